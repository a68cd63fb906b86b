"""Labels of rows: names or numbers of classes, one for each row or several; or values that are themselves to be found."""

import math
from typing import TYPE_CHECKING, Any

from accel_ddp.errors import UserError

if TYPE_CHECKING:
    import datasets


class Labels:
    """Label names and numbers of classes; `several` where each row has a list of them, `is_value` where there are no classes."""

    def __init__(self, column: str, names: list[str], values: dict[Any, int], several: bool = False, is_value: bool = False):
        self.column, self.names, self.values, self.several, self.is_value = column, names, values, several, is_value
        self.problem_type = (
            "regression" if is_value else "multi_label_classification" if several else "single_label_classification"
        )

    @classmethod
    def for_task(cls, train: "datasets.Dataset", test: "datasets.Dataset", cfg: Any) -> "Labels":
        """As `--label_column`, `--num_labels` and `--class_weights` say."""
        if cfg.num_labels == 1:
            labels = cls.of_values(train, test, cfg.label_column)
        else:
            # Rows that were set aside, or left out, may have the only ones of a rare class.
            labels = cls.of(
                train, test, cfg.label_column, of_both=bool((cfg.train_file and not cfg.eval_file) or cfg.max_train_items)
            )
            if cfg.num_labels not in (0, len(labels.names)):
                raise UserError(
                    f"--num_labels {cfg.num_labels}: the data have {len(labels.names)} ({', '.join(labels.names[:20])}). "
                    "Leave it out."
                )
        if cfg.class_weights != "none" and labels.problem_type != "single_label_classification":
            raise UserError(f"--class_weights {cfg.class_weights}: is for one label per row, not for {labels.problem_type}.")
        return labels

    @property
    def identity(self) -> list[Any]:
        """What the encoded labels depend on."""
        return [self.column, self.names, self.problem_type]

    def for_model(self) -> dict[str, Any]:
        """What the config of a model with these labels holds."""
        names = {"id2label": dict(enumerate(self.names)), "label2id": {name: i for i, name in enumerate(self.names)}}
        return {"num_labels": len(self.names), **names, "problem_type": self.problem_type}

    @classmethod
    def of_values(cls, train: "datasets.Dataset", test: "datasets.Dataset", column: str) -> "Labels":
        """A number for each row, to be predicted as it is."""
        for name, rows in (("training", train), ("evaluation", test)):
            values = rows[column][:]
            bad = next((i for i, v in enumerate(values) if isinstance(v, bool) or not isinstance(v, int | float)), None)
            if bad is None:
                bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
            if bad is not None:
                raise UserError(
                    f"--label_column {column}: row {bad} of the {name} data holds {values[bad]!r}, which is no number."
                )
        return cls(column, [column], {}, is_value=True)

    @classmethod
    def of(cls, train: "datasets.Dataset", test: "datasets.Dataset", column: str, of_both: bool = False) -> "Labels":
        """Of the training rows. A label of `test` that is not among them is a UserError, unless they are `of_both`."""
        feature = train.features[column]
        several = _is_list(feature)
        inner = feature.feature if several else feature
        if getattr(inner, "dtype", "") not in ("string", "large_string", "bool") and not str(
            getattr(inner, "dtype", "")
        ).startswith(("int", "uint")):
            kinds = sorted({type(value).__name__ for value in train[column][:1000]})
            held = f"{', '.join(kinds)} ({inner})"
            raise UserError(f"--label_column {column}: holds {held}; labels are names or whole numbers, or lists of them.")
        found = {name: _distinct(rows, column, several) for name, rows in (("training", train), ("evaluation", test))}
        for name, values in found.items():
            if None in values:
                raise UserError(f"--label_column {column}: a row of the {name} data has no label.")
        names = getattr(inner, "names", None)  # a dataset that knows its classes, also those nobody has
        values = list(range(len(names))) if names else sorted(found["training"] | (found["evaluation"] if of_both else set()))
        if several and set(values) == {0, 1} and len({len(row) for row in train[column][:]}) == 1:
            raise UserError(
                f"--label_column {column}: holds lists of 0 and 1 for each class. Give lists of the names of the right ones."
            )
        for name, those in found.items():
            unknown = sorted(those - set(values), key=str)
            if unknown:
                known = "the dataset does not declare" if names else "the training data lack"
                raise UserError(
                    f"--label_column {column}: the {name} data have labels that {known}: {', '.join(map(str, unknown[:10]))}. "
                    f"Known are: {', '.join(map(str, (names or values)[:20]))}."
                )
        if len(values) < 2 and not several:
            raise UserError(f"--label_column {column}: all rows have the label {values}; there is nothing to learn.")
        return cls(column, names or [str(value) for value in values], {value: i for i, value in enumerate(values)}, several)

    def encode(self, rows: dict[str, list]) -> list:
        """Class numbers; where several are right, a 0 or 1 for each class; values as they are."""
        if self.is_value:
            return [float(value) for value in rows[self.column]]
        if not self.several:
            return [self.values[value] for value in rows[self.column]]
        return [[int(name in set(row)) for name in self.values] for row in rows[self.column]]

    def balanced_weights(self, encoded: list[int], device: Any) -> Any:
        """A weight for each class, so that each has the same say however many rows it has; 1 on the average over rows."""
        import torch

        counts = torch.bincount(torch.tensor(encoded), minlength=len(self.names))
        return (len(encoded) / ((counts > 0).sum() * counts.clamp(min=1))).to(device)


def _is_list(feature: Any) -> bool:
    import datasets

    return isinstance(feature, (datasets.Sequence, getattr(datasets, "List", datasets.Sequence)))


def _distinct(rows: "datasets.Dataset", column: str, several: bool) -> set:
    if not several:
        return set(rows.unique(column))
    return {value for row in rows[column][:] for value in (row if row is not None else [None])}
