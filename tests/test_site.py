"""The documentation site: every page is in the navigation, every link leads somewhere, and it works as files, without a network."""
# ruff: noqa: F811  (a fixture of another module)

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.conftest import ROOT
from tests.test_report_page import CONTRAST, Browser, browser, in_browser  # noqa: F401


def build(folder: Path, builder: str) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["make", "docs", f"SITE={folder}", f"BUILDER={builder}"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    build(folder, "html")
    return folder


def test_every_page_is_in_the_navigation_and_every_link_leads_to_a_page_and_a_heading(tmp_path):
    """Everything else is a warning of Sphinx, and a warning is an error. The pages are not written, which takes as long again."""
    build(tmp_path / "site", "dummy")
    for page in (ROOT / "docs").rglob("*.md"):
        assert not re.search(r"!\[[^]]*\]\(https?:", page.read_text()), f"{page.name}: a picture that needs a network"


@in_browser
def test_every_link_leads_to_a_file_of_the_site_and_nothing_is_loaded_from_elsewhere(site):
    """This also finds links of the theme, in HTML, and to files that were not copied."""
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    anchors = {name: {"", *re.findall(r'\sid="([^"]+)"', text)} for name, text in pages.items()}
    assert {f"{path.relative_to(ROOT).with_suffix('.html')}" for path in (ROOT / "docs").rglob("*.md")} <= set(pages)
    for name, text in pages.items():
        loaded = re.findall(r'<(?:script|img|link|iframe|source)\b[^>]*\s(?:src|href)="([^"]+)"', text)
        assert [address for address in loaded if address.startswith(("http", "//"))] == [], name
        for link in set(re.findall(r'\s(?:href|src)="([^"]*)"', text)):
            path, _, anchor = unescape(link).partition("#")
            if re.match(r"https?:|data:", path):
                continue
            target = os.path.normpath(os.path.join(os.path.dirname(name), unquote(path.partition("?")[0]))) if path else name
            assert (site / target).is_file(), f"{name}: {link}"
            assert target not in anchors or unquote(anchor) in anchors[target], f"{name}: {link}"
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"@import|url\(\s*['\"]?(?:http|//)", styles)
    assert "highlight-bash notranslate" in pages["docs/index.html"], "the word after ```bash does not change the language"


@in_browser
def test_search_finds_a_page_from_a_file(site, browser: Browser):
    browser.open(site / "index.html")
    browser.wait("location.href.endsWith('/docs/index.html')")
    browser.run("const box = document.querySelector('input[name=q]'); box.value = 'resume'; box.form.submit()")
    browser.wait("document.querySelectorAll('#search-results li').length > 3")
    found = browser.run("return [...document.querySelectorAll('#search-results li a')].map(a => a.getAttribute('href'))")
    assert all(browser.run("return new URL(arguments[0], location.href).protocol", link) == "file:" for link in found)
    assert "docs/resume.html" in found[:5], found
    browser.run("document.querySelector('#search-results li a').click()")
    browser.wait("document.querySelector('article h1') && !location.href.includes('search.html')")
    browser.check_quiet()


@in_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_fits_a_phone_and_is_readable_in_both_themes(site, browser: Browser, dark):
    for page in sorted(site.rglob("*.html")):
        browser.open(page, 390, dark=dark)
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), page.name
        assert browser.run("return [...document.images].every(image => image.complete && image.naturalWidth)"), page.name
    for name in ("index", "options", "launch"):
        browser.open(site / "docs" / f"{name}.html", 1280, dark=dark)
        background = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 300) == dark, background
        assert browser.run(CONTRAST) == {}, name
    browser.check_quiet()
