"""Text for people: numbers with nouns and units, lists, tables, and the nearest of several names."""

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

# Letters of decimal units, from the largest.
SI_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
_BYTES = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10))
_TIMES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def plural(number: float, noun: str) -> str:
    """Return the noun for a number of things: "rank", "ranks", "micro-batches"."""
    return noun if number == 1 else f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 rank", "2 ranks", "1,000 steps"."""
    return f"{number:,} {plural(number, noun)}"


def ranks_text(ranks: Sequence[int], most: int = 8) -> str:
    """Return "rank 3" or "ranks 0, 1, 2". Of many ranks, the first are named."""
    return f"{plural(len(ranks), 'rank')} {listed(map(str, ranks), most)}"


def listed(words: Iterable[str], most: int = 3, separator: str = ", ") -> str:
    """Return the first words, and the number of the others: "a, b, c and 2 more"."""
    words = list(words)
    return separator.join(words[:most]) + (f" and {len(words) - most:,} more" if len(words) > most else "")


def shorten(text: str, most: int, end: str = "...") -> str:
    return text if len(text) <= most else text[: most - len(end)] + end


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an exception, or its class: a MemoryError and a timeout may have no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def format_si(value: float) -> str:
    """Return a number with three digits and the letter of a decimal unit: "12.3 G". The caller appends the unit, such as B/s."""
    letter = next((letter for letter, unit in SI_UNITS.items() if value >= unit), "u")
    return f"{value / SI_UNITS[letter]:.3g} {letter}"


def format_bytes(number: float) -> str:
    """Return a size with three digits and a binary unit: "1.5 GiB", "600 MiB", "10 B"."""
    for unit, power in _BYTES:
        if abs(number) >= 2**power:
            return f"{_three_digits(number / 2**power)} {unit}"
    return f"{number:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a time with three digits, or in its two largest units: "48.1 ms", "12.3 s", "13 min 5 s", "2 d 3 h"."""
    return _seconds(seconds, _three_digits)


def rough_seconds(seconds: float) -> str:
    """Return a time that varies, with two digits: "5.6 ms", "48 ms", "1.0 s", "12 s", "13 min 5 s"."""
    return _seconds(seconds, lambda value: f"{value:.1f}" if abs(value) < 9.95 else f"{value:.0f}")


def _seconds(seconds: float, write: Callable[[float], str]) -> str:
    if not math.isfinite(seconds):
        return str(seconds)
    if 0 < abs(seconds) < 0.9995:
        return f"{write(seconds * 1000)} ms" if abs(seconds) >= 1e-4 else f"{write(seconds * 1e6)} us"
    if abs(seconds) < 60:
        return f"{write(seconds)} s"
    left = round(seconds)
    at = next(at for at, (size, _) in enumerate(_TIMES) if abs(left) >= size)
    (size, unit), (smaller, name) = _TIMES[at], _TIMES[at + 1]
    rest = left % size // smaller
    return f"{left // size} {unit}" + (f" {rest} {name}" if rest else "")


def format_clock(seconds: float) -> str:
    """Return 3:07 or 2:03:07."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def table(rows: Iterable[Sequence[str]], left: int | None = None) -> list[str]:
    """Return the lines of a table. The first `left` columns are aligned to the left, by default all of them."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if left is None or place < left else str.rjust for place in range(len(widths))]
    return ["  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths)).rstrip() for row in rows]


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean_path(path: str | Path) -> str:
    """Return " Did you mean runs/mine?" with the most similar path that exists, or "". One name of `path` may be misspelled."""
    try:
        there = next(folder for folder in Path(path).parents if folder.is_dir())
        wrong, *rest = Path(path).relative_to(there).parts
        near = nearest(wrong, sorted(other.name for other in there.iterdir() if not rest or other.is_dir()))
    except (OSError, StopIteration):
        return ""
    meant = Path(there, near, *rest)
    return f" Did you mean {meant if meant.exists() else there / near}?" if near else ""


def did_you_mean(word: str, known: Iterable[str], form: str = "{}", cutoff: float = 0.6) -> str:
    """Return " Did you mean lr?" with the known word that is most similar to `word`, or "". `form` is how the word is written."""
    found = nearest(word, known, cutoff)
    return f" Did you mean {form.format(found)}?" if found else ""


def read_table(path: Path) -> Any:
    """Return the content of a YAML file. With the parser in C it takes a tenth of the time: some ms, at every start of a rank."""
    import yaml

    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
