"""A transformers model whose layers compute packed, if that gives the same as padding."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_ddp.speed import padding_free
from accel_ddp.speed.padding_free import ITS_OWN, NAME, Micro, Segments, Unpackable, pack, segments_of, unpack, using


class _SmallTable(torch.autograd.Function):
    """An embedding of few rows. Torch's own gradient of it is slow, for many tokens meet in one row, and sums in any order."""

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
    """Embeddings of kinds of tokens and the like."""
    plain = lambda m: type(m) is nn.Embedding and m.padding_idx is None and m.max_norm is None and not m.sparse
    return [module for module in model.modules() if plain(module) and module.num_embeddings <= 16]


def _looked_up(table: nn.Embedding, places: Tensor) -> Tensor:
    return _SmallTable.apply(places, table.weight)


class Packed:
    """Lets `model` compute packed whenever a batch of `using` comes along. `run` calls a layer: see `graphs`."""

    def __init__(self, model: nn.Module):
        """Raises Unpackable where it is plain that the model cannot; `holds_for` finds out the rest."""
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

        owner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if owner is None:
            raise Unpackable("it is no model of transformers")
        self.model, self.owner, self.layers = model, owner, layers_of(owner)
        configs = [m.config for m in owner.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")]
        self.configs = {id(config): config for config in configs}
        kinds = {config._attn_implementation for config in self.configs.values()}
        if not kinds <= {ITS_OWN, NAME}:
            raise Unpackable(f"its attention is {', '.join(map(str, kinds))}, not {ITS_OWN}")
        dropped = ("layerdrop", "layer_drop", "encoder_layerdrop", "decoder_layerdrop")
        if any(getattr(config, name, 0) for config in self.configs.values() for name in dropped):
            raise Unpackable("it leaves out layers at random (layerdrop)")
        windows = ("sliding_window", "attention_chunk_size", "local_attention")
        found = [getattr(config, name, None) for config in self.configs.values() for name in windows]
        # Texts that are no longer than half of a window, which may be of both sides, do not feel it.
        self.longest = min((int(window) // 2 for window in found if window), default=1 << 30)
        AttentionInterface.register(NAME, padding_free.attention)
        AttentionMaskInterface.register(NAME, padding_free.mask_of)
        self.micro: Micro | None = None
        self.at: Segments | None = None
        self.calls: list[Callable[..., Any]] = [layer.forward for layer in self.layers]
        self.run: Callable[..., Any] | None = None  # calls a layer instead of `calls`: see `graphs`
        self.forget: Callable[[], None] = lambda: None  # what was computed before will have no backward pass
        self.is_wanted, self.before, self.watched = True, None, None
        self._clear()

    def _clear(self) -> None:
        self.micro, self.at, self.known, self.given, self.taken = None, None, {}, None, None

    def install(self) -> None:
        for config in self.configs.values():
            config._attn_implementation = NAME
        for table in small_tables(self.owner) if next(self.owner.parameters()).is_cuda else ():
            table.forward = functools.partial(_looked_up, table)
        # Not a hook: adapters call `forward` itself; and what is no module's is not copied with the model.
        self.owner.forward = self._model(self.owner.forward)
        for number, layer in enumerate(self.layers):
            layer.forward = self._layer(number)

    def remove(self) -> None:
        for config in self.configs.values():
            config._attn_implementation = ITS_OWN
        for module in [self.owner, *self.layers, *small_tables(self.owner)]:
            module.__dict__.pop("forward", None)
        self._clear()

    def _model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            is_first = padding_free.now is not self.before
            if is_first:
                self.before = padding_free.now
                self.forget()
            micro = self._micro(kwargs.get("attention_mask"))
            # A checkpointed layer is called again in the backward pass, when this is over: `at` must be that of its call.
            checkpointed = torch.is_grad_enabled() and any(getattr(m, "gradient_checkpointing", False) for m in self.layers[:1])
            if checkpointed and self.at is not None and not is_first:
                raise RuntimeError(
                    "the loss calls the model twice, which with --gradient_checkpointing cannot be packed: add --packing off"
                )
            self._clear()
            self.micro, padding_free.is_packing = micro, micro is not None
            try:
                return original(*args, **kwargs)
            finally:
                padding_free.is_packing = False
                if not checkpointed:
                    self._clear()

        return forward

    def _micro(self, mask: Tensor | None) -> Micro | None:
        """What the host knows of this call, if it is the batch of `using` that is computed, and one to be packed."""
        now = padding_free.now
        if now is None or not isinstance(mask, Tensor) or not self.is_wanted or now.longest > self.longest or mask.ndim != 2:
            return None
        is_it = mask.data_ptr() == now.mask.data_ptr() and mask.numel() == now.mask.numel()
        return Micro(mask, now.tokens, now.longest) if is_it else None

    def _segments(self, hidden: Tensor) -> Segments:
        if self.at is None:  # in the first layer: only inside of the forward pass one sees what is computed in
            kind = hidden.device.type
            narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
            self.at = segments_of(self.micro, narrow in (torch.bfloat16, torch.float16) and self._has_flash(hidden.device))
        return self.at

    def _has_flash(self, device: torch.device) -> bool:
        config = next(iter(self.configs.values()))
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8 and size % 8 == 0 and size <= 256

    def _layer(self, number: int) -> Callable[..., Any]:
        original, last = self.layers[number].forward, len(self.layers) - 1

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.micro is None:
                out = original(hidden_states, *args, **kwargs)
                if number == last and self.watched is not None:
                    self.watched.append(out)
                return out
            at = self._segments(hidden_states)
            if number == 0:
                hidden_states = pack(hidden_states, at)
            args, kwargs = self._arguments(args, kwargs, at)
            if self.run is not None and not padding_free.is_settling and torch.is_grad_enabled():
                out = self.run(number, hidden_states, args, kwargs)
            elif torch.is_grad_enabled() or self.layers[number].training:
                # Also without gradients: a pass that is repeated with them must draw the same dropout, and compiled code draws
                # another than plain code does.
                out = self.calls[number](hidden_states, *args, **kwargs)
            else:  # an evaluation is not worth a compilation of its own
                out = original(hidden_states, *args, **kwargs)
            if number < last:
                return out
            out = (unpack(out[0], at), *out[1:]) if isinstance(out, tuple) else unpack(out, at)
            if self.watched is not None:
                self.watched.append(out)
            return out

        return forward

    def _arguments(self, args: tuple, kwargs: dict[str, Any], at: Segments) -> tuple[tuple, dict[str, Any]]:
        """Packed. Most layers are given the same objects as the one before: found out at once, for the host is what waits."""
        if (
            self.given
            and len(kwargs) == len(self.given[1]) and len(args) == len(self.given[0])
            and all(a is b for a, b in zip(args, self.given[0]))
            and all(self.given[1].get(name, self) is value for name, value in kwargs.items())
        ):  # fmt: skip
            return self.taken
        packed = {name: self._packed(value, at) for name, value in kwargs.items()}
        packed |= {name: value for name, value in (("attention_mask", None), ("use_cache", False)) if name in packed}
        # Flash attention needs no more; the rest would give every width of a padded batch a recording of its own.
        packed["segments"] = at._replace(slots=None, places=None, real=None, mask=None, shape=None) if at.is_flash else at
        self.given, self.taken = (args, kwargs), (tuple(self._packed(value, at) for value in args), packed)
        return self.taken

    def _packed(self, value: Any, at: Segments) -> Any:
        """What a layer gets beside its hidden states: positions are packed, once for all layers; a mask and a cache of what
        was generated are left out."""
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
            raise Unpackable("its layers are given a tensor of four dimensions that is no mask")
        if value.ndim < 2 or value.shape[1] != at.shape[1] or value.shape[0] not in (1, at.shape[0]):
            return value
        if id(value) not in self.known:
            self.known[id(value)] = value, pack(value, at)  # with the value: its id is free when it is gone
        return self.known[id(value)][1]

    def holds_for(self, loss: Callable[[Any], Tensor], batch: Any, allowed: float) -> str:
        """Nothing, if what comes out of the last layer, and the loss, are the same with and without padding; else why not.

        `allowed` is a share of the largest value. Out of memory is no answer, and is raised.
        """
        was_training, precision = self.model.training, torch.get_float32_matmul_precision()
        self.model.eval()
        torch.set_float32_matmul_precision("highest")  # so that a small difference is one
        results = []
        try:
            with torch.no_grad():
                for self.is_wanted in (False, True):
                    self.watched = []
                    with using(batch):
                        value = float(loss(batch))
                    if not self.watched:
                        return "its last layer is not run"
                    last = self.watched[-1]
                    out = last[0] if isinstance(last, tuple) else last
                    results.append((value, out[batch["attention_mask"].reshape(out.shape[:2]).bool()].float()))
        except torch.OutOfMemoryError:
            raise
        except Unpackable as error:
            return str(error)
        except Exception as error:  # of many kinds: layers that return something else, indices that do not fit
            return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200]
        finally:
            self.is_wanted, self.watched = True, None
            self._clear()
            torch.set_float32_matmul_precision(precision)
            self.model.train(was_training)
        (padded, before), (packed, after) = results
        apart = float((before - after).abs().max() / before.abs().max().clamp(min=1e-12))
        if apart > allowed or not abs(padded - packed) <= 10 * allowed * max(abs(padded), 1e-3):
            return f"it computes something else packed: {apart:.1e} apart, a loss of {packed:.6g} instead of {padded:.6g}"
        return ""


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformer that is one stack of them, in their order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    stacks = [
        list(module) for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(isinstance(m, GradientCheckpointingLayer) for m in module)
    ]  # fmt: skip
    if len(stacks) != 1:
        raise Unpackable(f"the model has {len(stacks)} stacks of layers" if stacks else "the model's layers are not found")
    if len({type(layer) for layer in stacks[0]}) > 1:
        raise Unpackable("its layers are of several kinds")
    return stacks[0]
