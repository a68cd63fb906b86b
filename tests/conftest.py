"""Helpers that start real processes. Nothing here mocks torch, accelerate, the network or the disk."""

import contextlib
import functools
import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from accel_ddp.nodes.spawn import die_with_parent
from tests import forking

pytest_plugins = ["tests.nodes", "tests.parallel", "tests.ssh_nodes", "tests.slurm_cluster"]

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "programs"
BIN = Path(sys.executable).parent
# A shell starts background commands with SIGINT and SIGQUIT ignored, and child processes would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup; a handler is not inherited by processes that tests start
    signal.signal(signal.SIGHUP, lambda *_: None)
# A config for one process, as the wizard writes it. Accelerate starts such a process without torchrun.
SINGLE = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_machines: 1\nnum_processes: 1\n"
# The copy is taken here, because libraries that tests import later add variables that the processes of a user do not have.
OUTSIDE = dict(os.environ)
# One thread for each process, also for this one. With more processes than cores, two threads of a matrix product wait for each
# other in a busy loop, and a run of one rank takes 3 times the CPU time.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
os.environ.update(ONE_THREAD)
# Test modules import torch and many other libraries. To look for cycles among them takes a fifth of the collection's time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@dataclass
class Ended:
    """The results of the processes of one launch, in the order of their commands."""

    codes: list[int]
    texts: list[str]  # stdout and stderr of each process, in one text
    seconds: float

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def well(self) -> "Ended":
        """Assert that every exit code is 0. Return self."""
        assert self.codes == [0] * len(self.codes), f"exit codes {self.codes}\n{self.text[-6000:]}"
        return self


port_numbers = itertools.count(os.getpid() * 101)  # sessions start at different ports, and workers have different ones
WORKER, WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def free_port() -> int:
    """Return a free port below 32768. The kernel assigns none of these, so the port stays free until a launcher binds it."""
    while True:
        size = 19_000 // WORKERS
        port = 10_000 + WORKER * size + next(port_numbers) % size
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def clean_environment(**more: str | None) -> dict[str, str]:
    """Return the environment of a new user, without variables that change a run, and without GPUs. None removes a variable."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU", "WANDB_API_KEY", "WANDB_MODE")
    # Without compiled files, every process would compile this package again, which takes 0.2 s.
    env = {name: value for name, value in OUTSIDE.items() if name not in (*drop, "PYTHONDONTWRITEBYTECODE")}
    fixed = {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    env |= {"PATH": f"{BIN}{os.pathsep}{env['PATH']}", **ONE_THREAD, **fixed, **more}
    return {name: value for name, value in env.items() if value is not None}


@functools.cache
def fork_server() -> forking.Server:
    """Return the fork server of this pytest process. The first call starts it."""
    return forking.Server(clean_environment())


def started(
    commands: list[list[str]], environments: list[dict[str, str]], folders: list[Path], new_session: bool, fresh: bool
) -> list[subprocess.Popen | forking.Forked]:
    """Start the commands and return their processes.

    Python scripts are forked if their environments allow it. Either all commands are forked or none, because ranks have the same
    parent process, as under a launcher.
    """
    starts = list(zip(commands, environments, folders, strict=True))
    scripts = (".py", str(BIN / "accel-ddp"))
    is_script = [command[0] == sys.executable and command[1].endswith(scripts) for command in commands]
    if not fresh and all(is_script) and all(fork_server().fits(env) for env in environments):
        return [fork_server().fork(command[1:], env, cwd, new_session) for command, env, cwd in starts]
    # A session of tests that is killed ends its processes: those of `Running` have their own sessions, and would train on.
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "preexec_fn": die_with_parent}
    return [subprocess.Popen(command, env=env, cwd=cwd, start_new_session=new_session, **options) for command, env, cwd in starts]


def run_all(
    commands: list[list],
    environments: list[dict[str, str]],
    timeout: float = 300,
    cwd: Path | list[Path] = ROOT,
    fresh: bool = False,
) -> Ended:
    """Start the commands at the same time, wait for all of them, and return their results."""
    return Running(commands, environments, cwd, new_session=False, fresh=fresh).ended(timeout)


class Running:
    """Processes whose output is read while they run. `fresh` starts a new interpreter for each; see tests/forking.py."""

    def __init__(
        self, commands: list[list], environments: list[dict[str, str]], cwd: Path | list[Path] = ROOT, new_session: bool = True,
        fresh: bool = False,
    ):  # fmt: skip
        argvs = [[str(argument) for argument in command] for command in commands]
        folders = cwd if isinstance(cwd, list) else [cwd] * len(argvs)
        self.processes = started(argvs, environments, folders, new_session, fresh)
        self.read = [""] * len(commands)

    def until(self, expected: str, of: int = 0, timeout: float = 300) -> None:
        """Wait until process `of` prints a line that contains `expected`. Otherwise kill all processes and fail."""
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        for line in self.processes[of].stdout:
            self.read[of] += line
            if expected in line:
                timer.cancel()
                return
        timer.cancel()
        timer.join()
        self.kill()
        raise AssertionError(f"process {of} has not printed {expected!r}. It printed:\n{self.read[of]}")

    def kill(self) -> None:
        """Kill the processes that are still running, with all their descendants."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()
                process.kill()

    def abort(self) -> str:
        """Send SIGABRT to every process that has the output open, so that it prints its stacks. Return a list of them as text."""
        pipes = {os.readlink(f"/proc/self/fd/{process.stdout.fileno()}") for process in self.processes}
        hang = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                files = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")}
                if files & pipes and process.pid != os.getpid():
                    hang.append(
                        f"{process.pid} (parent {process.ppid()}, {process.status()}): {' '.join(process.cmdline())[:200]}"
                    )
                    process.send_signal(signal.SIGABRT)
        time.sleep(2)
        return "\n".join(["processes that had the output open:", *hang])

    def ended(self, timeout: float = 300) -> Ended:
        """Wait for all processes and return their results. After the timeout, kill them with their descendants and fail."""
        began = time.monotonic()

        def read_rest(number: int) -> None:  # Popen.communicate omits what `until` has buffered
            for line in self.processes[number].stdout:
                self.read[number] += line

        readers = [threading.Thread(target=read_rest, args=(number,), daemon=True) for number in range(len(self.processes))]
        try:
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join(max(0, began + timeout - time.monotonic()))
            if any(reader.is_alive() for reader in readers):
                hang = self.abort()
                raise AssertionError(f"the processes have not ended after {timeout} s:\n" + "\n".join([*self.read, hang]))
            codes = [process.wait(60) for process in self.processes]
        finally:
            self.kill()
        return Ended(codes, self.read, time.monotonic() - began)


