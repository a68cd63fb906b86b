"""All checks except for collectives, from this host alone to every path between the nodes, and the preflight that runs them."""

import asyncio
import contextlib
import errno
import functools
import ipaddress
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.doctor import compare_nodes, facts, host, node_client
from accel_ddp.doctor import findings as report
from accel_ddp.doctor.check_options import CheckOptions, options_of_config
from accel_ddp.doctor.coordinator import try_port
from accel_ddp.doctor.findings import ERROR, Finding, Outcome, has_errors
from accel_ddp.doctor.host import HOST, local_finding
from accel_ddp.doctor.node_client import CoordinatorSearch, Facts
from accel_ddp.doctor.verdict import Examiner
from accel_ddp.errors import UserError
from accel_ddp.nodes import messages
from accel_ddp.nodes.launcher import check_rank_variables, check_requested_world, warn_about_independent_tasks
from accel_ddp.nodes.probe import ProbeServer
from accel_ddp.nodes.topology import Topology, topology_of_this_rank
from accel_ddp.watch.restart_files import IS_RESTART


async def check_cluster(topology: Topology, options: CheckOptions, print_progress: Callable[[str], None]) -> Outcome:
    """Return the outcome in bounded time. The node with the main address coordinates; all nodes connect to it as clients."""
    began = time.monotonic()
    token = messages.make_token(topology.main_port, options.script, options.secret)
    try:
        ip = await node_client.resolve_main_address(topology, options.wait_seconds, print_progress, began)
    except UserError as error:
        saw = f"{topology.describe('main_process_ip')} cannot be resolved on this host: {error}"
        options.findings.append(local_finding(topology, "E_NAME", saw))
        ip = await node_client.find_address_without_name(topology, token)
        if not ip:
            return Outcome(options.findings)
    check = _ClusterCheck(topology, options, print_progress, token, ip)
    try:
        return await check.run(began)
    except (OSError, asyncio.TimeoutError) as error:
        reason = str(error) or f"it sent nothing for {host.MAIN_SILENT:.0f} s"
        main = f"{topology.main_address}:{topology.main_port}"
        saw = f"the connection to the main node {main} was lost before the verdict: {reason}"
        return Outcome([*check.findings, local_finding(topology, "E_MAIN_LOST", saw)])
    finally:
        await check.close()


class _ClusterCheck:
    def __init__(self, topology: Topology, options: CheckOptions, print_progress: Callable[[str], None], token: bytes, ip: str):
        self.topology, self.options, self.print_progress, self.token, self.ip = topology, options, print_progress, token, ip
        self.findings = [*options.findings]  # of this node
        self.probe_server = ProbeServer(token)
        self.coordinator: Examiner | None = None  # if this node runs it
        self.tasks: list[asyncio.Future] = []

    async def run(self, began: float) -> Outcome:
        await asyncio.to_thread(self._check_host)
        collecting = asyncio.ensure_future(asyncio.to_thread(_collect_facts, self.topology, self.options))  # while it connects
        self.tasks.append(collecting)
        if self.topology.local_rank == 0:
            try:
                await self.probe_server.open(self.data_ip)
            except OSError as error:
                saw = f"no port can be opened on {self.data_ip}: {error.strerror}"
                self.findings.append(local_finding(self.topology, "E_PORT", saw))
        connection = await self._connect(began)
        if connection is None:
            return Outcome([*self.findings, *(await collecting)[1]])
        progress = (lambda text: None) if self.coordinator else self.print_progress  # the coordinator prints it itself
        hello, measures = self._hello(), self.options.measures_bandwidth
        follow = node_client.follow_coordinator(connection, hello, collecting, self.folder, self.token, measures, progress)
        following = asyncio.ensure_future(follow)
        self.tasks.append(following)
        if self.coordinator:  # an exception in the coordinator must not look like a main node that does not answer
            await asyncio.wait([following, self.coordinator.finished], return_when=asyncio.FIRST_COMPLETED)
            if self.coordinator.finished.done():
                self.coordinator.finished.result()
        outcome = await following
        if self.coordinator:
            await self.coordinator.finished
        outcome.about, outcome.interface = facts.describe_node((await collecting)[0]), self.interface
        return outcome

    async def close(self) -> None:
        await self.probe_server.close()
        if self.coordinator:
            await self.coordinator.close()
        for task in self.tasks:  # after Ctrl-C; what they raise now is already reported or irrelevant
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _check_host(self) -> None:
        topology, options = self.topology, self.options
        self.findings += host.check_topology(topology, self.ip)
        # The coordinator listens on one address, if it runs here, and this node connects to the other one.
        self.listen_ip, self.connect_ip = host.choose_coordinator_addresses(topology, self.ip)
        address, self.interface, wrong = host.choose_data_address(topology, self.connect_ip)
        self.data_ip = address or self.ip
        variables = host.socket_interface_variables(self.interface, self.data_ip)
        self.findings += wrong
        self.findings += host.check_host_name(topology, self.interface, self.data_ip, variables, options.sets_interface)
        if options.sets_interface:
            os.environ.update(variables)
        self.folder = host.nearest_existing_folder(options.output_dir) if options.output_dir else None
        if topology.local_rank == 0:
            self.findings += host.check_limits(topology, options.output_dir, self.folder)

    async def _connect(self, began: float) -> messages.Stream | None:
        topology, findings, is_main_address = self.topology, self.findings, host.is_local_address(self.ip)
        may_coordinate = is_main_address and topology.local_rank == 0
        # With two nodes on one machine, another node could take the port of node 0, so it waits for node 0.
        start_after = 0.0 if not topology.node_rank else 5.0 if ipaddress.ip_address(self.ip).is_loopback else 0.5
        if may_coordinate and not start_after:
            self.coordinator = await self._start_coordinator()
        search = functools.partial(CoordinatorSearch, topology, self.connect_ip, self.token, self.options, self.print_progress)
        reached = await search(findings, began, self._start_coordinator if may_coordinate else None, start_after).run()
        if isinstance(reached, Examiner):
            self.coordinator = reached
            reached = await search([], time.monotonic()).run()
        if not isinstance(reached, Finding):
            return reached
        may_rescue = topology.local_rank == 0 and topology.rescue_port and (is_main_address or topology.node_rank == 0)
        if reached.severity != ERROR or not may_rescue or self.coordinator:
            findings.append(reached)
            return None
        if not has_errors(findings):  # otherwise these errors are the reason
            findings.append(reached)
        # The other nodes would wait for this one. They connect to the rescue port and receive these errors.
        self.coordinator = await self._start_coordinator(is_rescue=True)
        opened = await try_port("127.0.0.1", topology.rescue_port, self.token) if self.coordinator else ("", "")
        return opened if isinstance(opened, messages.Stream) else None

    async def _start_coordinator(self, is_rescue: bool = False) -> Examiner | None:
        """None: the port is used, by a doctor of this run or another program. `is_rescue` is for errors of this node."""
        topology = self.topology
        coordinator = Examiner(self.token, self.options.wait_seconds, self.print_progress)
        # Nodes find the rescue port when the main address is wrong, so no single address of this host is the right one.
        address, ports = ("0.0.0.0", (topology.rescue_port,)) if is_rescue else (self.listen_ip, topology.coordinator_ports)
        try:
            await coordinator.open(address, ports, self.connect_ip, topology.rescue_port, topology.main_address)
        except OSError as error:
            if not is_rescue and error.errno != errno.EADDRINUSE:
                saw = f"it is not possible to listen on {address}:{ports[0]}: {error.strerror}"
                self.findings.append(local_finding(topology, "E_PORT", saw))
            return None
        return coordinator

    def _hello(self) -> dict[str, Any]:
        topology, options = self.topology, self.options
        return {
            "node": topology.node_rank, "nodes": topology.num_nodes, "ranks": topology.num_ranks, "rank": topology.rank,
            "node_ranks": topology.num_node_ranks,
            "local_rank": topology.local_rank, "local_ranks": topology.num_local_processes, "pid": os.getpid(), "host": HOST,
            "ip": self.data_ip, "interface": self.interface, "ports": self.probe_server.ports, "needed": options.checkpoint_bytes,
            "open": host.firewall_advice(), "deep": options.deep, "key": options.keys.public if options.keys else "",
            "findings": [finding.as_dict() for finding in self.findings[: compare_nodes.MOST_FINDINGS]],
        }  # fmt: skip


