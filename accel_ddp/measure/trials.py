"""Run one trial on all nodes and end it on all nodes, in bounded time."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from accel_ddp.measure.tune_results import Trial
from accel_ddp.nodes import messages
from accel_ddp.nodes.messages import find_free_port, printable

# Constants and messages that the coordinator on the main node and the agents on all nodes share.
#
# Every message is a JSON object. From the coordinator to an agent, by the value of "command":
#
#     heartbeat
#     print    text
#     start    trial, port, environment, spec    start the worker processes of a trial
#     kill                                       kill the worker processes of this node
#     write    files                             write the files with the best values
#     exit     code, text                        print the text and exit with this code
#
# From an agent to the coordinator, by the value of "event":
#
#     heartbeat
#     worker_report    trial, rank, report         a worker printed this report, see `worker`
#     worker_exit      trial, rank, code, output   a worker ended; output is its last error message
#     node_done        trial                       all workers of this node have ended
#     written          lines, is_complete          the answer to `write`
#     leaving          reason                      the user ended this agent
#
# The first message of an agent has no "event": it describes its node. The coordinator itself adds two events, `joined` and `lost`.
HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 10.0  # after this time without a message the other side counts as lost
JOIN_SECONDS = 30.0  # for all agents to connect after the preflight


# The main node's side of the connections between the nodes. The agents on all nodes connect to the coordinator.
#
# Both sides send a heartbeat every second, so a node that dies, hangs or loses its network is named on all nodes within seconds.


class TuningEnded(Exception):
    """Ends the tuning on every node with an exit code, after printing a text."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code, self.text = code, text


@dataclass
class Member:
    """A node whose agent is connected."""

    info: dict[str, Any]  # the agent's first message
    writer: asyncio.StreamWriter


class Coordinator:
    """Sends commands to the agents of all nodes and receives their events."""

    def __init__(self, nodes: int, token: bytes):
        self.nodes, self.token = nodes, token
        self.members: dict[int, Member] = {}
        self.events: asyncio.Queue[tuple[int, dict[str, Any]]] = asyncio.Queue()
        self.heartbeat: asyncio.Future | None = None
        self.server: asyncio.Server | None = None

    async def open(self, ip: str, port: int) -> None:
        self.server = await asyncio.start_server(self._serve, sock=messages.open_listening_socket(ip, port))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = None
        try:
            await messages.handshake(reader, writer, self.token, is_client=False)
            info = await messages.receive(reader, SILENCE_SECONDS)
            node = int(info["node"])
            if node in self.members or not 0 <= node < self.nodes:
                raise ValueError("not expected")
            self.members[node] = Member(info, writer)
            self.events.put_nowait((node, {"event": "joined"}))
            while True:
                message = await messages.receive(reader, SILENCE_SECONDS)
                if message["event"] != "heartbeat":
                    self.events.put_nowait((node, message))
        except asyncio.CancelledError:  # asyncio would print it as an error if it were raised again
            pass
        except (messages.HandshakeError, ValueError, KeyError, TypeError, OSError, asyncio.TimeoutError) as error:
            if node in self.members and self.members[node].writer is writer:
                is_silent = isinstance(error, (asyncio.TimeoutError, TimeoutError))
                silent = f"has sent nothing for {SILENCE_SECONDS:.0f} s"
                reason = silent if is_silent else "has closed the connection: its process was killed, or its network failed"
                self.events.put_nowait((node, {"event": "lost", "reason": reason}))
        finally:
            writer.close()

    async def wait_for_members(self) -> None:
        """Return when the agents of all nodes are connected. Raises TuningEnded if one does not connect."""
        deadline = time.monotonic() + JOIN_SECONDS
        self.heartbeat = asyncio.ensure_future(self._send_heartbeats())
        while len(self.members) < self.nodes:
            if await self.next_event(deadline) is None:
                missing = ", ".join(f"machine_rank {node}" for node in range(self.nodes) if node not in self.members)
                raise TuningEnded(1, f"{missing} passed the preflight but did not connect within {JOIN_SECONDS:.0f} s after it.")

    async def _send_heartbeats(self) -> None:
        while True:
            await self.send({"command": "heartbeat"})
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def name(self, node: int) -> str:
        return f"machine_rank {node} ({printable(self.members[node].info['host'], 100)})"

    @property
    def hosts(self) -> str:
        """The host names of the first 16 nodes."""
        return ", ".join(self.members[node].info["host"] for node in range(min(self.nodes, 16)))

    async def next_event(self, deadline: float) -> tuple[int, dict[str, Any]] | None:
        """Return (node, event), or None at the deadline. Raises TuningEnded if a node is lost or leaves."""
        try:
            node, event = await asyncio.wait_for(self.events.get(), max(0.0, deadline - time.monotonic()))
        except (asyncio.TimeoutError, TimeoutError):
            return None
        if event["event"] in ("lost", "leaving"):
            reason = printable(event["reason"], 300)
            raise TuningEnded(1, f"{self.name(node)} {reason}. The tuning ends on every node.")
        return node, event

    async def send(self, message: dict[str, Any], only: int | None = None) -> None:
        """Send a command to all nodes, or to one. A failed connection is ignored here: `next_event` reports the lost node."""

        async def send_to(member: Member) -> None:
            with contextlib.suppress(OSError, asyncio.TimeoutError, RuntimeError):
                await messages.send(member.writer, message, 5)

        await asyncio.gather(*(send_to(member) for node, member in list(self.members.items()) if only in (None, node)))

    async def print_on_all(self, text: str) -> None:
        """Print a text on every node."""
        await self.send({"command": "print", "text": text})

    async def close(self) -> None:
        if self.heartbeat:
            self.heartbeat.cancel()
        if self.server:
            self.server.close()


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
