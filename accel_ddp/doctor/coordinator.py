"""The connections between a coordinator on one node and all nodes, shared by `accel-ddp doctor`, the preflight and `accel-ddp tune`.

Messages are JSON objects. The coordinator sends requests, whose kind is the value of "do". `wait` requests nothing, and `close` is
the last one. A node first sends a description of itself (`hello`), then answers and events. Both sides send something every 2 s, so
a side that sends nothing for several times this long has died, hangs or has lost its network.

A node that cannot use the main address finds the coordinator by a broadcast. If the address is wrong on every node, the others would
otherwise wait for it. Cloud networks deliver no broadcasts, so there the other nodes report after their own time limit.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import os
import select
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import psutil

from accel_ddp.doctor.host import external_interfaces
from accel_ddp.nodes import messages, probe
from accel_ddp.nodes.messages import Stream, make_proof, printable

Message = dict[str, Any]

KEEPALIVE_SECONDS = 2.0
OTHER_PROGRAM = "other program"  # a result of `try_port`, besides the results of a probe
_HELLO_SECONDS = 10.0
_MOST_MEMBERS = 8192
_MOST_UNREAD = 256  # messages; a member that sends more waits until they are read
_MOST_SEEKERS = 64
_BROADCAST_SECONDS = 0.3
_NONCE, _PROOF = 16, 32  # bytes
_QUERY, _SAME, _OTHER = b"accel-ddp query", b"accel-ddp same", b"accel-ddp other"


@dataclass(eq=False)
class Member:
    """A process that has connected and described itself: one per node, or one per rank under a launcher."""

    hello: Message
    stream: Stream
    lost: str = ""  # what happened to its connection; empty while it is open
    is_silent: bool = False  # it did not answer a request, and receives no further ones

    async def send(self, message: Message) -> None:
        """Send a message. A failure is ignored, because the reading side reports the lost connection."""
        if not self.lost:
            with contextlib.suppress(OSError, asyncio.TimeoutError, RuntimeError):
                await self.stream.send(message, 5)


class Coordinator:
    """Accepts nodes with the token. A subclass has `read_hello` (ValueError ... for a bad one), perhaps `join` and `take`."""

    def __init__(self, find_key: Callable[[int], bytes | None], silence_seconds: float):
        self.door, self.silence_seconds = messages.Door(find_key), silence_seconds
        self.members: list[Member] = []
        self.changed = asyncio.Event()  # set when a node connects or is lost
        self.inbox: asyncio.Queue[tuple[Member, Message]] = asyncio.Queue(_MOST_UNREAD)
        self.servers: list[asyncio.Server] = []
        self.num_rejected = 0
        self.keeping_alive: asyncio.Future | None = None

    async def listen(self, ip: str, port: int) -> None:
        sock = messages.open_listening_socket(ip, port, small_segments=True)
        self.servers.append(await asyncio.start_server(self._serve, sock=sock, limit=1 << 16))
        self.keeping_alive = self.keeping_alive or asyncio.ensure_future(self._keep_alive())

    def stop_listening(self) -> None:
        for server in self.servers:
            server.close()

    async def close(self) -> None:
        self.stop_listening()
        if self.keeping_alive:
            self.keeping_alive.cancel()

    async def join(self, member: Member) -> None:
        """Add a node to the members. Raises ValueError if it is not expected."""
        self.members.append(member)
        self.changed.set()

    async def take(self, member: Member, message: Message) -> None:
        """Handle a message. The default is to queue it for `receive`."""
        await self.inbox.put((member, message))

    async def _verify(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Member | None:
        try:
            stream = await self.door.admit(reader, writer)
            hello = self.read_hello(await stream.receive(_HELLO_SECONDS))
            if len(self.members) >= _MOST_MEMBERS:
                raise ValueError("too many members")
            return Member(hello, stream)
        except asyncio.CancelledError:  # the event loop ends; it would print the exception if it were raised again
            return None
        except Exception:  # a process without the token can send anything
            self.num_rejected += 1
            return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if member := await self._verify(reader, writer):
            try:
                await self.join(member)
                while True:
                    message = await member.stream.receive(self.silence_seconds)
                    if message.get("event") != "alive":
                        await self.take(member, message)
            except (Exception, asyncio.CancelledError) as error:  # raised again, the event loop would print it
                member.lost = describe_loss(error, self.silence_seconds)
            if member in self.members:
                with contextlib.suppress(asyncio.QueueFull):  # then `receive` does not wait
                    self.inbox.put_nowait((member, {}))
            self.changed.set()
        writer.close()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEPALIVE_SECONDS)
            await self.send_to_all({"do": "wait"})

    async def send_to_all(self, message: Message) -> None:
        await asyncio.gather(*(member.send(message) for member in self.members))

    async def receive(self, deadline: float) -> tuple[Member, Message] | None:
        """Return the next message and its sender, or None at the deadline. The last message of a lost member is empty."""
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self.inbox.get(), max(0.0, deadline - time.monotonic()))
        return None

    async def collect_answers(self, members: Iterable[Member], seconds: float) -> dict[Member, Message]:
        """Return the next message of each of these members. A member that is lost, or sends none in time, has no entry."""
        waiting, answers = {member for member in members if not member.lost}, {}
        deadline = time.monotonic() + seconds
        while waiting and (received := await self.receive(deadline)):
            member, answer = received
            if member in waiting:
                waiting.discard(member)
                answers |= {member: answer} if answer else {}
        return answers


def describe_loss(error: BaseException, silence_seconds: float) -> str:
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
        return f"has sent nothing for {silence_seconds:.0f} s"
    is_closed = isinstance(error, (OSError, asyncio.CancelledError))
    return "has closed the connection" if is_closed else f"sent an invalid message ({error})"


class CoordinatorClient:
    def __init__(self, stream: Stream, silence_seconds: float):
        self.stream, self.silence_seconds = stream, silence_seconds
        self.outbox: asyncio.Queue[Message] = asyncio.Queue()  # answers and events

    async def follow(self, hello: Message, answer: Callable[[Message], Awaitable[None]]) -> Message:
        """Answer requests until the last one. OSError or TimeoutError: the connection is lost; ValueError ...: bad request."""
        self.outbox.put_nowait(hello)
        sending = asyncio.ensure_future(self._send())
        try:
            while True:
                request = await self.stream.receive(self.silence_seconds)
                if request["do"] == "close":
                    return request
                if request["do"] != "wait":
                    await answer(request)
        finally:
            sending.cancel()
            await self.stream.close()

    async def _send(self) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):  # `follow` reports the lost connection
            while True:
                message: Message = {"event": "alive"}
                with contextlib.suppress(asyncio.TimeoutError):
                    message = await asyncio.wait_for(self.outbox.get(), KEEPALIVE_SECONDS)
                await self.stream.send(message)


async def try_port(ip: str, port: int, key: bytes, node: int = 0) -> Stream | tuple[str, str]:
    try:
        reader, writer = await messages.connect(ip, port, 3.0, small_segments=True)
    except (OSError, asyncio.TimeoutError) as error:
        return probe.classify_error(error), getattr(error, "strerror", "") or ""
    try:
        return await messages.handshake(reader, writer, key, node)
    except (messages.HandshakeError, OSError) as error:
        writer.close()
        return OTHER_PROGRAM, str(error)


class Responder(asyncio.DatagramProtocol):
    """Answers broadcasts of nodes that look for a coordinator with this token. `seekers` are those with another main address."""

    def __init__(self, token: bytes, main_address: str):
        self.token, self.main_address = token, main_address.encode()
        self.transport: asyncio.DatagramTransport | None = None
        self.seekers: dict[str, str] = {}  # address of a node -> the main address that it was given

    async def open(self, port: int) -> None:
        """Listen on a UDP port. Errors are ignored, because discovery is optional."""
        with contextlib.suppress(OSError):
            loop = asyncio.get_running_loop()
            # A socket that is bound to the address of an interface receives no broadcasts.
            self.transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("0.0.0.0", port))

    def close(self) -> None:
        if self.transport:
            self.transport.close()

    def datagram_received(self, data: bytes, sender: tuple) -> None:
        nonce, proof, wanted = data[:_NONCE], data[_NONCE : _NONCE + _PROOF], data[_NONCE + _PROOF :]
        if not hmac.compare_digest(proof, make_proof(self.token, _QUERY, nonce, wanted)) or not self.transport:
            return
        if wanted != self.main_address and len(self.seekers) < _MOST_SEEKERS:
            self.seekers[sender[0]] = printable(wanted.decode(errors="replace"))
        self.transport.sendto(make_proof(self.token, _SAME if wanted == self.main_address else _OTHER, nonce), sender)


def find_coordinator(token: bytes, main_address: str, port: int) -> tuple[str, bool]:
    """Ask by broadcast. Return an address or "", and whether its main address is ours; else it may be of another run."""
    nonce, wanted = os.urandom(_NONCE), main_address.encode()
    query = nonce + make_proof(token, _QUERY, nonce, wanted) + wanted
    same, other = (make_proof(token, kind, nonce) for kind in (_SAME, _OTHER))
    found = ""
    with contextlib.ExitStack() as stack:
        sockets = []
        entries = psutil.net_if_addrs()
        for entry in (entry for name in external_interfaces() for entry in entries.get(name, ())):
            if entry.family != socket.AF_INET or not entry.netmask:
                continue
            broadcast = str(ipaddress.ip_network(f"{entry.address}/{entry.netmask}", strict=False).broadcast_address)
            with contextlib.suppress(OSError):  # an interface that is just going down
                sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                sock.bind((entry.address, 0))
                sock.sendto(query, (broadcast, port))
                sockets.append(sock)
        deadline = time.monotonic() + _BROADCAST_SECONDS
        while sockets and (left := deadline - time.monotonic()) > 0:
            for sock in select.select(sockets, [], [], left)[0]:
                with contextlib.suppress(OSError):
                    data, sender = sock.recvfrom(256)
                    if hmac.compare_digest(data, same):
                        return sender[0], True
                    if hmac.compare_digest(data, other):
                        found = sender[0]
    return found, False
