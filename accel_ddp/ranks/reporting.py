"""Configures the logger `accel_ddp`: one line per message, with host and rank where there are several ranks."""

import logging
import os
import socket
import sys
from pathlib import Path
from typing import TextIO

from accel_ddp.ranks.process import ending, links, this_rank
from accel_ddp.records.incidents import ERROR, INFO, Incident

# Stores what this rank prints as a warning in incidents.jsonl, so that reports show it.


def record(text: str, kind: str = "WARNING", level: str = "", step: int = -1) -> None:
    """Store an incident, without waiting for the disk. It may be called on every rank: equal texts are stored once.

    `text` may begin with a level and a kind, as in "warning: LOSS_SPIKE: the loss is ...". The level is otherwise "warning".
    """
    incident = Incident.parse(text.strip(), kind, level, rank=this_rank.rank, host=this_rank.host, step=step)
    if link := links.monitor:
        link.send({"incident": incident._asdict()})
    elif this_rank.is_main:  # there is no monitor
        links.incidents.write(incident)
        if ending.run_folder_lock:
            links.incidents.open(Path(ending.run_folder_lock.name).parent)


def warn_on_main(text: str, kind: str, step: int = -1) -> None:
    """Print a text on the main rank, and store it."""
    if this_rank.is_main:
        print(text, flush=True)
        record(text, kind, step=step)


def record_end(text: str, kind: str, step: int) -> None:
    """Store the failure that ends this rank, if there is no monitor that stores it."""
    if links.monitor is None and ending.failure is None and this_rank.is_main:
        record(text, kind.upper(), INFO if kind in ("stopped", "interrupted") else ERROR, step)
        links.incidents.close(1)


class IncidentHandler(logging.Handler):
    """Stores the warnings of the library. Reports of long waits, which are repeated, are no incidents."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, entry: logging.LogRecord) -> None:
        text = entry.getMessage()
        if not text.startswith("waiting for"):
            kind = "FALLBACK" if entry.name.startswith("accel_ddp.speed") else "WARNING"
            record(text, kind, ERROR if entry.levelno >= logging.ERROR else "")


class _RankFilter(logging.Filter):
    """Drops messages below WARNING on all ranks but the main one, because every rank logs the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.prefix = f"[{socket.gethostname()} rank {self.rank}] " if self.num_ranks > 1 else ""

    def filter(self, record: logging.LogRecord) -> bool:
        record.prefix = self.prefix
        record.severity = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return self.rank == 0 or record.levelno >= logging.WARNING


class _StderrHandler(logging.StreamHandler):
    """Writes to the current `sys.stderr`, which may be replaced after the handler was made."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def configure() -> None:
    """Send messages of the library to stderr. An application that has configured the logger keeps its own handlers."""
    # PEFT imports torchao if it is installed. Users cannot act on what is printed about its classes and about kernels for some GPUs.
    for name in ("torch.utils._pytree", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logger = logging.getLogger("accel_ddp")
    has_handlers = bool(logger.handlers)
    if not any(isinstance(handler, IncidentHandler) for handler in logger.handlers):
        logger.addHandler(IncidentHandler())
    if has_handlers:
        return
    handler = _StderrHandler()
    handler.addFilter(_RankFilter())
    handler.setFormatter(logging.Formatter("%(prefix)s%(severity)s%(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
