"""What page.jinja shows about runs: key figures, curves, comparison, and the sections of one run."""

import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from accel_ddp.report.cards import TIMES, brief, cell, duration, figure, number, percent, plain, rate, table, tagged
from accel_ddp.report.chart_data import CHARTS, POINTS, downsample, metric_names, places, rank_name, series, slowness
from accel_ddp.report.run_data import PARTS, ReportedRun, dict_of, is_number, list_of
from accel_ddp.text import counted, format_bytes

View = dict[str, Any]

_OF_THE_FOLDER = ("output_dir", "run_name")  # they differ in every run, and the name shows it


def unique_names(folders: list[Path]) -> list[str]:
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    names = []
    for own in parts:
        ends = range(1, len(own))
        length = next((n for n in ends if sum(other[-n:] == own[-n:] for other in parts) == 1), len(own))
        names.append("/".join(own[-length:]).replace("//", "/"))
    return names


def differences(runs: list[ReportedRun]) -> list[tuple[str, str, list[Any]]]:
    """Return (section, name, value of each run) for what differs between runs. None: the run does not have the value.

    An option that a run does not have, because its version is older, is no difference if the other runs use the default.
    """
    found = []
    described = [_describe(run) for run in runs]
    changed = {name for run in runs for name in dict_of(run.start.get("options"))}
    for part in ("options", "data", "cluster", "versions", "environment"):
        for name in dict.fromkeys(name for one in described for name in one[part]):
            values = [one[part].get(name) for one in described]
            if part == "options" and None in values and name not in changed and all("options" in run.start for run in runs):
                continue
            if any(value != values[0] for value in values[1:]):
                found.append((part, name, values))
    return found


def _describe(run: ReportedRun) -> dict[str, dict[str, Any]]:
    start = run.start
    options = run.options or {
        name: value[0] for name, value in dict_of(start.get("options")).items() if isinstance(value, list) and value
    }
    ranks = [one for one in list_of(start.get("ranks")) if isinstance(one, dict)]
    devices = Counter(str(one.get("device")) for one in ranks)
    cluster = {
        "ranks": run.summary.get("ranks"),
        "nodes": run.summary.get("nodes"),
        "hosts": ", ".join(dict.fromkeys(str(one.get("host")) for one in ranks)) or None,
        "devices": ", ".join(f"{count} x {name}" for name, count in devices.items()) or None,
        "precision": start.get("precision"),
        "sharding": dict_of(start.get("sharding")).get("text"),
        "micro-batch": dict_of(start.get("batch")).get("micro"),
        "accumulation": dict_of(start.get("batch")).get("accumulation"),
    }
    return {
        "options": {name: value for name, value in options.items() if name not in _OF_THE_FOLDER},
        "data": {"items": start.get("items"), "total_steps": start.get("total_steps")},
        "cluster": cluster,
        "versions": dict_of(start.get("versions")),
        "environment": dict_of(start.get("environment")),
    }


SYMBOLS = {"complete": "✓", "stopped": "■", "failed": "✕", "running": "▶", "interrupted": "■"}
INCIDENTS = 300
CHECKPOINTS = 200
OPERATIONS = 15  # of a profile


def run_view(run: ReportedRun, data: View, index: int, prefix: str) -> View:
    """Return what the page shows about one run and must be computed first."""
    shown = {"time": time_of_ranks(run, data, index), "load": load_of_nodes(data, index), **evaluations(run)}
    return {"run": run, "index": index, "prefix": prefix, "cluster": cluster(run), **shown}


def state_of(run: ReportedRun) -> str:
    if run.state != "interrupted":
        return run.state
    last = next((one for one in reversed(run.incidents) if one.get("level") == "error" or one.get("kind") == "RESTART"), {})
    return "failed" if last.get("level") == "error" else "interrupted"


def badge(run: ReportedRun) -> Markup:
    state = state_of(run)
    return Markup('<span class="state {0}"><span aria-hidden="true">{1}</span> {0}</span>').format(state, SYMBOLS[state])


def last_error(run: ReportedRun) -> str:
    last = next((str(one["text"]) for one in reversed(run.incidents) if one.get("level") == "error"), "")
    return last[:500] if state_of(run) == "failed" else ""


def worst_incidents(run: ReportedRun) -> list[View]:
    severity = lambda i: ({"error": 0, "warning": 1}.get(str(run.incidents[i].get("level")), 2), i)
    return [run.incidents[i] for i in sorted(sorted(range(len(run.incidents)), key=severity)[:INCIDENTS])]


