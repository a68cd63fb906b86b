"""All checks except for collectives, from this host alone to every path between the nodes."""

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.doctor import facts, host, host_checks, node_client, paths
from accel_ddp.doctor import findings as report
from accel_ddp.doctor.check_options import CheckOptions, options_of_config
from accel_ddp.doctor.coordinator import Coordinator
from accel_ddp.doctor.findings import ERROR, Finding, Outcome, has_errors
from accel_ddp.doctor.host import HOST, firewall_advice, local_finding
from accel_ddp.doctor.node_client import Facts, follow_coordinator
from accel_ddp.errors import UserError
from accel_ddp.nodes import messages
from accel_ddp.nodes.launcher import check_rank_variables, check_requested_world, warn_about_independent_tasks
from accel_ddp.nodes.probe import ProbeServer
from accel_ddp.nodes.topology import Topology, topology_of_this_rank
from accel_ddp.watch.restart_files import IS_RESTART


@dataclass
class _LocalChecks:
    """The outcome of the checks of this host alone."""

    findings: list[Finding]
    listen_ip: str  # address on which the coordinator listens, if it runs here
    connect_ip: str  # address under which this node connects to the coordinator
    data_ip: str  # address and interface that this node uses for data
    interface: str
    folder: Path | None  # the existing part of the output folder


async def check_cluster(topology: Topology, options: CheckOptions, print_progress: Callable[[str], None]) -> Outcome:
    """Run all checks except for collectives and return their outcome, in bounded time whatever the other nodes do.

    The node that has the main address runs the coordinator. Every node, also that one, connects to it as a client.
    """
    began = time.monotonic()
    token = messages.make_token(topology.main_port, options.script, options.secret)
    try:
        ip = await node_client.resolve_main_address(topology, options.wait_seconds, print_progress, began)
    except UserError as error:
        options.findings.append(node_client.explain_unknown_name(topology, str(error)))
        ip = await node_client.find_address_without_name(topology, token)
        if not ip:
            return Outcome(options.findings)
    local = await asyncio.to_thread(_check_host, topology, options, ip)
    findings = local.findings
    collecting = asyncio.ensure_future(asyncio.to_thread(_collect_facts, topology, options))  # while it connects
    probe_server = ProbeServer(token)
    coordinator: Coordinator | None = None
    following: asyncio.Future | None = None
    start = lambda **more: _start_coordinator(topology, local, token, options, print_progress, **more)
    may_rescue = topology.local_rank == 0 and topology.rescue_port and (host.is_local_address(ip) or topology.node_rank == 0)
    reach = lambda **more: node_client.connect_to_coordinator(topology, local.connect_ip, token, options, print_progress, **more)
    try:
        if topology.local_rank == 0:
            try:
                await probe_server.open(local.data_ip)
            except OSError as error:
                saw = f"no port can be opened on {local.data_ip}: {error.strerror}"
                fix = "choose another interface with GLOO_SOCKET_IFNAME, see `ip addr`"
                findings.append(local_finding(topology, "E_PORT", saw, fix))
        may_coordinate = host.is_local_address(ip) and topology.local_rank == 0
        # With two nodes on one machine, a node other than 0 that took the port first would block node 0's launcher. It
        # therefore waits some seconds for node 0.
        start_after = 0.0 if not topology.node_rank else 5.0 if ipaddress.ip_address(ip).is_loopback else 0.5
        if may_coordinate and not start_after:
            coordinator = await start()
        reached = await reach(
            findings=findings, began=began, start_coordinator=start if may_coordinate else None, start_after=start_after
        )
        if isinstance(reached, Finding):
            if reached.severity != ERROR or not may_rescue:
                return Outcome([*findings, *(await collecting)[1], reached])
            if not has_errors(findings):  # otherwise these errors are the reason
                findings.append(reached)
            # The other nodes would wait for this one. They connect to the rescue port and receive these errors.
            coordinator = await start(is_rescue=True)
            reached = await node_client.connect_to_rescue_port(topology, token) if coordinator else None
            if not reached:
                return Outcome([*findings, *(await collecting)[1]])
        if isinstance(reached, Coordinator):
            coordinator = reached
            reached = await reach(findings=[], began=time.monotonic())
            if isinstance(reached, Finding):
                return Outcome([*findings, reached])
        hello = {
            "node": topology.node_rank, "nodes": topology.num_nodes, "ranks": topology.num_ranks, "rank": topology.rank,
            "node_ranks": topology.num_node_ranks,
            "local_rank": topology.local_rank, "local_ranks": topology.num_local_processes, "pid": os.getpid(), "host": HOST,
            "ip": local.data_ip, "interface": local.interface, "ports": probe_server.ports, "needed": options.checkpoint_bytes,
            "open": firewall_advice(f"TCP {topology.main_port}"), "deep": options.deep,
            "findings": [finding.as_dict() for finding in findings[: paths.MOST_FINDINGS]],
        }  # fmt: skip
        client_progress = (lambda text: None) if coordinator else print_progress  # the coordinator prints it itself
        following = asyncio.ensure_future(
            follow_coordinator(reached, hello, collecting, local.folder, token, options.measures_bandwidth, client_progress)
        )
        if coordinator:  # an exception in the coordinator must not look like a main node that does not answer
            await asyncio.wait([following, coordinator.finished], return_when=asyncio.FIRST_COMPLETED)
            if coordinator.finished.done():
                coordinator.finished.result()
        outcome = await following
        if coordinator:
            await coordinator.finished
        outcome.about, outcome.interface = facts.describe_node((await collecting)[0]), local.interface
        return outcome
    except (OSError, asyncio.TimeoutError) as error:
        reason = str(error) or f"it sent nothing for {host.MAIN_SILENT:.0f} s"
        lost = local_finding(
            topology, "E_MAIN_LOST", f"the connection to the main node {topology.main_address}:{topology.main_port} was lost "
            f"before the verdict: {reason}", "read the output of the main node to see why; then start again on every node",
        )  # fmt: skip
        return Outcome([*findings, lost])
    finally:
        await probe_server.close()
        if coordinator:
            await coordinator.close()
        for task in (collecting, following):  # after Ctrl-C; what they raise now is already reported or irrelevant
            if task:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _check_host(topology: Topology, options: CheckOptions, ip: str) -> _LocalChecks:
    """Run the checks of this host alone. `ip` is the address of the main node."""
    findings = [*options.findings, *host_checks.check_topology(topology, ip)]
    listen_ip, connect_ip = host.choose_coordinator_addresses(topology, ip)
    address, interface, wrong = host_checks.choose_data_address(topology, connect_ip)
    data_ip = address or ip
    variables = host.socket_interface_variables(interface, data_ip)
    findings += [*wrong, *host_checks.check_host_name(topology, interface, data_ip, variables, options.sets_interface)]
    if options.sets_interface:
        os.environ.update(variables)
    folder = host.nearest_existing_folder(options.output_dir) if options.output_dir else None
    if topology.local_rank == 0:
        findings += host_checks.check_limits(topology, options.output_dir, folder)
    return _LocalChecks(findings, listen_ip, connect_ip, data_ip, interface, folder)


