"""Describe the gradients of a model: the shapes of its parameters, their dtype and their size.

Every parameter is an entry [kind, shape, is_trained], in the model's order. The kind is "embedding", "matrix" or "vector".
"""

import json
import math
from dataclasses import dataclass
from typing import Any

Entries = list[list[Any]]

_SIDE = 1024  # of the square matrices that stand for a model if only its size is given


@dataclass(frozen=True)
class Gradients:
    """The gradients that DDP averages in a step."""

    entries: Entries  # empty if there is no model
    dtype: str = "float32"

    @property
    def bytes_per_element(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def bytes(self) -> int:
        """A multiple of 4, because all-reduce is timed on float32; 0 if there is no model."""
        return max(4, count_elements(self.entries) * self.bytes_per_element // 4 * 4) if self.entries else 0


def entries_of_size(size: int) -> Entries:
    """Return float32 matrices of together about `size` bytes: square ones, and a smaller one for the rest."""
    whole, rest = divmod(size // 4, _SIDE * _SIDE)
    entries: Entries = [["matrix", [_SIDE, _SIDE], True] for _ in range(whole)]
    if rows := rest // _SIDE:
        entries.append(["matrix", [rows, _SIDE], True])
    return entries or [["vector", [max(1, rest)], True]]


def count_elements(entries: Entries) -> int:
    """Return the number of trained elements."""
    return sum(math.prod(shape) for _, shape, is_trained in entries if is_trained)


def first_entries(entries: Entries, elements: int) -> Entries:
    """Return the first entries with together at most `elements` trained elements, and at least one entry."""
    kept: Entries = []
    for entry in entries:
        elements -= count_elements([entry])
        if kept and elements < 0:
            break
        kept.append(entry)
    return kept


def pack(entries: Entries) -> dict[str, Any]:
    """Return the different entries and their order, because a message between nodes has a limited size."""
    different = {json.dumps(entry): entry for entry in entries}
    index = {key: number for number, key in enumerate(different)}
    return {"different": list(different.values()), "order": [index[json.dumps(entry)] for entry in entries]}


def unpack(message: dict[str, Any]) -> Entries:
    return [message["different"][number] for number in message["order"]]
