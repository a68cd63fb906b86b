"""The two searches of `accel-ddp tune`: settings under which all-reduce is fastest, and DDP options with the shortest step.

Settings are environment variables of NCCL. DDP options are bucket sizes and communication hooks.
"""

import math
import time
from dataclasses import asdict, replace
from typing import Any

from accel_ddp.measure import tune_results
from accel_ddp.measure.trials import TrialRunner, TuningEnded
from accel_ddp.measure.tune_options import TuneOptions
from accel_ddp.measure.tune_results import DdpConfig, Entries, Gradients, Transport, Trial
from accel_ddp.text import counted, format_bytes

SHARE_WITH_MODEL = 0.6  # of the time for settings, if DDP steps of a model are timed after them


class SettingsTuner:
    """Searches the settings under which all-reduce is fastest. `began` is the start of the tuning."""

    def __init__(self, runner: TrialRunner, options: TuneOptions, gradients: Gradients, began: float):
        self.runner, self.options, self.gradients, self.coordinator = runner, options, gradients, runner.coordinator
        self.show = self.coordinator.print_on_all
        self.minutes = options.minutes * (SHARE_WITH_MODEL if gradients.entries else 1.0)
        self.settings_deadline, self.deadline = began + self.minutes * 60, began + options.minutes * 60
        self.sizes = list(tune_results.SIZES)
        if gradients.entries and gradients.bytes < tune_results.SIZES[1]:  # DDP never sends more than this in one message
            self.sizes = sorted({*tune_results.SIZES[:2], gradients.bytes})

    async def measure_default(self) -> tuple[Trial, Transport]:
        """Measure the default settings and return the trial and the transport. Raises TuningEnded if the trial fails."""
        trial = Trial({})
        await self._measure(trial, read_nccl_log=True)
        transport = None
        if 0 in self.runner.connected:
            reports = list(self.runner.connected.values())
            every = lambda name: sorted({word for report in reports for word in report[name]})
            first = {name: self.runner.connected[0][name] for name in ("backend", "device", "version", "network")}
            # From all ranks, because a rank may communicate only with ranks on its own node.
            transport = Transport(**first, paths=every("paths"), interfaces=every("interfaces"))
            await self.show(f"{transport.version}, {transport.device}")
        await self.show(tune_results.all_reduce_heading(self.sizes))
        await self.show(tune_results.all_reduce_row(trial, self.sizes, trial.score))
        if trial.failure or transport is None:
            text = f"The trial with the default settings failed, so there is nothing to compare with: {trial.failure}."
            raise TuningEnded(1, f"{text} Run `accel-ddp doctor` on every node to find the reason.")
        return trial, transport

    async def tune(self, default: Trial, transport: Transport) -> Trial:
        """Return the trial with the fastest settings, or the default trial if nothing is faster by more than noise."""
        await self._print_transport(transport)
        first = [Trial(settings, note="--try") for settings in self.options.tries]
        if transport.uses_sockets and (settings := self.coordinator.members[0].hello["environment"]):
            first.append(Trial(settings, note="as in node 0's environment"))
        proposals = tune_results.propose_settings(self.coordinator.nodes if transport.uses_sockets else 0, default.score)
        if expected := len(first) + (tune_results.MAX_TRIALS if transport.uses_sockets else 0):
            seconds = self.runner.usual_seconds
            await self.show(
                f"a trial takes about {seconds:.0f} s, so {expected} trials take about {expected * seconds / 60:.1f} minutes; no "
                f"trial starts after {self.minutes:.1f} minutes"
            )
        measured: list[Trial] = []
        score: float | None = None  # of the last proposal
        while True:
            try:
                trial = first.pop(0) if first else Trial(proposals.send(score))
            except StopIteration:
                break
            if time.monotonic() + self.runner.usual_seconds > self.settings_deadline:
                number = counted(self.runner.number, "trial")
                await self.show(f"the time for settings is over after {number}; a larger --minutes allows more")
                break
            await self.measure(trial, default)
            measured += [] if trial.failure else [trial]
            score = None if trial.failure or trial.note else trial.score
        return await self.confirm(default, measured)

    async def _print_transport(self, transport: Transport) -> None:
        """Print how the ranks communicate, and the reason if NCCL's socket settings have no effect on it."""
        if not transport.is_nccl:
            return await self.show("NCCL settings are not tried: gloo is used, because there are no GPUs")
        paths = " and ".join(transport.paths) or "an unknown transport (not in its log)"
        interfaces = f" through {', '.join(transport.interfaces)}" if transport.interfaces else ""
        await self.show(f"transport: NCCL {paths}, network {transport.network}{interfaces}")
        network = f"{transport.network} {' '.join(transport.paths)}"
        if transport.uses_sockets:
            return
        if self.coordinator.nodes == 1 or not any("NET" in path for path in transport.paths):
            reason = "the ranks communicate through NVLink, PCIe or shared memory"
        elif "IB" in network:
            reason = "InfiniBand or RoCE transfers the data, and sockets are used only to open connections"
        elif "OFI" in network or "Libfabric" in network:
            reason = "the libfabric plugin (EFA) transfers the data and has its own tuning"
        else:
            reason = f"the network is {transport.network}"
        await self.show(f"NCCL's socket settings are not tried: {reason}")

    async def confirm(self, default: Trial, measured: list[Trial]) -> Trial:
        """Measure the best trial and the default again, and return the one that is then better.

        The best of many noisy trials is partly luck. The best trial counts with the slower of its two scores, and the default
        with the faster. If other trials are then ahead, they are measured again too.
        """
        candidates, best = sorted(measured, key=lambda trial: trial.score), default
        if not candidates or candidates[0].score >= default.score * tune_results.FASTER:
            return default
        ends = max(self.settings_deadline, self.deadline - 4 * self.runner.usual_seconds)
        if time.monotonic() + 2 * self.runner.usual_seconds >= ends:
            return candidates[0]
        repeated = await self.measure(Trial(default.settings, note="repeated"), default)
        default.score = min(default.score, repeated.score)
        for index, trial in enumerate(candidates):
            no_time = index > 0 and time.monotonic() + self.runner.usual_seconds > ends
            if trial.score >= best.score * tune_results.FASTER or no_time:
                break
            repeated = await self.measure(Trial(trial.settings, note="repeated"), default)
            trial.score = math.inf if repeated.failure else max(trial.score, repeated.score)
            for size, ms in repeated.milliseconds.items():
                trial.milliseconds[size] = max(ms, trial.milliseconds.get(size, ms))
            best = trial if trial.score < best.score * tune_results.FASTER else best
        return best

    async def measure(self, trial: Trial, default: Trial) -> Trial:
        """Measure the trial, print its row on every node, and return it."""
        await self._measure(trial)
        await self.show(tune_results.all_reduce_row(trial, self.sizes, default.score))
        return trial

    async def _measure(self, trial: Trial, read_nccl_log: bool = False) -> None:
        spec: dict[str, Any] = {
            "measure": "all_reduce", "backend": self.options.backend, "seconds": self.options.trial_seconds,
            "nccl_debug": "INFO" if read_nccl_log else "WARN", "sizes": self.sizes,
        }  # fmt: skip
        reports, trial.failure = await self.runner.run(trial, spec)
        trial.number = self.runner.number
        for report in reports:
            if report["event"] == "measured":
                trial.milliseconds[int(report["size"])] = float(report["ms"])
        if not trial.failure and not trial.milliseconds:
            trial.failure = "it measured nothing"
        if not trial.failure:
            trial.score = tune_results.score(trial.milliseconds, self.gradients.bytes)


