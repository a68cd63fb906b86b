"""The main node's side: who is here, who is missing, and one verdict that every node hears before the doors close."""

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from accel_ddp.doctor import compare, paths
from accel_ddp.doctor import sanitize as believed
from accel_ddp.doctor.report import Finding, in_order, is_bad
from accel_ddp.net import messages as wire

NAMED_AFTER, NAMED_EVERY = 2.0, 10.0  # seconds until those who are missing are named, and again
GRACE = 0.7  # for nodes that are about to come, when the verdict is clear already
FACTS_SECONDS = 45.0  # for a node that is here to tell what it has: its disks and driver may be slow
ANSWER_SECONDS, PER_PATH_SECONDS = 12.0, 1.0  # of a node that was asked to do something, and more for each path that it measures
_LINGER = 0.5  # for nodes that come after a verdict
_MOST_VISITORS = 256  # at once that have not shown the token; each is dropped after 3 s
_MOST_MEMBERS = 2 * believed.MOST_NODES
_MOST_TOLD = 200  # findings of one verdict
_FEW = 16  # nodes up to which every path is told


@dataclass(eq=False)
class Member:
    said: dict[str, Any]
    writer: asyncio.StreamWriter
    inbox: asyncio.Queue = field(default_factory=lambda: asyncio.Queue(16))
    has_facts: bool = False
    gone: bool = False  # its connection is closed
    silent: bool = False  # it did not answer: it is not asked again

    @property
    def name(self) -> str:
        local = f", local rank {self.said['local_rank']}" if self.said["local_rank"] else ""
        return f"{self.said['host']} (machine_rank {self.said['node']}{local})"

    @property
    def is_voice(self) -> bool:
        """One process of each node looks at the paths and the disk; the other ranks wait for the verdict."""
        return self.said["local_rank"] == 0

    async def tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await wire.send(self.writer, message, 5)


