"""Layers that start at once: their kernels are started together, from a recording (a CUDA graph).

Small and medium models are bound by how fast the host can start kernels. A recording of the forward pass of some layers, and one
of their backward pass, are one start each. Such a group is a node in autograd's graph. Without other ranks it is the whole
stack; with them it is as large as one of DDP's buckets, so that DDP sends the gradients of a group while those below it still
compute. Hooks, accumulation and frozen parameters are as they always are. One thing is not: a gradient that somebody keeps beyond
its step is overwritten by the next replay.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accel_ddp.speed.graph_replay import ALIGNED, Group, Recording, Replay, Shared, grouped, twins_of

log = logging.getLogger(__name__)

MOST_SHAPES = 24  # recordings of so many lengths are kept; others are computed without
# A recording keeps the memory of a micro-batch for ever, and lengths that are not recorded need as much beside it.
GRAPH_MEMORY = 2.5  # times what a micro-batch takes
LEAST_FREE = 0.1  # of the GPU's memory: with less, nothing more is recorded
ASK_AGAIN = 100  # micro-batches after there was no room


def _same(some: tuple, others: tuple) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others))


class GraphedLayers:
    """Calls of a stack of layers, recorded for each shape the second time that it comes: the first time compiles."""

    def __init__(
        self,
        layers: list[nn.Module],
        calls: list[Callable[..., Any]],
        device: torch.device,
        is_compiled: bool,
        group_bytes: float,
    ):
        self.layers, self.calls, self.is_compiled = layers, calls, is_compiled
        self.group_bytes = group_bytes  # of gradients that are there at once
        self.groups: list[Group] = []
        self.shared = Shared(device)
        self.seen: set[Any] = set()  # shapes that came through all layers
        self.recordings: dict[Any, list[Recording]] = {}  # of each group
        self.copied: tuple[Any, list[Tensor]] = (None, [])
        self.given: tuple[Any, Any] = ((), None)
        self.key: Any = None
        self.parameters = [p for layer in layers for p in layer.parameters()]
        self.trained: tuple[bool, ...] = ()  # which of them are learned
        # By a replay: the first layer of it, and what came out of each.
        self.computed: tuple[int, tuple[Tensor, ...] | None] = (0, None)
        self.last: Any = None  # what the layer before gave
        self.version = 0  # its own: nobody has written into it since
        self.is_chain = True  # whether each layer is given what the one before gave
        self.patience = 0  # micro-batches until memory is asked for again
        self.broken = ""  # why nothing is recorded any more

    def call(self, number: int, hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The layer's output, from its recording if there is one."""
        if self.broken and self.computed[1] is None:
            return self.calls[number](hidden, *args, **kwargs)
        is_untouched = number == 0 or hidden._version == self.version
        if number == 0:
            self.computed = 0, None
            self._look_at(hidden, args, kwargs)
            if self.key in self.seen and self.key not in self.recordings and not self.shared.in_flight and not self.broken:
                self._record(hidden)
        first, outs = self.computed
        is_inside = outs is not None and first < number < first + len(outs)
        if number and (kwargs is not self.given[1] or not _same(args, self.given[0])):
            if is_inside:
                raise RuntimeError("layers are given different things, which they were not before: add --compile off")
            self._give_up("layers are given different things")
        if is_inside:
            if hidden is not outs[number - first - 1] or not is_untouched:
                raise RuntimeError("a layer is not given what the one before gave, which it was before: add --compile off")
            out = outs[number - first]
        elif not self.broken and self.key in self.recordings and (found := self._replayed(number, hidden)) is not None:
            self.computed = number, found
            out = found[0]
        else:
            self.computed = 0, None
            self.is_chain = self.is_chain and (number == 0 or hidden is self.last) and is_untouched
            out = self.last = self.calls[number](hidden, *args, **kwargs)
        self.version = out._version if isinstance(out, Tensor) else 0
        if number == len(self.layers) - 1:
            self.computed, self.last = (0, None), None  # what they hold on to may go
            if len(self.seen) < MOST_SHAPES and not self.broken:
                self.seen.add(self.key)
        return out

    def _replayed(self, number: int, hidden: Tensor) -> tuple[Tensor, ...] | None:
        """What comes out of the layers of the group that begins here; none where it cannot be had from a recording."""
        place = next((i for i, group in enumerate(self.groups) if group.first == number), None)
        if place is None:
            return None  # the group's first layer was not to be had either
        busy, group, key = self.shared.in_flight, self.groups[place], self.key
        if (number, key) in busy or (busy and self.shared.shape != key):
            return None  # called again before its backward pass: that one needs what is recorded
        self.shared.shape = key
        it = self.recordings[key][place]
        self._copy(it.inputs)
        return Replay.apply(self.shared, (number, key), group, it, hidden, *it.parameters)

    def _look_at(self, hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """What the layers are given beside their hidden states: all of them the same objects."""
        self.given = args, kwargs
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.inputs = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        if any(x.requires_grad for x in self.inputs):
            self._give_up("layers share something that is learned")
        if strange := [leaf for leaf in self.leaves if not isinstance(leaf, Tensor | bool | int | float | str | None)]:
            self._give_up(f"layers are given a {type(strange[0]).__name__}, of which nobody knows whether it changes")
        trained = tuple([p.requires_grad for p in self.parameters])
        if trained != self.trained:
            self._drop()
            self.trained = trained
        others = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in self.leaves)
        self.key = (tuple(hidden.shape), hidden.dtype, hidden.requires_grad, self.layers[0].training, others)

    def _give_up(self, why: str) -> None:
        self.broken = why
        log.warning("the layers cannot be captured as CUDA graphs; training continues without them: %s", why)

    def _drop(self) -> None:
        """All recordings, and their memory."""
        self.groups, self.copied = [], (None, [])
        self.recordings.clear()
        self.seen.clear()

    def discard_pending(self) -> None:
        """Another micro-batch: what was computed before and never had a backward pass will not have one."""
        self.shared.in_flight.clear()

    def _copy(self, mine: list[Tensor]) -> None:
        """Positions and the places of texts, once for all layers."""
        if self.copied[0] is mine and self.copied[1] is self.inputs:
            return
        for target, source in zip(mine, self.inputs):
            target.copy_(source)
        self.copied = mine, self.inputs

    def _record(self, hidden: Tensor) -> None:
        self.patience -= 1
        if self.patience > 0:
            return
        free, all_of_it = torch.cuda.mem_get_info(hidden.device)
        held = torch.cuda.memory_allocated(hidden.device)
        unused = free + torch.cuda.memory_reserved(hidden.device) - held
        needed = max(GRAPH_MEMORY * (torch.cuda.max_memory_allocated(hidden.device) - held), LEAST_FREE * all_of_it)
        if unused < needed:
            self.patience = ASK_AGAIN
            return
        if free < needed:  # a recording cannot use what is kept for others
            torch.cuda.empty_cache()
        generator = torch.cuda.default_generators[hidden.device.index or 0]
        drawn = generator.get_state()  # dropout goes on as if nothing had been recorded
        try:
            self.recordings[self.key] = self._recorded(hidden)
        except torch.OutOfMemoryError:  # those that there are go on
            self.patience = sys.maxsize
            torch.cuda.synchronize()
        except Exception as error:
            first: BaseException = error
            while first.__context__ is not None:
                first = first.__context__
            self._give_up(f"{type(first).__name__}: {next(iter(str(first).splitlines()), '')}"[:200])
            torch.cuda.synchronize()
            self._drop()
        generator.set_state(drawn)

    def _recorded(self, hidden: Tensor) -> list[Recording]:
        shared = self.shared
        if not self.groups:
            self.groups = grouped(self.layers, self.group_bytes if self.is_chain else 0)
        if len({p.dtype for group in self.groups for p in group.parameters}) > 1:
            raise ValueError("its parameters are of several types")
        for group in self.groups:
            group.reserve(hidden.device)
        inputs = [x.clone() for x in self.inputs]
        first = hidden.detach().clone().requires_grad_(hidden.requires_grad)
        torch.cuda.synchronize()
        kept = torch.is_autocast_cache_enabled()
        if not self.is_compiled:  # which holds casts of its own, and would compile anew
            torch.set_autocast_cache_enabled(False)  # a cast that was kept from outside would not be done again in a replay
        try:
            tensors = iter(inputs)
            same = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
            args, kwargs = pytree.tree_unflatten(same, self.spec)
            self._on_the_stream(first, args, kwargs)
            ahead, x = [], first
            for group in self.groups:
                graph, passed = torch.cuda.CUDAGraph(), []
                with shared.recording(graph):
                    for number, layer in enumerate(group.layers, start=group.first):
                        with twins_of(layer, group.of_layers[number - group.first]) as twins:
                            out = self.calls[number](x, *args, **kwargs)
                        if not isinstance(out, Tensor):
                            raise ValueError("its layers return more than one tensor")
                        passed.append((x, out, twins))
                        x = out.detach().requires_grad_(out.requires_grad)
                ahead.append((graph, passed))
                if not self.is_chain:  # what the next is given is written elsewhere: somebody may still read this
                    x = torch.empty_like(x).requires_grad_(x.requires_grad)
            done: list[Recording] = []
            gradient = torch.empty_like(ahead[-1][1][-1][1])
            for group in reversed(self.groups):
                graph, passed = ahead.pop()
                done.append(self._recorded_back(group, graph, passed, inputs, gradient))
                gradient = done[-1].gradient_in if done[-1].gradient_in is not None else gradient
        finally:
            torch.set_autocast_cache_enabled(kept)
        return done[::-1]

    def _recorded_back(
        self, group: Group, graph: torch.cuda.CUDAGraph, passed: list, inputs: list[Tensor], gradient: Tensor
    ) -> Recording:
        """`passed`: of each layer, what went in, what came out, its parameters; emptied, so that their memory is used again."""
        hidden, outs, gradient_out = passed[0][0].detach(), [out.detach() for _, out, _ in passed], gradient
        views: list[Tensor] = []
        learned: list[nn.Parameter] = []
        places: list[int] = []
        if not passed[-1][1].requires_grad:  # frozen, like all below it
            return Recording(graph, None, hidden, inputs, outs, gradient_out, None, [], [], [], 0)
        back, start, inward = torch.cuda.CUDAGraph(), 0, None
        with self.shared.recording(back):
            while passed:
                x, out, twins = passed.pop()
                if not out.requires_grad:
                    inward = None
                    continue
                wanted = ([x] if x.requires_grad else []) + twins
                found = list(torch.autograd.grad(out, wanted, gradient, allow_unused=True))
                inward = found.pop(0) if x.requires_grad else None
                targets = []
                for parameter, g in zip(group.of_layers[len(passed)], found):
                    if g is None:
                        continue
                    learned.append(parameter)
                    places.append(len(views))
                    views.append(group.gradients[start : start + g.numel()].view(g.shape))
                    targets.append(views[-1])
                    start += g.numel()
                    if gap := -start % ALIGNED:
                        views.append(group.gradients[start : start + gap])
                        start += gap
                if targets:
                    torch._foreach_copy_(targets, [g for g in found if g is not None])
                gradient = inward if inward is not None else gradient
                del found, out, x, twins, wanted
        return Recording(graph, back, hidden, inputs, outs, gradient_out, inward, views, learned, places, start)

    def _on_the_stream(self, first: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """Once for nothing: what libraries set up when they are first used on a stream must not be part of a recording."""
        with torch.cuda.stream(self.shared.stream):
            trained = [p for p in self.layers[0].parameters() if p.requires_grad]
            with twins_of(self.layers[0], trained) as twins:
                out = self.calls[0](first, *args, **kwargs)
            if out.requires_grad:
                torch.autograd.grad(out.sum(), [p for p in (first, *twins) if p.requires_grad], allow_unused=True)
        torch.cuda.synchronize()
