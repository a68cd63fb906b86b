"""Compares the tensors of two checkpoints. Each of them may be one file or the pieces of several ranks."""

import math
from pathlib import Path

import torch
from torch import Tensor

from accel_ddp.saving.format import MODEL
from accel_ddp.saving.pieces import Pieces


def largest_difference(a: Path, b: Path) -> tuple[float, str]:
    """Return the largest difference of any weight, and the name of its tensor. NaN and a missing tensor count as the largest."""
    one, two = Pieces(a, MODEL), Pieces(b, MODEL)
    shapes, others = one.tensors, two.tensors
    differences = {}
    for name in {**shapes, **others}:
        if shapes.get(name) != others.get(name):
            differences[name] = math.inf
        elif math.prod(shapes[name][0]):
            differences[name] = (one.read(name).double() - two.read(name).double()).abs().max().item()
    name = max(differences, key=lambda name: (math.isnan(differences[name]), differences[name]))
    return differences[name], name


def is_identical(a: Path, b: Path, group: str) -> bool:
    """Return whether two checkpoints have the same tensors with the same bits. `group` is `format.MODEL` or `format.OPTIMIZER`."""
    one, two = Pieces(a, group), Pieces(b, group)
    return one.tensors == two.tensors and all(_bytes_of(one.read(name)) == _bytes_of(two.read(name)) for name in one.tensors)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
