"""Layers that compute without padding inside a model that gets padded texts.

Encoder-decoders have two rows, and the layers of their decoder share the output of the encoder and position biases. An attention that
does not use transformers' interface (DeBERTa, BLOOM) gets padded hidden states, and the rest of its layer a row.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_ddp.engine.ddp import in_plain_order
from accel_ddp.engine.rows import Grid, Rows, grain_of, pack, rounded_up, unpack
from accel_ddp.speed import padding_free
from accel_ddp.speed.called_model import CalledModel
from accel_ddp.speed.cuda_graphs import Token
from accel_ddp.speed.layer_calls import Call, dispatch_layers, restore_layers
from accel_ddp.speed.layer_stacks import (
    BIASES,
    CARRIED,
    Stack,
    find_stacks,
    flash_size,
    own_attentions,
)
from accel_ddp.speed.padding_free import NeedsPadding, Segments, is_active


class PackedLayers(CalledModel):
    """Lets the layers of `model` compute the rows of a micro-batch."""

    shares = True

    def __init__(self, model: nn.Module, is_sharded: bool = False):
        """Raise NeedsPadding if the model obviously cannot compute without padding. `check` tests the others."""
        super().__init__(model, is_sharded)
        stacks = find_stacks(self.owner)
        self.layers = [layer for layers in stacks for layer in layers]
        self.attentions = own_attentions(self.layers) if self.kinds == {"eager"} else []
        if "eager" in self.kinds and not self.attentions:
            raise NeedsPadding(f"its attention is {', '.join(map(str, self.kinds))}, not sdpa")
        if self.attentions and len(stacks) > 1:
            raise NeedsPadding("its attention is not an attention of transformers")
        if self.windows and not self.attentions:
            raise NeedsPadding("its attention has windows")
        firsts = [0, *(len(layers) for layers in stacks[:-1])]
        self.stacks = [Stack(layers, first, bool(self.attentions)) for layers, first in zip(stacks, firsts)]
        if is_sharded and any(stack.bias is not None for stack in self.stacks):
            raise NeedsPadding("its layers share a position bias, which is sharded")
        self.plain: list[Call] = [stack.call_of(n) for stack in self.stacks for n in stack.numbers]
        self.calls = self.plain
        self.run: Call | None = None  # calls a layer instead of `calls`, see `capture`
        self.waits: Callable[[], Any] = lambda: None  # whether the last pass with checkpointed layers awaits its backward pass
        self.is_single = len(stacks) == 1
        self.forget_pass()

    def forget_pass(self) -> None:
        self.is_packed = False
        self.known: dict[int, tuple[Tensor, Tensor]] = {}
        for stack in self.stacks:
            stack.clear()

    def install(self) -> None:
        if self.attentions:  # they have no interface, and projections and tables of other classes
            self.configs = {}
        super().install()
        self.hooks += [
            self.called.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.called.register_forward_hook(self._leave, always_call=True, prepend=True),
        ]
        calls = [functools.partial(self._call, stack, number) for stack in self.stacks for number in stack.numbers]
        dispatch_layers(self.layers, calls)
        for stack in self.stacks:
            stack.install(self.attentions)

    def remove(self) -> None:
        super().remove()
        restore_layers(self.layers)
        for stack in self.stacks:
            stack.remove(self.attentions)
        self.forget_pass()

    def capture(self, graphs_of: Callable[[list[nn.Module], list[Call]], Any]) -> list[Any]:
        """Call the layers of each stack through `graphs_of(layers, calls)`, which captures them as CUDA graphs, and return these."""
        found = [graphs_of(stack.layers, [self.calls[number] for number in stack.numbers]) for stack in self.stacks]
        owner = {number: (graphs, stack.numbers[0]) for stack, graphs in zip(self.stacks, found) for number in stack.numbers}

        def run(number: int, hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
            graphs, first = owner[number]
            return graphs.call(number - first, hidden, args, kwargs)

        self.run = run
        return found

    @property
    def targets(self) -> list[Any]:
        """Return what is compiled: functions that call layers with other arguments."""
        return [*self.plain]

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Prepare the stacks for the rows of this call."""
        if self._checkpoints() and self.waits() is not None and self.rows is not None:
            raise RuntimeError(
                "the loss calls the model twice, which does not work without padding and with --gradient_checkpointing. "
                "Add --padding_free off."
            )
        self.forget_pass()
        self.is_packed = self.rows is not None and self._set_rows(self.rows, kwargs) and self.is_enabled
        self.token = is_active.set(self.is_packed)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self.token is not None:
            is_active.reset(self.token)
            self.token = None
        if not (self._checkpoints() and torch.is_grad_enabled()):
            self.forget_pass()
        elif self.is_packed and isinstance(output, Mapping):
            self.waits = _backward_of(next(iter(output.values())))

    def _checkpoints(self) -> bool:
        """Return whether layers are called again in the backward pass, after the call of the model, and need the same `at`."""
        return any(getattr(m, "gradient_checkpointing", False) for m in self.layers[:1])

    def _set_rows(self, rows: Rows, given: dict[str, Any]) -> bool:
        """Set the rows of each stack, and return whether those of the decoder are known.

        A decoder that generates gets the tokens before its labels. One that classifies gets the tokens of its encoder.
        """
        stacks, target = self.stacks, rows.get("target", rows)
        self.compared = target if self.outputs is not None else None
        stacks[0].rows, stacks[0].grid = rows, rows.grid
        if len(stacks) == 1:
            return True
        if rows.is_shared or given.get("decoder_attention_mask") is not None:
            return False
        # One more, so that the unused end of each row has queries and keys. Rows of equal lengths could not be told apart.
        grain, more = (64, rounded_up) if rows.starts.is_cuda else (1, int)
        lengths = [more(rows.used + 1), more(target.used + 1)]
        lengths[1] += grain if lengths[0] == lengths[1] else 0
        for stack, some, length in zip(stacks, (rows, target), lengths):
            stack.rows, stack.grid = some, some.grid_of_size(some.width, length)
        return True

    def _segments(self, stack: Stack, hidden: Tensor) -> Segments:
        if stack.at is None:  # in the first layer, because the autocast type is known only inside the forward pass
            kind = hidden.device.type
            narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
            is_narrow = narrow in (torch.bfloat16, torch.float16) and not self.attentions
            rows, is_flash = stack.rows, is_narrow and self._has_flash(hidden.device)
            stack.at, tokens = padding_free.segments_of(rows, is_flash), len(stack.grid.places)
            if len(self.stacks) > 1:
                starts = F.pad(rows.starts[: rows.texts + 1], (0, 1), value=tokens)
                longest = max(rows.longest, grain_of(tokens) + (64 if hidden.is_cuda else 1))
                source = self.stacks[0].at if stack is not self.stacks[0] else None
                stack.at = Segments(starts, longest, is_flash, None if is_flash else stack.grid, None, source)
            if self.attentions:
                stack.at = stack.at._replace(grid=stack.grid)
        return stack.at

    def _has_flash(self, device: torch.device) -> bool:
        return device.type == "cuda" and flash_size(self.owner.config, device) > 0

    def _call(self, stack: Stack, number: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Without gradients and outside of the model's call, the micro-batch of the last checkpointed call is over: `generate`
        # calls an encoder alone.
        is_packed = self.is_packed and (is_active.get() or torch.is_grad_enabled())
        at = self._segments(stack, hidden_states) if is_packed else None
        if at is None:
            out = stack.originals[number - stack.numbers[0]](hidden_states, *args, **kwargs)
        else:
            hidden, given = self._shared_arguments(stack, number, hidden_states, args, kwargs)
            is_plain = in_plain_order.get()
            if self.run is not None and not is_plain and torch.is_grad_enabled():
                out = self.run(number, hidden, (), given)
            else:  # compiled layers have another order of gradients, and an evaluation is not worth compiling
                uses_calls = not is_plain and (torch.is_grad_enabled() or self.layers[number].training)
                out = (self.calls if uses_calls else self.plain)[number](hidden, **given)
            out = unpack(out[:, : len(stack.grid.places)], stack.grid) if number == stack.numbers[-1] else out
            out = (out, *[None] * (stack.outputs - 1)) if stack.outputs else out
        if number == len(self.layers) - 1 and self.outputs is not None:
            hidden = out[0] if isinstance(out, tuple) else out
            self.outputs.append(hidden if stack.grid is None else pack(hidden, stack.grid))
        return out

    def _shared_arguments(
        self, stack: Stack, number: int, hidden: Tensor, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the row and the arguments that all layers of a stack get, from those of its first layer."""
        named = {**dict(zip(stack.names, args)), **kwargs}
        rest = {name: value for name, value in named.items() if name not in (*CARRIED, *BIASES)}
        if number != stack.numbers[0]:
            if rest.keys() != stack.given.keys() or any(stack.given[name] is not value for name, value in rest.items()):
                raise NeedsPadding("its layers get different arguments")
            return hidden, stack.packed
        at, grid = stack.at, stack.grid
        packed = rest
        if not stack.own_attention:
            packed = {name: self._packed(value, grid) for name, value in rest.items()}
            packed |= {name: value for name, value in (("attention_mask", None), ("use_cache", False)) if name in packed}
        hidden, lengths = stack.enter(hidden, named, self.stacks[0].grid)
        places = None
        if stack.bias is not None:  # the widths of few different padded batches, because each is captured as a CUDA graph
            wide = grid.mask.shape[1] + (-grid.mask.shape[1] % 64 if hidden.is_cuda else 0)
            grid = stack.rows.grid_of_size(wide, len(grid.places))
            at, places = at._replace(grid=grid), stack.places_of_bias(grid)
        stack.given = rest
        stack.packed = packed | {"segments": at, "lengths": lengths, "places": places}
        return hidden, stack.packed

    def _packed(self, value: Any, grid: Grid) -> Any:
        """Return an argument of a layer without padding. Masks and caches become None; positions are packed once for all layers."""
        from transformers.cache_utils import Cache

        if isinstance(value, tuple | list):
            return type(value)(self._packed(part, grid) for part in value)
        if isinstance(value, Cache):
            return None
        if not isinstance(value, Tensor):
            return value
        if value.ndim >= 4:
            if value.ndim == 4 and value.shape[1] == 1 and value.shape[-1] == grid.mask.shape[1] and not value.requires_grad:
                return None
            raise NeedsPadding("its layers get a tensor of four dimensions that is not a mask")
        if value.ndim < 2 or value.shape[1] != grid.mask.shape[1] or value.shape[0] not in (1, grid.mask.shape[0]):
            return value
        if id(value) not in self.known:
            self.known[id(value)] = value, pack(value, grid)  # holding the value keeps its id unique
        return self.known[id(value)][1]


def _backward_of(output: Tensor) -> Callable[[], Any]:
    """Return a function that returns None when the backward pass of an output has begun, or can begin no more."""
    token = Token()
    if output.grad_fn is not None:
        held = output.grad_fn.metadata
        held["accel_ddp"] = token
        output.register_hook(lambda gradient: held.clear())
    return weakref.ref(token)
