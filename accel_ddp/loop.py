"""The loop of a run: update, log, evaluate, save, stop.

It is the only one, and it is meant to be read. `recipes/own_loop.py` is a short copy to start from if you need another.
"""

import contextlib
import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp import phases
from accel_ddp.config.option_values import check_end
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.observe.hook import Hook
from accel_ddp.observe.recorder import start_recorder
from accel_ddp.phases import COMPILE, DATA, DEVICE, END, HOOKS, LOAD, METRICS
from accel_ddp.ranks import signals
from accel_ddp.ranks.agreement import broadcast_object, gather_everywhere, print_on_main
from accel_ddp.ranks.failures import LAUNCHER_DIED, EvaluationStopped, Failure, Stopped
from accel_ddp.ranks.process import Exit, Moment, ending, this_rank
from accel_ddp.records.eval_tables import Table, check_tables
from accel_ddp.saving import restart_record
from accel_ddp.saving.checkpoints import Checkpoints
from accel_ddp.saving.resume import last_steps
from accel_ddp.seeds import mixed
from accel_ddp.speed.attach import Speed, attach
from accel_ddp.training import run_facts
from accel_ddp.training.divergence import NonfiniteSteps, ParameterCheck
from accel_ddp.training.ema import Ema
from accel_ddp.training.evaluation import broadcast_metrics
from accel_ddp.training.losses import LossSum, WholeBatch
from accel_ddp.training.optim import lr_at, set_lr
from accel_ddp.training.own_time import OwnTime, Part
from accel_ddp.training.padding_check import require_independence
from accel_ddp.training.run_facts import describe_memory, describe_run, measure_memory
from accel_ddp.training.sharding import prepare, reshard
from accel_ddp.training.step_numbers import Breakdown, LateReader, Numbers, RankSample, Throughput, describe
from accel_ddp.training.stream import TrainBatches
from accel_ddp.training.system_sample import SystemSample
from accel_ddp.training.update import Count, update


class Outcome(NamedTuple):
    """How a run ended."""

    metrics: dict[str, float]  # of the last evaluation
    step: int
    unsaved: str = ""  # why the last state is not on the disk; the process then ends with exit code 74


