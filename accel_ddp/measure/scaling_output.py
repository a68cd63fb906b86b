"""The results as text, as a JSON document, and as an HTML page that contains plotly itself and opens without a network."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accel_ddp.errors import UserError
from accel_ddp.measure.scaling_analysis import (
    PARTS,
    Advice,
    Comparison,
    MeasuredLinks,
    Prediction,
    Result,
    advise,
    compare,
    describe_advice,
    find_limits,
    predict,
)
from accel_ddp.measure.scaling_plan import STRONG, WEAK, Placement
from accel_ddp.report.markup import Html, escape, generator, safe_json, tag
from accel_ddp.text import counted, format_seconds, format_si, plural

TITLES = {
    STRONG: "strong scaling: the same global batch on more ranks",
    WEAK: "weak scaling: the global batch grows with the ranks",
}
HEAD = ("ranks", "nodes", "batch", "micro x acc.", "step", "spread", "samples/s", "tokens/s", "speed-up", "efficiency", "predicted",
        "data", "compute", "comm.", "other")  # fmt: skip
COMPUTE = ("forward", "backward", "optimizer")
_WIDTH = 40  # of the chart
LARGE_SPREAD = 0.2  # a run whose steps vary more is repeated once


@dataclass(frozen=True)
class Summary:
    """Everything that is shown."""

    recipe: str
    modes: Sequence[str]
    results: Sequence[Result]
    links: Sequence[MeasuredLinks]
    left_out: Sequence[str]
    places: Sequence[Placement]
    on_gpu: bool
    threads: int
    hook: str
    steps: int
    warmup: int
    is_complete: bool

    def table(self, mode: str) -> list[Comparison]:
        return compare(self.results, mode)

    def rows(self, mode: str) -> list[tuple[str, ...]]:
        """Return the heading and the cells of a table, without columns that have only a heading."""
        rows = [HEAD, *(row_of(self, one) for one in self.table(mode))]
        used = [column for column in range(len(HEAD)) if any(row[column] for row in rows[1:])]
        return [tuple(row[column] for column in used) for row in rows]

    def remarks(self, mode: str) -> list[str]:
        """Return what is to be said about settings of a table that have failed or run otherwise than asked."""
        found = [one for one in self.results if mode in one.setting.modes and (one.problem or one.setting.note)]
        return [f"{one.setting.describe()}: {one.problem or one.setting.note}" for one in found]

    def links_of(self, place: Placement) -> MeasuredLinks | None:
        """Return the links that were measured for this number of nodes: one, or several."""
        found = [links for links in self.links if (links.nodes > 1) == (place.nodes > 1)]
        return found[-1] if found else None

    def prediction(self, comparison: Comparison) -> Prediction | None:
        return predict(comparison, self.links_of(comparison.result.setting.place), self.hook)

    def advice(self) -> list[Advice]:
        return advise(self.table(STRONG), self.table(WEAK))

    def limits(self, mode: str) -> tuple[Comparison | None, list[str]]:
        """Return the setting with the most ranks, and what limits it."""
        table = [one for one in self.table(mode) if one.ideal_speedup > 1]
        return (table[-1], find_limits(table[-1], mode, self.on_gpu)) if table else (None, [])

    def device(self) -> str:
        ranks = next((result.measured.ranks for result in self.results if result.measured and result.measured.ranks), [])
        names = sorted({str(rank.get("device", "")) for rank in ranks} - {""})
        return " and ".join(names) or ("GPU" if self.on_gpu else "CPU")

    def batch(self) -> int:
        """The global batch of strong scaling."""
        return min((result.setting.batch for result in self.results), default=0)


def row_of(summary: Summary, comparison: Comparison) -> tuple[str, ...]:
    """Return the cells of one row, in the order of HEAD."""
    result, setting, measured = comparison.result, comparison.result.setting, comparison.result.known
    predicted = summary.prediction(comparison)
    share = lambda *parts: f"{measured.mean(*parts) / measured.seconds:.0%}"
    tokens = f"{measured.tokens / measured.seconds:,.0f}" if measured.tokens else ""
    return (
        str(setting.ranks), str(setting.place.nodes), str(setting.batch), f"{measured.micro} x {measured.accumulation}",
        format_seconds(measured.seconds), f"{measured.spread:.0%}", f"{result.samples_per_second:,.1f}", tokens,
        f"{comparison.speedup:.2f} of {comparison.ideal_speedup:g}", f"{comparison.efficiency:.0%}",
        _range(predicted) if predicted else "", share("data"), share(*COMPUTE), share("communication"), share("other"),
    )  # fmt: skip


def _range(predicted: Prediction) -> str:
    low, high = f"{predicted.worst:.0%}", f"{predicted.best:.0%}"
    return low if low == high else f"{low[:-1]}-{high}"


def format_summary(summary: Summary) -> str:
    """Return the tables, a chart, what limits scaling, and which batch reaches 90 %."""
    steps = f"medians of {summary.steps} steps after {summary.warmup} steps of warm-up"
    lines = [f"\n{summary.recipe} on {summary.device()}: {steps}"]
    for mode in summary.modes:
        lines += ["", TITLES[mode], *_format_table(summary, mode)]
        lines += [f"{text}." for text in summary.remarks(mode)]
        lines += ["", *format_chart(summary.table(mode))]
    lines += ["", *_explain_limits(summary)]
    if advice := summary.advice():
        lines += ["", "which global batch reaches 90 % of the ideal speed-up over the first row with the same batch:"]
        lines += [f"  {describe_advice(one, summary.batch())}" for one in advice]
        if any(not one.is_reached and one.batch > summary.batch() for one in advice):
            lines.append("  A larger global batch is another training: choose the learning rate for it.")
    for links in summary.links:
        where = f"{links.ranks} ranks on {counted(links.nodes, 'node')}"
        measured = f"{format_si(links.bus)}B/s of bus bandwidth and {format_si(links.latency)}s of latency"
        lines.append(f"predicted: by the doctor, from {measured} on {where}.")
    if any(result.measured and result.measured.spread > LARGE_SPREAD for result in summary.results):
        lines.append(
            f"Some steps vary by more than {LARGE_SPREAD:.0%}, so that these numbers are uncertain. Other processes use this machine, "
            "or batches differ, for example in the lengths of texts. More --steps help."
        )
    if not summary.is_complete:
        lines.append("Some settings were not measured.")
    return "\n".join(lines)


def _format_table(summary: Summary, mode: str) -> list[str]:
    rows = summary.rows(mode)
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]


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
    """Return one JSON document with everything that was measured and computed."""
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
                "seconds": {part: measured.parts[part] for part in PARTS}, "gradient_bytes": measured.gradient_bytes,
            }  # fmt: skip
        results.append(one)
    tables = {}
    for mode in summary.modes:
        rows = []
        for comparison in summary.table(mode):
            predicted = summary.prediction(comparison)
            rows.append({
                "ranks": comparison.result.setting.ranks, "global_batch": comparison.result.setting.batch,
                "speedup": comparison.speedup, "ideal_speedup": comparison.ideal_speedup, "efficiency": comparison.efficiency,
                "predicted_efficiency": [predicted.worst, predicted.best] if predicted else None,
                "predicted_communication_seconds": predicted.communication if predicted else None,
                "lost_seconds": comparison.losses(),
            })  # fmt: skip
        tables[mode] = {"rows": rows, "limits": summary.limits(mode)[1]}
    return json.dumps({
        "recipe": summary.recipe, "device": summary.device(), "steps": summary.steps, "warmup": summary.warmup,
        "threads": summary.threads, "is_complete": summary.is_complete, "left_out": list(summary.left_out), "results": results,
        "tables": tables, "advice": [asdict(one) for one in summary.advice()], "links": [asdict(one) for one in summary.links],
    }, allow_nan=False)  # fmt: skip


# The colors of Okabe and Ito, which color-blind readers can distinguish.
BLUE, ORANGE, GREEN, GREY, SKY, VERMILION = "#0072b2", "#e69f00", "#009e73", "#888888", "#56b4e9", "#d55e00"
PART_COLORS = {"data": ORANGE, "forward": SKY, "backward": BLUE, "optimizer": GREEN, "communication": VERMILION, "other": GREY}

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">{generator}<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1100px; padding: 1rem; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-size: .85rem; }}
.plots {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
.plot {{ flex: 1 1 320px; min-width: 0; height: 380px; }}
th, td {{ padding: .2rem .45rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }}
</style></head><body>
{body}
<script>{plotly}</script>
<script>
const figures = {figures};
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
for (const [id, figure] of Object.entries(figures)) {{
  const layout = Object.assign({{paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {{color: dark ? "#ddd" : "#222"}},
    margin: {{l: 55, r: 15, t: 40, b: 45}}, legend: {{orientation: "h", y: -0.25}}}}, figure.layout);
  const grid = {{gridcolor: dark ? "#444" : "#ddd", zeroline: false}};
  for (const axis of ["xaxis", "yaxis"]) layout[axis] = Object.assign({{}}, grid, layout[axis]);
  Plotly.newPlot(id, figure.data, layout, {{responsive: true, displayModeBar: false}});
}}
</script></body></html>
"""


