"""Probes of every pair of nodes in both directions, on fresh ports, with payloads as large as those of training.

A firewall or a tunnel that would block the first all-reduce is found here, together with the two nodes it is between.
"""

import asyncio
import statistics
from typing import Any

from accel_ddp.doctor.platforms import firewall_advice
from accel_ddp.doctor.report import Finding, format_table
from accel_ddp.net.probe import CONNECT_SECONDS, CUT, DROPPED, OK, PAYLOAD, REFUSED, STALLED, UNREACHABLE, probe

_MANY = 3  # if more nodes than this cannot reach a node, they share one finding


async def probe_all(node: int, roster: list[dict[str, Any]], token: bytes, measures: bool) -> list[dict[str, Any]]:
    """Return the probes from this node to every other one.

    Probes run at the same time. Measurements run one after the other and start with the next node, so that not all nodes
    measure the path to the same node at once.
    """
    others = [peer for peer in roster if peer["node"] != node]
    others.sort(key=lambda peer: (peer["node"] - node) % (max(p["node"] for p in roster) + 1))
    results = await asyncio.gather(*(probe(peer["ip"], peer["ports"], token, False) for peer in others))
    if measures:
        for i, peer in enumerate(others):
            if results[i]["how"] == OK:
                results[i] = await probe(peer["ip"], peer["ports"], token, True)
    return [{**result, "from": node, "to": peer["node"]} for result, peer in zip(results, others)]


def check_paths(probes: list[dict[str, Any]], roster: list[dict[str, Any]]) -> list[Finding]:
    """Return findings about paths that fail or are slow, from the probes of all nodes."""
    peers = {peer["node"]: peer for peer in roster}
    by_pair = {(one["from"], one["to"]): one for one in probes}
    found = []
    failed: dict[tuple[int, str], list[int]] = {}
    for (source, target), one in sorted(by_pair.items()):
        if one["how"] != OK:
            failed.setdefault((target, one["how"]), []).append(source)
    for (target, result), sources in sorted(failed.items()):
        for source in sources if len(sources) <= _MANY else sources[:1]:
            path = f"{_name(peers[source])} -> {_name(peers[target])}, {peers[target]['ip']}:{by_pair[source, target]['port']}"
            if len(sources) > _MANY:
                path = f"{len(sources)} of {len(roster) - 1} nodes -> {_name(peers[target])}, for example {path}"
            back = by_pair.get((target, source), {}).get("how")
            also = f" The other direction: {back}." if back and back != result else ""
            also = " The other direction works." if back == OK else also
            code, saw, fix = _explain_failure(result, peers[source], peers[target])
            code = "E_PATH_ONE_WAY" if back == OK and result in (DROPPED, REFUSED, UNREACHABLE) else code
            found.append(Finding(code, f"{path}: {saw}.{also}", fix, host=peers[source]["host"], node=source))
    rates = {pair: one["rate"] for pair, one in by_pair.items() if one["how"] == OK and one.get("rate")}
    if len(rates) > 2:
        median = statistics.median(rates.values())
        (source, target), slowest = min(rates.items(), key=lambda item: item[1])
        if slowest < median / 4:
            found.append(
                Finding(
                    "W_PATH_SLOW", f"{_name(peers[source])} -> {_name(peers[target])}: {slowest / 1e6:.1f} MB/s, while the "
                    f"median of all pairs is {median / 1e6:.1f} MB/s: every step waits for this path",
                    "check the cable, duplex and load of that link (ethtool, ip -s link)",
                    host=peers[source]["host"], node=source,
                )
            )  # fmt: skip
    return found


def _name(peer: dict[str, Any]) -> str:
    return f"{peer['host']} (machine_rank {peer['node']})"


def _explain_failure(result: str, source: dict[str, Any], target: dict[str, Any]) -> tuple[str, str, str]:
    """Return (code, observation, fix) for a path that does not work."""
    open_firewall = source.get("open") or firewall_advice("the main port", "")
    return {
        DROPPED: ("E_PATH_DROPPED", f"no answer within {CONNECT_SECONDS:.0f} s: packets are dropped", open_firewall),
        REFUSED: (
            "E_PATH_REFUSED", "refused, although that node listens on this port: a firewall rejects it", open_firewall,
        ),
        UNREACHABLE: (
            "E_PATH_UNREACHABLE", "the network reports that this host cannot be reached",
            f"check routes: ip route get {target['ip']}",
        ),
        STALLED: (
            "E_PATH_MTU", f"the connection works and small messages pass, but {PAYLOAD >> 10} KiB get stuck: large packets are "
            "dropped (MTU)", "on both nodes lower the MTU of the interface: ip link set dev "
            f"{source.get('interface') or 'eth0'} mtu 1400; or let ICMP `fragmentation needed` pass",
        ),
        CUT: (
            "E_PATH_CUT", "the connection was opened, but then closed, or not answered by the doctor of that node",
            "check that the doctor of that node is still running; then look for a proxy or a firewall that resets connections",
        ),
    }[result]  # fmt: skip


def format_paths(probes: list[dict[str, Any]], few: int) -> list[str]:
    """Return a line with the slowest path and the longest round trip, and a table of all pairs of up to `few` nodes."""
    good = {(one["from"], one["to"]): one for one in probes if one["how"] == OK and one.get("rate")}
    if not good:
        return ["no path works"]
    slow, late = min(good.values(), key=lambda one: one["rate"]), max(good.values(), key=lambda one: one["seconds"])
    lines = [
        f"{len(good)} of {len(probes)} directions work; slowest {slow['from']} -> {slow['to']} "
        f"{slow['rate'] * 8 / 1e9:.2f} Gbit/s (one TCP stream); longest round trip "
        f"{late['from']} -> {late['to']} {late['seconds'] * 1e3:.2f} ms"
    ]
    nodes = sorted({node for one in probes for node in (one["from"], one["to"])})
    if 2 < len(nodes) <= few:

        def cell(a: int, b: int) -> str:
            result = next((one["how"] for one in probes if (one["from"], one["to"]) == (a, b)), "-")
            return f"{good[a, b]['rate'] * 8 / 1e9:.2f} ({good[a, b]['seconds'] * 1e3:.2f})" if (a, b) in good else result

        rows = [[str(a), *[cell(a, b) for b in nodes]] for a in nodes]
        lines += format_table(["Gbit/s (ms)", *[f"-> {b}" for b in nodes]], rows)
    return lines
