"""A node's side: find the main node, say who one is, do what it asks for, and hear the verdict."""

import asyncio
import contextlib
import errno
import ipaddress
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_ddp.config import UserError
from accel_ddp.doctor import facts, here, meeting, paths, wire
from accel_ddp.doctor.place import Place
from accel_ddp.doctor.report import Finding, how_to_open, is_bad, printable, surroundings, whole

SILENT_SECONDS = 8.0  # a host that is up answers, if only with a refusal
MAIN_SECONDS = 20.0  # the main node says something every 2 s


@dataclass(kw_only=True)
class Wanted:
    """What the doctor looks at besides the nodes themselves."""

    wait: float = 300.0
    wait_was_given: bool = False  # then also for an address that does not answer at all
    token: str = ""
    measure: bool = True  # bandwidth of each path, one after the other; without: that they work
    deep: bool = False
    recipe: dict[str, Any] = field(default_factory=dict)  # the resolved options, of which no node may have its own
    places: dict[str, str] = field(default_factory=dict)  # --model and --dataset, which may be names on the hub
    files: dict[str, str] = field(default_factory=dict)  # option -> path whose content must be the same
    script: str = ""
    output_dir: str = "."
    needed: int = 0  # bytes that the checkpoints will take
    sets_interface: bool = False  # GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of this process, for those that it starts


@dataclass
class Outcome:
    findings: list[Finding]
    lines: list[str] = field(default_factory=list)
    table: list[str] = field(default_factory=list)
    roster: list[dict[str, Any]] = field(default_factory=list)
    paths: list[dict[str, Any]] = field(default_factory=list)
    node: int | None = None
    deep_port: int | None = None
    about: str = ""  # this node, in a line
    interface: str = ""

    @property
    def is_bad(self) -> bool:
        return is_bad(self.findings)


