"""A model of transformers that computes the texts of a micro-batch as one row, without padding. None of its layers is changed.

A hook in front of the base model gives it the row of all tokens, with the position of each token in its text and the boundaries of the
texts. They travel through the keyword arguments of the model to our attention, which is registered in transformers. A head that
computes each token gets the row. For one that computes texts, a hook behind the base model pads the hidden states. Only mixers, the
layers of hybrid models whose states run along the row, get padded texts themselves.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accel_ddp.engine.rows import GIVEN, Rows, hook_target, map_tensors, pack, unpack
from accel_ddp.speed import padding_free
from accel_ddp.speed.called_model import CalledModel
from accel_ddp.speed.layer_calls import LayerCalls
from accel_ddp.speed.layer_stacks import (
    find_rotaries,
    flash_size,
    layers_of,
    own_attentions,
)
from accel_ddp.speed.padding_free import NeedsPadding, Segments, is_active

# Modules whose result for a token depends on all tokens before it in the row, and which take no boundaries.
MIXERS = re.compile(r"(GatedDeltaNet|DeltaAttention|ShortConv|Mixer|MambaLayer|RecurrentBlock)$")


class LayersOfModel(LayerCalls, CalledModel):
    """A model of transformers with one stack of layers."""

    def __init__(self, model: nn.Module, is_sharded: bool):
        CalledModel.__init__(self, model, is_sharded)
        LayerCalls.__init__(self, *self._find_layers())

    def _find_layers(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the layers and the rotary embeddings that alternate, both empty if layers cannot be captured."""
        mixers = self.mixers
        if mixers:
            self.why_plain = f"its layers contain {type(mixers[0]).__name__}, whose states run along a text"
            return [], []
        try:
            layers = layers_of(self.owner)
        except NeedsPadding as reason:
            self.why_plain = str(reason)
            return [], []
        return layers, [] if self.is_sharded else find_rotaries(self.owner, layers)

    @functools.cached_property
    def mixers(self) -> list[nn.Module]:
        return [m for m in self.owner.modules() if MIXERS.search(type(m).__name__)]

    def install(self) -> None:
        super().install()
        self.attach()

    def remove(self) -> None:
        super().remove()
        self.detach()


