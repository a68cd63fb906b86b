"""The state of a run as named tensors: how it is taken from a model and an optimizer, and how it is put back."""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_ddp.errors import UserError


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in ("accel_ddp", "torch", "accelerate", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def taken(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Weights, the optimizer's tensors and its other values, by the names of parameters: groups may change, names do not."""
    weights = kept(model)
    names = {id(p): name for name, p in model.named_parameters()}
    tensors, values = {}, {}
    for i, parameter in enumerate(parameters(optimizer)):
        name = names.get(id(parameter), f"#{i}")
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value
            elif value is None or isinstance(value, (bool, int, float, str)):
                values.setdefault(name, {})[key] = value
            else:
                raise UserError(
                    f"The optimizer {type(optimizer).__name__} keeps a {type(value).__name__} for each parameter ({key}); a "
                    "checkpoint holds tensors, numbers and words."
                )
    return weights, tensors, values


def has_adapters(model: nn.Module) -> bool:
    """Whether peft put adapters into it, so that the weights below them never change."""
    return hasattr(model, "peft_config")


def kept(model: nn.Module) -> dict[str, Tensor]:
    """What of a model is saved: everything; under adapters only what is trained, and buffers, which may change too."""
    weights = unique(model.state_dict())
    if not has_adapters(model):
        return weights
    changing = {name for name, p in model.named_parameters() if p.requires_grad} | {name for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in weights.items() if name in changing}


def frozen(model: nn.Module) -> str:
    """A digest of what is not saved, or nothing: adapters go on only above the weights that they were trained on.

    Of 64 values of each tensor, so that it costs milliseconds: it tells models apart, not a flipped bit.
    """
    if not has_adapters(model):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for name, p in model.named_parameters():
        if not p.requires_grad and "original_module" not in name:  # of a head that was made anew: random, and not used
            some = p.detach().reshape(-1)[:: max(1, p.numel() // 64)].cpu().contiguous()
            digest.update(f"{name} {list(p.shape)} {p.dtype}".encode() + some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def unique(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those that share their memory (tied weights) once, under their first name."""
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


def described(piece: Any) -> tuple[list[int], torch.dtype]:
    return [*piece.get_shape()], _KINDS[piece.get_dtype()]


def refuse_another_model(ours: dict[str, Any], there: dict[str, Any], path: Path) -> None:
    lines = [f"{name} is only in the checkpoint" for name in there if name not in ours]
    lines += [f"{name} is only in the model" for name in ours if name not in there]
    lines += [
        f"{name} is {ours[name]} in the model and {there[name]} in the checkpoint"
        for name in ours if name in there and tuple(ours[name]) != tuple(there[name])
    ]  # fmt: skip
    if lines:
        more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise UserError(f"--resume: {path} is of another model: {'; '.join(lines[:3])}{more}. Give its --model and options.")


def put_back(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Give the optimizer what it had for each parameter. Its options stay those of the command line."""
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names.get(id(p), f"#{i}") for i, p in enumerate(parameters(optimizer))]
    kept = {i: state[name] for i, name in enumerate(order) if name in state}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": kept})
