"""A table mapped in shards by all cores of a node. Shards that a killed run has completed are not computed again.

Every shard is an Arrow file, renamed when it is complete. Its name has its number and a digest of its bytes, so a damaged one is found
and replaced. What is in the shards depends on the rows and the function, and not on the number of cores.
"""

import contextlib
import ctypes
import hashlib
import multiprocessing
import os
import pickle
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_ddp.nodes.cores import usable_cores
from accel_ddp.ranks.process import Moment, ending, this_rank
from accel_ddp.ranks.signals import IgnoreInWorker, blocked_for_children
from accel_ddp.sources.places import shows_progress
from accel_ddp.text import rough_seconds

if TYPE_CHECKING:
    import datasets

SOURCE = "source row"  # a temporary column: the index of the row from which a row was made
BATCH = 1000  # rows of one call of the function; packed rows depend on it
SHARD_ROWS = 4 * BATCH  # a table with more rows is mapped by several processes, and a killed run repeats so many rows per core
MOST_SHARDS = 500  # of a table, each of which is a file that stays open
NARROW = ("labels", "words")  # lists of token numbers, stored in 4 bytes instead of 8; see `tokenization.fingerprint`
PROGRESS_EVERY = 30.0  # seconds between two lines, if the output is not a terminal
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
    numbers = range(-(-len(rows) // size))
    complete = {number for number, file in _find_shards(folder) if _digest_of_file(file) == _SHARD.fullmatch(file.name)[2]}
    for number, file in _find_shards(folder):
        if number not in complete:
            file.unlink()
    missing = [number for number in numbers if number not in complete]
    features = None
    if len(numbers) > 1 and missing:
        first = _map(rows.select(range(BATCH)), function, 0, lambda _: None, new_fingerprint=f"{key}-types", keep_in_memory=True)
        features = _narrowed(first.features)
    write = partial(_write_shard, rows, function, features, size, key, folder)
    progress = Progress(doing, len(rows), len(rows) - sum(min(size, len(rows) - number * size) for number in missing))
    workers = min(usable_cores(), len(missing))
    # Other platforms than Linux have no safe fork.
    if workers > 1 and len(numbers) > 1 and sys.platform == "linux":
        with contextlib.closing(progress):
            _run_workers(write, missing, workers, progress)
    else:
        for number in missing:
            write(number, progress.add)
    chosen = dict(_find_shards(folder))
    for file in {*folder.iterdir()} - {*chosen.values()}:  # what killed processes have left
        file.unlink()


def load_shards(folder: Path) -> "datasets.Dataset":
    """Return the rows that `write_shards` has written, memory-mapped."""
    import datasets

    parts = [datasets.Dataset.from_file(str(file)) for _, file in _find_shards(folder)]
    return datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]


def _find_shards(folder: Path) -> Iterator[tuple[int, Path]]:
    matches = ((_SHARD.fullmatch(file.name), file) for file in sorted(folder.iterdir()))
    return ((int(match[1]), file) for match, file in matches if match)


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

    # With `new_fingerprint`, `datasets` does not try to hash the function, which often fails.
    fixed = {
        "batched": True,
        "batch_size": BATCH,
        "with_indices": True,
        "remove_columns": part.column_names,
        "desc": "tokenizing",
    }
    return part.map(add_source, **fixed, **options)


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


def _digest_of_file(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    with file.open("rb", buffering=0) as opened:
        while some := opened.read(1 << 20):
            digest.update(some)
    return digest.hexdigest()


def _narrowed(features: Any) -> Any:
    import datasets

    narrow = {name: type(kind)(datasets.Value("int32")) for name, kind in features.items() if name in NARROW and _is_wide(kind)}
    return datasets.Features({**features, **narrow})


def _is_wide(feature: Any) -> bool:
    return getattr(getattr(feature, "feature", None), "dtype", "") == "int64"


def _run_workers(write: Callable[[int, Callable], None], numbers: list[int], count: int, progress: "Progress") -> None:
    """Write shards with `count` forked processes. Raise the first exception of any of them.

    Functions of recipes cannot be pickled, so processes are forked, as data workers are: they use neither CUDA nor the process group,
    and end with this process, however it ends. Threads would not help, because most of the time is spent in Python.
    """
    context = multiprocessing.get_context("fork")
    taken, done = context.Value("q", 0), context.RawArray("q", count)
    ignore = IgnoreInWorker("fork")

    def work(place: int, errors: Connection) -> None:
        import datasets

        ignore()
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for each core
        datasets.disable_progress_bars()

        def report(rows: int) -> None:
            done[place] += rows

        try:
            while True:
                with taken:
                    turn, taken.value = taken.value, taken.value + 1
                if turn >= len(numbers):
                    return
                write(numbers[turn], report)
        except BaseException as error:
            errors.send(_as_bytes(error))

    ending.run(Moment.FORK)
    reader, writer = context.Pipe(duplex=False)
    processes = [context.Process(target=work, args=(place, writer), daemon=True) for place in range(count)]
    try:
        with blocked_for_children():
            for process in processes:
                process.start()
        running = {process.sentinel: process for process in processes}
        while running:
            ready = wait([reader, *running], timeout=1.0)
            progress.show(sum(done))
            if reader in ready:
                error, trace = pickle.loads(reader.recv())
                raise error from RuntimeError(trace)
            for sentinel in ready:
                process = running.pop(sentinel)
                process.join()
                if process.exitcode:
                    raise RuntimeError(
                        f"{progress.doing}: a worker process was ended ({process.exitcode}), often because the memory is used up. "
                        "A run that is started again continues with the rows that are left."
                    )
    finally:
        for process in processes:
            if process.pid:
                process.kill()
                process.join()


def _as_bytes(error: BaseException) -> bytes:
    """Return an exception and its traceback for another process. Some exceptions cannot be pickled, and become a RuntimeError."""
    trace = traceback.format_exc()
    try:
        packed = pickle.dumps((error, trace))
        pickle.loads(packed)
        return packed
    except Exception:
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), trace))


