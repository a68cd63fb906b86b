"""What the logs of the runs say: how long steps take and on what, speed-up and efficiency, and what limits them.

`measure` reads a log, `compare` puts the settings of a table beside its first row, and `find_limits` explains the losses.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_ddp.measure.scaling_plan import Setting
from accel_ddp.text import format_seconds, format_si, read_table

PARTS = ("data", "forward", "backward", "optimizer", "other", "communication")
NOTABLE = 0.03  # losses below this share of a step are not reported
SMALL_BYTES = 1e6
STRAGGLER = 0.1  # a rank that is slower than the median rank by this fraction
_LOSSES: dict[str, str] = read_table(Path(__file__).with_name("losses.yaml"))


@dataclass(frozen=True)
class Measurement:
    """The steps of one run after the warm-up. Seconds are the seconds of one step."""

    seconds: float  # median
    spread: float  # interquartile range divided by the median
    # Part -> seconds of each rank. Their sum over the parts is `seconds`, on average over the ranks.
    parts: dict[str, list[float]]
    exposed: float  # seconds of communication on the rank that is ready last, which waits for no other rank
    tokens: float = 0.0  # per step; 0 if items are not texts
    ranks: list[dict[str, Any]] = field(default_factory=list)  # host and device of each rank
    micro: int = 1
    accumulation: int = 1
    gradient_bytes: int = 0  # 0: not known

    def mean(self, *parts: str) -> float:
        return sum(statistics.fmean(self.parts[part]) for part in parts)

    @property
    def waiting(self) -> float:
        return self.mean("communication") - self.exposed

    def own(self) -> list[float]:
        return [sum(self.parts[part][rank] for part in PARTS[:-1]) for rank in range(len(self.parts["data"]))]


def measure(events: Sequence[dict[str, Any]], warmup: int) -> Measurement | None:
    """Return what the log of a run, or the logs of repeated runs, measured after `warmup` steps. None: there are no such steps."""
    start = next((event for event in events if event["event"] == "start"), {})
    is_number = lambda value: isinstance(value, int | float) and math.isfinite(value)
    steps = [event for event in events if event["event"] == "ranks" and event["first_step"] > warmup]
    steps = [event for event in steps if all(is_number(value) for part in PARTS for value in event.get(part, ["?"]))]
    if not steps:
        return None
    # On a GPU one event may stand for several steps.
    tokens = [event["tokens"] for event in events if event["event"] == "update" and event["step"] > warmup and "tokens" in event]
    batch = start.get("batch", {})
    return summarize(
        steps, tokens=statistics.fmean(tokens or [0.0]), ranks=start.get("ranks", []), micro=batch.get("micro", 1),
        accumulation=batch.get("accumulation", 1), gradient_bytes=start.get("model", {}).get("gradient_bytes", 0),
    )  # fmt: skip


def summarize(steps: list[dict[str, Any]], **facts: Any) -> Measurement:
    """Return the median of the steps, and how the steps near the median are divided."""
    num_ranks = len(steps[0]["data"])
    durations = [sum(sum(step[part]) for part in PARTS) / num_ranks for step in steps]
    low, median, high = statistics.quantiles(durations if len(steps) > 1 else durations * 2, n=4, method="inclusive")
    # Parts are averaged over the steps between the quartiles, because medians of parts would not add up to the step.
    near = [step for step, seconds in zip(steps, durations) if low <= seconds <= high]
    parts = {part: [statistics.fmean(step[part][rank] for step in near) for rank in range(num_ranks)] for part in PARTS}
    scale = median * num_ranks / max(sum(map(sum, parts.values())), 1e-12)
    parts = {part: [seconds * scale for seconds in values] for part, values in parts.items()}
    exposed = scale * statistics.fmean(min(step["communication"]) for step in near)
    return Measurement(median, (high - low) / max(median, 1e-12), parts, exposed, **facts)


@dataclass(frozen=True)
class Result:
    setting: Setting
    measured: Measurement | None
    problem: str = ""
    runs: int = 1

    @property
    def known(self) -> Measurement:
        assert self.measured
        return self.measured

    @property
    def samples_per_second(self) -> float:
        return self.setting.batch / self.known.seconds


@dataclass(frozen=True)
class Comparison:
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


def find_limits(comparison: Comparison, mode: str, on_gpu: bool) -> list[str]:
    now, base = comparison.result.known, comparison.base.known
    rank, slower = slowest_rank(now)
    each = lambda result: result.known.mean("forward", "backward") / result.setting.per_rank
    facts = {
        "rank": rank, "slower": slower, "now": now.micro, "base": base.micro,
        "host": next((f" ({one['host']})" for one in now.ranks if one.get("rank") == rank and one.get("host")), ""),
        "sent": f" of {format_si(now.gradient_bytes)}B of gradients" if now.gradient_bytes else "",
        "smaller": _LOSSES["fewer_bytes"].format(hook="bf16" if on_gpu else "fp16") if now.gradient_bytes >= SMALL_BYTES else "",
    }  # fmt: skip
    texts = {
        "waiting": "slow_rank" if slower > STRAGGLER else "waiting",
        "compute": "few_items" if now.micro < base.micro else "compute_gpu" if on_gpu else "compute_cpu",
        "optimizer": f"optimizer_{mode}",
    }
    found = []
    for name, seconds in sorted(comparison.losses().items(), key=lambda item: -item[1]):
        if seconds > NOTABLE * now.seconds:
            lost = f"{format_seconds(seconds)} of each step ({seconds / now.seconds:.0%})"
            item = _LOSSES["item"].format(ratio=each(comparison.result) / max(each(comparison.base), 1e-12), lost=lost)
            found.append(_LOSSES[texts.get(name, name)].format(lost=lost, item=item, **facts))
    return found
