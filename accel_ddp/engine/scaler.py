"""Clipping and the optimizer's step, which is left out if the numbers of a step are not finite: with fp16's scaler and without it.

With a fused optimizer on a GPU, its kernels read there whether they shall skip, so the host does not wait.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_ddp import compat
from accel_ddp.errors import UserError
from accel_ddp.ranks import shards


class Stepper:
    """The end of a step: `clip`, then `step_if_finite`. It is made before the forward pass, because it keeps the buffers."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, keeps_buffers: bool):
        """`keeps_buffers`: a skipped step restores the buffers too, such as the running statistics of batch norm."""
        self.accelerator, self.model = accelerator, model
        # Accelerate's wrapper searches the disk for an optional package every step. What it does for the scaler is done here.
        self.optimizer, self._wrapper = getattr(optimizer, "optimizer", optimizer), optimizer
        self._buffers = copy_buffers(model) if keeps_buffers else {}
        self._rates = self._learning_rates()

    def _learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]  # a tensor of `set_lr` is in host memory

    def clip(self, max_norm: float) -> Tensor:
        """Unscale and clip the gradients. Return the norm of all gradients before that."""
        if self._learning_rates() != self._rates:
            raise UserError(
                "The learning rate was changed during an update, for example by a scheduler that the loss steps. It would change "
                "once per micro-batch. Remove the scheduler: `fit` sets the learning rate of each step, see --lr_schedule."
            )
        if self.accelerator.scaler:
            self.accelerator.unscale_gradients(self._wrapper)
        device = self.accelerator.device
        self._skips, self._divisor = can_skip_on_device(self.optimizer, device), None
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = compat.norm_of([p.grad for p in params if p.grad is not None])  # also if nothing is clipped, for the log
        # The kernels of these optimizers read the divisor. Otherwise clipping is one more pass over all gradients.
        if self._skips and (type(self.optimizer) in (torch.optim.AdamW, torch.optim.SGD) or _reads_divisor(self.optimizer)):
            norm = shards.full(norm).to(device)
            self._divisor = ((norm + 1e-6) / max_norm).clamp(min=1).float() if max_norm else None
            return norm
        if max_norm:
            nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return shards.full(norm).to(device)

    def step_if_finite(self, number: Tensor) -> None:
        """Step the optimizer if `number` is finite, otherwise restore the buffers. Every rank has the same number."""
        stepper = self.optimizer
        if self._skips:
            is_bad = (number - number) != 0  # the difference is NaN for a number that is not finite, and NaN differs from 0
            stepper.grad_scale, stepper.found_inf = self._divisor, is_bad.float()
            try:
                stepper.step()
            finally:
                del stepper.grad_scale, stepper.found_inf
            for buffer, before in _pair_buffers(self.model, self._buffers):
                torch.where(is_bad, before, buffer, out=buffer)
        elif math.isfinite(number.item()):
            stepper.step()
        else:
            restore_buffers(self.model, self._buffers)
        if getattr(stepper.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:  # it may do more, and keep zeros
            stepper.zero_grad()
        for group in stepper.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        if self.accelerator.scaler:
            self.accelerator.scaler.update()


def can_skip_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether the kernels of the optimizer read `found_inf`, as those of torch's fused optimizers do for GradScaler.

    For other optimizers the host reads the number. On a GPU it then waits in every step until the backward pass is done, and the
    GPU waits until the host has launched the next kernels. On a CPU reading a number costs nothing.
    """
    first = optimizer.param_groups[0]["params"][0]
    is_offloaded = isinstance(first, DTensor) and first.device.type == "cpu"  # it steps shards in host memory
    if device.type == "cpu" or is_offloaded or not compat.reads_found_inf(optimizer) or _takes_scaler(type(optimizer)):
        return False
    if not all(group.get("fused", True) for group in optimizer.param_groups):
        return False
    # In its first step, fused SGD allocates momentum without initial values. A kernel that skips would leave them undefined.
    with_momentum = [p for group in optimizer.param_groups if group.get("momentum") for p in group["params"]]
    return all(p in optimizer.state for p in with_momentum if p.grad is not None)


def _reads_divisor(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the class says, itself and not by inheritance, that its step divides gradients by `grad_scale`."""
    return "divides_gradients" in vars(type(optimizer))


@functools.cache
def _takes_scaler(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether `step` expects the GradScaler as an argument, an older protocol, which does not read `found_inf`."""
    return "grad_scaler" in inspect.signature(kind.step).parameters


def averages_itself(optimizer: object) -> bool:
    """Return whether an optimizer has its own averages of the weights, which `eval` puts into the model and `train` takes out."""
    return all(callable(getattr(optimizer, name, None)) for name in ("eval", "train"))


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def restore_buffers(model: nn.Module, copies: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for buffer, before in _pair_buffers(model, copies):
            buffer.copy_(before)


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


def _pair_buffers(model: nn.Module, copies: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return each buffer with its copy. A forward pass may have replaced a cache by a larger one, which is left as it is."""
    buffers = model.named_buffers() if copies else ()
    pairs = [(buffer, copies[name]) for name, buffer in buffers if name in copies]
    return [(buffer, copy) for buffer, copy in pairs if (buffer.shape, buffer.dtype) == (copy.shape, copy.dtype)]
