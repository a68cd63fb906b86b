"""Files of tensors that are stored in pieces, one file for each rank, and a reader for both layouts of a checkpoint.

The files have the format of torch's `HuggingFaceStorageWriter(save_distributed=True)`: safetensors files whose metadata contain the
place of each piece in its tensor. `torch.distributed.checkpoint` can read them too. They are written and read here, because its
planner needs collectives, which must not run in the thread of a writer.

Each rank writes its part and reports it through the launcher's store, and the main rank commits the checkpoint when all are there. The
partial folder's name has a number drawn at each start, so a part that a killed run has left is never taken for one of this run.
"""

import contextlib
import hashlib
import json
import math
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accel_ddp.ranks.process import ending, links, this_rank
from accel_ddp.saving import checkpoint_format
from accel_ddp.saving.checkpoint_format import MODEL, OPTIMIZER, PIECES
from accel_ddp.saving.state_tensors import DTYPES, EMA

INFO, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # torch's names
BLOCK = 1 << 24  # bytes
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def file_name(rank: int) -> str:
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def describe(offsets: dict[str, list[int]], **facts: str) -> dict[str, str]:
    info = {name: {OFFSETS: place} for name, place in offsets.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", INFO: json.dumps(info), **facts}


def write_file(path: Path, tensors: dict[str, Any], metadata: dict[str, str]) -> dict[str, Any]:
    """Return size and sha256. A tensor may be (shape, dtype, function that returns it), so only one at a time needs memory."""
    facts = {name: t if isinstance(t, tuple) else ([*t.shape], t.dtype, lambda t=t: t) for name, t in tensors.items()}
    # As safetensors does it, so that equal tensors give equal bytes. With large types first all of them are aligned.
    names = sorted(facts, key=lambda name: (-facts[name][1].itemsize, name))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        shape, dtype, _ = facts[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        file.write(begin_of_file := struct.pack("<Q", len(text)) + text)
        digest.update(begin_of_file)
        for name in names:
            values = memoryview(facts[name][2]().contiguous().reshape(-1).view(torch.uint8).numpy())
            for begin in range(0, len(values), BLOCK):  # of a block, the cache of the processor still has a part for the digest
                file.write(values[begin : begin + BLOCK])
                digest.update(values[begin : begin + BLOCK])
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return {"size": size, "sha256": digest.hexdigest()}


class Piece(NamedTuple):
    offsets: list[int]
    shape: list[int]
    path: Path
    begin: int  # bytes


class Pieces:
    """Reads tensors of one group of a checkpoint, from one file or the pieces of ranks. It maps no file into memory."""

    def __init__(self, checkpoint: Path, group: str):
        """`group` is MODEL or OPTIMIZER."""
        whole = checkpoint / group
        self.paths = [whole] if whole.is_file() else sorted((checkpoint / PIECES[group]).glob("*.safetensors"))
        self._pieces: dict[str, list[Piece]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for path in self.paths:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header, begin = json.loads(file.read(length)), 8 + length
            info = json.loads(header.pop("__metadata__", {}).get(INFO, "{}"))
            for name, facts in header.items():
                offsets = info.get(name, {}).get(OFFSETS, [0] * len(facts["shape"]))
                self._pieces.setdefault(name, []).append(Piece(offsets, facts["shape"], path, begin + facts["data_offsets"][0]))
                self._dtypes[name] = DTYPES[facts["dtype"]]

    @property
    def tensors(self) -> dict[str, tuple[list[int], torch.dtype]]:
        return {name: (self._shape(name), dtype) for name, dtype in self._dtypes.items()}

    def _shape(self, name: str) -> list[int]:
        ends = [[at + length for at, length in zip(piece.offsets, piece.shape)] for piece in self._pieces[name]]
        return [max(sizes) for sizes in zip(*ends)]

    def read(self, name: str, offsets: list[int] | None = None, lengths: list[int] | None = None) -> Tensor:
        shape = self._shape(name)
        offsets, lengths = offsets or [0] * len(shape), shape if lengths is None else lengths
        result = torch.empty(lengths, dtype=self._dtypes[name])
        found = 0
        for piece in self._pieces[name]:
            begins = [max(a, b) for a, b in zip(offsets, piece.offsets)]
            ends = [min(a + n, b + m) for a, n, b, m in zip(offsets, lengths, piece.offsets, piece.shape)]
            sizes = [end - begin for begin, end in zip(begins, ends)]
            if any(size <= 0 for size in sizes):
                continue
            found += math.prod(sizes)
            if not shape:
                _read_into(result, piece.path, piece.begin)
                continue
            row = math.prod(piece.shape[1:]) * result.element_size()
            place = piece.begin + (begins[0] - piece.offsets[0]) * row
            target = result[tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, offsets))]
            if sizes[1:] == piece.shape[1:] and target.is_contiguous():
                _read_into(target, piece.path, place)
            else:  # a part of each row
                rows = torch.empty([sizes[0], *piece.shape[1:]], dtype=result.dtype)
                _read_into(rows, piece.path, place)
                inside = [slice(b - p, e - p) for b, e, p in zip(begins[1:], ends[1:], piece.offsets[1:])]
                target.copy_(rows[(slice(None), *inside)])
        if found != result.numel():
            raise OSError(f"{self.paths[0].parent}: {result.numel() - found:,} values of {name} are in no file")
        return result


class AveragedPieces(Pieces):
    """Reads the weights of a checkpoint, and for each weight that has an average (`--ema_decay`) its average instead."""

    def __init__(self, checkpoint: Path):
        super().__init__(checkpoint, MODEL)
        self.averages = Pieces(checkpoint, OPTIMIZER)

    def read(self, name: str, offsets: list[int] | None = None, lengths: list[int] | None = None) -> Tensor:
        average = f"{name}/{EMA}"
        if average not in self.averages.tensors:
            return super().read(name, offsets, lengths)
        return self.averages.read(average, offsets, lengths).to(self._dtypes[name])


def has_averages(checkpoint: Path) -> bool:
    return any(name.endswith(f"/{EMA}") for name in Pieces(checkpoint, OPTIMIZER).tensors)


def _read_into(tensor: Tensor, path: Path, begin: int) -> None:
    values = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    with path.open("rb") as file:
        file.seek(begin)
        if file.readinto(values) < len(values):
            raise OSError(f"{path} is too short")


# ---- writing a sharded checkpoint

POLL_SECONDS = 0.02
REPORT_EVERY = 60  # seconds
MAX_DELAY_OF_DISK = 20  # seconds until a network disk shows a file that another node has written
MAX_WAIT_AFTER_FAILURE = 18  # seconds; less than a rank that fails waits for its own writer


class PartError(OSError):
    def __init__(self, text: str, host: str):
        super().__init__(0, text)
        self.host = host


class PartialSave(NamedTuple):
    """One save of a sharded checkpoint, of which each rank writes a part. It is the same on every rank."""

    nonce: str  # of this start of the run
    number: int
    writers: list[tuple[int, str]]  # rank and host of each rank that writes a part
    run: str
    step: int

    def key(self, rank: int) -> str:
        return f"save/{self.nonce}/{self.number}/{rank}"


def write(
    final: Path, groups: dict[str, dict[str, Tensor]], offsets: dict[str, dict[str, list[int]]], run: dict[str, Any],
    files: dict[str, bytes], save: PartialSave,
) -> None:  # fmt: skip
    """The main rank waits for all parts, and commits the checkpoint, or raises OSError and leaves nothing. Others never raise."""
    partial = final.with_name(f".{final.name}.partial-{save.nonce}-{save.number}")
    failure: Exception | None = None
    written: dict[str, Any] = {}
    try:
        partial.mkdir(parents=True, exist_ok=True)
        checkpoint_format.check_space(partial, sum(t.nbytes for group in groups.values() for t in group.values()))
        for group in filter(groups.get, groups):
            name = f"{PIECES[group]}/{file_name(this_rank.rank)}"
            (partial / name).parent.mkdir(exist_ok=True)
            metadata = describe(offsets[group], run=save.run, step=str(save.step))
            written[name] = write_file(partial / name, groups[group], metadata)
            checkpoint_format.sync((partial / name).parent)
    except Exception as error:  # the main rank must receive each one
        failure = error
    if not this_rank.is_main:
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        if isinstance(failure, OSError) and failure.strerror:
            text = failure.strerror + (f" ({failure.filename})" if failure.filename else "")
        report = {"error": text, "files": written}
        try:
            links.store.set(save.key(this_rank.rank), json.dumps(report))
            links.store.check([save.key(this_rank.rank)])  # `set` alone does not notice that the store is lost
        except dist.DistError:  # with its launcher; the ranks share the folder too
            with contextlib.suppress(OSError):
                checkpoint_format.write_json(partial / f"part-{this_rank.rank}.json", report)
        return
    try:
        found = _wait_for_parts(save, partial)  # also after an own failure, because other ranks still write into the folder
        if failure is not None:
            raise failure
        for rank, host in save.writers:
            if rank in found and found[rank]["error"]:
                raise PartError(f"rank {rank}: {found[rank]['error']}", host)
            own = found.get(rank, {}).get("files", {})
            _require_files(partial, rank, host, own)
            written |= own
        checkpoint_format.complete(partial, final, run, files, written)
    except Exception:
        checkpoint_format.remove(partial)
        raise


def _require_files(partial: Path, rank: int, host: str, files: dict[str, Any]) -> None:
    """Raise PartError if the files of a rank are not in the folder of the main rank, because that rank has another disk."""
    deadline = time.monotonic() + MAX_DELAY_OF_DISK
    for name, facts in files.items():
        while True:
            with contextlib.suppress(OSError):
                if (partial / name).stat().st_size == facts["size"]:
                    break
            if time.monotonic() > deadline or ending.has_failed.is_set():
                raise PartError(f"the folder of rank {rank} is not that of {this_rank.host}, where {name} is missing", host)
            time.sleep(0.5)


def _wait_for_parts(save: PartialSave, partial: Path) -> dict[int, dict[str, Any]]:
    """PartError if a rank is lost. No limit while all live; without the store, the folder must grow."""
    missing = {rank: host for rank, host in save.writers if rank != this_rank.rank}
    found: dict[int, dict[str, Any]] = {}
    began = reported = grown_at = time.monotonic()
    failed_at, size = None, 0
    while missing:
        try:
            for rank in [rank for rank in missing if links.store.check([save.key(rank)])]:
                found[rank] = json.loads(links.store.get(save.key(rank)))
                del missing[rank]
                links.store.delete_key(save.key(rank))
        except dist.DistError as error:
            for path in partial.glob("part-*.json"):
                if (report := checkpoint_format.read_json(path)) is not None:  # None: it is being written
                    found[rank := int(path.stem[5:])] = report
                    missing.pop(rank, None)
                    path.unlink()
            before, size = size, sum(path.stat().st_size for path in partial.glob("*/*"))
            grown_at = time.monotonic() if size != before else grown_at
            if missing and time.monotonic() - grown_at > MAX_DELAY_OF_DISK:
                lost = "the store of the launcher was lost, so the parts of other ranks are not known"
                raise PartError(lost, this_rank.host) from error
        now = time.monotonic()
        if ending.has_failed.is_set() and missing:
            failed_at = failed_at or now
            failure = ending.failure
            is_dead = failure is not None and failure.kind == "died" and failure.rank in missing
            if is_dead or now - failed_at > MAX_WAIT_AFTER_FAILURE:
                rank = failure.rank if is_dead and failure else next(iter(missing))
                raise PartError(f"rank {rank} exited before its part was complete", missing[rank])
        if now - reported > REPORT_EVERY:
            reported = now
            who = ", ".join(f"rank {rank} ({host})" for rank, host in list(missing.items())[:4])
            text = f"The checkpoint of step {save.step} is not complete: {who} still writes ({now - began:.0f} s)."
            print(text, file=sys.stderr, flush=True)
        if missing:
            time.sleep(POLL_SECONDS)
    return found


# ---- comparing two checkpoints, each of them one file or the pieces of several ranks


def largest_difference(a: Path, b: Path) -> tuple[float, str]:
    """Return the largest difference of any weight, and the name of its tensor. NaN and a missing tensor count as the largest."""
    one, two = Pieces(a, MODEL), Pieces(b, MODEL)
    shapes, others = one.tensors, two.tensors
    differences = {}
    for name in {**shapes, **others}:
        if shapes.get(name) != others.get(name):
            differences[name] = math.inf
        elif math.prod(shapes[name][0]):
            differences[name] = (one.read(name).double() - two.read(name).double()).abs().max().item()
    name = max(differences, key=lambda name: (math.isnan(differences[name]), differences[name]))
    return differences[name], name


def is_identical(a: Path, b: Path, group: str) -> bool:
    one, two = Pieces(a, group), Pieces(b, group)
    bits = lambda pieces, name: pieces.read(name).reshape(-1).view(torch.uint8)
    return one.tensors == two.tensors and all(torch.equal(bits(one, name), bits(two, name)) for name in one.tensors)
