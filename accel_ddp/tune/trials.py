"""One trial on all nodes: started together, listened to, and over everywhere in bounded time."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from accel_ddp.net.messages import find_free_port
from accel_ddp.tune.results import Trial
from accel_ddp.tune.together import Conductor, Ended

Hear = Callable[[dict[str, Any]], Awaitable[None]]

FIRST_SECONDS = 180.0  # for the first trial: torch may come from a cold network disk
TOLD_EVERY = 15.0  # while a trial is silent
GRACE = 1.0  # for other ranks to say why too, when one has failed
END_SECONDS = 15.0  # for killed processes to end


class Trials:
    def __init__(self, conductor: Conductor, local: int, ip: str, seconds: float):
        self.all, self.local, self.ip, self.seconds = conductor, local, ip, seconds
        self.nodes, self.ranks = conductor.nodes, conductor.nodes * local
        self.number = 0
        self.startup = FIRST_SECONDS  # until all ranks were connected, in the fastest trial
        self.lasted = 0.0  # of a usual one
        self.connected: dict[int, dict[str, Any]] = {}  # rank -> what it said of its device and transport, in the last trial

    async def on_all(self, trial: Trial, spec: dict[str, Any], hear: Hear | None = None) -> tuple[list[dict[str, Any]], str]:
        """What rank 0 said, which `hear` hears at once, and why it failed, if it did.

        Every process of the trial is over on every node.
        """
        self.number += 1
        began, port, over = time.monotonic(), find_free_port(self.ip), set()
        connected = self.connected = {}
        for node in range(self.nodes):
            message = {"do": "trial", "trial": self.number, "port": port, "settings": trial.of_node(node), "spec": spec}
            await self.all.tell(message, only=node)
        is_first = self.startup == FIRST_SECONDS
        seconds = self.seconds + (FIRST_SECONDS if is_first else self.startup + max(5.0, self.startup))
        said: list[dict[str, Any]] = []
        failed, deadline, is_killed, tell_at, heard_at = "", began + seconds, False, began + TOLD_EVERY, began
        while len(over) < self.nodes:
            heard = await self.all.next(min(deadline, tell_at))
            absent = [str(rank) for rank in range(self.ranks) if rank not in connected]
            if heard is None and time.monotonic() < deadline:
                tell_at = time.monotonic() + TOLD_EVERY
                what = f"rank {', '.join(absent[:8])} has not connected" if absent else "it is being measured"
                await self.all.say(f"(trial {self.number}, {time.monotonic() - began:.0f} s: {what})")
                continue
            if heard is None:
                if is_killed:
                    late = ", ".join(self.all.name(node) for node in range(self.nodes) if node not in over)
                    raise Ended(1, f"ranks on {late} do not end though killed: look at dmesg and nvidia-smi there.")
                if not failed:
                    who = f": rank {', '.join(absent[:8])} did not connect" if absent else ""
                    failed = f"no answer for {time.monotonic() - heard_at:.0f} s{who}; ended"
                is_killed, deadline = True, time.monotonic() + END_SECONDS
                await self.all.tell({"do": "kill"})
                continue
            node, message = heard
            if message.get("trial") != self.number:
                continue
            if message.get("over"):
                over.add(node)
            elif "said" in message:
                one, rank, heard_at = message["said"], message["rank"], time.monotonic()
                if one.get("at") == "connected":
                    connected[rank] = one
                    if len(connected) == self.ranks and not failed:
                        self.startup = min(self.startup, time.monotonic() - began)
                        deadline = time.monotonic() + self.seconds
                elif one.get("at") == "failed":
                    failed = failed or f"rank {rank}: {one['why']}"
                elif spec["part"] == "ddp" and not failed:  # many in one start: none may be silent for longer
                    deadline = time.monotonic() + self.seconds
                if rank == 0:
                    tell_at = time.monotonic() + TOLD_EVERY
                    said.append(one)
                    if hear:
                        await hear(one)
            elif message.get("exit"):
                words = f": {message['words']}" if message["words"] else ""
                if failed and message["words"].startswith("NCCL: ") and message["words"] not in failed:
                    failed += f" | {message['words']}"
                failed = failed or f"rank {message['rank']} ended with exit code {message['exit']}{words}"
            if failed and not is_killed:
                deadline = min(deadline, time.monotonic() + GRACE)
        if not is_first or not failed:
            self.lasted = max(self.lasted * 0.5, time.monotonic() - began)
        return said, failed
