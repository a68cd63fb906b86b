"""Traces one micro-batch of a run with fake tensors: how much memory its tensors take at each moment."""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from accel_ddp.memory.fake_model import NARROW, FakeModel, make_batch, remove_padding
from accel_ddp.memory.tracker import ACTIVATIONS, LOSS, NUM_KINDS, LikeGpu, Tracker, rounded
from accel_ddp.speed.linear_cross_entropy import OutputHead
from accel_ddp.speed.padding_free import NeedsPadding
from accel_ddp.speed.padding_free_model import layers_of
from accel_ddp.tasks import masking
from accel_ddp.training import losses
from accel_ddp.training.current_batch import CurrentBatch

TRACED_LAYERS = 3  # the first, the last, and one that stands for all others


@dataclass(frozen=True)
class Trace:
    """The memory of a micro-batch, besides weights and optimizer state."""

    moments: np.ndarray  # bytes of each kind (a column) at each moment
    num_layers: int
    output_of_layer: int  # bytes
    is_padding_free: bool
    evaluation: int  # bytes of the largest moment of an evaluation


NOTHING = Trace(np.zeros((1, NUM_KINDS), dtype=np.int64), 0, 0, False, 0)  # of a model that cannot be traced


def trace(fake: FakeModel, cfg: Any, precision: str, micro_batch_size: int) -> Trace:
    """Return the memory of the forward and backward pass of a micro-batch. The model is changed and must not be used again.

    `precision` is that of --mixed_precision: no, bf16 or fp16.
    """
    model = fake.model
    with fake.mode, LikeGpu(copies_logits=cfg.compile == "off"):
        stack, num_layers = _shorten(model)
        is_padding_free = remove_padding(fake, cfg)
        head = _prepare_head(fake)
        tracker = Tracker(_find_parameters(model, stack))
        computed = _Autocast(model, precision, tracker)
        marks = _Marks(tracker, stack)
        model.train(cfg.dropout)
        batch = make_batch(fake, cfg, micro_batch_size)
        with tracker, CurrentBatch(batch):
            loss = _loss(fake, computed, head, batch, cfg)
            trained = [p for p in model.parameters() if p.requires_grad]
            # `torch.autograd.grad` would leave `LikeGpu`, in which checkpointed layers must be computed again too.
            gradients = _engine_run_backward(
                (loss,), (torch.ones_like(loss),), False, False, tuple(trained), allow_unreachable=True, accumulate_grad=False
            )
            tracker.mark()
        moments = marks.extend(np.stack(tracker.moments), num_layers)
        del gradients, loss
        marks.remove()
        evaluation = _trace_evaluation(fake, computed, cfg, tracker)
    return Trace(moments, num_layers, marks.output_bytes, is_padding_free, evaluation)


def _trace_evaluation(fake: FakeModel, computed: "_Autocast", cfg: Any, tracker: Tracker) -> int:
    tracker.moments.clear()
    before = int(tracker.live[0].sum())
    fake.model.eval()
    batch = make_batch(fake, cfg, getattr(cfg, "eval_batch_size", 1))
    with torch.no_grad(), tracker, CurrentBatch(batch):
        scores = computed(**{name: value for name, value in batch.items() if name != "labels"}, **_more_inputs(fake, batch))
        logits = getattr(scores, "logits", None)
        if logits is not None and fake.model_class in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM"):
            first = int(fake.model_class == "AutoModelForCausalLM")
            losses.of_tokens(logits[:, : logits.shape[1] - first], batch["labels"][:, first:], "rows")
    return max((int(moment[0].sum()) for moment in tracker.moments), default=before) - before


def _find_parameters(model: nn.Module, stack: nn.ModuleList | None) -> dict[nn.Parameter, bool]:
    inside = {id(p) for p in stack.parameters()} if stack is not None else set()
    return {p: id(p) in inside for p in model.parameters()}


def _shorten(model: nn.Module) -> tuple[nn.ModuleList | None, int]:
    """Remove all but `TRACED_LAYERS` layers. Return what remains of their stack, and how many layers there were."""
    try:
        layers = layers_of(model)
    except NeedsPadding:
        return None, 0
    stack = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == len(layers) and m[0] is layers[0])
    del stack[TRACED_LAYERS:]
    return stack, len(layers)


