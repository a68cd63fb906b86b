"""Brings the numbers of updates to the host without a device synchronisation."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_ddp.training.rank_sample import RankSample, split_samples
from accel_ddp.training.update import UpdateStats


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
