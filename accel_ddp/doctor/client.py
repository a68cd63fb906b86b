"""The side of every node in the exchange with the coordinator: send facts, do what is requested, receive the verdict."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_ddp.doctor import paths, sanitize, timeouts
from accel_ddp.doctor.connect import Connection
from accel_ddp.doctor.report import Finding, Outcome
from accel_ddp.doctor.shared_folder import list_markers, write_marker
from accel_ddp.net import messages
from accel_ddp.net.sanitize import bounded_list, printable, whole_number

Facts = tuple[dict[str, Any], list[Finding]]  # facts of a node, and findings made while they were collected


async def follow_coordinator(
    connection: Connection, hello: dict[str, Any], collecting: "asyncio.Future[Facts]", folder: Path | None, token: bytes,
    measures_bandwidth: bool, print_progress: Callable[[str], None],
) -> Outcome:  # fmt: skip
    """Send `hello` and the facts, do what the coordinator requests, and return its verdict.

    `folder` is the existing part of the output folder. Raises OSError if the connection is lost before the verdict.
    """
    reader, writer = connection
    node_rank, outcome = hello["node"], None
    marker: Path | None = None
    marker_error: str | None = None  # None: no marker was written yet
    sending: asyncio.Future | None = None
    try:
        await messages.send(writer, hello)
        sending = asyncio.ensure_future(_send_facts(writer, collecting))
        while True:
            message = await messages.receive(reader, timeouts.MAIN_SILENT)
            request = message.get("do")
            if request == "print":
                print_progress(printable(message["text"]))
            elif request == "probe":
                roster = sanitize.clean_roster(message["roster"])
                me = next((peer for peer in roster if peer["ip"] == hello["ip"] and peer["ports"] == hello["ports"]), {})
                node_rank = me.get("node", node_rank)
                marker, marker_error = await asyncio.to_thread(write_marker, folder, message["mark"], node_rank)
                probes = await paths.probe_all(node_rank, roster, token, measures_bandwidth)
                await messages.send(writer, {"paths": probes})
            elif request == "check_folder":
                if marker_error is None:
                    marker, marker_error = await asyncio.to_thread(write_marker, folder, message["mark"], node_rank)
                answer = await asyncio.to_thread(list_markers, folder, message["mark"], marker_error)
                await messages.send(writer, answer)
            elif request == "verdict":
                outcome = _read_verdict(message)
                await messages.send(writer, {"received": True})
            elif request == "close":
                break
    except (ValueError, TypeError, KeyError) as error:
        raise ConnectionError(f"it sent an invalid message ({error})") from error
    except (OSError, asyncio.TimeoutError):
        if not outcome:
            raise
    finally:
        if sending:
            sending.cancel()
        if marker:
            with contextlib.suppress(OSError):
                marker.unlink()
        await messages.close(writer)
    if not outcome:
        raise ConnectionError("it closed the connection without a verdict")
    return outcome


def _read_verdict(message: dict[str, Any]) -> Outcome:
    return Outcome(
        sanitize.clean_findings(message["verdict"], 1000),
        lines=sanitize.clean_lines(message["lines"], 200),
        table=sanitize.clean_lines(message["table"], 1000),
        roster=sanitize.clean_roster(message["roster"]),
        paths=bounded_list(message["paths"], 1000),
        node_rank=whole_number(message["node"]),
        deep_port=whole_number(message.get("deep_port")),
    )


async def _send_facts(writer: asyncio.StreamWriter, collecting: "asyncio.Future[Facts]") -> None:
    """Send the facts when they are collected. They follow `hello`, so that missing nodes are reported meanwhile."""
    facts, wrong = await asyncio.shield(collecting)
    findings = [finding.as_dict() for finding in wrong[: sanitize.MOST_FINDINGS]]
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await messages.send(writer, {**facts, "findings": findings, "time": time.time()})
