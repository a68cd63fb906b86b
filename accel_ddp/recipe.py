"""What all recipes share: from the options to the exported model."""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp.accelerator import start
from accel_ddp.assembly import fit
from accel_ddp.config.options import columns_of
from accel_ddp.config.train_config import RecipeConfig, TrainConfig
from accel_ddp.engine.terms import refuse_old
from accel_ddp.errors import UserError
from accel_ddp.exporting import export
from accel_ddp.exporting.trained_model import KINDS
from accel_ddp.memory import at_start
from accel_ddp.observe import hooks
from accel_ddp.ranks.agreement import print_on_main, together
from accel_ddp.saving.checkpoint_format import FACTS
from accel_ddp.saving.state_tensors import has_adapters
from accel_ddp.sources import models
from accel_ddp.tasks import examples
from accel_ddp.text import listed
from accel_ddp.training import optim
from accel_ddp.training.evaluation import EvalBatches
from accel_ddp.training.run_end import RunOutcome
from accel_ddp.training.stream import TrainBatches


def train(cfg: TrainConfig, task_class: Any) -> RunOutcome:
    """Train `task_class(cfg, accelerator)` as the `main` of a recipe does, print its report, and export the model.

    The task is a `Task`, or any object with the method `terms(model, batch, team)`. It may load its model itself: then it has the
    attributes `model`, `processor` (a tokenizer or image processor), `train` (a `TrainBatches`) and `eval_batches`.
    """
    number = getattr(cfg, "log_predictions", 0)
    refuse_old(task_class)
    if number and not hasattr(task_class, "tables"):
        raise UserError(
            f"--log_predictions {number}: {task_class.__name__} of this recipe has no method `tables`, which returns the predictions. "
            "Leave --log_predictions out, or write the method as docs/own_recipe.md describes."
        )
    accelerator = start(cfg)
    if hasattr(task_class, "build"):
        task = task_class(cfg, accelerator)
        load_model(task)
        task.batches()
    else:
        _fit_memory(cfg, accelerator, task_class)
        task = task_class(cfg, accelerator)
        _require_weights(task.model, cfg)
    optimizer = optim.build(task.model, cfg)
    return fit_and_export(
        accelerator, cfg, task=task, model=task.model, optimizer=optimizer, train=task.train, test=task.eval_batches
    )


def load_model(task: Any) -> nn.Module:
    """Return the model of `--model` that `task.build()` makes for the labels of the task, prepared for training.

    Options that the memory decides are chosen before, from `task.model_class`, a class of transformers, and `task.memory_rows`.
    """
    _fit_memory(task.cfg, task.accelerator, task, task.memory_rows)
    with together("load the model"):
        task.model = task.build()
    _require_weights(task.model, task.cfg)
    return task.model


def fit_and_export(
    accelerator: Accelerator, cfg: TrainConfig, *, task: Any, model: nn.Module, optimizer: torch.optim.Optimizer, train: TrainBatches,
    test: EvalBatches,
) -> RunOutcome:  # fmt: skip
    """Call `fit`, which hands model and optimizer to the Accelerator, print the report, and export the model to OUTPUT_DIR/model.

    The task has a `processor`, which is exported too. These are optional:

    - `report()` returns text to print at the end.
    - `example` is Python code that uses the exported `{folder}`, for the line `try:`.
    - `more_files` are exported too.
    """
    if getattr(cfg, "show_example", 0):
        with together("show training rows"):
            if accelerator.is_main_process:
                print(examples.show_rows(task, cfg), flush=True)
    files = export.files_of(model, task.processor, facts_to_predict(task) | getattr(task, "more_files", {}))
    observers = [] if cfg.evaluate_only else hooks.standard(accelerator, cfg)
    report = Report(task, cfg)
    if accelerator.is_main_process and hasattr(task, "report"):
        observers.append(report)
    parts = {"task": task, "model": model, "optimizer": optimizer, "train": train, "test": test}
    outcome = fit(accelerator, cfg, **parts, hooks=observers, files=files)
    if cfg.evaluate_only:
        return outcome
    if accelerator.is_main_process and hasattr(task, "report") and (text := report.of_best if outcome.best else task.report()):
        print(text)
    export.at_the_end(accelerator, cfg, model, files, outcome.metrics, getattr(task, "example", ""), outcome.best)
    for hook in observers if accelerator.is_main_process else ():
        hook.on_export(Path(cfg.output_dir) / export.FOLDER)
    return outcome


def facts_to_predict(task: Any) -> dict[str, bytes]:
    """Return the file that tells `accel-ddp predict` what the model of this task reads, if it cannot be known from the options.

    `predicts` of a task is a key of `trained_model.KINDS`, if its class of models does not say it. `predict_columns` are options of the
    command; by default the columns of texts or images, whose options may have any names in a recipe of yours.
    """
    known = {name for kind in KINDS.values() for group in kind["columns"] for own in group.items() for name in (own[0], *own[1])}
    texts, images = columns_of(task.cfg, "text", "words"), columns_of(task.cfg, "image")
    is_own = any(option not in known for option, _ in (texts or images)[:1])
    options = ("text_column", "text_pair_column") if texts else ("image_column",)
    columns = dict(zip(options, [name for _, name in texts or images])) if is_own else {}
    facts = {"predicts": getattr(task, "predicts", ""), "columns": getattr(task, "predict_columns", columns)}
    return {FACTS: json.dumps(facts).encode()} if any(facts.values()) else {}


def _fit_memory(cfg: TrainConfig, accelerator: Accelerator, task: Any, rows: Any = ()) -> None:
    if not cfg.evaluate_only:
        _print_default_model(cfg)
    at_start.fit_memory(cfg, accelerator, getattr(task, "model_class", ""), rows)


def _print_default_model(cfg: TrainConfig) -> None:
    """Name the model that trains on the user's own data if the user has not chosen it."""
    default, has_own_data = type(cfg), isinstance(cfg, RecipeConfig) and (cfg.train_file or cfg.dataset != type(cfg).dataset)
    if has_own_data and default.model and cfg.model == default.model:
        is_new = cfg.model.startswith((models.NEW_MODELS, "mini-resnet"))
        what = "a small model with random weights. For a pretrained one, give --model" if is_new else "--model changes it"
        print_on_main(f"model {cfg.model}: the default of this recipe, {what}")


def _require_weights(model: Any, cfg: TrainConfig) -> None:
    """Raise UserError if a model that is to be evaluated lacks weights, such as a head. An unused pooler may be missing."""
    if not cfg.evaluate_only or cfg.resume:
        return
    new = [] if has_adapters(model) else getattr(model, "_new_modules", [])  # adapters without a head were refused before
    if missing := [name for name in new if "pooler" not in name]:
        raise UserError(
            f"{cfg.evaluate_only}: has no weights for {listed(missing)}, which begin at random values. Train it first, or choose the "
            "recipe that it was made for with --recipe."
        )


class Report(hooks.Hook):
    """Keeps the report of the best evaluation of this process, whose weights `--keep_best` exports."""

    def __init__(self, task: Any, cfg: TrainConfig):
        self.task, self.metric, self.of_best = task, cfg.best() if cfg.keep_best else None, ""

    def on_start(self, step, total_steps, evaluations):
        self.evaluations = dict(evaluations)

    def on_evaluate(self, step, metrics):
        self.evaluations[step] = metrics
        if self.metric and self.metric.rank({at: known for at, known in self.evaluations.items() if at})[:1] == [step]:
            self.of_best = self.task.report()
