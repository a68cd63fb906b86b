"""Layers that start at once: each is compiled, and its kernels are started together, from a recording (a CUDA graph).

Small and medium models are bound by how fast the host can start kernels. A recording of a layer's forward pass, and one of
its backward pass, are one start each. Every layer is a node of its own in autograd's graph: DDP sends a layer's gradients while
the layers below it still compute, and hooks, accumulation and frozen parameters are as they always are.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accel_ddp import world

MOST_SHAPES = 24  # recordings of so many lengths are kept; others are computed without
# A recording keeps the memory of a micro-batch for ever, and lengths that are not recorded need as much beside it.
ROOM = 2.5  # times what a micro-batch takes
LEAST_FREE = 0.1  # of the GPU's memory: with less, nothing more is recorded


class _Shared:
    """What the recordings of all layers have in common."""

    def __init__(self, device: torch.device):
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self.gradients: Tensor | None = None  # of one layer at a time: copied from here as soon as they are there
        self.in_flight: set[tuple[int, Any]] = set()  # (layer, shape) whose backward pass is to come
        self.shape: Any = None  # theirs


class _Recording(NamedTuple):
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph | None  # None where nothing is learned
    hidden: Tensor  # read by `forward`
    inputs: list[Tensor]  # read by both; the same for all layers of a shape
    out: Tensor
    gradient_out: Tensor  # read by `backward`
    gradient_in: Tensor | None
    gradients: list[Tensor]  # of the parameters: views of `_Shared.gradients`
    used: list[bool]  # whether a parameter has a gradient at all
    size: int  # of all gradients


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: _Shared, key: Any, it: _Recording, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.shared, ctx.key, ctx.it = shared, key, it
        if hidden.data_ptr() != it.hidden.data_ptr():
            it.hidden.copy_(hidden)
        it.forward.replay()
        return it.out.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        it = ctx.it
        ctx.shared.in_flight.discard(ctx.key)
        if gradient.data_ptr() != it.gradient_out.data_ptr():
            it.gradient_out.copy_(gradient)
        it.backward.replay()
        found: Any = ()
        if it.gradients:
            # One copy for all: autograd keeps what it gets as a parameter's gradient, and the next layer writes here again.
            copy = ctx.shared.gradients[: it.size].clone()
            found = torch._C._nn.unflatten_dense_tensors(copy, it.gradients)
        if not all(it.used):
            views = iter(found)
            found = [next(views) if used else None for used in it.used]
        return None, None, None, None if it.gradient_in is None else it.gradient_in.detach(), *found


@contextlib.contextmanager
def _twins(layer: nn.Module, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Other parameters over the same memory. DDP keeps the node of each parameter in autograd's graph, which is of another
    stream: a recording that met it would have to wait for that stream, which is not allowed."""
    twin_of = {id(p): nn.Parameter(p.detach()) for p in parameters}
    owners = [(module, name, p) for module in layer.modules() for name, p in module._parameters.items() if id(p) in twin_of]
    for module, name, p in owners:
        module._parameters[name] = twin_of[id(p)]
    try:
        yield [twin_of[id(p)] for p in parameters]
    finally:
        for module, name, p in owners:
            module._parameters[name] = p


def _same(some: tuple, others: tuple) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others))


