"""Labels of rows: classes (one per row, or several), or numbers for regression."""

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_ddp.errors import UserError
from accel_ddp.records.eval_tables import Table
from accel_ddp.sources import data, models
from accel_ddp.sources.places import warn
from accel_ddp.tasks import tables
from accel_ddp.tasks.tables import ScoreTable
from accel_ddp.text import counted, listed

if TYPE_CHECKING:
    import datasets


class Labels:
    """The classes of a label column. `class_ids` maps the values in the data to class numbers.

    If `is_multi_label`, each row has a list of classes. If `is_regression`, there are no classes and the values are numbers.
    """

    def __init__(
        self, column: str, names: list[str], class_ids: dict[Any, int], is_multi_label: bool = False, is_regression: bool = False
    ):
        self.column, self.names, self.class_ids = column, names, class_ids
        self.is_multi_label, self.is_regression = is_multi_label, is_regression
        self.is_declared = False  # whether the dataset declares the names of the classes
        kind = "multi" if is_multi_label else "single"
        self.problem_type = "regression" if is_regression else f"{kind}_label_classification"

    @classmethod
    def for_task(cls, train: "datasets.Dataset", test: "datasets.Dataset", cfg: Any) -> "Labels":
        """Return the labels that `--label_column`, `--num_labels` and `--class_weights` define."""
        if cfg.num_labels == 1:
            if all(data.parse_number(value) is None for value in data.iter_values(train, cfg.label_column)):
                reason = f"no training row contains a number, for example {train[0][cfg.label_column]!r:.40}"
                raise UserError(f"--label_column {cfg.label_column}: {reason}. For classes, leave --num_labels out.")
            labels = cls(cfg.label_column, [cfg.label_column], {}, is_regression=True)
        else:
            labels = cls.from_rows(train, test, cfg.label_column, may_lack_classes(cfg, train), models.label_names(cfg))
            if cfg.num_labels not in (0, len(labels.names)):
                reason = f"the data have {len(labels.names)} labels ({', '.join(labels.names[:20])})"
                raise UserError(f"--num_labels {cfg.num_labels}: {reason}. Leave it out.")
        if (weights := getattr(cfg, "class_weights", "none")) != "none" and labels.problem_type != "single_label_classification":
            raise UserError(f"--class_weights {weights}: needs one label per row. This is {labels.problem_type}.")
        return labels

    @property
    def kind(self) -> str:
        """Which `--metrics` there are."""
        return "numbers" if self.is_regression else "classes"

    def references(self, rows: Any) -> list:
        return rows["labels"][:]

    @property
    def identity(self) -> list[Any]:
        """What the encoded labels depend on, for the cache key of tokenized data."""
        return [self.column, self.names, self.problem_type, sorted(map(repr, self.class_ids.items()))]

    def model_config(self) -> dict[str, Any]:
        names = {"id2label": dict(enumerate(self.names)), "label2id": {name: i for i, name in enumerate(self.names)}}
        return {"num_labels": len(self.names), **names, "problem_type": self.problem_type}

    @classmethod
    def from_rows(
        cls, train: "datasets.Dataset", test: "datasets.Dataset", column: str, use_both: bool = False, known: Sequence[str] = ()
    ) -> "Labels":
        """Return the labels of the training rows, or with `use_both` of both tables, or `known` ones, of `models.label_names`.

        `find_problems` reports rows without a label, and rows of `test` with a label that is not among these.
        """
        import datasets

        feature = train.features[column]
        is_multi_label = isinstance(feature, datasets.Sequence | datasets.List | datasets.LargeList)  # polars: LargeList
        inner = feature.feature if is_multi_label else feature
        names = getattr(inner, "names", None)  # declared by the dataset, including classes without rows
        found = []
        for rows in (train, test):
            # `rows.unique` would copy the texts of all rows if some were set aside: 20 s for 400,000 rows, and this takes 2 s.
            cells = (cell for row in data.iter_values(rows, column) for cell in ((row or ()) if is_multi_label else (row,)))
            # `_find_values` rejects a tuple, which stands for a list or a dictionary.
            found.append({cell if isinstance(cell, Hashable) else (str(cell),) for cell in cells if not data.is_missing(cell)})
        value_of = _find_values(found[0] | found[1])
        if value_of is None:
            raise UserError(f"--label_column {column}: contains {_describe_kinds(found[0] | found[1])}")
        if known:
            return cls(column, [*known], classes_of_model(known, value_of, names), is_multi_label)
        if not found[0]:
            raise UserError(f"--label_column {column}: no training row has a label.")
        used = found[0] | (found[1] if use_both else set())
        values = list(range(len(names))) if names else sorted({value_of[cell] for cell in used})
        widths = (len(row) for row in data.iter_values(train, column) if row is not None)
        if is_multi_label and set(values) == {0, 1} and len({*widths}) == 1:
            raise UserError(f"--label_column {column}: contains a list of 0 and 1 for each row. Give lists of names of classes.")
        if len(values) < 2 and not is_multi_label:
            raise UserError(f"--label_column {column}: all rows have the same label {values}, so there is nothing to learn.")
        index = {value: i for i, value in enumerate(values)}
        class_ids = {cell: index[value] for cell, value in value_of.items() if value in index}
        labels = cls(column, names or [str(value) for value in values], class_ids, is_multi_label)
        labels.is_declared = bool(names)
        return labels

    def find_problems(self, rows: dict[str, list]) -> list[str]:
        """Return for each row why its label cannot be used, or "". See `data.drop_broken`."""
        return [self._find_problem(cell) for cell in rows[self.column]]

    def _find_problem(self, cell: Any) -> str:
        if self.is_regression or data.is_missing(cell):
            return data.number_problem(self.column, cell)
        cells = cell if self.is_multi_label else [cell]
        if any(map(data.is_missing, cells)):
            return f"its {self.column} contains an empty name"
        unknown = [one for one in cells if one not in self.class_ids]
        return describe_unknown("label", unknown, self.names, self.is_declared) if unknown else ""

    def encode(self, rows: dict[str, list]) -> list:
        """Return class numbers, for several labels per row a 0 or 1 for each class, or for regression the numbers.

        Rows with a problem have class 0, no class, or the number 0.
        """
        cells = rows[self.column]
        if self.is_regression:
            return [data.parse_number(cell) or 0.0 for cell in cells]
        if not self.is_multi_label:
            return [self.class_ids.get(cell, 0) if isinstance(cell, Hashable) else 0 for cell in cells]
        chosen = [{self.class_ids.get(one) for one in row or ()} for row in cells]
        return [[int(i in some) for i in range(len(self.names))] for some in chosen]

    def report_classes(self, tables: Iterable[dict[str, list]]) -> None:
        """Warn about classes that may be mistakes, see `report_classes`. The tables have the column `labels` of `encode`."""
        number = len(self.names)
        count = lambda labels: labels.reshape(-1, number).sum(0) if self.is_multi_label else np.bincount(labels, minlength=number)
        if not self.is_regression:
            counts = [count(np.array(rows["labels"][:], dtype=np.int64)) for rows in tables]
            report_classes(f"--label_column {self.column}", "rows", self.names, *counts)

    def balanced_weights(self, encoded: list[int], device: Any) -> Any:
        """Return a weight for each class, inverse to its number of rows. The mean weight over all rows is 1."""
        import torch

        counts = torch.bincount(torch.tensor(encoded), minlength=len(self.names))
        return (len(encoded) / ((counts > 0).sum() * counts.clamp(min=1))).to(device)


