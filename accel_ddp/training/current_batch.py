"""Which micro-batch is being computed.

`update` and `evaluate` announce every micro-batch before they call the model. Code that changes how a model computes, such as
`speed`, reads it here. The announcement is neutral: nothing in `training` depends on who reads it.
"""

from contextvars import ContextVar
from typing import Any


class CurrentBatch:
    """`with CurrentBatch(batch): ...` announces a micro-batch. Each announcement is a new object, also for the same batch."""

    def __init__(self, batch: Any, in_plain_order: bool = False):
        """`in_plain_order`: gradients must become ready in the order in which the plain model produces them."""
        self.batch, self.in_plain_order = batch, in_plain_order

    def __enter__(self) -> "CurrentBatch":
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


_current: ContextVar[CurrentBatch | None] = ContextVar("accel_ddp_current_batch", default=None)


def current_batch() -> CurrentBatch | None:
    return _current.get()
