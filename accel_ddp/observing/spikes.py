"""The report of losses that are far above those of recent steps."""

from accel_ddp.observing.hook import Hook
from accel_ddp.ranks.incidents import record
from accel_ddp.training.loss_spikes import LossSpikes


class SpikeReport(Hook):
    """Prints a warning if a loss is far above those of recent steps, and a line when that has ended."""

    def on_start(self, step, total_steps, evaluations):
        self.spikes = LossSpikes()

    def on_update(self, numbers, pace):
        if text := self.spikes.observe(numbers.step, numbers.loss):
            print(text, flush=True)
            record(text, step=numbers.step)
