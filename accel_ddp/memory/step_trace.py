"""How much memory the tensors of one micro-batch take at each moment, traced with tensors that have shapes and no values.

`Tracker` sees every operator and stores the size of each new storage until the storage is freed. The operators run on fake tensors
of the CPU. Where a GPU would save other tensors for the backward pass, `LikeGpu` replaces the operator.
"""

import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from accel_ddp import compat
from accel_ddp.engine import losses
from accel_ddp.engine.rows import Rows
from accel_ddp.memory.fake_model import IMAGES, NARROW, FakeModel, make_batch, remove_padding
from accel_ddp.speed.layer_stacks import layers_of
from accel_ddp.speed.linear_cross_entropy import OutputHead
from accel_ddp.speed.padding_free import NeedsPadding

LIMIT_SECONDS = 20  # for a model whose layers loop over tokens
BLOCK = 512  # bytes; the allocator of a GPU rounds up to a multiple of it

# What a storage is used for. `Trace.moments` has one column for each.
ACTIVATIONS, LOSS, CASTS_OF_LAYERS, CASTS_OF_REST, GRADIENTS_OF_LAYERS, GRADIENTS_OF_REST = range(6)
NUM_KINDS = 6


def rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


class Tracker(TorchDispatchMode):
    """Records the bytes of each kind after every allocation. Parameters are not counted."""

    def __init__(self, in_layers: dict[nn.Parameter, bool]):
        super().__init__()
        self.deadline = time.monotonic() + LIMIT_SECONDS
        self.kind = ACTIVATIONS  # of new storages
        self.is_in_middle = False  # whether the forward pass of the layer runs that stands for others
        self.live = np.zeros((2, NUM_KINDS), dtype=np.int64)  # all bytes, and those that this layer has allocated
        self.moments: list[np.ndarray] = []
        self._known: dict[int, list[Any]] = {}  # storage -> [bytes, kind, whether this layer has allocated it, weak reference]
        self._parameters = {compat.storage_key(p): inside for p, inside in in_layers.items()}
        for p, inside in in_layers.items():
            if p.requires_grad:
                p.register_hook(lambda g, kind=GRADIENTS_OF_LAYERS if inside else GRADIENTS_OF_REST: self._move(g, kind))

    def mark(self) -> int:
        self.moments.append(self.live.copy())
        return len(self.moments) - 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"it takes more than {LIMIT_SECONDS} s")
        out = function(*args, **(kwargs or {}))
        kind = self.kind
        if function is torch.ops.aten._to_copy.default:
            inside = self._parameters.get(compat.storage_key(args[0]))
            kind = kind if inside is None else CASTS_OF_LAYERS if inside else CASTS_OF_REST
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor):
                self._add(one, kind)
        return out

    def _add(self, tensor: Tensor, kind: int) -> None:
        storage = tensor.untyped_storage()
        key = compat.storage_key(tensor)
        if key in self._known or key in self._parameters:
            return
        size = rounded(storage.nbytes())
        self._known[key] = [0, kind, self.is_in_middle, weakref.ref(storage, lambda _: self._resize(self._known.pop(key), 0))]
        self._resize(self._known[key], size)
        self.mark()

    def _resize(self, entry: list[Any], size: int) -> None:
        self.live[: 1 + entry[2], entry[1]] += size - entry[0]
        entry[0] = size

    def _move(self, tensor: Tensor, kind: int) -> None:
        """Count a storage as another kind, because it has become a gradient of a parameter."""
        entry = self._known.get(compat.storage_key(tensor))
        if entry is not None:
            size = entry[0]
            self._resize(entry, 0)
            entry[1] = kind
            self._resize(entry, size)


# Functions that autocast computes in float32 on a GPU. On a CPU it computes them in the type of their input.
_IN_FLOAT32 = {
    F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.softmax, torch.softmax, Tensor.softmax, F.log_softmax,
    torch.log_softmax, torch.pow, Tensor.pow, torch.exp, Tensor.exp,
}  # fmt: skip


