"""The main node's side: who is here, who is missing, and one verdict that every node hears before the doors close."""

import asyncio
import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from accel_ddp.doctor import compare, paths, wire
from accel_ddp.doctor.report import Finding, in_order, is_bad, printable, whole

NAMED_AFTER, NAMED_EVERY = 2.0, 10.0  # seconds until those who are missing are named, and again
GRACE = 0.7  # for nodes that are about to come, when the verdict is clear already
ANSWER_SECONDS = 12.0  # of a node that was asked to do something
PER_PATH_SECONDS = 1.0  # more, for each path that it measures
_LINGER = 0.5  # for nodes that come after a verdict
_MOST_VISITORS = 256  # at once that have not shown the token; each is dropped after 3 s


def checked(hello: dict[str, Any]) -> dict[str, Any]:
    """What a node says of itself, as far as it can be believed: types and sizes. ValueError where it cannot."""
    member = {name: whole(hello.get(name)) for name in ("node", "nodes", "ranks", "local_rank", "local_ranks", "pid")}
    member["needed"] = whole(hello.get("needed", 0), 10**16)
    if None in (member["nodes"], member["ranks"], member["local_rank"], member["local_ranks"]) or len(hello) > 50:
        raise ValueError("not a hello")
    member |= {name: printable(hello.get(name, ""), 300) for name in ("host", "interface", "open")}
    member["ip"] = str(ipaddress.ip_address(hello.get("ip")))
    member["ports"] = [whole(port, 65535) for port in list(hello.get("ports") or [])[:2]]
    member["findings"] = [Finding.from_stranger(one) for one in list(hello.get("findings") or [])[:64]]
    member["deep"] = hello.get("deep") is True
    facts = hello.get("facts")
    if not isinstance(facts, dict) or not isinstance(facts.get("time"), (int, float)):
        raise ValueError("not a hello")
    clean: dict[str, Any] = {"gpus": [printable(one, 100) for one in list(facts.get("gpus") or [])[:64]]}
    for group in ("versions", "code", "recipe", "accelerate", "files", "driver", "environment"):
        entries = facts.get(group) or {}
        if not isinstance(entries, dict) or len(entries) > 500:
            raise ValueError("not facts")
        clean[group] = {printable(name, 100): printable(str(value), 300) for name, value in entries.items()}
    member["facts"] = clean
    member["clock"] = facts["time"] - time.time()
    return member


@dataclass(eq=False)
class Member:
    said: dict[str, Any]
    writer: asyncio.StreamWriter
    inbox: asyncio.Queue = field(default_factory=lambda: asyncio.Queue(16))
    gone: bool = False  # its connection is closed
    silent: bool = False  # it did not answer: it is not asked again

    @property
    def name(self) -> str:
        return f"{self.said['host']} (machine_rank {self.said['node']}{self._local})"

    @property
    def _local(self) -> str:
        return f", local rank {self.said['local_rank']}" if self.said["local_rank"] else ""

    @property
    def is_voice(self) -> bool:
        """One process of each node looks at the paths and the disk; the other ranks wait for the verdict."""
        return self.said["local_rank"] == 0

    async def tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await wire.send(self.writer, message, 5)


