"""Validation of what other nodes send to the doctor: types, sizes and ranges. Invalid content raises ValueError."""

import ipaddress
from typing import Any

from accel_ddp.doctor import paths
from accel_ddp.doctor.report import Finding
from accel_ddp.net.sanitize import bounded_list, finite_number, printable, whole_number

MOST_NODES, MOST_LOCAL_RANKS, MOST_FINDINGS = 4096, 256, 64
FACT_GROUPS = ("versions", "code", "recipe", "accelerate", "files", "driver", "environment")
_PROBE_RESULTS = (paths.OK, paths.DROPPED, paths.REFUSED, paths.UNREACHABLE, paths.STALLED, paths.CUT)


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
        if entry["how"] == paths.OK:
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