async def examine(place: Place, wanted: Wanted, say: Callable[[str], None]) -> Outcome:
    """Everything but collectives. Ends in bounded time whatever the other nodes do."""
    began = time.monotonic()
    try:
        ip = await _resolved(place, wanted, say, began)
    except UserError as error:
        return Outcome([_no_such_name(place, str(error))])
    findings = here.of_the_place(place, ip)
    address, interface = await asyncio.to_thread(here.data_address, ip, place, findings)
    findings += await asyncio.to_thread(here.of_the_name, place, interface, ip, wanted.sets_interface)
    findings += await asyncio.to_thread(here.of_the_limits, place, [wanted.output_dir])
    facts_to_come = asyncio.ensure_future(
        asyncio.to_thread(
            facts.collected, place, wanted.recipe, wanted.places, wanted.files, wanted.script, 10 if wanted.measure else 2
        )
    )  # while we look for the main node
    token = wire.token_of(place.port, wanted.token)
    listener = paths.Listener(token)
    hosted: meeting.Meeting | None = None
    attending: asyncio.Future | None = None
    try:
        if address:
            with contextlib.suppress(OSError):
                await listener.open(address)
        may_host = here.is_here(ip) and place.local_rank == 0
        # Of two nodes on one machine the first to come would keep the port from node 0's launcher: it leaves it some seconds.
        patience = 0.0 if not place.node else 5.0 if ipaddress.ip_address(ip).is_loopback else 0.5
        if may_host and not patience:
            hosted = await _host(place, ip, token, wanted, say, findings)
        patience = patience if may_host else None
        reached = await _reach(place, ip, token, wanted, say, patience, findings, began)
        if isinstance(reached, Finding):
            more = (await facts_to_come)[1]
            return Outcome([*findings, *more, reached])
        if isinstance(reached, meeting.Meeting):
            hosted = reached
            reached = await _reach(place, ip, token, wanted, say, None, [], time.monotonic())
            assert not isinstance(reached, (Finding, meeting.Meeting)), reached
        known, more = await facts_to_come
        findings += more
        hello = {
            "node": place.node, "nodes": place.nodes, "ranks": place.ranks, "local_rank": place.local_rank,
            "local_ranks": place.local_ranks, "pid": os.getpid(), "host": here.HOST, "ip": address or ip, "interface": interface,
            "ports": listener.ports, "open": how_to_open(f"TCP {place.port}"), "needed": wanted.needed, "deep": wanted.deep,
            "findings": [finding.as_dict() for finding in findings], "facts": {**known, "time": time.time()},
        }  # fmt: skip
        attending = asyncio.ensure_future(_attend(reached, hello, token, wanted, _unheard if hosted else say))
        if hosted:  # a fault of ours in it must not look like a silent main node
            await asyncio.wait([attending, hosted.conducted], return_when=asyncio.FIRST_COMPLETED)
            if hosted.conducted.done():
                hosted.conducted.result()
        outcome = await attending
        if hosted:
            await hosted.conducted
        return Outcome(**{**vars(outcome), "about": facts.in_a_line(known), "interface": interface})
    except (ConnectionError, asyncio.TimeoutError) as error:
        text = str(error) or "nothing was heard from it"
        lost = here.finding(
            place, "E_MAIN_LOST",
            f"the main node {place.address}:{place.port} was there, and was lost before the verdict: {text}",
            "look at its screen: was it ended, or did it fail? Start again on every node",
        )  # fmt: skip
        return Outcome([*findings, lost])
    finally:
        await listener.close()
        if hosted:
            await hosted.close()
        for task in (facts_to_come, attending):  # Ctrl-C: what they raise now has been said, or is not worth a line
            if task:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def _resolved(place: Place, wanted: Wanted, say: Callable[[str], None], began: float) -> str:
    """The main node's address. In Kubernetes the name of a pod appears when the pod has started: it is waited for."""
    told = 0.0
    while True:
        try:
            return await asyncio.to_thread(here.resolved, place.address)
        except UserError as error:
            waited = time.monotonic() - began
            if surroundings() != "kubernetes" or waited > wanted.wait:
                raise
            if waited - told > (meeting.NAMED_EVERY if told else meeting.NAMED_AFTER):
                told = waited
                say(f"waiting for the name {place.address} ({error}), {waited:.0f} of {wanted.wait:.0f} s: is that pod started?")
            await asyncio.sleep(1)


async def _host(
    place: Place, ip: str, token: bytes, wanted: Wanted, say: Callable[[str], None], findings: list[Finding]
) -> meeting.Meeting | None:
    """The meeting, where its port is free. Else someone is there: a doctor of this run, or another program (see `_reach`)."""
    opened = meeting.Meeting(token, wanted.wait, say, wanted.deep)
    try:
        await opened.open(ip, place.meeting_ports)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            saw = f"{ip}:{place.meeting_ports[0]} cannot be listened on: {error.strerror}"
            findings.append(here.finding(place, "E_PORT", saw, "use another --main_process_port, above 1023, on every node"))
        return None
    return opened


async def _reach(
    place: Place, ip: str, token: bytes, wanted: Wanted, say: Callable[[str], None], host_after: float | None,
    findings: list[Finding], began: float,
) -> Any:  # fmt: skip
    """A connection to the meeting; or, after `host_after` seconds, the meeting itself; or why there is none."""
    told = time.monotonic() - meeting.NAMED_EVERY + meeting.NAMED_AFTER
    quick = max(wanted.wait, 1) if wanted.wait_was_given else min(wanted.wait, SILENT_SECONDS)
    first, stranger = began, ""
    while True:
        tries = [asyncio.ensure_future(_knock(ip, port, token)) for port in place.meeting_ports]
        answers = await asyncio.gather(*tries)
        good = [answer for answer in answers if isinstance(answer, tuple)]
        for _, writer in good[1:]:
            writer.close()
        if good:
            return good[0]
        order = ("stranger", paths.REFUSED, paths.CUT, paths.DROPPED, paths.UNREACHABLE)
        kind, why = min((answer.partition(": ")[::2] for answer in answers), key=lambda pair: order.index(pair[0]))
        stranger = why if kind == "stranger" else stranger
        waited = time.monotonic() - first
        may_host = host_after is not None and kind == paths.REFUSED and waited >= host_after
        if may_host and (hosted := await _host(place, ip, token, wanted, say, findings)):
            return hosted
        limit = wanted.wait if kind == paths.REFUSED else quick
        if is_bad(findings):  # this node has something to say that ends the run anyway
            limit = min(limit, 5.0)
        if waited >= limit:
            if stranger and kind == paths.REFUSED:  # that one has given up; what it said is worth more
                kind, why = "stranger", stranger
            return _unreached(place, ip, kind, why, waited)
        if time.monotonic() - told >= meeting.NAMED_EVERY:
            told = time.monotonic()
            finding = _unreached(place, ip, kind, why, waited)
            say(f"waiting for the main node ({waited:.0f} of {limit:.0f} s): {finding.saw}. {finding.fix}")
        await asyncio.sleep(0.1 if kind == paths.REFUSED else 0.3)


