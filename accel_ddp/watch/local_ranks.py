"""What the monitor of a node watches there: its ranks (their pages, ends and stacks, and the connection to each) and the run folder.

A call to a disk that does not answer never returns. Therefore a thread that nothing waits for looks at the folder, and a child
process writes to it.
"""

import asyncio
import contextlib
import json
import mmap
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_ddp import phases
from accel_ddp.records.incidents import INFO, WARNING
from accel_ddp.text import format_bytes
from accel_ddp.watch import processes
from accel_ddp.watch.diagnosis import Event, RankView
from accel_ddp.watch.processes import Stack, read_stack, read_stack_of_worker
from accel_ddp.watch.restart_files import how_to_continue

EXIT_SECONDS = 10.0  # a rank that can end by itself has ended this long after the failure was sent to it (8 s at a stop)
SAVE_SECONDS = 22.0  # the same for a rank that is writing a checkpoint
BLOCKED_SECONDS = SAVE_SECONDS + 3  # a rank that was killed and still exists is blocked in the kernel
LOOK_SECONDS = 2.0  # between two looks at the output folder
ANSWER_SECONDS = 4.0  # a disk that has not written a few bytes after this time does not answer


@dataclass
class LocalRank:
    rank: int
    pid: int
    memory: mmap.mmap
    stack_file: Path
    writer: asyncio.StreamWriter
    kills: processes.OutOfMemoryKills
    stopped_at: float = 0.0
    is_finished: bool = False  # its program is complete
    is_dead: bool = False
    status: int | None = None  # exit code, or minus the signal
    reading: phases.Reading | None = None
    num_files: int = 0  # that it has open, with its connections
    most_files: int = 0  # its limit
    collective: asyncio.Future | None = None  # the last collective of the rank, once it has answered

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write(json.dumps(message).encode() + b"\n")

    @property
    def has_ended(self) -> bool:
        return self.is_finished or self.is_dead


