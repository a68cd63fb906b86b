"""The process that starts, watches and ends a job on one node: `python -m accel_ddp.launch.guard`.

The launching machine starts a guard on each node, over ssh or as a subprocess, and exchanges JSON lines with the guard over stdin
and stdout. No argument, variable or secret of the job is ever part of a command line of ssh.

Everything that the job starts is a descendant of the guard, also a process whose parent has died, because the guard is a
"subreaper" of Linux. The guard ends all of its descendants, and no other process. If stdin ends or no message arrives for
SILENT_SECONDS, the launching machine is gone, and the guard stops the job: the ranks save a checkpoint, and what is left after
SAVE_SECONDS is killed. A detached guard has no launching machine, and runs until the job ends or SIGTERM asks for a stop.
"""

import asyncio
import codecs
import contextlib
import ctypes
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil

from accel_ddp.errors import INTERRUPTED, STOPPED
from accel_ddp.launch import job_record, node_checks
from accel_ddp.launch.connection import PROTOCOL
from accel_ddp.launch.job_commands import replace_home
from accel_ddp.launch.job_record import LogFile, Record, store_place
from accel_ddp.launch.node_output import Lines, RankOutputs
from accel_ddp.nodes.launcher import CONFIG_FILE
from accel_ddp.nodes.spawn import die_with_parent, is_pending

SILENT_SECONDS = 15.0
SAVE_SECONDS = 10.0
LEFTOVER_SECONDS = 3.0  # monitors and data workers end by themselves after their launcher
KILL_SECONDS = 30.0  # a killed process with much pinned memory needs seconds; one that waits for a dead disk never ends
REPORT_SECONDS = 3.0  # after a kill, processes that are left are listed
LOOK_SECONDS = 10.0  # between two looks for processes that somebody else has killed, and that do not end
SHUTDOWN_SECONDS = 600  # how long a launcher waits for ranks that save their last checkpoint
_MOST_BUFFERED = 1 << 20  # bytes; a link that is slower than the output must not stop the ranks
_PR_SET_CHILD_SUBREAPER = 36


class Channel:
    """Sends messages to the launching machine. Output is dropped while the link is slower than the output. The log has all of it."""

    def __init__(self, transport: asyncio.WriteTransport):
        self.transport, self.dropped = transport, 0

    @property
    def is_full(self) -> bool:
        return not self.transport.is_closing() and self.transport.get_write_buffer_size() > _MOST_BUFFERED // 2

    def send(self, kind: str, **values: Any) -> None:
        if self.transport.is_closing():
            return
        if kind == "out" and self.transport.get_write_buffer_size() > _MOST_BUFFERED:
            self.dropped += 1
            return
        if self.dropped:
            dropped, self.dropped = self.dropped, 0
            self.send("notice", text=f"{dropped} parts of the output were left out, because the link is slow; see the log file")
        self.transport.write(json.dumps({"is": kind, **values}).encode() + b"\n")


