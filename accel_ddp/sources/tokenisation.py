"""Tokenises rows once, caches the result on disk, and pads rows to micro-batches."""

import functools
import hashlib
import inspect
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate import Accelerator

from accel_ddp.config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.seeds import mixed
from accel_ddp.sources.data import at_places, places

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)

SOURCE = "made of row"  # a temporary column: the index of the row from which a row was made


def fingerprint(rows: "datasets.Dataset") -> str:
    """Of the content: equal rows have equal fingerprints, wherever and however they are stored."""
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
def _digest_of_code() -> str:
    """Return a digest of the code that tokenisation may call: `sources`, `tasks` and the seeds.

    A change of any other code must not tokenise the data again.
    """
    package = Path(__file__).parents[1]
    files = [*sorted((package / "sources").rglob("*.py")), *sorted((package / "tasks").rglob("*.py")), package / "seeds.py"]
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

    words = json.dumps([_digest_of_code(), fingerprint(rows), inspect.getsource(function), depends_on], sort_keys=True)
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
                log.warning("waiting for another process to tokenise (%.0f s): %s.lock", waited, final)
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


def say_what_is_cut(tables: list["datasets.Dataset"], max_length: int) -> list["datasets.Dataset"]:
    """The same tables; how many of their rows fill `--max_length`, beyond which nothing is seen, is said."""
    for rows, name in zip(tables, ("training", "evaluation")):
        texts = lambda ids: ids if ids and isinstance(ids[0], list) else [ids]  # of a row with several
        full = sum(any(len(text) >= max_length for text in texts(ids)) for ids in rows["input_ids"])
        if full:
            log.info(f"{full:,} of {len(rows):,} {name} rows fill --max_length {max_length}: what goes beyond it is cut.")
    return tables


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
