"""Hooks observe a run. They never change what is learned, but they may end the run."""

import contextlib
import json
import math
import os
import secrets
import sys
import time
from pathlib import Path
from typing import IO, Any

from accelerate import Accelerator

from accel_ddp.config import TrainConfig, as_plain_dict
from accel_ddp.ranks import signals
from accel_ddp.saving.checkpoints import Metrics
from accel_ddp.training.late_reader import Numbers
from accel_ddp.training.loss_spikes import LossSpikes
from accel_ddp.training.throughput import Pace


class Hook:
    """A hook is called on every rank that has it, with numbers that are the same on every rank.

    If a hook ends the run on one rank, all ranks end it, so that a hook may exist on the main rank only.
    """

    def on_start(self, step: int, total_steps: int, evaluations: dict[int, Metrics]) -> bool | None:
        """`evaluations` are those before the run was resumed. Return True if they end the run."""

    def on_warm_up(self, step: int, seconds: float) -> None:
        """Called after the layers were compiled, before the first step."""

    def on_restart(self, step: int, restart: dict[str, Any]) -> None:
        """Called before the first step after an automatic restart, on the main rank only."""

    def on_update(self, numbers: Numbers, pace: Pace) -> None: ...
    def on_evaluate(self, step: int, metrics: Metrics) -> bool | None:
        """Return True to end the run after this step."""

    def on_save(self, step: int, path: Path) -> None:
        """Called when the checkpoint of `step` is complete, on the main rank only, some steps after `step`."""

    def on_end(self, step: int, summary: dict[str, Any]) -> None: ...


def standard(accelerator: Accelerator, cfg: TrainConfig) -> list[Hook]:
    """Return the hooks of every run, with trackers and early stopping if the options ask for them."""
    hooks: list[Hook] = [EarlyStopping(cfg)] if cfg.early_stopping_patience else []
    if accelerator.is_main_process:
        hooks += [SpikeReport(), Progress(cfg), JsonlLog(cfg)]
        if cfg.report_to:
            hooks.append(Trackers(accelerator, cfg))
    return hooks


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


class SpikeReport(Hook):
    """Prints a warning if a loss is far above those of recent steps, and a line when that has ended."""

    def on_start(self, step, total_steps, evaluations):
        self.spikes = LossSpikes()

    def on_update(self, numbers, pace):
        if text := self.spikes.observe(numbers.step, numbers.loss):
            print(text, flush=True)


