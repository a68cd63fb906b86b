"""Train a small model, and inject a fault into one rank at one step, or whenever a file requests one.

`--fault NAME --fault_rank R --fault_step S` injects the fault in every process that gets to step S, also after a restart. A file
`rank-R` in --fault_folder with the text `NAME SECONDS` injects a fault once, at the next step of rank R, and is removed first.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.entry import run
from accel_ddp.saving.checkpoint_format import MANIFEST

FAULTS = {
    "segv": "SIGSEGV in a C function",
    "exit": "os._exit(3), without a message",
    "exception": "an exception",
    "leave": "sys.exit(0)",
    "oom": "more memory than the limit of its memory cgroup",
    "stop": "SIGSTOP; --fault_seconds later SIGCONT, if another process is there to send it",
    "hang": "Python code that waits --fault_seconds",
    "gil": "a C function that holds the GIL for about --fault_seconds",
    "barrier": "a barrier on this rank only",
    "deadlock": "this rank waits in a barrier of another process group than the other ranks",
    "skip": "no backward pass in this step",
    "lr": "twice the learning rate of the other ranks, from this step on",
    "data": "an item of the dataset takes --fault_seconds, in the rank or in one of its data workers",
    "eval_data": "the same for an item of the next evaluation",
    "slow_data": "every item of the dataset takes --fault_seconds, from this step on",
    "worker": "a data worker is killed with SIGKILL",
    "straggler": "the loss of every micro-batch takes --fault_seconds longer, from this step on",
    "fast": "the end of straggler and slow_data",
    "disk": "a system call on the folder of --fault_path, whose disk hangs",
}
OOM_LIMIT = 400 << 20


@dataclass(kw_only=True)
class Config(TrainConfig):
    steps: int = 30
    global_batch_size: int = 4
    micro_batch_size: int = 2
    save_every: int = 5
    eval_every: int = 0
    eval_first: bool = False
    lr: float = 0.01
    keep_last: int = 3
    log_every: int = 1
    num_workers: int = 0
    items: int = option(60, "number of items of the dataset")
    width: int = option(16, "width of the hidden layer")
    step_seconds: float = option(0.1, "minimum duration of a micro-batch in seconds", affects_result=False)
    eval_seconds: float = option(0.0, "minimum duration of an evaluation in seconds", affects_result=False)
    save_seconds: float = option(0.0, "additional duration of a save in seconds, as on a slow disk", affects_result=False)
    fault: str = option("", f"fault to inject: {', '.join(FAULTS)}", affects_result=False)
    fault_rank: int = option(1, "rank that has the fault", affects_result=False)
    fault_step: int = option(8, "step in which the fault happens", affects_result=False)
    fault_seconds: float = option(600.0, "duration of the fault, where it has one", affects_result=False)
    fault_folder: str = option("", "folder whose files rank-R request faults", affects_result=False)
    fault_path: str = option("", "folder on a disk that hangs", affects_result=False)


def double_learning_rates(optimizer, *_) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 2


class Faults:
    """The faults of one rank. `step` is the step that the rank is doing."""

    def __init__(self, cfg: Config):
        self.cfg, self.rank = cfg, int(os.environ.get("RANK", 0))
        self.folder = Path(cfg.fault_folder or f"{cfg.output_dir}.faults")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.step, self.is_first_batch = 0, True
        self.optimizer = None
        self.extra_seconds = 0.0
        self.kept = []  # memory that stays allocated

    def inject_if_due(self) -> str:
        """Inject the fault that is due in this micro-batch. Return its name, or an empty string."""
        is_first, self.is_first_batch = self.is_first_batch, False
        name = ""
        if is_first and self.cfg.fault and (self.rank, self.step) == (self.cfg.fault_rank, self.cfg.fault_step):
            name, seconds = self.cfg.fault, self.cfg.fault_seconds
        elif is_first and (request := take(self.folder / f"rank-{self.rank}")):
            name, seconds = request.split()[0], float(request.split()[1])
        elif is_first and self.cfg.fault == "deadlock" and self.step == self.cfg.fault_step:
            name, seconds = "other_group", 0.0
        if name:
            print(f"rank {self.rank} (pid {os.getpid()}) injects {name} at step {self.step}", flush=True)
            self.inject(name, seconds)
        time.sleep(self.extra_seconds)
        return name

    def inject(self, name: str, seconds: float) -> None:
        import torch.distributed as dist

        from accel_ddp.ranks.process import links

        if name == "segv":
            ctypes.string_at(0)
        elif name == "exit":
            os._exit(3)
        elif name == "leave":
            sys.exit(0)
        elif name == "exception":
            raise RuntimeError("a fault of this test")
        elif name == "oom":
            self.kept.append(bytearray(os.urandom(1) * (2 * OOM_LIMIT)))
        elif name == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif name == "hang":
            time.sleep(seconds)
        elif name == "gil":
            hold_gil(seconds)
        elif name in ("barrier", "other_group"):
            dist.barrier()
        elif name == "deadlock":
            dist.barrier(links.slow_group)
        elif name == "lr":
            self.optimizer.register_step_pre_hook(double_learning_rates)  # `update` refuses another one before the step
        elif name == "worker":
            multiprocessing.active_children()[0].kill()
        elif name == "straggler":
            self.extra_seconds = seconds
        elif name == "fast":
            self.extra_seconds = 0.0
            (self.folder / f"slow-{self.rank}").unlink(missing_ok=True)
        elif name == "disk":
            Path(self.cfg.fault_path, "file").write_text("")
        elif name in ("data", "slow_data", "eval_data"):
            put(self.folder / f"{'slow' if name == 'slow_data' else name}-{self.rank}", str(seconds))
        elif name != "skip":
            raise ValueError(f"unknown fault {name}")


def put(path: Path, text: str) -> None:
    """Create a file with this text in one moment."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.rename(path)


