"""The numbers of updates on the host: what each rank reports about itself, how fast the run trains, and where its time goes."""

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_ddp import phases
from accel_ddp.engine.step_sums import UpdateStats
from accel_ddp.engine.terms import MOST_NUMBERS
from accel_ddp.phases import Split, Timing

# The fields of `RankSample` that describe the machine. They follow those of `Timing`.
SYSTEM = (
    "gpu_memory",  # bytes that torch has allocated at most
    "gpu_memory_used",  # bytes in use on the device, by all processes
    "gpu_utilisation",  # 0 to 1
    "gpu_temperature",  # degrees Celsius
    "gpu_power",  # watts
    "cpu",  # processor cores that this rank and its data workers use
    "memory",  # bytes of this rank and its data workers
    "host_memory",  # fraction of the node's memory in use, 0 to 1
)


class RankSample(NamedTuple("RankSample", [(name, float) for name in (*Timing._fields, *SYSTEM)])):
    """What a rank reports about itself in steps that are logged: the fields of `Timing`, and how busy its machine is.

    Values that are not known are NaN. `step` is at most a few steps before the one that carries the sample. The sample travels in the
    all-reduce of the numbers of items, which every step does anyway, so it needs no collective of its own.
    """

    __slots__ = ()

    @classmethod
    def of(cls, timing: Timing, system: Sequence[float] = ()) -> "RankSample":
        return cls(*map(float, timing), *(system or [math.nan] * len(SYSTEM)))


def splits_between(before: Sequence[RankSample], now: Sequence[RankSample]) -> list[Split]:
    """Return the average step of each rank between two samples. []: there is no earlier sample, or no step between them."""
    if len(before) != len(now) or any(b.step <= a.step for a, b in zip(before, now)):
        return []
    return [
        Split(*((getattr(b, part) - getattr(a, part)) / (b.step - a.step) for part in Split._fields)) for a, b in zip(before, now)
    ]


def find_slowest(splits: Sequence[Split]) -> tuple[int, float]:
    """Return the rank that works longest, and what it costs the others in each step."""
    own = [sum(split) - split.communication for split in splits]
    slowest = max(range(len(own)), key=own.__getitem__)
    # The median is that of the faster half, so that with two ranks it is the other one.
    return slowest, own[slowest] - statistics.median_low(own)


def split_samples(values: Sequence[float]) -> list[RankSample]:
    """Return the samples of all ranks from the numbers that the all-reduce has summed."""
    size = len(RankSample._fields)
    return [RankSample(*values[at : at + size]) for at in range(0, len(values), size)]


class Numbers(NamedTuple):
    """The numbers of one update on the host. Except for `local_loss` they are the same on every rank."""

    step: int  # updates done
    lr: float
    loss: float
    grad_norm: float
    items: float
    votes: int  # ranks that ask for a stop
    tokens: int  # without padding; 0 if items are not texts
    flops: float  # of the model for this update, forward and backward; 0 if they cannot be counted
    local_loss: float
    ranks: Sequence[RankSample] = ()  # of every rank, in steps that are logged
    # Of the numbers that the task returned with its loss, over all items; the rows of each dataset so far.
    means: dict[str, float] = {}


