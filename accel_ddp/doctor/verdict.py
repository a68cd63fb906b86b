"""The doctor's coordinator on the main node: it waits for all nodes, compares them, and sends one verdict to every node.

Each node sends its `hello`, then its facts. The coordinator then requests probes of the data paths and a check of the output folder,
and finally sends the verdict. Every step has a time limit.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from accel_ddp.doctor import compare_nodes, host
from accel_ddp.doctor.compare_nodes import name_of
from accel_ddp.doctor.coordinator import Coordinator, Member, Message, Responder
from accel_ddp.doctor.findings import ERROR, Finding, Outcome, has_errors, sort_findings
from accel_ddp.doctor.host import HOST
from accel_ddp.nodes import messages
from accel_ddp.nodes.spawn import raise_file_limit
from accel_ddp.nodes.topology import describe_ranks, find_nodes

GRACE_SECONDS = 15.0  # for nodes that are still starting, when the findings are already errors: they report the errors too
ANSWER_SECONDS, PER_PATH_SECONDS = 12.0, 1.0  # to answer a request, and more for each path that is measured
_SILENCE_SECONDS = 3600.0  # a node that hangs is found because it does not answer a request
_LATE_SECONDS = 0.5  # for nodes that connect after the verdict
_MOST_FINDINGS = 200  # in one verdict
_MOST_NAMED = 16  # missing nodes
_FEW = 16  # up to this number of nodes, all of them and all paths are listed


def find_missing(hellos: list[Message]) -> list[str]:
    by_rank, local_ranks = compare_nodes.counts_ranks(hellos), {}
    key, total, name, kind = ("rank", "ranks", "rank", "ranks") if by_rank else ("node", "nodes", "machine_rank", "nodes")
    numbers = sorted(set(range(max((hello[total] for hello in hellos), default=1))) - {hello[key] for hello in hellos})
    missing = [f"{name} {number}" for number in numbers[:_MOST_NAMED]]
    missing += [f"{len(numbers) - _MOST_NAMED} more {kind}"] if len(numbers) > _MOST_NAMED else []
    for hello in [] if by_rank else hellos:
        local_ranks.setdefault(hello["node"], set(range(hello["local_ranks"]))).discard(hello["local_rank"])
    return missing + [f"local rank {one} of machine_rank {node}" for node, left in sorted(local_ranks.items()) for one in left]


class Examiner(Coordinator):
    """Runs on the main node. `open` starts it; `finished` is done when every node has received the verdict."""

    def __init__(self, token: bytes, wait_seconds: float, print_progress: Callable[[str], None]):
        super().__init__(lambda node: token, _SILENCE_SECONDS)
        self.token, self.wait_seconds, self.print_progress = token, wait_seconds, print_progress
        self.is_rescue = False  # the main port cannot be used; nodes are only told why
        self.responder: Responder | None = None
        self.is_complete = False  # a node that connects from now on is late
        self.outcome: Outcome | None = None
        self.ip = self.address = ""
        self.mark = os.urandom(6).hex()  # in the names of the files that show whether nodes share a folder

    async def open(self, ip: str, ports: tuple[int, ...], shown_ip: str, rescue_port: int | None, main_address: str) -> None:
        """Listen on the first free port, else OSError. Nodes that cannot reach it use `rescue_port`, by TCP and by broadcast."""
        for port in ports:
            try:
                await self.listen(ip, port)
                break
            except OSError:
                if port == ports[-1]:
                    raise
        raise_file_limit()  # each rank of a large world needs an open file
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

    @property
    def hellos(self) -> list[Message]:
        return [member.hello for member in self.members]

    @property
    def mains(self) -> list[Member]:
        """Return one process of each node, in the order of the node ranks. It checks the paths and the disk of its node."""
        return sorted((one for one in self.members if one.hello["local_rank"] == 0), key=lambda one: one.hello["node"])

    # ---- nodes that connect

    def read_hello(self, message: Message) -> Message:
        hello = compare_nodes.clean("hello", message)
        if self.is_rescue:  # this coordinator does not listen on the main port, for a reason that its own node reports
            hello["findings"] = [finding for finding in hello["findings"] if finding.code != "E_PORT_BLOCKED"]
        return hello

    async def join(self, member: Member) -> None:
        hello = member.hello
        if hello["node"] is None:  # c10d: node ranks are assigned here; the coordinator's node is 0
            taken = {one["node"] for one in self.hellos} | {0}
            # In containers, processes of different nodes may have the same pid.
            is_mine = (hello["host"], hello["pid"]) == (HOST, os.getpid())
            hello["node"] = 0 if is_mine else next(n for n in range(len(taken) + 1) if n not in taken)
        if self.is_complete:  # it was not checked, and must not receive the verdict `healthy`
            names = ", ".join(name_of(one.hello) for one in self.mains[:8])
            saw = f"{name_of(hello)} connected after the nodes had been checked without it: {names}"
            late = Outcome([Finding("E_LATE", saw, host=hello["host"], node=hello["node"])])
            is_failed = self.outcome and self.outcome.has_errors
            await member.send(_verdict_message(self.outcome if is_failed else late, member))
            await member.send({"do": "close"})
            await member.stream.close()
            raise ConnectionError("it is late")
        await super().join(member)
        self._number_nodes()

    def _number_nodes(self) -> None:
        if compare_nodes.counts_ranks(self.hellos):
            hellos = sorted(self.hellos, key=lambda hello: hello["rank"])
            for hello, node in zip(hellos, find_nodes([(m["host"], m["local_rank"], m["local_ranks"]) for m in hellos])):
                hello["node"] = node

    async def take(self, member: Member, message: Message) -> None:
        if "facts" in member.hello:
            await super().take(member, message)
            return
        facts = compare_nodes.clean_facts(message)
        member.hello |= {"facts": facts, "clock": facts["time"] - time.time()}
        member.hello["findings"] += facts["findings"]
        self.changed.set()

    # ---- the wait for all nodes

    async def _wait_for_all(self) -> list[Finding]:
        began = time.monotonic()
        printed_at = began - host.NOTICE_INTERVAL + host.FIRST_NOTICE
        grace = min(GRACE_SECONDS, 0.75 * self.wait_seconds)
        errors_since = complete_since = None  # errors make it pointless to wait for more nodes
        while True:
            for member in [m for m in self.members if m.lost]:
                self.members.remove(member)
                self._number_nodes()
                await self._print_everywhere(f"{name_of(member.hello)} has closed its connection.")
            now, missing, errors = time.monotonic(), find_missing(self.hellos), self._find_errors()
            without_facts = [member for member in self.members if "facts" not in member.hello]
            num_connected, num_expected, _ = self._count_expected()
            has_enough = errors and num_connected >= num_expected and not any(one.startswith("local") for one in missing)
            complete_since = (complete_since or now) if self.members and (not missing or has_enough) else None
            if errors and not errors_since and missing:
                codes = ", ".join(sorted({finding.code for finding in errors}))
                text = f"{codes}: waiting up to {grace:.0f} s for {', '.join(missing)}, so that every node prints the error."
                await self._print_everywhere(text)
            errors_since = (errors_since or now) if errors else None
            is_pointless = complete_since or (errors_since and now - errors_since > grace)
            if is_pointless and not without_facts:
                return []
            if complete_since and now - complete_since > host.FACTS:
                return [self.report_silent(member, host.FACTS, "sending its facts") for member in without_facts]
            if self.members and missing and now - began >= self.wait_seconds:
                return [self._report_missing(one) for one in missing]
            if self.members and now - printed_at >= host.NOTICE_INTERVAL:
                printed_at = now
                await self._print_progress(missing, without_facts, now - began)
            self.changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 0.25)

    def _find_errors(self) -> list[Finding]:
        errors = compare_nodes.check_duplicates(self.hellos)
        errors += compare_nodes.check_counts([member.hello for member in self.mains])
        return errors + [finding for finding in self._own_findings() if finding.severity == ERROR]

    async def _print_progress(self, missing: list[str], without_facts: list[Member], seconds: float) -> None:
        num_connected, _, kind = self._count_expected()
        what = ", ".join(missing) or f"the facts of {', '.join(name_of(one.hello) for one in without_facts[:8])}"
        hint = f" Check that it is started there and can reach {self.address}.{self._describe_seekers()}"
        num_all = max(hello[kind] for hello in self.hellos)
        await self._print_everywhere(
            f"waiting for {what} ({num_connected} of {num_all} {kind} are connected: {self._connected()}), "
            f"{seconds:.0f} of {self.wait_seconds:.0f} s.{hint if missing else ''}"
        )

    def _count_expected(self) -> tuple[int, int, str]:
        if compare_nodes.counts_ranks(self.hellos):
            return len(self.members), min(hello["ranks"] for hello in self.hellos), "ranks"
        return len(self.mains), min((hello["nodes"] for hello in self.hellos), default=1), "nodes"

    def _own_findings(self) -> list[Finding]:
        """E_MAIN_IS_HERE is left out if node 0 has connected: the node that reports it then shares a machine with node 0."""
        # A rank only estimates its node if the user has set RANK and WORLD_SIZE.
        found = [
            replace(finding, **({} if hello["rank"] is None else {"node": hello["node"]}))
            for hello in self.hellos for finding in hello["findings"]
        ]  # fmt: skip
        has_main = any(hello["node"] == 0 for hello in self.hellos)
        return [finding for finding in found if not (has_main and finding.code == "E_MAIN_IS_HERE")]

    def _connected(self) -> str:
        return ", ".join(f"{m.hello['node']} {m.hello['host']}" for m in self.mains[:_FEW])

    def _report_missing(self, missing: str) -> Finding:
        rejected = f"; {self.num_rejected} connections without the token were rejected" if self.num_rejected else ""
        advice = next((hello["open"] for hello in self.hellos if hello["open"]), "")
        own = " (only this machine can reach this address)" if self.address.startswith("127.") else ""
        return Finding(
            "E_MISSING", f"{missing} did not connect within {self.wait_seconds:.0f} s; connected: {self._connected()}{rejected}",
            "start the same command there; if it is running, its output shows why it does not connect: TCP to "
            f"{self.address}{own} must be open ({advice}). --wait waits longer.{self._describe_seekers()}",
        )  # fmt: skip

    def report_silent(self, member: Member, seconds: float, activity: str) -> Finding:
        member.is_silent = True
        how = "closed its connection" if member.lost else f"did not answer within {seconds:.0f} s"
        saw = f"{name_of(member.hello)} {how} while {activity}"
        return Finding("E_SILENT", saw, host=member.hello["host"], node=member.hello["node"])

    def _describe_seekers(self) -> str:
        connected = {hello["ip"] for hello in self.hellos}
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
        mains, has_all = self.mains, not find_missing(self.hellos)
        hellos = [member.hello for member in mains if "facts" in member.hello]
        findings = [
            *reasons,
            *self._own_findings(),
            *compare_nodes.check_duplicates(self.hellos),
            *compare_nodes.check_counts(hellos, has_all),
        ]
        counts, copied = compare_nodes.count_ranks(hellos), ("node", "host", "ip", "ports", "interface", "open", "key")
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
        num_connected, num_expected, _ = self._count_expected()
        await self._send_verdict(expects_more=not reasons and num_connected < num_expected)

    async def _compare(self, outcome: Outcome, hellos: list[Message]) -> None:
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
        clean = lambda answer, node: compare_nodes.clean_probes(answer, node, nodes)
        answers = await self._request({"do": "probe", "roster": roster}, clean, "checking the data paths", outcome)
        probes = [probe for answer in answers.values() for probe in answer]
        outcome.paths = probes if len(roster) <= _FEW else []
        outcome.findings += compare_nodes.check_paths(probes, roster)
        first, *more = compare_nodes.format_paths(probes, _FEW)
        outcome.lines += [f"paths       {first}", *(f"            {line}" for line in more)]

    async def _check_storage(self, outcome: Outcome, hellos: list[Message]) -> None:
        clean = lambda answer, node: compare_nodes.clean("folder", answer)
        folders = await self._request({"do": "check_folder"}, clean, "checking the output folder", outcome)
        if any(one["folder"] for one in folders.values()):
            wrong, text = compare_nodes.check_storage(hellos, folders, max((m["needed"] for m in hellos), default=0))
            outcome.findings += wrong
            outcome.lines.append(f"storage     {text}")

    async def _request(
        self, message: Message, clean: Callable[[Message, int], Any], activity: str, outcome: Outcome
    ) -> dict[int, Any]:
        mains = [member for member in self.mains if not (member.lost or member.is_silent)]
        seconds = ANSWER_SECONDS + PER_PATH_SECONDS * len(mains)
        await asyncio.gather(*(member.send({**message, "mark": self.mark}) for member in mains))
        answers, cleaned = await self.collect_answers(mains, seconds), {}
        for member in mains:
            try:
                cleaned[member.hello["node"]] = clean(answers[member], member.hello["node"])
            except (ValueError, TypeError, KeyError):
                outcome.findings.append(self.report_silent(member, seconds, activity))
        return cleaned

    async def _send_verdict(self, expects_more: bool) -> None:
        """Late nodes get it too, so the server closes after it, and nodes go on after that: their launchers need the port."""
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
