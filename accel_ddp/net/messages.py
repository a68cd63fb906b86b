"""Messages between the doctors of the nodes: JSON of bounded size, only with a peer that shows the run's token.

A stranger who connects is told nothing but a random number, and is dropped after a few seconds and a few bytes.
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

MAGIC = b"accel-ddp doctor 1\n"
LARGEST = 1 << 20  # bytes of a message
SMALL_SEGMENT = 536  # words must get through a path that swallows large packets: those are what `paths` tests
_NONCE, _PROOF = 16, 32
_GREETING_SECONDS = 3.0


class Stranger(Exception):
    """The other side is no doctor of this run."""


def token_of(port: int, script: str, given: str) -> bytes:
    """What the nodes of one run have in common. Only `--token` is a secret; the rest keeps two jobs apart."""
    return hashlib.sha256(json.dumps(["accel-ddp", port, os.path.basename(script), given]).encode()).digest()


def _proof(token: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.new(token, b"".join([role, *nonces]), "sha256").digest()


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, comes: bool) -> None:
    """Both sides show that they have the token, without sending it; Stranger where the other has not."""
    mine = os.urandom(_NONCE)
    try:
        if comes:
            writer.write(MAGIC + mine)
            theirs = await asyncio.wait_for(reader.readexactly(_NONCE), _GREETING_SECONDS)
            writer.write(_proof(token, b"comes", mine, theirs))
            answer = await asyncio.wait_for(reader.readexactly(_PROOF), _GREETING_SECONDS)
            if not hmac.compare_digest(answer, _proof(token, b"hosts", theirs, mine)):
                raise Stranger("it does not have our token")
            return
        hello = await asyncio.wait_for(reader.readexactly(len(MAGIC) + _NONCE), _GREETING_SECONDS)
        if hello[: len(MAGIC)] != MAGIC:
            raise Stranger("it is no doctor")
        theirs = hello[len(MAGIC) :]
        writer.write(mine)
        answer = await asyncio.wait_for(reader.readexactly(_PROOF), _GREETING_SECONDS)
        if not hmac.compare_digest(answer, _proof(token, b"comes", theirs, mine)):
            raise Stranger("it does not have our token")
        writer.write(_proof(token, b"hosts", mine, theirs))
    except asyncio.IncompleteReadError as error:
        closed_after_nonce = comes and error.expected == _PROOF
        raise Stranger("it refused our token" if closed_after_nonce else "it closed the connection") from error
    except (asyncio.TimeoutError, TimeoutError) as error:
        raise Stranger("it did not answer as a doctor does") from error


async def send(writer: asyncio.StreamWriter, message: dict[str, Any], seconds: float = 10) -> None:
    data = json.dumps(message).encode()
    if len(data) > LARGEST:
        raise ConnectionError(f"a message of {len(data)} bytes is too large to send")
    writer.write(struct.pack(">I", len(data)) + data)
    await asyncio.wait_for(writer.drain(), seconds)


async def receive(reader: asyncio.StreamReader, seconds: float) -> dict[str, Any]:
    """The next message; ConnectionError where the peer is gone or sends what is none."""

    async def whole_message() -> bytes:
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        if size > LARGEST:
            raise ConnectionError(f"a message of {size} bytes")
        return await reader.readexactly(size)

    try:
        message = json.loads(await asyncio.wait_for(whole_message(), seconds))
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the connection was closed") from error
    except (ValueError, RecursionError) as error:
        raise ConnectionError("a message that is not JSON") from error
    if not isinstance(message, dict):
        raise ConnectionError("a message that is no dictionary")
    return message


def listening_socket(ip: str, port: int, small: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if small:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)
        sock.bind((ip, port))
        sock.listen(128)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


async def connect(ip: str, port: int, seconds: float, small: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection, or the OSError that says why not; TimeoutError where nothing answers."""
    sock = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if small:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, (ip, port)), seconds)
        if sock.getsockname() == sock.getpeername():  # a port of this machine may connect to itself when nobody listens
            raise ConnectionRefusedError(111, "Connection refused")
        return await asyncio.open_connection(sock=sock)
    except asyncio.TimeoutError:
        sock.close()
        raise TimeoutError from None
    except BaseException:
        sock.close()
        raise


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(Exception):
        await asyncio.wait_for(writer.wait_closed(), 1)
