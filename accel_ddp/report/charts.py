"""The sections with charts: curves, where the time goes, the load of the nodes, and evaluations with their tables."""

import math
import re
from typing import Any

import numpy as np

from accel_ddp.report.cards import brief, cell, chart, choice, duration, figure, legend, note, percent, scroll, section, table
from accel_ddp.report.chart_data import CHARTS, POINTS, downsample, metric_names, rank_name, series, slowness
from accel_ddp.report.markup import Html, join, tag
from accel_ddp.report.run_data import PARTS, ReportedRun, is_number
from accel_ddp.text import counted

WAITING = {"data": "waiting for data", "communication": "waiting for other ranks"}  # other parts have their own names
MARKS = {"error": "error", "warning": "warning", "info": "information", "save": "checkpoint"}


def curves(runs: list[ReportedRun], data: list[dict[str, Any]]) -> Html:
    names = list(dict.fromkeys(name for one in data for name in one["curves"]))
    if not names:
        return Html()
    over = "eval:loss" if {"loss", "eval:loss"} <= set(names) else None  # drawn into the chart of the training loss
    cards = [_curve(name, runs, over if name == "loss" else None) for name in names if name != over]
    zoom = note(
        tag("span", "Drag over a curve to zoom; all charts follow. Double-click resets.", class_="fine"),
        tag("span", "Switch on “Drag to zoom” to zoom with a finger; all charts follow.", class_="touch"),
        class_="js",
    )
    longest = max((len(run.updates.get("step", ())) for run in runs), default=0)
    reduced = f"Each curve has about {POINTS:,} points, which include its extremes. log.jsonl contains all steps."
    levels = {mark["level"] for one in data for mark in one["marks"]}
    marks = legend((f"mark {level}", text) for level, text in MARKS.items() if level in levels) if levels else ""
    grid = tag("div", *cards, class_="grid several" if len(runs) > 1 else "grid")
    return section("curves", "Curves", _controls(runs, data), zoom, note(reduced) if longest > POINTS else "", marks, grid)


def _controls(runs: list[ReportedRun], data: list[dict[str, Any]]) -> Html:
    axes = {"step": "Step", "time": "Time"} | ({"samples": "Samples"} if all(one["batch"] for one in data) else {})
    smoothing = "0.8" if len(runs) > 1 else "0"  # noisy curves of several runs hide each other
    box = lambda kind, text, class_=None, **values: tag(
        "label", tag("input", type=kind, autocomplete="off", **values), tag("span", text), class_=class_
    )
    radios = [box("radio", text, name="axis", value=axis, checked=axis == "step") for axis, text in axes.items()]
    slider = tag("input", type="range", id="smoothing", min="0", max="0.99", step="0.01", value=smoothing, autocomplete="off")
    controls = [
        tag("fieldset", tag("legend", "Horizontal axis", class_="hidden"), *radios, class_="segments"),
        tag("label", tag("span", "Smoothing"), slider, tag("output", for_="smoothing", id="smoothing-value"), class_="choice"),
        box("checkbox", "Log scale", "choice", id="log"),
        box("checkbox", "Incidents and checkpoints", "choice", id="marks", checked=True)
        if any(one["marks"] for one in data)
        else "",
        box("checkbox", "Drag to zoom", "choice touch", id="drag"),
        tag("button", "Reset zoom", type="button", id="reset"),
    ]
    bar = tag("div", *controls, class_="controls", role="group", aria_label="Controls of the curves")
    toggles = [
        tag(
            "label",
            tag("input", type="checkbox", data_show=index, checked=True, autocomplete="off"),
            tag("i", class_="line", data_line=index),
            tag("span", run.name),
        )
        for index, run in enumerate(runs)
    ]
    shown = tag("div", *toggles, class_="runs", role="group", aria_label="Runs in the curves") if len(runs) > 1 else ""
    return tag("div", bar, shown, class_="bar js")