class JobOnNode:
    def __init__(self, request: dict[str, Any], channel: Channel):
        self.request, self.channel = request, channel
        self.kill_seconds = request.get("kill_seconds", KILL_SECONDS)
        self.look_seconds = request.get("look_seconds", LOOK_SECONDS)
        self.is_killed = self.is_interrupted = False  # is_interrupted: the stop was a Ctrl-C
        self.record = Record(request["run_folder"], request["host"])
        self.why = ""  # the reason of the first stop
        self.process: asyncio.subprocess.Process | None = None
        self.outputs: RankOutputs | None = None
        self.lines: dict[int | None, Lines] = {}
        self.terminal_text = codecs.getincrementaldecoder("utf-8")("replace")  # a character may arrive in two parts
        self.given_up = asyncio.Event()  # KILL_SECONDS after a kill
        self.ended = asyncio.Event()
        self.timers: list[asyncio.TimerHandle] = []

    async def start(self) -> str:
        request, place, is_own = self.request, str(self.record.log), False
        try:
            if not (is_own := self.record.claim()):
                state = self.record.read()
                return f"a job named {request['job']!r} is already running on {request['host']} (pid {state.get('pid')})"
            self.log = LogFile(self.record.log)
            store_place(request["output"], request["job"], request["run_folder"])
            place = tempfile.gettempdir()
            folder = tempfile.mkdtemp(prefix="accel_ddp_output_")
            self.outputs = RankOutputs(Path(folder), request["processes"], request["terminal"])
        except OSError as error:
            why = f"{place}: cannot be written on {request['host']}: {error.strerror}"
            if is_own:
                self.record.write(state="ended", code=127, why=why, ended=time.time())
            return why
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        pairs = zip(request["words"], request["kinds"])
        words = [node_checks.find_file(word, kind) or word if kind else word for word, kind in pairs]
        words = replace_home(words, [request["run_folder"]], os.path.expanduser)
        env = {**os.environ, **request["env"], "ACCEL_DDP_OUTPUT": folder, "ACCEL_DDP_GUARD": "1"}
        if config := request["env"].get(CONFIG_FILE):
            env[CONFIG_FILE] = node_checks.find_file(config, "accelerate_configs") or config
        env["PATH"] = node_checks.path_of_programs(env)
        env.setdefault("PYTHONUNBUFFERED", "1")
        env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
        self.log.header(f"{request['host']}: {shlex.join(words)}")
        # With a pipe of asyncio, some versions of Python wait for the end of every process that has inherited the pipe.
        pipe = self.outputs.open_pipe()
        try:
            self.process = await asyncio.create_subprocess_exec(
                *words, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),  # SIGTERM saves and stops as well
            )  # fmt: skip
        except OSError as error:
            self.outputs.close()
            why = f"{words[0]} cannot be started on {request['host']}: {error.strerror}"
            self.record.write(state="ended", code=127, why=why, ended=time.time())
            return why
        began = {"pid": os.getpid(), "launcher": self.process.pid, "began": time.time(), "words": words, "job": request["job"]}
        self.record.write(state="running", code=None, why="", detached=request["detach"], rank=request["rank"], **began)
        loop = asyncio.get_running_loop()
        for descriptor in self.outputs.filenos():
            loop.add_reader(descriptor, self._read, [descriptor])
        if self.why:  # a stop was requested in the meantime
            self.process.send_signal(signal.SIGINT)
        if request["time_limit"]:
            self.timers.append(loop.call_later(request["time_limit"], self.stop, "the time limit is reached"))
        self.waiting = asyncio.ensure_future(self._wait())
        return ""

    def stop(self, why: str, seconds: float | None = None, is_interrupt: bool = False) -> None:
        """Stop as Ctrl-C does, and kill after `seconds`. Before the first step, Ctrl-C returns 130, and other stops 75."""
        if seconds is not None:
            self.timers.append(asyncio.get_running_loop().call_later(seconds, self.kill, why))
        if self.why:
            return
        self.why, self.is_interrupted = why, is_interrupt
        self.note(f"{self.request['host']}: {why}: the job saves a checkpoint and stops")
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGINT)

    def kill(self, why: str) -> None:
        """Kill the launcher and all of its descendants. Give up if they are still alive after KILL_SECONDS."""
        self.why, self.is_killed = self.why or why, True
        self.note(f"{self.request['host']}: {why}: the processes of the job are killed")
        self._kill_descendants()
        loop = asyncio.get_running_loop()
        self.timers += [loop.call_later(REPORT_SECONDS, self._report_left), loop.call_later(self.kill_seconds, self.given_up.set)]

    def _report_left(self) -> None:
        if left := self._descendants():
            what = f"have not exited {REPORT_SECONDS:.0f} s after they were killed"
            self.channel.send("left", text=self._describe_left(left, what))

    def _describe_left(self, left: list[psutil.Process], what: str = "cannot be killed") -> str:
        pids = ",".join(str(process.pid) for process in left)
        return (
            f"{self.request['host']}: these processes of the job {what}: {pids}. They wait for a disk or a driver "
            f"that does not answer, or belong to another user. `ps -o pid,user,stat,wchan,cmd -p {pids}` shows them there."
        )

    def note(self, text: str) -> None:
        self.log.write(f"[accel-ddp] {text}")
        self.channel.send("notice", text=text)

    async def _wait(self) -> None:
        ended, given_up = asyncio.ensure_future(self.process.wait()), asyncio.ensure_future(self.given_up.wait())
        killed: set[int] = set()
        while not (ended.done() or given_up.done()):
            await asyncio.wait({ended, given_up}, timeout=self.look_seconds, return_when=asyncio.FIRST_COMPLETED)
            before, killed = killed, {process.pid for process in self._descendants() if is_pending(process.pid, signal.SIGKILL)}
            if before & killed and not self.is_killed:  # the monitors have killed a rank; the launcher would wait for it forever
                self.kill("a process of the job does not exit, although it was killed")
        code = ended.result() if ended.done() else -signal.SIGKILL
        left = await self._end_descendants()
        for timer in self.timers:
            timer.cancel()
        self._read_rest()
        code = 128 - code if code < 0 else code
        if code == INTERRUPTED and self.why and not self.is_interrupted and not self.is_killed:
            code = STOPPED
        self.record.write(state="ended", code=code, why=self.why or left, ended=time.time())
        self.log.header(f"exited with code {code}" + "".join(f": {text}" for text in (self.why, left) if text))
        if self.log.failed:
            self.channel.send("notice", text=f"{self.record.log}: not all of the output could be written: {self.log.failed}")
        self.channel.send("end", code=code, why=self.why, left=left)
        self.ended.set()

    async def _end_descendants(self) -> str:
        deadline = time.monotonic() + LEFTOVER_SECONDS
        while self._descendants() and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        deadline = time.monotonic() + (1 if self.given_up.is_set() else self.kill_seconds)
        while left := self._descendants():  # until there are none, because a process may start another one while it is killed
            if time.monotonic() > deadline:
                return self._describe_left(left)
            self._kill_descendants()
            await asyncio.sleep(0.05)
        return ""

    def _read_rest(self) -> None:
        for descriptor in self.outputs.filenos():
            asyncio.get_running_loop().remove_reader(descriptor)
        for rank, data in self.outputs.drain():
            self._receive(rank, data)
        for rank, lines in self.lines.items():
            self._store(rank, lines.end())
        self.outputs.close()

    def _descendants(self) -> list[psutil.Process]:
        """Return the living descendants of the guard. Orphans that have ended are waited for."""
        found = []
        launcher = self.process.pid if self.process else None
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
                elif process.ppid() == os.getpid() and process.pid != launcher:  # asyncio waits for the launcher
                    os.waitpid(process.pid, os.WNOHANG)
        return found

    def _kill_descendants(self) -> None:
        for process in self._descendants():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _read(self, descriptors: list[int]) -> None:
        for rank, data in self.outputs.read(descriptors):
            self._receive(rank, data)

    def _receive(self, rank: int | None, data: bytes) -> None:
        is_terminal = rank == 0 and self.outputs.has_terminal
        found = self.lines.setdefault(rank, Lines()).add(data)
        self._store(rank, found, sends=not is_terminal)
        if is_terminal:  # the panel is shown as it is
            self.channel.send("out", rank=self._global(rank), raw=self.terminal_text.decode(data), lines=found)

    def _store(self, rank: int | None, lines: list[str], sends: bool = True) -> None:
        name = "" if rank is None else f"[rank {self._global(rank)}] "
        for line in lines:
            self.log.write(f"{name}{line}")
        if lines and sends:
            self.channel.send("out", rank=self._global(rank), lines=lines)

    def _global(self, rank: int | None) -> int | None:
        return None if rank is None else self.request["first_rank"] + rank


