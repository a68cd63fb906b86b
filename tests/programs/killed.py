"""Kill a run before every file system operation of a save and inside of its large files, resume it each time, and print a report.

Each process of the run is a fork, so that torch is imported only once. It completes one save, and ends in the next one. Python
reports the operations of the thread that writes checkpoints as audit events. safetensors' own operations are not reported. A limit
on the size of files therefore ends a process in the middle of a tensor file: the kernel sends SIGXFSZ.
"""

import contextlib
import dataclasses
import json
import os
import resource
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import base

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run
from accel_ddp.saving import checkpoint_format

OPERATIONS = ("open", "os.mkdir", "os.rename", "os.chmod", "os.remove", "os.rmdir")
SIZES = (100_000, 300_000)  # inside of model.safetensors, which has 206 kB, and of optimizer.safetensors, which has 412 kB


@dataclass(kw_only=True)
class Config(TrainConfig):
    steps: int = 100_000
    lr_schedule: str = "constant"
    save_every: int = 1
    log_every: int = 1
    global_batch_size: int = 4
    lr: float = 1e-3


def train(cfg: Config) -> None:
    """Train from the newest checkpoint until the end or until this process is killed."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    accelerator = accel_ddp.start(cfg)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 400), nn.Dropout(0.1), nn.Linear(400, 64))
    hook = accel_ddp.hooks.Hook()
    hook.on_start = lambda step, total, past: print(f"from {step}", flush=True)
    accel_ddp.fit(
        accelerator,
        cfg,
        task=base.Task(),
        model=model,
        optimizer=accel_ddp.optim.build(model, cfg),
        train=accel_ddp.TrainBatches(list(torch.randn(50, 64, generator=torch.Generator().manual_seed(1))), torch.stack),
        hooks=[hook],
    )


def watch_saves(folder: str, in_save: int, kill_at: int, size_limit: int) -> None:
    """Print the operations of save number `in_save` of this process. A save begins with the folder of the run.

    Kill the process before operation `kill_at`, or limit the size of files from the first operation on.
    """
    saves, operations = 0, -1

    def on_event(event: str, arguments: tuple) -> None:
        nonlocal saves, operations
        if event not in OPERATIONS or not threading.current_thread().name.startswith("checkpoint"):
            return
        saves += event == "os.mkdir" and str(arguments[0]) == folder
        if saves == in_save:
            operations += 1
            os.write(1, f"operation {event} {Path(str(arguments[0])).name}\n".encode())
            if operations == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if operations == 0 and size_limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size_limit, resource.RLIM_INFINITY))

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(on_event)


def run_in_fork(cfg: Config, in_save: int = 2, kill_at: int = -1, size_limit: int = 0) -> dict:
    """Train in a fork. Return the operations of its save, how it ended, and the checkpoints before and after it."""
    folder = Path(cfg.output_dir)
    steps = lambda: sorted(int(path.name[5:]) for path in folder.glob("step_*"))
    before = steps()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        os.close(reader)
        watch_saves(cfg.output_dir, in_save, kill_at, size_limit)
        with contextlib.suppress(accel_ddp.ranks.failures.Stopped):
            train(cfg)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as output:
        lines = output.read().splitlines()
    status = os.waitpid(child, 0)[1]
    return {
        "from": [int(line[5:]) for line in lines if line.startswith("from ")],
        "operations": [line[10:] for line in lines if line.startswith("operation ")],
        "status": status,
        "before": before,
        "after": steps(),
        "problems": [problem for path in folder.glob("step_*") if (problem := checkpoint_format.find_problem(path))],
        "hidden": {p.name: {f.name: f.stat().st_size for f in p.rglob("*") if f.is_file()} for p in folder.glob(".step_*")},
    }


def main(cfg: Config) -> None:
    # These are imported before the forks, so that it happens only once.
    import safetensors.torch  # noqa: F401

    import accel_ddp.accelerator
    import accel_ddp.assembly  # noqa: F401

    first = run_in_fork(dataclasses.replace(cfg, stop_after=4), in_save=3)  # the save of step 3 removes the checkpoint of step 1
    again = dataclasses.replace(cfg, resume="auto")
    sized = [run_in_fork(again, size_limit=size) for size in SIZES]
    killed = [run_in_fork(again, kill_at=number) for number in range(len(first["operations"]))]
    end = killed[-1]["after"][-1] + 2
    last = run_in_fork(dataclasses.replace(again, stop_after=end))
    straight = dataclasses.replace(cfg, stop_after=end, output_dir=f"{cfg.output_dir}_uninterrupted")
    report = {"first": first, "sized": sized, "killed": killed, "last": last, "uninterrupted": run_in_fork(straight)}
    print(json.dumps(report))


if __name__ == "__main__":
    run(Config, main)
