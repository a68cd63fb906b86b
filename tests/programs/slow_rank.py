"""Train on ranks of which the last one is slow in one part of its steps, and write what each rank has measured to OUT/RANK.jsonl."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import base

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(TrainConfig):
    out: str = ""
    slow: str = ""  # loss, backward, data, hook, or items: each takes `seconds`, on the last rank three times as long
    seconds: float = 0.2
    from_step: int = 0
    until_step: int = 1_000_000
    steps: int = 20
    global_batch_size: int = 16
    micro_batch_size: int = 4
    log_every: int = 1
    width: int = 128
    batch_norm: bool = False
    pause: float = 0.0  # minimum seconds of a micro-batch, on every rank


def main(cfg: Config) -> None:
    import torch
    from torch import nn

    from accel_ddp.engine.hook import Hook
    from accel_ddp.engine.step_times import measure_steps
    from accel_ddp.training import run_events

    accelerator = accel_ddp.start(cfg)
    now, slept = {"step": 0}, []

    def delay(where: str) -> None:
        if where == cfg.slow and accelerator.is_last_process and cfg.from_step <= now["step"] < cfg.until_step:
            began = time.perf_counter()
            time.sleep(cfg.seconds)
            slept.append(time.perf_counter() - began)

    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            delay("data")
            return torch.full((cfg.width,), index / 64)

    class Delayed(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            delay("backward")
            return gradient

    class Slow(Hook):
        def on_update(self, numbers, pace):
            now["step"] = numbers.step
            delay("hook")

    file = (Path(cfg.out) / f"{accelerator.process_index}.jsonl").open("w", buffering=1)

    class Recorded(type(measure_steps(accelerator.device))):
        def end_step(self, step):
            file.write(json.dumps([time.time(), *super().end_step(step)]) + "\n")
            return self.timing

    run_events.measure_steps = lambda device, step: Recorded(step)
    torch.manual_seed(0)
    layers = [nn.Linear(cfg.width, cfg.width), *([nn.BatchNorm1d(cfg.width)] if cfg.batch_norm else [])]
    model = nn.Sequential(*layers, nn.Linear(cfg.width, cfg.width))

    def losses(model, batch):
        delay("loss")
        time.sleep(cfg.pause)
        if cfg.slow == "items":
            time.sleep(cfg.seconds * len(batch) * (3 if accelerator.is_last_process else 1))
        return model(Delayed.apply(batch.clone().requires_grad_())).square().sum(1)

    accel_ddp.fit(
        accelerator, cfg, task=base.Task(losses), model=model, optimizer=accel_ddp.optim.build(model, cfg),
        train=accel_ddp.TrainBatches(Items(), torch.stack),
        hooks=[*accel_ddp.hooks.standard(accelerator, cfg), Slow()],
    )  # fmt: skip
    if slept:
        (Path(cfg.out) / "slept.json").write_text(json.dumps(slept))


if __name__ == "__main__":
    run(Config, main)
