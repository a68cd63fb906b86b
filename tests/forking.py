"""Processes that need not import torch and its like again: forks of one that has (programs/fork_server.py).

They are real processes, with an environment, pipes, signals, sockets and an end of their own; but importing takes some
seconds of a core, and a training in these tests a fraction of one. What is not covered by them is the start of an interpreter:
what the libraries read from their environment when they are imported, in which order they are, and the seed of hashes, which
all forks share. The tests of launchers, of the README's commands and of `verify` start interpreters.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

SERVER = Path(__file__).parent / "programs" / "fork_server.py"

# All variables in which a process may differ from the server: what reads them does so after the fork.
READ_LATE = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME",
    "ACCEL_DDP_CACHE", "DDP_TIMEOUT_SECONDS", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS",
    "TRACKIO_DIR",
}  # fmt: skip


class Server:
    def __init__(self, environment: dict[str, str]):
        """For processes of this environment, but for what is READ_LATE."""
        self.environment = environment
        self.connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(300)  # the first answer comes when everything is imported
        self.said = tempfile.TemporaryFile("w+")
        # accel_ddp sets this before it imports torch.
        own = {"OMP_WAIT_POLICY": "PASSIVE", **environment}
        # Those of numpy and of pyarrow start no threads when they are imported.
        own.update(OPENBLAS_NUM_THREADS="1", JE_ARROW_MALLOC_CONF="background_thread:false")
        own.pop("OMP_NUM_THREADS", None)  # the forks set what they are to have
        self.process = subprocess.Popen(
            [sys.executable, SERVER, str(other.fileno())], env=own, stdin=subprocess.DEVNULL, stdout=self.said, stderr=self.said,
            pass_fds=[other.fileno()],
        )  # fmt: skip
        other.close()
        self.one_at_a_time = threading.Lock()
        atexit.register(self.end)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def fits(self, environment: dict[str, str]) -> bool:
        changed = {name for name, _ in environment.items() ^ self.environment.items()}
        return changed <= READ_LATE

    def fork(self, words: list[str], environment: dict[str, str], cwd: Path, new_session: bool) -> "Forked":
        reader, output = os.pipe()
        report, reporter = os.pipe()
        wanted = {"words": words, "environment": environment, "cwd": str(cwd), "new_session": new_session}
        try:
            with self.one_at_a_time:
                socket.send_fds(self.connection, [json.dumps(wanted).encode()], [output, reporter])
                answer = self.connection.recv(100)
        except OSError as error:
            raise self.is_gone() from error
        finally:
            os.close(output)
            os.close(reporter)
        if not answer:
            raise self.is_gone()
        return Forked(self, int(answer), reader, report)

    def is_gone(self) -> RuntimeError:
        self.said.seek(0)
        return RuntimeError(f"{SERVER} has ended or hangs, exit code {self.process.poll()}. It said: {self.said.read()}")


class Forked:
    """A process that the server has forked, with what the tests use of a subprocess.Popen."""

    def __init__(self, server: Server, pid: int, output: int, report: int):
        self.server = server
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = open(output)
        self.report = open(report, "rb", buffering=0)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self.report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            code = self.report.read(10)
            if not code:
                raise self.server.is_gone()
            self.returncode = int(code)
            self.report.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