class Progress:
    """Shows how far a long loop over rows is: in a terminal one line that changes, elsewhere a line now and then."""

    def __init__(self, doing: str, total: int, done: int = 0):
        self.doing, self.total, self.first, self.done = doing, total, done, 0
        self.began = self.shown = time.monotonic()
        self.is_bar = False

    def add(self, rows: int) -> None:
        self.show(self.done + rows)

    def show(self, done: int) -> None:
        """Report that `done` rows were completed by this process."""
        self.done, now = done, time.monotonic()
        if now - self.shown < (1.0 if shows_progress() else PROGRESS_EVERY):
            return
        self.shown = now
        if shows_progress():
            self.is_bar = True
            sys.stderr.write(f"\r{self.text()}\x1b[K")
            sys.stderr.flush()
        else:
            prefix = f"[{this_rank.host} rank {this_rank.rank}] " if this_rank.num_ranks > 1 else ""
            print(f"{prefix}{self.text()}", file=sys.stderr, flush=True)

    def text(self) -> str:
        """Return for example "tokenizing: 340,000 of 1,000,000 rows (34 %), 5,200 rows/s, 2 min left"."""
        at, rate = self.first + self.done, self.done / max(time.monotonic() - self.began, 1e-9)
        left = f", {rough_seconds((self.total - at) / rate)} left" if self.done else ""
        return f"{self.doing}: {at:,} of {self.total:,} rows ({at / max(self.total, 1):.0%}), {rate:,.0f} rows/s{left}"

    def close(self) -> None:
        """End the line in a terminal."""
        if self.is_bar:
            print(file=sys.stderr, flush=True)


def let_pages_go() -> None:
    """Remove pages of mapped Arrow files from the resident memory of this process. They stay in the kernel's cache.

    The kernel removes them itself when memory is short. Until then a process that has read 100 GB once appears to use 100 GB.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, access, *_ = line.split(maxsplit=2)
            if "w" not in access and line.endswith((".arrow", ".draft")):  # a page that was not changed is read again if needed
                first, end = (int(part, 16) for part in place.split("-"))
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED)
