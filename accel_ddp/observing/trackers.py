"""Trackers: wandb, tensorboard and trackio."""

import contextlib
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from accel_ddp.config import TrainConfig, as_plain_dict
from accel_ddp.observing.hook import Hook
from accel_ddp.observing.rates import rates_of
from accel_ddp.ranks import signals


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
            values |= {f"train/{name}": value for name, value in rates_of(numbers, pace).items()}
            self._try(self.accelerator.log, values, step=numbers.step)

    def on_evaluate(self, step, metrics):
        self._try(self.accelerator.log, {f"eval/{name}": value for name, value in metrics.items()}, step=step)

    def on_end(self, step, summary):
        if "goodput" in summary:
            self._try(self.accelerator.log, {"restart/goodput": summary["goodput"]}, step=step)
        for tracker in self.accelerator.trackers:  # `end_training` would also close the process group, on this rank only
            self._try(tracker.finish)


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