def comparison(runs: list[ReportedRun]) -> View:
    of = lambda name, form: [figure(run.summary.get(name), form) for run in runs]
    last = lambda name: [figure((run.summary.get("last_evaluation") or {}).get(name), number) for run in runs]
    best = lambda one: f"{one['metric']} {number(one['value'])} (step {number(one['step'])})" if one else None
    metrics = dict.fromkeys(name for run in runs for name in metric_names(run))
    rows = [
        ["state", *map(badge, runs)],
        ["steps", *of("steps", number)],
        ["wall time", *of("wall_seconds", duration)],
        ["samples/s", *of("samples_per_second", rate)],
        ["tokens/s", *of("tokens_per_second", rate)],
        ["MFU", *of("mfu", percent)],
        ["goodput", *of("goodput", percent)],
        ["best metric", *(best(run.summary.get("best")) for run in runs)],
        *([f"last {name.replace('_', ' ')}", *last(name)] for name in metrics),
        ["incidents", *(number(len(run.incidents)) for run in runs)],
    ]
    names = [run.name for run in runs]
    figures = table(["figure", *names], [row for row in rows if any(row[1:])], "Final figures of the runs")
    other = [[name, kind, *map(plain, values)] for kind, name, values in differences(runs)]
    changed = table(["name", "kind", *names], other, "Differences between the runs") if other else None
    return {"comparison": figures, "differences": changed}


def cluster(run: ReportedRun) -> View | None:
    nodes: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for place in places(run).values():
        nodes.setdefault((str(place.get("node", 0)), str(place.get("host", ""))), []).append(place)
    rows = []
    for (node, host), members in nodes.items():
        devices = [str(one.get("device", "")) for one in members]
        kinds = ", ".join(f"{devices.count(kind)} {TIMES} {kind}" for kind in dict.fromkeys(devices))
        ranks = sorted(one["rank"] for one in members)
        is_range = len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1
        memory = max((one["memory"] for one in members if is_number(one.get("memory"))), default=None)
        listed = f"{ranks[0]} to {ranks[-1]}" if is_range else ", ".join(map(str, ranks))
        rows.append([f"node {node}", host, listed, kinds, figure(memory, format_bytes)])
    width = 5 if any(row[4] for row in rows) else 4
    columns = ["node", "host", "ranks", "devices", "memory of a GPU"]
    return table(columns[:width], [row[:width] for row in rows], "Nodes of the run") if rows else None


# ---- charts: curves, where the time goes, the load of the nodes

WAITING = {"data": "waiting for data", "communication": "waiting for other ranks"}  # other parts have their own names
MARK_NAMES = {"error": "error", "warning": "warning", "info": "information", "save": "checkpoint"}


def curves(runs: list[ReportedRun], data: list[View]) -> View:
    names = list(dict.fromkeys(name for one in data for name in one["curves"]))
    over = "eval:loss" if {"loss", "eval:loss"} <= set(names) else None  # drawn into the chart of the training loss
    longest = max((len(run.updates.get("step", ())) for run in runs), default=0)
    reduced = f"Each curve has about {POINTS:,} points, which include its extremes. log.jsonl contains all steps."
    levels = {mark["level"] for one in data for mark in one["marks"]}
    return {
        "cards": [_curve(name, runs, over if name == "loss" else None) for name in names if name != over],
        "axes": ["Step", "Time", *(["Samples"] if all(one["batch"] for one in data) else [])],
        "marks": [(f"mark {level}", text) for level, text in MARK_NAMES.items() if level in levels],
        "has_marks": any(one["marks"] for one in data),
        "reduced": reduced if longest > POINTS else "",
    }


def _curve(name: str, runs: list[ReportedRun], over: str | None) -> View:
    words = name.removeprefix("eval:").replace("_", " ")
    if name.startswith("eval:"):
        title, unit, text = f"Evaluation: {words}", "", "Measured on the evaluation data."
    else:
        title, unit, text = CHARTS["curves"].get(name, (words, "", "A value that the run has logged."))
    figures = {run.name: one for run in runs if (one := _figures(run, name, is_short=len(runs) > 1))}
    last = "last: " + " · ".join(f"{run} {one}" for run, one in list(figures.items())[:6])
    line = last if len(runs) > 1 else "".join(figures.values())
    key = [("line-train", "training"), ("line-eval", "evaluation")] if over else []
    label = f"Line chart of {title} by step. " + " ".join(f"{run}: {one}." for run, one in figures.items())
    return {
        "kind": "curve", "title": title, "text": text, "label": label[:600], "key": key, "figures": line,
        "data": {"key": name, "unit": unit, "over": over},
    }  # fmt: skip


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


