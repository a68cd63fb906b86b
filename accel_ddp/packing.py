"""No computing on padding: inside a transformer's layers the texts of a micro-batch lie one after the other.

Outside of the layers nothing changes. A micro-batch comes padded, embeddings give each token its place in its own text, and
what stands after the last layer (a pooler, a head, a loss) sees a padded batch again; so a recipe, a model and its positions
need not know. Between the first and the last layer there is one row of all real tokens. Attention sees where each text begins
and ends, on a GPU in half precision through flash attention for texts of any length. Elsewhere queries, keys and values go
back into padded rows for the attention alone: correct on every device and in every precision, and the matrices of the layers,
nine tenths of the work, still see no padding.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "accel_ddp_packed"  # among transformers' kinds of attention
ITS_OWN = ("sdpa",)  # the kind that is replaced; who asks for another gets it, with padding


class Unpackable(Exception):
    """Why this model must be computed with padding."""


class Segments(NamedTuple):
    """Where the texts lie in a row of tokens; what remains of the row is one more text, that nobody reads."""

    starts: Tensor  # int32: first token of each text, and the row's end
    longest: int  # at least as long as the longest text
    slots: Tensor  # of each place of the padded batch: its token in the row (0, where there is only padding)
    places: Tensor  # of each token in the row: its place in the padded batch (0, in what remains)
    real: Tensor  # bool: of each token in the row, whether it is of a text
    mask: Tensor  # bool: of each place of the padded batch, the same
    shape: tuple[int, int]  # of the padded batch
    is_flash: bool


class Micro(NamedTuple):
    """What the host knows of the micro-batch that is computed: the device must not be asked."""

    mask: Tensor
    tokens: int  # of the row: at least as many as are real
    longest: int


_now: Micro | None = None


class using:
    """`with using(batch)`: a model whose attention mask is that of this batch computes it packed, if it can."""

    def __init__(self, batch: Any):
        sizes = getattr(batch, "sizes", None)
        self.micro = Micro(batch["attention_mask"], sizes.row, sizes.longest) if sizes else None

    def __enter__(self) -> None:
        global _now
        _now = self.micro

    def __exit__(self, *_: object) -> None:
        global _now
        _now = None


def segments_of(micro: Micro, is_flash: bool) -> Segments:
    """Computed on the device, without asking it for a number."""
    mask, tokens = micro.mask.bool(), micro.tokens
    flat = mask.flatten()
    before = flat.cumsum(0) - 1
    spill = torch.where(flat, before, tokens)  # padding is written behind the row, and cut off
    places = torch.zeros(tokens + 1, dtype=torch.long, device=mask.device)
    places.scatter_(0, spill, torch.arange(len(flat), device=mask.device))
    ends = mask.sum(1).cumsum(0)
    starts = F.pad(ends, (1, 1)).to(torch.int32)
    starts[-1] = tokens
    real = torch.arange(tokens, device=mask.device) < ends[-1]
    slots = torch.where(flat, before, 0)
    return Segments(starts, micro.longest, slots, places[:tokens], real, flat, tuple(mask.shape), is_flash)


class Move(torch.autograd.Function):
    """[1, from, ...] -> [1, to, ...]. The gradient goes the way back by an index, not by a sum: the same bits every time."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor, has_gradient: Tensor) -> Tensor:
        ctx.save_for_backward(back, has_gradient)
        return rows.index_select(1, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back, has_gradient = ctx.saved_tensors
        rows = gradient.index_select(1, back)
        return rows.mul_(has_gradient.view(1, -1, *[1] * (rows.ndim - 2))), None, None, None


def pack(padded: Tensor, at: Segments) -> Tensor:
    """[texts, width, ...] -> [1, tokens, ...]"""
    if padded.shape[0] == 1 and at.shape[0] > 1:  # positions, the same for every text
        padded = padded.expand(at.shape[0], *padded.shape[1:])
    # What comes out is no view: compiled code is for tensors that are views of others, or for tensors that are not.
    return Move.apply(padded.flatten(0, 1)[None], at.places, at.slots, at.mask)


def unpack(row: Tensor, at: Segments) -> Tensor:
    """[1, tokens, ...] -> [texts, width, ...]; at padding there is something finite."""
    return Move.apply(row, at.slots, at.places, at.real)[0].unflatten(0, at.shape)


# The operators below transformers' and torch's own wrappers of flash attention, of which none has dropout, needs no further
# package, and sums gradients in the same order every time. One operator each, so that a compiler need not look inside.
@torch.library.custom_op("accel_ddp::flash", mutates_args=())
def _flash(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, dropout: float, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, random_state, _, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, dropout, causal, False, scale=scale
    )
    return out, lse, random_state


@_flash.register_fake
def _(q, k, v, starts, longest, dropout, causal, scale):
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return torch.empty_like(q), lse, torch.empty(2, dtype=torch.uint64, device=q.device)


@torch.library.custom_op("accel_ddp::flash_backward", mutates_args=())
def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, longest: int, dropout: float,
    causal: bool, random_state: Tensor, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with _in_one_order():
        return torch.ops.aten._flash_attention_backward(
            gradient.contiguous(), q, k, v, out, lse, starts, starts, longest, longest, dropout, causal,
            random_state, torch.empty(0, device=q.device), scale=scale,
        )  # fmt: skip


@_flash_backward.register_fake
def _(gradient, q, k, v, out, lse, starts, longest, dropout, causal, random_state, scale):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, starts, ctx.longest, ctx.dropout, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, starts, *output)


