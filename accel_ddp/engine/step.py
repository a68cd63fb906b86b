"""One optimizer step: micro-batches in, one update of the weights out.

A micro-batch is what a rank computes in one forward and backward pass: of texts `Rows`, one behind the other. Where each text begins
is a column that travels as an argument of `model(rows)` to our attention, which transformers calls (`speed/row_model.py`). The loss
of a step is the sum over all micro-batches of all ranks, divided by their number of items, which `count` of the task says. DDP wraps
`Terms`, the module whose forward pass is `terms` of the task: the loss of each item, and numbers to log.

In a run, only this module, `ddp`, `scaler` and `rehearsal` write the `.grad` of parameters, clip and step. On a GPU, with a fused
optimizer, nothing here reads a device value on the host. The phases show the monitor where a rank is, and divide the time of a step.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp import phases
from accel_ddp.engine import ddp
from accel_ddp.engine.rows import MicroBatch
from accel_ddp.engine.scaler import Stepper
from accel_ddp.engine.step_sums import NOTHING, Carry, ItemSums, LossNumbers, UpdateStats
from accel_ddp.engine.step_times import sync_after_backward
from accel_ddp.engine.terms import Sealed, checked, numbers_of, terms_of
from accel_ddp.phases import BACKWARD, FORWARD, OTHER, enter
from accel_ddp.seeds import dropout_seed, seed_forward

if TYPE_CHECKING:
    from accel_ddp.config.train_config import TrainConfig


def train_step(
    accelerator: Accelerator, cfg: "TrainConfig", terms: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[MicroBatch],
    seed: int = 0, carry: Carry = NOTHING, pause: Callable[[int], None] | None = None,
) -> UpdateStats:  # fmt: skip
    """Do one optimizer step on the mean loss of all items in `batches` on all ranks of the team of `terms`.

    `terms` is what `prepare` has returned, or `Terms` on a single rank.
    How the items are spread over micro-batches and ranks does not change the result. Dropout depends on `seed` and on the place of the
    micro-batch among those of all ranks, so it stays the same when the same micro-batches are spread over another number of ranks.
    Of `cfg` this reads `max_grad_norm` and `on_nonfinite`. `pause(i)` is called before micro-batch i, where weights and optimizer are
    those of the step before.

    If the loss or the gradient norm is not finite, every rank leaves weights and optimizer unchanged. The caller finds that in the
    returned numbers. With `on_nonfinite="skip"` the buffers are restored too, such as the running statistics of batch norm.
    """
    enter(FORWARD)
    plain, device = terms_of(terms), accelerator.device
    team = plain.team

    def seeded(i: int) -> Sealed:  # a batch that DDP passes on as it is
        seed_forward(dropout_seed(seed, i, team.rank, team.size), device)
        return Sealed(batches[i])

    plain.prepare(batches, seeded)  # columns that a task needs from all micro-batches, computed with the same dropout
    gradients = ddp.begin_step(accelerator, terms, optimizer, batches[0])
    stepper = Stepper(accelerator, plain.model, optimizer, keeps_buffers=cfg.on_nonfinite == "skip")
    counts = [plain.count(batch) for batch in batches]
    sums = ItemSums(sum(counts), carry, team, device)  # the reduce runs during the first forward pass
    numbers, weight = LossNumbers(sums.dtype, device), None
    for i in range(len(batches)):
        if pause:
            pause(i)
        is_last = i == len(batches) - 1
        with gradients.micro_batch(terms, is_last):
            enter(FORWARD)
            found = terms(seeded(i))
            loss = checked(found, counts[i])
            numbers.add(numbers_of(found))
            if i == 0:
                ddp.check_no_gradients(optimizer)
            # DDP averages gradients over ranks. We want their sum, hence the number of ranks.
            weight = team.size / sums.wait_for_items() if weight is None else weight
            enter(BACKWARD)
            weighted = loss * weight
            if is_last and team.size > 1:
                sync_after_backward(weighted)
            gradients.begin_backward()
            # Like `accelerator.backward`, but without its division by the number of micro-batches.
            (accelerator.scaler.scale(weighted) if accelerator.scaler else weighted).backward()
        numbers.add_loss(loss)
    gradients.end_backward()
    grad_norm = stepper.clip(cfg.max_grad_norm)
    loss, means, unused = numbers.over_ranks(gradients, team)
    for parameter in unused:
        parameter.grad = None  # as on one rank: the optimizer leaves it as it is
    loss = loss * (weight / team.size)
    stepper.step_if_finite(loss + grad_norm)  # a sum is finite if both are
    phases.HERE.advance(phases.HERE.step + 1)
    enter(OTHER)
    return UpdateStats(loss, grad_norm, *sums.known, numbers.loss, sums.samples, numbers.names or (), means)