class LikeGpu(TorchFunctionMode):
    """Lets operators save what they save on a GPU: attention no scores, dropout one byte per element, norms float32."""

    def __init__(self, copies_logits: bool):
        super().__init__()
        self.copies_logits = copies_logits

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask")
            return _Attention.apply(*args[:3], mask if isinstance(mask, Tensor) and mask.requires_grad else None)
        if function in _GROUPED:
            return _Grouped.apply(*args[:2])
        if function is torch.rand and args and not args[0]:
            return 1.0  # OPT and BART skip a layer if such a number is small
        if function is F.dropout:
            return _dropout(*args, **kwargs)
        if function is F.log_softmax and kwargs.get("dtype") and not torch.is_grad_enabled():
            # For float16 a GPU has one kernel. Before it, torch copies bfloat16 logits to float32. A compiled loss needs no copy.
            wide = args[0].to(kwargs["dtype"]) if self.copies_logits and args[0].dtype == torch.bfloat16 else None
            out = torch.empty(args[0].shape, dtype=kwargs["dtype"])
            del wide
            return out
        if function in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        return function(*args, **kwargs)


_GROUPED = compat.grouped_products()  # products of experts, whose fake versions accept no float32


class _Grouped(torch.autograd.Function):
    """Multiplies rows by the matrices of their experts, and saves both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrices)
        return x.new_empty((x.shape[0], matrices.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


class _Attention(torch.autograd.Function):
    """Saves what the fused kernels of a GPU save: queries, keys, values, a bias that is trained, the output, one float32 per query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        narrow = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else q.dtype
        given = [x.to(narrow) for x in (q, k, v, bias) if x is not None]
        ctx.number = len(given)
        out = given[0].new_empty((*q.shape[:-1], v.shape[-1]))
        ctx.save_for_backward(*given, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_inputs = [torch.empty_like(saved) for saved in ctx.saved_tensors[: ctx.number]]
        return (*of_inputs, *[None] * (4 - ctx.number))


GENERATING = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
TRACED_LAYERS = 3  # the first, the last, and one that stands for all others


@dataclass(frozen=True)
class Trace:
    moments: np.ndarray  # bytes of each kind (a column) at each moment
    num_layers: int
    output_of_layer: int  # bytes
    is_padding_free: bool
    evaluations: dict[int, int]  # items per batch -> bytes of the largest moment of an evaluation


NOTHING = Trace(np.zeros((1, NUM_KINDS), dtype=np.int64), 0, 0, False, {})  # of a model that cannot be traced


def trace(fake: FakeModel, cfg: Any, precision: str, micro_batch_size: int) -> Trace:
    model = fake.model
    with fake.mode, LikeGpu(copies_logits=cfg.compile == "off"):
        stack, num_layers = _shorten(model)
        is_padding_free = False
        if cfg.padding_free != "off" and fake.model_class != IMAGES:
            is_padding_free = remove_padding(model)
        head = _prepare_head(fake)
        inside = {id(p) for p in stack.parameters()} if stack is not None else set()
        tracker = Tracker({p: id(p) in inside for p in model.parameters()})
        computed = _Autocast(model, precision, tracker)
        marks = _Marks(tracker, stack)
        model.train(cfg.dropout)
        batch = make_batch(fake, cfg, micro_batch_size)
        with tracker:
            loss = _loss(fake, computed, head, batch, cfg)
            trained = [p for p in model.parameters() if p.requires_grad]
            # Checkpointed layers must be computed again inside `LikeGpu` too.
            gradients = compat.gradients_in_modes(loss, trained)
            tracker.mark()
        moments = marks.extend(np.stack(tracker.moments), num_layers)
        del gradients, loss
        marks.remove()
        if stack is not None:
            del stack[1:-1]  # without gradients, layers leave nothing behind
        evaluations = _trace_evaluations(fake, computed, head, cfg, tracker, num_layers)
    return Trace(moments, num_layers, marks.output_bytes, is_padding_free, evaluations)


# What `--eval_batch_size auto` may choose. More tokens at once are not faster.
EVAL_SIZES, EVAL_TOKENS = (1, 8, 64), 1 << 15


def _trace_evaluations(
    fake: FakeModel, computed: "_Autocast", head: OutputHead | None, cfg: Any, tracker: Tracker, num_layers: int
) -> dict[int, int]:
    fake.model.eval()
    given = getattr(cfg, "eval_batch_size", 1)
    width = _labels(make_batch(fake, cfg, 1, True)).numel() if given == "auto" else 0
    sizes = [size for size in EVAL_SIZES if size * width <= max(EVAL_TOKENS, width)] if given == "auto" else [given]
    found = {}
    for size in sizes:
        batch = make_batch(fake, cfg, size, True)
        tracker.moments.clear()
        before = int(tracker.live[0].sum())
        with torch.no_grad(), tracker:
            if head is not None:
                head.item_losses(computed, batch)
            else:
                logits = getattr(_outputs(computed, batch), "logits", None)
                if logits is not None and fake.model_class in GENERATING:
                    losses.cross_entropy(logits[0], _labels(batch), "none")
        found[size] = max((int(moment[0].sum()) for moment in tracker.moments), default=before) - before
    least = min(found.values()) + _cache_bytes(fake, cfg, computed.narrow, num_layers)  # one prompt at a time is answered
    return {size: max(taken, least) for size, taken in found.items()}


def _cache_bytes(fake: FakeModel, cfg: Any, narrow: torch.dtype | None, num_layers: int) -> int:
    """Return the bytes of the keys and values of a prompt, if a causal language model answers some in an evaluation."""
    if fake.model_class != "AutoModelForCausalLM" or not (getattr(cfg, "samples", 0) or getattr(cfg, "log_predictions", 0)):
        return 0
    config = fake.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(1, heads)
    tokens = make_batch(fake, cfg, 1, True).width + getattr(cfg, "max_new_tokens", 0)
    per_token = 2 * (getattr(config, "num_key_value_heads", None) or heads) * size * (narrow or torch.float32).itemsize
    return num_layers * tokens * per_token


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
    """The model inside autocast, with outputs in float32, as Accelerate's `prepare` makes it."""

    def __init__(self, model: nn.Module, precision: str, tracker: Tracker):
        super().__init__()
        self.inner, self.tracker = model, tracker
        self.narrow = NARROW.get(precision)

    def forward(self, *args: Any, **inputs: Any) -> Any:
        self.tracker.kind = ACTIVATIONS
        with torch.autocast("cpu", dtype=self.narrow) if self.narrow else contextlib.nullcontext():
            out = self.inner(*args, **inputs)
        if self.narrow:
            for name, value in list(out.items()):
                out[name] = value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        self.tracker.kind = LOSS
        return out


def _prepare_head(fake: FakeModel) -> OutputHead | None:
    if fake.model_class not in ("AutoModelForCausalLM", "AutoModelForMaskedLM"):
        return None
    head = OutputHead(fake.model)
    text = fake.config.get_text_config()
    scales = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    head.is_last = not any(getattr(text, name, None) not in (None, 1, 1.0) for name in scales)
    return head


def _labels(batch: Any) -> Tensor:
    return batch["target"]["labels"] if "target" in batch else batch["labels"]


def _outputs(computed: _Autocast, batch: Any) -> Any:
    return computed(batch) if isinstance(batch, Rows) else computed(pixel_values=batch["pixel_values"])


def _loss(fake: FakeModel, computed: _Autocast, head: OutputHead | None, batch: Any, cfg: Any) -> Tensor:
    if fake.model_class == "AutoModelForMaskedLM":
        masked = max(1, int(batch.targets * getattr(cfg, "mask_share", 0.15)))
        places = torch.zeros(masked, dtype=torch.long)
        batch = batch.replaced(labelled=places, answers=places)
    if head is not None:
        compute = head.text_logps if getattr(cfg, "texts_per_item", 1) > 1 else head.loss_sum  # of pairs
        return compute(computed, batch).sum()
    out = _outputs(computed, batch)
    if fake.model_class == "AutoModelForSeq2SeqLM":
        return losses.cross_entropy(out.logits[0], _labels(batch))
    return (out.logits if "logits" in out else out.last_hidden_state).sum()


class _Marks:
    """Finds the moments at which the middle one of three layers begins and ends, forward and backward."""

    def __init__(self, tracker: Tracker, stack: nn.ModuleList | None):
        self.tracker, self.at, self.output_bytes = tracker, {}, 0
        self.hooks: list[Any] = []
        for number, layer in enumerate(stack or ()):
            begin = functools.partial(self._begin, number)
            self.hooks.append(layer.register_forward_pre_hook(begin, with_kwargs=True))
        if stack is not None:
            self.hooks.append(stack[-1].register_forward_hook(self._end))

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _begin(self, number: int, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if f"forward {number}" in self.at:  # a checkpointed layer runs again in the backward pass; only the first call counts
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
                hidden.register_hook(lambda _: setattr(self.tracker, "kind", ACTIVATIONS))

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
