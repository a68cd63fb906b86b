"""CUDA graphs for tests on a CPU: a replay executes the captured operators again, in the same memory.

The rules of CUDA graphs hold here too. A capture computes nothing: the tensors that it allocates are filled with NaN afterwards. A
replay reads and writes the tensors of the capture, also those that were allocated outside of it. An operator for which the host
would wait for the device is an error. Streams and memory pools have no counterpart on a CPU and do nothing.
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

GIGABYTE = 1 << 30
WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default}


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Capture(TorchDispatchMode):
    """Stores the operators that are called, their arguments, and the tensors that each of them allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in WAITS:
            raise RuntimeError(f"the host waits for the device inside of a capture: {operator}")
        out = operator(*args, **(kwargs or {}))
        inputs = {memory_of(tensor) for tensor in tensors_in((args, kwargs))}
        # Other outputs are views of inputs, or inputs that were changed in place.
        new = {place: tensor.data for place, tensor in enumerate(tensors_in(out)) if memory_of(tensor) not in inputs}
        # `data` has its own version counter, because autograd does not see what a replay writes.
        self.calls.append((operator, *tree_map_only(Tensor, lambda tensor: tensor.data, (args, kwargs or {})), new))
        return out


class Graph:
    def __init__(self) -> None:
        self.capture = Capture()
        self.replays = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "") -> None:
        self.capture.__enter__()

    def capture_end(self) -> None:
        self.capture.__exit__(None, None, None)
        for *_, new in self.capture.calls:
            for tensor in new.values():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for operator, args, kwargs, new in self.capture.calls:
            again = operator(*args, **kwargs)
            if new:
                outputs = tensors_in(again)
                for place, tensor in new.items():
                    tensor.copy_(outputs[place])


class Stream:  # a class, because transformers uses torch.cuda.Stream in annotations
    def __init__(self, device: torch.device):
        self.device = device


def replace_cuda(monkeypatch: pytest.MonkeyPatch, free: int = 1000 * GIGABYTE) -> SimpleNamespace:
    """Replace what the speed package uses of torch.cuda. `free` of the returned object is the memory that the GPU has left."""
    device = SimpleNamespace(free=free)
    for name, value in {
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: None,
        "Stream": Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda _: (device.free, 1000 * GIGABYTE),
        "memory_allocated": lambda _: 0,
        "memory_reserved": lambda _: 0,
        "max_memory_allocated": lambda _: GIGABYTE,
        "default_generators": (torch.default_generator,),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return device
