"""The output of the ranks: a node receives that of each rank (`nodes.terminal`), and the launching machine prints all."""

import asyncio
import codecs
import contextlib
import fcntl
import os
import re
import struct
import sys
import termios
import tty
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from accel_ddp.nodes.terminal import erase_before_line, split_incomplete_frame, without_controls, without_frames
from accel_ddp.records.files import BackgroundWriter

_PIPE_BYTES = 1 << 20  # a guard that is busy does not delay the ranks; more than this needs privileges
_READ_BYTES = 1 << 16
_CAUSE = re.compile(r"^(?:\[rank \d+\] )?error: ")
_RESTART = re.compile(r"^restart \d+")  # the job continues after the errors before it
_KIND = re.compile(r"error: [A-Z][A-Z_]+: ")
_MOST_LINES = 20  # of a cause
_MOST_WAITING = 1000  # texts that are not printed yet
# Scripts that do not use this package print only a traceback, and torch then prints a report with the exit code of the rank.
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): ")
_REPORT = re.compile(r"^Root Cause \(first observed failure\)")
_EXIT_CODE = re.compile(r"^\s+exitcode\s*: (-?\d+) \(pid")


# ---- on a node


class RankOutputs:
    """A FIFO per local rank, or a terminal for rank 0, in a folder of this node alone. They outlive a restart of the ranks."""

    def __init__(self, folder: Path, local_ranks: int, terminal_size: tuple[int, int] | None = None):
        self.folder = folder
        self._ranks: dict[int, int | None] = {}  # descriptor -> local rank
        self._terminal = self._pipe = -1  # the sides to which rank 0 and the launcher write
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            for rank in range(local_ranks):
                path = folder / f"rank{rank}"
                path.unlink(missing_ok=True)
                if rank or terminal_size is None or not self._open_terminal(path, terminal_size):
                    os.mkfifo(path, 0o600)
                    # A FIFO that has no writer is always readable, at its end. Opened for both, it has one.
                    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                    self._ranks[descriptor] = rank
                    with contextlib.suppress(OSError, AttributeError):  # the limit of this user is reached; not on macOS
                        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except BaseException:
            self.close()
            raise

    def _open_terminal(self, path: Path, size: tuple[int, int]) -> bool:
        try:
            ours, theirs = os.openpty()
        except OSError:
            return False
        self._ranks[ours], self._terminal = 0, theirs  # a terminal whose other side is closed returns errors
        os.set_blocking(ours, False)
        tty.setraw(theirs)  # bytes arrive unchanged; the user's terminal translates the ends of lines
        self.resize(size)
        path.symlink_to(os.ttyname(theirs))
        return True

    def open_pipe(self) -> int:
        """Return a descriptor to which the launcher writes, which is read as rank None. It stays open, so there is no end."""
        ours, self._pipe = os.pipe()
        os.set_blocking(ours, False)
        self._ranks[ours] = None
        return self._pipe

    @property
    def has_terminal(self) -> bool:
        return self._terminal >= 0

    def resize(self, size: tuple[int, int]) -> None:
        if self.has_terminal:
            columns, lines = size
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def filenos(self) -> list[int]:
        return list(self._ranks)

    def read(self, ready: Iterable[int] | None = None) -> Iterator[tuple[int | None, bytes]]:
        for descriptor in self.filenos() if ready is None else ready:
            with contextlib.suppress(BlockingIOError):  # nothing is waited for
                if data := os.read(descriptor, _READ_BYTES):
                    yield self._ranks[descriptor], data

    def drain(self) -> Iterator[tuple[int | None, bytes]]:
        while found := list(self.read()):
            yield from found

    def close(self) -> None:
        for descriptor in [*self._ranks, *(one for one in (self._terminal, self._pipe) if one >= 0)]:
            os.close(descriptor)
        self._ranks, self._terminal, self._pipe = {}, -1, -1
        with contextlib.suppress(OSError):
            for path in self.folder.glob("rank*"):
                path.unlink()
            self.folder.rmdir()


