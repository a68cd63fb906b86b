"""The monitor of a node: a small process without torch that watches the ranks, their launcher, and the other nodes.

It prints what goes wrong, the same text on every node that can still be reached, and ends the ranks of its node when the run cannot
continue. It has its own session, so a signal to the ranks or the terminal does not end it. It exits after the last rank of its node.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from accel_ddp import phases
from accel_ddp.nodes.messages import check_shape
from accel_ddp.nodes.terminal import erase_before_line
from accel_ddp.records.files import BackgroundWriter
from accel_ddp.records.incidents import ERROR, INFO, WARNING, Incident, IncidentWriter
from accel_ddp.watch import processes
from accel_ddp.watch.diagnosis import Cause, Event, Judge, NodeView, RankView
from accel_ddp.watch.link import COORDINATORS, SHAPES, Peer, Peers
from accel_ddp.watch.local_ranks import LocalRank, LocalRanks, OutputFolder, wait_for_end
from accel_ddp.watch.processes import Stack
from accel_ddp.watch.restart_files import how_to_continue, launcher_pid, write_outcome
from accel_ddp.watch.slow_run import Flows, SlowRun

READ_SECONDS = 0.25  # between two readings of the pages
BEAT_EVERY = 2  # readings between two heartbeats to the other nodes
DECIDE_SECONDS = 2.0  # a node decides for itself if the coordinator has not answered its report within this time
SECONDARY_SECONDS = 3.0  # an error that may follow from another one is reported if no other one arrives within this time
LONGEST_LINE = 1 << 26  # bytes of a message of a rank; that with all ranks of a run has about 60 for each
UNREACHABLE_SECONDS = 20.0  # a coordinator that has not answered for this long after the start cannot be reached
FRESH_SECONDS = 2.0  # what another node has observed is true for this long
MOST_WITNESSES = 9  # nodes that are asked whether they hear a node that is silent here
GAP_SECONDS = 3.0  # if the monitor itself did not run for this long (a suspended machine), what it sees is not the ranks' fault


@dataclass
class Monitor:
    node: int
    host: str
    launcher: int  # pid of the parent of the ranks; 0: they have none of interest
    parent: int  # the rank that started this process
    report_after: float
    abort_after: float
    remote: dict[int, RankView] = field(default_factory=dict)
    heard_ranks_at: dict[int, float] = field(default_factory=dict)
    timings: dict[int, phases.Timing] = field(default_factory=dict)  # of ranks on other nodes
    slow_run: SlowRun | None = None
    stacks: dict[int, Stack] = field(default_factory=dict)
    asked_stacks: set[int] = field(default_factory=set)  # ranks whose stacks are being read
    failure: dict[str, Any] | None = None
    output: OutputFolder | None = None
    node_socket: socket.socket | None = None  # listens for the monitors of other nodes

    def __post_init__(self) -> None:
        self.judge = Judge(self.host, self.report_after, self.abort_after, self._how_to_continue)
        erase = erase_before_line(2)  # of the panel that the main rank may show in the same terminal
        # A terminal or a pipe that is not read would stop the monitor.
        self.printer = BackgroundWriter(lambda text: os.write(2, f"{erase}{text}\n".encode(errors="replace")), "printer")
        self.printer.start()
        self.incidents = IncidentWriter()
        self.recorded: set[tuple[str, str]] = set()  # kind and text of what ranks have reported; many may report the same
        self.ranks = LocalRanks(self.node, self.host, self.launcher)
        self.peers = Peers(self.node, [], self.receive)  # until `_connect`
        self.flows = Flows([])
        # (observer, node) -> seconds without an answer, whether packets still arrive from it, when and from whom this was learned
        self.silences: dict[tuple[int, int], tuple[float, bool, float, int]] = {}
        self.failed_at = 0.0
        self.quiet_until = 0.0
        self.pending: dict[str, Any] | None = None  # a failure of this node, sent to the coordinator
        self.tasks: set[asyncio.Task] = set()
        self.stop_reason = ""
        self.has_reported_unreachable = False
        self.changed = asyncio.Event()

    # ---- ranks of this node

    async def serve_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        local: LocalRank | None = None
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                message = json.loads(line)
                if "hello" in message:
                    local = self.ranks.register(message["hello"], writer)
                    self._keep(self._watch_death(local))
                    if self.failure:
                        local.send({"failure": self.failure})
                    if self.stop_reason:
                        local.send({"stop": self.stop_reason})
                elif "roster" in message:
                    self._connect(message)
                elif "output_dir" in message:
                    self.ranks.by_hand = message["by_hand"]
                    if message["is_watched"]:
                        self.output = OutputFolder(message["output_dir"])
                elif "is_claimed" in message and self.output:
                    self.output.watch()
                    self.incidents.open(self.output.path)
                elif "incident" in message:
                    self._record(Incident(**message["incident"]))
                elif "failed" in message:
                    self._submit(message["failed"])
                elif "stop" in message:
                    self._spread_stop(message["stop"])
                elif "collective" in message and local:
                    if local.collective and not local.collective.done():
                        local.collective.set_result(message["collective"])
                elif "finished" in message and local:
                    local.is_finished = True
        writer.close()
        self.changed.set()

    async def _watch_death(self, local: LocalRank) -> None:
        await wait_for_end(local.pid)
        local.status = processes.exit_status(local.pid)
        await asyncio.sleep(0.05)  # its last messages are read before
        local.is_dead = True
        if not local.is_finished or local.status:
            self._submit(self.ranks.describe_death(local))
        self.changed.set()

    async def watch_launcher(self) -> None:
        """Report the death of the launcher. Linux sends the ranks a signal, at which they save and stop."""
        await wait_for_end(self.launcher)
        status = processes.exit_status(self.launcher)
        await asyncio.sleep(0.3)
        if self.failure or all(local.has_ended for local in self.ranks.values()):
            return
        what = processes.describe_exit(status) if status != 0 else "died"
        step = max((local.reading.step for local in self.ranks.values() if local.reading), default=0)
        text = f"the launcher of {self.host} (pid {self.launcher}) {what} at step {step}. Its ranks save a checkpoint and exit."
        self._announce(Event(WARNING, "LAUNCHER_DIED", text, host=self.host, step=step))

    # ---- failures

    def _submit(self, failure: dict[str, Any]) -> None:
        """Report a failure of a rank of this node to the coordinator, which chooses the first one of the run."""
        if self.failure or (self.pending and not self.pending.get("is_secondary")):
            return
        self.pending = failure
        decides = self._decides()
        if not decides:
            for node in (0, 1):
                self.peers.send(node, {"failed": failure})
        self._keep(self._decide(failure, 0 if decides else DECIDE_SECONDS))

    async def _decide(self, failure: dict[str, Any], seconds: float) -> None:
        await asyncio.sleep(seconds + (SECONDARY_SECONDS if failure.get("is_secondary") else 0))
        self._fail(failure)

    def _fail(self, failure: dict[str, Any]) -> None:
        if self.failure:
            return
        if self.slow_run and self.slow_run.slowness.slow_link and failure["kind"] in ("died", "failed"):  # on the coordinator
            link = f"\n  A link was slow: {self.slow_run.slowness.link_text}."
            failure = {**failure, "text": failure["text"] + link, "line": failure["line"] + link}
        self.failure, self.failed_at = failure, time.monotonic()
        self.printer.put(failure["line"])
        if self.node == 0:  # a stop that was asked for is no error
            level = INFO if failure["kind"] in ("stopped", "interrupted") else ERROR
            place = {name: failure[name] for name in ("rank", "host", "step") if name in failure}
            self.incidents.write(Incident.parse(failure["line"], failure["kind"].upper(), level, **place))
        if "TORCHELASTIC_RUN_ID" in os.environ:  # a launcher that may start the ranks again
            step = failure.get("step", -1)
            outcome = {**failure, "text": failure["line"], "step": None if step < 0 else step, "time": time.time()}
            write_outcome(launcher_pid(self.launcher), outcome)
        self.ranks.send({"failure": failure})
        self.peers.broadcast({"failure": failure})
        self.changed.set()

    def _how_to_continue(self, cause: Cause) -> str:
        return how_to_continue(1, cause.step, self.ranks.by_hand, self.launcher, cause.kind.endswith("NODE_LOST"))

    def _announce(self, event: Event) -> None:
        if event.severity == ERROR:
            text, place = f"{event.kind}: {event.text}", {"rank": event.rank, "host": event.host, "step": event.step}
            self._fail({"kind": "died", "text": text, "line": str(event), "exit_code": 1, **place})
        else:
            self._print(event)
            now, message = time.monotonic(), {"event": event._asdict()}
            lost = [peer.node for peer in self.peers.peers.values() if peer.silent(now) > self.report_after]
            via = next((node for node in self.peers.peers if node not in lost), None)  # another node may reach them
            for node in self.peers.peers:
                self.peers.send(node, {**message, "relay": lost} if node == via else message)

    def _print(self, event: Event) -> None:
        self.printer.put(str(event))
        if self.node == 0:
            step = event.step or -1
            self.incidents.write(Incident(event.severity, event.kind, event.text, event.rank, event.host, step))

    def _record(self, incident: Incident) -> None:
        if self.node:
            self.peers.send(0, {"incident": incident._asdict()})
        elif (incident.kind, incident.text) not in self.recorded:
            self.recorded.add((incident.kind, incident.text))
            self.incidents.write(incident)
            if incident.kind == "SAVE_FAILED":  # a full disk: the users of the other nodes must know that nothing is saved
                self._print_elsewhere(Event(*incident[:6]))

    def _print_elsewhere(self, event: Event) -> None:
        """Print what a rank has already printed on its own node on all other nodes. Runs on the main node."""
        source = self.remote[event.rank].node if event.rank in self.remote else self.node
        if source != self.node:
            self.printer.put(str(event))
        for node in self.peers.peers:
            if node != source:
                self.peers.send(node, {"event": event._asdict()})

    # ---- other nodes

    def _connect(self, message: dict[str, Any]) -> None:
        self.node = self.ranks.node = message.get("node", self.node)
        for entry in message["ranks"]:
            if entry["node"] != self.node:
                self.remote[entry["rank"]] = RankView(entry["rank"], entry["node"], entry["host"], entry["pid"])
        if len(message["roster"]) > 1:
            self.peers = Peers(self.node, message["roster"], self.receive, self.printer.put)
            self.peers.start()
            if self.node_socket is not None:
                self._keep(self.peers.listen_for_pings(self.node_socket))
        self.flows = Flows(message["roster"])
        self.slow_run = SlowRun(self.node, message, self.peers, self._announce)

    def receive(self, node: int, message: dict[str, Any]) -> None:
        """Handle a message of another monitor. Raises ValueError, and changes nothing, if the message is malformed."""
        for name in message.keys() & SHAPES.keys():
            check_shape(message[name], SHAPES[name])
        self._read_beat(node, message)
        if "failure" in message and not self.failure:
            self._fail(message["failure"])
        if "failed" in message and not self.failure and self._decides():
            self._keep(self._decide(message["failed"], 0))
        if "event" in message:
            self._print(Event(**message["event"]))
            for target in message.get("relay", ()):
                self.peers.send(target, {"event": message["event"]})
        if "incident" in message:
            self._record(Incident(**message["incident"]))
        if "stop" in message:
            self._spread_stop(message["stop"], source=node)
        if self.slow_run and ("measure" in message or "rate" in message):
            self._keep(self.slow_run.receive(node, message))
        if "want_stack" in message:
            self._keep(self._send_stack(node, message["want_stack"]))
        if "stack" in message:
            rank, frames, collective = message["stack"]
            self.stacks[rank] = Stack(frames)
            self.stacks[rank].collective = collective

    def _read_beat(self, node: int, message: dict[str, Any]) -> None:
        now = time.monotonic()
        for rank, step, phase, age, normal, state, stopped, suspended, writing, finished, *timing in message.get("ranks", ()):
            if view := self.remote.get(rank):
                view.step, view.phase, view.age, view.normal, view.state = step, phase, age, normal, state
                view.stopped, view.is_suspended, view.writing, view.is_finished = stopped, suspended, writing, finished
                self.heard_ranks_at[rank] = now
                self.timings[rank] = phases.Timing(*timing)
        if "traffic" in message:
            self.flows.add(node, message["traffic"], now)
        for observer, other, *silence in message.get("silent", ()):
            self.silences[observer, other] = (*silence, now, node)

    def _spread_stop(self, reason: str, source: int | None = None) -> None:
        if self.stop_reason:
            return
        self.stop_reason = reason
        self.ranks.send({"stop": reason})
        for node in self.peers.peers:
            if node != source:
                self.peers.send(node, {"stop": reason})

    def _decides(self) -> bool:
        """Return whether this node chooses the diagnosis: node 0, node 1 if node 0 is lost, and others if they are cut off."""
        now = time.monotonic()

        def is_lost(peer: Peer) -> bool:
            is_unreachable = not peer.heard_at and now - self.peers.started_at > UNREACHABLE_SECONDS
            if peer.is_done or is_unreachable or peer.closed(now) > 1.0:
                return True
            view = self._view_of(peer, now)
            return view.silent > self.report_after and len(view.heard_by) <= len(view.lost_by)

        return all(is_lost(peer) for node, peer in self.peers.peers.items() if node < min(self.node, 2))

    def _view_of(self, peer: Peer, now: float) -> NodeView:
        """Return what is known about another node: from its messages, from collectives, and from nodes connected to it."""
        silent = min(peer.silent(now), self.flows.seconds_since(now, peer.node, self.node))  # messages share a slow link
        view, limit = NodeView(peer.node, peer.host, peer.address, silent, peer.closed(now)), self.report_after / 2
        if silent <= limit:
            return view
        fresh = {pair: known for pair, known in self.silences.items() if now - known[2] < FRESH_SECONDS}
        is_connected = lambda other: other is not peer and min(other.node, peer.node) < COORDINATORS
        hears = lambda other: other.heard_at and other.silent(now) < limit and not other.closed(now) and not other.is_done
        for other in [each for each in self.peers.peers.values() if is_connected(each) and hears(each)][:MOST_WITNESSES]:
            is_lost = fresh.get((other.node, peer.node), (0.0,))[0] > limit
            (view.lost_by if is_lost else view.heard_by).append(other.host)
        if peer.is_one_way(now):
            view.one_way = self.host
        elif fresh.get((peer.node, self.node), (0.0, False))[1]:
            view.one_way = peer.host
        return view

    def _report_unreachable(self, now: float) -> None:
        if self.peers.peers and not self.has_reported_unreachable and now - self.peers.started_at > UNREACHABLE_SECONDS:
            self.has_reported_unreachable = True
            for peer in self.peers.peers.values():
                if not peer.heard_at and not peer.is_done:
                    text = (
                        f"the monitors of {self.host} and {peer.host} ({peer.address}:{peer.port}) cannot connect"
                        f"{f': {peer.reason}' * bool(peer.reason)}. Faults of one node "
                        "are not reported on the other. Allow all TCP between the nodes."
                    )
                    self.printer.put(f"warning: {text}")
                    self._record(Incident(WARNING, "UNREACHABLE", text, host=peer.host))

    async def _send_stack(self, node: int, rank: int) -> None:
        stack = await self.ranks.read_stack(rank)
        self.peers.send(node, {"stack": [rank, list(stack), stack.collective]})

    async def _collect_stack(self, rank: int) -> None:
        self.stacks[rank] = await self.ranks.read_stack(rank)

    # ---- the loop

    def _keep(self, coroutine: Any) -> None:
        def end(task: asyncio.Task) -> None:
            self.tasks.discard(task)
            if not task.cancelled() and (error := task.exception()):
                self.printer.put("".join(traceback.format_exception(error)))

        task = asyncio.ensure_future(coroutine)
        self.tasks.add(task)
        task.add_done_callback(end)

    async def run(self) -> None:
        if self.launcher:
            self._keep(self.watch_launcher())
        parent = asyncio.ensure_future(wait_for_end(self.parent))
        last, count = time.monotonic(), 0
        is_decided = lambda: self.pending is None or self.failure is not None
        while not (parent.done() and all(local.is_dead for local in self.ranks.values()) and is_decided()):
            self.changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), READ_SECONDS)
            now = time.monotonic()
            if now - last > GAP_SECONDS:
                self.quiet_until = now + self.report_after + 5
            self.ranks.read_pages(now)
            if self.failure and (blocked := self.ranks.end(now - self.failed_at)):
                for line in blocked:
                    self.printer.put(line)
                    self._record(Incident.parse(line, "RANK_BLOCKED", host=self.host))
                break
            count += 1
            if count % BEAT_EVERY == 0:
                if self.peers.peers:
                    self._send_beat()
                self._report_unreachable(now)
                if not self.failure and now > self.quiet_until:
                    if self._decides():
                        self._try_to_judge(now, now - last)
                    else:  # the coordinator decides again, so what this node has reported while it was cut off is over
                        for event in self.judge.close([self.remote[rank] for rank in self.heard_ranks_at]):
                            self.printer.put(str(event))
            last = now
        await self.peers.close()

    def _send_beat(self) -> None:
        timings = self.ranks.timings()
        rows = [
            [v.rank, v.step, v.phase, round(v.age, 2), v.normal, v.state, round(v.stopped, 2), v.is_suspended,
             round(v.writing, 1), v.is_finished, *timings[v.rank]]
            for v in self.ranks.views()
        ]  # fmt: skip
        traffic = self.ranks.read_traffic(self.report_after / 2)
        self.flows.add(self.node, traffic, time.monotonic())
        now = time.monotonic()
        silent = [
            [self.node, p.node, round(p.silent(now), 1), p.is_one_way(now)]
            for p in self.peers.peers.values()
            if p.silent(now) > 1
        ]
        # What a node has observed itself is passed on, because it cannot reach the node that it has observed.
        silent += [
            [*pair, seconds, True] for pair, (seconds, one_way, at, source) in self.silences.items()
            if one_way and pair[0] == source and now - at < FRESH_SECONDS
        ]  # fmt: skip
        more = {"silent": silent} if silent else {}
        self.peers.broadcast({"ranks": rows, **({"traffic": traffic} if traffic else {}), **more})
        self.peers.ping_silent()

    def _try_to_judge(self, now: float, seconds: float) -> None:
        """Judge. A mistake in a diagnosis must not end the monitor, which would look like a lost node."""
        try:
            self._judge(now, seconds)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            if ("", text) not in self.recorded:
                self.recorded.add(("", text))
                self.printer.put(f"warning: the monitor of {self.host} cannot diagnose this run: {text}")

    def _judge(self, now: float, seconds: float) -> None:
        remote = ((self.remote[rank], now - heard_at) for rank, heard_at in self.heard_ranks_at.items())
        views = [*self.ranks.views(), *(dataclasses.replace(v, age=v.age + late) for v, late in remote)]
        views.sort(key=lambda v: v.rank)
        for v in views:  # a stack is valid as long as its rank does not progress
            if v.age < 1 and v.rank in self.stacks:
                del self.stacks[v.rank]
                self.asked_stacks.discard(v.rank)
        if self.output:  # does its disk answer? A rank of this node may wait for it
            own = [v for v in views if v.node == self.node]
            late = [v for v in own if v.age > self.report_after / 2]
            slow = [v for v in late if v.phase == phases.SAVE or v.state == "D"] or [v for v in own if v.writing > 30]
            self.judge.disk_hung = self.output.seconds_without_answer(bool(slow))
            for event in self.output.events():
                self._announce(event)
        known = {v.node for v in views}
        self.judge.quiet = self.flows.seconds_since(now)
        nodes = [self._view_of(peer, now) for peer in self.peers.peers.values() if peer.node in known and not peer.is_done]
        for event in self.judge.examine(seconds * BEAT_EVERY, views, nodes, self.stacks):
            self._announce(event)
        if self.slow_run and self.node == 0:
            self.slow_run.examine(views, {**self.timings, **self.ranks.timings()})
            if self.judge.waits_for_link:
                self.slow_run.report_flow(self.flows, [v for v in views if not v.is_finished], now)
        for rank in self.judge.wants_stacks - self.asked_stacks:
            self.asked_stacks.add(rank)
            if rank in self.ranks:
                self._keep(self._collect_stack(rank))
            elif rank in self.remote:
                self.peers.send(self.remote[rank].node, {"want_stack": rank})


async def watch(options: dict[str, Any]) -> None:
    names = ("node", "host", "launcher", "parent", "report_after", "abort_after")
    monitor = Monitor(**{name: options[name] for name in names})

    async def accept_node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # asyncio would print it when this process ends
            if monitor.peers.peers:
                await monitor.peers.accept(reader, writer)
        writer.close()

    rank_socket = socket.socket(fileno=options["rank_socket"])
    servers = [await asyncio.start_unix_server(monitor.serve_rank, sock=rank_socket, limit=LONGEST_LINE)]
    if options["node_socket"] is not None:
        monitor.node_socket = socket.socket(fileno=options["node_socket"])
        servers.append(await asyncio.start_server(accept_node, sock=monitor.node_socket))
    try:
        await monitor.run()
    except Exception:
        traceback.print_exc()
    for server in servers:
        server.close()
    if monitor.output:
        monitor.output.close()
    monitor.printer.close(2)
    monitor.incidents.close()
    shutil.rmtree(options["folder"], ignore_errors=True)
    # Not a normal end: a disk may block a thread, and asyncio prints an error for each rank that cannot be killed.
    os._exit(0)


if __name__ == "__main__":
    # Schedulers send signals to every process of a job. The monitor ends with its ranks.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(watch(json.loads(sys.argv[1])))
