"""Rows as tokens, computed once and cached on disk, and padded to micro-batches."""

import copy
import hashlib
import inspect
import json
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_ddp import phases
from accel_ddp.config.options import columns_of, properties_of
from accel_ddp.config.train_config import RecipeConfig, TrainConfig
from accel_ddp.engine.rows import DOCUMENTS
from accel_ddp.phases import TOKENIZE
from accel_ddp.seeds import mixed
from accel_ddp.sources.data import drop_broken, find_text_problems, merge_problems, row_numbers, with_row_numbers
from accel_ddp.sources.models import tokenizer_digest
from accel_ddp.sources.places import Progress, warn, write_once
from accel_ddp.sources.shard_map import NARROW, SOURCE, Function, let_pages_go, load_shards, write_shards

if TYPE_CHECKING:
    import datasets

REMEMBERED_ROWS = 10_000  # the fingerprint of a larger table is stored


def fingerprint(rows: "datasets.Dataset", cache_dir: str = "") -> str:
    """Return a digest of the content. Equal rows have equal fingerprints, wherever and however they are stored.

    With a `cache_dir`, the digest of a large table is stored there and computed again only if its files have changed: their path,
    size, inode or time. Reading 100 GB takes minutes.
    """
    key = _storage_key(rows) if cache_dir and len(rows) > REMEMBERED_ROWS else ""
    if key:
        write = lambda folder: (folder.mkdir(), (folder / "digest").write_text(_compute_fingerprint(rows)))
        stored = (write_once(cache_dir, f"digest-{key}", write, "read the rows") / "digest").read_text()
        if len(stored) == 32:
            return stored
    return _compute_fingerprint(rows)


def _storage_key(rows: "datasets.Dataset") -> str:
    """Return what identifies the files of a table and how it was made from them, or "" for a table in memory."""
    files = [Path(file["filename"]).absolute() for file in rows.cache_files]
    stats = [(str(file), stat.st_size, stat.st_mtime_ns, stat.st_ino) for file in files for stat in [file.stat()]]
    # `_fingerprint` of `datasets` covers the steps from the files to this table: the columns, rows and values that were selected.
    parts = [_digest_of_code(), stats, rows._fingerprint, rows.column_names, len(rows)]
    return f"{mixed(0, json.dumps(parts)):016x}" if files else ""


def _compute_fingerprint(rows: "datasets.Dataset") -> str:
    import pyarrow as pa

    digest = hashlib.blake2b(digest_size=16)
    with Progress("reading", len(rows)) as progress:
        for table in rows.with_format("arrow").iter(batch_size=10_000):
            for place, field in enumerate(table.schema):  # these have 8 bytes in small tables, and in those of earlier versions
                if field.name in NARROW and field.type == pa.list_(pa.int32()):
                    table = table.set_column(place, field.name, table[field.name].cast(pa.list_(pa.int64())))
            table = table.replace_schema_metadata(None).combine_chunks()
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            digest.update(sink.getvalue())
            progress.add(len(table))
            let_pages_go()
    return digest.hexdigest()


@cache
def _digest_of_code() -> str:
    """Return a digest of the code that tokenization may call: `sources`, `tasks` and the seeds."""
    package = Path(__file__).parents[1]
    files = [*(package / "sources").rglob("*.py"), *(package / "tasks").rglob("*.py"), package / "seeds.py"]
    digest = hashlib.blake2b(digest_size=16)
    for name, file in sorted((file.relative_to(package).as_posix(), file) for file in files):
        digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def cache_key(rows: "datasets.Dataset", function: Callable, depends_on: Any, cache_dir: str = "") -> str:
    parts = [_digest_of_code(), fingerprint(rows, cache_dir), inspect.getsource(getattr(function, "func", function)), depends_on]
    return f"{mixed(0, json.dumps(parts, sort_keys=True)):016x}"


def map_once(
    rows: "datasets.Dataset", function: Function, *, depends_on: Any, cfg: TrainConfig, doing: str = "tokenizing"
) -> "datasets.Dataset":
    """Return `rows.map(function, batched=True)`, computed once for the same content by all cores, and cached on disk.

    The cache key consists of the content of `rows`, the source of `function`, the source of `accel_ddp.sources` and
    `accel_ddp.tasks`, and `depends_on`: everything else that changes the result, as JSON. A function that makes several rows
    from one returns a column SOURCE with the index of that row in the batch. It is called in forked processes, and must not use a GPU.
    """
    if not len(rows):
        return rows.remove_columns(rows.column_names)
    with phases.phase(TOKENIZE):
        key = cache_key(rows, function, depends_on, cfg.cache_dir)
        write = partial(write_shards, rows, function, key, doing)
        done = load_shards(write_once(cfg.cache_dir, key, write, "tokenize", keeps_parts=True))
        source = np.array(done.with_format("numpy")[SOURCE][:], dtype=int)
    return with_row_numbers(done.remove_columns(SOURCE), row_numbers(rows)[source])


