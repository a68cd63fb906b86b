"""Computation without padding: the texts of a micro-batch are concatenated to one row, and attention gets their boundaries.

On a GPU in half precision it is flash attention for sequences of variable length. Elsewhere queries, keys and values are padded for
the attention alone. That is correct on every device and in every precision, and the matrix products of the layers, nine tenths of the
work, still contain no padding. `row_model` and `packed_layers` bring models to such rows.

If two texts begin with the same prompt, the row contains the prompt once, behind which both answers follow. Each answer attends to the
prompt and to itself. In a causal model the result is the same, because the prompt does not see the answers.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_ddp import compat
from accel_ddp.engine.rows import Grid, Rows, pack, unpack
from accel_ddp.training.isolation import unknown_arguments

log = logging.getLogger(__name__)

LEAST_SHARED = 0.05  # of the tokens of a sample; with less, gathering keys takes more time than it saves
NAME = "accel_ddp_padding_free"  # the name of our attention in transformers
NAME_OF_EAGER = "accel_ddp_padding_free_eager"  # of the same for models without SDPA
GROUPED = "grouped_mm"  # the products of experts that `experts` replaces


class NeedsPadding(Exception):
    """The model must be computed with padding, for the reason in the message."""


class Segments(NamedTuple):
    """The texts in a row of tokens, as attention needs them. The unused end of the row is treated as one more text."""

    starts: Tensor  # int32: first token of each text, and the end of the row
    longest: int  # at least the length of the longest text
    is_flash: bool
    grid: Grid | None = None  # the same texts as a padded batch, for attention without flash attention, and for mixers
    keys: tuple[Tensor, Tensor, Tensor] | None = None  # of flash attention, if texts share some, see `rows`
    source: "Segments | None" = None  # of the encoder, to which the layers of a decoder attend; its row has another length


# Whether the forward pass that runs computes without padding. The attention function, which transformers calls, reads it.
is_active: ContextVar[bool] = ContextVar("accel_ddp_padding_free", default=False)
# While a model is compared with and without padding: the windows that its layers have passed to the attention.
windows_seen: ContextVar[set[int] | None] = ContextVar("accel_ddp_windows_seen", default=None)


def segments_of(rows: Rows, is_flash: bool, has_mixers: bool = False) -> Segments:
    """Return the texts of rows. With a grid, every width of a padded batch needs its own CUDA graph."""
    keys = (rows["key_starts"], rows["key_tokens"], rows["key_places"]) if rows.is_shared and is_flash else None
    return Segments(rows.starts, rows.longest, is_flash, None if is_flash and not has_mixers else rows.grid, keys)


def _own_kernels(
    q: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, keys: Tensor | None, dropout: float, causal: bool
) -> Any:
    """Return the module `attention_kernels` if it can compute this attention, or else None. It is faster than torch's."""
    if keys is not None or key_starts.data_ptr() != starts.data_ptr() or v.shape[2] != q.shape[2]:
        return None
    own = _kernels_for(q.device, q.dtype, q.shape[2], dropout, causal)
    return own if own and len(starts) <= own.MAX_TEXTS else None


@functools.cache
def _kernels_for(device: torch.device, dtype: torch.dtype, size: int, dropout: float, causal: bool) -> Any:
    """Return the module `attention_kernels` if Triton can compile it for heads of this size on this GPU, or else None."""
    if not find_spec("triton") or torch.cuda.get_device_capability(device)[0] < 9:
        return None
    from accel_ddp.speed import attention_kernels as own

    some, starts = torch.zeros(1, 1, size, dtype=dtype, device=device), torch.arange(2, dtype=torch.int32, device=device)
    if size not in own.SIZES:
        return None
    try:
        # The seed is not drawn: a run that begins here, such as a resumed one, must draw the same numbers as others.
        rest = torch.zeros(2, dtype=torch.long, device=device), starts, dropout, causal, None
        own.gradients(some, some, some, some, *own.forward(some, some, some, *rest), *rest)
        return own
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of many kinds, for example no C compiler
        log.warning("attention uses torch's kernels, because Triton cannot compile: %s: %s", type(error).__name__, error)
        return None


def _used(window: int, longest: int) -> int:
    """Return the window, or -1 if no text is longer. In traced code, the comparison would compile again for longer texts."""
    return -1 if window >= longest else window


