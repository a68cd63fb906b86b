"""Labels of rows: classes (one per row, or several), or numbers for regression."""

import math
from typing import TYPE_CHECKING, Any

from accel_ddp.errors import UserError

if TYPE_CHECKING:
    import datasets


class Labels:
    """The classes of a label column. `class_ids` maps the values in the data to class numbers.

    If `is_multi_label`, each row has a list of classes. If `is_regression`, there are no classes and the values are numbers.
    """

    def __init__(
        self,
        column: str,
        names: list[str],
        class_ids: dict[Any, int],
        is_multi_label: bool = False,
        is_regression: bool = False,
    ):
        self.column, self.names, self.class_ids = column, names, class_ids
        self.is_multi_label, self.is_regression = is_multi_label, is_regression
        self.problem_type = (
            "regression" if is_regression else "multi_label_classification" if is_multi_label else "single_label_classification"
        )

    @classmethod
    def for_task(cls, train: "datasets.Dataset", test: "datasets.Dataset", cfg: Any) -> "Labels":
        """Return the labels that `--label_column`, `--num_labels` and `--class_weights` define."""
        if cfg.num_labels == 1:
            labels = cls.for_regression(train, test, cfg.label_column)
        else:
            labels = cls.from_rows(train, test, cfg.label_column, use_both=may_lack_classes(cfg))
            if cfg.num_labels not in (0, len(labels.names)):
                raise UserError(
                    f"--num_labels {cfg.num_labels}: the data have {len(labels.names)} labels ({', '.join(labels.names[:20])}). "
                    "Leave it out."
                )
        if cfg.class_weights != "none" and labels.problem_type != "single_label_classification":
            raise UserError(
                f"--class_weights {cfg.class_weights}: needs one label per row, but this is {labels.problem_type}. Leave it out."
            )
        return labels

    @property
    def identity(self) -> list[Any]:
        """What the encoded labels depend on, for the cache key of tokenised data."""
        return [self.column, self.names, self.problem_type]

    def model_config(self) -> dict[str, Any]:
        """Return the options of a transformers config for a model with these labels."""
        names = {"id2label": dict(enumerate(self.names)), "label2id": {name: i for i, name in enumerate(self.names)}}
        return {"num_labels": len(self.names), **names, "problem_type": self.problem_type}

    @classmethod
    def for_regression(cls, train: "datasets.Dataset", test: "datasets.Dataset", column: str) -> "Labels":
        """Return labels that are numbers. Raise UserError for the first value that is not a finite number."""
        for name, rows in (("training", train), ("evaluation", test)):
            values = rows[column][:]
            bad = next((i for i, v in enumerate(values) if isinstance(v, bool) or not isinstance(v, int | float)), None)
            if bad is None:
                bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
            if bad is not None:
                raise UserError(
                    f"--label_column {column}: row {bad} of the {name} data contains {values[bad]!r}, which is not a number. "
                    "For classes, leave --num_labels out."
                )
        return cls(column, [column], {}, is_regression=True)

    @classmethod
    def from_rows(cls, train: "datasets.Dataset", test: "datasets.Dataset", column: str, use_both: bool = False) -> "Labels":
        """Return the labels of the training rows, or with `use_both` of both tables.

        Raise UserError for a label that occurs only in `test`, unless `use_both` is set.
        """
        feature = train.features[column]
        is_multi_label = _is_list(feature)
        inner = feature.feature if is_multi_label else feature
        dtype = str(getattr(inner, "dtype", ""))
        if dtype not in ("string", "large_string", "bool") and not dtype.startswith(("int", "uint")):
            kinds = sorted({type(value).__name__ for value in train[column][:1000]})
            raise UserError(
                f"--label_column {column}: contains {', '.join(kinds)} ({inner}). Labels must be names or whole numbers, or "
                "lists of them. For regression, add --num_labels 1."
            )
        found = {name: _distinct(rows, column, is_multi_label) for name, rows in (("training", train), ("evaluation", test))}
        for name, values in found.items():
            if None in values:
                raise UserError(f"--label_column {column}: a row of the {name} data has no label.")
        names = getattr(inner, "names", None)  # declared by the dataset, including classes without rows
        values = list(range(len(names))) if names else sorted(found["training"] | (found["evaluation"] if use_both else set()))
        if is_multi_label and set(values) == {0, 1} and len({len(row) for row in train[column][:]}) == 1:
            raise UserError(
                f"--label_column {column}: contains a list of 0 and 1 for each row. Give lists of the names of the classes instead."
            )
        check_known(f"--label_column {column}", "labels", found, values, names)
        if len(values) < 2 and not is_multi_label:
            raise UserError(f"--label_column {column}: all rows have the same label {values}, so that there is nothing to learn.")
        class_ids = {value: i for i, value in enumerate(values)}
        return cls(column, names or [str(value) for value in values], class_ids, is_multi_label)

    def encode(self, rows: dict[str, list]) -> list:
        """Return class numbers, for several labels per row a 0 or 1 for each class, or for regression the numbers."""
        if self.is_regression:
            return [float(value) for value in rows[self.column]]
        if not self.is_multi_label:
            return [self.class_ids[value] for value in rows[self.column]]
        return [[int(name in set(row)) for name in self.class_ids] for row in rows[self.column]]

    def balanced_weights(self, encoded: list[int], device: Any) -> Any:
        """Return a weight for each class, inverse to its number of rows. The mean weight over all rows is 1."""
        import torch

        counts = torch.bincount(torch.tensor(encoded), minlength=len(self.names))
        return (len(encoded) / ((counts > 0).sum() * counts.clamp(min=1))).to(device)


def may_lack_classes(cfg: Any) -> bool:
    """Return whether the training rows may lack a class that the evaluation rows have.

    Rows of a rare class may all be set aside for the evaluation, or left out by `--max_train_items`.
    """
    return bool((cfg.train_file and not cfg.eval_file) or cfg.max_train_items)


def _is_list(feature: Any) -> bool:
    import datasets

    return isinstance(feature, (datasets.Sequence, getattr(datasets, "List", datasets.Sequence)))


def _distinct(rows: "datasets.Dataset", column: str, is_multi_label: bool) -> set:
    if not is_multi_label:
        return set(rows.unique(column))
    return {value for row in rows[column][:] for value in (row if row is not None else [None])}


def check_known(option: str, what: str, found: dict[str, set], values: list, names: list[str] | None) -> None:
    """Raise UserError if training or evaluation data have labels or tags that are not among `values`.

    `names` are those that the dataset declares, or None if it declares none.
    """
    for name, those in found.items():
        if unknown := sorted(those - set(values), key=str):
            reason = "the dataset does not declare" if names else "do not occur in the training data"
            raise UserError(
                f"{option}: the {name} data have {what} that {reason}: {', '.join(map(str, unknown[:10]))}. "
                f"Known {what} are: {', '.join(map(str, (names or values)[:20]))}."
            )