def write_page(path: Path, summary: Summary) -> None:
    """Write the page. Raise UserError if the file cannot be written."""
    from plotly.offline import get_plotlyjs

    figures: dict[str, Any] = {}
    title = f"Scaling of {summary.recipe}"
    steps = f"Medians of {summary.steps} steps after {summary.warmup} steps of warm-up."
    body = [tag("h1", title), tag("p", f"{summary.device()}. {steps}")]
    for mode in summary.modes:
        if not (table := summary.table(mode)):
            continue
        found = _figures(summary, table)
        figures |= {f"{mode}_{name}": figure for name, figure in found.items()}
        head, *rows = summary.rows(mode)
        cells = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
        body += [
            tag("h2", TITLES[mode].capitalize()),
            tag("div", *(tag("div", class_="plot", id=f"{mode}_{name}") for name in found), class_="plots"),
            tag("div", tag("table", tag("tr", *(tag("th", cell) for cell in head)), *cells), class_="wide"),
            _list(summary.remarks(mode)),
            tag("h3", "What limits it"),
            _list(summary.limits(mode)[1] or ["No loss is above 3 % of a step."]),
        ]
    if advice := summary.advice():
        body.append(tag("h2", "Which global batch reaches 90 %"))
        body.append(_list([describe_advice(one, summary.batch()) for one in advice]))
    text = _PAGE.format(
        generator=generator("scaling"), title=escape(title), body="\n".join(body), plotly=get_plotlyjs(), figures=safe_json(figures)
    )  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--page {path}: cannot be written: {error.strerror}.") from None


