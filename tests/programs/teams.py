"""Take steps with teams of 1, 2 and 4 ranks inside one job of 4 ranks, and write the weights of each rank to OUT.

Every team computes the same global batches, so all ranks of all teams have the same weights.
"""

from dataclasses import dataclass

import base
import torch
import torch.distributed as dist
from torch import nn

import accel_ddp
from accel_ddp.engine.step import train_step
from accel_ddp.entry import run
from accel_ddp.ranks.agreement import gather_objects
from accel_ddp.ranks.team import Team
from accel_ddp.training.sharding import prepare
from accel_ddp.training.stream import TrainBatches


@dataclass(kw_only=True)
class Config(base.Config):
    steps: int = 5
    micro_batch_size: int = 2
    optimizer: str = "sgd"
    max_grad_norm: float = 0.5


def teams_of(accelerator, size: int) -> list[Team]:
    """Return the team of each rank. Forming groups is a collective."""
    ranks = accelerator.num_processes
    groups = [dist.new_group([*range(first, first + size)]) if 1 < size < ranks else None for first in range(0, ranks, size)]
    return [Team(size, rank % size, groups[rank // size]) for rank in range(ranks)]


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)
    rows = [*torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))]
    found = {}
    for size in (1, 2, 4):
        team = teams_of(accelerator, size)[accelerator.process_index]
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 2)).double()
        task, optimizer = base.Task(), accel_ddp.optim.build(model, cfg)
        terms, optimizer = prepare(accelerator, cfg, task, model, optimizer, team)
        batches = TrainBatches(rows, torch.stack).starting_at(0, accelerator, cfg, team)
        numbers = []
        for step in range(cfg.steps):
            stats = train_step(accelerator, cfg, terms, optimizer, next(batches), seed=step)
            numbers.append((float(stats.loss), float(stats.grad_norm), float(stats.items)))
        found[size] = [p.detach().clone() for p in model.parameters()], numbers
        batches.close()
    everyone = gather_objects(found)
    if accelerator.is_main_process:
        torch.save(everyone, cfg.out)


if __name__ == "__main__":
    run(Config, main)
