"""A job on ssh hosts or this machine: checks, start, output, stop and end, and how a later command finds it again."""

import asyncio
import contextlib
import dataclasses
import os
import re
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accel_ddp.errors import INTERRUPTED, STOPPED, UNSAVED, USER_ERROR, UserError
from accel_ddp.launch import job_commands, node_checks
from accel_ddp.launch.code_files import copy_code, find_source
from accel_ddp.launch.connection import Connection, Lost, join_reasons, open_all, ssh_words
from accel_ddp.launch.description import Cluster, Node, shown_value
from accel_ddp.launch.job_commands import Job
from accel_ddp.launch.job_record import Record
from accel_ddp.launch.node_output import Console
from accel_ddp.nodes.run_secret import TOKEN, read_secret
from accel_ddp.text import counted, listed, table

END_SECONDS = 660.0  # of `accel-ddp stop`; longer than a launcher waits for its ranks
STOP_SECONDS = 10.0  # how long the other nodes may save after one node has failed
SILENT_SECONDS = 12.0  # without a message the connection to a node is lost. The other nodes then end within 30 s as well
_INTERVAL = 3.0
_FOLLOW_SECONDS = 120.0  # after an agreed stop, all nodes end together; a node that does not is stopped


def render(cluster: Cluster, job: Job) -> str:
    address = cluster.main_address or (cluster.nodes[0].host.rpartition("@")[2] if cluster.backend == "ssh" else "127.0.0.1")
    lines = []
    for node in cluster.nodes:
        where = f"ssh {node.host}" if cluster.backend == "ssh" else "this machine"
        lines.append(f"# node {node.rank}: {where}, {counted(node.processes, 'process')}")
        if node.folder:
            lines.append(f"cd {_shown_path(node.folder)}")
        if node.venv:
            lines.append(f". {_shown_path(f'{node.venv}/bin/activate')}")
        for name, value in job_commands.node_environment(cluster, node).items():
            shown = shown_value(name, value)
            lines.append(f"export {name}={job_commands.to_shell([shown])}")
        words = job_commands.launcher_words(cluster, job, node_rank=node.rank, address=address, port=cluster.main_port)
        paths = [job_commands.config_word(cluster), job.run_folder]
        lines += [job_commands.to_shell(job_commands.replace_home(words, paths, _shown_path)), ""]
    if not cluster.main_address and cluster.backend == "ssh":
        first = cluster.nodes[0].host
        lines.append(f"# main_address is not given: the launcher uses the address under which ssh reached {first}.")
    return "\n".join(lines).rstrip() + "\n"


def _shown_path(path: str) -> job_commands.Shell:
    """Return a path as a user types it: a leading `~/` is not quoted."""
    return job_commands.Shell(job_commands.shell_path(path).replace('"$HOME"', "~", 1))


def launch(cluster: Cluster, job: Job, is_detached: bool = False) -> int:
    return asyncio.run(Session(cluster, job, is_detached).run())


