"""Layers that are captured as CUDA graphs, so one launch starts all of their kernels.

The speed of small and medium models is limited by how fast the host launches kernels. With a CUDA graph of the forward pass of a
group of layers, and one of its backward pass, each pass is one launch. A group is one node in autograd's graph. With one rank, all
layers are one group. With several ranks, a group is as large as one of DDP's buckets, so DDP reduces the gradients of a group
while the groups below it still compute. Hooks, gradient accumulation and frozen parameters work as without CUDA graphs. There is
one difference: the next replay overwrites a gradient that is kept beyond its step.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from accel_ddp import compat
from accel_ddp.engine.rehearsal import move_gradients
from accel_ddp.speed.modules import converted_together, gradients_written_to
from accel_ddp.text import first_line

log = logging.getLogger(__name__)

# Numbers, not bytes. The last bit of a sum over a gradient depends on the alignment of the gradient's address.
ALIGNMENT = 64
UNSUPPORTED = "Layers that are captured as CUDA graphs do not support this. Add --compile off."


class LayerGroup:
    """Neighboring layers that are captured together, and the memory of their gradients."""

    def __init__(self, first: int, layers: list[nn.Module]):
        self.first, self.layers = first, layers
        self.parameters_of_layers = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
        self.parameters = [p for parameters in self.parameters_of_layers for p in parameters]
        self.gradients: Tensor | None = None  # every replay of a backward pass writes to it


class CapturedGroup(NamedTuple):
    """The CUDA graphs of a group of layers for one shape, and the tensors that they read and write."""

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph | None  # None if nothing in the group or below it is trained
    hidden: Tensor  # `forward` reads it
    inputs: list[Tensor]  # both read them; they are the same for all layers of a shape
    outputs: list[Tensor]  # of each layer
    gradient_out: Tensor  # of the last output; `backward` reads it
    gradient_in: Tensor | None  # of `hidden`; `backward` writes it
    gradients: list[Tensor]  # one after the other in `LayerGroup.gradients`, including the gaps between them
    parameters: list[nn.Parameter]  # those that have a gradient
    places: list[int]  # of their gradients in `gradients`
    size: int  # of all gradients together


class Token:
    """A forward pass. An `object` cannot be referenced weakly."""


class Replay(torch.autograd.Function):
    """Runs the layers of a group: (hidden states, parameters) -> the output of each layer."""

    @staticmethod
    def forward(
        ctx: Any,
        owner: "GraphedLayers",
        key: Any,
        group: LayerGroup,
        captured: CapturedGroup,
        hidden: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.owner, ctx.key, ctx.group, ctx.captured = owner, key, group, captured
        ctx.token = owner.pending[key] = Token()
        ctx.set_materialize_grads(False)
        if hidden.data_ptr() != captured.hidden.data_ptr():
            captured.hidden.copy_(hidden)
        captured.forward.replay()
        return tuple(output.detach() for output in captured.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: Tensor | None) -> tuple:
        captured, (*of_earlier_layers, gradient) = ctx.captured, of_outputs
        if ctx.owner.pending.pop(ctx.key, None) is not ctx.token:
            raise RuntimeError(f"a backward pass runs twice, or after the forward pass of the next micro-batch. {UNSUPPORTED}")
        if gradient is None or any(g is not None for g in of_earlier_layers):
            raise RuntimeError(f"the loss uses the output of a layer before the last one. {UNSUPPORTED}")
        if gradient.data_ptr() != captured.gradient_out.data_ptr():
            captured.gradient_out.copy_(gradient)
        found: tuple = ()
        if captured.gradients:
            # Autograd stores the tensor of the previous replay as the gradient, without a copy. This replay overwrites it.
            move_gradients(ctx.group.parameters, ctx.group.gradients)
        captured.backward.replay()
        if captured.gradients:
            found = compat.split_like(ctx.group.gradients[: captured.size], captured.gradients)
        gradient_in = None if captured.gradient_in is None else captured.gradient_in.detach()
        return None, None, None, None, gradient_in, *[found[place] for place in captured.places]


@contextlib.contextmanager
def parameter_aliases(layer: nn.Module, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Replace parameters of the layer by other ones over the same memory inside the block, and yield these.

    DDP holds the node of each parameter in autograd's graph, and that node belongs to another stream. A capture that uses the
    node would have to wait for that stream, which CUDA does not allow.
    """
    alias_of = {id(p): nn.Parameter(p.detach()) for p in parameters}
    owners = [
        (module, name, p) for module in layer.modules() for name, p in compat.own_parameters(module).items() if id(p) in alias_of
    ]
    for module, name, p in owners:
        compat.own_parameters(module)[name] = alias_of[id(p)]
    try:
        yield [alias_of[id(p)] for p in parameters]
    finally:
        for module, name, p in owners:
            compat.own_parameters(module)[name] = p


