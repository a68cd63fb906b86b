"""The properties of an option, stored with the option.

They replace lists of option names elsewhere: `affects_result` decides what a resumed run may change, `per_node` what may differ
between nodes, `also` which names of other toolkits lead to the option.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

# Groups of `--help`, in the order in which they are shown.
GROUPS = {
    "model": "Which model is trained, and which part of it.",
    "data": "Where the rows come from.",
    "training": "These options change what is learned.",
    "evaluation": "When the model is evaluated.",
    "saving": "Checkpoints, stopping and resuming.",
    "logging": "What is logged, and where.",
    "speed": "These options change time and memory, and the result only by rounding.",
    "multi-node": "Several GPUs and nodes.",
}


@dataclass(frozen=True)
class Properties:
    """The help text, the group and the constraints of an option."""

    help: str = ""
    group: str = ""  # of `--help`: a key of GROUPS
    affects_result: bool = True  # a resumed run must keep the value; False: it changes only rounding or dropout masks
    per_node: bool = False  # nodes may have different values
    at_least: float | None = None
    also: tuple[str, ...] = ()  # names that users of other toolkits type, for "did you mean" messages


def option(
    default: Any,
    help: str | None = None,
    *,
    group: str | None = None,
    affects_result: bool | None = None,
    per_node: bool | None = None,
    at_least: float | None = None,
    also: tuple[str, ...] | None = None,
) -> Any:
    """Return a dataclass field with these properties. A field that overrides an inherited one keeps what is not given."""
    given = {
        "help": help, "group": group, "affects_result": affects_result, "per_node": per_node, "at_least": at_least, "also": also,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata={name: value for name, value in given.items() if value is not None})


def properties_of(cls: type) -> dict[str, Properties]:
    """Return the properties of each option of a config class. A class without a value takes that of its base class."""
    found = {}
    for name in [field.name for field in dataclasses.fields(cls)]:
        merged: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            own = base.__dict__.get("__dataclass_fields__", {}).get(name)
            merged |= own.metadata if own is not None else {}
        found[name] = Properties(**merged)
    return found
