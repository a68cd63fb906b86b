"""A node's side of the doctor: how it finds and reaches the coordinator, why it cannot, and how it answers requests."""

import asyncio
import contextlib
import ipaddress
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from accel_ddp.doctor import compare_nodes, host
from accel_ddp.doctor.check_options import CheckOptions
from accel_ddp.doctor.coordinator import OTHER_PROGRAM, CoordinatorClient, Message, find_coordinator, try_port
from accel_ddp.doctor.findings import Finding, Outcome, has_errors
from accel_ddp.doctor.host import firewall_advice, local_finding
from accel_ddp.doctor.verdict import GRACE_SECONDS, Examiner
from accel_ddp.errors import UserError
from accel_ddp.nodes import messages
from accel_ddp.nodes.messages import Stream, bounded_list, printable, whole_number
from accel_ddp.nodes.probe import CUT, DROPPED, REFUSED, UNREACHABLE
from accel_ddp.nodes.topology import Topology

Facts = tuple[dict[str, Any], list[Finding]]  # facts of a node, and findings made while they were collected
StartCoordinator = Callable[[], Awaitable[Examiner | None]]

# The first two messages of a client of TCPStore (TCPStoreBackend.hpp of torch): a type, then a number. The last one is sent back.
_STORE_VALIDATE, _STORE_PING = b"\x00" + (0x3C85F7CE).to_bytes(4, "little"), b"\x0d"
_MOST_CERTAIN = (OTHER_PROGRAM, REFUSED, CUT, DROPPED, UNREACHABLE)  # results, the most certain first
RESCUE_INTERVAL = 2.0  # seconds; every node of a network receives a broadcast


async def resolve_main_address(
    topology: Topology, wait_seconds: float, print_progress: Callable[[str], None], began: float
) -> str:
    printed_at = 0.0
    while True:
        try:
            return await asyncio.to_thread(host.resolve, topology.main_address)
        except UserError as error:
            waited = time.monotonic() - began
            if host.detect_platform() != "kubernetes" or waited > wait_seconds:
                raise
            if waited - printed_at > (host.NOTICE_INTERVAL if printed_at else host.FIRST_NOTICE):
                printed_at = waited
                print_progress(
                    f"waiting for the name {topology.main_address} to resolve ({error}), {waited:.0f} of {wait_seconds:.0f} s. "
                    "Check that this pod has started."
                )
            await asyncio.sleep(1)


