"""The stacks of layers of a transformers model, and the arguments that their layers get.

Most models have one stack, and all of its layers get the same arguments. A `Stack` passes three kinds of arguments on itself. Tensors
with a gradient that all layers share (the output of an encoder, embeddings of relative positions) travel behind the tokens of the
row, because the only gradient that a CUDA graph returns is that of the row. An attention that does not use transformers' interface
(DeBERTa) gets padded hidden states, and the rest of its layer computes without padding.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_ddp.engine.rows import Grid, Rows, pack, unpack
from accel_ddp.speed.layer_calls import dispatch_layers, restore_layers
from accel_ddp.speed.padding_free import GROUPED, NAME, NeedsPadding, Segments

CARRIED = ("encoder_hidden_states", "rel_embeddings")  # arguments with a gradient that all layers share
DROPPED = ("layerdrop", "layer_drop", "encoder_layerdrop", "decoder_layerdrop")  # options of configs
WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention")
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


class SmallEmbedding(nn.Embedding):
    """An embedding with few rows, whose gradient is fast and deterministic."""

    def forward(self, places: Tensor) -> Tensor:
        return SmallTable.apply(places, self.weight)


def replace_tables(model: nn.Module) -> None:
    """Compute embeddings with few rows, such as token types, as `SmallEmbedding` on a GPU."""
    for m in model.modules() if next(model.parameters()).is_cuda else ():
        if type(m) is nn.Embedding and m.num_embeddings <= 16 and m.padding_idx is None and m.max_norm is None and not m.sparse:
            m.__class__ = SmallEmbedding


def restore_tables(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is SmallEmbedding:
            module.__class__ = nn.Embedding


class _Inside:
    """What an attention that needs padding reads: the padded batch, and its hidden states with and without padding."""

    def __init__(self) -> None:
        self.at: Grid | None = None
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
        self.outputs = 0  # of a layer, if that is a tuple
        self.inside = _Inside()
        self.clear()

    def clear(self) -> None:
        self.rows: Rows | None = None
        self.grid: Grid | None = None  # of the padded batch that enters and leaves the stack
        self.at: Segments | None = None
        self.given: Any = None
        self.packed: Any = None

    def install(self, attentions: list[nn.Module]) -> None:
        """Let the attentions of the layers get padded hidden states, while their projections of them compute without padding."""
        for attention in attentions:
            linears = linear_children(attention)
            calls = [functools.partial(_project, linear.forward, self.inside) for linear in linears]
            dispatch_layers([attention, *linears], [functools.partial(_pad_around, attention.forward, self.inside), *calls])

    def remove(self, attentions: list[nn.Module]) -> None:
        for attention in attentions:
            restore_layers([attention, *linear_children(attention)])

    def call_of(self, number: int) -> Callable[..., Any]:
        """Return the function that computes a layer: (row, arguments) -> row."""
        original = self.originals[number - self.numbers[0]]

        def call(row: Tensor, segments: Segments, lengths: list[int], places: Any, **given: Any) -> Tensor:
            hidden, *carried = row.split(lengths, 1) if len(lengths) > 1 else [row]
            given |= {name: rows if name == CARRIED[0] else rows[0] for name, rows in zip(self.carried_names, carried)}
            if self.bias is not None:
                given["position_bias"] = self.bias_of(carried[-1], places)
                given |= {name: hidden.new_zeros(1, 1, 1, 1) for name in BIASES[1:] if name in self.names}
            if self.own_attention:
                self.inside.at = segments.grid
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

    def enter(self, hidden: Tensor, named: dict[str, Any], source: Grid) -> tuple[Tensor, list[int]]:
        """Return the row that the first layer gets, and the lengths of its parts: tokens, then what all layers share."""
        parts = [pack(hidden, self.grid)]
        self.carried_names = [name for name in CARRIED if isinstance(named.get(name), Tensor)]
        for name in self.carried_names:
            value = named[name]
            parts.append(pack(value, source) if name == "encoder_hidden_states" else value[None])
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

    def places_of_bias(self, grid: Grid) -> Tensor:
        """Return the rows of its table that the position bias consists of: [width, width]."""
        positions = torch.arange(grid.mask.shape[1], device=grid.mask.device)
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


def _pad_around(original: Callable[..., Any], inside: _Inside, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    at = inside.at
    if at is None:
        return original(hidden_states, *args, **kwargs)
    padded = unpack(hidden_states, at)
    inside.pair = padded, hidden_states
    pad = lambda x: unpack(x, at) if isinstance(x, Tensor) and x.shape[:2] == hidden_states.shape[:2] else x
    out = original(padded, *map(pad, args), **{name: pad(value) for name, value in kwargs.items()})
    inside.pair = None, None
    return (pack(out[0], at), *out[1:]) if isinstance(out, tuple) else pack(out, at)


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


def expert_configs(owner: nn.Module, configs: list[Any]) -> list[Any]:
    """Return the configs of experts whose products `padding_free.experts` can replace."""
    has_experts = any(type(module).__name__.endswith("Experts") for module in owner.modules())
    return [c for c in configs if has_experts and getattr(c, "_experts_implementation", None) in (GROUPED, NAME)]


def windows_of(configs: Iterable[Any]) -> set[int]:
    """Return the windows of attention that configs name."""
    found = [getattr(config, name, None) for config in configs for name in WINDOWS]
    return {int(window) for window in found if window}


def head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return size or config.hidden_size // config.num_attention_heads


def flash_size(config: Any, device: torch.device) -> int:
    """Return the size of a head for flash attention on this GPU, or 0 if that cannot compute it."""
    latent = [getattr(config, name, None) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    size = sum(latent) if all(latent) else head_size(config)
    return size if torch.cuda.get_device_capability(device)[0] >= 8 and size % 8 == 0 and size <= 256 else 0
