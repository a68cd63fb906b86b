"""Use the public names as a script of a user does. `make types` checks this file with mypy; it is never run.

Each `type: ignore` marks a mistake that mypy must report: an unused one is an error (`warn_unused_ignores`).
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from typing_extensions import assert_type

import accel_ddp
from accel_ddp import TrainBatches, TrainConfig, UserError, fit, parse_config, run, start, together


@dataclass(kw_only=True)
class Config(TrainConfig):
    hidden: int = 16


class Task(accel_ddp.Task):
    def terms(self, model: torch.nn.Module, batch: Any, team: Any) -> dict[str, Any]:
        return {"loss": model(batch["x"]).square()}


def evaluate(model: torch.nn.Module) -> dict[str, float]:
    return {"loss": 0.0}


def main(cfg: Config) -> None:
    accelerator = start(cfg)
    assert_type(accelerator, Accelerator)
    with together("build the model") as facts:
        facts["the model"] = "digest"
        model = torch.nn.Linear(cfg.hidden, 1)
    train = TrainBatches([{"x": 1.0}], torch.utils.data.default_collate)
    optimizer = accel_ddp.optim.build(model, cfg)
    hooks = accel_ddp.hooks.standard(accelerator, cfg)
    outcome = fit(
        accelerator, cfg, task=Task(cfg), model=model, optimizer=optimizer, train=train, test=evaluate, hooks=hooks,
    )  # fmt: skip
    assert_type(outcome.metrics, dict[str, float])


def options() -> Config:
    cfg = parse_config(Config, ["--hidden", "8"])
    assert_type(cfg, Config)
    if cfg.hidden < 1:
        raise UserError(f"--hidden {cfg.hidden}: must be 1 or more.")
    return cfg


def entry() -> NoReturn:
    run(Config, main)


def mistakes(accelerator: Accelerator, cfg: Config) -> None:
    accel_ddp.fitt()  # type: ignore[attr-defined]
    start("config.yaml")  # type: ignore[arg-type]
    fit(accelerator, cfg)  # type: ignore[call-arg]
    Config(hiden=8)  # type: ignore[call-arg]
    Config(comm_hook="int8")  # type: ignore[arg-type]
    run(Config, evaluate)  # type: ignore[arg-type]
