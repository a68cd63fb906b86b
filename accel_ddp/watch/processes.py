"""What a monitor can learn about a process from outside: its state, how it ended, whether the kernel killed it, and its stack.

faulthandler prints the Python stack of a rank that does not progress from inside the rank, at the C level, so a rank that waits
in a collective or holds the GIL prints it too. A stopped process cannot. py-spy, if it is installed, reads its memory from outside.
"""

import asyncio
import contextlib
import faulthandler
import os
import re
import resource
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from accel_ddp.nodes.spawn import is_pending


def state_of(pid: int) -> str:
    """Return the state letter of a process: R and S run, T is stopped, D is blocked in the kernel, Z has ended. "": there is none."""
    return next(iter(_stat(pid)), "")


def exit_status(pid: int) -> int | None:
    """Return the exit code or minus the signal, or None if the launcher, its parent, has read it, which takes it about 0.1 s."""
    fields = _stat(pid)
    if not fields or fields[0] not in "ZX":
        return None
    status = int(fields[49])
    return -(status & 0x7F) if status & 0x7F else status >> 8


def describe_exit(status: int | None) -> str:
    if status is None:
        return "died"
    if status >= 0:
        return f"exited with code {status}"
    names = {int(each): each.name for each in signal.Signals}
    return f"was killed by {names.get(-status, f'signal {-status}')}"


def count_files(pid: int) -> tuple[int, int] | None:
    try:
        number = os.stat(f"/proc/{pid}/fd").st_size or len(os.listdir(f"/proc/{pid}/fd"))  # the size is 0 before Linux 6.2
        return (number, resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]) if number else None
    except OSError:
        return None


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name of the program, which may contain spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def kernel_function(pid: int) -> str:
    threads = [int(path.name) for path in Path(f"/proc/{pid}/task").glob("*")]
    blocked = next((thread for thread in threads if state_of(thread) == "D"), pid)
    with contextlib.suppress(OSError):
        return Path(f"/proc/{blocked}/wchan").read_text().strip("0 \n")
    return ""


_DIAG = struct.Struct("=4x2H16s16s20xI4xI")  # inet_diag_msg: ports, addresses, bytes to send, inode
_BYTES = struct.Struct("=120xQQ")  # tcp_info: acknowledged, received


def tcp_traffic(pids: Iterable[int], without_port: int) -> list[list]:
    """Return [own, peer, acknowledged, received, to send] to other hosts. Without sock_diag (gVisor, macOS) or with RDMA: []."""
    own = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it was closed
                    own.add(os.readlink(entry.path))
    rows: dict[tuple[str, str], list] = {}
    with contextlib.suppress(OSError, AttributeError):
        for family in (socket.AF_INET, socket.AF_INET6):
            for ports, ends, numbers, inode in _tcp_connections(family):
                if f"socket:[{inode}]" in own and without_port not in ports and ends[0] != ends[1]:
                    row = rows.setdefault(ends, [*ends, 0, 0, 0])
                    row[2:] = map(sum, zip(row[2:], numbers))
    return list(rows.values())


def _tcp_connections(family: int) -> Iterator[tuple[tuple[int, int], tuple[str, str], tuple[int, int, int], int]]:
    """Yield the ports, addresses, bytes and inode of each open TCP connection in this network namespace, as `ss -tine` prints them."""
    SOCK_DIAG, SOCK_DIAG_BY_FAMILY, DUMP_REQUEST, DONE, INFO, ESTABLISHED = 4, 20, 0x301, 3, 2, 1
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as kernel:
        kernel.settimeout(1)
        request = struct.pack("=4BI48x", family, socket.IPPROTO_TCP, 1 << (INFO - 1), 0, 1 << ESTABLISHED)
        kernel.send(struct.pack("=IHHII", 16 + len(request), SOCK_DIAG_BY_FAMILY, DUMP_REQUEST, 0, 0) + request)
        while True:
            data = kernel.recv(1 << 17)
            while data:
                size, kind = struct.unpack_from("=IH", data)
                if kind <= DONE:  # also an error
                    return
                *ports, source, target, queued, inode = _DIAG.unpack_from(data, 16)
                length = 4 if family == socket.AF_INET else 16
                ends = [socket.inet_ntop(family, each[:length]).removeprefix("::ffff:") for each in (source, target)]
                at = 16 + _DIAG.size
                while at + 4 <= size:
                    length, attribute = struct.unpack_from("=HH", data, at)
                    if attribute == INFO and length >= 4 + _BYTES.size:
                        yield tuple(map(socket.ntohs, ports)), tuple(ends), (*_BYTES.unpack_from(data, at + 4), queued), inode
                    at += max(4, length + 3 & ~3)
                data = data[size + 3 & ~3 :]


class OutOfMemoryKills:
    """The number of processes that the kernel has killed in the memory cgroup of a process, from the construction on."""

    def __init__(self, pid: int):
        self.pid = pid
        self.before = {file: _count_kills(file) for file in (_OF_MACHINE, *_cgroup_files(pid))}

    def happened(self) -> list[Path]:
        # The process may have been moved to another cgroup since.
        files = {*self.before, *_cgroup_files(self.pid)} - {_OF_MACHINE}
        return [file.parent for file in files if _count_kills(file) > self.before.get(file, 0)]

    def happened_on_machine(self) -> bool:
        """Return whether the kernel has killed any process. This is visible also where the files of cgroups are hidden."""
        return _count_kills(_OF_MACHINE) > self.before[_OF_MACHINE]


