"""Layers that are captured as CUDA graphs, so that one launch starts all of their kernels.

The speed of small and medium models is limited by how fast the host launches kernels. With a CUDA graph of the forward pass of a
group of layers, and one of its backward pass, each pass is one launch. A group is one node in autograd's graph. With one rank, all
layers are one group. With several ranks, a group is as large as one of DDP's buckets, so that DDP reduces the gradients of a group
while the groups below it still compute. Hooks, gradient accumulation and frozen parameters work as without CUDA graphs. There is
one difference: the next replay overwrites a gradient that is kept beyond its step.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accel_ddp.speed.graph_replay import (
    ALIGNMENT,
    CapturedGroup,
    GraphMemory,
    LayerGroup,
    Replay,
    group_layers,
    parameter_aliases,
)

log = logging.getLogger(__name__)

MAX_SHAPES = 24  # micro-batches of further shapes run without CUDA graphs
# A captured shape holds the memory of a micro-batch until the end, and a shape that is not captured needs as much besides it.
GRAPH_MEMORY = 2.5  # times the memory of a micro-batch
MIN_FREE_MEMORY = 0.1  # fraction of the GPU's memory; with less, no further shape is captured
RETRY_AFTER = 100  # micro-batches, if there was not enough memory


def _are_identical(some: tuple, others: tuple) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others))


class GraphedLayers:
    """Calls a stack of layers. Each shape is captured when it occurs for the second time, because the first time compiles."""

    def __init__(
        self,
        layers: list[nn.Module],
        calls: list[Callable[..., Any]],
        device: torch.device,
        is_compiled: bool,
        group_bytes: float,
    ):
        """`group_bytes`: the gradients of a group, which become ready together."""
        self.layers, self.calls, self.is_compiled = layers, calls, is_compiled
        self.group_bytes = group_bytes
        self.groups: list[LayerGroup] = []
        self.memory = GraphMemory(device)
        self.seen: set[Any] = set()  # keys of shapes that went through all layers
        self.captured: dict[Any, list[CapturedGroup]] = {}  # key of the shape -> groups
        self.copied: tuple[Any, list[Tensor]] = (None, [])  # the last (targets, sources) of `_copy_inputs`
        self.arguments: tuple[Any, Any] = ((), None)  # of the first layer
        self.key: Any = None  # shapes, types and values of the arguments of the first layer
        self.parameters = [p for layer in layers for p in layer.parameters()]
        self.trained: tuple[bool, ...] = ()  # which of them are trained
        self.replayed: tuple[int, tuple[Tensor, ...] | None] = (0, None)  # first layer of the last replay, and its outputs
        self.last_output: Any = None  # of the last layer that ran without a graph
        self.last_version = 0  # version counter of the last output, which changes if the output is modified in place
        self.is_chain = True  # whether each layer gets the output of the layer before it
        self.retry_in = 0  # micro-batches until a capture is tried again
        self.disabled_reason = ""  # why nothing is captured or replayed any more

    def call(self, number: int, hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the output of the layer, from a CUDA graph if its shape is captured."""
        if self.disabled_reason and self.replayed[1] is None:
            return self.calls[number](hidden, *args, **kwargs)
        is_unmodified = number == 0 or hidden._version == self.last_version
        if number == 0:
            self.replayed = 0, None
            self._inspect(hidden, args, kwargs)
            if self.key in self.seen and self.key not in self.captured and not self.memory.pending and not self.disabled_reason:
                self._try_to_capture(hidden)
        first, outputs = self.replayed
        is_inside = outputs is not None and first < number < first + len(outputs)
        if number and (kwargs is not self.arguments[1] or not _are_identical(args, self.arguments[0])):
            if is_inside:
                raise RuntimeError(
                    "a layer gets other arguments than the first layer. Layers that are captured as CUDA graphs must get the same "
                    "arguments. Add --compile off."
                )
            self._disable("the layers get different arguments")
        if is_inside:
            if hidden is not outputs[number - first - 1] or not is_unmodified:
                raise RuntimeError(
                    "the input of a layer is not the unchanged output of the layer before it. Layers that are captured as CUDA "
                    "graphs need that. Add --compile off."
                )
            out = outputs[number - first]
        elif not self.disabled_reason and self.key in self.captured and (found := self._replay(number, hidden)) is not None:
            self.replayed = number, found
            out = found[0]
        else:
            self.replayed = 0, None
            self.is_chain = self.is_chain and (number == 0 or hidden is self.last_output) and is_unmodified
            out = self.last_output = self.calls[number](hidden, *args, **kwargs)
        self.last_version = out._version if isinstance(out, Tensor) else 0
        if number == len(self.layers) - 1:
            self.replayed, self.last_output = (0, None), None  # so that their memory can be freed
            if len(self.seen) < MAX_SHAPES and not self.disabled_reason:
                self.seen.add(self.key)
        return out

    def _replay(self, number: int, hidden: Tensor) -> tuple[Tensor, ...] | None:
        """Return the outputs of all layers of the group that begins here, or None if the group must run without its graph."""
        place = next((i for i, group in enumerate(self.groups) if group.first == number), None)
        if place is None:
            return None  # the first layer of the group ran without a graph too
        pending, group, key = self.memory.pending, self.groups[place], self.key
        if (number, key) in pending or (pending and self.memory.pending_key != key):
            return None  # a backward pass that has not run yet needs the memory that the replay would overwrite
        self.memory.pending_key = key
        captured = self.captured[key][place]
        self._copy_inputs(captured.inputs)
        return Replay.apply(self.memory, (number, key), group, captured, hidden, *captured.parameters)

    def _inspect(self, hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """Store the arguments besides the hidden states, which are the same objects for all layers, and compute the key."""
        self.arguments = args, kwargs
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.inputs = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        if any(x.requires_grad for x in self.inputs):
            self._disable("an argument that the layers share is trained")
        if unknown := [leaf for leaf in self.leaves if not isinstance(leaf, Tensor | bool | int | float | str | None)]:
            self._disable(f"the layers get an argument of type {type(unknown[0]).__name__}, which may change between steps")
        trained = tuple([p.requires_grad for p in self.parameters])
        if trained != self.trained:
            self._discard_graphs()
            self.trained = trained
        others = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in self.leaves)
        self.key = (tuple(hidden.shape), hidden.dtype, hidden.requires_grad, self.layers[0].training, others)

    def _disable(self, reason: str) -> None:
        self.disabled_reason = reason
        log.warning("the layers cannot be captured as CUDA graphs; training continues without them: %s", reason)

    def _discard_graphs(self) -> None:
        """Discard all CUDA graphs and their memory."""
        self.groups, self.copied = [], (None, [])
        self.captured.clear()
        self.seen.clear()

    def discard_pending(self) -> None:
        """Mark the memory of earlier forward passes as unused. Call it before a new micro-batch.

        A forward pass of an earlier micro-batch that had no backward pass will not have one.
        """
        self.memory.pending.clear()

    def _copy_inputs(self, targets: list[Tensor]) -> None:
        """Copy positions and the boundaries of texts into the memory of the graphs, once for all layers."""
        if self.copied[0] is targets and self.copied[1] is self.inputs:
            return
        for target, source in zip(targets, self.inputs):
            target.copy_(source)
        self.copied = targets, self.inputs

    def _try_to_capture(self, hidden: Tensor) -> None:
        """Capture the current shape if there is enough memory."""
        self.retry_in -= 1
        if self.retry_in > 0:
            return
        free, total = torch.cuda.mem_get_info(hidden.device)
        held = torch.cuda.memory_allocated(hidden.device)
        unused = free + torch.cuda.memory_reserved(hidden.device) - held
        needed = max(GRAPH_MEMORY * (torch.cuda.max_memory_allocated(hidden.device) - held), MIN_FREE_MEMORY * total)
        if unused < needed:
            self.retry_in = RETRY_AFTER
            return
        if free < needed:  # a capture cannot use memory that the allocator caches for other pools
            torch.cuda.empty_cache()
        generator = torch.cuda.default_generators[hidden.device.index or 0]
        drawn = generator.get_state()  # dropout draws the same values as without a capture
        try:
            self.captured[self.key] = self._capture(hidden)
        except torch.OutOfMemoryError:  # the shapes that are captured are still used
            self.retry_in = sys.maxsize
            torch.cuda.synchronize()
        except Exception as error:
            first: BaseException = error
            while first.__context__ is not None:
                first = first.__context__
            self._disable(f"{type(first).__name__}: {next(iter(str(first).splitlines()), '')}"[:200])
            torch.cuda.synchronize()
            self._discard_graphs()
        generator.set_state(drawn)

    def _capture(self, hidden: Tensor) -> list[CapturedGroup]:
        """Capture the forward passes of all groups and then, in the opposite order, their backward passes."""
        memory = self.memory
        if not self.groups:
            self.groups = group_layers(self.layers, self.group_bytes if self.is_chain else 0)
        if len({p.dtype for group in self.groups for p in group.parameters}) > 1:
            raise ValueError("the parameters have several types")
        for group in self.groups:
            group.allocate_gradients(hidden.device)
        inputs = [x.clone() for x in self.inputs]
        first = hidden.detach().clone().requires_grad_(hidden.requires_grad)
        torch.cuda.synchronize()
        was_enabled = torch.is_autocast_cache_enabled()
        if not self.is_compiled:  # compiled code contains its casts, and would be compiled again
            torch.set_autocast_cache_enabled(False)  # a cast from the cache would not be repeated in a replay
        try:
            tensors = iter(inputs)
            leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
            args, kwargs = pytree.tree_unflatten(leaves, self.spec)
            self._warm_up_stream(first, args, kwargs)
            forward_passes, x = [], first
            for group in self.groups:
                graph, passed = torch.cuda.CUDAGraph(), []
                with memory.capture(graph):
                    for number, layer in enumerate(group.layers, start=group.first):
                        with parameter_aliases(layer, group.parameters_of_layers[number - group.first]) as aliases:
                            out = self.calls[number](x, *args, **kwargs)
                        if not isinstance(out, Tensor):
                            raise ValueError("the layers return more than one tensor")
                        passed.append((x, out, aliases))
                        x = out.detach().requires_grad_(out.requires_grad)
                forward_passes.append((graph, passed))
                if not self.is_chain:  # the next group gets its own memory, because other code may still read this output
                    x = torch.empty_like(x).requires_grad_(x.requires_grad)
            done: list[CapturedGroup] = []
            gradient = torch.empty_like(forward_passes[-1][1][-1][1])
            for group in reversed(self.groups):
                graph, passed = forward_passes.pop()
                done.append(self._capture_backward(group, graph, passed, inputs, gradient))
                gradient = done[-1].gradient_in if done[-1].gradient_in is not None else gradient
        finally:
            torch.set_autocast_cache_enabled(was_enabled)
        return done[::-1]

    def _capture_backward(
        self, group: LayerGroup, graph: torch.cuda.CUDAGraph, passed: list, inputs: list[Tensor], gradient: Tensor
    ) -> CapturedGroup:
        """Capture the backward pass of a group and return both of its graphs.

        `passed` has the input, the output and the parameters of each layer. It is emptied, so that their memory is used again.
        """
        hidden, outputs, gradient_out = passed[0][0].detach(), [out.detach() for _, out, _ in passed], gradient
        views: list[Tensor] = []
        learned: list[nn.Parameter] = []
        places: list[int] = []
        if not passed[-1][1].requires_grad:  # the group and all layers below it are frozen
            return CapturedGroup(graph, None, hidden, inputs, outputs, gradient_out, None, [], [], [], 0)
        backward, start, gradient_in = torch.cuda.CUDAGraph(), 0, None
        with self.memory.capture(backward):
            while passed:
                x, out, aliases = passed.pop()
                if not out.requires_grad:
                    gradient_in = None
                    continue
                wanted = ([x] if x.requires_grad else []) + aliases
                found = list(torch.autograd.grad(out, wanted, gradient, allow_unused=True))
                gradient_in = found.pop(0) if x.requires_grad else None
                targets = []
                for parameter, g in zip(group.parameters_of_layers[len(passed)], found):
                    if g is None:
                        continue
                    learned.append(parameter)
                    places.append(len(views))
                    views.append(group.gradients[start : start + g.numel()].view(g.shape))
                    targets.append(views[-1])
                    start += g.numel()
                    if gap := -start % ALIGNMENT:
                        views.append(group.gradients[start : start + gap])
                        start += gap
                if targets:
                    torch._foreach_copy_(targets, [g for g in found if g is not None])
                gradient = gradient_in if gradient_in is not None else gradient
                del found, out, x, aliases, wanted
        return CapturedGroup(graph, backward, hidden, inputs, outputs, gradient_out, gradient_in, views, learned, places, start)

    def _warm_up_stream(self, first: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """Run the first layer once. Libraries allocate memory at their first use on a stream, which a capture must not contain."""
        with torch.cuda.stream(self.memory.stream):
            trained = [p for p in self.layers[0].parameters() if p.requires_grad]
            with parameter_aliases(self.layers[0], trained) as aliases:
                out = self.calls[0](first, *args, **kwargs)
            if out.requires_grad:
                torch.autograd.grad(out.sum(), [p for p in (first, *aliases) if p.requires_grad], allow_unused=True)
        torch.cuda.synchronize()