def _collect_facts(topology: Topology, options: CheckOptions) -> Facts:
    """Return the facts of this node and findings about them.

    Only the first rank of a node collects facts: those of the other ranks are the same, and the driver would be queried by
    all of them at once.
    """
    if topology.local_rank:
        return {}, []
    hash_seconds = 10.0 if options.measures_bandwidth else 2.0
    collect = lambda: facts.collect_facts(
        topology, options.recipe, options.hub_names, options.files, options.script, hash_seconds
    )
    seconds = host.FACTS - 5
    collected = host.call_with_timeout(collect, seconds, None)
    if collected is None:
        saw = f"this node could not collect its versions, files and GPUs within {seconds:.0f} s: a disk or a program hangs"
        fix = "try `df`, `git status` and `nvidia-smi` there"
        return {}, [local_finding(topology, "E_DISK_STUCK", saw, fix)]
    return collected


async def _start_coordinator(
    topology: Topology, local: "_LocalChecks", token: bytes, options: CheckOptions, print_progress: Callable[[str], None],
    is_rescue: bool = False,
) -> Coordinator | None:  # fmt: skip
    """Return a coordinator that listens, or None if its port cannot be used. `is_rescue` is for errors of this node.

    A port in use belongs to another doctor of this run or to another program, which connecting to it shows.
    """
    coordinator = Coordinator(token, options.wait_seconds, print_progress)
    try:
        address, ports = (local.listen_ip, topology.coordinator_ports) if not is_rescue else ("0.0.0.0", (topology.rescue_port,))
        await coordinator.open(address, ports, local.connect_ip, topology.rescue_port, topology.main_address)
    except OSError as error:
        if not is_rescue and error.errno != errno.EADDRINUSE:
            saw = f"it is not possible to listen on {local.listen_ip}:{topology.coordinator_ports[0]}: {error.strerror}"
            fix = "use another --main_process_port, above 1023, on every node"
            local.findings.append(local_finding(topology, "E_PORT", saw, fix))
        return None
    return coordinator


# The checks that every recipe on more than one node runs before torch is imported.


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
    options.wait_seconds, options.no_answer_seconds = cfg.preflight_wait, host.PREFLIGHT_NO_ANSWER
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
