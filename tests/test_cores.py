"""Tests of how many cores a process may use, and of the environment of ranks that are started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_ddp.nodes import spawn
from accel_ddp.nodes.cores import usable_cores
from tests.conftest import clean_environment

AFFINITY = len(os.sched_getaffinity(0))


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 8, id="no /proc"),
        pytest.param({"proc/self/cgroup": "0::/\n"}, 8, id="no quota file, as in the root of version 2"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8, id="no limit"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4, id="4 CPUs of a pod"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2, id="1.5 CPUs"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1000 100000\n"}, 1, id="0.01 CPUs"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 8, id="more than the affinity"),
        pytest.param(
            {"proc/self/cgroup": "0::/jobs/a/b\n", "sys/fs/cgroup/jobs/cpu.max": "200000 100000\n",
             "sys/fs/cgroup/jobs/a/cpu.max": "max 100000\n", "sys/fs/cgroup/jobs/a/b/cpu.max": "500000 100000\n"},
            2, id="a cgroup above has the smallest quota",
        ),
        pytest.param(
            {"proc/self/cgroup": "3:memory:/x\n1:cpu,cpuacct:/docker/1f\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
             "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            3, id="version 1: the path is one of the host",
        ),
        pytest.param(
            {"proc/self/cgroup": "1:cpu,cpuacct:/a\n", "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n",
             "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "50000\n"},
            5, id="version 1, mounted under both names",
        ),
        pytest.param(
            {"proc/self/cgroup": "1:cpu:/\n0::/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
             "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            8, id="version 1 without a limit",
        ),
        pytest.param({"proc/self/cgroup": "0::/../..\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2, id="outside of its namespace"),
    ],
)  # fmt: skip
def test_cores_are_the_affinity_limited_by_the_quota_of_every_cgroup(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert usable_cores(write(tmp_path, files)) == expected


def test_cores_of_this_process():
    """A quota of this machine may be below the affinity, but the affinity of a child is the limit in any case."""
    assert 1 <= usable_cores() <= AFFINITY
    one = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); from accel_ddp.nodes.cores import usable_cores; "
    ended = subprocess.run([sys.executable, "-c", one + "print(usable_cores())"], capture_output=True, text=True, check=True)
    assert ended.stdout == "1\n"


def test_a_rank_has_the_variables_of_torchrun_and_none_of_another_launcher(monkeypatch):
    others = {"RANK": "7", "TORCHELASTIC_RUN_ID": "x", "PET_NNODES": "3", "OMPI_COMM_WORLD_RANK": "1", "GROUP_RANK": "2"}
    for name, value in {**others, "KEPT": "1"}.items():
        monkeypatch.setenv(name, value)
    found = spawn.clean_environment()
    assert not others.keys() & found.keys()
    assert found["KEPT"] == "1"
    assert spawn.rank_environment([2, 3], 1, 2, "10.0.0.1", 29500) == {
        "RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip


def test_a_process_dies_with_its_parent():
    """The parent exits without ending its child."""
    child = (
        "import time; from accel_ddp.nodes.spawn import die_with_parent as end; end(); print('set', flush=True); time.sleep(60)"
    )
    parent = f"""import subprocess, sys, os
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE, text=True)
assert child.stdout.readline() == "set\\n"
print(child.pid, flush=True)
os._exit(0)"""
    ended = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=180, env=clean_environment())
    assert ended.returncode == 0, ended.stderr
    assert not is_running(int(ended.stdout))


def is_running(pid: int) -> bool:
    import psutil

    try:
        psutil.wait_procs([psutil.Process(pid)], timeout=50)
        return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
