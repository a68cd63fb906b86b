"""Attention over concatenated texts, in Triton, for GPUs from Hopper on. Its gradient sums in a fixed order.

torch's flash attention starts as many blocks for each text as the longest one needs, and in its deterministic mode one block computes
the gradients of a whole text and head, so most of the GPU waits for the longest text. Here each block finds its own text, so that none
is empty, and no two blocks add to the same gradient. Import this module only if Triton is installed.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TEXTS = 4096  # each block reads the boundaries of all texts
SIZES = (32, 64, 128)  # of a head
# (rows, columns, warps, stages) of a block for heads of at most 64 and of 128 numbers: the fastest of ten on an H200. With dropout
# the hash needs registers, and blocks have fewer columns.
BLOCKS = {64: (64, 64, 4, 3), 128: (64, 64, 4, 2)}
COLUMNS_WITH_DROPOUT = 32
NUMBERS = ["texts", "tokens", "heads", "groups"]  # a kernel is compiled once for all of them
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _find(starts, texts, number, N: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first token and the length of the text of a block, and the first row of the block in the text."""
    at = tl.arange(0, N)
    lengths = tl.load(starts + at + 1, at < texts, 0) - tl.load(starts + at, at < texts, 0)
    blocks = (lengths + BLOCK - 1) // BLOCK
    is_before = tl.cumsum(blocks, 0) <= number
    text = tl.sum(is_before.to(tl.int32), 0)  # a block behind the last text has none, and so a length of 0
    first = tl.load(starts + text, text < texts, 0)
    length = tl.load(starts + text + 1, text < texts, 0) - first
    return first.to(tl.int64), length, (number - tl.sum(tl.where(is_before, blocks, 0), 0)) * BLOCK


@triton.jit
def _rows(base, rows, width, length, SIZE: tl.constexpr):
    """Load rows of a text, and zeros behind its end."""
    return tl.load(base + rows[:, None] * width + tl.arange(0, SIZE)[None, :], rows[:, None] < length, 0.0)


@triton.jit
def _numbers_of(seed, queries):
    """Return two random numbers for each query, hashes of its place and of the seed."""
    x = queries.to(tl.uint32) * 0x9E3779B1 + tl.load(seed).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16), x * 0x27D4EB2F + tl.load(seed + 1).to(tl.uint32)


@triton.jit
def _is_kept(first, second, keys, DROPPED: tl.constexpr):
    """Return what dropout keeps: a hash of the two numbers of a query and of the key. Philox would take ten times as long."""
    x = keys.to(tl.uint32) * 0x9E3779B1 + first
    x = (x ^ (x >> 16)) * 0x85EBCA6B + second
    return (x ^ (x >> 13)) * 0xC2B2AE35 >= DROPPED


