"""How a node finds and reaches the coordinator, and why it cannot."""

import asyncio
import contextlib
import ipaddress
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from accel_ddp.doctor import discovery, host, paths
from accel_ddp.doctor.check_options import CheckOptions
from accel_ddp.doctor.coordinator import GRACE_SECONDS, Coordinator
from accel_ddp.doctor.findings import Finding, Outcome, has_errors
from accel_ddp.doctor.host import detect_platform, external_addresses, find_port_user, firewall_advice, local_finding, resolve
from accel_ddp.doctor.host_checks import list_markers, write_marker
from accel_ddp.errors import UserError
from accel_ddp.nodes import messages, probe
from accel_ddp.nodes.messages import bounded_list, printable, whole_number
from accel_ddp.nodes.topology import Topology

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
# The first two messages of a client of TCPStore (TCPStoreBackend.hpp of torch): a type, then a number. The last one is sent back.
_STORE_VALIDATE, _STORE_PING = b"\x00" + (0x3C85F7CE).to_bytes(4, "little"), b"\x0d"
LONGEST_BROADCAST_INTERVAL = 16.0  # seconds
OTHER_PROGRAM = "other program"  # a result of `_try_port`, besides those of `paths`


async def resolve_main_address(
    topology: Topology, wait_seconds: float, print_progress: Callable[[str], None], began: float
) -> str:
    """Return the IP address of the main node. Raises UserError if its name does not resolve.

    In Kubernetes, the name of a pod resolves only after the pod has started, so this function waits for it there.
    """
    printed_at = 0.0
    while True:
        try:
            return await asyncio.to_thread(resolve, topology.main_address)
        except UserError as error:
            waited = time.monotonic() - began
            if detect_platform() != "kubernetes" or waited > wait_seconds:
                raise
            if waited - printed_at > (host.NOTICE_INTERVAL if printed_at else host.FIRST_NOTICE):
                printed_at = waited
                print_progress(
                    f"waiting for the name {topology.main_address} to resolve ({error}), {waited:.0f} of {wait_seconds:.0f} s. "
                    "Check that this pod has started."
                )
            await asyncio.sleep(1)


async def connect_to_coordinator(
    topology: Topology, ip: str, token: bytes, options: CheckOptions, print_progress: Callable[[str], None],
    findings: list[Finding], began: float, start_coordinator: Callable[[], Awaitable[Coordinator | None]] | None = None,
    start_after: float = 0.0,
) -> Connection | Coordinator | Finding:  # fmt: skip
    """Return a connection to the coordinator, or a finding that says why there is none.

    If nothing listens after `start_after` seconds and `start_coordinator` is given, it is called, and the coordinator that it
    returns is returned. Errors among `findings` shorten the wait, because they end the run in any case. A finding is added to them
    if the main node can be reached, but not on its main port.
    """
    printed_at = time.monotonic() - host.NOTICE_INTERVAL + host.FIRST_NOTICE
    other_program = other_main = ""
    tried_rescue_at = began
    broadcast_at, broadcast_after = began, 1.0  # seconds; doubled each time, because every node of a network receives a broadcast
    while True:
        answers = await asyncio.gather(*(_try_port(ip, port, token) for port in topology.coordinator_ports))
        connections = [answer for answer in answers if not isinstance(answer[0], str)]
        for _, writer in connections[1:]:
            writer.close()
        if connections:
            return connections[0]
        order = (OTHER_PROGRAM, paths.REFUSED, paths.CUT, paths.DROPPED, paths.UNREACHABLE)
        result, reason = min(answers, key=lambda answer: order.index(answer[0]))
        other_program = reason if result == OTHER_PROGRAM else other_program
        waited = time.monotonic() - began
        if result == OTHER_PROGRAM and options.may_join_rendezvous and await is_torch_store(ip, topology.main_port):
            saw = f"the rendezvous at {topology.main_address}:{topology.main_port} is already running"
            return local_finding(topology, "I_RENDEZVOUS", saw, "")
        if start_coordinator and result == paths.REFUSED and waited >= start_after and (started := await start_coordinator()):
            return started
        limit = options.wait_seconds if result == paths.REFUSED else min(options.wait_seconds, options.no_answer_seconds)
        if result == OTHER_PROGRAM:  # it holds the port and will probably keep it
            # Node 0 gives up first. The other nodes then receive its report.
            limit = min(options.wait_seconds, host.NO_ANSWER + (0 if start_coordinator else GRACE_SECONDS))
        if has_errors(findings):
            limit = min(limit, 5.0)
        if waited >= limit:
            if other_program and result == paths.REFUSED:  # the other program has ended; its answer explains more
                result, reason = OTHER_PROGRAM, other_program
            return _explain_failure(topology, ip, result, reason, waited, other_main)
        if time.monotonic() - printed_at >= host.NOTICE_INTERVAL:
            printed_at = time.monotonic()
            finding = _explain_failure(topology, ip, result, reason, waited, other_main)
            print_progress(f"waiting for the main node ({waited:.0f} of {limit:.0f} s): {finding.saw}; fix: {finding.fix}")
        if topology.rescue_port and time.monotonic() - tried_rescue_at > 1:
            tried_rescue_at = now = time.monotonic()
            broadcasts = topology.local_rank == 0 and now - broadcast_at > broadcast_after
            if broadcasts:
                broadcast_at, broadcast_after = now, min(2 * broadcast_after, LONGEST_BROADCAST_INTERVAL)
            rescued, found = await _try_rescue(topology, ip, token, result, findings, broadcasts)
            other_main = found if broadcasts else other_main
            if rescued:
                return rescued
        await asyncio.sleep(0.1 if result == paths.REFUSED else 0.3)


