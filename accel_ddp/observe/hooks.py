"""The hooks that recipes use: the interface, those of every run, early stopping, and the report of spikes of the loss."""

import math
import statistics
from collections import deque

from accelerate import Accelerator

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.hook import Hook as Hook
from accel_ddp.observe.log_hook import JsonlLog
from accel_ddp.observe.progress import Progress
from accel_ddp.observe.trackers import Trackers
from accel_ddp.ranks.reporting import warn_on_main
from accel_ddp.text import counted


def standard(accelerator: Accelerator, cfg: TrainConfig) -> list[Hook]:
    """Return the hooks of every run, with trackers and early stopping if the options ask for them."""
    hooks: list[Hook] = [EarlyStopping(cfg)] if cfg.early_stopping_patience else []
    if accelerator.is_main_process:
        hooks += [SpikeReport(), Progress(cfg), JsonlLog(cfg)]
        if cfg.report_to:
            hooks.append(Trackers(accelerator, cfg))
    return hooks


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


WINDOW = 200  # losses of recent steps that a loss is compared with
FIRST = 50  # no report before so many losses were observed
LAST = 50  # spikes in a row after which their level counts as usual
DEVIATIONS = 10  # robust standard deviations above the median
REACH = 3  # times as far above the median as the largest loss of the window; small batches have rare large losses
PART = 0.25  # of the median of the first steps; when almost everything is learned, one wrong item is many times the usual loss


class LossSpikes:
    """Compares each loss with the median of recent losses and their median absolute deviation (MAD), which outliers do not move."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.scale = 0.0  # the usual loss of the first steps
        self.spike: list[float] = []  # the losses of the spike that has not ended yet
        self.since, self.usual = 0, 0.0  # its first step, and the usual loss before it

    def observe(self, step: int, loss: float) -> str:
        """Return a line to print if a spike begins or ends with this step, otherwise ""."""
        if not math.isfinite(loss):
            return ""  # `--on_nonfinite` reports these
        if len(self.recent) >= FIRST:
            self.scale = self.scale or abs(statistics.median(self.recent))
            if loss > max(self.recent):  # always true for a spike; medians take ten times as long
                usual = statistics.median(self.recent)
                if loss > self._limit(usual):
                    return self._continue_spike(step, loss, usual)
        self.recent.append(loss)
        if not self.spike:
            return ""
        text = (
            f"info: LOSS_SPIKE: the loss is {loss:.4g} at step {step}, as before the spike. The spike lasted "
            f"{counted(step - self.since, 'step')} with losses up to {max(self.spike):.4g}."
        )
        self.spike = []
        return text

    def _limit(self, usual: float) -> float:
        deviation = 1.4826 * statistics.median(abs(loss - usual) for loss in self.recent)  # of a normal distribution
        return usual + max(DEVIATIONS * deviation, REACH * (max(self.recent) - usual), PART * self.scale)

    def _continue_spike(self, step: int, loss: float, usual: float) -> str:
        self.spike.append(loss)
        if len(self.spike) == 1:
            self.since, self.usual = step, usual
            return (
                f"warning: LOSS_SPIKE: the loss is {loss:.4g} at step {step}. The {len(self.recent)} steps before had {usual:.4g} "
                f"(median), at most {max(self.recent):.4g}. Training continues. If the loss does not fall again, resume from an "
                "earlier checkpoint with a lower --lr or --max_grad_norm, and inspect the data of this step."
            )
        if len(self.spike) < LAST:
            return ""
        lowest = min(self.spike)
        self.recent, self.spike = deque(self.spike, maxlen=WINDOW), []
        return (
            f"warning: LOSS_SPIKE: the loss has not fallen since step {self.since}. It was {self.usual:.4g} before and at least "
            f"{lowest:.4g} since. Resume from a checkpoint before step {self.since} with a lower --lr or --max_grad_norm."
        )


class SpikeReport(Hook):
    """Prints a warning if a loss is far above those of recent steps, and a line when that has ended."""

    def on_start(self, step, total_steps, evaluations):
        self.spikes = LossSpikes()

    def on_update(self, numbers, pace):
        if text := self.spikes.observe(numbers.step, numbers.loss):
            warn_on_main(text, step=numbers.step)
