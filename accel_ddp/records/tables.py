"""Tables of an evaluation: scores of each class, a confusion matrix, sample predictions.

A run stores them in OUTPUT_DIR/tables/step_00000120.json, trackers show them, and `accel-ddp report` reads them.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

FOLDER = "tables"


@dataclass
class Table:
    """One table. Cells are strings, numbers or None.

    A `matrix` has a row for each true class and a column for each predicted class, after a first column with the names of the rows.
    `predictions` contain data of the user, so that they are made only on request.
    """

    columns: list[str]
    rows: list[list[Any]]
    kind: Literal["scores", "matrix", "predictions"] = "scores"
    title: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def file_of(step: int) -> str:
    """Return the path of the tables of a step, relative to the folder of the run."""
    return f"{FOLDER}/step_{step:08d}.json"
