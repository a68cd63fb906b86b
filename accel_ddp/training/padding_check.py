"""A test before training: whether the result of a text depends on the longer texts that it is padded with.

If it does, weights and metrics depend on the micro-batch size and on the number of ranks. Examples are models that mix all positions
without a mask (FNet, Nystromformer, ConvBERT), that read the last position (XLNet), or that choose their rotary embeddings by the
longest text of a micro-batch (longrope, dynamic scaling). Some depend on it only for texts that are longer than a window (Doge), so
texts of several lengths are compared.
"""

import contextlib
import functools
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.backends import cudnn
from torch.overrides import TorchFunctionMode

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.rows import Rows
from accel_ddp.engine.terms import Terms
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import gather_everywhere, together
from accel_ddp.ranks.process import this_rank
from accel_ddp.ranks.reporting import warn_on_main
from accel_ddp.ranks.shards import is_sharded
from accel_ddp.training.sharding import computed_in, recover
from accel_ddp.training.stream import TrainBatches

log = logging.getLogger(__name__)

# Differences are fractions of the largest value. Rounding in float32 gives 1e-7 to 1e-6 in small models and 2e-5 in one of 48 layers.
# A real dependence may be as small (7e-6 in a ConvBERT), so a difference between the first two limits is computed in float64.
ALLOWED = 3e-6
NEVER_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}  # 16 bits have no such limit: 7e-2 in a BERT of 24 layers
ALLOWED_IN_FLOAT64 = 1e-6  # some models compute parts in float32
ALLOWED_IN_16_BITS = 1e-4  # of weights that have 16 or 4 bits and are computed in float32, because many GPUs are slow in float64
TRIED = 32  # items of a dataset whose lengths are not known
MOST_TEXTS = 8  # that are compared
LIMITS = ("window", "chunk", "block", "stride", "segment", "original_max_position")  # in names of a config: a model changes there


def require_independence(accelerator: Accelerator, cfg: TrainConfig, terms: Terms, train: TrainBatches) -> None:
    """Raise UserError on every rank if the result of a text depends on its padding, unless `--allow_inexact` is given.

    Call it on every rank, before `prepare`. It costs two forward passes of at most three items for each of 3 to 8 texts,
    and as many in float64 if the results differ slightly.
    """
    is_single = cfg.split(accelerator.num_processes)[0] == 1 and cfg.micro_batch_size != "auto" and not cfg.micro_batch_tokens
    if all(gather_everywhere(is_single)) and getattr(cfg, "eval_batch_size", 1) == 1:
        return  # no text is padded
    # For a sharded model it is a collective, and so outside of the block.
    with contextlib.nullcontext() if is_sharded(terms.model) else together("compare a text with and without padding"):
        reason = difference(accelerator, cfg, terms, train)
    reasons = [found for found in gather_everywhere(reason) if found]
    if not reasons:
        return
    if not cfg.allow_inexact:
        kind = "tokens" if cfg.micro_batch_tokens else "size"
        sizes = f"--micro_batch_{kind} {getattr(cfg, f'micro_batch_{kind}')}"
        sizes += f" --eval_batch_size {cfg.eval_batch_size}" if hasattr(cfg, "eval_batch_size") else ""
        single = "--micro_batch_size 1" + " --eval_batch_size 1" * hasattr(cfg, "eval_batch_size")
        raise UserError(
            f"{sizes}: {reasons[0]}. The weights and metrics would depend on the micro-batch size and on the number of ranks. "
            f"Use {single}, which needs no padding, or another model. Or add --allow_inexact to train anyway."
        )
    warn_on_main(
        f"--allow_inexact: {reasons[0]}. The weights and metrics depend on the micro-batch size and on the number of ranks.",
        "INEXACT",
    )


def difference(accelerator: Accelerator, cfg: TrainConfig, terms: Terms, train: TrainBatches) -> str:
    """Return "" if texts have the same result alone and next to the longest one, or else a sentence with the largest difference.

    Texts of equal length are never padded, and other items than texts are not compared. For a sharded model, this is a collective:
    all ranks compute the same items, and agree on whether they compute in float64 too.
    """
    model, compute = terms.model, _Compute(accelerator, cfg, terms, train)
    sharded = is_sharded(model)
    with together("read texts to compare them with and without padding") if sharded else contextlib.nullcontext():
        groups = _choose_texts(train, accelerator, cfg, _limits_of(model))
        for group in groups if sharded else ():
            compute.read(group), compute.read(group[:1])
    if not groups:
        return ""
    if not getattr(model, "is_quantized", False) and not sharded:
        model.to(accelerator.device)
    was_training, kept = model.training, next(model.parameters()).dtype
    model.eval()
    try:
        # Layers of a sharded model may be gathered in 16 bits, whose rounding would look like a difference.
        is_narrow = kept.itemsize == 2 and not sharded
        allowed = ALLOWED_IN_16_BITS if is_narrow else ALLOWED
        apart, worst = _distance_in(torch.float32 if is_narrow else kept, compute, groups)
        if allowed < apart <= NEVER_ROUNDING.get(kept, sys.float_info.max) and not is_narrow:
            apart = 0.0 if _distance_in(torch.float64, compute, groups)[0] <= ALLOWED_IN_FLOAT64 else apart
    finally:
        model.train(was_training)
        forget_peak(accelerator.device)
    return "" if apart <= allowed else compute.describe(worst, apart)


