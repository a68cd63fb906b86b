"""Several files as one table: folders, patterns, compressed files, and where each row comes from."""

import glob
import hashlib
import lzma
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_ddp.config.option_values import split_weight
from accel_ddp.errors import UserError
from accel_ddp.seeds import mixed
from accel_ddp.sources.places import warn, write_once
from accel_ddp.sources.table_files import COMPRESSIONS, describe_folder, ending_of, find_lines, is_saved, open_plain, require_file
from accel_ddp.text import listed

if TYPE_CHECKING:
    import datasets

FOLDER, PATTERN = "/", "*"  # among the endings: the reader takes folders, or folders and patterns, as they are
NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # of `datasets`
BLOCK = 1 << 16


@dataclass(frozen=True)
class Files:
    """The files of an option, whose rows are in one table, and its arguments. Several arguments are several datasets."""

    paths: tuple[str, ...]  # as messages name them
    plain: tuple[str, ...]  # the same without compression
    ends: np.ndarray  # the number of rows up to the end of each file
    datasets: np.ndarray  # the argument that each file belongs to
    names: tuple[str, ...] = ()  # of the arguments
    weights: tuple[float, ...] | None = None
    lacking: dict[str, str] = field(default_factory=dict)  # columns that not all files have in the same way, and why

    def places(self, numbers: Sequence[int]) -> dict[int, tuple[str, int, int]]:
        """Return the file, the row in it and the line of each row number. Rows count from 0 and lines from 1; 0: not known."""
        at = np.searchsorted(self.ends, numbers, side="right")
        rows = np.array(numbers) - np.concatenate([[0], self.ends])[at]
        lines = {file: find_lines(self.plain[file], rows[at == file].tolist()) for file in np.unique(at).tolist()}
        return {
            number: (self.paths[file], row, lines[file].get(row, 0))
            for number, file, row in zip(numbers, at.tolist(), rows.tolist())
        }


def find_files(option: str, path: str, endings: Sequence[str], quiet: bool = False) -> list[str]:
    """Return the files that a path, a folder (with its subfolders) or a pattern names, sorted.

    `endings` has groups of endings. Files of the first group that occurs are read, and a warning names the others. A folder of
    `save_to_disk` counts as a file.
    """
    place, takes_folders = Path(path), FOLDER in endings
    if place.is_file() or is_saved(place) or (place.is_dir() and takes_folders) or PATTERN in endings:
        return [path]
    if not place.is_dir() and not glob.has_magic(path):
        return [str(require_file(option, path))]
    matches = [place] if place.is_dir() else [Path(match) for match in glob.glob(path, recursive=True)]
    inside = lambda match: match.rglob("*") if match.is_dir() and not takes_folders else [match]
    is_hidden = lambda file, match: any(part.startswith(".") for part in file.relative_to(match).parts)
    is_read = lambda file: takes_folders or (file.is_file() and file.stat().st_size)
    found = {file for match in matches for file in inside(match) if is_read(file) and not is_hidden(file, match)}
    saved = lambda file: next((folder for folder in (file.parent.parent, file.parent) if is_saved(folder)), file)
    found = sorted({saved(file) for file in found})
    kinds = [[f for f in found if (f.is_dir() or ending_of(f) in group.split()) and f.name not in NOT_DATA] for group in endings]
    files = next(filter(None, kinds), [])
    if not files and found and quiet:  # a recipe may read it
        return [path]
    if not files and place.is_dir():
        raise UserError(f"{option} {path}: the folder contains no files that can be read. {describe_folder(place)}")
    if not files:
        reason = f"no file that matches this pattern ends with {' '.join(endings)}" if found else "no file matches this pattern"
        raise UserError(f"{option} {path}: {reason} (looked in {Path.cwd()}).")
    if not quiet and (others := [file.name for file in found if file not in files]):
        warn(f"{option} {path}: {len(files):,} files are read. These are left out: {listed(others, 5)}.")
    return list(map(str, files))


def decompress(option: str, path: str, cache_dir: str) -> str:
    file = Path(path)
    if file.suffix.lower() not in COMPRESSIONS or file.is_dir():
        return path
    facts = file.stat()
    key = mixed(0, f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}")
    return str(write_once(cache_dir, f"files/{key:016x}", partial(_decompress, option, file), "decompress files") / file.stem)


