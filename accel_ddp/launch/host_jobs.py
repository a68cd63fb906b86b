"""`accel-ddp status`, `logs` and `stop` for jobs on ssh hosts and on this machine."""

import asyncio
import contextlib
import re
import select
import sys
import time
from typing import Any

from accel_ddp.errors import INTERRUPTED, STOPPED, UserError
from accel_ddp.launch.connection import Connection, Lost
from accel_ddp.launch.description import Cluster
from accel_ddp.launch.job_commands import Job
from accel_ddp.launch.node_output import Console
from accel_ddp.text import table

STOP_SECONDS = 660.0  # longer than a launcher waits for its ranks


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
    seconds = 30.0 if is_now else STOP_SECONDS
    return await ask_all(cluster, "end_job", "stopped", seconds + 30, now=is_now, seconds=seconds, **_where(cluster, job))


def _where(cluster: Cluster, job: Job) -> dict[str, str]:
    """Return the part of a request that names a job. `output` is empty if the user has given the folder of the job itself."""
    is_given = job.run_folder != f"{cluster.output.rstrip('/')}/{job.name}"
    return {"job": job.name, "run_folder": job.run_folder, "output": "" if is_given else cluster.output}
