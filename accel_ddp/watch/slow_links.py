"""Which links between nodes are slow, from measurements of their rates."""

import statistics
from collections.abc import Mapping

SLOWER_LINK = 4.0  # times slower than before, or than the other links
REPEAT_STEPS = 100  # the next measurement or report of the same case; the pause doubles each time


class Links:
    """The measurements of links between nodes, and when the next one is due."""

    def __init__(self) -> None:
        self.reference: dict[tuple[int, int], float] = {}
        self.wants_probe = False
        self.slow: tuple[int, int] | None = None  # reported, and not over
        self.since = 0  # the first step in which all ranks wait longer than usual; 0: they do not
        self.asked_at, self.asked_waiting, self.pause = 0, 0.0, REPEAT_STEPS

    def is_probe_due(self, step: int, waiting: float) -> bool:
        """Return whether to measure now: the first time, if waiting has doubled, and after 100, 200, 400, ... steps."""
        if self.asked_waiting and waiting < 2 * self.asked_waiting:
            if step - self.asked_at < self.pause:
                return False
            self.pause *= 2
        self.asked_at, self.asked_waiting, self.wants_probe = step, waiting, True
        return True


def find_slow_link(
    rates: Mapping[tuple[int, int], float], reference: Mapping[tuple[int, int], float]
) -> tuple[tuple[int, int], float, float] | None:
    """Return (pair, its rate, the rate it is compared with) of the slowest link that is much slower than it was, or than the others.

    Return None if there is none. A busy processor slows every measurement down. Pairs of a node with itself show by how much.
    """
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


def pairs_to_measure(nodes: list[int]) -> list[tuple[int, int]]:
    """Return the pairs of nodes between which gradients travel in a ring, in both directions, and each node with itself."""
    return [*neighbours(nodes), *((node, node) for node in sorted(set(nodes)))]


def neighbours(nodes: list[int]) -> list[tuple[int, int]]:
    """Return the pairs of nodes between which gradients travel in a ring, in both directions."""
    ordered = sorted(set(nodes))
    ring = list(zip(ordered, ordered[1:] + ordered[:1])) if len(ordered) > 2 else [tuple(ordered)] if len(ordered) == 2 else []
    return [pair for a, b in ring for pair in ((a, b), (b, a))]
