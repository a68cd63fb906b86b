"""Reduces a run to the numbers that its charts draw. A page has the same size for a thousand and for a million steps.

Curves keep their extremes (`downsample`). What has a value for each rank is averaged over intervals of steps, because the largest
of many noisy values would make every rank look slow.
"""

import itertools
import math
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from accel_ddp.report.run_data import ReportedRun, dict_of, list_of


def downsample(x: np.ndarray, *columns: np.ndarray, most: int) -> np.ndarray:
    """Return the indices, in order, of at most `most` points that look like all points.

    The first and the last point are kept. The points are divided into bins of equal size. The smallest and the largest value of each
    column are kept in each bin, so spikes stay visible, and one value that is not finite, so a curve has a gap there. A point whose
    `x` is not finite is left out.
    """
    usable = np.flatnonzero(np.isfinite(x))
    if len(usable) <= most or most < 1:
        return usable[: max(most, 0)]
    ends = usable[[0, -1]][:most]
    values = [np.asarray(column, float)[usable] for column in columns]
    has_gaps = not all(np.isfinite(column).all() for column in values)
    bins = (most - 2) // (max(1, len(values)) * (3 if has_gaps else 2))
    if bins < 1 or not values:
        return np.unique(usable[np.linspace(0, len(usable) - 1, most).astype(int)]) if most > 1 else ends
    size = -(-len(usable) // bins)
    starts = np.arange(0, len(usable), size)
    kept = [ends]
    for column in values:
        padded = np.full(len(starts) * size, np.nan)
        padded[: len(column)] = column
        table = padded.reshape(-1, size)
        is_finite = np.isfinite(table)
        some = is_finite.any(axis=1)
        for filled in (np.where(is_finite, table, np.inf).argmin(axis=1), np.where(is_finite, table, -np.inf).argmax(axis=1)):
            kept.append(usable[(starts + filled)[some]])
        if has_gaps:
            is_finite.reshape(-1)[len(column) :] = True  # the padding is no gap
            gaps = ~is_finite.all(axis=1)
            kept.append(usable[(starts + is_finite.argmin(axis=1))[gaps]])
    indices: np.ndarray = np.unique(np.concatenate(kept))
    return indices


POINTS = 2000  # of a curve
MEANS = 500  # of a curve, for smoothing: the points keep extremes, so their moving average would be biased
INTERVALS = 240  # columns of the heat map and of the charts of ranks
RANKS = 64  # that have a chart of their own
ROWS = 128  # of the heat map
NODES = 8  # that have a line of their own
MARKS = 200  # of incidents
SAVES = 50  # of checkpoints
METRICS = 24  # of evaluations that have a chart
PARTS = ("forward", "backward", "optimizer", "data", "other", "communication")  # from the bottom of a stack to its top
NOT_CURVES = ("step", "time", "items", "tokens", "repeated")


def chart_data(run: ReportedRun, num_runs: int = 1) -> dict[str, Any]:
    """Return the numbers of the charts of one run, as they are stored in the page."""
    first = first_time(run)
    share = max(1, num_runs // 4)  # up to 4 runs have all points, more runs divide them
    curves = {name: _curve(run, name, first, POINTS // share, MEANS // share) for name in curve_names(run)}
    for name in metric_names(run)[:METRICS]:
        curves[f"eval:{name}"] = _evaluation_curve(run, name, first, POINTS // share)
    columns = max(40, INTERVALS // max(1, num_runs // 2))
    return {
        "name": run.name,
        "batch": global_batch(run),
        "curves": curves,
        "marks": marks(run, first),
        "ranks": rank_data(run, first, columns, max(4, RANKS // num_runs)),
        "system": system_data(run, first, columns),
    }


def first_time(run: ReportedRun) -> float:
    times = [event["time"] for event in run.starts if "time" in event] + [float(t) for t in run.updates.get("time", [])[:1]]
    return min(times, default=0.0)


def global_batch(run: ReportedRun) -> int:
    """Return the samples of a step, or 0 if the log does not state them."""
    value = dict_of(run.start.get("batch")).get("global")
    return value if isinstance(value, int) else 0


def curve_names(run: ReportedRun) -> list[str]:
    """Return the columns of the updates that have a finite value and are worth a curve."""
    known = ["loss", "lr", "grad_norm", "samples_per_second", "tokens_per_second", "mfu", "tflops"]
    names = [name for name in known if name in run.updates] + [name for name in run.updates if name not in (*known, *NOT_CURVES)]
    return [name for name in names if np.issubdtype(run.updates[name].dtype, np.number) and np.isfinite(run.updates[name]).any()]


def metric_names(run: ReportedRun) -> list[str]:
    """Return the names of the metrics of the evaluations, in the order in which they appear."""
    found = dict.fromkeys(name for one in run.evaluations for name, value in one.items() if is_number(value))
    return [name for name in found if name not in ("step", "time")]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _curve(run: ReportedRun, name: str, first: float, points: int, means: int) -> dict[str, Any]:
    steps, times, values = run.updates["step"], run.updates["time"] - first, run.updates[name]
    kept = downsample(steps, values, most=points)
    curve = {"step": whole(steps[kept]), "time": rounded(times[kept]), "y": rounded(values[kept])}
    if len(values) > len(kept):
        edges = np.linspace(0, len(values), means + 1).astype(int)
        middle = edges[:-1] + np.diff(edges) // 2
        curve["mean"] = {"step": whole(steps[middle]), "time": rounded(times[middle]), "y": rounded(_means(values, edges))}
    return curve


def _evaluation_curve(run: ReportedRun, name: str, first: float, points: int) -> dict[str, Any]:
    known = [one for one in run.evaluations if is_number(one.get(name))]
    steps = np.array([one["step"] for one in known])
    values = np.array([one[name] for one in known], float)
    times = np.array([one.get("time", math.nan) for one in known], float) - first
    kept = downsample(steps, values, most=points)
    return {"step": whole(steps[kept]), "time": rounded(times[kept]), "y": rounded(values[kept])}


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
    steps, times = run.updates.get("step", np.array([])), run.updates.get("time", np.array([]))
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
    order = np.argsort(-np.nan_to_num(_mean(slow, 0), nan=-1), kind="stable")
    chosen = sorted(order[:num_ranks].tolist())
    views = [{"name": "mean of all ranks", "parts": _milliseconds({p: _mean(v, 1) for p, v in binned.items()})}]
    views += [
        {"name": rank_name(run, rank), "parts": _milliseconds({p: v[:, rank] for p, v in binned.items()})}
        for rank in (chosen if own.shape[1] > 1 else [])
    ]
    # The summary averages the usual lines too.
    of_ranks = {part: np.array(run.summary["seconds_per_rank"][part], float) for part in binned}
    averages = {part: np.array([_mean(values[group], 0) for group in groups]) for part, values in of_ranks.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks of a group may have no value
        heat = np.array([np.nanmax(slow[:, group], axis=1) for group in groups]) if own.shape[1] > 1 else None
    return {
        **_axis(run, steps, first, edges),
        "per_column": int(np.ceil(len(steps) / (len(edges) - 1))),
        "views": views,
        "rows": labels,
        "average": _milliseconds(averages),
        "slow": None if heat is None else [rounded(100 * row, 3) for row in heat],
    }


def slowness(own: np.ndarray) -> np.ndarray:
    """Return the own time of each rank relative to the median of the ranks, minus 1: 0.3 means 30 % slower.

    Of two ranks the median is the faster one, as in the findings of the log.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
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


# Name of a value in the log: how the ranks of a node are combined, and the factor to the unit of the chart.
SYSTEM = {
    "gpu_memory": (np.nanmax, 2**-30), "gpu_memory_used": (np.nanmax, 2**-30), "gpu_utilisation": (np.nanmean, 100),
    "gpu_temperature": (np.nanmax, 1), "gpu_power": (np.nansum, 1), "cpu": (np.nansum, 1), "memory": (np.nansum, 2**-30),
    "host_memory": (np.nanmax, 100),
}  # fmt: skip


def system_data(run: ReportedRun, first: float, columns: int) -> dict[str, Any]:
    """Return the load of each node over time, or its lowest, median and highest value over the nodes if there are many."""
    if not len(run.ranks.steps):
        return {}
    edges, charts = _edges(len(run.ranks.steps), columns), {}
    for name, values in run.ranks.system.items():
        if name not in SYSTEM or not values.size or not np.isfinite(values).any():
            continue
        combine, factor = SYSTEM[name]
        binned = _means(values, edges) * factor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a rank without a value
            nodes = {node: combine(binned[:, ranks], axis=1) for node, ranks in ranks_of_nodes(run, binned.shape[1]).items()}
            for node, ranks in ranks_of_nodes(run, binned.shape[1]).items():
                nodes[node][~np.isfinite(binned[:, ranks]).any(axis=1)] = np.nan  # nansum returns 0 there
            if len(nodes) > NODES:
                table = np.array(list(nodes.values()))
                nodes = {
                    "highest node": np.nanmax(table, 0),
                    "median node": np.nanmedian(table, 0),
                    "lowest node": np.nanmin(table, 0),
                }
        charts[name] = {
            **_axis(run, run.ranks.steps, first, edges),
            "lines": [{"name": node, "y": rounded(line)} for node, line in nodes.items()],
        }
    return charts


def _axis(run: ReportedRun, steps: np.ndarray, first: float, edges: np.ndarray) -> dict[str, list[float]]:
    """Return the last step and its time of each interval."""
    steps = steps[edges[1:] - 1]
    known, times = run.updates.get("step", np.array([])), run.updates.get("time", np.array([]))
    at = np.interp(steps, known, times) - first if len(known) else steps * math.nan
    return {"step": whole(steps), "time": rounded(at)}


def _edges(count: int, columns: int) -> np.ndarray:
    return np.linspace(0, count, min(count, columns) + 1).astype(int)


def _means(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the means of the intervals between the edges, along the first axis. NaN values do not count."""
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), edges[:-1], axis=0)
    counts = np.add.reduceat(known.astype(float), edges[:-1], axis=0)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mean of no values is NaN
        return np.nanmean(values, axis=axis)


def _milliseconds(parts: dict[str, np.ndarray]) -> dict[str, list[float]]:
    return {part: rounded(values * 1000, 4) for part, values in parts.items()}


def whole(values: Iterable[float]) -> list[int]:
    return [int(value) for value in values]


def rounded(values: np.ndarray, digits: int = 6) -> list[float]:
    """Return numbers with few digits, which is more than a chart shows and half of the size."""
    return [float(f"{value:.{digits}g}") for value in values.tolist()]
