"""Writes a sharded checkpoint: each rank writes its part, and the main rank commits the checkpoint when all parts are there.

Writers are threads, in which no collective may run. A rank reports its part through the store of the launcher. The name of the
partial folder contains a number that is drawn at each start, so that a part of a killed attempt is never taken for one of this.
"""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from accel_ddp.ranks.process import process
from accel_ddp.saving import format, pieces

if TYPE_CHECKING:
    from torch import Tensor

POLL_SECONDS = 0.02
REPORT_EVERY = 60  # seconds
MAX_DELAY_OF_DISK = 20  # seconds until a network disk shows a file that another node has written
MAX_WAIT_AFTER_FAILURE = 18  # seconds; less than a rank that fails waits for its own writer


class PartError(OSError):
    """A rank could not write its part."""

    def __init__(self, text: str, host: str):
        super().__init__(0, text)
        self.host = host


class Attempt(NamedTuple):
    """One attempt to write a checkpoint. It is the same on every rank."""

    nonce: str  # of this start of the run
    number: int
    writers: list[tuple[int, str]]  # rank and host of each rank that writes a part
    run: str
    step: int

    def key(self, rank: int) -> str:
        return f"save/{self.nonce}/{self.number}/{rank}"


def write(
    final: Path, groups: dict[str, dict[str, "Tensor"]], offsets: dict[str, dict[str, list[int]]], run: dict[str, Any],
    files: dict[str, bytes], attempt: Attempt,
) -> None:  # fmt: skip
    """Write the part of this rank. On the main rank, also wait for the other parts and commit the checkpoint.

    If any part is missing, the main rank raises OSError, and nothing is left of the checkpoint. Other ranks raise nothing.
    """
    partial = final.with_name(f".{final.name}.partial-{attempt.nonce}-{attempt.number}")
    failure: Exception | None = None
    written: dict[str, Any] = {}
    try:
        written = _write_part(partial, groups, offsets, attempt)
    except Exception as error:  # the main rank must receive each one
        failure = error
    if not process.is_main:
        text = "" if failure is None else _reason(failure)
        with contextlib.suppress(dist.DistError):  # without the store, the run ends
            process.store.set(attempt.key(process.rank), json.dumps({"error": text, "files": written}))
        return
    try:
        found = _wait_for_parts(attempt)  # also after an own failure, because other ranks still write into the folder
        if failure is not None:
            raise failure
        for rank, host in attempt.writers:
            if rank in found and found[rank]["error"]:
                raise PartError(f"rank {rank}: {found[rank]['error']}", host)
            own = found.get(rank, {}).get("files", {})
            _require_files(partial, rank, host, own)
            written |= own
        format.complete(partial, final, run, files, written)
    except Exception:
        format.remove(partial)
        raise


def _write_part(
    partial: Path, groups: dict[str, dict[str, "Tensor"]], offsets: dict[str, dict[str, list[int]]], attempt: Attempt
) -> dict[str, Any]:
    """Write the tensors of this rank. Return the size and the hash of each file."""
    partial.mkdir(parents=True, exist_ok=True)
    format.check_space(partial, sum(t.nbytes for group in groups.values() for t in group.values()))
    written = {}
    for group, tensors in groups.items():
        if tensors:
            name = f"{format.PIECES[group]}/{pieces.file_name(process.rank)}"
            (partial / name).parent.mkdir(exist_ok=True)
            metadata = pieces.describe(offsets[group], run=attempt.run, step=str(attempt.step))
            written[name] = pieces.write_file(partial / name, tensors, metadata)
            format.sync((partial / name).parent)
    return written


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _require_files(partial: Path, rank: int, host: str, files: dict[str, Any]) -> None:
    """Raise PartError if the files of a rank are not in the folder of the main rank, because that rank has another disk."""
    deadline = time.monotonic() + MAX_DELAY_OF_DISK
    for name, facts in files.items():
        while True:
            with contextlib.suppress(OSError):
                if (partial / name).stat().st_size == facts["size"]:
                    break
            if time.monotonic() > deadline or process.has_failed.is_set():
                raise PartError(f"the folder of rank {rank} is not that of {process.host}, where {name} is missing", host)
            time.sleep(0.5)


def _wait_for_parts(attempt: Attempt) -> dict[int, dict[str, Any]]:
    """Return what the other ranks have reported. Raise PartError if a rank is lost.

    There is no time limit while all ranks are alive: a rank reports each error, and a disk that hangs is reported by the next save.
    """
    missing = {rank: host for rank, host in attempt.writers if rank != process.rank}
    found: dict[int, dict[str, Any]] = {}
    began = reported = time.monotonic()
    failed_at = None
    while missing:
        try:
            for rank in [rank for rank in missing if process.store.check([attempt.key(rank)])]:
                found[rank] = json.loads(process.store.get(attempt.key(rank)))
                del missing[rank]
                process.store.delete_key(attempt.key(rank))
        except dist.DistError as error:
            raise PartError(
                "the store of the launcher was lost, so that the parts of other ranks are not known", process.host
            ) from error
        now = time.monotonic()
        if process.has_failed.is_set() and missing:
            failed_at = failed_at or now
            failure = process.failure
            is_dead = failure is not None and failure.kind == "died" and failure.rank in missing
            if is_dead or now - failed_at > MAX_WAIT_AFTER_FAILURE:
                rank = failure.rank if is_dead and failure else next(iter(missing))
                raise PartError(f"rank {rank} has ended before its part was complete", missing[rank])
        if now - reported > REPORT_EVERY:
            reported = now
            who = ", ".join(f"rank {rank} ({host})" for rank, host in list(missing.items())[:4])
            text = f"The checkpoint of step {attempt.step} is not complete: {who} still writes ({now - began:.0f} s)."
            print(text, file=sys.stderr, flush=True)
        if missing:
            time.sleep(POLL_SECONDS)
    return found
