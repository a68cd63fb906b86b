"""The worker processes of one node in one trial. They end with the trial, or when the agent that started them ends."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_ddp.net.sanitize import printable

WORKER_MODULE = "accel_ddp.tune.worker"

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
