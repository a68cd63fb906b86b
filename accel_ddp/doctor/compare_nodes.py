"""What differs between the nodes, as findings and as a table. A difference that would change the result is an error."""

from typing import Any

from accel_ddp.doctor.findings import Finding
from accel_ddp.text import format_bytes, listed, table

_CODES = {  # of the groups of facts
    "versions": "E_VERSIONS", "code": "E_CODE", "recipe": "E_OPTIONS", "accelerate": "E_ACCELERATE_CONFIG", "files": "E_FILES",
    "environment": "W_ENVIRONMENT", "driver": "W_DRIVER",
}  # fmt: skip
_HARMLESS_VERSIONS = {"python"}  # neither pickles nor results depend on it
_MAY_LACK = ("code", "accelerate")  # groups: there may be no git, or a setting has its default
_CLOCK_SECONDS = 5.0
_UNEQUAL = (
    "For different numbers of ranks on the nodes, start torchrun with its own --nproc_per_node on each node, or use "
    "`accel-ddp launch`: `accelerate launch` divides num_processes by num_machines"
)


def describe_values(values: list[str], members: list[dict[str, Any]]) -> str:
    """Return which node has which value. With many nodes, rare values come first and common ones are shortened."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for value, member in zip(values, members):
        groups.setdefault(value, []).append(member)
    if len(members) <= 4:
        return ", ".join(f"{value[:80]} on {m['host']} (machine_rank {m['node']})" for value, m in zip(values, members))
    parts = []
    for value, holders in sorted(groups.items(), key=lambda item: len(item[1]))[:8]:
        names = listed(f"{m['host']} (machine_rank {m['node']})" for m in holders)
        parts.append(f"{value[:80]} on {names}")
    return "; ".join(parts)


def _sort_members(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(members, key=lambda m: (m["node"], m["local_rank"], m["ip"], m["pid"]))


def check_counts(members: list[dict[str, Any]], is_complete: bool = False) -> list[Finding]:
    """Return findings for numbers of nodes and ranks that contradict each other.

    `members` has one process of each node, and `is_complete` states that these are all nodes. Nodes may have different numbers of
    ranks, but not under `accelerate launch`, which divides the total by the number of nodes.
    """
    found = []
    members = _sort_members(members)
    names = {"nodes": "num_machines", "ranks": "WORLD_SIZE" if _counts_ranks(members) else "num_processes"}
    for key, name in names.items():
        if key == "nodes" and _counts_ranks(members):
            continue  # estimates
        if len({m[key] for m in members if m[key]}) > 1:
            saw = f"{name} differs: {describe_values([str(m[key]) for m in members], members)}"
            fix = f"use the same {name} on every node"
            if name == "num_processes":
                fix += f"; it is the total over all nodes. {_UNEQUAL}"
            found.append(Finding("E_COUNTS", saw, fix))
    total, counts = max((m["ranks"] for m in members), default=0), list(count_ranks(members).values())
    if not found and is_complete and total and sum(counts) != total and any(m["node_ranks"] for m in members):
        saw = f"the nodes start {sum(counts)} ranks, but the total is {total}: "
        saw += describe_values([f"{count} ranks" for count in counts], members)
        fix = (
            "use numbers whose sum is the total: WORLD_SIZE, or num_processes of `accelerate launch`, is the total over all nodes"
        )
        found.append(Finding("E_COUNTS", saw, f"{fix}. {_UNEQUAL}"))
    return found


def _counts_ranks(members: list[dict[str, Any]]) -> bool:
    return all(m["rank"] is not None for m in members)


def check_duplicates(members: list[dict[str, Any]]) -> list[Finding]:
    """Return a finding for each machine rank (and local rank) that several processes have."""
    found = []
    members = _sort_members(members)
    if _counts_ranks(members):
        return _check_duplicate_ranks(members)
    holders: dict[tuple[Any, int], list[dict[str, Any]]] = {}
    for member in members:
        holders.setdefault((member["node"], member["local_rank"]), []).append(member)
    for (node, local_rank), same in holders.items():
        if len(same) > 1:
            taken = {m["node"] for m in members}
            free = [n for n in range(max(m["nodes"] for m in members)) if n not in taken]
            if len(free) == 1:
                fix = f"give each node its own machine_rank: start one of them with --machine_rank {free[0]}"
            elif free:
                fix = "give each node its own machine_rank"
            else:
                fix = (
                    "give each node its own machine_rank; end what is left of an earlier run; a second job needs another "
                    "--main_process_port"
                )
            which = f"machine_rank {node}" + (f", local rank {local_rank}" if local_rank else "")
            found.append(Finding("E_DUPLICATE", f"{which} is used by {_name_processes(same)}", fix, node=node))
    return found


def _check_duplicate_ranks(members: list[dict[str, Any]]) -> list[Finding]:
    holders: dict[int, list[dict[str, Any]]] = {}
    for member in members:
        holders.setdefault(member["rank"], []).append(member)
    fix = "set another RANK for each process; end what is left of an earlier run; a second job needs another MASTER_PORT"
    return [
        Finding("E_DUPLICATE", f"rank {rank} is used by {_name_processes(same)}", fix)
        for rank, same in sorted(holders.items()) if len(same) > 1
    ]  # fmt: skip


def _name_processes(members: list[dict[str, Any]]) -> str:
    return " and ".join(f"{m['host']} ({m['ip']}, pid {m['pid']})" for m in members[:8])


def compare_facts(members: list[dict[str, Any]]) -> tuple[list[Finding], list[str]]:
    """Return (findings, lines of a table) about facts that differ between the nodes."""
    members = _sort_members(members)
    found, rows = [], []
    for group, code in _CODES.items():
        facts = [m["facts"].get(group) or {} for m in members]
        if group == "recipe" and not all(facts):
            continue  # the command line of a node is invalid, which that node reports; its options are not known
        for name in sorted({name for one in facts for name in one}):
            values = [str(one.get(name, "-")) for one in facts]
            is_hub_commit = name.startswith("hub commit")  # a node without it has not downloaded it yet
            may_lack = group in _MAY_LACK or is_hub_commit
            if len({value for value in values if not (may_lack and value == "-")}) <= 1:
                continue
            if group == "files" and any(value.startswith(("!", "~")) for value in values):
                continue  # the node that cannot read the file reports it
            as_code = "W_PYTHON" if name in _HARMLESS_VERSIONS else "W_HUB" if is_hub_commit else code
            label = f"--{name}" if group == "recipe" else f"accelerate {name}" if group == "accelerate" else name
            found.append(Finding(as_code, f"{label} differs: {describe_values(values, members)}"))
            rows.append((label, values, found[-1].severity))
    _compare_gpus(members, found, rows)
    _compare_clocks(members, found, rows)
    return found, _format_rows(members, rows) if rows else []


def _compare_gpus(members: list[dict[str, Any]], found: list[Finding], rows: list[tuple[str, list[str], str]]) -> None:
    known = [m for m in members if m["facts"].get("gpus") is not None and not m["facts"].get("wants_cpu")]
    gpus = [f"{len(m['facts']['gpus'])} x {m['facts']['gpus'][0]}" if m["facts"]["gpus"] else "no GPU" for m in known]
    kinds = {one for m in known for one in m["facts"]["gpus"]}
    is_planned = len(kinds) == 1 and all(len(m["facts"]["gpus"]) == m["node_ranks"] for m in known)  # one rank for each GPU
    if len(set(gpus)) <= 1 or is_planned:
        return
    if "no GPU" in gpus:
        found.append(Finding("E_GPU_MIX", f"some nodes have GPUs and some have none: {describe_values(gpus, known)}"))
    else:
        found.append(Finding("W_GPU_KINDS", f"GPUs differ: {describe_values(gpus, known)}"))
    if len(known) == len(members):
        rows.append(("GPUs", gpus, found[-1].severity))


def _compare_clocks(members: list[dict[str, Any]], found: list[Finding], rows: list[tuple[str, list[str], str]]) -> None:
    clocks = [m["clock"] for m in members]
    if not clocks or max(clocks) - min(clocks) <= _CLOCK_SECONDS:
        return
    off = max(members, key=lambda m: abs(m["clock"] - clocks[0]))
    seconds = f"{off['clock'] - clocks[0]:+.0f} s"
    saw = f"the clock differs by {seconds} from the clock of {members[0]['host']}: times in logs cannot be compared"
    found.append(Finding("W_CLOCK", saw, host=off["host"], node=off["node"]))
    rows.append(("clock (s)", [f"{clock - clocks[0]:+.0f}" for clock in clocks], "warning"))


def _format_rows(members: list[dict[str, Any]], rows: list[tuple[str, list[str], str]]) -> list[str]:
    """Return a table with a column for each node; with many nodes, only the first one and those that differ from it."""
    columns = [i for i in range(len(members)) if i == 0 or any(values[i] != values[0] for _, values, _ in rows)]
    columns = columns[:8] if len(members) > 8 else list(range(len(members)))
    header = ["differs", *[f"{members[i]['node']} {members[i]['host']}" for i in columns], ""]
    return table([header, *([label, *[values[i][:40] for i in columns], severity] for label, values, severity in rows)])


def count_ranks(members: list[dict[str, Any]]) -> dict[int, int]:
    """Return the number of ranks of each node: its own number (torchrun), or the same for all nodes (accelerate).

    Without any number it is the number of GPUs of the node that has the fewest, at least 1.
    """
    ranks, nodes = max((m["ranks"] for m in members), default=0), max((m["nodes"] for m in members), default=1)
    same = ranks // nodes or min((len(m.get("facts", {}).get("gpus") or []) for m in members), default=0) or 1
    return {m["node"]: m["node_ranks"] or same for m in members}


def check_storage(members: list[dict[str, Any]], folders: dict[int, dict[str, Any]], needed: int) -> tuple[list[Finding], str]:
    """Return findings about the output folder of the main node, which writes the checkpoints, and a line about it.

    `folders` has the answer of each node; `needed` is the disk space that the checkpoints will need.
    """
    main = next((m for m in members if m["node"] == 0), members[0])
    answer = folders.get(main["node"], {})
    folder, free = answer.get("folder", "?"), format_bytes(answer.get("free", 0))
    found = []
    if answer.get("error"):
        saw = f"{folder} cannot be written: {answer['error']}"
        found.append(Finding("E_OUTPUT_DIR", saw, host=main["host"], node=main["node"]))
    if needed and answer.get("free", needed) < needed:
        saw = f"{folder} has {free} free; checkpoints will need about {format_bytes(needed)}"
        found.append(Finding("E_DISK", saw, host=main["host"], node=main["node"]))
    num_sharing = sum(main["node"] in one.get("sees", []) for one in folders.values())
    if len(members) == 1:
        text = folder
    elif num_sharing == len(members):
        text = f"{folder} is shared by all nodes"
    else:
        text = f"{folder} is not shared: checkpoints are written on {main['host']}, and sent to the other nodes at resume"
    return found, f"{text}; {free} free"
