"""Reads the folder of a run: its log, its options, its checkpoints, its tables and its incidents."""

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

from accel_ddp.errors import UserError
from accel_ddp.records import log, tables
from accel_ddp.records.redaction import redact
from accel_ddp.report import json_text
from accel_ddp.report.incidents import find_incidents
from accel_ddp.report.json_text import number_of
from accel_ddp.report.log_reader import LogContent, read_log_columns
from accel_ddp.report.run_data import Run, State
from accel_ddp.report.summary import summarize
from accel_ddp.saving import format

_YOUNG_SECONDS = 120.0  # a log that has grown since then, or within three times the usual time between lines, is young
_RECENT_LINES = 20


def read_run(folder: str | Path, name: str = "") -> Run:
    """Return the run in a folder. Raise UserError if its log cannot be read or contains no event."""
    folder = Path(folder)
    path = folder / log.FILE
    try:
        content = read_log_columns(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if not content.events and not len(content.updates["step"]):
        reason = "it is empty" if not path.stat().st_size else "no line is a complete event"
        raise UserError(f"{path} contains no events: {reason}. The run has not begun, or this file belongs to another program.")
    run = Run(folder, name or os.path.basename(os.path.abspath(folder)), updates=content.updates, ranks=content.ranks)
    for event in content.events:
        if event["event"] == "start":
            run.starts.append(event)
            run.end = None  # of an earlier attempt
        elif event["event"] == "end":
            run.end = event
    run.evaluations = _read_evaluations(content)
    run.state = _find_state(run)
    run.options = _read_object(folder / "config.json", run.notes)
    best = _read_object(folder / "best.json", run.notes)
    run.checkpoints = _find_checkpoints(run.folder, content, best)
    run.tables = _read_tables(run, content, best)
    run.incidents = find_incidents(folder, content, run.end)
    run.profile = _read_object(folder / "profile" / "summary.json", run.notes) or None
    run.notes += _notes_of(content, run)
    run.summary = summarize(run, best, content)
    # Newer runs store no secrets, but a message of an older one may contain some.
    run.starts, run.options, run.incidents, run.end = _redacted([run.starts, run.options, run.incidents, run.end])
    return run


def _redacted(value: Any) -> Any:
    """Return a JSON value whose texts contain neither secrets of the environment nor passwords in URLs."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {name: _redacted(one) for name, one in value.items()}
    return [_redacted(one) for one in value] if isinstance(value, list) else value


def _notes_of(content: LogContent, run: Run) -> list[str]:
    notes = []
    if content.newer_schema is not None:
        notes.append(
            f"The log was written by a newer version of accel_ddp (schema {content.newer_schema}; this version reads {log.SCHEMA}), so "
            "that some values may be missing or wrong. Run: pip install -U accel_ddp"
        )
    if content.num_bad_lines:
        lines = "1 line" if content.num_bad_lines == 1 else f"{content.num_bad_lines:,} lines"
        notes.append(f"{lines} of the log could not be read: incomplete after a crash, or damaged.")
    if not run.starts:
        notes.append("The log has no beginning (event start).")
    if content.ranks.stride > 1:
        notes.append(f"The log is long. Of the times of ranks, one line in {content.ranks.stride} was read.")
    return notes


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return a JSON object from a file, or {} if the file is missing. A damaged file is noted."""
    try:
        value = json_text.parse(path.read_bytes())
        if isinstance(value, dict):
            return value
        notes.append(f"{path.name} contains no JSON object. It is left out.")
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        notes.append(f"{path.name} is damaged or cannot be read. It is left out.")
    return {}


def _read_evaluations(content: LogContent) -> list[dict[str, Any]]:
    """Return step, time and metrics of each evaluation, in the order of steps. The last evaluation of a step counts."""
    found = {}
    for event in content.events:
        if event["event"] == "evaluate":
            metrics = {name: value for name, value in event.items() if name not in ("event", "repeated", "step", "time")}
            numbers = {name: number_of(value) for name, value in metrics.items()}
            known = {name: number for name, number in numbers.items() if number == number or str(metrics[name]).lower() == "nan"}
            found[event["step"]] = {"step": event["step"], "time": event["time"], **known}
    return [found[step] for step in sorted(found)]


def _find_state(run: Run) -> State:
    """Return whether the run has ended. A run holds the lock of its folder.

    A lock of another machine may not be visible here. In this case a log that grows belongs to a run that continues.
    """
    if run.end is not None:
        return "stopped" if run.end.get("stopped") else "complete"
    try:
        with (run.folder / ".lock").open("rb") as file:
            holder = file.read(1000).decode("utf-8", "replace")
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if holder.endswith(f" on {socket.gethostname()}"):
            return "interrupted"
    except BlockingIOError:
        return "running"
    except OSError:
        pass
    times = run.updates["time"][-_RECENT_LINES:]
    gaps = np.diff(times[np.isfinite(times)])
    try:
        age = time.time() - (run.folder / log.FILE).stat().st_mtime
    except OSError:
        return "interrupted"
    return "running" if age < max(_YOUNG_SECONDS, 3 * gaps.max(initial=0.0)) else "interrupted"


def _find_checkpoints(folder: Path, content: LogContent, best: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the checkpoints that the log mentions or the folder contains, in the order of steps."""
    found: dict[int, dict[str, Any]] = {}
    for event in content.events:
        if event["event"] == "save":
            found[event["step"]] = {"step": event["step"], "path": Path(str(event.get("path", ""))).name, "time": event["time"]}
    there = {format.step_of(path): path for path in format.list_checkpoints(folder)}
    for step, path in there.items():
        found.setdefault(step, {"step": step, "path": path.name, "time": _committed_at(path)})
    for step, one in found.items():
        one |= {"exists": step in there, "is_best": step == best.get("step"), "bytes": _size_of(there.get(step))}
    return [found[step] for step in sorted(found)]


def _committed_at(path: Path) -> float:
    try:
        return (path / format.MANIFEST).stat().st_mtime
    except OSError:
        return float("nan")


def _size_of(path: Path | None) -> int | None:
    """Return the bytes of a checkpoint, or None if it does not exist any more."""
    if path is None:
        return None
    total = 0
    for one in path.rglob("*"):
        try:
            total += one.stat().st_size if one.is_file() else 0
        except OSError:  # removed at this moment
            return None
    return total


def _read_tables(run: Run, content: LogContent, best: dict[str, Any]) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the tables of the last evaluation and of the best one."""
    steps = sorted({event["step"] for event in content.events if event["event"] == "tables"})
    found = {}
    for step in sorted({*steps[-1:], *(step for step in steps if step == best.get("step"))}):
        values = _read_object(run.folder / tables.file_of(step), run.notes)
        valid = {name: table for name, value in values.items() if (table := _table_of(value))}
        if len(valid) < len(values):
            run.notes.append(f"{tables.file_of(step)} contains damaged tables. They are left out.")
        if valid:
            found[step] = valid
    return found


def _table_of(value: Any) -> dict[str, Any] | None:
    """Return a table whose rows all have a cell for each column, or None if it is damaged."""
    if not isinstance(value, dict) or not isinstance(value.get("columns"), list) or not isinstance(value.get("rows"), list):
        return None
    width = len(value["columns"])
    if not all(isinstance(row, list) and len(row) == width for row in value["rows"]):
        return None
    columns = [str(name) for name in value["columns"]]
    return {
        "columns": columns,
        "rows": value["rows"],
        "kind": str(value.get("kind", "scores")),
        "title": str(value.get("title", "")),
    }
