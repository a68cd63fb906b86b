"""A node's side of the tuning: one agent per node connects to the coordinator and executes its commands."""

import asyncio
import contextlib
import time
from typing import Any

from accel_ddp.doctor.collective_launch import WorkerProcesses
from accel_ddp.errors import INTERRUPTED
from accel_ddp.measure import tune_results
from accel_ddp.measure.trials import HEARTBEAT_SECONDS, JOIN_SECONDS, SILENCE_SECONDS
from accel_ddp.nodes import messages
from accel_ddp.nodes.messages import printable

WORKER_MODULE = "accel_ddp.measure.trial_worker"  # see `doctor.collective_launch`, which starts it


class Agent:
    """Starts and kills the worker processes of its node, prints texts and writes files, as the coordinator commands."""

    def __init__(self, processes: WorkerProcesses, out: str):
        self.processes, self.out = processes, out
        self.outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def run(self, ip: str, port: int, token: bytes, info: dict[str, Any], interrupted: asyncio.Future) -> int:
        """Execute the commands of the coordinator at this address until it sends `exit`, and return the exit code.

        `info` describes this node. The result of `interrupted` is the name of the signal with which the user ends this agent.
        Raises OSError if the coordinator does not accept a connection.
        """
        reader, writer = await _connect(ip, port, token)
        await messages.send(writer, info)
        sending = asyncio.ensure_future(self._send_events(writer))
        try:
            while True:
                receiving = asyncio.ensure_future(messages.receive(reader, SILENCE_SECONDS))
                await asyncio.wait([receiving, interrupted], return_when=asyncio.FIRST_COMPLETED)
                if interrupted.done():
                    receiving.cancel()
                    sending.cancel()
                    await asyncio.gather(receiving, sending, return_exceptions=True)
                    reason = f"was ended by {interrupted.result()}"
                    await messages.send(writer, {"event": "leaving", "reason": reason}, 2)
                    print(f"Ended by {interrupted.result()}. The tuning ends on the other nodes too.", flush=True)
                    return INTERRUPTED
                message = receiving.result()
                if message["command"] == "exit":
                    code = int(message["code"])
                    if message["text"]:
                        _print(message["text"])
                    return code
                await self._execute(message)
        except (OSError, asyncio.TimeoutError, KeyError, TypeError, ValueError) as error:
            print(
                f"The main node ({ip}:{port}) {_describe(error)}: `accel-ddp tune` ended there, or its network failed. Read its "
                "output, then start `accel-ddp tune` again on every node.",
                flush=True,
            )
            return 1
        finally:
            sending.cancel()
            await self.processes.close()
            await messages.close(writer)

    async def _execute(self, message: dict[str, Any]) -> None:
        command = message["command"]
        if command == "print":
            _print(message["text"])
        elif command == "start":
            trial, port, environment, spec = (message[name] for name in ("trial", "port", "environment", "spec"))
            self.processes.start(trial, port, environment, spec, self.outbox.put_nowait)
        elif command == "kill":
            self.processes.kill()
        elif command == "write":
            lines, is_complete = await asyncio.to_thread(tune_results.write_files, self.out, message["files"])
            self.outbox.put_nowait({"event": "written", "lines": lines, "is_complete": is_complete})

    async def _send_events(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            while True:
                event = {"event": "heartbeat"}
                with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                    event = await asyncio.wait_for(self.outbox.get(), HEARTBEAT_SECONDS)
                await messages.send(writer, event)


def _print(text: str) -> None:
    print("\n".join(printable(line) for line in text.split("\n")), flush=True)


def _describe(error: Exception) -> str:
    """Return what happened to the connection with the main node."""
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
        return f"has sent nothing for {SILENCE_SECONDS:.0f} s"
    return "has closed the connection" if isinstance(error, OSError) else f"sent an invalid message ({error})"


async def _connect(ip: str, port: int, token: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection to the coordinator. Raises OSError if it does not accept one within JOIN_SECONDS."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            reader, writer = await messages.connect(ip, port, 5)
            await messages.handshake(reader, writer, token, is_client=True)
            return reader, writer
        except (OSError, asyncio.TimeoutError, messages.HandshakeError) as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"the main node does not accept a connection at {ip}:{port}: {error}") from error
            await asyncio.sleep(0.1)
