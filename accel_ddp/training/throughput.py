"""How fast a run trains: samples, tokens and FLOPs per second."""

import time
from typing import NamedTuple

from accel_ddp.training.late_reader import Numbers


class Pace(NamedTuple):
    """Rates per second, over all ranks."""

    samples: float  # rows of the data; the items of a language model are tokens
    tokens: float  # without padding; 0 if items are not texts
    flops: float  # of the model; 0 if they are not counted
    mfu: float | None  # model FLOPs utilisation: the fraction of the GPUs' peak; None if the peak is not known

    def __str__(self) -> str:
        text = f"{self.samples:.1f} samples/s"
        if self.tokens:
            text += f"  {self.tokens:,.0f} tokens/s"
        return text + (f"  MFU {self.mfu:.1%}" if self.mfu is not None else "")


class Throughput:
    """Measures the pace since the last evaluation or save. The latest steps have the largest weight."""

    def __init__(self, samples_per_step: int, peak_flops: float | None) -> None:
        self.samples_per_step, self.peak_flops = samples_per_step, peak_flops
        self.restart()

    def restart(self) -> None:
        self.last, self.steps, self.tokens, self.flops, self.seconds = time.monotonic(), 0.0, 0.0, 0.0, 0.0

    def after(self, numbers: Numbers) -> Pace:
        now = time.monotonic()
        self.steps, self.tokens = 0.9 * self.steps + 1, 0.9 * self.tokens + numbers.tokens
        self.flops, self.seconds = 0.9 * self.flops + numbers.flops, 0.9 * self.seconds + now - self.last
        self.last = now
        seconds = max(self.seconds, 1e-9)
        mfu = self.flops / seconds / self.peak_flops if self.peak_flops and self.flops else None
        return Pace(self.steps * self.samples_per_step / seconds, self.tokens / seconds, self.flops / seconds, mfu)
