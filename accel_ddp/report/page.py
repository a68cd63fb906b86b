"""The page of `accel-ddp report`: one HTML file that needs no network. docs/report.md describes it.

All text is in the page itself and readable without scripts. page.js draws the charts, with the library plotly from the installed
package, from numbers that the page contains as JSON. The policy of the page forbids every request and every script except these
two, which it names by their hashes.
"""

import base64
import hashlib
import time
import warnings
from importlib.resources import files
from pathlib import Path
from typing import Any

from accel_ddp import __version__
from accel_ddp.records.files import replace_file
from accel_ddp.report import charts, sections
from accel_ddp.report.cards import choice, moment, section
from accel_ddp.report.chart_data import chart_data
from accel_ddp.report.markup import GENERATOR, Html, join, safe_json, tag
from accel_ddp.report.run_data import ReportedRun
from accel_ddp.text import listed

_NAVIGATION = {
    "comparison": "Comparison", "differences": "Differences", "curves": "Curves", "details": "Details", "incidents": "Incidents",
    "time": "Time", "hardware": "Load", "evaluations": "Evaluations", "checkpoints": "Checkpoints", "profile": "Profile",
    "configuration": "Configuration",
}  # fmt: skip
_VIEWPORT = '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'


def write_page(runs: list[ReportedRun], path: Path) -> None:
    """Write the page of one run, or of several runs that are compared. Raise OSError if the disk does not accept it."""
    replace_file(path, make_page(runs), has_rivals=True)  # a browser that reloads it sees the old page or the new one


def make_page(runs: list[ReportedRun]) -> str:
    """Return the page. Its size does not depend on the lengths of the runs."""
    from plotly.offline import get_plotlyjs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns where all values are missing
        data = [chart_data(run, len(runs)) for run in runs]
        body = join(_sections(runs, data))
    read = lambda name: files("accel_ddp.report").joinpath(name).read_text(encoding="utf-8")
    scripts = [get_plotlyjs().replace("\r\n", "\n"), read("page.js")]
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    header = [sections.title(runs[0]), sections.key_figures(runs[0])]
    if len(runs) > 1:
        header = [tag("h1", f"Comparison of {name}"), tag("p", listed((run.name for run in runs), 12), class_="subtitle")]
    links = [tag("a", title, href=f"#{key}") for key, title in _NAVIGATION.items() if f' id="{key}" ' in body]
    written = f"Written by accel-ddp {__version__} at {moment(time.time())}. This file contains everything that it needs."
    return join([
        Html('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'), Html(GENERATOR), _policy(scripts),
        Html(_VIEWPORT),
        tag("title", f"{name}: accel-ddp report"), tag("style", Html(read("page.css"))), Html("</head>\n<body>"),
        tag("a", "Skip to the content", href="#content", class_="hidden skip"),
        tag("header", *header), tag("nav", tag("div", *links), aria_label="Sections"),
        tag("main", body, id="content"), tag("footer", written),
        tag("script", safe_json({"runs": data}), type="application/json", id="data"),
        *(tag("script", Html(script)) for script in scripts), Html("</body></html>\n"),
    ])  # fmt: skip


def _sections(runs: list[ReportedRun], data: list[dict[str, Any]]) -> list[Html]:
    """Return the sections of the page. Several runs share their curves, and a list chooses the run whose details are shown."""
    if len(runs) == 1:
        return [charts.curves(runs, data), *_details(runs[0], data[0], 0, 2, "")]
    blocks = []
    for index, (run, one) in enumerate(zip(runs, data)):
        prefix = f"run{index}-"
        parts = [sections.title(run, 3), sections.key_figures(run, prefix), *_details(run, one, index, 3, prefix)]
        blocks.append(tag("div", *parts, class_="run", data_run=index))
    chosen = tag("div", choice("Run", [(str(i), run.name) for i, run in enumerate(runs)], details=True), class_="js")
    return [sections.comparison(runs), charts.curves(runs, data), section("details", "Details of a run", chosen, *blocks)]


def _details(run: ReportedRun, data: dict[str, Any], index: int, level: int, prefix: str) -> list[Html]:
    return [
        sections.incidents(run, level, prefix),
        charts.time_of_ranks(run, data, index, level, prefix),
        charts.load_of_nodes(data, index, level, prefix),
        charts.evaluations(run, index, level, prefix),
        sections.checkpoints(run, level, prefix),
        sections.profile(run, level, prefix),
        sections.configuration(run, level, prefix),
    ]


def _policy(scripts: list[str]) -> Html:
    """Return the Content-Security-Policy. plotly sets styles of elements, and makes images of charts from data and blob URLs."""
    digest = lambda script: base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = " ".join(f"'sha256-{digest(script)}'" for script in scripts)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return Html(f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; script-src {allowed}; {rest}">')
