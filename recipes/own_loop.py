r"""`classify.py` with the loop written out, for when you need to change it.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/own_loop.py --steps 20

A test requires that this file and `classify.py` learn bit-identical weights, on one rank and on two. This loop saves and resumes.
It has no evaluations during training, no trackers, and no agreed stop: a signal ends it at once.
"""

from classify import Config, Task

import accel_ddp
from accel_ddp.entry import run


def main(cfg: Config):
    for name in ("keep_best", "early_stopping_patience", "stop_after", "sync_every", "balance"):
        if getattr(cfg, name) not in (False, 0, "off"):
            raise accel_ddp.UserError(f"--{name}: this loop does not have it. Leave it out, or use recipes/classify.py.")
    accelerator = accel_ddp.start(cfg)
    task = Task(cfg, accelerator)
    model = accel_ddp.load_model(task)
    optimizer = accel_ddp.optim.build(model, cfg)
    train, test = task.batches()
    total_steps = train.total_steps(cfg)

    alone = accel_ddp.Terms(model, task)  # without other ranks
    accel_ddp.padding_check.require_independence(accelerator, cfg, alone, train)
    speed = accel_ddp.attach(accelerator, cfg, alone, train, total_steps)
    terms, optimizer = accel_ddp.prepare(accelerator, cfg, task, model, optimizer)
    files = accel_ddp.export.files_of(model, task.processor)
    check = accel_ddp.divergence.ParameterCheck(accelerator, cfg, model)
    ema = accel_ddp.ema.Ema(model, cfg.ema_decay, optimizer)
    facts = {"data": train.identity, "files": files, "averages": ema.current}
    saved = accel_ddp.checkpoints.Checkpoints(accelerator, cfg, model, optimizer, **facts, before_save=check.require)
    first = saved.restore()
    speed.choose_micro_batch_size(optimizer)
    speed.choose_compilation(first)
    updates = train.starting_at(first, accelerator, cfg)
    reader = accel_ddp.step_numbers.LateReader(accelerator.device)
    nonfinite = accel_ddp.divergence.NonfiniteSteps(accelerator, cfg, saved)
    terms.train(cfg.dropout)
    for step in range(first, total_steps):
        if speed.is_due(step):
            speed.compile_layers()
        lr = accel_ddp.optim.set_lr(optimizer, accel_ddp.optim.lr_at(step, cfg, total_steps))
        seed = accel_ddp.seeds.mixed(cfg.seed, "step", step)
        stats = accel_ddp.train_step(accelerator, cfg, terms, optimizer, next(updates), seed)
        ema.update(step + 1, stats)
        reader.push(step + 1, lr, stats)
        check.begin(step + 1)
        check.read(step + 1)
        saves = step + 1 == total_steps or (cfg.save_every and (step + 1) % cfg.save_every == 0)
        for numbers in reader.pop(wait_for_all=saves):  # on a GPU they arrive one step late
            nonfinite.on_update(numbers)
            if numbers.step % cfg.log_every == 0:
                accelerator.print(f"step {numbers.step}/{total_steps}  loss {numbers.loss:.4f}")
        if saves:
            saved.save(step + 1, is_last=step + 1 == total_steps)
    ema.apply()  # after the last save, which contains the weights too
    metrics = accel_ddp.evaluate(accelerator, terms, test)
    accelerator.print(metrics)
    if problem := saved.close():
        raise accel_ddp.UserError(problem)
    accel_ddp.export.at_the_end(accelerator, cfg, model, files, metrics)


if __name__ == "__main__":
    run(Config, main)
