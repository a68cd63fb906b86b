"""The state of a model and an optimizer as named tensors."""

import hashlib
import math
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_ddp import compat
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import gather_everywhere
from accel_ddp.ranks.process import this_rank
from accel_ddp.ranks.shards import is_first_copy, is_sharded, local, region
from accel_ddp.text import listed


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and the packages that affect results."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in ("accel_ddp", "torch", "accelerate", "transformers", "numpy", "triton"):  # triton compiles kernels on GPUs
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


# NAME/ema is the average of a weight, and NAME/outer its momentum over local workers. They are stored among the optimizer's tensors.
# NAME/KEY@3 belongs to the optimizer of the local worker 3.
EMA, OUTER = "ema", "outer"


def capture(model: nn.Module, optimizer: torch.optim.Optimizer, suffix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's tensors and its other values, by the names of parameters with `suffix`.

    Names are stable, while the parameter groups of an optimizer may change. Tensors may be spread over ranks. An optimizer whose
    state has tensor subclasses converts it to plain tensors with its method `to_plain`, and back with `from_plain`.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    to_plain = getattr(optimizer, "to_plain", dict)
    for i, parameter in enumerate(parameters(optimizer)):
        name = names.get(id(parameter), f"#{i}")
        for key, value in to_plain(optimizer.state.get(parameter, {})).items():
            if isinstance(value, Tensor):
                if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
                    raise UserError(
                        f"The optimizer {type(optimizer).__name__} stores a tensor of its own for the part of a parameter that a "
                        f"rank holds ({key}). A checkpoint of a sharded run can store it only if it is a DTensor like the parameter."
                    )
                tensors[f"{name}/{key}{suffix}"] = value
            elif value is None or isinstance(value, (bool, int, float, str)):
                values.setdefault(f"{name}{suffix}", {})[key] = value
            else:
                raise UserError(
                    f"The optimizer {type(optimizer).__name__} stores a {type(value).__name__} for each parameter ({key}). A "
                    "checkpoint can store tensors, numbers and strings only."
                )
    return tensors, values


def has_adapters(model: nn.Module) -> bool:
    """Return whether peft has added adapters, so the weights below them never change."""
    return hasattr(model, "peft_config")


def to_save(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that are saved: all of them, or with adapters these, what else is trained, and the buffers."""
    weights = unique(model.state_dict())
    if not has_adapters(model):
        return weights
    changing = {name for name, p in model.named_parameters() if p.requires_grad or _is_of_adapter(name)}
    changing |= {name for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in weights.items() if name in changing}


def _is_of_adapter(name: str) -> bool:
    """Return whether peft has added this parameter, which --freeze may have frozen."""
    return any(part in name for part in (".lora_", ".modules_to_save.", ".trainable_tokens_"))


def digest_of_frozen(model: nn.Module) -> str:
    """Return a digest of the weights below adapters, which are not saved, or "" for a model without adapters.

    It covers 64 values of each tensor and costs milliseconds. It distinguishes models, but does not detect a flipped bit. A sharded
    model has the same digest as the whole model. For a sharded model this is a collective.
    """
    if not has_adapters(model):
        return ""
    frozen = {
        name: p.detach() for name, p in model.named_parameters()
        # The random weights of a new head, which are not used, are no part of it.
        if not p.requires_grad and not _is_of_adapter(name) and "original_module" not in name
    }  # fmt: skip
    sharded = is_sharded(model)
    samples = {name: b"" if sharded and not is_first_copy(p) else _some_values(p) for name, p in frozen.items()}
    shares = gather_everywhere(samples) if sharded else [samples]  # the parts of a tensor are in the order of ranks
    digest = hashlib.blake2b(digest_size=16)
    for name, p in frozen.items():
        digest.update(f"{name} {list(p.shape)} {p.dtype}".encode() + b"".join(share[name] for share in shares))
    return digest.hexdigest()


def _some_values(tensor: Tensor) -> bytes:
    """Return every n-th value of a tensor, about 64 in all, of those that this rank holds."""
    every = max(1, tensor.numel() // 64)
    offsets, _ = region(tensor)
    before = offsets[0] * math.prod(tensor.shape[1:]) if offsets else 0  # values in the rows above this part
    return local(tensor).reshape(-1)[-before % every :: every].cpu().contiguous().view(torch.uint8).numpy().tobytes()


def own_pieces(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of which this rank stores its part. Each part is stored by one rank, and the main rank stores the rest."""
    has_values = lambda tensor: local(tensor).numel() or (not tensor.numel() and this_rank.is_main)
    return {name: tensor for name, tensor in tensors.items() if is_first_copy(tensor) and has_values(tensor)}


def parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def unique(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without duplicates: tied weights, which share memory, appear once, under their first name."""
    seen: set[Any] = set()
    once = {}
    for name, tensor in tensors.items():
        own = local(tensor)
        place: Any = name
        if own.numel():
            place = (own.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        elif tensor.numel():  # this rank has no row of it; the answer must be that of the other ranks
            place = (compat.storage_key(own), tensor.shape)
        if place not in seen:
            seen.add(place)
            once[name] = tensor
    return once


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def check_same_model(ours: dict[str, Any], there: dict[str, Any], path: Path) -> None:
    """Raise UserError if a checkpoint has other tensors than the model."""
    lines = [f"{name} is only in the checkpoint" for name in there if name not in ours]
    lines += [f"{name} is only in the model" for name in ours if name not in there]
    lines += [
        f"{name} is {ours[name]} in the model and {there[name]} in the checkpoint"
        for name in ours if name in there and tuple(ours[name]) != tuple(there[name])
    ]  # fmt: skip
    if lines:
        raise UserError(
            f"--resume: {path} belongs to another model: {listed(lines, separator='; ')}. Use the --model and options of that run."
        )


def restore(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Load the state of each parameter into the optimizer. Learning rate and other options stay as they are."""
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names.get(id(p), f"#{i}") for i, p in enumerate(parameters(optimizer))]
    from_plain = getattr(optimizer, "from_plain", lambda plain, parameter: plain)
    found = {i: from_plain(state[name], p) for i, (name, p) in enumerate(zip(order, parameters(optimizer))) if name in state}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": found})
