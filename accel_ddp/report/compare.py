"""Compares runs: short names that distinguish them, and the options, versions and machines in which they differ."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from accel_ddp.report.run_data import Run

_OF_THE_FOLDER = ("output_dir", "run_name")  # they differ in every run, and the name shows it


def unique_names(folders: list[Path]) -> list[str]:
    """Return the shortest end of each path that no other path has."""
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    names = []
    for own in parts:
        ends = range(1, len(own))
        length = next((n for n in ends if sum(other[-n:] == own[-n:] for other in parts) == 1), len(own))
        names.append("/".join(own[-length:]).replace("//", "/"))
    return names


def differences(runs: list[Run]) -> list[tuple[str, str, list[Any]]]:
    """Return (section, name, value of each run) for what differs between runs. None: the run does not have the value.

    An option that a run does not have, because its version is older, is no difference if the other runs use the default.
    """
    found = []
    described = [_describe(run) for run in runs]
    changed = {name for run in runs for name in _dict(run.start.get("options"))}
    for section in ("options", "data", "cluster", "versions", "environment"):
        names = dict.fromkeys(name for one in described for name in one[section])
        for name in names:
            values = [one[section].get(name) for one in described]
            if section == "options" and None in values and name not in changed and all("options" in run.start for run in runs):
                continue
            if any(value != values[0] for value in values[1:]):
                found.append((section, name, values))
    return found


def _describe(run: Run) -> dict[str, dict[str, Any]]:
    start = run.start
    options = run.options or {
        name: value[0] for name, value in _dict(start.get("options")).items() if isinstance(value, list) and value
    }
    ranks = [one for one in start.get("ranks") or [] if isinstance(one, dict)] if isinstance(start.get("ranks"), list) else []
    devices = Counter(str(one.get("device")) for one in ranks)
    cluster = {
        "ranks": run.summary.get("ranks"),
        "nodes": run.summary.get("nodes"),
        "hosts": ", ".join(dict.fromkeys(str(one.get("host")) for one in ranks)) or None,
        "devices": ", ".join(f"{count} x {name}" for name, count in devices.items()) or None,
        "precision": start.get("precision"),
        "sharding": _dict(start.get("sharding")).get("text"),
        "micro-batch": _dict(start.get("batch")).get("micro"),
        "accumulation": _dict(start.get("batch")).get("accumulation"),
    }
    return {
        "options": {name: value for name, value in options.items() if name not in _OF_THE_FOLDER},
        "data": {"items": start.get("items"), "total_steps": start.get("total_steps")},
        "cluster": cluster,
        "versions": _dict(start.get("versions")),
        "environment": _dict(start.get("environment")),
    }


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
