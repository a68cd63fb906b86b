"""The content of a run folder: log, options, checkpoints, tables and incidents."""

import contextlib
import fcntl
import math
import os
import re
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from accel_ddp.errors import UserError
from accel_ddp.records import eval_tables, incidents, run_log
from accel_ddp.records.files import parse, read_objects
from accel_ddp.records.redaction import redact_values
from accel_ddp.report.log_reader import LogContent
from accel_ddp.report.run_data import ReportedRun, State, dict_of, holds_number, number_of, summarize, whole_of
from accel_ddp.saving import checkpoint_format
from accel_ddp.text import counted

_PREFIX = re.compile(r"(error|warning|info): (?:([A-Z][A-Z0-9_]+): )?")
_SAME_SECONDS = 300.0  # the same text within this time is the same incident


def find_incidents(folder: Path, content: LogContent, end: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the incidents in the order of time, each once: time, step, level, kind, text, rank, host. Unknown values are None."""
    recorded = [_incident(line) for line in read_objects(folder / incidents.FILE) if "text" in line]
    found = [
        *recorded,
        *_restarts(list(read_objects(folder / "restarts.jsonl")), content.events),
        *_resumes(content.events),
        *_nonfinite(content.updates, {one["step"] for one in recorded if one["kind"].startswith("SKIPPED_STEP")}),
    ]
    if end and end.get("skipped_steps"):
        count = end["skipped_steps"]
        text = f"{count} updates of the last attempt were skipped, because their loss or gradients were not finite."
        found.append(_incident({**end, "text": text}, "warning", "SKIPPED_STEPS"))
    if end and end.get("stopped") and not any(one["kind"] == "STOPPED" and _is_near(one, end) for one in recorded):
        found.append(_incident({**end, "text": f"The run was stopped: {end['stopped']}"}, "info", "STOPPED"))
    return _once(found)


def _is_near(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two incidents happened at about the same time. A time that is not known is near to none."""
    times = [number_of(item.get("time")) for item in (one, other)]
    return abs(times[0] - times[1]) < _SAME_SECONDS


def _incident(line: dict[str, Any], level: str = "info", kind: str = "") -> dict[str, Any]:
    text, moment = str(line.get("text", "")), number_of(line.get("time"))
    if prefix := _PREFIX.match(text):
        level, kind, text = prefix[1], prefix[2] or kind, text[prefix.end() :]
    return {
        "time": moment if math.isfinite(moment) else None,
        "step": whole_of(line.get("step")),
        "level": line["level"] if line.get("level") in ("info", "warning", "error") else level,
        "kind": str(line.get("kind") or kind),
        "text": text,
        "rank": whole_of(line.get("rank")),
        "host": str(line["host"]) if line.get("host") else None,
    }


def _restarts(lines: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return failures and restarts: of the last job from restarts.jsonl, and of all jobs from the log."""
    found = [_incident(line, "error", "FAILURE") for line in lines if line.get("event") == "failure"]
    restarts = [line for line in lines if line.get("event") == "training" and "restart" in line]
    restarts += [event for event in events if event["event"] == "restart"]
    for line in {(one.get("restart"), one.get("lost_seconds"), one.get("committed")): one for one in restarts}.values():
        found.append(_incident({**line, "step": line.get("failed_step"), "kind": ""}, "error", "FAILURE"))
        text = (
            f"Training continues at step {line.get('step')} after restart {line.get('restart')}. Lost steps: {line.get('lost_steps')}. "
            f"Lost time: {line.get('lost_seconds')} s."
        )
        found.append(_incident({"time": line.get("time"), "step": line.get("step"), "text": text}, "warning", "RESTART"))
    return found


def _resumes(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found, starts = [], [place for place, event in enumerate(events) if event["event"] == "start"]
    for attempt, (first, end) in enumerate(zip(starts[1:], [*starts[2:], None]), start=2):
        if all(one["event"] != "restart" for one in events[first:end]):
            ranks = events[first].get("ranks")
            where = f" on {counted(len(ranks), 'rank')}" if isinstance(ranks, list) and ranks else ""
            text = f"Attempt {attempt} continues at step {events[first]['step']}{where}."
            found.append(_incident({**events[first], "text": text}, "info", "RESUME"))
    return found


def _nonfinite(updates: dict[str, np.ndarray], recorded: set[int | None]) -> list[dict[str, Any]]:
    """Return one incident for each group of logged steps in a row whose loss or gradient norm is not finite."""
    step = updates["step"]
    names = [name for name in ("loss", "grad_norm") if name in updates]
    bad = ~np.all([np.isfinite(updates[name]) for name in names], axis=0) if names else np.zeros(len(step), bool)
    bad &= ~np.isin(step, [one for one in recorded if one is not None])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], bad.astype(np.int8), [0]])))
    found = []
    for first, last in zip(edges[::2], edges[1::2] - 1):
        what = " and ".join(
            f"{name} is {updates[name][first]}" for name in names if not np.isfinite(updates[name][first])
        ).replace("grad_norm", "the gradient norm").replace("loss", "the loss")  # fmt: skip
        count = last - first + 1
        until = f", and the values of {count} logged steps up to step {step[last]} are not finite" if count > 1 else ""
        text = f"{what} in step {step[first]}{until}."
        line = {"time": updates["time"][first].item(), "step": step[first].item(), "text": text}
        found.append(_incident(line, "warning", "NOT_FINITE"))
    return found


def _once(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the incidents in the order of time, without those that two files contain. The longer text is kept."""
    kept: list[dict[str, Any]] = []
    last: dict[str, dict[str, Any]] = {}  # by the first line of the text; a traceback may follow
    for one in sorted(found, key=lambda one: (one["time"] is None, one["time"] or 0.0)):
        begin = one["text"].partition("\n")[0]
        same = last.get(begin)
        if same and _is_near(same, one) and (same["step"] == one["step"] or None in (same["step"], one["step"])):
            longer = max(same["text"], one["text"], key=len)
            same |= {name: value for name, value in one.items() if same[name] in (None, "")} | {"text": longer}
            continue
        last[begin] = one
        kept.append(one)
    return kept


# ---- the run


_YOUNG_SECONDS = 120.0  # a log that has grown since then, or within three times the usual time between lines, is young
_RECENT_LINES = 20


def read_run(folder: str | Path, name: str = "") -> ReportedRun:
    """Return the run in a folder. Raise UserError if its log cannot be read or contains no event."""
    folder = Path(folder)
    path = folder / run_log.FILE
    try:
        content = LogContent(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if not content.events and not len(content.updates["step"]):
        reason = "it is empty" if not path.stat().st_size else "no line is a complete event"
        raise UserError(f"{path} contains no events: {reason}. The run has not begun, or this file belongs to another program.")
    run = ReportedRun(folder, name or os.path.basename(os.path.abspath(folder)), updates=content.updates, ranks=content.ranks)
    for event in content.events:
        if event["event"] == "start":
            run.starts.append(event)
            run.end = None  # of an earlier attempt
        elif event["event"] == "end":
            run.end = event
    run.evaluations = _read_evaluations(content)
    run.state = _find_state(run)
    run.options = _read_object(folder / "config.json", run.notes)
    run.chosen = dict_of(run.options.pop("chosen", {}))
    best = _read_object(folder / "best.json", run.notes)
    run.checkpoints = _find_checkpoints(run.folder, content, best)
    run.tables = _read_tables(run, content, best)
    run.incidents = find_incidents(folder, content, run.end)
    run.profile = _read_object(folder / "profile" / "summary.json", run.notes) or None
    if content.newer_schema is not None:
        run.notes.append(
            f"The log was written by a newer version of accel_ddp (schema {content.newer_schema}; this version reads "
            f"{run_log.SCHEMA}), so some values may be missing or wrong. Run: pip install -U accel_ddp"
        )
    if content.num_bad_lines:
        lines = counted(content.num_bad_lines, "line")
        run.notes.append(f"{lines} of the log could not be read: incomplete after a crash, or damaged.")
    if not run.starts:
        run.notes.append("The log has no beginning (event start).")
    if content.ranks.stride > 1:
        run.notes.append(f"The log is long. Of the times of ranks, one line in {content.ranks.stride} was read.")
    run.summary = summarize(run, best, content.events)
    # Newer runs store no secrets, but a message of an older one may contain some.
    run.starts, run.options, run.incidents, run.end = redact_values([run.starts, run.options, run.incidents, run.end])
    return run


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return a JSON object from a file, or {} if the file is missing. A damaged file is noted."""
    value = None
    with contextlib.suppress(OSError):
        value = parse(path.read_bytes())
    if value is None and path.exists():
        notes.append(f"{path.name} is damaged or cannot be read. It is left out.")
    return value or {}


def _read_evaluations(content: LogContent) -> list[dict[str, Any]]:
    """Return step, time and metrics of each evaluation, in the order of steps. The last evaluation of a step counts."""
    found = {}
    for event in content.events:
        if event["event"] == "evaluate":
            metrics = {name: value for name, value in event.items() if name not in ("event", "repeated", "step", "time")}
            known = {name: number_of(value) for name, value in metrics.items() if holds_number(value)}
            found[event["step"]] = {"step": event["step"], "time": event["time"], **known}
    return [found[step] for step in sorted(found)]


def _find_state(run: ReportedRun) -> State:
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
    age = time.time() - (run.folder / run_log.FILE).stat().st_mtime
    return "running" if age < max(_YOUNG_SECONDS, 3 * gaps.max(initial=0.0)) else "interrupted"


def _find_checkpoints(folder: Path, content: LogContent, best: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the checkpoints that the log mentions or the folder contains, in the order of steps."""
    found: dict[int, dict[str, Any]] = {}
    for event in content.events:
        if event["event"] == "save":
            found[event["step"]] = {"step": event["step"], "path": Path(str(event.get("path", ""))).name, "time": event["time"]}
    there = {checkpoint_format.step_of(path): path for path in checkpoint_format.list_checkpoints(folder)}
    for step, path in there.items():
        committed, size = math.nan, None
        with contextlib.suppress(OSError):  # it is removed at this moment, or an older version has written it
            size = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
            committed = (path / checkpoint_format.MANIFEST).stat().st_mtime
        found.setdefault(step, {"step": step, "path": path.name, "time": committed})["bytes"] = size
    defaults = lambda step: {"exists": step in there, "is_best": step == best.get("step"), "bytes": None}
    return [defaults(step) | found[step] for step in sorted(found)]


def _read_tables(run: ReportedRun, content: LogContent, best: dict[str, Any]) -> dict[int, dict[str, dict[str, Any]]]:
    steps = sorted({event["step"] for event in content.events if event["event"] == "tables"})
    found = {}
    for step in sorted({*steps[-1:], *(step for step in steps if step == best.get("step"))}):
        values = _read_object(run.folder / eval_tables.file_of(step), run.notes)
        valid = {name: asdict(table) for name, table in eval_tables.parse_tables(values).items()}
        if len(valid) < len(values):
            run.notes.append(f"{eval_tables.file_of(step)} contains damaged tables. They are left out.")
        if valid:
            found[step] = valid
    return found
