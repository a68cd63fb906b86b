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


def in_order(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(members, key=lambda m: (m["node"], m["local_rank"], m["ip"], m["pid"]))


def counts(members: list[dict[str, Any]]) -> list[Finding]:
    """Numbers that every node must agree on before anything else makes sense."""
    found = []
    members = in_order(members)
    for key, name in (("nodes", "num_machines"), ("ranks", "num_processes"), ("local_ranks", "ranks of a node")):
        values = {m[key] for m in members if m[key]}
        if len(values) > 1:
            said = ", ".join(f"{m[key]} on {m['host']} (machine_rank {m['node']})" for m in members)
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
            names = " and ".join(f"{m['host']} ({m['ip']}, pid {m['pid']})" for m in who)
            taken = {m["node"] for m in members}
            free = [n for n in range(max(m["nodes"] for m in members)) if n not in taken]
            other = "which" if len(free) != 1 else f"--machine_rank {free[0]}"
            found.append(
                Finding(
                    "E_DUPLICATE",
                    f"machine_rank {node}{f', local rank {local_rank}' if local_rank else ''} is claimed by {names}",
                    f"give each node its own: one of them is {other}" if free else
                    "give each node its own machine_rank, and end what is left of an earlier run", node=node,
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
            if len(set(values)) == 1 or (name.startswith("hub commit") and "-" in values):
                continue  # what is not in the cache yet will be fetched
            if group == "files" and any(value.startswith(("!", "~")) for value in values):
                continue  # the node that cannot read it has said so
            as_code = "W_PYTHON" if name in _HARMLESS else code
            label = f"--{name}" if group == "recipe" else f"accelerate {name}" if group == "accelerate" else name
            said = ", ".join(f"{value[:80]} on {m['host']} (machine_rank {m['node']})" for value, m in zip(values, members))
            found.append(Finding(as_code, f"{label} differs: {said}", fix))
            rows.append([label, *[value[:40] for value in values], Finding(as_code, "", "").severity])
    kinds = [m["facts"].get("gpus") or [] for m in members]
    listed = [f"{len(one)} x {one[0]}" if one else "no GPU" for one in kinds]
    if len(set(listed)) > 1:
        mixed = any(kinds) and not all(kinds)
        said = ", ".join(f"{words} on {m['host']} (machine_rank {m['node']})" for words, m in zip(listed, members))
        found.append(
            Finding("E_GPU_MIX", f"some nodes have GPUs and some have none: {said}", "check nvidia-smi, CUDA_VISIBLE_DEVICES and "
                    "the torch build there, or set ACCELERATE_USE_CPU=true on every node")
            if mixed else
            Finding("W_GPU_KINDS", f"GPUs differ: {said}", "a step takes as long as the slowest: choose "
                    "--micro_batch_size for the smallest")
        )  # fmt: skip
        rows.append(["GPUs", *[words[:40] for words in listed], found[-1].severity])
    clocks = [m["clock"] for m in members]
    if max(clocks) - min(clocks) > _CLOCK_SECONDS:
        late = max(members, key=lambda m: abs(m["clock"] - members[0]["clock"]))
        found.append(
            Finding("W_CLOCK", f"the clock differs by {late['clock'] - members[0]['clock']:+.0f} s from that of "
                    f"{members[0]['host']}: logs cannot be put side by side", "timedatectl set-ntp true",
                    host=late["host"], node=late["node"])
        )  # fmt: skip
        rows.append(["clock (s)", *[f"{clock - clocks[0]:+.0f}" for clock in clocks], "warning"])
    if not rows:
        return found, []
    header = ["differs", *[f"{m['node']} {m['host']}" for m in members], ""]
    return found, table(header, rows)


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
