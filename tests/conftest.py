"""Helpers that start real processes. Nothing here is a stand-in for torch, accelerate, the network or the disk."""

import contextlib
import functools
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

from tests import forking

pytest_plugins = ["tests.nodes", "tests.parallel"]

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "programs"
BIN = Path(sys.executable).parent
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell runs in the background, with all its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
OUTSIDE = dict(os.environ)  # libraries that a test imports here add to os.environ what processes of a user do not have


@dataclass
class Ended:
    """How the processes of one launch ended, in their order."""

    codes: list[int]
    texts: list[str]  # stdout and stderr of each
    seconds: float

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def well(self) -> "Ended":
        assert self.codes == [0] * len(self.codes), f"exit codes {self.codes}\n{self.text[-6000:]}"
        return self


port_numbers = itertools.count(os.getpid() * 101)  # sessions and workers begin at different ports


def free_port() -> int:
    """Return a free port below 32768: the kernel hands out none of these, so it stays free until a launcher takes it."""
    while True:
        port = 10_000 + next(port_numbers) % 19_000
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def clean_environment(**more: str) -> dict[str, str]:
    """Of a new user: nothing left over that changes a run, and no GPU even where the machine has one."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU", "WANDB_API_KEY", "WANDB_MODE")
    # Without compiled files every process would compile this package anew: a fifth of a second.
    env = {name: value for name, value in OUTSIDE.items() if name not in (*drop, "PYTHONDONTWRITEBYTECODE")}
    fixed = {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return {**env, "PATH": f"{BIN}{os.pathsep}{env['PATH']}", **fixed, **more}


@functools.cache
def fork_server() -> forking.Server:
    return forking.Server(clean_environment())


def started(
    commands: list[list[str]], environments: list[dict[str, str]], folders: list[Path], new_session: bool, fresh: bool
) -> list[subprocess.Popen | forking.Forked]:
    """Python scripts as forks, where their environments allow it. All or none: ranks have one parent, as from a launcher."""
    places = list(zip(commands, environments, folders, strict=True))
    scripts = (".py", str(BIN / "accel-ddp"))
    is_script = [command[0] == sys.executable and command[1].endswith(scripts) for command in commands]
    if not fresh and all(is_script) and all(fork_server().fits(env) for env in environments):
        return [fork_server().fork(command[1:], env, cwd, new_session) for command, env, cwd in places]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [subprocess.Popen(command, env=env, cwd=cwd, start_new_session=new_session, **pipes) for command, env, cwd in places]


def run_all(
    commands: list[list],
    environments: list[dict[str, str]],
    timeout: float = 300,
    cwd: Path | list[Path] = ROOT,
    fresh: bool = False,
) -> Ended:
    """Start the commands together; wait for all."""
    return Running(commands, environments, cwd, new_session=False, fresh=fresh).ended(timeout)


class Running:
    """Processes that are watched while they run. `fresh`: each in an interpreter of its own, see tests/forking.py."""

    def __init__(
        self, commands: list[list], environments: list[dict[str, str]], cwd: Path | list[Path] = ROOT, new_session: bool = True,
        fresh: bool = False,
    ):  # fmt: skip
        words = [[str(word) for word in command] for command in commands]
        folders = cwd if isinstance(cwd, list) else [cwd] * len(words)
        self.processes = started(words, environments, folders, new_session, fresh)
        self.read = [""] * len(commands)

    def until(self, words: str, of: int = 0, timeout: float = 120) -> None:
        """Until a process says this; the whole family is ended if it does not."""
        late = threading.Timer(timeout, self.kill)
        late.start()
        for line in self.processes[of].stdout:
            self.read[of] += line
            if words in line:
                late.cancel()
                return
        late.cancel()
        late.join()
        self.kill()
        raise AssertionError(f"{words!r} was never said:\n{self.read[of]}")

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()
                process.kill()

    def abort(self) -> str:
        """End those that hang, and those that only keep the output open, so that they say where: each prints its stacks."""
        pipes = {os.readlink(f"/proc/self/fd/{process.stdout.fileno()}") for process in self.processes}
        hang = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                files = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")}
                if files & pipes and process.pid != os.getpid():
                    hang.append(f"{process.pid} of {process.ppid()}, {process.status()}: {' '.join(process.cmdline())[:200]}")
                    process.send_signal(signal.SIGABRT)
        time.sleep(2)
        return "\n".join(["these were there:", *hang])

    def ended(self, timeout: float = 120) -> Ended:
        """Wait for all of them; their families are ended if they do not."""
        began = time.monotonic()

        def read_on(number: int) -> None:  # Popen.communicate leaves out what `until` has read ahead
            for line in self.processes[number].stdout:
                self.read[number] += line

        readers = [threading.Thread(target=read_on, args=(number,), daemon=True) for number in range(len(self.processes))]
        try:
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join(max(0, began + timeout - time.monotonic()))
            if any(reader.is_alive() for reader in readers):
                hang = self.abort()
                raise AssertionError(f"not ended after {timeout} s:\n" + "\n".join([*self.read, hang]))
            codes = [process.wait(10) for process in self.processes]
        finally:
            self.kill()
        return Ended(codes, self.read, time.monotonic() - began)


def rank_environments(ranks: int, **more: str) -> list[dict[str, str]]:
    port = str(free_port())
    if ranks == 1:
        return [clean_environment(**more)]
    return [
        clean_environment(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1", **more,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def node_environments(nodes: int, **more: str) -> list[dict[str, str]]:
    """Of ranks that are each alone on their node."""
    return [{**env, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} for env in rank_environments(nodes, **more)]


def run_ranks(ranks: int, script: Path | str, *args: object, timeout: float = 300, fresh: bool = False, **env: str) -> Ended:
    """Each rank a process that we start ourselves, so that each one's exit code and words can be seen."""
    return run_all([[sys.executable, script, *args]] * ranks, rank_environments(ranks, **env), timeout, fresh=fresh)


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> str:
    """One folder of tokenised data for all workers of the session: what one test tokenises is found by the next."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"
    folder.mkdir(exist_ok=True)
    os.environ["ACCEL_DDP_CACHE"] = OUTSIDE["ACCEL_DDP_CACHE"] = str(folder)
    return OUTSIDE["ACCEL_DDP_CACHE"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """A folder with a tiny BERT and the tokenizer of the embedded model."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from accel_ddp.config import RecipeConfig
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
