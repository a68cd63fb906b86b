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


def fit(accelerator: Any, cfg: TrainConfig, model: Any, rows: list, loss_sum: Any = None, **more: Any) -> Any:
    """Train a model on tensors, and return what `accel_ddp.fit` returns. By default, the loss is the square of the outputs."""
    import torch

    options = {"optimizer": accel_ddp.optim.build(model, cfg), "train": accel_ddp.TrainBatches(rows, torch.stack), "count": len}
    squares = lambda model, batch: model(batch).square().sum()
    return accel_ddp.fit(accelerator, cfg, model=model, loss_sum=loss_sum or squares, **{**options, **more})
