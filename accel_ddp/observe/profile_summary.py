"""The summary of a profile over all ranks: summary.json, and the text that is printed. docs/profile.md describes the fields."""

import argparse
import json
import shlex
from pathlib import Path
from statistics import fmean
from typing import Any

from accel_ddp.errors import UserError
from accel_ddp.observe import traces
from accel_ddp.observe.profile_advice import ms, recommend
from accel_ddp.records import run_log
from accel_ddp.records.files import replace_file

SCHEMA = 1
# The options that recommendations depend on.
OPTIONS = (
    "global_batch_size", "micro_batch_size", "bucket_cap_mb", "comm_hook", "num_workers", "compile", "padding_free", "pin_memory",
    "log_every", "gradient_checkpointing", "mixed_precision",
)  # fmt: skip
_UNEVEN = 0.1  # a rank that computes this much longer than the others is reported


def summarize(run: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of summary.json. `run` describes the run, and `ranks` has the analysis of each rank that was recorded."""
    overall = _overall(ranks)
    operations = _merge_operations([rank["operations"] for rank in ranks])
    recommendations = [one._asdict() for one in recommend(run, overall, operations)]
    return {
        "schema": SCHEMA, "run": run, "overall": overall, "operations": operations, "findings": _findings(ranks),
        "recommendations": recommendations, "ranks": ranks,
    }  # fmt: skip


def _mean(values: list[Any]) -> Any:
    """Return the mean of numbers, or of dictionaries field by field. Fields that a rank does not have count as 0."""
    if isinstance(values[0], dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _mean([value.get(name, 0.0) for value in values if isinstance(value, dict)]) for name in names}
    if any(isinstance(value, dict) for value in values):
        return _mean([value for value in values if isinstance(value, dict)])
    return round(fmean(values), 9)


def _overall(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of the ranks. `network` is what the rank that waits least waits: no other rank is the cause of it."""
    names = ("step_seconds", "computation", "communication", "communication_sum", "overlapped", "exposed", "collectives")
    found: dict[str, Any] = {"kind": ranks[0]["kind"], **{name: _mean([rank[name] for rank in ranks]) for name in names}}
    found["network"] = min(rank["exposed"] for rank in ranks)
    found["parts"] = _mean([rank["parts"] for rank in ranks])
    found["breakdown"] = _mean([rank["breakdown"] for rank in ranks])
    found["idle"] = found["copies"] = None
    if found["kind"] == "gpu":
        numbers = ("seconds", "gaps", "during", "host_late")
        found["idle"] = {name: _mean([rank["idle"][name] for rank in ranks]) for name in numbers}
        found["copies"] = _mean([rank["copies"] for rank in ranks])
    return found


def _merge_operations(lists: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for operations in lists:
        for one in operations:
            row = merged.setdefault(one["name"], {"name": one["name"], "seconds": 0.0, "count": 0.0, "share": 0.0})
            for name in ("seconds", "count", "share"):
                row[name] = round(row[name] + one[name] / len(lists), 9)
    return sorted(merged.values(), key=lambda one: -one["seconds"])[: max(map(len, lists))]


def _findings(ranks: list[dict[str, Any]]) -> list[str]:
    """Return what no option changes: a rank for which the others wait."""
    if len(ranks) < 2:
        return []
    slowest = max(ranks, key=lambda rank: rank["computation"])
    others = fmean(rank["computation"] for rank in ranks if rank is not slowest)
    waits = fmean(rank["exposed"] for rank in ranks if rank is not slowest) - slowest["exposed"]
    if slowest["computation"] < (1 + _UNEVEN) * others or waits < 0.02 * slowest["step_seconds"]:
        return []
    return [
        f"rank {slowest['rank']} ({slowest['host']}) computes {slowest['computation'] / others - 1:.0%} longer than the others, which "
        f"wait {ms(waits)} per step for it.".replace("%", " %")
    ]


# ---- files


def write(folder: Path, summary: dict[str, Any], text: str) -> None:
    (folder / traces.SUMMARY_TEXT).write_text(text + "\n")
    replace_file(folder / traces.SUMMARY, json.dumps(summary, indent=1) + "\n")


# ---- text


def format_text(summary: dict[str, Any], run_folder: str) -> str:
    run, overall = summary["run"], summary["overall"]
    first, last = run["steps"]
    steps = f"step {first}" if first == last else f"steps {first}-{last}"
    count, nodes, recorded = run["num_ranks"], run["num_nodes"], len(summary["ranks"])
    where = f"{recorded} of {count} ranks" if recorded < count else f"{count} rank{'s' * (count > 1)}"
    where += f" on {nodes} node{'s' * (nodes > 1)} ({run['device']})"
    lines = [f"profile of {steps}, {where}: {_ms(overall['step_seconds'])} per step", "", *_parts(overall)]
    if recorded > 1:
        lines += ["", *_table_of_ranks(summary["ranks"], overall["kind"])]
    lines += ["", *_operations(summary["operations"], overall["kind"])]
    if overall["kind"] == "gpu":
        lines += ["", *_gaps(summary["ranks"])]
    for finding in summary["findings"]:
        lines += ["", finding]
    lines += ["", *_recommendations(summary["recommendations"])]
    folder = Path(run_folder) / traces.FOLDER
    merged = folder / traces.MERGED
    accuracy = max(rank["clock"]["accuracy"] for rank in summary["ranks"]) / 1000
    clocks = f" Clocks of hosts are aligned to {accuracy:.3g} us." if accuracy else ""
    lines += [
        "",
        f"Open {merged} in https://ui.perfetto.dev.{clocks} Print this again: accel-ddp profile {shlex.quote(run_folder)}",
    ]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _row(name: str, seconds: float, step: float, more: str = "") -> str:
    return f"  {name:<28}{seconds * 1000:>10.2f} ms  {seconds / step:>6.1%}{'  ' + more if more else ''}".rstrip()


def _parts(overall: dict[str, Any]) -> list[str]:
    step, parts = overall["step_seconds"], overall["parts"]
    covered = overall["overlapped"] / overall["communication"] if overall["communication"] else 0.0
    more = f"{covered:.0%} of it overlaps with computation" if overall["communication"] else ""
    lines = ["per step, mean of the ranks", _row("computation", overall["computation"], step)]
    lines.append(_row("communication", overall["communication"], step, more))
    lines.append(_row("exposed communication", overall["exposed"], step))
    if overall["kind"] == "gpu":
        idle = overall["idle"]
        lines += [
            _row("memory copies", overall["copies"]["seconds"], step),
            _row("GPU idle", idle["seconds"], step, f"{idle['gaps']:.0f} gap{'s' * (round(idle['gaps']) != 1)} of 10 us or more"),
            _row("  the host waits for data", idle["during"]["data"], step),
            _row("  the host launches too late", idle["host_late"], step),
            "training thread of the host",
        ]
    lines += [_row("data wait" if name == "data" else name, seconds, step) for name, seconds in parts.items()]
    return lines


def _table_of_ranks(ranks: list[dict[str, Any]], kind: str) -> list[str]:
    width = max(len(f"{rank['rank']} ({rank['host']})") for rank in ranks)
    heads = ["step", "computation", "communication", "exposed", "data", *(["idle"] if kind == "gpu" else [])]
    lines = [f"{'rank':<{width}}" + "".join(f"{head:>15}" for head in heads) + "   (ms)"]
    for rank in ranks:
        data = rank["idle"]["during"]["data"] if kind == "gpu" else rank["parts"]["data"]
        values = [rank["step_seconds"], rank["computation"], rank["communication"], rank["exposed"], data]
        values += [rank["idle"]["seconds"]] if kind == "gpu" else []
        name = f"{rank['rank']} ({rank['host']})"
        lines.append(f"{name:<{width}}" + "".join(f"{value * 1000:>15.2f}" for value in values))
    return lines


def _operations(operations: list[dict[str, Any]], kind: str) -> list[str]:
    title = "largest kernels and copies" if kind == "gpu" else "largest operations, own time"
    lines = [f"{title:<60}{'ms per step':>12}{'share':>8}{'count':>8}"]
    for one in operations[:10]:
        count = f"{one['count']:,.0f}" if one["count"] >= 10 else f"{one['count']:.3g}"
        name = one["name"] if len(one["name"]) <= 58 else one["name"][:55] + "..."
        lines.append(f"{name:<60}{one['seconds'] * 1000:>12.3f}{one['share']:>8.1%}{count:>8}")
    return lines


def _gaps(ranks: list[dict[str, Any]]) -> list[str]:
    gaps = sorted(((gap, rank) for rank in ranks for gap in rank["idle"]["largest"]), key=lambda pair: -pair[0]["seconds"])[:3]
    lines = ["largest gaps in which a GPU was idle"]
    for gap, rank in gaps:
        doing = f", in {gap['host']}" if gap["host"] else ""
        lines.append(f"  {_ms(gap['seconds'])} on rank {rank['rank']} ({rank['host']}): the host was in {gap['part']}{doing}")
    return lines


def _recommendations(recommendations: list[dict[str, Any]]) -> list[str]:
    if not recommendations:
        return ["recommendations: none. No part of a step that an option changes takes 5 % or more of it."]
    lines = ["recommendations, with the one that could save the most first"]
    return lines + [f"  {number}. {one['text']}" for number, one in enumerate(recommendations, 1)]


# `accel-ddp profile RUN`: prints the summary of a profile again.


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="accel-ddp profile",
        description="Print the summary of a run that was recorded with --profile: where the time of a step goes, and which options "
        "would save time.",
    )
    parser.add_argument("run", help="the folder of the run (runs/...), or its folder profile/")
    parser.add_argument("--json", action="store_true", help="print summary.json instead of a text")
    parser.add_argument("--analyze", action="store_true", help="read the traces of all ranks again, and store the new summary")
    given = parser.parse_args(words)
    run = Path(given.run)
    folder = run if run.name == traces.FOLDER and run.is_dir() else run / traces.FOLDER
    run = folder.parent
    found = read_summary(folder, run)
    if given.analyze:
        found = analyze_again(folder, found)
        write(folder, found, format_text(found, str(run)))
    print(json.dumps(found, indent=1) if given.json else format_text(found, str(run)))
    return 0


def read_summary(folder: Path, run: Path) -> dict[str, Any]:
    """Return the content of summary.json. Raise UserError if there is none."""
    path = folder / traces.SUMMARY
    if not run.is_dir():
        raise UserError(f"{run}: there is no such folder. Type the folder of a run, for example: accel-ddp profile runs/my_run")
    if not path.is_file() and not (run / run_log.FILE).is_file():
        raise UserError(
            f"{run} is not a run: it has no {run_log.FILE}. Type the folder of a run, for example: accel-ddp profile runs/my_run"
        )
    if not path.is_file():
        raise UserError(
            f"{run} has no profile. Record one: add --profile to the command of the run. A run that is complete can be continued for "
            f"some steps: add --resume --output_dir {run} --profile and more --steps."
        )
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    if not isinstance(found, dict) or not isinstance(found.get("schema"), int):
        raise UserError(f"{path} is not a summary of a profile.")
    if found["schema"] > SCHEMA:
        raise UserError(
            f"{path} has version {found['schema']}, and this accel_ddp reads version {SCHEMA}. Install the version of "
            "accel_ddp that has recorded the profile."
        )
    return found


def analyze_again(folder: Path, before: dict[str, Any]) -> dict[str, Any]:
    """Return a summary of the traces in `folder`. What traces do not contain is taken from the summary `before`."""
    from accel_ddp.observe.trace_analysis import analyse

    ranks = []
    for one in before["ranks"]:
        path = folder / traces.file_of(one["rank"])
        if not path.is_file():
            raise UserError(f"{path} is missing. Without --analyze the stored summary is printed.")
        ranks.append({**one, **analyse(traces.read_trace(path))})
    return summarize(before["run"], ranks)
