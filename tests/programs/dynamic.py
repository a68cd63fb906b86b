"""Train a model whose forward pass skips parameters.

With --how never, one head is never used. With --how sometimes, each head is used in some steps and on some ranks. With --how random,
a forward pass in training draws numbers from numpy and Python, and stores the mean of its inputs in a buffer.
"""

import random
from dataclasses import dataclass

import base
import numpy as np
import torch
from torch import nn

import accel_ddp
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(base.Config):
    how: str = "never"
    save_every: int = 6
    micro_batch_size: int = 2
    optimizer: str = "sgd"


class Heads(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.body, self.small = how, nn.Linear(4, 4), nn.Linear(4, 1)
        # DDP names 100 parameters at once.
        self.large = nn.ModuleList(nn.Linear(4, 1) for _ in range(60)) if how == "never" else nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        """With `sometimes`, rows with a positive sum go to the large head, so that a micro-batch may have no row for one head."""
        hidden, is_large = self.body(x).tanh(), x.sum(-1) > 0
        if self.how == "random":
            self.mean.copy_(x.detach().mean(0))
            noise = (random.random(), np.random.rand()) if self.training else (0.5, 0.5)
            return self.small(hidden) * noise[0] + self.large(hidden) * noise[1]
        if self.how == "never":
            return self.small(hidden)
        parts = [head(hidden[rows]) for head, rows in ((self.small, ~is_large), (self.large, is_large)) if rows.any()]
        return torch.cat(parts)


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    torch.manual_seed(0)
    model = Heads(cfg.how).double()
    rows = list(torch.randn(64, 4, dtype=torch.float64))
    losses = lambda model, batch: (model(batch) - 1).square().sum(1)
    base.fit(accelerator, cfg, model, rows, losses, hooks=accel_ddp.hooks.standard(accelerator, cfg))


if __name__ == "__main__":
    run(Config, main)
