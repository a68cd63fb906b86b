"""What a step needs around forward and backward passes if torch's DDP sums the gradients. FSDP's part is `sharding.Lockstep`."""

import contextlib
from contextvars import ContextVar
from typing import Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel_ddp import compat, phases
from accel_ddp.engine.rows import MicroBatch
from accel_ddp.engine.scaler import state_restored
from accel_ddp.engine.terms import Sealed, checked, model_of, terms_of
from accel_ddp.errors import UserError
from accel_ddp.phases import OPTIMIZER, SYNC
from accel_ddp.text import shorten

# Whether gradients must become ready in the order in which the plain model produces them, so layers must not be captured or compiled.
in_plain_order: ContextVar[bool] = ContextVar("accel_ddp_in_plain_order", default=False)


class Gradients(Protocol):
    """The gradients of one step, which the ranks of a team sum."""

    def micro_batch(self, terms: nn.Module, is_last: bool) -> contextlib.AbstractContextManager: ...

    def begin_backward(self) -> None: ...

    def end_backward(self) -> None: ...

    def counts(self, device: torch.device, dtype: torch.dtype) -> Tensor: ...

    def find_unused(self, counts: Tensor) -> list[nn.Parameter]: ...


def begin_step(accelerator: Accelerator, terms: nn.Module, optimizer: torch.optim.Optimizer, batch: MicroBatch) -> Gradients:
    """Return the gradients of a step. `batch` is its first micro-batch."""
    if lockstep := getattr(model_of(terms), "_lockstep", None):
        lockstep.begin_step()
        return lockstep
    _settle_buckets(accelerator, terms, optimizer, batch)
    return DdpStep(accelerator, terms)


