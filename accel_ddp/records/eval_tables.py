"""Tables of an evaluation: scores of each class, a confusion matrix, predicted and true numbers, sample predictions.

A run stores them in OUTPUT_DIR/tables/step_00000120.json, trackers show them, and `accel-ddp report` reads them.
"""

import contextlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from accel_ddp.records.files import parse, replace_file

FOLDER = "tables"
KINDS = ("scores", "matrix", "points", "predictions")
IMAGE = "image"
NEWEST = 3  # evaluations whose tables a run keeps, besides the first and the best


@dataclass
class Table:
    """One table. Cells are strings, numbers or None.

    `scores` have the name of a row in their first column. A `matrix` has a row for each true class and a column for each predicted
    class, after a first column with the names of the rows. `points` have two columns of numbers, the true and the predicted ones.
    `predictions` contain data of the user, so they are made only on request (`--log_predictions`). Their column IMAGE, if there
    is one, has small images as data URIs.
    """

    columns: list[str]
    rows: list[list[Any]]
    kind: Literal["scores", "matrix", "points", "predictions"] = "scores"
    title: str = ""


def file_of(step: int) -> str:
    """Return the path of the tables of a step, relative to the folder of the run."""
    return f"{FOLDER}/step_{step:08d}.json"


def check_tables(tables: Any) -> dict[str, Table]:
    """Return the tables with cells that JSON and trackers accept. Raise TypeError or ValueError for what is not a table.

    Numbers of numpy and torch become Python's. Numbers that are not finite become "nan", "inf" and "-inf", as in log.jsonl.
    """
    if not isinstance(tables, Mapping):
        raise TypeError(f"`tables` returned {type(tables).__name__}. It must return a dictionary of accel_ddp.Table.")
    return {str(name): _check_table(str(name), table) for name, table in tables.items()}


def _check_table(name: str, table: Any) -> Table:
    if not isinstance(table, Table):
        raise TypeError(f"the table {name!r} is {type(table).__name__}. It must be an accel_ddp.Table.")
    if table.kind not in KINDS:
        raise ValueError(f"the kind of the table {name!r} is {table.kind!r}. It must be one of {', '.join(KINDS)}.")
    columns, rows = [str(column) for column in table.columns], [[_as_cell(cell) for cell in row] for row in table.rows]
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"row {number} of the table {name!r} has {len(row)} cells, but there are {len(columns)} columns.")
    return Table(columns, rows, table.kind, str(table.title))


def _as_cell(value: Any) -> str | int | float | None:
    if (hasattr(value, "item") and getattr(value, "size", 1) == 1) or (hasattr(value, "numel") and value.numel() == 1):
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, int):
        return value
    # A lone surrogate, which JSON files of a user may contain, cannot be written as UTF-8.
    return str(value).encode("utf-8", "replace").decode()


def write_tables(folder: Path, step: int, tables: dict[str, Table]) -> str:
    """Write the tables of a step and return their path relative to the folder of the run. Raise OSError if the disk fails.

    Equal tables have equal bytes, so a resumed run that repeats an evaluation leaves the file as it was.
    """
    path = folder / file_of(step)
    path.parent.mkdir(exist_ok=True)
    replace_file(path, json.dumps({name: asdict(table) for name, table in tables.items()}, ensure_ascii=False))
    return file_of(step)


def read_tables(path: Path) -> dict[str, Table]:
    """Return the tables of a file, or {} if it was removed or is damaged."""
    with contextlib.suppress(OSError):
        return parse_tables(parse(path.read_bytes()) or {})
    return {}


def parse_tables(values: dict[str, Any]) -> dict[str, Table]:
    """Return the tables of a JSON object. Damaged tables, and kinds and fields that are not known, are left out."""
    tables = {}
    for name, value in values.items():
        with contextlib.suppress(TypeError, ValueError):
            tables[name] = _check_table(name, Table(**{one.name: value[one.name] for one in fields(Table) if one.name in value}))
    return tables


def list_steps(folder: Path) -> list[int]:
    """Return the steps whose tables the folder of a run contains, in ascending order."""
    names = (re.fullmatch(r"step_(\d+)\.json", path.name) for path in (folder / FOLDER).glob("step_*.json"))
    return sorted(int(name[1]) for name in names if name)


def remove_after(folder: Path, step: int) -> None:
    """Remove tables of later steps, which a run that continues from `step` repeats, and partial files of a killed process."""
    for later in list_steps(folder):
        if later > step:
            _remove(folder / file_of(later))
    for partial in (folder / FOLDER).glob(".step_*.tmp"):
        _remove(partial)


def prune(folder: Path, best: int | None) -> None:
    """Keep the tables of the first evaluation, of the newest ones, and of the step `best`. Remove the others."""
    steps = list_steps(folder)
    for step in steps[1:-NEWEST]:
        if step != best:
            _remove(folder / file_of(step))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
