"""The state of a model and an optimizer as named tensors."""

import copy
import hashlib
import math
import platform
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
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
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in ("accel_ddp", "torch", "accelerate", "transformers", "numpy", "triton"):  # triton compiles kernels on GPUs
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


# NAME/ema is the average of a weight, and NAME/outer its momentum over local workers. They are stored among the optimizer's tensors.
# NAME/KEY@3 belongs to the optimizer of the local worker 3. NAME/group.KEY is of the optimizer's group that has the parameter.
EMA, OUTER, GROUP = "ema", "outer", "group."
# Values of groups that do not change in place, but are no numbers.
CONSTANTS = (
    torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic, Enum, FunctionType, BuiltinFunctionType, type
)  # fmt: skip

Options = list[dict[str, Any]]


def options_of(optimizer: torch.optim.Optimizer) -> Options:
    """What differs later is state. UserError for objects, which may change unseen, and state outside groups and parameters."""
    if more := [key for key in optimizer.state_dict() if key not in ("state", "param_groups")]:
        raise UserError(f"The optimizer {type(optimizer).__name__} has state that a checkpoint cannot store: {', '.join(more)}.")
    groups = [{key: value for key, value in group.items() if key not in ("params", "lr")} for group in optimizer.param_groups]
    for key, value in (item for group in groups for item in group.items()):
        if not all(isinstance(one, (Tensor, *CONSTANTS)) for one in (value if isinstance(value, list | tuple) else [value])):
            _as_json(value, optimizer, "in a parameter group", key)
    return copy.deepcopy(groups)


def _as_json(value: Any, optimizer: torch.optim.Optimizer, place: str, key: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) in (list, tuple):
        values = [_as_json(one, optimizer, place, key) for one in value]
        return values if isinstance(value, list) else {"tuple": values}
    raise UserError(
        f"The optimizer {type(optimizer).__name__} stores a {type(value).__name__} {place} ({key}). A checkpoint can store tensors, "
        "numbers and strings, and lists and tuples of numbers and strings only."
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(_from_json(value["tuple"]))
    return [*map(_from_json, value)] if isinstance(value, list) else value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(local(one), local(other))
    return type(one) is type(other) and bool(one == other)


def capture(
    model: nn.Module, optimizer: torch.optim.Optimizer, built: Options, suffix: str = ""
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's tensors and its other values, by the names of parameters with `suffix`.

    Names are stable, while the parameter groups of an optimizer may change, so each parameter has what differs in its group from
    `options_of` the optimizer when it was `built`. Tensors may be spread over ranks. An optimizer whose state has tensor subclasses
    converts it to plain tensors with its method `to_plain`, and back with `from_plain`.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    if others := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        reason = f"has state of no parameter, which cannot be stored: {others[0]!r}"
        raise UserError(f"The optimizer {type(optimizer).__name__} {reason}.")
    to_plain = getattr(optimizer, "to_plain", dict)
    of_groups = [
        {f"{GROUP}{key}": value for key, value in group.items()
         if key not in ("params", "lr") and not (key in options and _is_same(value, options[key]))}
        for group, options in zip(optimizer.param_groups, built)
    ]  # fmt: skip
    of_parameters = [of_group for of_group, group in zip(of_groups, optimizer.param_groups) for _ in group["params"]]
    for i, (parameter, of_group) in enumerate(zip(parameters(optimizer), of_parameters)):
        name = names.get(id(parameter), f"#{i}")
        for key, value in {**to_plain(optimizer.state.get(parameter, {})), **of_group}.items():
            if isinstance(value, Tensor):
                is_own = value.shape != parameter.shape if isinstance(value, DTensor) else value.numel() > 1
                if isinstance(parameter, DTensor) and is_own:
                    raise UserError(
                        f"The optimizer {type(optimizer).__name__} stores a tensor of its own for the part of a parameter that a "
                        f"rank holds ({key}). A checkpoint of a sharded run can store it only if it is a DTensor of the shape of the "
                        "parameter. Train with DDP: accelerate_configs/1node.yaml or 2node.yaml."
                    )
                tensors[f"{name}/{key}{suffix}"] = value
            else:
                place = "in a parameter group" if key.startswith(GROUP) else "for each parameter"
                plain = _as_json(value, optimizer, place, key.removeprefix(GROUP))
                values.setdefault(f"{name}{suffix}", {})[key] = plain
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
    lines = [f"{name} is only in the checkpoint" for name in there if name not in ours]
    lines += [f"{name} is only in the model" for name in ours if name not in there]
    lines += [
        f"{name} is {ours[name]} in the model and {there[name]} in the checkpoint"
        for name in ours if name in there and tuple(ours[name]) != tuple(there[name])
    ]  # fmt: skip
    if lines:
        instead = "Use the --model and options of that run"
        raise UserError(f"--resume: {path} belongs to another model: {listed(lines, separator='; ')}. {instead}.")


def restore(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, dict[str, Any]]) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    from_plain = getattr(optimizer, "from_plain", lambda plain, parameter: plain)
    every = [state.get(names.get(id(p), f"#{i}"), {}) for i, p in enumerate(parameters(optimizer))]
    own = [{key: _from_json(value) for key, value in one.items() if not key.startswith(GROUP)} for one in every]
    found = {i: from_plain(plain, p) for i, (plain, p) in enumerate(zip(own, parameters(optimizer))) if plain}
    rest = iter(every)
    for group in optimizer.param_groups:
        for one in [next(rest) for _ in group["params"]]:
            group |= {key.removeprefix(GROUP): _from_json(value) for key, value in one.items() if key.startswith(GROUP)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": found})
    for i, p in enumerate(parameters(optimizer)):  # torch has given floating-point state the type of the parameter
        for key, value in found.get(i, {}).items():
            if isinstance(value, Tensor) and (loaded := optimizer.state[p][key]).dtype != value.dtype:
                optimizer.state[p][key] = value.to(loaded.device)
