"""What other nodes send, as far as it can be believed: types, sizes, ranges. ValueError where it cannot."""

import ipaddress
from typing import Any

from accel_ddp.doctor.report import Finding, printable, whole

MOST_NODES, MOST_LOCAL, MOST_FINDINGS = 4096, 256, 64
GROUPS = ("versions", "code", "recipe", "accelerate", "files", "driver", "environment")
WAYS = ("ok", "dropped", "refused", "unreachable", "stalled", "cut")


def listed(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError("not a list")
    return value


def finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:  # nor NaN
        raise ValueError("not a number")
    return float(value)


def hello(message: dict[str, Any]) -> dict[str, Any]:
    """Who a node is."""
    said = {
        "node": whole(message.get("node"), MOST_NODES),
        "nodes": whole(message["nodes"], MOST_NODES),
        "ranks": whole(message["ranks"], MOST_NODES * MOST_LOCAL),
        "local_rank": whole(message["local_rank"], MOST_LOCAL),
        "local_ranks": whole(message["local_ranks"], MOST_LOCAL),
        "pid": whole(message["pid"]),
        "needed": whole(message.get("needed", 0), 10**16),
        "ip": str(ipaddress.ip_address(message["ip"])),
        "ports": [whole(port, 65535) for port in listed(message["ports"], 2)],
        "findings": findings(message.get("findings") or []),
        "deep": message.get("deep") is True,
        **{name: printable(message.get(name, ""), 300) for name in ("host", "interface", "open")},
    }
    if None in (said["nodes"], said["ranks"], said["local_rank"], said["local_ranks"], said["pid"], *said["ports"]):
        raise ValueError("not a hello")
    return said


def facts(message: dict[str, Any]) -> dict[str, Any]:
    """What a node has; empty for ranks that leave this to another rank of their node."""
    found = {"findings": findings(message.get("findings") or []), "time": finite(message["time"])}
    found["gpus"] = None if message.get("gpus") is None else [printable(one, 100) for one in listed(message["gpus"], 64)]
    found["wants_cpu"] = message.get("wants_cpu") is True
    for group in GROUPS:
        entries = message.get(group) or {}
        if not isinstance(entries, dict) or len(entries) > 500:
            raise ValueError("not facts")
        found[group] = {printable(name, 100): printable(value, 400) for name, value in entries.items()}
    return found


def findings(value: Any) -> list[Finding]:
    return [Finding.from_stranger(one) for one in listed(value, MOST_FINDINGS)]


def results(answer: dict[str, Any], node: int, nodes: set[int]) -> list[dict[str, Any]]:
    """The probes that a node reports."""
    found = []
    for one in listed(answer.get("paths"), MOST_NODES):
        if not isinstance(one, dict) or one.get("to") not in nodes or one.get("how") not in WAYS:
            raise ValueError("not a probe")
        entry = {"from": node, "to": one["to"], "how": one["how"], "port": whole(one.get("port"), 65535)}
        if entry["how"] == "ok":
            entry |= {name: max(1e-9, finite(one[name])) for name in ("seconds", "rate")}
        found.append(entry)
    return found


def folder(answer: dict[str, Any]) -> dict[str, Any]:
    """What a node says of the output folder."""
    return {
        "folder": printable(answer["folder"], 300),
        "error": printable(answer["error"], 300),
        "free": whole(answer["free"], 10**18),
        "sees": [whole(n, MOST_NODES) for n in listed(answer["sees"], MOST_NODES)],
    }


def roster(value: Any) -> list[dict[str, Any]]:
    return [
        {
            "node": whole(peer["node"], MOST_NODES), "host": printable(peer["host"], 300),
            "ip": str(ipaddress.ip_address(peer["ip"])), "ports": [whole(port, 65535) for port in listed(peer["ports"], 2)],
            "interface": printable(peer["interface"], 300), "open": printable(peer["open"]),
        }
        for peer in listed(value, MOST_NODES)
    ]  # fmt: skip


def lines(value: Any, most: int) -> list[str]:
    return [printable(line) for line in listed(value, most)]
