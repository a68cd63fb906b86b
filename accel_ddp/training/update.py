"""One optimizer update. In a run, only this module writes the `.grad` of parameters, clips and steps.

On a GPU, with a fused optimizer, nothing here reads a device value on the host. The phases show the monitor where a rank is, and
divide the time of a step.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from accel_ddp import compat, phases
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.phases import BACKWARD, FORWARD, OPTIMIZER, OTHER, SYNC, enter
from accel_ddp.ranks import shards
from accel_ddp.ranks.process import links, this_rank
from accel_ddp.seeds import dropout_seed, seed_forward
from accel_ddp.text import shorten
from accel_ddp.training.losses import CurrentBatch, LossSum, MicroBatch, WholeBatch, checked, depends_on, numbers_of
from accel_ddp.training.optim import AdamW, Muon
from accel_ddp.training.sharding import Lockstep, begin_micro_batch
from accel_ddp.training.step_times import sync_after_backward

Count = Callable[[MicroBatch], Tensor | int]


class UpdateStats(NamedTuple):
    """The numbers of one update. Tensors are on the device; reading one on the host waits for the GPU."""

    loss: Tensor  # mean over all items of all ranks
    grad_norm: Tensor  # before clipping; if it or `loss` is not finite, the optimizer did not step
    items: Tensor | float  # over all ranks
    votes: Tensor | float  # how many ranks ask for a stop
    tokens: Tensor | float  # without padding, over all ranks
    flops: Tensor | float  # over all ranks
    local_loss: Tensor  # the sum of this rank, to identify the rank whose loss is not finite
    samples: Tensor | Sequence[float] = ()  # one `RankSample` after the other; empty in steps that are not logged
    names: tuple[str, ...] = ()  # of the numbers that the loss function returned with its loss
    means: Tensor | Sequence[float] = ()  # of these numbers, over all items of all ranks; NaN if no item counts


class Carry(NamedTuple):
    """What the small all-reduce of a step transports besides the number of items."""

    vote: bool = False  # asks all ranks to stop
    tokens: float = 0.0  # of this rank, for the log
    flops: float = 0.0
    sample: Sequence[float] = ()  # the `RankSample` of this rank; empty on every rank in steps that are not logged


NOTHING = Carry()


def update(
    accelerator: Accelerator,
    cfg: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[MicroBatch],
    loss_sum: LossSum | WholeBatch,
    count: Count,
    seed: int = 0,
    carry: Carry = NOTHING,
) -> UpdateStats:
    """Do one optimizer step on the mean loss of all items in `batches` on all ranks.

    How the items are spread over micro-batches and ranks does not change the result. Dropout depends on `seed` and on the place of the
    micro-batch among those of all ranks, so it stays the same when the same micro-batches are spread over another number of ranks.
    Of `cfg` this reads `max_grad_norm` and `on_nonfinite`.

    If the loss or the gradient norm is not finite, every rank leaves weights and optimizer unchanged. The caller finds that in the
    returned numbers. With `on_nonfinite="skip"` the buffers are restored too, such as the running statistics of batch norm.
    """
    enter(FORWARD)
    num_ranks, device = links.team.size, accelerator.device
    rates, used = _learning_rates(optimizer), _of_ddp(model)
    if hasattr(loss_sum, "for_step"):
        loss_sum = loss_sum.for_step(accelerator, model, batches, seed)
    _settle_buckets(accelerator, model, optimizer, batches[0], loss_sum)
    buffers = _copy_buffers(model) if cfg.on_nonfinite == "skip" else {}
    counts = [count(batch) for batch in batches]
    sums = _Sums(sum(counts), carry, num_ranks, device)
    numbers = _Numbers(sums.dtype, device)
    lockstep = getattr(model, "_lockstep", None)  # of a sharded model
    if lockstep:
        lockstep.begin_step()
    times_before = compat.gradient_times(model)
    total = weight = None
    for i, batch in enumerate(batches):
        seed_forward(dropout_seed(seed, i, links.team.rank, num_ranks), device)
        is_last = i == len(batches) - 1
        with _synchronizing(accelerator, model, is_last), lockstep.micro_batch() if lockstep else nullcontext():
            enter(FORWARD)
            with CurrentBatch(batch):
                found = loss_sum(model, batch)
            loss = checked(found)
            numbers.add(numbers_of(found), counts[i])
            if i == 0:
                _check_no_gradients(optimizer)
            # DDP averages gradients over ranks. We want their sum, hence num_ranks.
            weight = num_ranks / sums.wait_for_items() if weight is None else weight
            enter(BACKWARD)
            weighted = loss * weight
            if is_last and num_ranks > 1:
                sync_after_backward(weighted)
            if lockstep:
                lockstep.begin_backward()
            # Like `accelerator.backward`, but without its division by the number of micro-batches.
            (accelerator.scaler.scale(weighted) if accelerator.scaler else weighted).backward()
        loss = loss.detach().to(sums.dtype)
        total = loss if total is None else total + loss

    _check_backward(model, times_before, weighted)
    enter(OPTIMIZER)
    if used:
        used.complete(model)
    if _learning_rates(optimizer) != rates:
        raise UserError(
            "The learning rate was changed during an update, for example by a scheduler that the loss steps. It would change once per "
            "micro-batch. Remove the scheduler: `fit` sets the learning rate of each step, see --lr_schedule."
        )
    if accelerator.scaler:
        accelerator.unscale_gradients(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Accelerate's wrapper searches the disk for an optional package every step. What it does for the scaler is done here.
    stepper = getattr(optimizer, "optimizer", optimizer)
    skips = _can_skip_on_device(stepper, device)
    grad_norm, divisor = _clip(stepper, parameters, cfg.max_grad_norm, device, skips)
    total_loss, totals = _sum_of_ranks(total, numbers.sums, lockstep or used, num_ranks)
    mean_loss = total_loss * (weight / num_ranks)
    _step_if_finite(accelerator, model, stepper, mean_loss + grad_norm, buffers, skips, divisor)
    phases.HERE.advance(phases.HERE.step + 1)
    enter(OTHER)
    above, below = totals.view(2, len(totals) // 2)
    more = (sums.samples, numbers.names or (), above / below)
    return UpdateStats(mean_loss, grad_norm, sums.items, sums.votes, sums.tokens, sums.flops, total, *more)


def _learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]  # a tensor of `set_lr` is in host memory


class _Sums:
    """The number of items and what a step carries, summed over all ranks.

    The all-reduce runs during the first forward pass, because only the first backward pass needs its result.
    """

    def __init__(self, items: Tensor | float, carry: Carry, num_ranks: int, device: torch.device):
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.items: Tensor | float = items
        self.votes: Tensor | float = float(carry.vote)
        self.tokens: Tensor | float = carry.tokens
        self.flops: Tensor | float = carry.flops
        self.samples: Tensor | Sequence[float] = carry.sample
        self._work: dist.Work | None = None
        if num_ranks == 1:
            return
        known = [0.0 if isinstance(items, Tensor) else items, self.votes, carry.tokens, carry.flops]
        summed = torch.tensor(known, dtype=self.dtype)
        summed = (_append_sample(summed, carry.sample, num_ranks) if carry.sample else summed).to(device, non_blocking=True)
        if isinstance(items, Tensor):
            summed[0] += items
        self._work = dist.all_reduce(summed, async_op=True, group=links.team.group)
        # These are views, which contain the sums after the wait.
        self.items, self.votes, self.tokens, self.flops = summed[:4].unbind()
        self.samples = summed[4:] if carry.sample else ()

    def wait_for_items(self) -> Tensor | float:
        """Return the number of items of all ranks. Without items the loss is not finite, so that the optimizer does not step."""
        if self._work:
            with phases.phase(SYNC):
                self._work.wait()  # on a GPU the stream waits, not the host
        return self.items.to(self.dtype) if isinstance(self.items, Tensor) else self.items or math.nan


class _Numbers:
    """The numbers that a loss function returns with its losses, summed over micro-batches. Every rank has the same names."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.names: tuple[str, ...] | None = None  # of the first micro-batch
        self.sums = torch.zeros(0, dtype=dtype, device=device)  # and then how many items each one is over

    def add(self, numbers: dict[str, tuple[Any, Any]], items: Tensor | float) -> None:
        """Add the numbers of a micro-batch of `items`, without waiting for the device."""
        self.names = (*numbers,) if self.names is None else self.names
        if (*numbers,) != self.names:
            raise UserError(
                f"The loss function returned the numbers {', '.join(numbers) or '(none)'} for a micro-batch and "
                f"{', '.join(self.names) or '(none)'} for another one. Return the same names for every micro-batch."
            )
        if numbers:
            values = [value for value, _ in numbers.values()] + [items if n is None else n for _, n in numbers.values()]
            new = lambda value: self.sums.new_full((), value)  # copies nothing from the host
            row = torch.stack([v.detach().to(self.sums).reshape(()) if isinstance(v, Tensor) else new(v) for v in values])
            self.sums = self.sums + row if len(self.sums) else row


