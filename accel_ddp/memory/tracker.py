"""Records how much memory the tensors of a step take at each moment, with tensors that have shapes and no values.

`Tracker` sees every operator and stores the size of each new storage until the storage is freed. The operators run on fake tensors
of the CPU. Where a GPU would save other tensors for the backward pass, `LikeGpu` replaces the operator.
"""

import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

LIMIT_SECONDS = 20  # for a model whose layers loop over tokens
BLOCK = 512  # bytes; the allocator of a GPU rounds up to a multiple of it

# What a storage is used for. `Trace.moments` has one column for each.
ACTIVATIONS, LOSS, CASTS_OF_LAYERS, CASTS_OF_REST, GRADIENTS_OF_LAYERS, GRADIENTS_OF_REST = range(6)
NUM_KINDS = 6


def rounded(size: int) -> int:
    """Return the bytes that the allocator of a GPU uses for `size` bytes."""
    return -(-size // BLOCK) * BLOCK


class Tracker(TorchDispatchMode):
    """Records the bytes of each kind after every allocation. Parameters are not counted."""

    def __init__(self, in_layers: dict[nn.Parameter, bool]):
        """`in_layers`: all parameters, and whether they belong to one of the layers."""
        super().__init__()
        self.deadline = time.monotonic() + LIMIT_SECONDS
        self.kind = ACTIVATIONS  # of new storages
        self.is_in_middle = False  # whether the forward pass of the layer runs that stands for others
        self.live = np.zeros((2, NUM_KINDS), dtype=np.int64)  # all bytes, and those that this layer has allocated
        self.moments: list[np.ndarray] = []
        self._known: dict[int, list[Any]] = {}  # storage -> [bytes, kind, whether this layer has allocated it, weak reference]
        self._parameters = {p.untyped_storage()._cdata: inside for p, inside in in_layers.items()}
        for p, inside in in_layers.items():
            if p.requires_grad:
                p.register_hook(lambda g, kind=GRADIENTS_OF_LAYERS if inside else GRADIENTS_OF_REST: self._move(g, kind))

    def mark(self) -> int:
        """Return the number of the current moment."""
        self.moments.append(self.live.copy())
        return len(self.moments) - 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"it takes more than {LIMIT_SECONDS} s")
        out = function(*args, **(kwargs or {}))
        kind = self.kind
        if function is torch.ops.aten._to_copy.default:
            inside = self._parameters.get(args[0].untyped_storage()._cdata)
            kind = kind if inside is None else CASTS_OF_LAYERS if inside else CASTS_OF_REST
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor):
                self._add(one, kind)
        return out

    def _add(self, tensor: Tensor, kind: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._parameters:
            return
        size = rounded(storage.nbytes())
        self._known[key] = [0, kind, self.is_in_middle, weakref.ref(storage, lambda _: self._remove(key))]
        self._resize(self._known[key], size)
        self.mark()

    def _resize(self, entry: list[Any], size: int) -> None:
        self.live[: 1 + entry[2], entry[1]] += size - entry[0]
        entry[0] = size

    def _remove(self, key: int) -> None:
        self._resize(self._known.pop(key), 0)

    def _move(self, tensor: Tensor, kind: int) -> None:
        """Count a storage as another kind, because it has become a gradient of a parameter."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            size = entry[0]
            self._resize(entry, 0)
            entry[1] = kind
            self._resize(entry, size)


# Functions that autocast computes in float32 on a GPU. On a CPU it computes them in the type of their input.
_IN_FLOAT32 = {
    F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.softmax, torch.softmax, Tensor.softmax, F.log_softmax,
    torch.log_softmax, torch.pow, Tensor.pow, torch.exp, Tensor.exp,
}  # fmt: skip


class LikeGpu(TorchFunctionMode):
    """Lets operators save what they save on a GPU: attention no scores, dropout one byte per element, norms float32."""

    def __init__(self, copies_logits: bool):
        super().__init__()
        self.copies_logits = copies_logits

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return _Attention.apply(*args[:3])
        if function in _GROUPED:
            return _Grouped.apply(*args[:2])
        if function is torch.rand and args and not args[0]:
            return 1.0  # OPT and BART skip a layer if such a number is small
        if function is F.dropout:
            return _dropout(*args, **kwargs)
        if function is F.log_softmax and kwargs.get("dtype") and not torch.is_grad_enabled():
            # For float16 a GPU has one kernel. Before it, torch copies bfloat16 logits to float32. A compiled loss needs no copy.
            wide = args[0].to(kwargs["dtype"]) if self.copies_logits and args[0].dtype == torch.bfloat16 else None
            out = torch.empty(args[0].shape, dtype=kwargs["dtype"])
            del wide
            return out
        if function in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        return function(*args, **kwargs)


# Products of experts, whose fake versions accept no float32.
_GROUPED = {getattr(home, name) for home, name in ((F, "grouped_mm"), (torch, "_grouped_mm")) if hasattr(home, name)}


class _Grouped(torch.autograd.Function):
    """Multiplies rows by the matrices of their experts, and saves both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrices)
        return x.new_empty((x.shape[0], matrices.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


class _Attention(torch.autograd.Function):
    """Saves queries, keys, values, the output and one float32 number per query, as the fused kernels of a GPU do."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        narrow = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else q.dtype
        q, k, v = q.to(narrow), k.to(narrow), v.to(narrow)
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