def rank_environments(ranks: int, **more: str) -> list[dict[str, str]]:
    """Return the environments of ranks on one node, as a launcher sets them. A single rank has no launcher."""
    port = str(free_port())
    if ranks == 1:
        return [clean_environment(**more)]
    return [
        clean_environment(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **more,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def node_environments(nodes: int, **more: str) -> list[dict[str, str]]:
    """Return the environments of nodes with one rank each."""
    return [{**env, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} for env in rank_environments(nodes, **more)]


def two_node_commands(*words: object, **env: str) -> tuple[list[list], list[dict[str, str]]]:
    """Return the commands and environments of `accelerate launch` on two nodes, with this machine as both."""
    common = [
        "--config_file",
        "accelerate_configs/2node.yaml",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        free_port(),
    ]
    commands = [[*common, "--machine_rank", node, *words] for node in (0, 1)]
    return commands, [clean_environment(GLOO_SOCKET_IFNAME="lo", **env)] * 2


def run_ranks(ranks: int, script: Path | str, *args: object, timeout: float = 300, fresh: bool = False, **env: str) -> Ended:
    """Run a script on several ranks without a launcher, so that the exit code and the output of each rank are available."""
    return run_all([[sys.executable, script, *args]] * ranks, rank_environments(ranks, **env), timeout, fresh=fresh)


@pytest.fixture(scope="session", autouse=True)
def cache_of_session(tmp_path_factory) -> str:
    """Return a folder that all processes of all workers share, so that each model is made and each data set is tokenized once."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"
    folder.mkdir(exist_ok=True)
    os.environ["ACCEL_DDP_CACHE"] = OUTSIDE["ACCEL_DDP_CACHE"] = str(folder)
    return str(folder)


@pytest.fixture(scope="session")
def cache(cache_of_session) -> str:
    return cache_of_session


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Return a folder with a tiny BERT and the tokenizer of the builtin model."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from accel_ddp.config.train_config import RecipeConfig
    from accel_ddp.sources import models

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = models.load_tokenizer(RecipeConfig(model="builtin:all-MiniLM-L6-v2"))
    torch.manual_seed(0)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.2,
    }
    BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def environment_restored():
    """Restore the variables of this process after each test. Otherwise one that sets WORLD_SIZE changes later tests of the worker."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)
