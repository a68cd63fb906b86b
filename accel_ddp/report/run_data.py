"""What a report contains about a run, and its summary: duration, steps, rates, goodput, the best metric, the time of each part."""

import contextlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

PARTS = ("forward", "backward", "optimizer", "data", "other", "communication")  # of a step, from the bottom of a stack to its top


@dataclass
class RankTimes:
    """How each rank spends a step, and how busy its machine is. Row i is the average of the steps first_steps[i] to steps[i].

    W is the largest number of ranks of all attempts. Ranks that did not exist in an attempt are NaN in its rows.
    """

    steps: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # [n]
    first_steps: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # [n]
    seconds: dict[str, np.ndarray] = field(default_factory=dict)  # part -> [n, W], seconds per step
    system: dict[str, np.ndarray] = field(default_factory=dict)  # name -> [n, W], in the units of docs/log.md
    stride: int = 1  # every stride-th line of the log was read

    @property
    def num_ranks(self) -> int:
        return max((values.shape[1] for values in self.seconds.values()), default=0)

    def usual_lines(self, first_steps: list[int]) -> np.ndarray:
        """Return which lines do not contain the first step of an attempt, which starts data workers and chooses kernels."""
        is_usual = ~np.isin(self.first_steps, first_steps)
        return is_usual if is_usual.any() else np.ones(len(is_usual), bool)


State = Literal["complete", "stopped", "running", "interrupted"]


@dataclass
class ReportedRun:
    """One run. Everything in it comes from files that others may have written: text is not escaped."""

    folder: Path
    name: str  # unique among the runs of a report
    starts: list[dict[str, Any]] = field(default_factory=list)  # one per attempt; the last one describes the run
    updates: dict[str, np.ndarray] = field(default_factory=dict)  # columns of full resolution, NaN where a line has no value
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # step, time and metrics
    ranks: RankTimes = field(default_factory=RankTimes)
    tables: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)  # step -> name -> columns, rows, kind, title
    checkpoints: list[dict[str, Any]] = field(default_factory=list)  # step, path, time, exists, is_best, bytes
    incidents: list[dict[str, Any]] = field(default_factory=list)  # time, step, level, kind, text, rank, host
    end: dict[str, Any] | None = None  # None: `state` is running or interrupted
    state: State = "interrupted"  # interrupted: it was killed, or it failed
    options: dict[str, Any] = field(default_factory=dict)  # config.json
    chosen: dict[str, Any] = field(default_factory=dict)  # why options have the values that `auto` chose
    summary: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)  # what could not be read

    @property
    def first_steps(self) -> list[int]:
        return [start.get("step", 0) + 1 for start in self.starts]

    @property
    def start(self) -> dict[str, Any]:
        return self.starts[-1] if self.starts else {}


# ---- values in files that anyone may have written


def number_of(value: Any) -> float:
    """Return a number of the log as a float, also "nan", "inf" and "-inf". Other values are NaN."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return math.nan if isinstance(value, bool) else float(value)
    return math.nan


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def holds_number(value: Any) -> bool:
    """Return whether the log has stored a number, which may be "nan"."""
    return not math.isnan(number_of(value)) or str(value).lower() == "nan"


def whole_of(value: Any, default: int | None = None) -> int | None:
    """Return a whole number that is not negative, such as a step. `default` replaces a value that is none."""
    number = number_of(value)
    return int(number) if 0 <= number < 2**53 and number == int(number) else default


def dict_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# ---- summary

_RATES = ("samples_per_second", "tokens_per_second", "mfu")


def summarize(run: ReportedRun, best: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of a run. Values that are not known are None.

    The times between attempts are part of `wall_seconds`. The rates are averages over time. `seconds_per_step` has the average of each
    part over all ranks and logged steps, and `seconds_per_rank` the average of each rank.
    """
    start, updates = run.start, run.updates
    ends = [run.end] if run.end else []
    logged = [one["time"] for one in (*run.starts, *run.evaluations, *run.checkpoints, *ends)]
    times = [value for value in (*logged, *updates["time"][:1].tolist(), *updates["time"][-1:].tolist()) if math.isfinite(value)]
    steps = [*updates["step"][-1:].tolist(), *(one["step"] for one in (*run.evaluations[-1:], *ends))]
    last_step = max(steps, default=start.get("step", 0))
    size = number_of(dict_of(start.get("batch")).get("global", run.options.get("global_batch_size")))
    ranks = [one for one in list_of(start.get("ranks")) if isinstance(one, dict)]
    per_rank = _seconds_per_rank(run.ranks, run.first_steps)
    measured = [number_of(one.get("goodput")) for one in (*events, *ends) if one["event"] in ("restart", "end")]
    goodputs = [value for value in measured if math.isfinite(value)]
    return {
        "began": min(times, default=None),
        "wall_seconds": max(times) - min(times) if times else None,
        "attempts": len(run.starts),
        "steps": last_step,
        "total_steps": whole_of(start.get("total_steps")),
        "samples": int(last_step * size) if 0 < size < math.inf else None,
        "ranks": len(ranks) or run.ranks.num_ranks or None,
        "nodes": len({str(one.get("node")) for one in ranks}) or None,
        **{name: _harmonic_mean(updates.get(name)) for name in _RATES},
        "goodput": goodputs[-1] if goodputs else None,  # that the run has measured, at its end or at its last restart
        "best": _best(run, best),
        "last_evaluation": run.evaluations[-1] if run.evaluations else None,
        "seconds_per_step": {part: float(known.mean()) for part, x in per_rank.items() if len(known := x[np.isfinite(x)])},
        "seconds_per_rank": {part: values.tolist() for part, values in per_rank.items()},
    }


def _seconds_per_rank(ranks: RankTimes, first_steps: list[int]) -> dict[str, np.ndarray]:
    """Return the average seconds per step of each part and rank, of usual lines. A line counts as often as it has steps."""
    weights = np.maximum(1, ranks.steps - ranks.first_steps + 1) * ranks.usual_lines(first_steps)
    average = lambda values: np.ma.average(np.ma.masked_invalid(values), axis=0, weights=weights)
    return {part: np.ma.filled(average(values.astype(float)), np.nan) for part, values in ranks.seconds.items()}


def _best(run: ReportedRun, best: dict[str, Any]) -> dict[str, Any] | None:
    if {"metric", "step", "value"} <= best.keys():
        return {"metric": str(best["metric"]), "step": best["step"], "value": number_of(best["value"])}
    losses = [(one["loss"], one["step"]) for one in run.evaluations if math.isfinite(one.get("loss", math.nan))]
    return {"metric": "loss", "step": min(losses)[1], "value": min(losses)[0]} if losses else None


def _harmonic_mean(values: np.ndarray | None) -> float | None:
    """Return the average over time of a rate: each line stands for equally many steps."""
    known = values[np.isfinite(values) & (values > 0)] if values is not None else np.empty(0)
    return float(len(known) / (1 / known).sum()) if len(known) else None
