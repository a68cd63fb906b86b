"""Train on several ranks, and let the last rank go its own way after --at steps.

With --how lr its optimizer has another learning rate, with update it skips one step of the optimizer, with backward it skips one
backward pass, and with bit one bit of a weight changes. With evaluation, each evaluation changes weights on all ranks. Buffers and
frozen parameters differ between ranks in every run.
"""

import os
import signal
from dataclasses import dataclass

import base
import torch
from torch import nn

import accel_ddp
from accel_ddp.config.option_values import Direction
from accel_ddp.config.options import option
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.hook import Hook
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(TrainConfig):
    how: str = option("", "lr, update, backward, bit or evaluation", affects_result=False)
    at: int = option(5, "step after which the last rank differs", affects_result=False)
    sigterm_at: int = option(0, "step after which this process sends SIGTERM to itself", affects_result=False)
    steps: int = 12
    save_every: int = 6
    eval_every: int = 100
    eval_first: bool = False
    keep_last: int = 9
    global_batch_size: int = 6
    micro_batch_size: int = 1
    lr: float = 0.01
    log_every: int = 1
    broadcast_buffers: str = "off"

    def metric_directions(self) -> dict[str, Direction]:
        return {"progress": "max"}


class Model(nn.Module):
    """Parameters of several types and shapes, one of which is empty, and batch norm."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.body = nn.Linear(4, 5)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.head = nn.Linear(5, 1).double()

    def forward(self, x):
        self.norm(torch.cat([x, x + 1]))
        hidden = self.body(x + 0 * self.frozen(x)).tanh() * self.scale + self.empty.sum()
        return self.head(hidden.double())


class Fault(Hook):
    """Change the last rank after step `cfg.at`."""

    def __init__(self, accelerator, cfg, model, optimizer):
        self.is_last, self.cfg, self.model, self.optimizer = accelerator.is_last_process, cfg, model, optimizer

    def on_start(self, step, total_steps, evaluations):
        self.model.frozen.weight.data += self.is_last
        return False

    def on_update(self, numbers, throughput):
        if numbers.step == self.cfg.sigterm_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if numbers.step != self.cfg.at or not self.is_last:
            return
        if self.cfg.how == "bit":
            bits = self.model.body.weight.data.view(-1).view(torch.int32)
            bits[7] ^= 1  # the lowest one of a number
        if self.cfg.how == "lr":
            self.optimizer.register_step_pre_hook(lambda optimizer, *_: accel_ddp.optim.set_lr(optimizer, 0.02) and None)
        if self.cfg.how == "update":
            real = self.optimizer.step

            def skip_once():
                self.optimizer.step = real

            self.optimizer.step = skip_once


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    torch.manual_seed(0)
    model = Model().to(accelerator.device)
    optimizer = accel_ddp.optim.build(model, cfg)
    evaluated: list[int] = []

    def losses(model, batch):
        loss = (model(batch) - 1).square().sum(1)
        losses.calls += torch.is_grad_enabled()  # not in the check before the first step
        micro_batches = cfg.split(accelerator.num_processes)[1]
        if cfg.how == "backward" and accelerator.is_last_process and losses.calls == (cfg.at + 1) * micro_batches:
            loss = loss.detach().requires_grad_()
        return loss

    def evaluate(model):
        evaluated.append(0)
        if cfg.how == "evaluation":
            model.body.weight.data /= 2
        return {"progress": float(len(evaluated))}  # each evaluation is the best one

    losses.calls = 0
    accel_ddp.fit(
        accelerator, cfg, task=base.Task(losses), model=model, optimizer=optimizer,
        train=accel_ddp.TrainBatches(list(torch.randn(64, 4)), torch.stack), test=evaluate,
        hooks=[*accel_ddp.hooks.standard(accelerator, cfg), Fault(accelerator, cfg, model, optimizer)],
    )  # fmt: skip


if __name__ == "__main__":
    run(Config, main)