MAX_STARTS = 3  # a config that fails ends its processes, and the remaining configs need new ones
TOKENS_ON_GPU, TOKENS_ON_CPU = 1024, 128


class DdpTuner:
    """Searches the bucket size and the hook with which a step is shortest, under the best settings."""

    def __init__(self, runner: TrialRunner, options: TuneOptions, gradients: Gradients, is_nccl: bool, deadline: float):
        self.runner, self.options, self.gradients, self.deadline = runner, options, gradients, deadline
        self.show = runner.coordinator.print_on_all
        self.tokens = options.tokens or (TOKENS_ON_GPU if is_nccl else TOKENS_ON_CPU)
        self.configs = dict(enumerate(configs_to_time(gradients.bytes, is_nccl)))
        self.current = -1  # the config that is being timed; -1 before the first one of a start
        self.compute_ms = 0.0  # of a step without communication; 0 before it is measured

    async def tune(self, best: Trial) -> tuple[DdpConfig, float] | None:
        """Return the best config and its speed relative to DDP's default, or None if the default could not be timed."""
        entries = await self._entries_for_the_time_left(best)
        precision = f" in {self.options.autocast}" if self.options.autocast not in ("", "auto") else ""
        text = f"a DDP step with these gradients{precision}, {self.tokens} tokens per rank, settings: {best.label}"
        await self.show(f"{text}\n{tune_results.DDP_HEADING}")
        for _ in range(MAX_STARTS):
            remaining = self._remaining()
            seconds_left = self.deadline - time.monotonic() - self.runner.startup_seconds
            if not remaining or (len(remaining) < len(self.configs) and seconds_left < 5):
                break
            self.current = -1
            _, failure = await self.runner.run(best, self._spec(entries, remaining, seconds_left), self._on_report)
            if failure and self.current < 0:
                await self.show(f"the model could not be timed: {failure}")
                break
            if failure and self.current in dict(self._remaining()):
                await self._show_row(self.current, failure=failure)
        if tune_results.DEFAULT not in self.times():
            await self.show("DDP's default bucket size could not be timed, so no DDP options are written")
            return None
        if untimed := len(self._remaining()):
            await self.show(f"{untimed} more configs were not timed; a larger --minutes allows more")
        (bucket, hook), speedup = tune_results.confirmed_choice(self.times())
        return DdpConfig(bucket_cap_mb=bucket, comm_hook=hook), speedup

    def times(self) -> dict[tune_results.Choice, list[float]]:
        """Return all times of each choice. They are for gradient_as_bucket_view, which is the default."""
        found: dict[tune_results.Choice, list[float]] = {}
        for config in self.configs.values():
            if config.milliseconds and config.gradient_as_bucket_view:
                found.setdefault(config.choice, []).append(config.milliseconds)
        return found

    def exact_bucket(self) -> int:
        exact = {choice: times for choice, times in self.times().items() if choice[1] == "none"}
        return tune_results.confirmed_choice(exact)[0][0] if tune_results.DEFAULT in exact else tune_results.DEFAULT[0]

    def _remaining(self) -> list[tuple[int, dict[str, Any]]]:
        return [(number, asdict(one)) for number, one in self.configs.items() if not one.milliseconds and not one.failure]

    def _spec(self, entries: Entries, remaining: list[tuple[int, dict[str, Any]]], seconds_left: float) -> dict[str, Any]:
        return {
            "measure": "ddp", "backend": self.options.backend, "seconds": self.options.trial_seconds * len(remaining),
            "nccl_debug": "WARN", "entries": entries, "dtype": self.gradients.dtype,
            "autocast": self.options.autocast, "tokens": self.tokens, "configs": remaining,
            "config_seconds": min(2.0, max(0.2, seconds_left / len(remaining) / 3)),
            "times": [[*choice, min(each)] for choice, each in self.times().items()],
        }  # fmt: skip

    async def _on_report(self, report: dict[str, Any]) -> None:
        event = report["event"]
        if event == "config":
            self.current = number = report["number"]
            chosen = {name: report[name] for name in ("bucket_cap_mb", "comm_hook")}
            self.configs[number] = replace(self.configs[number], **chosen)
        elif event == "tokens" and report["tokens"] < self.tokens:
            self.tokens = report["tokens"]
            only = f"with only {self.tokens} tokens"
            await self.show(f"({only}, because more take too long here; less communication is overlapped)")
        elif event == "compute_only":
            self.compute_ms = report["ms"]
        elif event == "redundant":
            del self.configs[report["number"]]
        elif event == "timed":
            await self._show_row(report["number"], milliseconds=report["ms"])

    async def _show_row(self, number: int, **measured: Any) -> None:
        config = self.configs[number] = replace(self.configs[number], **measured)
        default_ms = min(self.times().get(tune_results.DEFAULT, [math.nan]))
        await self.show(tune_results.ddp_row(config, self.compute_ms, default_ms))

    async def _entries_for_the_time_left(self, best: Trial) -> Entries:
        """Return the parameters of the model, or as many of the first ones as can be sent often enough in the time left."""
        entries, largest = self.gradients.entries, max(best.milliseconds)
        step_seconds = self.gradients.bytes * best.milliseconds[largest] / largest / 1000
        limit = max(10.0, self.deadline - time.monotonic()) * 0.7 / (len(self.configs) * 8)
        if step_seconds <= limit:
            return entries
        kept = tune_results.first_entries(entries, int(tune_results.count_elements(entries) * limit / step_seconds))
        size = format_bytes(tune_results.count_elements(kept) * self.gradients.bytes_per_element)
        await self.show(
            f"a step with all gradients would take {step_seconds:.1f} s, so only the first {size} of them are used; a larger "
            "--minutes allows more"
        )
        return kept


def configs_to_time(gradient_bytes: int, is_nccl: bool) -> list[DdpConfig]:
    # gloo cannot reduce bf16. With several buckets PowerSGD hangs over gloo, because callbacks start its collectives in a
    # different order on each rank (seen with torch 2.13).
    hooks = ["bf16", "fp16", "powersgd"] if is_nccl else ["fp16"]
    sizes = tune_results.bucket_sizes(gradient_bytes)
    configs = [DdpConfig(size) for size in sizes]
    # A hook halves the bytes of each bucket but not its fixed cost, so larger buckets may be best with a hook although they are
    # not without one. On one H200 as two nodes a step with the bf16 hook took 106 ms with 25 MB buckets and 70 ms with 100 MB.
    configs += [DdpConfig(size, hooks[0]) for size in sizes if size >= 25]
    configs += [DdpConfig(comm_hook=hook) for hook in hooks[1:]]
    configs.append(DdpConfig(gradient_as_bucket_view=False))
    # The default may have been unlucky, and the best without a hook and the best of all may have been lucky.
    configs += [DdpConfig(25, is_repeat=True), DdpConfig(is_repeat=True), DdpConfig(comm_hook="", is_repeat=True)]
    return configs
