"""Warnings about data and models, which are the same on every rank."""

import logging

from accel_ddp.ranks.process import process

log = logging.getLogger(__name__)


def warn(text: str) -> None:
    """Log a warning on the main rank only. The other ranks would repeat it."""
    if process.is_main:
        log.warning(text)
