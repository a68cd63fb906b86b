"""Train sharded models whose batches use different parameters on each rank. Rank 0 writes the results as JSON to OUT.

Each rank has batches of a kind of its own. A kind selects an expert, a head or a layer.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import base
import torch
from torch import Tensor, nn

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.step import train_step
from accel_ddp.engine.terms import Terms
from accel_ddp.entry import run
from accel_ddp.errors import UserError
from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.ranks.agreement import gather_everywhere
from accel_ddp.ranks.process import this_rank
from accel_ddp.ranks.shards import full
from accel_ddp.ranks.team import Team
from accel_ddp.training import sharding

STEPS, SIZE = 3, 6
Batch = tuple[Tensor, int]  # rows, and their kind


class Block(nn.Module):
    """A layer with experts, of which one is used by each batch."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(SIZE, SIZE)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))

    def forward(self, x: Tensor, kind: int) -> Tensor:
        return x + torch.tanh(self.experts[kind](self.shared(x)))


class Experts(nn.Module):
    """Experts inside of layers, and heads in the root. No batch uses the last ones. With `as_layers` the heads are layers."""

    def __init__(self, as_layers: bool = False, calls_all: bool = False):
        super().__init__()
        self.calls_all = calls_all
        self.layers = nn.ModuleList(Block() for _ in range(2))
        heads = [nn.Linear(SIZE, 1) for _ in range(4)]
        self.heads = nn.ModuleList(heads) if as_layers else nn.ModuleDict(dict(zip("0123", heads)))

    def forward(self, x: Tensor, kind: int) -> Tensor:
        for layer in self.layers:
            x = layer(x, kind)
        heads = list(self.heads.values() if isinstance(self.heads, nn.ModuleDict) else self.heads)
        if self.calls_all:
            return [head(x) for head in heads][kind]
        return heads[kind](x)


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch).square().squeeze(1)


def losses_of_parts(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the same without a call of the model itself."""
    (x, kind), head = batch, str(batch[1])
    for layer in model.layers:
        x = layer(x, kind)
    return model.heads[head](x).square().squeeze(1)


def batches_of(step: int, rank: int, kinds: Callable[[int, int, int], int]) -> list[Batch]:
    """Return the two micro-batches of a rank."""
    rows = torch.Generator().manual_seed(10 * step + rank)
    sizes = (2 + rank, 3)
    return [(torch.randn(n, SIZE, generator=rows, dtype=torch.float64), kinds(step, rank, i)) for i, n in enumerate(sizes)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With weight decay, a parameter without a gradient stays as it is, and one with a gradient of 0 does not."""
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)


def train_together(
    accelerator,
    model: nn.Module,
    plan: ShardingPlan,
    kinds: Callable[[int, int, int], int],
    keep: str = "none",
    losses: Callable[..., Tensor] = losses,
) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    sharding.shard(model, plan, accelerator.device, keep=keep)
    optimizer, terms = optimizer_of(model), Terms(model, base.Task(losses), Team.of(accelerator))
    for step in range(STEPS):
        own = batches_of(step, this_rank.rank, kinds)
        train_step(accelerator, TrainConfig(max_grad_norm=1.0), terms, optimizer, own)
    sharding.reshard(model)
    return {name: full(p.detach()) for name, p in model.named_parameters()}


def train_alone(model: nn.Module, kinds: Callable[[int, int, int], int]) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        every = [batch for rank in range(this_rank.num_ranks) for batch in batches_of(step, rank, kinds)]
        optimizer.zero_grad()
        (sum(losses(model, batch).sum() for batch in every) / sum(len(rows) for rows, _ in every)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


KINDS = {
    "other experts on each rank": lambda step, rank, number: rank,
    "other experts in each micro-batch": lambda step, rank, number: (rank + number + step) % 3,
    "one rank changes": lambda step, rank, number: 2 if (step, rank) == (1, 1) else 0,
}


def compare(accelerator) -> dict[str, float | list[str]]:
    """Return the largest difference from one rank for each case, or the error of each rank."""
    torch.manual_seed(0)
    plain, as_layers, called = (
        Experts(**more).double() for more in ({}, {"as_layers": True}, {"as_layers": True, "calls_all": True})
    )
    found: dict[str, float | list[str]] = {}
    for name, kinds in KINDS.items():
        alone = train_alone(plain, kinds)
        for keep, computes in (("gradients", losses), ("none", losses), ("none", losses_of_parts)):
            together = train_together(accelerator, plain, ShardingPlan(), kinds, keep, computes)
            found[f"{name}, kept: {keep}, {computes.__name__}"] = max(
                float((together[key] - value).abs().max()) for key, value in alone.items()
            )
    start = {name: p.detach() for name, p in plain.named_parameters()}
    found["an expert that no batch uses"] = max(
        float((together[key] - start[key]).abs().max()) for key in start if "experts.3" in key or "heads.3" in key
    )
    kinds = KINDS["other experts on each rank"]
    alone, blocks = train_alone(as_layers, kinds), ShardingPlan(layer_classes=("Block",))
    together = train_together(accelerator, as_layers, blocks, kinds)
    found["heads that the config leaves in the root"] = max(
        float((together[key] - value).abs().max()) for key, value in alone.items()
    )
    for name, model in {"heads as layers": as_layers, "heads as layers, all called": called}.items():
        try:
            train_together(accelerator, model, ShardingPlan(), kinds)
            error = ""
        except UserError as raised:
            error = str(raised)
        found[name] = gather_everywhere(error)
    return found


@dataclass(kw_only=True)
class Config(TrainConfig):
    out: str = ""
    changes: bool = False  # one rank uses another layer in its second step


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    if cfg.changes:
        train_together(accelerator, Experts(as_layers=True).double(), ShardingPlan(), KINDS["one rank changes"])
    found = compare(accelerator)
    if this_rank.is_main:
        Path(cfg.out).write_text(json.dumps(found))


if __name__ == "__main__":
    run(Config, main)
