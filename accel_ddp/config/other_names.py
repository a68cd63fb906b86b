"""Reads other_names.yaml: names of options in other toolkits, for error messages, `accel-ddp convert` and docs/from_*.md."""

from pathlib import Path
from typing import Any

from accel_ddp.text import read_table

TABLES: dict[str, dict[str, Any]] = read_table(Path(__file__).with_suffix(".yaml"))
OTHER_NAMES: dict[str, str] = TABLES["other_names"]
INSTEAD: dict[str, str] = TABLES["instead"]
NO_EQUIVALENT: dict[str, str] = TABLES["no_equivalent"]
NOTES: dict[str, str] = TABLES["notes"]
