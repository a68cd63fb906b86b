"""The module that DDP wraps. Its forward pass is the loss terms of a task, so a task may call any part of the model.

A task is any object with `terms(model, batch, team)`, which returns a dictionary. "loss" is one value for each item, or a sum with the
number of items. Every other entry is a number to log: values, whose mean is logged, or a sum with its number. `accel_ddp.Task` says
what else a task may have. `train_step` divides the sum of the loss by the items of all micro-batches and ranks.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel_ddp.engine.rows import MicroBatch, Rows, accept_rows
from accel_ddp.errors import UserError
from accel_ddp.ranks.team import Team


class Sealed(contextlib.nullcontext):
    """A micro-batch for DDP, which would rebuild dictionaries and tuples."""


# Seeds the dropout of micro-batch i of a step as the step does: `with seeded(i): model(...)`.
Seeded = Callable[[int], Sealed]
MOST_NUMBERS = 64
# Names of other fields of the event `train_step` of log.jsonl.
RESERVED = ("event", "step", "time", "repeated", "grad_norm", "lr", "items", "samples_per_second", "tokens", "tokens_per_second",
            "tflops", "mfu", "epoch")  # fmt: skip
REPLACED = {
    "loss_sum": "`terms(model, batch, team)`, which returns {'loss': the loss of each item}",
    "evaluate": "`measure(model, batch)` and `metrics(table)`",
    "summarize": "`metrics(table)`",
}


class Terms(nn.Module):
    """A model and what it learns. Without a team of ranks, a step is computed by this rank alone."""

    def __init__(self, model: nn.Module, task: Any, team: Team | None = None):
        super().__init__()
        refuse_old(task)
        self.model, self.task, self.team = model, task, team or Team()
        accept_rows(model)

    def forward(self, batch: MicroBatch | Sealed) -> dict[str, Any]:
        """Return the terms of a micro-batch."""
        batch = batch.enter_result if isinstance(batch, Sealed) else batch
        compute = lambda: self.task.terms(self.model, batch, self.team)
        within = getattr(self.model, "_within_forward", None)  # gathers the weights of a sharded model
        return within(compute) if within else compute()

    def prepare(self, batches: Sequence[MicroBatch], seeded: Seeded) -> None:
        """Let the task add columns that need all micro-batches of a step."""
        if hasattr(self.task, "prepare"):
            self.task.prepare(self.model, batches, self.team, seeded)

    def count(self, batch: MicroBatch) -> Tensor | int:
        return self.task.count(batch) if hasattr(self.task, "count") else count_items(batch)

    @property
    def is_whole(self) -> bool:
        """Whether the loss compares all items of a step."""
        return getattr(self.task, "whole_batch", False)

    def alone(self) -> "Terms":
        """Return the terms of a step that is one micro-batch of this rank."""
        return Terms(self.model, self.task)

    def trial(self, batch: MicroBatch) -> dict[str, Any]:
        """Return the terms of one micro-batch outside of a step, for `alone()`."""
        self.prepare([batch], lambda _: Sealed(batch))
        return self(batch)


def terms_of(wrapped: nn.Module) -> Terms:
    """Return the terms in what `prepare` has returned."""
    return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped


def model_of(wrapped: nn.Module) -> nn.Module:
    """Return the model, which is what is saved, named and compared, in what `prepare` has returned, or a model itself."""
    found = terms_of(wrapped)
    return found.model if isinstance(found, Terms) else found


def count_items(batch: MicroBatch) -> int:
    """Return the items of rows, or the length of the first tensor of a batch."""
    if isinstance(batch, Rows):
        return batch.items
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else (batch,)
    return len(next(part for part in parts if isinstance(part, Tensor) and part.ndim))


def refuse_old(task: Any) -> None:
    """Raise UserError for a task or a class of tasks that was written for an older version."""
    for name, now in REPLACED.items():
        if hasattr(task, name):
            kind = task if isinstance(task, type) else type(task)
            raise UserError(f"{kind.__name__}.{name}: tasks now have {now} instead. See docs/own_recipe.md.")


def problem_of(found: Any, count: Tensor | float | None) -> str:
    """Return what is wrong with the loss that `terms` returned for `count` items, or "". A number on a GPU is not compared."""
    if not isinstance(found, Mapping) or "loss" not in found:
        kind = (
            f"a dictionary without 'loss' ({', '.join(map(str, found))})" if isinstance(found, Mapping) else type(found).__name__
        )
        return f"{kind}. Return {{'loss': the loss of each item}}"
    loss, is_sum = found["loss"], isinstance(found["loss"], tuple)
    value, number = loss if is_sum and len(loss) == 2 else (loss, None)
    if not isinstance(value, Tensor):
        return f"a loss of the type {type(value).__name__}, which has no gradient. Return a tensor, without .item() and float()"
    items = "" if isinstance(count, Tensor) or count is None else f" for {count:g} item{'s' * (count != 1)}"
    if is_sum and value.numel() != 1:
        return f"a sum of the shape {[*value.shape]} as loss{items}. Return (sum, number of items), or the loss of each item"
    if is_sum and items and not isinstance(number, Tensor) and number != count:
        return f"a loss that is the sum over {number:g} items{items}. `count` and `terms` must count the same items"
    if not is_sum and (not value.ndim or (items and value.numel() != count)):
        return (
            f"a loss of shape {[*value.shape]}{items}. Return the loss of each item, without .sum() and .mean(), or "
            "(sum, number of items)"
        )
    return ""


def checked(found: Any, count: Tensor | float | None = None, needs_gradient: bool = True) -> Tensor:
    """Return the summed loss of a micro-batch. Raise UserError if it is not the loss of its items, with a gradient."""
    reason = problem_of(found, count)
    if not reason:
        loss = found["loss"][0].reshape(()) if isinstance(found["loss"], tuple) else found["loss"].sum()
        if loss.requires_grad or not needs_gradient:
            return loss
        reason = (
            "a loss without a gradient. It was computed under torch.no_grad(), it is detached, or it is a constant. "
            "Instead of a constant 0 return 0 * model(batch).sum()"
        )
    raise UserError(f"`terms` returned {reason}.")


def numbers_of(found: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (sum, number) of each number that a task returned with its loss."""
    names = [name for name in found if name != "loss"]
    if used := [name for name in names if not isinstance(name, str) or name in RESERVED]:
        raise UserError(f"`terms` returned a number named {used[0]!r}, which the log cannot store. Choose another name.")
    if len(names) > MOST_NUMBERS:
        raise UserError(f"`terms` returned {len(names)} numbers. Return at most {MOST_NUMBERS}.")
    numbers = {}
    for name in names:
        value = found[name]
        if not isinstance(value, tuple) and not (isinstance(value, Tensor) and value.ndim):
            raise UserError(f"`terms` returned one number as {name!r}. Return a value for each item, or (sum, number).")
        numbers[name] = value if isinstance(value, tuple) else (value.sum(), value.numel())
    return numbers


def columns_of(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the terms of each item, for an evaluation."""
    if isinstance(found["loss"], tuple):
        raise UserError(
            "`terms` returned the loss as a sum, so an evaluation needs `measure(model, batch)`, which returns one row per item."
        )
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
