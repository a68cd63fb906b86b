"""What listens to `engine.fit`: numbers, averages, comparisons of weights, checkpoints, evaluations, and the hooks of a run."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from accel_ddp import phases
from accel_ddp.engine.fit import Known, Run
from accel_ddp.engine.hook import Hook, Hooks
from accel_ddp.engine.step_numbers import LateReader, RankSample, Throughput
from accel_ddp.engine.step_sums import Carry
from accel_ddp.engine.step_times import measure_steps
from accel_ddp.phases import CHECK, COMPILE, DEVICE, LOAD, METRICS, phase
from accel_ddp.ranks import signals
from accel_ddp.ranks.agreement import gather_everywhere
from accel_ddp.ranks.failures import EvaluationStopped
from accel_ddp.ranks.process import ending
from accel_ddp.saving import restart_record
from accel_ddp.saving.checkpoints import Checkpoints
from accel_ddp.saving.run_folder import update_options
from accel_ddp.training.divergence import NonfiniteSteps, ParameterCheck, weights_kept
from accel_ddp.training.ema import Ema
from accel_ddp.training.evaluation import EvalBatches, broadcast_metrics, evaluate
from accel_ddp.training.sharding import reshard
from accel_ddp.training.stream import TrainBatches
from accel_ddp.training.system_sample import SystemSample


class RunEvents:
    """The listeners of a run, in the order in which they hear of a step. Every rank calls the same methods."""

    system: SystemSample  # while steps are taken

    def __init__(
        self,
        run: Run,
        train: TrainBatches,
        saved: Checkpoints,
        check: ParameterCheck,
        ema: Ema,
        speed: Any,
        test: EvalBatches | Callable[[nn.Module], dict[str, float]] | None,
        hooks: Sequence[Hook],
    ):
        """`speed` is a `speed.attach.Speed`, or None. `test` is what the task evaluates, or a function of the model."""
        self.run, self.cfg, self.train, self.saved = run, run.cfg, train, saved
        self.check, self.ema, self.speed, self.test = check, ema, speed, test
        device = run.accelerator.device
        self.reader = LateReader(device, run.accelerator.num_processes)
        self.times = measure_steps(device, run.step)
        self.ended_at: dict[int, float] = {}  # the training time at the end of steps whose numbers are not read yet
        self.pace = Throughput(train.mean_items(run.cfg), speed.peak_flops if speed else None)
        self.nonfinite = NonfiniteSteps(run.accelerator, run.cfg, saved)
        self.hooks = Hooks([self.nonfinite, *hooks])
        self.first, self.keeps_weights = run.step, False  # whether an evaluation after a step has left the weights as they are
        self.metrics: dict[str, float] = {}  # of the last evaluation

    # ---- a step

    def compile_if_due(self) -> None:
        if self.speed and self.speed.is_due(self.run.step):
            with phase(LOAD), phase(COMPILE):  # the time belongs to no step
                seconds = self.speed.compile_layers()
            self.hooks.notify("on_warm_up", self.run.step, seconds)
            if self.run.accelerator.is_main_process:
                update_options(self.cfg)  # if compiling has failed, a resume must not try again

    def warm_up(self) -> None:
        """Compile the layers if that is due, and report an automatic restart."""
        self.compile_if_due()
        if restart := restart_record.begin_training(self.cfg, self.run.step, self.saved.resumed_from):
            self.hooks.notify("on_restart", self.run.step, restart)

    def begin_step(self) -> None:
        self.compile_if_due()
        self.hooks.notify("on_step_begin", self.run.step + 1)

    def carry(self, batches: list[Any]) -> Carry:
        """Return this rank's vote to stop, its work, and its sample in steps that are logged. One vote stops all ranks."""
        step = self.run.step + 1
        is_logged = step % self.cfg.log_every == 0 or step == self.run.schedule.total_steps
        tokens, flops = self.speed.work_of(batches) if self.speed else (0.0, 0.0)
        sample = RankSample.of(self.times.timing, self.system.latest) if is_logged else ()
        return Carry(signals.is_stop_requested(), tokens, flops, sample)

    def end_step(self, known: Known) -> None:
        """Pass the numbers of completed steps to the hooks, and find out whether all ranks stop.

        With local steps, the ranks know the numbers and the votes of all only when they synchronize, and stop only then.
        """
        run, step = self.run, self.run.step
        self.ended_at[step] = phases.HERE.training_seconds()
        phases.HERE.report_timing(self.times.end_step(step))
        if known:
            self.ema.update(step, *(stats for _, _, stats in known))
        with phase(DEVICE):
            for numbers in known:
                self.reader.push(*numbers)
                self.read_numbers()
            if known:
                self.check.begin(step, run.schedule.saves(step), run.schedule.before(step))
                self.read_numbers(wait_for_all=bool(self.cfg.sync_every) or run.schedule.pauses(step))
        with phase(CHECK):
            self.check.read(step)  # after the numbers: a loss that is not finite is reported as such
        self.hooks.notify("on_step_end", step)
        run.is_stopping = run.is_stopping or run.schedule.stops(step)
        if run.is_stopping:
            ending.stop.is_agreed = True  # from here on no time limit ends the save
            with phase(DEVICE):
                self.read_numbers(wait_for_all=True)

    def read_numbers(self, wait_for_all: bool = False) -> None:
        """Pass the numbers of completed steps to the hooks.

        On a GPU they arrive one step late, so the host does not wait, and a vote to stop takes effect one step later.
        """
        for numbers in self.reader.pop(wait_for_all):
            # The sum of votes is the same on every rank, so all stop after the same step.
            self.run.is_stopping = self.run.is_stopping or numbers.votes > 0
            numbers = numbers._replace(means=numbers.means | self.train.counts(numbers.step, self.cfg))
            self.hooks.notify("on_update", numbers, self.pace.after(numbers, self.ended_at.pop(numbers.step)))

    # ---- checkpoints and evaluations

    def save(self) -> None:
        self.saved.save(self.run.step, is_last=not self.run.continues)

    def report_saves(self) -> None:
        for step, path in self.saved.take_committed():
            self.hooks.notify("on_save", step, path)

    def evaluate(self) -> None:
        """Evaluate, and save again if that stops the run."""
        self.evaluate_once()
        if self.run.is_done or self.run.is_stopping:
            self.save()

    def evaluate_before_training(self) -> None:
        """Evaluate before the first step, or repeat an evaluation in which the run was killed after its save."""
        run = self.run
        if not run.is_stopping and run.schedule.evaluates(run.step) and run.step not in self.saved.evaluations:
            self.evaluate_once()

    def evaluate_once(self) -> None:
        run = self.run
        with phase(METRICS):
            try:
                what = f"the evaluation at step {run.step}"
                with self.ema.applied(), contextlib.nullcontext() if self.keeps_weights else weights_kept(run.model, what):
                    is_own = not isinstance(self.test, EvalBatches)
                    metrics = self.test(run.model) if is_own else evaluate(run.accelerator, run.terms, self.test)
                    reshard(run.model)  # a function of a user may have left weights gathered
            except EvaluationStopped:
                run.is_stopping = True
                ending.stop.is_agreed = True
                return
            self.keeps_weights = run.step > self.first
            # Ranks that compared different values would disagree on when to stop. A user's function may return them.
            self.metrics = broadcast_metrics(metrics, run.accelerator.is_main_process)
            self.saved.evaluated(run.step, self.metrics)
            self.end_if(self.hooks.notify("on_evaluate", run.step, self.metrics))

    def end_if(self, ends: list[bool | None]) -> None:
        """End the run if a hook of any rank asks for it. This is a collective, because ranks may have different hooks."""
        self.run.is_done = any(gather_everywhere(any(ends))) or self.run.is_done
