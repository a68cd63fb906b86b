"""The parents of all nodes: the main node's conducts, and every one attends, also its own.

Each says something every second, so that a node that dies, hangs or is cut off is named on all others within seconds.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from accel_ddp.net import messages
from accel_ddp.net.sanitize import printable
from accel_ddp.tune.ranks import Ranks

BEAT, SILENT = 1.0, 10.0  # seconds
_COME = 30.0  # for a parent to come from the preflight to here


class Ended(Exception):
    """The tuning is over on every node: (exit code, words)."""


class Conductor:
    """The main node's ear and voice."""

    def __init__(self, nodes: int, token: bytes):
        self.nodes, self.token = nodes, token
        self.members: dict[int, tuple[dict[str, Any], asyncio.StreamWriter]] = {}
        self.heard: asyncio.Queue[tuple[int, dict[str, Any]]] = asyncio.Queue()
        self.beating: asyncio.Future | None = None

    async def open(self, ip: str, port: int) -> None:
        self.server = await asyncio.start_server(self._visit, sock=messages.open_listening_socket(ip, port))

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = None
        try:
            await messages.handshake(reader, writer, self.token, is_client=False)
            hello = await messages.receive(reader, SILENT)
            node = int(hello["node"])
            if node in self.members or not 0 <= node < self.nodes:
                raise ValueError("not expected")
            self.members[node] = (hello, writer)
            self.heard.put_nowait((node, {"here": True}))
            while True:
                message = await messages.receive(reader, SILENT)
                if not message.get("beat"):
                    self.heard.put_nowait((node, message))
        except asyncio.CancelledError:  # raised again it would be printed as a fault
            pass
        except (messages.HandshakeError, ValueError, KeyError, TypeError, OSError, asyncio.TimeoutError) as error:
            if node in self.members and self.members[node][1] is writer:
                silent = isinstance(error, (asyncio.TimeoutError, TimeoutError))
                why = f"has said nothing for {SILENT:.0f} s" if silent else "is gone: its process ended, or its network did"
                self.heard.put_nowait((node, {"lost": why}))
        finally:
            writer.close()

    async def gather(self) -> None:
        """Until all are here; Ended where one does not come."""
        deadline = time.monotonic() + _COME
        self.beating = asyncio.ensure_future(self._beat())
        while len(self.members) < self.nodes:
            if await self.next(deadline) is None:
                missing = ", ".join(f"machine_rank {node}" for node in range(self.nodes) if node not in self.members)
                raise Ended(1, f"{missing} passed the preflight and did not come to the tuning within {_COME:.0f} s.")

    async def _beat(self) -> None:
        while True:
            await self.tell({"do": "beat"})
            await asyncio.sleep(BEAT)

    def name(self, node: int) -> str:
        return f"machine_rank {node} ({printable(self.members[node][0]['host'], 100)})"

    async def next(self, deadline: float) -> tuple[int, dict[str, Any]] | None:
        """What a node says next; None at the deadline; Ended where one is lost or leaves."""
        try:
            node, message = await asyncio.wait_for(self.heard.get(), max(0.0, deadline - time.monotonic()))
        except (asyncio.TimeoutError, TimeoutError):
            return None
        if "lost" in message:
            raise Ended(1, f"{self.name(node)} {message['lost']}. The tuning is ended on every node.")
        if "gone" in message:
            why = printable(message["gone"], 300)
            raise Ended(1, f"{self.name(node)} {why}. The tuning is ended on every node.")
        return node, message

    async def tell(self, message: dict[str, Any], only: int | None = None) -> None:
        async def one(writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.TimeoutError, RuntimeError):
                await messages.send(writer, message, 5)

        await asyncio.gather(*(one(writer) for node, (_, writer) in list(self.members.items()) if only in (None, node)))

    async def say(self, text: str) -> None:
        """On every node."""
        await self.tell({"do": "say", "text": text})

    async def close(self) -> None:
        if self.beating:
            self.beating.cancel()
        self.server.close()


async def attend(
    ip: str, port: int, token: bytes, hello: dict[str, Any], make_ranks: Callable[[Callable[[dict], None]], Ranks],
    write: Callable[[dict[str, str]], list[str]], leaving: asyncio.Future,
) -> int:  # fmt: skip
    """A node's part: start and end ranks as it is told, and print what all print. The exit code. `leaving` is Ctrl-C's."""
    reader, writer = await _reach(ip, port, token)
    outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    ranks = make_ranks(outbox.put_nowait)

    async def send() -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            while True:
                message = {"beat": True}
                with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                    message = await asyncio.wait_for(outbox.get(), BEAT)
                await messages.send(writer, message)

    await messages.send(writer, hello)
    sending = asyncio.ensure_future(send())
    code = 1
    try:
        while True:
            receiving = asyncio.ensure_future(messages.receive(reader, SILENT))
            await asyncio.wait([receiving, leaving], return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                receiving.cancel()
                sending.cancel()
                await asyncio.gather(receiving, sending, return_exceptions=True)
                await messages.send(writer, {"gone": f"was ended by {leaving.result()}"}, 2)
                print(f"ended by {leaving.result()}; the other nodes are told.", flush=True)
                return 130
            message = receiving.result()
            do = message["do"]
            if do == "say":
                print("\n".join(printable(line) for line in message["text"].split("\n")), flush=True)
            elif do == "trial":
                ranks.start(message["trial"], message["port"], message["settings"], message["spec"])
            elif do == "kill":
                ranks.kill()
            elif do == "write":
                outbox.put_nowait({"wrote": await asyncio.to_thread(write, message["files"])})
            elif do == "end":
                code = int(message["code"])
                if message["text"]:
                    print("\n".join(printable(line) for line in message["text"].split("\n")), flush=True)
                return code
    except (OSError, asyncio.TimeoutError, KeyError, TypeError, ValueError) as error:
        how = f"has said nothing for {SILENT:.0f} s" if isinstance(error, (asyncio.TimeoutError, TimeoutError)) else "is gone"
        how = how if isinstance(error, (OSError, asyncio.TimeoutError)) else f"sent what is no message of a tune ({error})"
        print(
            f"the main node ({ip}:{port}) {how}: its tune was ended, or its network failed. Look at its screen, and start "
            "again on every node.",
            flush=True,
        )
        return code
    finally:
        sending.cancel()
        await ranks.close()
        await messages.close(writer)


async def _reach(ip: str, port: int, token: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The conductor's; OSError where it does not open within the time that is given to come."""
    deadline = time.monotonic() + _COME
    while True:
        try:
            reader, writer = await messages.connect(ip, port, 5)
            await messages.handshake(reader, writer, token, is_client=True)
            return reader, writer
        except (OSError, asyncio.TimeoutError, messages.HandshakeError) as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"the main node does not answer at {ip}:{port}: {error}") from error
            await asyncio.sleep(0.1)
