"""The search for ranks and links that slow a run down, in the times that ranks publish. Nothing here ends a run.

Ranks wait for each other in every step, so all have the same step time. The rank whose own time is the longest costs the others the
difference. If no rank stands out but all wait longer than before, a link may be slow. This is reported only after a
measurement of the links has confirmed it, because a busy machine delays communication as well.
"""

import itertools
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

from accel_ddp.phases import Timing
from accel_ddp.text import ranks_text, rough_seconds

SLOWER_LINK = 4.0  # times slower than before, or than the other links
REPEAT_STEPS = 100  # the next measurement or report of the same case; the pause doubles each time


def find_slow_link(
    rates: Mapping[tuple[int, int], float], reference: Mapping[tuple[int, int], float]
) -> tuple[tuple[int, int], float, float] | None:
    """Return (pair, rate, usual rate) of a slow link, or None. A busy processor slows all; a node with itself shows how much."""
    links = {pair: rate for pair, rate in rates.items() if pair[0] != pair[1]}
    busy = {a: min(1.0, rate / reference[a, a]) for (a, b), rate in rates.items() if a == b and reference.get((a, a))}
    found = []
    for pair, rate in links.items():
        others = [other for each, other in links.items() if each != pair and each != pair[::-1]]
        usual = statistics.median(others) if others else reference.get(pair, 0.0)
        before = reference.get(pair, 0.0) * min(busy.get(node, 1.0) for node in pair)
        if rate < max(usual if others else 0.0, before) / SLOWER_LINK:
            found.append((pair, rate, usual or reference[pair]))
    return min(found, key=lambda each: each[1], default=None)


def neighbours(nodes: list[int]) -> list[tuple[int, int]]:
    ordered = sorted(set(nodes))
    ring = list(zip(ordered, ordered[1:] + ordered[:1])) if len(ordered) > 2 else [tuple(ordered)] if len(ordered) == 2 else []
    return [pair for a, b in ring for pair in ((a, b), (b, a))]


CHECK_LINK = "Check the cable, the duplex mode and the load of that link (ethtool, ip -s link)."
STRAGGLER, SLOW_LINK, DATA_SLOW = "STRAGGLER", "SLOW_LINK", "DATA_SLOW"

WARM_UP = 3  # steps that are not judged
BLOCK_SECONDS = 0.25  # steps are judged together until they have taken this long, because single short steps are only noise
WINDOW, BAD = 10, 8  # so many of the last blocks must agree
LONG_WINDOW = 120  # blocks, for a rank that is interrupted again and again
SLOWER = 1.25  # times the own time of the other ranks
LOST = 0.2  # fraction of the step time that others lose; less is not reported
CLEARLY_LOST = 0.4  # more than noise on a busy machine
STEADY = 3.0  # standard deviations
MATERIAL, LONG_SECONDS = 0.05, 60.0  # fraction of the last minute that the others must have lost; less is not worth a warning
LINK_WINDOW, LINK_BAD = 5, 4  # fewer blocks, because a measurement has to confirm it
GROWTH = 3.0  # times the earlier communication
WAITING = 0.5  # fraction of the step time in communication that is checked even if it was always so
DATA_SHARE, DATA_SECONDS = 0.3, 0.002  # of a step; shorter waits for data are not reported
REPEAT_SECONDS = 60.0  # a lasting case is reported again after REPEAT_STEPS, but not before so many seconds
OBSERVATIONS = 40  # of the state of a process

_CHECK_GPU = "Check {host} for other processes, low clock rates and heat (nvidia-smi -q)."
_BALANCE = "If it stays slower, --balance speed gives it fewer items."
# The parts of the own time of a rank, in the order in which it publishes them. Communication follows.
PARTS = {
    "data": (
        "waits for its data loader",
        "Loading data takes {share} of each step on {host}; increase --num_workers, or check the disk and the processor of {host}.",
    ),
    "forward": ("is slow in its forward pass", f"{_CHECK_GPU} {_BALANCE}"),
    "backward": ("is slow in its backward pass", f"{_CHECK_GPU} {_BALANCE}"),
    "optimizer": ("is slow in its optimizer", _CHECK_GPU),
    "other": ("is slow between its steps, in hooks or in logging", "Check the hooks and trackers, and the disk of {host}."),
}


