"""The numbers that trackers show, grouped as panels: train/, eval/, speed/, system/, restarts/ and checkpoints/."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from accel_ddp.observing.rates import rates_of
from accel_ddp.training.late_reader import Numbers
from accel_ddp.training.rank_sample import SYSTEM, RankSample, Split, splits_between
from accel_ddp.training.throughput import Pace

# Beyond these numbers the curves of a panel cannot be told apart, and every row would have thousands of values.
MOST_RANKS = 16  # with a curve each; beyond, there is the minimum, mean and maximum of each node
MOST_NODES = 16  # beyond, there is the minimum, mean and maximum of all ranks


class Scale(NamedTuple):
    """What turns the numbers of a step into rates: the size of the run."""

    items: int  # of the training data
    global_batch_size: int
    nodes: tuple[int, ...]  # the node of each rank


def row_of_update(numbers: Numbers, pace: Pace, before: Sequence[RankSample], scale: Scale) -> dict[str, float]:
    """Return the row of a logged step. `before` are the samples of the logged step before, or ()."""
    row = {"train/loss": numbers.loss, "train/grad_norm": numbers.grad_norm, "train/lr": numbers.lr}
    if scale.items:
        row["train/epoch"] = numbers.step * scale.global_batch_size / scale.items
    row["speed/samples_per_second"] = pace.samples
    if pace.samples > 0:
        row["speed/step_seconds"] = scale.global_batch_size / pace.samples
    row |= {f"speed/{name}": value for name, value in rates_of(numbers, pace).items()}
    return row | _row_of_times(before, numbers.ranks) | _row_of_system(numbers.ranks, scale.nodes)


def _row_of_times(before: Sequence[RankSample], ranks: Sequence[RankSample]) -> dict[str, float]:
    """Return the parts of a step in seconds, as the mean over ranks, and what the slowest rank costs the others in each step."""
    if not (splits := splits_between(before, ranks)):
        return {}
    row = {f"speed/step_{part}_seconds": statistics.mean(getattr(split, part) for split in splits) for part in Split._fields}
    if len(splits) > 1:
        own = [sum(split) - split.communication for split in splits]
        slowest = max(range(len(own)), key=own.__getitem__)
        row["speed/slowest_rank"] = slowest
        # The median is that of the faster half, so that with two ranks it is the other one.
        row["speed/slowest_rank_costs_seconds"] = own[slowest] - statistics.median_low(own)
    return row


def _row_of_system(ranks: Sequence[RankSample], nodes: Sequence[int]) -> dict[str, float]:
    """Return what each rank or each node uses of its machine. wandb itself measures only the main node."""
    if len(nodes) != len(ranks):
        return {}
    row: dict[str, float] = {}
    for name in SYSTEM:
        values = [getattr(rank, name) for rank in ranks]
        if len(ranks) <= MOST_RANKS:
            row |= {f"system/node{node}.rank{rank}/{name}": value for rank, (node, value) in enumerate(zip(nodes, values))}
            continue
        groups: dict[str, list[float]] = {}
        for node, value in zip(nodes, values):
            if not math.isnan(value):
                groups.setdefault(f"node{node}" if len(set(nodes)) <= MOST_NODES else "all", []).append(value)
        for group, known in groups.items():
            row |= {f"system/{group}/{name}_min": min(known), f"system/{group}/{name}_max": max(known)}
            row[f"system/{group}/{name}_mean"] = statistics.mean(known)
    return {name: value for name, value in row.items() if not math.isnan(value)}


def row_of_restart(restart: dict[str, Any]) -> dict[str, float]:
    """Return the row of an automatic restart."""
    names = {"restart": "count", "lost_steps": "lost_steps", "lost_seconds": "lost_seconds", "goodput": "goodput"}
    return {f"restarts/{name}": restart[key] for key, name in names.items() if isinstance(restart.get(key), int | float)}


def best_of(evaluations: dict[int, dict[str, float]], directions: dict[str, Any]) -> dict[str, float]:
    """Return the best value of each metric whose direction is known, and its step."""
    best: dict[str, float] = {}
    for name, direction in directions.items():
        values = {step: metrics[name] for step, metrics in evaluations.items() if not math.isnan(metrics.get(name, math.nan))}
        if values and direction in ("min", "max"):
            step = (min if direction == "min" else max)(values, key=lambda at: (values[at], at if direction == "min" else -at))
            best |= {f"best/{name}": values[step], f"best/{name}_step": step}
    return best
