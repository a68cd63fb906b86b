"""Starts the rank processes of the collective checks on this node and reads their report."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from accel_ddp.doctor.findings import Finding, Outcome
from accel_ddp.doctor.host import HOST, socket_interface_variables
from accel_ddp.doctor.paths import clean_finding

_GRACE_SECONDS = 15  # after the time limit of the ranks, until they are killed
_FIX = "python -c 'import torch; print(torch.cuda.is_available())' shows whether torch works there; see dmesg and nvidia-smi"


def run_collectives(outcome: Outcome, options: list[str], seconds: float) -> tuple[list[str], list[Finding], dict[str, Any]]:
    """Run a process for each rank of this node with these options. Returns (lines, findings, figures) of their report.

    The ranks of all nodes write the same report. `seconds` is their time limit.
    """
    main = next((peer for peer in outcome.roster if peer["node"] == 0), outcome.roster[0])
    node_rank, counts = outcome.node_rank or 0, outcome.ranks_of_nodes
    num_local, first_rank = counts[node_rank], sum(counts[:node_rank])
    base = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "PET_"))}
    base |= socket_interface_variables(outcome.interface, main["ip"])  # as the preflight of a recipe sets them
    processes, results = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            for local_rank in range(num_local):
                results.append(folder / f"{local_rank}.json")
                env = {
                    **base, "RANK": str(first_rank + local_rank),
                    "WORLD_SIZE": str(sum(counts)), "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(num_local), "GROUP_RANK": str(node_rank), "MASTER_ADDR": main["ip"],
                    "MASTER_PORT": str(outcome.deep_port),
                }  # fmt: skip
                command = [sys.executable, "-m", "accel_ddp.doctor.collectives", "--result", str(results[-1])]
                command += ["--seconds", str(seconds), "--ranks_of_nodes", ",".join(map(str, counts)), *options]
                with open(folder / f"{local_rank}.txt", "w") as output:
                    processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=output))
            deadline = time.monotonic() + seconds + _GRACE_SECONDS
            for process in processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            ends = [_end_process(process) for process in processes]
        for file in results:
            try:
                report = json.loads(file.read_text())
                findings = [clean_finding(finding) for finding in report["findings"]]
                return [str(line) for line in report["lines"]], findings, report["figures"]
            except (OSError, ValueError, KeyError):
                continue
        findings = []
        for local_rank, end in enumerate(ends):
            output = (folder / f"{local_rank}.txt").read_text(errors="replace").strip().splitlines()
            saw = f"its process {end} and wrote no report{f'; its last line of output: {output[-1][:300]}' if output else ''}"
            rank = first_rank + local_rank
            findings.append(Finding("E_COLLECTIVE_FAILED", saw, _FIX, host=HOST, node=node_rank, rank=rank))
        return [], findings, {}


def _end_process(process: subprocess.Popen) -> str:
    """Kill the process if it is still running. Returns how it ended."""
    if process.poll() is not None:
        return f"ended with exit code {process.returncode}"
    import psutil

    state = psutil.Process(process.pid).status()
    process.kill()
    process.wait()
    return f"was still running at the time limit ({state})"
