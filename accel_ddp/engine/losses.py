"""Losses of items. With `GradCache`, each item of a step is compared with all others, of whatever rank and micro-batch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from accel_ddp import phases
from accel_ddp.engine.rows import MicroBatch
from accel_ddp.errors import UserError
from accel_ddp.phases import SYNC
from accel_ddp.ranks.team import Team


def _wide(logits: Tensor) -> Tensor:
    """Return at least float32, because a sum over thousands of tokens has only three exact digits in bf16 and overflows in fp16."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "sum", weights: Tensor | None = None) -> Tensor:
    """Return the loss of items with one correct class each. Labels of -100 are ignored. `weights` are per class."""
    return F.cross_entropy(_wide(logits), labels, weight=weights, reduction=reduction, ignore_index=-100)


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


class GradCache:
    """A loss that compares all items of a step: what `terms` and `prepare` of its task call. The task has `whole_batch = True`.

    `embed(model, batch)` returns rows for the items of a micro-batch. `keys(batch)` returns integers for each item, whose
    meaning is up to the loss. `losses(rows, keys)` returns the loss of each item, given the rows of all items.

    Every rank computes all losses from gathered rows, and the gradient flows into its own rows only. The sum over ranks is
    therefore the gradient of one rank that holds the whole batch. If a rank has several micro-batches, `prepare` first computes rows
    without a graph to get their gradients, and each micro-batch is then computed again with a graph. This needs the memory of one
    micro-batch and one more forward pass.
    """

    def __init__(self, embed: Callable[..., Tensor], keys: Callable[..., Tensor], losses: Callable[[Tensor, Tensor], Tensor]):
        self.embed, self.keys, self.losses = embed, keys, losses

    def prepare(
        self, model: nn.Module, batches: Sequence[MicroBatch], team: Team, seeded: Callable[[int], AbstractContextManager]
    ) -> None:
        """Add the gradients of the rows and the losses as columns, if a rank has several micro-batches."""
        if len(batches) == 1:
            return
        rows = []
        for i, batch in enumerate(batches):
            with torch.no_grad(), seeded(i):  # so dropout draws the same values again
                rows.append(self.embed(model, batch))
        leaf, keys = torch.cat(rows).requires_grad_(), torch.cat([self.keys(batch) for batch in batches])
        total, own = self._own_and_all(leaf, keys, team)
        gradients, sizes = torch.autograd.grad(total, leaf)[0], [len(part) for part in rows]
        for batch, flow, values in zip(batches, gradients.split(sizes), own.detach().split(sizes)):
            batch["flow"], batch["losses"] = flow, values

    def terms(self, model: nn.Module, batch: MicroBatch, team: Team) -> dict[str, tuple[Tensor, int]]:
        """Return the loss. Its value covers the micro-batch, its gradient the whole step."""
        rows = self.embed(model, batch)
        if "flow" not in batch:
            return {"loss": (self._own_and_all(rows, self.keys(batch), team)[0], len(rows))}
        flow = (rows * batch["flow"]).sum()
        return {"loss": (flow + (batch["losses"].sum() - flow).detach(), len(rows))}

    def _own_and_all(self, rows: Tensor, keys: Tensor, team: Team) -> tuple[Tensor, Tensor]:
        """Return (a sum with the value of this rank's items and the gradient of all items, the losses of this rank's items)."""
        everyone, keys = _gather(rows.detach(), team), _gather(keys, team)
        first = team.rank * len(rows)
        losses = self.losses(torch.cat([everyone[:first], rows, everyone[first + len(rows) :]]), keys)
        if losses.shape != keys.shape[:1]:
            raise UserError(
                f"`losses` of GradCache returned a tensor of shape {[*losses.shape]} for {len(keys)} items. Return one loss for each "
                "item, without a sum or a mean."
            )
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
