"""Reads from the log of a run how long its steps take, and on what each rank spends the time."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PARTS = ("data", "forward", "backward", "optimizer", "other", "communication")


@dataclass(frozen=True)
class Measurement:
    """The steps of one run after the warm-up. Seconds are those of one step."""

    seconds: float  # median
    spread: float  # interquartile range divided by the median
    parts: dict[
        str, list[float]
    ]  # part -> seconds of each rank; their sum over the parts is `seconds`, on average over the ranks
    exposed: float  # in which communication is not hidden: that of the rank that is ready last, which waits for no other rank
    steps: list[dict[str, Any]] = field(repr=False)  # the lines of the log that were used, to combine repeated runs
    tokens: float = 0.0  # per step; 0 if items are not texts
    ranks: list[dict[str, Any]] = field(default_factory=list)  # host and device of each rank
    micro: int = 1
    accumulation: int = 1
    gradient_bytes: int = 0  # 0: not known
    total_steps: int = 0

    def mean(self, *parts: str) -> float:
        """Return the seconds of these parts, on average over the ranks."""
        return sum(statistics.fmean(self.parts[part]) for part in parts)

    @property
    def waiting(self) -> float:
        """Seconds in which ranks wait for slower ones, on average."""
        return self.mean("communication") - self.exposed

    @property
    def straggling(self) -> float:
        """The part of `waiting` that is for a rank that is always slower, and so grows with the items of a step."""
        own = self.own()
        return min(self.waiting, max(own) - statistics.fmean(own))

    def own(self) -> list[float]:
        """Return the seconds that each rank needs itself, without communication and waiting."""
        return [sum(self.parts[part][rank] for part in PARTS[:-1]) for rank in range(len(self.parts["data"]))]


def measure(events: Sequence[dict[str, Any]], warmup: int) -> Measurement | None:
    """Return what the log of a run has measured after `warmup` steps. None: there are no such steps."""
    start = next((event for event in events if event["event"] == "start"), {})
    steps = [event for event in events if event["event"] == "ranks" and event["first_step"] > warmup and _is_complete(event)]
    if not steps:
        return None
    # On a GPU one event may stand for several steps.
    tokens = [event["tokens"] for event in events if event["event"] == "update" and event["step"] > warmup and "tokens" in event]
    batch = start.get("batch", {})
    return summarize(
        steps, tokens=statistics.fmean(tokens) if tokens else 0.0, ranks=start.get("ranks", []),
        micro=batch.get("micro", 1), accumulation=batch.get("accumulation", 1), total_steps=start.get("total_steps", 0),
        gradient_bytes=start.get("model", {}).get("gradient_bytes", 0),
    )  # fmt: skip


def combine(first: Measurement, second: Measurement) -> Measurement:
    """Return the measurement of the steps of two runs with the same setting."""
    same = {name: getattr(first, name) for name in ("tokens", "ranks", "micro", "accumulation", "total_steps", "gradient_bytes")}
    return summarize([*first.steps, *second.steps], **same)


def summarize(steps: list[dict[str, Any]], **facts: Any) -> Measurement:
    """Return the median of the steps, and how the steps near the median are divided."""
    num_ranks = len(steps[0]["data"])
    durations = [sum(sum(step[part]) for part in PARTS) / num_ranks for step in steps]
    low, median, high = _quartiles(durations)
    # Parts are averaged over the steps between the quartiles, because medians of parts would not add up to the step.
    near = [step for step, seconds in zip(steps, durations) if low <= seconds <= high]
    parts = {part: [statistics.fmean(step[part][rank] for step in near) for rank in range(num_ranks)] for part in PARTS}
    scale = median * num_ranks / max(sum(map(sum, parts.values())), 1e-12)
    parts = {part: [seconds * scale for seconds in values] for part, values in parts.items()}
    exposed = scale * statistics.fmean(min(step["communication"]) for step in near)
    return Measurement(median, (high - low) / max(median, 1e-12), parts, exposed, steps, **facts)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def _is_complete(event: dict[str, Any]) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for part in PARTS for value in event.get(part, ["?"]))