class Notice(NamedTuple):
    kind: str
    is_over: bool  # the case has ended
    text: str
    ranks: tuple[int, ...]
    since: int  # the first step of the case
    host: str = ""  # of the first rank, or of the first node


class _Block(NamedTuple):
    """Consecutive steps of all ranks. Seconds are per step."""

    first: int
    last: int
    seconds: float
    normal: float  # own time of the slowest rank that is not slow
    slow: dict[int, tuple[float, str, float]]  # rank: own time, the part in which it is slow, time of data loading
    waiting: float  # communication of the rank that waits least; it does not wait for other ranks
    data: dict[int, float]  # node: of its rank that waits least for data
    is_uneven: bool  # a rank is clearly slow

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    def lost(self, rank: int) -> float:
        return self.slow[rank][0] - self.normal if rank in self.slow else 0.0


class _Case:
    """Something that has been reported, or a measurement that was made, and is not over."""

    def __init__(self, since: int) -> None:
        self.since, self.reported_at, self.pause, self.severity = since, 0, REPEAT_STEPS, 0.0
        self.ranks: set[int] = set()
        self.until, self.lost, self.seconds, self.passed = since, 0.0, 0.0, 0.0  # to the last slow block; `passed` to the newest

    def add(self, block: _Block) -> None:
        self.passed += block.seconds * block.steps
        if lost := max(map(block.lost, self.ranks)):
            self.lost, self.seconds, self.until = self.lost + lost * block.steps, self.passed, block.last

    @property
    def cost(self) -> str:
        """Return what was lost, in the same words at the beginning and at the end of the case."""
        per_step = self.lost / (self.until - self.since + 1)
        return f"{rough_seconds(per_step)} per step for it, {_percent(min(1.0, self.lost / max(self.seconds, 1e-9)))} of the step time"

    def is_due(self, step: int, severity: float, step_seconds: float = float("inf")) -> bool:
        """Return whether to report it, which the caller then does: first, if twice as severe, after 100, 200, 400 ... steps."""
        if self.severity and severity < 2 * self.severity:
            if step - self.reported_at < self.pause * max(1.0, REPEAT_SECONDS / REPEAT_STEPS / max(step_seconds, 1e-6)):
                return False
            self.pause *= 2
        self.reported_at, self.severity = step, severity
        return True


