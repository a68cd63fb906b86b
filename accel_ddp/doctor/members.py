"""The processes that are connected to the coordinator."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

from accel_ddp.doctor.report import Finding
from accel_ddp.net import messages

_MOST_NAMED = 16  # missing nodes


@dataclass(eq=False)
class Member:
    """A process that has connected and sent a valid `hello`: one per node, or one per rank under a launcher."""

    hello: dict[str, Any]  # with "facts" and "clock" once these are received
    writer: asyncio.StreamWriter
    inbox: asyncio.Queue = field(default_factory=lambda: asyncio.Queue(16))
    has_facts: bool = False
    is_gone: bool = False  # its connection is closed
    is_silent: bool = False  # it did not answer a request, and receives no further ones

    @property
    def name(self) -> str:
        local = f", local rank {self.hello['local_rank']}" if self.hello["local_rank"] else ""
        return f"{self.hello['host']} (machine_rank {self.hello['node']}{local})"

    @property
    def is_local_main(self) -> bool:
        """Whether this process checks the paths and the disk of its node. The other ranks wait for the verdict."""
        return self.hello["local_rank"] == 0

    async def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await messages.send(self.writer, message, 5)


def local_mains(members: list[Member]) -> list[Member]:
    """Return one process of each node, in the order of the node ranks."""
    return sorted((member for member in members if member.is_local_main), key=lambda member: member.hello["node"])


def find_missing(members: list[Member]) -> list[str]:
    """Return the machine ranks that have not connected, and the missing local ranks of nodes that have."""
    connected: dict[int, set[int]] = {}
    local_sizes: dict[int, int] = {}
    for member in members:
        node = member.hello["node"]
        connected.setdefault(node, set()).add(member.hello["local_rank"])
        local_sizes[node] = max(local_sizes.get(node, 1), member.hello["local_ranks"])
    num_nodes = max((m.hello["nodes"] for m in members), default=1)
    absent = [str(node) for node in range(num_nodes) if node not in connected]
    missing = [f"machine_rank {node}" for node in absent[:_MOST_NAMED]]
    missing += [f"{len(absent) - _MOST_NAMED} more nodes"] if len(absent) > _MOST_NAMED else []
    for node, ranks in sorted(connected.items()):
        missing += [f"local rank {one} of machine_rank {node}" for one in range(local_sizes[node]) if one not in ranks]
    return missing


def findings_of_members(members: list[Member]) -> list[Finding]:
    """Return what the nodes found on their own.

    E_MAIN_IS_HERE is left out if node 0 has connected: the node that reports it then shares a machine with node 0.
    """
    found = [finding for member in members for finding in member.hello["findings"]]
    has_main = any(member.hello["node"] == 0 for member in members)
    return [finding for finding in found if not (has_main and finding.code == "E_MAIN_IS_HERE")]
