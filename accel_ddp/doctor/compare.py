"""What differs between the nodes, as a table; what changes results is an error."""

from typing import Any

from accel_ddp.doctor.report import Finding, gibibytes, table

# group of facts -> (code, what to do)
_ERRORS = {
    "versions": ("E_VERSIONS", "install the same on every node: pip install -c constraints.txt -e ."),
    "code": ("E_CODE", "check out the same commit on every node (git status, git pull), or share one folder"),
    "recipe": ("E_OPTIONS", "start every node with the same options"),
    "accelerate": ("E_ACCELERATE_CONFIG", "use the same accelerate config and options of `accelerate launch` on every node"),
    "files": ("E_FILES", "copy the same files to every node, or use a shared disk"),
}
_WARNINGS = {
    "environment": ("W_ENVIRONMENT", "export the same NCCL settings on every node"),
    "driver": ("W_DRIVER", "results are the same; update the older driver when you can"),
}
_HARMLESS = {"python"}  # of versions: pickles and results are the same
_CLOCK_SECONDS = 5.0


def told(values: list[str], members: list[dict[str, Any]]) -> str:
    """Who has which value: the deviating ones by name, also among hundreds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for value, member in zip(values, members):
        groups.setdefault(value, []).append(member)
    if len(members) <= 4:
        return ", ".join(f"{value[:80]} on {m['host']} (machine_rank {m['node']})" for value, m in zip(values, members))
    words = []
    for value, who in sorted(groups.items(), key=lambda item: len(item[1]))[:8]:
        names = ", ".join(f"{m['host']} (machine_rank {m['node']})" for m in who[:3])
        words.append(f"{value[:80]} on {names}{f' and {len(who) - 3} more' if len(who) > 3 else ''}")
    return "; ".join(words)


def in_order(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(members, key=lambda m: (m["node"], m["local_rank"], m["ip"], m["pid"]))


def counts(members: list[dict[str, Any]]) -> list[Finding]:
    """Numbers that every node must agree on before anything else makes sense."""
    found = []
    members = in_order(members)
    for key, name in (("nodes", "num_machines"), ("ranks", "num_processes"), ("local_ranks", "ranks of a node")):
        values = {m[key] for m in members if m[key]}
        if len(values) > 1:
            said = told([str(m[key]) for m in members], members)
            found.append(
                Finding(
                    "E_COUNTS", f"{name} differs: {said}", f"use the same {name} on every node; num_processes is the total of all"
                )
            )
    return found


def duplicates(members: list[dict[str, Any]]) -> list[Finding]:
    found = []
    members = in_order(members)
    claims: dict[tuple[Any, int], list[dict[str, Any]]] = {}
    for member in members:
        claims.setdefault((member["node"], member["local_rank"]), []).append(member)
    for (node, local_rank), who in claims.items():
        if len(who) > 1:
            who = who[:8]
            names = " and ".join(f"{m['host']} ({m['ip']}, pid {m['pid']})" for m in who)
            taken = {m["node"] for m in members}
            free = [n for n in range(max(m["nodes"] for m in members)) if n not in taken]
            other = "which" if len(free) != 1 else f"--machine_rank {free[0]}"
            found.append(
                Finding(
                    "E_DUPLICATE",
                    f"machine_rank {node}{f', local rank {local_rank}' if local_rank else ''} is claimed by {names}",
                    f"give each node its own: one of them is {other}" if free else
                    "give each node its own machine_rank; end what is left of an earlier run; a second job needs another "
                    "--main_process_port", node=node,
                )
            )  # fmt: skip
    return found


def differences(members: list[dict[str, Any]]) -> tuple[list[Finding], list[str]]:
    """(findings, table of what differs) of the nodes' facts."""
    members = in_order(members)
    found, rows = [], []
    for group, (code, fix) in {**_ERRORS, **_WARNINGS}.items():
        facts = [m["facts"].get(group) or {} for m in members]
        names = sorted({name for one in facts for name in one})
        for name in names:
            values = [str(one.get(name, "-")) for one in facts]
            known = [value for value in values if value != "-"]
            may_lack = group in ("code", "accelerate") or name.startswith(
                "hub commit"
            )  # no git there; a default; not fetched yet
            if len(set(known if may_lack else values)) <= 1:
                continue
            if group == "files" and any(value.startswith(("!", "~")) for value in values):
                continue  # the node that cannot read it has said so
            as_code = "W_PYTHON" if name in _HARMLESS else "W_HUB" if name.startswith("hub commit") else code
            label = f"--{name}" if group == "recipe" else f"accelerate {name}" if group == "accelerate" else name
            found.append(Finding(as_code, f"{label} differs: {told(values, members)}", fix))
            rows.append((label, values, Finding(as_code, "", "").severity))
    seen = [
        m for m in members if m["facts"].get("gpus") is not None and not m["facts"].get("wants_cpu")
    ]  # of the others it is unknown
    listed = [f"{len(m['facts']['gpus'])} x {m['facts']['gpus'][0]}" if m["facts"]["gpus"] else "no GPU" for m in seen]
    if len(set(listed)) > 1:
        mixed = "no GPU" in listed
        found.append(
            Finding("E_GPU_MIX", f"some nodes have GPUs and some have none: {told(listed, seen)}", "check nvidia-smi, "
                    "CUDA_VISIBLE_DEVICES and the torch build there, or set ACCELERATE_USE_CPU=true on every node")
            if mixed else
            Finding("W_GPU_KINDS", f"GPUs differ: {told(listed, seen)}", "a step takes as long as the slowest: choose "
                    "--micro_batch_size for the smallest")
        )  # fmt: skip
        if len(seen) == len(members):
            rows.append(("GPUs", listed, found[-1].severity))
    clocks = [m["clock"] for m in members]
    if max(clocks) - min(clocks) > _CLOCK_SECONDS:
        late = max(members, key=lambda m: abs(m["clock"] - members[0]["clock"]))
        found.append(
            Finding("W_CLOCK", f"the clock differs by {late['clock'] - members[0]['clock']:+.0f} s from that of "
                    f"{members[0]['host']}: logs cannot be put side by side", "timedatectl set-ntp true",
                    host=late["host"], node=late["node"])
        )  # fmt: skip
        rows.append(("clock (s)", [f"{clock - clocks[0]:+.0f}" for clock in clocks], "warning"))
    return found, _table(members, rows) if rows else []


