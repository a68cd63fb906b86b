"""What a step of our loop costs beside a step of a bare PyTorch loop that does the same work.

    python benchmarks/loop_overhead.py
    torchrun --nproc_per_node 2 benchmarks/loop_overhead.py

Both train a copy of the same model on the same micro-batches, with the same optimizer, clipping, precision, DDP
options and data loading. Ours also seeds dropout, checks every loss, reads every loss and writes the log. They take
turns in one process, the first of a turn changing, so that a machine that slows down slows both. Aim: 1.02 or less.
"""

import argparse
import contextlib
import copy
import gc
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import accel_ddp
from accel_ddp import runtime
from accel_ddp.data import Shuffle, loader_options

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from classify import Config, Task

UNTIMED_STEPS = 4  # at the start of every turn: data workers start, DDP sorts its buckets, AdamW makes its state


def main(cfg: Config, rounds: int) -> None:
    accelerator = accel_ddp.start(cfg)
    task = Task(cfg, accelerator)
    turns = {"ours": lambda: ours(cfg, accelerator, task), "bare": lambda: bare(cfg, accelerator, task)}
    timed_steps = cfg.steps - UNTIMED_STEPS
    runtime.say(f"\n{'ms per step':14}{'ours':>10}{'bare':>10}{'ours / bare':>14}")
    ratios = []
    for turn in range(rounds + 1):
        names = list(turns) if turn % 2 else list(reversed(turns))
        ms = {name: turns[name]() / timed_steps * 1000 for name in names}
        ratio = ms["ours"] / ms["bare"]
        runtime.say(f"{f'round {turn}' if turn else 'warm-up':14}{ms['ours']:10.2f}{ms['bare']:10.2f}{ratio:14.3f}")
        ratios += [ratio] if turn else []
    spread = f"from {min(ratios):.3f} to {max(ratios):.3f}"
    runtime.say(f"median ours / bare over {rounds} rounds of {timed_steps} steps: {statistics.median(ratios):.3f} ({spread})")


def now(device: torch.device) -> float:
    """The time at which everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class TimedBatches(accel_ddp.TrainBatches):
    """Notes when the first timed step asks for its data. A hook cannot: on a GPU it hears of a step one step late."""

    def starting_at(self, step, accelerator, cfg):
        for at, batches in enumerate(super().starting_at(step, accelerator, cfg)):
            yield batches
            if at + 1 == UNTIMED_STEPS:  # control comes back here when the next step's data are asked for
                self.began = now(accelerator.device)


class Stopwatch(accel_ddp.hooks.Hook):
    """Notes the end of the last step, of which hooks hear at once. The last hook, so that the others are paid for."""

    def __init__(self, cfg: Config, device: torch.device):
        self.last, self.device = cfg.steps, device

    def on_update(self, numbers, rate):
        if numbers.step == self.last:
            self.ended = now(self.device)


def ours(cfg: Config, accelerator, task: Task) -> float:
    """Seconds of the timed steps of a whole `fit`: its preparation and its checkpoint are left out."""
    model = copy.deepcopy(task.model)
    batches, stopwatch = TimedBatches(task.train.dataset, task.train.collate), Stopwatch(cfg, accelerator.device)
    with contextlib.redirect_stdout(io.StringIO()):
        accel_ddp.fit(
            accelerator,
            cfg,
            model=model,
            optimizer=accel_ddp.optim.build(model, cfg),
            train=batches,
            loss_sum=task.loss_sum,
            count=task.count,
            hooks=[*accel_ddp.hooks.standard(accelerator, cfg), stopwatch],
        )
    accelerator.free_memory()
    gc.collect()
    return stopwatch.ended - batches.began


def bare(cfg: Config, accelerator, task: Task) -> float:
    """The loop that one would write by hand: nothing of Accelerate, no checks, the loss read every tenth step."""
    device, num_ranks = accelerator.device, accelerator.num_processes
    model = copy.deepcopy(task.model).to(device).train()
    optimizer = accel_ddp.optim.build(model, cfg)
    if num_ranks > 1:
        model = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=cfg.gradient_as_bucket_view,
            bucket_cap_mb=cfg.bucket_cap_mb,
            broadcast_buffers=False,
        )
    micro, count = cfg.split(num_ranks)
    batches = iter(
        DataLoader(
            task.train.dataset,
            batch_sampler=indices_of_our_batches(cfg, accelerator, len(task.train)),
            collate_fn=task.train.collate,
            **loader_options(cfg, accelerator),
        )
    )
    low_precision = torch.autocast(device.type, torch.bfloat16, enabled=accelerator.mixed_precision == "bf16")
    with contextlib.redirect_stdout(io.StringIO()):
        for step in range(cfg.steps):
            if step == UNTIMED_STEPS:
                began = now(device)
            for group in optimizer.param_groups:
                group["lr"] = cfg.lr * (1 - step / cfg.steps)
            for i in range(count):
                batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(batches).items()}
                labels = batch.pop("labels")
                with model.no_sync() if num_ranks > 1 and i < count - 1 else contextlib.nullcontext():
                    with low_precision:
                        logits = model(**batch).logits
                    loss = F.cross_entropy(logits.float(), labels) / count
                    loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % cfg.log_every == 0:
                print(f"step {step + 1}/{cfg.steps}  loss {loss.item() * count:.4f}")
        ended = now(device)
    del model, optimizer, batches
    gc.collect()
    return ended - began


def indices_of_our_batches(cfg: Config, accelerator, num_items: int) -> list[list[int]]:
    """The rows that `TrainBatches` gives this rank: other rows would be padded to other lengths, which take other times."""
    micro, count = cfg.split(accelerator.num_processes)
    order, ranks = Shuffle(num_items, cfg.seed), accelerator.num_processes
    # Workers fetch ahead of the last step, ours as well: the stream does not end there.
    firsts = [(i * ranks + accelerator.process_index) * micro for i in range(2 * cfg.steps * count)]
    return [[order.at(position) for position in range(first, first + micro)] for first in firsts]


if __name__ == "__main__":
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps_per_round", type=int, default=200 if on_gpu else 8, help="timed steps of each loop")
    parser.add_argument("--micro_batch_size", type=int, default=32 if on_gpu else 16, help="items of a rank at once")
    parser.add_argument("--global_batch_size", type=int, default=0, help="items of a step; default: one micro-batch a rank")
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="bf16" if on_gpu else "no")
    parser.add_argument("--model", default=Config.model)
    parser.add_argument("--dataset", default=Config.dataset)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = UNTIMED_STEPS + options.steps_per_round
        cfg = Config(
            output_dir=folder,
            model=options.model,
            dataset=options.dataset,
            steps=steps,
            save_every=steps + 1,  # at the end only, after the clock has stopped
            micro_batch_size=options.micro_batch_size,
            global_batch_size=options.global_batch_size or options.micro_batch_size * runtime.NUM_RANKS,
            mixed_precision=options.mixed_precision,
        )
        code = runtime.supervise(lambda cfg: main(cfg, options.rounds), cfg)
    sys.exit(code)
