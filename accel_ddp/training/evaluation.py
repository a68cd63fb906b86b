"""Evaluation whose result does not depend on the number of ranks."""

import contextlib
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from accel_ddp import compat, phases
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.hook import Hook
from accel_ddp.engine.terms import columns_of, terms_of
from accel_ddp.errors import UserError
from accel_ddp.phases import EVAL_DATA, EVALUATE, METRICS
from accel_ddp.ranks.agreement import broadcast_object, gather_everywhere, gather_objects, is_any
from accel_ddp.ranks.failures import EvaluationStopped
from accel_ddp.ranks.shards import is_sharded
from accel_ddp.ranks.signals import is_stop_requested
from accel_ddp.ranks.team import Team
from accel_ddp.records.eval_tables import Table, check_tables
from accel_ddp.saving.checkpoints import Metrics
from accel_ddp.text import counted, ranks_text, shorten
from accel_ddp.training.sharding import gathered, plan_of
from accel_ddp.training.stream import Mixture, require_items
from accel_ddp.training.workers import loader_options, starting_workers

Rows = dict[str, np.ndarray]

# Names of fields of the events `evaluate` and `end` of log.jsonl.
RESERVED = ("event", "step", "time", "repeated", "skipped_steps", "stopped", "best_step", "goodput", "breakdown", "memory")


class EvalBatches:
    """This rank's share of an evaluation set: rank r of W has items r, r + W, ... Every item is evaluated exactly once.

    Accelerate's loaders fill the last batch with repeated items. Here a rank may have one item less. If the model is sharded, all ranks
    must compute the same number of batches, so such a rank repeats an item. `evaluate` drops its row.
    """

    def __init__(self, dataset: Any, collate: Callable[[list], Any], batch_size: int, accelerator: Accelerator, cfg: TrainConfig):
        require_items(dataset)
        self.num_items, self.device, self._is_compared = len(dataset), accelerator.device, False
        self.mixture: Mixture | None = getattr(dataset, "mixture", None)
        share: Any = range(accelerator.process_index, len(dataset), accelerator.num_processes)
        self.num_own = len(share)  # rows of this rank that count
        if plan_of(accelerator) and self.num_own * accelerator.num_processes < len(dataset):
            share = [*share, 0]
        self.loader = DataLoader(
            Subset(dataset, share), batch_size=batch_size, collate_fn=collate, **loader_options(cfg, accelerator)
        )

    def require_equal_ranks(self) -> None:
        """Raise UserError on every rank if the ranks have other numbers of items. It is a collective in its first call."""
        sizes = [] if self._is_compared else gather_everywhere(self.num_items)
        self._is_compared = True
        if ranks := [rank for rank, size in enumerate(sizes) if size != sizes[0]]:
            raise UserError(
                f"the evaluation data have {counted(sizes[0], 'item')} on rank 0 and {sizes[ranks[0]]:,} on {ranks_text(ranks)}. Give "
                "all ranks the whole dataset, in the same order: EvalBatches shares it out."
            )

    def __iter__(self) -> Iterator[Any]:
        with starting_workers(self.loader):
            batches = iter(self.loader)
        for _ in range(len(self.loader)):
            with phases.phase(EVAL_DATA):
                batch = next(batches)
            yield send_to_device(batch, self.device, non_blocking=True)


def evaluate(accelerator: Accelerator, terms: nn.Module, batches: EvalBatches) -> dict[str, float]:
    """Return the metrics of one pass over every item, which are the same for any number of ranks. `terms`: of `prepare`, or `Terms`.

    `measure(model, batch)` of the task returns one row per item of a batch (predictions, labels, losses). `metrics(table)` gets the
    rows of all items in the order of the data, on rank 0, and every rank returns its result. A task without them has the terms of
    each item and their means. `generate(model)` is called after that, see `compute_on_main`.

    Rows may have a different width in each batch (tags, generated tokens): shorter ones are filled with -100. If the items come from
    several datasets, `loss/NAME` is the loss of each.
    """
    model, task = terms_of(terms).model, terms_of(terms).task
    measure = getattr(task, "measure", lambda model, batch: columns_of(task.terms(model, batch, Team())))
    found = measure_all(accelerator, model, batches, measure, getattr(task, "metrics", means_of))
    if hasattr(task, "generate"):
        compute_on_main(accelerator, model, task.generate)
    return found


