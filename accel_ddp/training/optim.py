"""The optimizer, and a learning-rate schedule that is a function of the step."""

import math

import torch
from torch import nn

from accel_ddp.config import TrainConfig


def build(model: nn.Module, cfg: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the options. Only matrices get weight decay. It is fused if the device supports that."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if cfg.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, fused=_can_be_fused(trainable))
    return torch.optim.AdamW(groups, lr=cfg.lr, fused=_can_be_fused(trainable))


def _can_be_fused(parameters: list[nn.Parameter]) -> bool:
    # On a CPU the fused kernel is as exact and about twice as fast. It needs floating-point tensors.
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)


def lr_at(step: int, cfg: TrainConfig, total_steps: int) -> float:
    """Return the learning rate of update `step` (from 0): a linear warm-up, then the schedule down to 0 at the end."""
    warmup = cfg.warmup_steps or math.ceil(cfg.warmup_ratio * total_steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    if cfg.lr_schedule == "linear":
        return cfg.lr * max(0.0, 1 - done)
    if cfg.lr_schedule == "cosine":
        return cfg.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return cfg.lr


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
