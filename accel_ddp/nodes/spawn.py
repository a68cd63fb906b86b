"""What a process that starts ranks needs: an environment without a launcher, variables of a rank, signals, and the end of orphans."""

import contextlib
import ctypes
import functools
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from accel_ddp.nodes.launcher import MPI_VARIABLES

# Words that run a module. A random.py in the working directory is not imported; Python 3.10 lacks the option for it.
MODULE = ["-P", "-m"] if sys.version_info >= (3, 11) else ["-m"]

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_OF_TORCHRUN = ("TORCHELASTIC_", "PET_")  # torchrun reads its own options from PET_ variables
_PR_SET_PDEATHSIG = 1
_MOST_FILES = 1 << 20  # some systems have a hard limit of 2^30, and programs that close every possible file
WAIT_SECONDS = 10.0  # for a program that another thread is starting; milliseconds, unless the file system of the program hangs
# Loaded here, because loading takes a lock, which must not be taken between fork and exec.
_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None


def clean_environment() -> dict[str, str]:
    removed = {*RANK_VARIABLES, *MPI_VARIABLES}
    return {name: value for name, value in os.environ.items() if name not in removed and not name.startswith(_OF_TORCHRUN)}


def rank_environment(ranks_of_nodes: list[int], node: int, local_rank: int, address: str, port: int) -> dict[str, str]:
    values = (
        sum(ranks_of_nodes[:node]) + local_rank, sum(ranks_of_nodes), local_rank, ranks_of_nodes[node], node, address, port
    )  # fmt: skip
    return dict(zip(RANK_VARIABLES, map(str, values), strict=True))


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Linux sends this signal when the parent ends, not if it has ended before. May be called between fork and exec."""
    if _LIBRARY is not None:
        _LIBRARY.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def kill_tree(pid: int) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def is_pending(pid: int, number: int, masks: str = "SigPnd|ShdPnd") -> bool:
    """Return whether a signal was sent to a process that has not acted on it, or is in other `masks` of /proc/PID/status."""
    with contextlib.suppress(OSError):
        found = re.findall(rf"^(?:{masks}):\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return any(int(mask, 16) >> (number - 1) & 1 for mask in found)
    return False


def raise_file_limit() -> None:
    """Let this process and its children open as many files as the hard limit allows: each connection, also a stranger's, is one."""
    with contextlib.suppress(ValueError, OSError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def keep_forks_apart_from_starts() -> None:
    """A worker forked inside another thread's `Popen` holds its pipe, and `Popen` waits for its exit. Tested: Python 3.11."""
    plain = subprocess.Popen.__init__
    if hasattr(plain, "__wrapped__"):  # done by an earlier call
        return
    lock, is_held = threading.RLock(), False  # a start with `preexec_fn` is a fork too

    @functools.wraps(plain)
    def start(*args: Any, **kwargs: Any) -> None:
        with lock:
            plain(*args, **kwargs)

    def before_fork() -> None:
        nonlocal is_held
        is_held = lock.acquire(timeout=WAIT_SECONDS)

    def after_in_child() -> None:
        nonlocal lock
        lock = threading.RLock()  # the thread that may hold the other one does not exist here

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]
    release = lambda: lock.release() if is_held else None
    os.register_at_fork(before=before_fork, after_in_parent=release, after_in_child=after_in_child)