def _decompress(option: str, file: Path, folder: Path) -> None:
    folder.mkdir()
    num_lines = 0
    with open_plain(file) as stream, (folder / file.stem).open("wb") as plain:
        while True:
            try:
                block = stream.read(BLOCK)
            except (OSError, EOFError, lzma.LZMAError) as error:
                reason = f"is truncated or damaged after line {num_lines:,} ({error})"
                raise UserError(f"{option} {file}: {reason}. Copy it again.") from error
            if not block:
                return
            num_lines += block.count(b"\n")
            plain.write(block)


def expand(option: str, arguments: Sequence[str], endings: Sequence[str], quiet: bool = False) -> list[tuple[int, str]]:
    """Return the files of all arguments of an option, each with the number of its argument. Raise UserError if one is given twice."""
    paths = [split_weight(argument)[0] for argument in arguments]
    found = [(number, file) for number, path in enumerate(paths) for file in find_files(option, path, endings, quiet)]
    seen: dict[Path, int] = {}
    for number, file in found:
        if (before := seen.setdefault(Path(file).resolve(), number)) != number:
            reason = f"{file} is named by {paths[before]} and by {paths[number]}"
            raise UserError(f"{option}: {reason}. Name each file once. Weights say how often it is used: PATH:NUMBER.")
    return found


def read_all(
    option: str,
    arguments: Sequence[str],
    reader: Callable[[str, str], "datasets.Dataset"],
    endings: Sequence[str],
    cache_dir: str,
) -> "datasets.Dataset":
    found, plain, tables = expand(option, arguments, endings), [], []
    for _, path in found:
        plain.append(decompress(option, path, cache_dir))
        try:
            tables.append(reader(option, plain[-1]))
        except UserError as error:
            raise UserError(str(error).replace(plain[-1], path)) from error
    paths = [path for _, path in found]
    rows, lacking = _join(option, tables, paths) if tables[1:] else (tables[0], {})
    names = _short_names([split_weight(argument)[0] for argument in arguments])
    weights = tuple(weight for argument in arguments if (weight := split_weight(argument)[1]) is not None)
    rows.files = Files(
        tuple(paths), tuple(plain), np.cumsum([len(table) for table in tables]), np.array([number for number, _ in found]), names,
        weights if len(weights) == len(names) > 1 else None, lacking,
    )  # fmt: skip
    return rows


def _short_names(paths: list[str]) -> tuple[str, ...]:
    """Return distinct names of paths, as short as possible: their last parts without endings and patterns, or with a number."""
    parts = [[part.split(".")[0] or part for part in Path(path).parts if not glob.has_magic(part)] or [path] for path in paths]
    for depth in range(1, 4):
        names = tuple("-".join(part[-depth:]) for part in parts)
        if len({*names}) == len(names):
            return names
    return tuple(f"{part[-1]}-{number}" for number, part in enumerate(parts, start=1))


def _join(option: str, tables: list["datasets.Dataset"], paths: list[str]) -> tuple["datasets.Dataset", dict[str, str]]:
    """Return one table, and why columns cannot be required. A column that a file lacks is empty there, as in one joined file."""
    import datasets

    lacking, kinds = {}, {}
    for column in dict.fromkeys(name for table in tables for name in table.column_names):
        having = [i for i, table in enumerate(tables) if column in table.column_names]
        if len(having) < len(tables):
            without = next(i for i in range(len(tables)) if i not in having)
            names = ", ".join(tables[without].column_names)
            lacking[column] = f"{paths[having[0]]} has this column, but {paths[without]} does not. It has: {names}."
        first = tables[having[0]].features[column]
        if all(tables[i].features[column] == first for i in having):
            continue
        for i in having:
            tables[i] = _with_class_names(tables[i], column)
        kinds[column] = first = tables[having[0]].features[column]
        for i in having:
            try:
                kinds[column] = _common_type(kinds[column], tables[i].features[column], tables[: i + 1], column)
            except TypeError:
                show = lambda kind: str(getattr(kind, "dtype", kind))[:60]
                differ = f"{show(first)} in {paths[having[0]]}, but {show(tables[i].features[column])} in {paths[i]}"
                lacking[column] = f"Its type is {differ}. Write the same type in all files."
                warn(f"{option}: the column {column!r} is left out. {lacking[column]}")
                tables = [table.remove_columns(column) if column in table.column_names else table for table in tables]
                del kinds[column]
                break
    if not any(table.column_names for table in tables):
        raise UserError(f"{option}: {next(iter(lacking.values()))}")
    if some := [column for column in lacking if column in {name for table in tables for name in table.column_names}]:
        warn(f"{option}: some files lack these columns, and their rows have no values there: {listed(some, 5)}.")
    for i, table in enumerate(tables):
        features = datasets.Features({name: kinds.get(name, kind) for name, kind in table.features.items()})
        tables[i] = table if features == table.features else table.cast(features)
    return datasets.concatenate_datasets(tables), lacking


