"""Tests of `accel-ddp status`, `logs` and `stop` for jobs that run somewhere else, that have ended, or whose node is down."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest
import yaml

from accel_ddp.launch.job_record import LogFile, Record, find_records, store_place
from tests.conftest import BIN, ROOT, Running, clean_environment, free_port
from tests.ssh_nodes import Machine, Machines

# It is quiet until it is asked to stop. It then needs some seconds to save.
SAVES = """
import os, signal, time
def stop(*_):
    for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
    print("saving\\n", end="", flush=True); time.sleep(4); print("saved\\n", end="", flush=True); os._exit(75)
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, stop)
print(f"rank {os.environ['RANK']} runs\\n", end="", flush=True)
time.sleep(600)
"""


def shell(machine: Machine, line: str) -> subprocess.CompletedProcess:
    words = machine.command(["bash", "-c", line], folder=f"{machine.machines.home}/elsewhere")
    return subprocess.run(words, env=machine.environment(), capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_detached_job_is_found_by_its_name_wherever_its_folder_is_and_stops_although_a_node_is_down(machines: Machines):
    laptop, (node0, node1, elsewhere) = machines.laptop, machines.nodes
    for machine in machines.all:
        machines.write(machine, "work/saves.py", SAVES)
    # Different numbers of processes are started by torchrun, which is twice as fast as Accelerate.
    file = machines.describe([{"host": "node0", "processes": 2}, "node1"], ssh={"connect_seconds": 2}, name="cluster.yaml")
    folder = f"{machines.home}/an other/folder"
    detach = ["launch", "--detach", "--name", "far", file, "saves.py", "--output_dir", folder]
    assert "accel-ddp logs -f cluster.yaml --name far" in laptop.run(BIN / "accel-ddp", *detach).well().text
    machines.until(lambda: "rank 2 runs" in (node1.home / "an other/folder/launch/node1.log").read_text(), 180, "rank 2")
    machines.write(elsewhere, "elsewhere/cluster.yaml", (laptop.work / file).read_text() + "name: another_one\n")

    status = shell(elsewhere, "accel-ddp status cluster.yaml")
    assert status.returncode == 0, status.stderr
    rows = [line.split() for line in status.stdout.splitlines()]
    assert [row[:3] for row in rows] == [["far", "node0", "running"], ["far", "node1", "running"]]
    # The reader of the output ends, and the job prints nothing.
    head = shell(elsewhere, "timeout 60 accel-ddp logs -f -n 1 cluster.yaml --name far | head -n 1; echo ${PIPESTATUS[0]}")
    assert head.stdout.splitlines()[-1] == "1", head
    assert head.stderr == ""
    missing = shell(elsewhere, "accel-ddp logs cluster.yaml")
    assert missing.returncode == 2
    assert "no node has a log of a job named 'another_one'" in missing.stderr
    machines.until(lambda: not elsewhere.processes(), 10, "no process of `logs`")

    node1.die()
    status = shell(elsewhere, "accel-ddp status cluster.yaml --name far")
    assert status.returncode == 1
    assert any(line.split()[:3] == ["far", "node0", "running"] for line in status.stdout.splitlines()), status.stdout
    assert "node1: the host cannot be reached" in status.stdout
    logs = shell(elsewhere, "accel-ddp logs cluster.yaml --name far")
    assert logs.returncode == 1
    assert "[node0] rank 1 runs" in logs.stdout
    assert "node1: the host cannot be reached" in logs.stdout
    # A stop that is interrupted goes on at the nodes, and another one waits for its end.
    stop = "timeout --preserve-status -s INT 4 accel-ddp stop cluster.yaml --name far; echo $?; "
    stopped = shell(elsewhere, stop + "accel-ddp stop cluster.yaml --name far")
    assert "the nodes continue without this command" in stopped.stdout
    assert "130\n" in stopped.stdout
    assert "node0: exited with code " in stopped.stdout
    assert stopped.returncode == 1
    assert "node1: the host cannot be reached" in stopped.stdout
    log = (node0.home / "an other/folder/launch/node0.log").read_text()
    assert log.count("saved\n") == 2, log
    assert "a stop was requested" in log
    assert machines.left() == []


@pytest.fixture
def local(tmp_path):
    """A description of a node on this machine with a job whose guard is this test."""
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"backend": "local", "nodes": ["here"], "gpus_per_node": 0}))
    record = Record(tmp_path / "runs" / "job", "here")
    assert record.claim()
    return tmp_path, record


def accel_ddp(folder: Path, *words: str) -> Running:
    return Running([[BIN / "accel-ddp", *words]], [clean_environment()], cwd=folder)


def test_logs_are_complete_however_long_they_are_and_although_they_are_replaced_while_they_are_followed(local):
    folder, record = local
    log = LogFile(record.log, most_bytes=400_000)
    for number in range(8_000):
        log.write(f"[rank 1] line {number} " + "x" * 50)
    assert record.log.with_suffix(".log.1").stat().st_size > 400_000
    assert record.log.stat().st_size < 401_000, "a log does not grow without a limit"
    following = accel_ddp(folder, "logs", "-f", "-n", "1", "cluster.yaml", "--name", "job")
    following.until("line 7999 ")
    for number in range(8_000, 25_000):
        log.write(f"[rank 1] line {number} " + "x" * 50)
    record.write(state="ended", code=74)
    record._held.close()
    ended = following.ended(60)
    assert ended.codes == [74], "the exit code of the job"
    numbers = [int(line.split()[4]) for line in ended.text.splitlines() if line.startswith("[here rank 1] line")]
    assert len(numbers) == len(set(numbers))
    assert numbers[-1] == 24_999
    assert numbers == sorted(numbers)
    assert set(range(24_000, 25_000)) <= set(numbers)
    last = accel_ddp(folder, "logs", "-n", "9", "cluster.yaml", "--name", "job").ended(60).well()
    assert len(last.text.splitlines()) == 9
    assert accel_ddp(folder, "logs", "-n", "-1", "cluster.yaml", "--name", "job").ended(60).codes == [2]


def test_stop_never_signals_a_process_that_is_not_the_guard_of_the_job(local):
    """The pid in the file is that of another program, because the guard has just started or was killed long ago."""
    folder, record = local
    assert record.describe()["state"] == "starting"
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    record.write(pid=other.pid, state="running")
    for now in ([], ["--now"]):
        ended = accel_ddp(folder, "stop", *now, "cluster.yaml", "--name", "job").ended(60)
        assert ended.codes == [2]
        assert "here: not running" in ended.text
    time.sleep(0.1)
    assert other.poll() is None
    other.send_signal(signal.SIGKILL)
    other.wait()
    record._held.close()
    followed = accel_ddp(folder, "logs", "-f", "cluster.yaml", "--name", "job").ended(60)
    assert followed.codes == [2], "there is no log yet"
    record.log.write_text("the last line\n")
    followed = accel_ddp(folder, "logs", "-f", "cluster.yaml", "--name", "job").ended(60)
    assert followed.codes == [1], "a job whose guard was killed has not ended well"
    assert "its guard was killed" in followed.text
    status = accel_ddp(folder, "status", "cluster.yaml").ended(60).well().text
    assert "exited (?)" in status
    assert "its guard was killed, or the node was restarted" in status


def test_a_job_with_a_name_is_found_where_it_was_started_last(tmp_path):
    output, far = tmp_path / "runs", tmp_path / "far"
    for folder in (output / "job", output / "second", far):
        Record(folder, "here").claim()
    store_place(output, "job", far)
    found = {name: record.run_folder for name, record in find_records(output, "here").items()}
    assert found == {"job": far, "second": output / "second"}
    store_place(output, "job", output / "job")
    assert find_records(output, "here")["job"].run_folder == output / "job"
    assert json.loads((far / "launch" / "here.json").read_text())["pid"] == os.getpid()
    assert find_records(tmp_path / "missing", "here") == {}
    store_place(output, "third", output / "second")
    assert list(find_records(output, "here")) == ["job", "third"], "one job is listed once"


def test_the_main_rank_has_a_terminal_that_follows_the_size_of_the_terminal_of_the_user(tmp_path):
    """The script does not use the package otherwise, so that it starts without torch."""
    script = """
