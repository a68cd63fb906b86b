"""How busy the machine of this rank is, measured by a thread, so that no step waits for it."""

import math
import threading

import torch

from accel_ddp.training.rank_sample import SYSTEM

EVERY_SECONDS = 2.0


class SystemSample:
    """`latest` has the values of `SYSTEM`, in that order."""

    def __init__(self, device: torch.device):
        self.device = device
        self.latest: tuple[float, ...] = (math.nan,) * len(SYSTEM)
        self.is_closed = threading.Event()
        self.thread = threading.Thread(target=self._measure_again_and_again, name="system sample", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.is_closed.set()

    def _measure_again_and_again(self) -> None:
        while not self.is_closed.is_set():
            self.latest = self._measure()
            self.is_closed.wait(EVERY_SECONDS)

    def _measure(self) -> tuple[float, ...]:
        return (math.nan,) * len(SYSTEM)
