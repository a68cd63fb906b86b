"""The connection of a rank to the monitor of its node."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from accel_ddp.nodes.messages import open_listening_socket
from accel_ddp.phases import Phases
from accel_ddp.watch import processes

_MEMORY = "/dev/shm"  # a file system in memory, on Linux
_PREFIX, _LOCK = "accel_ddp_watch_", "lock"
_STALE_SECONDS = 60.0  # a younger folder may belong to a monitor that is being started


class MonitorAddress(NamedTuple):
    """Where a monitor listens."""

    folder: str  # for the socket and the pages of the ranks of its node
    pid: int
    ip: str  # for the monitors of other nodes
    port: int


def start_monitor(*, node: int, has_other_nodes: bool, host: str, ip: str, launcher: int, report_after: float,
                  abort_after: float) -> MonitorAddress:  # fmt: skip
    """Start the monitor of this node. The sockets are open when this returns, although the monitor needs longer to start."""
    parent = Path(_MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir())
    _remove_stale_folders(parent)
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    with contextlib.ExitStack() as opened:
        lock = opened.enter_context(open(Path(folder, _LOCK), "w"))
        fcntl.flock(lock, fcntl.LOCK_EX)  # the monitor inherits the open file, and with it the lock
        ranks = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        ranks.bind(f"{folder}/socket")
        ranks.listen(1024)
        sockets, port = [ranks], 0
        if has_other_nodes:
            nodes = opened.enter_context(open_listening_socket(ip, 0, small_segments=True))
            sockets.append(nodes)
            port = nodes.getsockname()[1]
        options = {
            "node": node, "host": host, "launcher": launcher, "parent": os.getpid(), "folder": folder,
            "report_after": report_after, "abort_after": abort_after, "rank_socket": ranks.fileno(),
            "node_socket": sockets[1].fileno() if has_other_nodes else None,
        }  # fmt: skip
        package = str(Path(__file__).parents[2])
        paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))}
        process = subprocess.Popen(
            [sys.executable, "-m", "accel_ddp.watch.monitor", json.dumps(options)], env=environment, stdin=subprocess.DEVNULL,
            start_new_session=True, cwd="/",  # a file of the user such as asyncio.py in the current folder must not be imported
            pass_fds=[file.fileno() for file in (lock, *sockets)],
        )  # fmt: skip
    return MonitorAddress(folder, process.pid, ip, port)


def _remove_stale_folders(parent: Path) -> None:
    """Remove the folders of monitors that were killed. A monitor that runs has a lock on its folder, also in another container."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # the lock is held, or the folder is being removed
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or time.time() - found.st_mtime < _STALE_SECONDS:
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


class Link:
    """Sends messages to the monitor, and passes those of the monitor to `on_message`, in a thread."""

    def __init__(self, address: MonitorAddress, rank: int, heartbeat: Phases, on_message: Callable[[dict[str, Any]], None],
                 on_lost: Callable[[], None]):  # fmt: skip
        self.address, self.on_message, self.on_lost = address, on_message, on_lost
        self.is_closed, self._pid = False, os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(f"{address.folder}/socket")
        self._lock = threading.Lock()
        page, stack = Path(address.folder, f"page.{rank}"), Path(address.folder, f"stack.{rank}")
        heartbeat.publish(page)
        self._stack_file = processes.print_on_signal(stack)
        processes.allow_tracing(address.pid)
        self.send({"hello": {"rank": rank, "pid": os.getpid(), "page": str(page), "stack": str(stack)}})
        self._thread = threading.Thread(target=self._read, daemon=True, name="monitor link")
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        if os.getpid() != self._pid:  # a data worker, which is a fork, would mix its bytes with those of its rank
            return
        with self._lock, contextlib.suppress(OSError):  # the monitor is lost
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
            for line in lines:
                self.on_message(json.loads(line))
        if not self.is_closed:
            self.on_lost()

    def close(self) -> None:
        """Report that the program of this rank is complete, and close the connection."""
        self.is_closed = True
        self.send({"finished": True})
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        self._socket.close()


def remove_folder(address: MonitorAddress) -> None:
    """Remove what a monitor that was killed has left."""
    shutil.rmtree(address.folder, ignore_errors=True)
