"""A node's side of the tuning: one agent per node answers the coordinator and runs the worker processes of a trial.

The workers end with the trial, or when the agent that started them ends.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_ddp.doctor.coordinator import Connection, CoordinatorClient, describe_loss, try_port
from accel_ddp.errors import INTERRUPTED
from accel_ddp.measure import tune_results
from accel_ddp.measure.trials import JOIN_SECONDS, SILENCE_SECONDS
from accel_ddp.nodes import messages
from accel_ddp.nodes.messages import printable

WORKER_MODULE = "accel_ddp.measure.trial_worker"

SendEvent = Callable[[dict[str, Any]], None]


class WorkerProcesses:
    """Starts the workers of this node, forwards their reports, and kills them.

    `environment` is the environment of the workers, to which the main node may add only the variables in `allowed_variables`.
    """

    def __init__(
        self, node: int, ranks_of_nodes: list[int], main_ip: str, environment: dict[str, str], allowed_variables: set[str]
    ):
        self.node, self.main_ip = node, main_ip
        self.local_ranks, self.ranks = ranks_of_nodes[node], sum(ranks_of_nodes)
        self.first_rank = sum(ranks_of_nodes[:node])
        self.environment, self.allowed_variables = environment, allowed_variables
        self.processes: list[asyncio.subprocess.Process] = []
        self.running: asyncio.Future | None = None

    def start(self, trial: int, port: int, variables: dict[str, str], spec: dict[str, Any], send_event: SendEvent) -> None:
        """Start the workers, which measure what `spec` describes. Their reports and ends are given to `send_event`."""
        if not variables.keys() <= self.allowed_variables:
            forbidden = ", ".join(variables.keys() - self.allowed_variables)
            raise ValueError(f"the variables {forbidden} are not tuned and not given with --try on this node")
        self.running = asyncio.ensure_future(self._run(trial, port, variables, spec, send_event))

    async def _run(self, trial: int, port: int, variables: dict[str, str], spec: dict[str, Any], send_event: SendEvent) -> None:
        folder = Path(tempfile.mkdtemp(prefix="accel_ddp_tune_"))
        try:
            (folder / "spec").write_text(json.dumps(spec))
            self.processes, readers = [], []
            for local_rank in range(self.local_ranks):
                rank = self.first_rank + local_rank
                env = {
                    **self.environment, **variables, "RANK": str(rank), "WORLD_SIZE": str(self.ranks),
                    "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self.local_ranks), "GROUP_RANK": str(self.node),
                    "MASTER_ADDR": self.main_ip, "MASTER_PORT": str(port),
                    "NCCL_DEBUG": "INFO" if spec["read_nccl_log"] else "WARN", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV",
                    "NCCL_DEBUG_FILE": str(folder / f"nccl.{local_rank}"),
                }  # fmt: skip
                command = [sys.executable, "-m", WORKER_MODULE, str(folder / "spec"), str(os.getpid())]
                with open(folder / f"stderr.{local_rank}", "w") as stderr:
                    process = await asyncio.create_subprocess_exec(
                        *command, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=stderr,
                        start_new_session=True,  # Ctrl-C reaches the agent alone, which then kills the workers
                    )  # fmt: skip
                self.processes.append(process)
                source = {"trial": trial, "rank": rank}
                readers.append(asyncio.ensure_future(_forward_reports(process, source, folder, local_rank, send_event)))
            await asyncio.gather(*readers)
        except OSError as error:
            self.kill()
            failed = {"trial": trial, "rank": self.first_rank, "code": 1, "output": f"cannot be started: {error}"}
            send_event({"event": "worker_exit", **failed})
        finally:
            self.kill()
            shutil.rmtree(folder, ignore_errors=True)
        send_event({"event": "node_done", "trial": trial})

    def kill(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    async def close(self) -> None:
        """Kill the workers and wait at most 5 s for their end."""
        self.kill()
        if self.running:
            with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(asyncio.shield(self.running), 5)


async def _forward_reports(
    process: asyncio.subprocess.Process, source: dict[str, Any], folder: Path, local_rank: int, send_event: SendEvent
) -> None:
    """Send an event for every report of a worker and for its end."""
    async for line in process.stdout:
        with contextlib.suppress(ValueError):  # a library may print other lines
            report = json.loads(line)
            if isinstance(report, dict):
                send_event({"event": "worker_report", **source, "report": report})
    code = await process.wait()
    output = _last_error(folder, local_rank) if code else ""
    send_event({"event": "worker_exit", **source, "code": code, "output": output})


def _last_error(folder: Path, local_rank: int) -> str:
    """Return the first warning of NCCL, or the last line of the worker's stderr."""
    with contextlib.suppress(OSError):
        if warnings := re.findall("NCCL WARN (.*)", (folder / f"nccl.{local_rank}").read_text(errors="replace")):
            return printable(f"NCCL: {warnings[0]}", 300)
    with contextlib.suppress(OSError):
        text = (folder / f"stderr.{local_rank}").read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return printable(lines[-1], 300) if lines else ""
    return ""


