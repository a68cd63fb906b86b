"""A step of AdamW for many parameters as one Triton kernel, which also clips gradients and counts steps.

Memory bandwidth limits a step. torch's fused kernel writes gradients back if it scales them, and reaches less of the bandwidth. Every
operation is rounded as IEEE 754 says, so that ranks with different GPUs compute the same. Import it only if Triton is installed.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers that a block steps


@triton.jit
def _step_block(
    addresses, owners, firsts, sizes, factors, found_inf, divisor, keep, beta1, rest1, beta2, rest2, eps, ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) == 0:
        owner = tl.load(owners + tl.program_id(0))
        begin = (tl.program_id(0) - tl.load(firsts + owner)) * SIZE
        at, size = begin + tl.arange(0, SIZE), tl.load(sizes + owner)
        kind = tl.pointer_type(tl.float32)
        p, g = tl.load(addresses + owner * 5).to(kind), tl.load(addresses + owner * 5 + 1).to(kind)
        m, v = tl.load(addresses + owner * 5 + 2).to(kind), tl.load(addresses + owner * 5 + 3).to(kind)
        if ALIGNED:  # so that four numbers are read at once
            p, g, m, v = tl.multiple_of(p, 16), tl.multiple_of(g, 16), tl.multiple_of(m, 16), tl.multiple_of(v, 16)
            size = tl.multiple_of(size, 4)
        gradient = tl.div_rn(tl.load(g + at, at < size, 0.0), tl.load(divisor))
        mean = tl.load(m + at, at < size, 0.0) * beta1 + gradient * rest1
        square = tl.load(v + at, at < size, 0.0) * beta2 + gradient * gradient * rest2
        scale = tl.sqrt_rn(square) * tl.load(factors + owner * 2 + 1) + eps
        change = tl.div_rn(mean * tl.load(factors + owner * 2), scale)
        tl.store(p + at, tl.load(p + at, at < size, 0.0) * keep - change, at < size)
        tl.store(m + at, mean, at < size)
        tl.store(v + at, square, at < size)
        if begin == 0:
            count = tl.load(addresses + owner * 5 + 4).to(kind)
            tl.store(count, tl.load(count) + 1)


@lru_cache(maxsize=16)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parameter of each block, the first block of each parameter, and the sizes."""
    counts = torch.tensor([-(-size // BLOCK) for size in sizes])
    owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    return tuple(x.int().to(device) for x in (owners, counts.cumsum(0) - counts, torch.tensor(sizes)))


def step_all(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    counts: Sequence[Tensor],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    found_inf: Tensor,
    divisor: Tensor | None,
) -> None:
    """Step parameters. `counts` are the steps that each has done.

    All tensors are contiguous and in float32. Nothing changes if `found_inf` is not 0. Gradients are divided by `divisor`.
    """
    device, sizes = found_inf.device, tuple(map(Tensor.numel, params))
    table = np.array([[*map(Tensor.data_ptr, some)] for some in (params, grads, means, squares, counts)])
    is_aligned = all(size % 4 == 0 for size in sizes) and not (table[:4] % 16).any()
    addresses = torch.from_numpy(table.T.copy())
    addresses = (addresses.pin_memory() if device.type == "cuda" else addresses).to(device, non_blocking=True)  # without waiting
    blocks = _blocks(sizes, device)
    steps = torch.stack([*counts]).double() + 1
    factors = torch.stack([lr / (1 - betas[0] ** steps), (1 - betas[1] ** steps).rsqrt()], 1).float()
    _step_block[(len(blocks[0]),)](
        addresses, *blocks, factors, found_inf, torch.ones_like(found_inf) if divisor is None else divisor, 1 - lr * weight_decay,
        betas[0], 1 - betas[0], betas[1], 1 - betas[1], eps, ALIGNED=is_aligned, SIZE=BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def try_to_compile(device: torch.device) -> None:
    """Raise an error if Triton cannot compile the kernel."""
    new = lambda *shape: torch.zeros(shape, device=device)
    step_all(*[[new(4)] for _ in range(4)], [new()], 0.0, (0.0, 0.0), 1.0, 0.0, new(), None)
