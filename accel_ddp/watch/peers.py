"""The connections between the monitors of all nodes.

Every node sends heartbeats to node 0, which coordinates, and to node 1, which takes over if node 0 is lost; both send theirs to every
node. A cluster of N nodes has 2 N connections, and no node has more than N.
"""

import asyncio
import contextlib
import hmac
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from accel_ddp.nodes import messages, probe

COORDINATORS = 2  # node 0 and its substitute
RETRY_SECONDS = 0.5
CONNECT_SECONDS = 5.0
_FULL_BUFFER = 1 << 18  # bytes; a peer that does not read gets nothing more


@dataclass
class Peer:
    """Another node."""

    node: int
    host: str
    address: str
    port: int
    heard_at: float = 0.0  # when its last message arrived; 0: never
    closed_at: float = 0.0  # when it closed its connection; 0: it is open, or was never opened
    pinged_at: float = 0.0  # when its last datagram arrived
    is_done: bool = False  # all its ranks have ended normally
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def silent(self, now: float) -> float:
        return now - self.heard_at if self.heard_at and not self.is_done else 0.0

    def is_one_way(self, now: float) -> bool:
        """Return whether packets arrive from this node, although it does not receive those of this node."""
        return bool(self.pinged_at) and now - self.pinged_at < 3 * RETRY_SECONDS

    def closed(self, now: float) -> float:
        return now - self.closed_at if self.closed_at and not self.is_done else 0.0


class _Pings(asyncio.DatagramProtocol):
    """Receives the datagrams of nodes that receive nothing from this node. Only TCP needs packets in both directions."""

    def __init__(self, peers: "Peers"):
        self.peers = peers

    def datagram_received(self, data: bytes, address: Any) -> None:
        for peer in self.peers.peers.values():
            if hmac.compare_digest(data, self.peers.make_ping(peer.node)):
                peer.pinged_at = time.monotonic()

    def error_received(self, error: Exception) -> None:
        pass  # the other node has no monitor any more


class Peers:
    """Connects this node to the nodes that coordinate, and them to it."""

    def __init__(
        self, own_node: int, roster: list[dict[str, Any]], token: bytes, on_message: Callable[[int, dict[str, Any]], None]
    ):
        self.own_node, self.token, self.on_message = own_node, token, on_message
        mine = own_node < COORDINATORS  # a coordinator is connected to all, the others to the coordinators
        self.peers = {
            node["node"]: Peer(node["node"], node["host"], node["address"], node["port"])
            for node in roster
            if node["node"] != own_node and (mine or node["node"] < COORDINATORS)
        }
        self.tasks: set[asyncio.Task] = set()
        self.is_closing = False
        self.bytes_sent = 0
        self.started_at = time.monotonic()
        self.pings: asyncio.DatagramTransport | None = None

    async def listen_for_pings(self, sock: socket.socket) -> None:
        """Receive datagrams on the port on which `sock` listens for connections."""
        with contextlib.suppress(OSError):  # the port is in use; then the direction of a lost link is not reported
            address = sock.getsockname()[:2]
            loop = asyncio.get_running_loop()
            self.pings, _ = await loop.create_datagram_endpoint(lambda: _Pings(self), local_addr=address, family=sock.family)

    def make_ping(self, node: int) -> bytes:
        return hmac.new(self.token, f"ping {node}".encode(), "sha256").digest()

    def ping_silent(self) -> None:
        """Send a datagram to each node that has been silent for some time."""
        now = time.monotonic()
        for peer in self.peers.values():
            if self.pings and peer.silent(now) > 4 * RETRY_SECONDS:
                with contextlib.suppress(OSError):
                    self.pings.sendto(self.make_ping(self.own_node), (peer.address, peer.port))

    def start(self) -> None:
        """Open the connections to the coordinators with a lower number. The others connect to this node."""
        for peer in self.peers.values():
            if peer.node < min(COORDINATORS, self.own_node):
                self._keep(self._stay_connected(peer))

    def _keep(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _stay_connected(self, peer: Peer) -> None:
        while not self.is_closing and not peer.is_done:
            with contextlib.suppress(OSError, messages.HandshakeError, asyncio.TimeoutError):
                reader, writer = await messages.connect(peer.address, peer.port, CONNECT_SECONDS, small_segments=True)
                await messages.handshake(reader, writer, self.token, is_client=True)
                writer.write(messages.encode({"node": self.own_node}))
                await self._read(peer, reader, writer)
            await asyncio.sleep(RETRY_SECONDS)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection of another node. Connections without the token are closed."""
        try:
            await messages.handshake(reader, writer, self.token, is_client=False)
            opening = await messages.receive(reader, CONNECT_SECONDS)
            node = opening.get("node")
            if node in self.peers:
                await self._read(self.peers[node], reader, writer)
            elif "bytes" in opening:
                await probe.serve_transfers(reader, writer, opening)
        except (OSError, messages.HandshakeError, ValueError, asyncio.TimeoutError):
            pass
        finally:
            writer.close()

    async def _read(self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer.writers.append(writer)
        peer.closed_at = 0.0
        try:
            while True:
                message = await messages.receive(reader, 1e9)
                peer.heard_at = time.monotonic()
                if message.get("bye"):
                    peer.is_done = True
                self.on_message(peer.node, message)
        except OSError:
            pass
        finally:
            peer.writers.remove(writer)
            writer.close()
            if not peer.writers:
                peer.closed_at = time.monotonic()

    def send(self, node: int, message: dict[str, Any]) -> None:
        """Send to one node, if it is connected. A message that cannot be sent is lost."""
        peer = self.peers.get(node)
        if peer and peer.writers:
            writer = peer.writers[-1]
            if writer.transport.get_write_buffer_size() < _FULL_BUFFER:
                with contextlib.suppress(OSError, RuntimeError):  # the connection is lost, or the message is too large
                    data = messages.encode(message)
                    self.bytes_sent += len(data)
                    writer.write(data)

    def broadcast(self, message: dict[str, Any]) -> None:
        for node in self.peers:
            self.send(node, message)

    async def close(self) -> None:
        """Send that this node is done, wait a moment until that is delivered, and close all connections."""
        self.is_closing = True
        self.broadcast({"bye": True})
        writers = [writer for peer in self.peers.values() for writer in peer.writers]
        with contextlib.suppress(Exception):
            await asyncio.wait_for(asyncio.gather(*(writer.drain() for writer in writers), return_exceptions=True), 1)
        for writer in writers:
            writer.close()
        await asyncio.sleep(0)
        if self.pings:
            self.pings.close()
        for task in self.tasks:
            task.cancel()
