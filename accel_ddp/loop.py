"""The schedule of a run. There is one, and it is meant to be read, and copied when you need another."""

import math
import time
from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp import checkpoint, world
from accel_ddp.config import TrainConfig, UserError
from accel_ddp.hooks import Hook
from accel_ddp.optim import lr_at, set_lr
from accel_ddp.seeds import mixed
from accel_ddp.stream import TrainBatches
from accel_ddp.update import Count, LateReader, LossSum, Numbers, update


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
) -> dict[str, float]:
    """Train for `cfg.steps` or `cfg.epochs`, from the checkpoint that `cfg.resume` names if there is one.

    Returns the last evaluation. What is learned in step `s` depends on `s`, the seed and the weights, so
    that neither a restart nor the number of ranks changes it.
    """
    total_steps = cfg.total_steps(len(train))
    model, optimizer = accelerator.prepare(model, optimizer)
    step = checkpoint.restore(accelerator, cfg, model, optimizer)
    world.say(f"{total_steps} steps = {total_steps * cfg.global_batch_size / len(train):.2f} epochs of {len(train):,} items")
    updates = train.starting_at(step, accelerator, cfg)
    reader, rate = LateReader(accelerator.device), _Rate()
    metrics: dict[str, float] = {}
    skipped, stop, first = 0, False, step
    for hook in hooks:
        hook.on_start(step, total_steps)

    def is_due(every: int) -> bool:
        if every:
            return step % every == 0
        return step * cfg.global_batch_size // len(train) > (step - 1) * cfg.global_batch_size // len(train)

    def save() -> None:
        path = checkpoint.save(accelerator, cfg, model, optimizer, step)
        for hook in hooks:
            hook.on_save(step, path)

    model.train()
    while step < total_steps and not stop:
        lr = lr_at(step, cfg, total_steps)
        set_lr(optimizer, lr)
        seed = mixed(cfg.seed, "step", step)
        stats = update(accelerator, model, optimizer, next(updates), loss_sum, count, cfg.max_grad_norm, seed)
        step += 1
        reader.push(step, lr, stats)

        is_last = step == total_steps
        evaluates, saves = evaluate and (is_last or is_due(cfg.eval_every)), is_last or is_due(cfg.save_every)
        for numbers in reader.pop(all_of_them=evaluates or saves):
            skipped += _check(accelerator, numbers)
            per_second = rate.after(numbers.items)
            for hook in hooks:
                hook.on_update(numbers, per_second)
        if saves:  # before the evaluation, which may fail
            save()
        if evaluates:
            metrics = evaluate(model)
            stop = any([hook.on_evaluate(step, metrics) for hook in hooks])
            if stop and not saves:
                save()
        if evaluates or saves:
            rate.restart()

    if evaluate and not metrics:  # resumed after the last step: nothing was left to train
        metrics = evaluate(model)
    if skipped:
        world.say(f"{skipped} of {step - first} steps were skipped by the fp16 scaler (gradients overflowed).")
    for hook in hooks:
        hook.on_end(step, {**metrics, "skipped_steps": skipped})
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
    """Items per second since the last evaluation or save, the latest counting most."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.last, self.items, self.seconds = time.monotonic(), 0.0, 0.0

    def after(self, items: int) -> float:
        now = time.monotonic()
        self.items, self.seconds = 0.9 * self.items + items, 0.9 * self.seconds + now - self.last
        self.last = now
        return self.items / max(self.seconds, 1e-9)
