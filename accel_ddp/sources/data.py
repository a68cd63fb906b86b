"""Training and evaluation rows from the Hub, from files or from built-in datasets, and checks of them."""

import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_ddp.config.option_values import split_weight
from accel_ddp.config.options import columns_of
from accel_ddp.config.train_config import RecipeConfig, TrainConfig, has_splits
from accel_ddp.errors import UserError
from accel_ddp.seeds import mixed
from accel_ddp.sources import builtin, table_files
from accel_ddp.sources.many_files import Files, expand, hash_rows, read_all
from accel_ddp.sources.places import prepare_hub, warn
from accel_ddp.sources.table_files import TABLES, ending_of, load_file
from accel_ddp.text import counted, did_you_mean, first_line, listed

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)
MOST_RECORDED = 20_000  # characters of row numbers in the log
SHOWN = 5  # rows of each kind of problem that an error message names


def check_inputs(cfg: TrainConfig, quiet: bool = False) -> None:
    """Raise UserError if the model's folder, a file or a column is missing, without torch. A run would raise it a few seconds later.

    This applies to recipes whose Config has columns, see `check_columns`; others may read their files in another way. The names at the
    beginning of a file, which take milliseconds, are enough if all columns are there. Otherwise the file is read. Errors of other
    types are left to the run. `quiet`: without warnings, because a run that follows prints them.
    """
    try:
        if isinstance(cfg, RecipeConfig) and (hasattr(cfg, "check_columns") or columns_of(cfg)):
            _check_inputs(cfg, quiet)
    except UserError:
        raise
    except Exception as error:
        log.debug("the files were not checked: %r", error)


def _check_inputs(cfg: Any, quiet: bool) -> None:
    if cfg.model != type(cfg).model:  # the default may be a model of the recipe's own, such as mini-resnet
        builtin.require_model(cfg.model)
    options = {"--train_file": () if is_only_evaluated(cfg) else cfg.train_file, "--eval_file": cfg.eval_file}
    mixture_weights(cfg)
    if getattr(cfg, "negatives_file", "") and not cfg.evaluate_only:
        expand("--negatives_file", [cfg.negatives_file], cfg.file_endings, quiet=True)
    files = {option: expand(option, given, cfg.file_endings, quiet=True) for option, given in options.items() if given}
    if train := {Path(path).resolve() for _, path in files.get("--train_file", [])}:
        same = [path for _, path in files.get("--eval_file", []) if Path(path).resolve() in train and not path.endswith(".npz")]
        if same and not quiet:
            warn(f"--eval_file: {listed(same)} is a training file too. Its metrics do not show how the model does on other data.")
    paths = [path for found in files.values() for _, path in found]
    if not paths or any(ending_of(Path(path)) not in TABLES for path in paths):  # folders, and files that only a recipe reads
        return
    with suppress(Exception):
        return check_columns(cfg, *(table_files.ColumnNames(*(path for _, path in found)) for found in files.values()))
    read = lambda option: read_all(option, options[option], load_file, cfg.file_endings, cfg.cache_dir)
    check_columns(cfg, *map(read, files))


def is_only_evaluated(cfg: RecipeConfig) -> bool:
    """Return whether `accel-ddp evaluate` gives one file for both tables: the training rows may be missing on this machine."""
    return cfg.evaluate_only and cfg.train_file == cfg.eval_file