class LocalRanks(dict[int, LocalRank]):
    def __init__(self, node: int, host: str, launcher: int):
        super().__init__()
        self.node, self.host, self.launcher = node, host, launcher
        self.by_hand = "run the same command with --resume --output_dir FOLDER"  # until a rank knows more

    def register(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> LocalRank:
        rank, pid = hello["rank"], hello["pid"]
        with open(hello["page"], "rb") as file:
            memory = mmap.mmap(file.fileno(), phases.SIZE, access=mmap.ACCESS_READ)
        self[rank] = LocalRank(rank, pid, memory, Path(hello["stack"]), writer, processes.OutOfMemoryKills(pid))
        return self[rank]

    def send(self, message: dict[str, Any]) -> None:
        for local in self.values():
            local.send(message)

    def read_pages(self, now: float) -> None:
        for local in self.values():
            if not local.is_dead:
                local.reading = phases.read(local.memory)
                is_stopped = processes.state_of(local.pid) in ("T", "t")
                local.stopped_at = (local.stopped_at or now) if is_stopped else 0.0
                local.num_files, local.most_files = processes.count_files(local.pid) or (local.num_files, local.most_files)

    def views(self) -> list[RankView]:
        now, found = time.monotonic(), []
        for local in self.values():
            reading = local.reading or phases.read(local.memory)
            stopped = now - local.stopped_at if local.stopped_at else 0.0
            is_suspended = bool(local.stopped_at and self.launcher) and processes.state_of(self.launcher) in ("T", "t")
            found.append(RankView(
                local.rank, self.node, self.host, local.pid, reading.step, reading.phase, reading.age, reading.normal,
                processes.state_of(local.pid), stopped, is_suspended, reading.writing, local.has_ended,
            ))  # fmt: skip
        return found

    def timings(self) -> dict[int, phases.Timing]:
        timings = {rank: (local.reading or phases.read(local.memory)).timing for rank, local in self.items()}
        return {rank: phases.Timing(times.step, *(round(each, 4) for each in times[1:])) for rank, times in timings.items()}

    def read_traffic(self, seconds: float) -> list[list]:
        """Return `tcp_traffic` of the ranks of this node, if one of them has been in its phase for this long. It takes 1 ms."""
        readings = [local.reading for local in self.values() if local.reading and not local.has_ended]
        may_wait = lambda phase: phase == phases.WAIT or phase not in phases.UNLIMITED
        if not any(reading.age > seconds and may_wait(reading.phase) for reading in readings):
            return []
        return processes.tcp_traffic((local.pid for local in self.values()), int(os.environ.get("MASTER_PORT", 0)))  # the store's

    # ---- the end of a rank

    def describe_death(self, local: LocalRank) -> dict[str, Any]:
        seen = phases.read(local.memory)
        what = processes.describe_exit(local.status)
        place = {"rank": local.rank, "host": self.host, "step": phases.step_of(seen.step, seen.phase)}
        code = max(local.status or 0, 0)  # every rank ends with the code that the program has chosen
        how = how_to_continue(code or 1, place["step"], self.by_hand, self.launcher)
        is_killed = local.status in (-signal.SIGKILL, None)
        if is_killed and (cgroups := local.kills.happened()):
            size = f" of {format_bytes(limit)}" if (limit := processes.memory_limit(cgroups)) else ""
            what = f"was killed by the kernel, because its cgroup (container, Slurm job) used more memory than its limit{size},"
            how = "Use a smaller --micro_batch_size or fewer --num_workers, or raise the limit. " + how
        elif is_killed and local.kills.happened_on_machine():
            how = (
                f"The kernel has killed a process on {self.host} since the run began, because the machine or a cgroup (container, "
                f"Slurm job) had too little memory (oom_kill in /proc/vmstat): probably this one. {how}"
            )
        elif local.status in (-signal.SIGKILL, None):
            how = f"If nobody killed it, the machine ran out of memory: see `dmesg -T | grep -i kill` on {self.host}. " + how
        elif local.status in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL):
            how = "A library crashed; its output may be above. PYTHONFAULTHANDLER=1 prints the Python stack of a crash. " + how
            if local.most_files and local.num_files > 0.8 * local.most_files:
                how = (
                    f"It had {local.num_files} files and connections open, and may have {local.most_files} (ulimit -Hn). If it has no "
                    f"leak, strangers connect to its ports: see `ss -tnp` on {self.host} and SECURITY.md. "
                ) + how
        elif local.is_finished and local.status is not None and local.status > 0:
            what = f"has called sys.exit({local.status})"
        elif local.status is not None and local.status >= 0:
            what += " without an error message"
            how = "Look for os._exit or a library that exits the process. " + how
        text = f"RANK_DIED: rank {local.rank} ({self.host}, pid {local.pid}) {what} {phases.format_place(seen.step, seen.phase)}. {how}"
        return {"kind": "died", "text": text, "line": f"error: {text}", "code": code, "exit_code": code or 1, **place}

    def end(self, seconds: float) -> list[str]:
        """Kill the ranks that have not ended `seconds` after the failure was sent. Return a line for each that cannot be killed."""
        lines = []
        for local in (local for local in self.values() if not local.is_dead):
            limit = SAVE_SECONDS if phases.read(local.memory).writing else EXIT_SECONDS
            is_stopped = processes.state_of(local.pid) in ("T", "t")  # it cannot end by itself
            if seconds > (0 if is_stopped else limit):
                with contextlib.suppress(OSError):
                    os.kill(local.pid, signal.SIGKILL)
            if seconds > BLOCKED_SECONDS:
                where = f" in {name}" if (name := processes.kernel_function(local.pid)) else ""
                lines.append(
                    f"error: RANK_BLOCKED: rank {local.rank} ({self.host}, pid {local.pid}) cannot be killed, because the kernel "
                    f"blocks it{where} (state D). It exits when its disk or file system answers. No other rank waits for it, but the "
                    "launcher may."
                )
        return lines

    # ---- stacks

    async def read_stack(self, rank: int) -> Stack:
        local = self.get(rank)
        if local is None:
            return Stack()
        local.collective = asyncio.get_running_loop().create_future()
        local.send({"want_collective": True})
        stack = await read_stack(local.pid, local.stack_file, processes.state_of(local.pid))
        with contextlib.suppress(asyncio.TimeoutError):  # a rank that is stopped or holds the GIL does not answer
            stack.collective = await asyncio.wait_for(local.collective, 0.5)
        is_in_data = local.reading is not None and local.reading.phase in phases.LOADING
        worker = await read_stack_of_worker(local.pid, local.stack_file) if is_in_data else None
        if worker:
            stack[:0] = [*worker[:8], "(a data worker, for which the rank waits)"]
        return stack


