"""What a report contains about a run. `runs` reads it, and the page and the CSV files are made from it."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np


@dataclass
class RankTimes:
    """How each rank spends a step, and how busy its machine is. Row i is the average of the steps first_steps[i] to steps[i].

    W is the largest number of ranks of all attempts. Ranks that did not exist in an attempt are NaN in its rows.
    """

    steps: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # [n]
    first_steps: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # [n]
    times: np.ndarray = field(default_factory=lambda: np.empty(0))  # [n], unix seconds
    seconds: dict[str, np.ndarray] = field(default_factory=dict)  # part -> [n, W], seconds per step
    system: dict[str, np.ndarray] = field(default_factory=dict)  # name -> [n, W], in the units of docs/log.md
    stride: int = 1  # every stride-th line of the log was read

    @property
    def num_ranks(self) -> int:
        """Return W, which is 0 if no times were recorded."""
        return max((values.shape[1] for values in self.seconds.values()), default=0)


State = Literal["complete", "stopped", "running", "interrupted"]


@dataclass
class Run:
    """One run. Everything in it comes from files that others may have written: text is not escaped."""

    folder: Path
    name: str  # unique among the runs of a report
    starts: list[dict[str, Any]] = field(default_factory=list)  # one per attempt; the last one describes the run
    updates: dict[str, np.ndarray] = field(default_factory=dict)  # columns of full resolution, NaN where a line has no value
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # step, time and metrics
    ranks: RankTimes = field(default_factory=RankTimes)
    tables: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)  # step -> name -> columns, rows, kind, title
    checkpoints: list[dict[str, Any]] = field(default_factory=list)  # step, path, time, exists, is_best, bytes
    incidents: list[dict[str, Any]] = field(default_factory=list)  # time, step, level, kind, text, rank, host
    end: dict[str, Any] | None = None  # None: `state` is running or interrupted
    state: State = "interrupted"  # interrupted: it was killed, or it failed
    options: dict[str, Any] = field(default_factory=dict)  # config.json
    summary: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)  # what could not be read

    @property
    def first_steps(self) -> list[int]:
        """Return the first step of each attempt."""
        return [start.get("step", 0) + 1 for start in self.starts]

    @property
    def start(self) -> dict[str, Any]:
        """Return the event `start` of the last attempt, or {}."""
        return self.starts[-1] if self.starts else {}


# Parses JSON, and numbers in it, that anyone may have written.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(data: bytes) -> Any:
    """Return a JSON value whose text can be written as UTF-8. Raise ValueError if the data is no JSON."""
    try:
        value = json.loads(data)
        if _SURROGATE.search(data):  # half of a character outside of the basic plane is replaced
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("too deep") from error
    return value


def number_of(value: Any) -> float:
    """Return a number of the log as a float, also "nan", "inf" and "-inf". Other values are NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    if isinstance(value, str) and value.lower() not in ("nan", "inf", "-inf", "infinity", "-infinity"):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return -math.inf if str(value).startswith("-") else math.inf


def step_of(value: Any) -> int:
    """Return a step. Raise ValueError if the value cannot be one."""
    number = number_of(value)
    if not 0 <= number < 2**53 or number != int(number):
        raise ValueError(value)
    return int(number)
