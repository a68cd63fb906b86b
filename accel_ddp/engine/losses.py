"""Losses, summed over items, and the micro-batch that is being computed.

`train_step` divides a loss by the number of items of all micro-batches and ranks. In a `WholeBatch` loss, every item of a step is
compared with every other one, on whatever rank and in whatever micro-batch. `train_step` and `evaluate` announce every micro-batch with
`CurrentBatch` before they call the model. Code that changes how a model computes, such as `speed`, reads it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from accel_ddp import phases
from accel_ddp.errors import UserError
from accel_ddp.phases import SYNC
from accel_ddp.ranks.team import Team
from accel_ddp.seeds import dropout_seed, seed_forward


class CurrentBatch:
    """`with CurrentBatch(batch): ...` announces a micro-batch. Each announcement is a new object, also for the same batch."""

    def __init__(self, batch: Any, in_plain_order: bool = False):
        """`in_plain_order`: gradients must become ready in the order in which the plain model produces them."""
        self.batch, self.in_plain_order = batch, in_plain_order

    def __enter__(self) -> "CurrentBatch":
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


_current: ContextVar[CurrentBatch | None] = ContextVar("accel_ddp_current_batch", default=None)


def current_batch() -> CurrentBatch | None:
    """Return the announced micro-batch, or None outside of `with CurrentBatch(...)`."""
    return _current.get()


def _wide(logits: Tensor) -> Tensor:
    """Return at least float32, because a sum over thousands of tokens has only three exact digits in bf16 and overflows in fp16."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "sum", weights: Tensor | None = None) -> Tensor:
    """Return the loss of items with one correct class each. Labels of -100 are ignored. `weights` are per class."""
    return F.cross_entropy(_wide(logits), labels, weight=weights, reduction=reduction, ignore_index=-100)


def of_tokens(logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    """Return the loss of rows of tokens, each with a label or -100. With the reduction "rows" it is summed over each row."""
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), "sum" if reduction == "sum" else "none")
    return losses if reduction == "sum" else losses.view(labels.shape).sum(-1)


def next_tokens(labels: Tensor) -> Tensor:
    """Return the labels shifted left by one. The last token gets -100."""
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def of_classes(
    logits: Tensor, labels: Tensor, problem_type: str, reduction: str = "sum", weights: Tensor | None = None
) -> Tensor:
    """Return the loss of items with one correct class, several (averaged for each item), or a value (squared error)."""
    if problem_type == "single_label_classification":
        return cross_entropy(logits, labels, reduction, weights)
    if problem_type == "regression":
        return F.mse_loss(_wide(logits).squeeze(-1), labels.to(_wide(logits).dtype), reduction=reduction)
    losses = F.binary_cross_entropy_with_logits(_wide(logits), labels.to(_wide(logits).dtype), reduction="none").mean(-1)
    return losses.sum() if reduction == "sum" else losses


def loss_of(found: Any) -> Any:
    """Return the loss without the numbers that a loss function may return with it, see `LossSum`."""
    return found[0] if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping) else found


def numbers_of(found: Any) -> dict[str, tuple[Any, Any]]:
    """Return (sum, number) of each number that a loss function returned with its loss. The number is None: all items."""
    if loss_of(found) is found:
        return {}
    if used := [name for name in found[1] if not isinstance(name, str) or name in RESERVED]:
        raise UserError(
            f"The loss function returned a number named {used[0]!r}, which the log cannot store. Choose another name."
        )
    if len(found[1]) > MOST_NUMBERS:
        raise UserError(f"The loss function returned {len(found[1])} numbers. Return at most {MOST_NUMBERS}.")
    return {name: value if isinstance(value, tuple) else (value, None) for name, value in found[1].items()}


def checked(found: Any) -> Tensor:
    """Return the loss that a loss function has returned. Raise UserError if it is not one number with a gradient."""
    loss, reason = loss_of(found), ""
    if not isinstance(loss, Tensor):
        reason = f"a {type(loss).__name__}, which has no gradient. Return a tensor, without .item() and float()"
    elif loss.numel() != 1:
        reason = f"a tensor of shape {list(loss.shape)} instead of one number. Return the sum over the items: add .sum()"
    elif not loss.requires_grad:
        reason = (
            "a tensor without a gradient. It was computed under torch.no_grad(), it is detached, or it is a constant. "
            "Instead of a constant 0 return 0 * model(batch).sum()"
        )
    if reason:
        raise UserError(f"The loss function returned {reason}.")
    return loss


