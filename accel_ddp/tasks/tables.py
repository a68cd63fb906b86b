"""The tables of an evaluation, made from the rows of all items, which `accel_ddp.evaluate` passes to `summarize`.

All of them depend on the rows alone, which are in the order of the data, so the number of ranks does not change a table.
Numbers are rounded to DIGITS, because the last bits of a loss depend on how items are split into batches.
"""

import csv
import io
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from accel_ddp.records.eval_tables import IMAGE, Table
from accel_ddp.records.files import replace_file
from accel_ddp.text import shorten

if TYPE_CHECKING:
    from torch import Tensor

MOST_ROWS = 12  # a table of scores with more classes is printed as the worst ones
WORST_ROWS = 10
MOST_IN_TABLE = 1000  # trackers and the report show no more
COLUMNS = ["class", "precision", "recall", "f1", "support"]
FILE = "classes.csv"


class Row(NamedTuple):
    """The scores of a class or an average. A class that was neither present nor predicted has NaN."""

    name: str
    precision: float = math.nan
    recall: float = math.nan
    f1: float = math.nan
    support: int = 0  # how often the class occurs in the evaluation data

    @classmethod
    def of_report(cls, name: str, report: dict[str, Any]) -> "Row":
        """Return an entry of `classification_report(..., output_dict=True)` of scikit-learn or seqeval."""
        return cls(name, *(float(report[key]) for key in ("precision", "recall", "f1-score")), int(report["support"]))

    def cells(self) -> list[Any]:
        return [None if isinstance(value, float) and math.isnan(value) else value for value in self]


@dataclass
class ScoreTable:
    """The scores of all classes, and their averages over the classes that are present or predicted.

    scikit-learn computes them. Its text has all classes or averages of the shown ones only, so the text is made here.
    """

    rows: list[Row]
    averages: list[Row]
    noun: str = "classes"

    def __str__(self) -> str:
        """Return the table as text: all classes, or if there are many, those with the lowest F1."""
        known = shown = [row for row in self.rows if not math.isnan(row.f1)]
        if not known:
            return f"The evaluation data have no {self.noun}, and none were predicted."
        lines = []
        if len(known) > MOST_ROWS:  # of equal ones those that occur more often come first
            shown = sorted(known, key=lambda row: (row.f1, -row.support, row.name))[:WORST_ROWS]
            lines.append(f"The {len(shown)} of {len(known)} {self.noun} with the lowest F1:")
        width = max(len(row.name) for row in [*shown, *self.averages])
        number = lambda value: " " * 10 if math.isnan(value) else f" {value:9.3f}"
        line = lambda row: f"{row.name:>{width}} {''.join(map(number, row[1:4]))} {row.support:>9}"
        lines += [f"{'':{width}} " + "".join(f" {word:>9}" for word in ("precision", "recall", "f1-score", "support")), ""]
        lines += [*map(line, shown), "", *map(line, self.averages), ""]
        if absent := [row.name for row in self.rows if math.isnan(row.f1)]:
            more = ", ..." if len(absent) > WORST_ROWS else ""
            lines.append(
                f"{len(absent)} of {len(self.rows)} {self.noun} occur neither in the evaluation data nor in the predictions. They "
                f"have no F1 and are not averaged: {', '.join(absent[:WORST_ROWS])}{more}."
            )
        return "\n".join(lines)

    def as_table(self) -> Table:
        """Return all classes and averages, or if there are very many, those with the lowest F1. classes.csv has all of them."""
        rows, title = self.rows, f"Scores of the {self.noun}"
        if len(rows) > MOST_IN_TABLE:
            lowest = sorted(range(len(rows)), key=lambda i: (math.isnan(rows[i].f1), rows[i].f1, -rows[i].support, i))
            rows = [rows[i] for i in sorted(lowest[:MOST_IN_TABLE])]
            title = f"Scores of the {MOST_IN_TABLE:,} of {len(self.rows):,} {self.noun} with the lowest F1"
        return Table(COLUMNS, [row.cells() for row in (*rows, *self.averages)], "scores", title)

    def report(self, output_dir: str) -> str:
        """Write all classes to OUTPUT_DIR/classes.csv, and return the text to print. A disk that is full does not end the run."""
        csv.writer(file := io.StringIO()).writerows([COLUMNS, *(row.cells() for row in self.rows)])
        path = Path(output_dir) / FILE
        try:
            replace_file(path, file.getvalue(), syncs=True)
        except OSError as error:
            return f"{self}\n{path} could not be written on {socket.gethostname()}: {error.strerror}."
        return f"{self}\nall {self.noun}: {path}" if len(self.rows) > MOST_ROWS else str(self)


