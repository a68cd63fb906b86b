"""Ranks that a launcher with --max_restarts starts again continue by themselves, with the result of an uninterrupted run."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import BIN, PROGRAMS, Running, clean_environment, free_port, rank_environments, run_all
from tests.test_stop import last_checkpoint, wait_for

TRAINS = PROGRAMS / "trains.py"


class Job:
    """Launchers of one job, one for each node. A launcher may be killed and started again."""

    def __init__(self, nodes, backend: str, folder: Path, *arguments: object, max_restarts: int = 9):
        self.nodes, self.folder = nodes.nodes[:2], folder
        endpoint = f"{self.nodes[0].address}:{free_port()}"
        common = ["--nnodes", 2, "--nproc_per_node", 1, "--max_restarts", max_restarts]
        if backend == "c10d":
            common += ["--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "job"]
        else:
            common += ["--master_addr", self.nodes[0].address, "--master_port", endpoint.rpartition(":")[2]]
        self.commands = [
            [BIN / "torchrun", *common, *(["--node_rank", node] if backend == "static" else []), TRAINS, *arguments,
             "--output_dir", folder]
            for node in (0, 1)
        ]  # fmt: skip
        self.launchers: list[psutil.Popen] = [None, None]
        self.texts, self.changed = ["", ""], threading.Condition()
        self.start(0), self.start(1)

    def start(self, node: int) -> None:
        env = clean_environment(OMP_NUM_THREADS="1")
        command = self.nodes[node].command(self.commands[node])
        process = Running([command], [env]).processes[0]
        self.launchers[node] = process
        threading.Thread(target=self._read, args=(node, process), daemon=True).start()

    def _read(self, node: int, process) -> None:
        for line in process.stdout:
            with self.changed:
                self.texts[node] += line
                self.changed.notify_all()

    def until(self, expected: str, node: int = 0, after: int = 0, timeout: float = 120) -> int:
        """Wait until the node prints `expected` at or after the position `after` of its output. Return the position behind it."""
        with self.changed:
            found = self.changed.wait_for(lambda: self.texts[node].find(expected, after) >= 0, timeout)
            assert found, f"{expected!r} was not printed:\n{self.texts[0][-5000:]}\n--- node 1\n{self.texts[1][-5000:]}"
            return self.texts[node].find(expected, after) + len(expected)

    def rank(self, node: int) -> psutil.Process:
        children = psutil.Process(self.launchers[node].pid).children()
        return next(child for child in children if "trains.py" in " ".join(child.cmdline()))

    def kill_node(self, node: int) -> None:
        for pid in self.nodes[node].pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launchers[node].wait()

    def end(self, timeout: float = 120) -> list[int]:
        codes = [launcher.wait(timeout) for launcher in self.launchers]
        time.sleep(0.5)
        return codes

    @property
    def text(self) -> str:
        return f"{self.texts[0]}\n--- node 1\n{self.texts[1]}"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, bytes]:
    """Return the last checkpoint of an uninterrupted run on two ranks."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    run_all([[sys.executable, TRAINS, "--output_dir", folder]] * 2, rank_environments(2)).well()
    return last_checkpoint(folder)


def restarts_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "restarts.jsonl").read_text().splitlines()]
    return [line for line in lines if "restart" in line]


def inject(job: Job, fault: str) -> None:
    what, _, where = fault.partition(" ")
    node = int(where)
    if what == "rank":
        job.rank(node).kill()
    elif what == "launcher":
        job.launchers[node].kill()
        job.launchers[node].wait()
        deadline = time.monotonic() + 30
        while [pid for pid in job.nodes[node].pids() if psutil.pid_exists(pid)] and time.monotonic() < deadline:
            time.sleep(0.1)
        job.start(node)
    else:
        job.kill_node(node)
        job.start(node)


def check_faults(nodes, backend: str, folder: Path, uninterrupted: dict[str, bytes], faults: list[str]) -> Job:
    """Inject the faults one after another, each after two more steps, and compare the result."""
    job = Job(nodes, backend, folder, "--step_seconds", 0.3, "--save_every", 2)
    at, step = job.until("step  3/12"), 3
    wait_for(folder, 2)
    for number, fault in enumerate(faults, 1):
        began = time.monotonic()
        at = len(job.texts[0])
        inject(job, fault)
        at = job.until(f"restart {number} of 9: ", after=at)
        print(f"{fault}: trains again after {time.monotonic() - began:.1f} s")
        step = min(step + 2, 11)
        at = job.until(f"step {step:2}/12", after=at)
    assert job.end() == [0, 0], job.text
    assert last_checkpoint(folder) == uninterrupted
    assert len(restarts_of(folder)) == len(faults), "one restart for each failure"
    assert "Traceback" not in job.text, job.text
    return job


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_all(nodes, backend, tmp_path, uninterrupted):
    job = check_faults(
        nodes,
        backend,
        tmp_path / "run",
        uninterrupted,
        os.environ.get("FAULTS", "rank 1,rank 0,node 1,launcher 1,node 0").split(","),
    )
    print(job.text)