@triton.jit
def _attend(
    q, k, v, rows, column, length, scale, acc, total, top, first, second, width, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    DROPPED: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = column + tl.arange(0, COLUMNS)
    s = tl.dot(q, tl.trans(_rows(k, columns, width, length, SIZE))) * (scale * LOG2E)
    if MASKED:
        sees = columns[None, :] < length
        if CAUSAL:
            sees = sees & (columns[None, :] <= rows[:, None])
        s = tl.where(sees, s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    p, shrink = tl.exp2(s - new[:, None]), tl.exp2(top - new)
    total = total * shrink + tl.sum(p, 1)
    if DROPPED:
        p = tl.where(_is_kept(first[:, None], second[:, None], columns[None, :], DROPPED), p, 0.0)
    return tl.dot(p.to(q.dtype), _rows(v, columns, width, length, SIZE), acc * shrink[:, None]), total, new


@triton.jit(do_not_specialize=NUMBERS)
def _forward(
    q, k, v, out, lse, seed, starts, texts, tokens, scale, grow, heads, groups, DROPPED: tl.constexpr, CAUSAL: tl.constexpr,
    SIZE: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    first, length, begin = _find(starts, texts, tl.program_id(0), N, ROWS)
    if begin < length:
        rows, width, of_keys = begin + tl.arange(0, ROWS), heads * SIZE, groups * SIZE
        here, there = first * width + head * SIZE, first * of_keys + head // (heads // groups) * SIZE
        block = _rows(q + here, rows, width, length, SIZE)
        acc, total = tl.zeros([ROWS, SIZE], tl.float32), tl.zeros([ROWS], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        one, two = rows, rows
        if DROPPED:
            one, two = _numbers_of(seed, head * tokens + first + rows)
        whole = (begin if CAUSAL else length) // COLUMNS * COLUMNS  # columns that every row of the block sees
        for column in range(0, whole, COLUMNS):
            acc, total, top = _attend(
                block, k + there, v + there, rows, column, length, scale, acc, total, top, one, two, of_keys, CAUSAL, False,
                DROPPED, SIZE, COLUMNS,
            )  # fmt: skip
        for column in range(whole, tl.minimum(begin + ROWS, length) if CAUSAL else length, COLUMNS):
            acc, total, top = _attend(
                block, k + there, v + there, rows, column, length, scale, acc, total, top, one, two, of_keys, CAUSAL, True,
                DROPPED, SIZE, COLUMNS,
            )  # fmt: skip
        where = out + here + rows[:, None] * width + tl.arange(0, SIZE)[None, :]
        tl.store(where, (acc * (grow / total)[:, None]).to(block.dtype), rows[:, None] < length)
        tl.store(lse + head * tokens + first + rows, (top + tl.log2(total)) / LOG2E, rows < length)


@triton.jit(do_not_specialize=NUMBERS)
def _of_queries(
    q, k, v, out, lse, gradient, d_q, sums, seed, starts, texts, tokens, scale, grow, heads, groups, DROPPED: tl.constexpr,
    CAUSAL: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of queries, and for each query the sum over its output times the gradient."""
    head = tl.program_id(1)
    first, length, begin = _find(starts, texts, tl.program_id(0), N, ROWS)
    if begin < length:
        rows, width, of_keys = begin + tl.arange(0, ROWS), heads * SIZE, groups * SIZE
        here, there, place = (
            first * width + head * SIZE,
            first * of_keys + head // (heads // groups) * SIZE,
            head * tokens + first,
        )
        block, d_out = _rows(q + here, rows, width, length, SIZE), _rows(gradient + here, rows, width, length, SIZE)
        weighted = tl.sum(_rows(out + here, rows, width, length, SIZE).to(tl.float32) * d_out.to(tl.float32), 1)
        tl.store(sums + place + rows, weighted, rows < length)
        logarithms = tl.load(lse + place + rows, rows < length, 0.0) * LOG2E
        acc = tl.zeros([ROWS, SIZE], tl.float32)
        if DROPPED:
            one, two = _numbers_of(seed, place + rows)
        for column in range(0, tl.minimum(begin + ROWS, length) if CAUSAL else length, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            keys = _rows(k + there, columns, of_keys, length, SIZE)
            s = tl.dot(block, tl.trans(keys)) * (scale * LOG2E)
            sees = columns[None, :] < length
            if CAUSAL:
                sees = sees & (columns[None, :] <= rows[:, None])
            p = tl.where(sees, tl.exp2(s - logarithms[:, None]), 0.0)
            d_p = tl.dot(d_out, tl.trans(_rows(v + there, columns, of_keys, length, SIZE)))
            if DROPPED:
                d_p = tl.where(_is_kept(one[:, None], two[:, None], columns[None, :], DROPPED), d_p * grow, 0.0)
            acc = tl.dot((p * (d_p - weighted[:, None])).to(block.dtype), keys, acc)
        where = d_q + here + rows[:, None] * width + tl.arange(0, SIZE)[None, :]
        tl.store(where, (acc * scale).to(block.dtype), rows[:, None] < length)


@triton.jit(do_not_specialize=NUMBERS)
def _of_keys(
    q, k, v, lse, gradient, d_k, d_v, sums, seed, starts, texts, tokens, scale, grow, heads, groups, DROPPED: tl.constexpr,
    CAUSAL: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values, by the queries of one head. A block has ROWS keys and reads COLUMNS queries at once."""
    head = tl.program_id(1)
    first, length, begin = _find(starts, texts, tl.program_id(0), N, ROWS)
    if begin < length:
        rows, width, of_keys = begin + tl.arange(0, ROWS), heads * SIZE, groups * SIZE
        here, there, place = (
            first * width + head * SIZE,
            first * of_keys + head // (heads // groups) * SIZE,
            head * tokens + first,
        )
        keys, values = _rows(k + there, rows, of_keys, length, SIZE), _rows(v + there, rows, of_keys, length, SIZE)
        sum_k, sum_v = tl.zeros([ROWS, SIZE], tl.float32), tl.zeros([ROWS, SIZE], tl.float32)
        for column in range(begin // COLUMNS * COLUMNS if CAUSAL else 0, length, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            queries = _rows(q + here, columns, width, length, SIZE)
            logarithms = tl.load(lse + place + columns, columns < length, float("inf")) * LOG2E
            p = tl.exp2(tl.dot(keys, tl.trans(queries)) * (scale * LOG2E) - logarithms[None, :])
            if CAUSAL:
                p = tl.where(rows[:, None] <= columns[None, :], p, 0.0)
            d_out = _rows(gradient + here, columns, width, length, SIZE)
            d_p, p_kept = tl.dot(values, tl.trans(d_out)), p
            if DROPPED:
                one, two = _numbers_of(seed, place + columns)
                is_kept = _is_kept(one[None, :], two[None, :], rows[:, None], DROPPED)
                p_kept, d_p = tl.where(is_kept, p, 0.0), tl.where(is_kept, d_p * grow, 0.0)
            sum_v = tl.dot(p_kept.to(keys.dtype), d_out, sum_v)
            d_s = p * (d_p - tl.load(sums + place + columns, columns < length, 0.0)[None, :])
            sum_k = tl.dot(d_s.to(keys.dtype), queries, sum_k)
        where = here + rows[:, None] * width + tl.arange(0, SIZE)[None, :]
        tl.store(d_k + where, (sum_k * scale).to(keys.dtype), rows[:, None] < length)
        tl.store(d_v + where, (sum_v * grow).to(keys.dtype), rows[:, None] < length)


def _launch(
    kernel: Any, q: Tensor, k: Tensor, starts: Tensor, tensors: tuple, seed: Tensor, dropout: float, causal: bool,
    scale: float | None,
) -> None:  # fmt: skip
    (tokens, heads, size), texts = q.shape, len(starts) - 1
    rows, columns, warps, stages = BLOCKS[max(64, size)]
    columns = COLUMNS_WITH_DROPOUT if dropout else columns
    grid = (tokens // rows + texts, heads)  # at least as many blocks as all texts have
    scale = size**-0.5 if scale is None else scale
    with torch.cuda.device(q.device):
        kernel[grid](
            *tensors, seed, starts, texts, tokens, scale, 1 / (1 - dropout), heads, k.shape[1], DROPPED=int(dropout * 2**32),
            CAUSAL=causal, SIZE=size, N=max(64, triton.next_power_of_2(texts)), ROWS=rows, COLUMNS=columns, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor, starts: Tensor, dropout: float, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output of attention and the log of its sums, as torch's flash attention does.

    q, k and v are [tokens, heads, size]. `seed`: two numbers of 64 bits, from which dropout is computed in both passes.
    """
    out, lse = torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    _launch(_forward, q, k, starts, (q, k, v, out, lse), seed, dropout, causal, scale)
    return out, lse


def gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, starts: Tensor, dropout: float,
    causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values."""
    gradient = gradient.contiguous()
    sums, d_q, d_k, d_v = torch.empty_like(lse), torch.empty_like(q), torch.empty_like(q), torch.empty_like(q)
    rest = seed, dropout, causal, scale
    _launch(_of_queries, q, k, starts, (q, k, v, out, lse, gradient, d_q, sums), *rest)
    _launch(_of_keys, q, k, starts, (q, k, v, lse, gradient, d_k, d_v, sums), *rest)
    if q.shape[1] > k.shape[1]:  # several heads of queries share one of keys
        d_k, d_v = (d.unflatten(1, (k.shape[1], -1)).sum(2) for d in (d_k, d_v))
    return d_q, d_k, d_v
