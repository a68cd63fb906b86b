"""What the tasks of recipes share. Importing this module is fast, because options are checked before torch is imported."""

from typing import Any, ClassVar


class Task:
    """What is learned: the model, the data, the summed loss, the items over which it is averaged, and the metrics.

    `__init__` of a recipe loads `model` and `processor`, and calls `identify` and `use`. Then `evaluate` calls `measure(model, batch)`,
    which returns one row per item, and on the main rank `summarize(rows)`, which returns the metrics of all items in the order of
    the data. `tables()` and `report()` run there too. `accel_ddp.train` says what else a task may have.
    """

    model_class: ClassVar[str] = ""
    fingerprints: list[str]  # of the training and the evaluation rows

    def __init__(self, cfg: Any, accelerator: Any):
        self.cfg, self.accelerator = cfg, accelerator

    def identify(self, *tables: Any) -> str:
        """Set `fingerprints` and return them as one text, which must be the same on every rank."""
        from accel_ddp.sources.tokenization import fingerprint

        self.fingerprints = [fingerprint(rows, self.cfg.cache_dir) for rows in tables]
        return "".join(self.fingerprints)

    def pad(self, per_token: tuple[str, ...] = (), kind: Any = None) -> Any:
        """Return a collate function for tokenized rows; see `pad_collate`."""
        from accel_ddp.sources.tokenization import PadCollate, pad_collate

        return pad_collate(self.processor, self.accelerator, per_token, kind or PadCollate)

    def use(self, train: Any, test: Any, collate: Any, lengths: Any = None) -> None:
        """Train and evaluate on these items. Subsets of columns have the fingerprints of the whole rows."""
        from accel_ddp.training.evaluation import EvalBatches
        from accel_ddp.training.stream import TrainBatches

        self.train = TrainBatches(train, collate, self.fingerprints[0], lengths)
        self.eval_batches = EvalBatches(test, collate, self.cfg.eval_batch_size, self.accelerator, self.cfg)

    def evaluate(self, model: Any) -> dict[str, float]:
        from accel_ddp.training.evaluation import evaluate

        return evaluate(self.accelerator, model, self.eval_batches, self.measure, self.summarize)


class ClassTask(Task):
    """A task with `labels` and `more_metrics`. `scores` returns the logits and the loss of each item, `describe` shows some items."""

    def measure(self, model: Any, batch: Any) -> dict[str, Any]:
        from accel_ddp.tasks import tables

        scores, losses = self.scores(model, batch)
        labels, is_multi = self.labels, self.labels.is_multi_label
        answers = scores.squeeze(-1) if labels.is_regression else (scores > 0).long() if is_multi else scores.argmax(-1)
        rows = {"loss": losses, "predictions": answers, "references": batch["labels"]}
        if self.cfg.log_predictions and not labels.is_regression:
            rows["confidence"] = tables.confidence(scores, is_multi)
        if self.more_metrics.needs_probabilities:
            rows["probabilities"] = scores.float().sigmoid() if is_multi else scores.float().softmax(-1)
        return rows

    def summarize(self, rows: dict[str, Any]) -> dict[str, float]:
        from accel_ddp.tasks import metrics

        self.rows = {name: values for name, values in rows.items() if name != "probabilities"}  # for `tables`
        loss, self.table = rows.pop("loss").mean(), None
        rows.pop("confidence", None)
        if self.labels.is_regression:
            found = metrics.regression_metrics(**rows)
        else:
            found, self.table = metrics.class_metrics(rows["predictions"], rows["references"], self.labels.names)
        return self.more_metrics.add_to({**found, "loss": loss}, **rows)

    def tables(self) -> dict[str, Any]:
        from accel_ddp.tasks.labels import make_tables

        return make_tables(self.labels, self.rows, self.table, self.cfg.log_predictions, self.describe)

    def report(self) -> str:
        return self.table.report(self.cfg.output_dir) if self.table else ""
