"""The results as text and as a JSON document."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from accel_ddp.measure import scaling_analysis as analysis
from accel_ddp.measure.scaling_analysis import Comparison, Result
from accel_ddp.measure.scaling_plan import STRONG, WEAK
from accel_ddp.text import format_seconds, plural, table

TITLES = {
    STRONG: "strong scaling: the same global batch on more ranks",
    WEAK: "weak scaling: the global batch grows with the ranks",
}
HEAD = ("ranks", "nodes", "batch", "micro x acc.", "step", "spread", "samples/s", "tokens/s", "speed-up", "efficiency",
        "data", "compute", "comm.", "other")  # fmt: skip
COMPUTE = ("forward", "backward", "optimizer")
_WIDTH = 40  # of the chart
LARGE_SPREAD = 0.2  # a run whose steps vary more is repeated once


@dataclass
class Summary:
    recipe: str
    modes: Sequence[str]
    left_out: Sequence[str]
    on_gpu: bool
    threads: int
    steps: int
    warmup: int
    results: list[Result] = field(default_factory=list)
    is_complete: bool = False

    def table(self, mode: str) -> list[Comparison]:
        return analysis.compare(self.results, mode)

    def limits(self, mode: str) -> tuple[Comparison | None, list[str]]:
        table = [one for one in self.table(mode) if one.ideal_speedup > 1]
        return (table[-1], analysis.find_limits(table[-1], mode, self.on_gpu)) if table else (None, [])

    def device(self) -> str:
        ranks = next((result.measured.ranks for result in self.results if result.measured and result.measured.ranks), [])
        names = sorted({str(rank.get("device", "")) for rank in ranks} - {""})
        return " and ".join(names) or ("GPU" if self.on_gpu else "CPU")


def format_table(summary: Summary, mode: str) -> list[str]:
    """Return the lines of a table without columns that have only a heading, and remarks about settings that failed or changed."""
    rows = [HEAD]
    for comparison in summary.table(mode):
        result, setting, measured = comparison.result, comparison.result.setting, comparison.result.known
        share = lambda *parts, measured=measured: f"{measured.mean(*parts) / measured.seconds:.0%}"
        tokens = f"{measured.tokens / measured.seconds:,.0f}" if measured.tokens else ""
        rows.append((
            str(setting.ranks), str(setting.place.nodes), str(setting.batch), f"{measured.micro} x {measured.accumulation}",
            format_seconds(measured.seconds), f"{measured.spread:.0%}", f"{result.samples_per_second:,.1f}", tokens,
            f"{comparison.speedup:.2f} of {comparison.ideal_speedup:g}", f"{comparison.efficiency:.0%}",
            share("data"), share(*COMPUTE), share("communication"), share("other"),
        ))  # fmt: skip
    used = [column for column in zip(*rows) if any(column[1:])]
    remarks = [one for one in summary.results if mode in one.setting.modes and (one.problem or one.setting.note)]
    return [*table(zip(*used), left=0), *(f"{one.setting.describe()}: {one.problem or one.setting.note}." for one in remarks)]


def format_summary(summary: Summary) -> str:
    steps = f"medians of {summary.steps} steps after {summary.warmup} steps of warm-up"
    lines = [f"\n{summary.recipe} on {summary.device()}: {steps}"]
    for mode in summary.modes:
        lines += ["", TITLES[mode], *format_table(summary, mode), "", *format_chart(summary.table(mode))]
    lines += ["", *_explain_limits(summary)]
    if any(result.measured and result.measured.spread > LARGE_SPREAD for result in summary.results):
        lines.append(
            f"Some steps vary by more than {LARGE_SPREAD:.0%}, so these numbers are uncertain. Other processes use this machine, "
            "or batches differ, for example in the lengths of texts. More --steps help."
        )
    if not summary.is_complete:
        lines.append("Some settings were not measured.")
    return "\n".join(lines)


def _explain_limits(summary: Summary) -> list[str]:
    lines = []
    for mode in summary.modes:
        comparison, texts = summary.limits(mode)
        if comparison:
            where = f"{mode} scaling on {comparison.result.setting.ranks} ranks, {comparison.efficiency:.0%} efficient"
            lines.append(f"what limits {where}:" if texts else f"{where}: no loss is above 3 % of a step.")
            lines += [f"  {text}" for text in texts]
    return lines


def format_chart(table: Sequence[Comparison]) -> list[str]:
    """Return bars of the speed-up. The end of the line of dots is the ideal."""
    full, dot = ("█", "·") if "utf" in (getattr(sys.stdout, "encoding", "") or "").lower() else ("#", ".")
    most = max((one.ideal_speedup for one in table), default=1)
    lines = []
    for one in table:
        ideal = max(1, round(_WIDTH * one.ideal_speedup / most))
        bar = min(_WIDTH + 10, max(1, round(_WIDTH * one.speedup / most)))
        ranks = f"{one.result.setting.ranks:>5} {plural(one.result.setting.ranks, 'rank'):5}"
        lines.append(f"{ranks}  {full * bar}{dot * (ideal - bar)} {one.speedup:.2f} of {one.ideal_speedup:g}")
    return lines


def as_json(summary: Summary) -> str:
    results = []
    for result in summary.results:
        setting, measured = result.setting, result.measured
        one: dict[str, Any] = {
            "ranks": setting.ranks, "nodes": setting.place.nodes, "global_batch": setting.batch, "modes": list(setting.modes),
            "problem": result.problem, "note": setting.note, "runs": result.runs,
        }  # fmt: skip
        if measured:
            one |= {
                "micro_batch": measured.micro, "accumulation": measured.accumulation, "step_seconds": measured.seconds,
                "spread": measured.spread, "samples_per_second": result.samples_per_second,
                "tokens_per_second": measured.tokens / measured.seconds if measured.tokens else None,
                "seconds": {part: measured.parts[part] for part in analysis.PARTS}, "gradient_bytes": measured.gradient_bytes,
            }  # fmt: skip
        results.append(one)
    tables = {}
    for mode in summary.modes:
        rows = []
        for comparison in summary.table(mode):
            rows.append({
                "ranks": comparison.result.setting.ranks, "global_batch": comparison.result.setting.batch,
                "speedup": comparison.speedup, "ideal_speedup": comparison.ideal_speedup, "efficiency": comparison.efficiency,
                "lost_seconds": comparison.losses(),
            })  # fmt: skip
        tables[mode] = {"rows": rows, "limits": summary.limits(mode)[1]}
    return json.dumps({
        "recipe": summary.recipe, "device": summary.device(), "steps": summary.steps, "warmup": summary.warmup,
        "threads": summary.threads, "is_complete": summary.is_complete, "left_out": list(summary.left_out), "results": results,
        "tables": tables,
    }, allow_nan=False)  # fmt: skip
