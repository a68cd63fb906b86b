"""Helpers that start real processes. Nothing here is a stand-in for torch, accelerate, the network or the disk."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "programs"
BIN = Path(sys.executable).parent


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


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def clean_environment(**more: str) -> dict[str, str]:
    """Of a new user: nothing left over that changes a run, and no GPU even where the machine has one."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU", "WANDB_API_KEY", "WANDB_MODE")
    env = {name: value for name, value in os.environ.items() if name not in drop}
    return {**env, "PATH": f"{BIN}{os.pathsep}{env['PATH']}", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", **more}


def run_all(commands: list[list[str]], environments: list[dict[str, str]], timeout: float = 300, cwd: Path = ROOT) -> Ended:
    """Start the commands together; wait for all."""
    began = time.monotonic()
    started = [
        subprocess.Popen([str(w) for w in command], env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, env in zip(commands, environments, strict=True)
    ]
    try:
        texts = [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return Ended([process.returncode for process in started], texts, time.monotonic() - began)


class Running:
    """Processes that are watched while they run."""

    def __init__(self, commands: list[list], environments: list[dict[str, str]]):
        self.processes = [
            subprocess.Popen(
                [str(word) for word in command], env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )
            for command, env in zip(commands, environments, strict=True)
        ]  # fmt: skip
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
        self.kill()
        raise AssertionError(f"{words!r} was never said:\n{self.read[of]}")

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()

    def ended(self, timeout: float = 120) -> Ended:
        began = time.monotonic()
        try:
            texts = [before + process.communicate(timeout=timeout)[0] for before, process in zip(self.read, self.processes)]
        finally:
            self.kill()
        return Ended([process.returncode for process in self.processes], texts, time.monotonic() - began)


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


def run_ranks(ranks: int, script: Path | str, *args: object, timeout: float = 300, **env: str) -> Ended:
    """Each rank a process that we start ourselves, so that each one's exit code and words can be seen."""
    return run_all([[sys.executable, script, *args]] * ranks, rank_environments(ranks, **env), timeout)


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> str:
    """One folder of tokenised data for the whole session: what is tokenised in one test is found by the next."""
    os.environ["ACCEL_DDP_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    return os.environ["ACCEL_DDP_CACHE"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """A folder with a tiny BERT and the tokenizer of the embedded model."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from accel_ddp import models
    from accel_ddp.config import RecipeConfig

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = models.load_tokenizer(RecipeConfig(model="embedded:all-MiniLM-L6-v2"))
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
