"""The section with the evaluations: their metrics, scores of classes, confusion matrices, predictions."""

import math
import re
from typing import Any

import numpy as np

from accel_ddp.report.cards import cell, chart, choice, note, scroll, section, table
from accel_ddp.report.chart_data import is_number, metric_names
from accel_ddp.report.downsample import downsample
from accel_ddp.report.escaping import Html, join, tag
from accel_ddp.report.formats import number
from accel_ddp.report.run_data import Run

LISTED = 30  # evaluations in the table
COLUMNS = 40  # metrics in the table
CLASSES = 50  # of a confusion matrix
COMPACT = 16  # classes; the cells of a matrix with more are smaller
PREDICTIONS = 300
LONG = 40  # characters of a text that needs a wide column
POINTS = 1000  # of a chart of true and predicted numbers
SHADES = 8  # of a confusion matrix, as page.css defines them
_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}")
_LONGEST_IMAGE = 100_000  # characters

Rows = list[list[Any]]


def evaluations(run: Run, index: int, level: int, prefix: str) -> Html:
    """Return the section, or nothing for a run without evaluations."""
    steps = sorted(run.tables)
    blocks = []
    for step in steps:
        shown = [_table(name, one, level + 1) for name, one in run.tables[step].items() if one.get("rows")]
        title = tag(f"h{level + 1}", f"Tables of step {step:,}", class_="no-js") if len(steps) > 1 else ""
        blocks.append(tag("div", title, *shown, class_="step", data_step=step, data_of=index))
    names = {step: f"step {step:,}" + (f" ({best_name(run)})" if step == best_step(run) else "") for step in steps}
    chosen = choice("Tables of", [(str(step), names[step]) for step in reversed(steps)], tables=index) if len(steps) > 1 else ""
    picker = tag("div", chosen, class_="js") if chosen else ""
    return section("evaluations", "Evaluations", _metrics(run), picker, *blocks, level=level, prefix=prefix)


def best_step(run: Run) -> int | None:
    return (run.summary.get("best") or {}).get("step")


def best_name(run: Run) -> str:
    """Return what is best, for example "best accuracy": without --keep_best it is the loss, whatever --best_metric is."""
    return f"best {(run.summary.get('best') or {}).get('metric', '')}".replace("_", " ").strip()


def _metrics(run: Run) -> Html:
    """Return a table with a row for each evaluation, or for some of them if there are many. The newest is the first."""
    names = metric_names(run)[:COLUMNS]
    if not names:
        return Html()
    best, known = best_step(run), run.evaluations
    kept = set(np.linspace(0, len(known) - 1, min(len(known), LISTED)).astype(int).tolist())
    mark = tag("span", best_name(run), class_="tag")
    rows = [
        [join([f"{one['step']:,}", mark if one["step"] == best else ""]), *(one.get(name) for name in names)]
        for i, one in reversed(list(enumerate(known)))
        if i in kept or one["step"] == best
    ]
    text = f"{len(rows)} of {len(known):,} evaluations are shown. The CSV files contain all of them."
    shown = table(["step", *(name.replace("_", " ") for name in names)], rows, "Metrics of the evaluations, the newest first")
    return join([shown, note(text) if len(rows) < len(known) else ""])


def _table(name: str, one: dict[str, Any], level: int) -> Html:
    title = str(one.get("title") or name.replace("_", " ").capitalize())
    show = {"matrix": _matrix, "predictions": _predictions, "points": _points}.get(str(one.get("kind")), _scores)
    return show(one["columns"], one["rows"], title, level)


def _scores(columns: list[str], rows: Rows, title: str, level: int) -> Html:
    return join([tag(f"h{level}", title), table(columns, rows, title, class_="sortable")])


