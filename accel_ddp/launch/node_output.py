"""Receives the output of each rank of a node separately. The other side is `accel_ddp.nodes.terminal`."""

import codecs
import contextlib
import fcntl
import os
import struct
import termios
import tty
from collections.abc import Iterable, Iterator
from pathlib import Path

from accel_ddp.nodes.terminal import split_incomplete_frame, without_controls, without_frames

_PIPE_BYTES = 1 << 20  # a guard that is busy does not delay the ranks; more than this needs privileges
_READ_BYTES = 1 << 16


class RankOutputs:
    """One FIFO for each local rank, in a folder that ACCEL_DDP_OUTPUT names. They outlive a restart of the ranks.

    With a terminal size (columns, lines), rank 0 writes to a terminal of this size instead, and therefore shows its panel.
    The folder must be local to the node, because nodes that share a folder would overwrite each other's FIFOs.
    """

    def __init__(self, folder: Path, local_ranks: int, terminal_size: tuple[int, int] | None = None):
        self.folder = folder
        self._ranks: dict[int, int] = {}  # descriptor -> local rank
        self._terminal = -1  # the ranks' side
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
        """Make a terminal for rank 0 and return whether there is one. Some containers have none."""
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

    @property
    def has_terminal(self) -> bool:
        """Whether rank 0 writes to a terminal."""
        return self._terminal >= 0

    def resize(self, size: tuple[int, int]) -> None:
        """Set the size of the terminal of rank 0, if it has one."""
        if self.has_terminal:
            columns, lines = size
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def filenos(self) -> list[int]:
        """Return the descriptors to wait for."""
        return list(self._ranks)

    def read(self, ready: Iterable[int] | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield local ranks and what they have printed, at most 64 KiB from each of the descriptors `ready` (default: all).

        Descriptors of others are ignored, so that the result of `select` can be given. Nothing is waited for.
        """
        for descriptor in self.filenos() if ready is None else ready:
            if descriptor in self._ranks:
                with contextlib.suppress(BlockingIOError):
                    if data := os.read(descriptor, _READ_BYTES):
                        yield self._ranks[descriptor], data

    def drain(self) -> Iterator[tuple[int, bytes]]:
        """Yield everything that is still unread, after the ranks have ended."""
        while found := list(self.read()):
            yield from found

    def close(self) -> None:
        """Remove the folder. Ranks that are left can still print, without an effect."""
        for descriptor in [*self._ranks, *([self._terminal] if self.has_terminal else [])]:
            os.close(descriptor)
        self._ranks, self._terminal = {}, -1
        with contextlib.suppress(OSError):
            for path in self.folder.glob("rank*"):
                path.unlink()
            self.folder.rmdir()


# Splits the output of a process into lines. A progress bar, which returns to the start of its line, counts as one line.
#
# The live panel of the main rank is not part of any line.


class Lines:
    """Collects bytes of one stream and returns complete lines."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may arrive in two parts
        self.rest = self.frame = ""

    def add(self, data: bytes) -> list[str]:
        """Return the lines that are complete now, each without its end."""
        text, self.frame = split_incomplete_frame(self.frame + self.decoder.decode(data))
        *lines, self.rest = (self.rest + without_frames(text)).split("\n")
        if len(self.rest) > 1 << 16:  # output without line ends must not use memory without a limit
            lines, self.rest = [*lines, self.rest], ""
        if "\r" in self.rest[:-1]:
            self.rest = self.rest[self.rest.rindex("\r", 0, -1) :]
        return [visible(line) for line in lines]

    def end(self) -> list[str]:
        """Return what is left after the end of the stream."""
        rest, self.rest = self.rest, ""
        return [visible(rest)] if rest.strip() else []


def visible(line: str) -> str:
    """Return what a terminal shows after this line, without colours: a carriage return starts the line again."""
    return without_controls(line).rstrip("\r").rpartition("\r")[2]
