"""Reads log.jsonl into columns. A log of a million steps is read within seconds, with bounded memory."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accel_ddp.records.files import parse
from accel_ddp.records.run_log import SCHEMA
from accel_ddp.report.run_data import PARTS, RankTimes, dict_of, holds_number, number_of, whole_of


class RankRow(NamedTuple):
    step: int
    first: int
    last: int
    names: tuple[str, ...]  # of the parts, then of the system
    values: np.ndarray  # [names, ranks]; 4 bytes per value are enough to plot

    @classmethod
    def of(cls, event: dict[str, Any]) -> "RankRow":
        last = whole_of(event.get("last_step"), event["step"])
        first = whole_of(event.get("first_step"), last)
        given = {part: event.get(part) for part in PARTS} | dict_of(event.get("system"))
        lists = {name: values for name, values in given.items() if isinstance(values, list)}
        try:
            values = np.array(list(lists.values()), np.float32)  # also of "nan"
            if values.ndim != 2:
                raise ValueError
        except (ValueError, TypeError, OverflowError):
            rows = [[number_of(value) for value in row] for row in lists.values()]
            width = max(map(len, rows), default=0)
            values = np.array([row + [math.nan] * (width - len(row)) for row in rows], np.float32).reshape(len(rows), width)
        return cls(event["step"], first, last, tuple(lists), values)


def rank_times(rows: list[RankRow], stride: int) -> RankTimes:
    found = {row.step: row for row in rows if set(row.names) & set(PARTS)}
    rows = [found[step] for step in sorted(found)]
    width = max((row.values.shape[1] for row in rows), default=0)
    names = dict.fromkeys(name for of_row in dict.fromkeys(row.names for row in rows) for name in of_row)
    arrays = {name: np.full((len(rows), width), np.nan, np.float32) for name in names}
    for number, row in enumerate(rows):
        for name, values in zip(row.names, row.values):
            arrays[name][number, : len(values)] = values
    first, last = (np.array([getattr(row, name) for row in rows], np.int64) for name in ("first", "last"))
    seconds = {part: arrays[part] for part in PARTS if part in arrays}
    return RankTimes(last, first, seconds, {name: values for name, values in arrays.items() if name not in seconds}, stride)


_BATCH = 20_000  # lines that are parsed by one call
# Of `ranks`: if there are more lines, or more values of each part, only every second, fourth, ... line is parsed.
MOST_RANK_LINES, MOST_RANK_VALUES, _FEWEST_RANK_LINES = 1 << 13, 1 << 18, 512
_UPDATE_BYTES = 200  # of a usual line
_MOST_COLUMNS = 200  # the memory of a log in which every line has other names
_NOT_VALUES = ("event", "repeated")


class LogContent:
    """The events of a log that count. Steps that a later attempt has repeated are left out."""

    def __init__(self, path: Path) -> None:
        """Read a log. Raise OSError if that is impossible."""
        self.events: list[dict[str, Any]] = []  # without `update` and `ranks`, in the order of the file
        self.num_bad_lines = 0
        self.newer_schema: Any = None  # the number of a schema that this version does not know
        self.pending: list[bytes] = []  # lines of updates
        self.chunks: list[dict[str, np.ndarray]] = []
        self.rows: list[RankRow] = []
        self.seen, self.stride = 0, 1
        with np.errstate(over="ignore"), path.open("rb") as file:  # an absurd value becomes infinite
            for line in file:
                if line.endswith((b"\n", b"}")):  # otherwise the run is writing this line, or a crash has cut it
                    self._add_line(line, path)
            self._parse_updates()
        self.updates, self.ranks = _joined(self.chunks), rank_times(self.rows, self.stride)

    def _add_line(self, line: bytes, path: Path) -> None:
        # The event is recognized before the line is parsed, which takes most of the time.
        if line.startswith((b'{"event": "update"', b'{"event":"update"')):
            self._add_update(line)
        elif line.startswith((b'{"event": "ranks"', b'{"event":"ranks"')):
            self.seen += 1
            if self.seen == 1:  # an estimate of the number of lines; few lines are parsed in vain
                times_too_many = path.stat().st_size // (len(line) + _UPDATE_BYTES) // MOST_RANK_LINES
                self.stride = 1 << max(0, times_too_many.bit_length() - 1)
            if self.seen % self.stride == 0 and (event := self._parse(line)):
                self._add_rank_line(event)
        elif line.strip() and (event := self._parse(line)):
            if event["event"] == "update":  # of another program, with another first name
                self._add_update(line)
            elif event["event"] == "ranks":
                self._add_rank_line(event)
            else:
                self._add(event)

    def _add_update(self, line: bytes) -> None:
        self.pending.append(line)
        if len(self.pending) == _BATCH:
            self._parse_updates()

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        event = parse(line) or {}
        if isinstance(event.get("event"), str) and (step := whole_of(event.get("step", 0))) is not None:
            return {**event, "step": step, "time": number_of(event.get("time"))}
        self.num_bad_lines += 1
        return None

    def _add(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            self._parse_updates()
            # What earlier attempts have logged for steps after the one from which this attempt continues is left out.
            step = event["step"]
            for number, columns in enumerate(self.chunks):
                kept = columns["step"] <= step
                self.chunks[number] = {name: values[kept] for name, values in columns.items()}
            self.rows = [row for row in self.rows if row.step <= step]
            counts = lambda one: one["event"] not in ("evaluate", "tables") or one["step"] <= step
            self.events = list(filter(counts, self.events))
            schema = event.get("schema", SCHEMA)
            if not isinstance(schema, int) or schema > SCHEMA:
                self.newer_schema = schema
        self.events.append(event)

    def _add_rank_line(self, event: dict[str, Any]) -> None:
        self.rows.append(row := RankRow.of(event))
        if len(self.rows) > min(MOST_RANK_LINES, max(_FEWEST_RANK_LINES, MOST_RANK_VALUES // max(1, row.values.shape[1]))):
            self.rows, self.stride = self.rows[1::2], 2 * self.stride

    def _parse_updates(self) -> None:
        lines, self.pending = self.pending, []
        if not lines:
            return
        columns, count = _parse_fast(lines) if len(lines) == _BATCH else None, len(lines)
        if not columns:
            try:
                events = json.loads(b"[" + b",".join(lines) + b"]")
            except (ValueError, RecursionError):  # one of the lines is incomplete
                events = [event for line in lines if (event := self._parse(line))]
            columns, count = _columns(events), len(events)
        self.chunks.append(columns)
        self.num_bad_lines += count - len(columns["step"])


def _parse_fast(lines: list[bytes]) -> dict[str, np.ndarray] | None:
    """Return the columns of lines, in half of the time of `json`. None: some are incomplete, or contain more than numbers."""
    import pyarrow.json

    try:
        names = dict.fromkeys(["step", "time", *json.loads(lines[0]), *json.loads(lines[-1])])
        kinds = {name: pyarrow.float64() for name in names} | {"event": pyarrow.string(), "repeated": pyarrow.bool_()}
        schema = pyarrow.schema(list(kinds.items()))
        options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
        text = b"".join(lines).replace(b': "nan"', b": null")  # null becomes NaN
        table = pyarrow.json.read_json(pyarrow.BufferReader(text), parse_options=options)
    except (pyarrow.ArrowException, ValueError, TypeError, RecursionError):
        return None
    if len(table) != len(lines) or len(names) > _MOST_COLUMNS:
        return None
    return _with_steps({name: table[name].to_numpy() for name in names if name not in _NOT_VALUES})


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
            if name not in ("step", "time") and not any(map(holds_number, values)):
                del columns[name]
    return _with_steps(columns)


def _with_steps(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with np.errstate(invalid="ignore"):
        step = columns["step"]
        valid = (step >= 0) & (step < 2**53) & (step == np.floor(step))
    return columns if valid.all() else {name: values[valid] for name, values in columns.items()}


def _joined(chunks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the columns of all chunks in the order of steps, each step once. The last line of a step counts."""
    names = list(dict.fromkeys(["step", "time", *(name for chunk in chunks for name in chunk)]))[:_MOST_COLUMNS]
    part = lambda chunk, name: chunk[name] if name in chunk else np.full(len(chunk["step"]), np.nan)
    columns = {name: np.concatenate([np.empty(0), *(part(chunk, name) for chunk in chunks)]) for name in names}
    step = columns["step"] = columns["step"].astype(np.int64)
    if len(step) and not (np.diff(step) > 0).all():
        order = np.argsort(step, kind="stable")
        is_last: np.ndarray = np.append(np.diff(step[order]) > 0, True)
        columns = {name: values[order][is_last] for name, values in columns.items()}
    return columns
