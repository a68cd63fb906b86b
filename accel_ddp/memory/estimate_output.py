"""What `accel-ddp estimate` prints: the estimates of each number of GPUs, and which GPUs they fit."""

from accel_ddp.errors import UserError
from accel_ddp.memory.at_start import NAMES
from accel_ddp.memory.estimate import GIB, Estimate, Estimator, fits
from accel_ddp.memory.fake_model import ASSUMED_LENGTH
from accel_ddp.nodes.sharding_plan import ONE_PER_NODE, ShardingPlan
from accel_ddp.text import table

USABLE = 0.99  # of the number in the name of a GPU, in GiB


def layouts_of(
    estimator: Estimator, given: ShardingPlan | None, num_nodes: int, numbers: list[int]
) -> list[tuple[Estimate, ShardingPlan | None]]:
    found: list[tuple[Estimate, ShardingPlan | None]] = []
    for number in numbers:
        found.append((estimator.estimate(number), None))
        if given:
            estimator.require_sharded()
        if given and given.replicas == ONE_PER_NODE and number > num_nodes and number % num_nodes:
            raise UserError(
                f"--gpus {number}: the accelerate config has num_machines: {num_nodes} and one copy of the model on each node, "
                f"so each node needs the same number of GPUs. Use a multiple of {num_nodes}."
            )
        if number > 1 and (given or estimator.can_be_sharded()):
            # A plan has copies on nodes. Fewer GPUs than nodes are on one node.
            nodes = num_nodes if number % num_nodes == 0 else 1
            plan = (given or ShardingPlan()).on_nodes([number // nodes] * nodes)
            found.append((estimator.estimate(number, plan), plan))
    return found


def format_table(estimator: Estimator, layouts: list[tuple[Estimate, ShardingPlan | None]], sizes: list[float]) -> str:
    found = [one for one, _ in layouts]
    rows = [["GiB per GPU", *(one.title for one in found)]]
    for name, title in NAMES.items():
        if any(one.rows.get(name) for one in found):
            rows.append([title, *(f"{one.rows[name] / GIB:.2f}" for one in found)])
    rows.append(["total", *(f"{one.total / GIB:.2f}" for one in found)])
    for title, name in (("CUDA graphs, if there is room", "graphs"), ("more in an evaluation", "evaluation")):
        if any(getattr(one, name) for one in found):
            rows.append([title, *(f"{getattr(one, name) / GIB:.2f}" for one in found)])
    advice = []
    for size in sorted(sizes):
        usable = size * USABLE * GIB
        cells = []
        for one, plan in layouts:
            settled = estimator.settled(one.ranks, plan, usable)
            peak = settled.estimate(one.ranks, plan)
            is_on = settled.choices.get("gradient_checkpointing", (False, ""))[0]
            cells.append(f"{'*' * is_on}{peak.peak / GIB:.2f}" if fits(peak, usable) else "-")
        rows.append([f"peak on {size:g} GB", *cells])
        if {*cells} == {"-"}:
            changes = settled.suggest(one.ranks, plan, usable)
            use = f"For {one.title}, use" if len(layouts) > 1 else "Use"
            change = f"{use} {', or '.join(map(str, changes))}." if changes else "Use larger GPUs, or a smaller model."
            advice.append(f"{size:g} GB: does not fit. {change}")
    text = "\n".join(table(rows, left=1))
    lines = [
        text,
        "A peak is what torch allocates. CUDA, NCCL and fragmentation are added to decide whether it fits (-: it does not).",
    ]
    if "*" in text:
        lines.append("* with --gradient_checkpointing, which `auto` turns on there.")
    if getattr(estimator.cfg, "max_length", 0) == "auto":
        lines.append(f"Texts of {ASSUMED_LENGTH:,} tokens are assumed, because --max_length auto depends on the data.")
    if not found[0].has_activations:
        lines.append("Activations are not included, because the forward pass of this model could not be traced.")
    return "\n".join([*lines, *advice])
