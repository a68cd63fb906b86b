"""Checks before the first step of a process, also of a resumed one: what no later number would show, or only as a crash.

The loss of the first two items is computed together and alone, and the optimizer must hold what is trained. A task needs to provide
only the loss of some items and their number. `equal_ranks.py` compares what ranks have.
"""

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_ddp import compat
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.ddp import words_to_freeze
from accel_ddp.engine.rows import MicroBatch, Rows
from accel_ddp.engine.scaler import state_restored
from accel_ddp.engine.terms import checked, problem_of, terms_of
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import gather_everywhere
from accel_ddp.ranks.reporting import warn_on_main
from accel_ddp.ranks.shards import is_sharded
from accel_ddp.seeds import generator_states, generators_kept, mixed, seed_forward, seed_host
from accel_ddp.text import counted, shorten
from accel_ddp.training.equal_ranks import another_each_time, digest, first_items
from accel_ddp.training.padding_check import forget_peak, without_tf32
from accel_ddp.training.sharding import gathered, recover
from accel_ddp.training.stream import TrainBatches

log = logging.getLogger(__name__)

# Differences are fractions of the loss. In 16 bits, a choice between two experts may change by rounding, and a loss of sums over long
# answers has few digits. The mistakes that are looked for change a loss by a half at least, or by the share of padding.
ALLOWED, ALLOWED_IN_16_BITS = 1e-3, 0.3
REPEATED, REPEATED_IN_16_BITS = 1e-4, 0.05  # on a GPU, where kernels add in any order. On a CPU the bits are equal
NO_LOSS = 1e-5  # for each item: a smaller loss is rounding


# ---- trained parameters


def require_optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError for trained parameters that the optimizer does not hold: they would never move."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, p in model.named_parameters() if p.requires_grad and p not in held]
    if names:
        kept = [name for name, p in model.named_parameters() if p in held]
        raise UserError(
            f"the optimizer does not hold {counted(len(names), 'trained parameter')}, which would stay as they are: "
            f"{shorten(', '.join(names), 150)}. Give them to the optimizer, or freeze them before `fit` with {_freezing(names, kept)}."
        )


