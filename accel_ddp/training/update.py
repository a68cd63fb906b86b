"""One optimizer update: the only place that touches gradients."""

import contextlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel_ddp.speed import padding_free
from accel_ddp.errors import UserError
from accel_ddp.seeds import mixed, seed_torch

Batch = Any
LossSum = Callable[[nn.Module, Batch], Tensor]  # or a WholeBatch
Count = Callable[[Batch], Tensor | int]


class UpdateStats(NamedTuple):
    """Of one update. Tensors are on the device: reading one on the host waits for the GPU."""

    loss: Tensor  # mean over all items of all ranks
    grad_norm: Tensor  # before clipping; not finite in a step that the fp16 scaler skipped
    items: Tensor | float  # over all ranks
    votes: Tensor | float  # how many ranks ask for a stop
    tokens: Tensor | float  # real ones, over all ranks
    flops: Tensor | float  # over all ranks
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
    work: tuple[float, float] = (0.0, 0.0),
) -> UpdateStats:
    """Take one step down the mean loss of all items in `batches` on all ranks.

    How the items are spread over micro-batches and ranks does not change the result. Dropout is drawn
    from (`seed`, place of the micro-batch among those of all ranks), so that not even it changes when
    the same micro-batches are spread over another number of ranks. `work`: this rank's tokens and FLOPs, for the report.
    """
    if isinstance(loss_sum, WholeBatch):
        loss_sum = loss_sum.of(accelerator, model, batches, seed)
    _settle_buckets(accelerator, model, batches[0], loss_sum)
    num_ranks, device = accelerator.num_processes, accelerator.device
    exact = torch.float32 if device.type == "mps" else torch.float64
    items: Tensor | float = sum(count(batch) for batch in batches)
    votes: Tensor | float = float(vote)
    tokens, flops = work
    counting = None
    if num_ranks > 1:
        agreed = torch.tensor([0.0 if isinstance(items, Tensor) else items, votes, *work], dtype=exact)
        agreed = agreed.to(device, non_blocking=True)
        if isinstance(items, Tensor):
            agreed[0] += items
        # Travels while the first forward runs; its answer is needed by the first backward only.
        counting = dist.all_reduce(agreed, async_op=True)
        items, votes, tokens, flops = agreed.unbind()

    total = weight = None
    for i, batch in enumerate(batches):
        seed_torch(_dropout_seed(accelerator, seed, i), device)
        is_last = i == len(batches) - 1
        with nullcontext() if is_last else accelerator.no_sync(model):
            with padding_free.using(batch):
                loss = loss_sum(model, batch)
            if weight is None:
                if counting:
                    counting.wait()  # on a GPU its stream waits, not the host
                # DDP averages gradients over ranks and we want their sum, hence num_ranks.
                weight = num_ranks / items.clamp(min=1).to(exact) if isinstance(items, Tensor) else num_ranks / max(items, 1)
            weighted = loss * weight
            # What `accelerator.backward` does, without its division by a number of micro-batches, which is not ours.
            (accelerator.scaler.scale(weighted) if accelerator.scaler else weighted).backward()
        loss = loss.detach().to(exact)
        total = loss if total is None else total + loss

    _refuse_unused(model)
    # Read for the report, so computed also where nothing is clipped.
    if accelerator.scaler:
        accelerator.unscale_gradients()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grad_norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm or float("inf"))
    # Accelerate's wrapper of the optimizer is for its scaler; it searches the disk for an optional package in every step.
    stepper = optimizer if accelerator.scaler else getattr(optimizer, "optimizer", optimizer)
    stepper.step()
    stepper.zero_grad()
    loss_of_all = total
    if num_ranks > 1:
        loss_of_all = total.clone()
        dist.all_reduce(loss_of_all)
    return UpdateStats(loss_of_all * (weight / num_ranks), grad_norm, items, votes, tokens, flops, total)


