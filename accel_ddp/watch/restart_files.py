"""Files of a node for the next attempt of a launcher with `--max_restarts`.

The ranks of an attempt are gone when the launcher decides whether to start them again, and a main node that was lost has lost its
store. Therefore each node stores small files in a private folder of the user in the temporary directory: the outcome of each
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
from accel_ddp.records.files import replace_file

IS_RESTART = "ACCEL_DDP_IS_RESTART"  # the launcher sets this variable for ranks that continue an earlier attempt of any node
ROUND = "ACCEL_DDP_ROUND"  # the launcher sets the number of the attempt, which torch's agents do not always count
LAUNCHER = "ACCEL_DDP_LAUNCHER"  # the launcher sets its pid, because a shell script may run between it and a rank
MOST_FAILURES_OF_A_STEP = 3


def launcher_pid(parent: int = 0) -> int:
    """Return the pid of a launcher that could start this rank (or, elsewhere, one whose parent is `parent`) again, or 0."""
    return int(os.environ.get(LAUNCHER) or parent or os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def current_round() -> int:
    return int(os.environ.get(ROUND) or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def write_outcome(launcher_pid: int, outcome: dict[str, Any], replaced: int | None = None) -> bool:
    """Store how the current attempt ended on this node: kind, text, exit_code, step (or None), rank, host and time.

    The first outcome of an attempt stays: the launcher ends the other ranks after a failure, and their outcomes follow from it.
    Return False if there is one. The launcher may start the next attempt before the monitor of the last one has found out why a
    rank has died. Therefore each attempt has its own file. `replaced` is an attempt whose outcome is replaced.
    """
    return _write(launcher_pid, f"outcome{current_round() if replaced is None else replaced}", outcome, replaced is not None)


def read_outcome(launcher_pid: int, number: int) -> dict[str, Any] | None:
    return _read(launcher_pid, f"outcome{number}")


def store_run(launcher_pid: int, **values: Any) -> None:
    _write(launcher_pid, "run", {**read_run(launcher_pid), **values})


def read_run(launcher_pid: int) -> dict[str, Any]:
    return _read(launcher_pid, "run") or {}


def remove(launcher_pid: int) -> None:
    for path in folder.iterdir() if (folder := _folder()) else []:
        pid, _, rest = path.name.removeprefix(".").partition("-")  # a process that was killed leaves a hidden draft
        if pid.isdigit() and (int(pid) == launcher_pid or rest.split(".")[0] != _start_time(int(pid))):
            with contextlib.suppress(OSError):
                path.unlink()


def touch(launcher_pid: int) -> None:
    """Set the time of the files to now. Systems remove files from the temporary directory that are some days old."""
    if (folder := _folder()) and (run := _path(launcher_pid, "run")):
        for path in (folder, *folder.glob(f"{run.name.split('.')[0]}.*")):
            with contextlib.suppress(OSError):
                os.utime(path)


def why_not_restarted(outcome: dict[str, Any] | None, failed_steps: list[int | None]) -> str:
    """Return why this attempt must be the last one, or "". Earlier ones have failed at `failed_steps`."""
    if outcome is None:
        return ""
    code, step = outcome.get("exit_code"), outcome.get("step")
    if code in (STOPPED, INTERRUPTED, UNSAVED):
        return "a stop was requested, or the run is complete"
    if code == USER_ERROR:
        return "the same command would fail again"
    return find_repeated_step([*failed_steps, step])


def how_to_continue(code: int, step: int, by_hand: str, parent: int = 0, is_node_lost: bool = False) -> str:
    is_last = is_node_lost and "ACCEL_DDP_GUARD" in os.environ  # `accel-ddp launch` stops the other nodes
    used, most = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    failed_steps = read_run(launcher_pid(parent)).get("failed_steps", [])
    if used < most and not is_last and not why_not_restarted({"exit_code": code, "step": step}, failed_steps):
        return f"The launcher restarts the ranks from the last checkpoint (restart {used + 1} of {most})."
    left = f"No restart of --max_restarts {most} is left. " if 0 < most <= used else ""
    return f"{left}To continue from the last checkpoint, {by_hand}" if by_hand else ""  # an evaluation


def find_repeated_step(failed_steps: list[int | None]) -> str:
    """A GPU reports an error in the step or in the next one, so two steps in a row count as the same."""
    last = [step for step in failed_steps[-MOST_FAILURES_OF_A_STEP:] if step is not None]
    if len(last) < MOST_FAILURES_OF_A_STEP or max(last) - min(last) > 1:
        return ""
    names = f"step {last[0]} has" if len(set(last)) == 1 else f"steps {min(last)} and {max(last)} have"
    return f"{names} failed {MOST_FAILURES_OF_A_STEP} times"


def _start_time(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    if not Path("/proc/self/stat").exists():  # not Linux
        import psutil

        with contextlib.suppress(psutil.Error):
            return str(int(psutil.Process(pid).create_time()))
    return ""


def _folder() -> Path | None:
    """None: it is somebody else's, or cannot be made. Containers may share it and the host name, and have the same pids."""
    namespace = 0
    with contextlib.suppress(OSError):  # not Linux
        namespace = os.stat("/proc/self/ns/pid").st_ino
    folder = Path(tempfile.gettempdir(), f"accel_ddp-{os.getuid()}-{socket.gethostname()}-{namespace}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    return folder if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() else None


def _path(launcher_pid: int, what: str) -> Path | None:
    folder, started = _folder(), _start_time(launcher_pid) if launcher_pid else ""
    return folder / f"{launcher_pid}-{started}.{what}.json" if folder and started else None


def _write(launcher_pid: int, what: str, value: dict[str, Any], replaces: bool = True) -> bool:
    """Write a file completely or not at all. Return False if it exists and must not be replaced."""
    if path := _path(launcher_pid, what):
        try:
            replace_file(path, json.dumps(value), has_rivals=True, replaces=replaces)
        except FileExistsError:
            return False
        except OSError:  # a full disk must not end a run, which only is not continued by itself then
            with contextlib.suppress(OSError):  # or a file system without hard links
                replace_file(path, json.dumps(value), has_rivals=True)
    return True


def _read(launcher_pid: int, what: str) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        if (path := _path(launcher_pid, what)) and isinstance(value := json.loads(path.read_text()), dict):
            return value
    return None
