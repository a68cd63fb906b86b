"""Train a small model whose `tables` and one of whose hooks fail. A test checks that the run continues."""

from dataclasses import dataclass

import base
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(TrainConfig):
    eval_first: bool = False


class FailingHook(accel_ddp.hooks.Hook):
    def on_tables(self, step, tables):
        raise RuntimeError("a hook of a user")


class LastHook(accel_ddp.hooks.Hook):
    steps: tuple[int, ...] = ()

    def on_tables(self, step, tables):
        self.steps += (step,)

    def on_end(self, step, summary):
        print("after the failed hook:", *self.steps)


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.ones(64, 1), torch.zeros(64, 1))
    evaluations = []

    def evaluate(model):
        evaluations.append(len(evaluations) + 1)
        return {"loss": float(len(evaluations))}

    def tables():
        number = len(evaluations)
        if number <= 2:
            return {"own": accel_ddp.Table(["name", "value"], [["loss", 1 / 0]])}
        if number == 3:
            return None
        return {"own": accel_ddp.Table(["name", "value"], [["loss"] if number == 4 else ["loss", torch.tensor(float(number))]])}

    hooks = accel_ddp.hooks.standard(accelerator, cfg)
    return accel_ddp.fit(
        accelerator,
        cfg,
        task=base.Task(lambda model, batch: (model(batch[0]) - batch[1]).square().squeeze(1), tables=tables),
        model=model,
        optimizer=accel_ddp.optim.build(model, cfg),
        train=accel_ddp.TrainBatches(data, default_collate),
        test=evaluate,
        hooks=[FailingHook(), *hooks, LastHook()],
    )


if __name__ == "__main__":
    run(Config, main)
