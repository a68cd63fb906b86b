"""Linear layers under autocast whose weight gradients have the type of the weights from the start.

Autocast multiplies in half precision. torch rounds the gradient of a weight to half precision, converts it back, and a captured group
copies it to the memory of its gradients: 16 bytes per weight, read and written. Here the product, which sums in float32 anyway, writes
float32 to that memory: 4 bytes. Gradients are not rounded, so they are more exact, and plain, captured and compiled layers compute the
same.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_ddp import compat

# Address of a weight -> where its gradient is written. Only a capture fills it.
_targets: dict[int, Tensor] = {}


@contextlib.contextmanager
def gradients_written_to(weights: Sequence[Tensor], targets: Sequence[Tensor]) -> Iterator[None]:
    """Let the gradients of linear layers be written to `targets` inside of the block. Others get new memory, as outside of it.

    The second gradient of a weight that is used twice gets new memory too, and autograd adds both.
    """
    _targets.update((weight.data_ptr(), target) for weight, target in zip(weights, targets, strict=True))
    try:
        yield
    finally:
        _targets.clear()


def product(a: Tensor, b: Tensor, wide: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return a @ b in the wide type. A GPU sums in it anyway and can write the result directly."""
    is_narrow = a.dtype in (torch.float16, torch.bfloat16) and wide == torch.float32
    if not (a.is_cuda and is_narrow and hasattr(torch.ops.aten.mm, "dtype")):
        found = (a @ b).to(wide)
        return found if out is None else out.copy_(found)
    return torch.mm(a, b, out_dtype=wide) if out is None else torch.ops.aten.mm.dtype_out(a, b, wide, out=out)


# A compiler does not trace these. It would convert weights again in the backward pass, which saves memory and costs time.
@torch.library.custom_op("accel_ddp::narrowed", mutates_args=())
def _narrowed(weights: list[Tensor], kind: torch.dtype) -> Tensor:
    """Return the weights as one matrix of this type."""
    matrix = weights[0].new_empty((sum(map(len, weights)), weights[0].shape[1]), dtype=kind)
    compat.copy_all(matrix.split([*map(len, weights)]), weights)
    return matrix


@_narrowed.register_fake
def _(weights, kind):
    return weights[0].new_empty((sum(map(len, weights)), weights[0].shape[1]), dtype=kind)


@torch.library.custom_op("accel_ddp::weight_gradient", mutates_args=())
def _weight_gradient(gradient: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return product(gradient.T, rows, weight.dtype, _targets.pop(weight.data_ptr(), None) if _targets else None)


@_weight_gradient.register_fake
def _(gradient, rows, weight):
    return torch.empty_like(weight)


class _Linears(torch.autograd.Function):
    """F.linear(rows, weight, bias) in the type of `rows`, for several weights, with one product forward and one for the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, number: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = tensors[:number], [bias for bias in tensors[number:] if bias is not None]
        matrix = _narrowed([*weights], rows.dtype)
        ctx.save_for_backward(rows, matrix, *weights)
        bias = torch.cat(biases).to(rows.dtype) if biases else None
        return F.linear(rows, matrix, bias).split([*map(len, weights)], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrix, *weights = ctx.saved_tensors
        has_bias = ctx.needs_input_grad[2 + len(weights) :]
        whole = gradients[0] if len(weights) == 1 else torch.cat(gradients, -1)
        whole, flat = whole.reshape(-1, len(matrix)), rows.reshape(-1, rows.shape[-1])
        d_rows = (whole @ matrix).view(rows.shape) if ctx.needs_input_grad[0] else None
        parts = whole.split([*map(len, weights)], -1)
        d_weights = [_weight_gradient(part, flat, weight) for part, weight in zip(parts, weights)]
        d_biases = [part.sum(0, dtype=weight.dtype) if has else None for part, weight, has in zip(parts, weights, has_bias)]
        return d_rows, None, *d_weights, *d_biases


class WideGradients(nn.Linear):
    """A linear layer whose weight gradient is not rounded to the type of autocast."""

    same_input: "tuple[WideGradients, ...]"  # the layers that get the input of this one after it, such as keys after queries
    given: tuple[Tensor, Tensor] | None  # an input, and the output that another layer has computed for it

    def forward(self, rows: Tensor) -> Tensor:
        given, self.given = self.given, None
        if given is not None and given[0] is rows:
            return given[1]
        if not self._is_wide(rows):
            return F.linear(rows, self.weight, self.bias)
        # One product is faster than several. Without a compiler, joining the gradients would cost more.
        layers = [self, *(m for m in self.same_input if m._is_wide(rows))] if torch.compiler.is_compiling() else [self]
        narrow = rows.to(torch.get_autocast_dtype(rows.device.type))
        out, *others = _Linears.apply(narrow, len(layers), *(m.weight for m in layers), *(m.bias for m in layers))
        for layer, other in zip(layers[1:], others):
            layer.given = rows, other
        return out

    def _is_wide(self, rows: Tensor) -> bool:
        is_trained = self.weight.requires_grad and torch.is_grad_enabled()
        return is_trained and self.weight.dtype == torch.float32 and torch.is_autocast_enabled(rows.device.type)


@contextlib.contextmanager
def same_inputs(layer: nn.Module) -> Iterator[list[list[str]]]:
    """Yield a list. At the end of the block it contains the names of linear layers that got the same input, in their order."""
    calls: dict[int, tuple[Tensor, dict[str, None]]] = {}  # by the id of the input, which stays unique while it is held
    note = lambda name: lambda _, args: calls.setdefault(id(args[0]), (args[0], {}))[1].setdefault(name)
    named = {name: module for name, module in layer.named_modules() if type(module) is nn.Linear}
    hooks = [module.register_forward_pre_hook(note(name)) for name, module in named.items()]
    found: list[list[str]] = []
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        has_bias = lambda name: named[name].bias is not None
        for _, names in calls.values():
            same = [name for name in names if has_bias(name) == has_bias(next(iter(names)))]
            found += [same] if len(same) > 1 and same not in found else []


def install(layers: Sequence[nn.Module], same: list[list[str]]) -> None:
    """Replace the linear layers inside of `layers`. Their parameters, hooks and names stay as they are."""
    for layer in layers:
        for module in layer.modules():
            if type(module) is nn.Linear and "forward" not in module.__dict__:
                module.__class__ = WideGradients
                module.same_input, module.given = (), None
        for names in same:
            first, *others = [layer.get_submodule(name) for name in names]
            if all(type(module) is WideGradients for module in (first, *others)):
                first.same_input = tuple(others)
