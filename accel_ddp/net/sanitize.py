"""Validation of values that another process has sent. Each function returns the value, or raises ValueError."""

from typing import Any

LONGEST_TEXT = 2000  # characters


def printable(value: Any, longest: int = LONGEST_TEXT) -> str:
    """Return a text of at most `longest` characters without those that move a terminal's cursor."""
    if not isinstance(value, str):
        raise ValueError("not a text")
    text = "".join(letter if letter.isprintable() else " " for letter in value[: longest + 1])
    return text if len(text) <= longest else text[:longest] + "..."


def whole_number(value: Any, most: int = 10**9) -> int | None:
    """Return a whole number from 0 to `most`, or None if `value` is None."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError("not a number")
    return value


def finite_number(value: Any) -> float:
    """Return a number that is neither NaN nor infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:  # false for NaN
        raise ValueError("not a number")
    return float(value)


def bounded_list(value: Any, most: int) -> list[Any]:
    """Return a list of at most `most` entries."""
    if not isinstance(value, list) or len(value) > most:
        raise ValueError("not a list")
    return value
