"""The coordinator on the main node: it waits for all nodes, compares them, and sends one verdict to every node.

Each node opens one connection (see `client`) and sends `hello`, then its facts. The coordinator then requests probes of the
data paths and a check of the output folder, and finally sends the verdict. Every message has a time limit.
"""

import asyncio
import contextlib
import logging
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from accel_ddp.doctor import compare_nodes, host, paths
from accel_ddp.doctor.discovery import Responder
from accel_ddp.doctor.findings import ERROR, Finding, has_errors, sort_findings
from accel_ddp.doctor.host import HOST
from accel_ddp.nodes import messages
from accel_ddp.nodes.topology import describe_ranks, find_nodes

# The processes that are connected to the coordinator.
_MOST_NAMED = 16  # missing nodes


@dataclass(eq=False)
class Member:
    """A process that has connected and sent a valid `hello`: one per node, or one per rank under a launcher."""

    hello: dict[str, Any]  # with "facts" and "clock" once these are received
    writer: asyncio.StreamWriter
    inbox: asyncio.Queue = field(default_factory=lambda: asyncio.Queue(16))
    has_facts: bool = False
    is_gone: bool = False  # its connection is closed
    is_silent: bool = False  # it did not answer a request, and receives no further ones

    @property
    def name(self) -> str:
        local = f", local rank {self.hello['local_rank']}" if self.hello["local_rank"] else ""
        return f"{self.hello['host']} (machine_rank {self.hello['node']}{local})"

    @property
    def is_local_main(self) -> bool:
        """Whether this process checks the paths and the disk of its node. The other ranks wait for the verdict."""
        return self.hello["local_rank"] == 0

    async def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await messages.send(self.writer, message, 5)


def local_mains(members: list[Member]) -> list[Member]:
    """Return one process of each node, in the order of the node ranks."""
    return sorted((member for member in members if member.is_local_main), key=lambda member: member.hello["node"])


def counts_ranks(members: list[Member]) -> bool:
    """Return whether the user has set RANK and WORLD_SIZE: how many nodes there are follows from the ranks that connect."""
    return bool(members) and all(member.hello["rank"] is not None for member in members)


def number_nodes(members: list[Member]) -> None:
    """Set the node of each rank, if the user has set RANK and WORLD_SIZE."""
    if counts_ranks(members):
        ordered = sorted(members, key=lambda member: member.hello["rank"])
        hellos = [member.hello for member in ordered]
        for hello, node in zip(hellos, find_nodes([(m["host"], m["local_rank"], m["local_ranks"]) for m in hellos])):
            hello["node"] = node


def count_expected(members: list[Member]) -> tuple[int, int, str]:
    """Return how many nodes are connected, how many are expected at least, and the word for them.

    These are ranks instead of nodes if the user has set RANK and WORLD_SIZE.
    """
    if counts_ranks(members):
        return len(members), min(member.hello["ranks"] for member in members), "ranks"
    return len(local_mains(members)), min((member.hello["nodes"] for member in members), default=1), "nodes"


def find_missing(members: list[Member]) -> list[str]:
    """Return the machine ranks that have not connected, and the missing local ranks of nodes that have."""
    if counts_ranks(members):
        there = {member.hello["rank"] for member in members}
        ranks = [rank for rank in range(max(member.hello["ranks"] for member in members)) if rank not in there]
        more = [f"{len(ranks) - _MOST_NAMED} more ranks"] if len(ranks) > _MOST_NAMED else []
        return [*(f"rank {rank}" for rank in ranks[:_MOST_NAMED]), *more]
    connected: dict[int, set[int]] = {}
    local_sizes: dict[int, int] = {}
    for member in members:
        node = member.hello["node"]
        connected.setdefault(node, set()).add(member.hello["local_rank"])
        local_sizes[node] = max(local_sizes.get(node, 1), member.hello["local_ranks"])
    num_nodes = max((m.hello["nodes"] for m in members), default=1)
    absent = [str(node) for node in range(num_nodes) if node not in connected]
    missing = [f"machine_rank {node}" for node in absent[:_MOST_NAMED]]
    missing += [f"{len(absent) - _MOST_NAMED} more nodes"] if len(absent) > _MOST_NAMED else []
    for node, ranks in sorted(connected.items()):
        missing += [f"local rank {one} of machine_rank {node}" for one in range(local_sizes[node]) if one not in ranks]
    return missing