class Session:
    def __init__(self, cluster: Cluster, job: Job, is_detached: bool):
        self.cluster, self.job, self.is_detached = cluster, job, is_detached
        self.console = Console()
        self.secret = read_secret() or secrets.token_hex(32)  # of this run; it travels with the other variables, over ssh's stdin
        self.connections: list[Connection] = []
        self.codes: dict[int, int] = {}  # exit code of each node that has ended, in the order in which they ended
        self.reasons: dict[str, str] = {}  # host -> why its part of the job was stopped; "" if it ended by itself
        self.lost: list[str] = []  # connections that were lost while the job was running
        self.interrupts, self.is_ctrl_c = 0, False
        self.has_started = False
        self.is_stopping = False
        self.began = time.monotonic()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores it
                loop.add_signal_handler(number, self.interrupt, number)
        loop.add_signal_handler(signal.SIGWINCH, self.resize)
        self.work = asyncio.ensure_future(self._run())
        try:
            return await self.work
        except asyncio.CancelledError:
            return INTERRUPTED if self.is_ctrl_c else STOPPED
        except Lost as error:
            raise UserError(str(error)) from None
        finally:
            await asyncio.gather(*(connection.close() for connection in self.connections), return_exceptions=True)
            if self.interrupts < 2:  # otherwise the user does not wait for a pager or a terminal that is stopped
                await self.console.wait_until_printed()

    def interrupt(self, number: int) -> None:
        """Stop; the second time kill, the third time return. A closed terminal may send SIGHUP twice; it kills later."""
        if number == signal.SIGHUP and self.is_stopping:
            self._send_all("stop", why="the terminal was closed", seconds=STOP_SECONDS)
            return
        self.interrupts, self.is_ctrl_c = self.interrupts + 1, self.is_ctrl_c or number == signal.SIGINT
        if self.interrupts > 2:
            self.leaving = asyncio.ensure_future(self._leave())
        elif not self.has_started:
            self.work.cancel()
        elif self.is_detached:  # `_run` ends the job as soon as all nodes have started it
            self.console.note("stopping the job, which is just starting.")
        elif self.interrupts == 1:
            self.console.note("stopping: all ranks save a checkpoint. Press Ctrl-C again to kill the job at once.")
            self.is_stopping = True
            seconds = STOP_SECONDS if number == signal.SIGHUP else None
            why = "the terminal was closed" if seconds else "a stop was requested"
            self._send_all("stop", why=why, seconds=seconds, is_interrupt=self.is_ctrl_c)
        else:
            self.console.note("killing the job. Press Ctrl-C again to return before all processes have exited.")
            self._send_all("kill", why="the end was requested")

    async def _leave(self) -> None:
        """End this process at once. The guards go on without it: they kill what is left, and give up some time later."""
        hosts = listed((one.node.host for one in self.connections if one.node.rank not in self.codes), 8)
        self.console.note(
            f"returning, although the job may still run on {hosts or 'a node'}. `accel-ddp status "
            f"{job_commands.words_of_job(self.cluster, self.job)}` shows it."
        )
        with contextlib.suppress(asyncio.TimeoutError):  # of a terminal that is stopped
            await asyncio.wait_for(self.console.wait_until_printed(), 0.5)
        os._exit(INTERRUPTED)

    def resize(self) -> None:
        if self.has_started and (size := _terminal_size()):
            self.connections[0].send("resize", size=size)

    async def _run(self) -> int:
        cluster, job = self.cluster, self.job
        if cluster.copy != "none":
            await copy_code(cluster, find_source(job.script), lambda node: ssh_words(cluster, node), self.console.note)
        self.connections = await open_all(cluster)
        facts = await self._collect_facts()
        _refuse(node_checks.find_errors(cluster, job, facts))
        if cluster.copy == "none" and cluster.backend == "ssh" and Path(job.script).is_file():
            for text in await asyncio.to_thread(node_checks.compare_with_this_machine, job, facts):
                self.console.note(text)
        found = ["127.0.0.1"] if cluster.backend == "local" or len(cluster.nodes) == 1 else facts[0]["address"]
        address = cluster.main_address or next(iter(found), "")
        if not address:
            raise UserError(f"{cluster.file}: main_address is missing, and the address of {cluster.nodes[0].host} was not found.")
        _refuse(await node_checks.check_reach(self.connections, address, cluster.main_port))
        if cluster.doctor == "full" and not await self._run_doctor(address):
            return USER_ERROR
        await self._start(address)
        if self.is_detached and self.interrupts:  # while the nodes were starting
            await stop_all(cluster, job, is_now=True)
            return INTERRUPTED
        if self.is_detached:
            self.console.note(f"job {job.name!r} runs on {len(cluster.nodes)} nodes without this terminal.")
            for line in job_commands.follow_lines(cluster, job):
                self.console.note(line)
            return 0
        await asyncio.gather(*(self._follow(connection) for connection in self.connections))
        return self._finish()

    async def _collect_facts(self) -> list[dict[str, Any]]:
        config = job_commands.used_config(self.cluster)

        async def ask(connection: Connection) -> dict[str, Any]:
            node = connection.node
            return await connection.ask(
                "facts", "facts", script=self.job.script, config=config, run_folder=self.job.run_folder, host=node.host,
                job=self.job.name, output=self.cluster.output, gpus=node.gpus,
            )  # fmt: skip

        return await asyncio.gather(*map(ask, self.connections))

    def _request(self, connection: Connection, make: Callable[..., list[str]], address: str, detach: bool) -> dict[str, Any]:
        node, cluster = connection.node, self.cluster
        words = make(cluster, self.job, node_rank=node.rank, address=address, port=cluster.main_port)
        # The guard replaces the paths of our recipes and configs if they are not in the code folder but in the package.
        kinds = {self.job.script: "recipes", job_commands.config_word(cluster): "accelerate_configs"}
        script = words.index(self.job.script)
        terminal = None if detach or node.rank else _terminal_size()
        # What this terminal can do. The node does not have these variables, because ssh opens no terminal there.
        shown_as = {name: os.environ[name] for name in ("COLORTERM", "NO_COLOR", "CI") if name in os.environ}
        shown_as["TERM"] = os.environ.get("TERM") or "dumb"
        return {
            "words": words, "kinds": [kinds.get(word, "") if at <= script else "" for at, word in enumerate(words)],
            "env": {TOKEN: self.secret, **(shown_as if terminal else {}), **job_commands.node_environment(cluster, node)},
            "run_folder": self.job.run_folder, "host": node.host,
            "output": cluster.output, "job": self.job.name, "rank": node.rank, "processes": node.processes, "detach": detach,
            "first_rank": sum(one.processes for one in cluster.nodes[: node.rank]), "time_limit": cluster.time_limit,
            "terminal": terminal,
        }  # fmt: skip

    async def _start(self, address: str) -> None:
        self.has_started = True

        async def start(connection: Connection) -> None:
            request = self._request(connection, job_commands.launcher_words, address, self.is_detached)
            await connection.ask("start", "started", **request)

        results = await asyncio.gather(*map(start, self.connections), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures and not isinstance(failures[0], Lost):
            raise failures[0]
        if failures:
            self._send_all("kill", why="another node has not started")
            if self.is_detached:
                await stop_all(self.cluster, self.job, is_now=True)
            raise UserError(join_reasons("the job was not started:", list(map(str, failures))))

    async def _run_doctor(self, address: str) -> bool:
        self.console.note("the doctor checks all nodes, their bandwidth and collectives ...")

        async def check(connection: Connection) -> int:
            request = self._request(connection, job_commands.doctor_words, address, False)
            request |= {"time_limit": None, "terminal": None}
            await connection.ask("start", "started", **request)
            while (message := await self._receive(connection))["is"] != "end":
                if message["is"] == "out" and connection.node.rank == 0:
                    self.console.show(connection.node.host, 0, message["lines"])
            return message["code"]

        try:
            codes = await asyncio.gather(*map(check, self.connections))
        except Lost as error:
            raise UserError(f"the doctor did not finish: {error}") from None
        await asyncio.gather(*(connection.close() for connection in self.connections))
        if failed := [node for node, code in zip(self.cluster.nodes, codes) if code]:
            self.console.note(f"the doctor has found errors. Logs: {self._log_paths(failed)}")
            return False
        self.connections = await open_all(self.cluster)  # a guard runs one job
        return True

    async def _follow(self, connection: Connection) -> None:
        node, is_silent = connection.node, False
        try:
            while True:
                await self.console.wait_for_room()
                message = await self._receive(connection)
                if message["is"] == "out" and "raw" in message:
                    self.console.show_terminal(node.host, message["raw"], message["lines"])
                elif message["is"] == "out":
                    self.console.show(node.host, message["rank"], message["lines"])
                elif message["is"] == "notice" and not self.interrupts:
                    self.console.note(message["text"])
                elif message["is"] == "end":
                    self.codes[node.rank] = message["code"]
                    self.reasons[node.host] = message["why"]
                    if message["left"]:
                        self.console.note(message["left"])
                    break
                elif message["is"] == "left":
                    self.console.note(message["text"])
        except Lost as error:
            self.lost.append(str(error))
            self.codes[node.rank], is_silent = 1, connection.process.returncode is None
            self.console.note(f"the connection to {error}")
        if len(self.codes) < len(self.connections):
            self._stop_others(node.host, self.codes[node.rank], delay=0 if self.lost else 2)
        if is_silent:  # a guard that was stopped (SIGSTOP) would stay, because it does not see that this command has ended
            self.console.note(f"{node.host}: killing what may still run there (up to a minute)")
            await stop_all(dataclasses.replace(self.cluster, nodes=(node,)), self.job, is_now=True)

    async def _receive(self, connection: Connection) -> dict[str, Any]:
        """Return the next message of a node. Raises Lost after SILENT_SECONDS without one, not even a heartbeat."""
        silent = 0
        while True:
            try:
                return await asyncio.wait_for(connection.receive(), _INTERVAL)
            except asyncio.TimeoutError:
                # Intervals are counted, and not seconds: after a laptop has slept, messages that have arrived are read first.
                silent = silent + 1 if time.monotonic() - connection.last_message > _INTERVAL else 0
                if silent * _INTERVAL >= SILENT_SECONDS:
                    reason = f"no message for {SILENT_SECONDS:.0f} s: the host or the link to it is down"
                    raise Lost(f"{connection.node.host}: {reason}.") from None

    def _stop_others(self, host: str, code: int, delay: float) -> None:
        """In `delay` seconds, the monitors of the other nodes print the diagnosis and end their ranks."""
        loop = asyncio.get_running_loop()
        if code in (0, STOPPED, INTERRUPTED) or self.interrupts:  # all nodes end together; the main node may write for longer
            if code:
                why = f"{host} has exited"
                loop.call_later(_FOLLOW_SECONDS, lambda: self._send_all("stop", why=why, seconds=STOP_SECONDS))
        elif not self.is_stopping:
            self.is_stopping = True
            loop.call_later(delay, lambda: self._send_all("stop", why=f"{host} has failed", seconds=STOP_SECONDS))

    def _send_all(self, kind: str, **values: Any) -> None:
        for connection in self.connections:
            if connection.node.rank not in self.codes:
                connection.send(kind, **values)

    def _finish(self) -> int:
        failed = {rank: code for rank, code in self.codes.items() if code}
        code = next((code for code in failed.values() if code not in (STOPPED, INTERRUPTED)), next(iter(failed.values()), 0))
        if UNSAVED in failed.values():
            code = UNSAVED
        elif STOPPED in failed.values() and self.interrupts == 1:
            code = STOPPED
        elif self.interrupts > 1:
            code = INTERRUPTED
        first = next((self.cluster.nodes[rank].host for rank, one in failed.items() if one == code), "")
        if code == 1:  # torch returns 1 for every end of a script that does not use this package
            was_signal = self.reasons.get(first) and "SignalException" in self.console.exceptions.get(first, "")
            code = INTERRUPTED if was_signal else self.console.exit_codes.get(first) or 1
        seconds = time.monotonic() - self.began
        causes = [*self.lost, f"{first} exited with code {code}; its log has the reason"]
        if code not in (0, STOPPED, INTERRUPTED):
            causes.insert(0, self.console.first_cause(first))
        if len(causes) > 1:
            self.console.note(f"the first cause: {next(filter(None, causes))}")
        logs = self._log_paths(self.cluster.nodes)
        how = {0: "finished", STOPPED: "stopped with a checkpoint", INTERRUPTED: "was killed"}.get(code, "failed")
        self.console.note(f"job {self.job.name!r} {how} after {seconds:.0f} s, exit code {code}. Logs: {logs}")
        return code

    def _log_paths(self, nodes: Sequence[Node]) -> str:
        folder = Path(self.job.run_folder, "launch")
        return listed((f"{node.host}:{folder}/{Record('', node.host).log.name}" for node in nodes), 2)


def _refuse(errors: list[str]) -> None:
    if errors:
        raise UserError(join_reasons("the job was not started:", errors))


def _terminal_size() -> list[int] | None:
    with contextlib.suppress(OSError, ValueError):
        if os.isatty(sys.stdout.fileno()):
            return list(os.get_terminal_size(sys.stdout.fileno()))
    return None


# ---- `accel-ddp status`, `logs` and `stop`


async def ask_all(cluster: Cluster, kind: str, answer: str, limit: float, **values: Any) -> list[dict[str, Any] | str]:
    """Return the answer of each node, or the reason why there is none. A node that is down does not hide the others."""

    async def ask(connection: Connection) -> dict[str, Any] | str:
        try:
            await connection.open()
            return await connection.ask(kind, answer, limit, host=connection.node.host, **values)
        except Lost as error:
            return str(error)
        finally:
            await connection.close()

    return await asyncio.gather(*(ask(Connection(cluster, node)) for node in cluster.nodes))


def status(cluster: Cluster, job: Job | None) -> int:
    request = _where(cluster, job) if job else {"run_folder": "", "job": "", "output": cluster.output}
    answers = asyncio.run(ask_all(cluster, "status", "status", 60, **request))
    rows = []
    for node, answer in zip(cluster.nodes, answers):
        if isinstance(answer, str):
            rows.append(("?", node.host, "unknown", answer))
            continue
        for name, state in answer["jobs"].items():
            rows.append((name, node.host, *_describe(state)))
        if job and not answer["jobs"]:
            rows.append((job.name, node.host, "no job", f"there is no job of this name in {cluster.output}"))
    if not rows:
        print(f"no jobs below {cluster.output} on {len(cluster.nodes)} nodes")
    print("\n".join(table(sorted(rows, key=lambda row: row[0]))), end="\n" if rows else "")
    return 1 if any(isinstance(answer, str) for answer in answers) else 0


def _describe(state: dict[str, Any]) -> tuple[str, str]:
    clock = lambda seconds: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    step = f", step {state['step']}" if state.get("step") is not None else ""
    if state["state"] == "ended":
        why = f": {state['why']}" if state.get("why") else ""
        when = clock(state["ended"]) if state.get("ended") else ""
        return f"exited ({'?' if state.get('code') is None else state['code']})", f"{when}{step}{why}".lstrip(",: ")
    how = "detached" if state.get("detached") else "attached"
    return state["state"], f"since {clock(state.get('began', 0))}, pid {state.get('pid')}, {how}{step}"


def logs(cluster: Cluster, job: Job, follow: bool, lines: int) -> int:
    """Print all logs. With `follow`, return the job's exit code. BrokenPipeError if nobody reads them, as in `... | head`."""
    return asyncio.run(_show_logs(cluster, job, follow, lines))


async def _show_logs(cluster: Cluster, job: Job, follow: bool, lines: int) -> int:
    console = Console(ends_with_reader=True)
    codes: list[int] = []  # of the nodes, in the order in which they ended
    missing: list[str] = []
    lost: list[str] = []

    async def show(connection: Connection) -> None:
        host = connection.node.host
        try:
            await connection.open()
            connection.send("logs", host=host, follow=follow, lines=lines, **_where(cluster, job))
            while (message := await connection.receive())["is"] not in ("end", "failed"):
                await console.wait_for_room()
                for line in message["lines"] if message["is"] == "out" else []:
                    rank, text = re.fullmatch(r"(?:\[rank (\d+)\] ?)?(.*)", line, re.DOTALL).groups()  # the launcher has none
                    console.show(host, rank and int(rank), [text])
            if message["is"] == "end":
                if message["code"] is None and follow:
                    console.note(f"{host}: the exit code of the job is not known: {message['why'] or 'it has not started'}.")
                codes.append(1 if message["code"] is None else message["code"])
            else:
                (missing if message.get("is_missing") else lost).append(f"{host}: {message['text']}")
        except Lost as error:
            lost.append(str(error))
            console.note(str(error))
        finally:
            await connection.close()

    showing = asyncio.gather(*(show(Connection(cluster, node)) for node in cluster.nodes))
    watching = asyncio.ensure_future(_wait_for_closed_output())
    try:
        await asyncio.wait([showing, watching], return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            raise BrokenPipeError
        showing.result()
        await console.wait_until_printed()
    finally:
        watching.cancel()
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await showing
    if missing and not codes and not lost:
        raise UserError(f"no node has a log of a job named {job.name!r}. `accel-ddp status {cluster.file}` lists the jobs.")
    for text in missing:
        console.note(text)
    await console.wait_until_printed()
    if missing or lost or not follow:
        return 1 if missing or lost else 0
    failed = [code for code in codes if code]
    return STOPPED if STOPPED in failed else next((code for code in failed if code != INTERRUPTED), max(failed, default=0))


async def _wait_for_closed_output() -> None:
    """Return when the reader of stdout has ended. A job may print nothing for hours, so writing would show it too late."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors only
    while not poll.poll(0):
        await asyncio.sleep(0.5)


def stop(cluster: Cluster, job: Job, is_now: bool) -> int:
    how = "at once" if is_now else "after a checkpoint, which takes as long as a step and a save"
    print(f"asking all nodes to stop job {job.name!r} {how} ...", flush=True)
    try:
        answers = asyncio.run(stop_all(cluster, job, is_now))
    except KeyboardInterrupt:
        print(f"the nodes continue without this command. `accel-ddp status {cluster.file}` shows when the job has stopped.")
        return INTERRUPTED
    found = [answer for answer in answers if isinstance(answer, dict) and answer["was_running"]]
    has_failed = any(isinstance(answer, str) or answer.get("is_running") for answer in answers)
    for node, answer in zip(cluster.nodes, answers):
        if isinstance(answer, str):
            print(answer)
        elif not answer["was_running"]:
            print(f"{node.host}: not running")
        else:
            print(f"{node.host}: " + ("still running" if answer["is_running"] else f"exited with code {answer['code']}"))
    if not found and not has_failed:
        raise UserError(f"no node runs a job named {job.name!r}. `accel-ddp status {cluster.file}` lists the jobs.")
    return int(has_failed)


async def stop_all(cluster: Cluster, job: Job, is_now: bool) -> list[dict[str, Any] | str]:
    seconds = 30.0 if is_now else END_SECONDS
    return await ask_all(cluster, "end_job", "stopped", seconds + 30, now=is_now, seconds=seconds, **_where(cluster, job))


def _where(cluster: Cluster, job: Job) -> dict[str, str]:
    """Return the part of a request that names a job. `output` is empty if the user has given the folder of the job itself."""
    is_given = job.run_folder != f"{cluster.output.rstrip('/')}/{job.name}"
    return {"job": job.name, "run_folder": job.run_folder, "output": "" if is_given else cluster.output}