class LateReader:
    """Reads the stats of updates, on a GPU one step late.

    The speed of a model with small kernels is limited by how fast the host launches them. Waiting for the GPU in every step
    would cost more than everything else that a step does besides the model.
    """

    def __init__(self, device: torch.device, num_samples: int = 1):
        self.on_gpu = device.type == "cuda"
        self.waiting: deque[tuple[int, float, UpdateStats, Tensor, Any]] = deque()
        size = 7 + num_samples * len(RankSample._fields) + MOST_NUMBERS
        self.free = [torch.empty(size, dtype=torch.float64, pin_memory=True) for _ in range(3)] if self.on_gpu else []

    def push(self, step: int, lr: float, stats: UpdateStats) -> None:
        on_device = [value.to(stats.loss.dtype) for value in stats[:7] if isinstance(value, Tensor)]
        values, copied = torch.stack(on_device), None
        values = torch.cat([values, *(part for part in (stats.samples, stats.means) if isinstance(part, Tensor))])
        if self.on_gpu:
            pinned = self.free.pop()
            pinned[: len(values)].copy_(values, non_blocking=True)
            values = pinned
            copied = torch.cuda.Event()
            copied.record()
        self.waiting.append((step, lr, stats, values, copied))

    def pop(self, wait_for_all: bool) -> Iterator[Numbers]:
        """Yield the updates that are done. With `wait_for_all`, also the one that the GPU may still be computing."""
        while len(self.waiting) > (1 if self.on_gpu and not wait_for_all else 0):
            step, lr, stats, values, copied = self.waiting.popleft()
            if copied:
                copied.synchronize()
            known = sum(isinstance(v, Tensor) for v in stats[:7])
            read = iter(values[:known].tolist())
            on_host = [next(read) if isinstance(v, Tensor) else v for v in stats[:7]]
            loss, grad_norm, items, votes, tokens, flops, local_loss = on_host
            samples = stats.samples
            if isinstance(samples, Tensor):
                samples, known = values[known : known + len(samples)].tolist(), known + len(samples)
            means = dict(zip(stats.names, values[known : known + len(stats.names)].tolist()))
            if copied:
                self.free.append(values)
            items = int(items) if float(items).is_integer() else items  # a `count` may add up weights
            more = (items, int(votes), int(tokens), flops, local_loss, split_samples(samples))
            yield Numbers(step, lr, loss, grad_norm, *more, means={name: mean for name, mean in means.items() if mean == mean})


class Pace(NamedTuple):
    """Rates per second, over all ranks."""

    samples: float  # rows of the data; the items of a language model are tokens
    tokens: float  # without padding; 0 if items are not texts
    flops: float  # of the model; 0 if they are not counted
    mfu: float | None  # model FLOPs utilization: the fraction of the GPUs' peak; None if the peak is not known

    def __str__(self) -> str:
        text = f"{self.samples:.1f} samples/s"
        if self.tokens:
            text += f"  {self.tokens:,.0f} tokens/s"
        return text + (f"  MFU {self.mfu:.1%}" if self.mfu is not None else "")


class Throughput:
    """Measures the pace. The latest steps have the largest weight, and time outside of steps does not count."""

    def __init__(self, samples_per_step: float, peak_flops: float | None) -> None:
        self.samples_per_step, self.peak_flops = samples_per_step, peak_flops
        self.last, self.steps, self.tokens, self.flops, self.seconds = phases.HERE.training_seconds(), 0.0, 0.0, 0.0, 0.0

    def after(self, numbers: Numbers, now: float) -> Pace:
        """Return the pace after a step that ended at this time of training."""
        self.steps, self.tokens = 0.9 * self.steps + 1, 0.9 * self.tokens + numbers.tokens
        self.flops, self.seconds = 0.9 * self.flops + numbers.flops, 0.9 * self.seconds + now - self.last
        self.last = now
        seconds = max(self.seconds, 1e-9)
        mfu = self.flops / seconds / self.peak_flops if self.peak_flops and self.flops else None
        return Pace(self.steps * self.samples_per_step / seconds, self.tokens / seconds, self.flops / seconds, mfu)


def rates_of(numbers: Numbers, pace: Pace) -> dict[str, float]:
    """Return tokens, tokens/s, TFLOP/s and MFU, as log.jsonl and the trackers name them, without those that are not known."""
    known = {
        "tokens": numbers.tokens,
        "tokens_per_second": round(pace.tokens, 1),
        "tflops": float(f"{pace.flops / 1e12:.4g}"),
    }
    known = {name: value for name, value in known.items() if value}
    return known | ({"mfu": round(pace.mfu, 5)} if pace.mfu is not None else {})
