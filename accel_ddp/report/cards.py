"""Numbers as people read them, and tables for page.jinja."""

import math
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from markupsafe import Markup

from accel_ddp.report.run_data import is_number
from accel_ddp.text import format_seconds

UNKNOWN, MINUS, TIMES = "\u2013", "\u2212", "\u00d7"  # a dash, a minus sign, a multiplication sign


def number(value: Any) -> str:
    """Return a number with four significant digits. Whole numbers keep all their digits; other values are returned as text."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: UNKNOWN}[value]
    if not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: f"{MINUS}∞"}.get(value, "NaN")
    if value == int(value) and abs(value) < 1e15:
        return signed(f"{int(value):,}")
    if not 1e-4 <= abs(value) < 1e6:
        return signed(f"{value:.3e}")
    return signed(f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}")


def brief(value: float) -> str:
    """Return a number as `number` does, without zeros at its end."""
    digits, e, exponent = number(value).partition("e")
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + e + exponent


def signed(text: str) -> str:
    """Return a number with a minus sign instead of a hyphen, which is narrower than the digits."""
    return text.replace("-", MINUS, 1) if text.startswith("-") else text


def percent(fraction: float) -> str:
    return signed(f"{100 * fraction:.1f} %") if math.isfinite(fraction) else UNKNOWN


def duration(seconds: float) -> str:
    """Return a time as `format_seconds` does, without line breaks in it."""
    return format_seconds(seconds).replace("us", "µs").replace(" ", "\u00a0") if math.isfinite(seconds) else UNKNOWN


def moment(unix_seconds: float) -> str:
    """Return a time of day in UTC, because the reader may be elsewhere than the machine."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_seconds))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def rate(value: float) -> str:
    return number(round(value)) if value >= 100 else brief(value)


def plain(value: Any) -> str:
    """Return an option or a fact as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {plain(one)}" for name, one in list(value.items())[:40])
    if isinstance(value, list):
        return ", ".join(map(plain, value[:40]))
    return brief(value) if isinstance(value, float) else "empty" if value == "" else number(value)


def after(time: Any, first: float) -> str | None:
    return duration(max(0.0, time - first)) if is_number(time) else None


def words(name: Any) -> str:
    return str(name).replace("_", " ")


def command(given: Any) -> str:
    return shlex.join(map(str, given))[:400] if isinstance(given, list) else ""


TEXT = 2000  # characters of a cell
ROWS = 500  # of a table


class Figure(str):
    """A number with its unit, which a table aligns to the right."""


def figure(value: Any, form: Callable[[Any], str]) -> Figure | None:
    """Return a number in a form such as `percent`, or None if the value is not known."""
    return Figure(form(value)) if is_number(value) else None


def cell(value: Any) -> str:
    if isinstance(value, Markup):
        return value
    text = number(value)
    return text if len(text) <= TEXT else f"{text[:TEXT]} … ({len(text) - TEXT:,} more characters)"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str) -> dict[str, Any]:
    """Return a table: its columns and cells, each with its class. Columns that contain only numbers are aligned to the right."""
    rows = list(rows)
    shown = rows[:ROWS]
    is_numeric = lambda value: value is None or (isinstance(value, int | float | Figure) and not isinstance(value, bool))
    right = ["n" if shown and all(is_numeric(row[i]) for row in shown) else None for i in range(len(columns))]
    fewer = f"{len(shown):,} of {len(rows):,} rows are shown." if len(rows) > len(shown) else ""
    cells = [list(zip(map(cell, row), right)) for row in shown]
    return {"caption": caption, "columns": list(zip(columns, right)), "rows": cells, "fewer": fewer}


def tagged(step: int, tag: str) -> str:
    return Markup('{:,}<span class="tag">{}</span>').format(step, tag) if tag else f"{step:,}"
