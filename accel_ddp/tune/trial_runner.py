"""Run one trial on all nodes and end it on all nodes, in bounded time."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from accel_ddp.net.messages import find_free_port
from accel_ddp.tune.coordinator import Coordinator, TuningEnded
from accel_ddp.tune.results import Trial

Report = dict[str, Any]
OnReport = Callable[[Report], Awaitable[None]]

FIRST_STARTUP_SECONDS = 180.0  # torch may be read from a slow network disk
STATUS_SECONDS = 15.0  # a status line is printed after this time without a report of rank 0
FAILURE_SECONDS = 1.0  # for other ranks to report their reason too, after one rank has failed
KILL_SECONDS = 15.0  # for killed processes to end


@dataclass
class _State:
    """What the coordinator has received in the running trial."""

    began: float
    deadline: float
    status_at: float
    last_report_at: float
    connected: dict[int, Report] = field(default_factory=dict)
    done_nodes: set[int] = field(default_factory=set)
    reports: list[Report] = field(default_factory=list)  # of rank 0
    failure: str = ""
    is_killed: bool = False


class TrialRunner:
    def __init__(self, coordinator: Coordinator, ranks: int, main_ip: str, trial_seconds: float):
        self.coordinator, self.main_ip, self.trial_seconds = coordinator, main_ip, trial_seconds
        self.nodes, self.ranks = coordinator.nodes, ranks
        self.number = 0  # of the current trial
        self.startup_seconds = FIRST_STARTUP_SECONDS  # until all ranks are connected, in the trial with the fastest start
        self.usual_seconds = 0.0  # duration of a trial, for the decision whether there is time for another
        self.connected: dict[int, Report] = {}  # in the last trial, the report of each connected rank

    async def run(self, trial: Trial, spec: dict[str, Any], on_report: OnReport | None = None) -> tuple[list[Report], str]:
        """Run the trial and return the reports of rank 0 and the reason of a failure, which is empty if there is none.

        `on_report` is called with each report of rank 0 when it arrives. All processes of the trial have ended on return.
        """
        self.number += 1
        began, port = time.monotonic(), find_free_port(self.main_ip)
        for node in range(self.nodes):
            start = {"trial": self.number, "port": port, "environment": trial.environment(node), "spec": spec}
            await self.coordinator.send({"command": "start", **start}, only=node)
        is_first = self.startup_seconds == FIRST_STARTUP_SECONDS
        startup = FIRST_STARTUP_SECONDS if is_first else self.startup_seconds + max(5.0, self.startup_seconds)
        state = _State(began, began + self.trial_seconds + startup, began + STATUS_SECONDS, began)
        self.connected = state.connected
        while len(state.done_nodes) < self.nodes:
            received = await self.coordinator.next_event(min(state.deadline, state.status_at))
            if received is None and time.monotonic() < state.deadline:
                await self._print_status(state)
            elif received is None:
                await self._kill(state)
            elif received[1].get("trial") == self.number:
                await self._handle(state, *received, spec, on_report)
        if not is_first or not state.failure:
            self.usual_seconds = max(self.usual_seconds * 0.5, time.monotonic() - began)
        return state.reports, state.failure

    def _missing_ranks(self, state: _State) -> str:
        """Return the first ranks that are not connected, in words."""
        return ", ".join([str(rank) for rank in range(self.ranks) if rank not in state.connected][:8])

    async def _print_status(self, state: _State) -> None:
        state.status_at = time.monotonic() + STATUS_SECONDS
        missing = self._missing_ranks(state)
        status = f"rank {missing} has not connected yet" if missing else "measuring"
        await self.coordinator.print_on_all(f"(trial {self.number}, {time.monotonic() - state.began:.0f} s: {status})")

    async def _kill(self, state: _State) -> None:
        """Kill the trial at its deadline. Raises TuningEnded if its processes do not end."""
        if state.is_killed:
            nodes = ", ".join(self.coordinator.name(node) for node in range(self.nodes) if node not in state.done_nodes)
            text = f"Worker processes on {nodes} did not end within {KILL_SECONDS:.0f} s after they were killed."
            raise TuningEnded(1, f"{text} Check `dmesg` and `nvidia-smi` there.")
        if not state.failure:
            missing = self._missing_ranks(state)
            reason = f" (rank {missing} did not connect)" if missing else ""
            state.failure = f"no progress for {time.monotonic() - state.last_report_at:.0f} s{reason}, so it was killed"
        state.is_killed, state.deadline = True, time.monotonic() + KILL_SECONDS
        await self.coordinator.send({"command": "kill"})

    async def _handle(
        self, state: _State, node: int, event: dict[str, Any], spec: dict[str, Any], on_report: OnReport | None
    ) -> None:
        if event["event"] == "node_done":
            state.done_nodes.add(node)
        elif event["event"] == "worker_report":
            await self._handle_report(state, event["rank"], event["report"], spec, on_report)
        elif event["event"] == "worker_exit" and event["code"]:
            output = event["output"]
            if state.failure and output.startswith("NCCL: ") and output not in state.failure:
                state.failure += f" | {output}"
            reason = f"rank {event['rank']} ended with exit code {event['code']}{f': {output}' if output else ''}"
            state.failure = state.failure or reason
        if state.failure and not state.is_killed:
            state.deadline = min(state.deadline, time.monotonic() + FAILURE_SECONDS)

    async def _handle_report(
        self, state: _State, rank: int, report: Report, spec: dict[str, Any], on_report: OnReport | None
    ) -> None:
        state.last_report_at = now = time.monotonic()
        if report.get("event") == "connected":
            state.connected[rank] = report
            if len(state.connected) == self.ranks and not state.failure:
                self.startup_seconds = min(self.startup_seconds, now - state.began)
                state.deadline = now + self.trial_seconds
        elif report.get("event") == "failed":
            state.failure = state.failure or f"rank {rank}: {report['reason']}"
        elif spec["measure"] == "ddp" and not state.failure:  # times many configs, so the limit is for the time between reports
            state.deadline = now + self.trial_seconds
        if rank == 0:
            state.status_at = now + STATUS_SECONDS
            state.reports.append(report)
            if on_report:
                await on_report(report)
