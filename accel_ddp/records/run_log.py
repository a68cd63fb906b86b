"""log.jsonl: one JSON object per line, appended while the run continues. docs/log.md describes every event.

Readers ignore events and fields that they do not know. A new version of the schema is needed only if the meaning of an existing
field changes.
"""

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from accel_ddp.records.files import complete_last_line, read_objects, read_objects_backwards

SCHEMA = 1
FILE = "log.jsonl"
# Events of steps. After a resume from step s, events of later steps that an earlier attempt has written do not count.
OF_STEPS = ("update", "ranks", "evaluate", "tables")


class LogWriter:
    """Appends events. Each line is written by one call, so a reader sees complete lines, except for one that a crash has cut.

    The file has no buffer. After a full disk has cut a line, the next one begins on a line of its own.
    """

    def __init__(self, path: Path):
        self.path = path
        self.last_step = last_step_of(path)  # of earlier attempts; steps up to it are marked as repeated
        complete_last_line(path)
        self.file: IO[bytes] = path.open("ab", buffering=0)
        self.is_cut = False

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append an event. Raise OSError if the disk does not accept it."""
        line = {"event": event, "step": step, "time": round(time.time(), 3), **values}
        if event in OF_STEPS and 0 < step <= self.last_step:
            line["repeated"] = True
        text = json.dumps(without_nonfinite(line), separators=(", ", ": ")).encode() + b"\n"
        text = b"\n" * self.is_cut + text
        written = self.file.write(text)
        self.is_cut = written < len(text)
        if self.is_cut:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the events that count, in the order in which they were written."""
    events: list[dict[str, Any]] = []
    for event in (one for one in read_objects(path) if "event" in one):
        if event["event"] == "start":
            step = event.get("step", 0)
            events = [one for one in events if one["event"] not in OF_STEPS or one.get("step", 0) <= step]
        events.append(event)
    return events


def last_step_of(path: Path) -> int:
    """Return the last step that any attempt has logged, or 0. Only the end of the file is read.

    An event that repeats no earlier one has the highest step so far. With a large --log_every there may be no update, but
    evaluations.
    """
    for event in read_objects_backwards(path):
        step = event.get("step")
        if event.get("event") in OF_STEPS and not event.get("repeated") and isinstance(step, int) and step > 0:
            return step
    return 0


def last_step_of_attempt(path: Path) -> int | None:
    """Return the last step that the newest attempt has logged, at least the one from which it has started. None: there is no log."""
    steps = []
    for event in read_objects_backwards(path):
        if isinstance(step := event.get("step"), int):
            steps.append(step)
        if event.get("event") in ("start", "update"):  # the steps of one attempt only grow
            break
    return max(steps, default=None)


def without_nonfinite(value: Any, replace: Callable[[float], str | None] = str) -> Any:
    """Return a value that strict JSON can store: numbers that are not finite become "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return replace(value)
    if isinstance(value, dict):
        return {name: without_nonfinite(one, replace) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_nonfinite(one, replace) for one in value]
    return value
