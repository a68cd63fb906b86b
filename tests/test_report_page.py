"""The page of `accel-ddp report` in a real browser: it draws charts, loads nothing, runs nothing from data, fits every screen."""

import base64
import hashlib
import itertools
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_ddp.report.cards import MINUS, UNKNOWN, brief, duration, number, percent
from accel_ddp.report.chart_data import chart_data
from accel_ddp.report.page import make_page, safe_json, write_page
from accel_ddp.report.run_data import RankTimes, ReportedRun
from accel_ddp.report.run_reader import read_run
from tests.report_runs import write_run

INSTALL = "a browser is needed: apt-get install -y --no-install-recommends chromium chromium-driver"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
# Text that ends attributes, elements, scripts and comments, that is an entity or a tag of plotly, and that JSON does not escape.
HOSTILE = (
    "<b>7</b>&lt;\"'><img src=x onerror='window.hit=1'></script><script>window.hit=2</script><!--<b>bold</b>"
    "<a href='javascript:window.hit=3'>link</a>&lt;i&gt;%{x}\u2028\u2029\u202e\ud800\x00{{7*7}}"
)
VISIBLE = "<a href='javascript:window.hit=3'>link</a>&lt;i&gt;%{x}"


class Browser:
    """Chromium, with the messages of its console and the addresses that it has requested."""

    def __init__(self, profile: Path):
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))

    def command(self, name: str, **values: Any) -> None:
        self.driver.execute_cdp_cmd(f"Emulation.{name}", values)

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.set_screen(width, height, dark)
        self.driver.get(path.resolve().as_uri())

    def set_screen(self, width: int, height: int = 900, dark: bool = False) -> None:
        self.command("setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.command("setTouchEmulationEnabled", enabled=width < 700)
        self.command("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        until = time.monotonic() + 60
        while not self.run(f"return !!({condition})"):
            assert time.monotonic() < until, f"this does not become true: {condition}"
            time.sleep(0.05)

    def draw_all(self) -> None:
        """Draw every chart of the visible sections: the page is as tall as its content."""
        width, until = self.run("return innerWidth"), time.monotonic() + 60
        frames = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0], 50)))"
        missing = (
            "return [...document.querySelectorAll('[data-chart]')].filter(b => b.offsetParent && !b.data).map(b => b.outerHTML)"
        )
        busy = "return document.querySelector('main').ariaBusy !== 'false'"
        while True:
            height = self.run("return document.documentElement.scrollHeight")
            self.command("setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
            self.driver.execute_async_script(frames)
            if not (left := self.run(missing)) and not self.run(busy):
                return
            assert time.monotonic() < until, f"these charts are not drawn: {left}"

    def traces(self, query: str) -> list[dict[str, Any]]:
        """Return type, number of points and some properties of the traces of a chart."""
        return self.run(
            "return document.querySelector(arguments[0]).data.map(t => ({type: t.type, points: (t.x || []).length, name: t.name,"
            " finite: (t.y || []).filter(Number.isFinite).length, stack: t.stackgroup, opacity: t.opacity, yaxis: t.yaxis}))",
            query,
        )

    def check_quiet(self) -> None:
        """Check that there was no error, and that nothing was requested from a network."""
        assert [line["message"] for line in self.driver.get_log("browser") if line["level"] != "INFO"] == []
        messages = [json.loads(line["message"])["message"] for line in self.driver.get_log("performance")]
        requests = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        assert [url for url in requests if url.startswith(("http:", "https:", "ws:", "wss:"))] == []


in_browser = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(INSTALL)
    one = Browser(tmp_path_factory.mktemp("browser"))
    yield one
    one.driver.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def one_run(folder) -> Path:
    """The page of a run of 32 GPUs that has everything a run can have."""
    write_page([read_run(write_run(folder / "bert"))], folder / "one.html")
    return folder / "one.html"


# Elements whose text is cut or runs out of them. What scrolls inside of a frame is readable.
CUT = """
const found = [];
for (const element of document.querySelectorAll('body *')) {
  if (element.closest('svg, .scroll, .hidden, nav, option, script, .modebar-container, .plot') || !element.offsetParent) continue;
  const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  if (own && element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).display !== 'inline')
    found.push([element.tagName, element.className, element.textContent.slice(0, 80), element.scrollWidth, element.clientWidth]);
}
for (const box of document.querySelectorAll('.plot')) {
  if (!box.offsetParent) continue;
  const frame = box.getBoundingClientRect();
  for (const text of box.querySelectorAll('.xtick text, .ytick text, .xtitle, .ytitle, .colorbar text')) {
    const place = text.getBoundingClientRect();
    if (!place.width) found.push(['a label is hidden', box.dataset.chart, text.textContent]);
    if (place.left < frame.left - 2 || place.right > frame.right + 2 || place.bottom > frame.bottom + 2)
      found.push(['out of the chart', box.dataset.chart, text.textContent, place.left, place.right, frame.left, frame.right]);
  }
  const ticks = [...box.querySelectorAll('.xaxislayer-above .xtick text')].map(text => text.getBoundingClientRect());
  ticks.sort((a, b) => a.left - b.left).forEach((tick, i) => {
    if (i && tick.left < ticks[i - 1].right) found.push(['ticks overlap', box.dataset.chart, box.dataset.key]);
  });
}
const root = document.documentElement;
if (root.scrollWidth > innerWidth) found.push(['the page scrolls sideways', root.scrollWidth, innerWidth]);
return found;
"""
CONTRAST = """
const light = color => {
  const [r, g, b] = color.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const numbers = text => text.match(/[\\d.]+/g).map(Number);
const behind = element => {
  for (let e = element; e; e = e.parentElement) {
    const color = numbers(getComputedStyle(e).backgroundColor);
    if (color.length < 4 || color[3]) return color.slice(0, 3);
  }
  return [255, 255, 255];
};
const low = {};
for (const element of document.querySelectorAll('body *')) {
  if (!element.offsetParent || element.closest('svg, script, .hidden')) continue;
  if (![...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
  const [a, b] = [light(numbers(getComputedStyle(element).color).slice(0, 3)), light(behind(element))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) low[element.tagName + '.' + element.className] = (a + 0.05) / (b + 0.05);
}
return low;
"""


@in_browser
def test_charts_have_points_and_no_text_is_cut_on_any_screen(browser, one_run):
    """The size of the screen and the colours change while the page is open, as on a phone that is turned at dusk."""
    browser.open(one_run)
    for width, dark in ((1280, False), (1280, True), (360, True), (360, False)):
        browser.set_screen(width, dark=dark)
        browser.draw_all()
        background = "#161b22" if dark else "#ffffff"
        browser.wait(f"[...document.querySelectorAll('[data-chart]')].every(box => box.layout.paper_bgcolor === '{background}')")
        assert browser.run(CUT) == []
        assert browser.run(CONTRAST) == {}
    loss, *_ = browser.traces('[data-key="loss"]')
    assert (loss["points"], loss["finite"]) == (200, 200)
    kinds = browser.run("return [...document.querySelectorAll('[data-chart]')].map(b => [b.dataset.chart, b.data[0].x.length])")
    assert {kind for kind, _ in kinds} == {"curve", "time", "average", "heat", "system", "points"}
    assert all(points for _, points in kinds)
    browser.check_quiet()


@in_browser
def test_controls_change_the_charts_and_zoom_is_shared(browser, one_run):
    browser.open(one_run)
    browser.draw_all()
    names = lambda: {trace["name"] for trace in browser.traces('[data-key="loss"]')}
    assert {"error", "warning", "save"} <= names(), "incidents and checkpoints are marks in the curves"
    browser.run(
        "document.getElementById('smoothing').value = 0.9; document.getElementById('smoothing').dispatchEvent(new Event('input'))"
    )
    browser.wait("document.querySelector('[data-key=loss]').data.some(t => (t.name || '').endsWith('smoothed'))")
    browser.run("for (const id of ['log', 'marks']) document.getElementById(id).click()")
    browser.wait("document.querySelector('[data-key=loss]').layout.yaxis.type === 'log'")
    assert "warning" not in names()
    for axis, title, last in (("time", "time (min)", None), ("samples", "samples", 4000 * 256), ("step", "step", 4000)):
        browser.run(f"document.querySelector('input[value={axis}]').click()")
        browser.wait(f"document.querySelector('[data-key=loss]').layout.xaxis.title.text === '{title}'")
        assert last is None or browser.run("return document.querySelector('[data-key=loss]').data[0].x.at(-1)") == last
    browser.run("Plotly.relayout(document.querySelector('[data-key=loss]'), {'xaxis.range': [1000, 2000]})")
    browser.wait("Math.round(document.querySelector('[data-chart=heat]').layout.xaxis.range[0]) === 1000")
    browser.run("document.getElementById('reset').click()")
    browser.wait("(document.querySelector('[data-chart=heat]').layout || {xaxis: {range: [999]}}).xaxis.range[0] < 100")
    browser.draw_all()
    assert browser.run("return document.querySelectorAll('[data-view] option').length") == 33
    mean = browser.run("return document.querySelector('[data-chart=time]').data[1].y[100]")
    choose = "const s = document.querySelector(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'))"
    browser.run(choose, "[data-view]", "14")  # rank 13, which is slow
    browser.wait(f"document.querySelector('[data-chart=time]').data[1].y[100] > {mean} * 1.2")
    slow = browser.run("return document.querySelector('[data-chart=heat]').data[0].z.map(row => row[100])")
    assert max(slow) == slow[13] == pytest.approx(31, abs=5), "the straggler is the bright row"
    assert max(slow[:13] + slow[14:]) < 5
    browser.run(choose, "[data-filter]", "wrong")
    assert browser.run("return document.querySelectorAll('.predictions tbody tr:not([hidden])').length") == 10
    browser.run("document.querySelector('[data-percent]').click()")
    assert browser.run("return getComputedStyle(document.querySelector('.matrix .d'), '::after').content").endswith('%"')
    browser.run("document.querySelectorAll('.sortable thead button')[1].click()")
    column = browser.run(
        "return [...document.querySelectorAll('.sortable tbody tr')].map(row => Number(row.cells[1].textContent))"
    )
    assert column == sorted(column, reverse=True)
    image = "Plotly.toImage(document.querySelector('[data-key=loss]'), {format: 'png'}).then(arguments[0], arguments[0])"
    assert browser.driver.execute_async_script(image).startswith("data:image/png"), "a chart can be saved as an image"
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(
        "return [...document.querySelectorAll('[data-chart]')].every(box => box.layout.paper_bgcolor === '#ffffff')"
    )
    browser.run("dispatchEvent(new Event('afterprint'))")
    browser.check_quiet()


@in_browser
def test_everything_has_a_name_for_a_screen_reader(browser, one_run):
    if "one.html" not in browser.driver.current_url:
        browser.open(one_run)
    assert (
        browser.run("return [...document.querySelectorAll('[role=img], [role=region], nav')].filter(e => !e.ariaLabel).length")
        == 0
    )
    unlabelled = "return [...document.querySelectorAll('input, select')].filter(e => !e.labels.length).map(e => e.outerHTML)"
    assert browser.run(unlabelled) == []
    levels = browser.run("return [...document.querySelectorAll('h1, h2, h3, h4')].map(e => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), "no level of headings is left out"


@in_browser
def test_hostile_text_stays_text_everywhere(browser, folder):
    runs = [
        read_run(write_run(folder / f"hostile{i}", seed=i, steps=200, every=20, nodes=2, gpus=1, text=HOSTILE)) for i in (0, 1)
    ]
    for number_of_runs, run in enumerate(runs):
        run.name, run.notes = f"{number_of_runs}{HOSTILE}", [HOSTILE]
    for name, shown in (("hostile_one", runs[:1]), ("hostile_two", runs)):
        write_page(shown, folder / f"{name}.html")
        browser.open(folder / f"{name}.html")
        browser.draw_all()
        browser.run(
            "document.querySelectorAll('.plot.curve').forEach(b => Plotly.Fx.hover(b, [{curveNumber: 0, pointNumber: 1}]))"
        )
        assert browser.run("return window.hit") is None
        count = "return document.querySelectorAll(arguments[0]).length"
        assert browser.run(count, "script") == 3
        assert browser.run(count, "img, iframe, object, embed, b b, [onerror], [onclick], form, base, i:not([class])") == 0
        assert (
            browser.run("return [...document.querySelectorAll('a')].filter(a => !a.hash || a.href.includes('hit')).length") == 0
        )
        for query in ("h1, h3", ".reason, .note", ".incidents", ".scroll", "th", ".facts dt", ".facts dd", "option", ".texts li"):
            texts = browser.run("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", query)
            assert any(VISIBLE in text for text in texts), query
        assert browser.run(CUT) == []
        browser.check_quiet()
    texts = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    for query in (".heat .ytick text", ".curve .hoverlayer text", ".points .xtitle"):
        assert any("<b>7</b>&lt;" in text for text in browser.run(texts, query)), f"plotly shows names as they are: {query}"


@in_browser
def test_several_runs_are_overlaid_and_compared(browser, folder):
    runs = [
        read_run(write_run(folder / "small_lr", steps=400)),
        read_run(write_run(folder / "large_lr", steps=400, lr=1e-3, seed=1)),
        read_run(write_run(folder / "fewer_gpus", steps=400, nodes=2, seed=2, classes=50, ends=False)),
    ]
    write_page(runs, folder / "several.html")
    for width in (1280, 360):
        browser.open(folder / "several.html", width)
        browser.draw_all()
        names = {trace["name"] for trace in browser.traces('[data-key="eval:accuracy"]')}
        assert {"small_lr", "large_lr", "fewer_gpus"} <= names
        assert browser.run(CUT) == []
    rows = browser.run(
        "return [...document.querySelectorAll('#differences tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert ["lr", "options", "0.0003", "0.001", "0.0003"] in rows
    states = browser.run("return [...document.querySelectorAll('#comparison .state')].map(e => e.textContent)")
    assert states == ["✓ complete", "✓ complete", "■ interrupted"]
    browser.run("document.querySelector('[data-show=\"1\"]').click()")
    browser.wait("!document.querySelector('[data-key=\"eval:accuracy\"]').data.some(t => t.name === 'large_lr')")
    browser.run("const s = document.querySelector('[data-details]'); s.value = '2'; s.dispatchEvent(new Event('change'))")
    browser.draw_all()
    assert browser.run("return [...document.querySelectorAll('.run')].map(e => e.hidden)") == [True, True, False]
    assert browser.run("return document.querySelectorAll('.run:not([hidden]) .matrix.compact td[data-p]').length") == 2500
    assert browser.run(CUT) == []
    browser.check_quiet()


def make_huge_run() -> ReportedRun:
    """Return a run of a million logged steps, 10,000 evaluations and 1,024 ranks."""
    steps = np.arange(1, 1_000_001)
    loss = 1 / np.sqrt(steps) + np.random.default_rng(0).normal(size=len(steps)) * 0.01
    loss[123_456] = 50.0
    updates = {
        "step": steps,
        "time": 1e9 + steps * 0.5,
        "loss": loss,
        "grad_norm": loss * 2,
        "lr": loss * 0,
        "samples_per_second": loss + 9,
    }
    at = np.arange(1000, 1_000_001, 1000)
    own = np.full((len(at), 1024), 0.1)
    own[300:500, 700] = 0.15
    seconds = {"forward": own, "backward": own * 2, "communication": 0.5 - own * 3}
    places = [{"rank": rank, "node": rank // 8, "host": f"host-{rank // 8:03d}", "device": "NVIDIA H200"} for rank in range(1024)]
    run = ReportedRun(
        Path("huge"), "huge", [{"event": "start", "step": 0, "time": 1e9, "total_steps": 1_000_000, "ranks": places}], updates
    )
    run.evaluations = [
        {"step": int(step), "time": 1e9 + step * 0.5, "accuracy": step / 1e6} for step in range(100, 1_000_001, 100)
    ]
    run.ranks = RankTimes(at, at - 999, seconds, {"gpu_utilisation": own * 9})
    run.incidents = [{"time": 1e9 + i, "step": i, "level": "info", "kind": "X", "text": f"incident {i}"} for i in range(5000)]
    run.checkpoints = [{"step": i, "path": f"step_{i}", "time": 1e9 + i, "exists": True} for i in range(0, 1_000_000, 500)]
    per_rank = {part: values.mean(axis=0).tolist() for part, values in seconds.items()}
    run.summary = {"steps": 1_000_000, "began": 1e9, "ranks": 1024, "nodes": 128, "seconds_per_rank": per_rank}
    return run


@in_browser
def test_a_million_steps_and_1024_ranks_open_without_freezing(browser, folder):
    run = make_huge_run()
    write_page([run], folder / "huge.html")
    from plotly.offline import get_plotlyjs

    assert (folder / "huge.html").stat().st_size - len(get_plotlyjs().encode()) < 4e6
    browser.open(folder / "huge.html")
    browser.wait("document.querySelector('[data-key=loss]').data")
    assert browser.run("return [...document.querySelectorAll('[data-chart]')].some(box => !box.data)"), (
        "charts far below are drawn later"
    )
    loss = browser.traces('[data-key="loss"]')[0]
    assert 500 < loss["points"] <= 2000
    assert browser.run("return Math.max(...document.querySelector('[data-key=loss]').data[0].y)") == 50
    browser.draw_all()
    assert browser.traces('[data-key="eval:accuracy"]')[0]["points"] <= 2000
    rows = browser.run(
        "const rows = document.querySelector('[data-chart=heat]').data[0].z;"
        "return [rows.length, rows[0].length, rows.map(row => Math.max(...row))]"
    )
    assert rows[:2] == [128, 240]
    assert int(np.argmax(rows[2])) == 700 // 8, "a slow rank is visible in the row of its node"
    assert "rank 700 (host-087)" in browser.run("return document.querySelector('#time table').textContent")
    assert browser.run("return document.querySelectorAll('.incidents li').length") == 300
    assert browser.run(CUT) == []
    browser.check_quiet()


@in_browser
def test_without_scripts_the_page_is_readable_and_has_no_empty_controls(browser, one_run):
    browser.command("setScriptExecutionDisabled", value=True)
    try:
        browser.open(one_run)
        browser.command("setScriptExecutionDisabled", value=False)  # of scripts that start later: that of this test
        shown = browser.run("return document.body.innerText")
        visible = "return [...document.querySelectorAll(arguments[0])].filter(e => e.offsetParent).length"
        assert browser.run(visible, ".plot, select, input, button") == 0
        for text in (
            "Best accuracy",
            "last 0.",
            "An average step, without",
            "rank 13 (gpu-node-02)",
            "Confusion matrix",
            "--lr",
            "Increase --num_workers",
        ):
            assert text in shown, text
    finally:
        browser.command("setScriptExecutionDisabled", value=False)


# ---- without a browser


class Elements(HTMLParser):
    """Collects the elements and the attributes of a page, as a browser finds them."""

    def __init__(self, page: str):
        super().__init__()
        self.names: Counter[str] = Counter()
        self.attributes: Counter[str] = Counter()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names[tag] += 1
        self.attributes.update(name for name, _ in attrs)
        assert all(
            not (value or "").lower().startswith(("javascript:", "http")) for name, value in attrs if name in ("href", "src")
        )


def test_hostile_text_adds_no_element_and_no_attribute(tmp_path):
    """Pages of runs with plain and with hostile text have the same elements."""
    pages = []
    for name, text in (("plain", " plain"), ("hostile", HOSTILE)):
        runs = [
            read_run(write_run(tmp_path / f"{name}{i}", steps=200, nodes=2, gpus=1, text=text), text + str(i)) for i in (0, 1)
        ]
        pages += [make_page(runs[:1]), make_page(runs)]
    for plain, hostile in ((pages[0], pages[2]), (pages[1], pages[3])):
        assert Elements(plain).names == Elements(hostile).names
        without_class = lambda page: {**Elements(page).attributes, "class": None}  # a long text has a class of its own
        assert without_class(plain) == without_class(hostile)
        assert hostile.count("</script>") == 3
        hostile.encode("utf-8")


def test_the_policy_of_the_page_allows_only_its_own_scripts(tmp_path):
    page = make_page([read_run(write_run(tmp_path / "run", steps=200))])
    policy = page.split('http-equiv="Content-Security-Policy" content="')[1].split('"')[0]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert all(word.startswith("'sha256-") for word in rules["script-src"].split())
    scripts = [part.split("</script>")[0] for part in page.split("<script>")[1:]]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert rules["script-src"] == " ".join(f"'sha256-{one}'" for one in hashes)
    assert page.index("Content-Security-Policy") < page.index("<style")


def test_a_run_that_has_just_begun_has_no_empty_sections(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"event": "start", "step": 0, "time": 5, "schema": 1, "total_steps": 10}\n')
    page = make_page([read_run(tmp_path)])
    body = page[page.index("<body>") : page.index('<script type="application/json"')]
    assert "<section" not in body
    assert "<h1>" in body
    assert "of 10" in body


def test_strange_values_in_the_log_do_not_prevent_the_page(tmp_path):
    events = [
        {"event": "start", "step": 0, "time": 5, "ranks": [{"rank": "x"}, 7, {"rank": 1}], "options": [1], "versions": 3,
         "batch": "b", "command": "c", "sharding": {"text": "FSDP2 over 2 <ranks>"}},
        {"event": "update", "step": 1, "time": 6, "loss": "nan", "grad_norm": "inf", "lr": 0.1},
        {"event": "update", "step": 2, "time": 7, "loss": 1.0, "grad_norm": "nan", "lr": None},
        {"event": "evaluate", "step": 2, "time": 7, "loss": "nan", "accuracy": "inf"},
        {"event": "ranks", "step": 2, "time": 7, "first_step": 1, "last_step": 2, "data": [0.1, "nan"], "forward": [0.1, "nan"],
         "communication": [0, 0]},
    ]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "summary.json").write_text('{"overall": 3, "operations": {"a": 1}, "recommendations": "x"}')
    page = make_page([read_run(tmp_path), read_run(tmp_path, "again")])
    assert "NaN" not in page[page.index('id="data"') :].split("</script>")[0]
    assert "<dt>sharding</dt><dd>FSDP2 over 2 &lt;ranks&gt;</dd>" in page


def test_ranks_of_an_earlier_attempt_do_not_hide_the_others(tmp_path):
    """The first attempt has 2 ranks and the second one 3. The third rank has no times in the first attempt."""
    line = lambda step, count: {"event": "ranks", "step": step, "time": step, "first_step": step, "last_step": step,
                                "forward": [0.1] * count, "communication": [0.0] * count}  # fmt: skip
    events = [
        {"event": "start", "step": 0, "time": 0},
        line(1, 2),
        line(2, 2),
        {"event": "start", "step": 2, "time": 2},
        line(3, 3),
        line(4, 3),
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    ranks = chart_data(read_run(tmp_path))["ranks"]
    assert ranks["average"]["forward"] == [100, 100, 100]
    assert ranks["views"][0]["parts"]["forward"] == [100, 100]  # without the first line of each attempt


def test_json_in_the_page_cannot_end_its_script():
    text = safe_json({"a": HOSTILE, "b": [float("nan"), float("inf")], HOSTILE: 1})
    assert not {"<", ">", "&", "\u2028", "\u2029"} & set(text)
    assert json.loads(text) == {"a": HOSTILE, "b": [None, None], HOSTILE: 1}


def test_numbers_are_written_for_people():
    assert [number(value) for value in (1234567, 0.93512, 1.5e-7, float("nan"), None, True, -2.5)] == [
        "1,234,567", "0.9351", "1.500e-07", "NaN", UNKNOWN, "yes", f"{MINUS}2.500"]  # fmt: skip
    assert [brief(value) for value in (0.5, 5e-5, 100.0, 0.000282)] == ["0.5", "5e-05", "100", "0.000282"]
    seconds = (0.00001, 0.0481, 12.34, 59.96, 800, 7260, 200_000, float("nan"))
    assert [duration(value).replace("\u00a0", " ") for value in seconds] == [
        "10 µs", "48.1 ms", "12.3 s", "60 s", "13 min 20 s", "2 h 1 min", "2 d 7 h", UNKNOWN]  # fmt: skip
    assert percent(0.953) == "95.3 %"


def test_charts_of_ranks_leave_out_the_first_steps_and_earlier_ranks_keep_their_host(tmp_path):
    parts = ("data", "forward", "backward", "optimizer", "other", "communication")
    events = []
    for step, num_ranks, time_of in ((0, 2, 0.0), (20, 1, 100.0)):
        ranks = [{"rank": rank, "node": 0, "host": "a", "device": "CPU"} for rank in range(num_ranks)]
        events.append({"event": "start", "schema": 1, "step": step, "time": time_of, "total_steps": 40, "ranks": ranks})
        for last, seconds in ((step + 10, 9.0), (step + 20, 0.1)):
            times = {part: [seconds] * num_ranks for part in parts}
            line = {"step": last, "time": time_of + last, "first_step": last - 9, "last_step": last}
            events.append({"event": "update", "step": last, "time": time_of + last, "loss": 1.0})
            events.append({"event": "ranks", **line, **times, "system": {"cpu": [1.0] * num_ranks}})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    data = chart_data(read_run(tmp_path))
    assert data["ranks"]["step"] == [20, 40]
    assert data["ranks"]["views"][0]["parts"]["forward"] == [100.0, 100.0]
    assert data["ranks"]["rows"] == ["rank 0 (a)", "rank 1 (a)"]
    assert [line["name"] for line in data["system"]["cpu"]["lines"]] == ["a"]
