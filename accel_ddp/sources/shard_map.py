"""A table mapped in shards by all cores of a node. Shards that a killed run has completed are not computed again.

Every shard is an Arrow file, renamed when it is complete. Its name has its number and a digest of its bytes, so a damaged one is found
and replaced. What is in the shards depends on the rows and the function, and not on the number of cores.
"""

import contextlib
import ctypes
import hashlib
import multiprocessing
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_ddp.errors import UserError
from accel_ddp.nodes.cores import usable_cores
from accel_ddp.ranks.signals import IgnoreInWorker, blocked_for_children
from accel_ddp.sources.places import Progress

if TYPE_CHECKING:
    import datasets

SOURCE = "source row"  # a temporary column: the index of the row from which a row was made
BATCH = 1000  # rows of one call of the function; packed rows depend on it
SHARD_ROWS = 4 * BATCH  # a table with more rows is mapped by several processes, and a killed run repeats so many rows per core
LONGEST = 8000  # characters of an error of a worker
MOST_SHARDS = 500  # of a table, each of which is a file that stays open
NARROW = ("labels", "words")  # lists of token numbers, stored in 4 bytes instead of 8; see `tokenization.fingerprint`
_SHARD = re.compile(r"(\d{5})-(\w{16})\.arrow")
_MADV_DONTNEED = 4

Function = Callable[[dict[str, list]], dict[str, list]]


