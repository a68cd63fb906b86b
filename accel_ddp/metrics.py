"""Evaluation that does not depend on the number of ranks, and metrics of the `evaluate` package without its hub."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from accel_ddp import stop, world
from accel_ddp.config import TrainConfig
from accel_ddp.stream import loader_options

Rows = dict[str, np.ndarray]


class EvalBatches:
    """This rank's share of an evaluation set: rank r has items r, r + W, ..., none twice, none left out.

    Accelerate's loaders fill up the last batch with repeated items; here a rank may simply have one less.
    """

    def __init__(self, dataset: Any, collate: Callable[[list], Any], batch_size: int, accelerator: Accelerator, cfg: TrainConfig):
        self.num_items, self.device = len(dataset), accelerator.device
        share = range(accelerator.process_index, len(dataset), accelerator.num_processes)
        self.loader = DataLoader(
            Subset(dataset, share), batch_size=batch_size, collate_fn=collate, **loader_options(cfg, accelerator)
        )

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield send_to_device(batch, self.device, non_blocking=True)


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    batches: EvalBatches,
    measure: Callable[[nn.Module, Any], dict[str, Tensor]],
    summarize: Callable[[Rows], dict[str, float]],
) -> dict[str, float]:
    """The result is that of one process seeing every item once, whatever the number of ranks.

    `measure` returns one row per item of a batch (predictions, labels, losses); `summarize` sees the
    rows of all items in the order of the data, on the main rank, and every rank gets what it returns.
    """
    module = accelerator.unwrap_model(model)  # no DDP: ranks may have different numbers of batches
    was_training = module.training
    module.eval()
    parts: dict[str, list[Tensor]] = {}
    is_cut_short = False
    for batch in batches:
        if is_cut_short := stop.is_asked():
            break
        for name, value in measure(module, batch).items():
            parts.setdefault(name, []).append(value)
    module.train(was_training)
    mine = {name: torch.cat(values).cpu().numpy() for name, values in parts.items()}  # the only wait for the GPU
    shares = world.gathered(None if is_cut_short else mine)
    # A rank may have been through before it heard of the stop: all go by what the first to hear of it did.
    if world.agreed(shares is not None and any(share is None for share in shares)):
        raise stop.EvaluationStopped
    return world.agreed(summarize(_in_order(shares, batches.num_items)) if shares else None)


def _in_order(shares: list[Rows], num_items: int) -> Rows:
    rows: Rows = {}
    for rank, share in enumerate(shares):
        for name, values in share.items():
            whole = rows.setdefault(name, np.empty((num_items, *values.shape[1:]), dtype=values.dtype))
            whole[rank :: len(shares)] = values
    return rows


def load(name: str) -> Any:
    """A metric of the `evaluate` package by name, from this file: its own `load` asks the hub for code.

    Importing `evaluate` takes seconds (it imports every pipeline of transformers): main rank only, when first needed.
    """
    import datasets
    import evaluate as library
    from sklearn import metrics as sklearn

    functions = {
        "accuracy": lambda p, r: sklearn.accuracy_score(r, p),
        "f1": lambda p, r: sklearn.f1_score(r, p, average="macro", zero_division=0),
    }
    if name not in functions:
        return library.load(name)

    class Offline(library.Metric):
        def _info(self) -> Any:
            label = datasets.Value("int64")
            one = {"predictions": label, "references": label}
            several = {key: datasets.Sequence(label) for key in one}
            return library.MetricInfo(
                description=f"{name}, macro-averaged where classes are averaged",
                citation="",
                features=[datasets.Features(one), datasets.Features(several)],
            )

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            return {name: float(functions[name](np.array(predictions), np.array(references)))}

    return Offline(keep_in_memory=True)


def table_of_classes(predictions: np.ndarray, references: np.ndarray, names: list[str]) -> str:
    """Precision, recall, F1 and number of items of each class."""
    from sklearn.metrics import classification_report

    return classification_report(references, predictions, labels=range(len(names)), target_names=names, digits=3, zero_division=0)
