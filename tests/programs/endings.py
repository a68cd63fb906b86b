"""Train, and end in the way that --how names. Without --uses_run, the program calls `start` and `fit` but not `run`.

- (empty): train three times with hooks and metrics that exist on the main rank only. Rank 0 ends seconds after
  the others. Each rank closes the process group itself.
- raise, user error: the last rank raises an exception, or every rank raises a UserError.
- leave, all leave: the last rank calls sys.exit(0), or every rank does.
- stuck disk: the first evaluation cannot be written, and then rank 0 raises an exception.
"""

import atexit
import contextlib
import dataclasses
import gc
import os
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import base

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.hook import Hook
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(TrainConfig):
    how: str = ""
    uses_run: bool = False
    steps: int = 6
    eval_every: int = 2
    global_batch_size: int = 4
    eval_first: bool = False


class EndsRun(Hook):
    """Ends the run at its start, or in the evaluation after step 2."""

    def __init__(self, at_start: bool):
        self.at_start = at_start

    def on_start(self, step, total_steps, evaluations):
        return self.at_start

    def on_evaluate(self, step, metrics):
        return step == 2


def print_threads_of_gloo() -> None:
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((thread / "comm").read_text())
    print(f"there are {sum('gloo' in name for name in names)} threads of gloo", flush=True)


def main(cfg: Config) -> None:
    import torch

    atexit.register(print_threads_of_gloo)  # it is called after the handler of `start`
    accelerator = accel_ddp.start(cfg)
    print_threads_of_gloo()
    is_main, is_last = accelerator.is_main_process, accelerator.is_last_process
    models = []

    def fit(name: str, *hooks: Hook) -> int:
        """Return the last step."""
        config = dataclasses.replace(cfg, output_dir=f"{cfg.output_dir}/{name}")
        Path(config.output_dir).mkdir(exist_ok=True, parents=True)
        if cfg.how == "stuck disk" and is_main:
            # A process that opens this file for writing waits until another one reads it, as on a disk that does not answer.
            os.mkfifo(f"{config.output_dir}/.evaluations.json.tmp")
        model, calls = torch.nn.Linear(4, 1), []
        models.append(weakref.ref(model))

        def losses(model, batch):
            calls.extend([batch] * torch.is_grad_enabled())  # not in the check before the first step
            if len(calls) == 4 and ((cfg.how == "raise" and is_last) or (cfg.how == "stuck disk" and is_main)):
                raise ValueError("a bug in the user's loss")
            if len(calls) == 4 and cfg.how == "user error":
                raise accel_ddp.UserError("a mistake of the user")
            if len(calls) == 4 and (cfg.how == "all leave" or (cfg.how == "leave" and is_last)):
                sys.exit(0)
            return model(batch).square().sum(1)

        rows = list(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))  # the same on every rank
        return accel_ddp.fit(
            accelerator, config, task=base.Task(losses), model=model, optimizer=accel_ddp.optim.build(model, config), hooks=hooks,
            train=accel_ddp.TrainBatches(rows, torch.stack),
            test=lambda model: {"loss": 1.0} if is_main else {},
        ).step  # fmt: skip

    if cfg.how:
        fit("fails")
    ends = [fit("start", *[EndsRun(True)] * is_main), fit("evaluation", *[EndsRun(False)] * is_main), fit("none")]
    print(f"rank {accelerator.process_index} ended its runs after the steps {ends}", flush=True)
    accelerator.free_memory()
    gc.collect()
    print(f"rank {accelerator.process_index} has {sum(model() is not None for model in models)} models in memory", flush=True)
    if is_main and not is_last:
        time.sleep(4)
        print("rank 0 ends", flush=True)
    accelerator.end_training()  # many programs call it, and it closes the process group


if __name__ == "__main__":
    run(Config, main) if "--uses_run" in sys.argv else main(accel_ddp.parse_config(Config))
