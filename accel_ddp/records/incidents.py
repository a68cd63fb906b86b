"""incidents.jsonl: what went wrong in a run, or slowed it down. docs/log.md describes the fields.

The monitor of the main node writes it. Without a monitor, the main rank writes it.
"""

import json
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

from accel_ddp.records.files import BackgroundWriter, complete_last_line, read_objects
from accel_ddp.records.redaction import redact

FILE = "incidents.jsonl"
INFO, WARNING, ERROR = "info", "warning", "error"
RETRY_SECONDS = 5.0  # after a disk did not accept a line, or the folder was removed
MOST_WAITING = 1000  # incidents of a disk that does not accept any
_LINE = re.compile(r"(?:(info|warning|error): )?(?:([A-Z][A-Z_]+): )?")


class Incident(NamedTuple):
    """One incident. `rank` and `step` are -1, and `host` is "", if they are not known."""

    level: str
    kind: str  # for example STRAGGLER
    text: str
    rank: int = -1
    host: str = ""
    step: int = -1
    time: float = 0.0  # unix seconds

    @classmethod
    def parse(cls, line: str, kind: str = "", level: str = "", **place: object) -> "Incident":
        """Return the incident of a line such as "warning: LOSS_SPIKE: ...". `kind` and `level` are for lines that have none."""
        found = _LINE.match(line)
        return cls(found[1] or level or WARNING, found[2] or kind, line[found.end() :], **place)  # type: ignore[arg-type]


class IncidentWriter:
    """Appends incidents to a file from a thread, because a disk that does not answer would block the caller.

    Incidents are kept until `open`, which states the run folder, and while the disk does not accept them.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.writer = BackgroundWriter(self._append, "incidents", most=MOST_WAITING, retry_seconds=RETRY_SECONDS)
        self._is_first = True

    def open(self, folder: str | Path) -> None:
        """Write to the file in this folder from now on. A second call has no effect."""
        if not self.path:
            self.path = Path(folder, FILE)
            self.writer.start()

    def write(self, incident: Incident) -> None:
        """Append an incident soon. This never blocks and never raises."""
        self.writer.put(incident if incident.time else incident._replace(time=time.time()))

    def close(self, seconds: float = 2.0) -> None:
        """Wait at most `seconds` until everything is written."""
        self.writer.close(seconds)

    def _append(self, incident: Incident) -> None:
        is_first, self._is_first = self._is_first, True  # until this line is complete: a full disk may cut it
        if is_first:
            complete_last_line(self.path)
        place = {"rank": incident.rank, "host": incident.host, "step": incident.step}
        fields = {"time": round(incident.time, 3), "level": incident.level, "kind": incident.kind, "text": redact(incident.text)}
        fields |= {name: value for name, value in place.items() if value not in (-1, "")}
        line = json.dumps(fields).encode() + b"\n"
        # The file is opened again each time, because the folder may have been removed and created again.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            if os.write(descriptor, line) < len(line):
                raise OSError("the disk is full")
        finally:
            os.close(descriptor)
        self._is_first = False


def read_incidents(folder: Path) -> list[Incident]:
    """Return the incidents of a run in the order in which they were written. Fields that are not known are ignored."""
    found = []
    for line in read_objects(Path(folder, FILE)):
        known = {name: line[name] for name in Incident._fields if name in line}
        if {"level", "kind", "text"} <= known.keys():
            found.append(Incident(**known))
    return found
