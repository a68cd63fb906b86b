"""The loop of a run: update, log, evaluate, save, stop.

The package has one loop, and it is meant to be read: `fit` is the loop, and `TrainingRun` is what surrounds an update.
`training/update.py` does one step and `training/stream.py` chooses its items. The phases that these modules enter (`phases.py`) show
which phase a rank is in, and their listeners measure how long each part of a step takes: host seconds on a CPU, CUDA events on a GPU
(`training/step_times.py`). `recipes/own_loop.py` is a simplified example to start from if you need another loop.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp import phases
from accel_ddp.config.option_values import check_end
from accel_ddp.config.train_config import RecipeConfig, TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.observe.recorder import start_recorder
from accel_ddp.phases import CHECK, COMPILE, DATA, DEVICE, END, HOOKS, LOAD, METRICS, OTHER, UNLIMITED, phase
from accel_ddp.ranks import signals
from accel_ddp.ranks.agreement import broadcast_object, gather_everywhere, print_on_main
from accel_ddp.ranks.failures import LAUNCHER_DIED, EvaluationStopped, Failure, Stopped
from accel_ddp.ranks.process import Exit, Moment, ending, links
from accel_ddp.ranks.reporting import warn_on_main
from accel_ddp.records.eval_tables import Table
from accel_ddp.saving import restart_record
from accel_ddp.saving.checkpoints import Checkpoints
from accel_ddp.saving.resume import last_steps
from accel_ddp.saving.run_folder import update_options
from accel_ddp.sources.data import mixture_weights
from accel_ddp.speed.attach import Speed, attach
from accel_ddp.training import first_step
from accel_ddp.training.balance import Balance
from accel_ddp.training.divergence import NonfiniteSteps, ParameterCheck, report_untrained, weights_kept
from accel_ddp.training.ema import Ema
from accel_ddp.training.equal_ranks import require_equal_ranks
from accel_ddp.training.evaluation import TableReport, broadcast_metrics
from accel_ddp.training.hook import Breakdown, Hook
from accel_ddp.training.local_steps import Workers
from accel_ddp.training.losses import LossSum, WholeBatch
from accel_ddp.training.optim import lr_at, set_lr
from accel_ddp.training.padding_check import require_independence
from accel_ddp.training.run_facts import compilations_published, describe_run
from accel_ddp.training.sharding import prepare, reshard
from accel_ddp.training.step_numbers import LateReader, RankSample, Throughput
from accel_ddp.training.step_times import measure_steps, sync_at_broadcast
from accel_ddp.training.stream import TrainBatches
from accel_ddp.training.system_sample import SystemSample
from accel_ddp.training.update import Carry, Count, UpdateStats, update


class RunOutcome(NamedTuple):
    """How a run ended."""

    metrics: dict[str, float]  # of the last evaluation, or of the step `best`
    step: int
    unsaved: str = ""  # why the last state is not on the disk; the process then ends with exit code 74
    best: int | None = None  # with --keep_best, the step of the best checkpoint; None: the last step is the best one


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
) -> RunOutcome:
    """Train for `cfg.steps` or `cfg.epochs`, from the checkpoint of `cfg.resume` if there is one. Return metrics and the last step.

    The update of step `s` depends on `s`, the seed and the weights only. A restart does not change it, and the number of ranks
    changes it by rounding at most. To stop the run on request, every rank raises `Stopped` after the same checkpoint.

    - `loss_sum(model, batch)` returns the loss summed over the items of a micro-batch, and `count(batch)` their number.
    - `evaluate(model)` returns metrics. With `cfg.ema_decay` it gets the averaged weights, and so does the model at the end.
    - `tables()` returns the tables of the last evaluation. Only rank 0 calls it, and an error in it does not stop the run.
    - `files` are stored in every checkpoint, for its export.
    - `speedups=None` computes the model as it is.
    """
    run = TrainingRun(accelerator, cfg, model, optimizer, train, loss_sum, count, evaluate, hooks, files, speedups)  # restores
    run.start(tables)
    with run.session():  # signals, measurements and the profiler, closed however the run ends
        run.evaluate_before_training()
        run.warm_up()
        for step in run.remaining_steps():  # until the last step, an agreed stop, or a hook that ends the run
            lr = set_lr(run.optimizer, lr_at(step, cfg, run.total_steps))
            stats = []
            for seed in run.workers.of_step(step):  # one, unless --sync_every gives this rank several workers
                with phase(DATA):
                    batches = next(run.step_batches)
                stats.append(update(
                    accelerator, cfg, run.model, run.optimizer, batches, loss_sum, count, seed=seed, carry=run.carry(batches)
                ))  # fmt: skip
            run.complete_step(lr, stats)  # synchronization of workers, numbers, hooks, comparison of weights, votes to stop
            if run.saves_now():
                run.save()  # before the evaluation, which may fail
            if run.evaluates_now():
                run.evaluate()
            run.report_saves()
        return run.finish()


class TrainingRun:
    """What surrounds the updates of a run. Every rank has the same values and calls the same methods."""

    def __init__(
        self,
        accelerator: Accelerator,
        cfg: TrainConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train: TrainBatches,
        loss_sum: LossSum | WholeBatch,
        count: Count,
        evaluate: Callable[[nn.Module], dict[str, float]] | None,
        hooks: Sequence[Hook],
        files: dict[str, bytes] | None,
        speedups: Callable[..., Speed] | None,
    ):
        """Check the options, wrap model and optimizer, and restore the checkpoint from which the run continues."""
        if evaluate is None and (cfg.keep_best or cfg.early_stopping_patience):
            name = "keep_best" if cfg.keep_best else "early_stopping_patience"
            raise UserError(f"--{name}: this recipe has no evaluation. Leave --{name} out, or pass `evaluate` to `fit`.")
        if not cfg.evaluate_only:
            require_equal_ranks(model, train, cfg)
            first_step.require_optimized(model, optimizer)
        self.accelerator, self.cfg, self.train, self.evaluate_model = accelerator, cfg, train, evaluate
        self.num_items = len(train)
        if isinstance(cfg, RecipeConfig) and mixture_weights(cfg) and not train.mixture:
            raise UserError(f"--train_file {' '.join(cfg.train_file)}: this recipe does not mix datasets. Leave the weights out.")
        uneven = [
            f"--{name} {getattr(cfg, name)}" for name in ("micro_batch_tokens", "global_batch_tokens") if getattr(cfg, name)
        ]
        uneven += [f"--balance {cfg.balance}"] if cfg.balance != "off" else []
        if isinstance(loss_sum, WholeBatch) and uneven:
            raise UserError(
                f"{uneven[0]}: each item is compared with the items of all ranks, which must have equal numbers. Leave it out."
            )
        self.total_steps, self.epoch_size, self.mean_items = train.total_steps(cfg), train.epoch_size(cfg), train.mean_items(cfg)
        check_end(cfg.profile, self.total_steps)
        with weights_kept(model, "a forward pass before training") as self.loaded:
            if not cfg.evaluate_only:
                require_independence(accelerator, cfg, model, train, loss_sum)
            self.speed = speedups(accelerator, cfg, model, train, loss_sum, self.total_steps) if speedups else None
        self.workers = Workers(cfg, self.total_steps)
        ending.stop.when = (
            f"when the workers synchronize (--sync_every {cfg.sync_every})" if cfg.sync_every else "after this step"
        )
        self.model, self.optimizer = prepare(accelerator, cfg, model, optimizer)
        first_step.report_unused(accelerator.unwrap_model(self.model), self.optimizer)
        momentum = self.workers.attach(accelerator.unwrap_model(self.model), self.optimizer)
        self.check = ParameterCheck(accelerator, cfg, self.model)
        self.ema = Ema(accelerator.unwrap_model(self.model), cfg.ema_decay)
        identity = train.identity | ({"tokens": self.epoch_size} if cfg.global_batch_tokens else {})
        facts = {"data": identity, "total_steps": self.total_steps, "files": files, "averages": self.ema.averages}
        facts |= {"momentum": momentum, "states": self.workers.states, "before_save": self.check.require}
        self.saved = Checkpoints(accelerator, cfg, self.model, self.optimizer, **facts)
        self.saved.more = lambda: {"stream": train.state, **self.balance.state}
        self.step = self.saved.restore(begins_training=False)  # updates done; the training begins after the warm-up
        self.workers.begin()
        train.state = self.saved.resumed.get("stream", "")
        if not cfg.evaluate_only:
            if self.speed:
                self.speed.choose_micro_batch_size(self.model, self.optimizer)
                self.speed.choose_compilation(self.step)
            text, warnings = train.describe(self.total_steps, cfg)
            print_on_main(text)
            for warning in warnings:
                warn_on_main(warning, "WARNING")
            if self.step < self.total_steps:
                _print_new_schedule(cfg, self.saved, self.step, self.total_steps)
                with self.speed.plain_layers() if self.speed else contextlib.nullcontext():
                    first_step.require_sums(first_step.Trial(accelerator, cfg, self.model, train, loss_sum, count), cfg)
        needs_equal = isinstance(loss_sum, WholeBatch) or cfg.sync_every > 0 or cfg.sync_batchnorm
        self.balance = Balance(accelerator, cfg, self.saved.resumed, needs_equal)
        train.shares_at = self.balance.at
        self.step_batches = train.starting_at(self.step, accelerator, cfg)
        self.reader = LateReader(accelerator.device, accelerator.num_processes)
        self.times = measure_steps(accelerator.device, self.step)
        self.ended_at: dict[int, float] = {}  # the training time at the end of steps whose numbers are not read yet
        self.pace = Throughput(self.mean_items, self.speed.peak_flops if self.speed else None)
        self.nonfinite = NonfiniteSteps(accelerator, cfg, self.saved)
        self.hooks: list[Hook] = [self.nonfinite, self.balance, *hooks, Breakdown(accelerator.device)]
        self.first, self.keeps_weights = self.step, False  # whether an evaluation after a step has left the weights as they are
        self.is_done = False  # a hook has ended the run
        self.is_stopping = 0 < cfg.stop_after <= self.step  # the run was asked to stop
        self.metrics: dict[str, float] = {}  # of the last evaluation
        self.best: int | None = None  # at the end: the step with the best checkpoint, if it is not the last one

    def start(self, tables: Callable[[], dict[str, Table]] | None) -> None:
        """Store the options that were chosen for this model, and describe the run to the hooks, which may end it."""
        if self.accelerator.is_main_process:
            update_options(self.cfg)
        facts = describe_run(self.accelerator, self.cfg, self.num_items, self.mean_items, self.model)
        self.notify("on_describe", facts)
        ends = self.notify("on_start", self.step, self.total_steps, self.saved.evaluations)
        self.is_done = self._any_rank(ends) or bool(self.cfg.evaluate_only)
        if tables:
            self.hooks.append(TableReport(tables, self.notify))
        facts_of_model = facts.get("model", {}) | (self.speed.describe() if self.speed else {})
        self.recorder = start_recorder(self, facts_of_model)
        self.hooks += [self.recorder] if self.recorder else []
        self.model.train(self.cfg.dropout)
        phases.HERE.advance(self.step)
        phases.HERE.report_timing(self.times.timing)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Open what lasts as long as the training, and close it however the run ends."""
        with contextlib.ExitStack() as self.stack:
            self.stack.callback(self.hooks.clear)  # some refer to the run, which would keep the model in memory
            if self.speed:
                self.stack.callback(self.speed.close)
            self.stack.enter_context(signals.can_save(self.cfg))
            self.stack.enter_context(phase(LOAD))
            self.system = self.stack.enter_context(SystemSample(self.accelerator.device))
            self.stack.enter_context(phases.HERE.listening(self.times))
            if self.recorder:
                self.stack.enter_context(self.recorder)
            sync_at_broadcast(self.model)
            ending.early_exit = None
            try:
                yield
            except SystemExit as exit:
                ending.early_exit = exit
                raise

    def evaluate_before_training(self) -> None:
        """Evaluate before the first step, or repeat an evaluation in which the run was killed after its save."""
        if self.evaluates_now() and self.step not in self.saved.evaluations:
            self._run_evaluation()

    def warm_up(self) -> None:
        """Compile the layers if that is due, and report an automatic restart."""
        if not self._continues():
            return
        self._compile_if_due()
        if restart := restart_record.begin_training(self.cfg, self.step, self.saved.resumed_from):
            self.notify("on_restart", self.step, restart)
        self.stack.enter_context(compilations_published())

    def _compile_if_due(self) -> None:
        if self.speed and self.speed.is_due(self.step):
            with phase(LOAD), phase(COMPILE):  # the time belongs to no step
                seconds = self.speed.compile_layers()
            self.notify("on_warm_up", self.step, seconds)
            if self.accelerator.is_main_process:
                update_options(self.cfg)  # if compiling has failed, a resume must not try again

    # ---- a step

    def remaining_steps(self) -> Iterator[int]:
        """Yield the number of updates done, until the run ends."""
        phases.enter(OTHER)
        while self._continues():
            self._compile_if_due()
            self.notify("on_step_begin", self.step + 1)
            yield self.step

    def _continues(self) -> bool:
        return self.step < self.total_steps and not self.is_done and not self.is_stopping

    def carry(self, batches: Sequence[Any]) -> Carry:
        """Return this rank's vote to stop, its work, and its sample in steps that are logged. One vote stops all ranks."""
        tokens, flops = self.speed.work_of(batches) if self.speed else (0.0, 0.0)
        return Carry(signals.is_stop_requested(), tokens, flops, () if self.cfg.sync_every else self._sample(self.step + 1))

    def _sample(self, step: int) -> Sequence[float]:
        is_logged = step % self.cfg.log_every == 0 or step == self.total_steps
        return RankSample.of(self.times.timing, self.system.latest) if is_logged else ()

    def complete_step(self, lr: float, stats: list[UpdateStats]) -> None:
        """Count the step, pass the numbers of completed steps to the hooks, and find out whether all ranks stop.

        With local steps, the ranks know the numbers and the votes of all only when they synchronize, and stop only then.
        """
        self.step += 1
        known, before = self.workers.complete(self.step, lr, stats, self._sample(self.step)), self.workers.before(self.step)
        self.ended_at[self.step] = phases.HERE.training_seconds()
        phases.HERE.report_timing(self.times.end_step(self.step))
        if known:
            self.ema.update(self.step, *(stats for _, _, stats in known))
        with phase(DEVICE):
            for numbers in known:
                self.reader.push(*numbers)
                self.read_numbers()
            if known:
                self.check.begin(self.step, self._saves_after(self.step), before)
                self.read_numbers(wait_for_all=bool(self.cfg.sync_every) or self.pauses_after(self.step))
        with phase(CHECK):
            self.check.read(self.step)  # after the numbers: a loss that is not finite is reported as such
        self.notify("on_step_end", self.step)
        self.is_stopping = self.is_stopping or self._is_stop(self.step)
        if self.is_stopping:
            ending.stop.is_agreed = True  # from here on no time limit ends the save
            with phase(DEVICE):
                self.read_numbers(wait_for_all=True)

    def read_numbers(self, wait_for_all: bool = False) -> None:
        """Pass the numbers of completed updates to the hooks.

        On a GPU they arrive one step late, so the host does not wait, and a vote to stop takes effect one step later.
        """
        for numbers in self.reader.pop(wait_for_all):
            # The sum of votes is the same on every rank, so all stop after the same step.
            self.is_stopping = self.is_stopping or numbers.votes > 0
            numbers = numbers._replace(means=numbers.means | self.train.counts(numbers.step, self.cfg))
            self.notify("on_update", numbers, self.pace.after(numbers, self.ended_at.pop(numbers.step)))

    def notify(
        self, event: str, *values: Any, guard: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    ) -> list[Any]:
        """Call a method of all hooks that define it, and return the results. This is the only place that calls hooks."""
        default = getattr(Hook, event)
        # Before and after the training, where trackers connect and upload, a hook may take as long as it needs.
        place = contextlib.nullcontext() if phases.HERE.phase in UNLIMITED else phase(HOOKS)
        found = []
        with place:
            for hook in self.hooks:
                method = getattr(hook, event, default)
                if getattr(method, "__func__", method) is not default:
                    with guard():
                        found.append(method(*values))
        return found

    def _any_rank(self, ends: list[bool | None]) -> bool:
        """Return whether a hook of any rank stops the run. This is a collective, because ranks may have different hooks."""
        return any(gather_everywhere(any(ends)))

    # ---- checkpoints and evaluations

    def saves_now(self) -> bool:
        return self.is_stopping or self._saves_after(self.step)

    def evaluates_now(self) -> bool:
        return not self.is_stopping and self._evaluates_after(self.step)

    def pauses_after(self, step: int) -> bool:
        """Return whether a checkpoint or an evaluation follows a step."""
        return self._saves_after(step) or self._evaluates_after(step)

    def _saves_after(self, step: int) -> bool:
        return step == self.total_steps or self._is_stop(step) or self._is_due(step, self.cfg.save_every)

    def _is_stop(self, step: int) -> bool:
        """Return whether `--stop_after` means this step, or the first one at or after it in which workers synchronize."""
        return self.workers.syncs(step) and self.workers.before(step) < self.cfg.stop_after <= step

    def _evaluates_after(self, step: int) -> bool:
        if step == 0:
            return bool(self.evaluate_model) and self.cfg.eval_first
        return bool(self.evaluate_model) and (step == self.total_steps or self._is_due(step, self.cfg.eval_every))

    def _is_due(self, step: int, every: int) -> bool:
        """Return whether a step is the first one, of those in which workers synchronize, at or after a multiple of `every`."""
        passed = lambda steps: steps // every if every else steps * self.cfg.step_size // self.epoch_size
        return self.workers.syncs(step) and passed(step) > passed(self.workers.before(step))

    def save(self) -> None:
        self.saved.save(self.step, is_last=not self._continues())

    def evaluate(self) -> None:
        """Evaluate, and save again if that stops the run."""
        self._run_evaluation()
        if self.is_done or self.is_stopping:
            self.save()

    def _run_evaluation(self) -> None:
        with phase(METRICS):
            try:
                module, what = self.accelerator.unwrap_model(self.model), f"the evaluation at step {self.step}"
                with self.ema.applied(), contextlib.nullcontext() if self.keeps_weights else weights_kept(module, what):
                    metrics = self.evaluate_model(self.model)
                    reshard(self.model)  # an `evaluate` function of a user may have left weights gathered
            except EvaluationStopped:
                self.is_stopping = True
                ending.stop.is_agreed = True
                return
            self.keeps_weights = self.step > self.first
            # Ranks that compared different values would disagree on when to stop. A user's `evaluate` may return them.
            self.metrics = broadcast_metrics(metrics)
            self.saved.evaluated(self.step, self.metrics)
            ends = self._any_rank(self.notify("on_evaluate", self.step, self.metrics))
            self.is_done = self.is_done or ends

    def report_saves(self) -> None:
        for step, path in self.saved.take_committed():
            self.notify("on_save", step, path)

    # ---- the end

    def finish(self) -> RunOutcome:
        """Complete the last save, call the hooks for the last time, and return the outcome or raise `Stopped`."""
        phases.enter(END)
        if 0 < self.step == self.saved.skipped_in_a_row and not self.is_stopping:  # a run that is shorter than the limit
            self.nonfinite.refuse(self.step)
        if not self.is_stopping and self.evaluate_model and not self.metrics:  # resumed after the last step
            self._run_evaluation()
        if self.is_stopping and self.step and not self.cfg.evaluate_only:  # also if this process has done no step
            self.saved.save(self.step, is_last=True)
        unsaved = self.saved.close()
        if self.saved.metric and not self.is_stopping:  # only the main rank's disk is sure to have the checkpoint
            best = broadcast_object(self.saved.best())
            self.best = best if best != self.step else None
        self.report_saves()
        reason = signals.gather_reason() if self.is_stopping else ""
        self._report_end(reason)
        if self.is_stopping or not ending.stop.pid:  # a program without `run` continues after `fit`
            ending.run(Moment.TRACKERS, Exit.STOPPED if self.is_stopping else Exit.FINISHED)
        if self.is_stopping:
            broadcast_object(None, what="close its trackers")  # the launcher ends all ranks as soon as the first one is gone
            signals.remove_stop_file(self.cfg.output_dir)
            raise Stopped(self._stop_message(reason, unsaved))
        if unsaved:
            unsaved = f"the run is complete, but {unsaved}."
        else:
            self._print_best()
        ending.unsaved = unsaved
        self.ema.apply()
        if not self.cfg.evaluate_only:
            report_untrained(self.accelerator.unwrap_model(self.model), self.loaded, self.step)
        metrics = self.metrics if self.best is None else self.saved.evaluations[self.best]
        return RunOutcome(metrics, self.step, unsaved, self.best)

    def _report_end(self, reason: str) -> None:
        """Pass the summary of the run to the hooks. `reason` is why it was stopped."""
        goodput = restart_record.goodput(self.cfg)
        if goodput is not None:
            print(f"goodput: {goodput:.1%} of the time since the first attempt began was spent on steps that count.", flush=True)
        # The metrics of the weights that are exported, not those of an earlier evaluation.
        summary: dict[str, Any] = dict(self.saved.evaluations.get(self.step if self.best is None else self.best, {}))
        summary |= {"best_step": self.best} if self.best is not None else {}
        for fields in self.notify("summarize"):
            summary |= fields
        summary |= {"stopped": reason} if reason else {}
        summary |= {"goodput": goodput} if goodput is not None else {}
        self.notify("on_end", self.step, summary)

    def _print_best(self) -> None:
        saved, metric = self.saved, self.saved.metric
        if not metric:
            return
        if not saved.ranking:
            print_on_main(f"--keep_best: there is no best checkpoint, because {metric.name} was NaN in every evaluation.")
            return
        first, best = saved.ranking[0], saved.best()
        value = f"{saved.evaluations[first][metric.name]:.4f}"
        if best == first:
            print_on_main(f"best {metric.name}: {value} at step {best}, in {self.cfg.output_dir}/step_{best:08d}")
        else:  # its save has failed, it was deleted, or it is in the folder from which --resume continued
            where = f"of which {self.cfg.output_dir} has no checkpoint. Step {self.step if best is None else best} is exported."
            print_on_main(f"--keep_best: the best {metric.name} was {value} at step {first}, {where}")

    def _stop_message(self, reason: str, unsaved: str) -> Failure:
        if self.cfg.evaluate_only:
            return Failure("stopped", f"requested by {reason}. The evaluation has no result.")
        if not self.step:
            kind = "died" if reason.startswith(LAUNCHER_DIED) else "stopped"
            return Failure(kind, f"requested by {reason} before the first step. There is nothing to save.")
        if unsaved:
            return Failure(
                "unsaved", f"a stop was requested by {reason}, but {unsaved}. --resume continues from an older checkpoint."
            )
        text = f"{reason}. Step {self.step} of {self.total_steps} is saved. To continue, {links.by_hand}"
        is_orphan = reason.startswith(LAUNCHER_DIED)
        return Failure("died", text, step=self.step) if is_orphan else Failure("stopped", f"requested by {text}")


def _print_new_schedule(cfg: TrainConfig, saved: Checkpoints, step: int, total_steps: int) -> None:
    """Print the old and the new learning rate of the next step, if the resumed run has another last step or other options."""
    if not saved.resumed:
        return
    names = ("lr", "lr_schedule", "warmup_steps", "warmup_ratio", "min_lr_ratio", "decay_ratio")
    stored = saved.resumed.get("config", {})
    then = {name: stored.get(name, getattr(type(cfg), name)) for name in names}  # an older version has not stored all of them
    total_before = last_steps(cfg, saved.resumed)[1]
    now, before = lr_at(step, cfg, total_steps), lr_at(step, dataclasses.replace(cfg, **then), total_before)
    if (total_steps, now) == (total_before, before):
        return
    text = f"The run now has {total_steps} steps instead of {total_before}. " if total_steps != total_before else ""
    if now == before:
        text += f"The learning rate of step {step + 1} stays {now:.3g}."
    else:
        text += (
            f"The learning rate of step {step + 1} is {now:.3g} instead of {before:.3g}. The schedule now "
            f"assumes {total_steps} steps. Earlier steps are unchanged."
        )
    print_on_main(text)
