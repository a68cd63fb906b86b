"""One rank that measures collectives together with the ranks of all nodes, for `accel-ddp doctor` and `accel-ddp tune`.

`collective_launch` starts it as `python -m MODULE SPEC PARENT`, with RANK, WORLD_SIZE and so on in the environment. MODULE is
`doctor.collectives` or `measure.trial_worker`, SPEC a JSON file that describes what to measure, and PARENT the id of the process
that starts it. The worker prints its reports as lines of JSON and exits with os._exit, because an NCCL collective cannot be
interrupted and the shutdown of the interpreter may wait for ranks that have ended.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from accel_ddp.doctor.host import HOST
from accel_ddp.nodes.spawn import die_with_parent

ALIVE_SECONDS = 0.5  # a slow worker reports at this interval, so that it is not killed as one that hangs


def report(event: str, **values: Any) -> None:
    """Print a report with one system call, because the reader needs whole lines."""
    os.write(1, json.dumps({"event": event, **values}).encode() + b"\n")


class CollectiveWorker:
    """The part that both tools share: the process group, and all-reduces whose time counts on the slowest rank."""

    def __init__(self, spec: dict[str, Any]):
        self.spec, self.reported_at = spec, time.perf_counter()
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank, self.num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        self.num_collectives = 0  # that this rank has entered
        # By default torch aborts a process whose NCCL reports that another rank is gone, before it can report which one.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"

    def import_torch(self) -> None:
        import torch  # takes seconds; a minute from a cold network disk

        self.torch, self.dist = torch, torch.distributed

    def use_device(self, device: Any) -> None:
        self.device = device
        if device.type == "cuda":
            self.torch.cuda.set_device(device)

    def connect_store(self, starts: bool, seconds: float) -> Any:
        host, port, timeout = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=seconds)
        return self.dist.TCPStore(host, port, is_master=starts, timeout=timeout, wait_for_workers=False)

    def open_group(self, store: Any, seconds: float) -> None:
        on_gpu = self.device.type == "cuda"
        self.dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=self.dist.PrefixStore("group", store), rank=self.rank, world_size=self.num_ranks,
            timeout=timedelta(seconds=seconds), device_id=self.device if on_gpu else None,  # NCCL then connects here, not later
        )  # fmt: skip

    def nccl_version(self) -> str:
        return ".".join(map(str, self.torch.cuda.nccl.version()))

    def collective(self, call: Callable[[], Any]) -> Any:
        """Return what `call` returns when it is complete, also on a GPU. Calls are counted to find ranks that lag behind."""
        self.num_collectives += 1
        result = call()
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()
        return result

    def all_reduce(self, tensor: Any, operation: str = "SUM") -> Any:
        self.collective(lambda: self.dist.all_reduce(tensor, op=getattr(self.dist.ReduceOp, operation)))
        return tensor

    def time_each(self, call: Callable[[], Any], times: int) -> list[float]:
        """Return the milliseconds of each call on the slowest rank: the same on every rank, so all of them decide alike."""
        spans = []
        for _ in range(times):
            began = time.perf_counter()
            self.collective(call)
            spans.append((time.perf_counter() - began) * 1000)
            if time.perf_counter() - self.reported_at > ALIVE_SECONDS:
                self.reported_at = time.perf_counter()
                report("alive")
        if not spans:
            return []
        return self.all_reduce(self.torch.tensor(spans, dtype=self.torch.float64, device=self.device), "MAX").tolist()

    def read_log(self) -> str:
        name = os.environ.get("NCCL_DEBUG_FILE", "").replace("%h", HOST.split(".")[0]).replace("%p", str(os.getpid()))
        return Path(name).read_text(errors="replace") if Path(name).is_file() else ""

    def wait_until_all_left(self, store: Any, seconds: float) -> None:
        """Wait on rank 0 until every rank has called this function, because rank 0 hosts the store that the others use."""
        left, deadline = store.add("left", 1), time.monotonic() + seconds
        while self.rank == 0 and left < self.num_ranks and time.monotonic() < deadline:
            time.sleep(0.01)
            left = store.add("left", 0)


def read_nccl_log(log: str) -> tuple[list[str], str, list[str]]:
    """Return the transports between ranks (`P2P/CUMEM`), the network or `unknown`, and its interfaces from NCCL's log."""
    paths = {"/".join(filter(None, path)) for path in re.findall(r" via (P2P|SHM|NET)(?:/([A-Za-z][\w ]*))?", log)}
    network = re.findall(r"Using network (.*\S)", log)[:1] or ["unknown"]
    names = re.findall(r"\[\d+\]([\w.-]+):", "\n".join(re.findall(r"NET/\w+ ?: Using (.*)", log)))
    return sorted(paths), network[0], list(dict.fromkeys(names))


def main(worker: type[CollectiveWorker]) -> None:
    spec, parent = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    worker(spec).run()
