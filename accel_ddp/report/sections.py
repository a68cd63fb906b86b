"""The sections without charts: key figures, comparison of runs, incidents, checkpoints, profile, configuration."""

import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from accel_ddp.report.cards import (
    TIMES,
    brief,
    duration,
    facts,
    figure,
    fold,
    moment,
    note,
    number,
    percent,
    section,
    table,
    tile,
)
from accel_ddp.report.chart_data import metric_names, places
from accel_ddp.report.markup import Html, join, tag
from accel_ddp.report.run_data import ReportedRun, dict_of, is_number, list_of
from accel_ddp.text import counted, format_bytes

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
SEVERITY = {"error": 0, "warning": 1, "info": 2}
INCIDENTS = 300
CHECKPOINTS = 200
OPERATIONS = 15  # of a profile


def state_of(run: ReportedRun) -> str:
    if run.state != "interrupted":
        return run.state
    last = next((one for one in reversed(run.incidents) if one.get("level") == "error" or one.get("kind") == "RESTART"), {})
    return "failed" if last.get("level") == "error" else "interrupted"


def badge(run: ReportedRun) -> Html:
    state = state_of(run)
    return tag("span", tag("span", SYMBOLS[state], aria_hidden="true"), f" {state}", class_=f"state {state}")


def title(run: ReportedRun, level: int = 1) -> Html:
    began, command = run.summary.get("began"), run.start.get("launcher") or run.start.get("command")
    facts = [f"Began {moment(began)}"] if is_number(began) else []
    words = shlex.join(map(str, command)) if isinstance(command, list) else ""
    last = next((str(one["text"]) for one in reversed(run.incidents) if one.get("level") == "error"), "")
    return join([
        tag("div", tag(f"h{level}", run.name), badge(run), class_="title"),
        tag("p", join([*facts, tag("code", run.folder)], " · "), class_="subtitle"),
        tag("p", tag("code", words[:400]), class_="subtitle") if words else "",
        tag("p", last[:500], class_="reason") if last and state_of(run) == "failed" else "",
        *map(note, run.notes),
    ])  # fmt: skip


def key_figures(run: ReportedRun, prefix: str = "") -> Html:
    """Return the tiles of a run. A figure that is not known has no tile."""
    summary = run.summary
    best, total, samples, ranks = (summary.get(name) for name in ("best", "total_steps", "samples", "ranks"))
    remarks = [*([f"of {total:,}"] if total else []), *([f"{samples:,} samples"] if samples else [])]
    found = [tile("Steps", f"{summary.get('steps') or 0:,}", ", ".join(remarks))]
    if is_number(seconds := summary.get("wall_seconds")):
        attempts = summary.get("attempts") or 1
        found.append(tile("Wall time", duration(seconds), f"{attempts} attempts" if attempts > 1 else ""))
    if best and is_number(best["value"]):
        name = str(best["metric"]).replace("_", " ")
        found.append(tile(f"Best {name}", number(best["value"]), f"step {number(best['step'])}", f"#{prefix}evaluations"))
    for name, label, form, remark in (
        ("samples_per_second", "Speed", _rate, "samples/s on average"),
        ("tokens_per_second", "Tokens", _rate, "tokens/s on average"),
        ("mfu", "MFU", percent, "of the peak of the GPUs"),
        ("goodput", "Goodput", percent, "of the time trained new steps"),
    ):
        if is_number(value := summary.get(name)):
            found.append(tile(label, form(value), remark))
    if parts := {part: value for part, value in (summary.get("seconds_per_step") or {}).items() if is_number(value)}:
        waiting = (parts.get("communication", 0.0) + parts.get("data", 0.0)) / (sum(parts.values()) or 1.0)
        found.append(tile("Waiting", percent(waiting), "of a step, for data and ranks", f"#{prefix}time"))
    if ranks:
        device = next((str(one.get("device", "")) for one in places(run).values()), "CPU")
        noun, where = "CPU rank" if device == "CPU" else "GPU", f"on {counted(summary.get('nodes') or 1, 'node')}"
        remark = where if device == "CPU" else f"{where}, {device}"
        found.append(tile("Cluster", counted(ranks, noun), remark, f"#{prefix}configuration"))
    if levels := [one.get("level") for one in run.incidents]:
        counts = [counted(levels.count(level), level) for level in ("error", "warning") if level in levels]
        found.append(tile("Incidents", f"{len(levels):,}", ", ".join(counts) or "information only", f"#{prefix}incidents"))
    return tag("dl", *found, class_="tiles")


