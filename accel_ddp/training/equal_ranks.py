"""A comparison of ranks before the first step: their data, and their parameters.

Ranks with other data would train on a mixture of both, or wait for each other forever.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accel_ddp import compat
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.rows import Rows
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import gather_everywhere, together
from accel_ddp.ranks.reporting import warn_on_main
from accel_ddp.seeds import generators_kept, mixed
from accel_ddp.text import ranks_text
from accel_ddp.training.stream import TrainBatches


def require_equal_ranks(model: nn.Module, train: TrainBatches, cfg: TrainConfig, num_ranks: int) -> None:
    """Raise UserError on every rank if the ranks have other data or other parameters. This is a collective.

    Each rank reads at most six items.
    """
    if num_ranks == 1:
        return
    same = "Give all ranks the whole dataset, in the same order: `fit` shares it out."
    parameters = {name: ([*p.shape], str(p.dtype), p.requires_grad) for name, p in model.named_parameters()}
    everyone = gather_everywhere({"items": len(train.dataset), **train.identity, "parameters": digest([*parameters.items()])})
    names = [name for name in everyone[0] if name != "parameters"]
    for name in names:
        if ranks := _others([one.get(name) for one in everyone]):
            values = f"{name}: {everyone[0][name]} on rank 0, and {everyone[ranks[0]].get(name)} on {ranks_text(ranks)}"
            raise UserError(f"the training data differ between ranks ({values}). {same}")
    if ranks := _others([one["parameters"] for one in everyone]):
        raise UserError(_compare_parameters(gather_everywhere(parameters), ranks))
    size, drawn = len(train.dataset), random.Random(mixed(cfg.seed, "probe"))
    places = [*dict.fromkeys([*first_items(train, cfg), 0, size - 1, drawn.randrange(size), drawn.randrange(size)])]

    def read() -> list[str]:
        with generators_kept(), together("read the first items"):
            return [digest(train.read([(0, place)], cfg.seed)) for place in places]

    mine = read()
    found = gather_everywhere(mine)
    if not (ranks := _others(found)):
        return
    place = next(place for place, *digests in zip(places, *found) if len({*digests}) > 1)
    if all(gather_everywhere(read() == mine)):
        raise UserError(f"item {place} of the training data is another one on {ranks_text(ranks)} than on rank 0. {same}")
    warn_on_main(f"warning: {another_each_time(place)}", "INEXACT")


def another_each_time(place: int) -> str:
    text = f"item {place} of the training data is another one each time it is read, so a resumed run learns other items. Draw random "
    return f"{text}numbers from torch, numpy and random without a generator of your own: `fit` seeds them."


def _others(values: Sequence[Any]) -> list[int]:
    """Return the ranks whose value is not that of rank 0."""
    return [rank for rank, value in enumerate(values) if value != values[0]]


def _compare_parameters(everyone: list[dict[str, Any]], ranks: list[int]) -> str:
    tables = everyone[0], everyone[ranks[0]]
    name = next((name for name in {**tables[0], **tables[1]} if tables[0].get(name) != tables[1].get(name)), "")
    same = "Build the same model on all ranks, and freeze the same parameters."
    if not name:
        return f"the parameters of {ranks_text(ranks)} have another order than those of rank 0. {same}"
    kinds = [table.get(name) for table in tables]
    here, there = [f"{'trained' if kind[2] else 'frozen'}, {kind[1]} {kind[0]}" if kind else "missing" for kind in kinds]
    return f"the parameter {name} is {here} on rank 0, and {there} on {ranks_text(ranks)}. {same}"


def digest(value: Any) -> str:
    """Return a digest of tensors, arrays, texts and numbers, the same in any process. Of other objects it is that of their type."""
    value = value.tensors() if isinstance(value, Rows) else dict(value) if isinstance(value, Mapping) else value
    leaves, structure = compat.flatten(value)
    found = hashlib.blake2b(str(structure).encode(), digest_size=16)
    for leaf in leaves:
        kind, content = str(getattr(leaf, "dtype", type(leaf).__name__)), b""
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            content = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            content = leaf.tobytes()
        elif isinstance(leaf, str | bytes | int | float):
            content = repr(leaf).encode()
        found.update(f"{kind} {list(getattr(leaf, 'shape', ()))} {len(content)} ".encode() + content)
    return found.hexdigest()


def first_items(train: TrainBatches, cfg: TrainConfig) -> list[int]:
    """Return the places of the first two items of the run. A stream has its first rows only in `dataset`."""
    return [place % len(train.dataset) for place in train.order(cfg.seed).items(0, 2)]
