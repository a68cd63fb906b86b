"""How options are declared: an option's properties, and the groups of `--help`.

The properties are stored with the option and replace lists of names elsewhere: `affects_result` decides what a resumed run may
change, `per_node` what may differ between nodes.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from accel_ddp.config.other_names import OTHER_NAMES

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

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Properties:
    """The help text, the group and the constraints of an option."""

    help: str = ""
    group: str = ""  # of `--help`: a key of GROUPS
    affects_result: bool = True  # a resumed run must keep the value; False: it changes only rounding or dropout masks
    per_node: bool = False  # nodes may have different values
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    legacy: Any = None  # the value of runs that are older than the option, or than its default `auto`; None: the default
    also: tuple[str, ...] = ()  # names that users of other toolkits type; OTHER_NAMES has those of the options of every run
    kind: str = ""  # of an option that names a column: what its cells are
    needs: str = ""  # the option without which it has no effect
    excludes: str = ""  # an option that it cannot be combined with

    def exceeded(self, value: Any) -> str:
        """Return the limit that a number exceeds, as the end of "must be", or "". NaN exceeds each."""
        if not isinstance(value, int | float):
            return ""
        if self.at_least is not None and not value >= self.at_least:
            return f"{self.at_least} or more"
        if self.above is not None and not value > self.above:
            return f"above {self.above:g} ({self.help})"
        return f"below {self.below:g} ({self.help})" if self.below is not None and not value < self.below else ""


def option(
    default: Any, help: str | None = None, *, group: str | None = None, affects_result: bool | None = None,
    per_node: bool | None = None, at_least: float | None = None, above: float | None = None, below: float | None = None,
    legacy: Any = None, also: tuple[str, ...] | None = None, kind: str | None = None, needs: str | None = None,
    excludes: str | None = None,
) -> Any:  # fmt: skip
    """Return a dataclass field for an option of a recipe. A field that overrides an inherited one keeps what is not given.

    - `help` and `group` (a key of GROUPS) are shown by `--help`.
    - `affects_result`: whether the option changes what is learned. `--resume` then refuses another value. Default: True.
    - `per_node`: whether nodes may have different values. Default: False.
    - `at_least`: the smallest valid number. `above` and `below`: limits that are no valid numbers themselves.
    - `legacy`: the value of runs from before the option existed.
    - `also`: names of the option in other toolkits, for suggestions.
    - `kind`: see `column`.
    - `needs` and `excludes`: the name of an option without which, or with which, another value than the default is refused.
    """
    given = {name: value for name, value in locals().items() if name != "default" and value is not None}
    return dataclasses.field(default=default, metadata=given)


def column(default: Any, help: str, *, kind: str = "text", **properties: Any) -> Any:
    """Return an option that names a column of the rows; one whose default is a tuple names several. An empty name is not required.

    A run without the column is refused before torch is imported. From `kind` follow the other checks, how a task reads the cells, and
    the columns of `accel-ddp predict`: text, label, number, words, tags or image.
    """
    return option(default, help, group="data", kind=kind, **properties)


def columns_of(cfg: Any, *kinds: str) -> list[tuple[str, str]]:
    """Return the options that name columns of these kinds (default: of all), each with its column, once for each of several."""
    found = []
    for name, properties in properties_of(type(cfg)).items():
        if properties.kind and (not kinds or properties.kind in kinds):
            given = getattr(cfg, name)
            found += [(name, one) for one in (given if isinstance(given, tuple) else (given,)) if one]
    return found


def of_group(group: str, **properties: Any) -> Callable[[C], C]:
    """Return a decorator, inside @dataclass, that gives the options of a class these defaults. `at_least` is given to numbers."""

    def decorate(cls: C) -> C:
        for name, field in vars(cls).items():
            if isinstance(field, dataclasses.Field) and name not in getattr(cls, "__dataclass_fields__", {}):
                is_number = type(field.default) in (int, float)
                own = {key: value for key, value in properties.items() if is_number or key != "at_least"}
                field.metadata = MappingProxyType({"group": group, **own, **field.metadata})
        return cls

    return decorate


def properties_of(cls: type) -> dict[str, Properties]:
    """Return the properties of each option of a config class. A class without a value takes its base class's value."""
    found = {}
    for name in [field.name for field in dataclasses.fields(cls)]:
        merged: dict[str, Any] = {"also": tuple(OTHER_NAMES.get(name, "").split())}
        for base in reversed(cls.__mro__):
            own = base.__dict__.get("__dataclass_fields__", {}).get(name)
            merged |= own.metadata if own is not None else {}
        found[name] = Properties(**merged)
    return found
