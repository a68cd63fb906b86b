"""Tables in files. A file that cannot be read is reported with the line, the reason, and what to do about it."""

import csv
import io
import json
import logging
import lzma
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from accel_ddp.errors import UserError
from accel_ddp.sources.places import reporting, shows_progress, warn
from accel_ddp.text import did_you_mean_path, first_line, format_bytes

if TYPE_CHECKING:
    import datasets

FILE_FORMATS = {
    ".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text"
}  # fmt: skip
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": "xz"}
COMPRESSED = {
    b"\x1f\x8b": "gunzip", b"PK\x03\x04": "unzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"
}  # fmt: skip
TABLES = FILE_FORMATS.keys() - {".txt"}  # most recipes need more columns than the one of a .txt
EVAL_SPLITS = ("validation", "dev", "test", "eval")
SENTENCE_FILES = (".conll", ".iob", ".bio")  # a row is a sentence, with a line for each word
LARGE = 100 << 20  # bytes; reading a smaller file takes a second
SEPARATORS = ";\t|"  # between the cells of a .csv, by mistake


def load_file(option: str, path: str) -> "datasets.Dataset":
    """Return the rows of a file with one of the endings in FILE_FORMATS, or of a folder of `save_to_disk`.

    All cells of a .csv or .tsv are texts, exactly as they are in the file, or None if they are empty. The types that pandas finds
    differ between the parts of a large file, and they change texts such as 007.
    """
    import datasets

    if is_saved(Path(path)):
        return _load_saved(option, path)
    file = require_file(option, path)
    kind = FILE_FORMATS.get(file.suffix.lower(), "")
    if not kind:
        usable = ", ".join(ending for ending in FILE_FORMATS if ending in TABLES)
        raise UserError(f"{option} {path}: files ending with {file.suffix!r} cannot be read. Use {usable}.")
    # Whether `datasets` has the rows in its cache: it looks at path and time, and reads nothing.
    was_read = lambda: Path(datasets.load_dataset_builder(kind, data_files=str(file.resolve())).cache_dir).is_dir()
    if kind not in ("parquet", "arrow") and not (kind == "json" and file.stat().st_size > LARGE and was_read()):
        require_utf8(option, file)
    options = _check_csv(option, file) if kind == "csv" else {}
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)  # the UserErrors below replace what it would log
    if not shows_progress():
        datasets.disable_progress_bars()
    rows: Any = ()
    try:
        with reporting(f"reading {path} ({format_bytes(file.stat().st_size)})"):
            rows = _load(kind, file, options)
    except Exception as error:  # many types of datasets, pyarrow and pandas
        if "corresponds to no data" not in str(error):
            raise UserError(f"{option} {path}: cannot be read as {kind}: {_find_reason(kind, file, error)}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
    if len(rows) == 0:
        raise UserError(f"{option} {path}: the file has no rows.")
    return rows


def _load(kind: str, file: Path, options: dict[str, Any]) -> "datasets.Dataset":
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # a request for a local file, which waits 3 s without a network
    read = partial(datasets.load_dataset, kind, data_files=str(file.resolve()), split="train")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pandas warns about empty cells at the end of lines
            return read(**options)
    except Exception:
        # `datasets` derives the types of columns from the first 10 MB, and fails if later lines have other types.
        if kind != "json" or file.stat().st_size < 10 << 20 or _find_broken_json(file):
            raise
        return read(chunksize=file.stat().st_size + 1)


def ending_of(file: Path) -> str:
    """Return the ending of a file without the one of its compression: .jsonl of rows.jsonl.gz."""
    return Path(file.stem if file.suffix.lower() in COMPRESSIONS else file).suffix.lower()


def open_plain(file: Path) -> IO[bytes]:
    import pyarrow

    compression = COMPRESSIONS.get(file.suffix.lower())
    return lzma.open(file) if compression == "xz" else pyarrow.input_stream(str(file), compression=compression)


def is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def saved_splits(folder: Path) -> list[str]:
    file = folder / "dataset_dict.json"
    return json.loads(file.read_text())["splits"] if file.is_file() else []


def _load_saved(option: str, path: str) -> "datasets.Dataset":
    """Return the rows of a folder of `save_to_disk`: of several splits, those for training or those for an evaluation."""
    import datasets

    if splits := saved_splits(Path(path)):
        usual = EVAL_SPLITS if option == "--eval_file" else ("train",)
        if not (name := next((name for name in usual if name in splits), "")):
            instead = f"Give one of them, for example {path}/{splits[0]}"
            raise UserError(f"{option} {path}: has the splits {', '.join(splits)}. {instead}.")
        return _load_saved(option, f"{path}/{name}")
    try:
        return datasets.load_from_disk(path)
    except Exception as error:  # many types of datasets and pyarrow
        raise UserError(f"{option} {path}: cannot be read as a folder of `save_to_disk`: {error}") from error


class ColumnNames:
    """The columns of files as their beginnings show them, without `datasets`. Later rows of a .json may have further ones."""

    def __init__(self, *paths: str):
        found = [self._read(Path(path)) for path in paths]
        self.column_names = list(dict.fromkeys(name for names in found for name in names))
        self.lacking = {name: "" for name in self.column_names if any(name not in names for names in found)}
        self.files = self  # as of a table that was read

    def _read(self, file: Path) -> list[str]:
        if file.suffix.lower() == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_schema(file).names
        if FILE_FORMATS[ending_of(file)] == "csv":
            return next(_read_cells(file))[1]
        with open_plain(file) as opened:
            text = opened.read(1 << 20).decode("utf-8-sig", "ignore")
        return list(json.JSONDecoder().raw_decode(text, text.index("{"))[0])

    def flatten(self) -> "ColumnNames":
        """Do nothing: the names of nested columns are not known here."""
        return self


def require_file(option: str, path: str) -> Path:
    """Return the path of a file. Raise UserError if it is missing, a folder, empty or compressed in spite of its ending."""
    file = Path(path)
    if file.is_dir():
        raise UserError(f"{option} {path}: is a folder and not a file. {describe_folder(file)}")
    if not file.is_file():
        reason = did_you_mean_path(file).strip() or "Check the path."
        if path.startswith("~"):
            reason = f"The shell did not replace ~. Use {Path(path).expanduser()}."
        raise UserError(f"{option} {path}: there is no such file (looked in {Path.cwd()}). {reason}")
    if file.stat().st_size == 0:
        raise UserError(f"{option} {path}: the file is empty.")
    with file.open("rb") as opened:
        begin = opened.read(6)
    tool = next((tool for mark, tool in COMPRESSED.items() if begin.startswith(mark)), "")
    if tool == "unzip" and file.suffix.lower() not in (".zip", ".gz"):
        raise UserError(f"{option} {path}: is a zip archive or a table of Excel. Export the table as .csv in UTF-8.")
    if tool and file.suffix.lower() not in COMPRESSIONS:
        command = f"unzip {file.name}" if tool == "unzip" else f"{tool} < {file.name} > new{file.suffix}"
        instead = f"Decompress it first, for example: {command}. Or give it its usual ending"
        raise UserError(f"{option} {path}: is compressed. {instead}.")
    return file


def describe_folder(folder: Path) -> str:
    entries = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
    if not entries:
        return "It is empty."
    endings = Counter("folders" if entry.is_dir() else entry.suffix or "other files" for entry in entries)
    counts = ", ".join(f"{number:,} {ending}" for ending, number in endings.most_common(4))
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        return f"It was written with `save_to_disk` of datasets ({counts})."
    usable = [entry for entry in entries if entry.suffix.lower() in FILE_FORMATS and entry.is_file()]
    preferred = sorted(usable, key=lambda file: (file.suffix == ".txt", "train" not in file.name.lower()))
    return f"It contains {counts}. " + (f"Give one file, for example {preferred[0]}." if usable else "None of these can be read.")


def require_utf8(option: str, file: Path) -> None:
    """Raise UserError if the file is not UTF-8. This costs a small part of the time that reading rows takes."""
    convert = lambda encoding: f"iconv -f {encoding} -t UTF-8 {file.name} > new{file.suffix}"
    place = 0
    with file.open("rb") as lines:
        begin = lines.peek(4096)[:4096]
        if begin.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in begin:
            hint = f"Convert it, for example: {convert('UTF-16')}"
            raise UserError(f"{option} {file}: the file is not UTF-8, but UTF-16 or binary. {hint}")
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                found = f"{error.reason} at byte {place + error.start} (0x{line[error.start]:02x}) in line {number:,}"
                hint = f"Save it as UTF-8, or convert it, for example: {convert('LATIN1')}"
                raise UserError(f"{option} {file}: the file is not UTF-8: {found}. {hint}") from error
            place += len(line)


def find_lines(path: str, numbers: list[int]) -> dict[int, int]:
    """Return the line (from 1) where each row (from 0) begins, with headers and cells of several lines. {}: not known."""
    file, wanted = Path(path), set(numbers)
    suffix = file.suffix.lower()
    if not file.is_file():
        return {}
    starts: Iterable[int] = ()
    if suffix in (".csv", ".tsv"):
        starts = islice((line for line, _ in _read_cells(file)), 1, None)
    elif suffix in (".jsonl", *SENTENCE_FILES):
        starts = _find_starts(file, suffix == ".jsonl")
    return {row: line for row, line in enumerate(islice(starts, max(wanted, default=0) + 1)) if row in wanted}


def _find_starts(file: Path, is_row_per_line: bool) -> Iterator[int]:
    """Yield the lines where rows begin. Sentences have empty lines between them."""
    last = -1
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip() and not line.startswith(b"-DOCSTART-"):
                if is_row_per_line or last < number - 1:
                    yield number
                last = number


def _check_csv(option: str, file: Path) -> dict[str, Any]:
    """Return options for `datasets`. Raise UserError for lines with too many cells, which pandas would drop or misread."""
    import datasets
    import pandas

    records = _read_cells(file)
    _, header = next(records, (0, []))
    if not header:
        raise UserError(f"{option} {file}: the file has no rows.")
    # Empty cells at the end of a line are not data: some programs write a separator after every cell.
    too_long = [(line, len(cells)) for line, cells in records if len(cells) > len(header) and any(cells[len(header) :])]
    if too_long:
        line, number = too_long[0]
        more = f" {len(too_long):,} lines have too many cells." if too_long[1:] else ""
        if mark := next((mark for mark in SEPARATORS if len(header) == 1 and mark in header[0]), ""):
            hint = f"Cells seem to be separated by {mark!r}: save them with commas, or with tabs as .tsv."
        else:
            is_csv = file.suffix.lower() == ".csv"
            hint = 'Put cells that contain a comma into quotes: "a, b".' if is_csv else "A cell of a .tsv cannot contain a tab."
        raise UserError(f"{option} {file}: line {line:,} has {number} cells, but the header has {len(header)}.{more} {hint}")
    options = {**_dialect(file), "keep_default_na": False, "na_values": [""]}  # "None" and "NA" are texts and labels
    csv.writer(line := io.StringIO()).writerow(header)
    names = [str(name) for name in pandas.read_csv(io.StringIO(line.getvalue())).columns]  # pandas makes repeated names distinct
    for name in [name for name, number in Counter(header).items() if number > 1 and name][:3]:
        others = [new for new, old in zip(names, header) if old == name]
        warn(f"{option} {file}: {len(others)} columns are named {name!r}. They are read as {', '.join(others)}.")
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return {**options, "features": features, "index_col": False, "usecols": names}


def _dialect(file: Path) -> dict[str, Any]:
    is_tsv = file.suffix.lower() == ".tsv"  # its quotes are ordinary characters
    return {"sep": "\t" if is_tsv else ",", "quoting": csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL}


def _read_cells(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line and the cells of each row. The first row is the header. Empty lines are left out, as pandas does."""
    dialect = _dialect(file)
    limit = csv.field_size_limit(sys.maxsize)
    try:
        with io.TextIOWrapper(open_plain(file), encoding="utf-8-sig", newline="") as lines:
            reader, line = csv.reader(lines, delimiter=dialect["sep"], quoting=dialect["quoting"]), 1
            for cells in reader:
                if len(cells) > 1 or (cells and cells[0].strip()):
                    yield line, cells
                line = reader.line_num + 1
    finally:
        csv.field_size_limit(limit)


def _find_reason(kind: str, file: Path, error: Exception) -> str:
    cause = first_line(error.__cause__ or error)
    if kind == "json":
        found = _find_broken_json(file)
        return f"{found} Correct it in the file. --skip_broken leaves out rows, but only if the file is JSON." if found else cause
    if kind == "csv" and "EOF inside string" in cause:
        *_, (line, _) = _read_cells(file)
        return f"the quote of a cell in line {line:,} is not closed. Close it, or write two quotes for a quote inside a cell."
    if kind in ("parquet", "arrow"):
        with file.open("rb") as opened:
            begin = opened.read(20).decode("ascii", "replace")
        is_text = begin.isascii() and begin.isprintable()
        return f"{cause.rstrip('.')}." + (f" It begins with {begin!r}: rename it to its real format." if is_text else "")
    return cause


def _find_broken_json(file: Path) -> str:
    """Return the first place that is not JSON, or not an object with distinct keys, or ""."""
    with file.open(encoding="utf-8-sig") as opened:
        first = next((line for line in opened if line.strip()), "")
        opened.seek(0)
        # One object per line is usual. Otherwise the whole file is one list, or objects of several lines each.
        texts = opened if first.lstrip().startswith("{") and _decode(first)[0] == "" else [opened.read()]
        for number, text in enumerate(texts, start=1):
            problem, line = _decode(text.rstrip())
            if problem:
                return f"line {number + line - 1:,} {problem}"
    return ""


def _decode(text: str) -> tuple[str, int]:
    """Return ("", 0) if `text` is white space, or one or more objects, or a list of objects. Else return (problem, its line)."""
    decoder, line_of = json.JSONDecoder(object_pairs_hook=_with_distinct_keys), lambda place: text.count("\n", 0, place) + 1
    place = len(text) - len(text.lstrip())
    while place < len(text):
        if place and text[place] == ",":
            return "has a comma after an object. Write one object per line, without commas between them.", line_of(place)
        try:
            value, after = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            at = text[error.pos : error.pos + 20].partition("\n")[0]
            found = f"at {at!r}" if at else "at its end"
            hint = " Names and texts need double quotes." if at.startswith("'") else ""
            return f"is not JSON: {error.msg.removesuffix(' at')} {found}, column {error.colno}.{hint}", error.lineno
        except KeyError as error:
            return f"has the key {error} twice in one object.", line_of(place)
        if not isinstance(value, dict) and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
            return f'is {json.dumps(value):.40}, where an object such as {{"text": ...}} is needed.', line_of(place)
        place = json.decoder.WHITESPACE.match(text, after).end()
    return "", 0


def _with_distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise KeyError(next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1))
    return made