class JsonlLog(Hook):
    """Writes one line per event to OUTPUT_DIR/log.jsonl, which is readable while the run continues."""

    def __init__(self, cfg: TrainConfig):
        self.every, self.path = cfg.log_every, Path(cfg.output_dir) / "log.jsonl"
        self.file: IO[str] = self.path.open("a", buffering=1)
        self.works = True

    def _write(self, event: str, step: int, **values: Any) -> None:
        values = {name: str(v) if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        try:
            self.file.write(json.dumps({"event": event, "step": step, "time": round(time.time(), 3), **values}) + "\n")
            self.works = True
        except OSError as error:
            if self.works:
                print(f"{self.path} cannot be written: {error.strerror}. Training continues.", file=sys.stderr, flush=True)
            self.works = False

    def on_start(self, step, total_steps, evaluations):
        self.total_steps = total_steps
        self._write("start", step, total_steps=total_steps)

    def on_warm_up(self, step, seconds):
        self._write("warm_up", step, seconds=round(seconds, 3))

    def on_restart(self, step, restart):
        self._write("restart", step, **restart)

    def on_update(self, numbers, pace):
        if numbers.step % self.every == 0 or numbers.step == self.total_steps:
            self._write("update", numbers.step, loss=numbers.loss, grad_norm=numbers.grad_norm, lr=numbers.lr,
                        items=numbers.items, samples_per_second=round(pace.samples, 2), **_rates(numbers, pace))  # fmt: skip

    def on_evaluate(self, step, metrics):
        self._write("evaluate", step, **metrics)

    def on_save(self, step, path):
        self._write("save", step, path=str(path))

    def on_end(self, step, summary):
        self._write("end", step, **summary)
        with contextlib.suppress(OSError):
            self.file.close()


class Trackers(Hook):
    """Logs to wandb, tensorboard and trackio through Accelerate. If one of them fails, it is reported and tracking ends."""

    def __init__(self, accelerator: Accelerator, cfg: TrainConfig):
        self.accelerator, self.every, self.works = accelerator, cfg.log_every, True
        name = cfg.run_name or Path(cfg.output_dir).name
        options: dict[str, Any] = {
            "wandb": {"name": name, "dir": cfg.output_dir, "id": _wandb_id(cfg), "resume": "allow"},
            "trackio": {"name": name, **({"resume": "allow"} if cfg.resume else {})},
        }
        if "wandb" in cfg.report_to and not _wandb_can_log_in():
            os.environ.setdefault("WANDB_MODE", "offline")
            folder = f"{cfg.output_dir}/wandb"
            print(
                f"wandb has no API key. The run is written to {folder}. Upload it later with: wandb sync {folder}/offline-run-*"
            )
        with signals.blocked_for_children():
            self._try(accelerator.init_trackers, cfg.project, config=as_plain_dict(cfg), init_kwargs=options)

    def _try(self, call: Any, *args: Any, **kwargs: Any) -> None:
        if self.works:
            try:
                call(*args, **kwargs)
            except Exception as error:
                self.works = False
                print(
                    f"Tracking has failed: {type(error).__name__}: {error}. Training continues, and log.jsonl contains everything.",
                    file=sys.stderr,
                )

    def on_start(self, step, total_steps, evaluations):
        self.total_steps = total_steps

    def on_restart(self, step, restart):
        values = {f"restart/{name}": restart[name] for name in ("restart", "lost_steps", "lost_seconds")}
        self._try(self.accelerator.log, values, step=step)

    def on_update(self, numbers, pace):
        if numbers.step % self.every == 0 or numbers.step == self.total_steps:
            values = {"train/loss": numbers.loss, "train/grad_norm": numbers.grad_norm, "train/lr": numbers.lr,
                      "train/samples_per_second": pace.samples}  # fmt: skip
            values |= {f"train/{name}": value for name, value in _rates(numbers, pace).items()}
            self._try(self.accelerator.log, values, step=numbers.step)

    def on_evaluate(self, step, metrics):
        self._try(self.accelerator.log, {f"eval/{name}": value for name, value in metrics.items()}, step=step)

    def on_end(self, step, summary):
        if "goodput" in summary:
            self._try(self.accelerator.log, {"restart/goodput": summary["goodput"]}, step=step)
        for tracker in self.accelerator.trackers:  # `end_training` would also close the process group, on this rank only
            self._try(tracker.finish)


class EarlyStopping(Hook):
    """Ends the run after `--early_stopping_patience` evaluations without a better `--best_metric`."""

    def __init__(self, cfg: TrainConfig):
        self.metric, self.patience = cfg.best(), cfg.early_stopping_patience
        self.best, self.since = None, 0

    def on_start(self, step, total_steps, evaluations):
        known = {at: metrics for at, metrics in evaluations.items() if self.metric.name in metrics}
        return any([self.on_evaluate(at, metrics) for at, metrics in known.items()])

    def on_evaluate(self, step, metrics):
        self.metric.require(metrics)
        if step == 0:  # the first steps may make a model worse than it was before training
            return False
        value = metrics[self.metric.name]
        self.best, self.since = (value, 0) if self.metric.is_better(value, self.best) else (self.best, self.since + 1)
        return self.since >= self.patience


def _rates(numbers: Numbers, pace: Pace) -> dict[str, float]:
    """Return tokens, tokens/s, TFLOP/s and MFU, without those that are not known."""
    known = {
        "tokens": numbers.tokens,
        "tokens_per_second": round(pace.tokens, 1),
        "tflops": float(f"{pace.flops / 1e12:.4g}"),
    }
    known = {name: value for name, value in known.items() if value}
    return known | ({"mfu": round(pace.mfu, 5)} if pace.mfu is not None else {})


def _wandb_id(cfg: TrainConfig) -> str:
    """Return the id of the wandb run: WANDB_RUN_ID, or that of the run that is resumed, or a new one.

    After a resume some steps are logged twice, with equal values. wandb keeps the first ones.
    """
    path = Path(cfg.output_dir) / "wandb_id.txt"
    known = os.environ.get("WANDB_RUN_ID", "")
    with contextlib.suppress(OSError):
        known = known or (path.read_text().strip() if cfg.resume else "")
    known = known or secrets.token_hex(4)
    if "wandb" in cfg.report_to:
        with contextlib.suppress(OSError):
            path.write_text(known + "\n")
    return known


def _wandb_can_log_in() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return netrc.is_file() and "wandb" in netrc.read_text()
    return False
