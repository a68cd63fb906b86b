"""What programs that write results share: the option --out, small batches, and `fit` for rows without labels."""

from dataclasses import dataclass
from typing import Any

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.config.train_config import TrainConfig


@dataclass(kw_only=True)
class Config(TrainConfig):
    out: str = option("", "file for the results", affects_result=False)
    steps: int = 6
    global_batch_size: int = 8
    lr: float = 0.05


class Task:
    """A task of one function, `losses(model, batch)`, which returns the loss of each item, or all terms."""

    def __init__(self, losses: Any = None, **methods: Any):
        self.losses = losses or squares
        vars(self).update(methods)  # such as `count`

    def terms(self, model: Any, batch: Any, team: Any) -> dict[str, Any]:
        found = self.losses(model, batch)
        return found if isinstance(found, dict) else {"loss": found}


def squares(model: Any, batch: Any) -> Any:
    return model(batch).square().flatten(1).sum(1)


def fit(accelerator: Any, cfg: TrainConfig, model: Any, rows: list, losses: Any = None, **more: Any) -> Any:
    """Train a model on tensors, and return what `accel_ddp.fit` returns. By default, the loss is the square of the outputs."""
    import torch

    options = {
        "optimizer": accel_ddp.optim.build(model, cfg),
        "train": accel_ddp.TrainBatches(rows, torch.stack),
        "task": Task(losses),
    }
    return accel_ddp.fit(accelerator, cfg, model=model, **{**options, **more})
