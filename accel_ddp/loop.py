"""The schedule of a run. There is one, and it is meant to be read, and copied when you need another."""

import math
import time
from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp.ranks import signals, world
from accel_ddp.saving import checkpoints
from accel_ddp.speed import attach, autobatch, flops
from accel_ddp.config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.training.hooks import Hook, Pace
from accel_ddp.training.optim import lr_at, set_lr
from accel_ddp.seeds import mixed
from accel_ddp.training.stream import TrainBatches
from accel_ddp.training.update import Count, LateReader, LossSum, Numbers, update


def fit(
    accelerator: Accelerator,
    cfg: TrainConfig,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: TrainBatches,
    loss_sum: LossSum,
    count: Count,
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    hooks: Sequence[Hook] = (),
    files: dict[str, bytes] | None = None,
) -> dict[str, float]:
    """Train for `cfg.steps` or `cfg.epochs`, from the checkpoint that `cfg.resume` names if there is one.

    Returns the last evaluation. What is learned in step `s` depends on `s`, the seed and the weights, so
    that neither a restart nor the number of ranks changes it. `files` go into every checkpoint, for its export.
    Where the run is asked to stop, every rank raises `Stopped` after the same step, when the checkpoint is whole.
    """
    total_steps = cfg.total_steps(len(train))
    speed = attach.prepare(accelerator, cfg, model, train, loss_sum, total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    saved = checkpoints.Checkpoints(accelerator, cfg, model, optimizer, data=train.identity, total_steps=total_steps, files=files)
    first = step = saved.restore()
    autobatch.settle(accelerator, cfg, model, optimizer, train, loss_sum, speed)
    world.say(f"{total_steps} steps = {total_steps * cfg.global_batch_size / len(train):.2f} epochs of {len(train):,} items")
    updates = train.starting_at(step, accelerator, cfg)
    peak = flops.peak_of_all(accelerator, cfg)
    reader, rate = LateReader(accelerator.device), _Rate(cfg.global_batch_size)
    metrics: dict[str, float] = {}
    skipped, is_stopping = 0, 0 < cfg.stop_after <= step
    is_done = any([hook.on_start(step, total_steps, saved.evaluations) for hook in hooks])

    def is_due(every: int) -> bool:
        if every:
            return step % every == 0
        return step * cfg.global_batch_size // len(train) > (step - 1) * cfg.global_batch_size // len(train)

    def evaluates() -> bool:
        if step == 0:
            return bool(evaluate) and cfg.eval_first
        return bool(evaluate) and (step == total_steps or is_due(cfg.eval_every))

    def take_in(numbers: Numbers) -> None:
        nonlocal skipped, is_stopping
        skipped += _check(accelerator, numbers)
        is_stopping = is_stopping or numbers.votes > 0  # the same sum on every rank, so the same step
        pace = rate.after(numbers, peak)
        for hook in hooks:
            hook.on_update(numbers, pace)

    def measure() -> None:
        nonlocal metrics, is_done, is_stopping
        try:
            metrics = evaluate(model)
        except signals.EvaluationStopped:
            is_stopping = True
            signals.all_know()
            return
        saved.evaluated(step, metrics)
        is_done = any([hook.on_evaluate(step, metrics) for hook in hooks])

    def tell_of_saves() -> None:
        for at, path in saved.committed():
            for hook in hooks:
                hook.on_save(at, path)

    model.train(cfg.dropout)
    with signals.armed(cfg), saved:
        if evaluates() and step not in saved.evaluations:  # before the first step; or killed in an evaluation after a save
            measure()
            rate.restart()
        if step < total_steps and not is_done and not is_stopping:
            seconds = speed.warm_up(accelerator, model, train, loss_sum)
            for hook in hooks if seconds is not None else ():
                hook.on_warm_up(step, seconds)
            rate.restart()
        while step < total_steps and not is_done and not is_stopping:
            lr = lr_at(step, cfg, total_steps)
            set_lr(optimizer, lr)
            seed = mixed(cfg.seed, "step", step)
            batches, asked = next(updates), signals.is_asked()
            work = speed.work_of(batches)
            stats = update(accelerator, model, optimizer, batches, loss_sum, count, cfg.max_grad_norm, seed, asked, work)
            step += 1
            reader.push(step, lr, stats)

            saves = step in (total_steps, cfg.stop_after) or is_due(cfg.save_every)
            for numbers in reader.pop(all_of_them=saves or evaluates()):
                take_in(numbers)
            is_stopping = is_stopping or step == cfg.stop_after
            if is_stopping:
                signals.all_know()
                for numbers in reader.pop(all_of_them=True):
                    take_in(numbers)
            if saves or is_stopping:  # before the evaluation, which may fail
                saved.save(step, is_last=is_stopping or step == total_steps)
            if evaluates() and not is_stopping:
                measure()
                if is_done or is_stopping:
                    saved.save(step, is_last=True)
            tell_of_saves()
            if saves or evaluates():
                rate.restart()
        if not is_stopping and evaluate and not metrics:  # resumed after the last step: nothing was left to train
            measure()
        if is_stopping and step:  # also where it was asked for before a step was done
            saved.save(step, is_last=True)
        unsaved = saved.close()
        tell_of_saves()
        if skipped:
            world.say(f"{skipped} of {step - first} steps were skipped by the fp16 scaler (gradients overflowed).")
        reason = signals.reason() if is_stopping else ""
        for hook in hooks:
            now = metrics if step in saved.evaluations else {}  # not those of an earlier step
            hook.on_end(step, {**now, "skipped_steps": skipped, **({"stopped": reason} if reason else {})})
        if is_stopping:
            world.agreed(None, what="close its trackers")  # the launcher ends all ranks as soon as the first is gone

    if is_stopping:
        signals.remove_file(cfg.output_dir)
        text = (
            f"stopped: asked by {reason}; step {step} of {total_steps} is saved. Go on with it: the same command with "
            f"--resume --output_dir {cfg.output_dir}"
        )
        if not step:
            text = f"stopped: asked by {reason} before the first step; there is nothing to save."
        elif unsaved:
            text = f"unsaved: asked to stop by {reason}, but {unsaved}. --resume goes on from an older one."
        if world.lasting:
            world.lasting.set("stopped", text)
        raise world.Stopped(text)
    if unsaved:
        world.unsaved = f"unsaved: the run is at its end, but {unsaved}."
    elif (best := saved.best()) is not None:
        world.say(f"best {cfg.keep_best}: {saved.evaluations[best][cfg.keep_best]:.4f} at step {best}, in "
                  f"{cfg.output_dir}/step_{best:08d}; export it: accel-ddp export {cfg.output_dir} FOLDER")  # fmt: skip
    return metrics


def _check(accelerator: Accelerator, numbers: Numbers) -> bool:
    """Whether the fp16 scaler skipped the step. A loss that is no number ends the run, on every rank."""
    if math.isfinite(numbers.loss) and math.isfinite(numbers.grad_norm):
        return False
    if math.isfinite(numbers.loss) and accelerator.scaler is not None:
        return True
    # Every rank saw the same loss, so every rank gets here.
    losses = world.gathered((world.HOST, numbers.local_loss))
    guilty = world.agreed(
        [f"rank {rank} on {host}" for rank, (host, loss) in enumerate(losses) if not math.isfinite(loss)] if losses else None
    )
    what = f"the loss is {numbers.loss}" if guilty else f"the gradient norm is {numbers.grad_norm}"
    raise UserError(
        f"step {numbers.step}: {what}{' on ' + ', '.join(guilty) if guilty else ''}. The run stops; checkpoints before it "
        "are good. Try a lower --lr, --warmup_steps, --max_grad_norm 1, bf16 instead of fp16, or look at the data of that step."
    )


class _Rate:
    """How fast it goes since the last evaluation or save, the latest counting most."""

    def __init__(self, samples_of_step: int) -> None:
        self.samples_of_step = samples_of_step
        self.restart()

    def restart(self) -> None:
        self.last, self.steps, self.tokens, self.flops, self.seconds = time.monotonic(), 0.0, 0.0, 0.0, 0.0

    def after(self, numbers: Numbers, peak: float | None) -> Pace:
        now = time.monotonic()
        self.steps, self.tokens = 0.9 * self.steps + 1, 0.9 * self.tokens + numbers.tokens
        self.flops, self.seconds = 0.9 * self.flops + numbers.flops, 0.9 * self.seconds + now - self.last
        self.last = now
        seconds = max(self.seconds, 1e-9)
        mfu = self.flops / seconds / peak if peak and self.flops else None
        return Pace(self.steps * self.samples_of_step / seconds, self.tokens / seconds, self.flops / seconds, mfu)
