"""The doctor's prediction for each setting, from the bandwidth and latency that it measures on the same ranks."""

import json
import re
from dataclasses import dataclass
from typing import Any

from accel_ddp.doctor.scaling import expected_step
from accel_ddp.scaling.analysis import Comparison

# Bytes that a hook sends, per byte of the gradients. What powersgd sends depends on the shapes.
HOOK_SHARES = {"none": 1.0, "bf16": 0.5, "fp16": 0.5}
_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


@dataclass(frozen=True)
class Links:
    """What the doctor has measured with all-reduces on `ranks` ranks of `nodes` nodes."""

    nodes: int
    ranks: int
    bus: float  # bytes per second
    latency: float  # seconds

    @property
    def hop(self) -> float:
        return self.latency / (2 * (self.ranks - 1))


@dataclass(frozen=True)
class Prediction:
    """Efficiencies if nothing overlaps, and if communication is hidden behind the last backward pass of a step."""

    worst: float
    best: float
    communication: float  # seconds of the all-reduce


def links_of_report(text: str, nodes: int, ranks: int) -> Links | None:
    """Return what `accel-ddp doctor --json` has measured. None: it has found an error, or has not measured."""
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)["collective"]
                return Links(nodes, ranks, found["bus_bytes_per_second"], found["latency_seconds"])
            except (ValueError, KeyError):
                continue
    return None


def links_of_text(text: str, nodes: int, ranks: int) -> Links | None:
    """Return what the doctor has printed, as `accel-ddp launch` with `doctor: full` shows it. None: it has not measured."""
    buses = re.findall(r"bandwidth: \d+ MB in .*bus ([\d.e+]+) ([TGMkmu]?)B/s", text)
    latencies = re.findall(r"latency: all-reduce of 8 bytes in ([\d.e+]+) ([TGMkmu]?)s", text)
    if not buses or not latencies:
        return None
    value = lambda found: float(found[0]) * _UNITS[found[1]]
    return Links(nodes, ranks, value(buses[-1]), value(latencies[-1]))


def predict(comparison: Comparison, links: Links | None, hook: str) -> Prediction | None:
    """Return the prediction for a setting from the base and the links. None: nothing is sent, or something is not known."""
    base, setting = comparison.base.known, comparison.result.setting
    gradients = base.gradient_bytes
    if links is None or setting.ranks == 1 or not gradients or hook not in HOOK_SHARES:
        return None
    ideal = comparison.share * base.seconds
    # The backward pass of the last micro-batch can hide communication. The doctor takes two thirds of the computing for it.
    compute = base.mean("forward", "backward") / base.accumulation
    compute *= min(1.0, comparison.share * base.accumulation)  # fewer items than a micro-batch of the base
    step = expected_step(setting.place.nodes, setting.ranks, gradients * HOOK_SHARES[hook], compute, links.bus, links.hop)
    exposed = compute / step["best"] - compute
    sent_in_base = base.mean("communication") if comparison.base.setting.ranks > 1 else 0.0
    alone = ideal - comparison.share * sent_in_base
    return Prediction(ideal / (alone + step["communication_seconds"]), ideal / (alone + exposed), step["communication_seconds"])
