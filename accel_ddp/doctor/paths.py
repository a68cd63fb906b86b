"""Every pair of nodes in both directions, on fresh ports, with a payload as large as training's: what a firewall or a
tunnel does to the first all-reduce is seen here, with a name."""

import asyncio
import contextlib
import errno
import statistics
import time
from typing import Any

from accel_ddp.doctor.report import Finding, how_to_open, table, whole
from accel_ddp.net import messages as wire

CONNECT_SECONDS = 4.0  # a SYN that was lost is sent again after 1 and 3 s
STALL_SECONDS = 3.0
PAYLOAD = 256 << 10  # many packets of any size that a path may swallow
MOST = 64 << 20  # bytes of one measurement
_PINGS = 10
_MOST_VISITORS = 1024  # at once; those without the token go after 3 s
_MANY = 3  # nodes that cannot reach one: above this they are told together

# How a probe ends, apart from "ok".
DROPPED, REFUSED, UNREACHABLE, STALLED, CUT = "dropped", "refused", "unreachable", "stalled", "cut"


class Listener:
    """Two ports on the data address of this node, open while the doctor runs, for nodes that have the token."""

    def __init__(self, token: bytes):
        self.token = token
        self.servers: list[asyncio.Server] = []
        self.ports: list[int] = []
        self.busy = 0

    async def open(self, ip: str) -> None:
        for _ in range(2):
            sock = wire.listening_socket(ip, 0)
            self.servers.append(await asyncio.start_server(self._answer, sock=sock, limit=1 << 20))
            self.ports.append(sock.getsockname()[1])

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.busy >= _MOST_VISITORS:
            writer.close()
            return
        self.busy += 1
        try:
            await wire.greet(reader, writer, self.token, comes=False)
            for _ in range(4 * _PINGS):  # of a peer that asks without end
                asked = await wire.receive(reader, 3 * STALL_SECONDS)
                size = whole(asked.get("bytes", 0), MOST)
                left = size
                while left:
                    # Longer than the sender waits: who gives up first decides whether it looks stuck or cut.
                    piece = await asyncio.wait_for(reader.read(min(left, 1 << 20)), 4 * STALL_SECONDS)
                    if not piece:
                        return
                    left -= len(piece)
                await wire.send(writer, {"got": size})
        except (wire.Stranger, OSError, ValueError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # also at the end of the loop, which would print it as a fault
        finally:
            self.busy -= 1
            writer.close()

    async def close(self) -> None:
        for server in self.servers:
            server.close()


def kind_of(error: BaseException) -> str:
    """What an error of `connect` says about the path."""
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return DROPPED
    if isinstance(error, ConnectionRefusedError):
        return REFUSED
    far = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EACCES, errno.EPERM)
    return UNREACHABLE if getattr(error, "errno", None) in far else CUT


async def probe(ip: str, ports: list[int], token: bytes, measure: bool) -> dict[str, Any]:
    """One direction of one pair: {"how": "ok", "seconds": latency, "rate": bytes per second}, or how it failed."""
    if not ports:  # that node could open none, and has said so
        return {"how": CUT, "port": 0}
    result: dict[str, Any] = {"how": "ok", "port": ports[0]}
    writers = []
    try:
        for port in ports:
            result["port"] = port
            try:
                reader, writer = await wire.connect(ip, port, CONNECT_SECONDS)
            except (OSError, asyncio.TimeoutError) as error:
                return {**result, "how": kind_of(error)}
            writers.append(writer)
            try:
                await wire.greet(reader, writer, token, comes=True)
            except (wire.Stranger, OSError):
                return {**result, "how": CUT}

        async def ask(size: int, patience: float) -> float:
            began = time.monotonic()
            await wire.send(writer, {"bytes": size})
            block = bytes(min(size, 1 << 20))
            for at in range(0, size, len(block) or 1):
                writer.write(block[: size - at])
                await asyncio.wait_for(writer.drain(), patience)
            await wire.receive(reader, patience)
            return time.monotonic() - began

        try:
            result["seconds"] = statistics.median([await ask(0, STALL_SECONDS) for _ in range(_PINGS)])
            seconds = await ask(PAYLOAD, 2 * STALL_SECONDS)
            result["rate"] = PAYLOAD / seconds
            if measure:  # as much as goes through in about a third of a second
                size = int(min(MOST, max(PAYLOAD, 0.3 * PAYLOAD / seconds)))
                result["rate"] = max(size / await ask(size, 10), result["rate"])
        except asyncio.TimeoutError:
            return {**result, "how": STALLED}
        except OSError:
            return {**result, "how": CUT}
        return result
    finally:
        for writer in writers:
            with contextlib.suppress(Exception):
                writer.close()


async def probe_all(me: int, roster: list[dict[str, Any]], token: bytes, measure: bool) -> list[dict[str, Any]]:
    """From this node to every other. All at once, but for measurements: these go one after the other, and start with the
    next node, so that they do not all meet at one."""
    others = [peer for peer in roster if peer["node"] != me]
    others.sort(key=lambda peer: (peer["node"] - me) % (max(p["node"] for p in roster) + 1))
    results = await asyncio.gather(*(probe(peer["ip"], peer["ports"], token, False) for peer in others))
    if measure:
        for i, peer in enumerate(others):
            if results[i]["how"] == "ok":
                results[i] = await probe(peer["ip"], peer["ports"], token, True)
    return [{**result, "from": me, "to": peer["node"]} for result, peer in zip(results, others)]


