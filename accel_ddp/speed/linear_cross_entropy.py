"""The loss over a large vocabulary without a table of all scores.

A model gives 16 texts of 512 tokens and 50,000 words a table of 1.6 GB in float32, and as much again for its gradient, most of
it for padding and for tokens that are not learned. Here only learned tokens are scored, some thousand at a time, and what
remains of each piece is its loss and its gradient.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from accel_ddp.speed import padding_free
from accel_ddp.training import losses

PIECE = 1 << 28  # scores that exist at once


class _LinearCrossEntropy(torch.autograd.Function):
    """sum of cross_entropy(hidden @ weight.T + bias, labels); the gradients are computed with it, piece by piece."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        narrow = hidden.dtype
        matrix = weight.to(narrow)
        wants_hidden, wants_weight, wants_bias, _ = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = None
        d_bias = torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32)) if wants_bias else None
        total = hidden.new_zeros((), dtype=torch.promote_types(narrow, torch.float32))
        size = max(256, PIECE // len(matrix) // 256 * 256)
        pieces = -(-len(hidden) // size)
        size = -(-len(hidden) // pieces // 64) * 64 if pieces else size  # equal ones
        for first in range(0, len(hidden), max(size, 1)):
            # A copy of the labels: for one that begins elsewhere the loss would be compiled again.
            some, right = hidden[first : first + size], labels[first : first + size].clone()
            scores = some @ matrix.T
            if bias is not None:
                scores += bias.to(narrow)
            loss, gradient = softmax(scores, right)
            total = total + loss
            if wants_hidden:
                torch.mm(gradient, matrix, out=d_hidden[first : first + size])
            if wants_weight:
                part = _product(gradient.T, some, torch.promote_types(weight.dtype, torch.float32))
                d_weight = part if d_weight is None else d_weight.add_(part)
            if wants_bias:
                d_bias += gradient.sum(0, dtype=d_bias.dtype)
        if wants_weight and d_weight is None:
            d_weight = torch.zeros_like(weight)
        ctx.save_for_backward(*[x for x in (d_hidden, d_weight, d_bias) if x is not None])
        ctx.has = [x is not None for x in (d_hidden, d_weight, d_bias)]
        ctx.types = [hidden.dtype, weight.dtype, bias.dtype if bias is not None else None]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        saved = iter(ctx.saved_tensors)
        return *[
            (next(saved) * gradient).to(kind) if has else None for has, kind in zip(ctx.has, ctx.types)
        ], None  # fmt: skip


def _product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """In the wide type, in which it is summed anyway, where a GPU can write it so."""
    is_narrow = a.dtype in (torch.float16, torch.bfloat16) and wide == torch.float32
    if a.is_cuda and is_narrow and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(a, b, out_dtype=wide)
    return (a @ b).to(wide)


def plain_softmax(scores: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """(summed loss, its gradient with respect to the scores); labels of -100 have neither."""
    counts = (right >= 0)[:, None]
    place = right.clamp(min=0)[:, None]
    # In place, and from and to the narrow type within one kernel each: this is bound by memory.
    logarithms = F.log_softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    loss = torch.where(counts, -logarithms.gather(1, place), 0).sum()
    gradient = logarithms.exp_().scatter_add_(1, place, logarithms.new_full((1, 1), -1).expand(len(place), 1))
    return loss, torch.mul(gradient, counts, out=scores)


def fused_softmax(scores: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The same, for a compiler: one pass over the scores instead of five."""
    counts = (right >= 0)[:, None]
    place = right.clamp(min=0)[:, None]
    logarithms = scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(-1)
    loss = torch.where(counts, -logarithms.gather(1, place), 0).sum()
    is_right = torch.arange(scores.shape[1], device=scores.device) == place
    return loss, torch.where(counts, logarithms.exp() - is_right.to(logarithms.dtype), 0).to(scores.dtype)


softmax = plain_softmax  # `fast` takes the other, compiled, where it compiles layers


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """Of the words that a head of this weight and bias gives `hidden`, computed in the type of `hidden`."""
    if not torch.is_grad_enabled():  # inside of the function that is not to be seen, and gradients would be computed
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels)


class OutputHead:
    """A model's last matrix, taken out of its forward pass where the loss can be had without its scores."""

    def __init__(self, model: nn.Module):
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        self.head = head if type(head) is nn.Linear else None  # not one with adapters, which is more than its weight
        self.narrow = torch.float32  # what the model computes in
        self.is_all: bool | None = None  # whether the scores are the head's, with nothing after it

    def loss_sum(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor, batch: Any) -> Tensor:
        """Of tokens, each of which has a label or -100; the same as `losses.of_tokens(model(**inputs).logits, labels)`."""
        sizes = getattr(batch, "sizes", None)
        if sizes is None or self.head is None or getattr(model, "find_unused_parameters", False):
            return losses.of_tokens(model(**inputs).logits, labels)
        if self.is_all is None:
            self.is_all = self._is_all(model, inputs)
        if not self.is_all:
            return losses.of_tokens(model(**inputs).logits, labels)
        with self._left_out():
            hidden = model(**inputs).logits.flatten(0, 1)
        flat = labels.flatten()
        learned = flat != -100
        # Where they are, without asking the device how many: the host knows a number that is not too small.
        before = learned.cumsum(0) - 1
        places = torch.zeros(sizes.room + 1, dtype=torch.long, device=flat.device)
        places.scatter_(0, torch.where(learned, before, sizes.room), torch.arange(len(flat), device=flat.device))
        places = places[:-1]
        right = torch.where(torch.arange(sizes.room, device=flat.device) <= before[-1], flat[places], -100)
        rows = padding_free.Move.apply(hidden[None], places, before.clamp(min=0), learned)[0]
        return linear_cross_entropy(rows.to(self.narrow), self.head.weight, self.head.bias, right)

    @contextlib.contextmanager
    def _left_out(self) -> Iterator[None]:
        self.head.forward = self._nothing
        try:
            yield
        finally:
            del self.head.forward

    def _nothing(self, hidden: Tensor) -> Tensor:
        kind = hidden.device.type  # Accelerate computes in half precision inside of the forward pass only
        self.narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.head.weight.dtype
        return hidden

    @torch.no_grad()
    def _is_all(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        """Some models scale or bound what their head gives. Whether this one does is seen by a head that gives something else;
        the answer does not depend on weights, so that it is the same on every rank and after a restart."""
        module = model.module if hasattr(model, "module") else model  # without DDP: other ranks may be elsewhere
        was_training = module.training
        module.eval()
        some = {name: value[:1] if isinstance(value, Tensor) else value for name, value in inputs.items()}
        given: list[Tensor] = []

        def large(hidden: Tensor) -> Tensor:
            values = torch.linspace(-900, 900, hidden.shape[1] * self.head.out_features, device=hidden.device)
            given.append(values.view(1, hidden.shape[1], -1).to(hidden.dtype))
            return given[0]

        self.head.forward = large
        try:
            scores = module(**some).logits
        except Exception:  # a head that is used otherwise
            return False
        finally:
            del self.head.forward
            module.train(was_training)
        return len(given) == 1 and scores.shape == given[0].shape and torch.equal(scores.float(), given[0].float())
