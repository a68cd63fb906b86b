"""A connection to the guard of one node: over ssh, or to a subprocess with `backend: local`."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

from accel_ddp.errors import UserError
from accel_ddp.launch.description import Cluster, Node
from accel_ddp.launch.job_commands import shell_path

FOLDER_MISSING, PYTHON_MISSING = 61, 62  # exit codes of the remote command
CONNECT_SECONDS = 10
BEAT_SECONDS = 2.0
_HELLO_SECONDS = 60.0  # after the connection: a busy node needs seconds to start Python
PROTOCOL = 1  # changes with the messages


def ssh_words(cluster: Cluster, node: Node) -> list[str]:
    """Return `ssh` with its options and the host. Options of the description come first, because ssh uses the first value of each."""
    connect = cluster.ssh.get("connect_seconds", CONNECT_SECONDS)
    options = ["BatchMode=yes", f"ConnectTimeout={connect}", "ServerAliveInterval=5", "ServerAliveCountMax=3"]
    # An existing master is used. As one itself, this ssh would end other sessions. Forwardings and commands would fail.
    options += ["ControlMaster=no", "ClearAllForwardings=yes", "RemoteCommand=none"]
    return ["ssh", *cluster.ssh.get("options", []), "-T", *(word for option in options for word in ("-o", option)), node.host]


def guard_command(node: Node) -> str:
    """Return the remote command that starts the guard. It works in every login shell, because `sh` runs it."""
    folder, venv = node.folder or "~", node.venv or ".venv"
    python = shell_path(f"{venv.rstrip('/')}/bin/python")
    missing = f"exit {PYTHON_MISSING}" if node.venv else f"p=$(command -v python3) || exit {PYTHON_MISSING}"
    lines = [f"cd {shell_path(folder)} || exit {FOLDER_MISSING}", f"p={python}", f'[ -x "$p" ] || {missing}']
    lines.append('exec "$p" -m accel_ddp.launch.guard')
    return f"exec sh -c {shlex.quote('; '.join(lines))}"


def explain(cluster: Cluster, node: Node, code: int | None, text: str) -> str:
    host, file = node.host, cluster.file
    end = "no answer within the time limit" if code is None else f"exit code {code}"
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "").rstrip(".")
    try_it = f"Try `{shlex.join(ssh_words(cluster, node))} true`."
    if code == FOLDER_MISSING:
        return f"{host}: the folder {node.folder or '~'} does not exist on this node. Correct `folder` in {file}, or write copy: rsync."
    if code == PYTHON_MISSING:
        what = f"{f'{node.venv}/bin/python' if node.venv else 'python3'} does not exist in {node.folder or '~'}"
        return f"{host}: {what} on this node. Correct `venv` in {file}, or install it there."
    if cluster.backend == "local":
        return f"{host}: the agent of this node exited ({end}): {last or 'it printed nothing'}."
    if "No module named" in text and "accel_ddp" in text:
        name = node.venv or "the Python of this node"
        venv = f"Correct `venv` in {file}" if node.venv else f"Write `venv` into {file}"
        return f"{host}: accel_ddp is missing or too old in {name}. {venv}, or run `pip install -c constraints.txt -e .` there."
    if code not in (None, 255):  # 255 is an error of ssh itself
        return f"{host}: the command on this node exited ({end}): {last or 'it printed nothing'}. {try_it}"
    unreachable = f"the host cannot be reached: {last}. Check that it runs and that its ssh port is open. {try_it}"
    reasons = {
        "IDENTIFICATION HAS CHANGED": "the host key has changed, so this may be another machine. Check it, then run "
        f"`ssh-keygen -R {host}`.",
        "Host key verification failed": f"the host key is not known yet. Run `ssh {host}` once, compare the key, and accept it there.",
        "Permission denied|Too many authentication failures": f"ssh refused your keys ({last}). Passwords and passphrases cannot be "
        f"typed here: use ssh-agent. {try_it}",
        "Could not resolve|not known": f"the name of the host cannot be resolved. Correct `nodes` in {file}, or add the host to your "
        "ssh configuration.",
        "(?i)timed out|No route to host|Connection refused|Network is unreachable|Connection closed": unreachable,
    }
    failed = f"the connection failed ({end}): {last or 'ssh printed nothing'}. {try_it}"
    return f"{host}: " + next((reason for pattern, reason in reasons.items() if re.search(pattern, text)), failed)


class Lost(Exception):
    """The connection has ended. The text states why."""


class Connection:
    def __init__(self, cluster: Cluster, node: Node):
        self.cluster, self.node = cluster, node
        self.process: asyncio.subprocess.Process | None = None
        self.errors = ""  # the end of what ssh has printed on stderr
        self.last_message = time.monotonic()
        self._tasks: list[asyncio.Task] = []

    async def open(self) -> None:
        env = dict(os.environ)
        if self.cluster.backend == "local":
            folder, venv = Path(self.node.folder or ".").expanduser().absolute(), self.node.venv
            python = str(folder / Path(venv).expanduser() / "bin" / "python") if venv else sys.executable
            words = [python, "-m", "accel_ddp.launch.guard"]
            # The guard must find the package of this process, also if it is not installed.
            env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [env.get("PYTHONPATH")])])
            if not folder.is_dir():
                raise Lost(f"{self.node.host}: the folder {folder} does not exist. Correct `folder` in {self.cluster.file}.")
        else:
            words, folder = [*ssh_words(self.cluster, self.node), guard_command(self.node)], None
        pipe = asyncio.subprocess.PIPE
        try:
            # In a session of its own, ssh does not receive the Ctrl-C of the terminal, and has no terminal to ask for a password.
            self.process = await asyncio.create_subprocess_exec(
                *words, stdin=pipe, stdout=pipe, stderr=pipe, limit=1 << 26, cwd=folder, env=env, start_new_session=True
            )
        except FileNotFoundError:
            if self.cluster.backend == "local":
                raise Lost(explain(self.cluster, self.node, PYTHON_MISSING, "")) from None
            raise UserError(f"{words[0]} is not installed on this machine. Install the OpenSSH client.") from None
        self._tasks.append(asyncio.ensure_future(self._read_errors()))
        limit = self.cluster.ssh.get("connect_seconds", CONNECT_SECONDS) + _HELLO_SECONDS
        try:
            hello = await asyncio.wait_for(self.receive(), limit)
        except asyncio.TimeoutError:
            raise Lost(explain(self.cluster, self.node, None, self.errors)) from None
        if hello.get("is") != "hello" or hello.get("protocol") != PROTOCOL:
            raise Lost(f"{self.node.host}: another version of accel_ddp is installed there. Install the same version.")
        self.errors = ""  # what the login has printed does not explain a later end
        self._tasks.append(asyncio.ensure_future(self._beat()))

    async def receive(self) -> dict[str, Any]:
        """Return the next message. Lines that are not messages are left out: login scripts may print them."""
        while True:
            try:
                line = await self.process.stdout.readline()
            except ValueError:  # a line without an end
                raise Lost(f"{self.node.host}: the answer does not come from accel_ddp.") from None
            if not line:
                code = await self._exit_code(5)
                await asyncio.wait(self._tasks[:1], timeout=1)
                raise Lost(explain(self.cluster, self.node, code, self.errors))
            self.last_message = time.monotonic()
            with contextlib.suppress(ValueError):
                if isinstance(message := json.loads(line), dict) and "is" in message:
                    if message["is"] == "beat":
                        continue
                    return message

    async def ask(self, kind: str, answer: str, limit: float = 60.0, **values: Any) -> dict[str, Any]:
        self.send(kind, **values)
        try:
            while (message := await asyncio.wait_for(self.receive(), limit))["is"] not in (answer, "failed"):
                pass
        except asyncio.TimeoutError:
            raise Lost(f"{self.node.host}: the guard does not answer within {limit:.0f} s.") from None
        if message["is"] == "failed":
            raise Lost(message["text"])
        return message

    def send(self, kind: str, **values: Any) -> None:
        if self.process.stdin.is_closing():  # asyncio would print a warning for each message to a guard that has ended
            return
        with contextlib.suppress(OSError, RuntimeError):
            self.process.stdin.write(json.dumps({"do": kind, **values}).encode() + b"\n")

    async def close(self) -> None:
        """End the connection. A guard without a connection stops its job."""
        for task in self._tasks:
            task.cancel()
        if self.process:
            with contextlib.suppress(OSError, RuntimeError):
                self.process.stdin.close()
            # With `backend: local`, the process is the guard itself, which needs some seconds to stop a job.
            if await self._exit_code(20 if self.cluster.backend == "local" else 2) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)  # also the ssh of a jump host, which has inherited stderr
                await self._exit_code(2)

    async def _exit_code(self, seconds: float) -> int | None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.process.wait(), seconds)
        return self.process.returncode

    async def _beat(self) -> None:
        while True:
            self.send("beat")
            await asyncio.sleep(BEAT_SECONDS)

    async def _read_errors(self) -> None:
        while data := await self.process.stderr.read(4096):
            self.errors = (self.errors + data.decode(errors="replace"))[-16384:]


async def open_all(cluster: Cluster) -> list[Connection]:
    """Return connections to the guards of all nodes. If some fail, close all and raise UserError with every reason."""
    connections = [Connection(cluster, node) for node in cluster.nodes]
    close_all = lambda: asyncio.gather(*(connection.close() for connection in connections))
    try:
        results = await asyncio.gather(*(connection.open() for connection in connections), return_exceptions=True)
    except asyncio.CancelledError:  # Ctrl-C
        await close_all()
        raise
    if failures := [result for result in results if result]:
        await close_all()
        for failure in failures:
            if not isinstance(failure, (Lost, UserError)):
                raise failure
        raise UserError(join_reasons("some nodes cannot be used:", list(map(str, failures))))
    return connections


def join_reasons(title: str, reasons: list[str]) -> str:
    return reasons[0] if len(reasons) == 1 else "\n  ".join([title, *reasons])