def _matrix(columns: list[str], rows: Rows, title: str, level: int) -> Html:
    """Return a confusion matrix as a table with coloured cells, which is readable without scripts and for screen readers."""
    names, heads = columns[1:], [str(row[0]) for row in rows]
    counts = np.array([[float(one) if is_number(one) else 0.0 for one in row[1:]] for row in rows])
    if not names:
        return Html()
    fewer = ""
    if len(names) > CLASSES and len(rows) == len(names):
        errors = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
        kept = np.sort(np.argsort(-errors, kind="stable")[:CLASSES])
        fewer = note(f"The {CLASSES} of {len(names):,} classes with the most errors are shown.")
        names, heads, counts = [names[i] for i in kept], [heads[i] for i in kept], counts[np.ix_(kept, kept)]
    sums = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, sums, out=np.zeros_like(counts), where=sums > 0)
    corner = tag("td", "true ↓ predicted →", class_="corner")
    head = tag("tr", corner, *(tag("th", tag("span", name), scope="col", title=name) for name in names))
    body = [
        tag(
            "tr",
            tag("th", tag("span", name), scope="row", title=name),
            *(_count(*pair, i == j) for j, pair in enumerate(zip(*line))),
        )
        for i, (name, line) in enumerate(zip(heads, zip(counts.tolist(), shares.tolist())))
    ]
    text = (
        "Rows are true classes, columns are predicted ones. The framed diagonal is correct. The colour is the share of the row."
    )
    switch = tag("input", type="checkbox", data_percent=True, autocomplete="off")
    percent = tag("label", switch, tag("span", "Percent of each row"), class_="choice js")
    class_ = "matrix compact" if len(names) > COMPACT else "matrix"
    shown = scroll(title, tag("thead", head), tag("tbody", *body), class_=class_)
    return tag("div", tag(f"h{level}", title), note(text), fewer, percent, shown, class_="confusion")


def _count(count: float, share: float, is_correct: bool) -> Html:
    shade = min(SHADES - 1, math.ceil(math.sqrt(share) * (SHADES - 1)))  # the root distinguishes rare errors
    text = "·" if not count else f"{count / 1000:.0f}k" if count >= 10_000 else number(count)
    class_ = f"q{shade} d" if is_correct else f"q{shade}"
    return Html(f'<td class="{class_}" data-p="{100 * share:.0f}%">{text}</td>')


def _predictions(columns: list[str], rows: Rows, title: str, level: int) -> Html:
    """Return sample predictions, with a list that shows those of one group."""
    at = columns.index("group") if "group" in columns else None
    shown = rows[:PREDICTIONS]
    groups = [str(row[at]) for row in shown] if at is not None else [None] * len(shown)
    body = [
        tag("tr", *(tag("td", _image(one) or cell(one), class_=_kind(one)) for one in row), data_group=group)
        for row, group in zip(shown, groups)
    ]
    names = [name for name in dict.fromkeys(groups) if name is not None]
    options = [("", f"all {len(shown):,}"), *((name, f"{name} ({groups.count(name):,})") for name in names)]
    picker = tag("div", choice("Show", options, filter=True), class_="js") if len(names) > 1 else ""
    head = tag("tr", *(tag("th", one, scope="col") for one in columns))
    fewer = note(f"{len(shown):,} of {len(rows):,} predictions are shown.") if len(rows) > len(shown) else ""
    grid = scroll(title, tag("thead", head), tag("tbody", *body), class_="texts")
    return tag("div", tag(f"h{level}", title), picker, grid, fewer, class_="predictions")


def _kind(value: Any) -> str | None:
    """Return the class of a cell: numbers are aligned, and long text has a wide column, also on a phone."""
    return "n" if is_number(value) else "long" if isinstance(value, str) and len(value) > LONG else None


def _image(value: Any) -> Html | None:
    """Return an image for a cell that contains one. Only formats without scripts are shown; everything else stays text."""
    if isinstance(value, str) and len(value) <= _LONGEST_IMAGE and _IMAGE.fullmatch(value):
        return Html(f'<img src="{value}" alt="input of the model" loading="lazy">')
    return None


def _points(columns: list[str], rows: Rows, title: str, level: int) -> Html:
    """Return a chart of true and predicted numbers."""
    known = np.array([row[:2] for row in rows if len(row) > 1 and is_number(row[0]) and is_number(row[1])], float)
    if not len(known):
        return Html()
    error = float(np.abs(known[:, 1] - known[:, 0]).mean())
    known = known[np.argsort(known[:, 0], kind="stable")]
    known = known[downsample(known[:, 0], known[:, 1], most=POINTS)]
    values = ";".join(" ".join(f"{value:.5g}" for value in column) for column in known.T)
    figures = f"mean absolute error {number(error)}"
    data = {"values": values, "x": columns[0], "y": columns[1]}
    label = f"Scatter chart of {columns[0]} and {columns[1]}, {figures}."
    text = "Each point is an item. On the dashed line the prediction is correct."
    return tag("div", chart("points", title, text, label, figures=figures, level=level, data=data), class_="grid")
