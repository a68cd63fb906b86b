"""The checks that every recipe on more than one node runs before torch is imported."""

import asyncio
import contextlib
import os
import socket
import sys
import time

from accel_ddp.config import TrainConfig
from accel_ddp.doctor import report, timeouts
from accel_ddp.doctor.cluster import check_cluster
from accel_ddp.doctor.host import HOST, local_finding
from accel_ddp.doctor.options import CheckOptions, options_of_config
from accel_ddp.doctor.report import Finding, Outcome
from accel_ddp.environment.launcher import check_rank_variables, check_requested_world, warn_about_independent_tasks
from accel_ddp.environment.topology import Topology, topology_of_this_rank
from accel_ddp.errors import UserError
from accel_ddp.watch.outcome import IS_RESTART


def run_preflight(cfg: TrainConfig) -> None:
    """Return when all nodes are connected, alike, and reach each other. Otherwise raise UserError on every rank."""
    topology = topology_of_this_rank()
    check_rank_variables()
    if cfg.preflight == "off" or topology.num_nodes <= 1:
        check_requested_world()
        warn_about_independent_tasks()
        return
    if os.environ.get(IS_RESTART) == "1" and not _is_preflight_running(topology):
        # The nodes were checked before the first attempt, and all launchers have agreed on this restart. `ranks.group` compares
        # the options of a node that has joined. A preflight would take seconds and would add a point at which ranks can wait.
        check_requested_world()
        return
    options = options_of_config(cfg, script=sys.argv[0])
    options.wait_seconds, options.no_answer_seconds = cfg.preflight_wait, timeouts.PREFLIGHT_NO_ANSWER
    options.measures_bandwidth, options.sets_interface = False, True
    try:
        check_requested_world()
    except UserError as error:  # reported to all nodes: if only this node ended, the others would wait for it
        options.findings.append(local_finding(topology, "E_PROCESSES", str(error), ""))
    began = time.monotonic()
    outcome = asyncio.run(check_cluster(topology, options, print_progress if topology.local_rank == 0 else lambda text: None))
    raise_on_errors(outcome)
    if topology.local_rank == 0:
        print_findings(outcome.findings)
    if topology.local_rank == 0 and outcome.node_rank == 0:
        over = f" over {outcome.interface}" if outcome.interface else ""
        print(f"preflight: {len(outcome.roster)} nodes are alike and reach each other{over} ({time.monotonic() - began:.1f} s)")


def _is_preflight_running(topology: Topology) -> bool:
    """Return whether ranks that are not restarted are still in their preflight, which needs this node too.

    With c10d the ranks of all nodes are started together, and the main port is that of their store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    for port in topology.coordinator_ports:
        with contextlib.suppress(OSError):
            socket.create_connection((topology.main_address, port), timeout=2).close()
            return True
    return False


def report_to_other_nodes(reason: str, topology: Topology | None = None, script: str = "") -> None:
    """Report to the other nodes that this node ends because of its options, so that they do not wait. Takes 5 s at most.

    A launcher gives the topology and the script. Otherwise they are those of this rank.
    """
    topology = topology or topology_of_this_rank()
    if topology.num_nodes <= 1 or topology.local_rank:
        return
    finding = local_finding(topology, "E_OPTIONS", reason, "read the output of that node")
    options = CheckOptions(script=script or sys.argv[0], measures_bandwidth=False, findings=[finding], wait_seconds=5)
    asyncio.run(check_cluster(topology, options, lambda text: None))


def print_progress(text: str) -> None:
    """Print a line about what the doctor waits for, with the name of this host."""
    print(f"{HOST}: {text}", file=sys.stderr, flush=True)


def raise_on_errors(outcome: Outcome) -> None:
    """Raise UserError with all findings if one of them is an error."""
    if outcome.has_errors:
        hint = "Training was not started. --preflight off starts it without these checks."
        lines = [report.format_findings(outcome.findings), *outcome.table, hint]
        raise UserError(f"preflight: {report.summarize(outcome.findings)}\n" + "\n".join(lines))


def print_findings(findings: list[Finding]) -> None:
    if findings:
        print(report.format_findings(findings, report.supports_colour(sys.stderr)), file=sys.stderr, flush=True)