MOST_CLASSES = 50  # of a confusion matrix
MOST_COUNTS = 1000  # rows of a table of counts
MOST_POINTS = 1000
LONGEST_TEXT = 300  # characters
DIGITS = 4
QUANTILES = {"minimum": 0, "5%": 0.05, "25%": 0.25, "median": 0.5, "75%": 0.75, "95%": 0.95, "maximum": 1}
CORRECT, WRONG, CONFIDENT = "correct", "wrong", "most confident error"
SAMPLE, LARGEST = "sample", "largest error"

# A function that returns columns for some items by their positions in the data, for example their texts.
Inputs = Callable[[list[int]], dict[str, list]]


def confusion(predictions: Any, references: Any, names: Sequence[str]) -> Table:
    """Return how often each true class (row) was predicted as each class (column). `predictions` has class numbers.

    Of more than MOST_CLASSES classes, those with the most errors have their own rows and columns. All others are one class.
    """
    # The pairs that occur are far fewer than all pairs of 10,000 classes, which would not fit in memory.
    codes = np.asarray(references, dtype=np.int64).ravel() * len(names) + np.asarray(predictions, dtype=np.int64).ravel()
    pairs, counts = np.unique(codes, return_counts=True)
    truth, guess = np.divmod(pairs, len(names))
    place, shown, title = np.arange(len(names)), list(names), "Confusion matrix"
    if len(names) > MOST_CLASSES:
        errors = np.zeros(len(names), dtype=int)
        is_wrong = truth != guess
        for side in (truth, guess):
            np.add.at(errors, side[is_wrong], counts[is_wrong])
        kept = np.sort(np.argsort(-errors, kind="stable")[: MOST_CLASSES - 1])
        place = np.full(len(names), len(kept))
        place[kept] = np.arange(len(kept))
        shown = [names[i] for i in kept]
        shown.append("other" if "other" not in shown else f"the other {len(names) - len(kept):,} classes")
        inside = int(counts[~is_wrong & (place[truth] == len(kept))].sum())
        title += (
            f" of the {len(kept)} of {len(names):,} classes with the most errors. Inside of {shown[-1]!r}, {inside:,} predictions are "
            "correct"
        )
    matrix = np.zeros((len(shown), len(shown)), dtype=int)
    np.add.at(matrix, (place[truth], place[guess]), counts)
    rows = [[name, *row] for name, row in zip(shown, matrix.tolist())]
    return Table(["true class", *shown], rows, "matrix", title)


def counts_of_classes(predictions: np.ndarray, references: np.ndarray, names: Sequence[str]) -> Table:
    """Return true and false positives and negatives of each class, for items with several classes (a 0 or 1 for each)."""
    guess, truth = predictions.astype(bool), references.astype(bool)
    found = np.stack([(guess & truth).sum(0), (guess & ~truth).sum(0), (~guess & truth).sum(0), (~guess & ~truth).sum(0)], axis=1)
    title, kept = "Predictions of each class", np.arange(len(names))
    if len(names) > MOST_COUNTS:
        kept = np.sort(np.argsort(-found[:, 1:3].sum(1), kind="stable")[:MOST_COUNTS])
        title = f"Predictions of the {MOST_COUNTS:,} of {len(names):,} classes with the most errors"
    columns = ["class", "true positives", "false positives", "false negatives", "true negatives"]
    return Table(columns, [[names[i], *found[i].tolist()] for i in kept], "scores", title)


def confidence(scores: "Tensor", is_multi_label: bool = False) -> "Tensor":
    """Return the probability of the predicted class of each row of logits, or of several labels the mean over the classes."""
    if is_multi_label:
        return scores.float().abs().sigmoid().mean(-1)
    return scores.float().softmax(-1).amax(-1)