class DdpStep:
    """The gradients of one step, summed by DDP, or those of a rank that has no DDP.

    If a rank has not used every parameter (an expert without a token, a layer without a use), DDP would wait for their gradients. An
    unused one contributes zeros. This costs one number in an all-reduce while a rank has used all, whereas
    `--find_unused_parameters` searches the graph of every step. If no rank has used all, the host waits for the GPU in this step.
    """

    def __init__(self, accelerator: Accelerator, terms: nn.Module):
        self.accelerator, self.wrapped, self.team = accelerator, terms, terms_of(terms).team
        self._times = compat.gradient_times(terms)
        self._completes = isinstance(terms, DistributedDataParallel) and not (terms.find_unused_parameters or terms.static_graph)
        if self._completes and not hasattr(terms, "_trained_parameters"):
            model = model_of(terms)
            ignored = compat.ignored_by_ddp(model)
            terms._trained_parameters = [
                (name, p) for name, p in model.named_parameters() if p.requires_grad and name not in ignored
            ]
        self._trained: list[tuple[str, nn.Parameter]] = terms._trained_parameters if self._completes else []  # in DDP's order
        self._unused: set[nn.Parameter] = set()  # without a gradient on this rank

    def micro_batch(self, terms: nn.Module, is_last: bool) -> contextlib.AbstractContextManager:
        """Return a context for one micro-batch. Only the last one all-reduces gradients."""
        return contextlib.nullcontext() if is_last else self.accelerator.no_sync(terms)

    def begin_backward(self) -> None: ...

    def end_backward(self) -> None:
        """Let DDP sum the buckets that wait for unused parameters. Other ranks are waiting for these sums."""
        self.complete()
        phases.enter(OPTIMIZER)

    def _require_gradients(self) -> None:
        """Raise an error if the last backward pass of this step reached no parameter.

        This rank has then synchronized nothing, and DDP does not report it. The next collective of this rank would be matched with
        the gradients of another rank: gloo aborts the process if their sizes differ, and otherwise the numbers are mixed.
        """
        if not self._times or (self.wrapped.static_graph and not any(self._times)):
            return  # a static graph has no times of its first step, in which DDP learns the graph
        if compat.gradient_times(self.wrapped) == self._times:
            raise RuntimeError(
                f"the backward pass of rank {dist.get_rank()} reached none of the trained parameters in the last micro-batch of this "
                "step. Its loss does not depend on the model: it is detached, or a constant is returned for some batches. Instead of "
                "a constant 0 return `0 * model(batch).sum()`."
            )

    def complete(self) -> None:
        self._require_gradients()
        found: list[int] = []
        while self._completes and (places := compat.without_gradient(self.wrapped)):  # at most 100 at once
            missing = [self._trained[place][1] for place in places]
            if frozen := [name for name, p in map(self._trained.__getitem__, places) if not p.requires_grad]:
                raise UserError(
                    f"requires_grad of {shorten(', '.join(frozen), 200)} was turned off during training, but DDP expects its "
                    "gradient. Freeze parameters before `fit`, with --freeze or requires_grad_(False)."
                )
            if set(places) & set(found):
                raise RuntimeError(f"DDP waits for the gradient of {self._trained[places[0]][0]}, although it has got zeros")
            self._unused |= {p for p in missing if p.grad is None}
            with phases.phase(SYNC):
                torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])
            found += places

    def counts(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return 1 if this rank has not used a parameter, otherwise 0."""
        return torch.full((int(self._completes),), float(bool(self._unused)), device=device, dtype=dtype)

    def find_unused(self, counts: Tensor) -> list[nn.Parameter]:
        """Return the parameters that no rank has used in this step. `counts` is the number of ranks that have not used some.

        If a rank has used all, there are none. Otherwise every rank gets here, and they compare which.
        """
        if not self._unused or counts.item() < self.team.size:
            return []
        trained = [p for _, p in self._trained]
        unused = torch.tensor([p in self._unused for p in trained], dtype=torch.int32).to(counts.device)
        dist.all_reduce(unused, dist.ReduceOp.MIN, group=self.team.group)
        return [p for p, is_unused in zip(trained, unused.tolist()) if is_unused]


def words_to_freeze(unused: list[str], used: list[str]) -> list[str]:
    """Return the shortest beginnings of the names `unused` that `--freeze` finds in no name of `used`, or [] if there are none.

    There are none if one of these names is a part of another name, for example head.weight of base.head.weight.
    """
    words: list[str] = []
    for name in unused:
        if any(word in name for word in words):
            continue
        ends = [i for i, letter in enumerate(name) if letter == "."]
        beginnings = [name[:i] for end in ends for i in (end, end + 1)] + [name]  # with the dot: layer.1. is not in layer.10.
        word = next((word for word in beginnings if not any(word in other for other in used)), None)
        if word is None:
            return []
        words.append(word)
    return words


def check_no_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if the task has called `backward` itself, whose gradients would be added to those of the step.

    After the first step, two parameters of each group are enough: reading all of them takes 0.1 ms for 500 parameters.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    groups = [[*params[:1], *params[-1:]] for params in groups] if optimizer.state else groups
    if any(p.grad is not None for params in groups for p in params):
        raise UserError(
            "Parameters have gradients before the backward pass of this update: `terms` calls backward() itself. Return the "
            "sum of all parts of the loss instead. For a gradient penalty use torch.autograd.grad(..., create_graph=True)."
        )


def _settle_buckets(accelerator: Accelerator, terms: nn.Module, optimizer: torch.optim.Optimizer, batch: MicroBatch) -> None:
    """Do one extra backward pass in the first step of a process, so that a resumed run is bit-identical.

    DDP rebuilds its buckets after its first backward pass, and with three or more ranks the last bit of a sum depends on the
    position in a bucket. Without this, the first step after a restart would sum in a different order than the uninterrupted run.
    """
    least = 2 if accelerator.device.type == "cuda" else 3  # on a GPU, the place of a gradient decides how its norm is summed
    if terms_of(terms).team.size < least or not isinstance(terms, DistributedDataParallel) or terms.find_unused_parameters:
        return
    if hasattr(terms, "_buckets_are_settled"):
        return
    terms._buckets_are_settled = True
    if accelerator.ddp_handler and accelerator.ddp_handler.comm_hook == DDPCommunicationHookType.POWER_SGD:
        return  # its error feedback includes every gradient
    with state_restored(terms):
        token = in_plain_order.set(True)
        try:
            loss = checked(terms(Sealed(batch)))
        finally:
            in_plain_order.reset(token)
        check_no_gradients(optimizer)
        settled = DdpStep(accelerator, terms)
        loss.backward()
        settled.complete()
