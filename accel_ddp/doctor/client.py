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

from accel_ddp.doctor import coordinator as meeting
from accel_ddp.doctor import facts, paths
from accel_ddp.doctor import host as here
from accel_ddp.doctor import sanitize as believed
from accel_ddp.doctor.report import Finding, how_to_open, is_bad, printable, surroundings, whole
from accel_ddp.environment.topology import Place
from accel_ddp.errors import UserError
from accel_ddp.net import messages as wire

SILENT_SECONDS = 8.0  # a host that is up answers, if only with a refusal
_MARK = ".accel_ddp_doctor_"
MAIN_SECONDS = 20.0  # the main node says something every 2 s


@dataclass(kw_only=True)
class Wanted:
    """What the doctor looks at besides the nodes themselves."""

    wait: float = 300.0
    silent: float = SILENT_SECONDS  # an address that does not answer at all is given up earlier
    token: str = field(default_factory=lambda: os.environ.get("ACCEL_DDP_TOKEN", ""))
    measure: bool = True  # bandwidth of each path, one after the other; without: that they work
    deep: bool = False
    recipe: dict[str, Any] = field(default_factory=dict)  # the resolved options, of which no node may have its own
    places: dict[str, str] = field(default_factory=dict)  # --model and --dataset, which may be names on the hub
    files: dict[str, str] = field(default_factory=dict)  # option -> path whose content must be the same
    script: str = ""
    output_dir: str = ""  # where checkpoints will go; empty: not looked at
    needed: int = 0  # bytes that the checkpoints will take
    sets_interface: bool = False  # GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of this process, for those that it starts
    already: list[Finding] = field(default_factory=list)  # what is wrong here for other reasons


@dataclass
class Outcome:
    findings: list[Finding]
    lines: list[str] = field(default_factory=list)
    table: list[str] = field(default_factory=list)
    roster: list[dict[str, Any]] = field(default_factory=list)
    paths: list[dict[str, Any]] = field(default_factory=list)
    node: int | None = None
    local: int = 1  # ranks of each node
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
        return Outcome([*wanted.already, _no_such_name(place, str(error))])
    findings = [*wanted.already, *await asyncio.to_thread(here.of_the_place, place, ip)]
    listens, knocks = await asyncio.to_thread(here.where_to_listen, place, ip)
    address, interface = await asyncio.to_thread(here.data_address, knocks, place, findings)
    findings += await asyncio.to_thread(here.of_the_name, place, interface, address or ip, wanted.sets_interface)
    folder = await asyncio.to_thread(here.existing, wanted.output_dir) if wanted.output_dir else None
    if place.local_rank == 0:
        findings += await asyncio.to_thread(here.of_the_limits, place, wanted.output_dir, folder)
    facts_to_come = asyncio.ensure_future(asyncio.to_thread(_facts, place, wanted))  # while we look for the main node
    token = wire.token_of(place.port, wanted.script, wanted.token)
    listener = paths.Listener(token)
    hosted: meeting.Meeting | None = None
    attending: asyncio.Future | None = None
    host = lambda: _host(place, listens, knocks, token, wanted, say, findings)
    try:
        if place.local_rank == 0:
            try:
                await listener.open(address or ip)
            except OSError as error:
                saw = f"no port can be opened on {address or ip}: {error.strerror}"
                findings.append(
                    here.finding(place, "E_PORT", saw, "choose another interface with GLOO_SOCKET_IFNAME, see `ip addr`")
                )
        may_host = here.is_here(ip) and place.local_rank == 0
        # Of two nodes on one machine the first to come would keep the port from node 0's launcher: it leaves it some seconds.
        patience = 0.0 if not place.node else 5.0 if ipaddress.ip_address(ip).is_loopback else 0.5
        if may_host and not patience:
            hosted = await host()
        reached = await _reach(place, knocks, token, wanted, say, (patience, host) if may_host else None, findings, began)
        if isinstance(reached, Finding):
            return Outcome([*findings, *(await facts_to_come)[1], reached])
        if isinstance(reached, meeting.Meeting):
            hosted = reached
            reached = await _reach(place, knocks, token, wanted, say, None, [], time.monotonic())
            if isinstance(reached, Finding):
                return Outcome([*findings, reached])
        hello = {
            "node": place.node, "nodes": place.nodes, "ranks": place.ranks, "local_rank": place.local_rank,
            "local_ranks": place.local_ranks, "pid": os.getpid(), "host": here.HOST, "ip": address or ip, "interface": interface,
            "ports": listener.ports, "open": how_to_open(f"TCP {place.port}"), "needed": wanted.needed, "deep": wanted.deep,
            "findings": [finding.as_dict() for finding in findings[: believed.MOST_FINDINGS]],
        }  # fmt: skip
        attending = asyncio.ensure_future(
            _attend(reached, hello, facts_to_come, folder, token, wanted, _unheard if hosted else say)
        )
        if hosted:  # a fault of ours in it must not look like a silent main node
            await asyncio.wait([attending, hosted.conducted], return_when=asyncio.FIRST_COMPLETED)
            if hosted.conducted.done():
                hosted.conducted.result()
        outcome = await attending
        if hosted:
            await hosted.conducted
        known, _ = await facts_to_come
        return Outcome(**{**vars(outcome), "about": facts.in_a_line(known), "interface": interface})
    except (OSError, asyncio.TimeoutError) as error:
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