class CoordinatorSearch:
    """Errors in `findings` shorten the wait from `began`. Without a listener, `start_coordinator` is called in the end."""

    def __init__(
        self, topology: Topology, ip: str, token: bytes, options: CheckOptions, print_progress: Callable[[str], None],
        findings: list[Finding], began: float, start_coordinator: StartCoordinator | None = None, start_after: float = 0.0,
    ):  # fmt: skip
        self.topology, self.ip, self.token, self.options, self.print_progress = topology, ip, token, options, print_progress
        self.findings, self.began, self.start_coordinator, self.start_after = findings, began, start_coordinator, start_after
        self.result = self.reason = ""  # how the last attempt failed
        self.other_program = ""  # the answer of another program on the main port
        self.other_main = ""  # address of a coordinator for the same script that answered a broadcast
        self.printed_at = time.monotonic() - host.NOTICE_INTERVAL + host.FIRST_NOTICE
        self.rescue_at = began - RESCUE_INTERVAL / 2  # the first attempt comes earlier

    @property
    def waited(self) -> float:
        return time.monotonic() - self.began

    async def run(self) -> Stream | Examiner | Finding:
        while True:
            answers = await asyncio.gather(*(try_port(self.ip, port, self.token) for port in self.topology.coordinator_ports))
            connections = [answer for answer in answers if isinstance(answer, Stream)]
            for stream in connections[1:]:
                stream.writer.close()
            if connections:
                return connections[0]
            self.result, self.reason = min(answers, key=lambda answer: _MOST_CERTAIN.index(answer[0]))
            self.other_program = self.reason if self.result == OTHER_PROGRAM else self.other_program
            if ended := await self._find_end():
                return ended
            if time.monotonic() - self.printed_at >= host.NOTICE_INTERVAL:
                self.printed_at = time.monotonic()
                finding = self._explain()
                times = f"{self.waited:.0f} of {self._limit():.0f} s"
                self.print_progress(f"waiting for the main node ({times}): {finding.saw}; fix: {finding.fix}")
            if self.topology.rescue_port and time.monotonic() - self.rescue_at > RESCUE_INTERVAL:
                self.rescue_at = time.monotonic()
                if connection := await self._try_rescue_port():
                    return connection
            await asyncio.sleep(0.1 if self.result == REFUSED else 0.3)

    async def _find_end(self) -> Examiner | Finding | None:
        topology, result = self.topology, self.result
        if result == OTHER_PROGRAM and self.options.may_join_rendezvous and await is_torch_store(self.ip, topology.main_port):
            saw = f"the rendezvous at {topology.main_address}:{topology.main_port} is already running"
            return local_finding(topology, "I_RENDEZVOUS", saw, "")
        may_start = self.start_coordinator and result == REFUSED and self.waited >= self.start_after
        if may_start and (started := await self.start_coordinator()):
            return started
        if self.waited < self._limit():
            return None
        if self.other_program and result == REFUSED:  # the other program has ended; its answer explains more
            self.result, self.reason = OTHER_PROGRAM, self.other_program
        return self._explain()

    def _limit(self) -> float:
        options = self.options
        limit = options.wait_seconds if self.result == REFUSED else min(options.wait_seconds, options.no_answer_seconds)
        if self.result == OTHER_PROGRAM:  # it holds the port and will probably keep it
            # Node 0 gives up first. The other nodes then receive its report.
            limit = min(options.wait_seconds, host.NO_ANSWER + (0 if self.start_coordinator else GRACE_SECONDS))
        return min(limit, 5.0) if has_errors(self.findings) else limit

    def _explain(self) -> Finding:
        topology, ip, result, reason = self.topology, self.ip, self.result, self.reason
        candidates = topology.coordinator_ports
        ports = str(topology.main_port) if candidates == (topology.main_port,) else f"{candidates[0]} to {candidates[-1]}"
        at = f"{topology.main_address}:{ports}" + (f" ({ip})" if ip != topology.main_address else "")
        unreachable = (
            "E_UNREACHABLE", f"{at} cannot be reached ({reason or 'no route'}): no host with this address is up in this network",
            f"correct {topology.describe('main_process_ip')}, or start that node (ip route get {ip})",
        )  # fmt: skip
        code, saw, fix = {
            REFUSED: (
                "E_REFUSED", f"{at} is up, but nothing listens there (refused)",
                f"start node 0 (--machine_rank 0), or correct {topology.describe('main_process_port')} so that it is node 0's. "
                f"The host {ip} may also be another machine than node 0: compare it with `hostname -I` of node 0, and correct "
                f"{topology.describe('main_process_ip')} on every node",
            ),
            DROPPED: (
                "E_DROPPED", f"{at} does not answer at all ({self.waited:.0f} s): packets are dropped, or no such host is up",
                f"check that {ip} is node 0's private address and is up; then {firewall_advice()}",
            ),
            OTHER_PROGRAM: (
                "E_PORT_BUSY", f"{at} is answered by something that is not the doctor of this run ({reason})", None,
            ),
        }.get(result, unreachable)  # fmt: skip
        if self.other_main and result != OTHER_PROGRAM:
            saw += f". A main node for the same script and port is at {self.other_main}"
            fix = f"use --main_process_ip {self.other_main} if that is node 0 of this run; otherwise {fix}"
        if result == OTHER_PROGRAM and (user := host.find_port_user(ip, topology.main_port)):
            saw = f"port {topology.main_port} of this host is in use by {user}, which is not the doctor of this run ({reason})"
            fix = "end this process if it is left of an earlier run, or use another --main_process_port on every node"
        return local_finding(topology, code, saw, fix)

    async def _try_rescue_port(self) -> Stream | None:
        """The main address may be wrong on all nodes (broadcast). If the main port is open too, a firewall blocks it."""
        topology, port = self.topology, self.topology.rescue_port or 0
        direct, is_same = await try_port(self.ip, port, self.token), False
        if not topology.local_rank and not ipaddress.ip_address(self.ip).is_loopback:  # which is the main address of many runs
            found, is_same = await _find_by_broadcast(topology, self.token)
            self.other_main = "" if found == self.ip else found
        if not isinstance(direct, Stream):
            connection = await try_port(self.other_main, port, self.token) if is_same and self.other_main else direct
            return connection if isinstance(connection, Stream) else None
        if self.result == OTHER_PROGRAM:  # node 0 reports this
            return direct
        again = await try_port(self.ip, topology.main_port, self.token)  # node 0 may have started in the meantime
        if isinstance(again, Stream):
            direct.writer.close()
            return again
        if again[0] != OTHER_PROGRAM:
            how = {DROPPED: "drops packets to", REFUSED: "rejects connections to"}.get(again[0], "blocks")
            main = f"{topology.main_address}:{topology.main_port}"
            saw = f"a firewall {how} {main}: port {port} of the main node can be reached from here"
            fix = f"{firewall_advice()}, or use a --main_process_port that is open"
            self.findings.append(local_finding(topology, "E_PORT_BLOCKED", saw, fix))
        return direct