def _gradients(ctx: Any, gradient: Tensor, *_: Any) -> tuple:
    q, k, v, starts, out, lse, random_state = ctx.saved_tensors
    found = _flash_backward(gradient, q, k, v, out, lse, starts, ctx.longest, ctx.dropout, ctx.causal, random_state, ctx.scale)
    return *found, None, None, None, None, None


_flash.register_autograd(_gradients, setup_context=_keep)


@contextlib.contextmanager
def _in_one_order() -> Iterator[None]:
    """Without it a resumed run would not be the same to the last bit."""
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # would cost a pass over each output
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    segments: Segments | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Like transformers' `sdpa_attention_forward`; with `segments`, of texts that lie one after the other."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)
    if strange := [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]:
        raise Unpackable(f"its attention has {', '.join(strange)}")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if segments.is_flash:
        # [tokens, heads, size]; rotated queries and keys may have come out wider than what is computed in.
        q, k, v = (x[0].transpose(0, 1).to(value.dtype).contiguous() for x in (query, key, value))
        return _flash(q, k, v, segments.starts, segments.longest, dropout, causal, scaling)[0][None], None
    heads = query.shape[1] // key.shape[1]
    q, k, v = (unpack(x.transpose(1, 2), segments).transpose(1, 2) for x in (query, key, value))
    if heads > 1:
        k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    mask = segments.mask.view(segments.shape)[:, None, None, :]
    if causal:
        width = segments.shape[1]
        mask = mask & torch.ones(width, width, dtype=torch.bool, device=mask.device).tril()
    # A row of padding before a text sees nothing at all: 0 / 0. Nobody reads it, but its gradient would spread.
    mask = mask | torch.eye(segments.shape[1], dtype=torch.bool, device=mask.device)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return pack(out.transpose(1, 2).contiguous(), segments), None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """What transformers hands to every layer as its mask; packed layers have none."""
    from transformers.masking_utils import sdpa_mask

    return None if _packs_now() else sdpa_mask(*args, **kwargs)


_packing_model: "weakref.ref[Packed] | None" = None  # the one whose forward pass runs