def load_rows(
    cfg: RecipeConfig, reader: Callable[[str, str], "datasets.Dataset"] | None = None, endings: Sequence[str] = ()
) -> tuple["datasets.Dataset", "datasets.Dataset"]:
    """Return training and evaluation rows of a Hub dataset, a built-in dataset or files.

    `reader(option, path)` reads a file with one of the `endings`; the default is `load_file`. Without evaluation data,
    `--eval_fraction` of the training rows is set aside, or else a tenth (at most 2,000). `--max_train_items` and `--max_eval_items`
    draw a sample. All of them depend on the seed only.
    """
    prepare_hub()
    mixture_weights(cfg)
    options = {"reader": reader or load_file, "endings": endings or cfg.file_endings, "cache_dir": cfg.cache_dir}
    given = "--eval_file" if is_only_evaluated(cfg) else "--train_file"
    read = lambda *paths, option=given: read_all(option, paths, **options)
    train_split, eval_split, name = cfg.train_split, cfg.eval_split, " ".join(cfg.train_file) or cfg.dataset
    if has_splits(cfg):
        folder, _ = split_weight(cfg.train_file[0])
        splits = {split: read(f"{folder}/{split}") for split in table_files.saved_splits(Path(folder))}
    elif cfg.train_file:
        train_split = "train"
        splits = {"train": read(*cfg.train_file)}
    elif cfg.dataset:
        splits = builtin.load_dataset(cfg.dataset) if cfg.dataset.startswith(builtin.PREFIX) else _load_from_hub(cfg.dataset)
    else:
        raise UserError("There are no training data. Give --train_file or --dataset.")
    if cfg.eval_file:
        eval_split = "eval"
        splits["eval"] = read(*cfg.eval_file, option="--eval_file")
    for option, split in (("train_split", train_split), ("eval_split", eval_split)):
        if split and split not in splits:
            raise UserError(f"--{option} {split}: {name} has no such split. Use one of: {', '.join(splits)}.")
    if not eval_split and not cfg.eval_fraction:
        eval_split = next((split for split in table_files.EVAL_SPLITS if split in splits), "")
    train = attach(splits[train_split])
    train, test = (train, attach(splits[eval_split])) if eval_split else _set_aside(train, cfg)
    for kind, rows in (("training", train), ("evaluation", test)):
        if len(rows) == 0:
            raise UserError(f"{name}: the {kind} data have no rows. Give another file, split or --eval_fraction.")
    if cfg.eval_fraction and len(test) < 2:
        warn(f"--eval_fraction {cfg.eval_fraction:g}: there is 1 evaluation row of {len(train) + 1:,}. Its metrics say little.")
    return draw_sample(train, "max_train_items", cfg), draw_sample(test, "max_eval_items", cfg)


def load_columns(cfg: RecipeConfig, reader: Any = None) -> list["datasets.Dataset"]:
    """Return the rows of `load_rows`, which have the columns of the options, with texts in those of texts."""
    tables, texts = [open_columns(rows, cfg) for rows in load_rows(cfg, reader)], columns_of(cfg, "text")
    check_columns(cfg, *tables)
    for option, column in texts:
        require_texts(dict(texts) | {option: column}, *tables)
    return tables


def attach(rows: "datasets.Dataset") -> "datasets.Dataset":
    """Return rows with the attribute `mixture` if they come from several arguments of an option. See `training.stream`."""
    files: Files | None = getattr(rows, "files", None)
    if files is not None and len(files.names) > 1:
        from accel_ddp.training.stream import Mixture

        rows.mixture = Mixture(files.names, dataset_numbers(rows), files.weights)
    return rows