def _collect_facts(topology: Topology, options: CheckOptions) -> Facts:
    """Return the facts of this node and findings about them. Other ranks than a node's first would only repeat them."""
    if topology.local_rank:
        return {}, []
    seconds = host.FACTS - 5
    collected = host.call_with_timeout(lambda: facts.collect_facts(topology, options), seconds, None)
    if collected is None:
        saw = f"this node could not collect its versions, files and GPUs within {seconds:.0f} s: a disk or a program hangs"
        return {}, [local_finding(topology, "E_DISK_STUCK", saw)]
    return collected


def run_preflight(cfg: TrainConfig) -> None:
    """Return when all nodes are connected, alike, and reach each other, or raise UserError on every rank. It needs no torch."""
    topology = topology_of_this_rank()
    check_rank_variables()
    if cfg.preflight == "off" or topology.num_nodes <= 1:
        check_requested_world()
        warn_about_independent_tasks()
        return
    # With c10d the ranks of all nodes start together. Otherwise ranks that are not restarted may still be in their preflight.
    is_running = lambda: any(host.port_answers(topology.main_address, port) for port in topology.coordinator_ports)
    is_static = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if os.environ.get(IS_RESTART) == "1" and not (is_static and is_running()):
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
        print(f"preflight: {len(outcome.roster)} nodes match and reach each other{over} ({time.monotonic() - began:.1f} s)")


def report_to_other_nodes(reason: str, topology: Topology | None = None, script: str = "") -> None:
    """Report to the nodes that would wait that this one exits, in at most 5 s. The defaults are those of this rank."""
    topology = topology or topology_of_this_rank()
    if topology.num_nodes <= 1 or topology.local_rank:
        return
    finding = local_finding(topology, "E_OPTIONS", reason, "read the output of that node")
    with contextlib.suppress(UserError):  # of the file with the secret, without which the other nodes do not listen
        options = CheckOptions(script=script or sys.argv[0], measures_bandwidth=False, findings=[finding], wait_seconds=5)
        asyncio.run(check_cluster(topology, options, lambda text: None))


def print_progress(text: str) -> None:
    print(f"{HOST}: {text}", file=sys.stderr, flush=True)


def raise_on_errors(outcome: Outcome) -> None:
    if outcome.has_errors:
        hint = "Training was not started. --preflight off starts it without these checks."
        lines = [report.format_findings(outcome.findings), *outcome.table, hint]
        raise UserError(f"preflight: {report.summarize(outcome.findings)}\n" + "\n".join(lines))


def print_findings(findings: list[Finding]) -> None:
    if findings:
        print(report.format_findings(findings, report.supports_color(sys.stderr)), file=sys.stderr, flush=True)
