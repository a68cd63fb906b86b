"""The assembly of a run: `fit` builds what surrounds `engine.fit` (model, speed, checkpoints, averages, hooks), trains, and ends it.

`engine/fit.py` is the loop, `engine/step.py` does one step, and `training/stream.py` chooses its items. The phases that these modules
enter (`phases.py`) show which phase a rank is in, and their listeners measure how long each part of a step takes: host seconds on a
CPU, CUDA events on a GPU (`engine/step_times.py`). Start from `recipes/own_loop.py` if you need another loop.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp import phases
from accel_ddp.config.option_values import check_end
from accel_ddp.config.train_config import RecipeConfig, TrainConfig
from accel_ddp.engine import fit as loop
from accel_ddp.engine.fit import Run, Schedule
from accel_ddp.engine.hook import Hook
from accel_ddp.engine.local_steps import Workers
from accel_ddp.engine.step_times import sync_at_broadcast
from accel_ddp.engine.terms import Terms, terms_of
from accel_ddp.errors import UserError
from accel_ddp.observe.recorder import Recorder, start_recorder
from accel_ddp.phases import LOAD, phase
from accel_ddp.ranks import signals
from accel_ddp.ranks.agreement import print_on_main
from accel_ddp.ranks.process import ending
from accel_ddp.ranks.reporting import warn_on_main
from accel_ddp.ranks.team import Team
from accel_ddp.saving.checkpoints import Checkpoints
from accel_ddp.saving.resume import last_steps
from accel_ddp.saving.run_folder import update_options
from accel_ddp.sources.data import mixture_weights
from accel_ddp.speed.attach import Speed, attach
from accel_ddp.training import first_step
from accel_ddp.training.balance import Balance
from accel_ddp.training.breakdown import Breakdown
from accel_ddp.training.divergence import ParameterCheck, report_untrained, weights_kept
from accel_ddp.training.ema import Ema
from accel_ddp.training.equal_ranks import require_equal_ranks
from accel_ddp.training.evaluation import EvalBatches, TableReport
from accel_ddp.training.optim import freeze, lr_at, set_lr
from accel_ddp.training.padding_check import require_independence
from accel_ddp.training.run_end import RunOutcome, finish
from accel_ddp.training.run_events import RunEvents
from accel_ddp.training.run_facts import compilations_published, describe_run
from accel_ddp.training.sharding import plan_of, prepare
from accel_ddp.training.stream import TrainBatches
from accel_ddp.training.system_sample import SystemSample


def fit(
    accelerator: Accelerator,
    cfg: TrainConfig,
    *,
    task: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: TrainBatches,
    test: EvalBatches | Callable[[nn.Module], dict[str, float]] | None = None,
    hooks: Sequence[Hook] = (),
    files: dict[str, bytes] | None = None,
    speedups: Callable[..., Speed] | None = attach,
) -> RunOutcome:
    """Train for `cfg.steps` or `cfg.epochs`, from the checkpoint of `cfg.resume` if there is one. Return metrics and the last step.

    The update of step `s` depends on `s`, the seed and the weights only. A restart does not change it, and the number of ranks
    changes it by rounding at most. To stop the run on request, every rank raises `Stopped` after the same checkpoint.

    - `task` has the method `terms(model, batch, team)`, which returns the loss of each item; see `Task`. Its method `tables()`, if it
      has one, returns the tables of the last evaluation. Only rank 0 calls it, and an error in it does not stop the run.
    - `test` are the items to evaluate with the task, or a function that gets the model and returns metrics. An evaluation gets the
      averages of `cfg.ema_decay`, or those of an optimizer with `eval` and `train`, and so does the model at the end.
    - `files` are stored in every checkpoint, for its export.
    - `speedups=None` computes the model as it is.
    """
    alone = Terms(model, task)
    _check_options(cfg, train, alone, test is not None)
    if not cfg.evaluate_only:
        freeze(model, getattr(cfg, "freeze", ()))  # also if the optimizer is the user's own
        require_equal_ranks(model, train, cfg, accelerator.num_processes)
        first_step.require_optimized(model, optimizer)
    total_steps = train.total_steps(cfg)
    check_end(cfg.profile, total_steps)
    with weights_kept(model, "a forward pass before training") as loaded:
        if not cfg.evaluate_only:
            require_independence(accelerator, cfg, alone, train)
        speed = speedups(accelerator, cfg, alone, train, total_steps) if speedups else None
    every = 1 if cfg.evaluate_only else max(1, cfg.sync_every)
    schedule = Schedule(cfg, total_steps, train.epoch_size(cfg), test is not None, every)
    workers = Workers(cfg, schedule, Team.of(accelerator))
    ending.stop.when = f"when the workers synchronize (--sync_every {cfg.sync_every})" if cfg.sync_every else "after this step"
    terms, optimizer = prepare(accelerator, cfg, task, model, optimizer, workers.team)
    first_step.report_unused(model, optimizer)
    momentum = workers.attach(model, optimizer)
    run = Run(accelerator, cfg, terms, optimizer, schedule, functools.partial(_set_lr, optimizer, schedule))
    check, ema = ParameterCheck(accelerator, cfg, model), Ema(model, cfg.ema_decay, optimizer, workers.total)
    facts = {"files": files, "averages": ema.current, "momentum": momentum, "states": workers.states, "team": workers.team}
    saved = _restore(run, train, check, **facts)
    workers.begin()
    if not cfg.evaluate_only:
        _choose_and_describe(run, train, saved, speed)
    needs_equal = alone.is_whole or cfg.sync_every > 0 or cfg.sync_batchnorm or plan_of(accelerator) is not None
    balance = Balance(accelerator, cfg, saved.resumed, needs_equal)
    train.shares_at = balance.at
    saved.more = lambda: {"stream": train.state, **balance.state}
    batches = train.starting_at(run.step, accelerator, cfg, workers.team)
    run.is_stopping = 0 < cfg.stop_after <= run.step
    listeners = [balance, *hooks, Breakdown(accelerator.device, accelerator.num_processes)]
    events = RunEvents(run, train, saved, check, ema, speed, test, listeners)
    recorder = _start(events, task)
    with _session(events, recorder) as stack:  # signals, measurements and the profiler, closed however the run ends
        if cfg.evaluate_only:
            return finish(events)
        events.evaluate_before_training()
        if run.continues:
            events.warm_up()
            stack.enter_context(compilations_published())
        loop.fit(run, batches, events, workers.take_step if cfg.sync_every else loop.one_step)
        outcome = finish(events)
        report_untrained(model, loaded, run.step)
        return outcome


def _check_options(cfg: TrainConfig, train: TrainBatches, terms: Terms, has_evaluation: bool) -> None:
    if not has_evaluation and (cfg.keep_best or cfg.early_stopping_patience):
        name = "keep_best" if cfg.keep_best else "early_stopping_patience"
        raise UserError(f"--{name}: this recipe has no evaluation. Leave --{name} out, or pass `test` to `fit`.")
    if isinstance(cfg, RecipeConfig) and mixture_weights(cfg) and not train.mixture:
        raise UserError(f"--train_file {' '.join(cfg.train_file)}: this recipe does not mix datasets. Leave the weights out.")
    uneven = [f"--{name} {getattr(cfg, name)}" for name in ("micro_batch_tokens", "global_batch_tokens") if getattr(cfg, name)]
    uneven += [f"--balance {cfg.balance}"] if cfg.balance != "off" else []
    if terms.is_whole and uneven:
        reason = "each item is compared with the items of all ranks, which must have equal numbers. Leave it out"
        raise UserError(f"{uneven[0]}: {reason}.")


def _restore(run: Run, train: TrainBatches, check: ParameterCheck, **facts: Any) -> Checkpoints:
    """Return the checkpoints of the run, and load the one from which it continues. `facts`: what a checkpoint contains besides."""
    cfg, schedule = run.cfg, run.schedule
    identity = train.identity | ({"tokens": schedule.epoch_size} if cfg.global_batch_tokens else {})
    facts |= {"data": identity, "total_steps": schedule.total_steps, "before_save": check.require}
    saved = Checkpoints(run.accelerator, cfg, run.model, run.optimizer, **facts)
    run.step = saved.restore(begins_training=False)  # the training begins after the warm-up
    train.state = saved.resumed.get("stream", "")
    return saved


def _choose_and_describe(run: Run, train: TrainBatches, saved: Checkpoints, speed: Speed | None) -> None:
    """Choose what `auto` options leave open, print how long the run is, and check the loss of its first items."""
    if speed:
        speed.choose_micro_batch_size(run.optimizer, len(terms_of(run.terms).team.workers))
        speed.choose_compilation(run.step)
    text, warnings = train.describe(run.schedule.total_steps, run.cfg)
    print_on_main(text)
    for warning in warnings:
        warn_on_main(warning, "WARNING")
    if run.step < run.schedule.total_steps:
        _print_new_schedule(run.cfg, saved, run.step, run.schedule.total_steps)
        with speed.plain_layers() if speed else contextlib.nullcontext():
            first_step.require_sums(first_step.Trial(run.accelerator, run.cfg, run.terms, train), run.cfg)


def _start(events: RunEvents, task: Any) -> Recorder | None:
    """Describe the run to the hooks, which may end it. Return what records the steps of `--profile`."""
    run, cfg, train, hooks = events.run, events.cfg, events.train, events.hooks
    if run.accelerator.is_main_process:
        update_options(cfg)
    facts = describe_run(run.accelerator, cfg, len(train), train.mean_items(cfg), run.model, getattr(task, "eval_rows", {}))
    hooks.notify("on_describe", facts)
    events.end_if(hooks.notify("on_start", run.step, run.schedule.total_steps, events.saved.evaluations))
    if getattr(task, "tables", None) and run.accelerator.is_main_process and not cfg.evaluate_only:
        hooks.append(TableReport(task.tables, hooks.notify))
    facts_of_model = facts.get("model", {}) | (events.speed.describe() if events.speed else {})
    recorder = start_recorder(run, events.times, events.read_numbers, facts_of_model)
    hooks += [recorder] if recorder else []
    run.terms.train(cfg.dropout)
    phases.HERE.advance(run.step)
    phases.HERE.report_timing(events.times.timing)
    return recorder


@contextlib.contextmanager
def _session(events: RunEvents, recorder: Recorder | None) -> Iterator[contextlib.ExitStack]:
    """Open what lasts as long as the training, and close it however the run ends."""
    run = events.run
    with contextlib.ExitStack() as stack:
        stack.callback(events.hooks.clear)  # some refer to the run, which would keep the model in memory
        if events.speed:
            stack.callback(events.speed.close)
        stack.enter_context(signals.can_save(run.cfg))
        stack.enter_context(phase(LOAD))
        events.system = stack.enter_context(SystemSample(run.accelerator.device))
        stack.enter_context(phases.HERE.listening(events.times))
        if recorder:
            stack.enter_context(recorder)
        sync_at_broadcast(run.terms)
        ending.early_exit = None
        try:
            yield stack
        except SystemExit as exit:
            ending.early_exit = exit
            raise


def _set_lr(optimizer: torch.optim.Optimizer, schedule: Schedule, step: int) -> float:
    return set_lr(optimizer, lr_at(step, schedule.cfg, schedule.total_steps))


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
