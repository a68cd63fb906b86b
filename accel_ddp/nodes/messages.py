"""Messages over TCP: JSON of bounded size, exchanged only with a peer that proves that it has the run's token.

A process without the token receives nothing but a random number. Its connection is closed after a few seconds and a few bytes. The
functions at the top validate received values: each returns the value, or raises ValueError.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
from typing import Any

LONGEST_TEXT = 2000  # characters


def printable(value: Any, longest: int = LONGEST_TEXT) -> str:
    """Return a text of at most `longest` characters without those that move a terminal's cursor."""
    if not isinstance(value, str):
        raise ValueError("not a text")
    text = "".join(letter if letter.isprintable() else " " for letter in value[: longest + 1])
    return text if len(text) <= longest else text[:longest] + "..."


def whole_number(value: Any, most: int = 10**9) -> int | None:
    """Return a whole number from 0 to `most`, or None if `value` is None."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError("not a number")
    return value


def finite_number(value: Any) -> float:
    """Return a number that is neither NaN nor infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:  # false for NaN
        raise ValueError("not a number")
    return float(value)


def bounded_list(value: Any, most: int) -> list[Any]:
    """Return a list of at most `most` entries."""
    if not isinstance(value, list) or len(value) > most:
        raise ValueError("not a list")
    return value


MAGIC = b"accel-ddp messages 3\n"  # the number changes with the format of the messages
LARGEST_MESSAGE = 1 << 20  # bytes
# The largest TCP segment of `small_segments` connections. Control messages then pass a network path that drops large packets,
# which is one of the faults that the doctor reports.
SMALL_SEGMENT = 536
_NONCE, _PROOF = 16, 32  # bytes
_HANDSHAKE_SECONDS = 3.0


class HandshakeError(Exception):
    """The other side is not a process of this run. The text of the exception describes its answer."""


def make_token(port: int, script: str, secret: str) -> bytes:
    """Return the token that the processes of one run share.

    Only `secret` (--token) keeps other users out. Port and script only keep two jobs apart.
    """
    return hashlib.sha256(json.dumps(["accel-ddp", port, os.path.basename(script), secret]).encode()).digest()


def make_proof(token: bytes, role: bytes, *nonces: bytes) -> bytes:
    """Return the bytes by which a client or a server proves that it has the token, without sending the token."""
    return hmac.new(token, b"".join([role, *nonces]), "sha256").digest()


async def handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, is_client: bool) -> None:
    """Prove to the other side that this process has the token, and require the same. Raises HandshakeError."""
    mine = os.urandom(_NONCE)
    try:
        if is_client:
            writer.write(MAGIC + mine)
            theirs = await asyncio.wait_for(reader.readexactly(_NONCE), _HANDSHAKE_SECONDS)
            writer.write(make_proof(token, b"client", mine, theirs))
            answer = await asyncio.wait_for(reader.readexactly(_PROOF), _HANDSHAKE_SECONDS)
            if not hmac.compare_digest(answer, make_proof(token, b"server", theirs, mine)):
                raise HandshakeError("it has another token, or is another program")
            return
        opening = await asyncio.wait_for(reader.readexactly(len(MAGIC) + _NONCE), _HANDSHAKE_SECONDS)
        if opening[: len(MAGIC)] != MAGIC:
            raise HandshakeError("it is another program, or another version of accel_ddp")
        theirs = opening[len(MAGIC) :]
        writer.write(mine)
        answer = await asyncio.wait_for(reader.readexactly(_PROOF), _HANDSHAKE_SECONDS)
        if not hmac.compare_digest(answer, make_proof(token, b"client", theirs, mine)):
            raise HandshakeError("it has another token")
        writer.write(make_proof(token, b"server", mine, theirs))
    except asyncio.IncompleteReadError as error:
        closed_after_nonce = is_client and error.expected == _PROOF
        raise HandshakeError("it refused our token" if closed_after_nonce else "it closed the connection") from error
    except (asyncio.TimeoutError, TimeoutError) as error:
        raise HandshakeError(f"it did not answer within {_HANDSHAKE_SECONDS:.0f} s") from error


def encode(message: dict[str, Any]) -> bytes:
    """Return the bytes of a message. Raises ConnectionError if the message is too large."""
    data = json.dumps(message).encode()
    if len(data) > LARGEST_MESSAGE:
        raise ConnectionError(f"a message of {len(data)} bytes is too large to send")
    return struct.pack(">I", len(data)) + data


async def send(writer: asyncio.StreamWriter, message: dict[str, Any], seconds: float = 10) -> None:
    """Send a message. Raises OSError if the connection is closed, and asyncio.TimeoutError if the peer does not read."""
    writer.write(encode(message))
    await asyncio.wait_for(writer.drain(), seconds)


async def receive(reader: asyncio.StreamReader, seconds: float) -> dict[str, Any]:
    """Return the next message.

    Raises ConnectionError if the peer closed the connection or sent an invalid message, and asyncio.TimeoutError.
    """

    async def read_frame() -> bytes:
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        if size > LARGEST_MESSAGE:
            raise ConnectionError(f"received a message of {size} bytes, more than the limit of {LARGEST_MESSAGE}")
        return await reader.readexactly(size)

    try:
        message = json.loads(await asyncio.wait_for(read_frame(), seconds))
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the connection was closed") from error
    except (ValueError, RecursionError) as error:
        raise ConnectionError("received a message that is not JSON") from error
    if not isinstance(message, dict):
        raise ConnectionError("received a message that is not a JSON object")
    return message


def find_free_port(ip: str) -> int:
    """Return a port of this address that nothing listens on at this moment."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as sock:
        sock.bind((ip, 0))
        return sock.getsockname()[1]


def open_listening_socket(ip: str, port: int, small_segments: bool = False) -> socket.socket:
    """Return a socket that listens on this address and port; port 0 means any free one. Raises OSError."""
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
    """Return a connection. Raises the OSError of `connect`, and TimeoutError if nothing answers within `seconds`."""
    sock = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if small_segments:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, (ip, port)), seconds)
        # If nothing listens on a port of this machine, the kernel may choose the same port for the client and connect it
        # to itself.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError(111, "Connection refused")
        return await asyncio.open_connection(sock=sock)
    except asyncio.TimeoutError:
        sock.close()
        raise TimeoutError from None
    except BaseException:
        sock.close()
        raise


async def close(writer: asyncio.StreamWriter) -> None:
    """Close a connection and wait up to a second until its buffers are sent."""
    writer.close()
    with contextlib.suppress(Exception):
        await asyncio.wait_for(writer.wait_closed(), 1)
