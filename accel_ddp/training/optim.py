"""The optimizer, frozen parameters, and a learning-rate schedule that is a function of the step."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from accel_ddp import optimizer_options
from accel_ddp.config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import print_on_main
from accel_ddp.ranks.process import process
from accel_ddp.sharding.apply import reshard
from accel_ddp.training import adamw8bit, muon

LEAST_LR_OF_ADAFACTOR = 1e-4


def build(model: nn.Module, cfg: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the options. Only matrices get weight decay. It is fused if the device supports that.

    The parameters of `--freeze` are frozen first.
    """
    reshard(model)  # a forward pass without a backward pass leaves weights gathered, which are no parameters of the optimizer
    freeze(model, cfg.freeze)
    groups = _groups(model, cfg)
    fused = _can_be_fused([p for group in groups for p in group["params"]])
    adam: dict[str, Any] = {"lr": cfg.lr, "betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps}
    if cfg.optimizer == "sgd":
        fused = fused and process.sharding is None  # torch has no fused SGD for shards
        return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, fused=fused)
    if cfg.optimizer == "adafactor":
        if cfg.lr < LEAST_LR_OF_ADAFACTOR:
            print_on_main(
                f"--optimizer adafactor --lr {cfg.lr}: Adafactor multiplies the learning rate by the size of the weights, so that the "
                "model will hardly learn. Usual values are from 1e-3 to 1e-2."
            )
        return torch.optim.Adafactor(groups, lr=cfg.lr)
    if cfg.optimizer == "adamw8bit":
        return adamw8bit.build(groups, **adam)
    if cfg.optimizer == "muon":
        return muon.Muon(groups, **adam, fused=fused)
    return torch.optim.AdamW(groups, **adam, fused=fused)


def _groups(model: nn.Module, cfg: TrainConfig) -> list[dict[str, Any]]:
    """Return the groups of trained parameters that have the same learning rate, weight decay and kind of step."""
    rates = _rates_of_parameters(model, cfg)
    hidden = muon.hidden_matrices(model) if cfg.optimizer == "muon" else set()
    if cfg.optimizer == "muon":
        muon.require_hidden(hidden)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in sorted(trainable, key=lambda p: p.ndim < 2):  # matrices first; the order is otherwise that of the model
        rate = rates.get(p, cfg.lr)
        values: dict[str, Any] = {"weight_decay": cfg.weight_decay if p.ndim >= 2 else 0.0, "lr": rate}
        values["lr_ratio"] = rate / cfg.lr if p in rates else 1.0
        if cfg.optimizer == "muon":
            values |= {"is_hidden": True, "momentum": cfg.momentum} if p in hidden else {"is_hidden": False}
        groups.setdefault(tuple(values.values()), {"params": [], **values})["params"].append(p)
    return list(groups.values())


def _rates_of_parameters(model: nn.Module, cfg: TrainConfig) -> dict[nn.Parameter, float]:
    """Return the learning rates of `--lr_of`. Raise UserError for a word that no trained parameter contains."""
    named, rates = dict(model.named_parameters()), {}
    for word, rate in cfg.learning_rates().items():
        found = [p for name, p in named.items() if word in name]
        if not any(p.requires_grad for p in found):
            reason = "these parameters are not trained." if found else f"no parameter has this in its name. {_parts_of(named)}"
            raise UserError(f"--lr_of {word}={rate:g}: {reason}")
        rates |= dict.fromkeys(found, rate)
    return rates


def state_bytes(model: nn.Module, cfg: TrainConfig) -> int:
    """Return how many bytes the optimizer stores for the trained parameters of a model, which may be on the meta device."""
    hidden = muon.hidden_matrices(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum(optimizer_options.state_bytes(cfg, p.shape, p.element_size(), p in hidden) for p in trained)


def freeze(model: nn.Module, words: tuple[str, ...]) -> None:
    """Freeze the parameters whose names contain one of the words."""
    names = [name for name, _ in model.named_parameters()]
    for word in words:
        if not any(word in name for name in names):
            raise UserError(f"--freeze {word}: no parameter has this in its name. {_parts_of(names)}")
    for name, parameter in model.named_parameters():
        if any(word in name for word in words):
            parameter.requires_grad_(False)
    if words and not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"--freeze {' '.join(words)}: leaves nothing to train. Freeze fewer parameters.")


def _parts_of(names: Iterable[str]) -> str:
    parts = sorted({".".join(name.split(".")[:2]) for name in names})
    return f"There are: {', '.join(parts[:20])}."


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
    """Return the learning rate of update `step` (from 0): a linear warm-up, then the schedule down to its minimum at the end."""
    warmup = cfg.warmup_steps or math.ceil(cfg.warmup_ratio * total_steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    left = 1.0
    if cfg.lr_schedule == "linear":
        left = 1 - done
    elif cfg.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    elif cfg.lr_schedule == "wsd":
        left = min(1.0, max(0, total_steps - step) / math.ceil(cfg.decay_ratio * total_steps))
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * left)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group. Those of `--lr_of` keep their ratio to `lr`."""
    for group in optimizer.param_groups:
        own = lr * group.get("lr_ratio", 1.0)
        # torchao compiles its step, and a number would be compiled into it.
        group["lr"] = torch.tensor(own, dtype=torch.float32) if isinstance(group["lr"], torch.Tensor) else own
