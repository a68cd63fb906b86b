"""What a recording of some layers is, and how it is replayed as a node of autograd's graph."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

ALIGNED = 64  # numbers; sums over a gradient are not the same to the last bit where it begins at another kind of address


class Group:
    """Layers that are recorded together, and where their gradients lie."""

    def __init__(self, first: int, layers: list[nn.Module]):
        self.first, self.layers = first, layers
        self.of_layers = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
        self.parameters = [p for parameters in self.of_layers for p in parameters]
        self.gradients: Tensor | None = None  # written by every replay of a backward pass

    def reserve(self, device: torch.device) -> None:
        if self.gradients is None and self.parameters:
            size = sum(p.numel() + -p.numel() % ALIGNED for p in self.parameters)
            self.gradients = torch.empty(size, dtype=self.parameters[0].dtype, device=device)

    def make_room(self) -> None:
        """Autograd keeps what it gets as a parameter's gradient. What lies there of an earlier micro-batch goes elsewhere."""
        held = [p for p in self.parameters if p.grad is not None]
        if not held:
            return
        place = self.gradients.untyped_storage().data_ptr()
        held = [p for p in held if p.grad.untyped_storage().data_ptr() == place]
        if held:
            copy = self.gradients.clone()
            for p in held:
                p.grad = copy.as_strided(p.grad.shape, p.grad.stride(), p.grad.storage_offset())


class Shared:
    """What all recordings have in common."""

    def __init__(self, device: torch.device):
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self.device = device
        # (first layer, shape) whose backward pass is to come, and which of their forward passes that was.
        self.in_flight: dict[tuple[int, Any], object] = {}
        self.shape: Any = None  # theirs

    @contextlib.contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Not `torch.cuda.graph`, which gives all memory that is kept back to the device each time: slow steps follow."""
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                try:
                    graph.capture_end()
                except Exception:
                    # Torch leaves its allocator in the state of recording, in which it gives no memory back any more.
                    with contextlib.suppress(Exception):
                        torch._C._cuda_endAllocateToPool(self.device.index or 0, self.pool)
                        torch._C._cuda_releasePool(self.device.index or 0, self.pool)
                    raise


class Recording(NamedTuple):
    """Of a group of layers, for one shape."""

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph | None  # None where nothing is learned
    hidden: Tensor  # read by `forward`
    inputs: list[Tensor]  # read by both; the same for all layers of a shape
    outs: list[Tensor]  # of each layer
    gradient_out: Tensor  # read by `backward`
    gradient_in: Tensor | None
    gradients: list[Tensor]  # one after the other in `Group.gradients`, with what lies between them
    parameters: list[nn.Parameter]  # those that have a gradient
    places: list[int]  # of theirs among the gradients
    size: int  # of all of them


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shared: Shared, key: Any, group: Group, it: Recording, hidden: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.shared, ctx.key, ctx.group, ctx.it = shared, key, group, it
        ctx.token = shared.in_flight[key] = object()
        ctx.set_materialize_grads(False)
        if hidden.data_ptr() != it.hidden.data_ptr():
            it.hidden.copy_(hidden)
        it.forward.replay()
        return tuple(out.detach() for out in it.outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_layers: Tensor | None) -> tuple:
        it, (*between, gradient) = ctx.it, of_layers
        if ctx.shared.in_flight.pop(ctx.key, None) is not ctx.token:
            raise RuntimeError("a backward pass for the second time, or after the next micro-batch's forward: add --compile off")
        if gradient is None or any(g is not None for g in between):
            raise RuntimeError("the loss uses what comes out of a layer before the last one: add --compile off")
        if gradient.data_ptr() != it.gradient_out.data_ptr():
            it.gradient_out.copy_(gradient)
        found: tuple = ()
        if it.gradients:
            ctx.group.make_room()
        it.backward.replay()
        if it.gradients:
            found = torch._C._nn.unflatten_dense_tensors(ctx.group.gradients[: it.size], it.gradients)
        inward = None if it.gradient_in is None else it.gradient_in.detach()
        return None, None, None, None, inward, *[found[place] for place in it.places]


@contextlib.contextmanager
def twins_of(layer: nn.Module, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
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


def grouped(layers: list[nn.Module], least: float) -> list[Group]:
    """Neighbours, with at least so many bytes of gradients each, but for the first group: it is the last to be sent."""
    groups: list[Group] = []
    end = len(layers)
    size = 0
    for first in reversed(range(len(layers))):
        size += sum(p.numel() * p.element_size() for p in layers[first].parameters() if p.requires_grad)
        if size >= least or first == 0:
            groups.append(Group(first, layers[first:end]))
            end, size = first, 0
    return groups[::-1]