class Slowness:
    def __init__(self, hosts: list[str], nodes: list[int], pids: list[int]):
        self.hosts, self.nodes, self.pids = hosts, nodes, pids
        self.reference: dict[tuple[int, int], float] = {}  # bytes per second of (source node, target node) at the start
        self._reset()

    def _reset(self) -> None:
        """Remove all observations of steps. The rates of links at the start stay valid."""
        hosts = self.hosts
        self.samples: list[list[Timing]] = [[] for _ in hosts]  # since the end of the last block
        self.states: list[deque[tuple[int, bool]]] = [deque(maxlen=OBSERVATIONS) for _ in hosts]  # step, is stopped
        self.stopped: set[int] = set()  # ranks whose process was in state T
        self.first: int | None = None  # the last step before the current block; None: not every rank has published
        self.target = 0  # the block may end when every rank has done this step
        self.behind = set(range(len(hosts)))  # ranks that have not
        self.blocks: deque[_Block] = deque(maxlen=LONG_WINDOW)
        self.cases: dict[tuple[str, int], _Case] = {}  # kind, node
        self.usual_waiting: list[float] = []  # communication of the first blocks
        self.wants_probe = False  # the coordinator should measure all neighboring pairs of nodes now, for `add_rates`
        self.probe = _Case(0)  # `since` is the first step in which all ranks wait longer than usual; 0: they do not
        self.slow_link: tuple[int, int] | None = None  # reported, and not over
        self.link_text = ""  # what was reported about it

    def observe(self, rank: int, times: Timing, is_stopped: bool = False) -> list[Notice]:
        self.states[rank].append((times.step, is_stopped))
        if is_stopped:
            self.stopped.add(rank)
        samples = self.samples[rank]
        if samples and times.step < samples[-1].step:  # the program has called `fit` again
            self._reset()
            samples = self.samples[rank]
        if not any(times[1:]):
            samples.clear()  # the first step may be a checkpoint's
        if not samples or times.step > samples[-1].step:
            samples.append(times)
            if self.first is None and all(each and any(each[-1][1:]) for each in self.samples):
                self._begin(max(each[0].step for each in self.samples) + WARM_UP)
            elif self.first is not None and times.step >= self.target:
                self.behind.discard(rank)
        return self._judge() if self._complete_block() else []

    def _complete_block(self) -> bool:
        if self.first is None or self.behind:
            return False
        last = min(each[-1].step for each in self.samples)
        seconds = sum(self._spent(0, last)) * (last - self.first)
        if seconds < BLOCK_SECONDS:
            self._wait_for(last + 1)
            return False
        self.blocks.append(self._block(last))
        for each in self.samples:
            while len(each) > 1 and each[1].step <= last:
                del each[0]
        self._begin(last)
        return True

    def _begin(self, step: int) -> None:
        self.first = step
        self._wait_for(step + 1)

    def _wait_for(self, step: int) -> None:
        self.target = step
        self.behind = {rank for rank, samples in enumerate(self.samples) if samples[-1].step < step}

    def _spent(self, rank: int, last: int) -> list[float]:
        before, after = _at(self.samples[rank], self.first), _at(self.samples[rank], last)
        return [(b - a) / (last - self.first) for a, b in zip(before, after)]

    def _block(self, last: int) -> _Block:
        spent = [self._spent(rank, last) for rank in range(len(self.hosts))]
        own = [sum(parts[:-1]) for parts in spent]
        seconds = statistics.median(map(sum, spent))
        usual = statistics.median_low(own)  # of two ranks it is the faster one
        slow = {rank for rank, value in enumerate(own) if value > SLOWER * usual and value - usual > LOST / 2 * seconds}
        normal = max(value for rank, value in enumerate(own) if rank not in slow)
        typical = [statistics.median_low(column) for column in zip(*spent)]
        part = lambda rank: max(zip(PARTS, spent[rank], typical), key=lambda each: each[1] - each[2])[0]
        data: dict[int, float] = {}
        for node, parts in zip(self.nodes, spent):
            data[node] = min(parts[0], data.get(node, parts[0]))
        return _Block(
            self.first + 1, last, seconds, normal, {rank: (own[rank], part(rank), spent[rank][0]) for rank in slow},
            min(parts[-1] for parts in spent), data,
            any(own[rank] - normal >= CLEARLY_LOST * seconds for rank in slow),
        )  # fmt: skip

    def _judge(self) -> list[Notice]:
        newest, recent = self.blocks[-1], self._last(WINDOW)
        found: list[Notice] = []
        stragglers: dict[int, list[int]] = {}
        lately = self._lost_lately()
        totals = dict.fromkeys(range(len(self.nodes)), 0.0)  # the seconds that the others have lost by each rank
        for block in self.blocks:
            for rank in block.slow:
                totals[rank] += block.lost(rank) * block.steps
        for case in (case for (kind, _), case in self.cases.items() if kind == STRAGGLER):
            case.add(newest)
        for rank in sorted({rank for block in recent for rank in block.slow} | self.stopped):
            node = self.nodes[rank]
            is_known = (STRAGGLER, node) in self.cases
            if self._stopped_share(rank) >= LOST or ((is_known or rank in lately) and self._is_straggler(rank, totals)):
                stragglers.setdefault(node, []).append(rank)
        for node, ranks in stragglers.items():
            if (STRAGGLER, node) not in self.cases:
                self.cases[STRAGGLER, node] = self._begin_case(ranks)
            case = self.cases[STRAGGLER, node]
            case.ranks.update(ranks)
            worst = max(ranks, key=self._lost)
            if case.is_due(newest.last, self._lost(worst) or self._stopped_share(worst), newest.seconds):
                text = self._straggler_text(ranks, worst, case)
                found.append(Notice(STRAGGLER, False, text, tuple(ranks), case.since, self.hosts[worst]))
        found += self._judge_links(is_excluded=bool(stragglers) or self._has_suspect())
        found += self._judge_data(is_excluded=bool(stragglers))
        for kind, node in [key for key in self.cases if key[0] == STRAGGLER and key[1] not in stragglers]:
            of_node = [rank for rank, its in enumerate(self.nodes) if its == node]
            if all(sum(rank in block.slow for block in recent) <= WINDOW - BAD for rank in of_node):
                case = self.cases.pop((kind, node))
                ranks, host = sorted(case.ranks), self.hosts[of_node[0]]
                text = (
                    f"{ranks_text(ranks)} ({host}) {'is' if len(ranks) == 1 else 'are'} as fast as the others again. From step "
                    f"{case.since} to step {case.until} the others waited {case.cost}, {rough_seconds(case.lost)} in all."
                )
                found.append(Notice(STRAGGLER, True, text, tuple(ranks), case.since, host))
        return found

    def _lost_lately(self) -> list[int]:
        """Return the ranks by which the others have lost a material part of the last minute, more than by most other ranks."""
        seconds, lost = 0.0, [0.0] * len(self.nodes)
        for block in reversed(self.blocks):
            seconds += block.seconds * block.steps
            for rank in block.slow:
                lost[rank] += block.lost(rank) * block.steps
            if seconds >= LONG_SECONDS:
                break
        usual = statistics.median_low(lost)  # on a busy machine, each rank delays the others now and then
        return [rank for rank, each in enumerate(lost) if each - usual >= MATERIAL * max(seconds, LONG_SECONDS)]

    def _begin_case(self, ranks: list[int]) -> _Case:
        """Return a case that includes the blocks before it, up to a pause of `WINDOW` blocks in which these ranks were not slow."""
        blocks = list(self.blocks)
        slow = [at for at, block in enumerate(blocks) if any(rank in block.slow for rank in ranks)] or [len(blocks) - 1]
        first = next((b for a, b in reversed(list(itertools.pairwise(slow))) if b - a > WINDOW), slow[0])
        case = _Case(blocks[first].first)
        case.ranks.update(ranks)
        for block in blocks[first:]:
            case.add(block)
        return case

    def _is_straggler(self, rank: int, totals: dict[int, float]) -> bool:
        """5 busy processes on 2 cores, 2 minutes: never 40 % lost in over 4 of 10 blocks, or a mean above 1.7 deviations."""
        window, bad = (2 * WINDOW, 2 * WINDOW - 2) if self.is_uneven else (WINDOW, BAD)
        recent = [block.lost(rank) / block.seconds for block in self._last(window)]
        if sum(share >= CLEARLY_LOST for share in recent) >= bad:
            return True
        if len(recent) == window and statistics.mean(recent) >= max(LOST, STEADY * statistics.pstdev(recent)):
            return True
        if len(self.blocks) < LONG_WINDOW // 2 or not any(recent):
            return False
        if totals[rank] < 1.5 * LOST * sum(block.seconds * block.steps for block in self.blocks):
            return False
        elsewhere = max((value for each, value in totals.items() if self.nodes[each] != self.nodes[rank]), default=0.0)
        return elsewhere <= totals[rank] / 4 and sum(rank in block.slow for block in self.blocks) >= BAD

    @property
    def is_uneven(self) -> bool:
        """Whether single ranks were clearly slower in a tenth of the earlier blocks, as with texts of different lengths."""
        earlier = list(self.blocks)[:-WINDOW]
        return sum(block.is_uneven for block in earlier) > 0.1 * len(earlier)

    def _last(self, number: int) -> list[_Block]:
        return list(self.blocks)[-number:]

    def _stopped_share(self, rank: int) -> float:
        states = self.states[rank]
        stops = {step for step, is_stopped in states if is_stopped}
        if len(stops) < 4 or len(states) < WINDOW:
            return 0.0
        return sum(is_stopped for _, is_stopped in states) / len(states)

    def _has_suspect(self) -> bool:
        counts = Counter(rank for block in self._last(LINK_WINDOW) for rank in block.slow)
        return max(counts.values(), default=0) > LINK_WINDOW - LINK_BAD

    def _lost(self, rank: int) -> float:
        bad = [block.lost(rank) for block in self._last(WINDOW) if rank in block.slow]
        return statistics.mean(bad) if bad else 0.0

    def _straggler_text(self, ranks: list[int], worst: int, case: _Case) -> str:
        host, pid = self.hosts[worst], self.pids[worst]
        name = f"rank {worst} ({host})"
        if len(ranks) > 1:
            name = f"ranks {', '.join(map(str, ranks))} ({host}) are slow. The slowest, rank {worst},"
        bad = [block for block in self._last(WINDOW) if worst in block.slow]
        share = self._stopped_share(worst)
        observed = f" Its process was stopped by a signal (state T) in {_percent(share)} of the observations."
        stopped = observed if share >= LOST else ""
        if not bad:
            return f"{name} is slow since step {case.since} (pid {pid}).{stopped} Find out what stops it."
        own, normal, data = (
            statistics.mean(values) for values in zip(*((b.slow[worst][0], b.normal, b.slow[worst][2]) for b in bad))
        )
        seconds = statistics.mean(block.seconds for block in bad)
        what, advice = PARTS[statistics.mode(block.slow[worst][1] for block in bad)]
        ratio = own / max(normal, 1e-9)
        slower = f"{_percent(ratio - 1)} slower than" if ratio < 10 else "more than 10 times slower than"
        return (
            f"{name} is {slower} the others, which wait {case.cost}, {rough_seconds(case.lost)} in all. Since step {case.since} it "
            f"{what} (pid {pid}): it needs "
            f"{rough_seconds(own)} of its own per step, the others {rough_seconds(normal)}.{stopped} "
            f"{'Find out what stops it.' if stopped else advice.format(host=host, share=_percent(min(1.0, data / seconds)))}"
        )

    # Links

    def _judge_links(self, is_excluded: bool) -> list[Notice]:
        newest = self.blocks[-1]
        if len(set(self.nodes)) < 2:
            return []
        if is_excluded:
            self.wants_probe = False
            return []
        if len(self.usual_waiting) < WINDOW and not self.slow_link:
            self.usual_waiting.append(newest.waiting)
        usual = statistics.median(self.usual_waiting) if self.usual_waiting else newest.waiting
        recent = self._last(LINK_WINDOW)
        has_grown = lambda block: block.waiting > GROWTH * usual and block.waiting - usual > LOST * block.seconds
        bad = [block for block in recent if has_grown(block) or block.waiting > WAITING * block.seconds]
        probe = self.probe
        if len(bad) >= LINK_BAD:
            if probe.is_due(newest.last, statistics.median(block.waiting for block in bad)):
                self.wants_probe, probe.since = True, probe.since or bad[0].first
        elif probe.since and sum(block.first >= probe.since for block in recent if block not in bad) >= LINK_BAD:
            self.wants_probe, since, probe.since, probe.severity = False, probe.since, 0, 0.0
            if self.slow_link:
                pair, self.slow_link = self.slow_link, None
                text = f"communication {self._pair(pair)} takes as long as before again. It was slow from step {since} on."
                return [Notice(SLOW_LINK, True, text, (), since)]
        return []

    def add_rates(self, rates: Mapping[tuple[int, int], float]) -> list[Notice]:
        self.wants_probe = False
        slowest = find_slow_link(rates, self.reference)
        if not slowest:
            return []
        pair, rate, reference = slowest
        recent = self._last(LINK_BAD)
        waiting = statistics.median(block.waiting for block in recent)
        since = self.probe.since or self.blocks[-1].first
        before = [block.waiting for block in self.blocks if block.last < since]
        usual = min(statistics.median(before or self.usual_waiting or [waiting]), waiting)
        self.slow_link = pair
        text = (
            f"{self._compare(pair, rate, reference)}. Since step {since} all ranks "
            f"wait {rough_seconds(waiting)} per step for communication, instead of {rough_seconds(usual)}. They lose "
            f"{_percent((waiting - usual) / statistics.median(block.seconds for block in recent))} of the step time. {CHECK_LINK}"
        )
        return [Notice(SLOW_LINK, False, text, (), since)]

    def add_flow(self, pair: tuple[int, int], rate: float, step: int, seconds: float) -> list[Notice]:
        """Return a notice about the link for which all ranks have waited for some seconds in one step. It is reported once."""
        if self.slow_link:
            return []
        self.slow_link, self.probe.since, self.probe.reported_at, self.probe.severity = pair, step, step, seconds
        text = (
            f"{self._compare(pair, rate)}. All ranks have waited {seconds:.0f} s for communication at step {step}, and its bytes still "
            f"arrive. The run continues, unless a collective takes longer than --ddp_timeout_seconds. {CHECK_LINK}"
        )
        return [Notice(SLOW_LINK, False, text, (), step)]

    def _compare(self, pair: tuple[int, int], rate: float, others: float = 0.0) -> str:
        at_start = f"at the start it was {_rate(self.reference[pair])}" if pair in self.reference else ""
        median = f"the median of the other pairs is {_rate(others)}" if others and len(set(self.nodes)) > 2 else ""
        compared = " and ".join(filter(None, [at_start, median]))
        self.link_text = f"the link {self._pair(pair)} transfers {_rate(rate)}" + f"; {compared}" * bool(compared)
        return self.link_text

    def _pair(self, pair: tuple[int, int]) -> str:
        source, target = (self.hosts[self.nodes.index(node)] for node in pair)
        return f"{source} -> {target}"

    # Data

    def _judge_data(self, is_excluded: bool) -> list[Notice]:
        recent = self._last(WINDOW)
        is_late = lambda block, node: block.data[node] > max(DATA_SECONDS, DATA_SHARE * block.seconds)
        bad = {node: found for node in recent[-1].data if (found := [block for block in recent if is_late(block, node)])}
        nodes = [node for node, blocks in bad.items() if len(blocks) >= BAD]
        if len(nodes) < len(recent[-1].data) and self._has_suspect():
            nodes = []  # the others wait for this node, which is reported as a straggler if that lasts
        key = (DATA_SLOW, -1)
        if not nodes or is_excluded:
            if key in self.cases and all(len(blocks) <= WINDOW - BAD for blocks in bad.values()):
                since = self.cases.pop(key).since
                return [Notice(DATA_SLOW, True, f"data loading, slow since step {since}, is fast again.", (), since)]
            return []
        waits = {node: statistics.mean(block.data[node] for block in bad[node]) for node in nodes}
        worst, wait = max(waits.items(), key=lambda each: each[1])
        seconds = statistics.mean(block.seconds for block in bad[worst])
        case = self.cases.setdefault(key, _Case(bad[worst][0].first))
        if not case.is_due(recent[-1].last, wait, seconds):
            return []
        hosts = [self.hosts[self.nodes.index(node)] for node in nodes]
        where = " and ".join(hosts) if len(hosts) < 4 else f"{len(hosts)} of {len(recent[-1].data)} nodes"
        text = (
            f"loading data takes {_percent(wait / seconds)} of each step on {where}; increase --num_workers. "
            f"{'The rank' if len(self.nodes) == 1 else 'Each rank there'} waits {rough_seconds(wait)} per step for its data loader "
            f"since step {case.since}. If more workers do not help, make the dataset faster: store decoded data, or use a faster disk."
        )
        return [Notice(DATA_SLOW, False, text, (), case.since, hosts[0])]


def _at(samples: list[Timing], step: int) -> list[float]:
    """Return the seconds up to `step`, which is between two samples if the reader has missed it."""
    after = next(i for i, times in enumerate(samples) if times.step >= step)
    b = samples[after]
    if b.step == step or not after:
        return list(b[1:])
    a = samples[after - 1]
    weight = (step - a.step) / (b.step - a.step)
    return [x + weight * (y - x) for x, y in zip(a[1:], b[1:])]


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _rate(value: float) -> str:
    return f"{value / 1e6:.1f} MB/s" if value >= 1e5 else f"{value / 1e6:.2g} MB/s"