def _sum_of_ranks(
    loss: Tensor, numbers: Tensor, used: "Lockstep | _DdpParameters | None", num_ranks: int
) -> tuple[Tensor, Tensor]:
    """Return the sums of the losses and of the numbers of all ranks. A parameter that no rank has used gets no gradient."""
    if num_ranks == 1:
        return loss, numbers
    summed = torch.cat([loss.reshape(1), numbers, *([used.counts(loss.device, loss.dtype)] if used else [])])
    with phases.phase(SYNC):
        dist.all_reduce(summed, group=links.team.group)
    last = 1 + len(numbers)
    for parameter in used.find_unused(summed[last:]) if used else ():
        parameter.grad = None  # as on one rank: the optimizer leaves it as it is
    return summed[0], summed[1:last]


def _clip(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], max_norm: float, device: torch.device, skips: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the norm of all gradients, and what `optimizer` divides them by (None: they are clipped here, or never)."""
    norm = compat.norm_of([p.grad for p in params if p.grad is not None])  # also if nothing is clipped, for the log
    # The kernels of these optimizers read the divisor. Otherwise clipping is one more pass over all gradients.
    if type(optimizer) in (AdamW, Muon, torch.optim.AdamW, torch.optim.SGD) and skips:
        norm = shards.full(norm).to(device)
        return norm, ((norm + 1e-6) / max_norm).clamp(min=1).float() if max_norm else None
    if max_norm:
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return shards.full(norm).to(device), None


def _step_if_finite(
    accelerator: Accelerator, model: nn.Module, stepper: torch.optim.Optimizer, number: Tensor, buffers: dict[str, Tensor],
    skips: bool, divisor: Tensor | None,
) -> None:  # fmt: skip
    """Step the optimizer if `number` is finite, otherwise restore `buffers`. Every rank has the same number.

    `skips`: its kernels read whether they shall skip, so the host does not wait for the number.
    """
    if skips:
        is_bad = (number - number) != 0  # the difference is NaN for a number that is not finite, and NaN differs from 0
        stepper.grad_scale, stepper.found_inf = divisor, is_bad.float()
        try:
            stepper.step()
        finally:
            del stepper.grad_scale, stepper.found_inf
        for buffer, before in _pair_buffers(model, buffers):
            torch.where(is_bad, before, buffer, out=buffer)
    elif math.isfinite(number.item()):
        stepper.step()
    else:
        for buffer, before in _pair_buffers(model, buffers):
            buffer.copy_(before)
    if getattr(stepper.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:  # it may do more, and keep zeros
        stepper.zero_grad()
    for group in stepper.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    if accelerator.scaler:
        accelerator.scaler.update()


def _can_skip_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether the kernels of the optimizer read `found_inf`, as those of torch's fused optimizers do for GradScaler.

    For other optimizers the host reads the number. On a GPU it then waits in every step until the backward pass is done, and the
    GPU waits until the host has launched the next kernels. On a CPU reading a number costs nothing.
    """
    first = optimizer.param_groups[0]["params"][0]
    is_offloaded = isinstance(first, DTensor) and first.device.type == "cpu"  # it steps shards in host memory
    if device.type == "cpu" or is_offloaded or not compat.reads_found_inf(optimizer) or _takes_scaler(type(optimizer)):
        return False
    if not all(group.get("fused", True) for group in optimizer.param_groups):
        return False
    # In its first step, fused SGD allocates momentum without initial values. A kernel that skips would leave them undefined.
    with_momentum = [p for group in optimizer.param_groups if group.get("momentum") for p in group["params"]]
    return all(p in optimizer.state for p in with_momentum if p.grad is not None)


