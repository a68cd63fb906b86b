"""The stacks of layers of a transformers model, and the arguments that their layers get.

Most models have one stack, and all of its layers get the same arguments. A `Stack` passes three kinds of arguments on itself. Tensors
with a gradient that all layers share (the output of an encoder, embeddings of relative positions) travel behind the tokens of the
row, because the only gradient that a CUDA graph returns is that of the row. Layers that alternate between two kinds of rotary
embeddings get both, and each uses its own. An attention that does not use transformers' interface (DeBERTa) gets padded hidden
states, and the rest of its layer computes without padding.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_ddp.speed.padding_free import NeedsPadding, Row, Segments, pack, unpack

CARRIED = ("encoder_hidden_states", "rel_embeddings")  # arguments with a gradient that all layers share
BIASES = ("position_bias", "encoder_decoder_position_bias")  # of T5; the first layer computes them, and the others get them


class SmallTable(torch.autograd.Function):
    """An embedding with few rows. torch's own gradient is slow, because many tokens share a row, and not deterministic."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = len(table)
        return F.embedding(places, table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (places,) = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        here = places.flatten()[None] == torch.arange(ctx.rows, device=places.device)[:, None]
        return None, here.to(flat.dtype) @ flat


class _Inside:
    """What an attention that needs padding reads: the segments of the row, and its hidden states with and without padding."""

    def __init__(self) -> None:
        self.at: Segments | None = None
        self.pair: tuple[Tensor | None, Tensor | None] = (None, None)


class Stack:
    """Layers that are called one after the other, with the row that goes through them."""

    def __init__(self, layers: list[nn.Module], first: int, own_attention: bool):
        self.layers, self.numbers = layers, range(first, first + len(layers))
        self.originals = [layer.forward for layer in layers]
        self.names = list(inspect.signature(type(layers[0]).forward).parameters)[2:]  # without `self` and the hidden states
        biases = [module for layer in layers for module in layer.modules() if hasattr(module, "relative_attention_bias")]
        if len(biases) > 1:
            raise NeedsPadding("each of its layers has its own position bias")
        self.bias: Any = biases[0] if biases else None
        self.own_attention = own_attention  # the attention gets padded hidden states
        self.carries = bool(biases) or own_attention or (first > 0 and "encoder_hidden_states" in self.names)
        self.alternates = False  # whether layers get one of several rotary embeddings; set before the first `call_of`
        self.kinds: list[list[str]] = [[""] for _ in layers]  # the name of the rotary embeddings of each layer
        self.outputs = 0  # of a layer, if that is a tuple
        self.inside = _Inside()
        self.clear()

    def clear(self) -> None:
        self.row: Row | None = None
        self.at: Segments | None = None
        self.given: Any = None
        self.packed: Any = None

    @property
    def is_plain(self) -> bool:
        """Return whether each layer gets the arguments that the model gives it, only without padding."""
        return not self.carries and not self.alternates

    def call_of(self, number: int) -> Callable[..., Any]:
        """Return the function that computes a layer: (row, arguments) -> row."""
        original, kind = self.originals[number - self.numbers[0]], self.kinds[number - self.numbers[0]]
        if self.is_plain:
            return original

        def call(
            row: Tensor, segments: Segments, lengths: list[int], rotary: dict[str, Any], places: Any, **given: Any
        ) -> Tensor:
            hidden, *carried = row.split(lengths, 1) if len(lengths) > 1 else [row]
            given |= {name: rows if name == CARRIED[0] else rows[0] for name, rows in zip(self.carried_names, carried)}
            if self.alternates:
                given["position_embeddings"] = rotary[kind[0]]
            if self.bias is not None:
                given["position_bias"] = self.bias_of(carried[-1], places)
                given |= {name: hidden.new_zeros(1, 1, 1, 1) for name in BIASES[1:] if name in self.names}
            if self.own_attention:
                self.inside.at = segments
            else:
                given["segments"] = segments
            try:
                out = original(hidden, **given)
            finally:
                self.inside.at = None
            if isinstance(out, tuple):
                if not self.outputs:
                    self.outputs = len(out)
                out = out[0]
            return torch.cat([out, *(rows.to(out.dtype) for rows in carried)], 1) if carried else out

        return call

    def enter(self, hidden: Tensor, named: dict[str, Any]) -> tuple[Tensor, list[int]]:
        """Return the row that the first layer gets, and the lengths of its parts: tokens, then what all layers share."""
        parts = [pack(hidden, self.at)]
        self.carried_names = [name for name in CARRIED if isinstance(named.get(name), Tensor)]
        for name in self.carried_names if self.carries else ():
            value = named[name]
            parts.append(pack(value, self.at.source) if name == "encoder_hidden_states" else value[None])
        if self.bias is not None:  # its table, as rows of the same size
            table = self.bias.relative_attention_bias
            table = table(torch.arange(len(table.weight), device=hidden.device)).flatten()  # not its weight: it may have adapters
            parts.append(F.pad(table, (0, -len(table) % hidden.shape[-1])).view(1, -1, hidden.shape[-1]))
        lengths = [part.shape[1] for part in parts]
        return (torch.cat([part.to(hidden.dtype) for part in parts], 1) if len(parts) > 1 else parts[0]), lengths

    def bias_of(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return the position bias of the padded batch: [1, heads, width, width]."""
        number, heads = self.bias.relative_attention_bias.weight.shape
        table = rows.flatten()[: number * heads].view(number, heads)
        return SmallTable.apply(places, table).permute(2, 0, 1)[None]

    def places_of_bias(self, at: Segments) -> Tensor:
        """Return the rows of its table that the position bias consists of: [width, width]."""
        positions = torch.arange(at.shape[1], device=at.slots.device)
        return self.bias._relative_position_bucket(
            positions - positions[:, None],
            bidirectional=not self.bias.is_decoder,
            num_buckets=self.bias.relative_attention_num_buckets,
            max_distance=self.bias.relative_attention_max_distance,
        )


def own_attentions(layers: list[nn.Module]) -> list[nn.Module]:
    """Return the attention of each layer, if it has one that does not use transformers' interface, or else []."""
    found = []
    for layer in layers:
        takers = [m for m in layer.modules() if m is not layer and "attention_mask" in inspect.signature(m.forward).parameters]
        inner = [m for m in takers if not any(other in takers for other in m.modules() if other is not m)]
        if len(inner) != 1 or "get_interface" in inspect.getsource(type(inner[0])):
            return []
        found += inner
    return found


def linear_children(attention: nn.Module) -> list[nn.Module]:
    """Return its projections, with and without adapters."""
    return [m for m in attention.children() if isinstance(m, nn.Linear) or hasattr(m, "base_layer")]


def pad_around(attention: nn.Module, inside: _Inside) -> None:
    """Let an attention get padded hidden states, while its projections of them compute without padding."""
    original = attention.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        at = inside.at
        if at is None:
            return original(hidden_states, *args, **kwargs)
        padded = unpack(hidden_states, at)
        inside.pair = padded, hidden_states
        pad = lambda x: unpack(x, at) if isinstance(x, Tensor) and x.shape[:2] == hidden_states.shape[:2] else x
        out = original(padded, *map(pad, args), **{name: pad(value) for name, value in kwargs.items()})
        inside.pair = None, None
        return (pack(out[0], at), *out[1:]) if isinstance(out, tuple) else pack(out, at)

    attention.forward = forward
    for linear in linear_children(attention):
        linear.forward = functools.partial(_project, linear.forward, inside)


def _project(original: Callable[..., Tensor], inside: _Inside, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    padded, row = inside.pair
    return original(x, *args, **kwargs) if x is not padded else unpack(original(row, *args, **kwargs), inside.at)


def find_rotaries(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Return the rotary embeddings outside of the layers, if there are several, or one that has several kinds; or else []."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    found = [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding") and id(m) not in inside]
    has_kinds = any("layer_type" in inspect.signature(m.forward).parameters for m in found)
    return found if len(found) > 1 or has_kinds else []


def find_stacks(model: nn.Module) -> list[list[nn.Module]]:
    """Return the layers of each stack: one, or those of an encoder and its decoder. Raise NeedsPadding for other models."""
    found = _lists_of_layers(model)
    takes_encoder = lambda layer: "encoder_hidden_states" in inspect.signature(type(layer).forward).parameters
    if len(found) == 2 and getattr(getattr(model, "config", None), "is_encoder_decoder", False) and takes_encoder(found[1][0]):
        return found
    return [layers_of(model)]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformer that is a single stack, in their order. Raise NeedsPadding for other models."""
    stacks = _lists_of_layers(model)
    if len(stacks) != 1:
        raise NeedsPadding(f"the model has {len(stacks)} stacks of layers" if stacks else "its layers were not found")
    if len({type(layer) for layer in stacks[0]}) > 1:
        raise NeedsPadding("its layers have different types")
    return stacks[0]


def _lists_of_layers(model: nn.Module) -> list[list[nn.Module]]:
    if "transformers.modeling_layers" not in sys.modules:  # not imported here, because that takes seconds
        raise NeedsPadding("its layers were not found")
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [
        list(module) for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(isinstance(m, GradientCheckpointingLayer) for m in module)
    ]  # fmt: skip
