"""How this package writes files and streams: small files atomically, lines of JSON by appending, slow targets from a thread."""

import contextlib
import errno
import json
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 18


# ---- small files


def replace_file(
    path: Path, content: str | bytes, *, syncs: bool = False, has_rivals: bool = False, replaces: bool = True
) -> None:
    """Write a file atomically: readers see the old content or the new content, never a part. Raise OSError if the disk fails.

    With `syncs` the content survives a power cut, for which a disk may take a second. `has_rivals`: other processes may write this
    file at the same time. Without `replaces`, raise FileExistsError if the file exists, also if a rival was faster.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp" if has_rivals else f".{path.name}.tmp")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        if syncs:
            sync(draft)
        if replaces:
            draft.replace(path)
        else:
            os.link(draft, path)  # unlike a rename, it fails if the file exists
            draft.unlink()
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def sync(path: Path) -> None:
    """Write a file's content or a folder's entries to the disk, so that a power cut does not undo a rename."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if path.is_file() or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks cannot sync folders
            raise
    finally:
        os.close(number)


# ---- lines of JSON, to which a run appends while other programs read them


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


# ---- targets that may not answer


class BackgroundWriter:
    """A thread that passes items to `write`, in order, so the caller never waits for a terminal, a pipe, a disk or a server.

    An OSError of `write` loses the item and is kept in `failure`. With `retry_seconds`, the item is retried after this time, when the
    next one arrives, and once more at the end. Any other exception ends the thread. Of more than `most` items that wait, the oldest
    is dropped.
    """

    def __init__(
        self, write: Callable[[Any], object], name: str, *, most: int | None = None, retry_seconds: float | None = None
    ) -> None:
        self.write_item, self.most, self.retry_seconds = write, most, retry_seconds
        self.waiting: deque[Any] = deque()
        self.failure: OSError | None = None
        self.is_done = threading.Event()
        self._changed = threading.Condition()  # reentrant: a signal handler may put an item while its thread puts one
        self._is_busy = self._is_closing = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        """Begin to write. Items that were put before are kept for this."""
        self._thread.start()

    def put(self, item: Any) -> None:
        """Write an item soon. This never blocks and never raises."""
        with self._changed:
            if self.is_done.is_set():
                return
            if self.most is not None and len(self.waiting) >= self.most:
                self.drop_one()
            self.waiting.append(item)
            self._changed.notify()

    def drop_one(self) -> None:
        self.waiting.popleft()

    @property
    def num_unwritten(self) -> int:
        with self._changed:
            return len(self.waiting) + self._is_busy

    def close(self, seconds: float = 0.0) -> bool:
        """End the thread after the last item. Wait at most `seconds` for it, and return whether everything is written."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        return self.is_done.wait(seconds if self._thread.is_alive() else 0.0)

    def stop(self) -> None:
        """Drop everything that waits and end the thread. Only `write` may call this."""
        with self._changed:
            self._is_closing, self._is_busy = True, False
            self.waiting.clear()
            self.is_done.set()

    def _work(self) -> None:
        try:
            while self._write_next():
                pass
        finally:
            self.stop()

    def _write_next(self) -> bool:
        """Write the next item. Return whether the thread goes on."""
        with self._changed:
            self._changed.wait_for(lambda: self.waiting or self._is_closing)
            if not self.waiting:
                return False
            item, self._is_busy = self.waiting.popleft(), True
            is_last_try = self._is_closing
        try:
            self.write_item(item)
        except OSError as error:
            self.failure = error
            if self.retry_seconds is not None:
                if is_last_try:
                    return False
                with self._changed:
                    self.waiting.appendleft(item)
                    self._is_busy = False
                    if not self._is_closing:
                        self._changed.wait(self.retry_seconds)
                return True
        self._is_busy = False
        return True