class Lines:
    """Collects one stream into lines, without the live panel. A progress bar, which returns to its start, is one line."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may arrive in two parts
        self.rest = self.frame = ""

    def add(self, data: bytes) -> list[str]:
        text, self.frame = split_incomplete_frame(self.frame + self.decoder.decode(data))
        *lines, self.rest = (self.rest + without_frames(text)).split("\n")
        if len(self.rest) > 1 << 16:  # output without line ends must not use memory without a limit
            lines, self.rest = [*lines, self.rest], ""
        if "\r" in self.rest[:-1]:
            self.rest = self.rest[self.rest.rindex("\r", 0, -1) :]
        return [visible(line) for line in lines]

    def end(self) -> list[str]:
        rest, self.rest = self.rest, ""
        return [visible(rest)] if rest.strip() else []


def visible(line: str) -> str:
    """Return what a terminal shows after this line, without colors: a carriage return starts the line again."""
    return without_controls(line).rstrip("\r").rpartition("\r")[2]


# ---- on the launching machine


class Console:
    """Prints above the main rank's panel, in a thread: a terminal or pager may block, and heartbeats must go on."""

    def __init__(self, stream: TextIO | None = None, ends_with_reader: bool = False):
        self.stream = stream or sys.stdout
        self.erase = ""  # of the panel of the main rank
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a stream without a descriptor
            self.erase = erase_before_line(self.stream.fileno())
        self.frame = ""  # the part of a frame that has arrived
        self.ends_with_reader = ends_with_reader  # raise BrokenPipeError, as other programs do
        self.at_line_start = True
        self.writer = BackgroundWriter(self._write_now, "console")
        self.writer.start()
        self.causes: list[tuple[str, list[str]]] = []  # host, lines; the first cause comes first
        self._open: dict[tuple[str, int | None], list[str]] = {}  # a cause whose further lines may follow
        self.exceptions: dict[str, str] = {}  # host -> the last exception before the report of torch
        self.exit_codes: dict[str, int | None] = {}  # host -> exit code in the report of torch; None: the report has begun

    def show(self, host: str, rank: int | None, lines: list[str]) -> None:
        prefix = "" if rank == 0 else f"[{host}] " if rank is None else f"[{host} rank {rank}] "
        for line in lines:
            self._remember(host, rank, line)
            self._print(f"{prefix}{line}\n")

    def show_terminal(self, host: str, text: str, lines: list[str]) -> None:
        for line in lines:
            self._remember(host, 0, line)
        # A frame arrives in several parts. No other line may be printed between them.
        text, self.frame = split_incomplete_frame(self.frame + text)
        self._write(text)
        if outside := without_controls(text):
            self.at_line_start = outside.endswith(("\n", "\r"))

    def note(self, text: str) -> None:
        self._print(f"accel-ddp: {text}\n")

    def first_cause(self, host: str = "") -> str:
        """Return the first error, a diagnosis preferred, else the last exception of `host`, which ended first."""
        named = [cause for cause in self.causes if _KIND.search(cause[1][0])] or self.causes
        for where, lines in named:
            return f"[{where}] " + "\n".join(lines)
        return f"[{host}] {self.exceptions[host]}" if host in self.exceptions else ""

    def _remember(self, host: str, rank: int | None, line: str) -> None:
        key = (host, rank)
        if _RESTART.match(line):
            self.causes.clear(), self._open.clear(), self.exceptions.clear(), self.exit_codes.clear()
        if _EXCEPTION.match(line) and "ChildFailedError" not in line and host not in self.exit_codes:
            self.exceptions[host] = line
        elif _REPORT.match(line):
            self.exit_codes.setdefault(host)
        elif self.exit_codes.get(host, 0) is None and (found := _EXIT_CODE.match(line)):
            self.exit_codes[host] = int(found[1]) if int(found[1]) >= 0 else 128 - int(found[1])
        if _CAUSE.match(line):
            if all(line != lines[0] for _, lines in self.causes):
                self._open[key] = [line]
                self.causes.append((host, self._open[key]))
            else:
                self._open.pop(key, None)
        elif key in self._open:
            if line.strip() and len(self._open[key]) < _MOST_LINES and line[:1] in " \tEW":
                self._open[key].append(line)
            else:
                del self._open[key]

    def _print(self, text: str) -> None:
        self._write(f"{self.erase}{text}" if self.at_line_start else f"\n{self.erase}{text}")
        self.at_line_start = True

    def _write(self, text: str) -> None:
        if self.writer.failure and self.ends_with_reader:
            raise self.writer.failure
        self.writer.put(text)

    def _write_now(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()  # an OSError here: nobody reads the output any more; the logs have it

    async def wait_until_printed(self, most: int = 0) -> None:
        while self.writer.num_unwritten > most:
            await asyncio.sleep(0.01)

    async def wait_for_room(self) -> None:
        """Wait while much is left to print. Call it before more output is received from a node."""
        await self.wait_until_printed(_MOST_WAITING)
