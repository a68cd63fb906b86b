"""Read batches of recipes with and without data workers, and write for each recipe whether they are equal to OUT.

While workers run, they and their fork server get the signals that launchers send to every process of a rank.
"""

import dataclasses
import importlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run

sys.path.insert(0, str(Path(accel_ddp.__file__).parents[1] / "recipes"))
SMALL = {"max_train_items": 40, "max_eval_items": 9, "eval_batch_size": 4, "global_batch_size": 8, "micro_batch_size": 4}


@dataclass(kw_only=True)
class Config(TrainConfig):
    out: str = ""
    text: str = ""  # a .txt file, for pretrain_mlm --streaming
    is_killed: bool = False  # only start a worker, and kill the rank


def tasks(cfg: Config) -> dict[str, dict]:
    """Return the recipes and their options."""
    names = ("classify", "embed", "images", "pretrain_mlm", "seq2seq", "sft", "tag")
    streamed = {"streaming": True, "train_file": cfg.text, "max_train_items": 0}
    return {**{name: {} for name in names}, "pretrain_mlm, streaming": streamed}


def are_equal(a, b) -> bool:
    """Return whether two batches have the same tensors."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def send_signals() -> None:
    for process in descendants():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP):
            process.send_signal(number)
    time.sleep(0.2)


def compare(accelerator, cfg: Config, name: str, options: dict, method: str) -> dict[str, bool]:
    """Return which batches are equal, and whether the workers have survived the signals."""
    recipe = importlib.import_module(name.split(",")[0])
    plain = recipe.Config(**{**SMALL, **options}, num_workers=0)
    task = recipe.Task(plain, accelerator)
    accel_ddp.load_model(task)
    task.batches()
    by_workers = dataclasses.replace(plain, num_workers=1, worker_start=method)
    expected = task.train.starting_at(0, accelerator, plain)
    found = task.train.starting_at(0, accelerator, by_workers)
    steps = [(next(expected), next(found))]
    running = {process.pid for process in descendants()}
    send_signals()
    steps += [(next(expected), next(found)) for _ in range(8)]  # more than the worker has prepared
    survived = running <= {process.pid for process in descendants()}
    found.close()
    loader = task.eval_batches.loader
    options = (loader.dataset.dataset, loader.collate_fn.collate, 4, accelerator)
    pairs = zip(accel_ddp.EvalBatches(*options, plain), accel_ddp.EvalBatches(*options, by_workers), strict=True)
    return {
        "train": all(are_equal(a, b) for one, two in steps for a, b in zip(one, two, strict=True)),
        "eval": all([are_equal(a, b) for a, b in pairs]),
        "survived": survived and len(running) > 0,
    }


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    results = {}
    if not cfg.is_killed:
        results = {name: compare(accelerator, cfg, name, options, "forkserver") for name, options in tasks(cfg).items()}
        results["classify, spawn"] = compare(accelerator, cfg, "classify", {}, "spawn")
        results["a closure"] = message_for_closure(accelerator, cfg)
    # One worker runs until the process ends.
    rows = accel_ddp.TrainBatches(torch.arange(8), torch.stack)
    changes = {"num_workers": 1, "worker_start": "forkserver", "global_batch_size": 2, "micro_batch_size": 2}
    updates = rows.starting_at(0, accelerator, dataclasses.replace(cfg, **changes))
    next(updates)
    results["pids"] = [process.pid for process in descendants()]
    Path(cfg.out).write_text(json.dumps(results))
    if cfg.is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    globals()["updates"] = updates  # otherwise the worker would end here


def message_for_closure(accelerator, cfg: Config) -> str:
    rows = accel_ddp.TrainBatches(torch.arange(8), lambda rows: torch.stack(rows))
    options = dataclasses.replace(cfg, num_workers=1, worker_start="forkserver", global_batch_size=2, micro_batch_size=2)
    try:
        next(rows.starting_at(0, accelerator, options))
    except accel_ddp.UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    run(Config, main)
