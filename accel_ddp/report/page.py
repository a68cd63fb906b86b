"""The page of `accel-ddp report`: one HTML file that needs no network. docs/report.md describes it.

All text is in the page itself and readable without scripts. page.js draws the charts, with the library plotly from the installed
package, from numbers that the page contains as JSON. The policy of the page forbids every request and every script except these
two, which it names by their hashes. Text from data stays text, whatever it contains: page.jinja escapes it.
"""

import base64
import hashlib
import json
import re
import time
import warnings
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from accel_ddp import __version__
from accel_ddp.records.files import replace_file
from accel_ddp.records.run_log import without_nonfinite
from accel_ddp.report import cards, sections
from accel_ddp.report.chart_data import chart_data, places
from accel_ddp.report.run_data import ReportedRun, dict_of, is_number, list_of
from accel_ddp.text import counted, format_bytes, listed

# Stands within the first 4096 bytes of the page. The command overwrites no file without it.
GENERATOR = '<meta name="generator" content="accel-ddp report">'
_NAVIGATION = {
    "comparison": "Comparison", "differences": "Differences", "curves": "Curves", "details": "Details", "incidents": "Incidents",
    "time": "Time", "hardware": "Load", "evaluations": "Evaluations", "checkpoints": "Checkpoints", "profile": "Profile",
    "configuration": "Configuration",
}  # fmt: skip
# Characters that HTML does not allow, and halves of surrogate pairs, which UTF-8 cannot encode.
_INVALID = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def write_page(runs: list[ReportedRun], path: Path) -> None:
    """Write the page of one run, or of several runs that are compared. Raise OSError if the disk does not accept it."""
    replace_file(path, make_page(runs), has_rivals=True)  # a browser that reloads it sees the old page or the new one


def make_page(runs: list[ReportedRun]) -> str:
    """Return the page. Its size does not depend on the lengths of the runs."""
    from plotly.offline import get_plotlyjs

    read = lambda name: files("accel_ddp.report").joinpath(name).read_text(encoding="utf-8")
    scripts = [get_plotlyjs().replace("\r\n", "\n"), read("page.js")]
    environment = Environment(autoescape=True)
    forms = [cards.brief, cards.duration, cards.figure, cards.moment, cards.number, cards.percent, cards.rate, format_bytes]
    forms += [cards.after, cards.cell, cards.command, cards.plain, cards.tagged, cards.words, counted, dict_of, list_of, places]
    functions = {one.__name__: one for one in (*forms, sections.badge, sections.last_error, sections.worst_incidents)}
    environment.filters |= functions
    environment.globals |= functions
    environment.globals |= {"most_checkpoints": sections.CHECKPOINTS, "most_operations": sections.OPERATIONS}
    environment.tests["known"] = is_number
    template = environment.from_string(re.sub(r"\n\s*", "", read("page.jinja")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns where all values are missing
        data = [chart_data(run, len(runs)) for run in runs]
        prefixes = [f"run{index}-" if len(runs) > 1 else "" for index in range(len(runs))]
        views = [sections.run_view(run, *more) for run, *more in zip(runs, data, range(len(runs)), prefixes)]
        page = template.render(
            runs=runs, views=views, curves=sections.curves(runs, data), **(sections.comparison(runs) if len(runs) > 1 else {}),
            choices=list(enumerate(run.name for run in runs)), name=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
            names=listed((run.name for run in runs), 12), navigation=_NAVIGATION, generator=GENERATOR, policy=_policy(scripts),
            css=read("page.css"), version=__version__, written=cards.moment(time.time()), data=safe_json({"runs": data}),
        )  # fmt: skip
    return _INVALID.sub("\ufffd", page) + "".join(f"<script>{script}</script>" for script in scripts) + "</body></html>\n"


def safe_json(value: Any) -> str:
    """Return JSON for a <script> element. No text in it can end the element. Numbers that are not finite become null."""
    text = json.dumps(without_nonfinite(value, lambda _: None), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: list[str]) -> str:
    """Return the Content-Security-Policy. plotly sets styles of elements, and makes images of charts from data and blob URLs."""
    digest = lambda script: base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = " ".join(f"'sha256-{digest(script)}'" for script in scripts)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}"
