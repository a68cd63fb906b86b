"""Reduces a run to the numbers that its charts draw. A page has the same size for a thousand and for a million steps.

Curves keep their extremes (`downsample`). What has a value for each rank is averaged over intervals of steps, because the largest
of many noisy values would make every rank look slow.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np

from accel_ddp.report.run_data import PARTS, ReportedRun, dict_of, is_number, list_of
from accel_ddp.text import read_table


def downsample(values: np.ndarray, most: int) -> np.ndarray:
    """Return the indices, in order, of at most `most` values that look like all values.

    The first and the last value are kept. The others are divided into bins of equal size. The smallest and the largest value of each
    bin are kept, so spikes stay visible, and one value that is not finite, so a curve has a gap there.
    """
    count, is_finite = len(values), np.isfinite(values)
    bins = (most - 2) // (2 if is_finite.all() else 3)
    if count <= most or bins < 1:
        return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))
    kept, size = {0, count - 1}, -(-count // bins)
    for begin in range(0, count, size):
        places = np.arange(begin, min(begin + size, count))
        finite = places[is_finite[places]]
        if len(finite):
            kept |= {finite[values[finite].argmin()], finite[values[finite].argmax()]}
        kept.update(places[~is_finite[places]][:1])
    return np.array(sorted(kept))


CHARTS = read_table(Path(__file__).with_name("charts.yaml"))
POINTS = 2000  # of a curve
MEANS = 500  # of a curve, for smoothing: the points keep extremes, so their moving average would be biased
INTERVALS = 240  # columns of the heat map and of the charts of ranks
RANKS = 64  # that have a chart of their own
ROWS = 128  # of the heat map
NODES = 8  # that have a line of their own
MARKS = 200  # of incidents
SAVES = 50  # of checkpoints
METRICS = 24  # of evaluations that have a chart
NOT_CURVES = ("step", "time", "items", "tokens", "repeated")


def chart_data(run: ReportedRun, num_runs: int = 1) -> dict[str, Any]:
    first = run.summary.get("began") or 0.0
    batch = dict_of(run.start.get("batch")).get("global")
    share = max(1, num_runs // 4)  # up to 4 runs have all points, more runs divide them
    order = ["loss", "lr", "grad_norm", "samples_per_second", "tokens_per_second", "mfu", "tflops", *run.updates]
    names = [name for name in dict.fromkeys(order) if name not in NOT_CURVES and np.isfinite(run.updates.get(name, np.nan)).any()]
    names += [f"eval:{name}" for name in metric_names(run)[:METRICS]]
    curves = {name: _curve(*series(run, name), first, POINTS // share, MEANS // share) for name in names}
    columns = max(40, INTERVALS // max(1, num_runs // 2))
    return {
        "name": run.name,
        "batch": batch if isinstance(batch, int) else 0,
        "curves": curves,
        "marks": marks(run, first),
        "ranks": rank_data(run, first, columns, max(4, RANKS // num_runs)),
        "system": system_data(run, first, columns),
    }


def metric_names(run: ReportedRun) -> list[str]:
    found = dict.fromkeys(name for one in run.evaluations for name, value in one.items() if is_number(value))
    return [name for name in found if name not in ("step", "time")]


def series(run: ReportedRun, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps, the times and the values of a column of the updates, or of the metric after "eval:"."""
    if not name.startswith("eval:"):
        steps = run.updates["step"]
        return steps, run.updates["time"], run.updates.get(name, np.full(len(steps), np.nan))
    known = [one for one in run.evaluations if is_number(one.get(name[5:]))]
    steps, times, values = (np.array([one.get(key, math.nan) for one in known]) for key in ("step", "time", name[5:]))
    return steps, times, values


def _curve(steps: np.ndarray, times: np.ndarray, values: np.ndarray, first: float, points: int, means: int) -> dict[str, Any]:
    kept = downsample(values, points)
    curve = {"step": steps[kept].tolist(), "time": rounded(times[kept] - first), "y": rounded(values[kept])}
    if len(values) > len(kept):
        edges = np.linspace(0, len(values), means + 1).astype(int)
        middle = edges[:-1] + np.diff(edges) // 2
        averages = rounded(_means(values, edges))
        curve["mean"] = {"step": steps[middle].tolist(), "time": rounded(times[middle] - first), "y": averages}
    return curve


