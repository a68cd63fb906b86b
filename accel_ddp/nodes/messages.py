"""Messages over TCP: JSON of bounded size, exchanged only with a peer that proves that it has the key.

A process without the key receives nothing but a random number. Its connection is closed after a few seconds and a few bytes. Each
message has a MAC with a key of this connection and the number of the message, so nobody can add, change or repeat one. Messages are
not encrypted. `run_secret` has the keys. The functions at the top return a received value, or raise ValueError if it is invalid.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import types
from collections.abc import Callable
from typing import Any

LONGEST_TEXT = 2000  # characters


def printable(value: Any, longest: int = LONGEST_TEXT) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    text = "".join(letter if letter.isprintable() else " " for letter in value[: longest + 1])
    return text if len(text) <= longest else text[:longest] + "..."


def whole_number(value: Any, most: int = 10**9) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError("not a number")
    return value


def finite_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:  # false for NaN
        raise ValueError("not a number")
    return float(value)


def bounded_list(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError("not a list")
    return value


def check_shape(value: Any, shape: Any) -> None:
    """A shape is a type, a function, [shape of each], (shape of the first, of the second ...) or {key: shape}."""
    if isinstance(shape, (list, tuple)):
        is_right = isinstance(value, list) and (isinstance(shape, list) or len(value) == len(shape))
        parts = zip(value, shape * len(value) if isinstance(shape, list) else shape) if is_right else ()
    elif isinstance(shape, dict):
        is_right = isinstance(value, dict) and shape.keys() <= value.keys()
        parts = ((value[key], inner) for key, inner in shape.items()) if is_right else ()
    else:
        is_right, parts = isinstance(value, shape) if isinstance(shape, type | types.UnionType) else shape(value), ()
    if not is_right:
        raise ValueError(f"{str(value)[:40]!r} is not as expected")
    for part, inner in parts:
        check_shape(part, inner)


MAGIC = b"accel-ddp messages 4\n"  # the number changes with the format of the messages
LARGEST_MESSAGE = 1 << 20  # bytes
# The largest TCP segment of `small_segments` connections, which pass a path that drops large packets, a known fault.
SMALL_SEGMENT = 536
_NODE, _NONCE, _PROOF = 4, 16, 32  # bytes
_HANDSHAKE_SECONDS = 3.0
MOST_UNVERIFIED = 256  # connections of a server at once without a completed handshake


class HandshakeError(Exception):
    """The other side is not a process of this run. The text of the exception describes its answer."""


def make_token(port: int, script: str, secret: str) -> bytes:
    """Return the key of the doctors of one run. Only `secret` keeps other users out. Port and script keep two jobs apart."""
    return hashlib.sha256(json.dumps(["accel-ddp", port, os.path.basename(script), secret]).encode()).digest()


def make_proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    """Return the bytes that only a process with the key can make. Parts of one role always have the same lengths, except the last."""
    return hmac.digest(key, b"".join([role, *parts]), "sha256")


class Stream:
    """A connection after the handshake. `node` is the node that the other side has the key of, if nodes have different keys."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, is_client: bool, node: int = 0):
        self.reader, self.writer, self.node = reader, writer, node
        self._own, self._other = (make_proof(key, role) for role in ((b"up", b"down") if is_client else (b"down", b"up")))
        self._num_written = self._num_read = 0

    def write(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        if len(data) > LARGEST_MESSAGE:
            raise ConnectionError(f"a message of {len(data)} bytes is too large to send")
        self.writer.write(struct.pack(">I", len(data)) + data + make_proof(self._own, struct.pack(">Q", self._num_written), data))
        self._num_written += 1

    async def send(self, message: dict[str, Any], seconds: float = 10) -> None:
        """Send a message. Raises OSError if the connection is closed, and asyncio.TimeoutError if the peer does not read."""
        self.write(message)
        await asyncio.wait_for(self.writer.drain(), seconds)

    async def receive(self, seconds: float) -> dict[str, Any]:
        """Return the next message. Raises ConnectionError (closed, or not a message) and asyncio.TimeoutError."""

        async def read_frame() -> tuple[bytes, bytes]:
            (size,) = struct.unpack(">I", await self.reader.readexactly(4))
            if size > LARGEST_MESSAGE:
                raise ConnectionError(f"received a message of {size} bytes, more than the limit of {LARGEST_MESSAGE}")
            return await self.reader.readexactly(size), await self.reader.readexactly(_PROOF)

        try:
            data, proof = await asyncio.wait_for(read_frame(), seconds)
            if not hmac.compare_digest(proof, make_proof(self._other, struct.pack(">Q", self._num_read), data)):
                raise ConnectionError("received a message that the other side has not sent now")
            self._num_read += 1
            message = json.loads(data)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the connection was closed") from error
        except (ValueError, RecursionError) as error:
            raise ConnectionError("received a message that is not JSON") from error
        if not isinstance(message, dict):
            raise ConnectionError("received a message that is not a JSON object")
        return message

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.writer.wait_closed(), 1)