async def wait_for_end(pid: int) -> None:
    """Return when a process has ended, also if its parent has not read its exit code yet."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (OSError, AttributeError):  # kernels before 5.3, old seccomp filters, macOS
        import psutil

        while psutil.pid_exists(pid) and processes.state_of(pid) != "Z":
            await asyncio.sleep(0.1)
        return
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


class OutputFolder:
    """The output folder, as the monitor of the main node sees it: whether it still exists, and whether its disk answers."""

    def __init__(self, path: str):
        self.path = Path(path)
        self.is_missing = False
        self.removals = 0  # also counts a folder that was created again before this process could see that it was missing
        self.reported = (False, 0)  # the last two in the last report
        self.probe = 0  # pid of the child that writes
        self.probed_at = 0.0

    def watch(self) -> None:
        """Look at the folder from now on, because it exists. A first look before that would be followed by a blind interval."""
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        held = -1  # an open folder, whose inode number is not used for another one
        while True:
            is_same = False
            with contextlib.suppress(OSError):
                is_same = held >= 0 and os.path.samestat(os.fstat(held), os.stat(self.path))
            if held >= 0 and not is_same:
                os.close(held)
                held = -1
                self.removals += 1
            if held < 0:
                with contextlib.suppress(OSError):
                    held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            self.is_missing = held < 0 and self.removals > 0
            time.sleep(LOOK_SECONDS)

    def events(self) -> list[Event]:
        before, self.reported = self.reported, (self.is_missing, self.removals)
        is_missing, removals = self.reported
        if self.reported == before:
            return []
        if removals != before[1]:
            created = "creates" if is_missing else "has created"
            text = (
                f"the output folder {self.path} was removed or is no longer mounted. Its checkpoints are gone. Training continues, "
                f"and the {'next' if is_missing else 'last'} save {created} it again."
            )
            return [Event(WARNING, "OUTPUT_REMOVED", text)]
        return [Event(INFO, "OUTPUT_REMOVED", f"the output folder {self.path} exists again.")]

    def seconds_without_answer(self, is_suspected: bool) -> float:
        """Return for how long the disk has not answered, or 0. The disk is tried out only if a save takes long."""
        now = time.monotonic()
        if self.probe:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.probe, os.WNOHANG)[0] == 0:
                    seconds = now - self.probed_at
                    return seconds if seconds > ANSWER_SECONDS else 0.0
            self.probe = 0
        if is_suspected and now - self.probed_at > ANSWER_SECONDS:
            self.probed_at, self.probe = now, os.fork()
            if self.probe == 0:  # in the child: write and remove a small file
                with contextlib.suppress(OSError), open(self.path / f".disk_check_{os.getpid()}", "w") as file:
                    os.write(file.fileno(), b"x")
                    os.fsync(file.fileno())
                    os.unlink(file.name)
                os._exit(0)
        return 0.0

    def close(self) -> None:
        """Kill the child that writes. A disk that does not answer blocks it, and its end is not awaited."""
        if self.probe:
            with contextlib.suppress(OSError):
                os.kill(self.probe, signal.SIGKILL)
