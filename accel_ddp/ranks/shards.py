"""What this rank holds of a tensor. Every rank holds all of an ordinary tensor."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from accel_ddp import compat


def is_sharded(model: nn.Module) -> bool:
    """Return whether the parameters of a model are spread over ranks."""
    return isinstance(model, FSDPModule) or any(isinstance(p, DTensor) for p in model.parameters())


def class_name(module: nn.Module) -> str:
    """Return the name of the class that a module had before it was sharded. `fully_shard` replaces it by a subclass."""
    return type(module).__name__.removeprefix("FSDP")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds. It shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor. For a tensor that is spread over ranks, this is a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def region(tensor: Tensor) -> tuple[list[int], list[int]]:
    """Return the offsets and the lengths, in each dimension, of the part that this rank holds."""
    if not isinstance(tensor, DTensor):
        return [0] * tensor.dim(), [*tensor.shape]
    return compat.region_of(tensor)


def is_first_copy(tensor: Tensor) -> bool:
    """Return whether this rank is the first one that holds this part. Of all copies, only this one needs to be saved."""
    if not isinstance(tensor, DTensor):
        return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    place = tensor.device_mesh.get_coordinate()
    return all(at == 0 for at, placement in zip(place, tensor.placements) if isinstance(placement, Replicate))


def sharded_like(part: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of which this rank holds `part`, spread over ranks like another one of the same shape."""
    return compat.dtensor_like(part, like) if isinstance(like, DTensor) else part