def marks(run: ReportedRun, first: float) -> list[dict[str, Any]]:
    """Return the incidents and the checkpoints as marks in the curves, the most severe first if there are too many."""
    severity = {"error": 0, "warning": 1}
    found = sorted(run.incidents, key=lambda one: severity.get(str(one.get("level")), 2))[:MARKS]
    saved = run.checkpoints[:: math.ceil(len(run.checkpoints) / SAVES) or 1]
    events = [(str(one.get("level", "info")), str(one.get("text", ""))[:300], one) for one in found]
    events += [("save", "checkpoint saved", one) for one in saved]
    placed = [(level, text, _place(run, one, first)) for level, text, one in events]
    return [{"level": level, "text": text, **place} for level, text, place in placed if place]


def _place(run: ReportedRun, event: dict[str, Any], first: float) -> dict[str, float] | None:
    """Return the step and the time of an event. Either is estimated from the other if it is missing."""
    steps, times = run.updates["step"], run.updates["time"]
    step, moment = event.get("step"), event.get("time")
    if not is_number(step) and is_number(moment) and len(times):
        step = int(np.interp(moment, times, steps))
    if not is_number(moment) and is_number(step) and len(steps):
        moment = float(np.interp(step, steps, times))
    if not is_number(step):
        return None
    return {"step": step, "time": round(moment - first, 2) if is_number(moment) else None}


def rank_data(run: ReportedRun, first: float, columns: int, num_ranks: int) -> dict[str, Any] | None:
    """Return where the ranks spend their time: on average, over time for the mean and for single ranks, and relative to the median."""
    usual = run.ranks.usual_lines(run.first_steps)
    steps = run.ranks.steps[usual]
    seconds = {part: values[usual] for part in PARTS if (values := run.ranks.seconds.get(part, np.empty(0))).size}
    if not seconds or not len(steps):
        return None
    edges = _edges(len(steps), columns)
    binned = {part: _means(values, edges) for part, values in seconds.items()}
    own = sum(values for part, values in binned.items() if part != "communication")
    slow = slowness(own)
    labels, groups = row_groups(run, own.shape[1])
    order = np.argsort(-np.nan_to_num(np.nanmean(slow, 0), nan=-1), kind="stable")
    chosen = sorted(order[:num_ranks].tolist())
    views = [{"name": "mean of all ranks", "parts": _milliseconds({p: np.nanmean(v, 1) for p, v in binned.items()})}]
    views += [
        {"name": rank_name(run, rank), "parts": _milliseconds({p: v[:, rank] for p, v in binned.items()})}
        for rank in (chosen if own.shape[1] > 1 else [])
    ]
    # The summary averages the usual lines too.
    of_ranks = {part: np.array(run.summary["seconds_per_rank"][part], float) for part in binned}
    averages = {part: np.array([np.nanmean(values[group]) for group in groups]) for part, values in of_ranks.items()}
    heat = [rounded(100 * np.nanmax(slow[:, group], axis=1), 3) for group in groups] if own.shape[1] > 1 else None
    return {
        **_axis(run, steps, first, edges),
        "per_column": int(np.ceil(len(steps) / (len(edges) - 1))),
        "views": views,
        "rows": labels,
        "average": _milliseconds(averages),
        "slow": heat,
    }


def slowness(own: np.ndarray) -> np.ndarray:
    """Return the own time of each rank relative to the median of the ranks, minus 1: 0.3 means 30 % slower.

    Of two ranks the median is the faster one, as in the findings of the log.
    """
    return own / np.nanquantile(own, 0.5, axis=1, keepdims=True, method="lower") - 1


def row_groups(run: ReportedRun, num_ranks: int) -> tuple[list[str], list[list[int]]]:
    """Return the rows of charts that list ranks: the ranks, or the nodes if there are many ranks, or groups of ranks."""
    if num_ranks <= ROWS:
        return [rank_name(run, rank) for rank in range(num_ranks)], [[rank] for rank in range(num_ranks)]
    nodes = ranks_of_nodes(run, num_ranks)
    if 1 < len(nodes) <= ROWS:
        return list(nodes), list(nodes.values())
    edges = np.linspace(0, num_ranks, ROWS + 1).astype(int)
    groups = [list(range(a, b)) for a, b in itertools.pairwise(edges)]
    return [f"ranks {group[0]} to {group[-1]}" for group in groups], groups