class Meeting:
    def __init__(self, token: bytes, wait: float, say: Callable[[str], None], deep: bool):
        self.token, self.wait, self.say, self.deep = token, wait, say, deep
        self.members: list[Member] = []
        self.changed = asyncio.Event()
        self.visitors = self.strangers = 0
        self.verdict: dict[str, Any] | None = None
        self.address = ""
        self.mark = os.urandom(6).hex()  # in the names of files by which nodes see whether they share a folder

    async def open(self, ip: str, ports: tuple[int, ...]) -> None:
        """Listen on the first free port. OSError where none is."""
        for port in ports:
            try:
                sock = wire.listening_socket(ip, port, small=True)
                break
            except OSError:
                if port == ports[-1]:
                    raise
        self.address = f"{ip}:{port}"
        self.server = await asyncio.start_server(self._visit, sock=sock, limit=1 << 16)
        self.conducted = asyncio.ensure_future(self._conduct())

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.visitors >= _MOST_VISITORS:
            writer.close()
            return
        self.visitors += 1
        try:
            await wire.greet(reader, writer, self.token, comes=False)
            member = Member(checked(await wire.receive(reader, 30)), writer)
        except (wire.Stranger, OSError, ValueError, TypeError, asyncio.TimeoutError):
            self.strangers += 1
            await wire.close(writer)
            return
        except asyncio.CancelledError:  # the loop ends; raised again it would be printed as a fault
            writer.close()
            return
        finally:
            self.visitors -= 1
        if self.verdict:
            await member.tell(self.verdict)
            await wire.close(writer)
            return
        if member.said["node"] is None:  # c10d: numbers are given out; the host of the meeting is 0
            taken = {one.said["node"] for one in self.members}
            member.said["node"] = next(n for n in range(len(taken) + 1) if n not in taken)
        self.members.append(member)
        self.changed.set()
        try:
            while True:
                member.inbox.put_nowait(await wire.receive(reader, 3600))
        except (OSError, asyncio.TimeoutError, asyncio.QueueFull, asyncio.CancelledError):
            member.gone = True
            with contextlib.suppress(asyncio.QueueFull):
                member.inbox.put_nowait({})
            self.changed.set()
            writer.close()

    def _voices(self) -> list[Member]:
        return [member for member in self.members if member.is_voice]

    def _missing(self) -> list[str]:
        """Machine ranks that are not here, and ranks of nodes that are here in part."""
        here = {(m.said["node"], m.said["local_rank"]) for m in self.members}
        nodes = max((m.said["nodes"] for m in self.members), default=1)
        missing = [f"machine_rank {node}" for node in range(nodes) if node not in {node for node, _ in here}]
        for node in sorted({node for node, _ in here}):
            of_it = max(m.said["local_ranks"] for m in self.members if m.said["node"] == node)
            missing += [f"local rank {one} of machine_rank {node}" for one in range(of_it) if (node, one) not in here]
        return missing

    def _clear_already(self) -> list[Finding]:
        """What makes waiting for the others pointless."""
        said = [member.said for member in self.members]
        found = [*compare.duplicates(said), *compare.counts([m.said for m in self._voices()])]
        return [*found, *(one for member in said for one in member["findings"] if one.severity == "error")]

    async def _all_here(self) -> list[Finding]:
        """Wait for every node; name those who are missing. Returns what ended the wait early."""
        began = time.monotonic()
        named, ticked, clear_since = began - NAMED_EVERY + NAMED_AFTER, began, None
        while True:
            now = time.monotonic()
            for member in [m for m in self.members if m.gone]:
                self.members.remove(member)
                await self._tell_all(f"{member.name} has left.")
            missing, clear = self._missing(), self._clear_already()
            crowd = len(self._voices()) >= min((m.said["nodes"] for m in self.members), default=1)
            if self.members and (not missing or (clear and crowd and not any(m.startswith("local") for m in missing))):
                return []
            clear_since = (clear_since or now) if clear else None
            if clear_since and now - clear_since > GRACE:
                return []
            waited = now - began
            if now - named >= NAMED_EVERY or (waited >= self.wait and self.members):
                named = now
                here = ", ".join(
                    f"{m.said['node']} {m.said['host']}" for m in sorted(self._voices(), key=lambda m: m.said["node"])
                )
                if waited >= self.wait:
                    return [
                        Finding(
                            "E_MISSING", f"{one} did not come within {self.wait:.0f} s; here: {here}"
                            + (f"; {self.strangers} connections without the token were refused" if self.strangers else ""),
                            f"start the same command there; if it runs, its screen says why it does not come: TCP to "
                            f"{self.address} must be open ({self._open_it()}). --wait waits longer",
                        )
                        for one in missing
                    ]  # fmt: skip
                if self.members:
                    nodes = max(m.said["nodes"] for m in self.members)
                    await self._tell_all(
                        f"waiting for {', '.join(missing)} ({len(self._voices())} of {nodes} nodes are here: {here}), "
                        f"{waited:.0f} of {self.wait:.0f} s. Is it started there, and can it reach {self.address}?"
                    )
            if now - ticked > 2:
                ticked = now
                await asyncio.gather(*(member.tell({"do": "wait"}) for member in self.members))
            self.changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 0.25)

    def _open_it(self) -> str:
        return next((m.said["open"] for m in self.members if m.said["open"]), "")

    async def _tell_all(self, text: str) -> None:
        self.say(text)
        await asyncio.gather(*(member.tell({"do": "say", "text": text}) for member in self.members))

    async def _ask(
        self, voices: list[Member], message: dict[str, Any], what: str
    ) -> tuple[dict[int, dict[str, Any]], list[Finding]]:
        """Every node's answer; a finding for each that does not give one."""

        patience = ANSWER_SECONDS + PER_PATH_SECONDS * len(voices)

        async def one(member: Member) -> dict[str, Any]:
            await member.tell(message)
            try:
                return await asyncio.wait_for(member.inbox.get(), patience)
            except asyncio.TimeoutError:
                member.silent = True
                return {}

        async def tick() -> None:  # those who only wait for the verdict hear that we are here
            while True:
                await asyncio.sleep(2)
                await asyncio.gather(*(member.tell({"do": "wait"}) for member in self.members))

        ticking = asyncio.ensure_future(tick())
        answers = await asyncio.gather(*(one(member) for member in voices))
        ticking.cancel()
        found = [
            Finding(
                "E_LEFT" if member.gone else "E_SILENT",
                f"{member.name} {'left' if member.gone else f'did not answer within {patience:.0f} s'} while {what}",
                "look at its screen; start it again", host=member.said["host"], node=member.said["node"],
            )
            for member, answer in zip(voices, answers) if not answer
        ]  # fmt: skip
        return {m.said["node"]: answer for m, answer in zip(voices, answers) if answer}, found

    async def _conduct(self) -> dict[str, Any]:
        findings = await self._all_here()
        waited_in_vain = bool(findings)
        voices = self._voices()
        said = [member.said for member in voices]
        local = [one for member in self.members for one in member.said["findings"]]
        findings += [*local, *compare.duplicates([m.said for m in self.members]), *compare.counts(said)]
        complete = not self._missing()
        lines: list[str] = []
        table: list[str] = []
        roster = [
            {**{name: m[name] for name in ("node", "host", "ip", "ports", "interface", "open")}, "gpus": len(m["facts"]["gpus"])}
            for m in sorted(said, key=lambda m: m["node"])
        ]
        results: list[dict[str, Any]] = []
        if complete:
            names = ", ".join(f"{m['node']} {m['host']} ({m['ip']})" for m in roster)
            lines.append(f"nodes       {len(voices)} of {len(voices)} are here: {names}")
            differ, table = compare.differences(said)
            findings += differ
            if not is_bad(differ) and len(voices) > 1:
                lines.append("            alike in packages, code, options, configs and files")
            if len(voices) > 1:
                answers, silent = await self._ask(
                    voices, {"do": "paths", "roster": roster, "mark": self.mark}, "looking at the data paths"
                )
                findings += silent
                for node, answer in answers.items():
                    results += _results(answer, node, {m["node"] for m in roster})
                findings += paths.judged(results, roster)
                first, *more = paths.in_lines(results)
                lines += [f"paths       {first}", *(f"            {line}" for line in more)]
            looks, silent = await self._ask(
                [v for v in voices if not (v.gone or v.silent)], {"do": "look", "mark": self.mark}, "looking at the output folder"
            )
            findings += silent
            seen = {node: _folder(answer) for node, answer in looks.items()}
            if seen:
                wrong, words = compare.storage(said, seen, max((m["needed"] for m in said), default=0))
                findings += wrong
                lines.append(f"storage     {words}")
        findings = in_order(findings)
        deep = self.deep and complete and not is_bad(findings)
        self.verdict = {
            "do": "hear", "verdict": [finding.as_dict() for finding in findings], "table": table, "lines": lines,
            "roster": roster, "paths": results, "deep_port": _free_port(self.address.rpartition(":")[0]) if deep else None,
        }  # fmt: skip
        expected = min((m["nodes"] for m in said), default=1)
        await self._until_all_have_heard(may_come=not waited_in_vain and len(voices) < expected)
        return self.verdict

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


def _results(answer: dict[str, Any], node: int, nodes: set[int]) -> list[dict[str, Any]]:
    """The probes that a node reports, as far as they can be believed."""
    clean = []
    with contextlib.suppress(ValueError, TypeError, KeyError):
        for one in list(answer.get("paths") or [])[: len(nodes)]:
            how = (
                one["how"] if one["how"] in ("ok", paths.DROPPED, paths.REFUSED, paths.UNREACHABLE, paths.STALLED) else paths.CUT
            )
            if one["to"] in nodes:
                figures = {name: float(one[name]) for name in ("seconds", "rate") if name in one}
                clean.append({"from": node, "to": one["to"], "how": how, "port": whole(one.get("port"), 65535), **figures})
    return clean


def _folder(answer: dict[str, Any]) -> dict[str, Any]:
    try:
        return {
            "folder": printable(answer.get("folder", ""), 300), "error": printable(answer.get("error", ""), 300),
            "free": whole(answer.get("free", 0), 10**18), "sees": [whole(n) for n in list(answer.get("sees") or [])[:1024]],
        }  # fmt: skip
    except (ValueError, TypeError):
        return {}


def _free_port(ip: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as sock:
        sock.bind((ip, 0))
        return sock.getsockname()[1]
