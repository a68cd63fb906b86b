"""Losses, summed over items: `update` divides by the number of items of all micro-batches and ranks."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    """One right class per item. Labels of -100 count for nothing."""
    return F.cross_entropy(logits, labels, reduction=reduction, ignore_index=-100)


def binary_cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    """Any number of right classes per item; an item's loss is the mean over the classes."""
    losses = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(-1)
    return losses.sum() if reduction == "sum" else losses


def of_classes(several: bool) -> Callable[..., Tensor]:
    """The loss for one right class per item, or for several."""
    return binary_cross_entropy if several else cross_entropy
