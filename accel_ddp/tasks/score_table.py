"""A table of precision, recall and F1 of each class, printed in the form of scikit-learn and written as CSV."""

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from accel_ddp.ranks.process import process
from accel_ddp.records.tables import Table
from accel_ddp.saving import format

MOST_ROWS = 12  # a table with more classes is printed as the worst ones
WORST_ROWS = 10
MOST_IN_TABLE = 1000  # trackers and the report show no more
NAME = "class"
FILE = "classes.csv"


class Row(NamedTuple):
    """The scores of a class or an average. A class that was neither present nor predicted has NaN."""

    name: str
    precision: float
    recall: float
    f1: float
    support: int  # how often the class occurs in the evaluation data


@dataclass
class ScoreTable:
    """The scores of all classes, and their averages over the classes that are present or predicted."""

    rows: list[Row]
    averages: list[Row]
    noun: str = "classes"

    def __str__(self) -> str:
        """Return the table as text: all classes, or if there are many, those with the lowest F1."""
        known = [row for row in self.rows if not math.isnan(row.f1)]
        if not known:
            return f"The evaluation data have no {self.noun}, and none were predicted."
        shown = known
        if len(known) > MOST_ROWS:  # of equal ones those that occur more often come first
            shown = sorted(known, key=lambda row: (row.f1, -row.support, row.name))[:WORST_ROWS]
        width = max(len(row.name) for row in [*shown, *self.averages])
        lines = [f"The {len(shown)} of {len(known)} {self.noun} with the lowest F1:"] if shown is not known else []
        lines += [f"{'':{width}} " + "".join(f" {word:>9}" for word in ("precision", "recall", "f1-score", "support")), ""]
        lines += [_line(row, width) for row in shown]
        lines += ["", *[_line(row, width) for row in self.averages], ""]
        if absent := [row.name for row in self.rows if math.isnan(row.f1)]:
            more = ", ..." if len(absent) > WORST_ROWS else ""
            lines.append(
                f"{len(absent)} of {len(self.rows)} {self.noun} occur neither in the evaluation data nor in the predictions. They "
                f"have no F1 and are not averaged: {', '.join(absent[:WORST_ROWS])}{more}."
            )
        return "\n".join(lines)

    def as_table(self) -> Table:
        """Return all classes and averages, or if there are very many, those with the lowest F1. classes.csv has all of them."""
        empty = lambda row: [None if isinstance(value, float) and math.isnan(value) else value for value in row]
        rows, title = self.rows, f"Scores of the {self.noun}"
        if len(rows) > MOST_IN_TABLE:
            lowest = sorted(range(len(rows)), key=lambda i: (math.isnan(rows[i].f1), rows[i].f1, -rows[i].support, i))
            rows = [rows[i] for i in sorted(lowest[:MOST_IN_TABLE])]
            title = f"Scores of the {MOST_IN_TABLE:,} of {len(self.rows):,} {self.noun} with the lowest F1"
        return Table([NAME, "precision", "recall", "f1", "support"], list(map(empty, [*rows, *self.averages])), "scores", title)

    def report(self, output_dir: str) -> str:
        """Write all classes to OUTPUT_DIR/classes.csv, and return the text to print. A disk that is full does not end the run."""
        file = io.StringIO()
        writer = csv.writer(file)
        writer.writerow([NAME, "precision", "recall", "f1", "support"])
        writer.writerows(["" if isinstance(value, float) and math.isnan(value) else value for value in row] for row in self.rows)
        path = Path(output_dir) / FILE
        try:
            format.write_text(path, file.getvalue())
        except OSError as error:
            return f"{self}\n{path} could not be written on {process.host}: {error.strerror}."
        return f"{self}\nall {self.noun}: {path}" if len(self.rows) > MOST_ROWS else str(self)


def _line(row: Row, width: int) -> str:
    numbers = "".join(f" {value:9.3f}" if not math.isnan(value) else " " * 10 for value in row[1:4])
    return f"{row.name:>{width}} {numbers} {row.support:>9}"
