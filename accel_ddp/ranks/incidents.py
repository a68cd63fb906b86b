"""Stores what this rank prints as a warning in incidents.jsonl, so that reports show it."""

import logging
from pathlib import Path

from accel_ddp.ranks.process import process
from accel_ddp.records.incidents import ERROR, INFO, Incident


def record(text: str, kind: str = "WARNING", level: str = "", step: int = -1) -> None:
    """Store an incident, without waiting for the disk. It may be called on every rank: equal texts are stored once.

    `text` may begin with a level and a kind, as in "warning: LOSS_SPIKE: the loss is ...". The level is otherwise "warning".
    """
    incident = Incident.parse(text.strip(), kind, level, rank=process.rank, host=process.host, step=step)
    if link := process.link:
        link.send({"incident": incident._asdict()})
    elif process.is_main:  # there is no monitor
        process.incidents.write(incident)
        if process.run_folder_lock:
            process.incidents.open(Path(process.run_folder_lock.name).parent)


def warn_on_main(text: str, kind: str, step: int = -1) -> None:
    """Print a text on the main rank, and store it."""
    if process.is_main:
        print(text, flush=True)
        record(text, kind, step=step)


def record_end(text: str, kind: str, step: int) -> None:
    """Store the failure that ends this rank, if there is no monitor that stores it."""
    if process.link is None and process.failure is None and process.is_main:
        record(text, kind.upper(), INFO if kind in ("stopped", "interrupted") else ERROR, step)
        process.incidents.close(1)


class IncidentHandler(logging.Handler):
    """Stores the warnings of the library. Reports of long waits, which are repeated, are no incidents."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, entry: logging.LogRecord) -> None:
        text = entry.getMessage()
        if not text.startswith("waiting for"):
            kind = "FALLBACK" if entry.name.startswith("accel_ddp.speed") else "WARNING"
            record(text, kind, ERROR if entry.levelno >= logging.ERROR else "")