def means_of(table: Rows) -> dict[str, float]:
    return {name: float(values.mean(dtype="float64")) for name, values in table.items()}


@torch.no_grad()
@phases.phase(METRICS)
def measure_all(
    accelerator: Accelerator,
    module: nn.Module,
    batches: EvalBatches,
    measure: Callable[[nn.Module, Any], dict[str, Tensor]],
    summarize: Callable[[Rows], dict[str, float]],
) -> dict[str, float]:
    """Compute a model without DDP, because ranks may have different numbers of batches. See `evaluate`."""
    batches.require_equal_ranks()
    if accelerator.num_processes > 1 and compat.has_batch_norm(module):
        for buffer in module.buffers():  # the running statistics of each rank differ, and those of rank 0 are saved
            dist.broadcast(buffer, src=0)
    was_training = module.training
    module.eval()
    parts: dict[str, list[Tensor]] = {}
    is_interrupted = False
    # The ranks of a sharded model compute each batch together. One that stopped alone would leave the others waiting.
    stops = (lambda: is_any(is_stop_requested())) if is_sharded(module) else is_stop_requested
    with gathered(module):
        for number, batch in enumerate(batches):
            if is_interrupted := stops():
                break
            phases.enter(EVALUATE)
            phases.HERE.progress = number, len(batches.loader)
            measured = measure(module, batch)
            for name, value in measured.items():
                parts.setdefault(name, []).append(value)
    phases.HERE.progress = 0, 0
    phases.enter(METRICS)  # which may take much longer than a batch
    module.train(was_training)
    as_array = lambda value: (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()  # numpy has no bfloat16
    mine = {name: _join([*map(as_array, values)])[: batches.num_own] for name, values in parts.items()}
    shares = gather_objects(None if is_interrupted else mine)
    # A rank may have finished before the stop request reached it. All ranks stop if one of them was interrupted.
    if broadcast_object(shares is not None and any(share is None for share in shares)):
        raise EvaluationStopped
    metrics = _summarize(_in_order(shares, batches.num_items), summarize, batches.mixture) if shares else None
    return broadcast_metrics(metrics, accelerator.is_main_process)


def _summarize(rows: Rows, summarize: Callable[[Rows], dict[str, float]], mixture: Mixture | None) -> Any:
    """Return the metrics of all items, and of each dataset those that are means of rows, such as `loss/NAME`.

    A mean is over the items, or over what they have of something, such as tokens: then another column has these numbers. If items have
    no loss, the first metric and the loss of each dataset are those of its rows. Recipes whose items have one may not allow that.
    """
    apart: dict[str, Any] = {}
    datasets = {name: mixture.numbers == at for at, name in enumerate(mixture.names)} if mixture else {}
    for dataset, these in datasets.items() if "loss" not in rows else ():
        with contextlib.suppress(Exception):  # a dataset alone may lack what a metric needs
            found = summarize({name: values[these] for name, values in rows.items()})
            apart |= {f"{name}/{dataset}": found[name] for name in dict.fromkeys([*found][:1] + ["loss"]) if name in found}
    metrics = summarize(dict(rows))  # last, because recipes store its rows
    if not datasets or not isinstance(metrics, Mapping):
        return metrics
    columns = {name: values for name, values in rows.items() if values.ndim == 1}
    weights = [np.ones(len(mixture.numbers)), *(some for some in columns.values() if some.dtype.kind in "iu")]
    for name in [name for name, value in metrics.items() if name in columns and isinstance(value, numbers.Real)]:
        mean = lambda weight, these, values=columns[name]: float(
            values[these].sum(dtype=float) / (weight[these].sum() or math.nan)
        )
        is_used = lambda weight, name=name, mean=mean: math.isclose(mean(weight, slice(None)), metrics[name], rel_tol=1e-5)
        for weight in [*filter(is_used, weights)][:1]:
            apart |= {f"{name}/{dataset}": mean(weight, these) for dataset, these in datasets.items() if weight[these].any()}
    return {**metrics, **apart}


@torch.no_grad()
@phases.phase(METRICS)
def compute_on_main(accelerator: Accelerator, model: nn.Module, compute: Callable[[nn.Module], Any]) -> Any:
    """Return `compute(model)` on rank 0, and None on the others. Call it on every rank, without using its result elsewhere.

    All ranks compute if the model is sharded, because each has a part of the weights. Otherwise only rank 0 does.
    """
    if not (accelerator.is_main_process or is_sharded(model)):
        return None
    was_training = model.training
    model.eval()
    with gathered(model):
        result = compute(model)
    model.train(was_training)
    return result if accelerator.is_main_process else None


def broadcast_metrics(metrics: Any, is_main: bool) -> dict[str, float]:
    """Return the metrics of the main rank as Python floats on every rank. Raise UserError everywhere for what is not a number."""
    try:
        found = as_numbers(metrics) if is_main else None
    except UserError as error:
        found = str(error)
    found = broadcast_object(found)
    if isinstance(found, str):
        raise UserError(found)
    return found


def as_numbers(metrics: Any) -> dict[str, float]:
    """Return metrics as Python floats, which JSON and trackers accept. Values may be numbers of numpy and torch.

    Raise UserError for what is not a number, and for names that log.jsonl uses itself.
    """
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"the evaluation returned {_describe(metrics)}. It must return a dictionary of metrics, such as {{'loss': 0.5}}."
        )
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or name in RESERVED:
            raise UserError(
                f"the evaluation returned a metric named {name!r}, which log.jsonl cannot store. Choose another name."
            )
        number = value.item() if isinstance(value, np.generic | np.ndarray | Tensor) and math.prod(value.shape) == 1 else value
        if not isinstance(number, numbers.Real):
            raise UserError(
                f"the metric {name!r} of the evaluation is {_describe(value)}, which is not a number. Return a number, or leave it out."
            )
        found[name] = float(number)
    return found


