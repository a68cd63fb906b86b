"""What the kernel tells about a process: its state, how it ended, and whether it was killed for using too much memory."""

import contextlib
import os
import signal
from pathlib import Path


def state_of(pid: int) -> str:
    """Return the state letter of a process: R and S run, T is stopped, D is blocked in the kernel, Z has ended. "": there is none."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks after the boot, which distinguishes processes with the same pid."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def parent_of(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def children_of(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def exit_status(pid: int) -> int | None:
    """Return the exit code of a process that has ended, or minus the signal that ended it. None: its parent has already read it.

    A monitor is not the parent of a rank. The status can be read until the launcher does so, which takes it about 0.1 s.
    """
    fields = _stat(pid)
    if not fields or fields[0] not in "ZX":
        return None
    status = int(fields[49])
    return -(status & 0x7F) if status & 0x7F else status >> 8


def describe_exit(status: int | None) -> str:
    """Return a phrase that completes "rank 1 ...", for example "was killed by SIGKILL"."""
    if status is None:
        return "died"
    if status >= 0:
        return f"ended with exit code {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name of the program, which may contain spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def kernel_stack(pid: int) -> str:
    """Return the kernel function in which a process is blocked, or ""."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text().strip("0 \n")
    return ""


def blocked_thread(pid: int) -> int:
    """Return a thread of the process that is blocked in the kernel (state D), or 0."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "D":
                    return int(thread)
    return 0


class OutOfMemoryKills:
    """Counts the processes that the kernel has killed in the memory cgroup of a process, from the moment of construction on."""

    def __init__(self, pid: int):
        self.pid = pid
        self.before = {file: _count_kills(file) for file in _cgroup_files(pid)}

    def happened(self) -> bool:
        # The process may have been moved to another cgroup since.
        return any(_count_kills(file) > self.before.get(file, 0) for file in {*self.before, *_cgroup_files(self.pid)})


def _cgroup_files(pid: int) -> list[Path]:
    files = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            roots = ["/sys/fs/cgroup/memory"] if "memory" in controllers.split(",") else []
            if not controllers:
                roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
            for root in roots:
                # In a container the path may be that of the host, and the root is then the cgroup of the container.
                for folder in dict.fromkeys((Path(root + path), Path(root))):
                    files += [folder / name for name in ("memory.events", "memory.oom_control") if (folder / name).exists()]
    return files


def _count_kills(file: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
