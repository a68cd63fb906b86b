"""Configures the logger `accel_ddp`: one line per message, with host and rank where there are several ranks."""

import logging
import os
import socket
import sys
from typing import TextIO

from accel_ddp.ranks.incidents import IncidentHandler


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
