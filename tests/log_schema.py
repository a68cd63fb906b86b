"""The files of real runs have the fields that docs/reference/log_fields.py states, which docs/log.md shows."""

import json
import re
import sys
from pathlib import Path

from accel_ddp.records.files import read_objects
from tests.conftest import ROOT

sys.path.append(str(ROOT / "docs"))
from reference.log_fields import ANY, EVENTS, EVERY_EVENT, INCIDENT, Fields

GOLDEN = Path(__file__).parent / "golden" / "observed_names.json"
OPEN = ("options", "environment", "versions", "system")  # objects whose names depend on the machine and the command
PAGE, CODES_PAGE = ROOT / "docs" / "log.md", ROOT / "docs" / "codes.md"
TYPES = {"integer": int, "number": (int, float), "string": str, "list": list, "object": dict, "true": bool}


def fields_of(event: str) -> Fields:
    assert event in EVENTS, f"log_fields.py does not describe the event {event}"
    return EVERY_EVENT | EVENTS[event][1]


def require_documented(folder: Path) -> set[str]:
    """Raise AssertionError if a line of the files of a run has an event, a field or a type that is not documented.

    Return the names of the events that occur.
    """
    events = set()
    for line in read_objects(folder / "log.jsonl"):
        require_fields(line, fields_of(line["event"]))
        events.add(line["event"])
    for line in read_objects(folder / "incidents.jsonl"):
        require_fields(line, INCIDENT)
        assert f"`{line['kind']}`" in CODES_PAGE.read_text(), f"docs/codes.md does not describe the incident {line['kind']}"
    listed = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text().split("## Follow a run")[0], flags=re.MULTILINE)
    known = re.compile("|".join(re.sub(r"\d+", r"\\d+", re.escape(name.rstrip("/"))) for name in listed))
    assert not (unknown := [path.name for path in folder.iterdir() if not known.fullmatch(path.name)]), (
        f"docs/log.md lacks {unknown}"
    )
    return events


def require_golden(run: str, found: dict[str, list[str]]) -> None:
    """Raise AssertionError if a run has other names in its log or its tracker than tests/golden/ has: dashboards depend on them."""
    assert found == json.loads(GOLDEN.read_text())[run], f"{run} has other names than {GOLDEN}: {json.dumps(found)}"


def names_in_log(folder: Path) -> dict[str, list[str]]:
    """Return the fields of each event of a run, and those of the objects inside."""
    names: dict[str, set[str]] = {}
    for line in read_objects(folder / "log.jsonl"):
        inner = [f"{name}.{key}" for name, value in line.items() if isinstance(value, dict) and name not in OPEN for key in value]
        names.setdefault(line["event"], set()).update(line, inner)
    return {event: sorted(some) for event, some in names.items()}


def require_fields(line: dict, fields: Fields) -> None:
    for name, value in line.items():
        kind, _ = fields.get(name) or fields.get(ANY) or ("", "")
        assert kind, f"log_fields.py does not describe the field {name} of {json.dumps(line)[:200]}"
        types = TYPES[kind.split()[0].rstrip(",")]
        is_nonfinite = value in ("nan", "inf", "-inf") and kind.startswith("number")
        assert isinstance(value, types) or is_nonfinite or (value is None and "null" in kind), (name, value, kind)
    missing = [name for name, (kind, _) in fields.items() if "missing" not in kind and name != ANY and name not in line]
    assert not missing, f"{missing} are missing in {json.dumps(line)[:200]}"
