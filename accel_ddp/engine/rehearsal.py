"""Forward and backward passes that leave nothing behind, for measurements, for graphs, and for the buckets of DDP."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from accel_ddp.engine.rows import MicroBatch
from accel_ddp.engine.scaler import state_restored
from accel_ddp.engine.terms import Terms, checked


def rehearse(terms: Terms, batch: MicroBatch, with_gradients: bool = True) -> tuple[Tensor | None, ...]:
    """Do a forward and a backward pass that leave nothing behind except caches and columns of the batch. `terms` are `alone()`.

    Return the gradients of trained parameters, none for a sharded model and without `with_gradients`. No parameter gets a gradient:
    DDP counts gradients, and with --static_graph it would not synchronize them any more. For a sharded model this is a collective,
    which sums the gradients as a step does, because they fit into memory only in parts.
    """
    module = terms.model
    with state_restored(module), torch.set_grad_enabled(with_gradients):
        loss = checked(terms.trial(batch), needs_gradient=with_gradients)
        if not with_gradients:
            return ()
        if isinstance(module, FSDPModule):
            loss.backward()
            for parameter in module.parameters():  # the parts, which may not have been the parameters before
                parameter.grad = None
            return ()
        trained = [p for p in module.parameters() if p.requires_grad]
        return torch.autograd.grad(loss, trained, allow_unused=True)


def move_gradients(parameters: Sequence[nn.Parameter], memory: Tensor) -> None:
    """Move the gradients that are stored in `memory` to a copy of it, because `memory` is about to be overwritten."""
    address = memory.untyped_storage().data_ptr()
    held = [p for p in parameters if p.grad is not None and p.grad.untyped_storage().data_ptr() == address]
    if held:
        copy = memory.clone()
        for p in held:
            p.grad = copy.as_strided(p.grad.shape, p.grad.stride(), p.grad.storage_offset())