async def handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, node: int = 0) -> Stream:
    mine = struct.pack(">I", node) + os.urandom(_NONCE)
    try:
        writer.write(MAGIC + mine)
        theirs = await asyncio.wait_for(reader.readexactly(_NONCE), _HANDSHAKE_SECONDS)
        writer.write(make_proof(key, b"client", mine, theirs))
        answer = await asyncio.wait_for(reader.readexactly(_PROOF), _HANDSHAKE_SECONDS)
    except asyncio.IncompleteReadError as error:
        raise HandshakeError("it refused our token" if error.expected == _PROOF else "it closed the connection") from error
    except (asyncio.TimeoutError, TimeoutError) as error:
        raise HandshakeError(f"it did not answer within {_HANDSHAKE_SECONDS:.0f} s") from error
    if not hmac.compare_digest(answer, make_proof(key, b"server", mine, theirs)):
        raise HandshakeError("it has another token, or is another program")
    return Stream(reader, writer, make_proof(key, b"session", mine, theirs), is_client=True, node=node)


class Door:
    """The handshakes of a server. `find_key` returns the key of a node, or None if there is no such node."""

    def __init__(self, find_key: Callable[[int], bytes | None], most_unverified: int = MOST_UNVERIFIED):
        self.find_key, self.most_unverified = find_key, most_unverified
        self.unverified: dict[asyncio.StreamWriter, None] = {}  # in the order in which they connected

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Stream:
        """Return the connection of a client that has the key. Raises HandshakeError. Each client has a few seconds."""
        if len(self.unverified) >= self.most_unverified:  # the oldest connection without a handshake makes room
            oldest = next(iter(self.unverified))
            del self.unverified[oldest]
            oldest.close()
        self.unverified[writer] = None
        try:
            return await asyncio.wait_for(self._verify(reader, writer), 2 * _HANDSHAKE_SECONDS)
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, TimeoutError) as error:
            raise HandshakeError("it closed the connection, or did not answer in time") from error
        finally:
            self.unverified.pop(writer, None)

    async def _verify(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Stream:
        opening = await asyncio.wait_for(reader.readexactly(len(MAGIC) + _NODE + _NONCE), _HANDSHAKE_SECONDS)
        if opening[: len(MAGIC)] != MAGIC:
            raise HandshakeError("it is another program, or another version of accel_ddp")
        theirs, mine = opening[len(MAGIC) :], os.urandom(_NONCE)
        (node,) = struct.unpack(">I", theirs[:_NODE])
        writer.write(mine)
        answer = await reader.readexactly(_PROOF)
        key = self.find_key(node)
        if key is None or not hmac.compare_digest(answer, make_proof(key, b"client", theirs, mine)):
            raise HandshakeError("it has another token")
        writer.write(make_proof(key, b"server", theirs, mine))
        return Stream(reader, writer, make_proof(key, b"session", theirs, mine), is_client=False, node=node)


def find_free_port(ip: str) -> int:
    with open_listening_socket(ip, 0) as sock:
        return sock.getsockname()[1]


def open_listening_socket(ip: str, port: int, small_segments: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if small_segments:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)
        sock.bind((ip, port))
        sock.listen(128)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


async def connect(
    ip: str, port: int, seconds: float, small_segments: bool = False
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if small_segments:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, (ip, port)), seconds)
        # If nothing listens on a port of this machine, the kernel may connect a client with the same port to itself.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError(111, "Connection refused")
        return await asyncio.open_connection(sock=sock)
    except asyncio.TimeoutError:
        sock.close()
        raise TimeoutError from None
    except BaseException:
        sock.close()
        raise
