"""Makes HTML and JSON in which text from data stays text, whatever it contains."""

import html
import json
import math
import re
from collections.abc import Iterable
from typing import Any

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
    text = json.dumps(_without_nonfinite(value), separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _without_nonfinite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(one) for one in value]
    return value
