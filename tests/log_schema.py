"""The schema of log.jsonl and incidents.jsonl, as docs/log.md states it. Tests of runs compare their files with it."""

import json
import re
from functools import cache
from pathlib import Path

from accel_ddp.records.files import read_objects
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "log.md"
ANY = "any other name"
OPTIONAL = "missing"
TYPES = {"integer": int, "number": (int, float), "text": str, "list": list, "object": dict, "true": bool}


@cache
def documented() -> dict[str, dict[str, str]]:
    """Return the type of each field of each event, and of incidents."""
    sections = re.split(r"^##+ (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for title, text in zip(sections[::2], sections[1::2]):
        rows = re.findall(r"^\| (?:`(\w+)`|(any other name)) \| ([^|]+) \| [^|]*\| [^|]+\|$", text, flags=re.MULTILINE)
        if rows:
            found[title] = {name or other: kind for name, other, kind in rows}
    return found


def require_documented(folder: Path) -> set[str]:
    """Raise AssertionError if a line of the files of a run has an event, a field or a type that is not documented.

    Return the names of the events that occur.
    """
    events = set()
    for line in read_objects(folder / "log.jsonl"):
        assert line["event"] in documented(), f"docs/log.md does not describe the event {line['event']}"
        events.add(line["event"])
        require_fields(line, documented()["every event"] | documented()[line["event"]])
    for line in read_objects(folder / "incidents.jsonl"):
        require_fields(line, documented()["incidents.jsonl"])
        assert f"`{line['kind']}`" in PAGE.read_text(), f"docs/log.md does not describe the incident {line['kind']}"
    return events


def require_fields(line: dict, fields: dict[str, str]) -> None:
    for name, value in line.items():
        kind = fields.get(name) or fields.get(ANY)
        assert kind, f"docs/log.md does not describe the field {name} of {json.dumps(line)[:200]}"
        types = TYPES[kind.split()[0].rstrip(",")]
        is_nonfinite = value in ("nan", "inf", "-inf") and kind.startswith("number")
        assert isinstance(value, types) or is_nonfinite or (value is None and "null" in kind), (name, value, kind)
    missing = [name for name, kind in fields.items() if OPTIONAL not in kind and name != ANY and name not in line]
    assert not missing, f"{missing} are missing in {json.dumps(line)[:200]}"
