"""The connections of a monitor: to the ranks of its node, and to the monitors of other nodes.

A rank starts the monitor of its node and has a `Link` to it. Monitors have `Peers`: every node sends heartbeats to node 0, which
coordinates, and to node 1, which takes over if node 0 is lost; both send theirs to every node. A cluster of N nodes has 2 N
connections, and no node has more than N.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import hmac
import json
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accel_ddp.nodes import messages, probe
from accel_ddp.phases import NAMES, Phases, Timing
from accel_ddp.watch import processes

_MEMORY = "/dev/shm"  # a file system in memory, on Linux
_PR_SET_PTRACER = 0x59616D61
_PREFIX, _LOCK = "accel_ddp_watch_", "lock"
_STALE_SECONDS = 60.0  # a younger folder may belong to a monitor that is being started

COORDINATORS = 2  # node 0 and its substitute
RETRY_SECONDS = 0.5
CONNECT_SECONDS = 5.0
MOST_REPORTS = 3  # of messages that cannot be handled
_FULL_BUFFER = 1 << 18  # bytes; a peer that does not read gets nothing more
_PING = ">IQ"  # the node that sends a datagram, and the number of the datagram
_NUMBER, _PLACE = (int, float), {"rank": int, "host": str, "step": int}
_ROW = (  # of a heartbeat, see `Monitor._send_beat`
    int, int, int, _NUMBER, (*_NUMBER, type(None)), str, _NUMBER, bool, _NUMBER, bool, *[_NUMBER] * len(Timing._fields)
)  # fmt: skip
_IS_ROW = lambda row: (
    isinstance(row, list) and len(row) == len(_ROW) and all(map(isinstance, row, _ROW)) and 0 <= row[2] < len(NAMES)
)
_FAILURE = {"kind": str, "text": str, "line": str, "exit_code": int, **_PLACE}
# What other monitors send: the key of a message, and the shape of its value.
SHAPES = {
    "ranks": [_IS_ROW], "failure": _FAILURE, "failed": _FAILURE, "event": {"severity": str, "kind": str, "text": str, **_PLACE},
    "incident": {"level": str, "kind": str, "text": str, **_PLACE}, "stop": str, "want_stack": int, "stack": (int, [str], str),
    "measure": int, "rate": (int, [int | float]), "traffic": [(str, str, int, int, int)],
    "silent": [(int, int, int | float, bool)], "relay": [int],
}  # fmt: skip


class MonitorAddress(NamedTuple):
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
        sockets = [ranks]
        if has_other_nodes:
            sockets.append(opened.enter_context(messages.open_listening_socket(ip, 0, small_segments=True)))
        port = sockets[1].getsockname()[1] if has_other_nodes else 0
        options = {
            "node": node, "host": host, "launcher": launcher, "parent": os.getpid(), "folder": folder,
            "report_after": report_after, "abort_after": abort_after, "rank_socket": ranks.fileno(),
            "node_socket": sockets[1].fileno() if has_other_nodes else None,
        }  # fmt: skip
        paths = [str(Path(__file__).parents[2]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
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
            with open(os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


class Link:
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
        if sys.platform == "linux":  # where Linux lets only parents read the memory of a process
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, address.pid)
        self.send({"hello": {"rank": rank, "pid": os.getpid(), "page": str(page), "stack": str(stack)}})
        self._thread = threading.Thread(target=self._read, daemon=True, name="monitor link")
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        if os.getpid() != self._pid:  # a data worker, which is a fork, would mix its bytes with the rank's
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
        self.is_closed = True
        self.send({"finished": True})
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        self._socket.close()


@dataclass
class Peer:
    node: int
    host: str
    address: str
    port: int
    heard_at: float = 0.0  # when its last message arrived; 0: never
    closed_at: float = 0.0  # when it closed its connection; 0: it is open, or was never opened
    pinged_at: float = 0.0  # when its last datagram arrived
    ping_number: int = 0  # of that datagram; each one has a higher number, so recorded ones are of no use
    is_done: bool = False  # all its ranks have ended normally
    stream: messages.Stream | None = None
    reason: str = ""  # why the last attempt to connect failed

    def silent(self, now: float) -> float:
        return now - self.heard_at if self.heard_at and not self.is_done else 0.0

    def is_one_way(self, now: float) -> bool:
        return bool(self.pinged_at) and now - self.pinged_at < 3 * RETRY_SECONDS

    def closed(self, now: float) -> float:
        return now - self.closed_at if self.closed_at and not self.is_done else 0.0


class _Pings(asyncio.DatagramProtocol):
    """Receives the datagrams of nodes that receive nothing from this node. Only TCP needs packets in both directions."""

    def __init__(self, peers: "Peers"):
        self.peers = peers

    def datagram_received(self, data: bytes, address: Any) -> None:
        node, number = struct.unpack(_PING, data[: struct.calcsize(_PING)].rjust(struct.calcsize(_PING)))
        peer = self.peers.peers.get(node)
        if peer and number > peer.ping_number and hmac.compare_digest(data, self.peers.make_ping(node, node, number)):
            peer.pinged_at, peer.ping_number = time.monotonic(), number


class Peers:
    """Connects this node to the nodes that coordinate, and them to it. `roster` has the key that each node shares with this one."""

    def __init__(
        self, own_node: int, roster: list[dict[str, Any]], on_message: Callable[[int, dict[str, Any]], None],
        report: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    ):  # fmt: skip
        self.own_node, self.on_message, self.report = own_node, on_message, report
        self.keys = {node["node"]: bytes.fromhex(node["key"]) for node in roster}
        self.door = messages.Door(self.keys.get)
        mine = own_node < COORDINATORS  # a coordinator is connected to all, the others to the coordinators
        self.peers = {
            node["node"]: Peer(node["node"], node["host"], node["address"], node["port"])
            for node in roster
            if node["node"] != own_node and (mine or node["node"] < COORDINATORS)
        }
        self.tasks: list[asyncio.Task] = []
        self.is_closing = False
        self.reported: set[str] = set()  # errors about messages
        self.started_at = time.monotonic()
        self.pings: asyncio.DatagramTransport | None = None

    async def listen_for_pings(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the port is in use; then the direction of a lost link is not reported
            address = sock.getsockname()[:2]
            loop = asyncio.get_running_loop()
            self.pings, _ = await loop.create_datagram_endpoint(lambda: _Pings(self), local_addr=address, family=sock.family)

    def make_ping(self, sender: int, other: int, number: int) -> bytes:
        head = struct.pack(_PING, sender, number)
        return head + messages.make_proof(self.keys[other], b"ping", head)

    def ping_silent(self) -> None:
        now = time.monotonic()
        for peer in self.peers.values():
            if self.pings and peer.silent(now) > 4 * RETRY_SECONDS:
                with contextlib.suppress(OSError):
                    self.pings.sendto(self.make_ping(self.own_node, peer.node, time.monotonic_ns()), (peer.address, peer.port))

    def start(self) -> None:
        """Open the connections to the coordinators with a lower number. The others connect to this node."""
        for peer in self.peers.values():
            if peer.node < min(COORDINATORS, self.own_node):
                self.tasks.append(asyncio.ensure_future(self._stay_connected(peer)))

    async def _stay_connected(self, peer: Peer) -> None:
        while not self.is_closing and not peer.is_done:
            writer = None
            try:
                reader, writer = await messages.connect(peer.address, peer.port, CONNECT_SECONDS, small_segments=True)
                stream = await messages.handshake(reader, writer, self.keys[peer.node], self.own_node)
                stream.write({"hello": True})
                await self._read(peer, stream)
            except (OSError, messages.HandshakeError, asyncio.TimeoutError) as error:
                peer.reason = str(error)
            if writer:
                writer.close()
            await asyncio.sleep(RETRY_SECONDS)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection of another node. Connections without its key are closed."""
        try:
            stream = await self.door.admit(reader, writer)
            opening = await stream.receive(CONNECT_SECONDS)
            if "bytes" in opening:
                await probe.serve_transfers(stream, opening)
            elif stream.node in self.peers and await self._may_replace(self.peers[stream.node]):
                await self._read(self.peers[stream.node], stream)
        except (OSError, messages.HandshakeError, ValueError, asyncio.TimeoutError):
            pass
        finally:
            writer.close()

    async def _may_replace(self, peer: Peer) -> bool:
        """Return whether a second connection of a node may replace the first one: only if heartbeats stop to arrive on the first."""
        deadline = time.monotonic() + CONNECT_SECONDS
        while peer.stream and time.monotonic() - peer.heard_at < 3 * RETRY_SECONDS:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.1)
        if peer.stream:
            peer.stream.writer.close()
        return True

    async def _read(self, peer: Peer, stream: messages.Stream) -> None:
        peer.stream, peer.closed_at = stream, 0.0
        try:
            while True:
                message = await stream.receive(1e9)
                peer.heard_at = time.monotonic()
                peer.is_done |= bool(message.get("bye"))
                try:
                    self.on_message(peer.node, message)
                except Exception as error:  # a malformed message must not end the connection, which would look like a lost node
                    text = f"{type(error).__name__}: {error}"
                    if text not in self.reported and len(self.reported) < MOST_REPORTS:  # heartbeats arrive twice a second
                        self.reported.add(text)
                        self.report(f"warning: a message of the monitor of {peer.host} cannot be handled: {text}")
        except OSError:
            pass
        finally:
            stream.writer.close()
            if peer.stream is stream:
                peer.stream, peer.closed_at = None, time.monotonic()

    def send(self, node: int, message: dict[str, Any]) -> None:
        """Send to one node, if it is connected. A message that cannot be sent is lost."""
        stream = self.peers[node].stream if node in self.peers else None
        if stream and stream.writer.transport.get_write_buffer_size() < _FULL_BUFFER:
            with contextlib.suppress(OSError, RuntimeError):  # the connection is lost, or the message is too large
                stream.write(message)

    def broadcast(self, message: dict[str, Any]) -> None:
        for node in self.peers:
            self.send(node, message)

    async def close(self) -> None:
        self.is_closing = True
        self.broadcast({"bye": True})
        writers = [peer.stream.writer for peer in self.peers.values() if peer.stream]
        with contextlib.suppress(Exception):
            await asyncio.wait_for(asyncio.gather(*(writer.drain() for writer in writers), return_exceptions=True), 1)
        for writer in writers:
            writer.close()
        await asyncio.sleep(0)
        if self.pings:
            self.pings.close()
        for task in self.tasks:
            task.cancel()
