"""Exports runs as CSV files, for spreadsheets and pandas. docs/report.md describes the files."""

import csv
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from accel_ddp.errors import UserError
from accel_ddp.report.run_data import Run

_BEGIN = "\ufeffrun,"  # of every file: Excel needs the mark of UTF-8, and the first column is the name of the run
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_BLOCK = 10_000  # rows


def write_csv(runs: Run | list[Run], folder: str | Path) -> list[Path]:
    """Write the numbers of runs into a folder and return the paths. Raise UserError if another program's file is in the way."""
    runs = [runs] if isinstance(runs, Run) else runs
    folder = Path(folder)
    files: dict[str, tuple[list[str], Iterable[list[Any]]]] = {
        "updates.csv": _updates(runs),
        "evaluations.csv": _dicts(runs, [run.evaluations for run in runs], ["step", "time"]),
        "ranks.csv": _ranks(runs),
        "checkpoints.csv": _dicts(runs, [run.checkpoints for run in runs], ["step", "time"]),
        "incidents.csv": _dicts(runs, [run.incidents for run in runs], ["time", "step", "level", "kind", "text", "rank", "host"]),
        **_tables(runs),
    }
    for name in files:
        _require_own(folder / name)
    try:
        for name, (header, rows) in files.items():
            _write(folder / name, header, rows)
    except OSError as error:
        raise UserError(f"--csv {folder}: {error.filename or folder} cannot be written: {error.strerror}.") from error
    return [folder / name for name in files]


def _write(path: Path, header: list[str], rows: Iterable[list[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.tmp")
    with new.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([_text(name) for name in header])
        writer.writerows(rows)
    new.replace(path)


def _require_own(path: Path) -> None:
    """Raise UserError if a file would be overwritten that is not from an earlier export."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            begin = file.read(len(_BEGIN))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"--csv {path.parent}: {path} cannot be read: {error.strerror}.") from error
    if begin != _BEGIN:
        raise UserError(
            f"--csv {path.parent}: {path} was not written by accel-ddp report. Move it away, or choose another folder."
        )


def _text(value: str) -> str:
    """Return text that a spreadsheet does not compute as a formula: an apostrophe precedes it. Numbers stay as they are."""
    value = value.replace("\0", "")
    if value.startswith(_FORMULA) and not _is_number(value):
        return "'" + value
    return value


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?", text) is not None


def _cell(value: Any) -> Any:
    """Return the value of a cell. Values that are not known are empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return value if isinstance(value, bool | int | float) else _text(str(value))


def _strings(values: np.ndarray) -> list[str]:
    """Return the numbers of a column as the shortest text that has the same value. NaN is empty."""
    if values.dtype.kind in "iu":
        return [str(value) for value in values.tolist()]
    if values.dtype == np.float32:  # 0.1 and not 0.10000000149011612
        return ["" if value == "nan" else value for value in values.astype(str).tolist()]
    return ["" if value != value else repr(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
            for value in values.tolist()]  # fmt: skip


def _updates(runs: list[Run]) -> tuple[list[str], Iterator[list[Any]]]:
    names = list(dict.fromkeys(name for run in runs for name in run.updates))

    def rows() -> Iterator[list[Any]]:
        for run in runs:
            for at in range(0, len(run.updates["step"]), _BLOCK):
                part = slice(at, at + _BLOCK)
                size = len(run.updates["step"][part])
                columns = [_strings(run.updates[name][part]) if name in run.updates else [""] * size for name in names]
                yield from map(list, zip([_text(run.name)] * size, *columns))

    return ["run", *names], rows()


def _ranks(runs: list[Run]) -> tuple[list[str], Iterator[list[Any]]]:
    """Return one row for each line of the log and each rank that existed then."""
    names = list(dict.fromkeys(name for run in runs for name in (*run.ranks.seconds, *run.ranks.system)))

    def rows() -> Iterator[list[Any]]:
        for run in runs:
            ranks, values = run.ranks, {**run.ranks.system, **run.ranks.seconds}
            for at in range(0, len(ranks.steps), _BLOCK):
                known = {name: one[at : at + _BLOCK] for name, one in values.items()}
                exists = np.any([np.isfinite(one) for one in known.values()], axis=0)  # [rows, ranks]
                row, rank = np.nonzero(exists)
                columns = [_strings(known[name][exists]) if name in known else [""] * len(row) for name in names]
                times = [_strings(one[at + row]) for one in (ranks.first_steps, ranks.steps, ranks.times)]
                yield from map(list, zip([_text(run.name)] * len(row), *times, _strings(rank), *columns))

    return ["run", "first_step", "last_step", "time", "rank", *names], rows()


def _dicts(runs: list[Run], lists: list[list[dict[str, Any]]], first: list[str]) -> tuple[list[str], Iterator[list[Any]]]:
    names = list(dict.fromkeys([*first, *(name for lines in lists for line in lines for name in line)]))
    rows = ([_text(run.name), *(_cell(line.get(name)) for name in names)] for run, lines in zip(runs, lists) for line in lines)
    return ["run", *names], rows


def _tables(runs: list[Run]) -> dict[str, tuple[list[str], Iterable[list[Any]]]]:
    """Return one file for each table, because tables have different columns."""
    found: dict[str, tuple[list[str], Iterable[list[Any]]]] = {}
    for run in runs:
        for step, named in run.tables.items():
            for name, table in named.items():
                words = [*([run.name] if len(runs) > 1 else []), f"step_{step:08d}", name]
                path = base = "tables/" + "_".join(re.sub(r"[^\w.-]+", "_", word).strip("._") or "table" for word in words)[:150]
                number = 1
                while f"{path}.csv" in found:  # names that differ only in characters that a file name cannot have
                    number += 1
                    path = f"{base}_{number}"
                rows = [[_text(run.name), str(step), *map(_cell, row)] for row in table["rows"]]
                found[f"{path}.csv"] = (["run", "step", *table["columns"]], rows)
    return found
