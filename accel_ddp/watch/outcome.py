"""What a node remembers between two attempts of a launcher with `--max_restarts`.

The ranks of an attempt are gone when the launcher decides whether to start them again, and a main node that was lost has lost its
store. Therefore each node keeps small files in a private folder of the user in the temporary directory: the outcome of each
attempt, and the run (its output folder, and the steps at which earlier attempts failed). Their key is the launcher, that is, its
pid and its start time, because pids are used again.
"""

import contextlib
import json
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

from accel_ddp.errors import INTERRUPTED, STOPPED, UNSAVED, USER_ERROR

IS_RESTART = "ACCEL_DDP_IS_RESTART"  # the launcher sets this variable for ranks that continue an earlier attempt of any node
ROUND = "ACCEL_DDP_ROUND"  # the launcher sets the number of the attempt, which torch's agents do not always count
MOST_FAILURES_OF_A_STEP = 3


def launcher_pid() -> int:
    """Return the pid of the launcher that started this rank, or 0 if there is none that could start the rank again."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0


def current_round() -> int:
    """Return the number of the attempt of this node's launcher, from 0."""
    return int(os.environ.get(ROUND) or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def write_outcome(launcher_pid: int, outcome: dict[str, Any]) -> None:
    """Store how the current attempt ended on this node: kind, text, exit_code, step (or None), rank, host and time.

    The first outcome of an attempt stays: the launcher ends the other ranks after a failure, and their outcomes follow from it.
    The launcher may start the next attempt before the monitor of the last one has found out why a rank has died. Therefore each
    attempt has its own file.
    """
    if read_outcome(launcher_pid, current_round()) is None:
        _write(launcher_pid, f"outcome{current_round()}", outcome)


def read_outcome(launcher_pid: int, number: int) -> dict[str, Any] | None:
    """Return what `write_outcome` has stored for an attempt of this launcher, or None."""
    return _read(launcher_pid, f"outcome{number}")


def forget_outcome(launcher_pid: int, number: int) -> None:
    """Remove the outcome of an attempt."""
    with contextlib.suppress(OSError):
        if path := _path(launcher_pid, f"outcome{number}"):
            path.unlink()


def remember(launcher_pid: int, **values: Any) -> None:
    """Store facts about the run, besides those that are already stored for this launcher."""
    _write(launcher_pid, "run", {**recall(launcher_pid), **values})


def recall(launcher_pid: int) -> dict[str, Any]:
    """Return what `remember` has stored for this launcher."""
    return _read(launcher_pid, "run") or {}


def forget(launcher_pid: int) -> None:
    """Remove what is stored for this launcher, and the files of launchers that are gone."""
    for path in folder.glob("*.json") if (folder := _folder()) else []:
        pid, _, rest = path.name.partition("-")
        if pid.isdigit() and (int(pid) == launcher_pid or rest.split(".")[0] != _start_time(int(pid))):
            with contextlib.suppress(OSError):
                path.unlink()


def why_not_restarted(outcome: dict[str, Any] | None, failed_steps: list[int | None]) -> str:
    """Return why an attempt with this outcome must be the last one, or "" if it may be followed by another one.

    `failed_steps` are the steps at which the attempts before it failed.
    """
    if outcome is None:
        return ""
    code, step = outcome.get("exit_code"), outcome.get("step")
    if code in (STOPPED, INTERRUPTED, UNSAVED):
        return "a stop was requested, or the run is complete"
    if code == USER_ERROR:
        return "the same command would fail again"
    if step is not None and [*failed_steps, step][-MOST_FAILURES_OF_A_STEP:] == [step] * MOST_FAILURES_OF_A_STEP:
        return f"step {step} has failed {MOST_FAILURES_OF_A_STEP} times"
    return ""


def _start_time(pid: int) -> str:
    """Return the start time of a process in ticks since the boot, or "" if there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    if not Path("/proc/self/stat").exists():  # not Linux
        import psutil

        with contextlib.suppress(psutil.Error):
            return str(int(psutil.Process(pid).create_time()))
    return ""


def _folder() -> Path | None:
    """Return the private folder of this user, or None if it cannot be made or belongs to somebody else."""
    folder = Path(tempfile.gettempdir(), f"accel_ddp-{os.getuid()}-{socket.gethostname()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    return folder if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() else None


def _path(launcher_pid: int, what: str) -> Path | None:
    folder, started = _folder(), _start_time(launcher_pid) if launcher_pid else ""
    return folder / f"{launcher_pid}-{started}.{what}.json" if folder and started else None


def _write(launcher_pid: int, what: str, value: dict[str, Any]) -> None:
    if path := _path(launcher_pid, what):
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # a full disk must not end a run, which only is not continued by itself then
            draft.write_text(json.dumps(value))
            draft.replace(path)


def _read(launcher_pid: int, what: str) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        if (path := _path(launcher_pid, what)) and isinstance(value := json.loads(path.read_text()), dict):
            return value
    return None
