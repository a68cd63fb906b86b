"""The worker processes that measure collectives on one node, and what the doctor reads from their reports."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import psutil

from accel_ddp.doctor.compare_nodes import clean_finding
from accel_ddp.doctor.findings import Finding, Outcome
from accel_ddp.doctor.host import HOST, socket_interface_variables
from accel_ddp.nodes.messages import printable
from accel_ddp.nodes.spawn import MODULE, clean_environment, rank_environment

CHECKS = "accel_ddp.doctor.collectives"
_GRACE_SECONDS = 15  # after the time limit of the ranks, until they are killed
_LONGEST_REPORT = 1 << 22  # bytes of a line
_FIX = "python -c 'import torch; print(torch.cuda.is_available())' shows whether torch works there; see dmesg and nvidia-smi"

SendEvent = Callable[[dict[str, Any]], None]


class WorkerProcesses:
    """Starts the workers of this node, forwards their reports, and kills them. `start` may set only `allowed_variables`."""

    def __init__(
        self, module: str, node: int, ranks_of_nodes: list[int], main_ip: str, environment: dict[str, str],
        allowed_variables: Set[str] = frozenset(),
    ):  # fmt: skip
        self.module, self.node, self.ranks_of_nodes, self.main_ip = module, node, ranks_of_nodes, main_ip
        self.first_rank = sum(ranks_of_nodes[:node])
        self.environment, self.allowed_variables = environment, allowed_variables
        self.processes: list[asyncio.subprocess.Process] = []
        self.running: asyncio.Future | None = None

    def start(self, trial: int, port: int, variables: dict[str, str], spec: dict[str, Any], send_event: SendEvent) -> None:
        if not variables.keys() <= self.allowed_variables:
            forbidden = ", ".join(variables.keys() - self.allowed_variables)
            raise ValueError(f"the variables {forbidden} are not tuned and not given with --try on this node")
        self.running = asyncio.ensure_future(self._run(trial, port, variables, spec, send_event))

    async def _run(self, trial: int, port: int, variables: dict[str, str], spec: dict[str, Any], send_event: SendEvent) -> None:
        folder = Path(tempfile.mkdtemp(prefix="accel_ddp_workers_"))
        try:
            (folder / "spec").write_text(json.dumps(spec))
            self.processes, readers = [], []
            for local_rank in range(self.ranks_of_nodes[self.node]):
                env = self.environment | variables
                env |= rank_environment(self.ranks_of_nodes, self.node, local_rank, self.main_ip, port)
                if spec["nccl_debug"]:
                    env |= {"NCCL_DEBUG": spec["nccl_debug"], "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV"}
                    env["NCCL_DEBUG_FILE"] = str(folder / f"nccl.{local_rank}")
                command = [sys.executable, *MODULE, self.module, str(folder / "spec"), str(os.getpid())]
                with open(folder / f"stderr.{local_rank}", "w") as stderr:
                    process = await asyncio.create_subprocess_exec(
                        *command, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=stderr,
                        limit=_LONGEST_REPORT, start_new_session=True,  # Ctrl-C reaches this process alone, which kills the workers
                    )  # fmt: skip
                self.processes.append(process)
                source = {"trial": trial, "rank": self.first_rank + local_rank}
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

    def states(self) -> dict[int, str]:
        found = {}
        for rank, process in enumerate(self.processes, self.first_rank):
            if process.returncode is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found[rank] = psutil.Process(process.pid).status()
        return found

    def kill(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    async def close(self) -> None:
        self.kill()
        if self.running:
            with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(asyncio.shield(self.running), 5)


async def _forward_reports(
    process: asyncio.subprocess.Process, source: dict[str, Any], folder: Path, local_rank: int, send_event: SendEvent
) -> None:
    """Send an event for every report of a worker and for its exit, with NCCL's first warning or its last line of stderr."""
    async for line in process.stdout:
        with contextlib.suppress(ValueError):  # a library may print other lines
            report = json.loads(line)
            if isinstance(report, dict):
                send_event({"event": "worker_report", **source, "report": report})
    code = await process.wait()
    logs = [folder / f"{name}.{local_rank}" for name in ("nccl", "stderr")]
    nccl, stderr = (log.read_text(errors="replace") if code and log.is_file() else "" for log in logs)
    warnings = [f"NCCL: {warning}" for warning in re.findall("NCCL WARN (.*)", nccl)]
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    output = printable((warnings[:1] or lines[-1:] or [""])[0], 300)
    send_event({"event": "worker_exit", **source, "code": code, "output": output})


def run_collectives(outcome: Outcome, options: dict[str, Any], seconds: float) -> tuple[list[str], list[Finding], dict[str, Any]]:
    main_ip = next((peer for peer in outcome.roster if peer["node"] == 0), outcome.roster[0])["ip"]
    # The interfaces are those that the preflight of a recipe sets. A user who has set NCCL_DEBUG wants the log.
    environment = clean_environment() | socket_interface_variables(outcome.interface, main_ip)
    workers = WorkerProcesses(CHECKS, outcome.node_rank or 0, outcome.ranks_of_nodes, main_ip, environment)
    spec = {"seconds": seconds, "ranks_of_nodes": outcome.ranks_of_nodes, **options}
    spec["nccl_debug"] = "" if "NCCL_DEBUG" in environment else "INFO"
    events: list[dict[str, Any]] = []
    states: dict[int, str] = {}  # of workers that had to be killed

    async def run() -> None:
        workers.start(0, outcome.deep_port, {}, spec, events.append)
        try:
            await asyncio.wait({workers.running}, timeout=seconds + _GRACE_SECONDS)
            states.update(workers.states())
        finally:
            await workers.close()

    asyncio.run(run())
    events.sort(key=lambda event: event.get("rank", 0))
    for report in [event["report"] for event in events if event["event"] == "worker_report"]:
        with contextlib.suppress(ValueError, KeyError):
            findings = [clean_finding(finding) for finding in report["findings"]]
            return [str(line) for line in report["lines"]], findings, report["figures"]
    findings = []
    for rank, code, output in [(one["rank"], one["code"], one["output"]) for one in events if one["event"] == "worker_exit"]:
        end = f"was still running at the time limit ({states[rank]})" if rank in states else f"exited with code {code}"
        saw = f"its process {end} and wrote no report{f'; its last line of output: {output}' if output else ''}"
        findings.append(Finding("E_COLLECTIVE_FAILED", saw, _FIX, host=HOST, node=workers.node, rank=rank))
    return [], findings, {}
