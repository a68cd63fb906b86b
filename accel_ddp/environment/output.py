"""Connects the output of a rank to the guard of its node, which then receives the lines of each rank separately."""

import contextlib
import io
import os
import select
import sys
from typing import Any

VARIABLE = "ACCEL_DDP_OUTPUT"  # a folder with one FIFO, or one link to a terminal, for each local rank
_DROPPED = b"\n(some output is missing here, because it was not read in time)\n"


def connect_output() -> bool:
    """Let stdout and stderr of this rank, and of everything it starts, write to the guard. Return whether they do.

    Without a guard that reads, the streams stay as they are. Only the first call has an effect.
    """
    folder = os.environ.pop(VARIABLE, "")  # a child process inherits the streams, which it may also have redirected
    if not folder:
        return False
    path = os.path.join(folder, f"rank{os.environ.get('LOCAL_RANK') or 0}")
    flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK  # NONBLOCK: an error instead of waiting for a reader
    try:
        own = os.open(path, flags)
        try:
            # Each call of `open` has flags of its own. Those of 1 and 2 are inherited by other programs, which expect to wait.
            inherited = os.open(path, flags)
        except OSError:
            os.close(own)
            raise
    except OSError:
        return False
    os.set_blocking(inherited, True)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # it may be closed, or replaced by something else
            stream.flush()
    os.dup2(inherited, 1)
    os.dup2(inherited, 2)
    os.close(inherited)
    raw = RankStream(own)
    sys.stdout = sys.__stdout__ = _text(raw, sys.stdout, "strict")
    sys.stderr = sys.__stderr__ = _text(raw, sys.stderr, "backslashreplace")
    return True


def _text(raw: "RankStream", before: Any, errors: str) -> io.TextIOWrapper:
    encoding, errors = getattr(before, "encoding", None) or "utf-8", getattr(before, "errors", None) or errors
    return io.TextIOWrapper(raw, encoding, errors, line_buffering=True)  # type: ignore[type-var]  # as Python's own with -u


class RankStream(io.RawIOBase):
    """Writes to the guard, and never fails.

    A rank that waits in `print` stops all ranks of the job. Output that the guard has not taken after some seconds is therefore
    dropped, and so is all output after the guard has ended.
    """

    def __init__(self, descriptor: int, seconds: float = 10):
        self.descriptor, self.seconds = descriptor, seconds
        self.is_dropping = False

    def write(self, data: Any) -> int:
        view = memoryview(_DROPPED + bytes(data) if self.is_dropping else data).cast("B")
        while view:
            try:
                view = view[os.write(self.descriptor, view) :]
                self.is_dropping = False
            except BlockingIOError:
                # Waiting is not repeated for each line, because a rank that waits for every line would be as bad as one that hangs.
                if self.is_dropping or not select.select([], [self.descriptor], [], self.seconds)[1]:
                    self.is_dropping = True
                    break
            except OSError:  # the guard has ended
                break
        return memoryview(data).nbytes

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.descriptor

    def isatty(self) -> bool:
        return os.isatty(self.descriptor)