def findings_of_members(members: list[Member]) -> list[Finding]:
    """Return what the nodes found on their own.

    E_MAIN_IS_HERE is left out if node 0 has connected: the node that reports it then shares a machine with node 0.
    """
    found = []
    for member in members:
        # A rank only estimates its node if the user has set RANK and WORLD_SIZE.
        node = {"node": member.hello["node"]} if member.hello["rank"] is not None else {}
        found += [replace(finding, **node) for finding in member.hello["findings"]]
    has_main = any(member.hello["node"] == 0 for member in members)
    return [finding for finding in found if not (has_main and finding.code == "E_MAIN_IS_HERE")]


logger = logging.getLogger(__name__)

GRACE_SECONDS = 15.0  # for nodes that are still starting, when the findings are already errors: they report the errors too
ANSWER_SECONDS, PER_PATH_SECONDS = 12.0, 1.0  # to answer a request, and more for each path that is measured
KEEPALIVE_SECONDS = 2.0  # between messages to clients that only wait
_LATE_SECONDS = 0.5  # for nodes that connect after the verdict
_MOST_UNVERIFIED = 256  # connections at once without a completed handshake; each is closed after 3 s
_MOST_MEMBERS = 2 * paths.MOST_NODES
_MOST_FINDINGS = 200  # in one verdict
_FEW = 16  # up to this number of nodes, all of them and all paths are listed


