"""Writes numbers for people: thousands separators, units, and hours and minutes instead of seconds."""

import itertools
import math
import time
from typing import Any

UNKNOWN, MINUS, TIMES = "\u2013", "\u2212", "\u00d7"  # a dash, a minus sign, a multiplication sign
_DURATIONS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_BYTES = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10))


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


def percent(fraction: float, digits: int = 1) -> str:
    return signed(f"{100 * fraction:.{digits}f} %") if math.isfinite(fraction) else UNKNOWN


def duration(seconds: float) -> str:
    """Return a time in its two largest units: 2 d 3 h, 13 min 5 s, 12.3 s, 48 ms."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds == 0:
        return "0 s"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} µs"
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds < 59.9 else "60 s"
    left = round(seconds)
    for (size, unit), (smaller, name) in itertools.pairwise(_DURATIONS):
        if left >= size:
            rest = left % size // smaller
            return f"{left // size}\u00a0{unit}" + (f" {rest}\u00a0{name}" if rest else "")
    return f"{left} s"


def size(count: float) -> str:
    for unit, power in _BYTES:
        if abs(count) >= 2**power:
            return f"{count / 2**power:.3g} {unit}"
    return f"{count:.0f} B"


def moment(unix_seconds: float) -> str:
    """Return a time of day in UTC, because the reader may be elsewhere than the machine."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_seconds))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
