"""Fit a linear map to noisy data with --comm_hook, and write the losses and the gradients after their all-reduce to OUT."""

from dataclasses import dataclass

import base

import accel_ddp
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(base.Config):
    global_batch_size: int = 64
    micro_batch_size: int = 32
    steps: int = 250
    optimizer: str = "sgd"
    lr: float = 0.3  # with 0.5 or more, powersgd may diverge
    lr_schedule: str = "constant"
    max_grad_norm: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0
    save_every: int = 10**9
    tf32: bool = False
    num_workers: int = 0


def main(cfg: Config) -> None:
    import torch
    from torch import nn

    accelerator = accel_ddp.start(cfg)
    generator = torch.Generator().manual_seed(0)
    inputs, noise = torch.randn(1024, 32, generator=generator), 0.3 * torch.randn(1024, 32, generator=generator)
    targets = inputs @ torch.randn(32, 32, generator=generator) / 32**0.5 + noise
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    optimizer = accel_ddp.optim.build(model, cfg)
    losses, gradients = [], []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(model.weight.grad.clone().cpu()))
    hook = accel_ddp.hooks.Hook()
    hook.on_update = lambda numbers, pace: losses.append(numbers.loss)
    accel_ddp.fit(
        accelerator,
        cfg,
        task=base.Task(lambda model, batch: (model(batch[0]) - batch[1]).square().mean(1)),
        model=model,
        optimizer=optimizer,
        train=accel_ddp.TrainBatches(list(zip(inputs, targets)), lambda rows: tuple(map(torch.stack, zip(*rows)))),
        hooks=[hook],
    )
    if accelerator.is_main_process:
        torch.save({"losses": losses, "gradients": torch.stack(gradients)}, cfg.out)


if __name__ == "__main__":
    run(Config, main)