def _curve(name: str, runs: list[ReportedRun], over: str | None) -> Html:
    plain = name.removeprefix("eval:").replace("_", " ")
    if name.startswith("eval:"):
        title, unit, text = f"Evaluation: {plain}", "", "Measured on the evaluation data."
    else:
        title, unit, text = CHARTS["curves"].get(name, (plain, "", "A value that the run has logged."))
    figures = {run.name: one for run in runs if (one := _figures(run, name, is_short=len(runs) > 1))}
    last = "last: " + " · ".join(f"{run} {one}" for run, one in list(figures.items())[:6])
    line = last if len(runs) > 1 else "".join(figures.values())
    key = legend([("line-train", "training"), ("line-eval", "evaluation")]) if over else ""
    label = f"Line chart of {title} by step. " + " ".join(f"{run}: {one}." for run, one in figures.items())
    return chart("curve", title, text, label[:600], key=key, figures=line, data={"key": name, "unit": unit, "over": over})


def _figures(run: ReportedRun, name: str, is_short: bool) -> str:
    steps, _, values = series(run, name)
    usable = np.isfinite(values)
    steps, values = steps[usable], values[usable]
    if not len(values):
        return ""
    show = lambda value: percent(value) if name == "mfu" else brief(float(value))
    at = lambda i: f"{show(values[i])} (step\u00a0{steps[i]:,.0f})"
    last = show(values[-1])
    return last if is_short else f"last {last} · min {at(int(values.argmin()))} · max {at(int(values.argmax()))}"


def time_of_ranks(run: ReportedRun, data: dict[str, Any], index: int, level: int, prefix: str) -> Html:
    ranks = data["ranks"]
    if not ranks:
        return Html()
    parts = {part: WAITING.get(part, part) for part in PARTS if part in ranks["average"]}
    key = legend((f"part-{part}", text) for part, text in parts.items())
    seconds = {part: float(np.nanmean(np.array(run.summary["seconds_per_rank"][part], float))) for part in parts}
    whole = sum(seconds.values()) or 1.0
    shares = ", ".join(f"{text} {percent(seconds[part] / whole)}" for part, text in parts.items())
    sentence = f"An average step, without the first logged ones, takes {duration(whole)}: {shares}."
    common = {"level": level + 1, "wide": True, "data": {"run": index}}
    views, count = ranks["views"], run.ranks.num_ranks
    text = CHARTS["ranks"]["time"]
    text += f" The list has the {len(views) - 1} slowest of {count:,} ranks." if 1 < len(views) <= count else ""
    label = f"Stacked areas of the parts of a step over the run. {sentence}"
    above = choice("Show", [(str(i), view["name"]) for i, view in enumerate(views)], view=index) if len(views) > 1 else ""
    cards = [chart("time", "Time of a step, over the run", text, label, above=above, key=key, **common)]
    if count > 1:
        rows = len(ranks["rows"])
        groups = "group of ranks" if ranks["rows"][0].startswith("ranks ") else "node"
        row = "rank" if rows == count else groups
        text = CHARTS["ranks"]["average"]
        text += f" A bar is the mean of the ranks of a {row}." if row != "rank" else ""
        label = f"Stacked bars of the parts of an average step for each {row}."
        cards.append(chart("average", f"Average step of each {row}", text, label, key=key, **common))
        text = CHARTS["ranks"]["heat"]
        text += " A row shows its slowest rank." if row != "rank" else ""
        averaged = f" One column is the mean of {counted(ranks['per_column'], 'logged interval')}."
        text += averaged if ranks["per_column"] > 1 else ""
        label = "Heat map of the own time of each rank relative to the median. The table below lists the slowest ranks."
        height = min(620, max(190, 110 + rows * (4 if rows > 48 else 20)))
        cards.append(chart("heat", "Stragglers", text, label, height=height, **common))
    grid = tag("div", *cards, class_="grid")
    return section("time", "Where the time goes", tag("p", sentence), grid, _slowest(run, level), level=level, prefix=prefix)


def _slowest(run: ReportedRun, level: int) -> Html:
    count = run.ranks.num_ranks
    if count < 2:
        return Html()
    averages = {part: np.array(values, float) for part, values in run.summary.get("seconds_per_rank", {}).items()}
    own = np.array(sum(values for part, values in averages.items() if part != "communication"))
    waits = averages.get("communication", np.zeros(count))
    relative = slowness(own[None])[0]
    relation = lambda value: ("+" if value > 0 else "") + percent(value)
    rows = [
        [rank_name(run, rank), figure(own[rank], duration), figure(relative[rank], relation), figure(waits[rank], duration)]
        for rank in np.argsort(-np.nan_to_num(own), kind="stable")[:10].tolist()
    ]
    title = f"The {len(rows)} slowest of {count:,} ranks" if len(rows) < count else "Own time of the ranks"
    shown = table(["rank", "own time per step", "relative to the median", "waits for others"], rows, f"{title}, on average")
    return join([tag(f"h{level + 1}", title), shown])


