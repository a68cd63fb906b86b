"""Hands model and optimizer to Accelerate, which wraps the model with DDP, or shards the model."""

from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp.errors import UserError
from accel_ddp.ranks.process import process
from accel_ddp.sharding import apply
from accel_ddp.sharding.tensors import is_sharded

if TYPE_CHECKING:
    from accel_ddp.config import TrainConfig


def prepare(
    accelerator: Accelerator, cfg: "TrainConfig", model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer for `update`: wrapped with DDP, or sharded if the accelerate config asks for that."""
    if process.sharding is None:
        return accelerator.prepare(model, optimizer)
    if not is_sharded(model):  # `models.prepare` shards a model of transformers before its weights are loaded
        apply.wrap(model, optimizer, process.sharding, *sharding_options(accelerator, cfg))
    apply.reshard(model)
    known = set(model.parameters())
    if not all(p in known for group in optimizer.param_groups for p in group["params"]):
        raise UserError(
            "The optimizer has parameters that are not those of the sharded model, and would not train it. Build the optimizer with "
            "accel_ddp.optim.build(model, cfg) after accel_ddp.models.prepare."
        )
    # This adds autocast and nothing else.
    return accelerator.prepare_model(model, device_placement=False, evaluation_mode=True), optimizer


def sharding_options(accelerator: Accelerator, cfg: "TrainConfig") -> tuple[torch.device, str, torch.dtype]:
    """Return device, precision and the dtype in which gradients are summed, the arguments of `shard`."""
    reduce_dtype = torch.bfloat16 if cfg.comm_hook == "bf16" else torch.float32
    return accelerator.device, accelerator.mixed_precision, reduce_dtype
