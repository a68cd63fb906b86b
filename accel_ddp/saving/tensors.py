"""Converts the state of a model and an optimizer to named tensors and back."""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_ddp.errors import UserError
from accel_ddp.saving.format import OPTIMIZER


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and the packages that affect results."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in ("accel_ddp", "torch", "accelerate", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


EMA = "ema"  # NAME/ema is the average of a weight; it is stored among the optimizer's tensors


def capture(
    model: nn.Module, optimizer: torch.optim.Optimizer, averages: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Return weights, the optimizer's tensors with the averages of weights, and its other values, by the names of parameters.

    Names are stable, while the parameter groups of an optimizer may change. An optimizer whose state has tensor subclasses
    converts it to plain tensors with its method `to_plain`, and back with `from_plain`.
    """
    weights = to_save(model)
    names = {id(p): name for name, p in model.named_parameters()}
    tensors, values = {f"{name}/{EMA}": average for name, average in averages.items()}, {}
    to_plain = getattr(optimizer, "to_plain", dict)
    for i, parameter in enumerate(parameters(optimizer)):
        name = names.get(id(parameter), f"#{i}")
        for key, value in to_plain(optimizer.state.get(parameter, {})).items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value
            elif value is None or isinstance(value, (bool, int, float, str)):
                values.setdefault(name, {})[key] = value
            else:
                raise UserError(
                    f"The optimizer {type(optimizer).__name__} stores a {type(value).__name__} for each parameter ({key}). A "
                    "checkpoint can store tensors, numbers and strings only."
                )
    return weights, tensors, values


def read_averages(path: Path) -> dict[str, Tensor]:
    """Return the averages of weights in a checkpoint, or {} if its run had no `--ema_decay`."""
    from safetensors import safe_open

    with safe_open(path / OPTIMIZER, framework="pt") as file:
        names = [name for name in file.keys() if name.endswith(f"/{EMA}")]  # noqa: SIM118
        return {name.removesuffix(f"/{EMA}"): file.get_tensor(name) for name in names}


def has_adapters(model: nn.Module) -> bool:
    """Return whether peft has added adapters, so that the weights below them never change."""
    return hasattr(model, "peft_config")


def to_save(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that are saved: all of them, or under adapters the trained ones and the buffers."""
    weights = unique(model.state_dict())
    if not has_adapters(model):
        return weights
    changing = {name for name, p in model.named_parameters() if p.requires_grad} | {name for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in weights.items() if name in changing}


def digest_of_frozen(model: nn.Module) -> str:
    """Return a digest of the weights below adapters, which are not saved, or "" for a model without adapters.

    It covers 64 values of each tensor and costs milliseconds. It distinguishes models, but does not detect a flipped bit.
    """
    if not has_adapters(model):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for name, p in model.named_parameters():
        if not p.requires_grad and "original_module" not in name:  # the random weights of a new head, which are not used
            some = p.detach().reshape(-1)[:: max(1, p.numel() // 64)].cpu().contiguous()
            digest.update(f"{name} {list(p.shape)} {p.dtype}".encode() + some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def unique(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without duplicates: tied weights, which share memory, appear once, under their first name."""
    seen: set[Any] = set()
    once = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device) if tensor.numel() else name
        if place not in seen:
            seen.add(place)
            once[name] = tensor
    return once


_KINDS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def shape_and_dtype(piece: Any) -> tuple[list[int], torch.dtype]:
    """Return shape and dtype of a tensor in an open safetensors file without reading the tensor."""
    return [*piece.get_shape()], _KINDS[piece.get_dtype()]


def check_same_model(ours: dict[str, Any], there: dict[str, Any], path: Path) -> None:
    """Raise UserError if a checkpoint has other tensors than the model."""
    lines = [f"{name} is only in the checkpoint" for name in there if name not in ours]
    lines += [f"{name} is only in the model" for name in ours if name not in there]
    lines += [
        f"{name} is {ours[name]} in the model and {there[name]} in the checkpoint"
        for name in ours if name in there and tuple(ours[name]) != tuple(there[name])
    ]  # fmt: skip
    if lines:
        more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise UserError(
            f"--resume: {path} belongs to another model: {'; '.join(lines[:3])}{more}. Use the --model and options of that run."
        )


def restore(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Load the state of each parameter into the optimizer. Learning rate and other options stay as they are."""
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names.get(id(p), f"#{i}") for i, p in enumerate(parameters(optimizer))]
    from_plain = getattr(optimizer, "from_plain", lambda plain, parameter: plain)
    found = {i: from_plain(state[name], p) for i, (name, p) in enumerate(zip(order, parameters(optimizer))) if name in state}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": found})
