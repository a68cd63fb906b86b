"""A transformers model whose layers compute without padding, if that gives the same result as padding."""

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_ddp.engine.losses import CurrentBatch, current_batch
from accel_ddp.speed import padding_free
from accel_ddp.speed.layer_stacks import (
    BIASES,
    CARRIED,
    SmallTable,
    Stack,
    find_rotaries,
    find_stacks,
    linear_children,
    own_attentions,
    pad_around,
)  # fmt: skip
from accel_ddp.speed.padding_free import GROUPED, NAME, REPLACED, NeedsPadding, Row, Segments, is_active, pack, unpack
from accel_ddp.training.padding_check import without_tf32


def small_tables(model: nn.Module) -> list[nn.Embedding]:
    """Return embeddings with few rows, such as token types."""
    plain = lambda m: type(m) is nn.Embedding and m.padding_idx is None and m.max_norm is None and not m.sparse
    return [module for module in model.modules() if plain(module) and module.num_embeddings <= 16]


def _look_up(table: nn.Embedding, places: Tensor) -> Tensor:
    return SmallTable.apply(places, table.weight)


class PaddingFree:
    """Lets `model` compute without padding whenever its attention mask belongs to the current batch."""

    def __init__(self, model: nn.Module, is_fixed: bool = False, is_sharded: bool = False):
        """Raise NeedsPadding if the model obviously cannot compute without padding. `check` tests the others.

        `is_fixed`: items have no mask, because all of them have the same length, such as images. The weights of a model that
        `is_sharded` exist only inside their layer, and its layers are not captured as CUDA graphs.
        """
        from transformers import PreTrainedModel

        owner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if owner is None:
            raise NeedsPadding("it is not a transformers model")
        self.model, self.owner, self.is_fixed = model, owner, is_fixed
        configs = [m.config for m in owner.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")]
        self.configs = {id(config): config for config in configs}
        stacks = find_stacks(owner)
        self.layers = [layer for layers in stacks for layer in layers]
        kinds = {config._attn_implementation for config in self.configs.values()}
        self.attentions = own_attentions(self.layers) if kinds == {"eager"} else []
        if not kinds <= {REPLACED, NAME} and not self.attentions:
            raise NeedsPadding(f"its attention is {', '.join(map(str, kinds))}, not {REPLACED}")
        dropped = ("layerdrop", "layer_drop", "encoder_layerdrop", "decoder_layerdrop")
        if any(getattr(config, name, 0) for config in self.configs.values() for name in dropped):
            raise NeedsPadding("it skips layers at random (layerdrop)")
        if self.attentions and len(stacks) > 1:
            raise NeedsPadding("its attention is not an attention of transformers")
        windows = ("sliding_window", "attention_chunk_size", "local_attention")
        found = [getattr(config, name, None) for config in self.configs.values() for name in windows]
        has_experts = any(type(module).__name__.endswith("Experts") for module in owner.modules())
        grouped = [c for c in self.configs.values() if getattr(c, "_experts_implementation", None) in (GROUPED, NAME)]
        self.expert_configs = grouped if has_experts else []
        self.windows = {int(window) for window in found if window}
        # A window, which may extend to both sides, has no effect on texts that are at most half as long.
        self.longest = min((window // 2 for window in self.windows), default=1 << 30)
        padding_free.register()
        firsts = [0, *(len(layers) for layers in stacks[:-1])]
        self.stacks = [Stack(layers, first, bool(self.attentions)) for layers, first in zip(stacks, firsts)]
        self.rotaries = [] if is_sharded or self.attentions or len(stacks) > 1 else find_rotaries(owner, self.layers)
        self.stacks[0].alternates = bool(self.rotaries)
        if is_sharded and any(stack.bias is not None for stack in self.stacks):
            raise NeedsPadding("its layers share a position bias, which is sharded")
        self.plain: list[Callable[..., Any]] = [stack.call_of(n) for stack in self.stacks for n in stack.numbers]
        self.calls = [*self.plain]
        self.run: Callable[..., Any] | None = None  # calls a layer instead of `calls`, see `capture`
        self.on_new_batch: Callable[[], None] = lambda: None  # forward passes before it will have no backward pass any more
        self.is_enabled = True
        self.shares = True  # compute tokens that two texts share once, in all micro-batches
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
        keep = lambda module, args, output: self.rotary.update({str(len(self.rotary)): output})
        self.hooks = [rotary.register_forward_hook(keep) for rotary in self.rotaries]
        for attention in self.attentions:
            pad_around(attention, self.stacks[0].inside)
        # Not a hook, because adapters call `forward` itself.
        self.owner.forward = self._model(self.owner.forward)
        for stack in self.stacks:
            for number, layer in zip(stack.numbers, stack.layers):
                layer.forward = self._layer(stack, number, layer.forward)

    def remove(self) -> None:
        for config in self.configs.values() if not self.attentions else ():
            config._attn_implementation = REPLACED
        for config in self.expert_configs:
            config._experts_implementation = GROUPED
        inner = [module for attention in self.attentions for module in (attention, *linear_children(attention))]
        for module in [self.owner, *self.layers, *small_tables(self.owner), *inner]:
            module.__dict__.pop("forward", None)
        for hook in self.hooks:
            hook.remove()
        self._clear()

    def capture(self, graphs_of: Callable[[list[nn.Module], list[Callable[..., Any]]], Any]) -> list[Any]:
        """Call the layers of each stack through `graphs_of(layers, calls)`, which captures them as CUDA graphs, and return these."""
        found = [graphs_of(stack.layers, [self.calls[number] for number in stack.numbers]) for stack in self.stacks]
        owner = {number: (graphs, stack.numbers[0]) for stack, graphs in zip(self.stacks, found) for number in stack.numbers}

        def run(number: int, hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
            graphs, first = owner[number]
            return graphs.call(number - first, hidden, args, kwargs)

        self.run, self.on_new_batch = run, lambda: [graphs.pending.clear() for graphs in found]
        return found

    @property
    def is_plain(self) -> bool:
        """Return whether all layers get the arguments that the model gives them, only without padding."""
        return all(stack.is_plain for stack in self.stacks)

    @property
    def targets(self) -> list[Any]:
        """Return what is compiled: layers, or functions that call them with other arguments."""
        return [self.layers[n] if stack.is_plain else self.plain[n] for stack in self.stacks for n in stack.numbers]

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
        row = padding_free.row_of(current, self.shares)
        if row is None or not self.is_enabled or row.mask.shape[-1] > self.longest:
            return None
        if not isinstance(given, Tensor) or given.ndim != 2:
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
            labels, ids = current.batch.get("labels"), given.get("decoder_input_ids")
            ids = given.get("labels") if ids is None else ids
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
        longest = max(longest, padding_free.grain_of(tokens) + grain)
        return [source, Row(mask, tokens, longest)]

    def _segments(self, stack: Stack, hidden: Tensor) -> Segments:
        if stack.at is None:  # in the first layer, because the autocast type is known only inside the forward pass
            kind = hidden.device.type
            narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
            has_flash = narrow in (torch.bfloat16, torch.float16) and self._has_flash(hidden.device) and not self.attentions
            if stack.row is None:  # items of a fixed length
                ones = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
                stack.row = Row(ones, ones.numel(), ones.shape[1])
            stack.at = padding_free.segments_of(stack.row, has_flash)
            if stack is not self.stacks[0]:
                stack.at = stack.at._replace(source=self.stacks[0].at)
            self.mask = stack.at.mask.view(stack.at.shape)
        return stack.at

    def _has_flash(self, device: torch.device) -> bool:
        size = head_size(next(iter(self.configs.values())))
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8 and size % 8 == 0 and size <= 256

    def _layer(self, stack: Stack, number: int, original: Callable[..., Any]) -> Callable[..., Any]:
        layer, first, last, is_plain = self.layers[number], stack.numbers[0], stack.numbers[-1], stack.is_plain

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Without gradients and outside of the model's call, the micro-batch of the last checkpointed call is over: `generate`
            # calls an encoder alone.
            is_packed = self.is_packed and (is_active.get() or torch.is_grad_enabled())
            at = (stack.at or self._segments(stack, hidden_states)) if is_packed else None
            if at is not None and is_plain:
                hidden_states = pack(hidden_states, at) if number == first else hidden_states
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
            elif not in_plain_order and (torch.is_grad_enabled() or layer.training):
                # Also without gradients: GradCache repeats the pass with gradients and must draw the same dropout, and compiled
                # code draws different values than plain code.
                out = self.calls[number](hidden_states, *args, **kwargs)
            else:  # an evaluation does not run often enough for its own compilation; compiled layers have another order of gradients
                out = self.plain[number](hidden_states, *args, **kwargs)
            if number == last and at is not None:
                row = out[0] if isinstance(out, tuple) else out
                padded = unpack(row if is_plain else row[:, : len(at.places)], at)
                out = (padded, *out[1:]) if isinstance(out, tuple) else padded
            if at is not None and not is_plain and stack.outputs:
                out = (out, *[None] * (stack.outputs - 1))
            if number == len(self.layers) - 1 and self.outputs is not None:
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
            and all(map(operator.is_, args, given[0]))
            and all(map(operator.is_, map(given[1].get, kwargs, itertools.repeat(self)), kwargs.values()))
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
            stack.kinds[number - stack.numbers[0]][:] = found
        skipped = (*CARRIED, *BIASES, *(("position_embeddings",) if stack.alternates else ()))
        rest = {name: value for name, value in named.items() if name not in skipped}
        if number != stack.numbers[0]:
            if rest.keys() != stack.given.keys() or any(stack.given[name] is not value for name, value in rest.items()):
                raise NeedsPadding("its layers get different arguments")
            return hidden, stack.packed
        at = stack.at
        packed = rest
        if not stack.own_attention:
            packed = {name: self._packed(value, at) for name, value in rest.items()}
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
        self.longest, self.mask = 1 << 30, None
        seen: set[int] = set()
        token = padding_free.windows_seen.set(seen)
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
                return "its attention mask is not the mask of the batch"
        except torch.OutOfMemoryError:
            raise
        except NeedsPadding as error:
            return str(error)
        except Exception as error:  # of many kinds: layers with other outputs, indices out of range
            return (
                f"its layers cannot compute without padding ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"[
                    :200
                ]
            )
        finally:
            padding_free.windows_seen.reset(token)
            self.is_enabled, self.outputs, self.longest = True, None, longest
            self._clear()
            self.model.train(was_training)
        (padded, before), (packed, after) = results
        before, after = before[self.mask], after[self.mask]
        of_tokens = (before - after).abs().amax(-1)
        # Rounding in half precision sends a few tokens to other experts, whose results differ.
        largest = of_tokens.quantile(0.9) if self.expert_configs and allowed > 1e-3 else of_tokens.max()
        apart = float(largest / before.abs().max().clamp(min=1e-12))
        if not apart <= allowed or not abs(padded - packed) <= 10 * allowed * max(abs(padded), 1e-3):
            return f"its result differs without padding: by {apart:.1e}, with a loss of {packed:.6g} instead of {padded:.6g}"
        # Texts may be longer than the windows that the layers have passed on: its size, one more, or one more than a half of it.
        unseen = {w for w in self.windows if not {w, w + 1, w // 2 + 1} & seen}
        self.longest = min((window // 2 for window in unseen), default=1 << 30)
        return ""


def _for_attention(at: Segments) -> Segments:
    """Return what the attention needs. With the rest, every width of a padded batch would need its own CUDA graph."""
    if not at.is_flash:
        return at
    rest = ("slots", "places", "real", "mask", "shape", "numbers", "own", "second")
    return at._replace(**dict.fromkeys(rest), source=at.source and _for_attention(at.source))


def head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return size or config.hidden_size // config.num_attention_heads
