"""One optimizer update: the only place that touches gradients."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from accel_ddp.seeds import mixed

Batch = Any
LossSum = Callable[[nn.Module, Batch], Tensor]
Count = Callable[[Batch], Tensor | int]


class UpdateStats(NamedTuple):
    """Of one update, on the device: reading a value on the host waits for the GPU."""

    loss: Tensor  # mean over all items of all ranks
    grad_norm: Tensor  # before clipping; not finite in a step that the fp16 scaler skipped
    items: Tensor  # over all ranks
    votes: Tensor  # how many ranks ask for a stop
    local_loss: Tensor  # this rank's sum, to name the rank that went wrong


def update(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    loss_sum: LossSum,
    count: Count,
    max_grad_norm: float = 0.0,
    seed: int = 0,
    vote: bool = False,
) -> UpdateStats:
    """Take one step down the mean loss of all items in `batches` on all ranks.

    How the items are spread over micro-batches and ranks does not change the result. Dropout is drawn
    from (`seed`, place of the micro-batch among those of all ranks), so that not even it changes when
    the same micro-batches are spread over another number of ranks.
    """
    num_ranks, rank = accelerator.num_processes, accelerator.process_index
    exact = torch.float32 if accelerator.device.type == "mps" else torch.float64
    items = sum(count(batch) for batch in batches)
    on_host = 0.0 if isinstance(items, Tensor) else float(items)
    agreed = torch.tensor([on_host, float(vote)], dtype=exact).to(accelerator.device, non_blocking=True)
    if isinstance(items, Tensor):
        agreed[0] += items
    # Travels while the first forward runs; its answer is needed by the first backward only.
    counting = dist.all_reduce(agreed, async_op=True) if num_ranks > 1 else None

    weight = None
    total = torch.zeros((), dtype=exact, device=accelerator.device)
    for i, batch in enumerate(batches):
        torch.manual_seed(mixed(seed, "dropout", i * num_ranks + rank))
        is_last = i == len(batches) - 1
        with nullcontext() if is_last else accelerator.no_sync(model):
            loss = loss_sum(model, batch)
            if weight is None:
                if counting:
                    counting.wait()  # on a GPU its stream waits, not the host
                # DDP averages gradients over ranks and we want their sum, hence num_ranks.
                weight = num_ranks / agreed[0].clamp(min=1)
            accelerator.backward(loss * weight)
        total += loss.detach()

    # Read for the report, so computed also where nothing is clipped.
    grad_norm = accelerator.clip_grad_norm_(
        [p for group in optimizer.param_groups for p in group["params"]], max_grad_norm or float("inf")
    )
    optimizer.step()
    optimizer.zero_grad()
    loss_of_all = total.clone()
    if num_ranks > 1:
        dist.all_reduce(loss_of_all)
    return UpdateStats(loss_of_all / agreed[0].clamp(min=1), grad_norm, agreed[0], agreed[1], total)


class Numbers(NamedTuple):
    """Of one update, on the host; the same on every rank, but for `local_loss`."""

    step: int  # updates done
    lr: float
    loss: float
    grad_norm: float
    items: int
    votes: int
    local_loss: float


class LateReader:
    """Brings the stats of updates to the host without making it wait for the GPU: there, one step late.

    A model of small kernels is bound by how fast the host can launch them; a wait in every step would cost
    more than everything else that a step does beside the model.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.waiting: deque[tuple[int, float, Tensor, Any]] = deque()
        self.free = [torch.empty(5, dtype=torch.float64, pin_memory=True) for _ in range(3)] if device.type == "cuda" else []

    def push(self, step: int, lr: float, stats: UpdateStats) -> None:
        values = torch.stack([value.to(stats.loss.dtype) for value in stats])
        copied = None
        if self.device.type == "cuda":
            values = self.free.pop().copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self.waiting.append((step, lr, values, copied))

    def pop(self, all_of_them: bool) -> Iterator[Numbers]:
        """The updates that are done; with `all_of_them`, also the one that the GPU may still be at."""
        while len(self.waiting) > (0 if all_of_them or self.device.type != "cuda" else 1):
            step, lr, values, copied = self.waiting.popleft()
            if copied:
                copied.synchronize()
            loss, grad_norm, items, votes, local_loss = values.tolist()
            if copied:
                self.free.append(values)
            yield Numbers(step, lr, loss, grad_norm, int(items), int(votes), local_loss)
