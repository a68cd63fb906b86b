"""Brings the numbers of updates to the host without a device synchronisation."""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_ddp.phases import Timing
from accel_ddp.text import rough_seconds
from accel_ddp.training.update import UpdateStats

# What each rank reports about itself in the steps that are logged: where its time goes, and how busy its machine is.
#
# The sample of each rank travels in the all-reduce of the numbers of items, which every step does anyway. It needs no collective of
# its own.
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


class Numbers(NamedTuple):
    """The numbers of one update on the host. Except for `local_loss` they are the same on every rank."""

    step: int  # updates done
    lr: float
    loss: float
    grad_norm: float
    items: int
    votes: int  # ranks that ask for a stop
    tokens: int  # without padding; 0 if items are not texts
    flops: float  # of the model for this update, forward and backward; 0 if they cannot be counted
    local_loss: float
    ranks: Sequence[RankSample] = ()  # of every rank, in steps that are logged


class LateReader:
    """Reads the stats of updates, on a GPU one step late.

    The speed of a model with small kernels is limited by how fast the host launches them. Waiting for the GPU in every step
    would cost more than everything else that a step does besides the model.
    """

    def __init__(self, device: torch.device, num_ranks: int = 1):
        self.on_gpu = device.type == "cuda"
        self.waiting: deque[tuple[int, float, UpdateStats, Tensor, Any]] = deque()
        size = 7 + num_ranks * len(RankSample._fields)
        self.free = [torch.empty(size, dtype=torch.float64, pin_memory=True) for _ in range(3)] if self.on_gpu else []

    def push(self, step: int, lr: float, stats: UpdateStats) -> None:
        on_device = [value.to(stats.loss.dtype) for value in stats[:7] if isinstance(value, Tensor)]
        values, copied = torch.stack(on_device), None
        if isinstance(stats.samples, Tensor):
            values = torch.cat([values, stats.samples])
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
                samples = values[known : known + len(samples)].tolist()
            if copied:
                self.free.append(values)
            more = (int(items), int(votes), int(tokens), flops, local_loss, split_samples(samples))
            yield Numbers(step, lr, loss, grad_norm, *more)


# How fast a run trains: samples, tokens and FLOPs per second.


class Pace(NamedTuple):
    """Rates per second, over all ranks."""

    samples: float  # rows of the data; the items of a language model are tokens
    tokens: float  # without padding; 0 if items are not texts
    flops: float  # of the model; 0 if they are not counted
    mfu: float | None  # model FLOPs utilisation: the fraction of the GPUs' peak; None if the peak is not known

    def __str__(self) -> str:
        text = f"{self.samples:.1f} samples/s"
        if self.tokens:
            text += f"  {self.tokens:,.0f} tokens/s"
        return text + (f"  MFU {self.mfu:.1%}" if self.mfu is not None else "")


class Throughput:
    """Measures the pace since the last evaluation or save. The latest steps have the largest weight."""

    def __init__(self, samples_per_step: int, peak_flops: float | None) -> None:
        self.samples_per_step, self.peak_flops = samples_per_step, peak_flops
        self.restart()

    def restart(self) -> None:
        self.last, self.steps, self.tokens, self.flops, self.seconds = time.monotonic(), 0.0, 0.0, 0.0, 0.0

    def after(self, numbers: Numbers) -> Pace:
        now = time.monotonic()
        self.steps, self.tokens = 0.9 * self.steps + 1, 0.9 * self.tokens + numbers.tokens
        self.flops, self.seconds = 0.9 * self.flops + numbers.flops, 0.9 * self.seconds + now - self.last
        self.last = now
        seconds = max(self.seconds, 1e-9)
        mfu = self.flops / seconds / self.peak_flops if self.peak_flops and self.flops else None
        return Pace(self.steps * self.samples_per_step / seconds, self.tokens / seconds, self.flops / seconds, mfu)


# Where the time of a whole run went, from the samples of all ranks.


class Breakdown:
    """Stores the first and the last sample of each rank. The steps before the first one, which are slower, are not counted."""

    def __init__(self) -> None:
        self.first: Sequence[RankSample] = ()
        self.last: Sequence[RankSample] = ()

    def add(self, ranks: Sequence[RankSample]) -> None:
        if ranks:
            self.first, self.last = self.first or ranks, ranks

    def summary(self, hosts: Sequence[str]) -> dict[str, Any]:
        """Return the field `breakdown` of the event `end` of log.jsonl. {}: too few steps were logged.

        `hosts` has the host of each rank. Only the main rank has it.
        """
        if not (splits := splits_between(self.first, self.last)):
            return {}
        seconds = statistics.mean(map(sum, splits))
        means = {part: statistics.mean(getattr(split, part) for split in splits) for part in Split._fields}
        summary: dict[str, Any] = {
            "first_step": int(self.first[0].step) + 1,
            "last_step": int(self.last[0].step),
            "seconds": round(seconds, 6),
            **{part: round(value / max(seconds, 1e-9), 4) for part, value in means.items()},
        }
        if len(splits) > 1:
            own = [sum(split) - split.communication for split in splits]
            slowest = max(range(len(own)), key=own.__getitem__)
            # The median is that of the faster half, so that with two ranks it is the other one.
            cost = own[slowest] - statistics.median_low(own)
            summary |= {"slowest_rank": slowest, "slowest_cost": round(cost, 6)}
            summary |= {"slowest_host": hosts[slowest]} if hosts else {}
        return summary


def describe(summary: dict[str, Any], num_ranks: int) -> str:
    """Return the line about the time of a step that a run prints at its end."""
    shares = {
        "data": summary["data"],
        "forward and backward": summary["forward"] + summary["backward"],
        "communication": summary["communication"],
        "optimizer": summary["optimizer"],
        "other": summary["other"],
    }
    parts = ", ".join(f"{name} {share * 100:.0f} %" for name, share in shares.items() if num_ranks > 1 or name != "communication")
    seconds, over = summary["seconds"], f" (mean over {num_ranks} ranks)" if num_ranks > 1 else ""
    text = f"time of a step{over}: {rough_seconds(seconds)}: {parts}."
    if num_ranks > 1:
        cost = summary["slowest_cost"]
        text += (
            f" The slowest is rank {summary['slowest_rank']} ({summary['slowest_host']}), for which the others wait "
            f"{rough_seconds(cost)} per step ({cost / max(seconds, 1e-9) * 100:.0f} %)."
        )
    return text
