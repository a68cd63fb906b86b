"""The summary of a profile over all ranks: summary.json, recommendations, and the text that is printed.

docs/profile.md describes the fields. A recommendation states the option to set, what it could save, and the numbers behind it.
`accel-ddp profile RUN` prints the summary again.
"""

import argparse
import json
import shlex
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from accel_ddp.config.option_values import Window
from accel_ddp.errors import UserError
from accel_ddp.observe import traces
from accel_ddp.records import run_log
from accel_ddp.records.files import replace_file
from accel_ddp.text import counted, read_table, shorten

SCHEMA = 1
# The options that recommendations depend on.
OPTIONS = (
    "global_batch_size", "micro_batch_size", "bucket_cap_mb", "comm_hook", "num_workers", "compile", "padding_free", "pin_memory",
    "log_every", "gradient_checkpointing", "mixed_precision", "global_batch_tokens", "micro_batch_tokens",
)  # fmt: skip
_UNEVEN = 0.1  # a rank that computes this much longer than the others is reported
NOTABLE = 0.05  # fraction of a step; less is not worth an option
_PRODUCTS = ("gemm", "cutlass", "xmma", "matmul", "nvjet", "conv", "wgrad", "dgrad")  # in the names of kernels on tensor cores


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
    if any(isinstance(value, dict) for value in values):
        known = [value or {} for value in values]
        names = dict.fromkeys(name for value in known for name in value)
        return {name: _mean([value.get(name, 0.0) for value in known]) for name in names}
    return round(fmean(values), 9)


