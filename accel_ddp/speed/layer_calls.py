"""The layers of a model, called as CUDA graphs or compiled code. A layer gets a subclass of its class, so its hooks and names stay."""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_ddp.engine.ddp import in_plain_order
from accel_ddp.speed.padding_free import NeedsPadding, Segments

Call = Callable[..., Any]
ROTARY = "position_embeddings"


@functools.cache
def _dispatching(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of layers that are called through `LayerCalls`, within all hooks, which gather weights with FSDP."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._dispatch(*args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "plain_class": kind, "__module__": kind.__module__})


def dispatch_layers(layers: Sequence[nn.Module], calls: Sequence[Call]) -> None:
    """Let each module be computed by its function instead of its `forward`."""
    for layer, call in zip(layers, calls, strict=True):
        layer._dispatch = call
        layer.__class__ = _dispatching(type(layer))


def restore_layers(layers: Sequence[nn.Module]) -> None:
    """Let modules compute their `forward` again."""
    for layer in layers:
        layer.__class__ = plain_class(layer)
        del layer._dispatch


def plain_class(layer: nn.Module) -> type[nn.Module]:
    """Return the class of a layer without `LayerCalls`."""
    return getattr(type(layer), "plain_class", type(layer))


class LayerCalls:
    """Calls layers that compute rows of texts: `run` from CUDA graphs, `calls` with compiled code, or `plain` as they are.

    A graph replays all layers at once, so every layer gets the arguments of all of them: the same objects, and of several rotary
    embeddings each layer takes its own.
    """

    def __init__(self, layers: list[nn.Module], rotaries: list[nn.Module]):
        self.layers, self.originals = layers, [layer.forward for layer in layers]
        self.alternates = bool(rotaries)  # layers get one of several rotary embeddings
        self.kinds = [[""] for _ in layers]  # the name of the rotary embeddings of each layer
        self.plain: list[Call] = [self._call_of(number) for number in range(len(layers))]
        self.calls = self.plain
        self.run: Call | None = None
        self.at: Segments | None = None  # of the model that runs
        self.given: tuple[tuple, dict[str, Any]] | None = None  # arguments of the last layer
        self.passed: tuple[tuple, dict[str, Any]] = ((), {})  # what was passed on for them
        self.rotary: dict[str, Any] = {}  # what the rotary embeddings of this pass have returned
        self.rotaries, self.rotary_hooks = rotaries, []

    @property
    def is_plain(self) -> bool:
        """Return whether each layer gets the arguments that the model gives it."""
        return not self.alternates

    @property
    def targets(self) -> list[Any]:
        """Return what is compiled: layers, or functions that call them with the arguments of all."""
        return [*self.plain] if self.alternates else [*self.layers]

    def capture(self, graphs_of: Callable[[list[nn.Module], list[Call]], Any]) -> list[Any]:
        """Call the layers through `graphs_of(layers, calls)`, which captures them as CUDA graphs, and return these."""
        graphs = graphs_of(self.layers, self.calls)
        self.run = graphs.call
        return [graphs]

    def attach(self) -> None:
        """Let the layers be called through this object."""
        self.rotary_hooks = [rotary.register_forward_hook(self._keep_rotary) for rotary in self.rotaries]
        dispatch_layers(self.layers, [functools.partial(self._dispatch, number) for number in range(len(self.layers))])

    def detach(self) -> None:
        restore_layers(self.layers)
        for hook in self.rotary_hooks:
            hook.remove()

    def begin_pass(self) -> None:
        """Forget the arguments of the last forward pass."""
        self.given, self.rotary = None, {}

    def _keep_rotary(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.rotary[str(len(self.rotary))] = output

    def _call_of(self, number: int) -> Call:
        """Return the function that computes a layer: (row, arguments) -> row."""
        original, kind = self.originals[number], self.kinds[number]
        if not self.alternates:
            return original

        def call(row: Tensor, *args: Any, rotary: dict[str, Any], **given: Any) -> Any:
            return original(row, *args, **{ROTARY: rotary[kind[0]]}, **given)

        return call

    def _dispatch(self, number: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("segments") is None or (self.run is None and self.calls is self.plain):
            return self.originals[number](hidden_states, *args, **kwargs)
        args, kwargs = self._shared(number, args, kwargs)
        is_plain = in_plain_order.get()
        if self.run is not None and not is_plain and torch.is_grad_enabled():
            return self.run(number, hidden_states, args, kwargs)
        # Also without gradients: GradCache repeats the pass with gradients and must draw the same dropout, and compiled code draws
        # different values than plain code. An evaluation does not run often enough for its own compilation.
        uses_calls = not is_plain and (torch.is_grad_enabled() or self.layers[number].training)
        return (self.calls if uses_calls else self.plain)[number](hidden_states, *args, **kwargs)

    def _shared(self, number: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a layer, as the same objects as for the layer before it if they are equal.

        That case is checked first, because the host limits the speed.
        """
        own = kwargs.pop(ROTARY, None) if self.alternates else None
        if self.alternates:
            found = [kind for kind, pair in self.rotary.items() if pair is own]
            if not found and self.at is None and self.kinds[number][0]:  # computed again in the backward pass of another call
                return args, kwargs | {"rotary": {self.kinds[number][0]: own}}
            if not found:
                raise NeedsPadding("its layers get rotary embeddings of an unknown origin")
            self.kinds[number][:] = found[:1]
        given = self.given
        if (
            given
            and len(kwargs) == len(given[1]) and len(args) == len(given[0])
            and all(map(operator.is_, args, given[0]))
            and all(map(operator.is_, map(given[1].get, kwargs, itertools.repeat(self)), kwargs.values()))
        ):  # fmt: skip
            return self.passed
        self.given = args, kwargs
        self.passed = args, kwargs | {"rotary": dict(self.rotary)} if self.alternates else kwargs
        return self.passed
