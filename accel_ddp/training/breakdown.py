"""The hook that reports where the time of a run went."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from accel_ddp.engine.hook import Hook
from accel_ddp.engine.step_numbers import Numbers, Pace, RankSample, find_slowest, splits_between
from accel_ddp.phases import Split
from accel_ddp.ranks.agreement import print_on_main
from accel_ddp.text import rough_seconds
from accel_ddp.training.run_facts import describe_memory, measure_memory

STEPS_TO_JUDGE = 8  # between two samples, because single steps vary
NETWORK_LIMITS = 0.3  # of a step
LATENCY_BYTES = 1 << 20  # gradients of fewer bytes take as long in 16 bits


class Breakdown(Hook):
    """Reports where the time of a whole run went, from the first and the last sample of each rank, and its peak of memory.

    The steps before the first sample, which are slower, are not counted.
    """

    def __init__(self, device: torch.device, num_ranks: int = 1) -> None:
        self.device, self.num_ranks = device, num_ranks
        self.hosts: list[str] = []  # of each rank, on the main rank
        self.hook = ""  # the --comm_hook that could be suggested, on the main rank
        self.first: Sequence[RankSample] = ()
        self.last: Sequence[RankSample] = ()

    def on_describe(self, facts: dict[str, Any]) -> None:
        self.hosts = [rank["host"] for rank in facts.get("ranks", [])]
        on_gpu = self.device.type == "cuda"
        can_be_sent = facts and "comm_hook" not in facts["options"] and facts["model"]["gradient_bytes"] > LATENCY_BYTES
        if can_be_sent and (on_gpu or "sharding" not in facts):
            self.hook = "bf16" if on_gpu else "fp16"

    def on_update(self, numbers: Numbers, pace: Pace) -> None:
        if numbers.ranks:
            self.first, self.last = self.first or numbers.ranks, numbers.ranks
            if self.hook and self.last[0].step >= self.first[0].step + STEPS_TO_JUDGE:
                self._judge_network()

    def _judge_network(self) -> None:
        """Print once how gradients could be sent in fewer bytes, if every rank waits for the network."""
        splits, hook = splits_between(self.first, self.last), self.hook
        share = min((split.communication / max(sum(split), 1e-9) for split in splits), default=0.0)
        if share >= NETWORK_LIMITS:
            self.hook = ""
            print_on_main(
                f"The network limits this run: communication takes {share * 100:.0f} % of a step, also on the rank that waits least. "
                f"--comm_hook {hook} sends gradients in half of their bytes. It rounds them, so it changes the result. The default "
                "sums them in float32."
            )

    def summarize(self) -> dict[str, Any]:
        found = {"breakdown": self.compute(), "memory": measure_memory(self.device, self.last)}
        return {name: value for name, value in found.items() if value}

    def on_end(self, step: int, summary: dict[str, Any]) -> None:
        if "breakdown" in summary and self.hosts:
            print_on_main(describe_breakdown(summary["breakdown"], self.num_ranks))
        if "memory" in summary:
            print_on_main(describe_memory(summary["memory"]))

    def compute(self) -> dict[str, Any]:
        """Return the field `breakdown` of the event `end` of log.jsonl. {}: too few steps were logged."""
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
            slowest, cost = find_slowest(splits)
            summary |= {"slowest_rank": slowest, "slowest_cost": round(cost, 6)}
            summary |= {"slowest_host": self.hosts[slowest]} if self.hosts else {}
        return summary


def describe_breakdown(summary: dict[str, Any], num_ranks: int) -> str:
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
    text = f"time of a step{over}: {rough_seconds(seconds)}: {parts}."
    if num_ranks > 1:
        cost = summary["slowest_cost"]
        text += (
            f" The slowest is rank {summary['slowest_rank']} ({summary['slowest_host']}), for which the others wait "
            f"{rough_seconds(cost)} per step ({cost / max(seconds, 1e-9) * 100:.0f} %)."
        )
    return text
