"""Reports about what slows a run down: `Slowness` gets the times of all ranks, and measurements of links when it asks for them."""

import asyncio
import contextlib
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


class SlowRun:
    """The coordinator has one, which judges. On other nodes it only measures links when the coordinator asks for it."""

    def __init__(self, node: int, message: dict[str, Any], peers: Peers, announce: Callable[[Event], None]):
        """`message` has all nodes and all ranks of the run."""
        self.node, self.peers, self.announce = node, peers, announce
        self.roster = {entry["node"]: entry for entry in message["roster"]}
        ranks = sorted(message["ranks"], key=lambda entry: entry["rank"])
        self.slowness = Slowness(*([entry[name] for entry in ranks] for name in ("host", "node", "pid")))
        self.has_reference = False  # the links were measured at the start
        self.task: asyncio.Future | None = None  # a measurement
        self.answers: dict[tuple[int, int], asyncio.Future] = {}

    def examine(self, views: list[RankView], timings: dict[int, Timing]) -> None:
        """Report what is slow. Only the coordinator calls it, after every heartbeat."""
        for view in views:
            if view.rank in timings and not view.is_finished:
                self._report(self.slowness.observe(view.rank, timings[view.rank], view.state in ("T", "t")))
        if not self.peers.peers or (self.task and not self.task.done()):
            return
        is_reference = not self.has_reference and all(peer.heard_at for peer in self.peers.peers.values())
        if is_reference or self.slowness.wants_probe:
            self.has_reference |= is_reference
            self.task = asyncio.ensure_future(self._measure_all(is_reference))

    def _report(self, notices: list[Notice]) -> None:
        for notice in notices:
            rank = notice.ranks[0] if notice.ranks else -1
            self.announce(Event(INFO if notice.is_over else WARNING, notice.kind, notice.text, rank, notice.host, notice.since))

    async def _measure_all(self, is_reference: bool) -> None:
        """Measure the bytes per second between neighbouring nodes, in both directions, and of each node with itself.

        Pairs that have no node in common are measured together. The lowest rate is the reference, and the highest one that of a link
        that may be slow, so neither is an outlier of a busy processor.
        """
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
        """Measure the link to the node that the coordinator asks for, or take its answer."""
        if message.get("measure") in self.roster:
            target = message["measure"]
            self.peers.send(node, {"rate": [target, await self._measure_from_here(target)]})
        elif "rate" in message:
            target, rates = message["rate"]
            answer = self.answers.get((node, target))
            if answer and not answer.done():
                answer.set_result(rates)
