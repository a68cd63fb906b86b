"""Reads raw text for language models: tables with a column of texts, or .txt files with a text per line."""

import codecs
import glob
from pathlib import Path
from typing import TYPE_CHECKING

from accel_ddp.config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.sources import data, hub

if TYPE_CHECKING:
    import datasets


def load_texts(cfg: RecipeConfig) -> tuple["datasets.Dataset", "datasets.Dataset"]:
    """Return training and evaluation rows like `data.load_rows`, also from several .txt files.

    Consecutive lines of a .txt belong together. Without `--eval_file`, the last tenth of its lines (at most 2,000) is therefore
    set aside, and not lines that are drawn at random.
    """
    if cfg.eval_file or not cfg.train_file or is_table(cfg.train_file):
        return data.load_rows(cfg, load_text_file)
    hub.prepare_hub()
    rows = load_text_file("--train_file", cfg.train_file)
    if len(rows) < 2:
        raise UserError(
            f"--train_file {cfg.train_file}: training and evaluation need at least 2 lines. Give more lines, or --eval_file."
        )
    num_train = len(rows) - max(1, min(2000, len(rows) // 10))
    train, test = range(num_train), range(num_train, len(rows))
    return rows.select(train[: cfg.max_train_items or num_train]), rows.select(test[: cfg.max_eval_items or len(test)])


def load_text_file(option: str, place: str) -> "datasets.Dataset":
    """Return the rows of a table, or the lines of .txt files in the column `text`. See `find_text_files` for `place`."""
    import datasets

    if is_table(place):
        if Path(place).suffix != ".parquet" and Path(place).is_file():
            _require_utf8(Path(place))
        return data.load_file(option, place)
    files = find_text_files(option, place)
    for file in files:
        _require_utf8(file)
    return datasets.load_dataset("text", data_files=[str(file.resolve()) for file in files], split="train")


def is_table(place: str) -> bool:
    """Return whether the file has columns, by its ending."""
    return Path(place).suffix in data.FILE_FORMATS.keys() - {".txt"}


def find_text_files(option: str, place: str) -> list[Path]:
    """Return the .txt files that a path, a folder (with its subfolders) or a pattern names, sorted, without empty files."""
    if Path(place).is_dir():
        files = sorted(Path(place).rglob("*.txt"))
    else:
        files = [Path(place)] if Path(place).is_file() else sorted(map(Path, glob.glob(place, recursive=True)))
    if not files:
        raise UserError(f"{option} {place}: there is no such file, and no folder that contains .txt (looked in {Path.cwd()}).")
    if others := [file for file in files if file.suffix != ".txt"]:
        raise UserError(f"{option} {place}: {others[0].name} is not a .txt file. Give .txt files only, for example '*.txt'.")
    with_text = [file for file in files if file.stat().st_size]
    if not with_text:
        raise UserError(f"{option} {place}: {'the file is' if len(files) == 1 else 'all files are'} empty.")
    return with_text


def decode_utf8(raw: bytes, path: Path, first: int, is_last: bool = True) -> tuple[str, int]:
    """Return the text of `raw`, which begins at byte `first` of the file, and the number of decoded bytes.

    Unless `is_last` is set, an incomplete character at the end is left for the next piece.
    """
    try:
        return codecs.utf_8_decode(raw, "strict", is_last)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: the file is not UTF-8: {error.reason} at byte {first + error.start} (0x{raw[error.start]:02x}). "
            f"Convert it, for example: iconv -f LATIN1 -t UTF-8 {path.name} > new.txt"
        ) from error


def _require_utf8(path: Path) -> None:
    """Raise UserError if the file is not UTF-8. This costs a small part of the time that tokenising takes."""
    rest, done, is_last = b"", 0, False
    with path.open("rb") as file:
        while not is_last:
            piece = file.read(1 << 20)
            is_last = not piece
            _, used = decode_utf8(rest + piece, path, done, is_last)
            rest, done = (rest + piece)[used:], done + used