class RowModel(LayersOfModel):
    """Lets `model` compute the row of a micro-batch."""

    def __init__(self, model: nn.Module, narrow: torch.dtype = torch.float32, is_sharded: bool = False):
        """Raise NeedsPadding if the model obviously cannot compute rows. `check` tests the others.

        `narrow` is the type of autocast, which Accelerate may turn on behind the hooks of this class. The weights of a model that
        `is_sharded` exist only inside their layer, and its layers are not captured as CUDA graphs.
        """
        super().__init__(model, is_sharded)
        if self.owner.config.is_encoder_decoder:
            raise NeedsPadding("the model has an encoder and a decoder")
        if self.kinds == {"eager"} and own_attentions(self.layers):
            raise NeedsPadding("its attention is not an attention of transformers")
        owner, self.narrow = self.owner, narrow
        self.base = owner.base_model if owner.base_model is not owner else getattr(owner, "model", owner)
        self.hooked = hook_target(model, owner) if self.base is owner else self.base
        signature = inspect.signature(type(self.base).forward).parameters
        self.base_names = [name for name in signature if name != "self"]
        if "position_ids" not in signature and not self.mixers:
            raise NeedsPadding("it does not take positions")
        self.longest = min((window // 2 for window in self.windows), default=1 << 30)  # until `check` has seen the windows
        table = next((m for name, m in self.base.named_modules() if name.endswith("position_embeddings")), None)
        padding = getattr(table, "padding_idx", None)
        self.first_position = 0 if padding is None else padding + 1  # RoBERTa counts from there
        self.adds_types = "token_type_ids" in signature and any(
            name.endswith("token_type_embeddings") for name, _ in self.base.named_modules()
        )
        is_of_tokens = owner.get_output_embeddings() is not None or type(owner).__name__.endswith("ForTokenClassification")
        self.is_per_token = is_of_tokens or self.base is owner  # whether the head computes each token separately
        self.shares = not self.mixers

    def install(self) -> None:
        super().install()
        self.hooks += [
            self.hooked.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.hooked.register_forward_hook(self._leave, always_call=True, prepend=True),
        ]
        if isinstance(pooler := getattr(self.base, "pooler", None), nn.Module):
            self.hooks.append(pooler.register_forward_pre_hook(self._pad_for_pooler))
        for mixer in self.mixers:
            mixer.forward = self._pad_around(mixer, mixer.forward)

    def remove(self) -> None:
        for mixer in self.mixers:
            mixer.__dict__.pop("forward", None)
        super().remove()

    def inputs_of(self, rows: Rows) -> dict[str, Any]:
        gets_row = self.is_per_token and self._computes(rows)
        return {"input_ids": rows.tokens[None]} if gets_row else super().inputs_of(rows)

    def _computes(self, rows: Rows) -> bool:
        return self.is_enabled and rows.width <= self.longest

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Give the base model the row."""
        self.begin_pass()
        rows = self.rows
        self.compared = rows if self.outputs is not None else None
        if rows is None or not self._computes(rows):
            return None
        self.at = padding_free.segments_of(rows, self._has_flash(rows.starts.device), has_mixers=bool(self.mixers))
        self.token = is_active.set(True)
        return (), self._inputs({**dict(zip(self.base_names, args)), **kwargs}, rows)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Pad the hidden states of the row, if the head expects that. An error in the model gets here too, without an output."""
        at, self.at = self.at, None
        if at is not None:
            is_active.reset(self.token)
            self.token = None  # a copy of the model has none
        if output is None or self.rows is None:
            return None
        grid = self.rows.grid
        if self.outputs is not None:
            values = list(output.values()) if isinstance(output, Mapping) else output
            value = values[0] if isinstance(values, tuple | list) else values
            self.outputs.append(pack(value, grid) if at is None else value)
        return None if at is None or self.is_per_token else map_tensors(output, self._padded)

    def _padded(self, x: Any) -> Any:
        grid = self.rows.grid
        return unpack(x, grid) if x.shape[:2] == (1, len(grid.places)) else x

    def _pad_for_pooler(self, module: nn.Module, args: tuple) -> tuple | None:
        return None if self.at is None else (self._padded(args[0]), *args[1:])

    def _pad_around(self, mixer: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        """Let a mixer get padded texts, one behind the other in its batch. Tokens do not see the padding behind them."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        of_layer: list[Segments | None] = [None]

        def remember(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            of_layer[0] = kwargs.get("segments")  # of this call, also if it is repeated below checkpointing

        layers = [m for m in self.owner.modules() if isinstance(m, GradientCheckpointingLayer) and mixer in [*m.modules()]]
        self.hooks += [layer.register_forward_pre_hook(remember, with_kwargs=True) for layer in layers]

        def forward(*args: Any, **kwargs: Any) -> Any:
            at = kwargs.pop("segments", None) or of_layer[0]
            if at is None and self.at is not None:
                raise NeedsPadding(f"its layers do not pass their arguments on to {type(mixer).__name__}")
            if at is None:
                return original(*args, **kwargs)
            grid, length = at.grid, len(at.grid.places)
            spread = lambda x: unpack(x, grid) if isinstance(x, Tensor) and x.ndim > 2 and x.shape[:2] == (1, length) else x
            kwargs = {name: None if name == "attention_mask" else spread(value) for name, value in kwargs.items()}
            return map_tensors(
                original(*map(spread, args), **kwargs), lambda x: pack(x, grid) if x.shape[:2] == grid.mask.shape else x
            )

        return forward

    def _inputs(self, given: dict[str, Any], rows: Rows) -> dict[str, Any]:
        """Return the arguments of the base model for a row."""
        found = given | {name: rows[name][None] for name in GIVEN if name in rows and name in self.base_names}
        if "position_ids" in self.base_names:
            found["position_ids"] = rows["positions"][None] + self.first_position
        if self.adds_types and "token_type_ids" not in rows:  # the buffer that would be used is too short
            found["token_type_ids"] = torch.zeros_like(rows["positions"])[None]
        # A mask of four dimensions is passed on as it is. Without one, transformers searches the positions for texts on the device.
        found["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=rows.starts.device)
        found |= {"use_cache": False} if "use_cache" in self.base_names else {}
        return found | {"segments": self.at}

    def _has_flash(self, device: torch.device) -> bool:
        """Return whether attention gets 16 bits and flash attention can compute it."""
        kind, weights = device.type, next(self.owner.parameters()).dtype
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weights
        if hasattr(self.hooked, "_original_forward") and not torch.is_autocast_enabled(kind):
            narrow = self.narrow  # Accelerate has put its autocast behind this hook
        is_bounded = any(getattr(config, "attn_logit_softcapping", None) for config, _ in self.configs.values())
        is_narrow = narrow in (torch.bfloat16, torch.float16) and kind == "cuda" and not is_bounded
        return is_narrow and flash_size(self.base.config, device) > 0


class FixedModel(LayersOfModel):
    """Layers whose items have one length and no mask, such as images: their batch is a row of texts already."""

    is_fixed, is_plain = True, False

    def __init__(self, model: nn.Module, is_sharded: bool = False):
        super().__init__(model, is_sharded)
        if self.why_plain:
            raise NeedsPadding(self.why_plain)
        self.width = 0  # positions of an item

    def _dispatch(self, number: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Below checkpointing a layer is called again in the backward pass.
        is_checkpointed = getattr(self.layers[number], "gradient_checkpointing", False)
        if is_checkpointed or not self.is_enabled:
            out = self.originals[number](hidden_states, *args, **kwargs)
        else:
            if number == 0:
                self.begin_pass()
                self.at = self._segments(hidden_states)
            out = super()._dispatch(number, hidden_states, *args, **kwargs, segments=self.at)
        if self.outputs is not None and number == len(self.layers) - 1:
            self.outputs.append(out[0] if isinstance(out, tuple) else out)
        return out

    def _segments(self, hidden: Tensor) -> Segments:
        number, self.width = hidden.shape[:2]
        kind = hidden.device.type
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        is_flash = kind == "cuda" and narrow.itemsize == 2 and flash_size(self.owner.config, hidden.device) > 0
        starts = torch.arange(0, (number + 1) * self.width, self.width, dtype=torch.int32, device=hidden.device)
        return Segments(starts, self.width, is_flash)
