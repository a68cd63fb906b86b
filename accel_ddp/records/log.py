"""log.jsonl: one JSON object per line, appended while the run continues. docs/log.md describes every event.

Readers ignore events and fields that they do not know. A new version of the schema is needed only if the meaning of an existing
field changes.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

SCHEMA = 1
FILE = "log.jsonl"
_TAIL_BYTES = 1 << 20
# Events of steps. After a resume from step s, those of steps after s that an earlier attempt has written do not count.
OF_STEPS = ("update", "ranks", "evaluate", "tables")


class LogWriter:
    """Appends events. Each line is written by one call, so that a reader sees complete lines, except for the one of a crash."""

    def __init__(self, path: Path):
        self.path = path
        self.last_step = last_step_of(path)  # of earlier attempts; steps up to it are marked as repeated
        _complete_last_line(path)
        self.file: IO[str] = path.open("a", buffering=1)

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append an event. Raise OSError if the disk does not accept it."""
        line = {"event": event, "step": step, "time": round(time.time(), 3), **values}
        if event in OF_STEPS and 0 < step <= self.last_step:
            line["repeated"] = True
        self.file.write(json.dumps(_without_nonfinite(line), separators=(", ", ": ")) + "\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log. Incomplete lines, which a crash leaves, are left out."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and "event" in event:
                    yield event


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the events that count, in the order in which they were written.

    A run that continues from step s repeats the steps after s. What earlier attempts have logged for these steps is left out.
    """
    events: list[dict[str, Any]] = []
    for event in read_lines(path):
        if event["event"] == "start":
            step = event.get("step", 0)
            events = [one for one in events if one["event"] not in OF_STEPS or one.get("step", 0) <= step]
        events.append(event)
    return events


def last_step_of(path: Path) -> int:
    """Return the last step that the log contains, from the end of the file."""
    steps = [0]
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError, AttributeError):
                event = json.loads(line)
                if event.get("event") == "update":
                    steps.append(int(event.get("step", 0)))
    return max(steps)


def _complete_last_line(path: Path) -> None:
    """End a line that a crash has cut, so that the next event is not appended to it."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        if file.seek(0, 2):
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _without_nonfinite(value: Any) -> Any:
    """Return a value that strict JSON can store: numbers that are not finite become "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _without_nonfinite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(one) for one in value]
    return value
