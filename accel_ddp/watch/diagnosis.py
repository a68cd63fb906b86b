"""The rules that decide which rank, node or link is at fault when a run does not progress.

`Judge.RULES` lists them from the most certain to the least certain kind of fault. The first rule that finds something in what the
monitors have observed decides, because whatever else does not progress waits for it. A fault is reported early and ends the run
late: many faults end by themselves.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from accel_ddp import phases
from accel_ddp.records.incidents import ERROR, INFO, WARNING
from accel_ddp.text import listed, ranks_text, rough_seconds
from accel_ddp.watch.processes import Stack

ABORT_FACTOR = 5  # a phase that takes this many times its usual duration is aborted, if that is later than --hang_abort_seconds
SLOW_DISK_FACTOR = 4  # times --hang_abort_seconds until a disk that does not answer ends the run
DEBUGGERS = ("/pdb.py:", "/bdb.py:", "debugpy", "pydevd")
STACK_SECONDS = 1.5  # how long a report waits for the stacks of the ranks
SHORT_SILENCE = 3.0  # an interruption of a link that is shorter is not worth a line
MANY_NODES = 4  # lost nodes; more are reported together
OUTLIER_SECONDS = 3.0  # between the last observation of a fault and its end
CLOSED_SECONDS = 2.0  # a node whose connection was closed may connect again within this time
CLOSED_ABORT_SECONDS = 5.0  # later the node is gone: its kernel has closed the connection


@dataclass
class RankView:
    """The last observation of one rank. Ages are in seconds."""

    rank: int
    node: int
    host: str
    pid: int
    step: int = 0
    phase: int = phases.START
    age: float = 0.0  # in this phase
    normal: float | None = None  # the slowest recent duration of this phase on this rank; None: not learned
    state: str = "S"  # of the process
    stopped: float = 0.0  # how long the process has been stopped
    is_suspended: bool = False  # its launcher is stopped too: the user has pressed Ctrl-Z
    writing: float = 0.0  # how long a checkpoint has been written
    is_finished: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def place(self) -> str:
        return phases.format_place(self.step, self.phase)

    @property
    def position(self) -> tuple[float, int]:
        """Return how far the rank has come. A rank never waits for one that is ahead of it."""
        return (float("inf"), 0) if self.phase in phases.UNLIMITED else (self.current_step, self.phase)

    @property
    def current_step(self) -> int:
        return phases.step_of(self.step, self.phase)


@dataclass
class NodeView:
    node: int
    host: str
    address: str
    silent: float = 0.0  # seconds since its last message
    closed: float = 0.0  # seconds since it closed its connection; 0: the connection is open
    one_way: str = ""  # the host that still receives packets of the other one; "": neither is known to
    heard_by: list[str] = field(default_factory=list)  # other nodes that it still answers
    lost_by: list[str] = field(default_factory=list)  # other nodes that it does not answer either


class Event(NamedTuple):
    severity: str
    kind: str
    text: str
    rank: int = -1
    host: str = ""
    step: int = 0

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind}: {self.text}"


@dataclass
class Cause:
    kind: str
    seconds: float  # since when
    text: str  # a sentence that names the rank or the node
    advice: str
    aborts_after: float
    culprits: list[int] = field(default_factory=list)
    wants_stacks_of: list[int] = field(default_factory=list)
    host: str = ""
    step: int = 0

    @property
    def culprit(self) -> int:
        return self.culprits[0] if self.culprits else -1


@dataclass
class _Open:
    cause: Cause
    waited: float = 0.0  # for stacks
    is_reported: bool = False
    ages: dict[tuple[int, int], tuple[float, float | None]] = field(default_factory=dict)  # see Judge.outliers


class _Scene:
    def __init__(self, judge: "Judge", ranks: list[RankView], nodes: list[NodeView], stacks: dict[int, Stack]):
        self.judge, self.ranks, self.nodes, self.stacks = judge, ranks, nodes, stacks
        ended = {r.node for r in ranks if r.is_finished} - {r.node for r in ranks if not r.is_finished}
        is_lost = lambda node: node.silent > judge.report_after or node.closed > CLOSED_SECONDS
        # A node without ranks may leave.
        self.lost = {node.node: node for node in nodes if is_lost(node) and node.node not in ended}
        self.active = [r for r in ranks if not r.is_finished and r.node not in self.lost]
        self._usual: dict[int, float] = {}  # seconds of a phase

    def usual(self, r: RankView) -> float:
        if r.phase not in self._usual:  # once per phase, because a run may have thousands of ranks
            normals = [self.judge.normal(other) for other in self.ranks if other.phase == r.phase]
            self._usual[r.phase] = phases.usual_seconds(r.phase, normals)
        return self._usual[r.phase]

    @functools.cached_property
    def overdue(self) -> list[RankView]:
        waits_for_disk = lambda r: (self.judge.disk_hung or r.state == "D") and r.phase in phases.LEAST
        usual = lambda r: (r.normal or 0.0) if waits_for_disk(r) else self.usual(r)
        return [r for r in self.active if r.age > usual(r) + self.judge.report_after]

    @functools.cached_property
    def behind(self) -> tuple[float, int]:
        """On a GPU a rank may wait in any phase that launches kernels, and is then ahead of the one at fault."""
        return min((r.position for r in self.active), default=(0, 0))

    def is_in_collective(self, r: RankView) -> bool:
        return self.stacks.get(r.rank, Stack()).is_in_collective()

    def may_wait(self, r: RankView) -> bool:
        """Return whether a rank may wait for another one. Its own delay then proves nothing."""
        return r.phase in phases.WAITING or self.is_in_collective(r)

    @functools.cached_property
    def is_standstill(self) -> bool:
        """Whether each rank waits for another one, and their collectives move no bytes."""
        return self.all_wait and self.judge.quiet > self.judge.report_after

    @functools.cached_property
    def all_wait(self) -> bool:
        return (
            len(self.active) > 1
            and bool(self.overdue)
            and all(self.may_wait(r) or r.position > self.behind for r in self.active)
            and all(r.age > self.judge.report_after for r in self.active)
        )

    def waits_for(self, culprits: list[int]) -> list[int]:
        excluded = set(culprits)
        return [r.rank for r in self.ranks if not r.is_finished and r.rank not in excluded]


class Judge:
    """Turns observations into events. The coordinator has one, and so has every node that is cut off."""

    def __init__(self, own_host: str, report_after: float, abort_after: float, how_to_continue: Callable[[Cause], str]):
        """`abort_after` 0: a run that does not progress is reported, but never ended."""
        self.own_host, self.report_after, self.abort_after = own_host, report_after, abort_after
        self.how_to_continue = how_to_continue  # after a cause that ends the ranks
        self.open: dict[str, _Open] = {}
        self.silences: dict[int, float] = {}  # the longest silence of each node that is not over
        self.wants_stacks: set[int] = set()
        # Seconds for which the disk of the output folder has not answered. The monitor of the main node sets it.
        self.disk_hung = 0.0
        # Seconds since the last byte of a collective between nodes arrived; infinity: no byte was seen. The monitor sets it.
        self.quiet = float("inf")
        self.waits_for_link = False  # all ranks wait, and bytes still arrive
        # Rank, phase -> how long a fault made it, and the usual duration before: a rank learns the former too.
        self.outliers: dict[tuple[int, int], tuple[float, float | None]] = {}

    def examine(self, seconds: float, ranks: list[RankView], nodes: list[NodeView], stacks: dict[int, Stack]) -> list[Event]:
        """Return what is to be printed now. `seconds` have passed since the last call. `nodes` are the other nodes."""
        scene = _Scene(self, ranks, nodes, stacks)
        causes = next((causes for rule in self.RULES if (causes := rule(self, scene))), {})
        self.waits_for_link = not causes and scene.all_wait
        self.wants_stacks = {rank for cause in causes.values() for rank in cause.wants_stacks_of if rank not in stacks}
        events = []
        for key, cause in causes.items():
            found = self.open.setdefault(key, _Open(cause))
            found.cause = cause
            if self._is_over_limit(cause, scene):
                events.append(self._event(ERROR, cause, scene, f"The ranks exit. {self.how_to_continue(cause)}"))
                found.is_reported = True
            elif not found.is_reported:
                found.waited += seconds
                if all(rank in stacks for rank in cause.wants_stacks_of) or found.waited > STACK_SECONDS:
                    found.is_reported = True
                    left = cause.aborts_after - cause.seconds
                    has_end = self.abort_after and left < float("inf")
                    end = f"The ranks exit in {max(left, 1):.0f} s if nothing changes." if has_end else ""
                    events.append(self._event(WARNING, cause, scene, end))
        for found in self.open.values():
            found.ages |= {(r.rank, r.phase): (r.age, self.normal(r)) for r in ranks if r.age > self.report_after}
        over = [self.open.pop(key) for key in list(self.open) if key not in causes]
        return events + self._end(over, ranks) + self._short_silences(nodes)

    def close(self, ranks: list[RankView]) -> list[Event]:
        over, self.open = self.open, {}
        return self._end(list(over.values()), ranks)

    def normal(self, r: RankView) -> float | None:
        """Return the usual duration that the rank has learned for its phase, or the one before a fault that has prolonged it."""
        age, before = self.outliers.get((r.rank, r.phase), (float("inf"), None))
        is_outlier = r.normal is not None and age <= r.normal < age + OUTLIER_SECONDS
        return before if is_outlier else r.normal

    def _end(self, over: list[_Open], ranks: list[RankView]) -> list[Event]:
        events = []
        for cause, ages in ((found.cause, found.ages) for found in over if found.is_reported):
            self.outliers |= ages
            step = max((r.current_step for r in ranks), default=cause.step)
            text = f"this fault was over after {cause.seconds:.0f} s, at step {step}: {cause.text}"
            events.append(Event(INFO, cause.kind, text, cause.culprit, cause.host, step))
        return events

    def _is_over_limit(self, cause: Cause, scene: _Scene) -> bool:
        if not self.abort_after or min(cause.seconds, self.quiet) < cause.aborts_after:
            return False
        # A rank that still progresses proves that the others do not wait for anything yet.
        others = set(scene.waits_for(cause.culprits))
        running = [r for r in scene.ranks if r.rank in others and r.phase not in phases.UNLIMITED]
        return not any(r.age < scene.usual(r) + self.report_after for r in running)

    def _event(self, severity: str, cause: Cause, scene: _Scene, end: str) -> Event:
        waiting = scene.waits_for(cause.culprits)
        parts = [cause.text]
        if waiting and cause.kind != "DEADLOCK":
            parts.append(f"{ranks_text(waiting).capitalize()} wait{'s' * (len(waiting) == 1)} for it.")
        parts += [cause.advice, end]
        text = " ".join(part for part in parts if part)
        for rank in cause.wants_stacks_of:
            if stack := scene.stacks.get(rank):
                text += f"\n  The innermost calls of rank {rank}:\n{stack.text()}"
        return Event(severity, cause.kind, text, cause.culprit, cause.host, cause.step)

    def _short_silences(self, nodes: list[NodeView]) -> list[Event]:
        events = []
        for node in nodes:
            longest = self.silences.get(node.node, 0.0)
            if node.silent >= longest:
                self.silences[node.node] = node.silent
            elif node.silent < 1.5:
                self.silences[node.node] = node.silent
                if SHORT_SILENCE <= longest < self.report_after and not node.closed:
                    text = f"{node.host} ({node.address}) did not answer {self.own_host} for {longest:.0f} s, and does again."
                    events.append(Event(INFO, "LINK_LOST", text, host=node.host))
        return events

    # ---- rules

    def _gone(self, scene: _Scene) -> dict[str, Cause]:
        """Find nodes that do not answer and processes that are stopped. Both are seen from outside, without any limit of a phase."""
        lost = scene.lost
        # Heartbeats of different nodes end up to a second after each other.
        is_cut_off = len(scene.nodes) > 1 and all(node.silent > self.report_after - 1 and not node.closed for node in scene.nodes)
        if lost and (is_cut_off or len(lost) > MANY_NODES):
            lost = {node.node: node for node in scene.nodes} if is_cut_off else lost
            causes = {"nodes": self._lost_nodes(list(lost.values()), 1 + len(scene.nodes), scene.ranks)}
            for node in lost:
                self.open.pop(f"node {node}", None)
        else:
            causes = {f"node {node.node}": self._lost_node(node, scene.ranks) for node in lost.values()}
        for r in (r for r in scene.active if r.stopped > self.report_after):
            text = f"{r.name} has been stopped (SIGSTOP) for {r.stopped:.0f} s {r.place}."
            advice = f"A debugger, a scheduler or a user has suspended it. `kill -CONT {r.pid}` on {r.host} continues it."
            limit = self.abort_after
            if r.is_suspended:
                advice, limit = f"Its launcher is stopped too. `fg` or `kill -CONT` on {r.host} continues both.", float("inf")
            place = ([r.rank], [r.rank], r.host, r.current_step)
            causes[f"rank {r.rank}"] = Cause("RANK_STOPPED", r.stopped, text, advice, limit, *place)
        return causes

    def _late(self, scene: _Scene) -> dict[str, Cause]:
        """Find ranks that are behind all others, for longer than usual, and not because they wait for another rank."""
        late = [r for r in scene.overdue if r.position == scene.behind and not scene.may_wait(r)]
        if not any(r.phase in phases.WAITING and r.age > self.report_after for r in scene.active):
            late = [r for r in late if r.phase != phases.OTHER]  # the user's own code, for which no rank waits
        is_slow_disk = lambda r: r.phase == phases.SAVE and not self.disk_hung and r.state != "D"
        return self._hung([r for r in late if not is_slow_disk(r)], scene)

    def _alone(self, scene: _Scene) -> dict[str, Cause]:
        return self._hung([r for r in scene.overdue if r.phase in phases.WAITING and len(scene.active) == 1], scene)

    def _computing(self, scene: _Scene) -> dict[str, Cause]:
        """Find ranks of a standstill that are in no collective, while others are: in a backward pass, a rank also computes."""
        waiting = [r for r in scene.active if scene.may_wait(r)] if scene.is_standstill else []
        working = [r for r in waiting if scene.stacks.get(r.rank) and not scene.is_in_collective(r)]
        return self._hung(working, scene) if len(working) < len(waiting) else {}

    def _standstill(self, scene: _Scene) -> dict[str, Cause]:
        if not scene.is_standstill:
            return {}
        active, places = scene.active, []
        for r in active[:16]:
            stack = scene.stacks.get(r.rank)
            inside = stack.name_of_collective() if stack and stack.is_in_collective() else phases.NAMES[r.phase]
            last = f" (its last collective: {stack.collective})" if stack and stack.collective else ""
            places.append(f"{r.name} is at step {r.current_step} in {inside}{last}")
        seconds = min(self.quiet, *(r.age for r in active))
        finished = [r.rank for r in scene.ranks if r.is_finished]
        ended = f" The program of {ranks_text(finished)} has already exited." if finished else ""
        text = f"no rank has progressed for {seconds:.0f} s, although all are alive: {'; '.join(places)}.{ended}"
        advice = (
            "Every rank must call the same collectives in the same order. Look for code that only some ranks run. If all ranks are "
            "at the same place, the network between them may drop packets of the process group: run `accel-ddp doctor`."
        )
        limit = self._limit(max(usual for r in active if (usual := scene.usual(r)) < float("inf")))
        every = [r.rank for r in active[:16]]
        step = max(r.current_step for r in active)
        return {"all": Cause("DEADLOCK", seconds, text, advice, limit, every, every, "", step)}

    RULES = (_gone, _late, _alone, _computing, _standstill)  # from the most certain to the least certain kind

    # ---- causes

    def _hung(self, ranks: list[RankView], scene: _Scene) -> dict[str, Cause]:
        return {f"rank {r.rank}": self._hung_rank(r, scene) for r in ranks}

    def _limit(self, usual: float) -> float:
        return max(self.abort_after, ABORT_FACTOR * usual) if usual < float("inf") else float("inf")

    def _lost_node(self, node: NodeView, ranks: list[RankView]) -> Cause:
        there = [r for r in ranks if r.node == node.node]
        seen = "; ".join(f"rank {r.rank} (pid {r.pid}) was last seen {r.place}" for r in there[:8])
        step = max((r.current_step for r in there), default=0)
        what = "the main node " if node.node == 0 else ""
        is_majority = len(node.lost_by) > len(node.heard_by)  # of the other nodes; between two nodes there is none
        if node.closed > CLOSED_SECONDS:
            kind, seconds, limit = "NODE_LOST", node.closed, min(CLOSED_ABORT_SECONDS, self.abort_after)
            text = f"{what}{node.host} ({node.address}) closed its connections {seconds:.0f} s ago: {seen}."
            advice = "Its processes were killed, or it was shut down. Start it again, or replace it."
        else:
            kind, seconds, limit = "LINK_LOST", node.silent, self.abort_after
            advice = "Its network is interrupted, or the node is down. Check both, and the firewalls."
            if is_majority:
                observers = listed([self.own_host, *node.lost_by], MANY_NODES)
                text = f"{what}{node.host} ({node.address}) has not answered {observers} for {seconds:.0f} s: {seen}."
            else:  # nobody can tell whose fault it is, so both sides print the same sentence
                first, second = sorted((self.own_host, node.host))
                both = f"{node.heard_by[0]} still hears both. " if node.heard_by else ""
                text = f"the link between {first} and {second} has been lost for more than {self.report_after:g} s. "
                text += f"{both}On {node.host}, {seen}."
                advice = f"Check the network between them, the firewalls, and whether {node.host} ({node.address}) is down."
            if node.one_way:
                # Not in the text, which is repeated when it is over: after an interruption, datagrams arrive before TCP continues.
                sender = node.host if node.one_way == self.own_host else self.own_host
                advice = (
                    f"{node.one_way} receives packets from {sender}, but {sender} receives none from {node.one_way}: a firewall or a "
                    f"switch drops packets in this direction. Check the rules of {sender}."
                )
        if node.node == 0 and (node.closed > CLOSED_SECONDS or is_majority):
            kind = "MAIN_NODE_LOST"
        return Cause(kind, seconds, text, advice, limit, [r.rank for r in there], host=node.host, step=step)

    def _lost_nodes(self, lost: list[NodeView], total: int, ranks: list[RankView]) -> Cause:
        """Return one cause for many nodes, for example behind a switch, instead of a line for each of them."""
        numbers = {node.node for node in lost}
        there = [r for r in ranks if r.node in numbers]
        is_closed = all(node.closed > CLOSED_SECONDS for node in lost)
        seconds = min(node.closed if is_closed else max(node.silent, node.closed) for node in lost)
        names = listed((f"{node.host} ({node.address})" for node in lost), MANY_NODES)
        what = "closed their connections to" if is_closed else "have not answered"
        step = max((r.current_step for r in there), default=0)
        is_cut_off = len(lost) == total - 1 and not is_closed
        number = f"all {len(lost)} nodes that should answer" if is_cut_off else f"{len(lost)} of {total} nodes"
        when = f"{seconds:.0f} s ago" if is_closed else f"for {seconds:.0f} s"
        text = f"{number} {what} {self.own_host} {when}: {names}. Their ranks were last seen at step {step}."
        advice = f"Check what these nodes have in common, for example a switch, and the network of {self.own_host}."
        if is_cut_off:
            advice = f"The network of {self.own_host} itself is interrupted. Check its cable, its interface and its firewall."
        limit = min(CLOSED_ABORT_SECONDS, self.abort_after) if is_closed else self.abort_after
        kind = "NODE_LOST" if is_closed else "LINK_LOST"
        return Cause(kind, seconds, text, advice, limit, [r.rank for r in there], host=lost[0].host, step=step)

    def _hung_rank(self, r: RankView, scene: _Scene) -> Cause:
        usual, seconds = scene.usual(r), r.age
        # The usual duration of a first batch is not known: it is reported early and ends the run late.
        limit = self._limit(usual if r.normal is not None else max(usual, phases.DEFAULT_USUAL))
        limit = float("inf") if r.phase == phases.OTHER else limit
        known = f" (usually {rough_seconds(usual)} at most)" if r.normal is not None else ""
        place = f"for {r.age:.0f} s{known} {r.place}"
        kind, text = "RANK_HUNG", f"{r.name} has not progressed {place}."
        advice = "The rank computes, or waits for something outside of this run: a disk, a network, a lock."
        if r.state == "D":
            kind, text = "RANK_BLOCKED", f"{r.name} has been blocked in the kernel (state D) {place}."
            advice = "Usually a disk or a network file system does not answer. The process cannot be killed until it does."
        elif r.phase in phases.LOADING:
            kind, text = "DATA_HUNG", f"{r.name} has waited for its data {place}."
            advice = "Look at the dataset's code, at its disk, and at the data workers of this rank."
        is_at_disk = self.disk_hung and (r.phase == phases.SAVE or r.state == "D")
        if is_at_disk:
            kind, text = "DISK_HUNG", f"{r.name} has waited for the disk of the output folder {place}."
            advice = "The disk does not answer. Check it, and its network if it is a network disk."
        if is_at_disk or r.state == "D":  # a slow disk that writes a large checkpoint may delay a small file for long
            seconds, limit = self.disk_hung or r.age, SLOW_DISK_FACTOR * self.abort_after
        if any(debugger in frame for frame in scene.stacks.get(r.rank, ()) for debugger in DEBUGGERS):
            advice, limit = "The rank is in a debugger.", float("inf")
        return Cause(kind, seconds, text, advice, limit, [r.rank], [r.rank], r.host, r.current_step)
