"""Do updates whose parts take known times, and write what `StepTimes` has measured to OUT/RANK.json.

The last rank needs longer in its forward pass, so that the others wait for it.
"""

import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import base

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run

DATA, FORWARD, BACKWARD, OPTIMIZER, SLOWER = 0.010, 0.012, 0.016, 0.014, 0.04
STEPS = 4


@dataclass(kw_only=True)
class Config(TrainConfig):
    out: str = ""
    global_batch_size: int = 2
    micro_batch_size: int = 1


def main(cfg: Config) -> None:
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    from accel_ddp import phases
    from accel_ddp.engine.losses import GradCache
    from accel_ddp.engine.step import train_step
    from accel_ddp.engine.step_times import measure_steps, sync_at_broadcast

    accelerator = accel_ddp.start(cfg)
    is_slow = accelerator.num_processes > 1 and accelerator.is_last_process

    class Sleeping(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            time.sleep(BACKWARD)
            return gradient

    class Model(nn.Module):
        def __init__(self, has_unused: bool, recomputes: bool):
            super().__init__()
            self.layer, self.recomputes = nn.Linear(8, 8), recomputes
            if has_unused:
                self.unused = nn.Linear(8, 8)

        def inner(self, x):
            time.sleep(FORWARD + SLOWER * is_slow)
            return self.layer(Sleeping.apply(x))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x)

    squares = lambda rows, keys: rows.square().sum(-1)
    cache = GradCache(lambda model, batch: model(batch["x"]), lambda batch: torch.arange(len(batch["x"])), squares)
    plain, whole = base.Task(), SimpleNamespace(terms=cache.terms, prepare=cache.prepare, whole_batch=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    # name: micro-batches, task, unused parameter, gradient checkpointing, scaler
    cases = {
        "plain": (1, plain, False, False, None),
        "accumulation": (3, plain, False, False, None),
        "whole batch": (1, whole, False, False, None),
        "whole batch in parts": (2, whole, False, False, None),
        "unused": (2, plain, True, False, None),
        "checkpointing": (2, plain, False, True, None),
        "scaler": (2, plain, False, False, scaler),
    }
    measured = {}
    for name, (count, task, has_unused, recomputes, scaler) in cases.items():
        model = Model(has_unused, recomputes)
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        optimizer.register_step_pre_hook(lambda *_: time.sleep(OPTIMIZER))
        accelerator.scaler = scaler
        if scaler:  # Accelerate does the same with fp16, which it uses on GPUs only
            accelerator.unscale_gradients = scaler.unscale_
        accelerator.ddp_handler.find_unused_parameters = has_unused
        terms, _ = accel_ddp.prepare(accelerator, cfg, task, model, optimizer)
        sync_at_broadcast(terms)
        rows, times = [], measure_steps(accelerator.device)
        with phases.HERE.listening(times):
            for step in range(STEPS + 1):
                with phases.phase(phases.DATA):
                    time.sleep(DATA)
                    batches = [torch.ones(2, 8, requires_grad=True) for _ in range(count)]
                    batches = [{"x": batch} for batch in batches] if task is whole else batches
                train_step(accelerator, cfg, terms, optimizer, batches)
                rows.append((time.perf_counter(), times.end_step(step + 1)[1:], time.perf_counter()))
        # of each step: the least and the most that its wall time can be, and its parts
        measured[name] = [
            [b_before - a_after, b_after - a_before, *(b - a for a, b in zip(a_parts, b_parts))]
            for (a_before, a_parts, a_after), (b_before, b_parts, b_after) in itertools.pairwise(rows)
        ]
    (Path(cfg.out) / f"{accelerator.process_index}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    run(Config, main)
