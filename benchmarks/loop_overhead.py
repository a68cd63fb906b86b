"""The time of a step of `fit`, compared with a step of a plain PyTorch loop that does the same work.

    python benchmarks/loop_overhead.py
    torchrun --nproc_per_node 2 benchmarks/loop_overhead.py

Both train a copy of the same model on the same micro-batches, with the same optimizer, clipping, precision, DDP options and data
loading. `fit` runs with `speedups=None`, so that it computes the padding too. In addition `fit` seeds dropout in every step, reads
and checks every loss, and writes the log. They take turns of a few steps in one process, so that a machine that slows down slows
both. The goal is a ratio of at most 1.02.
"""

import argparse
import contextlib
import copy
import io
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import accel_ddp
from accel_ddp.training.stream import Shuffle
from accel_ddp.training.workers import loader_options

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from classify import Config, Task


def main(cfg: Config, steps_per_round: int) -> None:
    accelerator = accel_ddp.start(cfg)
    task = Task(cfg, accelerator)
    model = accel_ddp.load_model(task)
    train, _ = task.batches()
    batches = TurnTaking(train, plain_loop(cfg, accelerator, copy.deepcopy(model), train), steps_per_round)
    with contextlib.redirect_stdout(io.StringIO()):  # both loops format their log lines, which would hide the table
        accel_ddp.fit(
            accelerator,
            cfg,
            task=task,
            model=model,
            optimizer=accel_ddp.optim.build(model, cfg),
            train=batches,
            hooks=accel_ddp.hooks.standard(accelerator, cfg),
            speedups=None,
        )
    accelerator.print(f"\n{'ms per step':14}{'ours':>10}{'plain':>10}{'ours / plain':>14}")
    ratios = [ours / plain for ours, plain in batches.seconds]
    for turn, (ratio, seconds) in enumerate(zip(ratios, batches.seconds)):
        ours, plain = (1000 * value / steps_per_round for value in seconds)
        accelerator.print(f"{f'round {turn}' if turn else 'warm-up':14}{ours:10.2f}{plain:10.2f}{ratio:14.3f}")
    counted = ratios[1:]
    accelerator.print(
        f"median ours / plain over {len(counted)} rounds of {steps_per_round} steps: {statistics.median(counted):.3f} "
        f"({min(counted):.3f} to {max(counted):.3f})"
    )


class TurnTaking(accel_ddp.TrainBatches):
    """Yields the batches of `fit`. Before the batches of a new round, it runs the last round of the plain loop.

    The time of `fit` is measured from one such moment to the next, so that it contains everything that `fit` does in a round,
    including the data loading and the hooks.
    """

    def __init__(self, train: accel_ddp.TrainBatches, plain: Iterator[None], steps_per_round: int):
        # Without lengths, so that items stay in the order of the stream, as in the plain loop.
        super().__init__(train.dataset, train.collate, lengths=lambda dataset: None)
        self.plain, self.steps_per_round = plain, steps_per_round
        self.seconds: list[tuple[float, float]] = []  # (ours, plain) of each round

    def starting_at(self, step, accelerator, cfg, team=None):
        stream = super().starting_at(step, accelerator, cfg, team)
        began = now(accelerator.device)
        for done in itertools.count():
            if done and done % self.steps_per_round == 0:
                ours_ended = now(accelerator.device)
                for _ in range(self.steps_per_round):
                    next(self.plain)
                plain_ended = now(accelerator.device)
                self.seconds.append((ours_ended - began, plain_ended - ours_ended))
                began = now(accelerator.device)
            yield next(stream)


def now(device: torch.device) -> float:
    """Return the time after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def plain_loop(cfg: Config, accelerator, model, train: accel_ddp.TrainBatches) -> Iterator[None]:
    """Do one step for every `next`. The loop has no Accelerate and no checks, and it reads every tenth loss."""
    device, num_ranks = accelerator.device, accelerator.num_processes
    num_micro_batches = cfg.split(num_ranks)[1]
    model.to(device).train()
    optimizer = accel_ddp.optim.build(model, cfg)
    if num_ranks > 1:
        model = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=cfg.gradient_as_bucket_view,
            bucket_cap_mb=cfg.bucket_cap_mb,
            broadcast_buffers=False,
        )
    rows = indices_of_our_batches(cfg, accelerator, len(train))
    loader = DataLoader(train.dataset, batch_sampler=rows, collate_fn=train.collate, **loader_options(cfg, accelerator))
    batches = iter(loader)
    low_precision = torch.autocast(device.type, torch.bfloat16, enabled=accelerator.mixed_precision == "bf16")
    for step in range(cfg.steps):
        for group in optimizer.param_groups:
            group["lr"] = cfg.lr * (1 - step / cfg.steps)
        for i in range(num_micro_batches):
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(batches).items()}
            labels = batch.pop("labels")
            with model.no_sync() if num_ranks > 1 and i < num_micro_batches - 1 else contextlib.nullcontext():
                with low_precision:
                    logits = model(**batch).logits
                loss = F.cross_entropy(logits.float(), labels) / num_micro_batches
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % cfg.log_every == 0:
            print(f"step {step + 1}/{cfg.steps}  loss {loss.item() * num_micro_batches:.4f}")
        yield


def indices_of_our_batches(cfg: Config, accelerator, num_items: int) -> list[list[int]]:
    """Return the rows of this rank's micro-batches in `fit`. Other rows would be padded to other widths."""
    num_ranks, rank = accelerator.num_processes, accelerator.process_index
    micro, count = cfg.split(num_ranks)
    order = Shuffle(num_items, cfg.seed)
    firsts = [(i * num_ranks + rank) * micro for i in range(cfg.steps * count)]
    return [[order.at(position) for position in range(first, first + micro)] for first in firsts]


if __name__ == "__main__":
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60 if on_gpu else 30)  # many, because a single one varies by 10 %
    parser.add_argument("--steps_per_round", type=int, default=20 if on_gpu else 3)
    parser.add_argument("--micro_batch_size", type=int, default=32 if on_gpu else 16, help="items that a rank computes at once")
    parser.add_argument("--global_batch_size", type=int, default=0, help="items of a step; default: one micro-batch per rank")
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="bf16" if on_gpu else "no")
    parser.add_argument("--model", default=Config.model)
    parser.add_argument("--dataset", default=Config.dataset)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # One more round for the warm-up, and one more step, so that `fit` asks for data after the last round.
        steps = (1 + options.rounds) * options.steps_per_round + 1
        cfg = Config(
            output_dir=folder,
            model=options.model,
            dataset=options.dataset,
            steps=steps,
            save_every=steps,  # after the last round
            micro_batch_size=options.micro_batch_size,
            global_batch_size=options.global_batch_size or options.micro_batch_size * int(os.environ.get("WORLD_SIZE", 1)),
            mixed_precision=options.mixed_precision,
        )
        main(cfg, options.steps_per_round)
    if dist.is_initialized():
        dist.destroy_process_group()
