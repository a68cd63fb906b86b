"""Reads log.jsonl into columns. A log of a million steps is read within seconds, with bounded memory."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accel_ddp.records.log import SCHEMA
from accel_ddp.report.run_data import RankTimes

_BATCH = 20_000  # lines that are parsed by one call
_CHUNK = 1 << 22
_LONGEST = 1 << 26  # bytes; a longer line is garbage
# Of `ranks`: if there are more lines, or more values of each part, only every second, fourth, ... line is parsed.
MOST_RANK_LINES, MOST_RANK_VALUES, _FEWEST_RANK_LINES = 1 << 13, 1 << 18, 512
_UPDATE_BYTES = 200  # of a usual line
_PARTS = ("data", "forward", "backward", "optimizer", "other", "communication")
_MOST_COLUMNS = 200  # the memory of a log in which every line has other names
_NOT_VALUES = ("event", "repeated")


@dataclass
class LogContent:
    """The events of a log that count. Steps that a later attempt has repeated are left out."""

    updates: dict[str, np.ndarray]
    ranks: RankTimes
    events: list[dict[str, Any]]  # all other events, in the order of the file
    num_bad_lines: int = 0
    newer_schema: Any = None  # the number of a schema that this version does not know
    num_repeated: int = 0  # logged steps that a later attempt has done again


def read_log_columns(path: Path) -> LogContent:
    """Return the content of a log. Raise OSError if it cannot be read."""
    return _Reader().read(path)


class _Reader:
    def __init__(self) -> None:
        self.pending: list[bytes] = []  # lines of updates
        self.chunks: list[dict[str, np.ndarray]] = []
        self.rows: list[_RankRow] = []
        self.seen, self.stride = 0, 1
        self.events: list[dict[str, Any]] = []
        self.bad = self.repeated = 0
        self.newer: Any = None

    def read(self, path: Path) -> LogContent:
        with np.errstate(over="ignore"):  # an absurd value becomes infinite
            self._read_lines(path)
        updates = _in_order(_concatenate(self.chunks))
        return LogContent(updates, _rank_times(self.rows, self.stride), self.events, self.bad, self.newer, self.repeated)

    def _read_lines(self, path: Path) -> None:
        for line in _lines(path):
            if line.startswith(b'{"event": "update"'):  # as `LogWriter` writes it
                self.pending.append(line)
                if len(self.pending) == _BATCH:
                    self._parse_updates()
            elif line.startswith(b'{"event": "ranks"'):
                self.seen += 1
                if self.seen == 1:  # an estimate of the number of lines, so that few lines are parsed in vain
                    self.stride = _power_of_2(path.stat().st_size // (len(line) + _UPDATE_BYTES) // MOST_RANK_LINES)
                if self.seen % self.stride == 0 and (event := self._parse(line)):
                    self._add_rank_line(event)
            elif event := self._parse(line):
                self._add(event)
        self._parse_updates()

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        """Return the event of a line, or None if the line is incomplete or not an event of a step."""
        try:
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event["event"], str):
                event["step"] = _whole(event.get("step", 0))
                event["time"] = number_of(event.get("time"))
                return event
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        self.bad += 1
        return None

    def _add(self, event: dict[str, Any]) -> None:
        name, step = event["event"], event["step"]
        if name == "update":
            self.chunks.append(_columns([event]))
            return
        if name == "ranks":
            self.seen += 1
            self._add_rank_line(event)
            return
        if name == "start":
            self._parse_updates()
            self._forget_after(step)
            schema = event.get("schema", SCHEMA)
            if not isinstance(schema, int) or schema > SCHEMA:
                self.newer = schema
        self.events.append(event)

    def _forget_after(self, step: int) -> None:
        """Leave out what earlier attempts have logged for steps after `step`, from which a new attempt continues."""
        columns = _concatenate(self.chunks)
        kept = columns["step"] <= step
        self.repeated += int((~kept).sum())
        self.chunks = [{name: values[kept] for name, values in columns.items()}]
        self.rows = [row for row in self.rows if row.step <= step]
        self.events = [one for one in self.events if one["event"] not in ("evaluate", "tables") or one["step"] <= step]

    def _add_rank_line(self, event: dict[str, Any]) -> None:
        self.rows.append(row := _RankRow.of(event))
        if len(self.rows) > min(MOST_RANK_LINES, max(_FEWEST_RANK_LINES, MOST_RANK_VALUES // max(1, row.values.shape[1]))):
            self.rows, self.stride = self.rows[1::2], 2 * self.stride

    def _parse_updates(self) -> None:
        lines, self.pending = self.pending, []
        if len(lines) == _BATCH and (columns := _parse_fast(lines)):
            self.chunks.append(columns)
            self.bad += len(lines) - len(columns["step"])
            return
        try:
            events = json.loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):  # one of the lines is incomplete
            events = [event for line in lines if (event := self._parse(line))]
        if events:
            columns = _columns(events)
            self.chunks.append(columns)
            self.bad += len(events) - len(columns["step"])


def _parse_fast(lines: list[bytes]) -> dict[str, np.ndarray] | None:
    """Return the columns of complete lines that contain numbers only, in half of the time of `json`. None: there are others."""
    import pyarrow
    import pyarrow.json

    try:
        table = pyarrow.json.read_json(pyarrow.BufferReader(b"\n".join(lines)))
    except pyarrow.ArrowException:
        return None
    columns = {name: table[name] for name in table.column_names if name not in _NOT_VALUES}
    is_number = lambda kind: pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)
    if (
        len(table) != len(lines)
        or not {"step", "time"} <= columns.keys()
        or not all(is_number(one.type) for one in columns.values())
    ):
        return None
    return _with_steps({name: one.to_numpy().astype(float) for name, one in list(columns.items())[:_MOST_COLUMNS]})


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that end with a line break, and the last one. A run may still append to the file."""
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from filter(None, lines)
            if len(rest) > _LONGEST:
                rest = b"{"  # what follows until the line break is not valid JSON
    if rest:
        yield rest


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


