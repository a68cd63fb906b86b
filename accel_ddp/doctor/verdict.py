"""The doctor's coordinator on the main node: it waits for all nodes, compares them, and sends one verdict to every node.

Each node sends its `hello`, then its facts. The coordinator then requests probes of the data paths and a check of the output folder,
and finally sends the verdict. Every step has a time limit.
"""

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from accel_ddp.doctor import compare_nodes, host, paths
from accel_ddp.doctor.coordinator import Coordinator, Member, Message, Responder
from accel_ddp.doctor.findings import ERROR, Finding, Outcome, has_errors, sort_findings
from accel_ddp.doctor.host import HOST
from accel_ddp.nodes import messages
from accel_ddp.nodes.topology import describe_ranks, find_nodes

GRACE_SECONDS = 15.0  # for nodes that are still starting, when the findings are already errors: they report the errors too
ANSWER_SECONDS, PER_PATH_SECONDS = 12.0, 1.0  # to answer a request, and more for each path that is measured
_SILENCE_SECONDS = 3600.0  # a node that hangs is found because it does not answer a request
_LATE_SECONDS = 0.5  # for nodes that connect after the verdict
_MOST_FINDINGS = 200  # in one verdict
_MOST_NAMED = 16  # missing nodes
_FEW = 16  # up to this number of nodes, all of them and all paths are listed


def name_of(member: Member) -> str:
    local = f", local rank {member.hello['local_rank']}" if member.hello["local_rank"] else ""
    return f"{member.hello['host']} (machine_rank {member.hello['node']}{local})"


def local_mains(members: list[Member]) -> list[Member]:
    """Return one process of each node, in the order of the node ranks. It checks the paths and the disk of its node."""
    return sorted((member for member in members if member.hello["local_rank"] == 0), key=lambda member: member.hello["node"])


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
        num_ranks = max(member.hello["ranks"] for member in members)
        return _name_first([f"rank {rank}" for rank in range(num_ranks) if rank not in there], "ranks")
    connected: dict[int, set[int]] = {}
    local_sizes: dict[int, int] = {}
    for member in members:
        node = member.hello["node"]
        connected.setdefault(node, set()).add(member.hello["local_rank"])
        local_sizes[node] = max(local_sizes.get(node, 1), member.hello["local_ranks"])
    num_nodes = max((m.hello["nodes"] for m in members), default=1)
    missing = _name_first([f"machine_rank {node}" for node in range(num_nodes) if node not in connected], "nodes")
    for node, ranks in sorted(connected.items()):
        missing += [f"local rank {one} of machine_rank {node}" for one in range(local_sizes[node]) if one not in ranks]
    return missing