def _with_class_names(table: "datasets.Dataset", column: str) -> "datasets.Dataset":
    """Return the table with names instead of class numbers, which mean other classes in other files."""
    import datasets

    kind = table.features[column]
    if not isinstance(kind, datasets.ClassLabel):
        return table
    name = lambda number: None if number is None or number < 0 else kind.names[number]
    features = datasets.Features({**table.features, column: datasets.Value("string")})
    return table.map(lambda rows: {column: [*map(name, rows[column])]}, batched=True, features=features)


def _common_type(a: Any, b: Any, tables: Sequence["datasets.Dataset"] = (), column: str = "") -> Any:
    """Return a type that holds the values of both, or raise TypeError. Texts of a .csv that are all numbers become numbers."""
    import datasets
    import pyarrow

    null = datasets.Value("null")
    if a == b or null in (a, b):
        return b if a == null else a
    json = next((kind for kind in (a, b) if type(kind).__name__ == "Json"), None)  # values of several types, since `datasets` 5
    if isinstance(a, dict) and isinstance(b, dict):
        with suppress(TypeError):
            return {name: _common_type(a.get(name, null), b.get(name, null)) for name in {**a, **b}}
        json = datasets.Json() if hasattr(datasets, "Json") else None
    if json and (isinstance(a, dict) or isinstance(b, dict)):
        return json
    if isinstance(a, datasets.List) and isinstance(b, datasets.List):
        return datasets.List(_common_type(a.feature, b.feature))
    if not isinstance(a, datasets.Value) or not isinstance(b, datasets.Value):
        raise TypeError
    try:
        schemas = [pyarrow.schema([("", kind.pa_type)]) for kind in (a, b)]
        return datasets.Features.from_arrow_schema(pyarrow.unify_schemas(schemas, promote_options="permissive"))[""]
    except TypeError:
        number = next((kind for kind in (a, b) if kind.dtype.startswith(("int", "float"))), None)
        if number is None or "string" not in (a.dtype, b.dtype):
            raise
    texts = [table for table in tables if column in table.column_names and table.features[column].dtype == "string"]
    try:
        for table in texts:
            for batch in table.select_columns(column).with_format("arrow").iter(10_000):
                batch[column].cast(number.pa_type)
    except pyarrow.ArrowInvalid as error:
        raise TypeError from error
    return number if texts else None


def hash_rows(table: Any, seed: int) -> np.ndarray:
    """Return a 64-bit hash of each row of an arrow table. Neither the order of columns nor columns without a value change it."""
    return _mix(sum((_hash(table[name].combine_chunks(), name) for name in table.column_names), np.uint64(seed % 2**64)))


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    return values ^ (values >> np.uint64(29))


def _hash(array: Any, name: str) -> np.ndarray:
    """Return a hash of each value and the name. It is 0 for null."""
    import pandas
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, is_null = array.type, array.is_null().to_numpy(zero_copy_only=False)
    if isinstance(kind, pa.BaseExtensionType):
        return _hash(array.storage, name)
    if pa.types.is_struct(kind):
        fields = dict(zip([field.name for field in kind], array.flatten()))
        if {*fields} == {"bytes", "path"}:  # an image: its content, wherever it is stored
            paths = pc.if_else(fields["bytes"].is_null(), fields["path"], None).to_pylist()
            fields["path"] = pa.array(
                [path and hashlib.blake2b(Path(path).read_bytes()).hexdigest() for path in paths], pa.string()
            )
        values = sum((_hash(inner, key) for key, inner in fields.items()), np.uint64(0))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
        places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        values = _mix(lengths.astype(np.uint64))
        np.add.at(
            values, np.repeat(np.arange(len(lengths)), lengths), _mix(_hash(array.flatten(), "") + places.astype(np.uint64))
        )
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        values = array.cast(pa.float64(), safe=False).fill_null(0).to_numpy().view(np.uint64)
    else:
        text = array if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else array.cast(pa.string())
        values = pandas.util.hash_array(text.to_numpy(zero_copy_only=False), categorize=False)
    salt = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.where(is_null, np.uint64(0), _mix(_mix(values) + np.uint64(salt)))
