"""Tests of the output of ranks: the guard of a node receives the lines of each rank separately, and no rank ever waits for it."""

import itertools
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from accel_ddp.launch.node_output import RankOutputs
from tests.conftest import ROOT, clean_environment

CONNECT = "import os, subprocess, sys, time; from accel_ddp.nodes.terminal import connect_output; print('before')\n"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "with space" / "output"


def start_rank(code: str, folder: Path, rank: int | None = 0, **pipes) -> subprocess.Popen:
    env = clean_environment(ACCEL_DDP_OUTPUT=str(folder), PYTHONPATH=str(ROOT))
    if rank is not None:
        env["LOCAL_RANK"] = str(rank)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **pipes}
    return subprocess.Popen([sys.executable, "-c", CONNECT + code], env=env, text=True, cwd=folder.parents[1], **pipes)


def collect(outputs: RankOutputs, ranks: list[subprocess.Popen], timeout: float = 180) -> dict[int, bytes]:
    """Read until the ranks have ended. Return what each has printed."""
    found: dict[int, bytes] = {}
    deadline = time.monotonic() + timeout
    while any(rank.poll() is None for rank in ranks):
        assert time.monotonic() < deadline, found
        for rank, data in outputs.read(select.select(outputs.filenos(), [], [], 0.05)[0]):
            found[rank] = found.get(rank, b"") + data
    for rank, data in outputs.drain():
        found[rank] = found.get(rank, b"") + data
    return found


def test_the_output_of_each_rank_arrives_separately_and_in_order(folder):
    code = """
print("connected:", connect_output(), "again:", connect_output(), file=sys.stderr)
print("out ä"); sys.stderr.write("\\rhalf a line")
os.write(1, b"\\nfrom C\\n")
subprocess.run(["sh", "-c", "echo child $ACCEL_DDP_OUTPUT; echo error >&2"])
if not os.fork(): print("worker"); os._exit(0)
os.wait(); sys.__stderr__.write(f"terminal: {sys.stderr.isatty()}\\n")
print("x" * 300_000)
print("\\udcff".encode(errors="replace"), end="")
"""
    outputs = RankOutputs(folder, 2)
    try:
        ranks = [start_rank(code, folder, rank) for rank in (0, 1)]
        found = collect(outputs, ranks)
        texts = [rank.communicate()[0] for rank in ranks]
    finally:
        outputs.close()
    text = "connected: True again: False\nout ä\n\rhalf a line\nfrom C\nchild\nerror\nworker\nterminal: False\n"
    expected = f"{text}{'x' * 300_000}\nb'?'".encode()
    assert found == {0: expected, 1: expected}
    assert texts == ["before\n"] * 2, "what was printed before goes to the launcher's output"
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert not folder.exists()


def test_the_main_rank_has_a_terminal_of_the_size_of_the_users_terminal(folder):
    code = """
connect_output()
print(sys.stderr.isatty(), os.get_terminal_size(2) if sys.stderr.isatty() else "")
from tqdm import tqdm
bar = tqdm(total=2, dynamic_ncols=True, mininterval=0); bar.update(1); time.sleep(0.2)
sys.stdin.read(); bar.update(1); bar.close()
try: print("controlling", os.open("/dev/tty", os.O_RDWR))
except OSError: print("no controlling terminal")
"""
    outputs = RankOutputs(folder, 2, (61, 17))
    try:
        ranks = [start_rank(code, folder, rank, stdin=subprocess.PIPE, start_new_session=True) for rank in (None, 1)]
        found = {0: b"", 1: b""}
        deadline = time.monotonic() + 180
        while not all(b"1/2" in data for data in found.values()) and time.monotonic() < deadline:
            for rank, data in outputs.read():
                found[rank] += data
            time.sleep(0.01)
        outputs.resize((33, 9))
        for rank in ranks:
            rank.stdin.close()
        for rank, data in collect(outputs, ranks).items():
            found[rank] += data
    finally:
        outputs.close()
    assert b"True os.terminal_size(columns=61, lines=17)\n" in found[0]
    first, *_, last = [line for line in found[0].decode().replace("\n", "\r").split("\r") if "/2 [" in line]
    assert (len(first), len(last)) == (60, 32), "the bar is as wide as the terminal, also if that changes"
    assert found[0].endswith(b"no controlling terminal\n")
    assert b"\r\n" not in found[0], "a log has plain ends of lines"
    assert b"False" in found[1]
    assert not folder.exists()


@pytest.mark.parametrize("what", ["no folder", "no reader", "no permission", "another file"])
def test_a_rank_without_a_guard_keeps_its_streams(folder, what):
    folder.mkdir(parents=True)
    if what == "no folder":
        folder.rmdir()
    elif what == "no reader":
        os.mkfifo(folder / "rank0")
    elif what == "no permission":
        (folder / "rank0").mkdir()
    else:
        (folder / "rank0").symlink_to("missing")
    rank = start_rank("print(connect_output(), 'ACCEL_DDP_OUTPUT' in os.environ)", folder)
    assert rank.communicate(timeout=180)[0] == "before\nFalse False\n"
    assert rank.returncode == 0


@pytest.mark.parametrize("terminal", [None, (80, 24)])
def test_the_end_of_the_guard_neither_ends_nor_blocks_a_rank(folder, terminal):
    code = """
connect_output(); print("connected"); sys.stdin.readline()
for _ in range(300): print("y" * 1000); print("y" * 1000, file=sys.stderr)
sys.exit(7)
"""
    outputs = RankOutputs(folder, 1, terminal)
    try:
        rank = start_rank(code, folder, stdin=subprocess.PIPE)
        while not any(data == b"connected\n" for _, data in outputs.read(select.select(outputs.filenos(), [], [], 60)[0])):
            pass
    finally:
        outputs.close()
    assert rank.communicate("\n", timeout=180)[0] == "before\n"
    assert rank.returncode == 7


@pytest.mark.parametrize("terminal", [None, (80, 24)])
def test_a_guard_that_does_not_read_cannot_stop_a_rank(folder, terminal):
    """The guard may be stopped, or may wait for a disk. Printing waits once, and the rank continues without its output."""
    code = """
old = os.dup(1)
connect_output()
sys.stdout.buffer.seconds = 0.2  # 10 s is too long for a test
for number in range(3000): print(f"{number} " + "z" * 1000)
os.write(old, b"printed\\n"); sys.stdin.readline(); print("read again")
"""
    outputs = RankOutputs(folder, 1, terminal)
    try:
        rank = start_rank(code, folder, stdin=subprocess.PIPE)
        timer = threading.Timer(60, rank.kill)
        timer.start()
        assert [rank.stdout.readline(), rank.stdout.readline()] == ["before\n", "printed\n"], "the rank waits for the guard"
        timer.cancel()
        text = b"".join(data for _, data in outputs.drain())
        rank.stdin.close()
        text = (text + collect(outputs, [rank])[0]).decode()
    finally:
        outputs.close()
    assert rank.returncode == 0
    assert text.startswith("0 zzz")
    assert "2999 zzz" not in text
    parts = text.split("\n(some output is missing here, because it was not read in time)\n")
    assert parts[-1] == "read again\n"
    assert len(parts) <= 4, "the rank waited often"  # a terminal may take more after a pause, because its kernel thread was busy
    for part in parts[:-1]:
        numbers = [int(line.split()[0]) for line in part.splitlines()[:-1]]  # the last line may be incomplete
        assert all(after == before + 1 for before, after in itertools.pairwise(numbers)), "a line is missing without a message"
