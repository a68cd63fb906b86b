"""Make the picture of `accel-ddp report` in the README: docs/report.png.

    PYTHONPATH=. python docs/make_screenshot.py docs/report.png          # the example: its numbers are invented, no run trained
    PYTHONPATH=. python docs/make_screenshot.py docs/report.png RUN...   # runs of your own

It needs Chromium: apt-get install -y --no-install-recommends chromium chromium-driver
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from accel_ddp.report.page import write_page
from accel_ddp.report.run_reader import read_run
from tests.report_runs import write_run
from tests.test_report_page import Browser

WIDTH, GAP = 1280, 16  # pixels
# What the picture shows, from top to bottom: (the first element, the last element), with everything between them.
PARTS = (
    ("header", ".card"),
    ("#incidents", "#incidents"),
    (".card:has(.time)", ".card:has(.time)"),
    (".card:has(.heat)", ".card:has(.heat)"),
)
EDGES = "return arguments[0].map(q => document.querySelector(q).getBoundingClientRect()).map((r, i) => i ? r.bottom : r.top)"


def take_picture(page: Path, folder: Path) -> Image.Image:
    """Return the parts of the page below each other."""
    browser = Browser(folder / "browser")
    try:
        browser.open(page, WIDTH)
        browser.draw_all()
        browser.run("document.querySelector('nav a[aria-current]')?.removeAttribute('aria-current')")
        whole = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB")
        edges = [[round(edge) for edge in browser.run(EDGES, part)] for part in PARTS]
    finally:
        browser.driver.quit()
    picture = Image.new("RGB", (WIDTH, sum(bottom - top + GAP for top, bottom in edges)), whole.getpixel((1, 1)))
    place = 0
    for top, bottom in edges:
        picture.paste(whole.crop((0, top, WIDTH, bottom)), (0, place))
        place += bottom - top + GAP
    return picture


if __name__ == "__main__":
    target, *folders = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as temporary:
        runs = [read_run(folder) for folder in folders]
        if not runs:
            runs = [read_run(write_run(Path(temporary) / "example", nodes=2), "example (synthetic)")]
            runs[0].folder = Path("runs/example")
        write_page(runs, Path(temporary) / "page.html")
        picture = take_picture(Path(temporary) / "page.html", Path(temporary))
    picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(target, optimize=True)