def _overall(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of the ranks. `network` is what the rank that waits least waits: no other rank is the cause of it."""
    names = ("step_seconds", "computation", "communication", "communication_sum", "overlapped", "exposed", "collectives")
    found = {"kind": ranks[0]["kind"], **{name: _mean([rank[name] for rank in ranks]) for name in names}}
    found["network"] = min(rank["exposed"] for rank in ranks)
    found |= {name: _mean([rank[name] for rank in ranks]) for name in ("parts", "breakdown")} | {"idle": None, "copies": None}
    if found["kind"] == "gpu":
        numbers = ("seconds", "gaps", "during", "host_late")
        found["idle"] = _mean([{name: rank["idle"][name] for name in numbers} for rank in ranks])
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


# ---- recommendations

_ADVICE: dict[str, list[str]] = read_table(Path(__file__).with_name("advice.yaml"))


class Recommendation(NamedTuple):
    """One option to try. `saves` is what it saves at most, in seconds per step."""

    option: str
    saves: float
    text: str


def recommend(run: dict[str, Any], overall: dict[str, Any], operations: list[dict[str, Any]]) -> list[Recommendation]:
    """Return the recommendations, with the one that could save the most first."""
    step, network, options, on_gpu = overall["step_seconds"], overall["network"], run["options"], overall["kind"] == "gpu"
    parts, computation, forward = overall["parts"], overall["computation"], overall["breakdown"]["forward"]
    of = lambda seconds: f"{seconds / step:.0%} of a step ({_number(seconds)} of {_number(step)} ms)".replace("%", " %")
    # On a GPU only the time counts in which it had nothing to do, because batches are prepared while it computes.
    during = overall["idle"]["during"] if on_gpu else parts
    wait, other, late = during["data"], min(parts["other"], during["other"]), overall["idle"]["host_late"] if on_gpu else 0.0
    kinds = overall["copies"]["kinds"] if on_gpu else {}
    pageable = sum(kind["seconds"] for name, kind in kinds.items() if "HtoD (Pageable" in name)
    products = sum(one["seconds"] for one in operations if any(word in one["name"].lower() for word in _PRODUCTS))
    # Two all-reduces sum counts and loss.
    megabytes, buckets, cap = run["gradient_bytes"] / (1 << 20), overall["collectives"] - 2, options.get("bucket_cap_mb", 25)
    cap = 25 if cap == "auto" else cap
    smaller = max(1, int(min(cap, megabytes) / 4))
    is_one = 0 < buckets <= 3 and megabytes > 2 * smaller and overall["overlapped"] < 0.5 * overall["communication"]
    now, every = options.get("num_workers", -1), options.get("log_every", 10)
    micro, count, batch = run["micro_batch_size"], run["accumulation"], options.get("global_batch_size", 0)
    fixed_batch = not options.get("global_batch_tokens")  # otherwise the numbers of items vary
    fixed_micro = fixed_batch and not options.get("micro_batch_tokens")
    facts = {
        "exposed": f"exposed communication takes {of(network)}, also on the rank that waits least",
        "late": f"the GPU waits for the host to launch kernels during {of(late)}",
        "hook": "bf16" if on_gpu else "fp16", "megabytes": megabytes, "smaller": smaller, "larger": cap * 2,
        "all_reduces": counted(round(buckets), "all-reduce"), "buckets": buckets, "libraries": "NCCL and DDP" if on_gpu else "DDP",
        "what": "communicates" if on_gpu else "communicates and updates the weights", "batch": batch, "twice_batch": 2 * batch,
        "waits": "the GPU waits for data during" if on_gpu else "waiting for data takes", "wait": of(wait),
        "workers": f"with --num_workers {now}" if now >= 0 else "with the default --num_workers",
        "more": 2 * now if now > 0 else 8 if on_gpu and now < 0 else 2, "pageable": of(pageable), "other": of(other),
        "every": every, "count": count, "micro": micro, "twice": 2 * micro, "products": of(products), "forward": of(forward),
        "computation": of(computation), "half": ms(computation / 2),
    }  # fmt: skip
    is_exposed, is_late = run["num_ranks"] > 1 and network >= NOTABLE * step, late >= NOTABLE * step
    rules = {  # name in advice.yaml -> whether it applies, and what it saves at most
        # Fewer bytes do not help where the latency is what takes time.
        "hook": (is_exposed and options.get("comm_hook") == "none" and megabytes > 1, network / 2),
        "smaller_buckets": (is_exposed and is_one, min(network, overall["breakdown"]["backward"]) * (1 - 1 / (buckets + 1 or 1))),
        "larger_buckets": (is_exposed and buckets > 40, network / 4),
        "tune": (is_exposed and run["num_nodes"] > 1, network / 3),
        "larger_batch": (is_exposed and fixed_batch, (network + parts["optimizer"] * (not on_gpu)) / 2),
        "workers": (wait >= NOTABLE * step, wait),
        "pin_memory": (options.get("pin_memory") == "off", pageable / 2),
        "log_every": (other >= NOTABLE * step and every < 10, other * (1 - every / 10)),
        "compile": (is_late and not run.get("compiled") and options.get("compile") != "on", late),
        "larger_micro_batch": (
            is_late and fixed_micro and count % 2 == 0 and options.get("micro_batch_size") != "auto", late / 2,
        ),
        "larger_batches": (is_late and fixed_micro and count == 1, late / 2),
        "bf16": (on_gpu and run["precision"] == "no" and products >= 0.2 * step, products / 2),
        "padding_free": (options.get("padding_free") == "off" and computation >= 0.3 * step, computation / 4),
        "checkpointing": (options.get("gradient_checkpointing") and forward >= NOTABLE * step, forward),
    }  # fmt: skip
    found = [
        Recommendation(_ADVICE[name][0].format(**facts), saves, _ADVICE[name][1].format(**facts, saves=ms(saves)))
        for name, (applies, saves) in rules.items()
        if applies and saves >= 0.02 * step
    ]
    return sorted(found, key=lambda one: -one.saves)


def ms(seconds: float) -> str:
    return f"{_number(seconds)} ms"


def _number(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}" if seconds >= 0.1 else f"{seconds * 1000:.3g}"


def write(folder: Path, summary: dict[str, Any], text: str) -> None:
    (folder / traces.SUMMARY_TEXT).write_text(text + "\n")
    replace_file(folder / traces.SUMMARY, json.dumps(summary, indent=1) + "\n")


# ---- text


def format_text(summary: dict[str, Any], run_folder: str) -> str:
    """Return the text that profile.jinja makes of a summary."""
    from jinja2 import Environment

    run, ranks, on_gpu = summary["run"], summary["ranks"], summary["overall"]["kind"] == "gpu"
    recorded = f"{len(ranks)} of {run['num_ranks']} ranks" if len(ranks) < run["num_ranks"] else counted(len(ranks), "rank")
    names = [f"{rank['rank']} ({rank['host']})" for rank in ranks]
    columns = {name: itemgetter(name) for name in ("computation", "communication", "exposed")}
    columns = {"step": itemgetter("step_seconds"), **columns, "data": lambda rank: rank["parts"]["data"]}
    gaps: list[Any] = []
    if on_gpu:
        columns |= {"data": lambda rank: rank["idle"]["during"]["data"], "idle": lambda rank: rank["idle"]["seconds"]}
        gaps = sorted(((gap, rank) for rank in ranks for gap in rank["idle"]["largest"]), key=lambda pair: -pair[0]["seconds"])[
            :3
        ]
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"shorten": shorten, "count": lambda count: f"{count:,.0f}" if count >= 10 else f"{count:.3g}"}
    template = environment.from_string(Path(__file__).with_name("profile.jinja").read_text())
    text = template.render(
        summary, window=Window(*run["steps"]), where=f"{recorded} on {counted(run['num_nodes'], 'node')} ({run['device']})",
        step=summary["overall"]["step_seconds"], on_gpu=on_gpu, names=names, width=max(map(len, names)), columns=columns, gaps=gaps,
        accuracy=max(rank["clock"]["accuracy"] for rank in ranks) / 1000, merged=Path(run_folder) / traces.FOLDER / traces.MERGED,
        run_folder=shlex.quote(run_folder), counted=counted,
    )  # fmt: skip
    return "\n".join(map(str.rstrip, text.splitlines()))


# ---- the command `accel-ddp profile RUN`


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="accel-ddp profile",
        description="Print the summary of a run that was recorded with --profile: where the time of a step goes, and which options "
        "would save time.",
    )
    parser.add_argument("run", help="the run folder (runs/...), or its folder profile/")
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
    path, hint = folder / traces.SUMMARY, "Name a run folder, for example: accel-ddp profile runs/my_run"
    if not run.is_dir():
        raise UserError(f"{run}: there is no such folder. {hint}")
    if not path.is_file() and not (run / run_log.FILE).is_file():
        raise UserError(f"{run} is not a run: it has no {run_log.FILE}. {hint}")
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
    ranks = []
    for one in before["ranks"]:
        path = folder / traces.file_of(one["rank"])
        if not path.is_file():
            raise UserError(f"{path} is missing. Without --analyze the stored summary is printed.")
        ranks.append({**one, **traces.analyse(traces.read_trace(path))})
    return summarize(before["run"], ranks)