def memory_limit(folders: list[Path]) -> int:
    limits = []
    every = {each for folder in folders for each in (folder, *folder.parents)}
    for file in (each / name for each in every for name in ("memory.max", "memory.limit_in_bytes")):  # of version 2 and 1
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(file.read_text()))
    limit = min(limits, default=0)
    return limit if limit < 1 << 60 else 0  # the number that means no limit in version 1


def _cgroup_files(pid: int) -> list[Path]:
    files = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            roots = ["/sys/fs/cgroup/memory"] if "memory" in controllers.split(",") else []
            if not controllers:
                roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
            for root in roots:
                # In a container the path may be the host's, and the root is then the cgroup of the container.
                for folder in dict.fromkeys((Path(root + path), Path(root))):
                    files += [folder / name for name in ("memory.events", "memory.oom_control") if (folder / name).exists()]
    return files


def _count_kills(file: Path) -> int:
    with contextlib.suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)", file.read_text(), re.MULTILINE):
            return int(found[1])
    return 0


_OF_MACHINE = Path("/proc/vmstat")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_PY_SPY_FRAME = re.compile(r"^    (?P<function>.+) \((?P<file>.+):(?P<line>\d+)\)$")
_COLLECTIVES = ("distributed_c10d.py", "c10d_logger.py")
_BACKWARD = os.path.join("torch", "autograd", "graph.py")
_MAX_FRAMES = 12
# The signal at which a rank prints its stack. Real-time signals are not used by launchers and schedulers. macOS has none.
_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 7


def print_on_signal(path: Path) -> IO[str]:
    """Let this process write the stacks of its threads to a file at each signal. The file must stay open."""
    file = open(path, "w")
    if hasattr(signal, "SIGRTMIN"):  # not on macOS
        faulthandler.register(_SIGNAL, file=file, all_threads=True)
    return file


class Stack(list[str]):
    """The frames of the main thread, the innermost first, each as "function (file:line)"."""

    collective = ""  # the last collective that the rank has started, for example "all_reduce number 45"

    def is_in_collective(self) -> bool:
        """Return whether the innermost frames belong to a collective, or to a backward pass, in which DDP runs collectives."""
        return bool(self) and any(part in self[0] for part in (*_COLLECTIVES, _BACKWARD))

    def name_of_collective(self) -> str:
        if self and _BACKWARD in self[0]:
            return "backward"
        names = [frame.split(" ")[0] for frame in self if any(part in frame for part in _COLLECTIVES)]
        return next((name for name in reversed(names) if name != "wrapper"), "a collective")

    def text(self) -> str:
        return "\n".join(f"    {frame}" for frame in self[:_MAX_FRAMES])


async def read_stack(pid: int, file: Path | None, state: str) -> Stack:
    """Return the stack of the main thread, or an empty one if it cannot be read. This takes 2 s at most."""
    if state not in ("T", "t") and file and is_pending(pid, _SIGNAL, "SigCgt"):  # it would end a process that does not handle it
        with contextlib.suppress(OSError):
            size = file.stat().st_size
            os.kill(pid, _SIGNAL)
            for _ in range(20):
                await asyncio.sleep(0.05)
                if file.stat().st_size > size:
                    await asyncio.sleep(0.05)
                    return parse(file.read_bytes()[size:].decode(errors="replace"))
    program = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if program is None:
        return Stack()
    try:
        process = await asyncio.create_subprocess_exec(
            program, "dump", "--nonblocking", "--pid", str(pid), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        output, _ = await asyncio.wait_for(process.communicate(), 2)
    except (OSError, asyncio.TimeoutError):
        return Stack()
    return parse(output.decode(errors="replace"))


async def read_stack_of_worker(rank: int, file: Path) -> Stack:
    """Return the stack of a data worker of a rank that is not idle, or an empty one. Forked workers write to the file of the rank."""
    children: list[str] = []
    for path in Path(f"/proc/{rank}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += path.read_text().split()
    for pid in map(int, children):
        stack = await read_stack(pid, file, state_of(pid))
        loop = next((at for at, frame in enumerate(stack) if frame.startswith("_worker_loop (")), 0)
        if loop and not stack[loop - 1].startswith("get ("):  # an idle worker waits for the indices of its next batch
            return stack
    return Stack()


def parse(text: str) -> Stack:
    sections = re.split(r"^(?=Thread |Current thread )", text, flags=re.MULTILINE)
    # faulthandler prints the main thread last. py-spy prints it first, with its name.
    named = [part for part in sections if '"MainThread"' in part]
    chosen = next(iter(named or [part for part in reversed(sections) if "  File " in part]), "")
    found = [_FRAME.match(line) or _PY_SPY_FRAME.match(line) for line in chosen.splitlines()]
    return Stack(f"{frame['function']} ({frame['file']}:{frame['line']})" for frame in found if frame)