def _distance_in(dtype: torch.dtype, compute: "_Compute", groups: list[list[int]]) -> tuple[float, list[int]]:
    """Return the largest distance on any rank and the items with it, or 0 if the model cannot be computed in this type: a user's
    model may fail in any way.

    The first step then reports it. All ranks of a sharded model have the same error. If one is out of memory, the others wait for it.
    """
    model, sharded, found, error = compute.model, is_sharded(compute.model), (0.0, groups[0]), ""
    try:
        with computed_exactly(model, dtype):
            # The padded texts come first, because some models (BigBird) change for good when they get a short text.
            padded = [compute(group) for group in groups]
            apart = [_distance(compute(group[:1]), before) for group, before in zip(groups, padded)]
            found = max(zip(apart, groups), key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
    except Exception as problem:
        if sharded and isinstance(problem, torch.OutOfMemoryError):
            raise
        error = f"{type(problem).__name__}: {problem}"
        if sharded:
            recover(model)
    everyone = gather_everywhere((found, error)) if sharded else [(found, error)]
    if any(error for _, error in everyone):
        log.info("texts with and without padding were not compared in %s: %s", dtype, error)
        return 0.0, groups[0]
    return max((found for found, _ in everyone), key=lambda pair: pair[0])


def forget_peak(device: torch.device) -> None:
    """Free what a check has used, and start to measure again: CUDA graphs take the peak for that of a micro-batch."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextlib.contextmanager
def computed_exactly(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute without rounding to less than `dtype` inside the block: float32, or float64, which needs memory for the weights."""
    with without_tf32(), computed_in(model, dtype) if is_sharded(model) else _computed_alone_in(model, dtype):
        yield


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Compute in float32 inside the block, so that the rounding of TF32 neither looks like a difference nor hides one.

    The precision stays as it is in a program that has set `torch.backends.*.fp32_precision`.
    """
    try:
        before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # torch then refuses to read these settings
        before = None
    if before:
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = False
    try:
        yield
    finally:
        if before:
            torch.set_float32_matmul_precision(before[0])
            cudnn.allow_tf32 = before[1]


@contextlib.contextmanager
def _computed_alone_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute a model in the type of its weights, in float32 if they have 16 bits, or with copies of them in float64.

    The weights themselves stay where they are. A conversion back would allocate memory, and so would fail and leave a half of the
    model in float64 when memory is full.
    """
    is_narrow = next(model.parameters()).dtype.itemsize == 2 and dtype == torch.float32
    tensors = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    tensors = tensors if dtype == torch.float64 else []
    if tensors:
        _require_memory(8 * sum(tensor.numel() for tensor, _ in tensors), tensors[0][1].device)
    try:
        for tensor, data in tensors:
            tensor.data = data.double()
        with in_float32(model) if is_narrow or getattr(model, "is_quantized", False) else contextlib.nullcontext():
            yield
    finally:
        for tensor, data in tensors:
            tensor.data = data


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute the functions of torch in float32 at least inside the block, with one weight of 16 or 4 bits at a time."""
    layers = [module for module in model.modules() if hasattr(module, "compute_dtype") and hasattr(module, "weight")]
    try:
        for layer in layers:
            layer.forward = functools.partial(_multiply_exactly, layer)
        with _InFloat32():
            yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


class _InFloat32(TorchFunctionMode):
    """Gives float32 copies of 16-bit tensors to every function, except for tensors that a function writes to."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name == "__get__":  # an attribute of a tensor
            found = function(*args)
            return torch.float32 if isinstance(found, torch.dtype) and _is_narrow(args[0]) else found
        if function is F.embedding:  # the table may be large
            return _widened(function(*args, **kwargs))
        writes = name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))
        wide = [arg if writes and number == 0 else _widened(arg) for number, arg in enumerate(args)]
        return function(*wide, **{key: value if key == "out" else _widened(value) for key, value in kwargs.items()})


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.element_size() == 2


def _widened(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_widened, value))
    return value.float() if _is_narrow(value) else value


