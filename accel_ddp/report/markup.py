"""HTML and JSON in which text from data stays text, whatever it contains, and the mark of our own pages."""

import html
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accel_ddp.errors import UserError
from accel_ddp.records.run_log import without_nonfinite

# Characters that HTML does not allow, and halves of surrogate pairs, which UTF-8 cannot encode.
_INVALID = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_VOID = ("br", "col", "hr", "input", "meta")


class Html(str):
    """Text that is markup already. Every other string is escaped before it becomes part of a page."""


def escape(value: Any) -> Html:
    """Return a value as markup. None becomes nothing."""
    if isinstance(value, Html):
        return value
    return Html("" if value is None else html.escape(_INVALID.sub("\ufffd", str(value)), quote=True))


def tag(name: str, /, *content: Any, **attributes: Any) -> Html:
    """Return an element. Attributes that are None or False are left out; `class_` is written as class, `data_run` as data-run."""
    words = [name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            words.append(key if value is True else f'{key}="{escape(value)}"')
    opening = f"<{' '.join(words)}>"
    return Html(opening if name in _VOID else f"{opening}{join(content)}</{name}>")


def join(parts: Iterable[Any], separator: str = "") -> Html:
    return Html(Html(separator).join(map(escape, parts)))


def safe_json(value: Any) -> Html:
    """Return JSON for a <script> element. No text in it can end the element. Numbers that are not finite become null."""
    text = json.dumps(without_nonfinite(value, lambda _: None), separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


# Stands within the first 4096 bytes of the page. `require_page` overwrites no file without it.
GENERATOR = '<meta name="generator" content="accel-ddp report">'


def require_page(path: Path, given: str) -> None:
    """Raise UserError if the page cannot be written: it is no HTML file, another program's file, or a folder. `given` is the option."""
    if path.is_dir():
        raise UserError(f"{given}: is a folder. Use: --out {path / 'report.html'}")
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{given}: a browser opens files that end with .html. Use: --out {path.with_name(path.name + '.html')}")
    try:
        is_own = not path.exists() or GENERATOR.encode() in path.read_bytes()[:4096]
    except OSError as error:
        raise UserError(f"{given}: cannot be read: {error.strerror}.") from error
    if not is_own:
        raise UserError(
            f"{given}: this file exists, and accel-ddp report has not written it. Move it away, or use another name: "
            f"--out {path.with_name('accel_ddp_report.html')}"
        )
    parent = next(one for one in path.absolute().parents if one.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{given}: {parent} cannot be written. Use another path, for example --out ~/report.html.")
