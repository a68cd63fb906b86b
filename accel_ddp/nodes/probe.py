"""Probes of the path from one node to another: whether it works, its round trip, and how many bytes per second it transfers."""

import asyncio
import contextlib
import errno
import statistics
import time
from typing import Any

from accel_ddp.nodes import messages
from accel_ddp.nodes.messages import whole_number

CONNECT_SECONDS = 4.0  # TCP repeats a lost SYN after 1 and 3 s
STALL_SECONDS = 3.0
PAYLOAD = 256 << 10  # bytes: many packets of any size that a path may drop
MOST = 64 << 20  # bytes of one measurement
_PINGS = 10
_SMALLEST, _LARGEST, _TRANSFERS, _LONG_ENOUGH, _RATE_SECONDS = 64 << 10, 16 << 20, 6, 0.05, 8.0  # of `measure_rate`
_MOST_CONNECTIONS = 1024  # at once; those without the token are closed after 6 s

# The results of a probe.
OK, DROPPED, REFUSED, UNREACHABLE, STALLED, CUT = "ok", "dropped", "refused", "unreachable", "stalled", "cut"


class ProbeServer:
    def __init__(self, token: bytes):
        self.door = messages.Door(lambda node: token, _MOST_CONNECTIONS)  # all nodes probe at once
        self.servers: list[asyncio.Server] = []
        self.ports: list[int] = []

    async def open(self, ip: str, num_ports: int = 2) -> None:
        for _ in range(num_ports):
            sock = messages.open_listening_socket(ip, 0)
            self.servers.append(await asyncio.start_server(self._serve, sock=sock, limit=1 << 20))
            self.ports.append(sock.getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve_transfers(await self.door.admit(reader, writer))
        except (messages.HandshakeError, OSError, ValueError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # the event loop would print these as errors when it ends
        finally:
            writer.close()

    async def close(self) -> None:
        for server in self.servers:
            server.close()


async def serve_transfers(stream: messages.Stream, request: dict[str, Any] | None = None) -> None:
    """Receive what the other side sends to measure the path. `request` is its first message, if that was already read."""
    for _ in range(4 * _PINGS):  # a bound for peers that send requests without end
        request = request or await stream.receive(3 * STALL_SECONDS)
        size = whole_number(request.get("bytes", 0), MOST)
        request, left = None, size
        while left:
            # Longer than the sender's timeout: the side that gives up first decides whether the path looks stalled or cut.
            piece = await asyncio.wait_for(stream.reader.read(min(left, 1 << 20)), 4 * STALL_SECONDS)
            if not piece:
                return
            left -= len(piece)
        await stream.send({"got": size})


def classify_error(error: BaseException) -> str:
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return DROPPED
    if isinstance(error, ConnectionRefusedError):
        return REFUSED
    unreachable = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EACCES, errno.EPERM)
    return UNREACHABLE if getattr(error, "errno", None) in unreachable else CUT


async def probe(ip: str, ports: list[int], token: bytes, measures: bool) -> dict[str, Any]:
    if not ports:  # that node could not open any, and reports this itself
        return {"how": CUT, "port": 0}
    result: dict[str, Any] = {"how": OK, "port": ports[0]}
    writers = []
    try:
        for port in ports:
            result["port"] = port
            try:
                reader, writer = await messages.connect(ip, port, CONNECT_SECONDS)
            except (OSError, asyncio.TimeoutError) as error:
                return {**result, "how": classify_error(error)}
            writers.append(writer)
            try:
                stream = await messages.handshake(reader, writer, token)
            except (messages.HandshakeError, OSError):
                return {**result, "how": CUT}

        try:
            result["seconds"] = statistics.median([await _transfer(stream, 0, STALL_SECONDS) for _ in range(_PINGS)])
            seconds = await _transfer(stream, PAYLOAD, 2 * STALL_SECONDS)
            result["rate"] = PAYLOAD / seconds
            if measures:  # as much as this path transfers in about a third of a second
                size = int(min(MOST, max(PAYLOAD, 0.3 * PAYLOAD / seconds)))
                result["rate"] = max(size / await _transfer(stream, size, 10), result["rate"])
        except asyncio.TimeoutError:
            return {**result, "how": STALLED}
        except OSError:
            return {**result, "how": CUT}
        return result
    finally:
        for writer in writers:
            with contextlib.suppress(Exception):
                writer.close()


async def measure_rate(ip: str, port: int, key: bytes, node: int = 0) -> float | None:
    """Return bytes per second or None. Sends as little as possible during a training: 4 times more until it can be measured."""
    try:
        reader, writer = await messages.connect(ip, port, CONNECT_SECONDS)
    except (OSError, asyncio.TimeoutError):
        return None
    best, size = 0.0, _SMALLEST
    try:
        stream = await messages.handshake(reader, writer, key, node)
        for _ in range(_TRANSFERS):
            began = time.monotonic()
            try:
                seconds = await _transfer(stream, size, _RATE_SECONDS)
            except asyncio.TimeoutError:
                return best or size / (time.monotonic() - began)  # at most this
            best = max(best, size / seconds)
            if seconds > 10 * _LONG_ENOUGH:
                break  # the path is so slow that more transfers would only delay the training
            if seconds < _LONG_ENOUGH and size < _LARGEST:
                size *= 4
    except (messages.HandshakeError, OSError):
        return best or None
    finally:
        writer.close()
    return best


async def _transfer(stream: messages.Stream, size: int, seconds: float) -> float:
    began = time.monotonic()
    await stream.send({"bytes": size})
    block = bytes(min(size, 1 << 20))
    for at in range(0, size, len(block) or 1):
        stream.writer.write(block[: size - at])
        await asyncio.wait_for(stream.writer.drain(), seconds)
    await stream.receive(seconds)
    return time.monotonic() - began
