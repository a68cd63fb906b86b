"""A terminal as a user has it: a pseudo-terminal, and an emulator (pyte) that shows what is on its screen."""

import contextlib
import fcntl
import os
import re
import select
import struct
import termios
import threading
import time

import pyte

from accel_ddp.nodes.terminal import BEGIN_FRAME, END_FRAME, without_controls


class UserTerminal:
    """Programs write to `descriptor`. A thread reads what they write, as the program of a terminal does."""

    def __init__(self, columns: int = 100, lines: int = 24):
        self.screen = pyte.HistoryScreen(columns, lines, history=5000)
        self.stream = pyte.ByteStream(self.screen)
        self.reader, self.descriptor = os.openpty()
        self.raw = b""
        self.lock = threading.Lock()
        self.reads = threading.Event()
        self.reads.set()
        self.is_closed = False
        self.emulates = True  # the emulator takes 10 s for a MB
        self.resize(columns, lines)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        while not self.is_closed:
            if self.reads.wait(0.1) and select.select([self.reader], [], [], 0.02)[0]:
                with contextlib.suppress(OSError), self.lock:
                    data = os.read(self.reader, 1 << 16)
                    self.raw += data
                    if self.emulates:
                        self.stream.feed(data)

    def resize(self, columns: int, lines: int) -> None:
        with self.lock:
            self.screen.resize(lines, columns)
            fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def rows(self) -> list[str]:
        """Return everything that a user can read, including what has left the screen at its top."""
        with self.lock:
            above = ["".join(row[x].data for x in range(self.screen.columns)) for row in self.screen.history.top]
            rows = [row.rstrip() for row in above + list(self.screen.display)]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    @property
    def text(self) -> str:
        return "\n".join(self.rows())

    @property
    def past(self) -> str:
        """Return everything that was ever written, without control sequences: also panels that later ones have replaced."""
        with self.lock:
            return without_controls(self.raw.decode(errors="replace").replace(BEGIN_FRAME, "\n").replace(END_FRAME, "\n"))

    def until(self, pattern: str, timeout: float = 180) -> str:
        """Wait until this was written. Return what matches."""
        deadline = time.monotonic() + timeout
        while not (found := re.search(pattern, self.past)):
            assert time.monotonic() < deadline, f"{pattern!r} is not shown:\n{self.text}"
            time.sleep(0.02)
        return found[0]

    def settle(self) -> "UserTerminal":
        """Wait until nothing is left to read."""
        while select.select([self.reader], [], [], 0.1)[0]:
            time.sleep(0.02)
        with self.lock:
            return self

    def close(self) -> None:
        self.is_closed = True
        self.reads.set()
        self.thread.join()
        os.close(self.reader)
        os.close(self.descriptor)
