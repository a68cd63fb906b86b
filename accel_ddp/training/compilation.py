"""Publishes that a rank compiles, which may take minutes in the middle of a step if torch.compile meets another shape."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from accel_ddp.ranks.process import process
from accel_ddp.watch.page import COMPILE


@contextlib.contextmanager
def published() -> Iterator[None]:
    """Enter the phase `compile` during each compilation inside of the block, if torch.compile is used."""
    if "torch._dynamo" not in sys.modules:  # its import takes seconds
        yield
        return
    from torch._dynamo.callback import callback_handler

    phases: list[int] = []

    def begin(*_: Any) -> None:
        phases.append(process.heartbeat.enter(COMPILE))

    def end(*_: Any) -> None:
        process.heartbeat.enter(phases.pop())

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)