async def _knock(ip: str, port: int, token: bytes) -> Any:
    """(reader, writer) of the meeting on this port, or `kind: why`."""
    try:
        reader, writer = await wire.connect(ip, port, 3.0, small=True)
    except (OSError, asyncio.TimeoutError) as error:
        return f"{paths.kind_of(error)}: {getattr(error, 'strerror', '') or ''}"
    try:
        await wire.greet(reader, writer, token, comes=True)
        return reader, writer
    except (wire.Stranger, OSError) as error:
        writer.close()
        return f"stranger: {error}"


def _no_such_name(place: Place, why: str) -> Finding:
    by_slurm = place.sources.get("main_process_ip", "").startswith("SLURM")
    fix = {
        "kubernetes": "MASTER_ADDR must be the headless Service's name of the first pod: POD.SERVICE",
        "slurm": f"export MASTER_ADDR=ADDRESS, see `scontrol show node {place.address}` (NodeAddr)"
        if by_slurm
        else 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)',
    }.get(surroundings(), "use the private IP address of node 0, or add the name to /etc/hosts on every node")
    return here.finding(place, "E_NAME", f"{place.said('main_process_ip')} cannot be resolved on this host: {why}", fix)


def _unreached(place: Place, ip: str, kind: str, why: str, waited: float) -> Finding:
    """Why the main node could not be reached, told apart by what the network answered."""
    ports = str(place.port) if place.meeting_ports == (place.port,) else f"{place.meeting_ports[0]} to {place.meeting_ports[-1]}"
    at = f"{place.address}:{ports}" + (f" ({ip})" if ip != place.address else "")
    if ipaddress.ip_address(ip).is_loopback and place.node:
        itself = f"{place.said('main_process_ip')} is this machine itself, and nothing listens on port {ports}"
        return here.finding(place, "E_REFUSED", itself, "give the address of node 0: --main_process_ip")
    code, saw, fix = {
        paths.REFUSED: ("E_REFUSED", f"{at} is up, but nothing listens there (refused)", "start node 0 (--machine_rank 0), or "
                        f"mend {place.said('main_process_port')} so that it is node 0's"),
        paths.DROPPED: ("E_DROPPED", f"{at} does not answer at all ({waited:.0f} s): packets are dropped, or no such host is up",
                        f"check that {ip} is node 0's private address and is up; then {how_to_open(f'TCP {place.port}')}"),
        paths.UNREACHABLE: ("E_UNREACHABLE", f"{at} cannot be reached ({why or 'no route'}): no host with this address is up "
                            "in this network", f"mend {place.said('main_process_ip')}, or start that node (ip route get {ip})"),
        paths.CUT: ("E_UNREACHABLE", f"{at}: {why or 'the connection failed'}", "look for a proxy or firewall between the nodes"),
        "stranger": ("E_PORT_BUSY", f"{at} is answered by something that is not the doctor of this run ({why})",
                     "end what is left of an earlier run there, or use another --main_process_port; --token must be the same"),
    }[kind]  # fmt: skip
    return here.finding(place, code, saw, fix)


