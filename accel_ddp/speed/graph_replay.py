"""A group of layers that is captured as CUDA graphs, and its replay as a node of autograd's graph."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from accel_ddp.training.update import move_gradients

# Numbers, not bytes. The last bit of a sum over a gradient depends on the alignment of the gradient's address.
ALIGNMENT = 64


class LayerGroup:
    """Neighbouring layers that are captured together, and the memory of their gradients."""

    def __init__(self, first: int, layers: list[nn.Module]):
        self.first, self.layers = first, layers
        self.parameters_of_layers = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
        self.parameters = [p for parameters in self.parameters_of_layers for p in parameters]
        self.gradients: Tensor | None = None  # every replay of a backward pass writes to it

    def allocate_gradients(self, device: torch.device) -> None:
        if self.gradients is None and self.parameters:
            size = sum(p.numel() + -p.numel() % ALIGNMENT for p in self.parameters)
            self.gradients = torch.empty(size, dtype=self.parameters[0].dtype, device=device)


class GraphMemory:
    """The memory pool and the stream that all CUDA graphs of a model share, and which of their memory is in use."""

    def __init__(self, device: torch.device):
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self.device = device
        # Groups whose backward pass has not run yet: (first layer, key of the shape) -> a token of the forward pass.
        self.pending: dict[tuple[int, Any], object] = {}
        self.pending_key: Any = None  # the key of their shape

    @contextlib.contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture the block. `torch.cuda.graph` would return all cached memory to the device each time, and slow steps follow."""
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                try:
                    graph.capture_end()
                except Exception:
                    # torch leaves its allocator in the state of a capture, in which it returns no memory to the device.
                    with contextlib.suppress(Exception):
                        torch._C._cuda_endAllocateToPool(self.device.index or 0, self.pool)
                        torch._C._cuda_releasePool(self.device.index or 0, self.pool)
                    raise


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


class Replay(torch.autograd.Function):
    """Runs the layers of a group: (hidden states, parameters) -> the output of each layer."""

    @staticmethod
    def forward(
        ctx: Any, memory: GraphMemory, key: Any, group: LayerGroup, captured: CapturedGroup, hidden: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.memory, ctx.key, ctx.group, ctx.captured = memory, key, group, captured
        ctx.token = memory.pending[key] = object()
        ctx.set_materialize_grads(False)
        if hidden.data_ptr() != captured.hidden.data_ptr():
            captured.hidden.copy_(hidden)
        captured.forward.replay()
        return tuple(output.detach() for output in captured.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: Tensor | None) -> tuple:
        captured, (*of_earlier_layers, gradient) = ctx.captured, of_outputs
        if ctx.memory.pending.pop(ctx.key, None) is not ctx.token:
            raise RuntimeError(
                "a backward pass runs a second time, or after the forward pass of the next micro-batch. Layers that are captured "
                "as CUDA graphs do not support this. Add --compile off."
            )
        if gradient is None or any(g is not None for g in of_earlier_layers):
            raise RuntimeError(
                "the loss uses the output of a layer before the last one. Layers that are captured as CUDA graphs do not support "
                "this. Add --compile off."
            )
        if gradient.data_ptr() != captured.gradient_out.data_ptr():
            captured.gradient_out.copy_(gradient)
        found: tuple = ()
        if captured.gradients:
            # Autograd stores the tensor of the previous replay as the gradient, without a copy. This replay overwrites it.
            move_gradients(ctx.group.parameters, ctx.group.gradients)
        captured.backward.replay()
        if captured.gradients:
            found = torch._C._nn.unflatten_dense_tensors(ctx.group.gradients[: captured.size], captured.gradients)
        gradient_in = None if captured.gradient_in is None else captured.gradient_in.detach()
        return None, None, None, None, gradient_in, *[found[place] for place in captured.places]


@contextlib.contextmanager
def parameter_aliases(layer: nn.Module, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Replace parameters of the layer by other ones over the same memory inside of the block, and yield these.

    DDP holds the node of each parameter in autograd's graph, and that node belongs to another stream. A capture that uses the
    node would have to wait for that stream, which CUDA does not allow.
    """
    alias_of = {id(p): nn.Parameter(p.detach()) for p in parameters}
    owners = [(module, name, p) for module in layer.modules() for name, p in module._parameters.items() if id(p) in alias_of]
    for module, name, p in owners:
        module._parameters[name] = alias_of[id(p)]
    try:
        yield [alias_of[id(p)] for p in parameters]
    finally:
        for module, name, p in owners:
            module._parameters[name] = p


def group_layers(layers: list[nn.Module], min_bytes: float) -> list[LayerGroup]:
    """Return groups of neighbouring layers. Each has at least `min_bytes` of gradients.

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