def _name_first(names: list[str], kind: str) -> list[str]:
    """Return the first names, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return [*names[:_MOST_NAMED], *([f"{more} more {kind}"] if more > 0 else [])]


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


class Examiner(Coordinator):
    """Runs on the main node. `open` starts it; `finished` is done when every node has received the verdict."""

    def __init__(self, token: bytes, wait_seconds: float, print_progress: Callable[[str], None]):
        super().__init__(token, _SILENCE_SECONDS)
        self.wait_seconds, self.print_progress = wait_seconds, print_progress
        self.is_rescue = False  # the main port cannot be used; nodes are only told why
        self.responder: Responder | None = None
        self.is_complete = False  # a node that connects from now on is late
        self.outcome: Outcome | None = None
        self.ip = self.address = ""
        self.mark = os.urandom(6).hex()  # in the names of the files that show whether nodes share a folder

    async def open(self, ip: str, ports: tuple[int, ...], shown_ip: str, rescue_port: int | None, main_address: str) -> None:
        """Listen on the first free port. Raises OSError if none is free. `shown_ip` is the address in messages.

        Nodes that cannot reach this port or do not find this host use `rescue_port`, over TCP and as a broadcast over UDP.
        """
        for port in ports:
            try:
                await self.listen(ip, port)
                break
            except OSError:
                if port == ports[-1]:
                    raise
        with contextlib.suppress(ValueError, OSError):  # each rank of a large world needs an open file
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit[1], 65536) if limit[1] > 0 else 65536, limit[1]))
        self.ip, self.address, self.is_rescue = ip, f"{shown_ip}:{port}", port == rescue_port
        if rescue_port and not ip.startswith("127."):
            if not self.is_rescue:
                with contextlib.suppress(OSError):
                    await self.listen(ip, rescue_port)
            self.responder = Responder(self.token, main_address)
            await self.responder.open(rescue_port)
        self.finished = asyncio.ensure_future(self._run())

    def stop_listening(self) -> None:
        super().stop_listening()
        if self.responder:
            self.responder.close()

    async def close(self) -> None:
        await super().close()
        self.finished.cancel()
        await asyncio.gather(self.finished, return_exceptions=True)

    # ---- nodes that connect

    def read_hello(self, message: Message) -> Message:
        hello = paths.clean_hello(message)
        if self.is_rescue:  # this coordinator does not listen on the main port, for a reason that its own node reports
            hello["findings"] = [finding for finding in hello["findings"] if finding.code != "E_PORT_BLOCKED"]
        return hello

    async def join(self, member: Member) -> None:
        hello = member.hello
        if hello["node"] is None:  # c10d: node ranks are assigned here; the coordinator's node is 0
            taken = {one.hello["node"] for one in self.members} | {0}
            # In containers, processes of different nodes may have the same pid.
            is_mine = (hello["host"], hello["pid"]) == (HOST, os.getpid())
            hello["node"] = 0 if is_mine else next(n for n in range(len(taken) + 1) if n not in taken)
        if self.is_complete:
            await self._reject_late(member)
            raise ConnectionError("it is late")
        await super().join(member)
        number_nodes(self.members)

    async def take(self, member: Member, message: Message) -> None:
        """Store the facts of a node, which it sends first. Everything else is an answer."""
        if "facts" in member.hello:
            await super().take(member, message)
            return
        facts = paths.clean_facts(message)
        member.hello |= {"facts": facts, "clock": facts["time"] - time.time()}
        member.hello["findings"] += facts["findings"]
        self.changed.set()

    async def _reject_late(self, member: Member) -> None:
        """Send an error to a node that was not checked. It must not receive the verdict `healthy`."""
        names = ", ".join(name_of(one) for one in local_mains(self.members)[:8])
        saw = f"{name_of(member)} connected after the nodes had been checked without it: {names}"
        late = Outcome([Finding("E_LATE", saw, host=member.hello["host"], node=member.hello["node"])])
        is_failed = self.outcome and self.outcome.has_errors
        await member.send(_verdict_message(self.outcome if is_failed else late, member))
        await member.send({"do": "close"})
        await messages.close(member.writer)

    # ---- the wait for all nodes

    async def _wait_for_all(self) -> list[Finding]:
        """Wait until every node has sent its facts, and print which are missing. Returns why the wait ended early."""
        waiting = _WaitForNodes(self)
        while True:
            for member in [m for m in self.members if m.lost]:
                self.members.remove(member)
                number_nodes(self.members)
                await self._print_everywhere(f"{name_of(member)} has closed its connection.")
            waiting.look()
            if (reasons := waiting.why_over()) is not None:
                return reasons
            for text in waiting.notices():
                await self._print_everywhere(text)
            self.changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 0.25)

    def report_silent(self, member: Member, seconds: float, activity: str) -> Finding:
        """Return the finding for a member that does not answer, and stop sending requests to it."""
        member.is_silent = True
        how = "closed its connection" if member.lost else f"did not answer within {seconds:.0f} s"
        code, saw = "E_LEFT" if member.lost else "E_SILENT", f"{name_of(member)} {how} while {activity}"
        return Finding(code, saw, host=member.hello["host"], node=member.hello["node"])

    def describe_seekers(self) -> str:
        """Return a sentence about nodes that look for the main node of this script at another address, or an empty string."""
        connected = {member.hello["ip"] for member in self.members}
        others = [(ip, main) for ip, main in (self.responder.seekers.items() if self.responder else ()) if ip not in connected]
        return "".join(
            f" The host {ip} runs the same script, but looks for the main node at {main}: correct --main_process_ip there if it "
            "belongs to this run." for ip, main in others[:4]
        )  # fmt: skip

    async def _print_everywhere(self, text: str) -> None:
        self.print_progress(text)
        await self.send_to_all({"do": "print", "text": text})

    # ---- the checks and the verdict

    async def _run(self) -> None:
        reasons = await self._wait_for_all()
        self.is_complete = True
        mains, has_all = local_mains(self.members), not find_missing(self.members)
        hellos = [member.hello for member in mains if "facts" in member.hello]
        findings = [
            *reasons,
            *findings_of_members(self.members),
            *compare_nodes.check_duplicates([m.hello for m in self.members]),
            *compare_nodes.check_counts(hellos, has_all),
        ]
        counts, copied = compare_nodes.count_ranks(hellos), ("node", "host", "ip", "ports", "interface", "open")
        roster = [{**{name: m[name] for name in copied}, "ranks": counts[m["node"]]} for m in hellos]
        outcome = Outcome(findings, roster=roster)
        is_whole = has_all and len(hellos) == len(mains) and not compare_nodes.check_duplicates(hellos)
        if is_whole:
            await self._compare(outcome, hellos)
            await self._check_storage(outcome, hellos)
        outcome.findings = sort_findings(outcome.findings)
        if is_whole and not outcome.has_errors and all(m["deep"] for m in hellos):
            outcome.deep_port = messages.find_free_port(self.ip)
        self.outcome = outcome
        num_connected, num_expected, _ = count_expected(self.members)
        await self._send_verdict(expects_more=not reasons and num_connected < num_expected)

    async def _compare(self, outcome: Outcome, hellos: list[dict[str, Any]]) -> None:
        """Compare the facts of the nodes, and check every path between them."""
        roster = outcome.roster
        names = ", ".join(f"{m['node']} {m['host']} ({m['ip']})" for m in roster[:_FEW])
        outcome.lines.append(f"nodes       {len(roster)} of {len(roster)} are connected: {names}{' ...' * (len(roster) > _FEW)}")
        if len({m["ranks"] for m in roster}) > 1:
            outcome.lines.append(f"            {describe_ranks([(m['host'], m['ranks']) for m in roster])}")
        differences, outcome.table = compare_nodes.compare_facts([m for m in hellos if m["facts"]["versions"]])
        outcome.findings += differences
        if len(roster) == 1:
            return
        outcome.lines += [] if has_errors(differences) else ["            the same packages, code, options, configs and files"]
        nodes = {peer["node"] for peer in roster}
        answers, silent = await self._request(
            {"do": "probe", "roster": roster, "mark": self.mark},
            lambda answer, node: paths.clean_probes(answer, node, nodes),
            "checking the data paths",
        )
        probes = [probe for answer in answers.values() for probe in answer]
        outcome.paths = probes if len(roster) <= _FEW else []
        outcome.findings += [*silent, *paths.check_paths(probes, roster)]
        first, *more = paths.format_paths(probes, _FEW)
        outcome.lines += [f"paths       {first}", *(f"            {line}" for line in more)]

    async def _check_storage(self, outcome: Outcome, hellos: list[dict[str, Any]]) -> None:
        """Check whether the output folder can be written and is shared by the nodes."""
        clean = lambda answer, node: paths.clean_folder(answer)
        request = {"do": "check_folder", "mark": self.mark}
        folders, silent = await self._request(request, clean, "checking the output folder")
        outcome.findings += silent
        if any(one["folder"] for one in folders.values()):
            wrong, text = compare_nodes.check_storage(hellos, folders, max((m["needed"] for m in hellos), default=0))
            outcome.findings += wrong
            outcome.lines.append(f"storage     {text}")

    async def _request(
        self, message: Message, clean: Callable[[Message, int], Any], activity: str
    ) -> tuple[dict[int, Any], list[Finding]]:
        """Send a request to every node. Returns the answers by node rank, and a finding for each node without one."""
        mains = [member for member in local_mains(self.members) if not (member.lost or member.is_silent)]
        seconds = ANSWER_SECONDS + PER_PATH_SECONDS * len(mains)
        await asyncio.gather(*(member.send(message) for member in mains))
        answers = await self.collect_answers(mains, seconds)
        cleaned, silent = {}, []
        for member in mains:
            try:
                cleaned[member.hello["node"]] = clean(answers[member], member.hello["node"])
            except (ValueError, TypeError, KeyError):
                silent.append(self.report_silent(member, seconds, activity))
        return cleaned, silent

    async def _send_verdict(self, expects_more: bool) -> None:
        """Send the verdict to all nodes, then stop listening, then let the nodes continue.

        A server that closed early would look like a fault to a slow node, and a node that connects late should receive the
        verdict too. Nodes continue only after the server is closed: the launchers that they start next would take its port
        for the rendezvous.
        """
        receivers = [member for member in self.members if not member.is_silent]
        await asyncio.gather(*(member.send(_verdict_message(self.outcome, member)) for member in receivers))
        await self.collect_answers(receivers, 5)  # the confirmations
        if expects_more:
            await asyncio.sleep(_LATE_SECONDS)
        self.stop_listening()
        await asyncio.gather(*(member.send({"do": "close"}) for member in receivers))
        deadline = time.monotonic() + 2
        while not all(member.lost for member in receivers) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)


def _verdict_message(outcome: Outcome, member: Member) -> Message:
    return {
        "do": "verdict", "verdict": [finding.as_dict() for finding in outcome.findings[:_MOST_FINDINGS]], "table": outcome.table,
        "lines": outcome.lines, "roster": outcome.roster, "paths": outcome.paths, "deep_port": outcome.deep_port,
        "node": member.hello["node"],
    }  # fmt: skip


class _WaitForNodes:
    """The wait for all nodes: `look` reads its state, `why_over` ends it, and `notices` are printed meanwhile."""

    def __init__(self, examiner: Examiner):
        self.examiner = examiner
        self.wait_seconds = examiner.wait_seconds
        self.grace_seconds = min(GRACE_SECONDS, 0.75 * self.wait_seconds)
        self.began = self.now = time.monotonic()
        self.printed_at = self.began - host.NOTICE_INTERVAL + host.FIRST_NOTICE
        self.errors_since: float | None = None  # errors make it pointless to wait for more nodes
        self.complete_since: float | None = None  # all nodes are connected that are waited for

    @property
    def waited(self) -> float:
        return self.now - self.began

    def look(self) -> None:
        self.now, self.members = time.monotonic(), self.examiner.members
        self.missing, self.errors = find_missing(self.members), self._find_errors()
        self.without_facts = [member for member in self.members if "facts" not in member.hello]
        self.num_connected, num_expected, self.kind = count_expected(self.members)
        lacks_local_rank = any(one.startswith("local") for one in self.missing)
        has_enough = bool(self.errors) and self.num_connected >= num_expected and not lacks_local_rank
        is_complete = bool(self.members) and (not self.missing or has_enough)
        self.has_new_errors = bool(self.errors) and not self.errors_since
        self.complete_since = (self.complete_since or self.now) if is_complete else None
        self.errors_since = (self.errors_since or self.now) if self.errors else None

    def _find_errors(self) -> list[Finding]:
        return [
            *compare_nodes.check_duplicates([member.hello for member in self.members]),
            *compare_nodes.check_counts([member.hello for member in local_mains(self.members)]),
            *(finding for finding in findings_of_members(self.members) if finding.severity == ERROR),
        ]

    def why_over(self) -> list[Finding] | None:
        """Return None while the wait continues, and otherwise why it has ended early. The list is empty if it has not."""
        if self.complete_since and not self.without_facts:
            return []
        if self.complete_since and self.now - self.complete_since > host.FACTS:
            return [self.examiner.report_silent(member, host.FACTS, "sending its facts") for member in self.without_facts]
        if self.errors_since and self.now - self.errors_since > self.grace_seconds and not self.without_facts:
            return []
        if self.members and self.missing and self.waited >= self.wait_seconds:
            return [self._report_missing(one) for one in self.missing]
        return None

    def notices(self) -> list[str]:
        """Return what is due to be printed on every node."""
        texts = []
        if self.has_new_errors and self.missing:
            codes = ", ".join(sorted({finding.code for finding in self.errors}))
            missing = ", ".join(self.missing)
            texts.append(f"{codes}: waiting up to {self.grace_seconds:.0f} s for {missing}, so that every node prints the error.")
        if self.members and self.now - self.printed_at >= host.NOTICE_INTERVAL:
            self.printed_at = self.now
            what = ", ".join(self.missing) or f"the facts of {', '.join(name_of(one) for one in self.without_facts[:8])}"
            hint = f" Check that it is started there and can reach {self.examiner.address}.{self.examiner.describe_seekers()}"
            num_all = max(member.hello[self.kind] for member in self.members)
            texts.append(
                f"waiting for {what} ({self.num_connected} of {num_all} {self.kind} are connected: {self._connected()}), "
                f"{self.waited:.0f} of {self.wait_seconds:.0f} s.{hint if self.missing else ''}"
            )
        return texts

    def _connected(self) -> str:
        return ", ".join(f"{m.hello['node']} {m.hello['host']}" for m in local_mains(self.members)[:_FEW])

    def _report_missing(self, missing: str) -> Finding:
        num_rejected, address = self.examiner.num_rejected, self.examiner.address
        rejected = f"; {num_rejected} connections without the token were rejected" if num_rejected else ""
        advice = next((m.hello["open"] for m in self.members if m.hello["open"]), "")
        is_loopback = address.startswith("127.")
        own = " (only this machine can reach this address: use one that the others can reach)" if is_loopback else ""
        return Finding(
            "E_MISSING", f"{missing} did not connect within {self.wait_seconds:.0f} s; connected: {self._connected()}{rejected}",
            "start the same command there; if it is running, its output shows why it does not connect: TCP to "
            f"{address}{own} must be open ({advice}). --wait waits longer.{self.examiner.describe_seekers()}",
        )  # fmt: skip
