"""Reports about what slows a run down. `Flows`, the bytes that collectives still move, tell a slow link from a deadlock."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from accel_ddp.nodes.probe import measure_rate
from accel_ddp.phases import Timing
from accel_ddp.records.incidents import INFO, WARNING
from accel_ddp.watch.diagnosis import Event, RankView
from accel_ddp.watch.link import Peers
from accel_ddp.watch.slowness import Notice, Slowness, neighbours

SLOW_RATE = 5e6  # bytes per second
MEASURE_SECONDS = 30.0  # the longest measurement; one that takes longer has no result
FLOW_SAMPLES = 12  # heartbeats over which the rate of a collective is measured
GAP_SECONDS = 2.0  # between two heartbeats with bytes; they are only sent while a rank is late


class Flows:
    """The bytes that ranks exchange with those of other nodes. Every monitor reads them while one of its ranks is late."""

    def __init__(self, roster: list[dict[str, Any]]):
        self.nodes: dict[str, int] = {entry["address"]: entry["node"] for entry in roster if "address" in entry}
        # Source and target node -> time, bytes, bytes that wait in the source. Both ends report a pair; the source knows more.
        self.samples: dict[tuple[int, int, bool], deque[tuple[float, int, int]]] = {}
        self.moved_at: dict[tuple[int, int], float] = {}

    def add(self, node: int, rows: list[list], now: float) -> None:
        """Add the rows of `tcp_traffic` of a node. Peers that are no node of the run, such as a tracker's server, are left out."""
        totals: dict[tuple[int, int, bool], list[int]] = {}
        for local, *_ in rows:  # a collective may use another interface than the monitors
            self.nodes.setdefault(local, node)
        for _, remote, acked, received, queued in rows:
            if (peer := self.nodes.get(remote, node)) != node:
                for key, numbers in (((node, peer, True), (acked, queued)), ((peer, node, False), (received, 0))):
                    totals[key] = [a + b for a, b in zip(totals.get(key, (0, 0)), numbers)]
        for key, (count, queued) in totals.items():
            samples = self.samples.setdefault(key, deque(maxlen=FLOW_SAMPLES))
            if samples and now - samples[-1][0] > GAP_SECONDS:  # these are of another step
                samples.clear()
            if samples and count > samples[-1][1]:
                self.moved_at[key[:2]] = now
            samples.append((now, count, queued))

    def seconds_since(self, now: float, source: int | None = None, target: int | None = None) -> float:
        """Return for how long no byte of a collective has arrived: none between these nodes, or none at all."""
        times = [at for pair, at in self.moved_at.items() if source is None or pair == (source, target)]
        return now - max(times, default=float("-inf"))

    def slowest(self, now: float, seconds: float) -> tuple[tuple[int, int], float] | None:
        found = []
        for (source, target, _), samples in self.samples.items():
            recent = [sample for sample in samples if now - sample[0] < seconds]
            if len(recent) > 1 and (duration := recent[-1][0] - recent[0][0]) >= 1 and recent[-1][1] > recent[0][1]:
                found.append((recent[-1][2], (source, target), (recent[-1][1] - recent[0][1]) / duration))
        return max(found)[1:] if found else None


class SlowRun:
    """The coordinator has one, which judges. On other nodes it only measures links when the coordinator asks for it."""

    def __init__(self, node: int, message: dict[str, Any], peers: Peers, announce: Callable[[Event], None]):
        self.node, self.peers, self.announce = node, peers, announce
        self.roster = {entry["node"]: entry for entry in message["roster"]}
        ranks = sorted(message["ranks"], key=lambda entry: entry["rank"])
        self.slowness = Slowness(*([entry[name] for entry in ranks] for name in ("host", "node", "pid")))
        self.has_reference = False  # the links were measured at the start
        self.task: asyncio.Future | None = None  # a measurement
        self.answers: dict[tuple[int, int], asyncio.Future] = {}

    def examine(self, views: list[RankView], timings: dict[int, Timing]) -> None:
        for view in views:
            if view.rank in timings and not view.is_finished:
                self._report(self.slowness.observe(view.rank, timings[view.rank], view.state in ("T", "t")))
        if not self.peers.peers or (self.task and not self.task.done()):
            return
        is_reference = not self.has_reference and all(peer.heard_at for peer in self.peers.peers.values())
        if is_reference or self.slowness.wants_probe:
            self.has_reference |= is_reference
            self.task = asyncio.ensure_future(self._measure_all(is_reference))

    def report_flow(self, flows: Flows, views: list[RankView], now: float) -> None:
        step, seconds = max(view.current_step for view in views), min(view.age for view in views)
        if flow := flows.slowest(now, seconds):
            self._report(self.slowness.add_flow(*flow, step, seconds))

    def _report(self, notices: list[Notice]) -> None:
        for notice in notices:
            rank = notice.ranks[0] if notice.ranks else -1
            self.announce(Event(INFO if notice.is_over else WARNING, notice.kind, notice.text, rank, notice.host, notice.since))

    async def _measure_all(self, is_reference: bool) -> None:
        """Measure disjoint pairs at once. The lowest rate is the reference, later the highest counts: no outliers."""
        rounds: list[list[tuple[int, int]]] = []
        for pair in [*neighbours(list(self.roster)), *((node, node) for node in sorted(self.roster))]:
            free = next((each for each in rounds if not any(set(pair) & set(other) for other in each)), None)
            if free is None:
                rounds.append([pair])
            else:
                free.append(pair)
        rates, choose = {}, min if is_reference else max
        for pairs in rounds:
            results = await asyncio.gather(*(self._measure(*pair) for pair in pairs))
            rates.update({pair: choose(measured) for pair, measured in zip(pairs, results) if measured})
        if is_reference:
            self.slowness.reference.update(rates)
        else:
            self._report(self.slowness.add_rates(rates))

    async def _measure(self, source: int, target: int) -> list[float]:
        if source == self.node:
            return await self._measure_from_here(target)
        answer = self.answers[source, target] = asyncio.get_running_loop().create_future()
        self.peers.send(source, {"measure": target})
        try:
            return await asyncio.wait_for(answer, MEASURE_SECONDS + 5)
        except asyncio.TimeoutError:
            return []
        finally:
            del self.answers[source, target]

    async def _measure_from_here(self, target: int) -> list[float]:
        """Return the rates of up to three measurements. One is enough if it is so slow that a processor cannot be the reason."""
        peer, rates = self.roster[target], []
        with contextlib.suppress(asyncio.TimeoutError, OSError):
            for _ in range(3):
                measured = measure_rate(peer["address"], peer["port"], self.peers.keys[target], self.node)
                rate = await asyncio.wait_for(measured, MEASURE_SECONDS)
                if rate is None:
                    break
                rates.append(rate)
                if rate < SLOW_RATE:
                    break
                await asyncio.sleep(0.2)
        return rates

    async def receive(self, node: int, message: dict[str, Any]) -> None:
        if message.get("measure") in self.roster:
            target = message["measure"]
            self.peers.send(node, {"rate": [target, await self._measure_from_here(target)]})
        elif "rate" in message:
            target, rates = message["rate"]
            answer = self.answers.get((node, target))
            if answer and not answer.done():
                answer.set_result(rates)