async def _find_by_broadcast(topology: Topology, token: bytes) -> tuple[str, bool]:
    return await asyncio.to_thread(find_coordinator, token, topology.main_address, topology.rescue_port or 0)


async def find_address_without_name(topology: Topology, token: bytes) -> str:
    """Find the main node when its name does not resolve, to report the error to every node."""
    if topology.node_rank == 0:
        return next(iter(host.external_addresses()), "")
    for _ in range(5 if topology.rescue_port else 0):
        found, is_same = await _find_by_broadcast(topology, token)
        if is_same:
            return found
        await asyncio.sleep(0.3)
    return ""


async def is_torch_store(ip: str, port: int) -> bool:
    """torch's own client prints pages of warnings for another program, and waits without a limit for one that is silent."""
    with contextlib.suppress(OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
        reader, writer = await messages.connect(ip, port, 3.0)
        with contextlib.closing(writer):
            nonce = os.urandom(4)
            writer.write(_STORE_VALIDATE + _STORE_PING + nonce)
            return await asyncio.wait_for(reader.readexactly(4), 1) == nonce
    return False


async def follow_coordinator(
    connection: Stream, hello: Message, collecting: "asyncio.Future[Facts]", folder: Path | None, token: bytes,
    measures_bandwidth: bool, print_progress: Callable[[str], None],
) -> Outcome:  # fmt: skip
    client = CoordinatorClient(connection, host.MAIN_SILENT)
    send = client.outbox.put_nowait
    outcome: Outcome | None = None
    folder_check = host.FolderCheck(folder)

    async def send_facts() -> None:
        """Send the facts when they are collected. They follow `hello`, so missing nodes are reported meanwhile."""
        facts, wrong = await asyncio.shield(collecting)
        findings = [finding.as_dict() for finding in wrong[: compare_nodes.MOST_FINDINGS]]
        send({**facts, "findings": findings, "time": time.time()})

    async def answer(request: Message) -> None:
        nonlocal outcome
        if request["do"] == "print":
            print_progress(printable(request["text"]))
        elif request["do"] == "probe":
            roster = compare_nodes.clean_roster(request["roster"])
            is_me = lambda peer: peer["ip"] == hello["ip"] and peer["ports"] == hello["ports"]
            hello["node"] = next((peer["node"] for peer in roster if is_me(peer)), hello["node"])
            await asyncio.to_thread(folder_check.write, request["mark"], hello["node"])
            send({"paths": await compare_nodes.probe_all(hello["node"], roster, token, measures_bandwidth)})
        elif request["do"] == "check_folder":
            await asyncio.to_thread(folder_check.write, request["mark"], hello["node"])
            send(await asyncio.to_thread(folder_check.look, request["mark"]))
        elif request["do"] == "verdict":
            outcome = Outcome(
                compare_nodes.clean_findings(request["verdict"], 1000),
                lines=[printable(line) for line in bounded_list(request["lines"], 200)],
                table=[printable(line) for line in bounded_list(request["table"], 1000)],
                roster=compare_nodes.clean_roster(request["roster"]), paths=bounded_list(request["paths"], 1000),
                node_rank=whole_number(request["node"]), deep_port=whole_number(request.get("deep_port")),
            )  # fmt: skip
            send({"received": True})

    sending = asyncio.ensure_future(send_facts())
    try:
        await client.follow(hello, answer)
    except (ValueError, TypeError, KeyError) as error:
        raise ConnectionError(f"it sent an invalid message ({error})") from error
    except (OSError, asyncio.TimeoutError):
        if not outcome:
            raise
    finally:
        sending.cancel()
        folder_check.remove()
    if not outcome:
        raise ConnectionError("it closed the connection without a verdict")
    return outcome
