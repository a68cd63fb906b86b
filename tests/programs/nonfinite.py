"""Train with steps whose loss or gradients are not finite, and write the results to OUT.

Each result is learned twice: by `fit` with --on_nonfinite, and by a plain loop that never computes these steps.
With --bad_from, only train: all steps from this one on have a loss that is not finite on the last rank.
"""

import dataclasses
from dataclasses import dataclass

import base
import torch
from torch import nn

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.entry import run
from accel_ddp.ranks.agreement import gather_everywhere
from accel_ddp.training import optim

BAD = {0: "data", 3: "constant", 4: "gradient", 5: "data"}  # what is not finite in these steps


@dataclass(kw_only=True)
class Config(base.Config):
    steps: int = 9
    bad_from: int = option(-1, "first step with a loss that is not finite", affects_result=False)


class Rough(torch.optim.Optimizer):
    """An optimizer of a user, which has a step counter and a momentum, and no fused kernel."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state["average"] = 0.9 * state.get("average", 0) + p.grad
                p -= group["lr"] / state["step"] * (state["average"] + 0.1 * p)


class Task:
    """It counts steps and not calls, because the first update on several ranks has one more call."""

    def __init__(self, accelerator, bad):
        self.is_last, self.bad, self.steps = accelerator.is_last_process, bad, 0

    def prepare(self, *_):
        self.steps += torch.is_grad_enabled()  # not in the check before the first step

    def terms(self, model, batch, team):
        kind = self.bad.get(self.steps - 1) if self.is_last else None
        loss = model(batch * float("nan") if kind == "data" else batch).square().sum(1)
        if kind == "constant":
            loss = loss + float("inf")  # its gradient is finite
        if kind == "gradient":
            loss = loss + (loss * 0).sqrt()  # is finite, and its gradient is not
        return {"loss": loss}


def new_model(has_norm: bool, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *([nn.BatchNorm1d(8)] * has_norm), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def new_optimizer(model, cfg, name):
    if name == "own":
        return Rough(model.parameters(), cfg.lr)
    if name == "not fused":
        return torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    return optim.build(model, dataclasses.replace(cfg, optimizer=name))


def state_of(model, optimizer) -> dict:
    state = getattr(optimizer, "optimizer", optimizer).state_dict()["state"]
    return {
        "weights": {name: value.detach().cpu().clone() for name, value in model.state_dict().items()},
        "optimizer": {f"{i} {name}": torch.as_tensor(v).cpu().clone() for i, s in state.items() for name, v in s.items()},
    }


def both_ways(accelerator, cfg, name, has_norm=True, dtype=torch.float64, bad=BAD, **changes) -> dict:
    """Return what `fit` and the plain loop have learned, and the error of `fit`."""
    cfg = dataclasses.replace(cfg, output_dir=f"{cfg.output_dir}_{name}_{has_norm}_{dtype}_{len(changes)}", **changes)
    generator = torch.Generator().manual_seed(1)
    data = accel_ddp.TrainBatches(list(torch.randn(64, 8, generator=generator, dtype=dtype)), torch.stack)
    model, error = new_model(has_norm, dtype), ""
    optimizer = new_optimizer(model, cfg, name)
    try:
        accel_ddp.fit(
            accelerator, cfg, task=Task(accelerator, bad), model=model, optimizer=optimizer, train=data, speedups=None
        )  # fmt: skip
    except accel_ddp.UserError as raised:
        error = str(raised)
    found = {"fit": state_of(model, optimizer), "error": error}

    model = new_model(has_norm, dtype)
    prepared, optimizer = accel_ddp.prepare(accelerator, cfg, Task(accelerator, {}), model, new_optimizer(model, cfg, name))
    updates = data.starting_at(0, accelerator, cfg)
    last = min(bad) if cfg.on_nonfinite == "stop" else cfg.steps
    prepared.train()
    for step in range(last):
        batches = next(updates)
        if step not in bad:
            optim.set_lr(optimizer, optim.lr_at(step, cfg, cfg.steps))
            seed = accel_ddp.seeds.mixed(cfg.seed, "step", step)
            accel_ddp.train_step(accelerator, cfg, prepared, optimizer, batches, seed)
    found["loop"] = state_of(model, optimizer)
    return found


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    if cfg.bad_from >= 0:
        bad = dict.fromkeys(range(cfg.bad_from, cfg.steps), "constant")
        model, task = new_model(False, torch.float64), Task(accelerator, bad)
        task.steps = cfg.stop_after if cfg.resume else 0
        base.fit(accelerator, cfg, model, list(torch.ones(64, 8, dtype=torch.float64)), task=task, speedups=None)
        return
    results = {}
    for name in ("adamw", "sgd", "not fused", "own"):
        results[name] = both_ways(accelerator, cfg, name, on_nonfinite="skip")
    results["without norm"] = both_ways(accelerator, cfg, "adamw", has_norm=False, on_nonfinite="skip")
    for kind in ("data", "constant", "gradient"):
        results[f"stop {kind}"] = both_ways(accelerator, cfg, "sgd", bad={4: kind}, on_nonfinite="stop", project=kind)
    if accelerator.scaler is None:
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler(accelerator.device.type, init_scale=4.0), True
        accelerator.state._mixed_precision = "fp16"
    for name in ("sgd", "not fused"):
        more = {"has_norm": False, "dtype": torch.float32, "on_nonfinite": "skip"}
        results[f"scaler {name}"] = both_ways(accelerator, cfg, name, bad={0: "gradient", 4: "constant"}, **more)
    everywhere = gather_everywhere({name: result["fit"]["weights"] for name, result in results.items()})
    if accelerator.is_main_process:
        torch.save({**results, "of ranks": everywhere}, cfg.out)


if __name__ == "__main__":
    run(Config, main)
