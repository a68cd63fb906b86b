"""Which items each rank computes in which micro-batch of a step: a function of the step, the options, the lengths and the shares.

A step takes as long as its slowest rank, so the items of a step are dealt to ranks by their cost. Neither the items of a step nor, up
to rounding and dropout, its result depend on how they are dealt.
"""

import bisect
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Sampler

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.ranks.team import Team

Item = tuple[int, int]  # position in the stream, index in the dataset
Shares = tuple[float, ...]  # the part of the work of each rank; their sum is 1


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
        self, order: Any, cfg: TrainConfig, num_ranks: int, parts: np.ndarray | None = None, cost: Cost = BY_TOKENS,
        is_sharded: bool = False,
    ):  # fmt: skip
        """`order` has the items of the stream, and `parts` the lengths of the texts of each item; None: they are not known."""
        self.order, self.num_ranks, self.parts, self.cost, self.is_sharded = order, num_ranks, parts, cost, is_sharded
        self.counts_tokens = bool(cfg.micro_batch_tokens)
        micro = np.inf if cfg.micro_batch_size == "auto" else cfg.micro_batch_size
        self.limits = [cfg.micro_batch_tokens or micro] * num_ranks  # items or tokens of a micro-batch of each rank
        # Whether all micro-batches have as many items if shares are equal.
        self.is_equal = not (self.counts_tokens or cfg.global_batch_tokens)
        # The position in the stream at which a step begins.
        self.first: Callable[[int], int] = lambda step: step * cfg.global_batch_size
        if cfg.global_batch_tokens:
            self.first = TokenSteps(order, parts.sum(1), cfg.global_batch_tokens).first

    def items(self, step: int) -> list[Item]:
        """Return the items of a step."""
        first = self.first(step)
        return list(enumerate(self.order.items(first, self.first(step + 1) - first), start=first))

    def deal(self, items: list[Item], rank: int, shares: Shares | None = None) -> list[list[Item]]:
        """Return the micro-batches of a rank, if these are the items of a step. All ranks pass the same shares; None: equal ones."""
        if shares is None and self.is_equal:
            return self._equal_groups(items)[rank :: self.num_ranks]
        parts = np.ones((len(items), 1)) if self.parts is None else self.parts[[index for _, index in items]]
        costs = self.cost.of(parts)
        by_cost, weights = np.argsort(-costs, kind="stable").tolist(), np.array(shares or [1.0] * self.num_ranks)
        owned = _deal(by_cost, costs, weights, costs, is_even=self.is_sharded)
        pack = lambda rank, number=0: self._pack(owned[rank], parts, costs, self.limits[rank], number)
        number = min(max(len(pack(rank)) for rank in range(self.num_ranks)), *map(len, owned)) if self.is_sharded else 0
        # The most expensive ones first: those that ranks of a sharded model compute at the same time are then alike.
        found = sorted(pack(rank, number), key=lambda group: -costs[group].sum())
        return [[items[place] for place in sorted(group)] for group in found]

    def _equal_groups(self, items: list[Item]) -> list[list[Item]]:
        micro = int(min(self.limits[0], len(items) // self.num_ranks))
        number = len(items) // micro
        if self.parts is None or number == 1:
            return [items[first : first + micro] for first in range(0, len(items), micro)]
        return spread(items, self.parts[[index for _, index in items]].sum(1), number)

    def _pack(self, own: list[int], parts: np.ndarray, costs: np.ndarray, limit: float, number: int) -> list[list[int]]:
        """Return the micro-batches of items, which begin with the most expensive one: `number`, or as few as possible."""
        if self.counts_tokens and self.cost.pads:
            return _cut(sorted(own, key=lambda item: -parts[item].sum()), parts, limit, number)
        sizes = parts.sum(1) if self.counts_tokens else np.ones(len(parts))
        least = max(1, int(np.ceil(np.minimum(sizes[own], limit).sum() / limit)))
        if self.parts is None:  # a stream of rows can only be read forward
            return [part.tolist() for part in np.array_split(own, number or least)]
        # A sharded model exceeds the limit if it needs more micro-batches than a rank has items.
        tries = [(number, limit), (number, np.inf)] if number else [(number, limit) for number in range(least, len(own) + 1)]
        return next(filter(None, (_deal(own, costs, np.ones(number), sizes, limit) for number, limit in tries)))


def spread(items: list[Item], lengths: np.ndarray, groups: int) -> list[list[Item]]:
    """Return groups with the same number of items and about the same number of tokens. `lengths` are those of the items.

    Items are assigned from the longest to the shortest, alternating the direction over the groups.
    """
    rows = [items[place] for place in np.argsort(-lengths, kind="stable")]
    turns = [rows[first : first + groups][:: -1 if turn % 2 else 1] for turn, first in enumerate(range(0, len(rows), groups))]
    return [sorted(group) for group in zip(*turns, strict=True)]


def _deal(
    own: list[int], costs: np.ndarray, shares: np.ndarray, sizes: np.ndarray, limit: float = np.inf, is_even: bool = False
) -> list[list[int]] | None:
    """Return a group of items for each share: each goes to the group that would be done first, from the most expensive item on.

    With equal shares and without other conditions, the largest group costs at most 4/3 of the least that is possible (Graham 1969).
    No group is empty, and none has a size above `limit` unless it is a single item; None: that was not found. With `is_even` groups
    have the same number of items, or one more.
    """
    loads, filled, numbers = np.zeros((3, len(shares)))
    groups: list[list[int]] = [[] for _ in shares]
    for done, item in enumerate(own):
        is_open = (filled + sizes[item] <= limit) | (numbers == 0)
        if is_even:
            is_open &= numbers <= done // len(shares)
        elif len(own) - done <= (numbers == 0).sum():  # the last items are for groups without any
            is_open = numbers == 0
        group = int(np.where(is_open, (loads + costs[item]) / shares, np.inf).argmin())
        if not is_open[group]:
            return None
        loads[group] += costs[item]
        filled[group] += sizes[item]
        numbers[group] += 1
        groups[group].append(item)
    return groups


def _cut(own: list[int], parts: np.ndarray, limit: float, number: int) -> list[list[int]]:
    """Return groups of items, which begin with the longest: `number`, or as few as possible. Texts of a group have similar lengths.

    None is above `limit` with padding, unless it is a single item or `number` is too small.
    """
    groups, widths = [[]], [0] * parts.shape[1]
    for item, lengths in zip(own, parts[own].tolist()):
        wider = [*map(max, widths, lengths)]
        is_full = bool(groups[-1]) and (len(groups[-1]) + 1) * sum(wider) > limit
        groups += [[]] if is_full else []
        widths = lengths if is_full else wider
        groups[-1].append(item)
    while number > len(groups):
        largest = groups.pop(max(range(len(groups)), key=lambda place: len(groups[place])))
        groups += [largest[::2], largest[1::2]]
    while 0 < number < len(groups):
        groups[-2:] = [groups[-2] + groups[-1]]
    return groups


class TokenSteps:
    """Where steps begin if each has about `--global_batch_tokens`: a step begins with the first item after so many tokens per step.

    All epochs of a dataset have the same number of tokens. So only the epoch of a step is summed, in chunks and up to the step. A
    mixture is summed from its beginning.
    """

    CHUNK = 1 << 16

    def __init__(self, order: Any, lengths: np.ndarray, tokens: int):
        self.order, self.lengths, self.tokens = order, lengths, tokens
        self.chunk = min(self.CHUNK, max(16, len(lengths)))  # items; the small epochs of a small mixture take time
        self.epoch_items = getattr(order, "num_items", 1 << 62)
        self.epoch_tokens = int(lengths.sum()) if hasattr(order, "num_items") else 1 << 62
        self._epoch, self._sums = 0, [0]  # the tokens before each chunk of an epoch
        self._chunk, self._before = -1, np.zeros(0)  # the tokens before each item of a chunk

    def first(self, step: int) -> int:
        """Return the position in the stream at which a step begins."""
        epoch, tokens = divmod(step * self.tokens, self.epoch_tokens)
        if epoch != self._epoch:
            self._epoch, self._sums, self._chunk = epoch, [0], -1
        while self._sums[-1] < tokens:
            self._sums.append(self._sums[-1] + int(self._lengths_of(len(self._sums) - 1).sum()))
        chunk = max(0, bisect.bisect_left(self._sums, tokens) - 1)
        if chunk != self._chunk:
            lengths = self._lengths_of(chunk)
            self._chunk, self._before = chunk, np.cumsum(lengths) - lengths
        inside = int(np.searchsorted(self._before, tokens - self._sums[chunk]))
        return epoch * self.epoch_items + chunk * self.chunk + inside

    def _lengths_of(self, chunk: int) -> np.ndarray:
        first = chunk * self.chunk
        number = min(self.chunk, self.epoch_items - first)
        return self.lengths[self.order.items(self._epoch * self.epoch_items + first, number)].astype(np.int64)


class OwnMicroBatches(Sampler[list[Item]]):
    """Yields the micro-batches of a rank, from a step on, without end. With local workers, those of one follow those of another.

    `numbers` has how many each update has that it has begun.
    """

    def __init__(self, plan: StepPlan, step: int, team: Team, shares_at: Callable[[int], Shares | None]):
        self.plan, self.step, self.team, self.shares_at = plan, step, team, shares_at
        self.numbers: deque[int] = deque()

    def __iter__(self) -> Iterator[list[Item]]:
        step = self.step
        while True:
            items = self.plan.items(step)
            for worker in self.team.workers:
                first, end = (len(items) * number // self.team.num_workers for number in (worker, worker + 1))
                found = self.plan.deal(items[first:end], self.team.rank, self.shares_at(step))
                self.numbers.append(len(found))
                yield from found
            step += 1
