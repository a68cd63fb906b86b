"""Reads raw text for language models: tables with a column of texts, or .txt files with a text per line."""

import dataclasses
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_ddp.config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.sources import data, hub
from accel_ddp.sources.files import FILE_FORMATS, describe_folder, load_file, require_file, require_utf8

if TYPE_CHECKING:
    import datasets


def load_texts(cfg: RecipeConfig) -> tuple["datasets.Dataset", "datasets.Dataset"]:
    """Return training and evaluation rows like `data.load_rows`, also from several .txt files.

    Consecutive lines of a .txt belong together. Without `--eval_file`, the last tenth of its lines (at most 2,000) is therefore
    set aside, and not lines that are drawn at random.
    """
    if not cfg.train_file or is_table(cfg.train_file):
        return data.load_rows(cfg, load_text_file)
    if cfg.eval_file:
        train, test = data.load_rows(dataclasses.replace(cfg, max_train_items=0, max_eval_items=0), load_text_file)
        return _draw_lines(train, test, cfg)
    hub.prepare_hub()
    rows = load_text_file("--train_file", cfg.train_file)
    if len(rows) < 2:
        raise UserError(
            f"--train_file {cfg.train_file}: training and evaluation need at least 2 lines. Give more lines, or --eval_file."
        )
    num_train = len(rows) - max(1, min(2000, len(rows) // 10))
    train, test = range(num_train), range(num_train, len(rows))
    return _draw_lines(*(data.with_row_numbers(rows.select(part), np.array(part)) for part in (train, test)), cfg)


def _draw_lines(train: "datasets.Dataset", test: "datasets.Dataset", cfg: RecipeConfig) -> tuple[Any, Any]:
    """Draw lines in runs of 100, because blocks of unrelated lines are not the text that is to be learned."""
    return data.draw_sample(train, "max_train_items", cfg, 100), data.draw_sample(test, "max_eval_items", cfg, 100)


def load_text_file(option: str, place: str) -> "datasets.Dataset":
    """Return the rows of a table, or the lines of .txt files in the column `text`. See `find_text_files` for `place`."""
    import datasets

    if is_table(place):
        return load_file(option, place)
    files = find_text_files(option, place)
    for file in files:
        require_utf8(option, file)
    return datasets.load_dataset("text", data_files=[str(file.resolve()) for file in files], split="train")


def is_table(place: str) -> bool:
    """Return whether the file has columns, by its ending."""
    return Path(place).suffix.lower() in FILE_FORMATS.keys() - {".txt"}


def find_text_files(option: str, place: str) -> list[Path]:
    """Return the .txt files that a path, a folder (with its subfolders) or a pattern names, sorted, without empty files."""
    if Path(place).is_dir():
        files = sorted(Path(place).rglob("*.txt"))
    else:
        files = [Path(place)] if Path(place).is_file() else sorted(map(Path, glob.glob(place, recursive=True)))
    if not files and Path(place).is_dir():
        raise UserError(f"{option} {place}: the folder contains no .txt files. {describe_folder(Path(place))}")
    if not files and glob.has_magic(place):
        raise UserError(f"{option} {place}: no file matches this pattern (looked in {Path.cwd()}).")
    if not files:
        require_file(option, place)
    if others := [file for file in files if file.suffix != ".txt"]:
        raise UserError(f"{option} {place}: {others[0].name} is not a .txt file. Give .txt files only, for example '*.txt'.")
    with_text = [file for file in files if file.stat().st_size]
    if not with_text:
        raise UserError(f"{option} {place}: {'the file is' if len(files) == 1 else 'all files are'} empty.")
    return with_text


def decode_utf8(raw: bytes, path: Path, first: int) -> str:
    """Return the text of `raw`, which begins at byte `first` of the file."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: the file is not UTF-8: {error.reason} at byte {first + error.start} (0x{raw[error.start]:02x}). "
            f"Convert it, for example: iconv -f LATIN1 -t UTF-8 {path.name} > new.txt"
        ) from error


def drop_other_values(tables: Sequence["datasets.Dataset"], cfg: Any) -> Sequence["datasets.Dataset"]:
    """Return the rows whose `--text_column` is text or empty. Other rows are handled as in `data.drop_broken`."""
    if all(str(getattr(rows.features[cfg.text_column], "dtype", "")) == "string" for rows in tables):
        return tables
    problems = [
        [f"its {cfg.text_column} is not text\t{value!r:.40}" if not isinstance(value, str | None) else "" for value in values]
        for values in (rows[cfg.text_column] for rows in tables)
    ]
    if not any(map(any, problems)):
        return tables
    return data.drop_broken([
        data.with_row_numbers(rows.add_column("problem", texts), data.row_numbers(rows)) for rows, texts in zip(tables, problems)
    ], cfg)  # fmt: skip
