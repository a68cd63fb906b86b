"""The progress of a run in the terminal."""

import sys
import time

from accel_ddp.config import TrainConfig
from accel_ddp.observing.hook import Hook


class Progress(Hook):
    """Shows a progress bar in a terminal, and prints plain lines otherwise."""

    def __init__(self, cfg: TrainConfig):
        self.every, self.bar = cfg.log_every, None

    def on_start(self, step, total_steps, evaluations):
        from tqdm import tqdm

        self.total_steps, self.began, self.first = total_steps, time.monotonic(), step
        self.evaluations = dict(evaluations)
        if sys.stderr.isatty():
            self.bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True, smoothing=0.1)

    def on_warm_up(self, step, seconds):
        self._print(f"warm-up: {seconds:.1f} s")
        self.began = time.monotonic()

    def on_update(self, numbers, pace):
        if self.bar is not None:
            self.bar.update(numbers.step - self.bar.n)
            speed = str(pace).replace("  ", ", ")
            self.bar.set_postfix_str(f"loss {numbers.loss:.4f}, lr {numbers.lr:.2e}, {speed}", refresh=False)
        elif numbers.step % self.every == 0 or numbers.step == self.total_steps:
            seconds = (time.monotonic() - self.began) / (numbers.step - self.first) * (self.total_steps - numbers.step)
            print(
                f"step {numbers.step:>{len(str(self.total_steps))}}/{self.total_steps}  loss {numbers.loss:.4f}  "
                f"grad {numbers.grad_norm:.3f}  lr {numbers.lr:.2e}  {pace}  "
                f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"
            )

    def on_evaluate(self, step, metrics):
        self.evaluations[step] = metrics
        when = f"step {step}" if step else "before training"
        self._print(f"{when}  evaluation: " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        if step == self.first:
            self.began = time.monotonic()  # the remaining time is estimated from steps alone

    def on_end(self, step, summary):
        if self.bar is not None:
            self.bar.close()
        before, after = self.evaluations.get(0, {}), self.evaluations.get(step, {})
        both = {name: (before[name], after[name]) for name in after if name in before}
        if step and both:
            width = max(map(len, both))
            print("\n".join([f"{'':{width}}  {'before':>10}  {'after':>10}"] + [
                f"{name:{width}}  {a:10.4f}  {b:10.4f}" for name, (a, b) in both.items()
            ]))  # fmt: skip

    def _print(self, text: str) -> None:
        self.bar.write(text) if self.bar is not None else print(text)
