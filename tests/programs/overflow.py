"""Train with a loss so steep that float16 gradients overflow until the scaler has reduced its factor.

With --finite_steps, the gradients of all later steps are not finite for any factor. On a CPU, where Accelerate has no fp16, the
program gives the Accelerator a scaler of torch.
"""

from dataclasses import dataclass

import base

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(TrainConfig):
    finite_steps: int = option(-1, "steps of this process with finite gradients; -1: all", affects_result=False)


def main(cfg: Config) -> None:
    import torch

    accelerator = accel_ddp.start(cfg)
    if accelerator.scaler is None:
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu"), True
        accelerator.state._mixed_precision = "fp16"
    model, calls = torch.nn.Linear(8, 8), []

    def losses(model, batch):
        calls.extend([batch] * torch.is_grad_enabled())  # not in the check before the first step
        loss = 100 * model(batch).square().sum(1)
        if 0 <= cfg.finite_steps < len(calls):
            loss = loss + (model(batch).float().sum() * 0).abs().sqrt()  # the square root of 0 has no finite gradient
        return loss

    accel_ddp.fit(
        accelerator,
        cfg,
        task=base.Task(losses),
        model=model,
        optimizer=accel_ddp.optim.build(model, cfg),
        train=accel_ddp.TrainBatches(list(torch.randn(64, 8)), torch.stack),
    )
    if accelerator.is_main_process:
        print("weights are finite" if all(p.isfinite().all() for p in model.parameters()) else "weights are not finite")


if __name__ == "__main__":
    run(Config, main)
