"""Reads from the log of a run how long its steps take, and on what each rank spends the time."""

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_ddp.measure.scaling_plan import Setting

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


# Compares the measured settings with the ideal: speed-up, efficiency, and what the lost time was spent on.


@dataclass(frozen=True)
class Result:
    """One setting and what was measured, or why nothing was measured."""

    setting: Setting
    measured: Measurement | None
    problem: str = ""
    runs: int = 1

    @property
    def known(self) -> Measurement:
        """The measurement, where there is one."""
        assert self.measured
        return self.measured

    @property
    def samples_per_second(self) -> float:
        return self.setting.batch / self.known.seconds


@dataclass(frozen=True)
class Comparison:
    """A measured setting beside the base, the measured setting of the same table with the fewest ranks."""

    base: Result
    result: Result

    @property
    def share(self) -> float:
        """The work of a rank as a fraction of that in the base: base ranks / ranks in strong scaling, 1 in weak scaling."""
        return self.result.setting.per_rank / self.base.setting.per_rank

    @property
    def speedup(self) -> float:
        return self.result.samples_per_second / self.base.samples_per_second

    @property
    def ideal_speedup(self) -> float:
        return self.result.setting.ranks / self.base.setting.ranks

    @property
    def efficiency(self) -> float:
        return self.speedup / self.ideal_speedup

    def losses(self) -> dict[str, float]:
        """Return the seconds of a step beyond the ideal, by cause. Their sum is the step minus the ideal step."""
        now, base, share = self.result.known, self.base.known, self.share
        beyond = lambda *parts: now.mean(*parts) - share * base.mean(*parts)
        return {
            "communication": now.exposed - share * base.exposed,
            "waiting": now.waiting - share * base.waiting,
            "data": beyond("data"),
            "compute": beyond("forward", "backward"),
            "optimizer": beyond("optimizer"),
            "other": beyond("other"),
        }


def compare(results: Sequence[Result], mode: str) -> list[Comparison]:
    """Return the measured settings of one table, from the fewest to the most ranks."""
    found = [result for result in results if mode in result.setting.modes and result.measured]
    found.sort(key=lambda result: result.setting.ranks)
    return [Comparison(found[0], result) for result in found]


def slowest_rank(measured: Measurement) -> tuple[int, float]:
    """Return the rank that needs the most time itself, and by which fraction it is slower than the median rank."""
    own = measured.own()
    rank = max(range(len(own)), key=own.__getitem__)
    median = sorted(own)[(len(own) - 1) // 2]
    return rank, own[rank] / max(median, 1e-12) - 1


# The doctor's prediction for each setting, from the bandwidth and latency that it measures on the same ranks.
# Bytes that a hook sends, per byte of the gradients. What powersgd sends depends on the shapes.
BUCKET_BYTES = 25e6  # of DDP
HOOK_SHARES = {"none": 1.0, "bf16": 0.5, "fp16": 0.5}
_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


@dataclass(frozen=True)
class MeasuredLinks:
    """What the doctor has measured with all-reduces on `ranks` ranks of `nodes` nodes."""

    nodes: int
    ranks: int
    bus: float  # bytes per second
    latency: float  # seconds

    def all_reduce_seconds(self, ranks: int, size: float) -> float:
        """Return the expected time of a ring all-reduce of `size` bytes on `ranks` ranks, in the buckets of DDP."""
        hop = self.latency / (2 * (self.ranks - 1))
        return 2 * (ranks - 1) / ranks * size / self.bus + 2 * (ranks - 1) * hop * math.ceil(size / BUCKET_BYTES)


@dataclass(frozen=True)
class Prediction:
    """Efficiencies if nothing overlaps, and if communication is hidden behind the last backward pass of a step."""

    worst: float
    best: float
    communication: float  # seconds of the all-reduce


def links_of_report(text: str, nodes: int, ranks: int) -> MeasuredLinks | None:
    """Return what `accel-ddp doctor --json` has measured. None: it has found an error, or has not measured."""
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)["collective"]
                return MeasuredLinks(nodes, ranks, found["bus_bytes_per_second"], found["latency_seconds"])
            except (ValueError, KeyError):
                continue
    return None


def links_of_text(text: str, nodes: int, ranks: int) -> MeasuredLinks | None:
    """Return what the doctor has printed, as `accel-ddp launch` with `doctor: full` shows it. None: it has not measured."""
    buses = re.findall(r"bandwidth: \d+ MB in .*bus ([\d.e+]+) ([TGMkmu]?)B/s", text)
    latencies = re.findall(r"latency: all-reduce of 8 bytes in ([\d.e+]+) ([TGMkmu]?)s", text)
    if not buses or not latencies:
        return None
    value = lambda found: float(found[0]) * _UNITS[found[1]]
    return MeasuredLinks(nodes, ranks, value(buses[-1]), value(latencies[-1]))


def predict(comparison: Comparison, links: MeasuredLinks | None, hook: str) -> Prediction | None:
    """Return the prediction for a setting from the base and the links. None: nothing is sent, or something is not known."""
    base, setting = comparison.base.known, comparison.result.setting
    gradients = base.gradient_bytes
    if links is None or setting.ranks == 1 or not gradients or hook not in HOOK_SHARES:
        return None
    ideal = comparison.share * base.seconds
    # The backward pass of the last micro-batch, about two thirds of its computing, can hide communication.
    compute = base.mean("forward", "backward") / base.accumulation
    compute *= min(1.0, comparison.share * base.accumulation)  # fewer items than a micro-batch of the base
    communication = links.all_reduce_seconds(setting.ranks, gradients * HOOK_SHARES[hook])
    exposed = max(0.0, communication - compute * 2 / 3)
    sent_in_base = base.mean("communication") if comparison.base.setting.ranks > 1 else 0.0
    alone = ideal - comparison.share * sent_in_base
    return Prediction(ideal / (alone + communication), ideal / (alone + exposed), communication)
