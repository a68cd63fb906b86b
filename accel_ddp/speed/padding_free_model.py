"""A transformers model whose layers compute without padding, if that gives the same result as padding.

Most models have one stack of layers, and all of its layers get the same arguments. Three kinds of arguments differ, so that a `Stack`
passes them on itself. Tensors with a gradient that all layers share (the output of an encoder, embeddings of relative positions)
travel behind the tokens of the row, because CUDA graphs can return no other gradients than that of the row. Rotary embeddings of
layers that alternate between two kinds are given to all layers, and each uses its own. An attention that is not transformers' own
interface (DeBERTa) gets padded hidden states, and the rest of its layers computes without padding.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_ddp.speed import padding_free
from accel_ddp.speed.padding_free import GROUPED, NAME, REPLACED, NeedsPadding, Row, Segments, is_active, pack, unpack
from accel_ddp.training.losses import CurrentBatch, current_batch
from accel_ddp.training.padding_check import without_tf32


class _SmallTable(torch.autograd.Function):
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


def small_tables(model: nn.Module) -> list[nn.Embedding]:
    """Return embeddings with few rows, such as token types."""
    plain = lambda m: type(m) is nn.Embedding and m.padding_idx is None and m.max_norm is None and not m.sparse
    return [module for module in model.modules() if plain(module) and module.num_embeddings <= 16]


def _look_up(table: nn.Embedding, places: Tensor) -> Tensor:
    return _SmallTable.apply(places, table.weight)


class _Inside:
    """What an attention that needs padding reads: the segments of the row, and its hidden states with and without padding."""

    at: Segments | None = None
    pair: tuple[Tensor | None, Tensor | None] = (None, None)


CARRIED = ("encoder_hidden_states", "rel_embeddings")  # arguments with a gradient that all layers share
BIASES = ("position_bias", "encoder_decoder_position_bias")  # of T5; the first layer computes them, and the others get them


class Stack:
    """Layers that are called one after the other, with the row that goes through them."""

    def __init__(self, layers: list[nn.Module], first: int, own_attention: bool):
        self.layers, self.first, self.last = layers, first, first + len(layers) - 1
        self.originals = [layer.forward for layer in layers]
        parameters = list(inspect.signature(type(layers[0]).forward).parameters)
        self.names = parameters[2:]  # without `self` and the hidden states
        biases = [module for layer in layers for module in layer.modules() if hasattr(module, "relative_attention_bias")]
        if len(biases) > 1:
            raise NeedsPadding("each of its layers has its own position bias")
        self.bias: Any = biases[0] if biases else None
        self.own_attention = own_attention  # the attention gets padded hidden states
        self.carries = bool(biases) or own_attention or (first > 0 and "encoder_hidden_states" in self.names)
        self.alternates = False  # whether layers get one of several rotary embeddings
        self.kinds: list[list[str]] = [[""] for _ in layers]  # the name of the rotary embeddings of each layer
        self.outputs = 0  # of a layer, if that is a tuple
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
        original, kind = self.originals[number - self.first], self.kinds[number - self.first]
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
                _Inside.at = segments
            else:
                given["segments"] = segments
            try:
                out = original(hidden, **given)
            finally:
                _Inside.at = None
            if isinstance(out, tuple):
                self.outputs = self.outputs or len(out)
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
            table = self.bias.relative_attention_bias.weight.flatten()
            parts.append(F.pad(table, (0, -len(table) % hidden.shape[-1])).view(1, -1, hidden.shape[-1]))
        lengths = [part.shape[1] for part in parts]
        return (torch.cat([part.to(hidden.dtype) for part in parts], 1) if len(parts) > 1 else parts[0]), lengths

    def bias_of(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return the position bias of the padded batch: [1, heads, width, width]."""
        number, heads = self.bias.relative_attention_bias.weight.shape
        table = rows.flatten()[: number * heads].view(number, heads)
        return _SmallTable.apply(places, table).permute(2, 0, 1)[None]

    def places_of_bias(self, at: Segments) -> Tensor:
        """Return the rows of its table that the position bias consists of: [width, width]."""
        positions = torch.arange(at.shape[1], device=at.slots.device)
        return self.bias._relative_position_bucket(
            positions - positions[:, None],
            bidirectional=not self.bias.is_decoder,
            num_buckets=self.bias.relative_attention_num_buckets,
            max_distance=self.bias.relative_attention_max_distance,
        )


