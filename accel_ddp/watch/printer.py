"""Prints the lines of a monitor."""

import contextlib
import os
import queue
import threading

from accel_ddp.environment.terminal import erase_before_line


class Printer:
    """Prints lines from a thread, because a terminal or a pipe that is not read would stop the monitor."""

    def __init__(self) -> None:
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.erase = erase_before_line(2)  # of the panel that the main rank may show in the same terminal
        self.thread = threading.Thread(target=self._print, daemon=True)
        self.thread.start()

    def print(self, text: str) -> None:
        self.lines.put(text)

    def _print(self) -> None:
        while (text := self.lines.get()) is not None:
            with contextlib.suppress(OSError):
                os.write(2, (self.erase + text + "\n").encode(errors="replace"))

    def close(self) -> None:
        """Wait a moment until everything is printed."""
        self.lines.put(None)
        self.thread.join(2)
