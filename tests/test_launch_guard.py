"""Tests of the guard of a node, which is started directly: its end, and what it sends over a slow link."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from accel_ddp.launch.connection import Connection, Lost
from accel_ddp.launch.description import read_description
from tests.conftest import BIN, clean_environment
from tests.jobs import HangingDisk
from tests.nodes import NotPossible

SLEEPS = "sleep\x00600\x00"  # the command line of `setpriv ... sleep 600` when it has become the other user


def start_guard(folder: Path, program: str, before: tuple[str, ...] = (), **more: object) -> subprocess.Popen:
    """Start a guard, with the command `before` if given, whose launcher is a Python program, and send heartbeats to it."""
    words = [sys.executable, "-c", program]
    request = {
        "do": "start", "words": words, "kinds": [""] * len(words), "env": {}, "run_folder": str(folder / "runs" / "job"),
        "host": "here", "output": str(folder / "runs"), "job": "job", "rank": 0, "processes": 1, "detach": False, "first_rank": 0,
        "time_limit": None, "terminal": None, **more,
    }  # fmt: skip
    guard = subprocess.Popen(
        [*before, sys.executable, "-m", "accel_ddp.launch.guard"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=clean_environment(),
    )  # fmt: skip

    def beat() -> None:
        with contextlib.suppress(OSError, ValueError):
            guard.stdin.write(json.dumps(request).encode() + b"\n")
            while guard.poll() is None:
                guard.stdin.write(b'{"do": "beat"}\n')
                guard.stdin.flush()
                time.sleep(0.5)

    threading.Thread(target=beat, daemon=True).start()
    return guard


def test_a_job_ends_although_a_process_that_it_leaves_behind_has_inherited_its_output(tmp_path):
    """Some versions of Python wait in `Process.wait` until all processes have closed the pipe."""
    began = time.monotonic()
    guard = start_guard(tmp_path, "import subprocess; subprocess.Popen(['sh', '-c', 'setsid sleep 600 & echo $!']).wait()")
    messages = [json.loads(line) for line in guard.stdout if line.strip()]
    assert time.monotonic() - began < 120
    assert guard.wait(60) == 0
    assert [message["code"] for message in messages if message["is"] == "end"] == [0]
    (pid,) = [int(line) for message in messages if message["is"] == "out" for line in message["lines"]]
    assert not Path(f"/proc/{pid}").exists()


def test_the_end_of_a_job_arrives_over_a_link_that_is_slower_than_the_output(tmp_path):
    guard = start_guard(tmp_path, "for number in range(30_000): print('x' * 100)")
    received = b""
    while data := os.read(guard.stdout.fileno(), 1 << 16):
        received += data
        time.sleep(0.5)  # the rest after the end of the launcher takes longer than 5 s
    messages = [json.loads(line) for line in received.splitlines() if line.strip()]
    assert [message["code"] for message in messages if message["is"] == "end"] == [0]
    assert any("the link is slow" in message["text"] for message in messages if message["is"] == "notice")
    assert (tmp_path / "runs" / "job" / "launch" / "here.log").read_text().count("x" * 100) == 30_000
    assert guard.wait(60) == 0


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
@pytest.mark.parametrize("is_launcher", [False, True])
def test_a_job_ends_although_one_of_its_processes_cannot_be_killed(tmp_path, is_launcher):
    """The process belongs to another user, and the guard lacks the capability of root to kill processes of others."""
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sleep", "600"]
    program = f"""
