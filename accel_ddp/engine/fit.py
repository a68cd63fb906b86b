"""The loop of a run: step, save, evaluate, until the last step or a stop. Whatever else happens listens to `Events`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp import phases
from accel_ddp.engine.rows import MicroBatch
from accel_ddp.engine.step import Carry, UpdateStats, train_step
from accel_ddp.engine.terms import model_of
from accel_ddp.phases import DATA, OTHER, phase
from accel_ddp.seeds import mixed

if TYPE_CHECKING:
    from accel_ddp.config.train_config import TrainConfig

CarryOf = Callable[[list[MicroBatch]], Carry]
# Steps whose numbers all ranks know (on a GPU their tensors may still be computed), each with its learning rate. One for each step,
# or with local workers all since the last synchronization.
Known = list[tuple[int, float, UpdateStats]]


class Schedule(NamedTuple):
    """After which steps a run saves, evaluates, and stops for `--stop_after`: a function of the step, so a resumed run agrees."""

    cfg: "TrainConfig"
    total_steps: int
    epoch_size: int  # in the units of `cfg.step_size`
    has_evaluation: bool
    every: int = 1  # local workers have weights of their own between its multiples; 1: all ranks always have the same

    def syncs(self, step: int) -> bool:
        """Return whether all ranks have the same weights after a step."""
        return step % self.every == 0 or step == self.total_steps

    def before(self, step: int) -> int:
        """Return the last step before this one after which all ranks had the same weights."""
        return (step - 1) // self.every * self.every

    def saves(self, step: int) -> bool:
        return step == self.total_steps or self.stops(step) or self._is_due(step, self.cfg.save_every)

    def stops(self, step: int) -> bool:
        """Return whether `--stop_after` means this step, or the first one at or after it in which all ranks are equal."""
        return self.syncs(step) and self.before(step) < self.cfg.stop_after <= step

    def evaluates(self, step: int) -> bool:
        if step == 0:
            return self.has_evaluation and self.cfg.eval_first
        return self.has_evaluation and (step == self.total_steps or self._is_due(step, self.cfg.eval_every))

    def pauses(self, step: int) -> bool:
        """Return whether a checkpoint or an evaluation follows a step."""
        return self.saves(step) or self.evaluates(step)

    def _is_due(self, step: int, every: int) -> bool:
        """Return whether a step is the first one, of those in which all ranks are equal, at or after a multiple of `every`.

        0: of an epoch.
        """
        steps, size = (1, every) if every else (self.cfg.step_size, self.epoch_size)
        return self.syncs(step) and step * steps // size > self.before(step) * steps // size


@dataclass
class Run:
    """What the loop reads and changes. Every rank has the same values."""

    accelerator: Accelerator
    cfg: "TrainConfig"
    terms: nn.Module  # what `prepare` has returned: `Terms`, or DDP around it
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    set_lr: Callable[[int], float]  # sets the learning rate of a step (from 0), and returns it
    step: int = 0  # steps done
    is_done: bool = False  # a hook has ended the run
    is_stopping: bool = (
        False  # `Events` has summed the votes: a rank was asked to stop, and all save and stop after the same step
    )

    @property
    def model(self) -> nn.Module:
        """The model without `Terms` and DDP, which may be sharded."""
        return model_of(self.terms)

    @property
    def continues(self) -> bool:
        return self.step < self.schedule.total_steps and not self.is_done and not self.is_stopping


class Events(Protocol):
    """What listens to the loop. Every rank calls every method; `end_step` and `evaluate` may end the run."""

    def begin_step(self) -> None: ...

    def carry(self, batches: list[MicroBatch]) -> Carry: ...  # this rank's vote to stop travels with its number of items

    def end_step(self, known: Known) -> None: ...

    def save(self) -> None: ...

    def evaluate(self) -> None: ...

    def report_saves(self) -> None: ...


def next_step(run: Run, batches: Iterator[list[MicroBatch]], carry: CarryOf, *worker: int) -> UpdateStats:
    """Take one optimizer step with the next micro-batches of this rank. A local `worker` draws dropout of its own."""
    with phase(DATA):
        own = next(batches)
    seed = mixed(run.cfg.seed, "step", run.step, *worker)
    return train_step(run.accelerator, run.cfg, run.terms, run.optimizer, own, seed, carry(own))


def one_step(run: Run, lr: float, batches: Iterator[list[MicroBatch]], carry: CarryOf) -> Known:
    return [(run.step + 1, lr, next_step(run, batches, carry))]


def fit(run: Run, batches: Iterator[list[MicroBatch]], events: Events, take_step: Callable[..., Known] = one_step) -> None:
    """Train from `run.step` to the last step, or until a rank is asked to stop, or until a hook ends the run.

    Step `s` depends on `s`, the seed and the weights only, so it is the same after a restart. Every step sums the votes of ranks
    to stop, so all ranks stop after the same one.
    """
    phases.enter(OTHER)
    while run.continues:
        events.begin_step()
        lr = run.set_lr(run.step)
        known = take_step(run, lr, batches, events.carry)
        run.step += 1
        events.end_step(known)  # log, averages, comparison of weights; numbers and votes arrive one step late on a GPU
        if run.is_stopping or run.schedule.saves(run.step):
            events.save()  # before the evaluation, which may fail
        if not run.is_stopping and run.schedule.evaluates(run.step):
            events.evaluate()
        events.report_saves()
