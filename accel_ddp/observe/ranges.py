"""Names the parts of a step in a trace, with `record_function`: step 12, data, forward, backward, optimizer."""

import threading
import time
from typing import Any

from torch.profiler import record_function

from accel_ddp.observe.traces import WAIT, Mark, name_of_step
from accel_ddp.phases import NAMES, Heartbeat
from accel_ddp.training.own_time import OwnTime

NAMES_OF_PARTS = ("data", "forward", "backward", "optimizer", "other", WAIT)  # in the order of `Part`


class Ranges:
    """Opens a range for each phase of the heartbeat while it is attached. Otherwise nothing of it runs.

    On a CPU the marks of `OwnTime` are stored too. They separate the time in which a rank waits for others, which begins inside of
    a backward pass. On a GPU the host does not wait, and the kernels of NCCL show the communication.
    """

    def __init__(self, heartbeat: Heartbeat, own_time: OwnTime):
        self.heartbeat, self.own_time = heartbeat, own_time
        self.thread = threading.get_ident()
        self.thread_id = threading.get_native_id()
        self.step: Any = None
        self.phase: Any = None
        self.marks: list[Mark] = []
        self.last_mark = 0

    def attach(self) -> None:
        """Replace two methods of these objects, so that steps that are not recorded need not ask whether they are."""
        for owner, name, method in ((self.heartbeat, "enter", self._enter), (self.own_time, "mark", self._mark)):
            setattr(owner, name, method)

    def detach(self) -> None:
        self.end_step()
        for owner, name in ((self.heartbeat, "enter"), (self.own_time, "mark")):
            vars(owner).pop(name, None)

    def begin_step(self, step: int) -> None:
        self.step = record_function(name_of_step(step))
        self.step.__enter__()
        self.last_mark = self.last_mark or time.time_ns()
        self._open(self.heartbeat.phase)

    def end_step(self) -> None:
        if self.step is not None:
            self._close()
            self.step.__exit__(None, None, None)
            self.step = None

    def _enter(self, phase: int) -> int:
        before = type(self.heartbeat).enter(self.heartbeat, phase)
        if before != phase and self.step is not None and threading.get_ident() == self.thread:
            self._close()
            self._open(phase)
        return before

    def _open(self, phase: int) -> None:
        self.phase = record_function(NAMES[phase])
        self.phase.__enter__()

    def _close(self) -> None:
        if self.phase is not None:
            self.phase.__exit__(None, None, None)
            self.phase = None

    def _mark(self, part: int) -> None:
        if self.step is not None and not self.own_time.on_gpu:
            now = time.time_ns()
            self.marks.append(Mark(NAMES_OF_PARTS[part], self.last_mark, now))
            self.last_mark = now
        type(self.own_time).mark(self.own_time, part)
