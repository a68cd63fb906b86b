"""Arithmetic of time intervals, as arrays of shape (n, 2) with the start and the end of each."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]


def intervals(pairs: Iterable[tuple[float, float]]) -> Intervals:
    return np.array(list(pairs), dtype=np.float64).reshape(-1, 2)


def clip(given: Intervals, first: float, last: float) -> Intervals:
    """Return the parts of the intervals between `first` and `last`."""
    inside = np.clip(given, first, last)
    return inside[inside[:, 1] > inside[:, 0]]


def union(*given: Intervals) -> Intervals:
    """Return intervals that do not touch each other, in order, which cover the same time."""
    every = np.concatenate(given) if given else intervals([])
    every = every[every[:, 1] > every[:, 0]]
    if not len(every):
        return every
    every = every[np.argsort(every[:, 0], kind="stable")]
    ends = np.maximum.accumulate(every[:, 1])
    begins_new = np.concatenate([[True], every[1:, 0] > ends[:-1]])
    last = np.concatenate([np.flatnonzero(begins_new)[1:] - 1, [len(every) - 1]])
    return np.stack([every[begins_new, 0], ends[last]], axis=1)


def length(*given: Intervals) -> float:
    """Return the time that the intervals cover together."""
    merged = union(*given)
    return float((merged[:, 1] - merged[:, 0]).sum())


def overlap(one: Intervals, other: Intervals) -> float:
    """Return the time that both cover."""
    return length(one) + length(other) - length(one, other)


def outside(one: Intervals, other: Intervals) -> float:
    """Return the time that `one` covers and `other` does not."""
    return length(one, other) - length(other)


def gaps(given: Intervals, first: float, last: float) -> Intervals:
    """Return the intervals between `first` and `last` that are not covered."""
    covered = union(clip(given, first, last))
    starts, ends = np.concatenate([[first], covered[:, 1]]), np.concatenate([covered[:, 0], [last]])
    found = np.stack([starts, ends], axis=1)
    return found[found[:, 1] > found[:, 0]]
