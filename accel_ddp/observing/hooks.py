"""The hooks that recipes use: the interface, and those of every run."""

from accelerate import Accelerator

from accel_ddp.config import TrainConfig
from accel_ddp.observing.early_stopping import EarlyStopping as EarlyStopping
from accel_ddp.observing.hook import Hook as Hook
from accel_ddp.observing.log import JsonlLog
from accel_ddp.observing.progress import Progress
from accel_ddp.observing.spikes import SpikeReport
from accel_ddp.observing.trackers import Trackers


def standard(accelerator: Accelerator, cfg: TrainConfig) -> list[Hook]:
    """Return the hooks of every run, with trackers and early stopping if the options ask for them."""
    hooks: list[Hook] = [EarlyStopping(cfg)] if cfg.early_stopping_patience else []
    if accelerator.is_main_process:
        hooks += [SpikeReport(), Progress(cfg), JsonlLog(cfg)]
        if cfg.report_to:
            hooks.append(Trackers(accelerator, cfg))
    return hooks
