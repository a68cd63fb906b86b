"""Forward and backward passes that leave nothing behind, for measurements, for graphs, and for the buckets of DDP."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from accel_ddp.engine.losses import CurrentBatch, LossSum, MicroBatch, WholeBatch, checked
from accel_ddp.engine.scaler import copy_buffers, restore_buffers


def rehearse(
    module: nn.Module, batch: MicroBatch, loss_sum: LossSum | WholeBatch, with_gradients: bool = True
) -> tuple[Tensor | None, ...]:
    """Do a forward and a backward pass that leave nothing behind except caches. `module` is the model without DDP.

    Return the gradients of trained parameters, none for a sharded model and without `with_gradients`. No parameter gets a gradient:
    DDP counts gradients, and with --static_graph it would not synchronize them any more. For a sharded model this is a collective,
    which sums the gradients as a step does, because they fit into memory only in parts.
    """
    with state_restored(module), torch.set_grad_enabled(with_gradients):
        loss = loss_in_trial(module, batch, loss_sum)
        if not with_gradients:
            return ()
        if isinstance(module, FSDPModule):
            loss.backward()
            for parameter in module.parameters():  # the parts, which may not have been the parameters before
                parameter.grad = None
            return ()
        trained = [p for p in module.parameters() if p.requires_grad]
        return torch.autograd.grad(loss, trained, allow_unused=True)


def loss_in_trial(model: nn.Module, batch: MicroBatch, loss_sum: LossSum | WholeBatch, in_plain_order: bool = False) -> Tensor:
    """Return the loss of one micro-batch, or a sum of the same cost if the loss needs the rows of other ranks."""
    with CurrentBatch(batch, in_plain_order):
        is_whole = isinstance(loss_sum, WholeBatch)
        return loss_sum.embed(model, batch).float().sum() if is_whole else checked(loss_sum(model, batch))


@contextlib.contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Restore the gradients and the buffers at the end, such as the running statistics of batch norm."""
    buffers, gradients = copy_buffers(model), [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        restore_buffers(model, buffers)


def move_gradients(parameters: Sequence[nn.Parameter], memory: Tensor) -> None:
    """Move the gradients that are stored in `memory` to a copy of it, because `memory` is about to be overwritten."""
    address = memory.untyped_storage().data_ptr()
    held = [p for p in parameters if p.grad is not None and p.grad.untyped_storage().data_ptr() == address]
    if held:
        copy = memory.clone()
        for p in held:
            p.grad = copy.as_strided(p.grad.shape, p.grad.stride(), p.grad.storage_offset())