def comparison(runs: list[ReportedRun]) -> Html:
    of = lambda name, form: [figure(run.summary.get(name), form) for run in runs]
    last = lambda name: [figure((run.summary.get("last_evaluation") or {}).get(name), number) for run in runs]
    best = lambda one: f"{one['metric']} {number(one['value'])} (step {number(one['step'])})" if one else None
    metrics = dict.fromkeys(name for run in runs for name in metric_names(run))
    rows = [
        ["state", *map(badge, runs)],
        ["steps", *of("steps", number)],
        ["wall time", *of("wall_seconds", duration)],
        ["samples/s", *of("samples_per_second", _rate)],
        ["tokens/s", *of("tokens_per_second", _rate)],
        ["MFU", *of("mfu", percent)],
        ["goodput", *of("goodput", percent)],
        ["best metric", *(best(run.summary.get("best")) for run in runs)],
        *([f"last {name.replace('_', ' ')}", *last(name)] for name in metrics),
        ["incidents", *(number(len(run.incidents)) for run in runs)],
    ]
    names = [run.name for run in runs]
    figures = table(["figure", *names], [row for row in rows if any(row[1:])], "Final figures of the runs")
    other = [[name, kind, *map(_value, values)] for kind, name, values in differences(runs)]
    text = note("What is not the same in all runs. A dash means that a run does not have the value.")
    changed = join([text, table(["name", "kind", *names], other, "Differences between the runs")]) if other else ""
    return join([section("comparison", "Comparison", figures), section("differences", "Differences", changed)])


def _rate(value: float) -> str:
    return number(round(value)) if value >= 100 else brief(value)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_value(one)}" for name, one in list(value.items())[:40])
    if isinstance(value, list):
        return ", ".join(map(_value, value[:40]))
    return brief(value) if isinstance(value, float) else "empty" if value == "" else number(value)


def incidents(run: ReportedRun, level: int, prefix: str) -> Html:
    severity = lambda i: (SEVERITY.get(str(run.incidents[i].get("level")), 2), i)
    chosen = sorted(sorted(range(len(run.incidents)), key=severity)[:INCIDENTS])
    first, items = run.summary.get("began") or 0.0, []
    for one in (run.incidents[i] for i in chosen):
        name = one["level"] if one.get("level") in SEVERITY else "info"
        when = f"after {duration(max(0.0, one['time'] - first))}" if is_number(one.get("time")) else ""
        step = f"step {number(one['step'])}" if one.get("step") is not None else ""
        rank = f"rank {one['rank']}" if one.get("rank") is not None else ""
        place = " · ".join(part for part in (step, when, rank, str(one.get("host") or "")) if part)
        text = tag("div", tag("p", str(one.get("text") or "")[:2000]), tag("p", place, class_="meta"))
        kind = tag("span", str(one.get("kind") or "").replace("_", " ").lower(), class_="kind")
        items.append(tag("li", tag("span", name, class_=f"level {name}"), text, kind))
    text = f"The {len(items)} most severe of {len(run.incidents):,} incidents are shown."
    shown = tag("ol", *items, class_="incidents", tabindex="0", aria_label="Incidents") if items else ""
    fewer = note(text) if len(items) < len(run.incidents) else ""
    return section("incidents", "Incidents", shown, fewer, level=level, prefix=prefix)