class PaddingFree:
    """Lets `model` compute without padding whenever its attention mask belongs to the current batch."""

    def __init__(self, model: nn.Module, is_fixed: bool = False, is_sharded: bool = False):
        """Raise NeedsPadding if the model obviously cannot compute without padding. `check` tests the others.

        `is_fixed`: items have no mask, because all of them have the same length, such as images. The weights of a model that
        `is_sharded` exist only inside of their layer, and its layers are not captured as CUDA graphs.
        """
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

        owner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if owner is None:
            raise NeedsPadding("it is not a transformers model")
        self.model, self.owner, self.is_fixed = model, owner, is_fixed
        configs = [m.config for m in owner.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")]
        self.configs = {id(config): config for config in configs}
        stacks = stacks_of(owner)
        self.layers = [layer for layers in stacks for layer in layers]
        kinds = {config._attn_implementation for config in self.configs.values()}
        self.attentions = own_attentions(self.layers) if kinds == {"eager"} else []
        if not kinds <= {REPLACED, NAME} and not self.attentions:
            raise NeedsPadding(f"its attention is {', '.join(map(str, kinds))}, not {REPLACED}")
        dropped = ("layerdrop", "layer_drop", "encoder_layerdrop", "decoder_layerdrop")
        if any(getattr(config, name, 0) for config in self.configs.values() for name in dropped):
            raise NeedsPadding("it skips layers at random (layerdrop)")
        if self.attentions and len(stacks) > 1:
            raise NeedsPadding("its attention is not that of transformers")
        windows = ("sliding_window", "attention_chunk_size", "local_attention")
        found = [getattr(config, name, None) for config in self.configs.values() for name in windows]
        experts = [getattr(config, "_experts_implementation", None) for config in self.configs.values()]
        self.has_experts = any(type(module).__name__.endswith("Experts") for module in owner.modules())
        self.expert_configs = [c for c, how in zip(self.configs.values(), experts) if self.has_experts and how in (GROUPED, NAME)]
        if self.expert_configs:
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

            ALL_EXPERTS_FUNCTIONS.register(NAME, padding_free.experts)
        self.windows = {int(window) for window in found if window}
        # A window, which may extend to both sides, has no effect on texts that are at most half as long.
        self.longest = min((window // 2 for window in self.windows), default=1 << 30)
        AttentionInterface.register(NAME, padding_free.attention)
        AttentionMaskInterface.register(NAME, padding_free.mask_of)
        firsts = [0, *(len(layers) for layers in stacks[:-1])]
        self.stacks = [Stack(layers, first, bool(self.attentions)) for layers, first in zip(stacks, firsts)]
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        self.rotaries = [m for m in owner.modules() if type(m).__name__.endswith("RotaryEmbedding") and id(m) not in inside]
        several = len(self.rotaries) > 1 or any("layer_type" in inspect.signature(m.forward).parameters for m in self.rotaries)
        self.stacks[0].alternates = several and len(stacks) == 1 and not self.attentions and not is_sharded
        if is_sharded and any(stack.bias is not None for stack in self.stacks):
            raise NeedsPadding("its layers share a position bias, which is sharded")
        self.plain: list[Callable[..., Any]] = [stack.call_of(n) for stack in self.stacks for n in _numbers(stack)]
        self.calls = [*self.plain]
        self.run: Callable[..., Any] | None = None  # calls a layer instead of `calls`, see `capture`
        self.on_new_batch: Callable[[], None] = lambda: None  # forward passes before it will have no backward pass any more
        self.is_enabled = True
        self.last_batch: CurrentBatch | None = None
        self.outputs: list[Any] | None = None  # of the last layer, while `check` runs
        self.mask: Tensor | None = None  # of the last layer's output
        self.hooks: list[Any] = []
        self._clear()

    def _clear(self) -> None:
        self.is_packed = False
        self.known: dict[int, tuple[Tensor, Tensor]] = {}
        self.rotary: dict[str, Any] = {}  # what the rotary embeddings of this pass have returned
        for stack in self.stacks:
            stack.clear()

    def install(self) -> None:
        for config in self.configs.values() if not self.attentions else ():
            config._attn_implementation = NAME
        for config in self.expert_configs:
            config._experts_implementation = NAME
        for table in small_tables(self.owner) if next(self.owner.parameters()).is_cuda else ():
            table.forward = functools.partial(_look_up, table)
        keep = lambda module, args, output: self.rotary.setdefault(str(len(self.rotary)), output)
        for rotary in self.rotaries if self.stacks[0].alternates else ():
            self.hooks.append(rotary.register_forward_hook(lambda *given: keep(*given) and None))
        for attention in self.attentions:
            _pad_around(attention)
        # Not a hook, because adapters call `forward` itself.
        self.owner.forward = self._model(self.owner.forward)
        for stack in self.stacks:
            for number in _numbers(stack):
                stack.layers[number - stack.first].forward = self._layer(stack, number)

    def remove(self) -> None:
        for config in self.configs.values() if not self.attentions else ():
            config._attn_implementation = REPLACED
        for config in self.expert_configs:
            config._experts_implementation = GROUPED
        inner = [module for attention in self.attentions for module in (attention, *_linear_children(attention))]
        for module in [self.owner, *self.layers, *small_tables(self.owner), *inner]:
            module.__dict__.pop("forward", None)
        while self.hooks:
            self.hooks.pop().remove()
        self._clear()

    def capture(self, graphs_of: Callable[[list[nn.Module], list[Callable[..., Any]]], Any]) -> list[Any]:
        """Call the layers of each stack through `graphs_of(layers, calls)`, which captures them as CUDA graphs, and return these."""
        found = [graphs_of(stack.layers, self.calls[stack.first : stack.last + 1]) for stack in self.stacks]
        owner = {number: (graphs, stack.first) for stack, graphs in zip(self.stacks, found) for number in _numbers(stack)}

        def run(number: int, hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
            graphs, first = owner[number]
            return graphs.call(number - first, hidden, args, kwargs)

        self.run, self.on_new_batch = run, lambda: [graphs.pending.clear() for graphs in found]
        return found

    @property
    def targets(self) -> list[Any]:
        """Return what is compiled: layers, or functions that call them with other arguments."""
        return [s.layers[n - s.first] if s.is_plain else self.plain[n] for s in self.stacks for n in _numbers(s)]

    def _model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            current = current_batch()
            is_first = current is not self.last_batch
            if is_first:
                self.last_batch = current
                self.on_new_batch()
            mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
            row = self._row(current, positions if mask is None else mask)  # rows of several texts have no mask
            rows = self._rows(current, row, kwargs) if row is not None else []
            # A checkpointed layer is called again in the backward pass, after this call has ended, and needs the same `at`.
            checkpointed = torch.is_grad_enabled() and any(getattr(m, "gradient_checkpointing", False) for m in self.layers[:1])
            if checkpointed and self.stacks[0].at is not None and not is_first:
                raise RuntimeError(
                    "the loss calls the model twice, which does not work without padding and with --gradient_checkpointing. "
                    "Add --padding_free off."
                )
            self._clear()
            for stack, of_stack in zip(self.stacks, rows):
                stack.row = of_stack
            is_fixed = self.is_fixed and self.is_enabled and current is not None and mask is None and positions is None
            self.is_packed = bool(rows) or is_fixed
            if rows and mask is None:  # otherwise transformers looks for texts in the positions, and waits for the GPU
                kwargs["attention_mask"] = row.mask
            token = is_active.set(self.is_packed)
            try:
                return original(*args, **kwargs)
            finally:
                is_active.reset(token)
                if not checkpointed:
                    self._clear()

        return forward

    def _row(self, current: CurrentBatch | None, given: Tensor | None) -> Row | None:
        """Return the row for this call, if the mask or the positions that it is given belong to the current batch."""
        row = padding_free.row_of(current)
        if row is None or not isinstance(given, Tensor) or not self.is_enabled or row.longest > self.longest or given.ndim != 2:
            return None
        is_same = lambda known: known is not None and given.data_ptr() == known.data_ptr() and given.numel() == known.numel()
        if is_same(row.mask):
            return row._replace(mask=given, positions=None)
        return row if is_same(row.positions) else None

    def _rows(self, current: CurrentBatch, row: Row, given: dict[str, Any]) -> list[Row]:
        """Return the row of each stack, or [] if that of the decoder is not known.

        A decoder that generates gets the tokens before its labels, so its row ends with the last label of each text. One that
        classifies gets the tokens of its encoder.
        """
        if len(self.stacks) == 1:
            return [row]
        if row.positions is not None or row.shared is not None or given.get("decoder_attention_mask") is not None:
            return []
        grain, more = (64, padding_free.rounded_up) if row.mask.is_cuda else (1, int)
        used, mask, longest = current.batch.sizes.tokens, row.mask, row.longest
        if self.owner.get_output_embeddings() is not None:
            labels, ids = current.batch.get("labels"), given.get("decoder_input_ids", given.get("labels"))
            if labels is None or labels.ndim != 2 or ids is None or ids.shape != labels.shape:
                return []
            mask, used = (labels != -100).flip(1).cumsum(1).flip(1) > 0, current.batch.sizes.until
            longest = 1 << max(0, labels.shape[1] - 1).bit_length() if mask.is_cuda else labels.shape[1]
        elif given.get("decoder_input_ids") is not None:
            return []
        # One more, so that the unused end of each row has queries and keys. Rows of equal lengths could not be told apart.
        source = row._replace(tokens=more(current.batch.sizes.tokens + 1))
        tokens = more(used + 1)
        tokens += grain if tokens == source.tokens else 0
        longest = max(longest, 1 << (tokens - used).bit_length())
        return [source, Row(mask, tokens, longest)]

    def _segments(self, stack: Stack, hidden: Tensor) -> Segments:
        if stack.at is None:  # in the first layer, because the autocast type is known only inside of the forward pass
            kind = hidden.device.type
            narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
            has_flash = narrow in (torch.bfloat16, torch.float16) and self._has_flash(hidden.device) and not self.attentions
            if stack.row is None:  # items of a fixed length
                ones = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
                stack.row = Row(ones, ones.numel(), ones.shape[1])
            stack.at = padding_free.segments_of(stack.row, has_flash)
            if stack.first > 0:
                stack.at = stack.at._replace(source=self.stacks[0].at)
            self.mask = stack.at.mask.view(stack.at.shape)
        return stack.at

    def _has_flash(self, device: torch.device) -> bool:
        size = head_size(next(iter(self.configs.values())))
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8 and size % 8 == 0 and size <= 256

    def _layer(self, stack: Stack, number: int) -> Callable[..., Any]:
        layer, original = stack.layers[number - stack.first], stack.originals[number - stack.first]

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            at = self._segments(stack, hidden_states) if self.is_packed else None
            if at is not None and stack.is_plain:
                hidden_states = pack(hidden_states, at) if number == stack.first else hidden_states
                args, kwargs = self._arguments(stack, args, kwargs, at)
            elif at is not None:
                hidden_states, kwargs = self._shared_arguments(stack, number, hidden_states, args, kwargs)
                args = ()
            current = current_batch()
            in_plain_order = current is not None and current.in_plain_order
            if at is None:
                out = original(hidden_states, *args, **kwargs)
            elif self.run is not None and not in_plain_order and torch.is_grad_enabled():
                out = self.run(number, hidden_states, args, kwargs)
            elif torch.is_grad_enabled() or layer.training:
                # Also without gradients: GradCache repeats the pass with gradients and must draw the same dropout, and compiled
                # code draws different values than plain code.
                out = self.calls[number](hidden_states, *args, **kwargs)
            else:  # an evaluation does not run often enough for its own compilation
                out = self.plain[number](hidden_states, *args, **kwargs)
            if number == stack.last and at is not None:
                row = out[0] if isinstance(out, tuple) else out
                padded = unpack(row if stack.is_plain else row[:, : len(at.places)], at)
                out = (padded, *out[1:]) if isinstance(out, tuple) else padded
            if at is not None and not stack.is_plain and stack.outputs:
                out = (out, *[None] * (stack.outputs - 1))
            if number == self.stacks[-1].last and self.outputs is not None:
                self.outputs.append(out)
            return out

        return forward

    def _arguments(self, stack: Stack, args: tuple, kwargs: dict[str, Any], at: Segments) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a layer without padding.

        Most layers get the same objects as the one before. That case is checked first, because the host limits the speed.
        """
        given = stack.given
        if (
            given
            and len(kwargs) == len(given[1]) and len(args) == len(given[0])
            and all(a is b for a, b in zip(args, given[0]))
            and all(given[1].get(name, self) is value for name, value in kwargs.items())
        ):  # fmt: skip
            return stack.packed
        packed = {name: self._packed(value, at) for name, value in kwargs.items()}
        packed |= {name: value for name, value in (("attention_mask", None), ("use_cache", False)) if name in packed}
        packed["segments"] = _for_attention(at)
        stack.given, stack.packed = (args, kwargs), (tuple(self._packed(value, at) for value in args), packed)
        return stack.packed

    def _shared_arguments(
        self, stack: Stack, number: int, hidden: Tensor, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the row and the arguments that all layers of a stack get, from those of its first layer."""
        named = {**dict(zip(stack.names, args)), **kwargs}
        if stack.alternates:
            found = [kind for kind, pair in self.rotary.items() if pair is named.get("position_embeddings")]
            if not found:
                raise NeedsPadding("its layers get rotary embeddings of an unknown origin")
            stack.kinds[number - stack.first][:] = found
        skipped = (*CARRIED, *BIASES, *(("position_embeddings",) if stack.alternates else ()))
        rest = {name: value for name, value in named.items() if name not in skipped}
        if number != stack.first:
            if rest.keys() != stack.given.keys() or any(stack.given[name] is not value for name, value in rest.items()):
                raise NeedsPadding("its layers get different arguments")
            return hidden, stack.packed
        at = stack.at
        packed = dict(rest) if stack.own_attention else {name: self._packed(value, at) for name, value in rest.items()}
        if not stack.own_attention:
            packed |= {name: value for name, value in (("attention_mask", None), ("use_cache", False)) if name in packed}
        hidden, lengths = stack.enter(hidden, named)
        inside, places = at if stack.own_attention else _for_attention(at), None
        if stack.bias is not None:  # the widths of few different padded batches, because each is captured as a CUDA graph
            wide = F.pad(stack.row.mask, (0, -at.shape[1] % 64 if hidden.is_cuda else 0))
            inside = padding_free.segments_of(stack.row._replace(mask=wide), at.is_flash)._replace(source=at.source)
            places = stack.places_of_bias(inside)
        stack.given = rest
        stack.packed = packed | {
            "segments": inside, "lengths": lengths, "places": places,
            "rotary": {kind: self._packed(pair, at) for kind, pair in self.rotary.items()} if stack.alternates else {},
        }  # fmt: skip
        return hidden, stack.packed

    def _packed(self, value: Any, at: Segments) -> Any:
        """Return an argument of a layer without padding. Masks and caches become None; positions are packed once for all layers."""
        from transformers.cache_utils import Cache

        if isinstance(value, tuple | list):
            return type(value)(self._packed(part, at) for part in value)
        if isinstance(value, Cache):
            return None
        if not isinstance(value, Tensor):
            return value
        if value.ndim >= 4:
            if value.ndim == 4 and value.shape[1] == 1 and value.shape[-1] == at.shape[1] and not value.requires_grad:
                return None
            raise NeedsPadding("its layers get a tensor of four dimensions that is not a mask")
        if value.ndim < 2 or value.shape[1] != at.shape[1] or value.shape[0] not in (1, at.shape[0]):
            return value
        if id(value) not in self.known:
            self.known[id(value)] = value, pack(value, at)  # holding the value keeps its id unique
        return self.known[id(value)][1]

    def check(self, loss: Callable[[Any], Tensor], batch: Any, allowed: float) -> str:
        """Return "" if the last layer's output and the loss are the same with and without padding, or else why not.

        `allowed` is a fraction of the largest value. An out-of-memory error is raised.
        """
        was_training = self.model.training
        self.model.eval()
        results, longest = [], self.longest
        self.longest = 1 << 30
        padding_free.windows_seen.clear()
        try:
            with torch.no_grad(), without_tf32():
                for self.is_enabled in (False, True):
                    self.outputs = []
                    with CurrentBatch(batch):
                        value = float(loss(batch))
                    if not self.outputs:
                        return "its last layer is not called"
                    last = self.outputs[-1]
                    out = last[0] if isinstance(last, tuple) else last
                    results.append((value, out.float()))
            if self.mask is None:
                return "its attention mask is not that of the batch"
        except torch.OutOfMemoryError:
            raise
        except NeedsPadding as error:
            return str(error)
        except Exception as error:  # of many kinds: layers with other outputs, indices out of range
            return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200]
        finally:
            self.is_enabled, self.outputs, self.longest = True, None, longest
            self._clear()
            self.model.train(was_training)
        (padded, before), (packed, after) = results
        before, after = before[self.mask], after[self.mask]
        of_tokens = (before - after).abs().amax(-1)
        # Rounding in half precision sends a few tokens to other experts, whose results differ.
        largest = of_tokens.quantile(0.9) if self.has_experts and allowed > 1e-3 else of_tokens.max()
        apart = float(largest / before.abs().max().clamp(min=1e-12))
        if not apart <= allowed or not abs(padded - packed) <= 10 * allowed * max(abs(padded), 1e-3):
            return f"its result differs without padding: by {apart:.1e}, with a loss of {packed:.6g} instead of {padded:.6g}"
        # Texts may be longer than the windows that the layers have passed on: its size, one more, or one more than a half of it.
        unseen = {w for w in self.windows if not {w, w + 1, w // 2 + 1} & padding_free.windows_seen}
        self.longest = min((window // 2 for window in unseen), default=1 << 30)
        return ""


def _for_attention(at: Segments) -> Segments:
    """Return what the attention needs. With the rest, every width of a padded batch would need its own CUDA graph."""
    if not at.is_flash:
        return at
    rest = ("slots", "places", "real", "mask", "shape", "numbers", "own", "second")
    return at._replace(**dict.fromkeys(rest), source=at.source and _for_attention(at.source))


def _numbers(stack: Stack) -> range:
    return range(stack.first, stack.last + 1)


def head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return size or config.hidden_size // config.num_attention_heads


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


def _linear_children(attention: nn.Module) -> list[nn.Module]:
    return [m for m in attention.children() if isinstance(m, nn.Linear) or hasattr(m, "base_layer")]  # of an adapter


def _pad_around(attention: nn.Module) -> None:
    """Let an attention get padded hidden states, while its projections of them compute without padding."""
    original = attention.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        at = _Inside.at
        if at is None:
            return original(hidden_states, *args, **kwargs)
        padded = unpack(hidden_states, at)
        _Inside.pair = padded, hidden_states
        pad = lambda x: unpack(x, at) if isinstance(x, Tensor) and x.shape[:2] == hidden_states.shape[:2] else x
        out = original(padded, *map(pad, args), **{name: pad(value) for name, value in kwargs.items()})
        _Inside.pair = None, None
        return (pack(out[0], at), *out[1:]) if isinstance(out, tuple) else pack(out, at)

    attention.forward = forward
    for linear in _linear_children(attention):
        linear.forward = functools.partial(_project, linear.forward)


def _project(original: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    padded, row = _Inside.pair
    return original(x, *args, **kwargs) if x is not padded else unpack(original(row, *args, **kwargs), _Inside.at)


def stacks_of(model: nn.Module) -> list[list[nn.Module]]:
    """Return the layers of each stack: one, or those of an encoder and its decoder. Raise NeedsPadding for other models."""
    found = _find_stacks(model)
    takes_encoder = lambda layer: "encoder_hidden_states" in inspect.signature(type(layer).forward).parameters
    if len(found) == 2 and getattr(getattr(model, "config", None), "is_encoder_decoder", False) and takes_encoder(found[1][0]):
        return found
    return [layers_of(model)]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformer that is a single stack, in their order. Raise NeedsPadding for other models."""
    stacks = _find_stacks(model)
    if len(stacks) != 1:
        raise NeedsPadding(f"the model has {len(stacks)} stacks of layers" if stacks else "its layers were not found")
    if len({type(layer) for layer in stacks[0]}) > 1:
        raise NeedsPadding("its layers have different types")
    return stacks[0]


def _find_stacks(model: nn.Module) -> list[list[nn.Module]]:
    if "transformers.modeling_layers" not in sys.modules:  # not imported here, because that takes seconds
        raise NeedsPadding("its layers were not found")
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [
        list(module) for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(isinstance(m, GradientCheckpointingLayer) for m in module)
    ]  # fmt: skip
