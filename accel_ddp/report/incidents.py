"""Collects the incidents of a run: diagnoses of the monitors, failures, restarts, resumed attempts, skipped steps and stops."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from accel_ddp.records import incidents
from accel_ddp.records.lines import read_objects
from accel_ddp.report.json_text import number_of
from accel_ddp.report.log_reader import LogContent

_PREFIX = re.compile(r"(error|warning|info): (?:([A-Z][A-Z0-9_]+): )?")
_MOST = 2000
_MOST_GAPS = 100  # groups of steps that are not finite
_SAME_SECONDS = 300.0  # the same text within this time is the same incident


def find_incidents(folder: Path, content: LogContent, end: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the incidents in the order of time, each once: time, step, level, kind, text, rank, host. Unknown values are None."""
    recorded = [_incident(line) for line in read_objects(folder / incidents.FILE) if "text" in line]
    found = [
        *recorded,
        *_restarts(list(read_objects(folder / "restarts.jsonl")), content.events),
        *_resumes(content.events),
        *_nonfinite(content.updates, {one["step"] for one in recorded if one["kind"].startswith("SKIPPED_STEP")}),
        *(_incident(event, kind=event["event"]) for event in content.events if _is_finding(event)),
    ]
    if end and end.get("skipped_steps"):
        text = (
            f"{end['skipped_steps']} updates of the last attempt were skipped, because their loss or gradients were not finite."
        )
        found.append(_incident({**end, "text": text}, "warning", "SKIPPED_STEPS"))
    if end and end.get("stopped") and not any(one["kind"] == "STOPPED" and _is_near(one, end) for one in recorded):
        found.append(_incident({**end, "text": f"The run was stopped: {end['stopped']}"}, "info", "STOPPED"))
    return _bounded(_once(found))


def _bounded(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the incidents, or the first and the last of them if there are very many."""
    half = _MOST // 2
    if len(found) <= _MOST:
        return found
    line = {**found[half], "text": f"{len(found) - _MOST} more incidents are left out here. incidents.jsonl contains them."}
    return [*found[:half], _incident({**line, "level": "info", "kind": "LEFT_OUT", "rank": None, "host": None}), *found[-half:]]


def _is_near(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two incidents happened at about the same time. A time that is not known is near to none."""
    times = [number_of(item.get("time")) for item in (one, other)]
    return abs(times[0] - times[1]) < _SAME_SECONDS


def _incident(line: dict[str, Any], level: str = "info", kind: str = "") -> dict[str, Any]:
    text = str(line.get("text", ""))
    if prefix := _PREFIX.match(text):
        level, kind, text = prefix[1], prefix[2] or kind, text[prefix.end() :]
    time, step, rank = (number_of(line.get(name)) for name in ("time", "step", "rank"))
    return {
        "time": time if math.isfinite(time) else None,
        "step": int(step) if math.isfinite(step) and step >= 0 else None,
        "level": line["level"] if line.get("level") in ("info", "warning", "error") else level,
        "kind": str(line.get("kind") or kind),
        "text": text,
        "rank": int(rank) if math.isfinite(rank) and rank >= 0 else None,
        "host": str(line["host"]) if line.get("host") else None,
    }


def _is_finding(event: dict[str, Any]) -> bool:
    """Return whether an event of the log is a message for people. `restart` is one that is treated elsewhere."""
    return "text" in event and event["event"] not in ("restart", "start", "end", "evaluate", "save", "tables")


def _restarts(lines: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return failures and restarts. restarts.jsonl has those of the last job, and the log those of all jobs."""
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
    """Return the attempts after the first one that were not started by an automatic restart."""
    found, attempt = [], 0
    for number, event in enumerate(events):
        if event["event"] == "start":
            attempt += 1
            following = [one["event"] for one in events[number + 1 : number + 8]]
            attempt_ends = following.index("start") if "start" in following else len(following)
            if attempt > 1 and "restart" not in following[:attempt_ends]:
                ranks = event.get("ranks")
                place = f" on {len(ranks)} rank{'s' * (len(ranks) != 1)}" if isinstance(ranks, list) and ranks else ""
                text = f"Attempt {attempt} continues at step {event['step']}{place}."
                found.append(_incident({**event, "text": text}, "info", "RESUME"))
    return found


def _nonfinite(updates: dict[str, np.ndarray], recorded: set[int | None]) -> list[dict[str, Any]]:
    """Return one incident for each group of logged steps in a row whose loss or gradient norm is not finite.

    Steps that incidents.jsonl contains are `recorded`.
    """
    step = updates["step"]
    names = [name for name in ("loss", "grad_norm") if name in updates]
    bad = ~np.all([np.isfinite(updates[name]) for name in names], axis=0) if names else np.zeros(len(step), bool)
    bad &= ~np.isin(step, [one for one in recorded if one is not None])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], bad.astype(np.int8), [0]])))
    groups = list(zip(edges[::2], edges[1::2] - 1))
    found = []
    for first, last in groups[:_MOST_GAPS]:
        what = " and ".join(
            f"{name} is {updates[name][first]}" for name in names if not np.isfinite(updates[name][first])
        ).replace("grad_norm", "the gradient norm").replace("loss", "the loss")  # fmt: skip
        until = (
            f", and the values of {last - first + 1} logged steps up to step {step[last]} are not finite" if last > first else ""
        )
        line = {
            "time": updates["time"][first].item(),
            "step": step[first].item(),
            "text": f"{what} in step {step[first]}{until}.",
        }
        found.append(_incident(line, "warning", "NOT_FINITE"))
    if len(groups) > _MOST_GAPS:
        more = groups[_MOST_GAPS:]
        first = more[0][0]
        text = f"the loss or the gradient norm is not finite in {sum(b - a + 1 for a, b in more)} more logged steps."
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