def _describe(value: Any) -> str:
    return f"{type(value).__name__} {shorten(' '.join(repr(value).split()), 63)}"


def _in_order(shares: list[Rows], num_items: int) -> Rows:
    """Return the rows of all ranks in the order of the data."""
    rows: Rows = {}
    for name in shares[0]:
        whole = _join([share[name] for share in shares if name in share])
        order = np.concatenate([np.arange(rank, num_items, len(shares)) for rank in range(len(shares))])
        rows[name] = np.empty_like(whole)
        rows[name][order] = whole
    return rows


def _join(parts: list[np.ndarray]) -> np.ndarray:
    """Concatenate arrays of rows. Narrower ones are filled with -100 to the width of the widest."""
    if parts[0].ndim > 1:
        width = max(part.shape[1] for part in parts)
        fill = lambda part: [(0, 0), (0, width - part.shape[1])] + [(0, 0)] * (part.ndim - 2)
        parts = [np.pad(part, fill(part), constant_values=-100) for part in parts]
    return np.concatenate(parts)


class TableReport(Hook):
    """Passes the tables of an evaluation to the hooks, on the main rank only. An error in them does not end the run."""

    def __init__(self, tables: Callable[[], dict[str, Table]], notify: Callable[..., list[Any]]):
        self.tables, self.notify = tables, notify
        self.printed: set[str] = set()  # errors

    def on_evaluate(self, step: int, metrics: Metrics) -> None:
        tables: dict[str, Table] = {}
        with self._surviving(step), phases.phase(METRICS):
            tables = check_tables(self.tables())
        if tables:
            self.notify("on_tables", step, tables, guard=lambda: self._surviving(step))

    @contextlib.contextmanager
    def _surviving(self, step: int) -> Iterator[None]:
        """Print an error once. The run continues, because only the main rank has tables and nothing depends on them."""
        try:
            yield
        except Exception as error:  # code of a task or of a hook
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
            reason = f"{type(error).__name__}: {error} ({own[-1].filename}, line {own[-1].lineno})"
            if reason not in self.printed:
                print(f"The tables of the evaluation at step {step} failed: {reason}. Training continues.", file=sys.stderr)
            self.printed.add(reason)