async def serve(is_detached: bool) -> int:
    """Exchange messages until the job has ended, or the launching machine is gone and the job has been stopped."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb"))
    transport, _ = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(os.dup(1), "wb"))
    guard = _Guard(reader, transport, is_detached)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: guard.job.stop("a stop was requested") if guard.job else sys.exit(1))
    loop.add_signal_handler(signal.SIGUSR1, lambda: guard.job.kill("the end was requested") if guard.job else sys.exit(1))
    return await guard.run()


class _Guard:
    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.WriteTransport, is_detached: bool):
        self.reader, self.transport, self.is_detached = reader, transport, is_detached
        self.channel = Channel(transport)
        self.server: asyncio.Server | None = None
        self.job: JobOnNode | None = None
        self.is_silent = False  # no message for SILENT_SECONDS

    async def run(self) -> int:
        if not self.is_detached:
            self.transport.write(b"\n")  # a login script may have printed a text without the end of its line
            self.channel.send("hello", protocol=PROTOCOL, pid=os.getpid())
        while (message := await self.read()) is not None:
            if await self.handle(message) or (self.job and self.job.ended.is_set()):
                break
        if self.job and self.job.process:
            if self.is_detached:
                await self._drain()
                self.transport.close()
            elif not self.job.ended.is_set():
                self.job.stop("the launching machine is gone", SAVE_SECONDS)
            await self.job.ended.wait()
        # Over a slow link, the rest of the output takes a while. The end of the job comes after it, and must not be lost.
        while message is not None and self.transport.get_write_buffer_size() and not self.transport.is_closing():
            message = await self.read()
        await self._drain()
        if self.is_silent:
            _end_own_sshd()
        return 0

    async def read(self) -> dict[str, Any] | None:
        try:
            line = await asyncio.wait_for(self.reader.readline(), SILENT_SECONDS)
        except asyncio.TimeoutError:
            self.is_silent = True
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    async def _drain(self) -> None:
        deadline = time.monotonic() + 5
        while self.transport.get_write_buffer_size() and not self.transport.is_closing() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def handle(self, message: dict[str, Any]) -> bool:
        send, do = self.channel.send, message["do"]
        if do == "beat":
            send("beat")
        elif do == "facts":
            send("facts", **await asyncio.to_thread(node_checks.collect, message))
        elif do == "listen":
            self.server, error = await node_checks.listen(message["port"], message["word"])
            send("listening", error=error)
        elif do == "connect":
            send("connected", error=await node_checks.connect(message["address"], message["port"], message["word"]))
        elif do == "unlisten":
            self.server.close()
            send("unlistened")
        elif do in job_record.ANSWERS:
            await self.answer(job_record.ANSWERS[do](message, self.channel))
            return True
        elif do == "start":
            return await self.start(message)
        elif self.job:  # a job that has not started is stopped by the end of the connection
            if do == "stop":
                self.job.stop(message["why"], message.get("seconds"), message.get("is_interrupt", False))
            elif do == "kill":
                self.job.kill(message["why"])
            elif self.job.outputs:
                self.job.outputs.resize(message["size"])
        return False

    async def answer(self, work: Coroutine[Any, Any, None]) -> None:
        answering = asyncio.ensure_future(work)
        while not answering.done():
            reading = asyncio.ensure_future(self.read())
            await asyncio.wait({answering, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                await asyncio.wait({reading})  # only one task may read at a time
            elif reading.result() is None:
                break
        if not answering.cancel():
            answering.result()

    async def start(self, request: dict[str, Any]) -> bool:
        if request["detach"] and not self.is_detached:
            self.channel.send(**await asyncio.to_thread(_start_detached, request))
            return True
        self.job = JobOnNode(request, self.channel)
        if error := await self.job.start():
            self.channel.send("failed", text=error)
            return True
        self.channel.send("started", pid=os.getpid())
        return self.is_detached


def _end_own_sshd() -> None:
    """End the sshd of this connection. It would wait for a client whose network was cut, for as long as TCP does."""
    me = psutil.Process()
    with contextlib.suppress(psutil.Error):
        parent = me.parent()
        if parent and parent.name().startswith("sshd") and parent.children() == [me]:  # a shared connection has other sessions
            parent.terminate()


def _start_detached(request: dict[str, Any]) -> dict[str, Any]:
    words = [sys.executable, "-m", "accel_ddp.launch.guard", "--detached"]  # as this one was started
    with contextlib.ExitStack() as stack:
        errors: Any = subprocess.DEVNULL
        with contextlib.suppress(OSError):  # the guard reports it
            log = Record(request["run_folder"], request["host"]).log
            log.parent.mkdir(parents=True, exist_ok=True)
            errors = stack.enter_context(log.open("ab"))
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()  # and left open until the answer, because the end of stdin ends a guard without a job
    answer = json.loads(process.stdout.readline() or b'{"is": "failed", "text": "the guard of the detached job has ended"}')
    return {"kind": answer.pop("is"), **answer}


def main() -> int:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        return asyncio.run(serve("--detached" in sys.argv))
    return 1


if __name__ == "__main__":
    sys.exit(main())
