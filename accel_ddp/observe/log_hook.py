"""The log of a run, log.jsonl in its folder. docs/log.md describes every event."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.hook import Hook
from accel_ddp.engine.step_numbers import SYSTEM, RankSample, rates_of, splits_between
from accel_ddp.phases import Split, Timing
from accel_ddp.ranks.reporting import warn
from accel_ddp.records import eval_tables as table_files
from accel_ddp.records.run_log import FILE, SCHEMA, LogWriter

FEW_RANKS, SECONDS_PER_RANK = 64, 0.02


class JsonlLog(Hook):
    """Writes one line per event to OUTPUT_DIR/log.jsonl, which is readable while the run continues."""

    def __init__(self, cfg: TrainConfig):
        self.every, self.folder = cfg.log_every, Path(cfg.output_dir)
        self.path = self.folder / FILE
        self.log = LogWriter(self.path)
        self.failing: set[Path] = set()  # folders whose disk does not accept files
        self.best, self.evaluations = cfg.best(), {}
        self.facts: dict[str, Any] = {}
        self.before: list[RankSample] = []
        self.ranks_written_at = -math.inf

    def _write(self, event: str, step: int, **values: Any) -> None:
        self._attempt(self.path, step, lambda: self.log.write(event, step, **values))

    def _attempt(self, path: Path, step: int, write: Callable[[], object]) -> bool:
        """Return whether a file was written. A disk that does not accept it is reported once, until it does again."""
        try:
            write()
        except OSError as error:
            if path.parent not in self.failing:
                warn(f"{path} cannot be written: {error.strerror}. Training continues.", "LOG_FAILED", step)
            self.failing.add(path.parent)
            return False
        self.failing.discard(path.parent)
        return True

    def on_describe(self, facts):
        self.facts = facts

    def on_start(self, step, total_steps, evaluations):
        self.first, self.total_steps = step, total_steps
        self.evaluations, self.before = dict(evaluations), []
        if self.log.file.closed:  # these hooks have observed another `fit`
            self.log = LogWriter(self.path)
        table_files.remove_after(self.folder, step)
        self._write("start", step, schema=SCHEMA, total_steps=total_steps, **self.facts)

    def on_warm_up(self, step, seconds):
        self._write("warm_up", step, seconds=round(seconds, 3))

    def on_restart(self, step, restart):
        self._write("restart", step, **restart)

    def on_update(self, numbers, pace):
        if numbers.step % self.every == 0 or numbers.step == self.total_steps:
            self._write("update", numbers.step, loss=numbers.loss, grad_norm=numbers.grad_norm, lr=numbers.lr,
                        items=numbers.items, samples_per_second=round(pace.samples, 2), **rates_of(numbers, pace),
                        **numbers.means)  # fmt: skip
        # For 1,000 ranks a line about each rank takes 20 ms and 190 KB, and is written every 20 s.
        wait = SECONDS_PER_RANK * len(numbers.ranks) if len(numbers.ranks) > FEW_RANKS else 0.0
        is_due = time.monotonic() - self.ranks_written_at >= wait or numbers.step == self.total_steps
        if numbers.ranks and is_due:
            self.ranks_written_at = time.monotonic()
            self._write_ranks(numbers.step, numbers.ranks)

    def _write_ranks(self, step: int, ranks: list[RankSample]) -> None:
        """Write the parts of a step on each rank, on average over the steps since the last such line."""
        self.before = self.before or [RankSample.of(Timing(self.first, *[0.0] * 6))] * len(ranks)
        if splits := splits_between(self.before, ranks):
            parts = {part: [round(getattr(split, part), 6) for split in splits] for part in Split._fields}
            system = {name: [getattr(rank, name) for rank in ranks] for name in SYSTEM}
            known = {name: values for name, values in system.items() if not all(value != value for value in values)}
            self._write(
                "ranks", step, first_step=int(self.before[0].step) + 1, last_step=int(ranks[0].step), **parts, system=known
            )
        self.before = ranks

    def on_evaluate(self, step, metrics):
        self.evaluations[step] = metrics
        self._write("evaluate", step, **metrics)

    def on_tables(self, step, tables):
        path = table_files.file_of(step)
        if not self._attempt(self.folder / path, step, lambda: table_files.write_tables(self.folder, step, tables)):
            return
        self._write("tables", step, path=path, names=list(tables))
        ranking = self.best.rank({at: metrics for at, metrics in self.evaluations.items() if at})
        table_files.prune(self.folder, best=ranking[0] if ranking else None)

    def on_save(self, step, path):
        self._write("save", step, path=str(path))

    def on_end(self, step, summary):
        self._write("end", step, **summary)
        self.log.close()
