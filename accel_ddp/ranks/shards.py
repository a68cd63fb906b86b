"""What this rank holds of a tensor. Every rank holds all of an ordinary tensor."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


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
    lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [*offsets], [*lengths]


def is_first_copy(tensor: Tensor) -> bool:
    """Return whether this rank is the first one that holds this part. Of all copies, only this one needs to be saved."""
    if not isinstance(tensor, DTensor):
        return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    place = tensor.device_mesh.get_coordinate()
    return all(at == 0 for at, placement in zip(place, tensor.placements) if isinstance(placement, Replicate))


def sharded_like(part: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of which this rank holds `part`, spread over ranks like another one of the same shape."""
    if not isinstance(like, DTensor):
        return part
    # `DTensor.from_local` would move a part that is offloaded to host memory to the GPU.
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=TensorMeta(like.shape, like.stride(), part.dtype))
    return DTensor(part, spec, requires_grad=False)
