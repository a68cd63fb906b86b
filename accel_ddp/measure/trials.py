"""Trials on all nodes: each one is started and ended on every node, in bounded time.

The main node sends these requests to the agents, by the value of "do" (`doctor.coordinator` has the ones that every tool shares):

    print    text
    start    trial, port, environment, spec    start the worker processes of a trial
    kill                                       kill the worker processes of this node
    write    files                             write the files with the best values
    close    code, text                        print the text and exit with this code

An agent sends these events, by the value of "event":

    worker_report    trial, rank, report         a worker printed this report, see `trial_worker`
    worker_exit      trial, rank, code, output   a worker ended; output is its last error message
    node_done        trial                       all workers of this node have ended
    written          lines, is_complete          the answer to `write`
    leaving          reason                      the user ended this agent
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from accel_ddp.doctor.coordinator import Coordinator, Member, Message
from accel_ddp.measure.tune_results import Trial
from accel_ddp.nodes.messages import find_free_port, printable, whole_number

SILENCE_SECONDS = 10.0  # after this time without a message the other side counts as lost
JOIN_SECONDS = 30.0  # for all agents to connect after the preflight
FIRST_STARTUP_SECONDS = 180.0  # torch may be read from a slow network disk
STATUS_SECONDS = 15.0  # a status line is printed after this time without a report of rank 0
FAILURE_SECONDS = 1.0  # for other ranks to report their reason too, after one rank has failed
KILL_SECONDS = 15.0  # for killed processes to end

Report = dict[str, Any]
OnReport = Callable[[Report], Awaitable[None]]


class TuningEnded(Exception):
    """Ends the tuning on every node with an exit code, after printing a text."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code, self.text = code, text


class TuneCoordinator(Coordinator):
    """The main node's side of the tuning. `members` are in the order of the nodes once all of them are connected."""

    def __init__(self, keys: dict[int, bytes]):
        """`keys` are those that this node shares with each node, also with itself."""
        super().__init__(keys.get, SILENCE_SECONDS)
        self.nodes = len(keys)

    def read_hello(self, message: Message) -> Message:
        return {**message, "node": whole_number(message["node"], self.nodes - 1), "host": printable(message["host"], 100)}

    async def join(self, member: Member) -> None:
        if any(member.hello["node"] == one.hello["node"] for one in self.members) or member.hello["node"] != member.stream.node:
            raise ValueError("not expected")
        await super().join(member)
        self.members.sort(key=lambda one: one.hello["node"])

    async def wait_for_members(self) -> None:
        """Return when the agents of all nodes are connected. Raises TuningEnded if one does not connect."""
        deadline = time.monotonic() + JOIN_SECONDS
        while len(self.members) < self.nodes:
            await self.next_event(time.monotonic() + 0.05)
            if time.monotonic() > deadline:
                there = {member.hello["node"] for member in self.members}
                missing = ", ".join(f"machine_rank {node}" for node in range(self.nodes) if node not in there)
                raise TuningEnded(1, f"{missing} passed the preflight but did not connect within {JOIN_SECONDS:.0f} s after it.")

    def name(self, node: int) -> str:
        return f"machine_rank {node} ({self.members[node].hello['host']})"

    @property
    def hosts(self) -> str:
        return ", ".join(member.hello["host"] for member in self.members[:16])

    async def next_event(self, deadline: float) -> tuple[int, Message] | None:
        """Return (node, event), or None at the deadline. Raises TuningEnded if a node is lost or leaves."""
        received = await self.receive(deadline)
        lost = next((member for member in self.members if member.lost), None)
        reason = ""
        if received and received[1].get("event") == "leaving":
            lost, reason = received[0], printable(received[1]["reason"], 300)
        elif lost and self.inbox.empty():  # everything that it has sent is handled first
            reason = lost.lost + (": its process was killed, or its network failed" if "closed" in lost.lost else "")
        if lost and reason:
            text = f"machine_rank {lost.hello['node']} ({lost.hello['host']}) {reason}. Tuning stops on every node."
            raise TuningEnded(1, text)
        return (received[0].hello["node"], received[1]) if received else None

    async def print_on_all(self, text: str) -> None:
        await self.send_to_all({"do": "print", "text": text})


@dataclass
class _State:
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
    def __init__(self, coordinator: TuneCoordinator, ranks: int, main_ip: str, trial_seconds: float):
        self.coordinator, self.main_ip, self.trial_seconds = coordinator, main_ip, trial_seconds
        self.nodes, self.ranks = coordinator.nodes, ranks
        self.number = 0  # of the current trial
        self.startup_seconds = FIRST_STARTUP_SECONDS  # until all ranks are connected, in the trial with the fastest start
        self.usual_seconds = 0.0  # duration of a trial, for the decision whether there is time for another
        self.connected: dict[int, Report] = {}  # in the last trial, the report of each connected rank

    async def run(self, trial: Trial, spec: dict[str, Any], on_report: OnReport | None = None) -> tuple[list[Report], str]:
        """Run the trial until its processes have ended. Return the reports of rank 0, and the reason of a failure or ""."""
        self.number += 1
        began, port = time.monotonic(), find_free_port(self.main_ip)
        start = {"trial": self.number, "port": port, "environment": trial.settings, "spec": spec}
        await self.coordinator.send_to_all({"do": "start", **start})
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
            text = f"Worker processes on {nodes} did not exit within {KILL_SECONDS:.0f} s after they were killed."
            raise TuningEnded(1, f"{text} Check `dmesg` and `nvidia-smi` there.")
        if not state.failure:
            missing = self._missing_ranks(state)
            reason = f" (rank {missing} did not connect)" if missing else ""
            state.failure = f"no progress for {time.monotonic() - state.last_report_at:.0f} s{reason}, so it was killed"
        state.is_killed, state.deadline = True, time.monotonic() + KILL_SECONDS
        await self.coordinator.send_to_all({"do": "kill"})

    async def _handle(
        self, state: _State, node: int, event: dict[str, Any], spec: dict[str, Any], on_report: OnReport | None
    ) -> None:
        """Take an event of a node. A failure leaves the other ranks little time to report their reasons too."""
        kind, rank, now = event["event"], event.get("rank"), time.monotonic()
        if kind == "node_done":
            state.done_nodes.add(node)
        elif kind == "worker_exit" and event["code"]:
            output = event["output"]
            if state.failure and output.startswith("NCCL: ") and output not in state.failure:
                state.failure += f" | {output}"
            reason = f"rank {rank} exited with code {event['code']}{f': {output}' if output else ''}"
            state.failure = state.failure or reason
        elif kind == "worker_report":
            report, state.last_report_at = event["report"], now
            if report.get("event") == "connected":
                state.connected[rank] = report
                if len(state.connected) == self.ranks and not state.failure:
                    self.startup_seconds = min(self.startup_seconds, now - state.began)
                    state.deadline = now + self.trial_seconds
            elif report.get("event") == "failed":
                state.failure = state.failure or f"rank {rank}: {report['reason']}"
            elif spec["measure"] == "ddp" and not state.failure:  # many configs, so the limit is for the time between reports
                state.deadline = now + self.trial_seconds
            if rank == 0:
                state.status_at = now + STATUS_SECONDS
                state.reports.append(report)
                if on_report:
                    await on_report(report)
        if state.failure and not state.is_killed:
            state.deadline = min(state.deadline, now + FAILURE_SECONDS)
