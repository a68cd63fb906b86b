"""The files of a node's part of a job (log, state, lock) in RUN_FOLDER/launch, and answers about them to other machines."""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import IO, Any

import psutil

from accel_ddp.records import run_log
from accel_ddp.records.files import replace_file


class Record:
    """The files of one node. Every node has names of its own, because nodes may share the run folder."""

    def __init__(self, run_folder: str | Path, host: str):
        self.run_folder = Path(run_folder).expanduser()
        label = re.sub(r"[^A-Za-z0-9._@-]", "_", host)
        folder = self.run_folder / "launch"
        self.log, self.state, self.lock = (folder / f"{label}.{kind}" for kind in ("log", "json", "lock"))
        self._held: IO[str] | None = None

    def claim(self) -> bool:
        """Take the lock until this process ends. Return False if another process has it: the job is running."""
        self.lock.parent.mkdir(parents=True, exist_ok=True)
        self._held = self.lock.open("a")
        for seconds in (0.05, 0.05, 0):
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(seconds)  # `is_running` of another process has the lock for a moment
            except OSError:  # a file system without locks: the state alone decides
                if self._has_process():
                    return False
                break
        else:
            return False
        # Until the job runs, the state must not name the process of an earlier job, whose pid may be that of another program.
        self.write(state="starting", pid=os.getpid(), code=None, why="", began=time.time(), ended=None)
        return True

    def is_running(self) -> bool:
        try:
            with self.lock.open("a+") as file:  # NFS demands that a file with a shared lock can be read
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        except BlockingIOError:
            return True
        except OSError:
            return self._has_process()

    def _has_process(self) -> bool:
        state = self.read()
        return state.get("state") in ("starting", "running") and Path(f"/proc/{state.get('pid')}").exists()

    def read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            if isinstance(value := json.loads(self.state.read_text()), dict):
                return value
        return {}

    def write(self, **values: Any) -> None:
        """Store the state, completely or not at all. A full disk must not end a job."""
        with contextlib.suppress(OSError):
            replace_file(self.state, json.dumps({**self.read(), **values}), has_rivals=True)

    def describe(self) -> dict[str, Any]:
        state = self.read()
        if state.get("state") in ("starting", "running") and not self.is_running():
            state |= {"state": "ended", "why": "its guard was killed, or the node was restarted"}
        return {**state, "log": str(self.log), "step": run_log.last_step_of_attempt(self.run_folder / run_log.FILE)}


class LogFile:
    """A log that becomes HOST.log.1 when it exceeds `most_bytes`. A full disk must not end a job, so errors are only stored."""

    def __init__(self, path: Path, most_bytes: int = 64 << 20):
        self.path, self.most_bytes = path, most_bytes
        self.file = path.open("ab", buffering=0)
        self.failed = ""

    def write(self, line: str) -> None:
        try:
            if self.file.tell() > self.most_bytes:
                self.path.replace(self.path.with_suffix(".log.1"))
                self.file.close()
                self.file = self.path.open("ab", buffering=0)
            self.file.write(f"{line}\n".encode(errors="replace"))
        except OSError as error:
            self.failed = self.failed or str(error.strerror)
        except ValueError:  # the new log could not be opened
            pass

    def header(self, text: str) -> None:
        self.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


def _place(output: str | Path, job: str) -> Path:
    return Path(output).expanduser() / ".accel_ddp" / job


def store_place(output: str | Path, job: str, run_folder: str | Path) -> None:
    """Store where a job is whose folder is not OUTPUT/NAME, so that its name is enough to find it."""
    place, folder = _place(output, job), Path(run_folder).expanduser().absolute()
    with contextlib.suppress(OSError):
        if folder == (Path(output).expanduser() / job).absolute():
            place.unlink(missing_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(str(folder))


def find_record(request: dict[str, Any]) -> Record:
    """Return the record of the job with this name. `output` is empty if the user has given the folder of the job."""
    if request["output"] and request["job"]:
        with contextlib.suppress(OSError):
            return Record(_place(request["output"], request["job"]).read_text(), request["host"])
    return Record(request["run_folder"], request["host"])


def find_records(output: str | Path, host: str) -> dict[str, Record]:
    output = Path(output).expanduser().absolute()
    places = {place.name: Path(place.read_text()) for place in output.glob(".accel_ddp/*")}
    named = {folder.name: folder for folder in output.glob("*") if folder not in places.values()} | places
    found = {name: Record(folder, host) for name, folder in sorted(named.items())}
    return {name: record for name, record in found.items() if record.state.exists()}


async def send_status(request: dict[str, Any], channel: Any) -> None:
    is_one = bool(request["run_folder"])
    found = {request["job"]: find_record(request)} if is_one else find_records(request["output"], request["host"])
    channel.send("status", jobs={name: record.describe() for name, record in found.items() if record.read()})


async def send_log(request: dict[str, Any], channel: Any) -> None:
    record = find_record(request)
    try:
        file = record.log.open("rb")
    except OSError as error:
        channel.send("failed", text=f"{record.log}: {error.strerror}", is_missing=isinstance(error, FileNotFoundError))
        return
    skip_to_last_lines(file, request["lines"])
    rest = b""
    while True:
        was_running, is_replaced = record.is_running(), False  # before reading: nothing is missed
        with contextlib.suppress(OSError):  # there is a new log if the old one was too large; between the two, there is none
            is_replaced = not os.path.samestat(os.fstat(file.fileno()), record.log.stat())
        while data := file.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            channel.send("out", rank=None, lines=[line.decode(errors="replace") for line in lines])
            while channel.is_full:  # output that does not fit into its buffer would be lost
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


def skip_to_last_lines(file: Any, count: int) -> None:
    """Move to the last `count` lines of a file, of which at most 1 MiB is read. 0: to its end."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - (1 << 20))
    file.seek(start)
    rest = b"\n".join(file.read(size - start).split(b"\n")[-1 - count :])
    file.seek(size - len(rest))


async def stop_job(request: dict[str, Any], channel: Any) -> None:
    record = find_record(request)
    state = record.read()
    if not record.is_running() or not _is_guard(state.get("pid")):
        channel.send("stopped", was_running=False, code=state.get("code"))
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(state["pid"], signal.SIGUSR1 if request["now"] else signal.SIGTERM)
        os.kill(state["pid"], signal.SIGCONT)  # a guard that was stopped (SIGSTOP) acts on it too
    deadline = time.monotonic() + request["seconds"]
    while record.is_running() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    channel.send("stopped", was_running=True, is_running=record.is_running(), code=record.read().get("code"))


def _is_guard(pid: int | None) -> bool:
    """Return whether a process is a guard. The pid in the file of a job may be that of another program by now."""
    with contextlib.suppress(psutil.Error):
        return bool(pid) and "accel_ddp.launch.guard" in psutil.Process(pid).cmdline()
    return False


ANSWERS = {"status": send_status, "logs": send_log, "end_job": stop_job}