async def find_address_without_name(topology: Topology, token: bytes) -> str:
    """Return an address of the main node although its name does not resolve, so that the other nodes receive this error too."""
    if topology.node_rank == 0:
        return next(iter(external_addresses()), "")
    for _ in range(5 if topology.rescue_port else 0):
        found, is_same = await asyncio.to_thread(discovery.find_coordinator, token, topology.main_address, topology.rescue_port)
        if is_same:
            return found
        await asyncio.sleep(0.3)
    return ""


async def connect_to_rescue_port(topology: Topology, token: bytes) -> Connection | None:
    """Return a connection of this node to the rescue port that it has opened itself."""
    connection = await _try_port("127.0.0.1", topology.rescue_port or 0, token)
    return None if isinstance(connection[0], str) else connection


async def _try_rescue(
    topology: Topology, ip: str, token: bytes, result: str, findings: list[Finding], broadcasts: bool
) -> tuple[Connection | None, str]:
    """Return a connection to the rescue port of the coordinator, or None, and the address of a coordinator that may be the right one.

    The coordinator has the main address, or answers a broadcast because the main address is wrong on all nodes. `result` is what
    connecting to the main port gave. If a coordinator listens there too, a firewall blocks it. A broadcast is sent if `broadcasts`.
    """
    port = topology.rescue_port or 0
    direct = await _try_port(ip, port, token)
    found, is_same = ("", False) if not broadcasts else await _find_other_coordinator(topology, ip, token)
    if isinstance(direct[0], str):
        connection = await _try_port(found, port, token) if is_same else direct
        return (None, found) if isinstance(connection[0], str) else (connection, "")
    if result == OTHER_PROGRAM:  # node 0 reports this
        return direct, ""
    again = await _try_port(ip, topology.main_port, token)  # node 0 may have started in the meantime
    if not isinstance(again[0], str):
        direct[1].close()
        return again, ""
    if again[0] != OTHER_PROGRAM:
        how = {paths.DROPPED: "drops packets to", paths.REFUSED: "rejects connections to"}.get(again[0], "blocks")
        saw = f"a firewall {how} {topology.main_address}:{topology.main_port}: port {port} of the main node can be reached from here"
        fix = f"{firewall_advice(f'TCP {topology.main_port}')}, or use a --main_process_port that is open"
        findings.append(local_finding(topology, "E_PORT_BLOCKED", saw, fix))
    return direct, ""


async def _find_other_coordinator(topology: Topology, ip: str, token: bytes) -> tuple[str, bool]:
    """Return the address of a coordinator that is not at the main address `ip`, and whether it belongs to this run."""
    if ipaddress.ip_address(ip).is_loopback:  # a loopback address is the main address of many runs
        return "", False
    found = await asyncio.to_thread(discovery.find_coordinator, token, topology.main_address, topology.rescue_port or 0)
    return ("", False) if found[0] == ip else found


