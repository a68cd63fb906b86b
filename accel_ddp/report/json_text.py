"""Parses JSON, and numbers in it, that anyone may have written."""

import json
import math
import re
from typing import Any

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(data: bytes) -> Any:
    """Return a JSON value whose text can be written as UTF-8. Raise ValueError if the data is no JSON."""
    try:
        value = json.loads(data)
        if _SURROGATE.search(data):  # half of a character outside of the basic plane is replaced
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("too deep") from error
    return value


def number_of(value: Any) -> float:
    """Return a number of the log as a float, also "nan", "inf" and "-inf". Other values are NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    if isinstance(value, str) and value.lower() not in ("nan", "inf", "-inf", "infinity", "-infinity"):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return -math.inf if str(value).startswith("-") else math.inf


def step_of(value: Any) -> int:
    """Return a step. Raise ValueError if the value cannot be one."""
    number = number_of(value)
    if not 0 <= number < 2**53 or number != int(number):
        raise ValueError(value)
    return int(number)