def _table(members: list[dict[str, Any]], rows: list[tuple[str, list[str], str]]) -> list[str]:
    """A column for each node; of many nodes for the first and for those that differ from it."""
    columns = [i for i in range(len(members)) if i == 0 or any(values[i] != values[0] for _, values, _ in rows)]
    columns = columns[:8] if len(members) > 8 else list(range(len(members)))
    header = ["differs", *[f"{members[i]['node']} {members[i]['host']}" for i in columns], ""]
    return table(header, [[label, *[values[i][:40] for i in columns], severity] for label, values, severity in rows])


def local_ranks(members: list[dict[str, Any]]) -> int:
    """Ranks of each node, as far as one of them says; else as many as each has GPUs."""
    ranks, nodes = max((m["ranks"] for m in members), default=0), max((m["nodes"] for m in members), default=1)
    if ranks // nodes:
        return ranks // nodes
    return min((len(m["facts"].get("gpus") or []) for m in members), default=0) or 1


def storage(members: list[dict[str, Any]], seen: dict[int, dict[str, Any]], needed: int) -> tuple[list[Finding], str]:
    """Whether the output folder is one folder, whether the node that writes can, and whether it has room."""
    main = next((m for m in members if m["node"] == 0), members[0])
    of_main = seen.get(main["node"], {})
    folder = of_main.get("folder", "?")
    found = []
    if of_main.get("error"):
        found.append(
            Finding("E_OUTPUT_DIR", f"{folder} cannot be written: {of_main['error']}", "choose another --output_dir, or mend its "
                    "rights: checkpoints are written on this node", host=main["host"], node=main["node"])
        )  # fmt: skip
    if needed and of_main.get("free", needed) < needed:
        found.append(
            Finding("E_DISK", f"{folder} has {gibibytes(of_main['free'])} free; checkpoints will need about {gibibytes(needed)}",
                    "make room, or use another --output_dir", host=main["host"], node=main["node"])
        )  # fmt: skip
    sharing = sorted(node for node, one in seen.items() if main["node"] in one.get("sees", []))
    if len(members) == 1:
        words = folder
    elif len(sharing) == len(members):
        words = f"{folder} is one folder for all nodes"
    else:
        words = f"{folder} is of each node alone: checkpoints are on {main['host']}, and are sent to the others at resume"
    return found, f"{words}; {gibibytes(of_main.get('free', 0))} free"
