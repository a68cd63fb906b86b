"""The processes that are connected to the coordinator."""

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

from accel_ddp.doctor.report import Finding
from accel_ddp.environment.topology import find_nodes
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


def counts_ranks(members: list[Member]) -> bool:
    """Return whether the user has set RANK and WORLD_SIZE: how many nodes there are follows from the ranks that connect."""
    return bool(members) and all(member.hello["rank"] is not None for member in members)


def number_nodes(members: list[Member]) -> None:
    """Set the node of each rank, if the user has set RANK and WORLD_SIZE."""
    if counts_ranks(members):
        ordered = sorted(members, key=lambda member: member.hello["rank"])
        hellos = [member.hello for member in ordered]
        for hello, node in zip(hellos, find_nodes([(m["host"], m["local_rank"], m["local_ranks"]) for m in hellos])):
            hello["node"] = node


def count_expected(members: list[Member]) -> tuple[int, int, str]:
    """Return how many nodes are connected, how many are expected at least, and the word for them.

    These are ranks instead of nodes if the user has set RANK and WORLD_SIZE.
    """
    if counts_ranks(members):
        return len(members), min(member.hello["ranks"] for member in members), "ranks"
    return len(local_mains(members)), min((member.hello["nodes"] for member in members), default=1), "nodes"


def find_missing(members: list[Member]) -> list[str]:
    """Return the machine ranks that have not connected, and the missing local ranks of nodes that have."""
    if counts_ranks(members):
        there = {member.hello["rank"] for member in members}
        ranks = [rank for rank in range(max(member.hello["ranks"] for member in members)) if rank not in there]
        more = [f"{len(ranks) - _MOST_NAMED} more ranks"] if len(ranks) > _MOST_NAMED else []
        return [*(f"rank {rank}" for rank in ranks[:_MOST_NAMED]), *more]
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
    found = []
    for member in members:
        # A rank only estimates its node if the user has set RANK and WORLD_SIZE.
        node = {"node": member.hello["node"]} if member.hello["rank"] is not None else {}
        found += [replace(finding, **node) for finding in member.hello["findings"]]
    has_main = any(member.hello["node"] == 0 for member in members)
    return [finding for finding in found if not (has_main and finding.code == "E_MAIN_IS_HERE")]
