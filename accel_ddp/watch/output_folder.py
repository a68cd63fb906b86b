"""Watches the output folder of a run: whether it still exists, and whether its disk answers.

A call to a disk that does not answer never returns. The folder is therefore looked at by a thread that nothing waits for, and
written to by a child process.
"""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from accel_ddp.watch.diagnosis import INFO, WARNING, Event

LOOK_SECONDS = 2.0
ANSWER_SECONDS = 4.0  # a disk that has not written a few bytes after this time does not answer


class OutputFolder:
    """The output folder, as seen from the monitor of the main node."""

    def __init__(self, path: str):
        self.path = Path(path)
        self.is_missing = False
        self.removals = 0  # also counts a folder that was created again before this process could see that it was missing
        self.is_reported = False
        self.reported_removals = 0
        self.probe = 0  # pid of the child that writes
        self.probed_at = 0.0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        held = -1  # an open folder, whose inode number is not used for another one
        while True:
            if held >= 0 and not self._is_same(held):
                os.close(held)
                held = -1
                self.removals += 1
            if held < 0:
                with contextlib.suppress(OSError):
                    held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            self.is_missing = held < 0 and self.removals > 0
            time.sleep(LOOK_SECONDS)

    def _is_same(self, held: int) -> bool:
        try:
            return os.path.samestat(os.fstat(held), os.stat(self.path))
        except OSError:
            return False

    def events(self) -> list[Event]:
        """Return what changed since the last call."""
        is_missing, removals = self.is_missing, self.removals
        if (is_missing, removals) == (self.is_reported, self.reported_removals):
            return []
        is_new, self.is_reported, self.reported_removals = removals != self.reported_removals, is_missing, removals
        if is_new:
            created = "creates" if is_missing else "has created"
            text = (
                f"the output folder {self.path} was removed or is no longer mounted. Its checkpoints are gone. Training continues, "
                f"and the {'next' if is_missing else 'last'} save {created} it again."
            )
            return [Event(WARNING, "OUTPUT_REMOVED", text)]
        return [Event(INFO, "OUTPUT_REMOVED", f"the output folder {self.path} exists again.")]

    def seconds_without_answer(self, is_suspected: bool) -> float:
        """Return for how long the disk has not answered, or 0. The disk is tried out only if a save takes long."""
        now = time.monotonic()
        if self.probe:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.probe, os.WNOHANG)[0] == 0:
                    seconds = now - self.probed_at
                    return seconds if seconds > ANSWER_SECONDS else 0.0
            self.probe = 0
        if is_suspected and now - self.probed_at > ANSWER_SECONDS:
            self.probed_at = now
            self.probe = os.fork()
            if self.probe == 0:
                self._write()
        return 0.0

    def close(self) -> None:
        """Kill the child that writes. A disk that does not answer blocks it, and its end is not awaited."""
        if self.probe:
            with contextlib.suppress(OSError):
                os.kill(self.probe, signal.SIGKILL)

    def _write(self) -> None:
        """Write and remove a small file. Runs in the child process."""
        with contextlib.suppress(OSError):
            path = self.path / f".disk_check_{os.getpid()}"
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
            os.write(descriptor, b"x")
            os.fsync(descriptor)
            os.close(descriptor)
            os.unlink(path)
        os._exit(0)
