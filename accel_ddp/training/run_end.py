"""The end of a run: the last save, the summary, the message of a stop, and the outcome."""

from typing import Any, NamedTuple

from accel_ddp import phases
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.phases import END
from accel_ddp.ranks import signals
from accel_ddp.ranks.agreement import broadcast_object, print_on_main
from accel_ddp.ranks.failures import LAUNCHER_DIED, Failure, Stopped
from accel_ddp.ranks.process import Exit, Moment, ending, links
from accel_ddp.saving import restart_record
from accel_ddp.saving.checkpoints import Checkpoints
from accel_ddp.training.run_events import RunEvents


class RunOutcome(NamedTuple):
    """How a run ended."""

    metrics: dict[str, float]  # of the last evaluation, or of the step `best`
    step: int
    unsaved: str = ""  # why the last state is not on the disk; the process then ends with exit code 74
    best: int | None = None  # with --keep_best, the step of the best checkpoint; None: the last step is the best one


def finish(events: RunEvents) -> RunOutcome:
    """Complete the last save, call the hooks for the last time, and return the outcome or raise `Stopped`."""
    run, cfg, saved = events.run, events.cfg, events.saved
    phases.enter(END)
    if 0 < run.step == saved.skipped_in_a_row and not run.is_stopping:  # a run that is shorter than the limit
        events.nonfinite.refuse(run.step)
    if not run.is_stopping and events.test and not events.metrics:  # resumed after the last step
        events.evaluate_once()
    if run.is_stopping and run.step and not cfg.evaluate_only:  # also if this process has done no step
        saved.save(run.step, is_last=True)
    unsaved, best = saved.close(), None
    if saved.metric and not run.is_stopping:  # only the main rank's disk is sure to have the checkpoint
        best = broadcast_object(saved.best())
        best = best if best != run.step else None
    events.report_saves()
    reason = signals.gather_reason() if run.is_stopping else ""
    _report_end(events, reason, best)
    if run.is_stopping or not ending.stop.pid:  # a program without `run` continues after `fit`
        ending.run(Moment.TRACKERS, Exit.STOPPED if run.is_stopping else Exit.FINISHED)
    if run.is_stopping:
        broadcast_object(None, what="close its trackers")  # the launcher ends all ranks as soon as the first one is gone
        signals.remove_stop_file(cfg.output_dir)
        raise Stopped(_stop_message(cfg, run.step, run.schedule.total_steps, reason, unsaved))
    if unsaved:
        unsaved = f"the run is complete, but {unsaved}."
    else:
        _print_best(cfg, saved, run.step)
    ending.unsaved = unsaved
    events.ema.apply()
    return RunOutcome(events.metrics if best is None else saved.evaluations[best], run.step, unsaved, best)


def _report_end(events: RunEvents, reason: str, best: int | None) -> None:
    """Pass the summary of the run to the hooks. `reason` is why it was stopped."""
    goodput, step = restart_record.goodput(events.cfg), events.run.step
    if goodput is not None:
        print(f"goodput: {goodput:.1%} of the time since the first attempt began was spent on steps that count.", flush=True)
    # The metrics of the weights that are exported, not those of an earlier evaluation.
    summary: dict[str, Any] = dict(events.saved.evaluations.get(step if best is None else best, {}))
    summary |= {"best_step": best} if best is not None else {}
    for fields in events.hooks.notify("summarize"):
        summary |= fields
    summary |= {"stopped": reason} if reason else {}
    summary |= {"goodput": goodput} if goodput is not None else {}
    events.hooks.notify("on_end", step, summary)


def _print_best(cfg: TrainConfig, saved: Checkpoints, step: int) -> None:
    metric = saved.metric
    if not metric:
        return
    if not saved.ranking:
        print_on_main(f"--keep_best: there is no best checkpoint, because {metric.name} was NaN in every evaluation.")
        return
    first, best = saved.ranking[0], saved.best()
    value = f"{saved.evaluations[first][metric.name]:.4f}"
    if best == first:
        print_on_main(f"best {metric.name}: {value} at step {best}, in {cfg.output_dir}/step_{best:08d}")
    else:  # its save has failed, it was deleted, or it is in the folder from which --resume continued
        where = f"of which {cfg.output_dir} has no checkpoint. Step {step if best is None else best} is exported."
        print_on_main(f"--keep_best: the best {metric.name} was {value} at step {first}, {where}")


def _stop_message(cfg: TrainConfig, step: int, total_steps: int, reason: str, unsaved: str) -> Failure:
    is_orphan = reason.startswith(LAUNCHER_DIED)
    if cfg.evaluate_only:
        return Failure("stopped", f"requested by {reason}. The evaluation has no result.")
    if not step:
        kind = "died" if is_orphan else "stopped"
        return Failure(kind, f"requested by {reason} before the first step. There is nothing to save.")
    if unsaved:
        return Failure(
            "unsaved", f"a stop was requested by {reason}, but {unsaved}. --resume continues from an older checkpoint."
        )
    text = f"{reason}. Step {step} of {total_steps} is saved. To continue, {links.by_hand}"
    return Failure("died", text, step=step) if is_orphan else Failure("stopped", f"requested by {text}")