async def _try_port(ip: str, port: int, token: bytes) -> Connection | tuple[str, str]:
    """Return (reader, writer) of the coordinator on this port, or (how the attempt failed, the reason)."""
    try:
        reader, writer = await messages.connect(ip, port, 3.0, small_segments=True)
    except (OSError, asyncio.TimeoutError) as error:
        return probe.classify_error(error), getattr(error, "strerror", "") or ""
    try:
        await messages.handshake(reader, writer, token, is_client=True)
        return reader, writer
    except (messages.HandshakeError, OSError) as error:
        writer.close()
        return OTHER_PROGRAM, str(error)


async def is_torch_store(ip: str, port: int) -> bool:
    """Return whether a TCPStore of torch answers a ping.

    torch's own client prints pages of warnings for any other program, and waits without a limit for one that sends nothing.
    """
    writer = None
    try:
        reader, writer = await messages.connect(ip, port, 3.0)
        nonce = os.urandom(4)
        writer.write(_STORE_VALIDATE + _STORE_PING + nonce)
        return await asyncio.wait_for(reader.readexactly(4), 1) == nonce
    except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
        return False
    finally:
        if writer:
            writer.close()


def explain_unknown_name(topology: Topology, reason: str) -> Finding:
    """Return the finding for a main address that does not resolve."""
    is_slurms = topology.sources.get("main_process_ip", "").startswith("SLURM")
    fix = {
        "kubernetes": "MASTER_ADDR must be the headless Service's name of the first pod: POD.SERVICE",
        "slurm": f"export MASTER_ADDR=ADDRESS, see `scontrol show node {topology.main_address}` (NodeAddr)"
        if is_slurms
        else 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)',
    }.get(detect_platform(), "use the private IP address of node 0, or add the name to /etc/hosts on every node")
    saw = f"{topology.describe('main_process_ip')} cannot be resolved on this host: {reason}"
    return local_finding(topology, "E_NAME", saw, fix)


def _explain_failure(topology: Topology, ip: str, result: str, reason: str, waited: float, other_main: str = "") -> Finding:
    """Return the finding for a main node that could not be reached, depending on what the network answered.

    `other_main` is the address of a main node that runs the same script, and may be the right one.
    """
    candidates = topology.coordinator_ports
    ports = str(topology.main_port) if candidates == (topology.main_port,) else f"{candidates[0]} to {candidates[-1]}"
    at = f"{topology.main_address}:{ports}" + (f" ({ip})" if ip != topology.main_address else "")
    if ipaddress.ip_address(ip).is_loopback and topology.node_rank and result == paths.REFUSED:
        saw = f"{topology.describe('main_process_ip')} is this machine itself, and nothing listens on port {ports}"
        return local_finding(topology, "E_REFUSED", saw, "give the address of node 0: --main_process_ip")
    code, saw, fix = {
        paths.REFUSED: (
            "E_REFUSED", f"{at} is up, but nothing listens there (refused)",
            f"start node 0 (--machine_rank 0), or correct {topology.describe('main_process_port')} so that it is node 0's. The host "
            f"{ip} may also be another machine than node 0: compare it with `hostname -I` of node 0, and correct "
            f"{topology.describe('main_process_ip')} on every node",
        ),
        paths.DROPPED: (
            "E_DROPPED", f"{at} does not answer at all ({waited:.0f} s): packets are dropped, or no such host is up",
            f"check that {ip} is node 0's private address and is up; then {firewall_advice(f'TCP {ports}')}",
        ),
        paths.UNREACHABLE: (
            "E_UNREACHABLE", f"{at} cannot be reached ({reason or 'no route'}): no host with this address is up in this network",
            f"correct {topology.describe('main_process_ip')}, or start that node (ip route get {ip})",
        ),
        paths.CUT: (
            "E_UNREACHABLE", f"{at}: {reason or 'the connection failed'}", "look for a proxy or firewall between the nodes",
        ),
        OTHER_PROGRAM: (
            "E_PORT_BUSY", f"{at} is answered by something that is not the doctor of this run ({reason})",
            "end what is left of an earlier run there, or use another --main_process_port; script, --token and version of "
            "accel_ddp must be the same on every node",
        ),
    }[result]  # fmt: skip
    if other_main and result != OTHER_PROGRAM:
        saw += f". A main node for the same script and port is at {other_main}"
        fix = f"use --main_process_ip {other_main} if that is node 0 of this run; otherwise {fix}"
    if result == OTHER_PROGRAM and (user := find_port_user(ip, topology.main_port)):
        saw = f"port {topology.main_port} of this host is in use by {user}, which is not the doctor of this run ({reason})"
        fix = "end this process if it is left of an earlier run, or use another --main_process_port on every node"
    return local_finding(topology, code, saw, fix)


