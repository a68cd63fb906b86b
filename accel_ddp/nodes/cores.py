"""How many CPU threads a rank uses, and the variable from which libraries read it."""

import contextlib
import os

from accel_ddp.nodes import launcher


def choose_num_threads(option: int, local_ranks: int) -> int:
    """Return the number of threads of a rank on CPUs: `option`, the number that the user has set, or a part of the cores."""
    if option:
        return option
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = os.environ.get(name, "").split(",")[0].strip()  # OpenMP accepts one number for each nested level
        if (
            value.isdigit()
            and int(value)
            and not (value == "1" and name == "OMP_NUM_THREADS" and _is_set_by_launcher(local_ranks))
        ):
            return int(value)
    return max(1, num_cores() // local_ranks)


def _is_set_by_launcher(local_ranks: int) -> bool:
    """Return whether a launcher has set OMP_NUM_THREADS to 1, because the user has not set it.

    `accelerate launch` does so, and torchrun does for several ranks. The variables with which the launcher was started show it.
    """
    by_accelerate = launcher.is_started_by_accelerate()
    if not by_accelerate and not ("TORCHELASTIC_RUN_ID" in os.environ and local_ranks > 1):
        return False
    import psutil

    with contextlib.suppress(psutil.Error):
        if "OMP_NUM_THREADS" in psutil.Process().parent().environ():
            return False
    return not launcher.find_accelerate_request().get("num_cpu_threads_per_process")


def set_num_threads(option: int, local_ranks: int) -> None:
    """Set OMP_NUM_THREADS for the libraries of torch, which read it when torch is imported.

    OpenBLAS keeps the number that it has read as its maximum, and `torch.set_num_threads` does not change it. With the 1 of
    `accelerate launch`, matrix products of a run on CPUs use one core. Operations of ranks with GPUs keep the launcher's number.
    """
    if option or not _may_use_gpu():
        os.environ["OMP_NUM_THREADS"] = str(choose_num_threads(option, local_ranks))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _may_use_gpu() -> bool:
    """Return whether this host has a GPU that is not hidden, without torch, which is not imported yet."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1") or launcher.cpu_is_wanted()
    return not is_hidden and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))  # NVIDIA, WSL, AMD
