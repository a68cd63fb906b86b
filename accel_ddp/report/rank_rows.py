"""The times of all ranks in one line of the log, and their arrays."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel_ddp.report.json_text import number_of, step_of
from accel_ddp.report.run_data import RankTimes

_PARTS = ("data", "forward", "backward", "optimizer", "other", "communication")


@dataclass
class RankRow:
    """One event `ranks`."""

    step: int
    first: int
    last: int
    time: float
    parts: tuple[str, ...]
    names: tuple[str, ...]  # of the parts, then of the system
    values: np.ndarray  # [names, ranks]; 4 bytes per value are enough to plot

    @classmethod
    def of(cls, event: dict[str, Any]) -> "RankRow":
        last = _step_or(event.get("last_step"), event["step"])
        first = _step_or(event.get("first_step"), last)
        system = event.get("system")
        lists = {part: event[part] for part in _PARTS if isinstance(event.get(part), list)}
        parts = tuple(lists)
        if isinstance(system, dict):
            lists |= {name: values for name, values in system.items() if isinstance(values, list)}
        try:
            values = np.array(list(lists.values()), np.float32)  # also of "nan"
            if values.ndim != 2:
                raise ValueError
        except (ValueError, TypeError, OverflowError):
            rows = [[number_of(value) for value in row] for row in lists.values()]
            width = max(map(len, rows), default=0)
            values = np.array([row + [math.nan] * (width - len(row)) for row in rows], np.float32).reshape(len(rows), width)
        return cls(event["step"], first, last, event["time"], parts, tuple(lists), values)


def rank_times(rows: list[RankRow], stride: int) -> RankTimes:
    """Return the rows as arrays, in the order of steps, each step once."""
    found = {row.step: row for row in rows if row.parts}
    rows = [found[step] for step in sorted(found)]
    width = max((row.values.shape[1] for row in rows), default=0)
    parts = dict.fromkeys(name for names in {row.parts for row in rows} for name in names)
    arrays: dict[str, np.ndarray] = {}
    for names in dict.fromkeys(row.names for row in rows):  # usually one, or one of each attempt
        at = [number for number, row in enumerate(rows) if row.names == names]
        for name in names:
            arrays.setdefault(name, np.full((len(rows), width), np.nan, np.float32))
        for number in at:
            values = rows[number].values
            for name, line in zip(names, values):
                arrays[name][number, : values.shape[1]] = line
    return RankTimes(
        np.array([row.last for row in rows], np.int64),
        np.array([row.first for row in rows], np.int64),
        np.array([row.time for row in rows], float),
        {part: arrays[part] for part in _PARTS if part in parts},
        {name: values for name, values in arrays.items() if name not in parts},
        stride,
    )


def _step_or(value: Any, default: int) -> int:
    try:
        return step_of(value)
    except ValueError:
        return default