def report_unused(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let the first step name the trained parameters for which no rank has a gradient, because a user may expect them to learn."""

    def report(stepping: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        handle.remove()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if names := [name for name, p in trained.items() if p.grad is None]:
            text = (
                f"{counted(len(names), 'trained parameter')} got no gradient in the first step: {shorten(', '.join(names), 150)}"
            )
            how = _freezing(names, [*trained.keys() - names])
            warn_on_main(f"{text}. A step leaves what it does not use as it is. If no step uses it, {how} saves memory and time.")

    handle = getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(report)


def _freezing(names: list[str], others: list[str]) -> str:
    words = " ".join(words_to_freeze(names, others))
    return f"--freeze {words}" if 0 < len(words) < 100 else "requires_grad_(False)"


# ---- the loss of two items


class Trial:
    """Computes the loss and the number of some of the first two items, as `update` does, in eval mode and without gradients.

    For a sharded model each loss is a collective, whose value is that of rank 0: all ranks draw the same conclusions.
    """

    def __init__(self, accelerator: Accelerator, cfg: TrainConfig, terms: nn.Module, train: TrainBatches):
        self.device, self.terms = accelerator.device, terms_of(terms).alone()
        self.model = self.terms.model
        self.is_sharded = is_sharded(self.model)
        self.draws, self.problem = False, ""  # whether the model itself has drawn random numbers; what is wrong with the terms
        self.places, self.seed = first_items(train, cfg), cfg.seed
        self._read = lambda items: train.read([(item, self.places[item]) for item in items], cfg.seed)
        self._to_device = lambda batch: train.to_device(batch, accelerator)
        self._batches: dict[tuple[int, ...], MicroBatch] = {}
        tokens, lengths = cfg.micro_batch_tokens, train.lengths if cfg.micro_batch_tokens else None
        # Memory is enough for two items if micro-batches may have two of the longest ones.
        has_room = cfg.split(accelerator.num_processes)[0] > 1 if lengths is None else 2 * int(lengths.max()) <= tokens
        self.has_two = has_room and self.places[0] != self.places[1]
        is_narrow = accelerator.mixed_precision != "no" or getattr(self.model, "is_quantized", False)
        self.is_narrow = is_narrow or any(p.is_floating_point() and p.itemsize < 4 for p in self.model.parameters())

    def batch(self, items: list[int]) -> MicroBatch:
        """Return a copy of a micro-batch, from which a loss may remove its labels."""
        if (key := tuple(items)) not in self._batches:
            self._batches[key] = self._to_device(self._read(items))
        return copy.copy(self._batches[key])

    def is_drawn(self) -> bool:
        """Return whether the collate function draws random numbers, which are others for other micro-batches."""
        self._read([0])
        states = generator_states()
        seed_host(mixed(self.seed, "collate", 0))  # as the data are read
        return states != generator_states()

    def is_repeated(self, item: int) -> bool:
        return digest(self._read([item])) == digest(self._read([item]))

    def loss(self, items: list[int], seed: int = 0) -> float:
        return self._together(lambda: self._compute(self.batch(items), seed))

    def _together(self, compute: Callable[[], float]) -> float:
        """Return a value, that of rank 0 for a sharded model, on all ranks or on none."""
        value, error = math.nan, ""
        try:
            value = compute()
        except Exception as problem:  # a user's code; the first step reports it
            error = f"{type(problem).__name__}: {problem}"
        everyone = gather_everywhere((value, error)) if self.is_sharded else [(value, error)]
        if errors := [error for _, error in everyone if error]:
            if self.is_sharded:
                recover(self.model)
            raise _NotComputed(errors[0])
        return everyone[0][0]

    def _compute(self, batch: MicroBatch, seed: int) -> float:
        seed_forward(seed, self.device)
        count = self.terms.count(batch)
        found = self.terms.trial(batch)
        self.problem = self.problem or problem_of(found, float(count))
        if self.problem:
            return math.nan
        if not (self.terms.is_whole and hasattr(self.terms.task, "outputs")):
            return float(checked(found, needs_gradient=False))
        # A loss depends on the other items, and an output must not.
        return float(self.terms.task.outputs(self.model, batch).double().abs().sum())

    def count(self, items: list[int]) -> float:
        return self._together(lambda: float(self.terms.count(self.batch(items))))

    def is_padded(self) -> bool:
        """Return whether the two items have tensors of different shapes, so that one is padded next to the other."""
        one, other = map(self.batch, ([0], [1]))
        if isinstance(one, Rows):
            return one.used != other.used
        parts = [compat.flatten(dict(batch) if isinstance(batch, Mapping) else batch)[0] for batch in (one, other)]
        shapes = [[part.shape for part in some if isinstance(part, Tensor)] for some in parts]
        return shapes[0] != shapes[1]

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Leave generators, buffers, gradients and training modes as they are."""
        modes = [(module, module.training) for module in self.model.modules()]
        states: list[bytes] = []

        def compare(*_: Any) -> None:
            self.draws = self.draws or states.pop() != generator_states(self.device)

        hooks = [self.model.register_forward_pre_hook(lambda *_: states.append(generator_states(self.device)))]
        hooks.append(self.model.register_forward_hook(compare))
        self.model.eval()
        try:
            kept = generators_kept(self.device), state_restored(self.model)
            with kept[0], kept[1], gathered(self.model), without_tf32(), torch.no_grad():
                yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, mode in modes:
                module.training = mode
            forget_peak(self.device)


class _NotComputed(Exception):
    """`terms` has raised an error, on some rank of a sharded model."""


def require_sums(trial: Trial, cfg: TrainConfig) -> None:
    """Raise UserError on every rank if the loss is not the sum over items, or not the same when it is computed again.

    With `--allow_inexact` it is a warning, as is a loss that depends on padding. It costs forward passes of five items, or of two if
    micro-batches have one item only.
    """
    found, has_two = ("", False), all(gather_everywhere(trial.has_two))
    try:
        with trial.undisturbed():
            found = find_problem(trial, has_two)
    except _NotComputed as error:
        log.info("the loss of the first items was not compared: %s", error)
    text, is_error = next((found for found in gather_everywhere(found) if found[0]), ("", False))
    if trial.problem:
        raise UserError(f"`terms` returned {trial.problem}.")
    if text and is_error and not cfg.allow_inexact:
        raise UserError(f"{text} Or add --allow_inexact to train anyway.")
    if text:
        warn_on_main(f"{'--allow_inexact' if is_error else 'warning'}: {text}", "INEXACT")


def find_problem(trial: Trial, has_two: bool) -> tuple[str, bool]:
    """Return what is wrong with the loss of the first items, or "", and whether that is an error rather than a warning."""
    one, again = trial.loss([0]), trial.loss([0], seed=1)
    if trial.problem or not math.isfinite(one + again):
        return "", False  # the first step reports a loss that is not finite
    exact = 0.0 if trial.device.type == "cpu" else REPEATED_IN_16_BITS if trial.is_narrow else REPEATED
    if abs(one - again) > exact * abs(one):
        drawn = abs(one - trial.loss([0])) <= exact * abs(one)  # with the same seed
        if drawn and not trial.draws:
            return "", False  # a loss with noise, which every step seeds. Two items together have other noise than each alone
        values = f"the loss of the first item is {one:.6g}, and {again:.6g} when it is computed again in eval mode"
        if drawn:
            advice = "Draw them only if `self.training` is set, as nn.Dropout does."
            return f"{values}: the model draws random numbers in eval mode, so no evaluation can be repeated. {advice}", True
        advice = "Compute it from the batch, the parameters and registered buffers only."
        state = "a counter in an attribute of the model, or a generator that is not seeded"
        return f"{values}: it depends on what no checkpoint contains, such as {state}. {advice}", True
    if not has_two:
        return "", False
    two, both = trial.loss([1]), trial.loss([0, 1])
    items = [trial.count(some) for some in ([0], [1], [0, 1])]
    allowed, least = ALLOWED_IN_16_BITS if trial.is_narrow else ALLOWED, NO_LOSS * max(1.0, *items)
    is_near = lambda value, expected: abs(value - expected) <= allowed * max(abs(one) + abs(two), abs(expected)) + least
    is_whole = trial.terms.is_whole and not hasattr(trial.terms.task, "outputs")
    if is_whole or not math.isfinite(two + both) or is_near(both, one + two):
        return _wrong_count(items), True
    if changing := [place for item, place in enumerate(trial.places) if not trial.is_repeated(item)]:
        return another_each_time(changing[0]), False
    if trial.is_drawn():
        return "", False
    values = f"the loss of two items is {both:.4g} together, and {one:.4g} and {two:.4g} alone"
    means = (one + two) / 2, (items[0] * one + items[1] * two) / (items[0] + items[1] or 1)
    if any(is_near(both, mean) for mean in means):
        advice = "Return the loss of each item, without a division: `train_step` divides by the items of all ranks."
        return f"{values}: it is the mean of theirs. {advice}", True
    twice = trial.loss([0, 0])
    if is_near(twice, 2 * one) and trial.is_padded():
        advice = "Leave padded positions out of the loss: give them labels of -100, or multiply losses by the attention mask."
        return f"{values}: it depends on padding, and so on the micro-batch size and the number of ranks. {advice}", False
    if is_near(twice, 4 * one):
        shapes = "tensors of the shapes (B, 1) and (B) were probably combined to (B, B)"
        return f"{values}, and an item next to itself counts four times: {shapes}. Add .squeeze(-1) to the first.", True
    advice = "Return losses that depend on one item each, or compare all items of a step: `whole_batch` in docs/own_recipe.md."
    return f"{values}: items change each other's loss, so the number of ranks changes the result. {advice}", True


def _wrong_count(items: list[float]) -> str:
    if abs(items[2] - items[0] - items[1]) <= 1e-6 * abs(items[2]):
        return ""
    text = f"`count` returned {items[2]:g} for two items together, and {items[0]:g} and {items[1]:g} for each alone. Return the number "
    return f"{text}of items that the loss is of, without padding."