def fit(
    accelerator: Accelerator,
    cfg: TrainConfig,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: TrainBatches,
    loss_sum: LossSum | WholeBatch,
    count: Count,
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    tables: Callable[[], dict[str, Table]] | None = None,
    hooks: Sequence[Hook] = (),
    files: dict[str, bytes] | None = None,
    speedups: Callable[..., Speed] | None = attach,
) -> Outcome:
    """Train for `cfg.steps` or `cfg.epochs`, starting from the checkpoint that `cfg.resume` means, if there is one.

    The update of step `s` depends on `s`, the seed and the weights, so that neither a restart nor the number of ranks changes it.
    `tables` returns the tables of the last evaluation. It is called on the main rank only, and an error in it does not end the run.
    With `cfg.ema_decay` the average of the weights is evaluated, and it is what the model contains at the end.
    `files` are stored in every checkpoint, for its export. With `speedups=None` the model is computed as it is. If the run is asked
    to stop, every rank raises `Stopped` after the same step, when the checkpoint is complete.
    """
    if evaluate is None and (cfg.keep_best or cfg.early_stopping_patience):
        name = "keep_best" if cfg.keep_best else "early_stopping_patience"
        raise UserError(f"--{name}: this recipe has no evaluation. Leave --{name} out, or pass `evaluate` to `fit`.")
    total_steps = cfg.total_steps(len(train))
    check_end(cfg.profile, total_steps)
    require_independence(accelerator, cfg, model, train, loss_sum)
    speed = speedups(accelerator, cfg, model, train, loss_sum, total_steps) if speedups else None
    model, optimizer = prepare(accelerator, cfg, model, optimizer)
    check = ParameterCheck(accelerator, cfg, model)
    ema = Ema(accelerator.unwrap_model(model), cfg.ema_decay)
    facts = {"data": train.identity, "total_steps": total_steps, "files": files, "averages": ema.averages}
    saved = Checkpoints(accelerator, cfg, model, optimizer, **facts, before_save=check.require)
    step = saved.restore(begins_training=False)  # after the warm-up
    if speed:
        speed.choose_micro_batch_size(model, optimizer)
    print_on_main(f"{total_steps} steps = {total_steps * cfg.global_batch_size / len(train):.2f} epochs of {len(train):,} items")
    if step < total_steps:
        _print_new_schedule(cfg, saved, step, total_steps)
    updates = train.starting_at(step, accelerator, cfg)
    reader = LateReader(accelerator.device, accelerator.num_processes)
    pace = Throughput(cfg.global_batch_size, speed.peak_flops if speed else None)
    run = _Run(accelerator, cfg, model, ema, evaluate, tables, hooks, saved, pace, total_steps, len(train), first=step, step=step)
    own_time = OwnTime(accelerator.device, step)
    own_time.attach(model)
    facts_of_run = describe_run(accelerator, cfg, len(train), model)
    run.hosts = [rank["host"] for rank in facts_of_run.get("ranks", [])]
    for hook in hooks:
        hook.on_describe(facts_of_run)
    run.is_done = _any_rank([hook.on_start(step, total_steps, saved.evaluations) for hook in hooks])

    facts_of_model = facts_of_run.get("model", {}) | (speed.describe() if speed else {})
    recorder = start_recorder(accelerator, cfg, own_time, step, total_steps, run.pauses_after, facts_of_model)

    model.train(cfg.dropout)
    heartbeat = phases.HERE
    heartbeat.advance(step)
    heartbeat.report_timing(own_time.timing)
    with signals.can_save(cfg), heartbeat.within(LOAD), SystemSample(accelerator.device) as system, recorder or nullcontext():
        # Before the first step, or if the run was killed in an evaluation after a save.
        if run.evaluates_now() and step not in saved.evaluations:
            run.evaluate()
            pace.restart()
        if run.continues():
            heartbeat.enter(COMPILE)
            seconds = speed.warm_up() if speed else None
            if seconds is not None:
                for hook in hooks:
                    hook.on_warm_up(step, seconds)
            if restart := restart_record.begin_training(cfg, step, saved.resumed_from):
                for hook in hooks:
                    hook.on_restart(step, restart)
            pace.restart()
            own_time.restart()
        with run_facts.published():
            while run.continues():
                if recorder and recorder.begin_step(run.step + 1):
                    run.receive(reader.pop(wait_for_all=True))
                    pace.restart()
                lr = lr_at(run.step, cfg, total_steps)
                set_lr(optimizer, lr)
                seed = mixed(cfg.seed, "step", run.step)
                own_time.mark(Part.OTHER)
                heartbeat.enter(DATA)
                batches, vote = next(updates), signals.is_stop_requested()  # a vote to stop; one vote stops all ranks
                own_time.mark(Part.DATA)
                work = speed.work_of(batches) if speed else (0.0, 0.0)  # tokens and FLOPs, for the log
                sample = RankSample.of(own_time.timing, system.latest) if run.logs_next() else ()
                more = (cfg.max_grad_norm, seed, vote, work, cfg.on_nonfinite, own_time, sample)
                stats = update(accelerator, model, optimizer, batches, loss_sum, count, *more)
                run.step += 1
                ema.update(run.step, stats)
                own_time.end_step(run.step)
                heartbeat.report_timing(own_time.timing)
                heartbeat.enter(DEVICE)
                reader.push(run.step, lr, stats)
                check.begin(run.step, is_needed=run.saves_now())

                # On a GPU the numbers of an update arrive one step late, so that the host does not wait for them.
                run.receive(reader.pop(wait_for_all=run.saves_now() or run.evaluates_now()))
                own_time.mark(Part.OTHER)
                heartbeat.enter(DEVICE)
                check.read(run.step)  # after the numbers: a loss that is not finite is reported as such
                own_time.mark(Part.COMMUNICATION)
                if recorder and recorder.end_step(run.step, run.is_stopping):
                    recorder = None
                    run.receive(reader.pop(wait_for_all=True))
                    pace.restart()
                    own_time.restart()
                run.is_stopping = run.is_stopping or run.step == cfg.stop_after
                if run.is_stopping:
                    signals.mark_agreed()  # from here on no time limit ends the save
                    heartbeat.enter(DEVICE)
                    run.receive(reader.pop(wait_for_all=True))
                if run.saves_now() or run.is_stopping:  # before the evaluation, which may fail
                    saved.save(run.step, is_last=run.is_stopping or run.step == total_steps)
                if run.evaluates_now() and not run.is_stopping:
                    run.evaluate()
                    if run.is_done or run.is_stopping:
                        saved.save(run.step, is_last=True)
                heartbeat.enter(HOOKS)
                run.report_saves()
                if run.saves_now() or run.evaluates_now():
                    pace.restart()
                    own_time.restart()
        return run.finish()


