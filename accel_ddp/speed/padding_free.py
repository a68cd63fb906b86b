"""Computation without padding: inside of the layers of a transformer, the texts of a micro-batch are concatenated to one row.

Outside of the layers nothing changes. A micro-batch enters padded, and the embeddings give each token its position in its own
text. Behind the last layer the pooler, head and loss get a padded batch again. Recipes, models and positions therefore need no
change. Between the first and the last layer there is one row of all tokens without padding. Attention gets the boundaries of the
texts. On a GPU in half precision it is flash attention for sequences of variable length. Elsewhere queries, keys and values are
padded for the attention alone. That is correct on every device and in every precision, and the matrix products of the layers,
nine tenths of the work, still contain no padding.
"""

from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_ddp import compat
from accel_ddp.training.losses import CurrentBatch

NAME = "accel_ddp_padding_free"  # the name of our attention in transformers
REPLACED = "sdpa"  # the attention that it replaces; a model with another attention is computed with padding


class NeedsPadding(Exception):
    """The model must be computed with padding, for the reason in the message."""


class Segments(NamedTuple):
    """The positions of the texts in a row of tokens. The unused end of the row is treated as one more text."""

    starts: Tensor  # int32: first token of each text, and the end of the row
    longest: int  # at least the length of the longest text
    slots: Tensor  # for each position of the padded batch: its token in the row (0 for padding)
    places: Tensor  # for each token in the row: its position in the padded batch (0 at the unused end)
    real: Tensor  # bool, for each token in the row: whether it belongs to a text
    mask: Tensor  # bool, for each position of the padded batch: whether it belongs to a text
    shape: tuple[int, int]  # of the padded batch
    is_flash: bool
    numbers: Tensor | None = None  # for each position of the padded batch: the number of its text, if its rows have several


class Row(NamedTuple):
    """The row for the micro-batch that is being computed. The numbers come from the host, so the device is not read."""

    mask: Tensor
    tokens: int  # length of the row: at least the number of tokens without padding
    longest: int  # at least the length of the longest text
    positions: Tensor | None = None  # of each token in its text, if the rows of the padded batch have several texts
    texts: int = 0  # at least the number of texts, if there are positions


# Whether the forward pass that runs computes without padding. The attention function, which transformers calls, reads it.
is_active: ContextVar[bool] = ContextVar("accel_ddp_padding_free", default=False)


def row_of(current: CurrentBatch | None) -> Row | None:
    """Return the row for a micro-batch of texts, or None for other micro-batches.

    On a GPU lengths are rounded up, so that there are few different ones, because each is captured as a CUDA graph.
    """
    sizes = getattr(current.batch, "sizes", None) if current is not None else None
    if sizes is None:
        return None
    mask, positions = current.batch["attention_mask"], current.batch.get("position_ids")
    if not mask.is_cuda:
        return Row(mask, sizes.tokens, sizes.width, positions, sizes.texts)
    tokens = rounded_up(sizes.tokens)
    # The unused end of the row is computed like a text, so it must not be longer than the longest.
    longest = max(1 << max(0, sizes.width - 1).bit_length(), 1 << (tokens - sizes.tokens).bit_length())
    return Row(mask, tokens, longest, positions, rounded_up(sizes.texts))


