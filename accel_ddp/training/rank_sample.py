"""What each rank reports about itself in the steps that are logged: where its time goes, and how busy its machine is.

The sample of each rank travels in the all-reduce of the numbers of items, which every step does anyway. It needs no collective of
its own.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from accel_ddp.watch.page import Timing

# The fields of `RankSample` that describe the machine. They follow those of `Timing`.
SYSTEM = ("gpu_memory", "gpu_memory_used", "gpu_utilisation", "gpu_temperature", "gpu_power", "cpu", "memory", "host_memory")


class RankSample(NamedTuple):
    """One rank. Values that are not known are NaN. The seconds are totals since the first step of the process, as in `Timing`."""

    step: float  # the last step that the seconds include; at most a few steps before the one that carries the sample
    data: float
    forward: float
    backward: float
    optimizer: float
    other: float
    communication: float
    gpu_memory: float  # bytes that torch has allocated at most
    gpu_memory_used: float  # bytes in use on the device, by all processes
    gpu_utilisation: float  # 0 to 1
    gpu_temperature: float  # degrees Celsius
    gpu_power: float  # watts
    cpu: float  # processor cores that this rank and its data workers use
    memory: float  # bytes of this rank and its data workers
    host_memory: float  # fraction of the node's memory in use, 0 to 1

    @classmethod
    def of(cls, timing: Timing, system: Sequence[float] = ()) -> "RankSample":
        return cls(*map(float, timing), *(system or [math.nan] * len(SYSTEM)))


class Split(NamedTuple):
    """How one rank spends a step, in seconds."""

    data: float
    forward: float
    backward: float
    optimizer: float
    other: float
    communication: float


def splits_between(before: Sequence[RankSample], now: Sequence[RankSample]) -> list[Split]:
    """Return the average step of each rank between two samples. []: there is no earlier sample, or no step between them."""
    if len(before) != len(now) or any(b.step <= a.step for a, b in zip(before, now)):
        return []
    return [
        Split(*((getattr(b, part) - getattr(a, part)) / (b.step - a.step) for part in Split._fields)) for a, b in zip(before, now)
    ]


def split_samples(values: Sequence[float]) -> list[RankSample]:
    """Return the samples of all ranks from the numbers that the all-reduce has summed."""
    size = len(RankSample._fields)
    return [RankSample(*values[at : at + size]) for at in range(0, len(values), size)]