class Agent:
    """Starts and kills the worker processes of its node, prints texts and writes files, as the coordinator requests."""

    def __init__(self, processes: WorkerProcesses, out: str):
        self.processes, self.out = processes, out

    async def run(self, ip: str, port: int, token: bytes, info: dict[str, Any], interrupted: asyncio.Future) -> int:
        """Answer the coordinator at this address until it closes the connection, and return the exit code.

        `info` describes this node. The result of `interrupted` is the name of the signal with which the user ends this agent.
        Raises OSError if the coordinator does not accept a connection.
        """
        self.client = client = CoordinatorClient(await _connect(ip, port, token), SILENCE_SECONDS)
        following = asyncio.ensure_future(client.follow(info, self._answer))
        try:
            await asyncio.wait([following, interrupted], return_when=asyncio.FIRST_COMPLETED)
            if interrupted.done():
                reason = f"was ended by {interrupted.result()}"
                await messages.send(client.writer, {"event": "leaving", "reason": reason}, 2)
                print(f"Ended by {interrupted.result()}. The tuning ends on the other nodes too.", flush=True)
                return INTERRUPTED
            ended = following.result()
            code = int(ended["code"])
            if ended["text"]:
                _print(ended["text"])
            return code
        except (OSError, asyncio.TimeoutError, KeyError, TypeError, ValueError) as error:
            print(
                f"The main node ({ip}:{port}) {describe_loss(error, SILENCE_SECONDS)}: `accel-ddp tune` ended there, or its network "
                "failed. Read its output, then start `accel-ddp tune` again on every node.",
                flush=True,
            )
            return 1
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await self.processes.close()

    async def _answer(self, request: dict[str, Any]) -> None:
        kind, outbox = request["do"], self.client.outbox
        if kind == "print":
            _print(request["text"])
        elif kind == "start":
            trial, port, environment, spec = (request[name] for name in ("trial", "port", "environment", "spec"))
            self.processes.start(trial, port, environment, spec, outbox.put_nowait)
        elif kind == "kill":
            self.processes.kill()
        elif kind == "write":
            lines, is_complete = await asyncio.to_thread(tune_results.write_files, self.out, request["files"])
            outbox.put_nowait({"event": "written", "lines": lines, "is_complete": is_complete})


def _print(text: str) -> None:
    print("\n".join(printable(line) for line in text.split("\n")), flush=True)


async def _connect(ip: str, port: int, token: bytes) -> Connection:
    """Return a connection to the coordinator. Raises OSError if it does not accept one within JOIN_SECONDS."""
    deadline = time.monotonic() + JOIN_SECONDS
    while isinstance((connection := await try_port(ip, port, token))[0], str):
        if time.monotonic() > deadline:
            reason = connection[1] or connection[0]
            raise ConnectionError(f"the main node does not accept a connection at {ip}:{port}: {reason}")
        await asyncio.sleep(0.1)
    return connection
