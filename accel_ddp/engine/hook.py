"""The interface of hooks, which listen to a run."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_ddp import phases
from accel_ddp.engine.step_numbers import Numbers, Pace
from accel_ddp.phases import HOOKS, UNLIMITED, phase
from accel_ddp.records.eval_tables import Table
from accel_ddp.saving.checkpoints import Metrics


class Hook:
    """The base class of hooks. A hook observes a run on every rank that has it, with the same numbers on every rank.

    If a hook stops the run on one rank, all ranks stop, so a hook may exist on rank 0 only.
    """

    def on_describe(self, facts: dict[str, Any]) -> None:
        """Called before `on_start`. `facts` has ranks, versions and options, as in the event `start` of log.jsonl."""

    def on_start(self, step: int, total_steps: int, evaluations: dict[int, Metrics]) -> bool | None:
        """Called before the first step. `evaluations` were made before a resume. Return True to stop the run."""

    def on_warm_up(self, step: int, seconds: float) -> None:
        """Called after the layers were compiled, before the first step or in the middle of a run."""

    def on_restart(self, step: int, restart: dict[str, Any]) -> None:
        """Called before the first step after an automatic restart, on rank 0 only."""

    def on_step_begin(self, step: int) -> None:
        """Called before the data of step `step` are loaded."""

    def on_update(self, numbers: Numbers, pace: Pace) -> None:
        """Called with the numbers of each update, on a GPU one step late."""

    def on_step_end(self, step: int) -> None:
        """Called after step `step`, before its checkpoint and its evaluation."""

    def on_evaluate(self, step: int, metrics: Metrics) -> bool | None:
        """Called after an evaluation. Return True to stop the run after this step."""

    def on_tables(self, step: int, tables: dict[str, Table]) -> None:
        """Called after `on_evaluate` if the evaluation has tables, on rank 0 only."""

    def on_save(self, step: int, path: Path) -> None:
        """Called when the checkpoint of `step` is complete, on rank 0 only, some steps after `step`."""

    def summarize(self) -> dict[str, Any] | None:
        """Return fields for the summary of the run that `on_end` receives."""

    def on_end(self, step: int, summary: dict[str, Any]) -> None:
        """Called once at the end, with the metrics of the last step and what `summarize` of each hook returned."""

    def on_export(self, folder: Path) -> None:
        """Called after `on_end` when the model is exported, on rank 0 only."""


class Hooks(list[Hook]):
    """The hooks of a run on this rank."""

    def notify(
        self, event: str, *values: Any, guard: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    ) -> list[Any]:
        """Call a method of all hooks that define it, and return the results. This is the only place that calls hooks."""
        default = getattr(Hook, event)
        # Before and after the training, where trackers connect and upload, a hook may take as long as it needs.
        place = contextlib.nullcontext() if phases.HERE.phase in UNLIMITED else phase(HOOKS)
        found = []
        with place:
            for hook in self:
                method = getattr(hook, event, default)
                if getattr(method, "__func__", method) is not default:
                    with guard():
                        found.append(method(*values))
        return found
