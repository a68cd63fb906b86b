"""`--balance`: the share of the global batch that each rank computes, so that a slower GPU gets fewer items and no rank waits for it.

Shares change neither the items of a step nor, up to rounding and dropout, its result. All ranks compute them from the same samples.
"""

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator

from accel_ddp.config.option_values import parse_shares
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.hook import Hook
from accel_ddp.engine.step_numbers import Numbers, Pace, RankSample, splits_between
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import gather_everywhere, print_on_main
from accel_ddp.text import rough_seconds, shorten
from accel_ddp.training.workers import loader_options

WARM_UP = 3  # steps that are not measured, after the start and after a change
FIRST, LONGEST = 10, 160  # steps that are measured before a decision; the number doubles each time
GAIN = 0.03  # of the time of a step; a smaller one is noise
UNITS = 1024  # parts into which a step is divided if it has no fixed number of items


class Balance(Hook):
    """The items of each rank from a step on, as whole numbers whose sum is the global batch. With `--balance off` it does nothing."""

    def __init__(self, accelerator: Accelerator, cfg: TrainConfig, saved: dict[str, Any], needs_equal: bool = False):
        """`saved` is the run.json from which the run continues. `needs_equal`: ranks must have equal numbers of items."""
        ranks = accelerator.num_processes
        self.given = parse_shares(cfg.balance, ranks)  # None: they are equal, or follow from the speed
        self.measures = cfg.balance == "speed" and ranks > 1
        self.units = UNITS if cfg.global_batch_tokens else cfg.global_batch_size
        equal = [self.units * (rank + 1) // ranks - self.units * rank // ranks for rank in range(ranks)]
        self.changes: list[tuple[int, list[int]]] = [(0, equal)]
        if self.measures and saved.get("num_ranks") == ranks and saved.get("shares") and sum(saved["shares"][0][1]) == self.units:
            self.changes = [(step, counts) for step, counts in saved["shares"]]
        self.sizes = gather_everywhere(cfg.micro_batch_size)  # of each rank's micro-batches; nodes may have different ones
        self.is_even = len({*self.sizes}) == 1
        if needs_equal and not self.is_even:
            why = "FSDP, local steps, --sync_batchnorm and losses that compare all items"
            raise UserError(f"--micro_batch_size {self.sizes}: must be the same on all ranks for {why}.")
        self.window = FIRST
        self.before: Sequence[RankSample] = ()  # of all ranks, when the current window began
        self.seen: dict[tuple[int, ...], float] = {}  # the seconds of a step with each division that was measured
        self.asked = -1  # the last step whose shares the data loader has read
        # Data workers prepare batches ahead, on each node its own number of them. A change begins behind all of these steps.
        ahead = loader_options(cfg, accelerator)
        horizon = ahead["num_workers"] * (ahead["prefetch_factor"] or 0) + WARM_UP
        self.horizon = max(gather_everywhere(horizon)) if self.measures else 0

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint must contain, so that a resumed run divides its steps as the run before it."""
        return {"shares": [*self.changes] if self.measures else [], "micro_batch_sizes": self.sizes}

    def at(self, step: int) -> tuple[float, ...] | None:
        """Return the shares of all ranks at a step, or None if all ranks have as many items in micro-batches of the same size."""
        self.asked = max(self.asked, step)
        since, counts = next(change for change in reversed(self.changes) if change[0] <= step)
        return self.given or (tuple(count / self.units for count in counts) if since or not self.is_even else None)

    def on_update(self, numbers: Numbers, pace: Pace) -> None:
        if not self.measures or not numbers.ranks:
            return
        since = self.changes[-1][0]
        now, first = numbers.ranks, min(sample.step for sample in numbers.ranks)
        if not self.before or self.before[0].step < since + WARM_UP:
            self.before = now if first >= since + WARM_UP else ()
        elif first - self.before[0].step >= self.window and (splits := splits_between(self.before, now)):
            self.before, self.window = now, min(2 * self.window, LONGEST)
            own = [split.data + split.forward + split.backward for split in splits]
            if found := self.decide(own, [split.optimizer + split.other for split in splits]):
                self._change(numbers.step + self.horizon, *found)

    def decide(self, own: list[float], fixed: list[float]) -> tuple[list[int], float, float] | None:
        """Return a faster division, the seconds of a step now, and what they should become; None: keep the division.

        `own` are the seconds of each rank that grow with its items, and `fixed` those that do not. On a GPU whose host is late, `own`
        of a fast rank is too short, because the GPU waits for other ranks meanwhile. So shares change by a factor of 2 at most, and a
        division that was measured to be faster is taken again.
        """
        counts = self.changes[-1][1]
        now = self.seen[tuple(counts)] = max(a + b for a, b in zip(own, fixed))
        best = min(self.seen, key=lambda each: self.seen[each])
        found = divide([max(seconds, 1e-9) / count for seconds, count in zip(own, counts)], fixed, counts)
        expected = max(a * new / old + b for a, b, new, old in zip(own, fixed, found, counts))
        if self.seen[best] < (1 - GAIN) * now:
            found, expected = [*best], self.seen[best]
        is_faster = max(expected, self.seen.get(tuple(found), 0.0)) < (1 - GAIN) * now
        return (found, now, expected) if is_faster else None

    def _change(self, step: int, counts: list[int], now: float, expected: float) -> None:
        if step <= self.asked:
            raise RuntimeError(f"shares that begin at step {step} are too late: step {self.asked} is already divided")
        self.changes.append((step, counts))
        items = shorten(", ".join(map(str, counts)), 100)
        text = f"--balance speed: from step {step + 1} on, the ranks get {items} of {self.units} items"
        print_on_main(f"{text}. The slowest should take {rough_seconds(expected)} per step instead of {rough_seconds(now)}.")


def divide(costs: Sequence[float], fixed: Sequence[float], before: Sequence[int]) -> list[int]:
    """Return how many units each rank gets, from half to twice as many as before, so that the slowest rank is done early.

    A rank takes `fixed` seconds and its cost for each unit. No other division within these limits ends earlier.
    """
    units, ranks = sum(before), range(len(costs))
    end = (units + sum(f / c for f, c in zip(fixed, costs))) / sum(1 / c for c in costs)
    counts = [min(2 * old, max((old + 1) // 2, int((end - f) / c))) for f, c, old in zip(fixed, costs, before)]
    ends = lambda rank, more: fixed[rank] + costs[rank] * (counts[rank] + more)
    while sum(counts) < units:
        counts[min((rank for rank in ranks if counts[rank] < 2 * before[rank]), key=lambda rank: ends(rank, 1))] += 1
    while sum(counts) > units:
        counts[max((rank for rank in ranks if 2 * counts[rank] > before[rank] + 1), key=lambda rank: ends(rank, 0))] -= 1
    return counts
