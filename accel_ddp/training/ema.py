"""The exponential moving average of the weights: `--ema_decay`.

After update `s` (from 1) each average becomes d * average + (1 - d) * weight, with d = min(decay, (1 + s) / (10 + s)). Early averages
thus forget the initial weights faster. An update that was skipped, because its numbers were not finite, changes no average.

`fit` evaluates the averages, and leaves them in the model at its end, where the export reads them. Training continues with the
weights. A checkpoint contains both: the averages are next to the state of the optimizer, as NAME/ema.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from accel_ddp.sharding.apply import reshard
from accel_ddp.sharding.tensors import local
from accel_ddp.training.update import UpdateStats


class Ema:
    """The averages of the trained parameters and of the floating-point buffers of a model. With decay 0 there are none."""

    def __init__(self, model: nn.Module, decay: float):
        """`model` is the model without DDP."""
        self.model, self.decay = model, decay
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}  # tied parameters appear once
        saved = model.state_dict()
        buffers = {name: b for name, b in model.named_buffers() if name in saved and b.is_floating_point()}
        self._weights: dict[str, Tensor] = {**trained, **buffers} if decay else {}
        # In 16 bits an average would not change, because 1 - decay is too small.
        self.averages = {name: _widened(weight.detach()) for name, weight in self._weights.items()}

    def update(self, step: int, stats: UpdateStats) -> None:
        """Add the weights after `step` updates to the averages. The host does not wait for a GPU."""
        if not self.averages:
            return
        amount = 1 - min(self.decay, (1 + step) / (10 + step))
        # Whether the update was skipped may be known on the device only. A weight of 0 leaves an average exactly as it is.
        amounts = torch.isfinite(stats.loss + stats.grad_norm).to(stats.loss.dtype) * amount
        by_dtype = {dtype: amounts.to(dtype) for dtype in {average.dtype for average in self.averages.values()}}
        with torch.no_grad():
            for name, average in self.averages.items():
                average = local(average)
                average.lerp_(local(self._current(name)).to(average.dtype), by_dtype[average.dtype].to(average.device))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the weights by their averages inside of the block. It needs memory for a copy of the weights."""
        weights = {name: local(self._current(name)).clone() for name in self.averages}
        self.apply()
        try:
            yield
        finally:
            self._load(weights)

    def apply(self) -> None:
        """Replace the weights by their averages."""
        self._load({name: local(average) for name, average in self.averages.items()})

    def _load(self, values: dict[str, Tensor]) -> None:
        if not values:
            return
        reshard(self.model)  # what is gathered is a copy of the old values
        with torch.no_grad():
            for name, value in values.items():
                local(self._current(name)).copy_(value)

    def _current(self, name: str) -> Tensor:
        return self._weights[name].detach()


def _widened(weight: Tensor) -> Tensor:
    """Return a copy with 32 bits or more."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
