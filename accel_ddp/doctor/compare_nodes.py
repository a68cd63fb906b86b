"""What differs between the nodes, and the data paths between them, as findings and as tables.

A difference that would change the result is an error. Probes of every pair of nodes run in both directions, on fresh ports, with
payloads as large as in training. They find a firewall or a tunnel that would block the first all-reduce, and the two nodes it is
between. This module also validates what nodes send to each other: types, sizes and ranges. Invalid content raises ValueError.
"""

import asyncio
import ipaddress
import statistics
from collections.abc import Callable
from typing import Any

from accel_ddp.doctor.findings import Finding
from accel_ddp.nodes.messages import LONGEST_TEXT, bounded_list, finite_number, printable, whole_number
from accel_ddp.nodes.probe import CONNECT_SECONDS, CUT, DROPPED, OK, PAYLOAD, REFUSED, STALLED, UNREACHABLE, probe
from accel_ddp.text import format_bytes, listed, table

_CODES = {  # of the groups of facts
    "versions": "E_VERSIONS", "code": "E_CODE", "recipe": "E_OPTIONS", "accelerate": "E_ACCELERATE_CONFIG", "files": "E_FILES",
    "environment": "W_ENVIRONMENT", "driver": "W_DRIVER",
}  # fmt: skip
FACT_GROUPS = tuple(_CODES)
_HUB_COMMIT = "hub commit"
_MAY_LACK = ("code", "accelerate")  # groups: there may be no git, or a setting has its default
_CLOCK_SECONDS = 5.0
_MANY = 3  # if more nodes than this cannot reach a node, they share one finding
_UNEQUAL = (
    "For different numbers of ranks on the nodes, start torchrun with its own --nproc_per_node on each node, or use "
    "`accel-ddp launch`: `accelerate launch` divides num_processes by num_machines"
)

Hello = dict[str, Any]  # of one process of a node


def name_of(hello: Hello) -> str:
    local = f", local rank {hello['local_rank']}" if hello.get("local_rank") else ""
    return f"{hello['host']} (machine_rank {hello['node']}{local})"


