"""Make the picture of `accel-ddp report` in the README, docs/report.png: key figures, the loss, and the heat map of slow ranks.

    PYTHONPATH=. python docs/make_screenshot.py docs/report.png RUN

The picture in the repository is of a real run: `sft` with the built-in model on two NCCL ranks that share one H200. Rank 1 slept
70 ms in each step from 100 to 200, was killed at step 266, and the launchers restarted the run.

It needs Chromium: apt-get install -y --no-install-recommends chromium chromium-driver
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from accel_ddp.report.page import write_page
from accel_ddp.report.run_reader import read_run
from tests.test_report_page import Browser

WIDTH, SCALE = 838, 2  # the width of a README in pixels, and the pixels of the picture for each of them
ARRANGE = """
const shown = ['Wall time', 'Best loss', 'Goodput', 'Waiting', 'Incidents'];
for (const tile of document.querySelectorAll('.tile')) tile.hidden = !shown.includes(tile.querySelector('dt').textContent);
const box = document.createElement('div'); box.id = 'shown';
for (const kind of ['curve', 'heat']) box.append(document.querySelector(`.card:has([data-chart=${kind}])`));
document.querySelector('main').prepend(box);
const style = document.createElement('style');
style.textContent = `.tile[hidden], nav, header .subtitle, main > :not(#shown), .figures, figcaption p { display: none !important }
  html { overflow: hidden } header { padding: 0.8rem 1.5rem !important } #shown .card { grid-column: auto; padding-bottom: 0 }
  .tiles { margin-top: 0.7rem !important; grid-template-columns: repeat(5, 1fr) !important }
  #shown .plot { height: 225px !important; min-height: 0 } .tile { padding: 0.5rem 0.6rem !important }
  #shown { display: grid; grid-template-columns: 1fr 1fr; gap: 0.8rem } main { padding-top: 0 !important; margin-top: 0 }`;
document.head.append(style);
"""


def take_picture(page: Path, folder: Path) -> Image.Image:
    browser = Browser(folder / "browser")
    try:
        browser.open(page, WIDTH)
        browser.run(ARRANGE)
        browser.draw_all()
        bottom = round(browser.run("return document.querySelector('#shown').getBoundingClientRect().bottom")) + 8
        browser.command("setDeviceMetricsOverride", width=WIDTH, height=bottom, deviceScaleFactor=SCALE, mobile=False)
        browser.wait("devicePixelRatio === 2")
        picture = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB")
    finally:
        browser.driver.quit()
    return picture.crop((0, 0, WIDTH * SCALE, bottom * SCALE))


if __name__ == "__main__":
    target, folder = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as temporary:
        write_page([read_run(folder)], Path(temporary) / "page.html")
        picture = take_picture(Path(temporary) / "page.html", Path(temporary))
    picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(target, optimize=True)
