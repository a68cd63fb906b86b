"""Settings of the documentation site. `make docs` builds it, and tests/test_site.py checks it.

The source folder is the repository, not docs/: pages link to README.md, CHANGELOG.md and files of other folders as they do on
GitHub. Linked files that are no pages are copied into the site. Pages are plain Markdown without directives of Sphinx; the lists
in docs/index.md are the navigation.
"""

import functools
import gc
import re
import sys
from pathlib import Path

from sphinx.search.en import SearchEnglish

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from accel_ddp import __version__  # noqa: E402

project = "accel_ddp"
author = project_copyright = "accel_ddp contributors"
version = release = __version__
html_title = f"accel_ddp {version}"

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "benchmarks/README.md", "recipes/README.md", "accelerate_configs/*.md"]
exclude_patterns = [".*", "**/.*", "build", "dist", "runs", "tests", "accel_ddp", "**/__pycache__"]
myst_heading_anchors = 4  # the anchors of GitHub

html_theme = "furo"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
# Summaries of search results are fetched, which browsers refuse for pages that are opened as files.
html_js_files = [(None, {"body": "if (location.protocol === 'file:') DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false"})]
html_search_scorer = str(ROOT / "docs" / "site" / "search.js")
html_copy_source = html_show_sphinx = False
html_last_updated_fmt = None
html_extra_path = ["site/index.html"]  # the site begins at docs/index.html

# A third of the time of a build: words that are on many pages, garbage of a process that lives for seconds, and curly quotes.
SearchEnglish.stem = functools.cache(SearchEnglish.stem)
gc.disable()
smartquotes = False


def add_navigation(app, docname: str, source: list[str]) -> None:
    """Append toctrees: on the home page one for each heading with a list of pages, elsewhere one for the folder of the page's name."""
    if docname == root_doc:
        for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
            heading = section.splitlines()[0]
            for part in re.split(r"^### ", section, flags=re.MULTILINE):
                name = part.splitlines()[0]
                caption = name if name == heading else f"{heading.removesuffix(' guides')}: {name}"
                pages = re.findall(r"^- \[(.+?)\]\((.+?)\.md\)", part, flags=re.MULTILINE)
                entries = "".join(f"{title} <{page}>\n" for title, page in pages)
                source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: '{caption}'\n\n{entries}```\n" if pages else ""
    elif any((ROOT / docname).glob("*.md")):
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{Path(docname).name}/*\n```\n"


def setup(app) -> dict[str, bool]:
    app.connect("source-read", add_navigation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