def _facts(place: Place, wanted: Wanted) -> tuple[dict[str, Any], list[Finding]]:
    """Of one rank of each node: the others have the same, and eight of them would ask the driver at once."""
    if place.local_rank:
        return {}, []
    patience = 10.0 if wanted.measure else 2.0
    collect = lambda: facts.collected(place, wanted.recipe, wanted.places, wanted.files, wanted.script, patience)
    found = here.bounded(collect, meeting.FACTS_SECONDS - 5, None)
    if found is None:
        saw = "this node could not tell within 40 s what it has: a disk or a program does not answer"
        return {}, [here.finding(place, "E_DISK_STUCK", saw, "try `df`, `git status` and `nvidia-smi` there")]
    return found


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
    place: Place, listens: str, shown: str, token: bytes, wanted: Wanted, say: Callable[[str], None], findings: list[Finding]
) -> meeting.Meeting | None:
    """The meeting, where its port is free. Else someone is there: a doctor of this run, or another program (see `_reach`)."""
    opened = meeting.Meeting(token, wanted.wait, say)
    try:
        await opened.open(listens, place.meeting_ports, shown)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            saw = f"{listens}:{place.meeting_ports[0]} cannot be listened on: {error.strerror}"
            findings.append(here.finding(place, "E_PORT", saw, "use another --main_process_port, above 1023, on every node"))
        return None
    return opened


async def _reach(
    place: Place, ip: str, token: bytes, wanted: Wanted, say: Callable[[str], None], may_host: Any, findings: list[Finding],
    began: float,
) -> Any:  # fmt: skip
    """A connection to the meeting; or the meeting itself, with (seconds after which, how) to host it; or why there is none."""
    told = time.monotonic() - meeting.NAMED_EVERY + meeting.NAMED_AFTER
    stranger = ""
    while True:
        answers = await asyncio.gather(*(_knock(ip, port, token) for port in place.meeting_ports))
        good = [answer for answer in answers if isinstance(answer, tuple)]
        for _, writer in good[1:]:
            writer.close()
        if good:
            return good[0]
        order = ("stranger", paths.REFUSED, paths.CUT, paths.DROPPED, paths.UNREACHABLE)
        kind, why = min((answer.partition(": ")[::2] for answer in answers), key=lambda pair: order.index(pair[0]))
        stranger = why if kind == "stranger" else stranger
        waited = time.monotonic() - began
        if may_host and kind == paths.REFUSED and waited >= may_host[0] and (hosted := await may_host[1]()):
            return hosted
        limit = wanted.wait if kind == paths.REFUSED else min(wanted.wait, wanted.silent)
        if kind == "stranger":  # another program has the port, and will not go by itself
            limit = min(limit, SILENT_SECONDS)
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
    if ipaddress.ip_address(ip).is_loopback and place.node and kind == paths.REFUSED:
        itself = f"{place.said('main_process_ip')} is this machine itself, and nothing listens on port {ports}"
        return here.finding(place, "E_REFUSED", itself, "give the address of node 0: --main_process_ip")
    code, saw, fix = {
        paths.REFUSED: ("E_REFUSED", f"{at} is up, but nothing listens there (refused)", "start node 0 (--machine_rank 0), or "
                        f"mend {place.said('main_process_port')} so that it is node 0's"),
        paths.DROPPED: ("E_DROPPED", f"{at} does not answer at all ({waited:.0f} s): packets are dropped, or no such host is up",
                        f"check that {ip} is node 0's private address and is up; then {how_to_open(f'TCP {ports}')}"),
        paths.UNREACHABLE: ("E_UNREACHABLE", f"{at} cannot be reached ({why or 'no route'}): no host with this address is up "
                            "in this network", f"mend {place.said('main_process_ip')}, or start that node (ip route get {ip})"),
        paths.CUT: ("E_UNREACHABLE", f"{at}: {why or 'the connection failed'}", "look for a proxy or firewall between the nodes"),
        "stranger": ("E_PORT_BUSY", f"{at} is answered by something that is not the doctor of this run ({why})",
                     "end what is left of an earlier run there, or use another --main_process_port (same script, same token?)"),
    }[kind]  # fmt: skip
    return here.finding(place, code, saw, fix)


