"""The cross-entropy loss over a large vocabulary without a tensor of all logits.

For 16 texts of 512 tokens and a vocabulary of 50,000, the logits take 1.6 GB in float32, and their gradient as much again. Most of
it is for padding and for tokens without a label. Here logits are computed only for tokens with a label, some thousand at a time.
Of each chunk only its loss and its gradient remain.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from accel_ddp.engine import losses
from accel_ddp.engine.rows import Rows, accept_rows
from accel_ddp.ranks.shards import is_sharded
from accel_ddp.speed.modules import product
from accel_ddp.training.sharding import recover

CHUNK = 1 << 28  # logits that exist at once

# Returns (loss of each token, gradient of their sum with respect to the logits) for logits and labels.
Softmax = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Yield parts of equal size of a row of tokens, each with at most `CHUNK` logits."""
    size = max(256, CHUNK // vocabulary // 256 * 256)
    size = -(-tokens // max(1, -(-tokens // size)) // 64) * 64
    yield from (slice(first, first + size) for first in range(0, tokens, max(size, 1)))


class _Head:
    """A linear head in the type `dtype`, some of whose rows may be replaced by `rows`: those of new tokens above a frozen table.

    The table is not copied, because it may have a gigabyte.
    """

    def __init__(self, dtype: torch.dtype, weight: Tensor, bias: Tensor | None, rows: Tensor | None, tokens: Tensor | None):
        self.matrix, self.bias, self.tokens = weight.to(dtype), bias, tokens
        self.rows = None if rows is None else rows.to(dtype)

    def scores(self, hidden: Tensor) -> Tensor:
        scores = hidden @ self.matrix.T
        if self.rows is not None:
            scores.index_copy_(1, self.tokens, hidden @ self.rows.T)
        return scores if self.bias is None else scores.add_(self.bias.to(hidden.dtype))

    def split(self, gradient: Tensor) -> Tensor | None:
        """Return the gradient of the logits of `tokens`, which is removed from that of the others."""
        if self.rows is None:
            return None
        own = gradient[:, self.tokens]
        gradient.index_fill_(1, self.tokens, 0)
        return own

    def to_hidden(self, gradient: Tensor, own: Tensor | None, out: Tensor) -> None:
        """Write the gradient of the head's input to `out`."""
        torch.mm(gradient, self.matrix, out=out)
        if own is not None:
            out.addmm_(own, self.rows)


class _LinearCrossEntropy(torch.autograd.Function):
    """sum(cross_entropy(hidden @ weight.T + bias, labels)). The gradients are computed in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | None, tokens: Tensor | None, labels: Tensor,
        softmax: Softmax,
    ) -> Tensor:  # fmt: skip
        head = _Head(hidden.dtype, weight, bias, rows, tokens)
        wants_hidden, wants_weight, wants_bias, wants_rows, *_ = ctx.needs_input_grad
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = None
        d_bias = torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32)) if wants_bias else None
        d_rows = torch.zeros_like(rows, dtype=wide) if wants_rows else None
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for here in _chunks(len(hidden), len(weight)):
            # The labels are copied, because the loss would be compiled again for a view with another offset.
            loss, gradient = softmax(head.scores(hidden[here]), labels[here].clone())
            total = total + loss.sum()
            if wants_bias:
                d_bias += gradient.sum(0, dtype=d_bias.dtype)
            own = head.split(gradient)
            if wants_hidden:
                head.to_hidden(gradient, own, d_hidden[here])
            if wants_weight:
                part = product(gradient.T, hidden[here], wide)
                d_weight = part if d_weight is None else d_weight.add_(part)
            if wants_rows:
                d_rows += product(own.T, hidden[here], wide)
        if wants_weight and d_weight is None:
            d_weight = torch.zeros_like(weight)
        found = (d_hidden, d_weight, d_bias, d_rows)
        ctx.save_for_backward(*[x for x in found if x is not None])
        ctx.types = [None if x is None else of.dtype for x, of in zip(found, (hidden, weight, bias, rows))]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        saved = iter(ctx.saved_tensors)
        return *[None if kind is None else (next(saved) * gradient).to(kind) for kind in ctx.types], None, None, None


class _TokenLosses(torch.autograd.Function):
    """cross_entropy(hidden @ weight.T + bias, labels) of each token. The factor of each loss is known only in the backward pass.

    With a frozen head, the gradient of `hidden` is computed in the forward pass, chunk by chunk, and scaled in the backward pass.
    The gradient of a trained head is a sum over tokens. It needs the logits again: one more product, and the memory of one chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | None, tokens: Tensor | None, labels: Tensor,
        softmax: Softmax,
    ) -> Tensor:  # fmt: skip
        head = _Head(hidden.dtype, weight, bias, rows, tokens)
        wants_hidden, *ctx.trains, _, _, _ = ctx.needs_input_grad
        found = hidden.new_zeros(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        d_hidden = torch.empty_like(hidden) if wants_hidden and not any(ctx.trains) else None
        for here in _chunks(len(hidden), len(weight)):
            found[here], gradient = softmax(head.scores(hidden[here]), labels[here].clone())
            if d_hidden is not None:
                head.to_hidden(gradient, head.split(gradient), d_hidden[here])
        ctx.softmax = softmax
        ctx.save_for_backward(d_hidden, *((hidden, weight, bias, rows, tokens, labels) if any(ctx.trains) else ()))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factors: Tensor) -> tuple:
        d_hidden, *again = ctx.saved_tensors
        if not again:
            return d_hidden * factors[:, None].to(d_hidden.dtype), None, None, None, None, None, None
        hidden, weight, bias, rows, tokens, labels = again
        head, factors = _Head(hidden.dtype, weight, bias, rows, tokens), factors[:, None].to(hidden.dtype)
        d_hidden = torch.empty_like(hidden)
        wide = torch.promote_types(weight.dtype, torch.float32)
        sums = [torch.zeros_like(x, dtype=wide) if trained else None for x, trained in zip((weight, bias, rows), ctx.trains)]
        d_weight, d_bias, d_rows = sums
        for here in _chunks(len(hidden), len(weight)):
            _, gradient = ctx.softmax(head.scores(hidden[here]), labels[here].clone())
            scaled = hidden[here] * factors[here]  # scaling logits would cost more
            if d_bias is not None:
                d_bias += product(gradient.T, factors[here], wide)[:, 0]
            own = head.split(gradient)
            head.to_hidden(gradient, own, d_hidden[here])
            if d_weight is not None:
                d_weight += product(gradient.T, scaled, wide)
            if d_rows is not None:
                d_rows += product(own.T, scaled, wide)
        of_head = [None if x is None else x.to(of.dtype) for x, of in zip(sums, (weight, bias, rows))]
        return d_hidden.mul_(factors), *of_head, None, None, None


def plain_softmax(scores: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return (loss of each token, gradient of their sum with respect to the logits). Both are 0 for labels of -100."""
    counts = (right >= 0)[:, None]
    place = right.clamp(min=0)[:, None]
    # In place, with conversions inside the kernels, because memory bandwidth limits the speed.
    logarithms = F.log_softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    loss = torch.where(counts, -logarithms.gather(1, place), 0)[:, 0]
    gradient = logarithms.exp_().scatter_add_(1, place, logarithms.new_full((1, 1), -1).expand(len(place), 1))
    return loss, torch.mul(gradient, counts, out=scores)


def fused_softmax(scores: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the same as `plain_softmax` in a form that compiles to one pass over the logits instead of five."""
    counts = (right >= 0)[:, None]
    place = right.clamp(min=0)[:, None]
    logarithms = scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(-1)
    loss = torch.where(counts, -logarithms.gather(1, place), 0)[:, 0]
    is_right = torch.arange(scores.shape[1], device=scores.device) == place
    return loss, torch.where(counts, logarithms.exp() - is_right.to(logarithms.dtype), 0).to(scores.dtype)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, softmax: Softmax = plain_softmax,
    rows: Tensor | None = None, tokens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the summed loss of a linear head on `hidden`, computed in the type of `hidden`. `rows` replace those of `tokens`."""
    values = [hidden, weight, bias, rows]
    if not torch.is_grad_enabled():  # the function cannot see this, and would compute gradients
        values = [None if value is None else value.detach() for value in values]
    return _LinearCrossEntropy.apply(*values, tokens, labels, softmax)


class OutputHead:
    """The output head of a language model. It is skipped in the forward pass, and the loss is computed in chunks instead."""

    def __init__(self, model: nn.Module):
        accept_rows(model)
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        adapter = getattr(head, "token_adapter", None)
        self.adapter = adapter if hasattr(adapter, "own_tokens") else None  # of new tokens; sources/adapters.py
        self.linear = head if self.adapter is None else self.adapter.base_layer
        self.head = head if type(self.linear) is nn.Linear else None  # a head with other adapters is more than its weight
        self.narrow = torch.float32  # the type in which the model computes
        self.is_last: bool | None = None  # whether the logits are the output of the head, with nothing behind it
        self.softmax: Softmax = plain_softmax  # `attach` replaces it by a compiled one
        if self.head is not None:
            self.head.accel_ddp_output_head = self  # how `attach` finds it

    def loss_sum(self, model: nn.Module, rows: Rows) -> Tensor:
        """Return the summed loss of the labels of the tokens."""
        if not self._can_skip(model, rows):
            return losses.cross_entropy(model(rows).logits[0], rows["labels"])
        hidden = self._labelled(model, rows)
        return linear_cross_entropy(hidden, *self._weights(), rows["answers"], self.softmax, *self._new_tokens())

    @torch.no_grad()
    def item_losses(self, model: nn.Module, rows: Rows) -> Tensor:
        """Return the loss of each item, without gradients, for an evaluation. It is the sum over its tokens."""
        if not self._can_skip(model, rows):
            return rows.sum(losses.cross_entropy(model(rows).logits[0], rows["labels"], "none"))
        hidden, right = self._labelled(model, rows), rows["answers"]
        head = _Head(hidden.dtype, *self._weights(), *self._new_tokens())
        found = hidden.new_zeros(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for here in _chunks(len(hidden), len(head.matrix)):
            found[here] = losses.cross_entropy(head.scores(hidden[here]), right[here], "none")
        return rows.sum(rows.spread(found))

    @torch.no_grad()
    def logits(self, model: nn.Module, rows: Rows) -> Tensor:
        """Return the logits of tokens with a label, for an evaluation."""
        if not self._can_skip(model, rows):
            return model(rows).logits[0, rows["labelled"][: rows.targets]]
        hidden = self._labelled(model, rows)[: rows.targets]
        return _Head(hidden.dtype, *self._weights(), *self._new_tokens()).scores(hidden)

    def text_logps(self, model: nn.Module, rows: Rows) -> Tensor:
        """Return the summed log-probability of the labels of each text, with gradients, in float32 or wider."""
        if not torch.is_grad_enabled():
            return -self.item_losses(model, rows)
        if not self._can_skip(model, rows):
            return -rows.sum(losses.cross_entropy(model(rows).logits[0], rows["labels"], "none"))
        hidden = self._labelled(model, rows)
        found = _TokenLosses.apply(hidden, *self._weights(), *self._new_tokens(), rows["answers"], self.softmax)
        return -rows.sum(rows.spread(found))

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        return self.linear.weight, self.linear.bias

    def _new_tokens(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the rows of new tokens and their numbers, if adapters train some and are not disabled."""
        if self.adapter is None or self.adapter.disable_adapters or self.adapter.merged:
            return None, None
        (name,) = self.adapter.active_adapters
        return self.adapter.trainable_tokens_delta[name], self.adapter.own_tokens

    def _can_skip(self, model: nn.Module, rows: Rows) -> bool:
        """Return whether the head can be skipped, because nothing is behind it."""
        if self.head is None:
            return False
        if self.is_last is None:
            self.is_last = self._is_last(model, rows.tokens.device)
        return self.is_last

    def _labelled(self, model: nn.Module, rows: Rows) -> Tensor:
        """Return the inputs of the head for tokens with a label."""
        self.head.forward = self._pass_through
        try:
            hidden = model(rows).logits
        finally:
            del self.head.forward
        return rows.take(hidden).to(self.narrow)

    def _pass_through(self, hidden: Tensor) -> Tensor:
        kind = hidden.device.type  # Accelerate uses autocast inside the forward pass only
        self.narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.linear.weight.dtype
        return hidden

    @torch.no_grad()
    def _is_last(self, model: nn.Module, device: torch.device) -> bool:
        """Return whether the logits are the unchanged output of the head. Some models scale or bound it.

        The test replaces the head's output by known values. The answer does not depend on weights, so it is the same on every
        rank and after a restart.
        """
        was_training = model.training
        model.eval()
        some = Rows.join({"input_ids": torch.zeros(2, dtype=torch.long)}, torch.tensor([2])).to(device)
        given: list[Tensor] = []

        def large(hidden: Tensor) -> Tensor:
            values = torch.linspace(-900, 900, hidden.shape[1] * self.linear.out_features, device=hidden.device)
            given.append(values.view(1, hidden.shape[1], -1).to(hidden.dtype))
            return given[0]

        self.head.forward = large
        try:
            scores = model(some).logits
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the model uses its head in another way
            if is_sharded(model):
                recover(model)
            return False
        finally:
            del self.head.forward
            model.train(was_training)
        return len(given) == 1 and scores.shape == given[0].shape and torch.equal(scores.float(), given[0].float())


def output_heads_of(model: nn.Module) -> list[OutputHead]:
    """Return the `OutputHead` objects that were made for this model."""
    return [module.accel_ddp_output_head for module in model.modules() if hasattr(module, "accel_ddp_output_head")]
