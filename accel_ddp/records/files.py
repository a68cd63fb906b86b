"""Files of JSON objects, one per line, to which a run appends while other programs read them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 18


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file. Lines that are not complete, which a crash leaves, and a missing file are left out."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            if (value := parse(line)) is not None:
                yield value


def read_objects_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects from the last to the first. Only as much of the end of the file is read as the caller takes."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        position, later = file.seek(0, 2), [b""]  # `later` are the pieces of a line whose beginning is not read yet, last first
        while position:
            size = min(CHUNK_BYTES, position)
            position -= size
            file.seek(position)
            first, *lines = file.read(size).split(b"\n")
            if lines:
                lines[-1] += b"".join(reversed(later))
                later = []
                for line in reversed(lines):
                    if (value := parse(line)) is not None:
                        yield value
            later.append(first)
        if (value := parse(b"".join(reversed(later)))) is not None:
            yield value


def parse(line: bytes | str) -> dict[str, Any] | None:
    """Return the object of a line, or None if the line is no complete object."""
    with contextlib.suppress(ValueError, RecursionError):  # ValueError also for bytes that are not UTF-8
        value = json.loads(line) if line.strip() else None
        return value if isinstance(value, dict) else None
    return None


def complete_last_line(path: Path) -> None:
    """End a line that a crash has cut, so that the next object is not appended to it."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        if file.seek(0, 2):
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
