"""Reads other_names.yaml: names of options in other toolkits, for error messages, `accel-ddp convert` and docs/from_*.md."""

from pathlib import Path
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C it takes 6 ms instead of 60 ms
TABLES: dict[str, dict[str, Any]] = yaml.load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), _LOADER)
OTHER_NAMES: dict[str, str] = TABLES["other_names"]
INSTEAD: dict[str, str] = TABLES["instead"]
NO_EQUIVALENT: dict[str, str] = TABLES["no_equivalent"]
NOTES: dict[str, str] = TABLES["notes"]
