"""The cards of the page: tiles, tables and frames of charts as HTML, and numbers as people read them."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from accel_ddp.report.markup import Html, escape, join, tag
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


TEXT = 2000  # characters of a cell
ROWS = 500  # of a table


class Figure(Html):
    """A number with its unit, which a table aligns to the right."""


def figure(value: Any, form: Callable[[Any], str]) -> Figure | None:
    """Return a number in a form such as `percent`, or None if the value is not known."""
    return Figure(escape(form(value))) if is_number(value) else None


def section(key: str, title: str, *content: Any, level: int = 2, prefix: str = "") -> Html:
    """Return a section with a heading that the navigation links to, or nothing if it has no content."""
    body = join(part for part in content if part)
    if not body:
        return Html()
    name = f"{prefix}{key}"
    return tag("section", tag(f"h{level}", title, id=f"{name}-title"), body, id=name, aria_labelledby=f"{name}-title")


def tile(label: str, value: Any, remark: Any = "", link: str | None = None) -> Html:
    """Return a key figure. It is a link if more about it is further down."""
    more = tag("a", tag("span", f"More about {label.lower()}", class_="hidden"), href=link) if link else ""
    return tag("div", tag("dt", label), tag("dd", tag("b", value), tag("span", remark) if remark else "", more), class_="tile")


def note(*content: Any, class_: str = "") -> Html:
    return tag("p", *content, class_=f"note {class_}".strip())


def chart(
    kind: str,
    title: str,
    explanation: str,
    label: str,
    *,
    data: Mapping[str, Any],
    above: Html | str = "",
    key: Html | str = "",
    figures: str = "",
    level: int = 3,
    wide: bool = False,
    height: int | None = None,
) -> Html:
    """Return the frame of a chart. page.js finds in `data` what to draw.

    `label` describes the chart to a screen reader, `figures` states its main numbers as text, and `key` is its legend.
    """
    found = {f"data_{name}": value for name, value in data.items()}
    style = f"height: {height}px" if height else None
    frame = tag("div", class_=f"plot {kind}", role="img", aria_label=label, data_chart=kind, style=style, **found)
    head = [tag("div", tag(f"h{level}", title), key if not wide else "", class_="head"), tag("p", explanation)]
    body = [tag("div", above, class_="js") if above else "", key if wide else "", frame]
    end = tag("p", figures, class_="figures") if figures else ""
    return tag("figure", tag("figcaption", *head), *body, end, class_="card wide" if wide else "card")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str, *, class_: str | None = None) -> Html:
    """Return a table that scrolls inside its frame. Columns that contain only numbers are aligned to the right."""
    rows = list(rows)
    shown = rows[:ROWS]
    is_numeric = lambda value: value is None or (isinstance(value, int | float | Figure) and not isinstance(value, bool))
    right = ["n" if shown and all(is_numeric(row[i]) for row in shown) else None for i in range(len(columns))]
    head = tag("tr", *(tag("th", column, scope="col", class_=kind) for column, kind in zip(columns, right)))
    cells = lambda row: (tag("td", cell(one), class_=kind) for one, kind in zip(row[1:], right[1:]))
    body = (tag("tr", tag("th", cell(row[0]), scope="row"), *cells(row)) for row in shown)
    fewer = note(f"{len(shown):,} of {len(rows):,} rows are shown.") if len(rows) > len(shown) else ""
    return join([scroll(caption, tag("thead", head), tag("tbody", *body), class_=class_), fewer])


def scroll(caption: str, *content: Html, class_: str | None = None) -> Html:
    """Return a table in a frame that scrolls, also with the keyboard."""
    grid = tag("table", tag("caption", caption, class_="hidden"), *content, class_=class_)
    return tag("div", grid, class_="scroll", tabindex="0", role="region", aria_label=caption)


def cell(value: Any) -> Html:
    if isinstance(value, Html):
        return value
    text = number(value)
    return escape(text if len(text) <= TEXT else f"{text[:TEXT]} … ({len(text) - TEXT:,} more characters)")


def facts(pairs: Iterable[tuple[str, Any]]) -> Html:
    rows = [tag("div", tag("dt", name), tag("dd", cell(value))) for name, value in pairs]
    return tag("dl", *rows, class_="facts") if rows else Html()


def fold(title: str, content: Html) -> Html:
    return tag("details", tag("summary", title), content) if content else Html()


def legend(items: Iterable[tuple[str, str]]) -> Html:
    return tag("ul", *(tag("li", tag("i", class_=f"swatch {name}"), text) for name, text in items), class_="legend")


def choice(label: str, options: Sequence[tuple[str, str]], **data: Any) -> Html:
    """Return a list to choose from, of (value, text)."""
    listed = [tag("option", text, value=value) for value, text in options]
    marks = {f"data_{key}": value for key, value in data.items()}
    return tag("label", tag("span", label), tag("select", *listed, autocomplete="off", **marks), class_="choice")
