"""No computing on padding: inside a transformer's layers the texts of a micro-batch lie one after the other.

Outside of the layers nothing changes. A micro-batch comes padded, embeddings give each token its place in its own text, and
what stands after the last layer (a pooler, a head, a loss) sees a padded batch again; so a recipe, a model and its positions
need not know. Between the first and the last layer there is one row of all real tokens. Attention sees where each text begins
and ends, on a GPU in half precision through flash attention for texts of any length. Elsewhere queries, keys and values go
back into padded rows for the attention alone: correct on every device and in every precision, and the matrices of the layers,
nine tenths of the work, still see no padding.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "accel_ddp_packed"  # among transformers' kinds of attention
ITS_OWN = "sdpa"  # the kind that is replaced; who asks for another gets it, with padding


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


now: Micro | None = None
is_settling = False  # while it is, layers are not replayed: DDP looks in which order gradients come; set by `update`
is_packing = False  # whether the forward pass that runs is a packed one; set by `packed`


class using:
    """`with using(batch)`: a model whose attention mask is that of this batch computes it packed, if it can."""

    def __init__(self, batch: Any):
        sizes = getattr(batch, "sizes", None)
        self.micro = Micro(batch["attention_mask"], sizes.row, sizes.longest) if sizes else None

    def __enter__(self) -> None:
        global now
        now = self.micro

    def __exit__(self, *_: object) -> None:
        global now
        now = None


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
    starts[-1:].fill_(tokens)  # not `starts[-1] = tokens`, for which the host waits until the device has done all before it
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
        if is_packing:  # texts would see each other
            raise Unpackable("it does not hand on to its attention what its layers are given")
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


def mask_of(*args: Any, **kwargs: Any) -> Tensor | None:
    """What transformers hands to every layer as its mask; packed layers have none."""
    from transformers.masking_utils import sdpa_mask

    return None if is_packing else sdpa_mask(*args, **kwargs)