def _whole(value: Any) -> int:
    """Return a step. Raise ValueError if the value cannot be one."""
    number = number_of(value)
    if not 0 <= number < 2**53 or number != int(number):
        raise ValueError(value)
    return int(number)


def _columns(events: list[Any]) -> dict[str, np.ndarray]:
    """Return the numbers of events as columns, NaN where an event has none. Events without a step are left out."""
    events = [event for event in events if isinstance(event, dict)]
    names = dict.fromkeys(["step", "time", *(name for keys in dict.fromkeys(map(tuple, events)) for name in keys)])
    columns: dict[str, np.ndarray] = {}
    for name in names:
        if name in _NOT_VALUES or len(columns) == _MOST_COLUMNS:
            continue
        values = [event.get(name) for event in events]
        try:
            if {str, bool} & set(map(type, values)):
                raise ValueError
            columns[name] = np.array(values, dtype=float)  # None becomes NaN
        except (ValueError, TypeError, OverflowError):
            columns[name] = np.array([number_of(value) for value in values], dtype=float)
            if name not in ("step", "time") and not any(_is_number(value) for value in values):
                del columns[name]
    return _with_steps(columns)


def _with_steps(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the columns without lines that have no valid step."""
    with np.errstate(invalid="ignore"):
        step = columns["step"]
        valid = (step >= 0) & (step < 2**53) & (step == np.floor(step))
    return columns if valid.all() else {name: values[valid] for name, values in columns.items()}


def _is_number(value: Any) -> bool:
    """Return whether the log has stored a number, which may be "nan"."""
    return not math.isnan(number_of(value)) or (isinstance(value, str) and value.lower() == "nan") or isinstance(value, float)


def _concatenate(chunks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    names = list(dict.fromkeys(["step", "time", *(name for chunk in chunks for name in chunk)]))[:_MOST_COLUMNS]
    sizes = [len(chunk["step"]) for chunk in chunks]
    return {
        name: np.concatenate(
            [chunk[name] if name in chunk else np.full(size, np.nan) for chunk, size in zip(chunks, sizes)] or [np.empty(0)]
        )
        for name in names
    }


def _in_order(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the columns in the order of steps, each step once. The last line of a step counts."""
    step = columns["step"] = columns["step"].astype(np.int64)
    if len(step) and not (np.diff(step) > 0).all():
        order = np.argsort(step, kind="stable")
        is_last: np.ndarray = np.append(np.diff(step[order]) > 0, True)
        columns = {name: values[order][is_last] for name, values in columns.items()}
    return columns


@dataclass
class _RankRow:
    """One event `ranks`."""

    step: int
    first: int
    last: int
    time: float
    parts: tuple[str, ...]
    names: tuple[str, ...]  # of the parts, then of the system
    values: np.ndarray  # [names, ranks]; 4 bytes per value are enough to plot

    @classmethod
    def of(cls, event: dict[str, Any]) -> "_RankRow":
        last = _step_or(event.get("last_step"), event["step"])
        first = _step_or(event.get("first_step"), last)
        system = event.get("system")
        lists = {part: event[part] for part in _PARTS if isinstance(event.get(part), list)}
        parts = tuple(lists)
        if isinstance(system, dict):
            lists |= {name: values for name, values in system.items() if isinstance(values, list)}
        try:
            values = np.array(list(lists.values()), np.float32)  # also of "nan"
        except (ValueError, TypeError, OverflowError):
            rows = [[number_of(value) for value in row] for row in lists.values()]
            width = max(map(len, rows))
            values = np.array([row + [math.nan] * (width - len(row)) for row in rows], np.float32)
        return cls(event["step"], first, last, event["time"], parts, tuple(lists), values.reshape(len(lists), -1))


def _rank_times(rows: list[_RankRow], stride: int) -> RankTimes:
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


def _power_of_2(number: int) -> int:
    """Return the largest power of 2 that is not above a number, and at least 1."""
    return 1 << max(0, number.bit_length() - 1)


def _step_or(value: Any, default: int) -> int:
    try:
        return _whole(value)
    except ValueError:
        return default
