"""How long a save blocks training, compared with a save that waits for the disk and with other libraries.

    python benchmarks/checkpoint.py

One process trains linear layers with AdamW on one device. It saves weights and optimizer repeatedly: with `Checkpoints`, with
Accelerate's `save_state`, and with torch's DCP (`async_save` with its default stager, which does not pin memory). They take turns,
so that a disk that slows down slows all of them. The cost of a save is the time until the call returns, plus the delay of the
steps from then until the save is on the disk. The delay is measured against steps during which nothing is written.

Our save computes hashes, syncs to the disk, and removes old checkpoints. DCP syncs too, `save_state` does not. The goal is at most
0.10 of our own save with a wait for the disk. On a CPU the writer takes cores from training, so that the numbers there only show
that the script works.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import accel_ddp
from accel_ddp.engine.step import train_step
from accel_ddp.saving.checkpoints import Checkpoints

WIDTH = 1024
BYTES_PER_PARAMETER = 12  # float32: the weight and two moments of AdamW
OURS, OURS_BLOCKING, NOTHING = "ours", "ours, blocking", "nothing saved"
SAVE_STATE, DCP_ASYNC = "accelerator.save_state", "DCP async_save"


class Save(NamedTuple):
    """The seconds of one save."""

    returned: float  # until the call returned
    blocked: float  # by which training is delayed
    finished: float  # until the background work was done


class Layers(nn.ModuleList):
    def forward(self, rows: Tensor) -> Tensor:
        for layer in self:
            rows = F.layer_norm(rows + layer(rows), (WIDTH,))  # keeps the scale for any number of layers
        return rows


class Training:
    def __init__(self, accelerator, cfg: accel_ddp.TrainConfig, megabytes: float):
        self.accelerator, self.cfg, self.steps = accelerator, cfg, 0
        num_layers = max(1, round(megabytes * 1e6 / BYTES_PER_PARAMETER / (WIDTH * WIDTH + WIDTH)))
        model = Layers(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.model = model
        self.terms, self.optimizer = accel_ddp.prepare(accelerator, cfg, Task(), model, accel_ddp.optim.build(model, cfg))
        self.rows = torch.randn(cfg.micro_batch_size, WIDTH, device=accelerator.device)
        self.size = sum(p.numel() for p in self.model.parameters()) * BYTES_PER_PARAMETER / 1e6

    def step(self) -> float:
        """Do one update and return its seconds. They include copies for a save, which are queued on the device before it."""
        began = time.perf_counter()
        train_step(self.accelerator, self.cfg, self.terms, self.optimizer, [self.rows])
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        self.steps += 1
        return time.perf_counter() - began


class Task(accel_ddp.Task):
    def terms(self, model: nn.Module, batch: Tensor, team: Any) -> dict[str, Tensor]:
        return {"loss": (model(batch) - batch.flip(1)).pow(2).sum(1)}


def main(cfg: accel_ddp.TrainConfig, megabytes: float, rounds: int, undisturbed_steps: int) -> None:
    accelerator = accel_ddp.start(cfg)
    # DCP needs a process group. It is opened after `start`, so that Accelerate sees a single process.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training = Training(accelerator, cfg, megabytes)
    for _ in range(5):  # the first one allocates the optimizer's state
        training.step()
    saved = Checkpoints(accelerator, cfg, training.model, training.optimizer)
    sleeper, peers_folder = ThreadPoolExecutor(max_workers=1), Path(cfg.output_dir) / "peers"

    def ours() -> list[Future]:
        saved.save(training.steps)
        return list(saved._pending)  # they end after the removal of old checkpoints, which follows the commit

    def ours_blocking() -> list[Future]:
        saved.save(training.steps)
        saved.wait()
        return []

    def save_state() -> list[Future]:
        accelerator.save_state(str(peers_folder))
        return []

    def dcp_async() -> list[Future]:
        weights, moments = get_state_dict(training.model, training.optimizer.optimizer)
        return [dcp.async_save({"model": weights, "optimizer": moments}, checkpoint_id=peers_folder)]

    def nothing() -> list[Future]:
        return [sleeper.submit(time.sleep, found[OURS][-1].finished)]  # its result shows the noise

    # Ours is the first, because it allocates the host memory that its blocking variant also uses.
    ways = {OURS: ours, OURS_BLOCKING: ours_blocking, SAVE_STATE: save_state, DCP_ASYNC: dcp_async, NOTHING: nothing}
    found: dict[str, list[Save]] = {way: [] for way in ways}
    for _ in range(1 + rounds):
        for way, save in ways.items():
            found[way].append(measure(training, save, undisturbed_steps))
            if saved.failed:
                sys.exit(saved.failed)
            shutil.rmtree(peers_folder, ignore_errors=True)
    saved.close()
    sleeper.shutdown()

    # safetensors 0.7 holds Python's lock while it writes, which stops training. Version 0.8 does not.
    print(*(f"{package} {version(package)}" for package in ("torch", "accelerate", "safetensors")), sep=", ")
    print(f"\n{training.size:,.0f} MB of state in {len(training.model)} layers, {rounds} rounds; ms: median (min to max)")
    print(f"{'':28}{'returns after':>30}{'blocks training for':>30}{'finished after':>30}")
    for way, saves in found.items():
        if way in (OURS, DCP_ASYNC):
            print_row(f"{way}, first save", saves[:1])
        print_row(way, saves[1:])
    print("\nblocks training for: ours / other, in the same round; median (min to max)")
    for other, goal in ((SAVE_STATE, ""), (DCP_ASYNC, ""), (OURS_BLOCKING, "   goal: at most 0.10")):
        ratios = [our.blocked / their.blocked for our, their in zip(found[OURS][1:], found[other][1:])]
        print(f"{f'ours / {other}':34}{spread(ratios, '.3f'):>26}{goal}")


def measure(training: Training, save: Callable[[], list[Future]], undisturbed_steps: int) -> Save:
    """Return the cost of `save`, which returns its work in the background."""
    os.sync()  # so that data of the save before are not written during this one
    undisturbed = [training.step() for _ in range(undisturbed_steps)]
    began = time.perf_counter()
    unfinished = save()
    returned = time.perf_counter() - began
    disturbed = []
    while not all(writing.done() for writing in unfinished):
        disturbed.append(training.step())
    finished = time.perf_counter() - began
    for writing in unfinished:
        writing.result()  # raises its exception, if there was one
    undisturbed += [training.step() for _ in range(undisturbed_steps)]  # before and after, because the speed may change
    typical = statistics.median(undisturbed)
    return Save(returned, returned + sum(seconds - typical for seconds in disturbed), finished)


def print_row(way: str, saves: list[Save]) -> None:
    returned, blocked, finished = (spread([1000 * seconds for seconds in column], ",.1f") for column in zip(*saves))
    print(f"{way:28}{returned:>30}{blocked:>30}{finished:>30}")


def spread(values: list[float], form: str) -> str:
    middle, least, most = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least} to {most})" if len(values) > 1 else middle


if __name__ == "__main__":
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=500, help="size of weights and optimizer; a third are weights")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind, after the first one")
    parser.add_argument("--folder", help="folder on the disk to test; default: the temporary folder")
    parser.add_argument("--rows", type=int, default=4096 if on_gpu else 64, help="rows of a step; more rows make it longer")
    parser.add_argument(
        "--undisturbed_steps", type=int, default=30 if on_gpu else 5, help="steps before and after a save, to compare with"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        batch = {"micro_batch_size": options.rows, "global_batch_size": options.rows}
        cfg = accel_ddp.TrainConfig(output_dir=folder, keep_last=2, mixed_precision="no", **batch)
        main(cfg, options.megabytes, options.rounds, options.undisturbed_steps)
    dist.destroy_process_group()