def judged(results: list[dict[str, Any]], roster: list[dict[str, Any]]) -> list[Finding]:
    """What the probes of all nodes say together."""
    names = {peer["node"]: peer for peer in roster}
    how = {(r["from"], r["to"]): r for r in results}
    found = []
    failed: dict[tuple[int, str], list[int]] = {}
    for (a, b), result in sorted(how.items()):
        if result["how"] != "ok":
            failed.setdefault((b, result["how"]), []).append(a)
    for (b, kind), sources in sorted(failed.items()):
        for a in sources if len(sources) <= _MANY else sources[:1]:
            here, there, result = names[a], names[b], how[a, b]
            way = f"{here['host']} (machine_rank {a}) -> {there['host']} (machine_rank {b}), {there['ip']}:{result['port']}"
            if len(sources) > _MANY:
                way = f"{len(sources)} of {len(roster) - 1} nodes -> {there['host']} (machine_rank {b}), for example {way}"
            back = how.get((b, a), {}).get("how")
            also = f" The other direction: {back}." if back and back != kind else ""
            also = " The other direction works." if back == "ok" else also
            code, saw, fix = _words(kind, here, there)
            code = "E_PATH_ONE_WAY" if back == "ok" and kind in (DROPPED, REFUSED, UNREACHABLE) else code
            found.append(Finding(code, f"{way}: {saw}.{also}", fix, host=here["host"], node=a))
    rates = {pair: r["rate"] for pair, r in how.items() if r["how"] == "ok" and r.get("rate")}
    if len(rates) > 2:
        usual = statistics.median(rates.values())
        (a, b), slowest = min(rates.items(), key=lambda item: item[1])
        if slowest < usual / 4:
            found.append(
                Finding(
                    "W_PATH_SLOW", f"{names[a]['host']} (machine_rank {a}) -> {names[b]['host']} (machine_rank {b}): "
                    f"{slowest / 1e6:.1f} MB/s, the median of all pairs is {usual / 1e6:.1f} MB/s: every step waits for it",
                    "check the cable, duplex and load of that link (ethtool, ip -s link)", host=names[a]["host"], node=a,
                )
            )  # fmt: skip
    return found


def _words(kind: str, here: dict[str, Any], there: dict[str, Any]) -> tuple[str, str, str]:
    """(code, what was seen, the fix) of a path from `here` to `there` that does not work."""
    open_it = here.get("open") or how_to_open("the main port", "")
    return {
        DROPPED: ("E_PATH_DROPPED", f"no answer within {CONNECT_SECONDS:.0f} s: packets are dropped", open_it),
        REFUSED: ("E_PATH_REFUSED", "refused, although it is listened on: a firewall rejects it", open_it),
        UNREACHABLE: ("E_PATH_UNREACHABLE", "the network says that this host cannot be reached",
                      f"check routes: ip route get {there['ip']}"),
        STALLED: ("E_PATH_MTU", f"connects and small messages pass, but {PAYLOAD >> 10} KiB get stuck: large packets are "
                  "swallowed (MTU)", "on both nodes lower the MTU of the interface: ip link set dev "
                  f"{here.get('interface') or 'eth0'} mtu 1400; or let ICMP `fragmentation needed` pass"),
        CUT: ("E_PATH_CUT", "connects, but is then cut, or answered by something else, or not at all",
              "is that node's doctor still running? Else look for a proxy or a firewall that resets connections"),
    }[kind]  # fmt: skip


def in_lines(results: list[dict[str, Any]], few: int) -> list[str]:
    """The slowest and the longest, and of a few nodes every pair."""
    good = {(r["from"], r["to"]): r for r in results if r["how"] == "ok" and r.get("rate")}
    if not good:
        return ["none works"]
    slow, late = min(good.values(), key=lambda r: r["rate"]), max(good.values(), key=lambda r: r["seconds"])
    lines = [
        f"{len(good)} of {len(results)} directions work; slowest {slow['from']} -> {slow['to']} "
        f"{slow['rate'] * 8 / 1e9:.2f} Gbit/s (one TCP stream); longest round trip "
        f"{late['from']} -> {late['to']} {late['seconds'] * 1e3:.2f} ms"
    ]
    nodes = sorted({node for r in results for node in (r["from"], r["to"])})
    if 2 < len(nodes) <= few:

        def cell(a: int, b: int) -> str:
            how = next((r["how"] for r in results if (r["from"], r["to"]) == (a, b)), "-")
            return f"{good[a, b]['rate'] * 8 / 1e9:.2f} ({good[a, b]['seconds'] * 1e3:.2f})" if (a, b) in good else how

        rows = [[str(a), *[cell(a, b) for b in nodes]] for a in nodes]
        lines += table(["Gbit/s (ms)", *[f"-> {b}" for b in nodes]], rows)
    return lines
