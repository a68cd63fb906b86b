"""Losses, summed over items: `update` divides by the number of items of all micro-batches and ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(logits: Tensor) -> Tensor:
    """At least float32: a sum over thousands of tokens has three digits in bf16, and is infinite in fp16."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "sum", weights: Tensor | None = None) -> Tensor:
    """One right class per item. Labels of -100 count for nothing. `weights` are of classes."""
    return F.cross_entropy(_wide(logits), labels, weight=weights, reduction=reduction, ignore_index=-100)


def of_tokens(logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    """Of rows of tokens, each with its label or -100. With the reduction "rows": summed over each row."""
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), "sum" if reduction == "sum" else "none")
    return losses if reduction == "sum" else losses.view(labels.shape).sum(-1)


def next_tokens(labels: Tensor) -> Tensor:
    """At each token, the label of the one after it."""
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def of_classes(
    logits: Tensor, labels: Tensor, problem_type: str, reduction: str = "sum", weights: Tensor | None = None
) -> Tensor:
    """One right class per item; several, whose losses are averaged for each item; or a value, by its squared error."""
    if problem_type == "single_label_classification":
        return cross_entropy(logits, labels, reduction, weights)
    if problem_type == "regression":
        return F.mse_loss(_wide(logits).squeeze(-1), labels.to(_wide(logits).dtype), reduction=reduction)
    losses = F.binary_cross_entropy_with_logits(_wide(logits), labels.to(_wide(logits).dtype), reduction="none").mean(-1)
    return losses.sum() if reduction == "sum" else losses