def of_numbers(predictions: np.ndarray, references: np.ndarray) -> dict[str, Table]:
    """Return the quantiles of the errors, and predicted beside true numbers: those of all items, or of a sample of MOST_POINTS."""
    predictions, references = (np.asarray(values, dtype=np.float64) for values in (predictions, references))
    errors = predictions - references
    levels = [np.quantile(values, list(QUANTILES.values())) for values in (errors, np.abs(errors))]
    rows = [[name, *map(_rounded, values)] for name, *values in zip(QUANTILES, *levels)]
    rows.append(["mean", _rounded(errors.mean()), _rounded(np.abs(errors).mean())])
    chosen = np.sort(_order(len(errors))[:MOST_POINTS])
    points = [[_rounded(references[i]), _rounded(predictions[i])] for i in chosen]
    title = "Predicted and true numbers" + (f" of {MOST_POINTS:,} of {len(errors):,} items" if len(errors) > MOST_POINTS else "")
    return {
        "errors": Table(["quantile", "error", "absolute error"], rows, "scores", "Errors: predicted minus true number"),
        "points": Table(["true", "predicted"], points, "points", title),
    }


def of_predictions(
    number: int, inputs: Inputs, *, is_correct: Any, certainty: Any, columns: dict[str, Any], worst: str = CONFIDENT
) -> dict[str, Table]:
    """Return the table of `--log_predictions`: `number` rows each of correct items, of wrong items, and of the `worst` items.

    The worst items are the wrong ones with the highest `certainty`. `columns` has the value of each item for each further column,
    or a function that returns it for the position of an item. An item is in one group only. The other items come in an order that
    depends on their number alone, so successive evaluations show the same items if these stay in their group.
    """
    is_correct, order = np.asarray(is_correct), _order(len(is_correct))
    is_wrong = ~is_correct
    wrong = np.flatnonzero(is_wrong)
    # Rounded, so that the last bits of a probability do not change which items are chosen.
    worst_items = wrong[np.argsort(-np.round(np.asarray(certainty, dtype=np.float64)[wrong], DIGITS), kind="stable")][:number]
    is_wrong[worst_items] = False
    groups = {CORRECT: order[is_correct[order]][:number], WRONG: order[is_wrong[order]][:number], worst: worst_items}
    return _prediction_table(groups, inputs, columns)


def of_predicted_numbers(number: int, inputs: Inputs, *, predictions: Any, references: Any, loss: Any) -> dict[str, Table]:
    """Return the table of `--log_predictions` for numbers: the `number` largest errors, and as many other items. 0: no table."""
    if not number:
        return {}
    errors = np.asarray(predictions, dtype=np.float64) - np.asarray(references, dtype=np.float64)
    largest = np.argsort(-np.round(np.abs(errors), DIGITS), kind="stable")[:number]
    order = _order(len(errors))
    sample = order[~np.isin(order, largest)][:number]
    columns = {"true": references, "predicted": predictions, "error": errors, "loss": loss}
    return _prediction_table({SAMPLE: sample, LARGEST: largest}, inputs, columns)


def of_samples(number: int, columns: dict[str, Any]) -> dict[str, Table]:
    """Return the table of `--log_predictions` with all of `number` items as one group."""
    return _prediction_table({SAMPLE: range(number)}, lambda items: {}, columns)


def _prediction_table(groups: dict[str, Any], inputs: Inputs, columns: dict[str, Any]) -> dict[str, Table]:
    chosen = [(group, int(i)) for group, items in groups.items() for i in items]
    described = inputs([i for _, i in chosen])
    rows = []
    for at, (group, i) in enumerate(chosen):
        values = [column(i) if callable(column) else column[i] for column in columns.values()]
        texts = [cells[at] if name == IMAGE else _short(cells[at]) for name, cells in described.items()]
        rows.append([group, *texts, *map(_short, values)])
    title = f"Sample predictions. Texts are shortened to {LONGEST_TEXT} characters"
    return {"predictions": Table(["group", *described, *columns], rows, "predictions", title)}


def _order(number: int) -> np.ndarray:
    """Return the positions 0 to `number` - 1 in a fixed random order. Data are often sorted by their classes."""
    return np.random.RandomState(0).permutation(number)  # its numbers are the same in every version of numpy


def _rounded(value: Any) -> float:
    return round(float(value), DIGITS) + 0.0  # -0.0 becomes 0.0


def _short(value: Any) -> Any:
    """Return a text shortened to LONGEST_TEXT characters, a rounded number, or another value as it is."""
    if isinstance(value, str):
        return shorten(value, LONGEST_TEXT, "…")
    value = value.item() if hasattr(value, "item") else value
    return _rounded(value) if isinstance(value, float) else value
