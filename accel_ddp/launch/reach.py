"""Checks that every node reaches the main node at the main address and port, before anything is started there.

torch waits up to 15 minutes for a node that cannot connect. The guard of the main node listens at the port for a moment, and the
guards of all nodes connect.
"""

import asyncio
import contextlib
import os
import secrets
import socket
from typing import Any

CONNECT_SECONDS = 5.0


class Listener:
    """Listens at the main port and sends a word to each node that connects, which shows that the address is that of this node."""

    def __init__(self) -> None:
        self.server: asyncio.Server | None = None

    async def open(self, port: int, word: str) -> str:
        """Listen. Return an error, or ""."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                writer.write(word.encode() + b"\n")
                # The other side closes first, so that this port is free at once.
                await asyncio.wait_for(reader.read(), CONNECT_SECONDS)
            writer.close()

        try:
            self.server = await asyncio.start_server(answer, None, port)
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
        return ""

    def close(self) -> None:
        if self.server:
            self.server.close()


async def connect(address: str, port: int, word: str) -> str:
    """Return why this node does not reach the main node, or ""."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port), CONNECT_SECONDS)
    except asyncio.TimeoutError:
        return f"no answer within {CONNECT_SECONDS:.0f} s. A firewall may drop the packets"
    except socket.gaierror:
        return "this name cannot be resolved there"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)  # asyncio puts the address into strerror
    try:
        line = await asyncio.wait_for(reader.readline(), CONNECT_SECONDS)
        return "" if line == word.encode() + b"\n" else "another machine or program answers there"
    except (OSError, asyncio.TimeoutError):
        return "another machine or program answers there"
    finally:
        writer.close()


async def check(connections: list[Any], address: str, port: int) -> list[str]:
    """Return the errors of the nodes that do not reach the main node. `connections` are those to the guards of all nodes."""
    word, main = secrets.token_hex(8), connections[0].node.host
    file = connections[0].cluster.file
    opened = await connections[0].ask("listen", "listening", port=port, word=word)
    if opened["error"]:
        return [f"{main}: main_port {port}: {opened['error']}. Write another main_port into {file}."]
    ask = lambda connection: connection.ask("connect", "connected", address=address, port=port, word=word)
    answers = await asyncio.gather(*map(ask, connections))
    await connections[0].ask("unlisten", "unlistened")
    advice = f"Write an address of {main} that all nodes reach into main_address in {file}, and allow all TCP between the nodes."
    return [
        f"{connection.node.host}: does not reach {main} at main_address {address}, main_port {port}: {answer['error']}. {advice}"
        for connection, answer in zip(connections, answers)
        if answer["error"]
    ]
