"""The averages of the weights that are evaluated: those of `--ema_decay`, or of an optimizer that has `eval` and `train`.

After update `s` (from 1) each average becomes d * average + (1 - d) * weight, with d = min(decay, (1 + s) / (10 + s)). Early averages
thus forget the initial weights faster. An update that was skipped, because its numbers were not finite, changes no average.

An optimizer with these methods, such as a schedule-free one, computes its averages itself. A copy of the weights makes sure that an
evaluation and a save leave no rounding in them, so a resumed run has the same bits.

`fit` evaluates the averages, and leaves them in the model at its end, where the export reads them. Training continues with the
weights. A checkpoint contains both: the averages are next to the state of the optimizer, as NAME/ema.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from accel_ddp import compat
from accel_ddp.engine.scaler import averages_itself
from accel_ddp.engine.step_sums import UpdateStats
from accel_ddp.errors import UserError
from accel_ddp.ranks.shards import local
from accel_ddp.training.sharding import reshard

MOST_AT_ONCE = 2**25  # elements, 128 MiB in float32


class Ema:
    """The averages of the trained parameters and of the floating-point buffers of a model.

    With decay 0 and an optimizer without `eval` there are none.
    """

    def __init__(self, model: nn.Module, decay: float, optimizer: torch.optim.Optimizer | None = None, num_workers: int = 1):
        """`model` is the model without DDP. `num_workers` are those of all ranks, with `--sync_every`."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self.model, self.decay, self.num_workers = model, decay, num_workers
        self._optimizer: Any = optimizer if averages_itself(optimizer) else None
        if self._optimizer:
            if decay:
                raise UserError(
                    f"--ema_decay {decay}: the optimizer {type(optimizer).__name__} averages the weights itself. Leave it out."
                )
            self._optimizer.train()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}  # tied parameters appear once
        saved = model.state_dict()
        buffers = {name: b for name, b in model.named_buffers() if name in saved and b.is_floating_point()}
        self._weights: dict[str, Tensor] = {**trained, **buffers} if decay else trained if self._optimizer else {}
        # In 16 bits an average would not change, because 1 - decay is too small.
        wide = lambda weight: weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        self.averages = {name: wide(weight) for name, weight in self._weights.items()}

    def update(self, step: int, *stats: UpdateStats) -> None:
        """Add the weights after `step` updates to the averages. The host does not wait for a GPU.

        `stats` has the updates since the last call: one, or with `--sync_every` those since the last synchronization.
        """
        if not self.decay:
            return
        amount = 1 - min(self.decay, (1 + step) / (10 + step)) ** len(stats)
        # Whether all updates were skipped may be known on the device only. A weight of 0 leaves an average exactly as it is. Of several
        # workers, one may have stepped although the mean of their losses is not finite.
        has_moved = [torch.isfinite(one.loss + one.grad_norm) | (self.num_workers > 1) for one in stats]
        amounts = (torch.stack(has_moved).any() if len(stats) > 1 else has_moved[0]).to(stats[0].loss.dtype) * amount
        groups: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
        with torch.no_grad():
            for name, average in self.averages.items():
                pair = local(average), local(self._weights[name].detach())
                groups.setdefault((average.dtype, pair[0].device), []).append(pair)
            for (dtype, device), pairs in groups.items():
                _move(pairs, amounts.to(device, dtype))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the weights by their averages inside the block. It needs memory for a copy of the weights."""
        weights = {name: local(self._weights[name].detach()).clone() for name in self.averages}
        self.apply()
        try:
            yield
        finally:
            if self._computes():
                self._optimizer.train()
            self._load(weights)

    @torch.no_grad()
    def apply(self) -> None:
        """Replace the weights by their averages."""
        if self._computes():
            self._optimizer.eval()
            reshard(self.model)
        else:
            self._load(self.averages)

    @torch.no_grad()
    def current(self) -> dict[str, Tensor]:
        """Return the averages of the weights as they are now."""
        if self._computes():
            with self.applied():
                for name, average in self.averages.items():
                    local(average).copy_(local(self._weights[name]))
        return self.averages

    def _computes(self) -> bool:
        """Return whether the averages are those of the optimizer now. Without state, as with --evaluate_only, they were loaded."""
        return bool(self._optimizer) and any(self._optimizer.state.values())  # a look at it adds empty ones

    def _load(self, values: dict[str, Tensor]) -> None:
        if not values:
            return
        reshard(self.model)  # what is gathered is a copy of the old values
        with torch.no_grad():
            for name, value in values.items():
                local(self._weights[name].detach()).copy_(local(value))


def _move(pairs: list[tuple[Tensor, Tensor]], amount: Tensor) -> None:
    """Move the first tensor of each pair towards the second by `amount` of their difference, with few kernels for many tensors.

    The differences need memory, so only a part of the tensors is moved at a time.
    """
    while pairs:
        size = number = 0
        while number < len(pairs) and (number == 0 or size + pairs[number][0].numel() <= MOST_AT_ONCE):
            size += pairs[number][0].numel()
            number += 1
        averages, weights = zip(*pairs[:number])
        compat.move_all(averages, [weight.to(averages[0].dtype) for weight in weights], amount)
        pairs = pairs[number:]
