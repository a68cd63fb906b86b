"""Rows: from names or files, checked, labelled, and tokenised once."""

import functools
import inspect
import json
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from accelerate import Accelerator

from accel_ddp import embedded
from accel_ddp.config import RecipeConfig, TrainConfig
from accel_ddp.environment.topology import is_local_main
from accel_ddp.errors import UserError
from accel_ddp.seeds import mixed
from accel_ddp.world import say

if TYPE_CHECKING:
    import datasets

SOURCE = "made of row"  # a column, for a while
FILE_FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}


# ---------------------------------------------------------------------------------------------- rows


@functools.cache
def prepare_hub() -> str:
    """Why the hub cannot be reached, or nothing. Without a network only its cache on this machine is used.

    Its client would try for a minute, once per file, before it says so.
    """
    import datasets
    import huggingface_hub
    import transformers

    if not (is_local_main() and sys.stderr.isatty()):  # bars and load reports of every rank are noise in a log
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    constants = huggingface_hub.constants
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return ""
    url = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), timeout=5).close()
        return ""
    except OSError as error:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        return f"{url.hostname}: {error.strerror or error}"


def load_rows(
    cfg: RecipeConfig, reader: Callable[[str, str], "datasets.Dataset"] | None = None
) -> tuple["datasets.Dataset", "datasets.Dataset"]:
    """(training rows, evaluation rows) of a hub dataset, an embedded one, or files, which `reader(option, path)` may read.

    Where there is nothing to evaluate on, a tenth of the training rows (at most 2,000) is set aside,
    chosen by the seed alone.
    """
    import datasets

    prepare_hub()
    read, train_split, eval_split = reader or load_file, cfg.train_split, cfg.eval_split
    if cfg.train_file:
        splits = {"train": read("--train_file", cfg.train_file)}
        if cfg.eval_file:
            splits["eval"] = read("--eval_file", cfg.eval_file)
        train_split, eval_split = "train", "eval" if cfg.eval_file else ""
    elif cfg.eval_file:
        raise UserError(f"--eval_file {cfg.eval_file} without --train_file: give both.")
    elif cfg.dataset.startswith("embedded:"):
        splits = embedded.load_dataset(cfg.dataset)
    elif cfg.dataset:
        splits = _load_hub(cfg.dataset)
    else:
        raise UserError("There are no data. Give --train_file or --dataset.")
    for option, split in (("train_split", train_split), ("eval_split", eval_split)):
        if split and split not in splits:
            raise UserError(f"--{option} {split}: {cfg.dataset} has {', '.join(splits)}.")
    if not eval_split:
        eval_split = next((name for name in ("validation", "dev", "test", "eval") if name in splits), "")
    train = splits[train_split]
    if eval_split:
        test = splits[eval_split]
    else:
        if len(train) < 2:
            raise UserError(f"{cfg.train_file or cfg.dataset}: {len(train)} rows are too few to train and to evaluate on.")
        numbered = datasets.Dataset.from_dict({"number": np.arange(len(train))})  # split alike: only their number counts
        options = {"test_size": max(1, min(2000, len(train) // 10)), "seed": mixed(cfg.seed, "split") % 2**32}
        halves, numbers = (rows.train_test_split(**options) for rows in (train, numbered))
        train, test = (at_places(halves[half], np.array(numbers[half]["number"][:])) for half in ("train", "test"))
    for name, rows in (("training", train), ("evaluation", test)):
        if len(rows) == 0:
            raise UserError(f"The {name} data of {cfg.train_file or cfg.dataset} have no rows.")
    return _first(train, cfg.max_train_items), _first(test, cfg.max_eval_items)


def _first(rows: "datasets.Dataset", number: int) -> "datasets.Dataset":
    return _chosen(rows, np.arange(number)) if 0 < number < len(rows) else rows


def _chosen(rows: "datasets.Dataset", which: np.ndarray) -> "datasets.Dataset":
    return at_places(rows.select(which), places(rows)[which])


def places(rows: "datasets.Dataset") -> np.ndarray:
    """Of each row, its place among those of its file, from 0: some may have been set aside, or left out."""
    return getattr(rows, "places", np.arange(len(rows)))


def at_places(rows: "datasets.Dataset", their_places: np.ndarray) -> "datasets.Dataset":
    """The same rows: not every method of a table hands on what it knows of them."""
    rows.places = their_places
    return rows


def load_file(option: str, path: str) -> "datasets.Dataset":
    import datasets

    file = Path(path)
    if not file.is_file():
        raise UserError(f"{option} {path}: there is no such file (looked in {Path.cwd()}).")
    if file.suffix not in FILE_FORMATS:
        raise UserError(f"{option} {path}: its ending is none of {', '.join(FILE_FORMATS)}.")
    if file.stat().st_size == 0:
        raise UserError(f"{option} {path}: the file is empty.")
    options = {"sep": "\t", "quoting": 3} if file.suffix == ".tsv" else {}  # 3: quotes in a .tsv are just characters
    if FILE_FORMATS[file.suffix] == "csv":  # "None" and "NA" are texts and labels like any other
        options |= {"keep_default_na": False, "na_values": [""]}
    loud = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)  # what it would log is in our words below
    try:
        rows = datasets.load_dataset(FILE_FORMATS[file.suffix], data_files=str(file.resolve()), split="train", **options)
    except Exception as error:
        if "corresponds to no data" in str(error):
            raise UserError(f"{option} {path}: has no rows.") from error
        cause = str(error.__cause__ or error).splitlines()[0]
        if "codec can't decode" in str(error) or "codec can't decode" in cause:
            raise UserError(f"{option} {path}: is not UTF-8 (as tables of Excel often are not). Save it as UTF-8.") from error
        raise UserError(f"{option} {path}: cannot be read as {FILE_FORMATS[file.suffix]}: {cause}") from error
    finally:
        datasets.logging.set_verbosity(loud)
    if len(rows) == 0:
        raise UserError(f"{option} {path}: has no rows.")
    return rows


def _load_hub(name: str) -> dict[str, "datasets.Dataset"]:
    import datasets

    if Path(name).is_file():
        raise UserError(f"--dataset {name} is a file. Use --train_file {name}.")
    offline = prepare_hub()
    try:
        return dict(datasets.load_dataset(*name.split(":", 1)))  # glue:sst2 is the configuration sst2 of glue
    except Exception as error:
        why = f"there is no network to the hub ({offline}) and no copy" if offline else str(error).strip().splitlines()[0]
        raise UserError(
            f"--dataset {name}: cannot be loaded: {why}. Without a network, use --train_file and --eval_file with local files."
        ) from error


def require_columns(columns: dict[str, str], *tables: "datasets.Dataset") -> None:
    """`columns`: the option that names each column, and its value; an empty one is not needed."""
    for rows in tables:
        for option, column in columns.items():
            if column and column not in rows.column_names:
                mark = next((mark for mark in ";\t|" if len(rows.column_names) == 1 and mark in rows.column_names[0]), "")
                hint = f" Values seem to be separated by {mark!r}: save them with commas, or with tabs as .tsv." if mark else ""
                raise UserError(
                    f"--{option} {column}: there is no such column. The data have: {', '.join(rows.column_names)}.{hint}"
                )


def texts(rows: dict[str, list], column: str) -> list[str]:
    """A column of texts, or a UserError that shows the first value that is none; what is missing is an empty text."""
    for value in rows[column]:
        if not isinstance(value, str | None):
            raise UserError(f"column {column!r} holds {value!r} ({type(value).__name__}), which is not text.")
    return [value or "" for value in rows[column]]


def empty(columns: list[str], texts: list[list[str]]) -> list[str]:
    """The problem of each row that has an empty text in one of the columns; nothing for the others."""
    blank = lambda row: next((column for column, text in zip(columns, row) if not text.strip()), None)
    return [f"its {column} is empty" if (column := blank(row)) else "" for row in zip(*texts)]


def without_broken(tables: list["datasets.Dataset"], cfg: RecipeConfig) -> list["datasets.Dataset"]:
    """Training and evaluation rows whose `problem` is empty; the column is gone.

    Others are named in a UserError; with `--skip_broken` they are left out and counted.
    """
    sound = []
    for rows, what in zip(tables, ("training", "evaluation")):
        bare = at_places(rows.remove_columns("problem"), places(rows))
        sound.append(_sound(bare, rows["problem"][:], cfg, what))
    return sound


def say_what_is_cut(tables: list["datasets.Dataset"], max_length: int) -> list["datasets.Dataset"]:
    """The same tables; how many of their rows fill `--max_length`, beyond which nothing is seen, is said."""
    for rows, name in zip(tables, ("training", "evaluation")):
        texts = lambda ids: ids if ids and isinstance(ids[0], list) else [ids]  # of a row with several
        full = sum(any(len(text) >= max_length for text in texts(ids)) for ids in rows["input_ids"])
        if full:
            say(f"{full:,} of {len(rows):,} {name} rows fill --max_length {max_length}: what goes beyond it is cut.")
    return tables


def with_labels(tables: Sequence["datasets.Dataset"], column: str, cfg: RecipeConfig) -> Sequence["datasets.Dataset"]:
    """Training and evaluation rows that have one; others are treated as `without_broken` does."""
    import datasets

    problems = [[f"it has no {column}" if value is None else "" for value in rows[column][:]] for rows in tables]
    if not any(map(any, problems)):
        return tables
    sound = [_sound(*one, cfg, what) for one, what in zip(zip(tables, problems), ("training", "evaluation"))]
    is_fraction = getattr(tables[0].features[column], "dtype", "") == "float64"
    if is_fraction and all(value.is_integer() for rows in sound for value in rows[column][:]):
        # Whole numbers of a .csv, which become fractions where one is missing.
        return [at_places(rows.cast_column(column, datasets.Value("int64")), places(rows)) for rows in sound]
    return sound


def _sound(rows: "datasets.Dataset", problems: list[str], cfg: RecipeConfig, what: str) -> "datasets.Dataset":
    broken = [i for i, problem in enumerate(problems) if problem]
    if not broken:
        return rows
    file = cfg.eval_file if what == "evaluation" and cfg.eval_file else cfg.train_file or cfg.dataset
    number = places(rows) + 1
    shown = "; ".join(f"row {number[i]}: {problems[i]}" for i in sorted(broken, key=lambda i: number[i])[:3])
    counted = f" (as {file} has them, counted from 1, without a header)"
    found = f"{len(broken):,} of {len(problems):,} {what} rows cannot be used: {shown}{'; ...' if broken[3:] else ''}{counted}."
    if not cfg.skip_broken:
        raise UserError(f"{found} Mend them, or leave them out with --skip_broken.")
    if len(broken) == len(problems):
        raise UserError(f"{found} There is nothing left.")
    say(f"--skip_broken: {found}")
    return _chosen(rows, np.setdiff1d(np.arange(len(problems)), broken))


def padded(tokenizer: Any, accelerator: Accelerator, per_token: tuple[str, ...] = ()) -> Callable[[list], Any]:
    """Collate tokenised rows: padded to the longest of the micro-batch, on a GPU to a multiple of 8.

    The columns `per_token`, labels for example, are padded with -100, which no loss counts.
    """
    import torch
    from transformers import DataCollatorWithPadding

    tokenizer.padding_side = "right"  # as the columns `per_token`, and as whoever takes a text's first token expects
    pad = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if accelerator.device.type == "cuda" else None)

    def collate(rows: list[dict[str, Any]]) -> Any:
        batch = pad([{name: value for name, value in row.items() if name not in per_token} for row in rows])
        width = batch["input_ids"].shape[1]
        for name in per_token:
            batch[name] = torch.tensor([row[name] + [-100] * (width - len(row[name])) for row in rows])
        return batch

    return collate


# ----------------------------------------------------------------------------- tokenised once, on disk


def fingerprint(rows: "datasets.Dataset") -> str:
    """Of the content: equal rows have equal fingerprints, wherever and however they are stored."""
    import hashlib

    import pyarrow as pa

    digest = hashlib.blake2b(digest_size=16)
    for table in rows.with_format("arrow").iter(batch_size=10_000):
        table = table.replace_schema_metadata(None).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        digest.update(sink.getvalue())
    return digest.hexdigest()


@functools.cache
def _code() -> str:
    """Of all sources of this package, whose functions `function` calls: other code, other result."""
    import hashlib

    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()


def map_once(
    rows: "datasets.Dataset", function: Callable[[dict[str, list]], dict[str, list]], *, depends_on: Any, cfg: TrainConfig
) -> "datasets.Dataset":
    """`rows.map(function, batched=True)`, done once per content and kept on disk.

    A function that makes several rows of one says in a column SOURCE of which, by its place in the batch.

    The key is the content of `rows`, the source of `function`, and `depends_on`: whatever else changes
    the result, as JSON. On each node the first rank does the work under a file lock and the others wait
    for the file; no collective is involved, so that no process-group timeout runs meanwhile.
    """
    import datasets
    from filelock import FileLock, Timeout

    words = json.dumps([_code(), fingerprint(rows), inspect.getsource(function), depends_on], sort_keys=True)
    final = Path(cfg.cache_dir).expanduser() / f"{mixed(0, words):016x}"
    lock, began = FileLock(f"{final}.lock"), time.monotonic()
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        while not final.exists():
            try:
                with lock.acquire(timeout=10):
                    if not final.exists():
                        _map_into(final, rows, function)
            except Timeout:
                waited = time.monotonic() - began
                print(f"waiting for another process to tokenise ({waited:.0f} s): {final}.lock", file=sys.stderr, flush=True)
    except OSError as error:
        raise UserError(f"--cache_dir {cfg.cache_dir}: cannot be written: {error.strerror or error}.") from error
    done = datasets.load_from_disk(str(final))
    if SOURCE in done.column_names:  # there are rows
        source = np.array(done.with_format("numpy")[SOURCE][:], dtype=int)
        done = at_places(done.remove_columns(SOURCE), places(rows)[source])
    return done


def _map_into(final: Path, rows: "datasets.Dataset", function: Callable) -> None:
    partial = final.with_name(f"{final.name}.partial.{os.getpid()}")
    options = {"remove_columns": rows.column_names, "keep_in_memory": True, "desc": "tokenising"}

    def with_source(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        made = function(batch)
        number = len(next(iter(made.values())))
        # Where rows are mixed, as in chunks for masking, nobody asks for theirs.
        of = made.pop(SOURCE, range(number) if number == len(indices) else [0] * number)
        return {**made, SOURCE: [indices[i] for i in of]}

    # With a fingerprint of ours `datasets` does not try to hash the function, which it often cannot.
    done = rows.map(with_source, batched=True, with_indices=True, new_fingerprint=final.name, **options)
    done.save_to_disk(str(partial))
    try:
        partial.rename(final)  # from here on it is in the cache
    except OSError:  # a file system without working locks: someone else was first with the same
        shutil.rmtree(partial, ignore_errors=True)
        if not final.exists():
            raise