def describe_values(values: list[str], members: list[Hello]) -> str:
    """Return which node has which value. With many nodes, rare values come first and common ones are shortened."""
    if len(members) <= 4:
        return ", ".join(f"{value[:80]} on {m['host']} (machine_rank {m['node']})" for value, m in zip(values, members))
    groups: dict[str, list[str]] = {}
    for value, m in zip(values, members):
        groups.setdefault(value, []).append(f"{m['host']} (machine_rank {m['node']})")
    rare_first = sorted(groups.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{value[:80]} on {listed(names)}" for value, names in rare_first[:8])


def _sort_members(members: list[Hello]) -> list[Hello]:
    return sorted(members, key=lambda m: (m["node"], m["local_rank"], m["ip"], m["pid"]))


def counts_ranks(members: list[Hello]) -> bool:
    """Return whether the user has set RANK and WORLD_SIZE: how many nodes there are follows from the ranks that connect."""
    return bool(members) and all(m["rank"] is not None for m in members)


def check_counts(members: list[Hello], is_complete: bool = False) -> list[Finding]:
    """`members`: one process per node (`is_complete`: of all). Only `accelerate launch` needs equal numbers of ranks."""
    found = []
    members = _sort_members(members)
    # With WORLD_SIZE, the numbers of nodes are estimates.
    names = {"ranks": "WORLD_SIZE"} if counts_ranks(members) else {"nodes": "num_machines", "ranks": "num_processes"}
    for key, name in names.items():
        if len({m[key] for m in members if m[key]}) > 1:
            saw = f"{name} differs: {describe_values([str(m[key]) for m in members], members)}"
            more = f"; it is the total over all nodes. {_UNEQUAL}" if name == "num_processes" else ""
            found.append(Finding("E_COUNTS", saw, f"use the same {name} on every node{more}"))
    total, counts = max((m["ranks"] for m in members), default=0), list(count_ranks(members).values())
    if not found and is_complete and total and sum(counts) != total and any(m["node_ranks"] for m in members):
        saw = f"the nodes start {sum(counts)} ranks, but the total is {total}: "
        saw += describe_values([f"{count} ranks" for count in counts], members)
        fix = "use numbers whose sum is the total: WORLD_SIZE, or num_processes of `accelerate launch`. "
        found.append(Finding("E_COUNTS", saw, fix + _UNEQUAL))
    return found


def check_duplicates(members: list[Hello]) -> list[Finding]:
    members, by_rank = _sort_members(members), counts_ranks(members)
    holders: dict[tuple[int, int], list[Hello]] = {}
    for m in members:
        holders.setdefault((m["rank"], 0) if by_rank else (m["node"], m["local_rank"]), []).append(m)
    free = sorted(set(range(max((m["nodes"] for m in members), default=0))) - {m["node"] for m in members})
    old = "end what is left of an earlier run; a second job needs another"
    found = []
    for (number, local_rank), same in sorted(holders.items()):
        which, fix = f"rank {number}", f"set another RANK for each process; {old} MASTER_PORT"
        if not by_rank:
            which = f"machine_rank {number}" + (f", local rank {local_rank}" if local_rank else "")
            more = f": start one of them with --machine_rank {free[0]}" if len(free) == 1 else ""
            fix = f"give each node its own machine_rank{more}{'' if free else f'; {old} --main_process_port'}"
        used = " and ".join(f"{m['host']} ({m['ip']}, pid {m['pid']})" for m in same[:8])
        if len(same) > 1:
            found.append(Finding("E_DUPLICATE", f"{which} is used by {used}", fix, node=None if by_rank else number))
    return found


def compare_facts(members: list[Hello]) -> tuple[list[Finding], list[str]]:
    members = _sort_members(members)
    found, rows = [], []
    for group, code in _CODES.items():
        facts = [m["facts"].get(group) or {} for m in members]
        if group == "recipe" and not all(facts):
            continue  # the command line of a node is invalid, which that node reports; its options are not known
        for name in sorted({name for one in facts for name in one}):
            values = [str(one.get(name, "-")) for one in facts]
            if not _differ(group, name, values):
                continue
            as_code = "W_PYTHON" if name == "python" else "W_HUB" if name.startswith(_HUB_COMMIT) else code
            label = f"--{name}" if group == "recipe" else f"accelerate {name}" if group == "accelerate" else name
            found.append(Finding(as_code, f"{label} differs: {describe_values(values, members)}"))
            rows.append((label, values, found[-1].severity))
    _compare_gpus(members, found, rows)
    _compare_clocks(members, found, rows)
    if not rows:
        return found, []
    # With many nodes, the table has the first one and those that differ from it.
    columns = [i for i in range(len(members)) if i == 0 or any(values[i] != values[0] for _, values, _ in rows)]
    columns = columns[:8] if len(members) > 8 else list(range(len(members)))
    header = ["differs", *[f"{members[i]['node']} {members[i]['host']}" for i in columns], ""]
    return found, table([header, *([label, *[values[i][:40] for i in columns], severity] for label, values, severity in rows)])


def _differ(group: str, name: str, values: list[str]) -> bool:
    """Return whether the values of a fact differ. A node may lack a commit of the hub that it has not downloaded yet."""
    may_lack = group in _MAY_LACK or name.startswith(_HUB_COMMIT)
    if group == "files" and any(value.startswith(("!", "~")) for value in values):
        return False  # the node that cannot read the file reports it
    return len({value for value in values if not (may_lack and value == "-")}) > 1


def _compare_clocks(members: list[Hello], found: list[Finding], rows: list[tuple[str, list[str], str]]) -> None:
    clocks = [m["clock"] for m in members]
    if clocks and max(clocks) - min(clocks) > _CLOCK_SECONDS:
        off = max(members, key=lambda m: abs(m["clock"] - clocks[0]))
        saw = f"the clock differs by {off['clock'] - clocks[0]:+.0f} s from the clock of {members[0]['host']}: times in logs "
        found.append(Finding("W_CLOCK", f"{saw}cannot be compared", host=off["host"], node=off["node"]))
        rows.append(("clock (s)", [f"{clock - clocks[0]:+.0f}" for clock in clocks], "warning"))


def _compare_gpus(members: list[Hello], found: list[Finding], rows: list[tuple[str, list[str], str]]) -> None:
    known = [m for m in members if m["facts"].get("gpus") is not None and not m["facts"].get("wants_cpu")]
    gpus = [f"{len(m['facts']['gpus'])} x {m['facts']['gpus'][0]}" if m["facts"]["gpus"] else "no GPU" for m in known]
    kinds = {one for m in known for one in m["facts"]["gpus"]}
    is_planned = len(kinds) == 1 and all(len(m["facts"]["gpus"]) == m["node_ranks"] for m in known)  # one rank for each GPU
    if len(set(gpus)) <= 1 or is_planned:
        return
    code, saw = ("E_GPU_MIX", "some nodes have GPUs and some have none") if "no GPU" in gpus else ("W_GPU_KINDS", "GPUs differ")
    found.append(Finding(code, f"{saw}: {describe_values(gpus, known)}"))
    if len(known) == len(members):
        rows.append(("GPUs", gpus, found[-1].severity))


def count_ranks(members: list[Hello]) -> dict[int, int]:
    """Return the ranks of each node: its own number (torchrun), the same on all, or the fewest GPUs of a node, at least 1."""
    ranks, nodes = max((m["ranks"] for m in members), default=0), max((m["nodes"] for m in members), default=1)
    same = ranks // nodes or min((len(m.get("facts", {}).get("gpus") or []) for m in members), default=0) or 1
    return {m["node"]: m["node_ranks"] or same for m in members}


def check_storage(members: list[Hello], folders: dict[int, dict[str, Any]], needed: int) -> tuple[list[Finding], str]:
    main = next((m for m in members if m["node"] == 0), members[0])
    place, answer = {"host": main["host"], "node": main["node"]}, folders.get(main["node"], {})
    folder, free = answer.get("folder", "?"), format_bytes(answer.get("free", 0))
    found = []
    if answer.get("error"):
        found.append(Finding("E_OUTPUT_DIR", f"{folder} cannot be written: {answer['error']}", **place))
    if needed and answer.get("free", needed) < needed:
        saw = f"{folder} has {free} free; checkpoints will need about {format_bytes(needed)}"
        found.append(Finding("E_DISK", saw, **place))
    text = f" is not shared: checkpoints are written on {main['host']}, and sent to the other nodes at resume"
    if sum(main["node"] in one.get("sees", []) for one in folders.values()) == len(members):
        text = " is shared by all nodes"
    return found, f"{folder}{text if len(members) > 1 else ''}; {free} free"


async def probe_all(node: int, roster: list[dict[str, Any]], token: bytes, measures: bool) -> list[dict[str, Any]]:
    """Probe all other nodes at once. Measurements follow one by one from the next node on, so none is measured by all at once."""
    others = [peer for peer in roster if peer["node"] != node]
    others.sort(key=lambda peer: (peer["node"] - node) % (max(p["node"] for p in roster) + 1))
    results = await asyncio.gather(*(probe(peer["ip"], peer["ports"], token, False) for peer in others))
    if measures:
        for i, peer in enumerate(others):
            if results[i]["how"] == OK:
                results[i] = await probe(peer["ip"], peer["ports"], token, True)
    return [{**result, "from": node, "to": peer["node"]} for result, peer in zip(results, others)]


_PATH_FAILURES = {
    DROPPED: ("E_PATH_DROPPED", f"no answer within {CONNECT_SECONDS:.0f} s: packets are dropped"),
    REFUSED: ("E_PATH_REFUSED", "refused, although that node listens on this port: a firewall rejects it"),
    UNREACHABLE: ("E_PATH_UNREACHABLE", "the network reports that this host cannot be reached"),
    STALLED: ("E_PATH_MTU", f"small messages pass, but {PAYLOAD >> 10} KiB get stuck: large packets are dropped (MTU)"),
    CUT: ("E_PATH_CUT", "the connection was opened, but then closed, or not answered by the doctor of that node"),
}


def check_paths(probes: list[dict[str, Any]], roster: list[dict[str, Any]]) -> list[Finding]:
    peers = {peer["node"]: peer for peer in roster}
    by_pair = {(one["from"], one["to"]): one for one in probes}
    found = []
    failed: dict[tuple[int, str], list[int]] = {}
    for (source, target), one in sorted(by_pair.items()):
        if one["how"] != OK:
            failed.setdefault((target, one["how"]), []).append(source)
    for (target, result), sources in sorted(failed.items()):
        for source in sources if len(sources) <= _MANY else sources[:1]:
            path = (
                f"{name_of(peers[source])} -> {name_of(peers[target])}, {peers[target]['ip']}:{by_pair[source, target]['port']}"
            )
            if len(sources) > _MANY:
                path = f"{len(sources)} of {len(roster) - 1} nodes -> {name_of(peers[target])}, for example {path}"
            code, saw = _PATH_FAILURES[result]
            by_firewall, back = result in (DROPPED, REFUSED), by_pair.get((target, source), {}).get("how")
            also = " The other direction works." if back == OK else f" The other direction: {back}."
            saw = f"{path}: {saw}.{also if back and back != result else ''}"
            fix = (peers[source]["open"] or None) if by_firewall else None
            code = "E_PATH_ONE_WAY" if back == OK and by_firewall else code
            found.append(Finding(code, saw, fix, host=peers[source]["host"], node=source))
    rates = {pair: one["rate"] for pair, one in by_pair.items() if one["how"] == OK and one.get("rate")}
    if len(rates) > 2:
        median = statistics.median(rates.values())
        (source, target), slowest = min(rates.items(), key=lambda item: item[1])
        if slowest < median / 4:
            path = f"{name_of(peers[source])} -> {name_of(peers[target])}: {slowest / 1e6:.1f} MB/s"
            saw = f"{path}, while the median of all pairs is {median / 1e6:.1f} MB/s: every step waits for this path"
            found.append(Finding("W_PATH_SLOW", saw, host=peers[source]["host"], node=source))
    return found


def format_paths(probes: list[dict[str, Any]], few: int) -> list[str]:
    good = [one for one in probes if one["how"] == OK and one.get("rate")]
    if not good:
        return ["no path works"]
    slow, late = min(good, key=lambda one: one["rate"]), max(good, key=lambda one: one["seconds"])
    lines = [
        f"{len(good)} of {len(probes)} directions work; slowest {slow['from']} -> {slow['to']} "
        f"{slow['rate'] * 8 / 1e9:.2f} Gbit/s (one TCP stream); longest round trip "
        f"{late['from']} -> {late['to']} {late['seconds'] * 1e3:.2f} ms"
    ]
    cells = {(one["from"], one["to"]): one["how"] for one in probes}
    cells |= {(one["from"], one["to"]): f"{one['rate'] * 8 / 1e9:.2f} ({one['seconds'] * 1e3:.2f})" for one in good}
    nodes = sorted({node for pair in cells for node in pair})
    if 2 < len(nodes) <= few:
        rows = [[str(a), *[cells.get((a, b), "-") for b in nodes]] for a in nodes]
        lines += table([["Gbit/s (ms)", *[f"-> {b}" for b in nodes]], *rows])
    return lines


MOST_NODES, MOST_FINDINGS = 4096, 64
_MOST_RANKS, _MOST_LOCAL_RANKS = 1 << 20, 256


def _text(longest: int = 300) -> Callable[[Any], str]:
    return lambda value: printable("" if value is None else value, longest)


def _count(most: int, default: int = -1) -> Callable[[Any], int | None]:
    """Return a check for a whole number that must be given, unless it has a valid default."""
    return lambda value: whole_number(default if value is None else value, most)


_CHECKS: dict[str, Callable[[Any], Any]] = {  # of the fields that nodes send; each receives None for a field that is missing
    "node": lambda value: whole_number(value, MOST_NODES), "rank": lambda value: whole_number(value, _MOST_RANKS),
    "nodes": _count(MOST_NODES), "ranks": _count(_MOST_RANKS), "node_ranks": _count(_MOST_LOCAL_RANKS, 0),
    "local_rank": _count(_MOST_LOCAL_RANKS), "local_ranks": _count(_MOST_LOCAL_RANKS), "pid": _count(10**9),
    "needed": _count(10**16, 0), "free": _count(10**18), "deep": lambda value: value is True,
    "ip": lambda value: str(ipaddress.ip_address(value)),
    "ports": lambda value: [_count(65535)(port) for port in bounded_list(value, 2)],
    "sees": lambda value: [_count(MOST_NODES)(node) for node in bounded_list(value, MOST_NODES)],
    "findings": lambda value: clean_findings(value or []),
    "host": _text(), "interface": _text(), "open": _text(), "folder": _text(), "error": _text(), "key": _text(64),
    "code": _text(), "saw": _text(LONGEST_TEXT), "fix": _text(LONGEST_TEXT),
}  # fmt: skip
_FIELDS = {
    "hello": "node nodes rank node_ranks ranks local_rank local_ranks pid needed ip ports findings deep host interface open key",
    "finding": "code saw fix host node rank",
    "folder": "folder error free sees",
    "peer": "node host ip ports interface open ranks key",
}


def clean(kind: str, message: Any) -> dict[str, Any]:
    """Return the fields of what another process sent: a `hello`, its first message; its `folder`; or a `peer` of the list."""
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return {name: _CHECKS[name](message.get(name)) for name in _FIELDS[kind].split()}


def clean_finding(value: Any) -> Finding:
    fields = clean("finding", value)
    if fields["code"][:2] not in ("E_", "W_", "I_"):
        raise ValueError("not a finding")
    return Finding(**fields)


def clean_findings(value: Any, most: int = MOST_FINDINGS) -> list[Finding]:
    return [clean_finding(one) for one in bounded_list(value, most)]


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
    probes = []
    for one in bounded_list(answer.get("paths"), MOST_NODES):
        if not isinstance(one, dict) or one.get("to") not in nodes or one.get("how") not in (OK, *_PATH_FAILURES):
            raise ValueError("not a probe")
        entry = {"from": node, "to": one["to"], "how": one["how"], "port": whole_number(one.get("port"), 65535)}
        if entry["how"] == OK:
            entry |= {name: max(1e-9, finite_number(one[name])) for name in ("seconds", "rate")}
        probes.append(entry)
    return probes


def clean_roster(value: Any) -> list[dict[str, Any]]:
    return [clean("peer", peer) for peer in bounded_list(value, MOST_NODES)]