def _packs_now() -> bool:
    packed = _packing_model() if _packing_model else None
    return packed is not None and packed.micro is not None


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
        self.layers = layers_of(owner)
        configs = [
            module.config for module in owner.modules() if hasattr(getattr(module, "config", None), "_attn_implementation")
        ]
        self.configs = {id(config): config for config in configs}
        kinds = {config._attn_implementation for config in self.configs.values()}
        if not kinds <= {*ITS_OWN, NAME}:
            raise Unpackable(f"its attention is {', '.join(map(str, kinds))}, not sdpa")
        windows = ("sliding_window", "attention_chunk_size", "local_attention")
        found = [getattr(config, name, None) for config in self.configs.values() for name in windows]
        # Texts that are no longer than half of a window, which may be of both sides, do not feel it.
        self.longest = min((int(window) // 2 for window in found if window), default=1 << 30)
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, _mask)
        self.model, self.micro, self.at, self.known = model, None, None, {}
        self.given: Any = None
        self.calls: list[Callable[..., Any]] = [layer.forward for layer in self.layers]
        self.is_wanted, self.before = True, None
        self.run: Callable[..., Any] | None = None  # calls a layer instead of `calls`: see `graphs`
        self.forget: Callable[[], None] = lambda: None  # what was computed before will have no backward pass

    def install(self) -> None:
        for config in self.configs.values():
            config._attn_implementation = NAME
        for table in small_tables(self.model) if next(self.model.parameters()).is_cuda else ():
            table.forward = functools.partial(_looked_up, table)
        self.handles = [self.model.register_forward_pre_hook(self._before, with_kwargs=True)]
        for number, layer in enumerate(self.layers):
            layer.forward = self._layer(number)

    def remove(self) -> None:
        for config in self.configs.values():
            config._attn_implementation = ITS_OWN[0]
        for handle in self.handles:
            handle.remove()
        for module in [*self.layers, *small_tables(self.model)]:
            module.__dict__.pop("forward", None)
        self.micro = None

    def _before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        global _packing_model
        mask = kwargs.get("attention_mask")
        # Both stay until the next forward pass: gradient checkpointing calls layers again in the backward pass.
        self.micro, self.at, self.known, self.given = None, None, {}, None
        _packing_model = weakref.ref(self)
        if _now is not self.before:
            self.before = _now
            self.forget()
        same = _now is not None and mask is not None and self.is_wanted and _now.longest <= self.longest
        if same and mask.data_ptr() == _now.mask.data_ptr() and mask.numel() == _now.mask.numel() and mask.ndim == 2:
            self.micro = Micro(mask, _now.tokens, _now.longest)

    def _segments(self, hidden: Tensor) -> Segments:
        if self.at is None:  # in the first layer: only inside of the forward pass one sees what is computed in
            kind = hidden.device.type
            narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
            config = next(iter(self.configs.values()))
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            is_flash = hidden.is_cuda and narrow in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= 256
            self.at = segments_of(self.micro, is_flash)
        return self.at

    def _layer(self, number: int) -> Callable[..., Any]:
        original, last = self.layers[number].forward, len(self.layers) - 1

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.micro is None:
                return original(hidden_states, *args, **kwargs)
            at = self._segments(hidden_states)
            if hidden_states.shape[:2] == at.shape:
                hidden_states = pack(hidden_states, at)
            args, kwargs = self._arguments(args, kwargs, at)
            if self.run is not None:
                out = self.run(number, hidden_states, args, kwargs)
            else:
                out = self.calls[number](hidden_states, *args, **kwargs)
            if number < last:
                return out
            return (unpack(out[0], at), *out[1:]) if isinstance(out, tuple) else unpack(out, at)

        return forward

    def _arguments(self, args: tuple, kwargs: dict[str, Any], at: Segments) -> tuple[tuple, dict[str, Any]]:
        """Packed. Most layers are given the same objects as the one before: found out at once, for the host is what waits."""
        if (
            self.given
            and len(kwargs) == len(self.given[1]) and all(a is b for a, b in zip(args, self.given[0]))
            and all(self.given[1].get(name, self) is value for name, value in kwargs.items())
        ):  # fmt: skip
            return self.taken
        packed = {name: None if name == "attention_mask" else self._packed(value, at) for name, value in kwargs.items()}
        # Flash attention needs no more; the rest would give every width of a padded batch a recording of its own.
        packed["segments"] = at._replace(slots=None, places=None, real=None, mask=None, shape=None) if at.is_flash else at
        self.given, self.taken = (args, kwargs), (tuple(self._packed(value, at) for value in args), packed)
        return self.taken

    def _packed(self, value: Any, at: Segments) -> Any:
        """What a layer gets beside its hidden states: positions are packed, once for all layers; a mask is left out."""
        if isinstance(value, tuple | list):
            return type(value)(self._packed(part, at) for part in value)
        if not isinstance(value, Tensor):
            return value
        if value.ndim >= 4:
            return None
        if value.ndim < 2 or value.shape[1] != at.shape[1] or value.shape[0] not in (1, at.shape[0]):
            return value
        if id(value) not in self.known:
            self.known[id(value)] = value, pack(value, at)  # with the value: its id is free when it is gone
        return self.known[id(value)][1]

    @torch.no_grad()
    def holds_for(self, loss: Callable[[Any], Tensor], batch: Any) -> str:
        """Nothing, if the losses of this batch are the same with and without padding; else what is different."""
        was_training = self.model.training
        self.model.eval()
        losses = []
        try:
            for self.is_wanted in (False, True):
                with using(batch):
                    losses.append(float(loss(batch)))
                if self.is_wanted and self.micro is None:
                    return "its attention mask is not that of the batch"
        except Unpackable as error:
            return str(error)
        except Exception as error:  # of many kinds: attention that knows no segments, layers that return something else
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        finally:
            self.is_wanted, self.micro, self.at = True, None, None
            self.model.train(was_training)
        allowed = 1e-3 if next(self.model.parameters()).dtype == torch.float32 else 3e-2
        if abs(losses[0] - losses[1]) <= allowed * max(abs(losses[0]), 1e-3):
            return ""
        return f"its loss was {losses[1]:.6g} packed and {losses[0]:.6g} padded"


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformer that is one stack of them, in their order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    stacks = [
        list(module) for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(isinstance(m, GradientCheckpointingLayer) for m in module)
    ]  # fmt: skip
    if len(stacks) != 1:
        raise Unpackable(f"it has {len(stacks)} stacks of layers" if stacks else "its layers are not found")
    if len({type(layer) for layer in stacks[0]}) > 1:
        raise Unpackable("its layers are of several kinds")
    return stacks[0]
