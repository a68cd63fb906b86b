"""The progress of a run: a live panel in a terminal, and plain lines elsewhere."""

import contextlib
import time
from typing import TYPE_CHECKING

from accel_ddp import best_metric
from accel_ddp.config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.observing.hook import Hook
from accel_ddp.ranks.process import process

if TYPE_CHECKING:
    from accel_ddp.observing.panel import State


class Progress(Hook):
    """Updates the panel that `start` has opened. If there is none, it prints a line every `--log_every` steps."""

    def __init__(self, cfg: TrainConfig):
        self.cfg, self.every, self.num_items = cfg, cfg.log_every, 0

    @property
    def state(self) -> "State | None":
        """What the panel shows. None: there is no panel."""
        return process.display.state if process.display else None

    def on_describe(self, facts):
        self.num_items = facts.get("items", 0)

    def on_start(self, step, total_steps, evaluations):
        self.total_steps, self.began, self.first = total_steps, time.monotonic(), step
        self.evaluations = dict(evaluations)
        if state := self.state:
            state.first_step, state.began, state.numbers = step, self.began, None
            state.steps_per_epoch = self.num_items / self.cfg.global_batch_size
            state.evaluations, state.metric = self.evaluations, _metric_of(self.cfg)
            state.total_steps = total_steps

    def on_warm_up(self, step, seconds):
        print(f"warm-up: {seconds:.1f} s")
        self._begin_steps()

    def on_update(self, numbers, pace):
        if state := self.state:
            state.numbers, state.pace, state.updated = numbers, pace, time.monotonic()
            if numbers.ranks:
                state.samples = state.samples[1], numbers.ranks
        elif numbers.step % self.every == 0 or numbers.step == self.total_steps:
            seconds = (time.monotonic() - self.began) / (numbers.step - self.first) * (self.total_steps - numbers.step)
            print(
                f"step {numbers.step:>{len(str(self.total_steps))}}/{self.total_steps}  loss {numbers.loss:.4f}  "
                f"grad {numbers.grad_norm:.3f}  lr {numbers.lr:.2e}  {pace}  "
                f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"
            )

    def on_evaluate(self, step, metrics):
        self.evaluations[step] = metrics
        when = f"step {step}" if step else "before training"
        print(f"{when}  evaluation: " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        if step == self.first:
            self._begin_steps()

    def on_end(self, step, summary):
        if process.display:
            process.display.finish("stopped" if "stopped" in summary else "done")
        before, after = self.evaluations.get(0, {}), self.evaluations.get(step, {})
        both = {name: (before[name], after[name]) for name in after if name in before}
        if step and both:
            width = max(map(len, both))
            print("\n".join([f"{'':{width}}  {'before':>10}  {'after':>10}"] + [
                f"{name:{width}}  {a:10.4f}  {b:10.4f}" for name, (a, b) in both.items()
            ]))  # fmt: skip

    def _begin_steps(self) -> None:
        self.began = time.monotonic()  # the remaining time is estimated from steps alone
        if state := self.state:
            state.began = self.began


def _metric_of(cfg: TrainConfig) -> best_metric.BestMetric | None:
    with contextlib.suppress(UserError):  # a direction that is not known matters only with --keep_best or early stopping
        return cfg.best()
    return None