class Recorded:
    """Calls of a stack of layers, recorded for each shape the second time that it comes: the first time compiles."""

    def __init__(self, layers: list[nn.Module], calls: list[Callable[..., Any]], device: torch.device, is_compiled: bool):
        self.layers, self.calls, self.is_compiled = layers, calls, is_compiled
        self.parameters = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
        self.shared = _Shared(device)
        self.seen: set[Any] = set()  # shapes that came through all layers
        self.recordings: dict[Any, list[_Recording]] = {}
        self.copied: tuple[Any, list[Tensor]] = (None, [])
        self.given: tuple[Any, Any] = ((), None)
        self.key: Any = None
        self.broken = ""  # why nothing is recorded any more

    def call(self, number: int, hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The layer's output, from its recording if there is one."""
        plain = self.calls[number]
        if self.broken:
            return plain(hidden, *args, **kwargs)
        if number == 0:
            self._look_at(hidden, args, kwargs)
            if self.broken:
                return plain(hidden, *args, **kwargs)
            if self.key in self.seen and self.key not in self.recordings and not self.shared.in_flight:
                self._record(hidden)
        elif kwargs is not self.given[1] or not _same(args, self.given[0]):
            self._give_up("layers are given different things")
            return plain(hidden, *args, **kwargs)
        key = self.key
        if key not in self.recordings:
            self._remember(number)
            return plain(hidden, *args, **kwargs)
        busy = self.shared.in_flight
        if (number, key) in busy or (busy and self.shared.shape != key):
            return plain(hidden, *args, **kwargs)  # called again before its backward pass: that one needs what is recorded
        self.shared.shape = key
        it = self.recordings[key][number]
        self._copy(it.inputs)
        busy.add((number, key))
        return _Replay.apply(self.shared, (number, key), it, hidden, *self.parameters[number])

    def _look_at(self, hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """What the layers are given beside their hidden states: all of them the same objects."""
        self.given = args, kwargs
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.inputs = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        if any(x.requires_grad for x in self.inputs):
            self._give_up("layers share something that is learned")
        if strange := [leaf for leaf in self.leaves if not isinstance(leaf, Tensor | bool | int | float | str | None)]:
            self._give_up(f"layers are given a {type(strange[0]).__name__}, of which nobody knows whether it changes")
        others = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in self.leaves)
        self.key = (tuple(hidden.shape), hidden.dtype, hidden.requires_grad, self.layers[0].training, others)

    def _give_up(self, why: str) -> None:
        self.broken = why
        print(f"rank {world.RANK} on {world.HOST}: kernels cannot be recorded, training goes on without: {why}",
              file=sys.stderr, flush=True)  # fmt: skip

    def forget(self) -> None:
        """Another micro-batch: what was computed before and never had a backward pass will not have one."""
        self.shared.in_flight.clear()

    def _remember(self, number: int) -> None:
        if number == len(self.layers) - 1 and len(self.seen) < MOST_SHAPES:
            self.seen.add(self.key)

    def _copy(self, mine: list[Tensor]) -> None:
        """Positions and the places of texts, once for all layers."""
        if self.copied[0] is mine and self.copied[1] is self.inputs:
            return
        for target, source in zip(mine, self.inputs):
            target.copy_(source)
        self.copied = mine, self.inputs

    def _record(self, hidden: Tensor) -> None:
        free, all_of_it = torch.cuda.mem_get_info(hidden.device)
        held = torch.cuda.memory_allocated(hidden.device)
        unused = free + torch.cuda.memory_reserved(hidden.device) - held
        if unused < ROOM * (torch.cuda.max_memory_allocated(hidden.device) - held) or unused < LEAST_FREE * all_of_it:
            return
        generator = torch.cuda.default_generators[hidden.device.index or 0]
        drawn = generator.get_state()  # dropout goes on as if nothing had been recorded
        try:
            self.recordings[self.key] = self._recorded(hidden)
        except Exception as error:
            first: BaseException = error
            while first.__context__ is not None:
                first = first.__context__
            self._give_up(f"{type(first).__name__}: {next(iter(str(first).splitlines()), '')}"[:200])
            torch.cuda.synchronize()
        generator.set_state(drawn)

    def _recorded(self, hidden: Tensor) -> list[_Recording]:
        shared, number_of = self.shared, len(self.layers)
        sizes = [sum(p.numel() for p in parameters) for parameters in self.parameters]
        dtypes = {p.dtype for parameters in self.parameters for p in parameters}
        if len(dtypes) > 1:
            raise ValueError("its parameters are of several types")
        if shared.gradients is None and dtypes:
            shared.gradients = torch.empty(max(sizes), dtype=dtypes.pop(), device=hidden.device)
        inputs = [x.clone() for x in self.inputs]
        first = hidden.detach().clone().requires_grad_(hidden.requires_grad)
        options = {"pool": shared.pool, "stream": shared.stream, "capture_error_mode": "thread_local"}
        torch.cuda.synchronize()
        done: list[_Recording] = []
        kept = torch.is_autocast_cache_enabled()
        if not self.is_compiled:  # which holds casts of its own, and would compile anew
            torch.set_autocast_cache_enabled(False)  # a cast that was kept from outside would not be done again in a replay
        try:
            tensors = iter(inputs)
            same = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
            args, kwargs = pytree.tree_unflatten(same, self.spec)
            self._on_the_stream(first, args, kwargs)
            ahead, x = [], first
            for number in range(number_of):
                graph = torch.cuda.CUDAGraph()
                with _twins(self.layers[number], self.parameters[number]) as twins, torch.cuda.graph(graph, **options):
                    out = self.calls[number](x, *args, **kwargs)
                if not isinstance(out, Tensor):
                    raise ValueError("its layers return more than one tensor")
                ahead.append((graph, x, out, twins))
                x = out.detach().requires_grad_(out.requires_grad)
            gradient = torch.empty_like(ahead[-1][2])
            for number in reversed(range(number_of)):
                graph, x, out, parameters = ahead[number]
                if not out.requires_grad:  # frozen, like all below it
                    done.append(_Recording(graph, None, x, inputs, out, gradient, None, [], [False] * len(parameters), 0))
                    continue
                wanted = ([x] if x.requires_grad else []) + parameters
                back = torch.cuda.CUDAGraph()
                with torch.cuda.graph(back, **options):
                    found = list(torch.autograd.grad(out, wanted, gradient, allow_unused=True))
                    inward = found.pop(0) if x.requires_grad else None
                    used = [g is not None for g in found]
                    views, start = [], 0
                    for parameter, g in zip(parameters, found):
                        if g is not None:
                            views.append(shared.gradients[start : start + parameter.numel()].view(parameter.shape))
                            start += parameter.numel()
                    if views:
                        torch._foreach_copy_(views, [g for g in found if g is not None])
                done.append(_Recording(graph, back, x.detach(), inputs, out.detach(), gradient, inward, views, used, start))
                del found, out, x, parameters
                ahead[number] = None
                gradient = inward if inward is not None else gradient
        finally:
            torch.set_autocast_cache_enabled(kept)
        return done[::-1]

    def _on_the_stream(self, first: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """Once for nothing: what libraries set up when they are first used on a stream must not be part of a recording."""
        with torch.cuda.stream(self.shared.stream):
            with _twins(self.layers[0], self.parameters[0]) as twins:
                out = self.calls[0](first, *args, **kwargs)
            if out.requires_grad:
                torch.autograd.grad(out.sum(), [p for p in (first, *twins) if p.requires_grad], allow_unused=True)
        torch.cuda.synchronize()
