"""The HTML page with the plots. It contains plotly itself, so that it opens without a network."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_ddp.errors import UserError
from accel_ddp.report.escaping import escape, safe_json, tag
from accel_ddp.report.markup import generator
from accel_ddp.scaling.advice import describe_advice
from accel_ddp.scaling.analysis import Comparison
from accel_ddp.scaling.output import HEAD, TITLES, Summary, row_of
from accel_ddp.scaling.prediction import Prediction

# The colours of Okabe and Ito, which colour-blind readers can distinguish.
BLUE, ORANGE, GREEN, GREY, SKY, VERMILION = "#0072b2", "#e69f00", "#009e73", "#888888", "#56b4e9", "#d55e00"
PART_COLOURS = {"data": ORANGE, "forward": SKY, "backward": BLUE, "optimizer": GREEN, "communication": VERMILION, "other": GREY}

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
    body = [f"<h1>Scaling of {escape(summary.recipe)}</h1>"]
    about = f"{summary.device()}. Medians of {summary.steps} steps after {summary.warmup} steps of warm-up."
    body.append(f"<p>{escape(about)}</p>")
    for mode in summary.modes:
        table = summary.table(mode)
        if not table:
            continue
        figures |= {f"{mode}_{name}": figure for name, figure in _figures(summary, table).items()}
        body.append(f"<h2>{escape(TITLES[mode].capitalize())}</h2>")
        plots = "".join(f'<div class="plot" id="{mode}_{name}"></div>' for name in ("speedup", "efficiency", "parts"))
        body.append(f'<div class="plots">{plots}</div>{_table([HEAD, *(row_of(summary, one) for one in table)])}')
        problems = [one for one in summary.results if mode in one.setting.modes and (one.problem or one.setting.note)]
        body += [_list([f"{one.setting.describe()}: {one.problem or one.setting.note}" for one in problems])]
        body.append(f"<h3>What limits it</h3>{_list(summary.limits(mode)[1] or ['No loss is above 3 % of a step.'])}")
    if advice := summary.advice():
        body.append("<h2>Which global batch reaches 90 %</h2>" + _list([describe_advice(one, summary.batch()) for one in advice]))
    text = _PAGE.format(
        generator=generator("scaling"),
        title=escape(f"Scaling of {summary.recipe}"),
        body="\n".join(body),
        plotly=get_plotlyjs(),
        figures=safe_json(figures),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--page {path}: cannot be written: {error.strerror}.") from None


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as a table, without columns that have only a heading."""
    used = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    cells = lambda row, name: tag("tr", *(tag(name, row[column]) for column in used))
    body = tag("tbody", *(cells(row, "td") for row in rows[1:]))
    return tag("div", tag("table", tag("thead", cells(rows[0], "th")), body), class_="wide")


def _list(texts: Sequence[str]) -> str:
    return tag("ul", *(tag("li", text) for text in texts)) if texts else ""


def _figures(summary: Summary, table: Sequence[Comparison]) -> dict[str, Any]:
    """Return speed-up, efficiency and the parts of a step over the number of ranks, as plotly's JSON."""
    ranks = [one.result.setting.ranks for one in table]
    line = lambda name, y, colour, **more: {
        "type": "scatter", "mode": "lines+markers", "name": name, "x": ranks, "y": y,
        "line": {"color": colour, **more.pop("line", {})},
    }  # fmt: skip
    axis = {"title": {"text": "ranks"}, "tickvals": ranks, "type": "log" if len(ranks) > 2 else "linear"}
    layout = lambda title, y: {"title": {"text": title}, "xaxis": axis, "yaxis": {"title": {"text": y}, "rangemode": "tozero"}}
    dash = {"dash": "dash"}
    ideal = [one.ideal_speedup for one in table]
    speedup = [line("ideal", ideal, GREY, line=dash), line("measured", [one.speedup for one in table], BLUE)]
    efficiency = [
        line("ideal", [100] * len(ranks), GREY, line=dash),
        line("measured", [100 * one.efficiency for one in table], BLUE),
    ]
    if any(summary.prediction(one) for one in table):
        known = [(one, summary.prediction(one) or Prediction(1.0, 1.0, 0.0)) for one in table]  # one rank sends nothing
        for name, dashes, pick in (("doctor, hidden", "dot", "best"), ("doctor, nothing overlaps", "dashdot", "worst")):
            style = {"dash": dashes}
            speedup.append(line(name, [getattr(found, pick) * one.ideal_speedup for one, found in known], ORANGE, line=style))
            efficiency.append(line(name, [100 * getattr(found, pick) for _, found in known], ORANGE, line=style))
    labels = [str(number) for number in ranks]
    parts = [
        {"type": "bar", "name": part, "x": labels, "y": [1000 * one.result.known.mean(part) for one in table],
         "marker": {"color": colour}}
        for part, colour in PART_COLOURS.items()
    ]  # fmt: skip
    bars = {"title": {"text": "A step"}, "barmode": "stack", "xaxis": {"title": {"text": "ranks"}, "type": "category"},
            "yaxis": {"title": {"text": "ms"}}}  # fmt: skip
    return {
        "speedup": {"data": speedup, "layout": layout("Speed-up", "")},
        "efficiency": {"data": efficiency, "layout": layout("Efficiency", "%")},
        "parts": {"data": parts, "layout": bars},
    }