def places(run: ReportedRun, of_all_attempts: bool = False) -> dict[int, dict[str, Any]]:
    """Return where each rank of the last attempt runs. An earlier attempt may have had more ranks."""
    starts = run.starts if of_all_attempts else run.starts[-1:]
    known = [one for start in starts for one in list_of(start.get("ranks"))]
    return {one["rank"]: one for one in known if isinstance(one, dict) and isinstance(one.get("rank"), int)}


def node_name(place: dict[str, Any]) -> str:
    return str(place.get("host") or f"node {place.get('node', 0)}")


def rank_name(run: ReportedRun, rank: int) -> str:
    place = places(run, of_all_attempts=True).get(rank)
    return f"rank {rank}" + (f" ({node_name(place)})" if place else "")


def ranks_of_nodes(run: ReportedRun, num_ranks: int) -> dict[str, list[int]]:
    """Return the ranks of each node by the name of its host. Two nodes with one host name stay apart."""
    known, nodes = places(run, of_all_attempts=True), {}
    for rank in range(num_ranks):
        place = known.get(rank, {})
        nodes.setdefault((place.get("node", 0), node_name(place)), []).append(rank)
    hosts = [host for _, host in nodes]
    return {host if hosts.count(host) == 1 else f"{host} (node {node})": ranks for (node, host), ranks in nodes.items()}


def system_data(run: ReportedRun, first: float, columns: int) -> dict[str, Any]:
    """Return the load of each node over time, or its lowest, median and highest value over the nodes if there are many."""
    if not len(run.ranks.steps):
        return {}
    edges, charts = _edges(len(run.ranks.steps), columns), {}
    for name, values in run.ranks.system.items():
        if name not in CHARTS["system"] or not values.size or not np.isfinite(values).any():
            continue
        _, unit, _, how = CHARTS["system"][name]
        combine, factor = getattr(np, f"nan{how}"), {"GiB": 2**-30, "%": 100}.get(unit, 1)
        binned = _means(values, edges) * factor
        of_nodes = {node: binned[:, ranks] for node, ranks in ranks_of_nodes(run, binned.shape[1]).items()}
        has_value = lambda part: np.isfinite(part).any(axis=1)  # nansum returns 0 where there is none
        nodes = {node: np.where(has_value(part), combine(part, axis=1), np.nan) for node, part in of_nodes.items()}
        if len(nodes) > NODES:
            table, words = np.array(list(nodes.values())), {"highest": np.nanmax, "median": np.nanmedian, "lowest": np.nanmin}
            nodes = {f"{word} node": reduce(table, axis=0) for word, reduce in words.items()}
        charts[name] = {
            **_axis(run, run.ranks.steps, first, edges),
            "lines": [{"name": node, "y": rounded(line)} for node, line in nodes.items()],
        }
    return charts


def _axis(run: ReportedRun, steps: np.ndarray, first: float, edges: np.ndarray) -> dict[str, list[float]]:
    steps = steps[edges[1:] - 1]
    known = run.updates["step"]
    at = np.interp(steps, known, run.updates["time"]) - first if len(known) else steps * math.nan
    return {"step": steps.tolist(), "time": rounded(at)}


def _edges(count: int, columns: int) -> np.ndarray:
    return np.linspace(0, count, min(count, columns) + 1).astype(int)


def _means(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the means of the intervals between the edges, along the first axis. NaN values do not count."""
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), edges[:-1], axis=0)
    counts = np.add.reduceat(known.astype(float), edges[:-1], axis=0)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _milliseconds(parts: dict[str, np.ndarray]) -> dict[str, list[float]]:
    return {part: rounded(values * 1000, 4) for part, values in parts.items()}


def rounded(values: np.ndarray, digits: int = 6) -> list[float]:
    """Return numbers with few digits, which is more than a chart shows and half of the size."""
    return [float(f"{value:.{digits}g}") for value in values.tolist()]
