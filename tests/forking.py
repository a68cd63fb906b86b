"""Start processes as forks of a server that has already imported torch and the other libraries (programs/fork_server.py).

Forks are real processes with their own environment, pipes, signals, sockets and exit code. They save time: the imports take
several seconds of CPU time, and training in these tests takes less than one. Forks do not test the start of an interpreter: the
variables that libraries read when they are imported, the order of the imports, and the hash seed, which all forks share. The
tests of launchers, of the commands in the README and of `verify` start new interpreters.
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
from collections.abc import Callable
from pathlib import Path

SERVER = Path(__file__).parent / "programs" / "fork_server.py"

# A fork may have other values of these variables than the server, because they are read after the fork.
READ_LATE = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME",
    "ACCEL_DDP_CACHE", "DDP_TIMEOUT_SECONDS", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS",
    "TRACKIO_DIR", "HF_TOKEN", "WANDB_API_KEY", "WANDB_MODE", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "NETRC",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "ACCELERATE_USE_FSDP", "FSDP_VERSION", "ACCELERATE_USE_PARALLELISM_CONFIG", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "TERM", "LANG", "LC_ALL", "CI", "NO_COLOR", "COLORTERM",
}  # fmt: skip


class Server:
    def __init__(self, environment: dict[str, str], place: Callable[[list], list] = list, libraries: str = "recipes"):
        """Start the server. Its forks may differ from this environment only in the variables of READ_LATE.

        `place` translates the command, for example into one that runs inside a node of tests/nodes.py, as then all forks do.
        `libraries` are those that recipes use, or only those of the training loop, which are imported in half of the time.
        """
        self.environment = environment
        self.connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(300)  # the first answer comes after all imports
        self.output = tempfile.TemporaryFile("w+")
        # accel_ddp sets this before it imports torch.
        own = {"OMP_WAIT_POLICY": "PASSIVE", **environment}
        # With these, numpy and pyarrow start no threads when they are imported. A process with threads cannot be forked safely.
        own.update(OPENBLAS_NUM_THREADS="1", JE_ARROW_MALLOC_CONF="background_thread:false")
        own.pop("OMP_NUM_THREADS", None)  # each fork sets its own number of threads
        self.process = subprocess.Popen(
            place([sys.executable, SERVER, str(other.fileno()), libraries]), env=own, stdin=subprocess.DEVNULL, stdout=self.output,
            stderr=self.output, pass_fds=[other.fileno()],
        )  # fmt: skip
        other.close()
        self.lock = threading.Lock()  # one request at a time
        atexit.register(self.end)

    def end(self) -> None:
        """Kill the server, and with it its forks."""
        self.process.kill()
        self.process.wait()

    def fits(self, environment: dict[str, str]) -> bool:
        """Return whether a fork can have this environment."""
        changed = {name for name, _ in environment.items() ^ self.environment.items()}
        return changed <= READ_LATE

    def fork(
        self, argv: list[str], environment: dict[str, str], cwd: Path, new_session: bool, terminal: int | None = None
    ) -> "Forked":
        """Start a Python script with its arguments as a fork of the server, and return its process.

        It writes to this terminal, or to the pipe `stdout` of the process.
        """
        reader, output = os.pipe() if terminal is None else (os.open(os.devnull, os.O_RDONLY), os.dup(terminal))
        report, reporter = os.pipe()
        request = {"argv": argv, "environment": environment, "cwd": str(cwd), "new_session": new_session}
        try:
            with self.lock:
                socket.send_fds(self.connection, [json.dumps(request).encode()], [output, reporter])
                answer = self.connection.recv(100)
        except OSError as error:
            raise self.no_answer() from error
        finally:
            os.close(output)
            os.close(reporter)
        if not answer:
            raise self.no_answer()
        return Forked(self, int(answer), reader, report)

    def no_answer(self) -> RuntimeError:
        """Return the error for a server that does not answer, with its exit code and its output."""
        self.output.seek(0)
        return RuntimeError(f"{SERVER} has ended or hangs (exit code {self.process.poll()}). Its output: {self.output.read()}")


class Forked:
    """A process that the server has forked. It has those methods of subprocess.Popen that the tests use."""

    def __init__(self, server: Server, pid: int, output: int, report: int):
        self.server = server
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = open(output)
        self.report = open(report, "rb", buffering=0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or minus the number of the signal that ended the process."""
        if self.returncode is None:
            if not select.select([self.report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            code = self.report.read(10)
            if not code:
                raise self.server.no_answer()
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
