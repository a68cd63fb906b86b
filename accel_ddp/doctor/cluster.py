"""All checks except for collectives, from this host alone to every path between the nodes."""

import asyncio
import errno
import ipaddress
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accel_ddp.doctor import connect, facts, host, host_checks, sanitize, timeouts
from accel_ddp.doctor.client import Facts, follow_coordinator
from accel_ddp.doctor.coordinator import Coordinator
from accel_ddp.doctor.host import HOST, local_finding
from accel_ddp.doctor.options import CheckOptions
from accel_ddp.doctor.platforms import firewall_advice
from accel_ddp.doctor.report import ERROR, Finding, Outcome, has_errors
from accel_ddp.environment.topology import Topology
from accel_ddp.errors import UserError
from accel_ddp.net import messages
from accel_ddp.net.probe import ProbeServer


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
        ip = await connect.resolve_main_address(topology, options.wait_seconds, print_progress, began)
    except UserError as error:
        options.findings.append(connect.explain_unknown_name(topology, str(error)))
        ip = await connect.find_address_without_name(topology, token)
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
    reach = lambda **more: connect.connect_to_coordinator(topology, local.connect_ip, token, options, print_progress, **more)
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
            reached = await connect.connect_to_rescue_port(topology, token) if coordinator else None
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
            "findings": [finding.as_dict() for finding in findings[: sanitize.MOST_FINDINGS]],
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
        reason = str(error) or f"it sent nothing for {timeouts.MAIN_SILENT:.0f} s"
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
    seconds = timeouts.FACTS - 5
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
