"""Explains what limits scaling, with numbers, and computes the global batch that reaches an efficiency of 90 %."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from accel_ddp.doctor.collectives import format_si
from accel_ddp.measure.scaling_analysis import Comparison, Result, slowest_rank
from accel_ddp.measure.scaling_plan import STRONG

GOAL = 0.9
NOTABLE = 0.03  # losses below this share of a step are not reported
SMALL_BYTES = 1e6
STRAGGLER = 0.1  # a rank that is slower than the median rank by this fraction


@dataclass(frozen=True)
class Advice:
    """The smallest global batch with an efficiency of at least GOAL on `ranks` ranks."""

    ranks: int
    batch: int  # 0: no batch reaches the goal
    micro: int
    accumulation: int
    efficiency: float  # that is expected with `batch`, or the limit for large batches if there is none
    is_reached: bool  # the measured batch of strong scaling reaches the goal


def find_batch(base: Result, result: Result) -> Advice:
    """Return the smallest global batch G whose speed-up over the base with the same G is GOAL of the ideal one.

    A step of N ranks takes (G / N) (u + w) + K seconds, and a step of the n ranks of the base takes (G / n) v + L. u and v are the
    seconds per item (data, forward, backward), w is the time per item in which ranks wait for one that is always slower, and K and L
    are the seconds per step that do not depend on the batch: optimizer, other, exposed communication and the other waiting.
    """
    now, then = result.known, base.known
    ranks, base_ranks, items = result.setting.ranks, base.setting.ranks, result.setting.per_rank
    u, w = now.mean("data", "forward", "backward") / items, now.straggling / items
    v = then.mean("data", "forward", "backward") / base.setting.per_rank
    fixed = now.mean("optimizer", "other") + now.mean("communication") - now.straggling
    base_fixed = then.mean("optimizer", "other", "communication")

    def efficiency(batch: float) -> float:
        return (batch / base_ranks * v + base_fixed) * base_ranks / (ranks * (batch / ranks * (u + w) + fixed))

    gain = v - GOAL * (u + w)
    needed = GOAL * ranks * fixed - base_ranks * base_fixed
    unit = ranks * now.micro
    if gain <= 0 and unit * gain < needed:
        return Advice(ranks, 0, now.micro, 0, v / (u + w), False)
    accumulation = max(1, math.ceil(needed / gain / unit - 1e-9)) if gain > 0 else 1
    return Advice(ranks, accumulation * unit, now.micro, accumulation, efficiency(accumulation * unit), False)


def advise(strong: Sequence[Comparison], weak: Sequence[Comparison]) -> list[Advice]:
    """Return the advice for each number of ranks above that of the base.

    The measurement of weak scaling is preferred, because its micro-batch is that of the base. In strong scaling it shrinks if the
    items of a rank do.
    """
    by_ranks = {one.result.setting.ranks: one for one in strong} | {one.result.setting.ranks: one for one in weak}
    efficiencies = {one.result.setting.ranks: one.efficiency for one in strong}
    found = []
    for ranks, one in sorted(by_ranks.items()):
        if one.ideal_speedup > 1:
            advice = find_batch(one.base, one.result)
            found.append(Advice(**{**vars(advice), "is_reached": efficiencies.get(ranks, 0) >= GOAL}))
    return found


def describe_advice(advice: Advice, batch: int) -> str:
    """Return the advice as text. `batch` is the global batch of strong scaling."""
    ranks = f"{advice.ranks} ranks"
    if advice.is_reached:
        return f"{ranks}: --global_batch_size {batch} reaches {GOAL:.0%}."
    if not advice.batch:
        return (
            f"{ranks}: no global batch reaches {GOAL:.0%}, because each item takes longer than in the first row. Large batches "
            f"approach {advice.efficiency:.0%}."
        )
    micro = f"{advice.accumulation} micro-batch{'es' * (advice.accumulation > 1)} of {advice.micro} items per rank"
    return f"{ranks}: --global_batch_size {advice.batch} ({micro}) would reach {advice.efficiency:.0%}."


def find_limits(comparison: Comparison, mode: str, on_gpu: bool) -> list[str]:
    """Return what the largest losses are and what to do about them, the largest first."""
    now = comparison.result.known
    losses = sorted(comparison.losses().items(), key=lambda item: -item[1])
    texts = {"communication": _communication, "waiting": _waiting, "data": _data, "compute": _compute}
    texts |= {"optimizer": _optimizer, "other": _other}
    found = []
    for name, seconds in losses:
        if seconds > NOTABLE * now.seconds:
            lost = f"{format_seconds(seconds)} of each step ({seconds / now.seconds:.0%})"
            found.append(texts[name](comparison, mode, on_gpu, lost))
    return found


def _communication(comparison: Comparison, mode: str, on_gpu: bool, lost: str) -> str:
    now = comparison.result.known
    sent = f" of {format_si(now.gradient_bytes)}B of gradients" if now.gradient_bytes else ""
    text = (
        f"communication: the all-reduce{sent} is not hidden behind the backward pass for {lost}. A larger --global_batch_size needs it "
        "less often per item."
    )
    if now.gradient_bytes < SMALL_BYTES:  # their latency counts, and not their size
        return text
    return f"{text} --comm_hook {'bf16' if on_gpu else 'fp16'} halves the bytes. `accel-ddp tune` finds faster settings."


def _waiting(comparison: Comparison, mode: str, on_gpu: bool, lost: str) -> str:
    now = comparison.result.known
    rank, slower = slowest_rank(now)
    host = next((one.get("host", "") for one in now.ranks if one.get("rank") == rank), "")
    if slower > STRAGGLER:
        where = f"rank {rank}{f' ({host})' if host else ''}"
        return (
            f"a slow rank: {where} is {slower:.0%} slower than the median rank. The ranks wait {lost} for it, on average. Check this "
            "host: other processes, temperature, its disk."
        )
    return f"waiting: ranks wait for each other {lost}, but no rank is always the slowest. The duration of their steps varies."


def _data(comparison: Comparison, mode: str, on_gpu: bool, lost: str) -> str:
    return f"data: ranks wait {lost} longer for their batches than the ideal. Increase --num_workers, or use a faster disk."


def _compute(comparison: Comparison, mode: str, on_gpu: bool, lost: str) -> str:
    now, base = comparison.result.known, comparison.base.known
    items, base_items = comparison.result.setting.per_rank, comparison.base.setting.per_rank
    ratio = (now.mean("forward", "backward") / items) / max(base.mean("forward", "backward") / base_items, 1e-12)
    slower = f"n item takes {ratio:.2f} times as long to compute as in the first row, which costs {lost}"
    if now.micro < base.micro:
        return (
            f"too few items per rank: a rank computes {now.micro} items at once instead of {base.micro}. A{slower}, because "
            "launching the operations takes as long as before. Use a larger --global_batch_size, or fewer ranks."
        )
    if not on_gpu:
        return (
            f"shared cores: a{slower}, with the same micro-batch. The ranks of a node share its cores, caches and memory bandwidth, "
            "and gloo uses the same cores. On more nodes, or on GPUs, this loss is smaller."
        )
    check = "Check the power limit and the temperature of the GPUs, and other processes."
    return f"computing: a{slower}, with the same micro-batch. {check}"


def _optimizer(comparison: Comparison, mode: str, on_gpu: bool, lost: str) -> str:
    reason = (
        "Every rank updates all parameters, so that this time does not shrink with the items of a rank" if mode == STRONG else ""
    )
    reason = reason or "It has the same work on every rank, so that other processes or shared cores are the cause"
    return f"optimizer: clipping and the optimizer step cost {lost}. {reason}."


def _other(comparison: Comparison, mode: str, on_gpu: bool, lost: str) -> str:
    return f"other: logging and Python code outside of the model cost {lost}. The time does not shrink with the items of a rank."


def format_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
