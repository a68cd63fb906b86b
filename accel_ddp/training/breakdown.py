"""Where the time of a whole run went, from the samples of all ranks."""

import statistics
from collections.abc import Sequence
from typing import Any

from accel_ddp.training.rank_sample import RankSample, Split, splits_between


class Breakdown:
    """Stores the first and the last sample of each rank. The steps before the first one, which are slower, are not counted."""

    def __init__(self) -> None:
        self.first: Sequence[RankSample] = ()
        self.last: Sequence[RankSample] = ()

    def add(self, ranks: Sequence[RankSample]) -> None:
        if ranks:
            self.first, self.last = self.first or ranks, ranks

    def summary(self, hosts: Sequence[str]) -> dict[str, Any]:
        """Return the field `breakdown` of the event `end` of log.jsonl. {}: too few steps were logged.

        `hosts` has the host of each rank. Only the main rank has it.
        """
        if not (splits := splits_between(self.first, self.last)):
            return {}
        seconds = statistics.mean(map(sum, splits))
        means = {part: statistics.mean(getattr(split, part) for split in splits) for part in Split._fields}
        summary: dict[str, Any] = {
            "first_step": int(self.first[0].step) + 1,
            "last_step": int(self.last[0].step),
            "seconds": round(seconds, 6),
            **{part: round(value / max(seconds, 1e-9), 4) for part, value in means.items()},
        }
        if len(splits) > 1:
            own = [sum(split) - split.communication for split in splits]
            slowest = max(range(len(own)), key=own.__getitem__)
            # The median is that of the faster half, so that with two ranks it is the other one.
            cost = own[slowest] - statistics.median_low(own)
            summary |= {"slowest_rank": slowest, "slowest_cost": round(cost, 6)}
            summary |= {"slowest_host": hosts[slowest]} if hosts else {}
        return summary


def describe(summary: dict[str, Any], num_ranks: int) -> str:
    """Return the line about the time of a step that a run prints at its end."""
    shares = {
        "data": summary["data"],
        "forward and backward": summary["forward"] + summary["backward"],
        "communication": summary["communication"],
        "optimizer": summary["optimizer"],
        "other": summary["other"],
    }
    parts = ", ".join(f"{name} {share * 100:.0f} %" for name, share in shares.items() if num_ranks > 1 or name != "communication")
    seconds, over = summary["seconds"], f" (mean over {num_ranks} ranks)" if num_ranks > 1 else ""
    text = f"time of a step{over}: {_milliseconds(seconds)}: {parts}."
    if num_ranks > 1:
        cost = summary["slowest_cost"]
        text += (
            f" The slowest is rank {summary['slowest_rank']} ({summary['slowest_host']}), for which the others wait "
            f"{_milliseconds(cost)} per step ({cost / max(seconds, 1e-9) * 100:.0f} %)."
        )
    return text


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
