"""Kill a run 30 times at random moments of its saves, resume it each time, and print a report as JSON.

Each process of the run is a fork, so that torch is imported only once.
"""

import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import accel_ddp
from accel_ddp.config import TrainConfig
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(TrainConfig):
    kills: int = 30
    steps: int = 100_000
    lr_schedule: str = "constant"
    save_every: int = 1
    log_every: int = 1
    global_batch_size: int = 4
    lr: float = 1e-3


def train(cfg: Config) -> None:
    """Train from the newest checkpoint until the end or until this process is killed."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    cfg = dataclasses.replace(cfg)
    accelerator = accel_ddp.start(cfg)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 400), nn.Dropout(0.1), nn.Linear(400, 64))  # 0.6 MB with the optimizer
    hook = accel_ddp.hooks.Hook()
    hook.on_start = lambda step, total, past: print(f"from {step}", flush=True)
    accel_ddp.fit(
        accelerator,
        cfg,
        model=model,
        optimizer=accel_ddp.optim.build(model, cfg),
        train=accel_ddp.TrainBatches(list(torch.randn(50, 64, generator=torch.Generator().manual_seed(1))), torch.stack),
        loss_sum=lambda model, batch: model(batch).square().sum(),
        count=len,
        hooks=[hook],
    )


def main(cfg: Config) -> None:
    import torch  # noqa: F401  before the forks, so that it is imported only once

    report = []
    folder = Path(cfg.output_dir)
    for number in range(cfg.kills + 1):
        before = max((int(p.name[5:]) for p in folder.glob("step_*")), default=0)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(writer, 1)
            last = 0 if number < cfg.kills else cfg.stop_after or before + 3
            with contextlib.suppress(accel_ddp.ranks.failures.Stopped):
                train(dataclasses.replace(cfg, resume="auto" if number else "", stop_after=last))
            os._exit(0)
        os.close(writer)
        output = os.fdopen(reader)
        began = next((line for line in output if line.startswith("from ")), "")
        if number < cfg.kills:
            while max((int(p.name[5:]) for p in folder.glob("step_*")), default=0) <= before:
                time.sleep(0.001)  # after the first save, others follow without a pause
                if os.waitpid(child, os.WNOHANG)[0]:
                    sys.exit(f"process {number} of the run ended before it was killed")
            time.sleep(random.random() * 0.1)
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        partial = [p.name for p in folder.glob(".step_*")]
        report.append({"had": before, "from": began.strip(), "status": status, "partial": partial})
    print(json.dumps(report))
    sys.stdout.flush()


if __name__ == "__main__":
    run(Config, main)
