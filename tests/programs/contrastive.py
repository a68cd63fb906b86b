"""Train a tiny model with a contrastive loss for a few steps. Tests compare its checkpoints for different numbers of ranks.

With --drop, the two passes over a micro-batch must draw the same dropout.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run
from accel_ddp.tasks.contrastive import in_batch_losses


@dataclass(kw_only=True)
class Config(TrainConfig):
    lr: float = 0.1
    optimizer: str = "sgd"
    drop: float = 0.0
    hard: bool = False
    cut: bool = False
    eval_first: bool = False


class Encoder(nn.Module):
    def __init__(self, drop: float):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(drop), nn.Linear(16, 8))

    def forward(self, texts):
        return self.layers(texts)


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    torch.manual_seed(0)
    model = Encoder(cfg.drop).double()
    parts = 4 if cfg.hard else 2
    texts = torch.randn(48, parts, 8, dtype=torch.float64)
    keys = torch.arange(48 * parts).view(48, parts)
    keys[3, 1] = keys[7, 1]  # rows with the same positive, or with the same anchor, are not negatives of each other
    keys[5, 0] = keys[9, 0]
    rows = [{"texts": texts[i], "keys": keys[i]} for i in range(48)]
    collate = lambda some: {name: torch.stack([row[name] for row in some]) for name in ("texts", "keys")}
    sizes = (8, 4) if cfg.cut else ()
    losses = lambda rows, keys: in_batch_losses(rows, keys, 20.0, sizes)
    cache = accel_ddp.losses.GradCache(lambda model, batch: model(batch["texts"]), lambda batch: batch["keys"], losses)
    task = SimpleNamespace(terms=cache.terms, prepare=cache.prepare, whole_batch=True)
    accel_ddp.fit(
        accelerator, cfg, task=task, model=model, optimizer=accel_ddp.optim.build(model, cfg),
        train=accel_ddp.TrainBatches(rows, collate),
        hooks=accel_ddp.hooks.standard(accelerator, cfg),
    )  # fmt: skip


if __name__ == "__main__":
    run(Config, main)