def classes_of_model(names: Sequence[str], value_of: dict[Any, Any], declared: list[str] | None) -> dict[Any, int]:
    """Return the class number of each label in the rows with which a model is evaluated: by its name, or else the label itself.

    `declared` are the names that the dataset has for its class numbers.
    """
    known = {name: number for number, name in enumerate(names)}
    name_of = lambda value: declared[value] if declared and value in range(len(declared)) else str(value)
    by_name = {cell: known[name_of(value)] for cell, value in value_of.items() if name_of(value) in known}
    return by_name or {cell: value for cell, value in value_of.items() if value in range(len(known))}


def may_lack_classes(cfg: Any, train: "datasets.Dataset") -> bool:
    """Return whether the training rows may lack a class that the evaluation rows have.

    Rows of a rare class may all be set aside for the evaluation, or left out by `--max_train_items`. `train` are the rows of
    `data.load_rows`.
    """
    return bool((cfg.train_file and not cfg.eval_file) or hasattr(train, "row_numbers"))


def _describe_kinds(cells: set) -> str:
    """Return which kinds of values a column has that cannot be labels, and what labels must be."""
    kinds = sorted({type(cell).__name__ for cell in cells})
    kinds = ["float"] if kinds == ["str"] else kinds  # texts with decimal numbers; see `_find_values`
    words = {"tuple": "lists", "str": "texts", "int": "whole numbers", "float": "decimal numbers"}
    hint = " For regression, add --num_labels 1." if kinds in (["float"], ["float", "int"]) else ""
    shown = " and ".join(words.get(kind, kind) for kind in kinds)
    return f"{shown}. Labels must be all names, all whole numbers, or all lists of them.{hint}"