class Meeting:
    def __init__(self, token: bytes, wait: float, say: Callable[[str], None]):
        self.token, self.wait, self.say = token, wait, say
        self.members: list[Member] = []
        self.changed = asyncio.Event()
        self.visitors: dict[asyncio.StreamWriter, None] = {}  # in the order in which they came
        self.strangers = 0
        self.called = False  # the roll: who comes now is late
        self.verdict: dict[str, Any] | None = None
        self.address = ""
        self.mark = os.urandom(6).hex()  # in the names of files by which nodes see whether they share a folder

    async def open(self, ip: str, ports: tuple[int, ...], shown: str) -> None:
        """Listen on the first free port. OSError where none is."""
        for port in ports:
            try:
                sock = wire.listening_socket(ip, port, small=True)
                break
            except OSError:
                if port == ports[-1]:
                    raise
        with contextlib.suppress(ValueError, OSError):  # a connection for each rank of a large world
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit[1], 65536) if limit[1] > 0 else 65536, limit[1]))
        self.address = f"{shown}:{port}"
        self.ip = ip
        self.server = await asyncio.start_server(self._visit, sock=sock, limit=1 << 16)
        self.conducted = asyncio.ensure_future(self._conduct())

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self.visitors) >= _MOST_VISITORS:  # who has shown nothing for longest makes room
            oldest = next(iter(self.visitors))
            del self.visitors[oldest]
            oldest.close()
        self.visitors[writer] = None
        try:
            await wire.greet(reader, writer, self.token, comes=False)
            member = Member(believed.hello(await wire.receive(reader, 10)), writer)
            if len(self.members) >= _MOST_MEMBERS:
                raise ValueError("too many")
        except asyncio.CancelledError:  # the loop ends; raised again it would be printed as a fault
            writer.close()
            return
        except Exception:  # whatever a stranger sends
            self.strangers += 1
            writer.close()
            return
        finally:
            self.visitors.pop(writer, None)
        if member.said["node"] is None:  # c10d: numbers are given out; the host of the meeting is 0
            taken = {one.said["node"] for one in self.members} | {0}
            mine = member.said["pid"] == os.getpid()
            member.said["node"] = 0 if mine else next(n for n in range(len(taken) + 1) if n not in taken)
        if self.verdict or self.called:
            await self._refuse_who_is_late(member)
            return
        self.members.append(member)
        self.changed.set()
        try:
            member.said["facts"] = found = believed.facts(await wire.receive(reader, FACTS_SECONDS))
            member.said["clock"] = found["time"] - time.time()
            member.said["findings"] += found["findings"]
            member.has_facts = True
            self.changed.set()
            while True:
                member.inbox.put_nowait(await wire.receive(reader, 3600))
        except (Exception, asyncio.CancelledError):
            member.gone = True
            with contextlib.suppress(asyncio.QueueFull):
                member.inbox.put_nowait({})
            self.changed.set()
            writer.close()

    async def _refuse_who_is_late(self, member: Member) -> None:
        """A node that is not among those who were looked at must not hear that all is well."""
        here = ", ".join(one.name for one in sorted(self._voices(), key=lambda one: one.said["node"])[:8])
        late = Finding(
            "E_LATE", f"{member.name} came when the nodes had met without it: {here}",
            "use the same num_machines on every node and a machine_rank of its own for each; then start all again",
            host=member.said["host"], node=member.said["node"],
        )  # fmt: skip
        told = self.verdict if self.verdict and is_bad(self.verdict_findings) else {"do": "hear", "verdict": [late.as_dict()]}
        await member.tell({"lines": [], "table": [], "roster": [], "paths": [], **told, "node": member.said["node"]})
        await member.tell({"do": "go"})
        await wire.close(member.writer)

    def _voices(self) -> list[Member]:
        return [member for member in self.members if member.is_voice]

    def _missing(self) -> list[str]:
        """Machine ranks that are not here, and ranks of nodes that are here in part."""
        here: dict[int, set[int]] = {}
        locals_of: dict[int, int] = {}
        for member in self.members:
            node = member.said["node"]
            here.setdefault(node, set()).add(member.said["local_rank"])
            locals_of[node] = max(locals_of.get(node, 1), member.said["local_ranks"])
        nodes = max((m.said["nodes"] for m in self.members), default=1)
        absent = [str(node) for node in range(nodes) if node not in here]
        missing = [f"machine_rank {node}" for node in absent[:16]]
        missing += [f"{len(absent) - 16} more nodes"] if len(absent) > 16 else []
        for node, ranks in sorted(here.items()):
            missing += [f"local rank {one} of machine_rank {node}" for one in range(locals_of[node]) if one not in ranks]
        return missing

    def _clear_already(self) -> list[Finding]:
        """What makes waiting for the others pointless."""
        said = [member.said for member in self.members]
        found = [*compare.duplicates(said), *compare.counts([m.said for m in self._voices()])]
        return [*found, *(one for one in self._of_the_nodes() if one.severity == "error")]

    def _of_the_nodes(self) -> list[Finding]:
        """What the nodes found at home. Where node 0 is here too, one that has the main address is a second on its machine."""
        found = [one for member in self.members for one in member.said["findings"]]
        is_there = any(member.said["node"] == 0 for member in self.members)
        return [one for one in found if not (is_there and one.code == "E_MAIN_IS_HERE")]

    async def _all_here(self) -> list[Finding]:
        """Wait for every node; name those who are missing. Returns what ended the wait early."""
        began = time.monotonic()
        named, ticked, clear_since, complete_since = began - NAMED_EVERY + NAMED_AFTER, began, None, None
        while True:
            now = time.monotonic()
            for member in [m for m in self.members if m.gone]:
                self.members.remove(member)
                await self._tell_all(f"{member.name} has left.")
            missing, clear = self._missing(), self._clear_already()
            crowd = len(self._voices()) >= min((m.said["nodes"] for m in self.members), default=1)
            complete = self.members and (not missing or (clear and crowd and not any(m.startswith("local") for m in missing)))
            late = [member for member in self.members if not member.has_facts]
            if complete and not late:
                return []
            complete_since = (complete_since or now) if complete else None
            if complete_since and now - complete_since > FACTS_SECONDS:
                return [self._silent(member, FACTS_SECONDS, "telling what it has") for member in late]
            clear_since = (clear_since or now) if clear else None
            if clear_since and now - clear_since > GRACE and not late:
                return []
            waited = now - began
            if self.members and (now - named >= NAMED_EVERY or waited >= self.wait):
                named = now
                here = ", ".join(
                    f"{m.said['node']} {m.said['host']}" for m in sorted(self._voices(), key=lambda m: m.said["node"])[:16]
                )
                if missing and waited >= self.wait:
                    return [self._never_came(one, here) for one in missing]
                nodes = max(m.said["nodes"] for m in self.members)
                whom = ", ".join(missing) or f"what {', '.join(member.name for member in late[:8])} has to tell"
                await self._tell_all(
                    f"waiting for {whom} ({len(self._voices())} of {nodes} nodes are here: {here}), {waited:.0f} of "
                    f"{self.wait:.0f} s." + (f" Is it started there, and can it reach {self.address}?" if missing else "")
                )
            if now - ticked > 2:
                ticked = now
                await asyncio.gather(*(member.tell({"do": "wait"}) for member in self.members))
            self.changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 0.25)

    def _never_came(self, who: str, here: str) -> Finding:
        others = f"; {self.strangers} connections without the token were refused" if self.strangers else ""
        open_it = next((m.said["open"] for m in self.members if m.said["open"]), "")
        own = " (an address of this machine alone: give one that the others can reach)" if self.address.startswith("127.") else ""
        return Finding(
            "E_MISSING", f"{who} did not come within {self.wait:.0f} s; here: {here}{others}",
            f"start the same command there; if it runs, its screen says why it does not come: TCP to {self.address}{own} must be "
            f"open ({open_it}). --wait waits longer",
        )  # fmt: skip

    def _silent(self, member: Member, patience: float, what: str) -> Finding:
        member.silent = True
        how = "left" if member.gone else f"did not answer within {patience:.0f} s"
        return Finding(
            "E_LEFT" if member.gone else "E_SILENT", f"{member.name} {how} while {what}", "look at its screen; start it again",
            host=member.said["host"], node=member.said["node"],
        )  # fmt: skip

    async def _tell_all(self, text: str) -> None:
        self.say(text)
        await asyncio.gather(*(member.tell({"do": "say", "text": text}) for member in self.members))

    async def _ask(
        self, message: dict[str, Any], understand: Callable[[dict[str, Any], int], Any], what: str
    ) -> tuple[dict[int, Any], list[Finding]]:
        """Every node's answer; a finding for each that does not give one."""
        voices = [voice for voice in self._voices() if not (voice.gone or voice.silent)]
        patience = ANSWER_SECONDS + PER_PATH_SECONDS * len(voices)

        async def one(member: Member) -> Any:
            await member.tell(message)
            with contextlib.suppress(asyncio.TimeoutError, ValueError, TypeError, KeyError):
                return understand(await asyncio.wait_for(member.inbox.get(), patience), member.said["node"])

        async def tick() -> None:  # those who only wait for the verdict hear that we are here
            while True:
                await asyncio.sleep(2)
                await asyncio.gather(*(member.tell({"do": "wait"}) for member in self.members))

        ticking = asyncio.ensure_future(tick())
        answers = await asyncio.gather(*(one(member) for member in voices))
        ticking.cancel()
        silent = [self._silent(member, patience, what) for member, answer in zip(voices, answers) if answer is None]
        return {m.said["node"]: answer for m, answer in zip(voices, answers) if answer is not None}, silent

    async def _conduct(self) -> None:
        findings = await self._all_here()
        self.called, waited_in_vain = True, bool(findings)
        voices = self._voices()
        said = sorted((member.said for member in voices if member.has_facts), key=lambda m: m["node"])
        counted = [*compare.duplicates([m.said for m in self.members]), *compare.counts(said)]
        findings += [*self._of_the_nodes(), *counted]
        lines: list[str] = []
        table: list[str] = []
        roster = [{name: m[name] for name in ("node", "host", "ip", "ports", "interface", "open")} for m in said]
        results: list[dict[str, Any]] = []
        complete = not self._missing() and len(said) == len(voices) and not compare.duplicates(said)
        if complete:
            names = ", ".join(f"{m['node']} {m['host']} ({m['ip']})" for m in roster[:_FEW])
            lines.append(f"nodes       {len(voices)} of {len(voices)} are here: {names}{' ...' * (len(roster) > _FEW)}")
            differ, table = compare.differences([m for m in said if m["facts"]["versions"]])
            findings += differ
            if len(voices) > 1:
                lines += [] if is_bad(differ) else ["            alike in packages, code, options, configs and files"]
                numbers = {m["node"] for m in roster}
                answers, silent = await self._ask(
                    {"do": "paths", "roster": roster, "mark": self.mark},
                    lambda answer, node: believed.results(answer, node, numbers), "looking at the data paths",
                )  # fmt: skip
                results = [one for answer in answers.values() for one in answer]
                findings += [*silent, *paths.judged(results, roster)]
                first, *more = paths.in_lines(results, _FEW)
                lines += [f"paths       {first}", *(f"            {line}" for line in more)]
            look = {"do": "look", "mark": self.mark}
            seen, silent = await self._ask(look, lambda answer, node: believed.folder(answer), "looking at the output folder")
            findings += silent
            if any(one["folder"] for one in seen.values()):
                wrong, words = compare.storage(said, seen, max((m["needed"] for m in said), default=0))
                findings += wrong
                lines.append(f"storage     {words}")
        self.verdict_findings = findings = in_order(findings)
        deep = complete and not is_bad(findings) and all(m["deep"] for m in said)
        self.verdict = {
            "do": "hear", "verdict": [finding.as_dict() for finding in findings[:_MOST_TOLD]], "table": table, "lines": lines,
            "roster": roster, "paths": results if len(roster) <= _FEW else [], "local": compare.local_ranks(said),
            "deep_port": free_port(self.ip) if deep else None,
        }  # fmt: skip
        expected = min((m["nodes"] for m in said), default=1)
        await self._until_all_have_heard(may_come=not waited_in_vain and len(voices) < expected)

    async def _until_all_have_heard(self, may_come: bool) -> None:
        """A door that closes early looks like a fault to a slow node; one that comes late should hear the verdict too.

        A node may go only when the door is closed: what it starts next would take our port for the launcher's.
        """
        everyone = [member for member in self.members if not member.silent]
        for member in everyone:
            while not member.inbox.empty():
                member.inbox.get_nowait()

        async def one(member: Member) -> None:
            await member.tell({**self.verdict, "node": member.said["node"]})
            if not member.gone:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(member.inbox.get(), 5)  # "heard", or {} where it is gone

        await asyncio.gather(*(one(member) for member in everyone))
        if may_come:
            await asyncio.sleep(_LINGER)
        self.server.close()
        await asyncio.gather(*(member.tell({"do": "go"}) for member in everyone))
        deadline = time.monotonic() + 2
        while not all(member.gone for member in everyone) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        self.server.close()
        self.conducted.cancel()
        await asyncio.gather(self.conducted, return_exceptions=True)


def free_port(ip: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as sock:
        sock.bind((ip, 0))
        return sock.getsockname()[1]
