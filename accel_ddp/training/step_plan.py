"""Which items each rank computes in which micro-batch of a step: a function of the step, the options, the lengths and the shares.

A step takes as long as its slowest rank, so the items of a step are dealt to ranks by their cost. Neither the items of a step nor, up
to rounding and dropout, its result depend on how they are dealt.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from torch.utils.data import Sampler

from accel_ddp.config.train_config import TrainConfig

Item = tuple[int, int]  # position in the stream, index in the dataset
Shares = tuple[float, ...]  # the part of the work of each rank; their sum is 1


class Order(Protocol):
    """Which item each position of the stream has."""

    def items(self, position: int, number: int) -> list[int]: ...


class Cost(NamedTuple):
    """The time of an item up to a factor, and whether the texts of a micro-batch are padded to the longest one."""

    per_token: float = 1.0
    per_square: float = 0.0  # of the length of each text: attention
    pads: bool = True

    def of(self, parts: np.ndarray) -> np.ndarray:
        """Return the cost of each item. `parts` are the lengths of its texts."""
        parts = parts.astype(np.float64)
        return self.per_token * np.maximum(1, parts.sum(1)) + self.per_square * (parts**2).sum(1)


BY_TOKENS = Cost()


class StepPlan:
    """The items of each step, and the micro-batches of each rank.

    With `--micro_batch_size` and equal shares, all micro-batches of a step have the same number of items and about as many tokens.
    Otherwise items are dealt to ranks by cost, in proportion to the shares, and each rank packs its own into as few micro-batches
    as the limit allows. An item above the limit is a micro-batch of its own. A rank has at least one item, and may have more
    micro-batches than another one, unless `is_sharded`: FSDP gathers weights in every micro-batch of every rank.
    """

    def __init__(
        self, order: Order, cfg: TrainConfig, num_ranks: int, parts: np.ndarray | None = None, cost: Cost = BY_TOKENS,
        is_sharded: bool = False,
    ):  # fmt: skip
        """`parts` are the lengths of the texts of each item, a row for each, or None if they are not known."""
        self.order, self.num_ranks, self.parts, self.cost, self.is_sharded = order, num_ranks, parts, cost, is_sharded
        self.limits = [cfg.split(num_ranks)[0]] * num_ranks  # items or tokens of a micro-batch, for each rank
        self.counts_tokens = False
        self.size = cfg.global_batch_size

    def first(self, step: int) -> int:
        """Return the position in the stream at which a step begins."""
        return step * self.size

    def items(self, step: int) -> list[Item]:
        """Return the items of a step."""
        first = self.first(step)
        return list(enumerate(self.order.items(first, self.first(step + 1) - first), start=first))

    def of_rank(self, step: int, rank: int, shares: Shares | None = None) -> list[list[Item]]:
        """Return the micro-batches of a rank. Every rank must pass the same shares; None: they are equal."""
        return self.deal(self.items(step), rank, shares)

    def deal(self, items: list[Item], rank: int, shares: Shares | None = None) -> list[list[Item]]:
        """Return the micro-batches of a rank, if these are the items of a step."""
        if shares is None and not self.counts_tokens:
            return self._equal_groups(items)[rank :: self.num_ranks]
        parts = np.ones((len(items), 1)) if self.parts is None else self.parts[[index for _, index in items]]
        costs = self.cost.of(parts)
        owned = _deal(costs, np.array(shares or [1 / self.num_ranks] * self.num_ranks), self.is_sharded)
        pack = lambda rank, number=0: self._pack(owned[rank], parts, costs, self.limits[rank], number)
        number = 0
        if self.is_sharded:
            number = min(max(len(pack(rank)) for rank in range(self.num_ranks)), *map(len, owned))
        # The most expensive ones first: those that ranks of a sharded model compute at the same time are then alike.
        found = sorted(pack(rank, number), key=lambda group: -costs[group].sum())
        return [[items[place] for place in sorted(group)] for group in found]

    def _equal_groups(self, items: list[Item]) -> list[list[Item]]:
        micro = min(self.limits[0], len(items) // self.num_ranks)
        number = len(items) // micro
        if self.parts is None or number == 1:
            return [items[first : first + micro] for first in range(0, len(items), micro)]
        return spread(items, self.parts[[index for _, index in items]].sum(1), number)

    def _pack(self, own: list[int], parts: np.ndarray, costs: np.ndarray, limit: float, number: int) -> list[list[int]]:
        """Return the micro-batches of items, which begin with the most expensive one: `number`, or as few as possible."""
        sizes = parts.sum(1) if self.counts_tokens else np.ones(len(parts))
        number, is_fixed = number or int(np.ceil(np.minimum(sizes[own], limit).sum() / limit)), bool(number)
        while (found := _fill(own, sizes, costs, limit, number)) is None:
            number, limit = (number, np.inf) if is_fixed else (number + 1, limit)
        return found


def spread(items: list[Item], lengths: np.ndarray, groups: int) -> list[list[Item]]:
    """Return groups with the same number of items and about the same number of tokens. `lengths` are those of the items.

    Items are assigned from the longest to the shortest, alternating the direction over the groups.
    """
    rows = [items[place] for place in np.argsort(-lengths, kind="stable")]
    turns = [rows[first : first + groups][:: -1 if turn % 2 else 1] for turn, first in enumerate(range(0, len(rows), groups))]
    return [sorted(group) for group in zip(*turns, strict=True)]


def _deal(costs: np.ndarray, shares: np.ndarray, is_even: bool) -> list[list[int]]:
    """Return the items of each rank: each goes to the rank that would be done first, from the most expensive item on.

    Without `is_even` the slowest rank takes at most 4/3 of the shortest possible time if the shares are equal (Graham 1969). With it
    ranks have the same number of items, or one more.
    """
    loads, sizes = np.zeros(len(shares)), np.zeros(len(shares), dtype=int)
    owned: list[list[int]] = [[] for _ in shares]
    for done, item in enumerate(np.argsort(-costs, kind="stable").tolist()):
        ends = (loads + costs[item]) / shares
        if is_even:
            ends[sizes > done // len(shares)] = np.inf
        elif len(costs) - done <= (sizes == 0).sum():  # the last items are for ranks without any
            ends[sizes > 0] = np.inf
        rank = int(ends.argmin())
        loads[rank] += costs[item]
        sizes[rank] += 1
        owned[rank].append(item)
    return owned


def _fill(own: list[int], sizes: np.ndarray, costs: np.ndarray, limit: float, number: int) -> list[list[int]] | None:
    """Return `number` groups of about the same cost, none above `limit` unless it is a single item; None: they do not fit."""
    loads, filled = np.zeros(number), np.zeros(number)
    groups: list[list[int]] = [[] for _ in range(number)]
    for item in own:
        fits = (filled + sizes[item] <= limit) | (loads == 0)
        group = int(np.where(fits, loads, np.inf).argmin())
        if not fits[group]:
            return None
        loads[group] += costs[item]
        filled[group] += sizes[item]
        groups[group].append(item)
    return groups


class OwnMicroBatches(Sampler[list[Item]]):
    """Yields the micro-batches of a rank, from a step on, without end. `numbers` has how many each step has that it has begun."""

    def __init__(self, plan: StepPlan, step: int, rank: int, shares_at: Callable[[int], Shares | None]):
        self.plan, self.step, self.rank, self.shares_at = plan, step, rank, shares_at
        self.numbers: deque[int] = deque()

    def __iter__(self) -> Iterator[list[Item]]:
        step = self.step
        while True:
            found = self.plan.of_rank(step, self.rank, self.shares_at(step))
            self.numbers.append(len(found))
            yield from found
            step += 1
