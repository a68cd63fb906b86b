"""What a guard answers about jobs that other guards run on the node: their state, their logs, and a stop."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any, Protocol

import psutil

from accel_ddp.launch.node.record import find_record, find_records


class Sender(Protocol):
    """Sends messages. Output that does not fit into its buffer is lost, so that a log must wait while it is full."""

    @property
    def is_full(self) -> bool: ...

    def send(self, kind: str, **values: Any) -> None: ...


async def send_status(request: dict[str, Any], channel: Sender) -> None:
    """Send the state of one job, or of all jobs below the output folder."""
    is_one = bool(request["run_folder"])
    found = {request["job"]: find_record(request)} if is_one else find_records(request["output"], request["host"])
    channel.send("status", jobs={name: record.describe() for name, record in found.items() if record.read()})


async def send_log(request: dict[str, Any], channel: Sender) -> None:
    """Send the last lines of the log, and with `follow` also those that are added until the job ends."""
    record = find_record(request)
    try:
        file = record.log.open("rb")
    except OSError as error:
        channel.send("failed", text=f"{record.log}: {error.strerror}", is_missing=isinstance(error, FileNotFoundError))
        return
    _skip_to_last_lines(file, request["lines"])
    rest = b""
    while True:
        was_running, is_replaced = record.is_running(), _is_replaced(file, record.log)  # before reading: nothing is missed
        while data := file.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            channel.send("out", rank=None, lines=[line.decode(errors="replace") for line in lines])
            while channel.is_full:
                await asyncio.sleep(0.02)
        if is_replaced:
            file.close()
            file = record.log.open("rb")
            continue
        if not request["follow"] or not was_running:
            break
        await asyncio.sleep(0.5)
    file.close()
    state = record.describe()
    channel.send("end", code=state.get("code"), why=state.get("why", ""))


def _is_replaced(file: Any, path: Path) -> bool:
    """Return whether there is a new log, because the old one was too large."""
    try:
        return not os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:  # between the two, there is none
        return False


def _skip_to_last_lines(file: Any, count: int) -> None:
    """Move to the last lines of a file, of which at most 1 MiB is read."""
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


async def stop_job(request: dict[str, Any], channel: Sender) -> None:
    """Ask the guard of a job for a stop, or with `now` kill the job, and wait until the guard has ended."""
    record = find_record(request)
    state = record.read()
    if not record.is_running() or not _is_guard(state.get("pid")):
        channel.send("stopped", was_running=False, code=state.get("code"))
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(state["pid"], signal.SIGUSR1 if request["now"] else signal.SIGTERM)
    deadline = time.monotonic() + request["seconds"]
    while record.is_running() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    channel.send("stopped", was_running=True, is_running=record.is_running(), code=record.read().get("code"))


def _is_guard(pid: int | None) -> bool:
    """Return whether a process is a guard. The pid in the file of a job may be that of another program by now."""
    with contextlib.suppress(psutil.Error):
        return bool(pid) and "accel_ddp.launch.node.guard" in psutil.Process(pid).cmdline()
    return False


REQUESTS = {"status": send_status, "logs": send_log, "end_job": stop_job}
