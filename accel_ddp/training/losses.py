"""Losses, summed over items. `update` divides them by the number of items of all micro-batches and ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(logits: Tensor) -> Tensor:
    """Return at least float32, because a sum over thousands of tokens has only three exact digits in bf16 and overflows in fp16."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "sum", weights: Tensor | None = None) -> Tensor:
    """Return the loss of items with one correct class each. Labels of -100 are ignored. `weights` are per class."""
    return F.cross_entropy(_wide(logits), labels, weight=weights, reduction=reduction, ignore_index=-100)


def of_tokens(logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    """Return the loss of rows of tokens, each with a label or -100. With the reduction "rows" it is summed over each row."""
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), "sum" if reduction == "sum" else "none")
    return losses if reduction == "sum" else losses.view(labels.shape).sum(-1)


def next_tokens(labels: Tensor) -> Tensor:
    """Return the labels shifted left by one. The last token gets -100."""
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def of_classes(
    logits: Tensor, labels: Tensor, problem_type: str, reduction: str = "sum", weights: Tensor | None = None
) -> Tensor:
    """Return the loss of items with one correct class, several (averaged for each item), or a value (squared error)."""
    if problem_type == "single_label_classification":
        return cross_entropy(logits, labels, reduction, weights)
    if problem_type == "regression":
        return F.mse_loss(_wide(logits).squeeze(-1), labels.to(_wide(logits).dtype), reduction=reduction)
    losses = F.binary_cross_entropy_with_logits(_wide(logits), labels.to(_wide(logits).dtype), reduction="none").mean(-1)
    return losses.sum() if reduction == "sum" else losses