# The side of every node in the exchange with the coordinator: send facts, do what is requested, receive the verdict.
Facts = tuple[dict[str, Any], list[Finding]]  # facts of a node, and findings made while they were collected


async def follow_coordinator(
    connection: Connection, hello: dict[str, Any], collecting: "asyncio.Future[Facts]", folder: Path | None, token: bytes,
    measures_bandwidth: bool, print_progress: Callable[[str], None],
) -> Outcome:  # fmt: skip
    """Send `hello` and the facts, do what the coordinator requests, and return its verdict.

    `folder` is the existing part of the output folder. Raises OSError if the connection is lost before the verdict.
    """
    reader, writer = connection
    node_rank, outcome = hello["node"], None
    marker: Path | None = None
    marker_error: str | None = None  # None: no marker was written yet
    sending: asyncio.Future | None = None
    try:
        await messages.send(writer, hello)
        sending = asyncio.ensure_future(_send_facts(writer, collecting))
        while True:
            message = await messages.receive(reader, host.MAIN_SILENT)
            request = message.get("do")
            if request == "print":
                print_progress(printable(message["text"]))
            elif request == "probe":
                roster = paths.clean_roster(message["roster"])
                me = next((peer for peer in roster if peer["ip"] == hello["ip"] and peer["ports"] == hello["ports"]), {})
                node_rank = me.get("node", node_rank)
                marker, marker_error = await asyncio.to_thread(write_marker, folder, message["mark"], node_rank)
                probes = await paths.probe_all(node_rank, roster, token, measures_bandwidth)
                await messages.send(writer, {"paths": probes})
            elif request == "check_folder":
                if marker_error is None:
                    marker, marker_error = await asyncio.to_thread(write_marker, folder, message["mark"], node_rank)
                answer = await asyncio.to_thread(list_markers, folder, message["mark"], marker_error)
                await messages.send(writer, answer)
            elif request == "verdict":
                outcome = _read_verdict(message)
                await messages.send(writer, {"received": True})
            elif request == "close":
                break
    except (ValueError, TypeError, KeyError) as error:
        raise ConnectionError(f"it sent an invalid message ({error})") from error
    except (OSError, asyncio.TimeoutError):
        if not outcome:
            raise
    finally:
        if sending:
            sending.cancel()
        if marker:
            with contextlib.suppress(OSError):
                marker.unlink()
        await messages.close(writer)
    if not outcome:
        raise ConnectionError("it closed the connection without a verdict")
    return outcome


def _read_verdict(message: dict[str, Any]) -> Outcome:
    return Outcome(
        paths.clean_findings(message["verdict"], 1000),
        lines=paths.clean_lines(message["lines"], 200),
        table=paths.clean_lines(message["table"], 1000),
        roster=paths.clean_roster(message["roster"]),
        paths=bounded_list(message["paths"], 1000),
        node_rank=whole_number(message["node"]),
        deep_port=whole_number(message.get("deep_port")),
    )


async def _send_facts(writer: asyncio.StreamWriter, collecting: "asyncio.Future[Facts]") -> None:
    """Send the facts when they are collected. They follow `hello`, so that missing nodes are reported meanwhile."""
    facts, wrong = await asyncio.shield(collecting)
    findings = [finding.as_dict() for finding in wrong[: paths.MOST_FINDINGS]]
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await messages.send(writer, {**facts, "findings": findings, "time": time.time()})
