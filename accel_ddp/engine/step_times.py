"""The time of a rank in each part of a step, without the time in which it waits for other ranks.

All ranks have the same step time, because each waits for the slowest. Their own times differ and identify it.
"""

import contextlib
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from accel_ddp import compat, phases
from accel_ddp.phases import NO_PART, PARTS, SYNC, Phase, Timing


class StepTimes:
    """Adds up the seconds in each part of a step. It listens to the phases of this process."""

    def __init__(self, step: int = 0) -> None:
        self.seconds = [0.0] * len(PARTS)
        self.timing = Timing(step, *self.seconds)
        self.measures_all = False  # set while steps are profiled, so that short steps are measured too

    def __call__(self, part: int, seconds: float, phase: Phase) -> None:
        if part >= 0:
            self.seconds[part] += seconds

    def end_step(self, step: int) -> Timing:
        """Return the times up to `step`; on a GPU up to the last step that it has completed."""
        return self.settle(step)

    def settle(self, step: int) -> Timing:
        """Return the times up to `step`. To be called between two steps, on a GPU after a synchronization."""
        self.timing = Timing(step, *self.seconds)
        return self.timing


class GpuStepTimes(StepTimes):
    """Measures the parts with CUDA events, which are read one step late, so neither the host nor the GPU waits.

    Time in which the GPU is idle, because the host is late, belongs to the part for which the host was late. The events of a step take
    0.09 ms of the host (on an H200), so only one of SAMPLE_EVERY short steps is measured and stands for the steps before it.
    """

    SAMPLE_EVERY, SHORT_SECONDS = 4, 0.05

    def __init__(self, step: int = 0) -> None:
        super().__init__(step)
        self.marks: list[tuple[int, Any]] = []  # of the current step: the part that ends, and the event at its end
        self.waiting: deque[tuple[int, list[tuple[int, Any]]]] = deque()  # steps that the GPU may still be computing
        self.free: list[Any] = []  # events
        self.before: Any = None  # the last event of the step before
        self.is_measured = True  # the current step
        self.ended_at = time.perf_counter()

    def __call__(self, part: int, seconds: float, phase: Phase) -> None:
        if part == NO_PART:
            self.ended_at = time.perf_counter()  # a pause does not make a step long
        if self.is_measured and part != phases.HERE.part:
            self.marks.append((part, self._record()))

    def end_step(self, step: int) -> Timing:
        if self.is_measured:
            self.marks.append((phases.HERE.part, self._record()))
            self.waiting.append((step, self.marks))
            self.marks = []
        while self.waiting and self.waiting[0][1][-1][1].query():
            self._add(*self.waiting.popleft())
        now = time.perf_counter()
        was_measured, is_long = self.is_measured, now - self.ended_at > self.SHORT_SECONDS
        self.is_measured = self.measures_all or is_long or not step % self.SAMPLE_EVERY
        self.ended_at = now
        if self.is_measured and not was_measured:
            self.marks.append((NO_PART, self._record()))
        return self.timing

    def settle(self, step: int) -> Timing:
        """Return the times up to `step`. Steps that were not measured do not count, so the next step stands for itself alone."""
        while self.waiting:
            self._add(*self.waiting.popleft())
        return super().settle(step)

    def _add(self, step: int, marks: list[tuple[int, Any]]) -> None:
        """Add the times of a step that the GPU has completed."""
        steps = step - self.timing.step
        for part, event in marks:
            if self.before is not None:
                if part >= 0:
                    self.seconds[part] += steps * self.before.elapsed_time(event) / 1000
                self.free.append(self.before)
            self.before = event
        self.timing = Timing(step, *self.seconds)

    def _record(self) -> Any:
        event = self.free.pop() if self.free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def measure_steps(device: torch.device, step: int = 0) -> StepTimes:
    """Return the listener that measures the steps after `step` on this device."""
    return GpuStepTimes(step) if device.type == "cuda" else StepTimes(step)


def sync_after_backward(loss: Tensor) -> None:
    """Enter SYNC when the last gradient of this rank is computed. To be called before `loss.backward()`."""
    compat.queue_after_backward(loss, lambda: phases.enter(SYNC))


def sync_at_broadcast(model: nn.Module) -> None:
    """Be in the phase SYNC while DDP broadcasts buffers at the start of a forward pass."""
    inside = contextlib.ExitStack()
    compat.around_buffer_sync(model, lambda: inside.enter_context(phases.phase(SYNC)), inside.close)
