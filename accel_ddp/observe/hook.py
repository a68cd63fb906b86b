"""The interface of hooks."""

from pathlib import Path
from typing import Any

from accel_ddp.records.eval_tables import Table
from accel_ddp.saving.checkpoints import Metrics
from accel_ddp.training.step_numbers import Numbers, Pace

# The rates of an update, as log.jsonl and the trackers name them.


def rates_of(numbers: Numbers, pace: Pace) -> dict[str, float]:
    """Return tokens, tokens/s, TFLOP/s and MFU, without those that are not known."""
    known = {
        "tokens": numbers.tokens,
        "tokens_per_second": round(pace.tokens, 1),
        "tflops": float(f"{pace.flops / 1e12:.4g}"),
    }
    known = {name: value for name, value in known.items() if value}
    return known | ({"mfu": round(pace.mfu, 5)} if pace.mfu is not None else {})


class Hook:
    """A hook is called on every rank that has it, with numbers that are the same on every rank.

    If a hook ends the run on one rank, all ranks end it, so that a hook may exist on the main rank only.
    """

    def on_describe(self, facts: dict[str, Any]) -> None:
        """Called before `on_start`. `facts` has the ranks, the versions and the options, as the event `start` of log.jsonl."""

    def on_start(self, step: int, total_steps: int, evaluations: dict[int, Metrics]) -> bool | None:
        """`evaluations` are those before the run was resumed. Return True if they end the run."""

    def on_warm_up(self, step: int, seconds: float) -> None:
        """Called after the layers were compiled, before the first step."""

    def on_restart(self, step: int, restart: dict[str, Any]) -> None:
        """Called before the first step after an automatic restart, on the main rank only."""

    def on_update(self, numbers: Numbers, pace: Pace) -> None: ...
    def on_evaluate(self, step: int, metrics: Metrics) -> bool | None:
        """Return True to end the run after this step."""

    def on_tables(self, step: int, tables: dict[str, Table]) -> None:
        """Called after `on_evaluate` if the evaluation has tables, on the main rank only."""

    def on_save(self, step: int, path: Path) -> None:
        """Called when the checkpoint of `step` is complete, on the main rank only, some steps after `step`."""

    def on_export(self, folder: Path) -> None:
        """Called after `on_end` when the model is exported, on the main rank only."""

    def on_end(self, step: int, summary: dict[str, Any]) -> None: ...