def take(path: Path) -> str:
    """Remove the file and return its text, or an empty string if there is none. Only one process gets the text."""
    mine = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.rename(mine)
    except FileNotFoundError:
        return ""
    text = mine.read_text()
    mine.unlink()
    return text


def hold_gil(seconds: float) -> None:
    """Compute for about this many seconds in one call of a C function, in which no other thread of Python can run."""
    began = time.thread_time()  # not the time on the wall, because other processes may interrupt this one
    sum(range(10**7))
    sum(range(int(10**7 * seconds / (time.thread_time() - began))))


def limit_memory() -> None:
    """Move this process into a new memory cgroup inside its own one, with a limit of OOM_LIMIT for what it allocates from now on.

    The cgroup remains when this process is killed. `remove_memory_limits` removes it.
    """
    line = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), "0::/")
    is_first_version = ":memory:" in line
    own = Path("/sys/fs/cgroup", "memory" if is_first_version else "", line.split(":", 2)[2].lstrip("/"))
    new = own / f"accel-ddp-tests-{os.getpid()}"
    try:
        new.mkdir()
        (new / ("memory.limit_in_bytes" if is_first_version else "memory.max")).write_text(str(OOM_LIMIT))
        (new / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        print(f"not possible: {error}", flush=True)
        sys.exit(77)
    print(f"memory cgroup {new}", flush=True)


def slow_down_saves(seconds: float) -> None:
    """Let the thread that writes checkpoints sleep before each manifest, as on a slow disk."""

    def on_event(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).endswith(MANIFEST) and threading.current_thread().name.startswith("checkpoint"):
            time.sleep(seconds)

    sys.addaudithook(on_event)


def main(cfg: Config) -> None:
    import torch
    from torch import nn

    if cfg.fault == "oom" and cfg.fault_rank == int(os.environ.get("RANK", 0)):
        limit_memory()
    if cfg.save_seconds:
        slow_down_saves(cfg.save_seconds)
    faults = Faults(cfg)
    slow_file, data_file, eval_file = (faults.folder / f"{name}-{faults.rank}" for name in ("slow", "data", "eval_data"))

    class Items(torch.utils.data.Dataset):
        def __init__(self, data_file):
            self.data_file = data_file

        def __len__(self):
            return cfg.items  # not a multiple of the batch size, so that a step crosses the end of an epoch

        def __getitem__(self, index):
            if seconds := take(self.data_file):
                print(f"an item takes {seconds} s in pid {os.getpid()}", flush=True)
                time.sleep(float(seconds))
            if slow_file.exists():
                time.sleep(float(slow_file.read_text()))
            generator = torch.Generator().manual_seed(index)
            return torch.randn(8, generator=generator, dtype=torch.float64) + 0.1 * torch.randn(8, dtype=torch.float64)

    accelerator = accel_ddp.start(cfg)
    print(f"rank {faults.rank} is pid {os.getpid()}", flush=True)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, cfg.width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(cfg.width, 1)).double()
    faults.optimizer = accel_ddp.optim.build(model, cfg)

    class Steps(accel_ddp.hooks.Hook):
        def on_start(self, step, total_steps, evaluations):
            faults.step, faults.is_first_batch = step + 1, True

        def on_update(self, numbers, pace):
            faults.step, faults.is_first_batch = numbers.step + 1, True

    class Task(accel_ddp.Task):
        def terms(self, model, batch, team):
            injected = faults.inject_if_due()
            time.sleep(cfg.step_seconds)
            if injected == "skip":
                return {"loss": torch.zeros(len(batch), dtype=torch.float64, requires_grad=True) + 0}
            return {"loss": model(batch).square().squeeze(-1)}

        def measure(self, model, batch):
            time.sleep(cfg.eval_seconds / 10)
            return {"loss": model(batch).square().squeeze(-1)}

    accel_ddp.fit(
        accelerator,
        cfg,
        task=Task(),
        model=model,
        optimizer=faults.optimizer,
        train=accel_ddp.TrainBatches(Items(data_file), torch.stack),
        test=accel_ddp.EvalBatches(Items(eval_file), torch.stack, 3, accelerator, cfg) if cfg.eval_every else None,
        hooks=[*accel_ddp.hooks.standard(accelerator, cfg), Steps()],
    )


if __name__ == "__main__":
    run(Config, main)