def time_of_ranks(run: ReportedRun, data: View, index: int) -> View | None:
    ranks = data["ranks"]
    if not ranks:
        return None
    parts = {part: WAITING.get(part, part) for part in PARTS if part in ranks["average"]}
    seconds = {part: float(np.nanmean(np.array(run.summary["seconds_per_rank"][part], float))) for part in parts}
    whole = sum(seconds.values()) or 1.0
    shares = ", ".join(f"{text} {percent(seconds[part] / whole)}" for part, text in parts.items())
    sentence = f"An average step, without the first logged ones, takes {duration(whole)}: {shares}."
    cards: list[View] = []

    def add(kind: str, title: str, label: str, *more: str, **values: Any) -> None:
        text = "".join([CHARTS["ranks"][kind], *more])
        cards.append({"kind": kind, "title": title, "text": text, "label": label, "wide": True, "data": {"run": index}, **values})

    views, count, rows = ranks["views"], run.ranks.num_ranks, len(ranks["rows"])
    key = [(f"part-{part}", text) for part, text in parts.items()]
    fewer = f" The list has the {len(views) - 1} slowest of {count:,} ranks." if 1 < len(views) <= count else ""
    names = [(i, view["name"]) for i, view in enumerate(views)] if len(views) > 1 else []
    label = f"Stacked areas of the parts of a step over the run. {sentence}"
    add("time", "Time of a step, over the run", label, fewer, views=names, key=key)
    if count > 1:
        groups = "group of ranks" if ranks["rows"][0].startswith("ranks ") else "node"
        row = "rank" if rows == count else groups
        mean = f" A bar is the mean of the ranks of a {row}." if row != "rank" else ""
        label = f"Stacked bars of the parts of an average step for each {row}."
        add("average", f"Average step of each {row}", label, mean, key=key)
        slowest = " A row shows its slowest rank." if row != "rank" else ""
        averaged = f" One column is the mean of {counted(ranks['per_column'], 'logged interval')}."
        label = "Heat map of the own time of each rank relative to the median. The table below lists the slowest ranks."
        height = min(620, max(190, 110 + rows * (4 if rows > 48 else 20)))
        add("heat", "Stragglers", label, slowest, averaged if ranks["per_column"] > 1 else "", height=height)
    return {"sentence": sentence, "cards": cards, "slowest": _slowest(run)}


def _slowest(run: ReportedRun) -> View | None:
    count = run.ranks.num_ranks
    if count < 2:
        return None
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
    columns = ["rank", "own time per step", "relative to the median", "waits for others"]
    return {**table(columns, rows, f"{title}, on average"), "title": title}


def load_of_nodes(data: View, index: int) -> View:
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
        cards.append({
            "kind": "system", "title": title, "text": text, "label": label, "figures": figures,
            "data": {"run": index, "key": name, "unit": unit},
        })  # fmt: skip
    return {"cards": cards, "nodes": names}


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


def evaluations(run: ReportedRun) -> View:
    steps, best = sorted(run.tables), run.summary.get("best") or {}
    # Without --keep_best it is the loss, whatever --best_metric is.
    mark = f"best {best.get('metric', '')}".replace("_", " ").strip()
    name = lambda step: f"step {step:,}" + (f" ({mark})" if step == best.get("step") else "")
    shown = {step: [_table(*item) for item in run.tables[step].items() if item[1].get("rows")] for step in steps}
    return {
        "metrics": _metrics(run, best.get("step"), mark),
        "tables": list(shown.items()),
        "steps": [(step, name(step)) for step in reversed(steps)],
    }


def _metrics(run: ReportedRun, best: int | None, mark: str) -> View | None:
    """Return a table with a row for each evaluation, or for some of them if there are many. The newest is the first."""
    names, known = metric_names(run)[:COLUMNS], run.evaluations
    if not names:
        return None
    kept = set(np.linspace(0, len(known) - 1, min(len(known), LISTED)).astype(int).tolist())
    rows = [
        [tagged(one["step"], mark if one["step"] == best else ""), *(one.get(name) for name in names)]
        for i, one in reversed(list(enumerate(known)))
        if i in kept or one["step"] == best
    ]
    found = table(["step", *(name.replace("_", " ") for name in names)], rows, "Metrics of the evaluations, the newest first")
    text = f"{len(rows)} of {len(known):,} evaluations are shown. log.jsonl contains all of them."
    return found | ({"fewer": text} if len(rows) < len(known) else {})


