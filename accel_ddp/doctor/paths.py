"""Probes of every pair of nodes in both directions, on fresh ports, with payloads as large as in training.

They find a firewall or a tunnel that would block the first all-reduce, and the two nodes it is between. This module also validates what
nodes send to each other: types, sizes and ranges. Invalid content raises ValueError.
"""

import asyncio
import ipaddress
import statistics
from typing import Any

from accel_ddp.doctor.findings import Finding
from accel_ddp.doctor.host import firewall_advice
from accel_ddp.nodes.messages import bounded_list, finite_number, printable, whole_number
from accel_ddp.nodes.probe import CONNECT_SECONDS, CUT, DROPPED, OK, PAYLOAD, REFUSED, STALLED, UNREACHABLE, probe
from accel_ddp.text import table

_MANY = 3  # if more nodes than this cannot reach a node, they share one finding


async def probe_all(node: int, roster: list[dict[str, Any]], token: bytes, measures: bool) -> list[dict[str, Any]]:
    """Return the probes from this node to every other one.

    Probes run at the same time. Measurements run one after the other and start with the next node. Otherwise all nodes would
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
            path = f"{_name(peers[source])} -> {_name(peers[target])}: {slowest / 1e6:.1f} MB/s"
            saw = f"{path}, while the median of all pairs is {median / 1e6:.1f} MB/s: every step waits for this path"
            found.append(Finding("W_PATH_SLOW", saw, host=peers[source]["host"], node=source))
    return found


def _name(peer: dict[str, Any]) -> str:
    return f"{peer['host']} (machine_rank {peer['node']})"


def _explain_failure(result: str, source: dict[str, Any], target: dict[str, Any]) -> tuple[str, str, str | None]:
    """Return (code, observation, fix) for a path that does not work. None is the usual fix of the code."""
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
            "E_PATH_CUT", "the connection was opened, but then closed, or not answered by the doctor of that node", None,
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
        lines += table([["Gbit/s (ms)", *[f"-> {b}" for b in nodes]], *rows])
    return lines


MOST_NODES, MOST_LOCAL_RANKS, MOST_FINDINGS = 4096, 256, 64
FACT_GROUPS = ("versions", "code", "recipe", "accelerate", "files", "driver", "environment")
_PROBE_RESULTS = (OK, DROPPED, REFUSED, UNREACHABLE, STALLED, CUT)


def clean_finding(value: Any) -> Finding:
    """Return the finding that another process sent as JSON."""
    if not isinstance(value, dict):
        raise ValueError("not a finding")
    texts = {name: printable(value.get(name, "")) for name in ("code", "saw", "fix", "host")}
    numbers = {name: whole_number(value.get(name)) for name in ("node", "rank")}
    if texts["code"][:2] not in ("E_", "W_", "I_"):
        raise ValueError("not a finding")
    return Finding(**texts, **numbers)


def clean_findings(value: Any, most: int = MOST_FINDINGS) -> list[Finding]:
    return [clean_finding(one) for one in bounded_list(value, most)]


def clean_hello(message: dict[str, Any]) -> dict[str, Any]:
    """Return the first message of a node: its rank, its address and what it requires."""
    hello = {
        "node": whole_number(message.get("node"), MOST_NODES),
        "nodes": whole_number(message["nodes"], MOST_NODES),
        "rank": whole_number(message.get("rank"), MOST_NODES * MOST_LOCAL_RANKS),
        "node_ranks": whole_number(message.get("node_ranks", 0), MOST_LOCAL_RANKS) or 0,
        "ranks": whole_number(message["ranks"], MOST_NODES * MOST_LOCAL_RANKS),
        "local_rank": whole_number(message["local_rank"], MOST_LOCAL_RANKS),
        "local_ranks": whole_number(message["local_ranks"], MOST_LOCAL_RANKS),
        "pid": whole_number(message["pid"]),
        "needed": whole_number(message.get("needed", 0), 10**16),
        "ip": str(ipaddress.ip_address(message["ip"])),
        "ports": [whole_number(port, 65535) for port in bounded_list(message["ports"], 2)],
        "findings": clean_findings(message.get("findings") or []),
        "deep": message.get("deep") is True,
        **{name: printable(message.get(name, ""), 300) for name in ("host", "interface", "open")},
    }
    if None in (hello["nodes"], hello["ranks"], hello["local_rank"], hello["local_ranks"], hello["pid"], *hello["ports"]):
        raise ValueError("not a hello")
    return hello


def clean_facts(message: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a node. They are empty for ranks other than the first of their node."""
    facts = {"findings": clean_findings(message.get("findings") or []), "time": finite_number(message["time"])}
    facts["gpus"] = None if message.get("gpus") is None else [printable(one, 100) for one in bounded_list(message["gpus"], 64)]
    facts["wants_cpu"] = message.get("wants_cpu") is True
    for group in FACT_GROUPS:
        entries = message.get(group) or {}
        if not isinstance(entries, dict) or len(entries) > 500:
            raise ValueError("not facts")
        facts[group] = {printable(name, 100): printable(value, 400) for name, value in entries.items()}
    return facts


def clean_probes(answer: dict[str, Any], node: int, nodes: set[int]) -> list[dict[str, Any]]:
    """Return the results of the probes that a node sent to the other nodes."""
    probes = []
    for one in bounded_list(answer.get("paths"), MOST_NODES):
        if not isinstance(one, dict) or one.get("to") not in nodes or one.get("how") not in _PROBE_RESULTS:
            raise ValueError("not a probe")
        entry = {"from": node, "to": one["to"], "how": one["how"], "port": whole_number(one.get("port"), 65535)}
        if entry["how"] == OK:
            entry |= {name: max(1e-9, finite_number(one[name])) for name in ("seconds", "rate")}
        probes.append(entry)
    return probes


def clean_folder(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what a node reports about the output folder."""
    return {
        "folder": printable(answer["folder"], 300),
        "error": printable(answer["error"], 300),
        "free": whole_number(answer["free"], 10**18),
        "sees": [whole_number(n, MOST_NODES) for n in bounded_list(answer["sees"], MOST_NODES)],
    }


def clean_roster(value: Any) -> list[dict[str, Any]]:
    """Return the list of all nodes that the coordinator sends."""
    return [
        {
            "node": whole_number(peer["node"], MOST_NODES), "host": printable(peer["host"], 300),
            "ip": str(ipaddress.ip_address(peer["ip"])),
            "ports": [whole_number(port, 65535) for port in bounded_list(peer["ports"], 2)],
            "interface": printable(peer["interface"], 300), "open": printable(peer["open"]),
            "ranks": whole_number(peer.get("ranks", 1), MOST_LOCAL_RANKS) or 1,
        }
        for peer in bounded_list(value, MOST_NODES)
    ]  # fmt: skip


def clean_lines(value: Any, most: int) -> list[str]:
    return [printable(line) for line in bounded_list(value, most)]