def _dropout_seed(accelerator: Accelerator, seed: int, i: int) -> int:
    """Of this rank's micro-batch `i`, by its place among those of all ranks."""
    return mixed(seed, "dropout", i * accelerator.num_processes + accelerator.process_index)


class WholeBatch:
    """A loss in which every item of a step sees every other one, on whatever rank and in whatever micro-batch.

    `embed(model, batch)` gives rows that belong to the items of a micro-batch, `keys(batch)` whole numbers for each
    (what they are is up to the loss), and `losses(rows, keys)` the loss of each item, given those of all. Every rank
    computes all losses from rows that were gathered, and the gradient flows into its own rows: the sum over ranks is
    the gradient of one rank that holds the whole batch. Where a rank has several micro-batches, rows are first computed
    without a graph and their gradients kept; each micro-batch then runs again, alone (GradCache): memory for one
    micro-batch, for one forward pass more.
    """

    def __init__(self, embed: LossSum, keys: Count, losses: Callable[[Tensor, Tensor], Tensor]):
        self.embed, self.keys, self.losses = embed, keys, losses

    def of(self, accelerator: Accelerator, model: nn.Module, batches: Sequence[Batch], seed: int) -> LossSum:
        """The loss of each of this step's micro-batches: its value is that of its own items, its gradient that of all."""
        keys = _gathered(torch.cat([self.keys(batch) for batch in batches]))
        if len(batches) == 1:
            return lambda model, batch: self._own_and_all(self.embed(model, batch), keys)[0]
        rows = []
        with torch.no_grad():
            for i, batch in enumerate(batches):
                seed_torch(_dropout_seed(accelerator, seed, i), accelerator.device)  # dropout draws the same again below
                with padding_free.using(batch):
                    rows.append(self.embed(model, batch))
        sizes, leaf = [len(part) for part in rows], torch.cat(rows).requires_grad_()
        total, own = self._own_and_all(leaf, keys)
        gradients = torch.autograd.grad(total, leaf)[0].split(sizes)
        values = own.detach().split(sizes)
        place = {id(batch): i for i, batch in enumerate(batches)}

        def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
            i = place[id(batch)]
            flow = (self.embed(model, batch) * gradients[i]).sum()
            return flow + (values[i].sum() - flow).detach()

        return loss_sum

    def _own_and_all(self, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(a sum with the value of this rank's items and the gradient of all items, the losses of this rank's items)"""
        everyone = _gathered(rows.detach())
        first = (dist.get_rank() if dist.is_initialized() else 0) * len(rows)
        losses = self.losses(torch.cat([everyone[:first], rows, everyone[first + len(rows) :]]), keys)
        own = losses[first : first + len(rows)]
        total = losses.sum()
        return total + (own.sum() - total).detach(), own


def _gathered(tensor: Tensor) -> Tensor:
    """The rows of all ranks, which have as many each."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def _refuse_unused(model: nn.Module) -> None:
    """DDP sends nothing for a parameter that the forward pass left out, nor for those that travel with it. It says so one
    step too late, without names, and by then the next collective of this rank has met that one of another."""
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters or model.static_graph:
        return
    try:
        model._check_reducer_finalized()
    except RuntimeError as error:
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        trained = [name for name, p in model.module.named_parameters() if p.requires_grad]
        names = [trained[int(i)] for i in found[1].split()] if found else ["of which DDP does not say the names"]
        raise UserError(
            f"{len(names)} parameters got no gradient in this step: {', '.join(names[:5])}{', ...' if names[5:] else ''}. The "
            "forward pass does not use them. If it uses others in other steps, add --find_unused_parameters; if it never does, "
            f"freeze them: --freeze {' '.join(dict.fromkeys(name.rsplit('.', 1)[0] for name in names[:3]))}."
        ) from error


def _settle_buckets(accelerator: Accelerator, model: nn.Module, batch: Batch, loss_sum: LossSum) -> None:
    """One backward pass for nothing, in a process's first update: a resumed run is then the same to the last bit.

    DDP lays out its buckets anew after its first backward pass, and with three ranks or more the last bit of a
    sum depends on the place in a bucket. Without this the first step after a restart would sum in another
    order than it did in the run that was not interrupted. With two ranks the order of a sum does not matter.
    """
    if accelerator.num_processes < 3 or not isinstance(model, DistributedDataParallel) or model.find_unused_parameters:
        return
    if getattr(model, "_buckets_are_settled", False):
        return
    model._buckets_are_settled = True
    if accelerator.ddp_handler and accelerator.ddp_handler.comm_hook == DDPCommunicationHookType.POWER_SGD:
        return  # it remembers every gradient that it has seen
    padding_free.is_settling = True  # always in the same order: whether a recording is there yet differs from life to life
    try:
        with _as_it_was(model):
            _loss(model, batch, loss_sum).backward()
    finally:
        padding_free.is_settling = False
    for parameter in model.parameters():
        parameter.grad = None


def rehearse(module: nn.Module, batch: Batch, loss_sum: LossSum) -> None:
    """A forward and a backward pass of which nothing remains but what they have set up, of a model without its DDP.

    No parameter gets a gradient: DDP counts those, and with --static_graph it would never send one again.
    """
    with _as_it_was(module):
        learned = [p for p in module.parameters() if p.requires_grad]
        torch.autograd.grad(_loss(module, batch, loss_sum), learned, allow_unused=True)


def _loss(model: nn.Module, batch: Batch, loss_sum: LossSum) -> Tensor:
    """Something of the same cost, where the loss needs the rows of other ranks."""
    with padding_free.using(batch):
        return loss_sum.embed(model, batch).float().sum() if isinstance(loss_sum, WholeBatch) else loss_sum(model, batch)


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Statistics of batch norm are put back."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers):
            buffer.copy_(before)


class Numbers(NamedTuple):
    """Of one update, on the host; the same on every rank, but for `local_loss`."""

    step: int  # updates done
    lr: float
    loss: float
    grad_norm: float
    items: int
    votes: int
    tokens: int  # real ones, that is without padding; 0 where items are no texts
    flops: float  # of the model for this update, forward and backward; 0 where we cannot count them
    local_loss: float


class LateReader:
    """Brings the stats of updates to the host without making it wait for the GPU: there, one step late.

    A model of small kernels is bound by how fast the host can launch them; a wait in every step would cost
    more than everything else that a step does beside the model.
    """

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.waiting: deque[tuple[int, float, UpdateStats, Tensor, Any]] = deque()
        self.free = [torch.empty(7, dtype=torch.float64, pin_memory=True) for _ in range(3)] if self.on_gpu else []

    def push(self, step: int, lr: float, stats: UpdateStats) -> None:
        on_device = [value.to(stats.loss.dtype) for value in stats if isinstance(value, Tensor)]
        values, copied = torch.stack(on_device), None
        if self.on_gpu:
            pinned = self.free.pop()
            pinned[: len(on_device)].copy_(values, non_blocking=True)
            values = pinned
            copied = torch.cuda.Event()
            copied.record()
        self.waiting.append((step, lr, stats, values, copied))

    def pop(self, all_of_them: bool) -> Iterator[Numbers]:
        """The updates that are done; with `all_of_them`, also the one that the GPU may still be at."""
        while len(self.waiting) > (1 if self.on_gpu and not all_of_them else 0):
            step, lr, stats, values, copied = self.waiting.popleft()
            if copied:
                copied.synchronize()
            read = iter(values[: sum(isinstance(v, Tensor) for v in stats)].tolist())
            values_of = [next(read) if isinstance(v, Tensor) else v for v in stats]
            loss, grad_norm, items, votes, tokens, flops, local_loss = values_of
            if copied:
                self.free.append(values)
            yield Numbers(step, lr, loss, grad_norm, int(items), int(votes), int(tokens), flops, local_loss)