def _find_values(cells: set) -> dict[Any, Any] | None:
    """Return the value of each label: itself, or a whole number that is written as a text or a float. Return None for other types.

    All cells of a .csv are texts. Whole numbers become floats such as 1.0 in a table of pandas in which one of them is missing.
    """
    kinds = {type(cell) for cell in cells}
    if len(kinds) > 1 or not kinds <= {str, int, bool, float}:
        return None
    if kinds == {str}:
        if all(re.fullmatch(r"-?(0|[1-9]\d*)(\.0+)?", cell.strip()) for cell in cells):
            return {cell: int(cell.partition(".")[0]) for cell in cells}
        numbers = [number for cell in cells if (number := data.parse_number(cell)) is not None]
        if sum(not number.is_integer() for number in numbers) > len(cells) / 2:
            return None
    if kinds == {float}:
        return {cell: int(cell) for cell in cells} if all(cell.is_integer() for cell in cells) else None
    return {cell: cell for cell in cells}


def describe_unknown(what: str, unknown: list, names: list[str], is_declared: bool) -> str:
    known = ", ".join(names[:10]) + (", ..." if names[10:] else "")
    reason = "is not declared by the dataset" if is_declared else "does not occur in the training data"
    return f"it has a {what} that {reason} ({known})\t{', '.join(map(repr, unknown[:3]))}"


def make_tables(
    labels: Labels, rows: dict[str, np.ndarray], scores: ScoreTable | None, number: int, inputs: tables.Inputs
) -> dict[str, Table]:
    """Return the scores and the confusion of the classes, or the errors of a regression, and `number` predictions of each group.

    `rows` has `predictions`, `references` and `loss`, and if there are predictions to show `confidence`; see `tables.confidence`.
    `inputs` describes items; see `tables.of_predictions`.
    """
    predictions, references, loss = rows["predictions"], rows["references"], rows["loss"]
    if labels.is_regression:
        made = tables.of_numbers(predictions, references)
        return made | tables.of_predicted_numbers(number, inputs, predictions=predictions, references=references, loss=loss)
    made = {"classes": scores.as_table()} if scores else {}
    if labels.is_multi_label:
        made["counts"] = tables.counts_of_classes(predictions, references, labels.names)
        is_correct = (predictions == references).all(-1)
        show = lambda values: lambda i: ", ".join(labels.names[at] for at in values[i].nonzero()[0])
    else:
        made["confusion"] = tables.confusion(predictions, references, labels.names)
        is_correct = predictions == references
        show = lambda values: lambda i: labels.names[values[i]]
    if number:
        columns = {"true": show(references), "predicted": show(predictions), "confidence": rows["confidence"], "loss": loss}
        made |= tables.of_predictions(number, inputs, is_correct=is_correct, certainty=rows["confidence"], columns=columns)
    return made


# What programs write for a missing value. "none" and "na" are left out, because they are names in many datasets.
NAMES_OF_MISSING = {"nan", "NaN", "NAN", "None", "null", "NULL", "N/A", "n/a", "NA", "<NA>", "#N/A"}


def report_classes(option: str, unit: str, names: list[str], train: np.ndarray, test: np.ndarray) -> None:
    """Warn about classes without training data, names that differ in case or white space only, and names such as nan.

    `train` and `test` have the number of rows or words (`unit`) of each class.
    """
    noun = unit.removesuffix("s")
    if missing := [i for i in range(len(names)) if not train[i]]:
        shown = [f"{names[i]!r} ({counted(test[i], f'evaluation {noun}')})" if test[i] else repr(names[i]) for i in missing]
        has = "has" if len(missing) == 1 else "have"
        number = f"{len(missing):,} of {len(names):,} classes"
        warn(f"{option}: {number} {has} no training {unit} and cannot be learned: {listed(shown, 5)}.")
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(" ".join(name.split()).casefold(), []).append(i)
    show = lambda some: ", ".join(f"{names[i]!r} ({counted(train[i] + test[i], noun)})" for i in some)
    if alike := [group for group in groups.values() if group[1:]]:
        reason = f"some names differ only in case or white space, and are separate classes: {listed(map(show, alike), 5, '; ')}"
        warn(f"{option}: {reason}. Write them in the same way if they mean the same.")
    if odd := [i for i, name in enumerate(names) if name.strip() in NAMES_OF_MISSING]:
        warn(f"{option}: a class is named {show(odd)}. Leave these {unit} empty if the label is missing, and use --skip_broken.")
    if all(name.startswith("[") and name.endswith("]") for name in names):
        warn(f"{option}: the names look like lists, for example {names[0]!r}. For several labels per row, use lists in a .jsonl.")