import os, sys, time
from accel_ddp.nodes.terminal import connect_output
connect_output()
size = os.get_terminal_size(2)
print(f"columns: {size.columns}", sys.stderr.isatty(), os.environ["TERM"])
while os.get_terminal_size(2) == size: time.sleep(0.05)
print(f"columns: {os.get_terminal_size(2).columns}")
"""
    (tmp_path / "script.py").write_text(script)
    description = {"backend": "local", "nodes": ["here"], "gpus_per_node": 0, "main_port": free_port()}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(description))
    command = ["launch", "--name", "bar", "cluster.yaml", "script.py"]
    child = pexpect.spawn(
        str(BIN / "accel-ddp"), command, env=clean_environment(PYTHONPATH=str(ROOT), TERM="vt220"), cwd=str(tmp_path), encoding="utf-8",
        dimensions=(20, 77), timeout=180,
    )  # fmt: skip
    child.expect("columns: 77 True vt220")
    child.setwinsize(20, 55)
    child.expect("columns: 55")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert "[rank 0] columns: 55\n" in (tmp_path / "runs/bar/launch/here.log").read_text()


PRINTS_AND_WAITS = """
import os, time
for number in range(500): print(f"line {number} " + "x" * 1000)
print("waits", flush=True)
while not os.path.exists("go on"): time.sleep(0.1)
print("ends", flush=True)
"""


def test_a_job_continues_while_nobody_reads_its_output_and_after_nohup(tmp_path):
    """A pager or Ctrl-S blocks a program that prints. Without heartbeats, the guards stop the job after 15 s."""
    (tmp_path / "prints.py").write_text(PRINTS_AND_WAITS)
    keys = {"backend": "local", "nodes": ["here"], "gpus_per_node": 0, "main_port": free_port()}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(keys))
    words = ["nohup", str(BIN / "accel-ddp"), "launch", "--name", "job", "cluster.yaml", "prints.py"]
    launched = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=tmp_path, env=clean_environment())
    log = tmp_path / "runs" / "job" / "launch" / "here.log"
    deadline = time.monotonic() + 180
    while not (log.exists() and "waits\n" in log.read_text()):
        assert time.monotonic() < deadline
        assert launched.poll() is None
        time.sleep(0.1)
    launched.send_signal(signal.SIGHUP)
    time.sleep(18)  # longer than guards wait for a heartbeat
    assert "--- " in log.read_text()
    assert "exited with" not in log.read_text()
    (tmp_path / "go on").touch()
    text = launched.communicate(timeout=180)[0].decode()
    assert launched.returncode == 0, text
    assert [line.split()[2] for line in text.splitlines() if "] line " in line] == list(map(str, range(500)))
    assert "[here] ends" in text


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
def test_a_third_ctrl_c_returns_at_once_although_a_process_cannot_be_killed(tmp_path):
    """The process belongs to another user, and the guard lacks the capability of root to kill processes of others."""
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sleep", "600"]
    (tmp_path / "script.py").write_text(
        "import signal, subprocess, time\n"
        f"child = subprocess.Popen({words!r}, start_new_session=True)\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
        "print('pid', child.pid, flush=True); time.sleep(600)\n"
    )
    keys = {"backend": "local", "nodes": ["here"], "gpus_per_node": 0, "main_port": free_port()}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(keys))
    launch = [BIN / "accel-ddp", "launch", "--name", "job", "cluster.yaml", "script.py"]
    running = Running([["setpriv", "--bounding-set=-kill", *launch]], [clean_environment()], cwd=tmp_path)
    running.until("pid ")
    pid = int(running.read[0].split()[-1])
    try:
        time.sleep(1)
        for text in ("stopping: all ranks save a checkpoint", f"3 s after they were killed: {pid}."):
            running.processes[0].send_signal(signal.SIGINT)
            running.until(text)
        began = time.monotonic()
        running.processes[0].send_signal(signal.SIGINT)
        ended = running.ended(10)
        assert time.monotonic() - began < 3
        assert ended.codes == [130], ended.text
        assert "returning, although the job may still run on here. `accel-ddp status cluster.yaml --name job`" in ended.text
    finally:
        os.kill(pid, signal.SIGKILL)