class Coordinator:
    """Runs on the main node. `open` starts it; `finished` is done when every node has received the verdict."""

    def __init__(self, token: bytes, wait_seconds: float, print_progress: Callable[[str], None]):
        self.token, self.wait_seconds, self.print_progress = token, wait_seconds, print_progress
        self.grace_seconds = min(GRACE_SECONDS, 0.75 * wait_seconds)
        self.is_rescue = False  # the main port cannot be used; nodes are only told why
        self.servers: list[asyncio.Server] = []
        self.responder: Responder | None = None
        self.members: list[Member] = []
        self.changed = asyncio.Event()
        self.unverified: dict[asyncio.StreamWriter, None] = {}  # in the order in which they connected
        self.num_rejected = 0
        self.is_complete = False  # a node that connects from now on is late
        self.findings: list[Finding] = []
        self.verdict: dict[str, Any] | None = None
        self.address = ""
        self.mark = os.urandom(6).hex()  # in the names of the files that show whether nodes share a folder

    async def open(self, ip: str, ports: tuple[int, ...], shown_ip: str, rescue_port: int | None, main_address: str) -> None:
        """Listen on the first free port. Raises OSError if none is free. `shown_ip` is the address in messages.

        Nodes that cannot reach this port or do not find this host use `rescue_port`, over TCP and as a broadcast over UDP.
        """
        for port in ports:
            try:
                sock = messages.open_listening_socket(ip, port, small_segments=True)
                break
            except OSError:
                if port == ports[-1]:
                    raise
        with contextlib.suppress(ValueError, OSError):  # each rank of a large world needs an open file
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit[1], 65536) if limit[1] > 0 else 65536, limit[1]))
        self.address = f"{shown_ip}:{port}"
        self.ip, self.is_rescue = ip, port == rescue_port
        self.servers.append(await asyncio.start_server(self._serve, sock=sock, limit=1 << 16))
        if rescue_port and not ip.startswith("127."):
            if not self.is_rescue:
                with contextlib.suppress(OSError):
                    sock = messages.open_listening_socket(ip, rescue_port, small_segments=True)
                    self.servers.append(await asyncio.start_server(self._serve, sock=sock, limit=1 << 16))
            self.responder = Responder(self.token, main_address)
            await self.responder.open(rescue_port)
        self.finished = asyncio.ensure_future(self._run())

    def _stop_listening(self) -> None:
        for server in self.servers:
            server.close()
        if self.responder:
            self.responder.close()

    async def close(self) -> None:
        self._stop_listening()
        self.finished.cancel()
        await asyncio.gather(self.finished, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection: handshake, hello, facts, then answers until it is closed."""
        if len(self.unverified) >= _MOST_UNVERIFIED:  # the oldest connection without a handshake makes room
            oldest = next(iter(self.unverified))
            del self.unverified[oldest]
            oldest.close()
        self.unverified[writer] = None
        try:
            await messages.handshake(reader, writer, self.token, is_client=False)
            member = Member(paths.clean_hello(await messages.receive(reader, 10)), writer)
            if len(self.members) >= _MOST_MEMBERS:
                raise ValueError("too many members")
            if self.is_rescue:  # this coordinator does not listen on the main port, for a reason that its own node reports
                own = [finding for finding in member.hello["findings"] if finding.code != "E_PORT_BLOCKED"]
                member.hello["findings"] = own
        except asyncio.CancelledError:  # the event loop ends; it would print the exception if it were raised again
            writer.close()
            return
        except Exception as error:  # a process without the token can send anything
            logger.debug("rejected a connection: %s", error)
            self.num_rejected += 1
            writer.close()
            return
        finally:
            self.unverified.pop(writer, None)
        if member.hello["node"] is None:  # c10d: node ranks are assigned here; the coordinator's node is 0
            taken = {one.hello["node"] for one in self.members} | {0}
            # In containers, processes of different nodes may have the same pid.
            is_mine = (member.hello["host"], member.hello["pid"]) == (HOST, os.getpid())
            member.hello["node"] = 0 if is_mine else next(n for n in range(len(taken) + 1) if n not in taken)
        if self.verdict or self.is_complete:
            await self._reject_late(member)
            return
        self.members.append(member)
        number_nodes(self.members)
        self.changed.set()
        try:
            member.hello["facts"] = facts = paths.clean_facts(await messages.receive(reader, host.FACTS))
            member.hello["clock"] = facts["time"] - time.time()
            member.hello["findings"] += facts["findings"]
            member.has_facts = True
            self.changed.set()
            while True:
                member.inbox.put_nowait(await messages.receive(reader, 3600))
        except (Exception, asyncio.CancelledError):
            member.is_gone = True
            with contextlib.suppress(asyncio.QueueFull):
                member.inbox.put_nowait({})
            self.changed.set()
            writer.close()

    async def _reject_late(self, member: Member) -> None:
        """Send an error to a node that was not checked. It must not receive the verdict `healthy`."""
        names = ", ".join(one.name for one in local_mains(self.members)[:8])
        late = Finding(
            "E_LATE", f"{member.name} connected after the nodes had been checked without it: {names}",
            "use the same num_machines on every node and a different machine_rank on each; then start all of them again",
            host=member.hello["host"], node=member.hello["node"],
        )  # fmt: skip
        is_failed = self.verdict and has_errors(self.findings)
        answer = self.verdict if is_failed else {"do": "verdict", "verdict": [late.as_dict()]}
        await member.send({"lines": [], "table": [], "roster": [], "paths": [], **answer, "node": member.hello["node"]})
        await member.send({"do": "close"})
        await messages.close(member.writer)

    def _early_errors(self) -> list[Finding]:
        """Return the errors that make it pointless to wait for more nodes."""
        hellos = [member.hello for member in self.members]
        found = [
            *compare_nodes.check_duplicates(hellos),
            *compare_nodes.check_counts([m.hello for m in local_mains(self.members)]),
        ]
        return [*found, *(finding for finding in findings_of_members(self.members) if finding.severity == ERROR)]

    async def _wait_for_all(self) -> list[Finding]:
        """Wait until every node has sent its facts, and print which are missing. Returns why the wait ended early."""
        began = time.monotonic()
        printed_at, kept_alive_at = began - host.NOTICE_INTERVAL + host.FIRST_NOTICE, began
        errors_since, complete_since = None, None
        while True:
            now = time.monotonic()
            for member in [m for m in self.members if m.is_gone]:
                self.members.remove(member)
                number_nodes(self.members)
                await self._print_everywhere(f"{member.name} has closed its connection.")
            missing, errors = find_missing(self.members), self._early_errors()
            num_connected, num_expected, kind = count_expected(self.members)
            is_enough = num_connected >= num_expected
            lacks_local_rank = any(one.startswith("local") for one in missing)
            is_complete = self.members and (not missing or (errors and is_enough and not lacks_local_rank))
            without_facts = [member for member in self.members if not member.has_facts]
            if is_complete and not without_facts:
                return []
            complete_since = (complete_since or now) if is_complete else None
            if complete_since and now - complete_since > host.FACTS:
                return [self._report_silent(member, host.FACTS, "sending its facts") for member in without_facts]
            if errors and not errors_since and missing:
                codes = ", ".join(sorted({finding.code for finding in errors}))
                await self._print_everywhere(
                    f"{codes}: waiting up to {self.grace_seconds:.0f} s for {', '.join(missing)}, so that every node prints the error."
                )
            errors_since = (errors_since or now) if errors else None
            if errors_since and now - errors_since > self.grace_seconds and not without_facts:
                return []
            waited = now - began
            if self.members and (now - printed_at >= host.NOTICE_INTERVAL or waited >= self.wait_seconds):
                printed_at = now
                mains = local_mains(self.members)
                connected = ", ".join(f"{m.hello['node']} {m.hello['host']}" for m in mains[:_FEW])
                if missing and waited >= self.wait_seconds:
                    return [self._report_missing(one, connected) for one in missing]
                num_all = max(m.hello[kind] for m in self.members)
                what = ", ".join(missing) or f"the facts of {', '.join(member.name for member in without_facts[:8])}"
                hint = (
                    f" Check that it is started there and can reach {self.address}.{self._describe_seekers()}" if missing else ""
                )
                await self._print_everywhere(
                    f"waiting for {what} ({num_connected} of {num_all} {kind} are connected: {connected}), {waited:.0f} of "
                    f"{self.wait_seconds:.0f} s.{hint}"
                )
            if now - kept_alive_at > KEEPALIVE_SECONDS:
                kept_alive_at = now
                await self._send_to_all({"do": "wait"})
            self.changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 0.25)

    def _report_missing(self, missing: str, connected: str) -> Finding:
        rejected = f"; {self.num_rejected} connections without the token were rejected" if self.num_rejected else ""
        advice = next((m.hello["open"] for m in self.members if m.hello["open"]), "")
        is_loopback = self.address.startswith("127.")
        own = " (only this machine can reach this address: use one that the others can reach)" if is_loopback else ""
        return Finding(
            "E_MISSING", f"{missing} did not connect within {self.wait_seconds:.0f} s; connected: {connected}{rejected}",
            "start the same command there; if it is running, its output shows why it does not connect: TCP to "
            f"{self.address}{own} must be open ({advice}). --wait waits longer.{self._describe_seekers()}",
        )  # fmt: skip

    def _describe_seekers(self) -> str:
        """Return a sentence about nodes that look for the main node of this script at another address, or an empty string."""
        connected = {member.hello["ip"] for member in self.members}
        others = [(ip, main) for ip, main in (self.responder.seekers.items() if self.responder else ()) if ip not in connected]
        return "".join(
            f" The host {ip} runs the same script, but looks for the main node at {main}: correct --main_process_ip there if it "
            "belongs to this run." for ip, main in others[:4]
        )  # fmt: skip

    def _report_silent(self, member: Member, seconds: float, activity: str) -> Finding:
        """Return the finding for a member that does not answer, and stop sending requests to it."""
        member.is_silent = True
        how = "closed its connection" if member.is_gone else f"did not answer within {seconds:.0f} s"
        return Finding(
            "E_LEFT" if member.is_gone else "E_SILENT", f"{member.name} {how} while {activity}",
            "read the output of that node; start it again", host=member.hello["host"], node=member.hello["node"],
        )  # fmt: skip

    async def _send_to_all(self, message: dict[str, Any]) -> None:
        await asyncio.gather(*(member.send(message) for member in self.members))

    async def _print_everywhere(self, text: str) -> None:
        self.print_progress(text)
        await self._send_to_all({"do": "print", "text": text})

    async def _request(
        self, message: dict[str, Any], clean: Callable[[dict[str, Any], int], Any], activity: str
    ) -> tuple[dict[int, Any], list[Finding]]:
        """Send a request to every node. Returns the answers by node rank, and a finding for each node without one."""
        mains = [member for member in local_mains(self.members) if not (member.is_gone or member.is_silent)]
        seconds = ANSWER_SECONDS + PER_PATH_SECONDS * len(mains)

        async def ask(member: Member) -> Any:
            await member.send(message)
            with contextlib.suppress(asyncio.TimeoutError, ValueError, TypeError, KeyError):
                return clean(await asyncio.wait_for(member.inbox.get(), seconds), member.hello["node"])

        async def keep_alive() -> None:  # the other ranks would give up on a coordinator that sends nothing
            while True:
                await asyncio.sleep(KEEPALIVE_SECONDS)
                await self._send_to_all({"do": "wait"})

        keeping_alive = asyncio.ensure_future(keep_alive())
        answers = await asyncio.gather(*(ask(member) for member in mains))
        keeping_alive.cancel()
        silent = [self._report_silent(member, seconds, activity) for member, answer in zip(mains, answers) if answer is None]
        return {m.hello["node"]: answer for m, answer in zip(mains, answers) if answer is not None}, silent

    async def _run(self) -> None:
        findings = await self._wait_for_all()
        self.is_complete, ended_early = True, bool(findings)
        mains = local_mains(self.members)
        hellos = sorted((member.hello for member in mains if member.has_facts), key=lambda m: m["node"])
        findings += findings_of_members(self.members)
        is_complete = not find_missing(self.members)
        findings += [
            *compare_nodes.check_duplicates([m.hello for m in self.members]),
            *compare_nodes.check_counts(hellos, is_complete),
        ]
        lines: list[str] = []
        table: list[str] = []
        probes: list[dict[str, Any]] = []
        counts, copied = compare_nodes.count_ranks(hellos), ("node", "host", "ip", "ports", "interface", "open")
        roster = [{**{name: m[name] for name in copied}, "ranks": counts[m["node"]]} for m in hellos]
        is_whole = is_complete and len(hellos) == len(mains) and not compare_nodes.check_duplicates(hellos)
        if is_whole:
            names = ", ".join(f"{m['node']} {m['host']} ({m['ip']})" for m in roster[:_FEW])
            lines.append(f"nodes       {len(mains)} of {len(mains)} are connected: {names}{' ...' * (len(roster) > _FEW)}")
            if len(set(counts.values())) > 1:
                lines.append(f"            {describe_ranks([(m['host'], m['ranks']) for m in roster])}")
            differences, table = compare_nodes.compare_facts([m for m in hellos if m["facts"]["versions"]])
            findings += differences
            if len(mains) > 1:
                lines += [] if has_errors(differences) else ["            the same packages, code, options, configs and files"]
                probes, silent = await self._check_paths(roster)
                findings += [*silent, *paths.check_paths(probes, roster)]
                first, *more = paths.format_paths(probes, _FEW)
                lines += [f"paths       {first}", *(f"            {line}" for line in more)]
            request = {"do": "check_folder", "mark": self.mark}
            clean = lambda answer, node: paths.clean_folder(answer)
            folders, silent = await self._request(request, clean, "checking the output folder")
            findings += silent
            if any(one["folder"] for one in folders.values()):
                wrong, text = compare_nodes.check_storage(hellos, folders, max((m["needed"] for m in hellos), default=0))
                findings += wrong
                lines.append(f"storage     {text}")
        self.findings = findings = sort_findings(findings)
        runs_collectives = is_whole and not has_errors(findings) and all(m["deep"] for m in hellos)
        self.verdict = {
            "do": "verdict", "verdict": [finding.as_dict() for finding in findings[:_MOST_FINDINGS]], "table": table,
            "lines": lines, "roster": roster, "paths": probes if len(roster) <= _FEW else [],
            "deep_port": messages.find_free_port(self.ip) if runs_collectives else None,
        }  # fmt: skip
        num_connected, num_expected, _ = count_expected(self.members)
        await self._send_verdict(expects_more=not ended_early and num_connected < num_expected)

    async def _check_paths(self, roster: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Finding]]:
        """Return the probes of all nodes, and a finding for each node that did not send any."""
        nodes = {peer["node"] for peer in roster}
        request = {"do": "probe", "roster": roster, "mark": self.mark}
        clean = lambda answer, node: paths.clean_probes(answer, node, nodes)
        answers, silent = await self._request(request, clean, "checking the data paths")
        return [probe for answer in answers.values() for probe in answer], silent

    async def _send_verdict(self, expects_more: bool) -> None:
        """Send the verdict to all nodes, then stop listening, then let the nodes continue.

        A server that closed early would look like a fault to a slow node, and a node that connects late should receive the
        verdict too. Nodes continue only after the server is closed: the launchers that they start next would take its port
        for the rendezvous.
        """
        receivers = [member for member in self.members if not member.is_silent]
        for member in receivers:
            while not member.inbox.empty():
                member.inbox.get_nowait()

        async def deliver(member: Member) -> None:
            await member.send({**self.verdict, "node": member.hello["node"]})
            if not member.is_gone:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(member.inbox.get(), 5)  # the confirmation, or {} if the connection is closed

        await asyncio.gather(*(deliver(member) for member in receivers))
        if expects_more:
            await asyncio.sleep(_LATE_SECONDS)
        self._stop_listening()
        await asyncio.gather(*(member.send({"do": "close"}) for member in receivers))
        deadline = time.monotonic() + 2
        while not all(member.is_gone for member in receivers) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
