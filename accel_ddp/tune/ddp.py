"""Tune DDP options: time a step of the model with different bucket sizes and communication hooks."""

import math
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from accel_ddp.tune import results, search, shapes
from accel_ddp.tune.coordinator import Coordinator
from accel_ddp.tune.options import TuneOptions
from accel_ddp.tune.results import DdpConfig, DdpTiming, Trial
from accel_ddp.tune.shapes import Entries, Gradients
from accel_ddp.tune.trial_runner import TrialRunner

MAX_STARTS = 3  # a config that fails ends its processes, and the remaining configs need new ones
TOKENS_ON_GPU, TOKENS_ON_CPU = 1024, 128


@dataclass
class _Measurements:
    """The configs and what the workers have reported about them."""

    configs: dict[int, DdpConfig]
    tokens: int
    timings: dict[int, DdpTiming] = field(default_factory=dict)
    current: int = -1  # the config that is being timed; -1 before the first one of a start
    compute_ms: float = 0.0  # of a step without communication; 0 before it is measured

    def times(self) -> dict[search.Choice, list[float]]:
        """Return all complete times of each choice. They are for gradient_as_bucket_view, which is the default."""
        found: dict[search.Choice, list[float]] = {}
        for number, timing in self.timings.items():
            config = self.configs[number]
            if not timing.failure and not timing.ended_early and config.gradient_as_bucket_view:
                found.setdefault(config.choice, []).append(timing.milliseconds)
        return found

    def remaining(self) -> list[tuple[int, dict[str, Any]]]:
        return [(number, asdict(config)) for number, config in self.configs.items() if number not in self.timings]


