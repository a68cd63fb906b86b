"""Watches the output folder of a run: whether it still exists, and whether its disk answers.

A call to a disk that does not answer never returns. The folder is therefore looked at by a thread that nothing waits for, and
written to by a child process.
"""

import contextlib
import os
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
        self.is_reported = False
        self.probe = 0  # pid of the child that writes
        self.probed_at = 0.0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        existed = False
        while True:
            exists = self.path.is_dir()
            self.is_missing = existed and not exists
            existed = existed or exists
            time.sleep(LOOK_SECONDS)

    def events(self) -> list[Event]:
        """Return what changed since the last call."""
        if self.is_missing == self.is_reported:
            return []
        self.is_reported = self.is_missing
        if self.is_missing:
            text = (
                f"the output folder {self.path} was removed or is no longer mounted. Its checkpoints are gone. Training continues, "
                "and the next save creates it again."
            )
            return [Event(WARNING, "OUTPUT_REMOVED", text)]
        return [Event(INFO, "OUTPUT_REMOVED", f"the output folder {self.path} exists again.")]

    def is_hung(self, is_suspected: bool) -> bool:
        """Return whether the disk does not answer. It is tried out only if a save takes long."""
        now = time.monotonic()
        if self.probe:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.probe, os.WNOHANG)[0] == 0:
                    return now - self.probed_at > ANSWER_SECONDS
            self.probe = 0
        if is_suspected and now - self.probed_at > ANSWER_SECONDS:
            self.probed_at = now
            self.probe = os.fork()
            if self.probe == 0:
                self._write()
        return False

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
