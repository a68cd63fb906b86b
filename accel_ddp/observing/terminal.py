"""Writes to a terminal: lines, and a panel below them. A terminal that is not read never blocks the caller."""

import contextlib
import os
import re
import select
import threading
import time
from collections.abc import Sequence
from typing import Any

from accel_ddp.environment.terminal import BEGIN_FRAME, END_FRAME, ERASE_BELOW
from accel_ddp.records.redaction import redact

_MOST_WAITING = 1 << 20  # bytes that a terminal has not taken yet
_DROPPED = b"\n(some output is missing here, because the terminal did not take it in time)\n"
_INDEX, _SAVE, _RESTORE, _ERASE_LINE = "\x1bD", "\x1b7", "\x1b8", "\x1b[K"
# Sequences that move the cursor or erase. Colours end with `m` and stay.
_MOVES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-ln-~]|[78DEM])")
# What tqdm writes: "Map:  45%|####5     | 900/2000 [00:01<00:02, 640.54 examples/s]" or "12it [00:01, 9.8it/s]".
_TQDM = re.compile(r"\d+%\||\d\S* \[\d\d:\d\d")


class Terminal:
    """A terminal with a panel of some rows below the cursor. All methods can be called from any thread."""

    def __init__(self, descriptor: int, encoding: str = "utf-8"):
        """Open the terminal again. Each call of `open` has flags of its own, so that other writers still wait as they expect."""
        flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self.descriptor = os.open(os.ttyname(descriptor), flags)
        except OSError:  # a terminal without a name, as in some containers
            self.descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
        self.encoding = encoding
        self.bar = ""  # the progress bar of a library, which the panel shows
        self.pid = os.getpid()
        self.lock = threading.RLock()  # a signal handler may print while its own thread prints
        self._frame = b""
        self._waiting = bytearray()

    def size(self) -> tuple[int, int]:
        """Return columns and lines."""
        with contextlib.suppress(OSError):
            columns, lines = os.get_terminal_size(self.descriptor)
            if columns and lines:
                return columns, lines
        return 80, 24

    def draw(self, rows: Sequence[str]) -> None:
        """Show these rows below the cursor, instead of those before. Without rows, the panel disappears."""
        text = ""
        if rows:
            # Moving down by `index` keeps the column and scrolls if necessary. Then there is room, and the saved place stays valid.
            room = f"{_ERASE_LINE}{_INDEX * len(rows)}\x1b[{len(rows)}A{_SAVE}"
            text = room + "".join(f"\r\n{row}\x1b[0m{_ERASE_LINE}" for row in rows) + ERASE_BELOW + _RESTORE
        frame = f"{BEGIN_FRAME}{text or ERASE_BELOW}{END_FRAME}".encode(self.encoding, "replace")
        with self.lock:
            self._frame = frame if rows else b""
            if self._drain():  # a frame that cannot be shown now is not needed later
                self._waiting += frame
                self._drain()

    def print(self, text: str) -> None:
        """Print a text above the panel. A line may be printed in several parts."""
        if not text:
            return
        with self.lock:
            is_read = self._drain()
            self._waiting += (ERASE_BELOW + _MOVES.sub("", text)).encode(self.encoding, "replace")
            if is_read:  # otherwise the next frame follows when the terminal takes it
                self._waiting += self._frame
                self._drain()
            elif len(self._waiting) > _MOST_WAITING:
                self._drop_middle()

    def write_stream(self, text: str) -> None:
        """Print what a program has written to its stdout or stderr. A progress bar becomes `bar` instead of a line."""
        with self.lock:
            if text.startswith("\r") and "\n" not in text:
                self.bar = next((part.strip() for part in reversed(_MOVES.sub("", text).split("\r")) if part.strip()), "")
            elif self.bar and not _MOVES.sub("", text).strip():
                bar, self.bar = self.bar, self.bar if "\n" not in text else ""
                if "\n" in text and not _TQDM.search(bar):  # the last state of a line that the program itself has updated
                    self.print(f"{bar}\n")
            else:
                self.print(text)

    def flush(self, seconds: float = 0.0) -> bool:
        """Wait until the terminal has taken everything, at most `seconds`. Return whether it has."""
        deadline = time.monotonic() + seconds
        while not self._drain():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with contextlib.suppress(OSError, ValueError):
                select.select([], [self.descriptor], [], min(left, 0.1))
        return True

    def close(self, seconds: float) -> None:
        """Remove the panel, and wait at most `seconds` until the terminal has taken everything."""
        self.draw([])
        self.flush(seconds)
        with self.lock:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def _drop_middle(self) -> None:
        """Keep the oldest and the newest lines of what is waiting: the beginning of an error, and the end of the run."""
        end = self._waiting.find(b"\n", _MOST_WAITING // 4) + 1
        begin = self._waiting.rfind(b"\n", 0, -_MOST_WAITING // 4) + 1
        if end < begin:
            self._waiting[end:begin] = _DROPPED

    def _drain(self) -> bool:
        """Write what is waiting, as far as the terminal takes it. Return whether nothing is left."""
        with self.lock:
            try:
                while self._waiting:
                    del self._waiting[: os.write(self.descriptor, bytes(self._waiting[: 1 << 16]))]
            except BlockingIOError:
                return False
            except OSError:  # the terminal is gone, or closed
                self._waiting.clear()
            return True


class TerminalStream:
    """Replaces stdout or stderr while there is a panel. As in Python's own, a text appears when its line ends or at `flush`.

    A data worker, which is forked, writes to the stream itself.
    """

    def __init__(self, terminal: Terminal, stream: Any):
        self.terminal, self.stream, self.is_open, self._line = terminal, stream, True, ""

    @property
    def _is_used(self) -> bool:
        return self.is_open and os.getpid() == self.terminal.pid

    def write(self, text: str) -> int:
        if self._is_used:
            with self.terminal.lock:
                self._line += text
                if "\n" in text or "\r" in text:
                    self.flush()
        else:
            self.stream.write(ERASE_BELOW + text if self.is_open and text != "\n" else text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self._is_used:
            return self.stream.flush()
        with self.terminal.lock:
            text, self._line = self._line, ""
            self.terminal.write_stream(redact(text))
        self.stream.flush()  # what was written to its `buffer`

    def close_panel(self) -> None:
        """Write to the stream itself from now on."""
        self.flush()
        self.is_open = False

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