class DdpTuner:
    """Searches the bucket size and the hook with which a step is shortest, under the best settings."""

    def __init__(
        self, coordinator: Coordinator, runner: TrialRunner, options: TuneOptions, gradients: Gradients, is_nccl: bool,
        deadline: float,
    ):  # fmt: skip
        self.coordinator, self.runner, self.options, self.gradients = coordinator, runner, options, gradients
        self.is_nccl, self.deadline = is_nccl, deadline
        tokens = options.tokens or (TOKENS_ON_GPU if is_nccl else TOKENS_ON_CPU)
        self.measurements = _Measurements(dict(enumerate(configs_to_time(gradients.bytes, is_nccl))), tokens)

    async def tune(self, best: Trial) -> tuple[DdpConfig, float] | None:
        """Return the best config and its speed relative to DDP's default, or None if the default could not be timed."""
        measurements = self.measurements
        entries = await self._entries_for_the_time_left(best)
        precision = f" in {self.options.autocast}" if self.options.autocast else ""
        text = f"a DDP step with these gradients{precision}, {measurements.tokens} tokens per rank, settings: {best.label}"
        await self.coordinator.print_on_all(f"{text}\n{results.DDP_HEADING}")
        for _ in range(MAX_STARTS):
            remaining = measurements.remaining()
            seconds_left = self.deadline - time.monotonic() - self.runner.startup_seconds
            if not remaining or (measurements.timings and seconds_left < 5):
                break
            measurements.current = -1
            _, failure = await self.runner.run(best, self._spec(entries, remaining, seconds_left), self._on_report)
            if failure and measurements.current < 0:
                await self.coordinator.print_on_all(f"the model could not be timed: {failure}")
                break
            if failure and measurements.current not in measurements.timings:
                await self._add(measurements.current, DdpTiming(failure=failure))
        if search.DEFAULT not in measurements.times():
            text = "DDP's default bucket size could not be timed, so no DDP options are written"
            await self.coordinator.print_on_all(text)
            return None
        if untimed := len(measurements.remaining()):
            await self.coordinator.print_on_all(f"{untimed} more configs were not timed; a larger --minutes allows more")
        (bucket, hook), speedup = search.confirmed_choice(measurements.times())
        return DdpConfig(bucket_cap_mb=bucket, comm_hook=hook), speedup

    def _spec(self, entries: Entries, remaining: list[tuple[int, dict[str, Any]]], seconds_left: float) -> dict[str, Any]:
        return {
            "measure": "ddp", "backend": self.options.backend, "seconds": self.options.trial_seconds * len(remaining),
            "read_nccl_log": False, "entries": shapes.pack(entries), "dtype": self.gradients.dtype,
            "autocast": self.options.autocast, "tokens": self.measurements.tokens, "configs": remaining,
            "config_seconds": min(2.0, max(0.2, seconds_left / len(remaining) / 3)),
            "times": [[*choice, min(each)] for choice, each in self.measurements.times().items()],
        }  # fmt: skip

    async def _on_report(self, report: dict[str, Any]) -> None:
        measurements, event = self.measurements, report["event"]
        if event == "config":
            measurements.current = number = report["number"]
            chosen = {name: report[name] for name in ("bucket_cap_mb", "comm_hook")}
            measurements.configs[number] = replace(measurements.configs[number], **chosen)
        elif event == "tokens" and report["tokens"] < measurements.tokens:
            measurements.tokens = report["tokens"]
            text = f"(with only {measurements.tokens} tokens, because more take too long here; less communication is overlapped)"
            await self.coordinator.print_on_all(text)
        elif event == "compute_only":
            measurements.compute_ms = report["ms"]
        elif event == "redundant":
            del measurements.configs[report["number"]]
        elif event == "timed":
            await self._add(report["number"], DdpTiming(report["ms"], report["ended_early"]))

    async def _add(self, number: int, timing: DdpTiming) -> None:
        """Store a timing and print its row on every node."""
        measurements = self.measurements
        measurements.timings[number] = timing
        default_ms = min(measurements.times().get(search.DEFAULT, [math.nan]))
        row = results.ddp_row(measurements.configs[number], timing, measurements.compute_ms, default_ms)
        await self.coordinator.print_on_all(row)

    async def _entries_for_the_time_left(self, best: Trial) -> Entries:
        """Return the parameters of the model, or as many of the first ones as can be sent often enough in the time left."""
        entries, largest = self.gradients.entries, max(best.milliseconds)
        step_seconds = self.gradients.bytes * best.milliseconds[largest] / largest / 1000
        limit = max(10.0, self.deadline - time.monotonic()) * 0.7 / (len(self.measurements.configs) * 8)
        if step_seconds <= limit:
            return entries
        kept = shapes.first_entries(entries, int(shapes.count_elements(entries) * limit / step_seconds))
        size = results.format_size(shapes.count_elements(kept) * self.gradients.bytes_per_element)
        await self.coordinator.print_on_all(
            f"a step with all gradients would take {step_seconds:.1f} s, so only the first {size} of them are used; a larger "
            "--minutes allows more"
        )
        return kept


def configs_to_time(gradient_bytes: int, is_nccl: bool) -> list[DdpConfig]:
    """Return the configs in the order in which they are timed, DDP's default first."""
    # gloo cannot reduce bf16. With several buckets PowerSGD hangs over gloo, because callbacks start its collectives in a
    # different order on each rank (seen with torch 2.13).
    hooks = ["bf16", "fp16", "powersgd"] if is_nccl else ["fp16"]
    sizes = search.bucket_sizes(gradient_bytes)
    configs = [DdpConfig(size) for size in sizes]
    # A hook halves the bytes of each bucket but not its fixed cost, so larger buckets may be best with a hook although they are
    # not without one. On one H200 as two nodes a step with the bf16 hook took 106 ms with 25 MB buckets and 70 ms with 100 MB.
    configs += [DdpConfig(size, hooks[0]) for size in sizes if size >= 25]
    configs += [DdpConfig(comm_hook=hook) for hook in hooks[1:]]
    configs.append(DdpConfig(gradient_as_bucket_view=False))
    # The default may have been unlucky, and the best without a hook and the best of all may have been lucky.
    configs += [DdpConfig(25, is_repeat=True), DdpConfig(is_repeat=True), DdpConfig(comm_hook="", is_repeat=True)]
    return configs
