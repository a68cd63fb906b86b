"""The monitor of a node: a small process without torch that watches the ranks, their launcher, and the other nodes.

It prints what goes wrong, the same text on every node that can still be reached, and ends the ranks of its node when the run cannot
continue. It has its own session, so that a signal to the ranks or the terminal does not end it. It ends after the last rank of its
node.
"""

import asyncio
import contextlib
import json
import mmap
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_ddp.watch import page, processes
from accel_ddp.watch.diagnosis import ERROR, WARNING, Event, Judge, NodeView, RankView
from accel_ddp.watch.outcome import write_outcome
from accel_ddp.watch.output_folder import OutputFolder
from accel_ddp.watch.peers import Peer, Peers
from accel_ddp.watch.slow_run import SlowRun
from accel_ddp.watch.stacks import Stack, read_stack, read_stack_of_worker

READ_SECONDS = 0.25  # between two readings of the pages
BEAT_EVERY = 2  # readings between two heartbeats to the other nodes
DECIDE_SECONDS = 2.0  # a node decides for itself if the coordinator has not answered its report within this time
SECONDARY_SECONDS = 3.0  # an error that may follow from another one is reported if no other one arrives within this time
EXIT_SECONDS = 8.0  # a rank that can end by itself has ended this long after the failure was sent to it
SAVE_SECONDS = 22.0  # the same for a rank that is writing a checkpoint
LONGEST_LINE = 1 << 26  # bytes of a message of a rank; that with all ranks of a run has about 60 for each
GAP_SECONDS = 3.0  # if the monitor itself did not run for this long (a suspended machine), what it sees is not the ranks' fault


@dataclass
class LocalRank:
    """A rank of this node."""

    rank: int
    pid: int
    memory: mmap.mmap
    stack_file: Path
    writer: asyncio.StreamWriter
    kills: processes.OutOfMemoryKills
    stopped_at: float = 0.0
    is_finished: bool = False  # its program is complete
    is_dead: bool = False
    status: int | None = None  # exit code, or minus the signal
    reading: page.Reading | None = None
    collective: asyncio.Future | None = None  # the last collective of the rank, once it has answered


