"""The optimizer, frozen parameters, and a learning-rate schedule that is a function of the step."""

import math

import torch
from torch import nn

from accel_ddp.config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.ranks.process import process


def build(model: nn.Module, cfg: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the options. Only matrices get weight decay. It is fused if the device supports that.

    The parameters of `--freeze` are frozen first.
    """
    freeze(model, cfg.freeze)
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if cfg.optimizer == "sgd":
        fused = _can_be_fused(trainable) and not process.sharding  # torch has no fused SGD for sharded parameters
        return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, fused=fused)
    return torch.optim.AdamW(groups, lr=cfg.lr, fused=_can_be_fused(trainable))


def freeze(model: nn.Module, words: tuple[str, ...]) -> None:
    """Freeze the parameters whose names contain one of the words."""
    names = [name for name, _ in model.named_parameters()]
    for word in words:
        if not any(word in name for name in names):
            parts = sorted({".".join(name.split(".")[:2]) for name in names})
            raise UserError(f"--freeze {word}: no parameter has this in its name. There are: {', '.join(parts[:20])}.")
    for name, parameter in model.named_parameters():
        if any(word in name for word in words):
            parameter.requires_grad_(False)
    if words and not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"--freeze {' '.join(words)}: leaves nothing to train. Freeze fewer parameters.")


def words_to_freeze(unused: list[str], used: list[str]) -> list[str]:
    """Return the shortest beginnings of the names `unused` that `freeze` finds in no name of `used`, or [] if there are none.

    There are none if one of these names is a part of another name, for example head.weight of base.head.weight.
    """
    words: list[str] = []
    for name in unused:
        if any(word in name for word in words):
            continue
        ends = [i for i, letter in enumerate(name) if letter == "."]
        beginnings = [name[:i] for end in ends for i in (end, end + 1)] + [name]  # with the dot: layer.1. is not in layer.10.
        word = next((word for word in beginnings if not any(word in other for other in used)), None)
        if word is None:
            return []
        words.append(word)
    return words


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