def _table(name: str, one: View) -> View:
    """Return a table of an evaluation. `show` is how page.jinja shows it."""
    kind, columns, rows = str(one.get("kind")), one["columns"], one["rows"]
    make = {"matrix": _matrix, "predictions": _predictions, "points": _points}.get(kind)
    title = str(one.get("title") or name.replace("_", " ").capitalize())
    return {"caption": title, "show": kind, **make(columns, rows, title)} if make else table(columns, rows, title)


def _matrix(columns: list[str], rows: Rows, title: str) -> View:
    names, heads = columns[1:], [str(row[0]) for row in rows]
    counts = np.array([[float(one) if is_number(one) else 0.0 for one in row[1:]] for row in rows])
    fewer = ""
    if len(names) > CLASSES and len(rows) == len(names):
        errors = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
        kept = np.sort(np.argsort(-errors, kind="stable")[:CLASSES])
        fewer = f"The {CLASSES} of {len(names):,} classes with the most errors are shown."
        names, heads, counts = [names[i] for i in kept], [heads[i] for i in kept], counts[np.ix_(kept, kept)]
    sums = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, sums, out=np.zeros_like(counts), where=sums > 0)
    lines = enumerate(zip(counts.tolist(), shares.tolist()))
    cells = [[_count(*pair, i == j) for j, pair in enumerate(zip(*line))] for i, line in lines]
    class_ = "matrix compact" if len(names) > COMPACT else "matrix"
    return {"show": "matrix" if names else "", "names": names, "rows": list(zip(heads, cells)), "fewer": fewer, "class": class_}


def _count(count: float, share: float, is_correct: bool) -> tuple[str, str, str]:
    """Return the class of a cell, its percentage and its text."""
    shade = min(SHADES - 1, math.ceil(math.sqrt(share) * (SHADES - 1)))  # the root distinguishes rare errors
    text = "·" if not count else f"{count / 1000:.0f}k" if count >= 10_000 else f"{count:,.0f}"
    return f"q{shade} d" if is_correct else f"q{shade}", f"{100 * share:.0f}%", text


def _predictions(columns: list[str], rows: Rows, title: str) -> View:
    at = columns.index("group") if "group" in columns else None
    shown = rows[:PREDICTIONS]
    groups = [str(row[at]) for row in shown] if at is not None else [None] * len(shown)
    names = [name for name in dict.fromkeys(groups) if name is not None]
    options = [("", f"all {len(shown):,}"), *((name, f"{name} ({groups.count(name):,})") for name in names)]
    return {
        "columns": columns, "rows": [(group, list(map(_prediction, row))) for group, row in zip(groups, shown)],
        "groups": options if len(names) > 1 else [],
        "fewer": f"{len(shown):,} of {len(rows):,} predictions are shown." if len(rows) > len(shown) else "",
    }  # fmt: skip


def _prediction(value: Any) -> tuple[str, str | None]:
    """Return a cell and its class. Numbers are aligned, long text has a wide column, and images have no scripts."""
    if isinstance(value, str) and len(value) <= _LONGEST_IMAGE and _IMAGE.fullmatch(value):
        return Markup('<img src="{}" alt="input of the model" loading="lazy">').format(value), "long"
    return cell(value), "n" if is_number(value) else "long" if isinstance(value, str) and len(value) > LONG else None


def _points(columns: list[str], rows: Rows, title: str) -> View:
    known = np.array([row[:2] for row in rows if len(row) > 1 and is_number(row[0]) and is_number(row[1])], float)
    if not len(known):
        return {"show": ""}
    error = float(np.abs(known[:, 1] - known[:, 0]).mean())
    known = known[np.argsort(known[:, 0], kind="stable")]
    known = known[downsample(known[:, 1], SCATTER_POINTS)]
    values = ";".join(" ".join(f"{value:.5g}" for value in column) for column in known.T)
    figures = f"mean absolute error {brief(error)}"
    return {"chart": {
        "kind": "points", "title": title, "text": "Each point is an item. On the dashed line the prediction is correct.",
        "label": f"Scatter chart of {columns[0]} and {columns[1]}, {figures}.", "figures": figures,
        "data": {"values": values, "x": columns[0], "y": columns[1]},
    }}  # fmt: skip
