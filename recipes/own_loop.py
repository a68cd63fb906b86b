"""`classify.py` with the loop written out, for when you need to change it.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/own_loop.py --steps 20

A test requires that this file and `classify.py` learn the same weights, to the bit, on one rank and on two. It saves and
resumes; what it leaves to `fit` are evaluations on the way, trackers, and the agreed stop: here a signal ends it at once.
"""

from classify import Config, Task

import accel_ddp
from accel_ddp.config import run


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    task = Task(cfg, accelerator)
    optimizer = accel_ddp.optim.build(task.model, cfg)
    total_steps = cfg.total_steps(len(task.train))

    speed = accel_ddp.fast.prepare(accelerator, cfg, task.model, task.train, task.loss_sum, total_steps)
    model, optimizer = accelerator.prepare(task.model, optimizer)
    files = accel_ddp.export.files_of(task.model, task.tokenizer)
    saved = accel_ddp.checkpoint.Checkpoints(accelerator, cfg, model, optimizer, data=task.train.identity, files=files)
    first = saved.restore()
    accel_ddp.fitting.settle(accelerator, cfg, model, optimizer, task.train, task.loss_sum, speed)
    updates = task.train.starting_at(first, accelerator, cfg)
    model.train(cfg.dropout)
    speed.warm_up(accelerator, model, task.train, task.loss_sum)
    for step in range(first, total_steps):
        accel_ddp.optim.set_lr(optimizer, accel_ddp.optim.lr_at(step, cfg, total_steps))
        seed = accel_ddp.seeds.mixed(cfg.seed, "step", step)
        stats = accel_ddp.update.update(
            accelerator, model, optimizer, next(updates), task.loss_sum, task.count, cfg.max_grad_norm, seed
        )
        if (step + 1) % cfg.log_every == 0:
            accelerator.print(f"step {step + 1}/{total_steps}  loss {stats.loss.item():.4f}")
        if step + 1 == total_steps or (cfg.save_every and (step + 1) % cfg.save_every == 0):
            saved.save(step + 1)
    metrics = task.evaluate(model)
    accelerator.print(metrics)
    if problem := saved.close():
        raise accel_ddp.UserError(problem)
    accel_ddp.export.at_the_end(accelerator, cfg, task.model, files, metrics)


if __name__ == "__main__":
    run(Config, main)
