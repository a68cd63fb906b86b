"""A transformers model whose layers compute without padding, if that gives the same result as padding."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_ddp.speed import padding_free
from accel_ddp.speed.padding_free import NAME, REPLACED, NeedsPadding, Row, Segments, is_active, pack, unpack
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


class PaddingFree:
    """Lets `model` compute without padding whenever its attention mask belongs to the current batch."""

    def __init__(self, model: nn.Module):
        """Raise NeedsPadding if the model obviously cannot compute without padding. `check` tests the others."""
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

        owner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if owner is None:
            raise NeedsPadding("it is not a transformers model")
        self.model, self.owner, self.layers = model, owner, layers_of(owner)
        configs = [m.config for m in owner.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")]
        self.configs = {id(config): config for config in configs}
        kinds = {config._attn_implementation for config in self.configs.values()}
        if not kinds <= {REPLACED, NAME}:
            raise NeedsPadding(f"its attention is {', '.join(map(str, kinds))}, not {REPLACED}")
        dropped = ("layerdrop", "layer_drop", "encoder_layerdrop", "decoder_layerdrop")
        if any(getattr(config, name, 0) for config in self.configs.values() for name in dropped):
            raise NeedsPadding("it skips layers at random (layerdrop)")
        windows = ("sliding_window", "attention_chunk_size", "local_attention")
        found = [getattr(config, name, None) for config in self.configs.values() for name in windows]
        # A window, which may extend to both sides, has no effect on texts that are at most half as long.
        self.longest = min((int(window) // 2 for window in found if window), default=1 << 30)
        AttentionInterface.register(NAME, padding_free.attention)
        AttentionMaskInterface.register(NAME, padding_free.mask_of)
        self.calls: list[Callable[..., Any]] = [layer.forward for layer in self.layers]
        self.run: Callable[..., Any] | None = None  # calls a layer instead of `calls`; set by `attach` to use CUDA graphs
        self.on_new_batch: Callable[[], None] = lambda: None  # forward passes before it will have no backward pass any more
        self.is_enabled = True
        self.last_batch: CurrentBatch | None = None
        self.outputs: list[Any] | None = None  # of the last layer, while `check` runs
        self._clear()

    def _clear(self) -> None:
        self.row: Row | None = None
        self.at: Segments | None = None
        self.known, self.given, self.packed_arguments = {}, None, None

    def install(self) -> None:
        for config in self.configs.values():
            config._attn_implementation = NAME
        for table in small_tables(self.owner) if next(self.owner.parameters()).is_cuda else ():
            table.forward = functools.partial(_look_up, table)
        # Not a hook, because adapters call `forward` itself.
        self.owner.forward = self._model(self.owner.forward)
        for number, layer in enumerate(self.layers):
            layer.forward = self._layer(number)

    def remove(self) -> None:
        for config in self.configs.values():
            config._attn_implementation = REPLACED
        for module in [self.owner, *self.layers, *small_tables(self.owner)]:
            module.__dict__.pop("forward", None)
        self._clear()

    def _model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            current = current_batch()
            is_first = current is not self.last_batch
            if is_first:
                self.last_batch = current
                self.on_new_batch()
            mask = kwargs.get("attention_mask")
            row = self._row(current, kwargs.get("position_ids") if mask is None else mask)  # rows of several texts have no mask
            # A checkpointed layer is called again in the backward pass, after this call has ended, and needs the same `at`.
            checkpointed = torch.is_grad_enabled() and any(getattr(m, "gradient_checkpointing", False) for m in self.layers[:1])
            if checkpointed and self.at is not None and not is_first:
                raise RuntimeError(
                    "the loss calls the model twice, which does not work without padding and with --gradient_checkpointing. "
                    "Add --padding_free off."
                )
            self._clear()
            self.row = row
            if row is not None and mask is None:  # otherwise transformers looks for texts in the positions, and waits for the GPU
                kwargs["attention_mask"] = row.mask
            token = is_active.set(row is not None)
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

    def _segments(self, hidden: Tensor) -> Segments:
        if self.at is None:  # in the first layer, because the autocast type is known only inside of the forward pass
            kind = hidden.device.type
            narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
            has_flash = narrow in (torch.bfloat16, torch.float16) and self._has_flash(hidden.device)
            self.at = padding_free.segments_of(self.row, has_flash)
        return self.at

    def _has_flash(self, device: torch.device) -> bool:
        config = next(iter(self.configs.values()))
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8 and size % 8 == 0 and size <= 256

    def _layer(self, number: int) -> Callable[..., Any]:
        original, last = self.layers[number].forward, len(self.layers) - 1

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            at = self._segments(hidden_states) if self.row is not None else None
            if at is not None:
                hidden_states = pack(hidden_states, at) if number == 0 else hidden_states
                args, kwargs = self._arguments(args, kwargs, at)
            current = current_batch()
            in_plain_order = current is not None and current.in_plain_order
            if at is None:
                out = original(hidden_states, *args, **kwargs)
            elif self.run is not None and not in_plain_order and torch.is_grad_enabled():
                out = self.run(number, hidden_states, args, kwargs)
            elif torch.is_grad_enabled() or self.layers[number].training:
                # Also without gradients: GradCache repeats the pass with gradients and must draw the same dropout, and compiled
                # code draws different values than plain code.
                out = self.calls[number](hidden_states, *args, **kwargs)
            else:  # an evaluation does not run often enough for its own compilation
                out = original(hidden_states, *args, **kwargs)
            if number == last and at is not None:
                out = (unpack(out[0], at), *out[1:]) if isinstance(out, tuple) else unpack(out, at)
            if number == last and self.outputs is not None:
                self.outputs.append(out)
            return out

        return forward

    def _arguments(self, args: tuple, kwargs: dict[str, Any], at: Segments) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a layer without padding.

        Most layers get the same objects as the one before. That case is checked first, because the host limits the speed.
        """
        if (
            self.given
            and len(kwargs) == len(self.given[1]) and len(args) == len(self.given[0])
            and all(a is b for a, b in zip(args, self.given[0]))
            and all(self.given[1].get(name, self) is value for name, value in kwargs.items())
        ):  # fmt: skip
            return self.packed_arguments
        packed = {name: self._packed(value, at) for name, value in kwargs.items()}
        packed |= {name: value for name, value in (("attention_mask", None), ("use_cache", False)) if name in packed}
        # Flash attention needs no more. With the rest, every width of a padded batch would need its own CUDA graph.
        rest = ("slots", "places", "real", "mask", "shape", "numbers", "own", "second")
        packed["segments"] = at._replace(**dict.fromkeys(rest)) if at.is_flash else at
        self.given, self.packed_arguments = (args, kwargs), (tuple(self._packed(value, at) for value in args), packed)
        return self.packed_arguments

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
        results = []
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
                    results.append((value, out[batch["attention_mask"].reshape(out.shape[:2]).bool()].float()))
        except torch.OutOfMemoryError:
            raise
        except NeedsPadding as error:
            return str(error)
        except Exception as error:  # of many kinds: layers with other outputs, indices out of range
            return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200]
        finally:
            self.is_enabled, self.outputs = True, None
            self._clear()
            self.model.train(was_training)
        (padded, before), (packed, after) = results
        apart = float((before - after).abs().max() / before.abs().max().clamp(min=1e-12))
        if not apart <= allowed or not abs(padded - packed) <= 10 * allowed * max(abs(padded), 1e-3):
            return f"its result differs without padding: by {apart:.1e}, with a loss of {packed:.6g} instead of {padded:.6g}"
        return ""


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformer that is a single stack, in their order. Raise NeedsPadding for other models."""
    if "transformers.modeling_layers" not in sys.modules:  # not imported here, because that takes seconds
        raise NeedsPadding("its layers were not found")
    from transformers.modeling_layers import GradientCheckpointingLayer

    stacks = [
        list(module) for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(isinstance(m, GradientCheckpointingLayer) for m in module)
    ]  # fmt: skip
    if len(stacks) != 1:
        raise NeedsPadding(f"the model has {len(stacks)} stacks of layers" if stacks else "its layers were not found")
    if len({type(layer) for layer in stacks[0]}) > 1:
        raise NeedsPadding("its layers have different types")
    return stacks[0]
