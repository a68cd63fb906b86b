"""A node's side of the tuning: one agent per node answers the coordinator and runs the worker processes of a trial."""

import asyncio
import time
from typing import Any

from accel_ddp.doctor.collective_launch import WorkerProcesses
from accel_ddp.doctor.coordinator import CoordinatorClient, describe_loss, try_port
from accel_ddp.errors import INTERRUPTED
from accel_ddp.measure import tune_results
from accel_ddp.measure.trials import JOIN_SECONDS, SILENCE_SECONDS
from accel_ddp.nodes.messages import Stream, printable
from accel_ddp.records.tuned_settings import FOLDER

WORKER_MODULE = "accel_ddp.measure.trial_worker"  # see `doctor.collective_launch`, which starts it


class Agent:
    """Starts and kills the worker processes of its node, prints texts and writes files, as the coordinator requests."""

    def __init__(self, processes: WorkerProcesses, out: str, cache_dir: str):
        self.processes, self.folders = processes, {"files": out, "for_runs": f"{cache_dir}/{FOLDER}"}

    async def run(self, ip: str, port: int, key: bytes, info: dict[str, Any], interrupted: asyncio.Future) -> int:
        """Answer the coordinator until it closes the connection or `interrupted` has the name of a signal. Return the exit code."""
        self.client = client = CoordinatorClient(await _connect(ip, port, key, info["node"]), SILENCE_SECONDS)
        following = asyncio.ensure_future(client.follow(info, self._answer))
        try:
            await asyncio.wait([following, interrupted], return_when=asyncio.FIRST_COMPLETED)
            if interrupted.done():
                reason = f"was stopped by {interrupted.result()}"
                await client.stream.send({"event": "leaving", "reason": reason}, 2)
                print(f"Stopped by {interrupted.result()}. Tuning stops on the other nodes too.", flush=True)
                return INTERRUPTED
            ended = following.result()
            code = int(ended["code"])
            if ended["text"]:
                _print(ended["text"])
            return code
        except (OSError, asyncio.TimeoutError, KeyError, TypeError, ValueError) as error:
            print(
                f"The main node ({ip}:{port}) {describe_loss(error, SILENCE_SECONDS)}: `accel-ddp tune` exited there, or its network "
                "failed. Read its output, then start `accel-ddp tune` again on every node.",
                flush=True,
            )
            return 1
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await self.processes.close()

    async def _answer(self, request: dict[str, Any]) -> None:
        kind, outbox = request["do"], self.client.outbox
        if kind == "print":
            _print(request["text"])
        elif kind == "start":
            trial, port, environment, spec = (request[name] for name in ("trial", "port", "environment", "spec"))
            self.processes.start(trial, port, environment, spec, outbox.put_nowait)
        elif kind == "kill":
            self.processes.kill()
        elif kind == "write":
            results = [
                await asyncio.to_thread(tune_results.write_files, folder, request[name]) for name, folder in self.folders.items()
            ]
            lines = [line for some, _ in results for line in some]
            outbox.put_nowait({"event": "written", "lines": lines, "is_complete": all(is_complete for _, is_complete in results)})


def _print(text: str) -> None:
    print("\n".join(printable(line) for line in text.split("\n")), flush=True)


async def _connect(ip: str, port: int, key: bytes, node: int) -> Stream:
    """Return a connection to the coordinator. Raises OSError if it does not accept one within JOIN_SECONDS."""
    deadline = time.monotonic() + JOIN_SECONDS
    while not isinstance(connection := await try_port(ip, port, key, node), Stream):
        if time.monotonic() > deadline:
            reason = connection[1] or connection[0]
            raise ConnectionError(f"the main node does not accept a connection at {ip}:{port}: {reason}")
        await asyncio.sleep(0.1)
    return connection