import subprocess, time
child = subprocess.Popen({words!r})
while child.poll() is None and open(f"/proc/{{child.pid}}/cmdline").read() != {SLEEPS!r}: time.sleep(0.01)
print(child.pid)"""
    if is_launcher:
        program = f"import os; print(os.getpid(), flush=True); os.execvp('setpriv', {words!r})"
    guard = start_guard(tmp_path, program, ("setpriv", "--bounding-set=-kill"), kill_seconds=1)
    messages = []
    for line in filter(bytes.strip, guard.stdout):
        messages.append(json.loads(line))
        if is_launcher and messages[-1]["is"] == "out":
            deadline = time.monotonic() + 60
            while Path(f"/proc/{messages[-1]['lines'][0]}/cmdline").read_text() != SLEEPS:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            guard.stdin.write(b'{"do": "kill", "why": "a test"}\n')
            guard.stdin.flush()
    (pid,) = [int(line) for message in messages if message["is"] == "out" for line in message["lines"]]
    try:
        assert guard.wait(60) == 0
        (end,) = [message for message in messages if message["is"] == "end"]
        assert end["code"] == (137 if is_launcher else 0)
        assert end["left"].startswith(f"here: these processes of the job cannot be killed: {pid}. "), end
        assert "sleep" in Path(f"/proc/{pid}/cmdline").read_text()
        state = json.loads((tmp_path / "runs" / "job" / "launch" / "here.json").read_text())
        assert (state["state"], state["why"]) == ("ended", "a test" if is_launcher else end["left"])
    finally:
        os.kill(pid, 9)


def test_stop_ends_a_guard_that_was_stopped(tmp_path):
    guard = start_guard(tmp_path, "import time; print('runs', flush=True); time.sleep(600)")
    messages = (json.loads(line) for line in filter(bytes.strip, guard.stdout))
    assert next(one for one in messages if one["is"] == "out")["lines"] == ["runs"]
    guard.send_signal(signal.SIGSTOP)
    (tmp_path / "cluster.yaml").write_text("{backend: local, nodes: [here], gpus_per_node: 0}")
    words = [BIN / "accel-ddp", "stop", "--now", "cluster.yaml", "--name", "job"]
    done = subprocess.run(words, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=180)
    assert "here: exited with code 137" in done.stdout, done
    assert guard.wait(60) == 0


def test_a_local_node_may_have_a_relative_folder_with_a_venv_and_a_missing_venv_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "env").symlink_to(BIN.parent)

    async def open_and_close(venv: str) -> None:
        file = tmp_path / "cluster.yaml"
        file.write_text(f"{{backend: local, nodes: [here], gpus_per_node: 0, folder: work, venv: {venv}}}")
        cluster = read_description(file)
        connection = Connection(cluster, cluster.nodes[0])
        try:
            await connection.open()
        finally:
            await connection.close()

    asyncio.run(open_and_close("env"))
    with pytest.raises(Lost, match="absent/bin/python does not exist in work on this node"):
        asyncio.run(open_and_close("absent"))


@pytest.mark.parametrize(("message", "code"), [(None, 75), ({"is_interrupt": False}, 75), ({"is_interrupt": True}, 130)])
def test_a_stop_before_the_first_step_is_75_and_ctrl_c_is_130(tmp_path, message, code):
    """`accel-ddp stop` sends SIGTERM to the guard, and the launching machine a message."""
    guard = start_guard(tmp_path, "import time; print('runs', flush=True); time.sleep(600)")
    messages = (json.loads(line) for line in filter(bytes.strip, guard.stdout))
    assert next(one for one in messages if one["is"] == "out")["lines"] == ["runs"]
    if message is None:
        guard.terminate()
    else:
        guard.stdin.write(json.dumps({"do": "stop", "why": "a test", **message}).encode() + b"\n")
        guard.stdin.flush()
    assert next(one for one in messages if one["is"] == "end")["code"] == code
    assert guard.wait(60) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="a hanging disk needs root")
def test_a_job_ends_although_the_kernel_blocks_a_rank_that_its_monitor_has_killed(tmp_path):
    """Nobody asks for a stop. The rank is in state D on a frozen disk, and its launcher waits for it."""
    try:
        disk = HangingDisk(tmp_path / "disk")
    except NotPossible as error:
        pytest.skip(f"not tested: a hanging disk needs loop devices: {error}")
    write = f"import os; print(os.getpid(), flush=True); input(); open({str(disk.path / 'file')!r}, 'w')"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {write!r}], stdin=open({str(tmp_path / 'go')!r}))"
    os.mkfifo(tmp_path / "go")
    guard = start_guard(tmp_path, program, tuple(disk.command([])), kill_seconds=4, look_seconds=0.5)
    try:
        with (tmp_path / "go").open("w") as go:
            messages = (json.loads(line) for line in filter(bytes.strip, guard.stdout))
            pid = int(next(message["lines"][0] for message in messages if message["is"] == "out"))
            disk.freeze()
            go.write("\n")
        while " D " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.05)
        os.kill(pid, 9)
        kinds = {message["is"]: message for message in messages}
        assert f"here: these processes of the job have not exited 3 s after they were killed: {pid}. " in kinds["left"]["text"], (
            kinds
        )
        assert kinds["end"]["left"].startswith(f"here: these processes of the job cannot be killed: {pid}. ")
        assert kinds["end"]["why"] == "a process of the job does not exit, although it was killed"
        assert guard.wait(60) == 0
    finally:
        disk.unfreeze()
        disk.close()
        guard.kill()
