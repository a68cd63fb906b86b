"""Loads training and evaluation rows from the Hub, from files or from built-in datasets, and checks them."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from accel_ddp.config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.seeds import mixed
from accel_ddp.sources import builtin
from accel_ddp.sources.hub import prepare_hub
from accel_ddp.sources.messages import warn

if TYPE_CHECKING:
    import datasets

FILE_FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}

# ---------------------------------------------------------------------------------------------- loading


def load_rows(
    cfg: RecipeConfig, reader: Callable[[str, str], "datasets.Dataset"] | None = None
) -> tuple["datasets.Dataset", "datasets.Dataset"]:
    """Return training and evaluation rows of a Hub dataset, a built-in dataset or files.

    `reader(option, path)` reads the files; the default is `load_file`. Without evaluation data, a tenth of the training rows
    (at most 2,000) is set aside. The choice depends on the seed only.
    """
    prepare_hub()
    splits, train_split, eval_split = _load_splits(cfg, reader or load_file)
    for option, split in (("train_split", train_split), ("eval_split", eval_split)):
        if split and split not in splits:
            raise UserError(f"--{option} {split}: {cfg.dataset} has no such split. Use one of: {', '.join(splits)}.")
    if not eval_split:
        eval_split = next((name for name in ("validation", "dev", "test", "eval") if name in splits), "")
    train = splits[train_split]
    train, test = (train, splits[eval_split]) if eval_split else _set_aside(train, cfg)
    for name, rows in (("training", train), ("evaluation", test)):
        if len(rows) == 0:
            raise UserError(f"{cfg.train_file or cfg.dataset}: the {name} data have no rows. Give another file or split.")
    return _select_first(train, cfg.max_train_items), _select_first(test, cfg.max_eval_items)


def _load_splits(
    cfg: RecipeConfig, reader: Callable[[str, str], "datasets.Dataset"]
) -> tuple[dict[str, "datasets.Dataset"], str, str]:
    """Return all splits, and the names of the training and the evaluation split. The latter is "" if it was not given."""
    if cfg.train_file:
        splits = {"train": reader("--train_file", cfg.train_file)}
        if cfg.eval_file:
            splits["eval"] = reader("--eval_file", cfg.eval_file)
        return splits, "train", "eval" if cfg.eval_file else ""
    if cfg.eval_file:
        raise UserError(f"--eval_file {cfg.eval_file}: was given without --train_file. Give both.")
    if not cfg.dataset:
        raise UserError("There are no training data. Give --train_file or --dataset.")
    load = builtin.load_dataset if builtin.is_builtin("--dataset", cfg.dataset) else _load_from_hub
    return load(cfg.dataset), cfg.train_split, cfg.eval_split


def _set_aside(train: "datasets.Dataset", cfg: RecipeConfig) -> list["datasets.Dataset"]:
    """Return training and evaluation rows that are drawn from `train`."""
    import datasets

    if len(train) < 2:
        raise UserError(
            f"{cfg.train_file or cfg.dataset}: training and evaluation need at least 2 rows, and the data have {len(train)}. "
            "Give more rows, or --eval_file."
        )
    # A table of row numbers is split in the same way, because the draw depends only on the number of rows.
    numbers = datasets.Dataset.from_dict({"number": np.arange(len(train))})
    options = {"test_size": max(1, min(2000, len(train) // 10)), "seed": mixed(cfg.seed, "split") % 2**32}
    rows, numbers = (table.train_test_split(**options) for table in (train, numbers))
    return [with_row_numbers(rows[part], np.array(numbers[part]["number"][:])) for part in ("train", "test")]


def load_file(option: str, path: str) -> "datasets.Dataset":
    """Return the rows of a file with one of the endings in FILE_FORMATS."""
    import datasets

    file = Path(path)
    if not file.is_file():
        raise UserError(f"{option} {path}: there is no such file (looked in {Path.cwd()}).")
    if file.suffix not in FILE_FORMATS:
        raise UserError(f"{option} {path}: files ending with {file.suffix!r} cannot be read. Use {', '.join(FILE_FORMATS)}.")
    if file.stat().st_size == 0:
        raise UserError(f"{option} {path}: the file is empty.")
    options = {"sep": "\t", "quoting": 3} if file.suffix == ".tsv" else {}  # 3: quotes in a .tsv are ordinary characters
    if FILE_FORMATS[file.suffix] == "csv":  # "None" and "NA" are texts and labels like any other
        options |= {"keep_default_na": False, "na_values": [""]}
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)  # the UserErrors below replace what it would log
    try:
        rows = datasets.load_dataset(FILE_FORMATS[file.suffix], data_files=str(file.resolve()), split="train", **options)
    except Exception as error:
        if "corresponds to no data" in str(error):
            raise UserError(f"{option} {path}: the file has no rows.") from error
        cause = str(error.__cause__ or error).splitlines()[0]
        if "codec can't decode" in str(error) or "codec can't decode" in cause:
            raise UserError(
                f"{option} {path}: the file is not UTF-8 (tables exported from Excel often are not). Save it as UTF-8."
            ) from error
        raise UserError(f"{option} {path}: the file cannot be read as {FILE_FORMATS[file.suffix]}: {cause}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
    if len(rows) == 0:
        raise UserError(f"{option} {path}: the file has no rows.")
    return rows


def _load_from_hub(name: str) -> dict[str, "datasets.Dataset"]:
    import datasets

    if Path(name).is_file():
        raise UserError(f"--dataset {name}: is a file. Use --train_file {name}.")
    offline = prepare_hub()
    try:
        return dict(datasets.load_dataset(*name.split(":", 1)))  # glue:sst2 is the configuration sst2 of glue
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = f"there is no network to the Hub ({offline}), and no copy in the local cache" if offline else lines[0]
        raise UserError(
            f"--dataset {name}: cannot be loaded: {reason}. Without a network, use --train_file and --eval_file with local files."
        ) from error


# ---------------------------------------------------------------------------------------------- row numbers


def row_numbers(rows: "datasets.Dataset") -> np.ndarray:
    """Return the number of each row in its file, counted from 0. Error messages name these numbers.

    They differ from the positions in `rows` if rows were set aside or dropped.
    """
    return getattr(rows, "row_numbers", np.arange(len(rows)))


def with_row_numbers(rows: "datasets.Dataset", numbers: np.ndarray) -> "datasets.Dataset":
    """Return `rows` with their numbers attached. Most methods of `datasets` return tables without this attribute."""
    rows.row_numbers = numbers
    return rows


def _select_first(rows: "datasets.Dataset", number: int) -> "datasets.Dataset":
    return _select(rows, np.arange(number)) if 0 < number < len(rows) else rows


def _select(rows: "datasets.Dataset", positions: np.ndarray) -> "datasets.Dataset":
    return with_row_numbers(rows.select(positions), row_numbers(rows)[positions])


# ---------------------------------------------------------------------------------------------- checks


def require_columns(columns: dict[str, str], *tables: "datasets.Dataset") -> None:
    """Raise UserError if a table lacks a column. `columns` maps options to their values; an empty value is not required."""
    for rows in tables:
        for option, column in columns.items():
            if column and column not in rows.column_names:
                mark = next((mark for mark in ";\t|" if len(rows.column_names) == 1 and mark in rows.column_names[0]), "")
                hint = f" Values seem to be separated by {mark!r}: save them with commas, or with tabs as .tsv." if mark else ""
                raise UserError(
                    f"--{option} {column}: there is no such column. The data have: {', '.join(rows.column_names)}.{hint}"
                )


def read_texts(rows: dict[str, list], column: str) -> list[str]:
    """Return a column of texts. Missing values become "". Raise UserError for the first value of another type."""
    for value in rows[column]:
        if not isinstance(value, str | None):
            raise UserError(f"column {column!r} contains {value!r} ({type(value).__name__}), which is not text.")
    return [value or "" for value in rows[column]]


def find_empty(columns: list[str], texts: list[list[str]]) -> list[str]:
    """Return the column `problem` for `drop_broken`: which of the columns is empty in a row, or ""."""
    first_empty = lambda row: next((column for column, text in zip(columns, row) if not text.strip()), None)
    return [f"its {column} is empty" if (column := first_empty(row)) else "" for row in zip(*texts)]


def drop_broken(tables: list["datasets.Dataset"], cfg: RecipeConfig) -> list["datasets.Dataset"]:
    """Return training and evaluation rows whose `problem` is "", without that column.

    Other rows raise UserError. With `--skip_broken` they are dropped, and a warning reports their number.
    """
    usable = []
    for rows, name in zip(tables, ("training", "evaluation")):
        without_column = with_row_numbers(rows.remove_columns("problem"), row_numbers(rows))
        usable.append(_drop(without_column, rows["problem"][:], cfg, name))
    return usable


def drop_unlabelled(tables: Sequence["datasets.Dataset"], column: str, cfg: RecipeConfig) -> Sequence["datasets.Dataset"]:
    """Return training and evaluation rows that have a label. Other rows are handled as in `drop_broken`."""
    import datasets

    problems = [[f"it has no {column}" if value is None else "" for value in rows[column][:]] for rows in tables]
    if not any(map(any, problems)):
        return tables
    usable = [_drop(*one, cfg, name) for one, name in zip(zip(tables, problems), ("training", "evaluation"))]
    is_float = getattr(tables[0].features[column], "dtype", "") == "float64"
    if is_float and all(value.is_integer() for rows in usable for value in rows[column][:]):
        # Integers of a .csv are read as floats if one of them is missing.
        return [with_row_numbers(rows.cast_column(column, datasets.Value("int64")), row_numbers(rows)) for rows in usable]
    return usable


def _drop(rows: "datasets.Dataset", problems: list[str], cfg: RecipeConfig, name: str) -> "datasets.Dataset":
    broken = [i for i, problem in enumerate(problems) if problem]
    if not broken:
        return rows
    file = cfg.eval_file if name == "evaluation" and cfg.eval_file else cfg.train_file or cfg.dataset
    number = row_numbers(rows) + 1
    shown = "; ".join(f"row {number[i]}: {problems[i]}" for i in sorted(broken, key=lambda i: number[i])[:3])
    found = (
        f"{len(broken):,} of {len(problems):,} {name} rows cannot be used: {shown}{'; ...' if broken[3:] else ''} "
        f"(rows of {file}, counted from 1 without the header)."
    )
    if not cfg.skip_broken:
        raise UserError(f"{found} Correct them, or leave them out with --skip_broken.")
    if len(broken) == len(problems):
        raise UserError(f"--skip_broken: no rows are left. {found}")
    warn(f"--skip_broken: {found}")
    return _select(rows, np.setdiff1d(np.arange(len(problems)), broken))
