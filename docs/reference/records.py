"""Codes, exit codes, keys of the cluster file, and fields of the files in a run folder, as sections of pages."""

import inspect
import re

from accel_ddp.doctor import findings
from accel_ddp.errors import EXIT_CODES
from accel_ddp.launch.description import BACKENDS, KEYS, NODE_KEYS, NOT_FOR, TABLES, Key
from reference import mark, table
from reference.log_fields import EVENTS, EVERY_EVENT, INCIDENT


def codes() -> str:
    """Return one table for each group of codes. The comments in `CODES` are the titles of the groups."""
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for title, code in re.findall(r'^    (?:# (.*)\.|"([EWI]_\w+)": Code\()', inspect.getsource(findings), flags=re.MULTILINE):
        if title:
            rows = groups.setdefault(title, [])
        else:
            rows.append((f"`{code}`", *map(mark, findings.CODES[code])))
    return "\n".join(f"### {title}\n\n{table(('code', 'reason', 'fix'), rows)}" for title, rows in groups.items())


def exit_codes() -> str:
    return table(("code", "meaning"), ((str(code), text) for code, text in EXIT_CODES.items()))


def keys() -> str:
    """Return one table for the keys of the file, one for the keys of a node, and one for each backend."""
    rows = []
    for name, key in KEYS.items():
        if name not in TABLES:
            backends = [backend for backend in BACKENDS if name not in NOT_FOR[backend]]
            rows.append((f"`{name}`", "all" if len(backends) == len(BACKENDS) else ", ".join(backends), key.help))
    parts = ["## Keys of the file\n", table(("key", "backends", "value"), rows), "## Keys of a node\n", _keys(NODE_KEYS)]
    for name, found in TABLES.items():
        parts += [f"## Keys of `{name}`\n", _keys(found)]
    return "\n".join(parts)


def _keys(found: dict[str, Key]) -> str:
    return table(("key", "value"), ((f"`{name}`", key.help) for name, key in found.items()))


def fields() -> str:
    """Return a table of the fields of every event, and one for each event of log.jsonl."""
    parts = ["### every event\n", _fields(EVERY_EVENT)]
    for name, (text, found) in EVENTS.items():
        parts += [f"### {name}\n", f"{text}\n", _fields(found)]
    return "\n".join(parts)


def incident_fields() -> str:
    return _fields(INCIDENT)


def _fields(found: dict[str, tuple[str, str]]) -> str:
    rows = ((name if " " in name else f"`{name}`", *texts) for name, texts in found.items())
    return table(("field", "type", "meaning"), rows)
