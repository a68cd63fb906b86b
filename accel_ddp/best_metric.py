"""The metric of `--best_metric`: which one it is, and whether a lower or a higher value is better."""

import difflib
import math
from typing import Literal, NamedTuple

from accel_ddp.errors import UserError

# "min": lower is better. "max": higher is better. "": not known, and further metrics may follow whose names begin with this one.
Direction = Literal["min", "max", ""]


class BestMetric(NamedTuple):
    """A metric by which evaluations are compared."""

    name: str
    direction: Literal["min", "max"]

    def require(self, metrics: dict[str, float]) -> None:
        """Raise UserError if an evaluation has not measured the metric."""
        if self.name not in metrics:
            raise UserError(
                f"--best_metric {self.name}: the evaluation has no such metric.{_suggest(self.name, list(metrics))} "
                f"Use one of: {', '.join(metrics)}."
            )

    def is_better(self, value: float, than: float | None) -> bool:
        """Return whether `value` is better than an earlier one. NaN is never better, and of equal values the first is best."""
        if math.isnan(value):
            return False
        return than is None or (value < than if self.direction == "min" else value > than)

    def rank(self, evaluations: dict[int, dict[str, float]]) -> list[int]:
        """Return the steps with a value of the metric, the best first. Of equal values the earlier step is first."""
        values = {step: metrics[self.name] for step, metrics in evaluations.items() if self.name in metrics}
        sign = 1 if self.direction == "min" else -1
        return sorted((step for step in values if not math.isnan(values[step])), key=lambda step: (sign * values[step], step))


def choose(text: str, declared: dict[str, Direction], can_add: bool = False) -> BestMetric:
    """Return the metric that `--best_metric TEXT` means among those that a recipe declares.

    TEXT is NAME, NAME:min or NAME:max. Without it, the first declared metric is used. If a recipe declares none, any name is
    accepted, because its metrics are not known before its first evaluation. `can_add` states whether there is `--metrics`.
    """
    is_closed = bool(declared)
    declared = declared or {"loss": "min"}
    name, colon, given = text.partition(":")
    name = name or next(iter(declared))
    if colon and given not in ("min", "max"):
        raise UserError(f"--best_metric {text}: after the colon, min or max is expected. Type {name}:min or {name}:max.")
    is_known = name in declared or any(
        direction == "" and name.startswith(f"{prefix}_") for prefix, direction in declared.items()
    )
    if is_closed and not is_known:
        raise UserError(
            f"--best_metric {text}: this recipe does not measure {name}.{_suggest(name, list(declared))} "
            f"Use one of: {', '.join(declared)}.{' Or add it with --metrics.' if can_add else ''} A metric that you write into a "
            "recipe is declared in `metric_directions` of its Config."
        )
    direction = given or declared.get(name, "")
    if direction not in ("min", "max"):
        raise UserError(
            f"--best_metric {text}: whether a lower or a higher {name} is better is not known. Type --best_metric {name}:min or "
            f"--best_metric {name}:max."
        )
    return BestMetric(name, direction)


def _suggest(name: str, known: list[str]) -> str:
    """Return " Did you mean accuracy?" for a misspelt name, or "". HF Trainer writes eval_ before each name."""
    word = name.lower().removeprefix("eval_")
    near = difflib.get_close_matches(word, known, n=1) or [other for other in known if word in other]
    return f" Did you mean {near[0]}?" if near else ""
