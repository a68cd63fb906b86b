"""What a guard answers about jobs that other guards run on the node: their state, their logs, and a stop."""

import asyncio
import os
import signal
import time
from typing import Any, Protocol

from accel_ddp.launch.record import Record, find_records


class Sender(Protocol):
    def send(self, kind: str, **values: Any) -> None: ...


async def send_status(request: dict[str, Any], channel: Sender) -> None:
    """Send the state of one job, or of all jobs below the output folder."""
    if request["run_folder"]:
        found = {request["job"]: Record(request["run_folder"], request["host"])}
    else:
        found = find_records(request["output"], request["host"])
    channel.send("status", jobs={name: record.describe() for name, record in found.items() if record.read()})


async def send_log(request: dict[str, Any], channel: Sender) -> None:
    """Send the last lines of the log, and with `follow` also those that are added until the job ends."""
    record = Record(request["run_folder"], request["host"])
    try:
        file = record.log.open("rb")
    except OSError as error:
        channel.send("failed", text=f"{record.log}: {error.strerror}")
        return
    with file:
        rest = _skip_to_last_lines(file, request["lines"])
        while True:
            was_running = record.is_running()
            while data := file.read(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                channel.send("out", rank=None, lines=[line.decode(errors="replace") for line in lines])
                await asyncio.sleep(0)
            if not request["follow"] or not was_running:
                break
            channel.send("beat")  # a connection that is closed is noticed
            await asyncio.sleep(0.5)
    state = record.read()
    channel.send("end", code=state.get("code"), why=state.get("why", ""))


def _skip_to_last_lines(file: Any, count: int) -> bytes:
    """Move to the last lines of a file, of which at most 1 MiB is read. Return what was read of an incomplete line."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - (1 << 20))
    file.seek(start)
    data = file.read(size - start)
    at = len(data)
    for _ in range(count + 1):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            break
    file.seek(start + at + 1)
    return b""


async def stop_job(request: dict[str, Any], channel: Sender) -> None:
    """Ask the guard of a job for a stop, or with `now` kill the job, and wait until the guard has ended."""
    record = Record(request["run_folder"], request["host"])
    state = record.read()
    if not record.is_running() or not state.get("pid"):
        channel.send("stopped", was_running=False, code=state.get("code"))
        return
    os.kill(state["pid"], signal.SIGUSR1 if request["now"] else signal.SIGTERM)
    deadline = time.monotonic() + request["seconds"]
    while record.is_running() and time.monotonic() < deadline:
        channel.send("beat")
        await asyncio.sleep(0.1)
    channel.send("stopped", was_running=True, is_running=record.is_running(), code=record.read().get("code"))


REQUESTS = {"status": send_status, "logs": send_log, "end_job": stop_job}
