"""Tune environment variables: time all-reduce under different settings of NCCL, or network interfaces for gloo."""

import math
import time
from typing import Any

from accel_ddp.tune import results, search
from accel_ddp.tune.coordinator import Coordinator, TuningEnded
from accel_ddp.tune.options import TuneOptions
from accel_ddp.tune.results import Transport, Trial
from accel_ddp.tune.shapes import Gradients
from accel_ddp.tune.trial_runner import TrialRunner

SHARE_WITH_MODEL = 0.6  # of the time for settings, if DDP steps of a model are timed after them


class SettingsTuner:
    """Searches the settings under which all-reduce is fastest. `began` is the start of the tuning."""

    def __init__(self, coordinator: Coordinator, runner: TrialRunner, options: TuneOptions, gradients: Gradients, began: float):
        self.coordinator, self.runner, self.options, self.gradients = coordinator, runner, options, gradients
        self.minutes = options.minutes * (SHARE_WITH_MODEL if gradients.entries else 1.0)
        self.settings_deadline, self.deadline = began + self.minutes * 60, began + options.minutes * 60
        self.sizes = list(search.SIZES)
        if gradients.entries and gradients.bytes < search.SIZES[1]:  # DDP never sends more than this in one message
            self.sizes = sorted({*search.SIZES[:2], gradients.bytes})

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
            await self.coordinator.print_on_all(f"{transport.version}, {transport.device}")
        await self.coordinator.print_on_all(results.all_reduce_heading(self.sizes))
        await self.coordinator.print_on_all(results.all_reduce_row(trial, self.sizes, trial.score))
        if trial.failure or transport is None:
            text = f"The trial with the default settings failed, so there is nothing to compare with: {trial.failure}."
            raise TuningEnded(1, f"{text} Run `accel-ddp doctor` on every node to find the reason.")
        return trial, transport

    async def tune(self, default: Trial, transport: Transport) -> Trial:
        """Return the trial with the fastest settings, or the default trial if nothing is faster by more than noise."""
        await self._print_transport(transport)
        first = self._trials_to_start_with(transport)
        proposals = search.propose_settings(self.coordinator.nodes, default.score) if transport.uses_sockets else None
        if expected := len(first) + (search.MAX_TRIALS if proposals else 0):
            seconds = self.runner.usual_seconds
            await self.coordinator.print_on_all(
                f"a trial takes about {seconds:.0f} s, so {expected} trials take about {expected * seconds / 60:.1f} minutes; no "
                f"trial starts after {self.minutes:.1f} minutes"
            )
        best, measured = default, []
        score: float | None = None  # of the last proposal
        while True:
            is_proposal = not first
            if first:
                trial = first.pop(0)
            else:
                try:
                    settings = proposals.send(score) if proposals else None
                except StopIteration:
                    settings = None
                if settings is None:
                    break
                trial = Trial(settings, interfaces=best.interfaces, interface_variable=best.interface_variable)
            if time.monotonic() + self.runner.usual_seconds > self.settings_deadline:
                number = f"{self.runner.number} trial{'s' * (self.runner.number > 1)}"
                await self.coordinator.print_on_all(
                    f"the time for settings is over after {number}; a larger --minutes allows more"
                )
                break
            await self.measure(trial, default, best)
            is_complete = not trial.failure and not trial.ended_early
            if is_complete:
                measured.append(trial)
                best = trial if trial.score < best.score * search.FASTER else best
            score = trial.score if is_proposal and is_complete else None
        return await self.confirm(default, best, measured)

    async def _print_transport(self, transport: Transport) -> None:
        if not transport.is_nccl:
            await self.coordinator.print_on_all("NCCL settings are not tried: gloo is used, because there are no GPUs")
            return
        paths = " and ".join(transport.paths) or "an unknown transport (not in its log)"
        interfaces = f" through {', '.join(transport.interfaces)}" if transport.interfaces else ""
        await self.coordinator.print_on_all(f"transport: NCCL {paths}, network {transport.network}{interfaces}")
        if not transport.uses_sockets:
            reason = why_not_sockets(transport, self.coordinator.nodes)
            await self.coordinator.print_on_all(f"NCCL's socket settings are not tried: {reason}")

    def _trials_to_start_with(self, transport: Transport) -> list[Trial]:
        """Return trials of --try, of the settings in node 0's environment, and of the network interfaces."""
        nodes = self.coordinator.nodes
        infos = [self.coordinator.members[node].info for node in range(nodes)]
        trials = [Trial(settings, note="--try") for settings in self.options.tries]
        if transport.uses_sockets and (settings := infos[0]["environment"]):
            trials.append(Trial(settings, note="as in node 0's environment"))
        uses_tcp = transport.uses_sockets or not transport.is_nccl
        if uses_tcp and nodes > 1 and not any(info["has_chosen_interface"] for info in infos):
            variable = "NCCL_SOCKET_IFNAME" if transport.is_nccl else "GLOO_SOCKET_IFNAME"
            choices = search.interface_choices([info["interfaces"] for info in infos])
            trials += [Trial({}, interfaces=choice, interface_variable=variable) for choice in choices]
        return trials

    async def confirm(self, default: Trial, best: Trial, measured: list[Trial]) -> Trial:
        """Measure the best trial and the default again, and return the one that is then better.

        The best of many noisy trials is partly luck. The best trial counts with the slower of its two scores, and the default
        with the faster. If other trials are then ahead, they are measured again too.
        """
        if best is default:
            return default
        ends = max(self.settings_deadline, self.deadline - 4 * self.runner.usual_seconds)
        if time.monotonic() + 2 * self.runner.usual_seconds < ends:
            repeated = await self.measure(Trial(default.settings, note="repeated"), default)
            default.score = min(default.score, repeated.score)
            others = sorted((trial for trial in measured if trial is not best), key=lambda trial: trial.score)
            candidates, best = [best, *others], default
            for index, trial in enumerate(candidates):
                no_time = index > 0 and time.monotonic() + self.runner.usual_seconds > ends
                if trial.score >= best.score * search.FASTER or no_time:
                    break
                repeated = Trial(trial.settings, trial.interfaces, trial.interface_variable, note="repeated")
                await self.measure(repeated, default)
                trial.score = math.inf if repeated.failure else max(trial.score, repeated.score)
                for size, ms in repeated.milliseconds.items():
                    trial.milliseconds[size] = max(ms, trial.milliseconds.get(size, ms))
                best = trial if trial.score < best.score * search.FASTER else best
        return best if best.score < default.score * search.FASTER else default

    async def measure(self, trial: Trial, default: Trial, best: Trial | None = None) -> Trial:
        """Measure the trial, print its row on every node, and return it. It ends early if it is much slower than `best`."""
        await self._measure(trial, best_ms=best.milliseconds if best else {})
        await self.coordinator.print_on_all(results.all_reduce_row(trial, self.sizes, default.score))
        return trial

    async def _measure(self, trial: Trial, read_nccl_log: bool = False, best_ms: dict[int, float] | None = None) -> None:
        spec: dict[str, Any] = {
            "measure": "all_reduce", "backend": self.options.backend, "seconds": self.options.trial_seconds,
            "read_nccl_log": read_nccl_log, "sizes": self.sizes,
            "best_ms": {str(size): ms for size, ms in (best_ms or {}).items() if size >= search.SIZES[1]},
        }  # fmt: skip
        reports, trial.failure = await self.runner.run(trial, spec)
        trial.number = self.runner.number
        for report in reports:
            if report["event"] == "measured":
                trial.milliseconds[int(report["size"])] = float(report["ms"])
                trial.ended_early = trial.ended_early or bool(report["ended_early"])
        if not trial.failure and not trial.milliseconds:
            trial.failure = "it measured nothing"
        if not trial.failure:
            trial.score = search.score(trial.milliseconds, self.gradients.bytes)


def why_not_sockets(transport: Transport, nodes: int) -> str:
    """Return the reason why NCCL's socket settings have no effect on this transport."""
    network = f"{transport.network} {' '.join(transport.paths)}"
    if nodes == 1 or not any("NET" in path for path in transport.paths):
        return "the ranks communicate through NVLink, PCIe or shared memory"
    if "IB" in network:
        return "InfiniBand or RoCE transfers the data, and sockets are used only to open connections"
    if "OFI" in network or "Libfabric" in network:
        return "the libfabric plugin (EFA) transfers the data and has its own tuning"
    return f"the network is {transport.network}"