@functools.cache
def _takes_scaler(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether `step` expects the GradScaler as an argument, an older protocol, which does not read `found_inf`."""
    return "grad_scaler" in inspect.signature(kind.step).parameters


def _append_sample(numbers: Tensor, sample: Sequence[float], num_ranks: int) -> Tensor:
    """Return `numbers` and a place for the sample of each rank, of which this rank fills its own. The others are 0.

    A Python list of the same numbers would take 1.6 ms for 1,000 ranks, and this takes 0.05 ms.
    """
    places = torch.zeros(num_ranks, len(sample), dtype=numbers.dtype)
    places[this_rank.rank] = torch.tensor(sample, dtype=numbers.dtype)
    return torch.cat([numbers, places.flatten()])


def _synchronizing(accelerator: Accelerator, model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager:
    """Return a context for the backward pass of one micro-batch. Only the last micro-batch all-reduces gradients."""
    if isinstance(model, FSDPModule):
        begin_micro_batch(model, is_last)
        return nullcontext()
    return nullcontext() if is_last else accelerator.no_sync(model)


def rehearse(
    module: nn.Module, batch: MicroBatch, loss_sum: LossSum | WholeBatch, with_gradients: bool = True
) -> tuple[Tensor | None, ...]:
    """Do a forward and a backward pass that leave nothing behind except caches. `module` is the model without DDP.

    Return the gradients of trained parameters, none for a sharded model and without `with_gradients`. No parameter gets a gradient:
    DDP counts gradients, and with --static_graph it would not synchronize them any more. For a sharded model this is a collective,
    which sums the gradients as a step does, because they fit into memory only in parts.
    """
    with state_restored(module), torch.set_grad_enabled(with_gradients):
        loss = _loss(module, batch, loss_sum)
        if not with_gradients:
            return ()
        if isinstance(module, FSDPModule):
            loss.backward()
            for parameter in module.parameters():  # the parts, which may not have been the parameters before
                parameter.grad = None
            return ()
        trained = [p for p in module.parameters() if p.requires_grad]
        return torch.autograd.grad(loss, trained, allow_unused=True)


def move_gradients(parameters: Sequence[nn.Parameter], memory: Tensor) -> None:
    """Move the gradients that are stored in `memory` to a copy of it, because `memory` is about to be overwritten."""
    address = memory.untyped_storage().data_ptr()
    held = [p for p in parameters if p.grad is not None and p.grad.untyped_storage().data_ptr() == address]
    if held:
        copy = memory.clone()
        for p in held:
            p.grad = copy.as_strided(p.grad.shape, p.grad.stride(), p.grad.storage_offset())


def _check_no_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if the loss function has called `backward` itself, whose gradients would be added to those of the update.

    After the first step, two parameters of each group are enough: reading all of them takes 0.1 ms for 500 parameters.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    groups = [[*params[:1], *params[-1:]] for params in groups] if optimizer.state else groups
    if any(p.grad is not None for params in groups for p in params):
        raise UserError(
            "Parameters have gradients before the backward pass of this update: the loss function calls backward() itself. Return the "
            "sum of all parts of the loss instead. For a gradient penalty use torch.autograd.grad(..., create_graph=True)."
        )


def _check_backward(model: nn.Module, times_before: list[int], loss: Tensor) -> None:
    """Raise RuntimeError if the last backward pass of this step reached no parameter.

    This rank has then synchronized nothing, and DDP does not report it. The next collective of this rank would be matched with
    the gradients of another rank: gloo aborts the process if their sizes differ, and otherwise the numbers are mixed.
    """
    if not times_before or (model.static_graph and not any(times_before)):
        return  # a static graph has no times of its first step, in which DDP learns the graph
    if compat.gradient_times(model) == times_before:
        if depends_on(loss, {*model.parameters()}):
            raise UserError(
                "The loss function has called the unwrapped model, whose gradients DDP does not synchronize. Call the `model` that the "
                "function is given."
            )
        raise RuntimeError(
            f"the backward pass of rank {this_rank.rank} reached none of the trained parameters in the last micro-batch of this step. "
            "Its loss does not depend on the model: it is detached, or a constant is returned for some batches. Instead of a "
            "constant 0 return `0 * model(batch).sum()`."
        )


class _DdpParameters:
    """Lets DDP complete a step in which this rank has not used every parameter: an expert without a token, or a layer without a use.

    DDP waits until each parameter of a bucket has a gradient. An unused one contributes zeros. This costs one number in an all-reduce
    while a rank has used all, whereas `--find_unused_parameters` searches the graph of every step. If no rank has used all, the host
    waits for the GPU in this step.
    """

    def __init__(self, model: DistributedDataParallel):
        ignored = compat.ignored_by_ddp(model.module)
        named = {name: p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored}
        self._names, self._trained = [*named], [*named.values()]  # in the order of DDP
        self._unused: set[nn.Parameter] = set()  # without a gradient on this rank in this step

    def complete(self, model: DistributedDataParallel) -> None:
        """Let DDP sum the buckets that wait for unused parameters. Other ranks are waiting for these sums."""
        self._unused, found = set(), []
        while places := compat.without_gradient(model):  # at most 100 at once
            missing = [self._trained[place] for place in places]
            if frozen := [self._names[place] for place in places if not self._trained[place].requires_grad]:
                raise UserError(
                    f"requires_grad of {shorten(', '.join(frozen), 200)} was turned off during training, but DDP expects its "
                    "gradient. Freeze parameters before `fit`, with --freeze or requires_grad_(False)."
                )
            if set(places) & set(found):
                raise RuntimeError(f"DDP waits for the gradient of {self._names[places[0]]}, although it has got zeros")
            self._unused |= {p for p in missing if p.grad is None}
            with phases.phase(SYNC):
                torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])
            found += places

    def counts(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return 1 if this rank has not used a parameter, otherwise 0."""
        return (torch.ones if self._unused else torch.zeros)(1, device=device, dtype=dtype)

    def find_unused(self, counts: Tensor) -> list[nn.Parameter]:
        """Return the parameters that no rank has used in this step. `counts` is the number of ranks that have not used some.

        If a rank has used all, there are none. Otherwise every rank gets here, and they compare which.
        """
        if not self._unused or counts.item() < links.team.size:
            return []
        unused = torch.tensor([p in self._unused for p in self._trained], dtype=torch.int32).to(counts.device)
        dist.all_reduce(unused, dist.ReduceOp.MIN, group=links.team.group)
        return [p for p, is_unused in zip(self._trained, unused.tolist()) if is_unused]


def _of_ddp(model: nn.Module) -> _DdpParameters | None:
    """Return the parameters that DDP sums, or None if there is no DDP, or if it finds unused parameters itself."""
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters or model.static_graph:
        return None
    if not hasattr(model, "_ddp_parameters"):
        model._ddp_parameters = _DdpParameters(model)
    return model._ddp_parameters


def _settle_buckets(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, batch: MicroBatch, loss_sum: LossSum
) -> None:
    """Do one extra backward pass in the first update of a process, so that a resumed run is bit-identical.

    DDP rebuilds its buckets after its first backward pass, and with three or more ranks the last bit of a sum depends on the
    position in a bucket. Without this, the first step after a restart would sum in a different order than the uninterrupted run.
    """
    least = 2 if accelerator.device.type == "cuda" else 3  # on a GPU, the place of a gradient decides how its norm is summed
    if links.team.size < least or not isinstance(model, DistributedDataParallel) or model.find_unused_parameters:
        return
    if getattr(model, "_buckets_are_settled", False):
        return
    model._buckets_are_settled = True
    if accelerator.ddp_handler and accelerator.ddp_handler.comm_hook == DDPCommunicationHookType.POWER_SGD:
        return  # its error feedback includes every gradient
    with state_restored(model):
        loss = _loss(model, batch, loss_sum, in_plain_order=True)
        _check_no_gradients(optimizer)
        times_before = compat.gradient_times(model)
        loss.backward()
        _check_backward(model, times_before, loss)
        if used := _of_ddp(model):
            used.complete(model)


def _loss(model: nn.Module, batch: MicroBatch, loss_sum: LossSum | WholeBatch, in_plain_order: bool = False) -> Tensor:
    """Return the loss of one micro-batch, or a sum of the same cost if the loss needs the rows of other ranks."""
    with CurrentBatch(batch, in_plain_order):
        is_whole = isinstance(loss_sum, WholeBatch)
        return loss_sum.embed(model, batch).float().sum() if is_whole else checked(loss_sum(model, batch))


@contextlib.contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Restore the gradients and the buffers at the end, such as the running statistics of batch norm."""
    buffers, gradients = _copy_buffers(model), [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in _pair_buffers(model, buffers):
                buffer.copy_(before)


def _copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _pair_buffers(model: nn.Module, copies: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return each buffer with its copy. A forward pass may have replaced a cache by a larger one, which is left as it is."""
    buffers = model.named_buffers() if copies else ()
    pairs = [(buffer, copies[name]) for name, buffer in buffers if name in copies]
    return [(buffer, copy) for buffer, copy in pairs if (buffer.shape, buffer.dtype) == (copy.shape, copy.dtype)]
