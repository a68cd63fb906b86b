"""Codes, exit codes, keys of the cluster file, and fields of the files in a run folder, as sections of pages."""

from accel_ddp.doctor.findings import FIXES
from accel_ddp.launch.description import BACKENDS, KEYS, NODE_KEYS, NOT_FOR, TABLES, Key
from reference import mark, table
from reference.code_meanings import EXIT_CODES, MEANINGS
from reference.log_fields import EVENTS, EVERY_EVENT, INCIDENT


def codes() -> str:
    """Return one table for each group of codes."""
    parts = []
    for title, meanings in MEANINGS.items():
        rows = ((f"`{code}`", mark(meaning), mark(FIXES[code])) for code, meaning in meanings.items())
        parts.append(f"### {title}\n\n{table(('code', 'reason', 'fix'), rows)}")
    return "\n".join(parts)


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
