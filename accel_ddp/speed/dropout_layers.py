"""Dropout whose compiled code draws cheap random numbers.

torch's compiler computes ten rounds of Philox for each number and uses one of the four that they return: dropout then takes longer
than reading and writing the tensor. Here compiled code hashes the place of a number with two numbers of the device's generator. The
backward pass computes the hash again, so that no mask is stored. Plain layers use torch's kernel, which is fast.
"""

import torch
from torch import Tensor, nn


class HashedDropout(nn.Dropout):
    """nn.Dropout, with a hash in compiled code."""

    def forward(self, x: Tensor) -> Tensor:
        if not (torch.compiler.is_compiling() and self.training and 0 < self.p < 1 and x.numel() < 1 << 31):
            return super().forward(x)
        first, second = torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32, device=x.device)
        rows, columns = (torch.arange(n, dtype=torch.int32, device=x.device) for n in (x.numel() // x.shape[-1], x.shape[-1]))
        # `^` comes first: the compiler would compute a sum or a product with the index, whose numbers must fit into 32 bits. The others
        # overflow. They are 0x9E3779B1, 0x85EBCA6B and 0xC2B2AE35 as signed numbers; `&` removes copies of the sign after a shift.
        h = ((rows[:, None] * x.shape[-1] + columns) ^ first) * -1640531535
        h = (h ^ (h >> 16 & 0xFFFF)) * -2048144789 + second
        h = (h ^ (h >> 13 & 0x7FFFF)) * -1028477387
        return torch.where(h.view(x.shape) >= int(self.p * 2**32) - (1 << 31), x * (1 / (1 - self.p)), 0)


def install(layers: list[nn.Module]) -> None:
    """Replace the dropout of these layers."""
    for layer in layers:
        for module in layer.modules():
            if type(module) is nn.Dropout:
                module.__class__ = HashedDropout
