"""The processes that prepare batches: their settings and their start."""

import contextlib
import multiprocessing
import pickle
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

from accelerate import Accelerator
from torch.utils.data import DataLoader

from accel_ddp import compat
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.nodes.cores import usable_cores
from accel_ddp.ranks.process import ending, this_rank
from accel_ddp.ranks.signals import IgnoreInWorker, blocked_for_children


def loader_options(cfg: TrainConfig, accelerator: Accelerator) -> dict[str, Any]:
    """Return DataLoader settings that suit the device, unless the user chose others."""
    on_gpu = accelerator.device.type == "cuda"
    workers = cfg.num_workers
    if workers < 0:  # on a CPU the cores are busy with training
        workers = max(1, min(4, usable_cores() // this_rank.local_ranks - 1)) if on_gpu else 0
    # A fork takes milliseconds and passes on functions that cannot be pickled. Python 3.14 has another default.
    default = "fork" if sys.platform == "linux" else multiprocessing.get_start_method()
    method = default if cfg.worker_start == "auto" else cfg.worker_start
    return {
        "num_workers": workers,
        "pin_memory": on_gpu if cfg.pin_memory == "auto" else cfg.pin_memory == "on",
        "prefetch_factor": cfg.prefetch_factor if workers else None,
        "persistent_workers": workers > 0,
        "worker_init_fn": IgnoreInWorker(method) if workers else None,
        "multiprocessing_context": method if workers else None,
    }


@contextlib.contextmanager
def starting_workers(loader: DataLoader) -> Iterator[None]:
    """Start the workers of `loader` inside the block. Raise UserError if the start method cannot pass them the dataset."""
    if not loader.num_workers:
        yield
        return
    method = loader.multiprocessing_context.get_start_method()
    if method != "fork":
        with blocked_for_children():
            resource_tracker.ensure_running()  # a separate block, because its start unblocks signals
    if method == "forkserver":
        loader.multiprocessing_context.set_forkserver_preload(["accel_ddp.training.stream"])  # imports torch once for all workers
    try:
        with blocked_for_children(forks=method == "fork"):
            yield
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        if method == "fork" or "pickle" not in str(error):
            raise
        raise UserError(
            f"--worker_start {method}: the dataset or the collate function cannot be pickled: {error}. Define functions and classes "
            "at the top of a module, or use --worker_start fork."
        ) from error
    compat.end_workers_at_exit(loader, ending.stop.announce_exit)
