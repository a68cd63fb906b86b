"""The main node's side of the connections between the nodes. The agents on all nodes connect to the coordinator.

Both sides send a heartbeat every second, so a node that dies, hangs or loses its network is named on all nodes within seconds.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any

from accel_ddp.net import messages
from accel_ddp.net.sanitize import printable
from accel_ddp.tune.protocol import HEARTBEAT_SECONDS, JOIN_SECONDS, SILENCE_SECONDS


class TuningEnded(Exception):
    """Ends the tuning on every node with an exit code, after printing a text."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code, self.text = code, text


@dataclass
class Member:
    """A node whose agent is connected."""

    info: dict[str, Any]  # the agent's first message
    writer: asyncio.StreamWriter


class Coordinator:
    """Sends commands to the agents of all nodes and receives their events."""

    def __init__(self, nodes: int, token: bytes):
        self.nodes, self.token = nodes, token
        self.members: dict[int, Member] = {}
        self.events: asyncio.Queue[tuple[int, dict[str, Any]]] = asyncio.Queue()
        self.heartbeat: asyncio.Future | None = None
        self.server: asyncio.Server | None = None

    async def open(self, ip: str, port: int) -> None:
        self.server = await asyncio.start_server(self._serve, sock=messages.open_listening_socket(ip, port))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = None
        try:
            await messages.handshake(reader, writer, self.token, is_client=False)
            info = await messages.receive(reader, SILENCE_SECONDS)
            node = int(info["node"])
            if node in self.members or not 0 <= node < self.nodes:
                raise ValueError("not expected")
            self.members[node] = Member(info, writer)
            self.events.put_nowait((node, {"event": "joined"}))
            while True:
                message = await messages.receive(reader, SILENCE_SECONDS)
                if message["event"] != "heartbeat":
                    self.events.put_nowait((node, message))
        except asyncio.CancelledError:  # asyncio would print it as an error if it were raised again
            pass
        except (messages.HandshakeError, ValueError, KeyError, TypeError, OSError, asyncio.TimeoutError) as error:
            if node in self.members and self.members[node].writer is writer:
                is_silent = isinstance(error, (asyncio.TimeoutError, TimeoutError))
                silent = f"has sent nothing for {SILENCE_SECONDS:.0f} s"
                reason = silent if is_silent else "has closed the connection: its process was killed, or its network failed"
                self.events.put_nowait((node, {"event": "lost", "reason": reason}))
        finally:
            writer.close()

    async def wait_for_members(self) -> None:
        """Return when the agents of all nodes are connected. Raises TuningEnded if one does not connect."""
        deadline = time.monotonic() + JOIN_SECONDS
        self.heartbeat = asyncio.ensure_future(self._send_heartbeats())
        while len(self.members) < self.nodes:
            if await self.next_event(deadline) is None:
                missing = ", ".join(f"machine_rank {node}" for node in range(self.nodes) if node not in self.members)
                raise TuningEnded(1, f"{missing} passed the preflight but did not connect within {JOIN_SECONDS:.0f} s after it.")

    async def _send_heartbeats(self) -> None:
        while True:
            await self.send({"command": "heartbeat"})
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def name(self, node: int) -> str:
        return f"machine_rank {node} ({printable(self.members[node].info['host'], 100)})"

    @property
    def hosts(self) -> str:
        """The host names of the first 16 nodes."""
        return ", ".join(self.members[node].info["host"] for node in range(min(self.nodes, 16)))

    async def next_event(self, deadline: float) -> tuple[int, dict[str, Any]] | None:
        """Return (node, event), or None at the deadline. Raises TuningEnded if a node is lost or leaves."""
        try:
            node, event = await asyncio.wait_for(self.events.get(), max(0.0, deadline - time.monotonic()))
        except (asyncio.TimeoutError, TimeoutError):
            return None
        if event["event"] in ("lost", "leaving"):
            reason = printable(event["reason"], 300)
            raise TuningEnded(1, f"{self.name(node)} {reason}. The tuning ends on every node.")
        return node, event

    async def send(self, message: dict[str, Any], only: int | None = None) -> None:
        """Send a command to all nodes, or to one. A failed connection is ignored here: `next_event` reports the lost node."""

        async def send_to(member: Member) -> None:
            with contextlib.suppress(OSError, asyncio.TimeoutError, RuntimeError):
                await messages.send(member.writer, message, 5)

        await asyncio.gather(*(send_to(member) for node, member in list(self.members.items()) if only in (None, node)))

    async def print_on_all(self, text: str) -> None:
        """Print a text on every node."""
        await self.send({"command": "print", "text": text})

    async def close(self) -> None:
        if self.heartbeat:
            self.heartbeat.cancel()
        if self.server:
            self.server.close()
