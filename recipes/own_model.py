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
        return {"loss": "min"}  # what `evaluate` measures, and whether lower ("min") or higher ("max") is better


def main(cfg: Config):
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset, default_collate

    accelerator = accel_ddp.start(cfg)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.linspace(-3, 3, 1000).unsqueeze(1)
    data = TensorDataset(x, torch.sin(x))  # any dataset with __len__ and __getitem__
    batches = accel_ddp.EvalBatches(data, default_collate, 100, accelerator, cfg)

    def squared_errors(model, batch):
        inputs, targets = batch
        return (model(inputs) - targets).square().squeeze(1)

    return accel_ddp.fit(
        accelerator,
        cfg,
        model=model,
        optimizer=accel_ddp.optim.build(model, cfg),
        train=accel_ddp.TrainBatches(data, default_collate),
        loss_sum=lambda model, batch: squared_errors(model, batch).sum(),  # summed: `train_step` divides by the items of all ranks
        count=lambda batch: len(batch[0]),  # how many items the loss is averaged over
        evaluate=lambda model: accel_ddp.evaluate(
            accelerator, model, batches,
            measure=lambda model, batch: {"loss": squared_errors(model, batch)},
            summarize=lambda rows: {"loss": float(rows["loss"].mean())},
        ),
        hooks=accel_ddp.hooks.standard(accelerator, cfg),
    )  # fmt: skip


if __name__ == "__main__":
    run(Config, main)
