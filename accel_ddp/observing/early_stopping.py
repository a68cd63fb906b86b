"""Early stopping."""

from accel_ddp.config import TrainConfig
from accel_ddp.observing.hook import Hook


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