def write_shards(rows: "datasets.Dataset", function: Function, key: str, doing: str, folder: Path) -> None:
    """Write `rows.map(function, batched=True)` into `folder`, with a column SOURCE. Valid shards that are there already are kept.

    `doing` begins the lines of progress. The first batch determines the types of all columns, as in `map`.
    """
    folder.mkdir(exist_ok=True)
    # As many rows per shard for any number of cores, and whole batches.
    size = max(SHARD_ROWS, -(-len(rows) // (MOST_SHARDS * BATCH)) * BATCH)
    missing = {*range(-(-len(rows) // size))}
    has_several = len(missing) > 1
    for number, digest, file in _find_shards(folder):
        missing.discard(number) if digest == _digest_of_file(file) else file.unlink()
    features = None
    if has_several and missing:
        first = _map(rows.select(range(BATCH)), function, 0, lambda _: None, new_fingerprint=f"{key}-types", keep_in_memory=True)
        features = _narrowed(first.features)
    write = partial(_write_shard, rows, function, features, size, key, folder)
    done = len(rows) - sum(min(size, len(rows) - number * size) for number in missing)
    workers = min(usable_cores(), len(missing))
    with Progress(doing, len(rows), done) as progress:
        if has_several and workers > 1 and sys.platform == "linux":  # other platforms have no safe fork
            _run_workers(write, sorted(missing), workers, progress)
        else:
            for number in sorted(missing):
                write(number, progress.add)
    for file in {*folder.iterdir()} - {file for *_, file in _find_shards(folder)}:  # what killed processes have left
        file.unlink()


def load_shards(folder: Path) -> "datasets.Dataset":
    import datasets

    parts = [datasets.Dataset.from_file(str(file)) for *_, file in _find_shards(folder)]
    return datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]


def _find_shards(folder: Path) -> Iterator[tuple[int, str, Path]]:
    """Yield the number, the digest and the file of each shard, in order. Another process may have written one too: it is left out."""
    last = -1
    for file in sorted(folder.iterdir()):
        if (match := _SHARD.fullmatch(file.name)) and int(match[1]) != last:
            last = int(match[1])
            yield last, match[2], file


def _digest_of_file(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    with file.open("rb", buffering=0) as opened:
        while some := opened.read(1 << 20):
            digest.update(some)
    return digest.hexdigest()


def _map(
    part: "datasets.Dataset", function: Function, start: int, report: Callable[[int], Any], **options: Any
) -> "datasets.Dataset":
    """Return the rows that the function makes from a part that begins at row `start`, with the column SOURCE."""

    def add_source(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        made = function(batch)
        number = len(next(iter(made.values())))
        # Blocks for masking mix the texts of several rows and have no SOURCE. Their row numbers are not used.
        source = made.pop(SOURCE, range(number) if number == len(indices) else [0] * number)
        report(len(indices))
        return {**made, SOURCE: [start + indices[i] for i in source]}

    # With `new_fingerprint` in `options`, `datasets` does not try to hash the function, which often fails.
    fixed = {"batched": True, "batch_size": BATCH, "with_indices": True, "remove_columns": part.column_names}
    return part.map(add_source, desc="tokenizing", **fixed, **options)


def _write_shard(
    rows: "datasets.Dataset", function: Function, features: Any, size: int, key: str, folder: Path, number: int, report: Callable
) -> None:
    start = number * size
    draft = folder / f"{number:05d}.{os.getpid()}.draft"
    part = rows.select(range(start, min(start + size, len(rows))))
    options = {"features": features, "cache_file_name": str(draft), "load_from_cache_file": False}
    _map(part, function, start, report, new_fingerprint=f"{key}-{number}", **options)
    draft.rename(folder / f"{number:05d}-{_digest_of_file(draft)}.arrow")
    let_pages_go()


def _narrowed(features: Any) -> Any:
    import datasets

    is_wide = lambda name, kind: name in NARROW and getattr(getattr(kind, "feature", None), "dtype", "") == "int64"
    narrow = {name: type(kind)(datasets.Value("int32")) for name, kind in features.items() if is_wide(name, kind)}
    return datasets.Features({**features, **narrow})


def _run_workers(write: Callable[[int, Callable], None], numbers: list[int], count: int, progress: Progress) -> None:
    """Write shards with `count` forked processes. Raise the first exception of any of them.

    Functions of recipes cannot be pickled, so processes are forked, as data workers are: they use neither CUDA nor the process group,
    and end with this process, however it ends. Threads would not help, because most of the time is spent in Python.
    """
    context = multiprocessing.get_context("fork")
    todo, errors, done = context.SimpleQueue(), context.SimpleQueue(), context.RawArray("q", count)
    for number in [*numbers, *[None] * count]:  # they fit into the buffer of a pipe
        todo.put(number)
    ignore = IgnoreInWorker("fork")

    def work(place: int) -> None:
        import datasets

        ignore()
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for each core
        datasets.disable_progress_bars()

        def report(rows: int) -> None:
            done[place] += rows

        try:
            for number in iter(todo.get, None):
                write(number, report)
        except BaseException as error:
            # Others may not be picklable, and a pipe takes 64 KB before somebody reads.
            is_known = isinstance(error, UserError | OSError) and len(str(error)) < LONGEST
            other = RuntimeError(f"{type(error).__name__}: {error}"[:LONGEST])
            errors.put((error if is_known else other, traceback.format_exc()[-LONGEST:]))
            sys.exit(1)

    let_pages_go()
    processes = [context.Process(target=work, args=(place,), daemon=True) for place in range(count)]
    try:
        with blocked_for_children(forks=True):
            for process in processes:
                process.start()
        while True:
            running = [process.sentinel for process in processes if process.exitcode is None]
            if failed := next((process for process in processes if process.exitcode), None):
                if not errors.empty():
                    error, trace = errors.get()
                    raise error from RuntimeError(trace)
                reason = f"a worker process was killed ({failed.exitcode}), often because the memory is used up"
                raise RuntimeError(f"{progress.doing}: {reason}. A restarted run continues with the remaining rows.")
            if not running:
                return
            wait(running, timeout=1.0)
            progress.show(sum(done))
    finally:
        for process in processes:
            if process.pid:
                process.kill()
                process.join()


def let_pages_go() -> None:
    """Give back memory that was freed, and pages of mapped Arrow files, which stay in the kernel's cache.

    The kernel removes these pages itself when memory is short. Until then a process that has read 100 GB once appears to use 100 GB.
    After a file of 1,000,000 chats was read, 200 MB were free in this process, and forked workers would have them too.
    """
    import pyarrow

    pyarrow.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError):  # of glibc only
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # other platforms have no such file
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, access, *_ = line.split(maxsplit=2)
            if "w" not in access and line.endswith((".arrow", ".draft")):  # a page that was not changed is read again if needed
                first, end = (int(part, 16) for part in place.split("-"))
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED)
