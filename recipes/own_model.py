r"""Train a model, a dataset and a loss of your own, without transformers.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/own_model.py

The model learns a sine wave. Everything works as in the other recipes: any number of GPUs and nodes, --resume, trackers.
"""

from dataclasses import dataclass

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(TrainConfig):
    epochs: float = 20.0
    lr: float = 1e-2

    def metric_directions(self):
        return {"loss": "min"}  # what is measured, and whether lower ("min") or higher ("max") is better


class Task(accel_ddp.Task):
    def terms(self, model, batch, team):
        inputs, targets = batch
        return {"loss": (model(inputs) - targets).square().squeeze(1)}  # of each item: `train_step` divides by those of all ranks


def main(cfg: Config):
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset, default_collate

    accelerator = accel_ddp.start(cfg)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.linspace(-3, 3, 1000).unsqueeze(1)
    data = TensorDataset(x, torch.sin(x))  # any dataset with __len__ and __getitem__
    return accel_ddp.fit(
        accelerator,
        cfg,
        task=Task(cfg, accelerator),
        model=model,
        optimizer=accel_ddp.optim.build(model, cfg),
        train=accel_ddp.TrainBatches(data, default_collate),
        test=accel_ddp.EvalBatches(data, default_collate, 100, accelerator, cfg),
        hooks=accel_ddp.hooks.standard(accelerator, cfg),
    )


if __name__ == "__main__":
    run(Config, main)