# Each is one operator, so a compiler does not trace it.
@torch.library.custom_op("accel_ddp::flash", mutates_args=())
def _flash(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, keys: Tensor | None, places: Tensor | None,
    sinks: Tensor | None, longest: int, dropout: float, causal: bool, scale: float | None, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    window = _used(window, longest)
    if window < 0 and sinks is None and (own := _own_kernels(q, v, starts, key_starts, keys, dropout, causal)):
        seed = torch.empty(2, dtype=torch.long, device=q.device)
        if dropout:  # from the generator of the device, which a replay of a CUDA graph advances
            seed.random_()
        return *own.forward(q, k, v, seed, starts, dropout, causal, scale), seed.view(torch.uint64)
    k, v = (k, v) if keys is None else (k[keys], v[keys])
    out, lse, state = compat.flash_attention(q, k, v, starts, key_starts, longest, dropout, causal, scale, window)
    return out if sinks is None else out * _share_of_keys(lse, sinks).T[..., None].to(out.dtype), lse, state


def _share_of_keys(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return which part of the attention of each token is not that of the sink of its head: [heads, tokens]."""
    return (lse - sinks.float()[:, None]).sigmoid()


@_flash.register_fake
def _(q, k, v, starts, key_starts, keys, places, sinks, longest, dropout, causal, scale, window):
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return torch.empty_like(q), lse, torch.empty(2, dtype=torch.uint64, device=q.device)


@torch.library.custom_op("accel_ddp::flash_backward", mutates_args=())
def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, key_starts: Tensor,
    keys: Tensor | None, places: Tensor | None, longest: int, dropout: float, causal: bool, random_state: Tensor,
    scale: float | None, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    window = _used(window, longest)
    if window < 0 and (own := _own_kernels(q, v, starts, key_starts, keys, dropout, causal)):
        return own.gradients(gradient, q, k, v, out, lse, random_state.view(torch.long), starts, dropout, causal, scale)
    # Otherwise a resumed run would not be bit-identical.
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would cost a pass over each output
    torch.use_deterministic_algorithms(True)
    k, v = (k, v) if keys is None else (k[keys], v[keys])
    try:
        d_q, *found = compat.flash_attention_gradients(
            gradient, q, k, v, out, lse, starts, key_starts, longest, dropout, causal, random_state, scale, window
        )
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills
    if places is not None:  # a shared key has two gradients
        first, second = places
        add = lambda d: d[first].add_(d[second.clamp(min=0)].mul_((second >= 0).view(-1, 1, 1)))
        found = [add(d) for d in found]
    return d_q, *found


@_flash_backward.register_fake
def _(gradient, q, k, v, out, lse, starts, key_starts, keys, places, longest, dropout, causal, random_state, scale, window):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.rest = inputs[8:]


def _gradients(ctx: Any, gradient: Tensor, *_: Any) -> tuple:
    q, k, v, *where, sinks, out, lse, random_state = ctx.saved_tensors
    longest, dropout, causal, scale, window = ctx.rest
    of_sinks = None
    if sinks is not None:
        # With g = sigmoid(lse - sink), the output is g times that of the keys. Its gradient through lse is included if the backward
        # pass of flash attention gets this output: it subtracts the products of gradients with outputs.
        part = _share_of_keys(lse, sinks)
        of_sinks = -((gradient * out).sum(-1, dtype=torch.float32).T * (1 - part)).sum(1).to(sinks.dtype)
        gradient = gradient * part.T[..., None].to(gradient.dtype)
    found = _flash_backward(gradient, q, k, v, out, lse, *where, longest, dropout, causal, random_state, scale, window)
    return *found, *[None] * 4, of_sinks, *[None] * 5


_flash.register_autograd(_gradients, setup_context=_save_for_backward)


def attention(
    replaced: Callable[..., Any],
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
    """Compute attention over texts that are concatenated to one row. Without `segments`, call the attention that is `replaced`."""
    if segments is None or (segments.grid is None and not segments.is_flash):
        if is_active.get():  # without segments, texts would attend to each other
            raise NeedsPadding("its layers do not pass their arguments on to the attention")
        return replaced(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)
    softcap, sinks = others.get("softcap"), others.get("s_aux")
    rest = {name: value for name, value in others.items() if name not in ("position_bias", "sliding_window", "softcap", "s_aux")}
    is_marker = attention_mask is not None and attention_mask.numel() == 1
    if reason := unknown_arguments(module, None if is_marker else attention_mask, rest):
        raise NeedsPadding(reason)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal and (segments.keys is not None or (segments.grid is not None and segments.grid.own is not None)):
        raise NeedsPadding("its texts share their beginnings, and its attention is not causal")
    source = segments if key.shape[2] == query.shape[2] else segments.source  # their rows have different lengths
    bias = others.get("position_bias")
    bias = None if bias is None or bias.numel() == 1 else bias
    window = -1  # a token sees so many tokens before it, and as many after it if the attention is not causal
    if others.get("sliding_window") is not None:
        window = int(others["sliding_window"]) - 1
        if not torch.compiler.is_compiling() and (seen := windows_seen.get()) is not None:
            seen.add(window + 1)
    if segments.is_flash and bias is None and softcap is None:
        size, own = query.shape[-1], value.shape[-1]  # different in latent attention
        wide = F.pad(value, (0, size - own)) if own < size else value
        # [tokens, heads, size]. Rotary embeddings may have returned queries and keys in a wider type.
        q, k, v = (x.transpose(1, 2).flatten(0, 1).to(value.dtype).contiguous() for x in (query, key, wide))
        where = (segments.starts, *(segments.keys or (source.starts, None, None)))
        longest = max(segments.longest, source.longest)
        out = _flash(q, k, v, *where, sinks, longest, dropout, causal, scaling, window)[0].unflatten(0, (len(query), -1))
        return out if own == size else out[..., :own], None
    heads = query.shape[1] // key.shape[1]
    q = unpack(query.transpose(1, 2), segments.grid).transpose(1, 2)
    k, v = (unpack(x.transpose(1, 2), source.grid).transpose(1, 2) for x in (key, value))
    if heads > 1:
        k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    mask = _padded_mask(segments.grid, source.grid, causal, window)
    if bias is not None:
        mask = torch.where(mask, bias.to(q.dtype), torch.finfo(q.dtype).min)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling)
    else:
        out = _attention_with_sinks(q, k, v, mask, dropout, scaling, softcap, sinks)
    return pack(out.transpose(1, 2).contiguous(), segments.grid), None


def _attention_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    dropout: float,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention whose scores are bounded, or that has a learned sink for each head, which SDPA has not."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    weights = F.dropout(weights if sinks is None else weights[..., :-1], dropout)
    return weights @ v


def _padded_mask(grid: Grid, source: Grid, causal: bool, window: int) -> Tensor:
    """Return which keys each query of the padded batch sees."""
    mask = source.mask[:, None, None, :]
    if source is not grid:
        return mask | ~mask.any(-1, keepdim=True)  # a text without keys would attend to nothing: 0 / 0
    places = torch.arange(mask.shape[-1], device=mask.device)
    before = places[:, None] - places
    if causal:
        mask = mask & (before >= 0)
    if window >= 0:
        mask = mask & (before.abs() <= window)
    # Padding beyond a window would attend to nothing: 0 / 0. The result is not used, but its gradient would spread.
    return mask | (before == 0)


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute the attention of the file of a model, which has no place in transformers' table."""
    query, key, value, mask, dropout, scaling, is_causal = args
    known = {"dropout": dropout, "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling}
    kwargs |= {} if is_causal is None else {"is_causal": is_causal}
    return sys.modules[type(module).__module__].eager_attention_forward(module, query, key, value, mask, **known, **kwargs)


def mask_of(replaced: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor | None:
    """Return the attention mask that transformers passes to every layer. Without padding there is none."""
    return None if is_active.get() else replaced(*args, **kwargs)


class _Narrow:
    """A module whose parameters are converted when they are read."""

    def __init__(self, module: nn.Module, kind: torch.dtype):
        self._module, self._kind = module, kind

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._kind) if isinstance(value, nn.Parameter) else value


def experts(module: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute experts like transformers' `grouped_mm`, in the type of autocast.

    Autocast does not convert the inputs of grouped products. In float32, torch has no kernel and waits for the GPU.
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return grouped_mm_experts_forward(module, hidden, chosen, weights)
    narrow = torch.get_autocast_dtype(kind)
    return grouped_mm_experts_forward(_Narrow(module, narrow), hidden.to(narrow), chosen, weights)


def register() -> None:
    """Let transformers find our attention and our experts by their name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask, sdpa_mask

    for name, replaced, mask in ((NAME, sdpa_attention_forward, sdpa_mask), (NAME_OF_EAGER, _eager, eager_mask)):
        AttentionInterface.register(name, functools.partial(attention, replaced))
        AttentionMaskInterface.register(name, functools.partial(mask_of, mask))
    with contextlib.suppress(ImportError):  # transformers 5
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
