"""Functions on lists of parameter shapes, each entry of which is [kind, shape, is_trained]."""

import json
import math
from typing import Any

_SQUARE = 1024  # side of the matrices that stand for a model of which only the size is known


def of_bytes(size: int) -> list[list[Any]]:
    """Square matrices of float32, and one for the rest."""
    whole, rest = divmod(size // 4, _SQUARE * _SQUARE)
    entries: list[list[Any]] = [["matrix", [_SQUARE, _SQUARE], True] for _ in range(whole)]
    if rows := rest // _SQUARE:
        entries.append(["matrix", [rows, _SQUARE], True])
    return entries or [["vector", [max(1, rest)], True]]


def count(entries: list[list[Any]]) -> int:
    """Numbers in those that are trained."""
    return sum(math.prod(shape) for _, shape, is_trained in entries if is_trained)


def first_of(entries: list[list[Any]], numbers: int) -> list[list[Any]]:
    """The first of them, up to so many trained numbers."""
    kept: list[list[Any]] = []
    for entry in entries:
        numbers -= count([entry])
        if kept and numbers < 0:
            break
        kept.append(entry)
    return kept


def packed(entries: list[list[Any]]) -> dict[str, Any]:
    """Each shape once and their order: a message between nodes must not be large."""
    different = {json.dumps(entry): entry for entry in entries}
    place = {key: number for number, key in enumerate(different)}
    return {"different": list(different.values()), "order": [place[json.dumps(entry)] for entry in entries]}


def unpacked(message: dict[str, Any]) -> list[list[Any]]:
    return [message["different"][number] for number in message["order"]]