def rounded_up(number: int) -> int:
    """Round up by at most a sixteenth on average, to one of few different numbers."""
    grain = max(64, 1 << max(0, (number // 8).bit_length() - 1))
    return max(1, -(-number // grain)) * grain


def segments_of(row: Row, is_flash: bool) -> Segments:
    """Return the positions of the texts, computed on the device without a synchronization."""
    mask, tokens = row.mask.bool(), row.tokens
    flat = mask.flatten()
    before = flat.cumsum(0) - 1
    spill = torch.where(flat, before, tokens)  # padding is written behind the row and removed below
    places = torch.zeros(tokens + 1, dtype=torch.long, device=mask.device)
    places.scatter_(0, spill, torch.arange(len(flat), device=mask.device))
    ends = mask.sum(1).cumsum(0)
    starts = F.pad(ends, (1, 1)).to(torch.int32)
    starts[-1:].fill_(tokens)  # `starts[-1] = tokens` would synchronize with the device
    numbers = None
    if row.positions is not None:
        # Behind the starts of the texts: the end of the last one, and empty texts at the end of the row.
        is_first = flat & (row.positions == 0).flatten()
        numbers = is_first.cumsum(0) - 1
        starts = torch.full((row.texts + 2,), tokens, device=mask.device)
        starts.scatter_(0, torch.where(is_first, numbers, row.texts + 1), torch.where(is_first, before, tokens))
        starts = starts.scatter_(0, numbers[-1:] + 1, ends[-1:]).to(torch.int32)
    real = torch.arange(tokens, device=mask.device) < ends[-1]
    slots = torch.where(flat, before, 0)
    return Segments(starts, row.longest, slots, places[:tokens], real, flat, tuple(mask.shape), is_flash, numbers)


class Move(torch.autograd.Function):
    """Moves rows: [1, from, ...] -> [1, to, ...]. The gradient is an indexing, not a sum, so that it is deterministic."""

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
    if padded.shape[0] == 1 and at.shape[0] > 1:  # positions, which are the same for every text
        padded = padded.expand(at.shape[0], *padded.shape[1:])
    # The result is not a view, because compiled code is specialized on whether a tensor is a view.
    return Move.apply(padded.flatten(0, 1)[None], at.places, at.slots, at.mask)


def unpack(row: Tensor, at: Segments) -> Tensor:
    """[1, tokens, ...] -> [texts, width, ...]. Padding gets arbitrary finite values."""
    return Move.apply(row, at.slots, at.places, at.real)[0].unflatten(0, at.shape)


# Each is one operator, so a compiler does not trace it.
@torch.library.custom_op("accel_ddp::flash", mutates_args=())
def _flash(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, dropout: float, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    return compat.flash_attention(q, k, v, starts, longest, dropout, causal, scale)


@_flash.register_fake
def _(q, k, v, starts, longest, dropout, causal, scale):
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return torch.empty_like(q), lse, torch.empty(2, dtype=torch.uint64, device=q.device)


@torch.library.custom_op("accel_ddp::flash_backward", mutates_args=())
def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, longest: int, dropout: float,
    causal: bool, random_state: Tensor, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # Otherwise a resumed run would not be bit-identical.
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would cost a pass over each output
    torch.use_deterministic_algorithms(True)
    try:
        return compat.flash_attention_gradients(
            gradient, q, k, v, out, lse, starts, longest, dropout, causal, random_state, scale
        )
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills


@_flash_backward.register_fake
def _(gradient, q, k, v, out, lse, starts, longest, dropout, causal, random_state, scale):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, starts, ctx.longest, ctx.dropout, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, starts, *output)


def _gradients(ctx: Any, gradient: Tensor, *_: Any) -> tuple:
    q, k, v, starts, out, lse, random_state = ctx.saved_tensors
    found = _flash_backward(gradient, q, k, v, out, lse, starts, ctx.longest, ctx.dropout, ctx.causal, random_state, ctx.scale)
    return *found, None, None, None, None, None


_flash.register_autograd(_gradients, setup_context=_save_for_backward)


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
    """Compute attention like transformers' `sdpa_attention_forward`. With `segments`, the texts are concatenated to one row."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if segments is None:
        if is_active.get():  # without segments, texts would attend to each other
            raise NeedsPadding("its layers do not pass their arguments on to the attention")
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]:
        raise NeedsPadding(f"its attention has {', '.join(unknown)}")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if segments.is_flash:
        # [tokens, heads, size]. Rotary embeddings may have returned queries and keys in a wider type.
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
    if segments.numbers is not None:
        numbers = segments.numbers.view(segments.shape)
        mask = mask & (numbers[:, None, :, None] == numbers[:, None, None, :])
    # Padding before a text would attend to nothing: 0 / 0. The result is not used, but its gradient would spread.
    mask = mask | torch.eye(segments.shape[1], dtype=torch.bool, device=mask.device)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return pack(out.transpose(1, 2).contiguous(), segments), None


def mask_of(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the attention mask that transformers passes to every layer. Without padding there is none."""
    from transformers.masking_utils import sdpa_mask

    return None if is_active.get() else sdpa_mask(*args, **kwargs)