@dataclass
class Monitor:
    """The state of this process."""

    node: int
    host: str
    num_local: int
    launcher: int  # pid of the parent of the ranks; 0: they have none of interest
    parent: int  # the rank that started this process
    report_after: float
    abort_after: float
    ranks: dict[int, LocalRank] = field(default_factory=dict)
    remote: dict[int, RankView] = field(default_factory=dict)
    heard_ranks_at: dict[int, float] = field(default_factory=dict)
    timings: dict[int, page.Timing] = field(default_factory=dict)  # of ranks on other nodes
    slow_run: SlowRun | None = None
    stacks: dict[int, Stack] = field(default_factory=dict)
    asked_stacks: dict[int, int] = field(default_factory=dict)  # rank to its beats at that moment
    failure: dict[str, Any] | None = None
    peers: Peers | None = None
    output: OutputFolder | None = None
    node_socket: socket.socket | None = None  # listens for the monitors of other nodes

    def __post_init__(self) -> None:
        self.judge = Judge(self.node, self.host, self.report_after, self.abort_after)
        self.failed_at = 0.0
        self.quiet_until = 0.0
        self.pending: dict[str, Any] | None = None  # a failure of this node, sent to the coordinator
        self.kill_stage = 0
        self.tasks: set[asyncio.Task] = set()
        self.stop_reason = ""
        self.is_launcher_dead = False
        self.changed = asyncio.Event()

    # ---- ranks of this node

    async def serve_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the messages of a rank: one JSON object per line."""
        local: LocalRank | None = None
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                message = json.loads(line)
                if "hello" in message:
                    local = self._register(message["hello"], writer)
                elif "roster" in message:
                    self._connect(message)
                elif "output_dir" in message:
                    self.output = OutputFolder(message["output_dir"])
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

    def _register(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> LocalRank:
        with open(hello["page"], "rb") as file:
            memory = mmap.mmap(file.fileno(), page.SIZE, access=mmap.ACCESS_READ)
        pid = hello["pid"]
        local = LocalRank(hello["rank"], pid, memory, Path(hello["stack"]), writer, processes.OutOfMemoryKills(pid))
        self.ranks[local.rank] = local
        self._keep(self._watch_death(local))
        if self.failure:
            self._send_to_rank(local, {"failure": self.failure})
        if self.stop_reason:
            self._send_to_rank(local, {"stop": self.stop_reason})
        return local

    async def _watch_death(self, local: LocalRank) -> None:
        await wait_for_end(local.pid)
        local.status = processes.exit_status(local.pid)
        await asyncio.sleep(0.05)  # its last messages are read before
        local.is_dead = True
        if local.is_finished and not local.status:
            self.changed.set()
            return
        if not self.failure and not self.pending and (not local.is_finished or local.status):
            self._submit(self._describe_death(local))
        self.changed.set()

    def _describe_death(self, local: LocalRank) -> dict[str, Any]:
        seen = page.read(local.memory)
        place = page.format_place(seen.step, seen.phase)
        what = processes.describe_exit(local.status)
        how = "Continue from the last checkpoint with --resume."
        if local.kills.happened():
            what = "was killed by the kernel, because its cgroup (container, Slurm job) used more memory than its limit,"
            how = "Use a smaller --micro_batch_size or fewer --num_workers, or raise the limit. " + how
        elif local.status in (-signal.SIGKILL, None):
            how = f"If nobody killed it, the machine ran out of memory: see `dmesg -T | grep -i kill` on {self.host}. " + how
        elif local.status in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL):
            how = "A library crashed; its output may be above. PYTHONFAULTHANDLER=1 prints the Python stack of a crash. " + how
        elif local.status is not None and local.status >= 0:
            what += " without an error message"
            how = "Look for os._exit or a library that ends the process. " + how
        text = f"RANK_DIED: rank {local.rank} ({self.host}, pid {local.pid}) {what} {place}. {how}"
        return {
            "kind": "died", "text": text, "line": f"error: {text}", "exit_code": 1, "rank": local.rank, "host": self.host,
            "step": page.step_of(seen.step, seen.phase),
        }  # fmt: skip

    def _send_to_rank(self, local: LocalRank, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            local.writer.write(json.dumps(message).encode() + b"\n")

    async def watch_launcher(self) -> None:
        """Report the death of the launcher. Linux sends the ranks a signal, at which they save and stop."""
        await wait_for_end(self.launcher)
        status = processes.exit_status(self.launcher)
        self.is_launcher_dead = True
        await asyncio.sleep(0.3)
        if self.failure or all(local.is_finished or local.is_dead for local in self.ranks.values()):
            return
        what = processes.describe_exit(status) if status != 0 else "died"
        step = max((local.reading.step for local in self.ranks.values() if local.reading), default=0)
        text = f"the launcher of {self.host} (pid {self.launcher}) {what} at step {step}. Its ranks save a checkpoint and end."
        self._announce(Event(WARNING, "LAUNCHER_DIED", text, host=self.host, step=step))

    # ---- failures

    def _submit(self, failure: dict[str, Any]) -> None:
        """Report a failure of a rank of this node to the coordinator, which chooses the first one of the run."""
        if self.failure or self.pending:
            return
        self.pending = failure
        if self._decides():
            self._keep(self._decide(failure, SECONDARY_SECONDS if failure.get("is_secondary") else 0))
            return
        for node in (0, 1):
            if self.peers:
                self.peers.send(node, {"failed": failure})
        seconds = DECIDE_SECONDS + (SECONDARY_SECONDS if failure.get("is_secondary") else 0)
        self._keep(self._decide(failure, seconds))

    async def _decide(self, failure: dict[str, Any], seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._fail(failure)

    def _fail(self, failure: dict[str, Any]) -> None:
        """End the run: print the failure here and on all nodes, and send it to the ranks."""
        if self.failure:
            return
        self.failure, self.failed_at = failure, time.monotonic()
        if self.peers:
            self.peers.broadcast({"failure": failure})
        print_line(failure["line"])
        if "TORCHELASTIC_RUN_ID" in os.environ:  # a launcher that may start the ranks again
            step = failure.get("step", -1)
            write_outcome(
                self.launcher, {**failure, "text": failure["line"], "step": None if step < 0 else step, "time": time.time()}
            )
        for local in self.ranks.values():
            self._send_to_rank(local, {"failure": failure})
        self.changed.set()

    def _announce(self, event: Event) -> None:
        if event.severity == ERROR:
            failure = {
                "kind": "died", "text": f"{event.kind}: {event.text}", "line": str(event), "exit_code": 1, "rank": event.rank,
                "host": event.host, "step": event.step,
            }  # fmt: skip
            self._fail(failure)
            return
        print_line(str(event))
        if self.peers:
            self.peers.broadcast({"event": str(event)})

    def _end_ranks(self, now: float) -> None:
        """End the ranks that have not ended by themselves after a failure."""
        alive = [local for local in self.ranks.values() if not local.is_dead]
        for local in alive:
            reading = page.read(local.memory)
            seconds = SAVE_SECONDS if reading.writing else EXIT_SECONDS
            is_stopped = processes.state_of(local.pid) in ("T", "t")
            if now - self.failed_at > (0 if is_stopped else seconds):
                with contextlib.suppress(OSError):
                    os.kill(local.pid, signal.SIGKILL)
        if alive and not self.kill_stage and now - self.failed_at > SAVE_SECONDS + 3:
            self.kill_stage = 1
            for local in alive:
                blocked = processes.blocked_thread(local.pid)
                where = f" in {name}" if (name := processes.kernel_stack(blocked or local.pid)) else ""
                print_line(
                    f"error: RANK_BLOCKED: rank {local.rank} ({self.host}, pid {local.pid}) cannot be killed, because the kernel "
                    f"blocks it{where} (state D). It ends when its disk or file system answers. Nothing waits for it."
                )

    # ---- other nodes

    def _connect(self, message: dict[str, Any]) -> None:
        """Connect to the other nodes. `roster` are all nodes, and `ranks` all ranks."""
        self.roster = {node["node"]: node for node in message["roster"]}
        for entry in message["ranks"]:
            if entry["node"] != self.node:
                self.remote[entry["rank"]] = RankView(entry["rank"], entry["node"], entry["host"], entry["pid"])
        if len(self.roster) > 1:
            self.peers = Peers(self.node, message["roster"], bytes.fromhex(message["token"]), self.receive)
            self.peers.start()
            if self.node_socket is not None:
                self._keep(self.peers.listen_for_pings(self.node_socket))
        self.slow_run = SlowRun(self.node, message, self.peers, self._announce)

    def receive(self, node: int, message: dict[str, Any]) -> None:
        """Handle a message of another monitor."""
        if "ranks" in message:
            now = time.monotonic()
            for rank, step, phase, age, normal, state, stopped, writing, finished, *timing in message["ranks"]:
                if view := self.remote.get(rank):
                    view.step, view.phase, view.age, view.normal, view.state = step, phase, age, normal, state
                    view.stopped, view.writing, view.is_finished = stopped, writing, finished
                    self.heard_ranks_at[rank] = now
                    self.timings[rank] = page.Timing(*timing)
        if "failure" in message and not self.failure:
            self._adopt(message["failure"])
        if "failed" in message and not self.failure and self._decides():
            self._keep(self._decide(message["failed"], SECONDARY_SECONDS if message["failed"].get("is_secondary") else 0))
        if "event" in message:
            print_line(message["event"])
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

    def _adopt(self, failure: dict[str, Any]) -> None:
        """Take over the failure that another node has chosen, and pass it on if this node coordinates too."""
        self._fail(failure)

    def _spread_stop(self, reason: str, source: int | None = None) -> None:
        if self.stop_reason:
            return
        self.stop_reason = reason
        for local in self.ranks.values():
            self._send_to_rank(local, {"stop": reason})
        if self.peers:
            for node in self.peers.peers:
                if node != source:
                    self.peers.send(node, {"stop": reason})

    def _decides(self) -> bool:
        """Return whether this node chooses the diagnosis: node 0, node 1 if node 0 is lost, and others if they are cut off."""
        if self.node == 0 or not self.peers:
            return True
        now = time.monotonic()
        return all(self._is_lost(self.peers.peers[node], now) for node in range(min(self.node, 2)) if node in self.peers.peers)

    def _is_lost(self, peer: Peer, now: float) -> bool:
        return peer.is_done or peer.silent(now) > self.report_after or peer.closed(now) > 1.0

    async def _send_stack(self, node: int, rank: int) -> None:
        stack = await self._read_stack(rank)
        if self.peers:
            self.peers.send(node, {"stack": [rank, list(stack), stack.collective]})

    async def _read_stack(self, rank: int) -> Stack:
        local = self.ranks.get(rank)
        if local is None:
            return Stack()
        local.collective = asyncio.get_running_loop().create_future()
        self._send_to_rank(local, {"want_collective": True})
        stack = await read_stack(local.pid, local.stack_file, processes.state_of(local.pid))
        with contextlib.suppress(asyncio.TimeoutError):  # a rank that is stopped or holds the GIL does not answer
            stack.collective = await asyncio.wait_for(local.collective, 0.5)
        if (
            local.reading
            and local.reading.phase == page.DATA
            and (worker := await read_stack_of_worker(local.pid, local.stack_file))
        ):
            worker[8:] = ["(a data worker, for which the rank waits)", *stack]
            return worker
        return stack

    async def _collect_stack(self, rank: int) -> None:
        self.stacks[rank] = await self._read_stack(rank)

    # ---- the loop

    def _keep(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def run(self) -> None:
        """Watch until the last rank of this node has ended."""
        if self.launcher:
            self._keep(self.watch_launcher())
        parent = asyncio.ensure_future(wait_for_end(self.parent))
        last, count = time.monotonic(), 0
        while not (parent.done() and all(local.is_dead for local in self.ranks.values()) and not self._waits_for_decision()):
            self.changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), READ_SECONDS)
            now = time.monotonic()
            if now - last > GAP_SECONDS:
                self.quiet_until = now + self.report_after + 5
            self._read_pages(now)
            if self.failure:
                self._end_ranks(now)
                if self.kill_stage:
                    break
            count += 1
            if count % BEAT_EVERY == 0:
                self._send_beat()
                if not self.failure and now > self.quiet_until:
                    if self._decides():
                        self._judge(now, now - last)
                    else:
                        self._hand_over()
            last = now
        if self.peers:
            await self.peers.close()

    def _hand_over(self) -> None:
        """Close what this node has reported while it was cut off. From now on the coordinator decides again."""
        for event in self.judge.close([view for view in self.remote.values() if view.rank in self.heard_ranks_at]):
            print_line(str(event))

    def _waits_for_decision(self) -> bool:
        return self.pending is not None and self.failure is None

    def _read_pages(self, now: float) -> None:
        for local in self.ranks.values():
            if not local.is_dead:
                local.reading = page.read(local.memory)
                is_stopped = processes.state_of(local.pid) in ("T", "t")
                local.stopped_at = (local.stopped_at or now) if is_stopped else 0.0

    def _view(self, local: LocalRank, now: float) -> RankView:
        reading = local.reading or page.read(local.memory)
        return RankView(
            local.rank, self.node, self.host, local.pid, reading.step, reading.phase, reading.age, reading.normal,
            processes.state_of(local.pid), now - local.stopped_at if local.stopped_at else 0.0, reading.writing,
            local.is_finished or local.is_dead,
        )  # fmt: skip

    def _send_beat(self) -> None:
        if self.peers:
            now = time.monotonic()
            views = [self._view(local, now) for local in self.ranks.values()]
            rows = [
                [
                    v.rank,
                    v.step,
                    v.phase,
                    round(v.age, 2),
                    v.normal,
                    v.state,
                    round(v.stopped, 2),
                    round(v.writing, 1),
                    v.is_finished,
                    *self._timing(v.rank),
                ]
                for v in views
            ]
            self.peers.broadcast({"ranks": rows})
            self.peers.ping_silent()

    def _timing(self, rank: int) -> page.Timing:
        """Return the times that a rank of this node has published, rounded to keep messages short."""
        local = self.ranks[rank]
        timing = (local.reading or page.read(local.memory)).timing
        return page.Timing(timing.step, *(round(seconds, 4) for seconds in timing[1:]))

    def _judge(self, now: float, seconds: float) -> None:
        views = [self._view(local, now) for local in self.ranks.values()]
        for rank, view in self.remote.items():
            if rank in self.heard_ranks_at:
                late = now - self.heard_ranks_at[rank]
                views.append(RankView(**{**view.__dict__, "age": view.age + late}))
        nodes = []
        if self.peers:
            known = {v.node for v in views}
            for peer in self.peers.peers.values():
                if not peer.is_done and peer.node in known:
                    nodes.append(
                        NodeView(peer.node, peer.host, peer.address, peer.silent(now), peer.closed(now), peer.is_one_way(now))
                    )
        views.sort(key=lambda v: v.rank)
        for v in views:  # a stack is valid as long as its rank does not progress
            if v.age < 1 and v.rank in self.stacks:
                del self.stacks[v.rank]
                self.asked_stacks.pop(v.rank, None)
        if self.output:
            own = [v for v in views if v.node == self.node]
            slow = [v for v in own if (v.phase == page.SAVE and v.age > self.report_after) or v.writing > 30]
            self.judge.is_disk_hung = self.output.is_hung(bool(slow))
            for event in self.output.events():
                self._announce(event)
        for event in self.judge.examine(seconds * BEAT_EVERY, views, nodes, self.stacks):
            self._announce(event)
        if self.slow_run and self.node == 0:
            self.slow_run.examine(views, {**self.timings, **{rank: self._timing(rank) for rank in self.ranks}})
        for rank in self.judge.wants_stacks - self.asked_stacks.keys():
            self.asked_stacks[rank] = 1
            if rank in self.ranks:
                self._keep(self._collect_stack(rank))
            elif self.peers and rank in self.remote:
                self.peers.send(self.remote[rank].node, {"want_stack": rank})


async def wait_for_end(pid: int) -> None:
    """Return when a process has ended, also if its parent has not read its exit code yet."""
    if not hasattr(os, "pidfd_open"):
        while processes_exists(pid):
            await asyncio.sleep(0.2)
        return
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def processes_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return True
    except OSError:
        return False


def print_line(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, (text + "\n").encode())


async def watch(options: dict[str, Any]) -> None:
    """Watch the ranks of this node until they have ended."""
    names = ("node", "host", "num_local", "launcher", "parent", "report_after", "abort_after")
    monitor = Monitor(**{name: options[name] for name in names})

    async def accept_node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # asyncio would print it when this process ends
            if monitor.peers:
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
    shutil.rmtree(options["folder"], ignore_errors=True)
    # Not a normal end: a thread may be blocked in the kernel, by a disk that does not answer, and asyncio would print an error for
    # every connection of a rank that cannot be killed.
    os._exit(0)


def main() -> None:
    # Schedulers send signals to every process of a job. The monitor ends with its ranks.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(watch(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