def load_of_nodes(data: dict[str, Any], index: int, level: int, prefix: str) -> Html:
    cards, names = [], []
    for name, (title, unit, text, _) in CHARTS["system"].items():
        if name not in data["system"]:
            continue
        nodes = data["system"][name]["lines"]
        names = max(names, [node["name"] for node in nodes], key=len)
        top = {node["name"]: max(known) for node in nodes if (known := [y for y in node["y"] if y == y])}
        high, low = max(top, key=top.__getitem__), min(top, key=top.__getitem__)
        figures = f"at most {brief(top[high])} {unit}" + (f" on {high}" if len(top) > 1 else "")
        figures += f" · {brief(top[low])} {unit} on {low}" if top[low] < top[high] else ""
        label = f"Line chart of {title} of each node: {figures}."[:600]
        values = {"run": index, "key": name, "unit": unit}
        cards.append(chart("system", title, text, label, figures=figures, level=level + 1, data=values))
    grid = tag("div", *cards, class_="grid") if cards else ""
    lines = [tag("li", tag("i", class_="line", data_line=i), tag("span", name)) for i, name in enumerate(names)]
    key = tag("ul", *lines, class_="legend js") if len(lines) > 1 else ""  # page.js draws the lines
    return section("hardware", "Load of the nodes", key, grid, level=level, prefix=prefix)


# ---- evaluations: their metrics, scores of classes, confusion matrices, predictions

LISTED = 30  # evaluations in the table
COLUMNS = 40  # metrics in the table
CLASSES = 50  # of a confusion matrix
COMPACT = 16  # classes; the cells of a matrix with more are smaller
PREDICTIONS = 300
LONG = 40  # characters of a text that needs a wide column
SCATTER_POINTS = 1000  # of a chart of true and predicted numbers
SHADES = 8  # of a confusion matrix, as page.css defines them
_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}")
_LONGEST_IMAGE = 100_000  # characters

Rows = list[list[Any]]


def evaluations(run: ReportedRun, index: int, level: int, prefix: str) -> Html:
    steps, best, blocks = sorted(run.tables), run.summary.get("best") or {}, []
    # Without --keep_best it is the loss, whatever --best_metric is.
    mark = f"best {best.get('metric', '')}".replace("_", " ").strip()
    for step in steps:
        shown = [_table(name, one, level + 1) for name, one in run.tables[step].items() if one.get("rows")]
        title = tag(f"h{level + 1}", f"Tables of step {step:,}", class_="no-js") if len(steps) > 1 else ""
        blocks.append(tag("div", title, *shown, class_="step", data_step=step, data_of=index))
    names = {step: f"step {step:,}" + (f" ({mark})" if step == best.get("step") else "") for step in steps}
    chosen = choice("Tables of", [(str(step), names[step]) for step in reversed(steps)], tables=index) if len(steps) > 1 else ""
    picker = tag("div", chosen, class_="js") if chosen else ""
    return section(
        "evaluations", "Evaluations", _metrics(run, best.get("step"), mark), picker, *blocks, level=level, prefix=prefix
    )


def _metrics(run: ReportedRun, best: int | None, mark: str) -> Html:
    """Return a table with a row for each evaluation, or for some of them if there are many. The newest is the first."""
    names = metric_names(run)[:COLUMNS]
    if not names:
        return Html()
    known = run.evaluations
    kept = set(np.linspace(0, len(known) - 1, min(len(known), LISTED)).astype(int).tolist())
    label = tag("span", mark, class_="tag")
    rows = [
        [join([f"{one['step']:,}", label if one["step"] == best else ""]), *(one.get(name) for name in names)]
        for i, one in reversed(list(enumerate(known)))
        if i in kept or one["step"] == best
    ]
    text = f"{len(rows)} of {len(known):,} evaluations are shown. log.jsonl contains all of them."
    shown = table(["step", *(name.replace("_", " ") for name in names)], rows, "Metrics of the evaluations, the newest first")
    return join([shown, note(text) if len(rows) < len(known) else ""])