def _list(texts: Sequence[str]) -> Html:
    return tag("ul", *(tag("li", text) for text in texts)) if texts else Html()


def _figures(summary: Summary, table: Sequence[Comparison]) -> dict[str, Any]:
    """Return speed-up, efficiency and the parts of a step over the number of ranks, as plotly's JSON."""
    ranks = [one.result.setting.ranks for one in table]
    line = lambda name, y, color, dash="solid": {
        "type": "scatter", "mode": "lines+markers", "name": name, "x": ranks, "y": y, "line": {"color": color, "dash": dash},
    }  # fmt: skip
    axis = {"title": {"text": "ranks"}, "tickvals": ranks, "type": "log" if len(ranks) > 2 else "linear"}
    layout = lambda title, y: {"title": {"text": title}, "xaxis": axis, "yaxis": {"title": {"text": y}, "rangemode": "tozero"}}
    speedup = [line("ideal", [one.ideal_speedup for one in table], GREY, "dash")]
    speedup.append(line("measured", [one.speedup for one in table], BLUE))
    efficiency = [line("ideal", [100] * len(ranks), GREY, "dash")]
    efficiency.append(line("measured", [100 * one.efficiency for one in table], BLUE))
    if any(summary.prediction(one) for one in table):
        known = [(one, summary.prediction(one) or Prediction(1.0, 1.0, 0.0)) for one in table]  # one rank sends nothing
        for name, dashes, pick in (("doctor, hidden", "dot", "best"), ("doctor, nothing overlaps", "dashdot", "worst")):
            speedup.append(line(name, [getattr(found, pick) * one.ideal_speedup for one, found in known], ORANGE, dashes))
            efficiency.append(line(name, [100 * getattr(found, pick) for _, found in known], ORANGE, dashes))
    labels = [str(number) for number in ranks]
    parts = [
        {"type": "bar", "name": part, "x": labels, "y": [1000 * one.result.known.mean(part) for one in table],
         "marker": {"color": color}}
        for part, color in PART_COLORS.items()
    ]  # fmt: skip
    bars = {"title": {"text": "A step"}, "barmode": "stack", "xaxis": {"title": {"text": "ranks"}, "type": "category"},
            "yaxis": {"title": {"text": "ms"}}}  # fmt: skip
    return {
        "speedup": {"data": speedup, "layout": layout("Speed-up", "")},
        "efficiency": {"data": efficiency, "layout": layout("Efficiency", "%")},
        "parts": {"data": parts, "layout": bars},
    }
