"""The load of the machine of this rank, measured by a thread, so no step waits for it."""

import contextlib
import math
import multiprocessing.process
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from accel_ddp.engine.step_numbers import SYSTEM

EVERY_SECONDS = 2.0
FIRST_SECONDS = 0.25  # after the first measurement, which has no earlier one to compare CPU time with
UNKNOWN = (math.nan,) * len(SYSTEM)


class SystemSample:
    """`latest` has the values of `SYSTEM`, in that order. The thread ends with the block of a `with` statement.

    Everything that the thread uses is imported before it starts: a data worker that is forked during an import of the thread would
    wait forever for the lock of that module. The thread calls no function that waits for the GPU.
    """

    def __init__(self, device: torch.device):
        self.latest = UNKNOWN
        self.device = device if device.type == "cuda" else None
        self.gpu = _Gpu(str(torch.cuda.get_device_properties(device).uuid)) if self.device else None
        self.own = psutil.Process()
        self.workers: dict[int, psutil.Process] = {}  # data workers by pid
        self.seconds: dict[int, float] = {}  # CPU time of each process at the last measurement
        self.measured_at = 0.0
        self.is_closed = threading.Event()
        self.thread = threading.Thread(target=self._poll, name="system sample", daemon=True)
        self.thread.start()

    def __enter__(self) -> "SystemSample":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed.set()

    def _poll(self) -> None:
        seconds = FIRST_SECONDS
        while not self.is_closed.is_set():
            self.latest = self._measure()
            self.is_closed.wait(seconds)
            seconds = EVERY_SECONDS

    def _measure(self) -> tuple[float, ...]:
        # The peak is never reset, because CUDA graphs read it during the training to decide how much memory a step needs.
        allocated = _number(lambda: torch.cuda.max_memory_allocated(self.device)) if self.device else math.nan
        of_gpu = self.gpu.measure() if self.gpu else (math.nan,) * 4
        cpu = memory = math.nan
        with contextlib.suppress(Exception):
            cpu, memory = self._measure_processes()
        return (allocated, *of_gpu, cpu, memory, _number(lambda: psutil.virtual_memory().percent / 100))

    def _measure_processes(self) -> tuple[float, float]:
        """Return the cores that this rank and its data workers used since the last call, and their resident memory in bytes."""
        now, total, seconds = time.monotonic(), 0.0, {}
        # `multiprocessing.active_children` would collect the exit codes of workers that have died, which the data loader needs.
        # A search for all children reads a file of every process of the machine: 3 ms for 118 processes.
        pids = {child.pid for child in list(getattr(multiprocessing.process, "_children", ()))} - {None, os.getpid()}
        self.workers = {pid: process for pid, process in self.workers.items() if pid in pids}
        for pid in pids - self.workers.keys():
            with contextlib.suppress(psutil.Error):
                self.workers[pid] = psutil.Process(pid)
        for process in (self.own, *self.workers.values()):
            with contextlib.suppress(psutil.Error):  # it has ended
                times = process.cpu_times()
                seconds[process.pid] = times.user + times.system
                total += process.memory_info().rss
        # A worker that was started since the last call has used all of its time since then.
        used = sum(value - self.seconds.get(pid, 0.0) for pid, value in seconds.items())
        cores = used / (now - self.measured_at) if self.measured_at else math.nan
        self.seconds, self.measured_at = seconds, now
        return max(cores, 0.0), total


class _Gpu:
    """The GPU of this rank, as NVML sees it. NVML numbers all GPUs of the machine, so the GPU is found by its UUID."""

    def __init__(self, uuid: str):
        """`uuid` comes from torch and has no prefix."""
        self.uuid = uuid
        self.nvml: Any = None
        with contextlib.suppress(ImportError):
            import pynvml

            self.nvml = pynvml
        self.handle: Any = None
        self.whole: Any = None  # the GPU of which `handle` is a part, with MIG; otherwise the same

    def measure(self) -> tuple[float, float, float, float]:
        """Return the bytes in use, the utilization from 0 to 1, the temperature in degrees Celsius, and the power in watts."""
        if self.handle is None and self.nvml:
            with contextlib.suppress(Exception):
                self._open()
        nvml, handle, whole = self.nvml, self.handle, self.whole
        if handle is None:
            return (math.nan,) * 4
        return (
            _number(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            _number(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),  # is not known with MIG
            _number(lambda: nvml.nvmlDeviceGetTemperature(whole, nvml.NVML_TEMPERATURE_GPU)),
            _number(lambda: nvml.nvmlDeviceGetPowerUsage(whole) / 1000),
        )

    def _open(self) -> None:
        """Find the GPU. Raise an exception if there is no driver or no such GPU."""
        nvml = self.nvml
        nvml.nvmlInit()
        try:
            self.handle = self.whole = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{self.uuid}")
        except nvml.NVMLError:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{self.uuid}")
            self.whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            self.handle = handle


def _number(read: Callable[[], float]) -> float:
    """Return what `read` returns, or NaN if it raises an exception. A driver may fail in any way, and training continues."""
    with contextlib.suppress(Exception):
        return float(read())
    return math.nan
