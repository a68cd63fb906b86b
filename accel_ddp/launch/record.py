"""The files of a node's part of a job, in RUN_FOLDER/launch: its log, its state, and a lock that is held while it runs."""

import contextlib
import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import IO, Any


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
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: the state alone decides
            return not self._has_process()
        return True

    def is_running(self) -> bool:
        """Return whether the guard of this job is alive on this node."""
        try:
            with self.lock.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        except BlockingIOError:
            return True
        except OSError:
            return self._has_process()

    def _has_process(self) -> bool:
        state = self.read()
        return state.get("state") == "running" and Path(f"/proc/{state.get('pid')}").exists()

    def read(self) -> dict[str, Any]:
        """Return the stored state, or {} if there is none."""
        with contextlib.suppress(OSError, ValueError):
            if isinstance(value := json.loads(self.state.read_text()), dict):
                return value
        return {}

    def write(self, **values: Any) -> None:
        """Store the state, completely or not at all. A full disk must not end a job."""
        draft = self.state.with_suffix(f".{os.getpid()}.draft")
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps({**self.read(), **values}))
            draft.replace(self.state)

    def describe(self) -> dict[str, Any]:
        """Return the state of the job on this node as `accel-ddp status` shows it."""
        state = self.read()
        is_running = self.is_running()
        if state.get("state") == "running" and not is_running:
            state |= {"state": "ended", "why": "its guard was killed, or the node was restarted", "code": state.get("code", 1)}
        elif is_running and "state" not in state:
            state["state"] = "starting"
        return {**state, "log": str(self.log), "step": last_step(self.run_folder)}


class LogFile:
    """Appends lines to the log of a node. A full disk must not end a job, so that errors of writing are only counted."""

    def __init__(self, path: Path):
        self.file = path.open("a", encoding="utf-8", errors="replace")
        self.failed = ""

    def write(self, line: str) -> None:
        try:
            self.file.write(f"{line}\n")
            self.file.flush()
        except OSError as error:
            self.failed = self.failed or str(error.strerror)

    def header(self, text: str) -> None:
        self.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


def last_step(run_folder: Path) -> int | None:
    """Return the last step in log.jsonl, or None. Only the end of the file is read."""
    with contextlib.suppress(OSError), (run_folder / "log.jsonl").open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 65536))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return int(json.loads(line)["step"])
    return None


def find_records(output: str | Path, host: str) -> dict[str, Record]:
    """Return the records of this node below the output folder by the name of their job."""
    found = {}
    with contextlib.suppress(OSError):
        for folder in sorted(Path(output).expanduser().iterdir()):
            record = Record(folder, host)
            if record.state.exists():
                found[folder.name] = record
    return found