def _multiply_exactly(layer: nn.Module, x: Tensor) -> Tensor:
    """Compute a 4-bit layer in the type of its input, for which bitsandbytes may have no kernel."""
    from bitsandbytes.functional import dequantize_4bit

    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return F.linear(x, weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


class _Compute:
    """Computes some items as one micro-batch and returns what the model returns for the first of them, without padding."""

    def __init__(self, accelerator: Accelerator, cfg: TrainConfig, terms: Terms, train: TrainBatches):
        self.accelerator, self.cfg, self.terms, self.model, self.train = accelerator, cfg, terms, terms.model, train
        self._batches: dict[tuple[int, ...], Any] = {}

    def read(self, places: list[int]) -> Any:
        """Return these items as a micro-batch."""
        if tuple(places) not in self._batches:
            self._batches[tuple(places)] = self.train.batch_of(places, self.accelerator, self.cfg)
        return self._batches[tuple(places)]

    def describe(self, places: list[int], apart: float) -> str:
        before, after = (self.read(some).width for some in (places[:1], places))
        return (
            f"the model computes a different result for a text of {before} tokens if it is padded to the {after} tokens of another "
            f"text (by {apart:.1e} of its largest value)"
        )

    @torch.no_grad()
    def __call__(self, places: list[int]) -> Tensor:
        batch = self.read(places)
        outputs: list[Any] = []
        hook = self.model.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            self.terms.trial(batch)
        finally:
            hook.remove()
        found, row = _main_tensor(outputs[-1]), batch.get("target", batch)
        return (found[0, : row.used] if found.ndim > 2 else found).flatten()  # it begins with the texts of the first item


def _require_memory(size: int, device: torch.device) -> None:
    """Raise MemoryError if each rank of this node cannot get so many bytes. A GPU reports it itself, but the kernel kills a process."""
    if device.type == "cpu" and size * this_rank.local_ranks > psutil.virtual_memory().available / 2:
        raise MemoryError(f"{size:,} bytes are not available")


def _limits_of(model: nn.Module) -> list[int]:
    """Return the lengths at which the config of a model, or a config inside it, suggests that the model changes."""
    config, found = getattr(model, "config", None), set()
    parts = [config.to_dict()] if hasattr(config, "to_dict") else []
    for part in parts:  # the list grows
        parts += [value for value in part.values() if isinstance(value, dict)]
        found |= {value for name, value in part.items() if type(value) is int and any(word in str(name) for word in LIMITS)}
    return sorted(found)


def _choose_texts(train: TrainBatches, accelerator: Accelerator, cfg: TrainConfig, limits: list[int]) -> list[list[int]]:
    """Return the indices of texts of different lengths, each with one or two of the longest, or [] if no text is ever padded.

    The lengths are the shortest, the middle one, the longest but one, and those around `limits`.
    """
    if not isinstance(train.batch_of([0], accelerator, cfg), Rows):
        return []
    lengths = train.part_lengths
    places = np.arange(len(train.dataset))
    if lengths is None:  # the last block of a text is shorter than the others
        places = np.unique([*range(min(TRIED, len(train))), len(train) - 1])
        lengths = np.array([[train.batch_of([int(place)], accelerator, cfg).whole] for place in places])
    if (lengths.min(0) == lengths.max(0)).all():
        return []
    totals = lengths.sum(1)
    counts = np.bincount(totals)
    there = np.flatnonzero(counts)
    there = there[:-1] if len(there) > 1 else there  # the longest is not padded
    below = lambda limit: there[there <= limit][-1:]
    wanted = [there[:1], below(np.searchsorted(counts.cumsum(), len(totals) / 2)), there[-1:]]
    wanted += [some for limit in limits for some in (below(limit), there[there > limit][:1])]
    compared = [int((totals == length).argmax()) for length in dict.fromkeys(np.concatenate(wanted).tolist())]
    # Sources and targets are padded to the longest of each. Of several texts, those of the longest two are enough.
    longest = sorted(set(lengths.argmax(0).tolist()), key=lambda place: (-lengths[place].max(), place))[:2]
    return [[int(places[place]) for place in (one, *longest)] for one in compared[:MOST_TEXTS]]


def _main_tensor(output: Any) -> Tensor:
    """Return the logits or the hidden states of the output of a model."""
    if isinstance(output, Tensor):
        return output
    values = dict(output) if isinstance(output, Mapping) else dict(enumerate(output))
    in_order = (values.get("logits"), values.get("last_hidden_state"), *values.values())
    return next(value for value in in_order if isinstance(value, Tensor))


def _distance(alone: Tensor, padded: Tensor) -> float:
    """Return the largest difference as a fraction of the largest value. It is not a number if one of the values is not."""
    before, after = alone.double(), padded[: len(alone)].double()
    if before.shape != after.shape:
        return float("inf")
    differs = before != after  # a masked logit is infinite in both
    if not differs.any():
        return 0.0
    largest = before[before.isfinite()].abs().max() if before.isfinite().any() else before.new_tensor(0.0)
    return float((before - after)[differs].abs().max() / largest.clamp(min=1e-12))
