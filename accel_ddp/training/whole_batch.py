"""A loss in which every item of a step is compared with every other one, on whatever rank and in whatever micro-batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from accel_ddp.seeds import dropout_seed, seed_torch
from accel_ddp.training.current_batch import CurrentBatch
from accel_ddp.training.own_time import Part

Batch = Any
LossSum = Callable[[nn.Module, Batch], Tensor]


class WholeBatch:
    """The parts of such a loss. `update` accepts it instead of a `loss_sum` function.

    `embed(model, batch)` returns rows for the items of a micro-batch. `keys(batch)` returns integers for each item, whose
    meaning is up to the loss. `losses(rows, keys)` returns the loss of each item, given the rows of all items.

    Every rank computes all losses from gathered rows, and the gradient flows into its own rows only. The sum over ranks is
    therefore the gradient of one rank that holds the whole batch. If a rank has several micro-batches, rows are first computed
    without a graph to get their gradients, and each micro-batch is then computed again with a graph (GradCache). This needs
    the memory of one micro-batch and one more forward pass.
    """

    def __init__(self, embed: LossSum, keys: Callable[[Batch], Tensor], losses: Callable[[Tensor, Tensor], Tensor]):
        self.embed, self.keys, self.losses = embed, keys, losses

    def for_step(
        self, accelerator: Accelerator, model: nn.Module, batches: Sequence[Batch], seed: int, mark: Callable[[int], None]
    ) -> LossSum:
        """Return a loss for each micro-batch of this step: its value is that of its own items, its gradient that of all.

        `mark` is that of `OwnTime`.
        """
        keys = _gather(torch.cat([self.keys(batch) for batch in batches]), mark)
        if len(batches) == 1:
            return lambda model, batch: self._own_and_all(self.embed(model, batch), keys, mark)[0]
        rows = []
        with torch.no_grad():
            for i, batch in enumerate(batches):
                # `update` seeds the same way, so that dropout draws the same values again.
                own_seed = dropout_seed(seed, i, accelerator.process_index, accelerator.num_processes)
                seed_torch(own_seed, accelerator.device)
                with CurrentBatch(batch):
                    rows.append(self.embed(model, batch))
        sizes, leaf = [len(part) for part in rows], torch.cat(rows).requires_grad_()
        total, own = self._own_and_all(leaf, keys, mark)
        gradients = torch.autograd.grad(total, leaf)[0].split(sizes)
        values = own.detach().split(sizes)
        index = {id(batch): i for i, batch in enumerate(batches)}

        def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
            i = index[id(batch)]
            flow = (self.embed(model, batch) * gradients[i]).sum()
            return flow + (values[i].sum() - flow).detach()

        return loss_sum

    def _own_and_all(self, rows: Tensor, keys: Tensor, mark: Callable[[int], None]) -> tuple[Tensor, Tensor]:
        """Return (a sum with the value of this rank's items and the gradient of all items, the losses of this rank's items)."""
        everyone = _gather(rows.detach(), mark)
        first = (dist.get_rank() if dist.is_initialized() else 0) * len(rows)
        losses = self.losses(torch.cat([everyone[:first], rows, everyone[first + len(rows) :]]), keys)
        own = losses[first : first + len(rows)]
        total = losses.sum()
        return total + (own.sum() - total).detach(), own


def _gather(tensor: Tensor, mark: Callable[[int], None]) -> Tensor:
    """Return the rows of all ranks, each of which has the same number."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    mark(Part.FORWARD)
    dist.all_gather(parts, tensor.contiguous())
    mark(Part.COMMUNICATION)
    return torch.cat(parts)