def _print_new_schedule(cfg: TrainConfig, saved: Checkpoints, step: int, total_steps: int) -> None:
    """Print the old and the new learning rate of the next step, if the resumed run has another last step or other options."""
    names = ("lr", "lr_schedule", "warmup_steps", "warmup_ratio", "min_lr_ratio", "decay_ratio")
    stored = saved.resumed.get("config", {})
    then = {name: stored.get(name, getattr(type(cfg), name)) for name in names}  # an older version has not stored all of them
    total_before = last_steps(cfg, saved.resumed)[1]
    now, before = lr_at(step, cfg, total_steps), lr_at(step, dataclasses.replace(cfg, **then), total_before)
    if not saved.resumed or (total_steps, now) == (total_before, before):
        return
    text = f"The run now ends after step {total_steps} instead of {total_before}. " if total_steps != total_before else ""
    if now == before:
        text += f"The learning rate of step {step + 1} stays {now:.3g}."
    else:
        text += (
            f"The learning rate of step {step + 1} is {now:.3g} instead of {before:.3g}. From here on the schedule is that of a run of "
            f"{total_steps} steps with these options. The steps before keep the learning rates that they had."
        )
    print_on_main(text)


@dataclass
class _Run:
    """Where a run is, and what happens besides updates. Every rank has the same values."""

    accelerator: Accelerator
    cfg: TrainConfig
    model: nn.Module
    ema: Ema
    evaluate_model: Callable[[nn.Module], dict[str, float]] | None
    tables: Callable[[], dict[str, Table]] | None
    hooks: Sequence[Hook]
    saved: Checkpoints
    pace: Throughput
    total_steps: int
    num_items: int
    first: int  # the step from which this process continued
    step: int  # updates done
    is_done: bool = False  # a hook has ended the run
    is_stopping: bool = False  # the run was asked to stop
    metrics: dict[str, float] = field(default_factory=dict)
    table_errors: set[str] = field(default_factory=set)  # printed ones

    def __post_init__(self) -> None:
        self.nonfinite = NonfiniteSteps(self.accelerator, self.cfg, self.saved)
        self.breakdown = Breakdown()
        self.hosts: list[str] = []  # of each rank, on the main rank
        self.is_stopping = 0 < self.cfg.stop_after <= self.step

    def continues(self) -> bool:
        return self.step < self.total_steps and not self.is_done and not self.is_stopping

    def saves_now(self) -> bool:
        return self._saves_after(self.step)

    def evaluates_now(self) -> bool:
        return self._evaluates_after(self.step)

    def pauses_after(self, step: int) -> bool:
        """Return whether a checkpoint or an evaluation follows a step."""
        return self._saves_after(step) or self._evaluates_after(step)

    def _saves_after(self, step: int) -> bool:
        return step in (self.total_steps, self.cfg.stop_after) or self._is_due(step, self.cfg.save_every)

    def _evaluates_after(self, step: int) -> bool:
        if step == 0:
            return bool(self.evaluate_model) and self.cfg.eval_first
        return bool(self.evaluate_model) and (step == self.total_steps or self._is_due(step, self.cfg.eval_every))

    def logs_next(self) -> bool:
        """Return whether the next step is logged, so that every rank sends its sample in it."""
        return (self.step + 1) % self.cfg.log_every == 0 or self.step + 1 == self.total_steps

    def _is_due(self, step: int, every: int) -> bool:
        if every:
            return step % every == 0
        epochs = lambda steps: steps * self.cfg.global_batch_size // self.num_items
        return epochs(step) > epochs(step - 1)

    def receive(self, updates: Iterator[Numbers]) -> None:
        """Check and log the numbers of completed updates."""
        for numbers in updates:
            self.nonfinite.check(numbers)
            # The sum of votes is the same on every rank, so that all stop after the same step.
            self.is_stopping = self.is_stopping or numbers.votes > 0
            pace = self.pace.after(numbers)
            self.breakdown.add(numbers.ranks)
            phases.HERE.enter(HOOKS)
            for hook in self.hooks:
                hook.on_update(numbers, pace)
            phases.HERE.enter(DEVICE)  # the next numbers may still be computed

    def evaluate(self) -> None:
        try:
            with phases.HERE.within(METRICS), self.ema.applied():
                metrics = self.evaluate_model(self.model)
                reshard(self.model)  # an `evaluate` function of a user may have left weights gathered
        except EvaluationStopped:
            self.is_stopping = True
            signals.mark_agreed()
            return
        # Ranks that compared different values would disagree on when to stop. An `evaluate` function of a user may return them.
        self.metrics = broadcast_metrics(metrics)
        self.saved.evaluated(self.step, self.metrics)
        phases.HERE.enter(HOOKS)
        ends = _any_rank([hook.on_evaluate(self.step, self.metrics) for hook in self.hooks])
        self.is_done = self.is_done or ends
        if self.tables and this_rank.is_main:
            self._report_tables()

    def _report_tables(self) -> None:
        """Pass the tables of the evaluation to the hooks."""
        tables: dict[str, Table] = {}
        with self._surviving_errors(), phases.HERE.within(METRICS):
            tables = check_tables(self.tables())
        for hook in self.hooks if tables else ():
            with self._surviving_errors():
                hook.on_tables(self.step, tables)

    @contextlib.contextmanager
    def _surviving_errors(self) -> Iterator[None]:
        """Print an error in tables once. The run continues, because only the main rank has tables and nothing depends on them."""
        try:
            yield
        except Exception as error:  # code of a task or of a hook
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
            reason = f"{type(error).__name__}: {error} ({own[-1].filename}, line {own[-1].lineno})"
            if reason not in self.table_errors:
                print(f"The tables of the evaluation at step {self.step} failed: {reason}. Training continues.", file=sys.stderr)
            self.table_errors.add(reason)

    def report_saves(self) -> None:
        for step, path in self.saved.take_committed():
            for hook in self.hooks:
                hook.on_save(step, path)

    def finish(self) -> Outcome:
        """Complete the last save, call the hooks for the last time, and return the outcome or raise `Stopped`."""
        cfg, saved = self.cfg, self.saved
        phases.HERE.enter(END)
        if 0 < self.step == saved.skipped_in_a_row and not self.is_stopping:  # all steps of a run that is shorter than the limit
            self.nonfinite.refuse(self.step)
        if not self.is_stopping and self.evaluate_model and not self.metrics:  # resumed after the last step
            self.evaluate()
        if self.is_stopping and self.step:  # also if the stop was requested before this process did a step
            saved.save(self.step, is_last=True)
        unsaved = saved.close()
        self.report_saves()
        self.nonfinite.print_summary(self.step - self.first)
        reason = signals.gather_reason() if self.is_stopping else ""
        now = self.metrics if self.step in saved.evaluations else {}  # not those of an earlier step
        goodput = restart_record.goodput(cfg)
        if goodput is not None:
            print(f"goodput: {goodput:.1%} of the time since the first attempt began was spent on steps that count.", flush=True)
        more = {"stopped": reason} if reason else {}
        more |= {"goodput": goodput} if goodput is not None else {}
        if breakdown := self.breakdown.summary(self.hosts):
            more |= {"breakdown": breakdown}
        if memory := measure_memory(self.accelerator.device, self.breakdown.last):
            more |= {"memory": memory}
        for hook in self.hooks:
            hook.on_end(self.step, {**now, "skipped_steps": self.nonfinite.skipped, **more})
        if breakdown and this_rank.is_main:
            print(describe(breakdown, this_rank.num_ranks), flush=True)
        if memory:
            print_on_main(describe_memory(memory))
        if self.is_stopping or not ending.stop.pid:  # a program without `run` continues after `fit`
            ending.run(Moment.TRACKERS, Exit.STOPPED if self.is_stopping else Exit.FINISHED)
        if self.is_stopping:
            broadcast_object(None, what="close its trackers")  # the launcher ends all ranks as soon as the first one is gone
            signals.remove_stop_file(cfg.output_dir)
            raise Stopped(self._stop_message(reason, unsaved))
        if unsaved:
            unsaved = f"the run is complete, but {unsaved}."
        elif saved.metric and (best := saved.best()) is not None:
            name = saved.metric.name
            print_on_main(
                f"best {name}: {saved.evaluations[best][name]:.4f} at step {best}, in {cfg.output_dir}/step_{best:08d}. Export it "
                f"with: accel-ddp export {cfg.output_dir} FOLDER"
            )
        elif saved.metric and not saved.ranking:
            print_on_main(f"--keep_best: there is no best checkpoint, because {saved.metric.name} was NaN in every evaluation.")
        ending.unsaved = unsaved
        self.ema.apply()
        return Outcome(self.metrics, self.step, unsaved)

    def _stop_message(self, reason: str, unsaved: str) -> Failure:
        if not self.step:
            kind = "died" if reason.startswith(LAUNCHER_DIED) else "stopped"
            return Failure(kind, f"requested by {reason} before the first step. There is nothing to save.")
        if unsaved:
            return Failure(
                "unsaved", f"a stop was requested by {reason}, but {unsaved}. --resume continues from an older checkpoint."
            )
        if reason.startswith(LAUNCHER_DIED):
            return Failure(
                "died",
                f"{reason}. Step {self.step} of {self.total_steps} is saved. Start the launcher again with the same command and "
                f"--resume --output_dir {self.cfg.output_dir}",
                step=self.step,
            )
        return Failure(
            "stopped",
            f"requested by {reason}. Step {self.step} of {self.total_steps} is saved. To continue, type the same command with "
            f"--resume --output_dir {self.cfg.output_dir}",
        )


def _any_rank(ends: list[bool | None]) -> bool:
    """Return whether a hook of any rank ends the run. This is a collective, because ranks may have different hooks."""
    return any(gather_everywhere(any(ends)))
