"""Train while this rank, its threads, its child processes and the other rank print to the same terminal in every way."""

import logging
import os
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run

early = logging.StreamHandler()  # made before the panel, as by libraries that are imported
LONG = " ".join(f"word{number:02d}" for number in range(40))  # several rows of a terminal


@dataclass(kw_only=True)
class Config(TrainConfig):
    steps: int = 20
    global_batch_size: int = 4
    micro_batch_size: int = 2
    eval_every: int = 10
    log_every: int = 1
    step_seconds: float = option(0.05, "duration of a micro-batch in seconds")
    fails_at: int = option(0, "step after which this rank raises an error")
    prints: int = option(0, "lines to print in each step")

    def metric_directions(self):
        return {"error": "min"}


class Noise(accel_ddp.hooks.Hook):
    def __init__(self, cfg, accelerator):
        self.cfg, self.is_main = cfg, accelerator.is_main_process

    def on_update(self, numbers, pace):
        if self.cfg.fails_at == numbers.step:
            raise ValueError("a bug in this step")
        if self.cfg.prints:
            for number in range(self.cfg.prints):
                print(f"step {numbers.step} line {number} {LONG}")
            logging.getLogger("early").warning(LONG)
        elif not self.is_main:
            if numbers.step == 3:
                print(f"other rank: {LONG}")
                print("other rank, first line\nother rank, second line\nother rank, third line", file=sys.stderr)
        elif numbers.step == 2:
            print("from print", flush=True)
            warnings.warn("from warnings", stacklevel=1)
            logging.getLogger("early").warning("from an early logger")
            print(f"long: {LONG}")
        elif numbers.step == 4:
            subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
            os.write(2, b"from C\n")
        elif numbers.step == 5:
            print("begins", end=" ", flush=True)
            time.sleep(1.0)  # some frames are drawn meanwhile
            print("and ends")
        elif numbers.step == 6:
            from tqdm import tqdm

            for number in tqdm(range(20), desc="a bar", mininterval=0.05):
                time.sleep(0.1)  # some frames are drawn meanwhile, also if other processes need the cores
                if number == 10:
                    tqdm.write("from tqdm.write")


def main(cfg: Config) -> None:
    import torch
    from torch import nn

    accelerator = accel_ddp.start(cfg)
    logging.getLogger("early").addHandler(early)
    items = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))

    class Task(accel_ddp.Task):
        def terms(self, model, batch, team):
            time.sleep(cfg.step_seconds)
            return {"loss": model(batch).square().squeeze(1)}

        def measure(self, model, batch):
            time.sleep(0.3)
            return {"error": model(batch).square().squeeze(1)}

    model = nn.Linear(4, 1)
    batches = accel_ddp.EvalBatches(items, torch.stack, 8, accelerator, cfg)
    accel_ddp.fit(
        accelerator, cfg, task=Task(), model=model, optimizer=accel_ddp.optim.build(model, cfg),
        train=accel_ddp.TrainBatches(items, torch.stack), test=batches,
        hooks=[*accel_ddp.hooks.standard(accelerator, cfg), Noise(cfg, accelerator)],
    )  # fmt: skip
    accelerator.print("trained")


if __name__ == "__main__":
    run(Config, main)
