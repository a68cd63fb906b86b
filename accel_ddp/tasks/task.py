"""What the tasks of recipes share. Importing this module is fast, because options are checked before torch is imported."""

from typing import Any, ClassVar


class Task:
    """What is learned: the loss of each item, and the metrics. `terms(model, batch, team)` returns

    - "loss": one value for each item of the micro-batch, or a sum with the number of items. `train_step` divides the sum of all losses
      by the items of all ranks. Autocast covers the model, and not the loss.
    - numbers to log: one value for each item, or a sum with its number.

    `team` are the ranks that compute the step. A subclass may replace the methods below, and add these:

    - `outputs(model, batch)` returns what the model says about each item, without its labels.
    - `prepare(model, batches, team, seeded)` adds columns that need all micro-batches of a step, before the first one is computed, such
      as `batch["z"]`. `with seeded(i)` seeds dropout as micro-batch i will. A loss that compares all items of a step does this with
      `losses.GradCache`, and sets `whole_batch = True`.
    - `generate(model)` is called after each evaluation, on the main rank, or on all if the model is sharded.
    - `tables()` and `report()`, on the main rank: what an evaluation shows.

    `__init__` of a recipe loads `model` and `processor`, and calls `identify` and `use`. `accel_ddp.train` says what else it may have.
    """

    whole_batch: ClassVar[bool] = False  # whether the loss compares all items of a step
    model_class: ClassVar[str] = ""
    fingerprints: list[str]  # of the training and the evaluation rows
    eval_rows: dict[str, Any]  # for the log: which rows are evaluated, if they were drawn
    only_prediction = ""  # for all items of the last evaluation; see `report_same`

    def __init__(self, cfg: Any = None, accelerator: Any = None):
        self.cfg, self.accelerator = cfg, accelerator

    def terms(self, model: Any, batch: Any, team: Any) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} needs the method `terms(model, batch, team)`")

    def count(self, batch: Any) -> Any:
        """Return the number of items of a micro-batch, which is known before its forward pass: an integer, or a tensor."""
        from accel_ddp.engine.terms import count_items

        return count_items(batch)

    def measure(self, model: Any, batch: Any) -> dict[str, Any]:
        """Return one row per item of a batch that is evaluated."""
        from accel_ddp.engine.terms import columns_of
        from accel_ddp.ranks.team import Team

        return columns_of(self.terms(model, batch, Team()))

    def metrics(self, table: dict[str, Any]) -> dict[str, float]:
        """Return the metrics of the rows of all items, in the order of the data, on the main rank."""
        from accel_ddp.training.evaluation import means_of

        return means_of(table)

    def report_same(self, predictions: Any, references: Any, describe: Any = "the value {:.3g}".format) -> None:
        """Print a line if all items have the same prediction although their labels differ.

        It is repeated only if the prediction changes. A new head does so before training, which is usual. `describe` returns the words
        for a prediction.
        """
        import numpy as np

        from accel_ddp import phases
        from accel_ddp.ranks.reporting import warn_on_main

        predictions, references = np.asarray(predictions), np.asarray(references)
        is_equal = lambda rows: rows.max() - rows.min() < 1e-3 if rows.dtype.kind == "f" else (rows == rows[:1]).all()
        is_one = lambda rows: len(rows) > 0 and bool(is_equal(rows))
        found = describe(predictions[0]) if is_one(predictions) and not is_one(references) else ""
        if found not in ("", self.only_prediction) and (phases.HERE.step or self.cfg.evaluate_only):
            advice = "If that stays so, use another --lr, more steps or --class_weights balanced."
            text = f"warning: ONE_ANSWER: the model predicts {found} for all {len(predictions):,} evaluation items."
            warn_on_main(text if self.cfg.evaluate_only else f"{text} {advice}", "ONE_ANSWER", phases.HERE.step)
        self.only_prediction = found

    def identify(self, *tables: Any) -> str:
        """Set `fingerprints` and return them as one text, which must be the same on every rank."""
        from accel_ddp.sources.tokenization import fingerprint

        self.fingerprints = [getattr(rows, "fingerprint", "") or fingerprint(rows, self.cfg.cache_dir) for rows in tables]
        return "".join(self.fingerprints)

    def make_rows(self, per_token: tuple[str, ...] = (), kind: Any = None, **options: Any) -> Any:
        """Return a collate function for tokenized items; see `rows.Collate`."""
        from accel_ddp.engine.rows import Collate

        return (kind or Collate)(per_token, 8 if self.accelerator.device.type == "cuda" else 0, **options)

    def use(self, train: Any, test: Any, collate: Any, lengths: Any = None) -> tuple[Any, Any]:
        """Return what trains and what evaluates these items. Subsets of columns have the fingerprints of the whole rows."""
        from accel_ddp.training.evaluation import EvalBatches
        from accel_ddp.training.stream import TrainBatches

        self.train = TrainBatches(train, collate, self.fingerprints[0], lengths)
        self.eval_batches = EvalBatches(test, collate, self.cfg.eval_batch_size, self.accelerator, self.cfg)
        return self.train, self.eval_batches