def _unheard(text: str) -> None:
    """The node that hosts the meeting has said it already."""


async def _attend(connection: Any, hello: dict[str, Any], token: bytes, wanted: Wanted, say: Callable[[str], None]) -> Outcome:
    """Say who we are, do what is asked, return the verdict. ConnectionError where the main node is lost."""
    reader, writer = connection
    folder = here.existing(wanted.output_dir)
    node, outcome, mine = hello["node"], None, None
    try:
        await wire.send(writer, hello)
        while True:
            message = await wire.receive(reader, MAIN_SECONDS)
            do = message.get("do")
            if do == "say":
                say(printable(message["text"]))
            elif do == "paths":
                roster = _roster(message)
                me = next((peer for peer in roster if peer["ip"] == hello["ip"] and peer["ports"] == hello["ports"]), {})
                node = me.get("node", node)
                mine = await asyncio.to_thread(_mark, folder, message, node)
                await wire.send(writer, {"paths": await paths.probe_all(node, roster, token, wanted.measure)})
            elif do == "look":
                mine = mine or await asyncio.to_thread(_mark, folder, message, node)
                await wire.send(writer, await asyncio.to_thread(_look, folder, message, mine[1]))
            elif do == "hear":
                outcome = Outcome(
                    [Finding.from_stranger(one) for one in list(message["verdict"])[:1000]],
                    [printable(line) for line in list(message.get("lines") or [])[:100]],
                    [printable(line) for line in list(message.get("table") or [])[:1000]],
                    _roster(message), list(message.get("paths") or []), whole(message.get("node")),
                    whole(message.get("deep_port")),
                )  # fmt: skip
                await wire.send(writer, {"heard": True})
            elif do == "go":
                break
    except (ValueError, TypeError, KeyError) as error:
        raise ConnectionError(f"it sent what is no message ({error})") from error
    except (ConnectionError, asyncio.TimeoutError):
        if not outcome:
            raise
    finally:
        if mine:
            with contextlib.suppress(OSError):
                mine[0].unlink()
        await wire.close(writer)
    if not outcome:
        raise ConnectionError("it left without a verdict")
    return outcome


def _roster(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "node": whole(peer["node"]), "host": printable(peer["host"], 300), "ip": str(ipaddress.ip_address(peer["ip"])),
            "ports": [whole(port, 65535) for port in peer["ports"][:2]], "interface": printable(peer["interface"], 300),
            "open": printable(peer["open"]), "gpus": whole(peer["gpus"]),
        }
        for peer in list(message.get("roster") or [])[:4096]
    ]  # fmt: skip


def _mark(folder: Path, message: dict[str, Any], node: int | None) -> tuple[Path, str]:
    """Write the file by which others see whether this is their folder too: (the file, "" or why it could not be written)."""
    file = folder / f".accel_ddp_doctor_{_mark_of(message)}_{node or 0}"

    def write() -> str:
        try:
            file.write_text("looked at by accel-ddp doctor\n")
            return ""
        except OSError as error:
            return error.strerror or str(error)

    return file, here.bounded(write, 3, "the disk does not answer")


def _mark_of(message: dict[str, Any]) -> str:
    return "".join(letter for letter in printable(message["mark"], 20) if letter.isalnum())


def _look(folder: Path, message: dict[str, Any], error: str) -> dict[str, Any]:
    """Whose files are in our folder. A network disk may show them a moment later."""
    beginning = f".accel_ddp_doctor_{_mark_of(message)}_"
    sees: list[int] = []
    for _ in range(3):
        names = here.bounded(lambda: os.listdir(folder), 2, [])
        sees = sorted(
            int(name[len(beginning) :]) for name in names if name.startswith(beginning) and name[len(beginning) :].isdigit()
        )
        if 0 in sees:
            break
        time.sleep(0.1)
    free = here.bounded(lambda: shutil.disk_usage(folder).free, 2, 0)
    return {"folder": str(folder), "error": error, "free": free, "sees": sees}
