"""How many cores this process may use, how many CPU threads a rank gets, and the variable from which libraries read it."""

import contextlib
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path

from accel_ddp.nodes import launcher


def choose_num_threads(option: int, local_ranks: int, cores: int = 0) -> int:
    """Return the threads of a rank on CPUs: `option`, what the user has set, or a part of the cores (`cores`: of another node)."""
    if option:
        return option
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = os.environ.get(name, "").split(",")[0].strip()  # OpenMP accepts one number for each nested level
        is_given = not (value == "1" and name == "OMP_NUM_THREADS" and _is_set_by_launcher(local_ranks))
        if value.isdigit() and int(value) and is_given:
            return int(value)
    return max(1, (cores or usable_cores()) // local_ranks)


def _is_set_by_launcher(local_ranks: int) -> bool:
    """Accelerate sets 1 if the user sets nothing, and torchrun does for several ranks: the launcher's variables show it."""
    request = launcher.find_accelerate_request()
    if request is None and not ("TORCHELASTIC_RUN_ID" in os.environ and local_ranks > 1):
        return False
    import psutil

    with contextlib.suppress(psutil.Error):
        if "OMP_NUM_THREADS" in psutil.Process().parent().environ():
            return False
    return not (request or {}).get("num_cpu_threads_per_process")


def set_num_threads(option: int, local_ranks: int) -> None:
    """For libraries that read it once: OpenBLAS keeps Accelerate's 1 as maximum, one core on CPUs. GPU ranks keep theirs."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1") or launcher.cpu_is_wanted()
    has_gpu = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))  # NVIDIA, WSL, AMD; torch is not imported yet
    if option or is_hidden or not has_gpu:
        os.environ["OMP_NUM_THREADS"] = str(choose_num_threads(option, local_ranks))


def usable_cores(root: str = "/") -> int:
    """Affinity, limited by the CPU quota: the kernel pauses a container beyond it. `root` has /proc and /sys, if any."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, _cpu_quotas(Path(root)))]))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of this cgroup and all above. In a container, the path may be the host's and not found here."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)  # version 1 or 2
        mounts = ("cpu", controllers) if "cpu" in controllers.split(",") else () if controllers else ("",)
        for mount, depth in itertools.product(mounts, range(len(parts) + 1)):
            folder = root.joinpath("sys/fs/cgroup", mount, *parts[:depth])
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                quota, period = " ".join((folder / file).read_text() for file in files).split()
                if int(quota) > 0 and int(period) > 0:  # -1: no limit
                    yield int(quota) / int(period)