class _Memory:
    """Memory of a tensor, without a reference that keeps it from being used again."""

    def __init__(self, tensor: Tensor):
        place = (tensor.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": place, "version": 3}


def _shared(output: Tensor) -> Tensor:
    """Return a tensor over the same memory, which the graphs of other shapes may use too.

    The graphs keep the memory, and only one shape at a time is between its forward and its backward pass. The outputs of all layers of
    a 1.4B model are 1 GB for each shape.
    """
    if not output.is_contiguous():
        return output
    return torch.as_tensor(_Memory(output), device=output.device).view(output.dtype).view(output.shape)


def group_layers(layers: list[nn.Module], min_bytes: float) -> list[LayerGroup]:
    """Return groups of neighboring layers. Each has at least `min_bytes` of gradients.

    The first group may have less, because its gradients are reduced last and nothing could overlap with them.
    """
    groups: list[LayerGroup] = []
    end = len(layers)
    size = 0
    for first in reversed(range(len(layers))):
        size += sum(p.numel() * p.element_size() for p in layers[first].parameters() if p.requires_grad)
        if size >= min_bytes or first == 0:
            groups.append(LayerGroup(first, layers[first:end]))
            end, size = first, 0
    return groups[::-1]


MAX_SHAPES = 32  # micro-batches of further shapes run without CUDA graphs
# A captured shape holds the memory of a micro-batch until the end, and a shape that is not captured needs as much besides it.
GRAPH_MEMORY = 2.5  # times the memory of a micro-batch
MIN_FREE_MEMORY = 0.1  # fraction of the GPU's memory; with less, no further shape is captured
RETRY_AFTER = 100  # micro-batches, if there was not enough memory


def _as_in_backward(device: torch.device) -> torch.autocast:
    """Turn autocast off. A capture runs within the forward pass of the model, but a plain backward pass is not under autocast."""
    return torch.autocast(device.type, enabled=False)


class GraphedLayers:
    """Calls a stack of layers. A shape is captured when it occurs; the first one when it occurs again, because that compiles."""

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
        self.device, self.pool, self.stream = device, torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # of all graphs
        # Groups whose backward pass has not run yet: (first layer, key of the shape) -> a token of the forward pass. It is gone with
        # the graph of a forward pass whose backward pass will not run.
        self.pending: WeakValueDictionary[tuple[int, Any], Token] = WeakValueDictionary()
        self.pending_key: Any = None  # the key of their shape
        self.seen: set[Any] = set()  # keys of shapes that went through all layers
        self.largest = 0  # numbers in the hidden states of the largest of them
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
        if number == 0:
            self.replayed = 0, None
            self._inspect(hidden, args, kwargs)
            # Once a shape is captured, libraries are warm, and capturing another one takes the host no longer than a pass without
            # it. A larger one is first computed, because its pass is the estimate of the memory that it needs.
            is_soon = bool(self.captured) and hidden.numel() <= self.largest
            is_new = self.key not in self.captured and len(self.captured) < MAX_SHAPES and (is_soon or self.key in self.seen)
            if is_new and not self.pending and not self.disabled_reason:
                self._try_to_capture(hidden)
        elif kwargs is not self.arguments[1] or (
            args is not self.arguments[0] and [*map(id, args)] != [*map(id, self.arguments[0])]
        ):
            if self._is_inside(number):
                raise RuntimeError(f"a layer gets other arguments than the first layer. {UNSUPPORTED}")
            self._disable("the layers get different arguments")
        is_unmodified = number == 0 or compat.version_of(hidden) == self.last_version
        if self._is_inside(number):
            first, outputs = self.replayed
            if hidden is not outputs[number - first - 1] or not is_unmodified:
                raise RuntimeError(f"the input of a layer is not the unchanged output of the layer before it. {UNSUPPORTED}")
            out = outputs[number - first]
        elif not self.disabled_reason and self.key in self.captured and (found := self._replay(number, hidden)) is not None:
            self.replayed = number, found
            out = found[0]
        else:
            self.replayed = 0, None
            self.is_chain = self.is_chain and (number == 0 or hidden is self.last_output) and is_unmodified
            out = self.last_output = self.calls[number](hidden, *args, **kwargs)
        self.last_version = compat.version_of(out) if isinstance(out, Tensor) else 0
        if number == len(self.layers) - 1:
            self.replayed, self.last_output = (0, None), None  # so that their memory can be freed
            self.largest = max(self.largest, hidden.numel())
            if len(self.seen) < MAX_SHAPES and not self.disabled_reason:
                self.seen.add(self.key)
        return out

    def _is_inside(self, number: int) -> bool:
        """Return whether the last replay has computed this layer together with an earlier one."""
        first, outputs = self.replayed
        return outputs is not None and first < number < first + len(outputs)

    def _replay(self, number: int, hidden: Tensor) -> tuple[Tensor, ...] | None:
        """Return the outputs of all layers of the group that begins here, or None if the group must run without its graph."""
        place = next((i for i, group in enumerate(self.groups) if group.first == number), None)
        if place is None:
            return None  # the first layer of the group ran without a graph too
        pending, group, key = self.pending, self.groups[place], self.key
        if (number, key) in pending or (pending and self.pending_key != key):
            return None  # a backward pass that has not run yet needs the memory that the replay would overwrite
        self.pending_key = key
        captured = self.captured[key][place]
        self._copy_inputs(captured.inputs)
        return Replay.apply(self, (number, key), group, captured, hidden, *captured.parameters)

    def _inspect(self, hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """Store the arguments besides the hidden states, which are the same objects for all layers, and compute the key."""
        self.arguments = args, kwargs
        self.leaves, self.spec = compat.flatten((args, kwargs))
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
        modes = tuple([layer.training for layer in self.layers])
        self.key = (tuple(hidden.shape), hidden.dtype, hidden.requires_grad, modes, others)

    def _disable(self, reason: str) -> None:
        self.disabled_reason = reason
        log.warning("the layers cannot be captured as CUDA graphs; training continues without them: %s", reason)

    def _discard_graphs(self) -> None:
        """Discard all CUDA graphs and their memory."""
        self.groups, self.copied = [], (None, [])
        self.captured.clear()
        self.seen.clear()
        self.pool = torch.cuda.graph_pool_handle()  # torch does not take a handle again whose graphs are gone

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
            torch.cuda.synchronize()
            if self.key in self.seen:  # otherwise its first pass may have to compile, which a capture must not contain
                first: BaseException = error
                while first.__context__ is not None:
                    first = first.__context__
                self._disable(f"{type(first).__name__}: {first_line(first)}"[:200])
                self._discard_graphs()
            elif not self.captured:
                self.pool = torch.cuda.graph_pool_handle()
        generator.set_state(drawn)

    @contextlib.contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture the block. `torch.cuda.graph` would return all cached memory to the device each time, and slow steps follow."""
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                try:
                    graph.capture_end()
                except Exception:
                    compat.end_failed_capture(self.device.index or 0, self.pool)
                    raise

    def _capture(self, hidden: Tensor) -> list[CapturedGroup]:
        """Capture the forward passes of all groups and then, in the opposite order, their backward passes."""
        if not self.groups:
            self.groups = group_layers(self.layers, self.group_bytes if self.is_chain else 0)
        if len({p.dtype for group in self.groups for p in group.parameters}) > 1:
            raise ValueError("the parameters have several types")
        for group in self.groups:
            if group.gradients is None and group.parameters:
                size = sum(p.numel() + -p.numel() % ALIGNMENT for p in group.parameters)
                group.gradients = torch.empty(size, dtype=group.parameters[0].dtype, device=hidden.device)
        inputs = [x.clone() for x in self.inputs]
        first = hidden.detach().clone().requires_grad_(hidden.requires_grad)
        torch.cuda.synchronize()
        was_enabled = torch.is_autocast_cache_enabled()
        if not self.is_compiled:  # compiled code contains its casts, and would be compiled again
            torch.set_autocast_cache_enabled(False)  # a cast from the cache would not be repeated in a replay
        try:
            tensors = iter(inputs)
            leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
            args, kwargs = self.spec.unflatten(leaves)
            self._warm_up_stream(first, args, kwargs)
            forward_passes, x = [], first
            for group in self.groups:
                graph, passed = torch.cuda.CUDAGraph(), []
                with self._capturing(graph), converted_together(group.layers):
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
        return [one._replace(outputs=[_shared(out) for out in one.outputs]) for one in done[::-1]]

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
        with self._capturing(backward):
            while passed:
                x, out, aliases = passed.pop()
                if not out.requires_grad:
                    gradient_in = None
                    continue
                parameters = group.parameters_of_layers[len(passed)]
                first, targets = len(places), []
                for parameter in parameters:
                    places.append(len(views))
                    targets.append(group.gradients[start : start + parameter.numel()].view(parameter.shape))
                    views.append(targets[-1])
                    start += parameter.numel()
                    if gap := -start % ALIGNMENT:
                        views.append(group.gradients[start : start + gap])
                        start += gap
                wanted = ([x] if x.requires_grad else []) + aliases
                with gradients_written_to(aliases, targets), _as_in_backward(hidden.device):
                    found = list(torch.autograd.grad(out, wanted, gradient, allow_unused=True))
                gradient_in = found.pop(0) if x.requires_grad else None
                used = [i for i, g in enumerate(found) if g is not None]
                learned += [parameters[i] for i in used]
                places[first:] = [places[first + i] for i in used]
                if elsewhere := [i for i in used if found[i].data_ptr() != targets[i].data_ptr()]:
                    compat.copy_all([targets[i] for i in elsewhere], [found[i] for i in elsewhere])
                gradient = gradient_in if gradient_in is not None else gradient
                del found, out, x, aliases, wanted
        return CapturedGroup(graph, backward, hidden, inputs, outputs, gradient_out, gradient_in, views, learned, places, start)

    def _warm_up_stream(self, first: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """Run the first layer once. Libraries allocate memory at their first use on a stream, which a capture must not contain."""
        with torch.cuda.stream(self.stream):
            buffers = [(buffer, buffer.clone(), compat.version_of(buffer)) for buffer in self.layers[0].buffers()]
            trained = [p for p in self.layers[0].parameters() if p.requires_grad]
            with parameter_aliases(self.layers[0], trained) as aliases:
                out = self.calls[0](first, *args, **kwargs)
            if out.requires_grad:
                with _as_in_backward(first.device):
                    torch.autograd.grad(out.sum(), [p for p in (first, *aliases) if p.requires_grad], allow_unused=True)
            for buffer, before, version in buffers:
                if compat.version_of(buffer) != version:
                    buffer.copy_(before)
        torch.cuda.synchronize()