def depends_on(loss: Tensor, parameters: set[nn.Parameter]) -> bool:
    """Return whether a graph reaches one of these parameters. It may be in use no more."""
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if getattr(node, "variable", None) in parameters:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [below for below, _ in node.next_functions]
    return False


MicroBatch = Any
# Returns the loss, summed over the items of a micro-batch, or (loss, {name: sum}) with numbers to log as means over the items of a
# step. A sum may be (sum, number) if not all items count. Every micro-batch must have the same names.
LossSum = Callable[[nn.Module, MicroBatch], Any]
MOST_NUMBERS = 64
# Names of other fields of the event `train_step` of log.jsonl.
RESERVED = ("event", "step", "time", "repeated", "loss", "grad_norm", "lr", "items", "samples_per_second", "tokens",
            "tokens_per_second", "tflops", "mfu", "epoch")  # fmt: skip


class WholeBatch:
    """The parts of a loss that compares all items of a step. `train_step` accepts it instead of a `loss_sum` function.

    `embed(model, batch)` returns rows for the items of a micro-batch. `keys(batch)` returns integers for each item, whose
    meaning is up to the loss. `losses(rows, keys)` returns the loss of each item, given the rows of all items.

    Every rank computes all losses from gathered rows, and the gradient flows into its own rows only. The sum over ranks is
    therefore the gradient of one rank that holds the whole batch. If a rank has several micro-batches, rows are first computed
    without a graph to get their gradients, and each micro-batch is then computed again with a graph (GradCache). This needs
    the memory of one micro-batch and one more forward pass.
    """

    def __init__(self, embed: LossSum, keys: Callable[[MicroBatch], Tensor], losses: Callable[[Tensor, Tensor], Tensor]):
        self.embed, self.keys, self.losses = embed, keys, losses

    def for_step(
        self, accelerator: Accelerator, model: nn.Module, batches: Sequence[MicroBatch], seed: int, team: Team
    ) -> LossSum:
        """Return one loss function per micro-batch. Its value covers the micro-batch, its gradient the whole batch."""
        keys = _gather(torch.cat([self.keys(batch) for batch in batches]), team)
        if len(batches) == 1:
            return lambda model, batch: self._own_and_all(self.embed(model, batch), keys, team)[0]
        rows = []
        with torch.no_grad():
            for i, batch in enumerate(batches):
                # `train_step` seeds the same way, so dropout draws the same values again.
                own_seed = dropout_seed(seed, i, team.rank, team.size)
                seed_forward(own_seed, accelerator.device)
                with CurrentBatch(batch):
                    rows.append(self.embed(model, batch))
        sizes, leaf = [len(part) for part in rows], torch.cat(rows).requires_grad_()
        total, own = self._own_and_all(leaf, keys, team)
        gradients = torch.autograd.grad(total, leaf)[0].split(sizes)
        values = own.detach().split(sizes)
        index = {id(batch): i for i, batch in enumerate(batches)}

        def loss_sum(model: nn.Module, batch: MicroBatch) -> Tensor:
            i = index[id(batch)]
            flow = (self.embed(model, batch) * gradients[i]).sum()
            return flow + (values[i].sum() - flow).detach()

        return loss_sum

    def _own_and_all(self, rows: Tensor, keys: Tensor, team: Team) -> tuple[Tensor, Tensor]:
        """Return (a sum with the value of this rank's items and the gradient of all items, the losses of this rank's items)."""
        everyone = _gather(rows.detach(), team)
        first = team.rank * len(rows)
        losses = self.losses(torch.cat([everyone[:first], rows, everyone[first + len(rows) :]]), keys)
        own = losses[first : first + len(rows)]
        total = losses.sum()
        return total + (own.sum() - total).detach(), own


def _gather(tensor: Tensor, team: Team) -> Tensor:
    """Return the rows of all ranks of a step, each of which has the same number."""
    if team.size == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(team.size)]
    with phases.phase(SYNC):
        dist.all_gather(parts, tensor.contiguous(), group=team.group)
    return torch.cat(parts)
