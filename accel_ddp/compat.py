"""Keeps forks of this process apart from the programs that other threads start.

`subprocess.Popen` waits until every copy of the write end of a pipe is closed. A data worker that is forked while another thread is
inside of `Popen` inherits a copy, and keeps it until it ends. The thread, for example that of a tracker, would wait for as long.
"""

import functools
import os
import subprocess
import threading
from typing import Any

WAIT_SECONDS = 10.0  # for a program that another thread is starting; milliseconds, unless the file system of the program hangs


class _Gate:
    """A lock that a thread holds while it starts a program, and while it forks."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a start with `preexec_fn` is a fork too
        self.is_held = False

    def before_fork(self) -> None:
        self.is_held = self.lock.acquire(timeout=WAIT_SECONDS)

    def after_in_parent(self) -> None:
        if self.is_held:
            self.lock.release()

    def after_in_child(self) -> None:
        self.lock = threading.RLock()  # the thread that may hold the other one does not exist here


def keep_forks_apart_from_starts() -> None:
    """Let forks wait for programs that other threads are starting, at most WAIT_SECONDS, and the other way round."""
    plain = subprocess.Popen.__init__
    if hasattr(plain, "__wrapped__"):  # done by an earlier call
        return
    gate = _Gate()

    @functools.wraps(plain)
    def start(*args: Any, **kwargs: Any) -> None:
        with gate.lock:
            plain(*args, **kwargs)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]
    os.register_at_fork(before=gate.before_fork, after_in_parent=gate.after_in_parent, after_in_child=gate.after_in_child)
