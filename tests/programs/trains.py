"""Train a small model with state that a resumed run can lose: dropout, augmentation, data workers and optimizer moments."""

import os
import sys
import threading
import time
from dataclasses import dataclass

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run
from accel_ddp.saving.checkpoint_format import MANIFEST


@dataclass(kw_only=True)
class Config(TrainConfig):
    steps: int = 12
    global_batch_size: int = 8
    micro_batch_size: int = 2
    save_every: int = 4
    eval_every: int = 6
    lr: float = 0.01
    keep_last: int = 9
    log_every: int = 1
    step_seconds: float = option(0.0, "minimum duration of a micro-batch in seconds", affects_result=False)
    eval_seconds: float = option(0.0, "minimum duration of an evaluation in seconds", affects_result=False)
    busy_seconds: float = option(0.0, "how many seconds the last rank is busy before its first step")
    width: int = 16
    wrong: str = option("", "deliberate mistake in the loss: mean, or count")
    fails_at: int = option(0, "step after which the last rank raises an error, in every attempt", affects_result=False)
    blocked_by: str = option("", "FIFO at which the first save waits for a writer, as on a disk that hangs", affects_result=False)


def block_first_save(fifo: str) -> None:
    """Let the thread that writes checkpoints wait at the FIFO before it writes the first manifest."""
    waits = [fifo]

    def on_event(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).endswith(MANIFEST) and threading.current_thread().name.startswith("checkpoint"):
            while waits:
                os.close(os.open(waits.pop(), os.O_RDONLY))

    sys.addaudithook(on_event)


def main(cfg: Config) -> None:
    import torch
    from torch import nn

    if cfg.blocked_by:
        block_first_save(cfg.blocked_by)

    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 60  # not a multiple of the batch size, so that a step crosses the end of an epoch

        def __getitem__(self, index):
            generator = torch.Generator().manual_seed(index)
            return torch.randn(8, generator=generator, dtype=torch.float64) + 0.1 * torch.randn(8, dtype=torch.float64)

    accelerator = accel_ddp.start(cfg)
    with accel_ddp.together("get ready"):
        if cfg.busy_seconds and accelerator.is_last_process:
            print("busy", flush=True)
            time.sleep(cfg.busy_seconds)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, cfg.width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(cfg.width, 1)).double()

    class Task(accel_ddp.Task):
        began = False  # an evaluation

        def terms(self, model, batch, team):
            time.sleep(cfg.step_seconds)
            loss = model(batch).square() * (1e3 if cfg.wrong == "count" else 1)  # gradients that are always clipped
            wrong = {"mean": (loss.mean(), len(batch)), "count": (loss.sum(), 1)}
            return {"loss": wrong.get(cfg.wrong, loss.squeeze(1))}

        def count(self, batch):
            return 1 if cfg.wrong == "count" else len(batch)

        def measure(self, model, batch):
            if not self.began:
                self.began = True
                accelerator.print("evaluating", flush=True)
            time.sleep(cfg.eval_seconds / 10)
            return {"loss": model(batch).square().squeeze(-1)}

        def metrics(self, table):
            self.began = False
            return super().metrics(table)

    class Fails(accel_ddp.hooks.Hook):
        def on_update(self, numbers, pace):
            if numbers.step == cfg.fails_at and accelerator.is_last_process:
                raise ValueError("a bug in this step")

    accel_ddp.fit(
        accelerator,
        cfg,
        task=Task(),
        model=model,
        optimizer=accel_ddp.optim.build(model, cfg),
        train=accel_ddp.TrainBatches(Items(), torch.stack),
        test=accel_ddp.EvalBatches(Items(), torch.stack, 3, accelerator, cfg),
        hooks=[*accel_ddp.hooks.standard(accelerator, cfg), Fails()],
    )


if __name__ == "__main__":
    run(Config, main)