def _table(name: str, one: dict[str, Any], level: int) -> Html:
    title = str(one.get("title") or name.replace("_", " ").capitalize())
    show = {"matrix": _matrix, "predictions": _predictions, "points": _points}.get(str(one.get("kind")))
    if show:
        return show(one["columns"], one["rows"], title, level)
    return join([tag(f"h{level}", title), table(one["columns"], one["rows"], title, class_="sortable")])


def _matrix(columns: list[str], rows: Rows, title: str, level: int) -> Html:
    """Return a confusion matrix as a table with colored cells, which is readable without scripts and for screen readers."""
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
    body = []
    for i, (name, line) in enumerate(zip(heads, zip(counts.tolist(), shares.tolist()))):
        cells = [_count(*pair, i == j) for j, pair in enumerate(zip(*line))]
        body.append(tag("tr", tag("th", tag("span", name), scope="row", title=name), *cells))
    text = "Rows are true classes, columns are predicted ones. The framed diagonal is correct. The color is the share of the row."
    switch = tag("input", type="checkbox", data_percent=True, autocomplete="off")
    percent = tag("label", switch, tag("span", "Percent of each row"), class_="choice js")
    class_ = "matrix compact" if len(names) > COMPACT else "matrix"
    shown = scroll(title, tag("thead", head), tag("tbody", *body), class_=class_)
    return tag("div", tag(f"h{level}", title), note(text), fewer, percent, shown, class_="confusion")


def _count(count: float, share: float, is_correct: bool) -> Html:
    shade = min(SHADES - 1, math.ceil(math.sqrt(share) * (SHADES - 1)))  # the root distinguishes rare errors
    text = "·" if not count else f"{count / 1000:.0f}k" if count >= 10_000 else f"{count:,.0f}"
    class_ = f"q{shade} d" if is_correct else f"q{shade}"
    return Html(f'<td class="{class_}" data-p="{100 * share:.0f}%">{text}</td>')


def _predictions(columns: list[str], rows: Rows, title: str, level: int) -> Html:
    at = columns.index("group") if "group" in columns else None
    shown = rows[:PREDICTIONS]
    groups = [str(row[at]) for row in shown] if at is not None else [None] * len(shown)
    body = [tag("tr", *map(_prediction, row), data_group=group) for row, group in zip(shown, groups)]
    names = [name for name in dict.fromkeys(groups) if name is not None]
    options = [("", f"all {len(shown):,}"), *((name, f"{name} ({groups.count(name):,})") for name in names)]
    picker = tag("div", choice("Show", options, filter=True), class_="js") if len(names) > 1 else ""
    head = tag("tr", *(tag("th", one, scope="col") for one in columns))
    fewer = note(f"{len(shown):,} of {len(rows):,} predictions are shown.") if len(rows) > len(shown) else ""
    grid = scroll(title, tag("thead", head), tag("tbody", *body), class_="texts")
    return tag("div", tag(f"h{level}", title), picker, grid, fewer, class_="predictions")


def _prediction(value: Any) -> Html:
    """Return a cell. Numbers are aligned, long text has a wide column, and images are shown in formats that have no scripts."""
    if isinstance(value, str) and len(value) <= _LONGEST_IMAGE and _IMAGE.fullmatch(value):
        return tag("td", Html(f'<img src="{value}" alt="input of the model" loading="lazy">'), class_="long")
    kind = "n" if is_number(value) else "long" if isinstance(value, str) and len(value) > LONG else None
    return tag("td", cell(value), class_=kind)


def _points(columns: list[str], rows: Rows, title: str, level: int) -> Html:
    known = np.array([row[:2] for row in rows if len(row) > 1 and is_number(row[0]) and is_number(row[1])], float)
    if not len(known):
        return Html()
    error = float(np.abs(known[:, 1] - known[:, 0]).mean())
    known = known[np.argsort(known[:, 0], kind="stable")]
    known = known[downsample(known[:, 1], SCATTER_POINTS)]
    values = ";".join(" ".join(f"{value:.5g}" for value in column) for column in known.T)
    figures = f"mean absolute error {brief(error)}"
    data = {"values": values, "x": columns[0], "y": columns[1]}
    label = f"Scatter chart of {columns[0]} and {columns[1]}, {figures}."
    text = "Each point is an item. On the dashed line the prediction is correct."
    return tag("div", chart("points", title, text, label, figures=figures, level=level, data=data), class_="grid")
