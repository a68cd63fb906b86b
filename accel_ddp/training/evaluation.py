"""Evaluation that does not depend on the number of ranks, and metrics of the `evaluate` package without its hub."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from accel_ddp.ranks import signals, world
from accel_ddp.speed import padding_free
from accel_ddp.config import TrainConfig
from accel_ddp.training.stream import Counted, loader_options, sized

Rows = dict[str, np.ndarray]


class EvalBatches:
    """This rank's share of an evaluation set: rank r has items r, r + W, ..., none twice, none left out.

    Accelerate's loaders fill up the last batch with repeated items; here a rank may simply have one less.
    """

    def __init__(self, dataset: Any, collate: Callable[[list], Any], batch_size: int, accelerator: Accelerator, cfg: TrainConfig):
        self.num_items, self.device = len(dataset), accelerator.device
        share = range(accelerator.process_index, len(dataset), accelerator.num_processes)
        self.loader = DataLoader(
            Subset(dataset, share), batch_size=batch_size, collate_fn=Counted(collate), **loader_options(cfg, accelerator)
        )

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield sized(send_to_device(batch, self.device, non_blocking=True), self.device)


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
    Rows may be of any width in each batch (tags, generated tokens): shorter ones are filled up with -100.
    """
    module = accelerator.unwrap_model(model)  # no DDP: ranks may have different numbers of batches
    if accelerator.num_processes > 1 and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
        for (
            buffer
        ) in module.buffers():  # each rank's running statistics are of its own batches; rank 0's are those that are saved
            dist.broadcast(buffer, src=0)
    was_training = module.training
    module.eval()
    parts: dict[str, list[Tensor]] = {}
    is_cut_short = False
    for batch in batches:
        if is_cut_short := signals.is_asked():
            break
        with padding_free.using(batch):
            measured = measure(module, batch)
        for name, value in measured.items():
            parts.setdefault(name, []).append(value)
    module.train(was_training)
    mine = {name: _joined([_as_array(value) for value in values]) for name, values in parts.items()}
    shares = world.gathered(None if is_cut_short else mine)
    # A rank may have been through before it heard of the stop: all go by what the first to hear of it did.
    if world.agreed(shares is not None and any(share is None for share in shares)):
        raise signals.EvaluationStopped
    return world.agreed(summarize(_in_order(shares, batches.num_items)) if shares else None)


def _as_array(tensor: Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()  # numpy has no bfloat16


def _in_order(shares: list[Rows], num_items: int) -> Rows:
    rows: Rows = {}
    for name in shares[0]:
        whole = _joined([share[name] for share in shares if name in share])
        order = np.concatenate([np.arange(rank, num_items, len(shares)) for rank in range(len(shares))])
        rows[name] = np.empty_like(whole)
        rows[name][order] = whole
    return rows


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """One below the other; what is narrower than the widest is filled up with -100."""
    if parts[0].ndim > 1:
        width = max(part.shape[1] for part in parts)
        fill = lambda part: [(0, 0), (0, width - part.shape[1])] + [(0, 0)] * (part.ndim - 2)
        parts = [np.pad(part, fill(part), constant_values=-100) for part in parts]
    return np.concatenate(parts)


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


def of_values(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """How near predicted numbers are, and how well they order; a correlation is 0 where all predictions are the same."""
    from scipy.stats import pearsonr, spearmanr

    scores = {"mse": float(((predictions - references) ** 2).mean())}
    for name, function in (("pearson", pearsonr), ("spearman", spearmanr)):
        varies = len(predictions) > 1 and np.ptp(predictions) > 0 and np.ptp(references) > 0
        scores[name] = float(function(predictions, references)[0]) if varies else 0.0
    return scores


def table_of_classes(predictions: np.ndarray, references: np.ndarray, names: list[str]) -> str:
    """Precision, recall, F1 and number of items of each class."""
    from sklearn.metrics import classification_report

    return classification_report(references, predictions, labels=range(len(names)), target_names=names, digits=3, zero_division=0)