class _Autocast(nn.Module):
    """The model inside of autocast, with outputs in float32, as Accelerate's `prepare` makes it."""

    def __init__(self, model: nn.Module, precision: str, tracker: Tracker):
        super().__init__()
        self.inner, self.tracker = model, tracker
        self.narrow = NARROW.get(precision)

    def forward(self, **inputs: Any) -> Any:
        self.tracker.kind = ACTIVATIONS
        with torch.autocast("cpu", dtype=self.narrow) if self.narrow else contextlib.nullcontext():
            out = self.inner(**inputs)
        if self.narrow:
            for name, value in list(out.items()):
                out[name] = value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        self.tracker.kind = LOSS
        return out


def _prepare_head(fake: FakeModel) -> OutputHead | None:
    """Return the head that computes the loss in chunks, for a causal language model whose logits are the output of its head."""
    if fake.model_class == "AutoModelForMaskedLM":
        whole = fake.model.get_base_model() if hasattr(fake.model, "get_base_model") else fake.model
        masking.compute_masked_logits_only(whole)
    if fake.model_class != "AutoModelForCausalLM":
        return None
    head = OutputHead(fake.model)
    text = fake.config.get_text_config()
    scales = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    head.is_last = not any(getattr(text, name, None) not in (None, 1, 1.0) for name in scales)
    return head


def _more_inputs(fake: FakeModel, batch: Any) -> dict[str, Any]:
    if fake.model_class == "AutoModelForSeq2SeqLM":
        return {"decoder_input_ids": batch["labels"], "use_cache": False}
    return {"use_cache": False} if fake.model_class == "AutoModelForCausalLM" else {}


def _loss(fake: FakeModel, computed: _Autocast, head: OutputHead | None, batch: Any, cfg: Any) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"} | _more_inputs(fake, batch)
    if head is not None:
        return head.loss_sum(computed, inputs, losses.next_tokens(batch["labels"]), batch)
    if fake.model_class == "AutoModelForMaskedLM":
        places = torch.zeros(max(1, int(batch["labels"].numel() * getattr(cfg, "mask_share", 0.15))), dtype=torch.long)
        return losses.cross_entropy(*masking.masked_logits(computed, batch | {"masked_positions": places}))
    out = computed(**inputs)
    if fake.model_class == "AutoModelForSeq2SeqLM":
        return losses.of_tokens(out.logits, batch["labels"])
    return (out.logits if "logits" in out else out.last_hidden_state).sum()


class _Marks:
    """Finds the moments at which the middle one of three layers begins and ends, forward and backward."""

    def __init__(self, tracker: Tracker, stack: nn.ModuleList | None):
        self.tracker, self.at, self.output_bytes = tracker, {}, 0
        self.hooks: list[Any] = []
        for number, layer in enumerate(stack or ()):
            # A checkpointed layer runs again in the backward pass. Only the first call counts.
            begin = functools.partial(self._begin, number)
            self.hooks.append(layer.register_forward_pre_hook(begin, with_kwargs=True))
        if stack is not None:
            self.hooks.append(stack[-1].register_forward_hook(self._end))

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _begin(self, number: int, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if f"forward {number}" in self.at:
            return
        self.at[f"forward {number}"] = self.tracker.mark()
        self.tracker.is_in_middle = number == 1
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: self.at.setdefault(f"backward {number}", self.tracker.mark()) and None)

    def _end(self, layer: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and not self.output_bytes:
            self.output_bytes = rounded(hidden.untyped_storage().nbytes())
            if hidden.requires_grad:
                hidden.register_hook(self._end_loss)

    def _end_loss(self, _: Tensor) -> None:
        self.tracker.kind = ACTIVATIONS

    def extend(self, moments: np.ndarray, num_layers: int) -> np.ndarray:
        """Return the moments of `num_layers` layers. Those of the middle layer are repeated, with what each repetition leaves."""
        of_all, of_middle = moments[:, 0], moments[:, 1]
        more = num_layers - TRACED_LAYERS
        if more <= 0 or "forward 2" not in self.at:
            return of_all
        first, last, end = self.at["forward 1"], self.at["forward 2"], len(moments) - 1
        began, ended = self.at.get("backward 2", end), self.at.get("backward 1", end)
        left, freed = of_middle[began], of_all[ended] - of_all[began]
        parts = [of_all[:first], *[of_all[first:last] + i * of_middle[last] for i in range(more + 1)]]
        parts.append(of_all[last:began] + more * of_middle[last:began])
        parts += [of_all[began:ended] + more * left + i * freed for i in range(more + 1)]
        return np.concatenate([*parts, of_all[ended:] + more * (left + freed)])