def _unheard(text: str) -> None:
    """The node that hosts the meeting has said it already."""


async def _attend(
    connection: Any, hello: dict[str, Any], facts_to_come: asyncio.Future, folder: Path | None, token: bytes, wanted: Wanted,
    say: Callable[[str], None],
) -> Outcome:  # fmt: skip
    """Say who we are, do what is asked, return the verdict. OSError where the main node is lost."""
    reader, writer = connection
    node, outcome, mine = hello["node"], None, None
    sending: asyncio.Future | None = None
    try:
        await wire.send(writer, hello)
        sending = asyncio.ensure_future(_send_facts(writer, facts_to_come))
        while True:
            message = await wire.receive(reader, MAIN_SECONDS)
            do = message.get("do")
            if do == "say":
                say(printable(message["text"]))
            elif do == "paths":
                roster = believed.roster(message["roster"])
                me = next((peer for peer in roster if peer["ip"] == hello["ip"] and peer["ports"] == hello["ports"]), {})
                node = me.get("node", node)
                mine = await asyncio.to_thread(_mark, folder, message, node)
                await wire.send(writer, {"paths": await paths.probe_all(node, roster, token, wanted.measure)})
            elif do == "look":
                mine = mine or await asyncio.to_thread(_mark, folder, message, node)
                await wire.send(writer, await asyncio.to_thread(_look, folder, message, mine[1]))
            elif do == "hear":
                outcome = Outcome(
                    [Finding.from_stranger(one) for one in believed.listed(message["verdict"], 1000)],
                    believed.lines(message["lines"], 200), believed.lines(message["table"], 1000),
                    believed.roster(message["roster"]), believed.listed(message["paths"], 1000), whole(message["node"]),
                    whole(message.get("local", 1), believed.MOST_LOCAL) or 1, whole(message.get("deep_port")),
                )  # fmt: skip
                await wire.send(writer, {"heard": True})
            elif do == "go":
                break
    except (ValueError, TypeError, KeyError) as error:
        raise ConnectionError(f"it sent what is no message ({error})") from error
    except (OSError, asyncio.TimeoutError):
        if not outcome:
            raise
    finally:
        if sending:
            sending.cancel()
        if mine and mine[0]:
            with contextlib.suppress(OSError):
                mine[0].unlink()
        await wire.close(writer)
    if not outcome:
        raise ConnectionError("it left without a verdict")
    return outcome


async def _send_facts(writer: asyncio.StreamWriter, facts_to_come: asyncio.Future) -> None:
    """When they are there: the meeting knows of us before, and can name those who are missing."""
    known, wrong = await asyncio.shield(facts_to_come)
    told = [finding.as_dict() for finding in wrong[: believed.MOST_FINDINGS]]
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await wire.send(writer, {**known, "findings": told, "time": time.time()})


def _mark(folder: Path | None, message: dict[str, Any], node: int | None) -> tuple[Path | None, str]:
    """Write the file by which others see whether this is their folder too: (the file, "" or why it could not be written)."""
    if not folder:
        return None, ""
    file = folder / f"{_MARK}{_mark_of(message)}_{node or 0}"

    def write() -> str:
        try:
            file.write_text("looked at by accel-ddp doctor\n")
            return ""
        except OSError as error:
            return error.strerror or str(error)

    return file, here.bounded(write, 3, "the disk does not answer")


def _mark_of(message: dict[str, Any]) -> str:
    return "".join(letter for letter in printable(message["mark"], 20) if letter.isalnum())


def _look(folder: Path | None, message: dict[str, Any], error: str) -> dict[str, Any]:
    """Whose files are in our folder. A network disk may show them a moment later."""
    if not folder:
        return {"folder": "", "error": "", "free": 0, "sees": []}
    beginning = f"{_MARK}{_mark_of(message)}_"
    sees: list[int] = []
    for _ in range(3):
        names = here.bounded(lambda: os.listdir(folder), 2, [])
        sees = sorted(
            int(name[len(beginning) :]) for name in names if name.startswith(beginning) and name[len(beginning) :].isdigit()
        )
        if 0 in sees:
            break
        time.sleep(0.1)
    for name in names:  # left by a doctor that was killed
        with contextlib.suppress(OSError):
            if name.startswith(_MARK) and time.time() - (folder / name).stat().st_mtime > 3600:
                (folder / name).unlink()
    free = here.bounded(lambda: shutil.disk_usage(folder).free, 2, 0)
    return {"folder": str(folder), "error": error, "free": free, "sees": sees}
