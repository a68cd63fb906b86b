"""Brings files of all ranks to the main rank. Nodes need not share a folder."""

import contextlib
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from accel_ddp.ranks.process import process

CHUNK = 4 << 20  # bytes; the memory that this needs on each side


def collect_files(ranks: list[int], sizes: dict[int, list[int]], mine: list[Path], targets: dict[int, list[Path]]) -> list[str]:
    """Send the files `mine` of this rank to the main rank, one rank after the other. Return what went wrong there.

    To be called by all ranks. On the main rank, `sizes` has the sizes of the files of each rank, and `targets` the paths to write.
    If the main rank cannot write a file, it receives the rest all the same, because the other rank sends it.
    """
    problems = []
    for rank in ranks:
        if rank == 0 or process.rank not in (0, rank):
            continue
        if process.rank == rank:
            for path in mine:
                _send(path)
        else:
            for size, path in zip(sizes[rank], targets[rank]):
                problems.append(_receive(rank, size, path))
    return [problem for problem in problems if problem]


def _send(path: Path) -> None:
    """Send a file. If it cannot be read to its end, zeros are sent for the rest, and the last message tells it."""
    size, is_complete = path.stat().st_size, True
    with path.open("rb") as file:
        for at in range(0, size, CHUNK):
            expected = min(CHUNK, size - at)
            data = b""
            with contextlib.suppress(OSError):
                data = file.read(expected)
            is_complete = is_complete and len(data) == expected
            chunk = torch.frombuffer(bytearray(data.ljust(expected, b"\0")), dtype=torch.uint8)
            dist.send(chunk, 0, group=process.slow_group)
            process.heartbeat.beat()
    dist.send(torch.tensor([int(is_complete)]), 0, group=process.slow_group)


def _receive(rank: int, size: int, path: Path) -> str:
    problem = ""
    file: IO[bytes] | None = None
    try:
        file = path.open("wb")
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror}"
    for at in range(0, size, CHUNK):
        chunk = torch.empty(min(CHUNK, size - at), dtype=torch.uint8)
        dist.recv(chunk, rank, group=process.slow_group)
        process.heartbeat.beat()
        if file is not None and not problem:
            try:
                file.write(chunk.numpy())
            except OSError as error:
                problem = f"{path} cannot be written: {error.strerror}"
    status = torch.zeros(1, dtype=torch.int64)
    dist.recv(status, rank, group=process.slow_group)
    if file is not None:
        try:
            file.close()
        except OSError as error:
            problem = problem or f"{path} cannot be written: {error.strerror}"
    return problem or ("" if status.item() else f"rank {rank} could not read its trace")
