"""Measures how far the clocks of hosts differ, so that traces of several hosts can be shown on one time axis."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from accel_ddp.profiling.traces import Clock
from accel_ddp.ranks.agreement import gather_everywhere
from accel_ddp.ranks.process import process

ROUND_TRIPS = 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def kernel_id() -> str:
    """Return a text that is the same for all processes with the same clock: those of one kernel, also in several containers."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return process.host


def measure_clock(
    ranks: list[int], now: Callable[[], int] | None = None, clock_id: str | None = None, round_trips: int = ROUND_TRIPS
) -> Clock:
    """Return how the clock of this rank differs from that of rank 0. This is a collective of all ranks.

    Each of `ranks` in turn asks rank 0 for its time. The reply belongs to the middle of the round trip, and the fastest of several
    round trips has the smallest error, which is at most half of its duration. Ranks on the host of rank 0 have its clock.
    """
    now = now or time.time_ns
    ids = gather_everywhere(kernel_id() if clock_id is None else clock_id)
    best = Clock()
    for rank in ranks:
        if ids[rank] == ids[0]:
            continue
        message = torch.zeros(1, dtype=torch.int64)
        for trip in range(round_trips):
            if process.is_main:
                dist.recv(message, rank, group=process.slow_group)
                message[0] = now()
                dist.send(message, rank, group=process.slow_group)
            elif process.rank == rank:
                sent = now()
                dist.send(message, 0, group=process.slow_group)
                dist.recv(message, 0, group=process.slow_group)
                received = now()
                found = Clock(int(message) - (sent + received) / 2, (received - sent) / 2)
                best = found if not trip or found.accuracy < best.accuracy else best
    return best


def between(before: Clock, after: Clock) -> Clock:
    """Return the clock in the middle of two measurements. The accuracy includes how far the clock has drifted meanwhile."""
    drift = abs(after.offset - before.offset) / 2
    return Clock((before.offset + after.offset) / 2, max(before.accuracy, after.accuracy) + drift)
