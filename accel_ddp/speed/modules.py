"""Modules that replace those of a model's layers: linear layers and dropout.

Under autocast, torch rounds the gradient of a weight to half precision, converts it back, and a captured group copies it to the
memory of its gradients: 16 bytes per weight, read and written. In `WideGradients` the product, which sums in float32 anyway, writes
float32 to that memory: 4 bytes. Gradients are not rounded, so they are more exact, and plain, captured and compiled layers compute
the same.

torch's compiler computes ten rounds of Philox for each random number of dropout and uses one of the four that they return. Dropout
then takes longer than reading and writing the tensor. Compiled code of `HashedDropout` hashes the place of a number with two numbers
of the device's generator. The backward pass computes the hash again, so that no mask is stored. Plain layers use torch's kernel,
which is fast.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_ddp import compat


@functools.cache
def _targets() -> dict[int, Tensor]:
    """Return the addresses of weights, and where their gradients are written. Backward passes run in threads of autograd."""
    return {}


@contextlib.contextmanager
def gradients_written_to(weights: Sequence[Tensor], targets: Sequence[Tensor]) -> Iterator[None]:
    """Let the gradients of linear layers be written to `targets` inside the block. Others get new memory, as outside of it.

    The second gradient of a weight that is used twice gets new memory too, and autograd adds both.
    """
    _targets().update((weight.data_ptr(), target) for weight, target in zip(weights, targets, strict=True))
    try:
        yield
    finally:
        _targets().clear()


@functools.cache
def _copies() -> dict[int, Tensor]:
    """Return the addresses of weights and biases, and their copies in half precision, see `converted_together`."""
    return {}


@contextlib.contextmanager
def converted_together(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Convert the weights of these layers with few kernels inside the block. Otherwise each linear layer converts its own."""
    some = [m for layer in layers for m in layer.modules() if type(m) is WideGradients and m.converts()]
    found = [p for m in some for p in (m.weight, m.bias) if p is not None]
    if found:
        copies = [torch.empty_like(p, dtype=torch.get_autocast_dtype(p.device.type), requires_grad=False) for p in found]
        compat.copy_all(copies, [p.detach() for p in found])
        _copies().update((p.data_ptr(), copy) for p, copy in zip(found, copies))
    try:
        yield
    finally:
        _copies().clear()


def product(a: Tensor, b: Tensor, wide: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return a @ b in the wide type. A GPU sums in it anyway and can write the result directly."""
    is_narrow = a.dtype in (torch.float16, torch.bfloat16) and wide == torch.float32
    if not (a.is_cuda and is_narrow and hasattr(torch.ops.aten.mm, "dtype")):
        found = (a @ b).to(wide)
        return found if out is None else out.copy_(found)
    return torch.mm(a, b, out_dtype=wide) if out is None else torch.ops.aten.mm.dtype_out(a, b, wide, out=out)


# Each is one operator, which a compiler does not trace: it would convert weights again in the backward pass. (It could not store code
# with an autograd.Function.)
@torch.library.custom_op("accel_ddp::linear", mutates_args=())
def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return F.linear(rows, weight, bias) in the type of `rows`, and the weight in this type."""
    known, kind = _copies(), rows.dtype
    matrix = known.pop(weight.data_ptr(), None)  # outputs of two calls must not share their memory
    if matrix is None or matrix.dtype != kind:
        matrix = weight.to(kind, copy=True)
    return F.linear(rows, matrix, None if bias is None else known.get(bias.data_ptr(), bias).to(kind)), matrix


@_linear.register_fake
def _(rows, weight, bias):
    return rows.new_empty((*rows.shape[:-1], len(weight))), torch.empty_like(weight, dtype=rows.dtype)


@torch.library.custom_op("accel_ddp::weight_gradient", mutates_args=())
def _weight_gradient(gradient: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return product(gradient.T, rows, weight.dtype, _targets().pop(weight.data_ptr(), None))


@_weight_gradient.register_fake
def _(gradient, rows, weight):
    return torch.empty_like(weight)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # no zeros for the matrix
    ctx.save_for_backward(inputs[0], output[1], inputs[1])


def _gradients(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
    rows, matrix, weight = ctx.saved_tensors
    wants_rows, _, wants_bias = ctx.needs_input_grad
    flat = gradient.reshape(-1, gradient.shape[-1])
    d_rows = (flat @ matrix).view(rows.shape) if wants_rows else None
    d_weight = _weight_gradient(flat, rows.reshape(-1, rows.shape[-1]), weight)
    return d_rows, d_weight, flat.sum(0, dtype=weight.dtype) if wants_bias else None


_linear.register_autograd(_gradients, setup_context=_save_for_backward)


class WideGradients(nn.Linear):
    """A linear layer whose weight gradient is not rounded to the type of autocast."""

    def forward(self, rows: Tensor) -> Tensor:
        if not self.converts():
            return F.linear(rows, self.weight, self.bias)
        return _linear(rows.to(torch.get_autocast_dtype(rows.device.type)), self.weight, self.bias)[0]

    def converts(self) -> bool:
        """Return whether a forward pass converts the weight."""
        is_trained = torch.is_grad_enabled() and self.weight.requires_grad
        return is_trained and self.weight.dtype == torch.float32 and torch.is_autocast_enabled(self.weight.device.type)


class HashedDropout(nn.Dropout):
    """nn.Dropout, with a hash in compiled code."""

    def forward(self, x: Tensor) -> Tensor:
        if not (torch.compiler.is_compiling() and self.training and 0 < self.p < 1 and x.numel() < 1 << 31):
            return super().forward(x)
        first, second = torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32, device=x.device)
        rows, columns = (torch.arange(n, dtype=torch.int32, device=x.device) for n in (x.numel() // x.shape[-1], x.shape[-1]))
        # `^` comes first: the compiler would compute a sum or a product with the index, whose numbers must fit into 32 bits. The others
        # overflow. They are 0x9E3779B1, 0x85EBCA6B and 0xC2B2AE35 as signed numbers; `&` removes copies of the sign after a shift.
        h = ((rows[:, None] * x.shape[-1] + columns) ^ first) * -1640531535
        h = (h ^ (h >> 16 & 0xFFFF)) * -2048144789 + second
        h = (h ^ (h >> 13 & 0x7FFFF)) * -1028477387
        return torch.where(h.view(x.shape) >= int(self.p * 2**32) - (1 << 31), x * (1 / (1 - self.p)), 0)


def install(layers: Sequence[nn.Module], is_sharded: bool) -> None:
    """Replace the modules inside `layers`. Their parameters, hooks and names stay as they are.

    The weights of a sharded model are gathered in half precision, so its linear layers stay.
    """
    for layer in layers:
        for module in layer.modules():
            if type(module) is nn.Dropout:
                module.__class__ = HashedDropout
            elif type(module) is nn.Linear and "forward" not in module.__dict__ and not is_sharded:
                module.__class__ = WideGradients
