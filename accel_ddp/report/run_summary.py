"""Computes the numbers at the top of a report: duration, steps, rates, goodput, the best metric and the time of each part."""

import math
from typing import Any

import numpy as np

from accel_ddp.report.log_reader import LogContent
from accel_ddp.report.run_data import RankTimes, Run, number_of

_RATES = ("samples_per_second", "tokens_per_second", "tflops", "mfu")


def summarize(run: Run, best: dict[str, Any], content: LogContent) -> dict[str, Any]:
    """Return the summary of a run. Values that are not known are None.

    The times between attempts are part of `wall_seconds`, and not of `active_seconds`. The rates are averages over time.
    `seconds_per_step` has the average of each part over all ranks and logged steps, and `seconds_per_rank` that of each rank.
    """
    start, updates = run.start, run.updates
    times = [one["time"] for one in (*run.starts, *run.evaluations, *run.checkpoints, *([run.end] if run.end else []))]
    times += [float(value) for value in updates["time"][[0, -1]]] if len(updates["time"]) else []
    times = [value for value in times if math.isfinite(value)]
    steps = [int(updates["step"][-1])] if len(updates["step"]) else []
    steps += [one["step"] for one in (*run.evaluations[-1:], *([run.end] if run.end else []))]
    last_step = max(steps, default=start.get("step", 0))
    batch = start.get("batch")
    size = _positive(batch.get("global") if isinstance(batch, dict) else None) or _positive(run.options.get("global_batch_size"))
    tokens = _mean(updates.get("tokens"))
    ranks = [one for one in start.get("ranks") or [] if isinstance(one, dict)] if isinstance(start.get("ranks"), list) else []
    per_rank = _seconds_per_rank(run.ranks, run.first_steps)
    return {
        "state": run.state,
        "began": min(times, default=None),
        "ended": max(times, default=None),
        "wall_seconds": max(times) - min(times) if times else None,
        "active_seconds": sum(end - begin for begin, end in content.spans if math.isfinite(end - begin)) or None,
        "attempts": len(run.starts),
        "repeated_steps": content.num_repeated,
        "steps": last_step,
        "total_steps": _whole_or_none(start.get("total_steps")),
        "samples": int(last_step * size) if size else None,
        "tokens": int(last_step * tokens) if tokens else None,
        "ranks": len(ranks) or run.ranks.num_ranks or None,
        "nodes": len({str(one.get("node")) for one in ranks}) or None,
        **{name: _harmonic_mean(updates.get(name)) for name in _RATES},
        "goodput": _goodput(run, content),
        "best": _best(run, best),
        "last_evaluation": run.evaluations[-1] if run.evaluations else None,
        "skipped_steps": _whole_or_none((run.end or {}).get("skipped_steps")),
        "seconds_per_step": {part: _mean(values) for part, values in per_rank.items()},
        "seconds_per_rank": {part: values.tolist() for part, values in per_rank.items()},
    }


def usual_lines(ranks: RankTimes, first_steps: list[int]) -> np.ndarray:
    """Return which lines are not the first one of an attempt, whose first step starts data workers and chooses kernels.

    All lines are usual if there are no others.
    """
    is_usual = ~np.isin(ranks.first_steps, first_steps)
    return is_usual if is_usual.any() else np.ones(len(is_usual), bool)


def _seconds_per_rank(ranks: RankTimes, first_steps: list[int]) -> dict[str, np.ndarray]:
    """Return the average seconds per step of each part and rank, of usual lines. A line counts as often as it has steps."""
    weights = np.maximum(1, ranks.steps - ranks.first_steps + 1).astype(float)[:, None]
    weights *= usual_lines(ranks, first_steps)[:, None]
    found = {}
    for part, values in ranks.seconds.items():
        known = np.isfinite(values)
        total = (known * weights).sum(axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            found[part] = np.where(known, values * weights, 0.0).sum(axis=0) / total
    return found


def _goodput(run: Run, content: LogContent) -> float | None:
    """Return the goodput that the run has measured, at its end or at its last restart."""
    measured = [event.get("goodput") for event in (*content.events, run.end or {}) if event.get("event") in ("restart", "end")]
    values = [value for one in measured if math.isfinite(value := number_of(one))]
    return values[-1] if values else None


def _best(run: Run, best: dict[str, Any]) -> dict[str, Any] | None:
    """Return metric, step and value of the best evaluation: that of `--best_metric`, or the lowest loss."""
    if {"metric", "step", "value"} <= best.keys():
        return {"metric": str(best["metric"]), "step": best["step"], "value": number_of(best["value"])}
    losses = [(one["loss"], one["step"]) for one in run.evaluations if math.isfinite(one.get("loss", math.nan))]
    return {"metric": "loss", "step": min(losses)[1], "value": min(losses)[0]} if losses else None


def _mean(values: np.ndarray | None) -> float | None:
    known = values[np.isfinite(values)] if values is not None else np.empty(0)
    return float(known.mean()) if len(known) else None


def _harmonic_mean(values: np.ndarray | None) -> float | None:
    """Return the average over time of a rate: each line stands for equally many steps."""
    known = values[np.isfinite(values) & (values > 0)] if values is not None else np.empty(0)
    return float(len(known) / (1 / known).sum()) if len(known) else None


def _positive(value: Any) -> float | None:
    number = number_of(value)
    return number if math.isfinite(number) and number > 0 else None


def _whole_or_none(value: Any) -> int | None:
    number = number_of(value)
    return int(number) if math.isfinite(number) else None
