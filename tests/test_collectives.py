"""Tests of the doctor's collective checks on CPUs, with a rank that is healthy and one that dies or does not continue."""

import contextlib
import json
import re
import signal
import sys
import time

import psutil
import pytest

from accel_ddp.doctor.collective_launch import CHECKS
from tests.conftest import Running, clean_environment, free_port, run_all


def doctor(*options: object) -> tuple[list[list], list[dict[str, str]]]:
    """Return the command and the environment of a doctor with two ranks."""
    place = ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    command = [sys.executable, "-m", "accel_ddp.doctor", "--num_processes", 2, *place, *options]
    return [command], [clean_environment(OMP_NUM_THREADS="1")]


def connected_workers(parent: int) -> list[psutil.Process]:
    """Return the ranks of a doctor that are connected with each other, once there are two of them."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):  # a child has ended since it was listed
            workers = [one for one in psutil.Process(parent).children() if CHECKS in one.cmdline()]
            if len(workers) == 2 and all(any(link.raddr for link in one.net_connections("tcp")) for one in workers):
                return workers
        time.sleep(0.02)
    raise AssertionError("the doctor has started no ranks")


@pytest.mark.slow  # in CI, tests/test_doctor.py runs the checks of healthy ranks under torchrun
def test_healthy_ranks_are_measured():
    report = json.loads(run_all(*doctor("--json", "--megabytes", 2)).well().text.splitlines()[-1])
    assert report["verdict"] == "healthy"
    assert {"backend": "gloo", "transport": "gloo over TCP through lo"}.items() <= report["collective"].items()
    rows = report["collective"]["bandwidth"]
    assert [row["bytes"] for row in rows] == [1_000_000, 2_000_000], "8 MB are above --megabytes 2"
    assert all(row["times"] >= 5 and row["bus_bytes_per_second"] > 0 for row in rows)
    assert report["collective"]["latency_seconds"] > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_rank_that_dies_or_does_not_continue_is_named(number):
    running = Running(*doctor("--deep_seconds", 45, "--megabytes", 64))
    ranks = {int(one.environ()["RANK"]): one for one in connected_workers(running.processes[0].pid)}
    ranks[1].send_signal(number)
    ended = running.ended(90)
    assert ended.codes == [1], ended.text
    assert re.search(r"^E_COLLECTIVE_(STUCK|FAILED)  \[\S+, machine_rank 0, rank 1\] ", ended.text, re.MULTILINE), ended.text
    assert re.search(r"rank 1( on \S+)? has (sent nothing for \d+ s, since step|not connected)", ended.text), ended.text
    assert not any(one.is_running() for one in ranks.values())