def checkpoints(run: ReportedRun, level: int, prefix: str) -> Html:
    first, there = run.summary.get("began") or 0.0, [one for one in run.checkpoints if one.get("exists")]
    rows = [
        [
            join([f"{one['step']:,}", tag("span", "best", class_="tag") if one.get("is_best") else ""]),
            figure(one.get("time"), lambda time: duration(max(0.0, time - first))),
            figure(one.get("bytes"), format_bytes),
            tag("code", one.get("path")),
        ]
        for one in reversed(there[-CHECKPOINTS:])
    ]
    shown = table(["step", "saved after", "size", "folder"], rows, "Checkpoints, the newest first") if rows else ""
    removed = len(run.checkpoints) - len(there)
    texts = [f"The last {len(rows)} of {len(there):,} checkpoints are shown."] if len(rows) < len(there) else []
    verb = "is" if removed == 1 else "are"
    texts += [f"{counted(removed, 'older checkpoint')} of this run {verb} no longer on the disk."] if removed else []
    return section("checkpoints", "Checkpoints", shown, *map(note, texts), level=level, prefix=prefix)


def profile(run: ReportedRun, level: int, prefix: str) -> Html:
    found = run.profile or {}
    overall, of_run = dict_of(found.get("overall")), dict_of(found.get("run"))
    step = overall.get("step_seconds")
    parts = {"computation": "computation", "communication": "communication", "overlapped": "of it during computation",
             "exposed": "of it not during computation"}  # fmt: skip
    pairs = [("steps", _value(of_run["steps"]).replace(", ", " to "))] if of_run.get("steps") else []
    pairs += [("duration of a step", duration(step))] if is_number(step) else []
    for name, text in parts.items():
        if is_number(value := overall.get(name)):
            share = f", {percent(value / step)} of a step" if is_number(step) and step else ""
            pairs.append((text, duration(value) + share))
    advice = [one.get("text") if isinstance(one, dict) else one for one in list_of(found.get("recommendations"))]
    texts = [*list_of(found.get("findings")), *advice]
    forms = {"seconds": duration, "share": percent, "count": brief}
    rows = [
        [one.get("name"), *(figure(one.get(key), form) for key, form in forms.items())]
        for one in list_of(found.get("operations"))[:OPERATIONS]
        if isinstance(one, dict)
    ]
    blocks = [facts(pairs)]
    if texts:
        listed = tag("ul", *(tag("li", str(one)[:2000]) for one in texts), class_="texts")
        blocks += [tag(f"h{level + 1}", "Findings and recommendations"), listed]
    if rows:
        columns, title = ["operation", "time per step", "share", "count per step"], "Largest operations"
        blocks += [tag(f"h{level + 1}", title), table(columns, rows, title)]
    return section("profile", "Profile", *blocks, level=level, prefix=prefix)


def configuration(run: ReportedRun, level: int, prefix: str) -> Html:
    start = run.start
    read = lambda name: dict_of(start.get(name))
    options = [
        [tag("code", f"--{name}"), _value(value[0]), _value(value[1])]
        for name, value in read("options").items()
        if isinstance(value, list) and len(value) == 2
    ]
    batch, pairs = read("batch"), []
    if batch:
        of, ranks = (lambda name: number(batch.get(name))), counted(run.summary.get("ranks") or 1, "rank")
        text = f"{of('global')} = micro-batch {of('micro')} {TIMES} accumulation {of('accumulation')} {TIMES} {ranks}"
        pairs.append(("global batch size", text))
    pairs += [("items in the training data", start["items"])] if start.get("items") is not None else []
    pairs += [("mixed precision", start["precision"])] if start.get("precision") else []
    pairs += [("sharding", read("sharding")["text"])] if read("sharding").get("text") else []
    nodes = _cluster(run)
    title = "Options that differ from the defaults"
    listed = join([tag(f"h{level + 1}", title), table(["option", "value", "default"], options, title)]) if options else ""
    texts = lambda values: facts((name, _value(value)) for name, value in values.items())
    why = lambda name: f" ({run.chosen[name]})" if name in run.chosen else ""
    return section(
        "configuration",
        "Configuration",
        join([tag(f"h{level + 1}", "Cluster"), nodes]) if nodes else "",
        facts(pairs),
        listed,
        fold("All options", facts((f"--{name}", _value(value) + why(name)) for name, value in run.options.items())),
        fold("Versions", texts(read("versions"))),
        fold("Environment variables", texts(read("environment"))),
        level=level,
        prefix=prefix,
    )


def _cluster(run: ReportedRun) -> Html:
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
    return table(columns[:width], [row[:width] for row in rows], "Nodes of the run") if rows else Html()