def encode_items(task: Any, tables: Sequence["datasets.Dataset"]) -> list["datasets.Dataset"]:
    """Return the usable training and evaluation rows as `task.items(rows)` makes them with `task.processor`; see `map_once`.

    `items` gets columns of some rows and returns columns; a task may have other `eval_items`. A column `problem` says why a row cannot
    be used; texts that are empty or no texts are found here. The key of the cache has `task.identity`, the options that `items` reads
    for the first row, and all options of data that the recipe itself declares, because other rows may need them.
    """
    cfg, texts = task.cfg, [column for _, column in columns_of(task.cfg, "text")]
    names = ["items", "eval_items" if hasattr(task, "eval_items") else "items"]

    def encode(name: str, rows: dict[str, list]) -> dict[str, list]:
        made = getattr(task, name)(rows)
        if SOURCE in made:
            return made
        problems = [find_text_problems(rows, texts)] if texts else []
        problems += [made["problem"]] if "problem" in made else []
        return {**made, "problem": merge_problems(*problems) if problems else [""] * len(next(iter(rows.values())))}

    properties, shared = properties_of(type(cfg)), properties_of(RecipeConfig)
    read = {name for name, found in properties.items() if found.group == "data" and name not in shared}

    class Recording(type(cfg)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    task.cfg = copy.copy(cfg)
    task.cfg.__class__ = Recording
    try:
        for name, rows in zip(names, tables):
            encode(name, rows[:1])
    finally:
        task.cfg = cfg
    options = {name: repr(getattr(cfg, name)) for name in sorted(read & properties.keys())}
    made = []
    for name, rows in zip(names, tables):
        code = inspect.getsource(getattr(type(task), name))
        depends_on = [tokenizer_digest(task.processor), code, options, getattr(task, "identity", [])]
        made.append(map_once(rows, partial(encode, name), depends_on=depends_on, cfg=cfg))
    return drop_broken(made, cfg)


def report_truncated(tables: list["datasets.Dataset"], max_length: int) -> list["datasets.Dataset"]:
    """Return the tables. Warn of texts with `max_length` tokens: their length before it is not stored."""
    for rows, name in zip(tables, ("training", "evaluation")):
        if full := _count_full(rows, max_length):
            warn(f"--max_length {max_length}: {full:,} of {len(rows):,} {name} rows reach it, and longer texts are truncated.")
    return tables


def _count_full(rows: "datasets.Dataset", max_length: int) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    number = 0
    for table in rows.select_columns(["input_ids"]).with_format("arrow").iter(10_000):
        ids = table["input_ids"].combine_chunks()
        has_several = pa.types.is_nested(ids.type.value_type)  # texts in each row
        is_full = np.asarray(pc.list_value_length(pc.list_flatten(ids) if has_several else ids)) >= max_length
        number += len(np.unique(np.asarray(pc.list_parent_indices(ids))[is_full])) if has_several else int(is_full.sum())
    return number


def pack_documents(rows: dict[str, list], room: int) -> dict[str, list]:
    """Return fewer rows, which consist of whole rows that were given and have at most `room` tokens, and a column DOCUMENTS.

    From the longest to the shortest, each is put into the fullest row that has room for it. That leaves 1 to 3 % of the room unused.
    """
    lengths = [len(ids) for ids in rows["input_ids"]]
    made: list[list[int]] = []
    free: list[tuple[int, int]] = []  # the room that is left in each row, ascending
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(free, (lengths[i], -1))
        left, number = free.pop(place) if place < len(free) else (room, len(made))
        made += [[]] if number == len(made) else []
        made[number].append(i)
        insort(free, (left - lengths[i], number))
    made = sorted(map(sorted, made))
    joined = {name: [[token for i in some for token in column[i]] for some in made] for name, column in rows.items()}
    return {**joined, DOCUMENTS: [[lengths[i] for i in some] for some in made]}
