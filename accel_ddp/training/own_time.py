"""Measures how long a rank itself needs for its steps, without the time in which it waits for other ranks.

All ranks have the same step time, because each waits for the slowest. Their own times differ and identify it.
"""

import time
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel_ddp.phases import Timing


class Part:
    """The parts of the time of a rank, in the order of the fields of `Timing`."""

    DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER, COMMUNICATION = range(6)


class OwnTime:
    """Divides the time of a rank into the parts of `Timing`.

    Each call of `mark` assigns the time since the previous call to one part. On a CPU a call takes 0.5 µs. On a GPU it records
    an event, and the times are read one step late, so that neither the host nor the GPU waits. Time in which the GPU is idle,
    because the host is late, belongs to the part for which the host was late. The events of a step take 0.09 ms of the host (on an
    H200), so that only one of SAMPLE_EVERY short steps is measured and stands for the steps before it.
    """

    SAMPLE_EVERY, SHORT_SECONDS = 4, 0.05

    def __init__(self, device: torch.device, step: int = 0):
        self.on_gpu = device.type == "cuda"
        self.seconds = [0.0] * 6
        self.timing = Timing(step, *self.seconds)
        self.marks: list[tuple[int | None, Any]] = []  # of the current step, on a GPU; part None begins a new interval
        self.waiting: deque[tuple[int, list[tuple[int | None, Any]]]] = deque()  # steps that the GPU may still be computing
        self.free: list[Any] = []  # events
        self.before: Any = None  # the last event of the step before
        self.is_measured = True  # the current step
        self.measures_all = False  # set while steps are profiled, so that short steps are measured too
        self.restart()

    def restart(self) -> None:
        """Assign the time since the last mark to no part, because it was not time of a step."""
        self.last = self.ended_at = time.perf_counter()
        if self.on_gpu and self.is_measured:
            self.marks.append((None, self._record()))

    def mark(self, part: int) -> None:
        """Assign the time since the last mark to `part`."""
        if self.on_gpu:
            if self.is_measured:
                self.marks.append((part, self._record()))
            return
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now

    def mark_end_of_backward(self, loss: Tensor) -> None:
        """Mark BACKWARD when the last gradient of this rank is computed. To be called before `loss.backward()`.

        The autograd engine calls its callbacks after the last gradient, in the order in which they were queued. DDP queues the
        callback that waits for its all-reduces during the backward pass, and the one of this function is queued at its start.
        """
        if not self.is_measured:
            return
        queue = torch.autograd.Variable._execution_engine.queue_callback
        loss.register_hook(lambda gradient: queue(lambda: self.mark(Part.BACKWARD)))

    def attach(self, model: nn.Module) -> None:
        """Assign the time in which DDP broadcasts buffers at the start of a forward pass to COMMUNICATION."""
        if not isinstance(model, DistributedDataParallel) or not model.will_sync_module_buffers():
            return
        broadcast = model._sync_buffers

        def timed() -> None:
            if not model.training or not torch.is_grad_enabled():  # an evaluation, or a trial
                return broadcast()
            self.mark(Part.FORWARD)
            broadcast()
            self.mark(Part.COMMUNICATION)

        model._sync_buffers = timed

    def end_step(self, step: int) -> None:
        """Update `timing`: on a CPU to `step`, on a GPU to the last step that the GPU has completed."""
        if not self.on_gpu:
            self.timing = Timing(step, *self.seconds)
            return
        if self.is_measured:
            self.waiting.append((step, self.marks))
            self.marks = []
        while self.waiting and self.waiting[0][1][-1][1].query():
            self._add(*self.waiting.popleft())
        now = time.perf_counter()
        was_measured, self.is_measured = (
            self.is_measured,
            self.measures_all or now - self.ended_at > self.SHORT_SECONDS or not step % self.SAMPLE_EVERY,
        )
        self.ended_at = now
        if self.is_measured and not was_measured:
            self.restart()

    def settle(self, step: int) -> Timing:
        """Return the times up to `step`. To be called after a synchronisation of the device, between two steps.

        Steps that were not measured do not count, so that the next step stands for itself alone.
        """
        while self.waiting:
            self._add(*self.waiting.popleft())
        self.timing = Timing(step, *self.seconds)
        return self.timing

    def _add(self, step: int, marks: list[tuple[int | None, Any]]) -> None:
        """Add the times of a step that the GPU has completed."""
        steps = step - self.timing.step
        for part, event in marks:
            if self.before is not None:
                if part is not None:
                    self.seconds[part] += steps * self.before.elapsed_time(event) / 1000
                self.free.append(self.before)
            self.before = event
        self.timing = Timing(step, *self.seconds)

    def _record(self) -> Any:
        event = self.free.pop() if self.free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event