def _set_aside(train: "datasets.Dataset", cfg: RecipeConfig) -> list["datasets.Dataset"]:

    if len(train) < 2:
        # A .json with one object, whose values are the rows or the columns, is read as one row.
        hints = {".json": "Write the rows as a list of objects, or one object per line."}
        hints |= dict.fromkeys(table_files.SENTENCE_FILES, "An empty line separates two texts.")
        raise UserError(
            f"{' '.join(cfg.train_file) or cfg.dataset}: training and evaluation need at least 2 rows, and the data have {len(train)}. "
            f"{hints.get(Path(*cfg.train_file[:1]).suffix, 'Give more rows, or --eval_file.')}"
        )
    if cfg.eval_fraction:
        seed, limit = mixed(cfg.seed, "eval_fraction"), np.uint64(int(cfg.eval_fraction * 2**64))
        is_test = np.concatenate([hash_rows(table, seed) < limit for table in train.with_format("arrow").iter(10_000)])
        return [select(train, np.flatnonzero(part)) for part in (~is_test, is_test)]
    order = np.random.default_rng(mixed(cfg.seed, "split") % 2**32).permutation(len(train))
    number = max(1, min(2000, len(train) // 10))
    return [select(train, order[number:]), select(train, order[:number])]


def _load_from_hub(name: str) -> dict[str, "datasets.Dataset"]:
    import datasets

    if Path(name).is_file():
        raise UserError(f"--dataset {name}: is a file. Use --train_file {name}.")
    if table_files.is_saved(Path(name)):
        raise UserError(f"--dataset {name}: {table_files.describe_folder(Path(name))} Use --train_file {name}.")
    offline = "" if Path(name).is_dir() else prepare_hub()
    try:
        return dict(datasets.load_dataset(*name.split(":", 1)))  # glue:sst2 is the configuration sst2 of glue
    except Exception as error:
        reason = f"there is no network to the Hub ({offline}), and no copy in the local cache" if offline else first_line(error)
        instead = "Without a network, use --train_file and --eval_file with local files"
        raise UserError(f"--dataset {name}: cannot be loaded: {reason}. {instead}.") from error


def draw_sample(rows: "datasets.Dataset", option: str, cfg: RecipeConfig, run_length: int = 1) -> "datasets.Dataset":
    positions = draw_positions(len(rows), option, cfg, run_length)
    return rows if len(positions) == len(rows) else select(rows, positions)


def draw_positions(num_rows: int, option: str, cfg: RecipeConfig, run_length: int = 1) -> np.ndarray | range:
    """Return the positions that `option` (`max_train_items` or `max_eval_items`) draws, in ascending order.

    The first rows would be a biased sample, because many files are sorted. The draw depends on the seed and the number of rows
    only, so a resumed run has the same rows. Positions are drawn in runs of `run_length` consecutive rows.
    """
    number = getattr(cfg, option)
    if not 0 < number < num_rows:
        return range(num_rows)
    num_runs = -(-num_rows // run_length)
    # One run more than are needed, because the last run may be short.
    runs = random.Random(mixed(cfg.seed, option)).sample(range(num_runs), min(num_runs, -(-number // run_length) + 1))
    positions = (np.array(runs)[:, None] * run_length + np.arange(run_length)).ravel()
    return np.sort(positions[positions < num_rows][:number])


def describe_drawn(rows: Any) -> dict[str, Any]:
    """Return for the log which rows these are, if they were drawn or set aside, and otherwise {}."""
    if not hasattr(rows, "row_numbers"):
        return {}
    ordered = np.sort(rows.row_numbers).astype("<i8")
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    facts = {"number": len(ordered), "digest": hashlib.blake2b(ordered.tobytes(), digest_size=8).hexdigest()}
    return facts | ({"rows": text} if len(text) <= MOST_RECORDED else {})


def row_numbers(rows: "datasets.Dataset") -> np.ndarray:
    """Return the number of each row in its file, from 0: its position, unless rows were set aside, sampled or dropped."""
    if hasattr(rows, "row_numbers"):
        return rows.row_numbers
    numbers = np.arange(len(rows)).view(RowNumbers)
    numbers.files = getattr(rows, "files", None)
    return numbers


def with_row_numbers(rows: "datasets.Dataset", numbers: np.ndarray) -> "datasets.Dataset":
    """Return `rows` with their numbers attached. Most methods of `datasets` return tables without this attribute."""
    rows.row_numbers, rows.files = numbers, getattr(numbers, "files", None)
    return attach(rows)


class RowNumbers(np.ndarray):
    """Row numbers that know their files, also after `numbers[positions]`."""

    files: Files | None

    def __array_finalize__(self, other: Any) -> None:
        self.files = getattr(other, "files", None)


def place_of(rows: "datasets.Dataset", number: int, short: bool = False) -> str:
    """Return where the row with this number is: "train-2.jsonl, row 17 (line 18)". See `row_numbers`. `short`: of one file only 17."""
    files: Files | None = getattr(rows, "files", None)
    if files is None or (short and not files.paths[1:]):
        return f"{number + 1}" if short else f"row {number + 1:,}"
    path, row, line = files.places([number])[number]
    return f"{path}, row {row + 1:,}{f' (line {line:,})' if line not in (0, row + 1) else ''}"


def dataset_numbers(rows: "datasets.Dataset") -> np.ndarray | None:
    """Return from which argument of the option each row comes, counted from 0, or None if there is one argument."""
    files: Files | None = getattr(rows, "files", None)
    if files is None or len(files.names) == 1:
        return None
    return files.datasets[np.searchsorted(files.ends, np.asarray(row_numbers(rows)), side="right")]


def mixture_weights(cfg: RecipeConfig) -> tuple[float, ...] | None:
    """Return the weight of each argument of `--train_file`, or None if they have none. Raise UserError if they cannot be used."""
    weights = [split_weight(argument)[1] for argument in cfg.train_file]
    for argument, weight in zip(cfg.train_file, weights):
        if weight is not None and not 0 < weight < float("inf"):
            instead = "Leave out a file that is not to be used"
            raise UserError(f"--train_file {argument}: the weight must be a number above 0. {instead}.")
        if weight is None and Path(argument.rpartition(":")[0]).is_file() and not Path(argument).exists():
            raise UserError(f"--train_file {argument}: the weight after the colon must be a number, for example 0.7.")
        if weight is None and any(weights):
            raise UserError(f"--train_file {argument}: has no weight, but others have. Give each one a weight: {argument}:1.")
    if weighted := [argument for argument in cfg.eval_file if split_weight(argument)[1] is not None]:
        raise UserError(f"--eval_file {weighted[0]}: evaluations use every row once. Leave out the weight.")
    return tuple(weights) if any(weights) and weights[1:] else None


def select_sources(rows: "datasets.Dataset", made: "datasets.Dataset") -> "datasets.Dataset":
    """Return the rows from which `made` was made, one for each of its rows. `made` is what `drop_broken` returns."""
    numbers = row_numbers(rows)
    order = np.argsort(numbers)
    return select(rows, order[np.searchsorted(numbers, row_numbers(made), sorter=order)])


def select(rows: "datasets.Dataset", positions: np.ndarray) -> "datasets.Dataset":
    return with_row_numbers(rows.select(positions), row_numbers(rows)[positions])


def for_each_dataset(rows: "datasets.Dataset", make: Callable[["datasets.Dataset"], "datasets.Dataset"]) -> "datasets.Dataset":
    """Return `make(rows)`, computed for each dataset alone if there are several. So no row is made from rows of two datasets."""
    import datasets

    numbers = dataset_numbers(rows)
    if numbers is None:
        return make(rows)
    parts = [make(select(rows, np.flatnonzero(numbers == number))) for number in np.unique(numbers)]
    made = np.concatenate([row_numbers(part) for part in parts]).view(RowNumbers)
    made.files = rows.files
    return with_row_numbers(datasets.concatenate_datasets(parts), made)


def lacking(rows: "datasets.Dataset") -> dict[str, str]:
    return getattr(getattr(rows, "files", None), "lacking", {})


def require_types(rows: "datasets.Dataset", names: Iterable[str]) -> None:
    for name in names:
        if name in lacking(rows) and name not in rows.column_names:
            raise UserError(f"The column {name!r} cannot be read. {lacking(rows)[name]}")


def require_columns(columns: dict[str, str], *tables: "datasets.Dataset") -> None:
    """Raise UserError if a table lacks a column. `columns` maps options to their values; an empty value is not required."""
    for rows in tables:
        for option, column in columns.items():
            if column and column in lacking(rows):
                raise UserError(f"--{option} {column}: {lacking(rows)[column]}")
            if column and column not in rows.column_names:
                raise UserError(f"--{option} {column}: there is no such column. {describe_columns(rows, columns)}")


def check_columns(cfg: Any, *tables: "datasets.Dataset") -> None:
    """Raise UserError if a table lacks a column of the options. A Config whose columns depend on each other checks them itself."""
    if hasattr(cfg, "check_columns"):
        return cfg.check_columns(*tables)
    needed = columns_of(cfg)
    tables = tuple(open_columns(rows, cfg) for rows in tables)
    for option, column in needed:
        require_columns(dict(needed) | {option: column}, *tables)
    return None


def open_columns(rows: "datasets.Dataset", cfg: Any) -> "datasets.Dataset":
    """Return the rows. If a column of texts is missing, keys of dictionaries become columns, such as translation.en."""
    return rows if {name for _, name in columns_of(cfg, "text")} <= {*rows.column_names} else rows.flatten()


def require_texts(columns: dict[str, str], *tables: "datasets.Dataset") -> None:
    """Raise UserError if a table lacks a column, or if a column contains no texts."""
    require_columns(columns, *tables)
    for rows in tables:
        for option, column in columns.items():
            kind = rows.features[column] if column else None
            may_be_text = str(getattr(kind, "dtype", "")) in ("string", "large_string", "null")
            if column and not may_be_text and type(kind).__name__ != "Json":  # Json of `datasets` 5: values of several types
                raise UserError(f"--{option} {column}: contains {rows[0][column]!r:.40} ({kind!s:.40}), which is not text.")


def describe_columns(rows: "datasets.Dataset", needed: dict[str, str]) -> str:
    """Return the names of the columns, and why a needed one may be missing. `needed` maps options to their values."""
    names = rows.column_names
    text = f"The data have: {', '.join(name if name == name.strip() else repr(name) for name in names)}."
    similar = lambda name: " ".join(name.split()).casefold()
    missing = next((column for column in needed.values() if column and column not in names), "")
    if missing in lacking(rows):
        return f"{text} {lacking(rows)[missing]}"
    near = next((name for name in names if missing and similar(name) == similar(missing)), "")
    if near:
        return f"{text} Did you mean {near!r}? Case and white space are part of a name."
    if mark := next((mark for mark in table_files.SEPARATORS if len(names) == 1 and mark in names[0]), ""):
        return f"{text} Values seem to be separated by {mark!r}: save them with commas, or with tabs as .tsv."
    first = rows.select(range(min(len(rows), 1000)))
    is_value = lambda name: parse_number(name) is not None or len(name.split()) >= 5 or name in map(str, first[name][:])
    if names != [str(i) for i in range(len(names))] and any(map(is_value, names)):  # pandas numbers columns without names
        example = ",".join(column for column in needed.values() if column)
        return (
            f"{text} These look like values: the table appears to have no header. Add a first line with the names of its "
            f"{len(names)} columns, for example {example}"
        )
    return text + did_you_mean(missing, names, cutoff=0.8)


def parse_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str) or "_" in str(value):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if np.isfinite(number) else None


def is_missing(value: Any) -> bool:
    """Return whether a cell is empty: None, NaN, or a text without characters. pandas writes NaN for an empty cell."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def number_problem(column: str, value: Any) -> str:
    if is_missing(value):
        return f"it has no {column}"
    return "" if parse_number(value) is not None else f"its {column} is not a finite number\t{value!r:.40}"


def iter_values(rows: "datasets.Dataset", column: str) -> Iterator[Any]:
    """Yield the values of a column. A list of them would need more memory than the rows of a large file."""
    return (value for some in rows.select_columns([column]).iter(10_000) for value in some[column])


def read_texts(rows: dict[str, list], column: str) -> list[str]:
    """Return a column of texts. Values that are not text become "", see `find_text_problems`."""
    return [value if isinstance(value, str) else "" for value in rows[column]]


def find_text_problems(rows: dict[str, list], columns: list[str]) -> list[str]:
    """Return for each row why one of its texts cannot be used, or "". See `drop_broken`."""
    problem = lambda column, text: f"its {column} is empty" if is_missing(text) else f"its {column} is not text\t{text!r:.40}"
    is_text = lambda value: isinstance(value, str) and not is_missing(value)
    return merge_problems(*(["" if is_text(one) else problem(column, one) for one in rows[column]] for column in columns))


def merge_problems(*parts: list[str]) -> list[str]:
    """Return all problems of each row. Each part has a text for each row, which is "" if there is no problem."""
    return ["\n".join(filter(None, problems)) for problems in zip(*parts, strict=True)]


def drop_broken(tables: list["datasets.Dataset"], cfg: RecipeConfig) -> list["datasets.Dataset"]:
    """Return training and evaluation rows whose `problem` is "", without that column.

    Other rows raise one UserError, which reports all problems of both tables. With `--skip_broken` they are dropped, and a warning
    reports them. The column `problem` has a line for each problem. After a tab, a line states what is special to this row.
    """
    clean = [with_row_numbers(rows.remove_columns("problem"), row_numbers(rows)) for rows in tables]
    problems = [_find_broken(rows) for rows in tables]
    if not any(problems):
        return clean
    found = _describe_broken(clean, problems, cfg)
    if empty := [name for name, rows, some in zip(("training", "evaluation"), tables, problems) if len(some) == len(rows)]:
        raise UserError(f"{found}\nNo {empty[0]} rows are left.")
    if not cfg.skip_broken:
        raise UserError(f"{found}\nCorrect them, or leave them out with --skip_broken.")
    warn(f"--skip_broken: {found}")
    keep = lambda rows, broken: select(rows, np.delete(np.arange(len(rows)), list(broken))) if broken else rows
    return [keep(rows, broken) for rows, broken in zip(clean, problems)]


def _find_broken(rows: "datasets.Dataset") -> dict[int, str]:
    """Return the problems of rows by their positions. Memory depends on the number of broken rows only."""
    found: dict[int, str] = {}
    for number, batch in enumerate(rows.select_columns("problem").with_format("arrow").iter(10_000)):
        texts = batch["problem"].to_numpy()
        found |= {number * 10_000 + at: texts[at] for at in np.flatnonzero(texts != "").tolist()}
    return found


def _describe_broken(tables: list["datasets.Dataset"], problems: list[dict[int, str]], cfg: RecipeConfig) -> str:
    """Return a line for each source with the number of its broken rows, followed by a line for each kind of problem."""
    source = listed(cfg.train_file) or cfg.dataset
    sources = [source, listed(cfg.eval_file) or source]
    was_set_aside = cfg.train_file and not cfg.train_file[0].endswith(".npz") and not has_splits(cfg)
    if not cfg.eval_file and not was_set_aside:
        sources = [f"{source} (training)", f"{source} (evaluation)"]
    lines = []
    for place in dict.fromkeys(sources):
        own = [(rows, some) for rows, some, its_place in zip(tables, problems, sources) if its_place == place]
        broken = {int(row_numbers(rows)[at]): text for rows, some in own for at, text in some.items()}
        if broken:
            total = len(np.unique(np.concatenate([row_numbers(rows) for rows, _ in own])))
            lines.append(f"{len(broken):,} of {counted(total, 'row')} of {place} cannot be used:")
            lines += [f"  {kind}" for kind in describe_kinds(broken, getattr(own[0][0], "files", None))]
    return "\n".join(lines)


def describe_kinds(broken: dict[int, str], files: Files | None) -> list[str]:
    """Return each kind of problem with its number of rows and its first rows. Rows and lines count from 1."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for number in sorted(broken):
        for problem in broken[number].split("\n"):
            kind, _, detail = problem.partition("\t")
            kinds.setdefault(kind, []).append((number, detail))
    shown = [number for rows in kinds.values() for number, _ in rows[:SHOWN]]
    places = files.places(shown) if files else {number: ("", number, 0) for number in shown}

    def describe(number: int, detail: str) -> str:
        path, row, line = places[number]
        if detail and path and Path(path).is_dir() and not table_files.is_saved(Path(path)):
            return detail  # a folder has no rows, and the detail is the name of the file
        more = ", ".join(filter(None, (f"line {line:,}" if line not in (0, row + 1) else "", detail)))
        return f"{f'{path}, ' if files and files.paths[1:] else ''}row {row + 1:,}{f' ({more})' if more else ''}"

    described = []
    for kind, rows in list(kinds.items())[: 2 * SHOWN]:
        count = f"{len(rows):,} rows, the first are " if rows[SHOWN:] else ""
        described.append(f"{kind}: {count}{', '.join(describe(*row) for row in rows[:SHOWN])}")
    if (rest := len(kinds) - 2 * SHOWN) > 0:
        described.append(f"and {rest:,} other problems")
    return described
