"""Code to try a trained model, with a row of the user's data. It survives every shell, whatever the row contains."""

import re
import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

MAX_LENGTH = 160  # characters of a text; longer texts would fill the terminal


def literal(value: Any) -> str:
    """Return a text, a list or a dictionary as Python code without single quotes, backslash pairs and line breaks.

    Between single quotes no shell changes it. Placeholders of `command` in a text are escaped.
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(name)}: {literal(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(literal, value))}]"
    if not isinstance(value, str):
        return repr(value)
    body = repr('"' + value)[2:-1]  # a text that contains a double quote is always written between single quotes
    body = body.replace(r"\\", r"\x5c").replace(r"\'", r"\x27").replace('"', r"\"")
    return '"' + re.sub(r"\{(?=(?:folder|model)\})", r"\\x7b", body) + '"'


def shorten(text: str) -> str:
    """Return the text, or its first words if it is long."""
    if len(text) <= MAX_LENGTH:
        return text
    return text[:MAX_LENGTH].rsplit(None, 1)[0] or text[:MAX_LENGTH]


def first_texts(rows: "datasets.Dataset", columns: list[str]) -> list[str]:
    """Return the texts of the first row that has a text in each of the columns, shortened. At most 100 rows are read."""
    for row in rows.select(range(min(len(rows), 100))):
        texts = [row[column] for column in columns]
        if all(isinstance(text, str) and text.strip() for text in texts):
            return [shorten(text) for text in texts]
    return ["YOUR TEXT" for _ in columns]


def command(code: str, folder: str, model: str = "{folder}") -> str:
    """Return a shell command that runs the code. {folder} in it becomes a text, and {model} becomes the code `model`."""
    code = code.replace("'{folder}'", "{folder}").replace("{model}", model).replace("{folder}", literal(folder))
    return f"python -c {shlex.quote(code)}"
