"""Train, and fail on the last rank: with a loss that is not finite, too little memory, an exception, an exit or a hang.

Without --how, the program trains without a failure.
"""

import sys
import time
from dataclasses import dataclass

import base

import accel_ddp
from accel_ddp import phases
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(TrainConfig):
    how: str = ""
    steps: int = 20
    global_batch_size: int = 4


def main(cfg: Config) -> None:
    import torch

    accelerator = accel_ddp.start(cfg)
    model = torch.nn.Linear(4, 1)

    def losses(model, batch):
        loss = model(batch).square().sum(1)
        # Not in the checks before the first step, and not in the pass that settles the buckets of DDP.
        is_fifth = torch.is_grad_enabled() and phases.HERE.step == 4
        if is_fifth and accelerator.process_index == accelerator.num_processes - 1:
            if cfg.how == "nan":
                return loss * float("nan")
            if cfg.how == "memory":
                torch.empty(1 << 50, dtype=torch.uint8)
            if cfg.how == "host memory":
                raise MemoryError  # without a text, as Python raises it
            if cfg.how == "exception":
                raise ValueError("a bug in the user's loss")
            if cfg.how == "exit":
                sys.exit(3)
            if cfg.how == "endless":
                print("now it hangs", flush=True)
                time.sleep(600)
        return loss

    accel_ddp.fit(
        accelerator,
        cfg,
        task=base.Task(losses),
        model=model,
        optimizer=accel_ddp.optim.build(model, cfg),
        train=accel_ddp.TrainBatches(list(torch.randn(64, 4)), torch.stack),
        hooks=accel_ddp.hooks.standard(accelerator, cfg),
    )


if __name__ == "__main__":
    run(Config, main)
