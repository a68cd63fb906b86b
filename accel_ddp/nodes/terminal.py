"""The output of a rank: how processes share a terminal with the live panel, and the connection to the guard of the node.

The panel of the main rank is below the cursor. Its process draws it with one write, between BEGIN_FRAME and END_FRAME, and returns
the cursor above it, or behind an incomplete line. So the lines of monitors, other ranks and launchers are above the panel, and the
next frame is drawn below them. ERASE_BELOW before a line removes the panel. No terminal mode is changed, so a killed process leaves
only its last panel, which the next line of a monitor removes.

Under `accel-ddp launch`, `connect_output` lets a rank write to the guard of its node, which receives the lines of each rank separately.
This module uses the standard library only.
"""

import contextlib
import functools
import io
import multiprocessing
import os
import re
import select
import sys
from typing import Any

ERASE_BELOW = "\x1b[J"
# Terminals that support synchronized output show a frame at once. Others ignore it. It also marks what does not belong into a log.
BEGIN_FRAME, END_FRAME = "\x1b[?2026h", "\x1b[?2026l"

VARIABLE = "ACCEL_DDP_OUTPUT"  # a folder with one FIFO, or one link to a terminal, for each local rank
_READ_SECONDS = 10  # for the guard to take output, before it is dropped
_DROPPED = b"\n(some output is missing here, because it was not read in time)\n"
_FRAME = re.compile(f"{re.escape(BEGIN_FRAME)}.*?{re.escape(END_FRAME)}", re.DOTALL)
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\^_78=>])")


def can_draw(descriptor: int) -> bool:
    """Return whether this is a terminal that can move its cursor. `!` in a notebook has a terminal that cannot."""
    is_drawn = os.environ.get("TERM", "") not in ("", "dumb", "unknown") and "JPY_PARENT_PID" not in os.environ
    return is_drawn and os.isatty(descriptor)


def in_notebook() -> bool:
    """Return whether this process is a kernel of Jupyter or an IPython shell, which must outlive a run. Its child processes are not."""
    return multiprocessing.parent_process() is None and _has_shell()


@functools.cache  # ipdb opens a shell inside a program, which is no notebook after that either
def _has_shell() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def erase_before_line(descriptor: int) -> str:
    """Return what to write before a line that another process than that of the panel prints. "" if this is no terminal."""
    return ERASE_BELOW if can_draw(descriptor) else ""


def split_incomplete_frame(text: str) -> tuple[str, str]:
    at = text.rfind(BEGIN_FRAME)
    if at >= 0 and END_FRAME not in text[at:]:
        return text[:at], text[at:]
    for length in range(min(len(BEGIN_FRAME) - 1, len(text)), 0, -1):  # the mark itself may arrive in two parts
        if BEGIN_FRAME.startswith(text[-length:]):
            return text[:-length], text[-length:]
    return text, ""


def without_frames(text: str) -> str:
    return _FRAME.sub("", text)


def without_controls(text: str) -> str:
    return _CONTROL.sub("", without_frames(text))


class SharedStream:
    def __init__(self, stream: Any):
        self.stream, self.at_line_start = stream, True

    def write(self, text: str) -> int:
        if text:
            self.stream.write(ERASE_BELOW + text if self.at_line_start else text)
            self.at_line_start = text.endswith("\n")
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def connect_output() -> bool:
    """Let all that this rank prints go to the guard, if there is one that reads. Only the first call has an effect."""
    folder = os.environ.pop(VARIABLE, "")  # a child process inherits the streams, which it may also have redirected
    if not folder:
        return False
    path = os.path.join(folder, f"rank{os.environ.get('LOCAL_RANK') or 0}")
    flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK  # NONBLOCK: an error instead of waiting for a reader
    try:
        # Each call of `open` has flags of its own. Those of 1 and 2 are inherited by other programs, which expect to wait.
        own, inherited = os.open(path, flags), os.open(path, flags)
    except OSError:
        return False
    os.set_blocking(inherited, True)
    raw = RankStream(own)
    for descriptor, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        before = getattr(sys, name)
        with contextlib.suppress(AttributeError, OSError, ValueError):  # it may be closed, or replaced by something else
            before.flush()
        os.dup2(inherited, descriptor)
        encoding, errors = getattr(before, "encoding", None) or "utf-8", getattr(before, "errors", None) or errors
        text = io.TextIOWrapper(raw, encoding, errors, line_buffering=True)  # type: ignore[type-var]  # as Python's own with -u
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    os.close(inherited)
    return True


class RankStream(io.RawIOBase):
    """Never fails or waits for long, which would stop all ranks: what the guard does not take in seconds is dropped."""

    def __init__(self, descriptor: int):
        self.descriptor, self.is_dropping = descriptor, False

    def write(self, data: Any) -> int:
        view = memoryview(_DROPPED + bytes(data) if self.is_dropping else data).cast("B")
        while view:
            try:
                view = view[os.write(self.descriptor, view) :]
                self.is_dropping = False
            except BlockingIOError:
                # Waiting is not repeated for each line, because a rank that waits for every line would be as bad as one that hangs.
                if self.is_dropping or not select.select([], [self.descriptor], [], _READ_SECONDS)[1]:
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
