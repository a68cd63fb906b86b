"""Trackers: wandb, tensorboard, trackio, mlflow, and the others that Accelerate knows.

Each tracker has a thread and a queue, so a tracker that is slow, hangs or fails neither stops nor slows training. The run waits
for trackers only at its end, for a limited time. `row_of_update` states which numbers they get.
"""

import atexit
import functools
import math
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from accelerate import Accelerator

from accel_ddp.config.option_values import BestMetric
from accel_ddp.config.train_config import TrainConfig, as_plain_dict
from accel_ddp.engine.hook import Hook
from accel_ddp.engine.step_numbers import SYSTEM, Numbers, Pace, RankSample, Split, find_slowest, rates_of, splits_between
from accel_ddp.nodes.spawn import keep_forks_apart_from_starts
from accel_ddp.observe.tracker_kinds import Tracker, make_tracker
from accel_ddp.ranks.process import Moment, ending
from accel_ddp.ranks.reporting import warn
from accel_ddp.records.eval_tables import Table
from accel_ddp.records.files import BackgroundWriter
from accel_ddp.records.redaction import redact, redact_command, redact_values
from accel_ddp.saving import checkpoint_format

MODEL_SECONDS = 240.0  # with --log_model; the launchers of the other nodes wait 300 s for the main node
STOP_SECONDS = 10.0  # after a stop request; Slurm, Kubernetes and torchrun kill 30 s after SIGTERM, and the save comes first
FAILURE_SECONDS = 3.0  # after an error, which the other ranks have received already
MOST_CALLS = 5_000  # that wait; of rows with 100 numbers, this is about 50 MB
IMPORT_SECONDS = 60.0  # for the import of a package, if data workers are about to be forked
EXIT_SECONDS = 5.0  # for what a tracker does when the interpreter exits
QUIET_SECONDS = 2.0  # a wait that is shorter is not reported
# Beyond these numbers the curves of a panel cannot be told apart, and every row would have thousands of values.
MOST_RANKS = 16  # with a curve each; beyond, there is the minimum, mean and maximum of each node
MOST_NODES = 16  # beyond, there is the minimum, mean and maximum of all ranks


class Call(NamedTuple):
    what: str  # for messages
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    is_row: bool = False  # rows may be dropped
    is_vital: bool = True  # if the call fails, the tracker is not called again


class TrackerThread(BackgroundWriter):
    def __init__(self, tracker: Tracker):
        super().__init__(self._call, f"tracker {tracker.name}", most=MOST_CALLS)
        self.tracker, self.name = tracker, tracker.name
        self.is_loaded = threading.Event()
        self.doing = "start"
        self.rows_dropped = 0
        self.start()

    def put(self, call: Call) -> None:
        """Append a call. If the queue is full, the oldest row is dropped, and this is printed once."""
        before = self.rows_dropped
        super().put(call)
        if self.rows_dropped and not before:
            self.report(
                f"{self.name} is slower than the run, or hangs ({self.doing}): its oldest rows are dropped, because {MOST_CALLS:,} "
                "wait. Training continues, and log.jsonl contains everything."
            )

    def drop_one(self) -> None:
        for number, call in enumerate(self.waiting):
            if call.is_row:
                del self.waiting[number]
                self.rows_dropped += 1
                return

    def _call(self, call: Call) -> None:
        # The processes that a tracker starts inherit this. They must outlive a signal that asks the run to stop.
        signal.pthread_sigmask(signal.SIG_BLOCK, ending.stop.handled_signals)
        self.doing = call.what
        try:
            call.function(*call.arguments)
        except BaseException as error:  # a tracker may call sys.exit, which would end only this thread, silently
            self.report(
                f"{self.name}: tracking has failed ({call.what}): {type(error).__name__}: {error}. Training continues, and "
                "log.jsonl contains everything."
            )
            if call.is_vital:
                self.stop()
        self.is_loaded.set()  # the import is the first call

    def report(self, text: str) -> None:
        warn(redact(text), "TRACKER")


def wait_for_imports(threads: Sequence[TrackerThread], seconds: float) -> None:
    """Wait until the packages of the trackers are imported, or have failed to be, at most `seconds`.

    A data worker that is forked during an import would wait forever for the lock of that module, if it imports the module too.
    """
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.is_loaded.wait(max(0.0, deadline - time.monotonic()))


def close_all(threads: Sequence[TrackerThread], seconds: float) -> None:
    """Finish the trackers, and wait for them at most `seconds`. Print what is waited for, and how to upload what is left."""
    for thread in threads:
        thread.put(Call("finish", thread.tracker.finish))
        thread.close()
    began = time.monotonic()
    wait_all = lambda limit: all([thread.is_done.wait(max(0.0, began + limit - time.monotonic())) for thread in threads])
    if not wait_all(min(QUIET_SECONDS, seconds)) and seconds > QUIET_SECONDS:
        names = " and ".join(one.name for one in threads if not one.is_done.is_set())
        left = sum(len(one.waiting) for one in threads)
        rows = f", with {left:,} calls in the queue" if left > 1 else ""
        print(f"waiting up to {seconds:.0f} s for {names} to store the last numbers{rows}", flush=True)
        wait_all(seconds)
    for thread in threads:
        if not thread.is_done.is_set():
            text = f"{thread.name} did not finish within {seconds:.0f} s ({thread.doing}). log.jsonl contains everything."
            thread.report(f"{text} {thread.tracker.how_to_upload_later()}".rstrip())
        if thread.rows_dropped:
            print(f"{thread.name}: {thread.rows_dropped:,} rows were dropped in total.", file=sys.stderr, flush=True)
    hangs = not all(thread.is_done.is_set() for thread in threads)
    main_thread = threading.main_thread()
    if hangs or not main_thread.is_alive():
        wait, seconds = main_thread.join, 0.5 if hangs else EXIT_SECONDS
    else:  # threads of the program, for which the interpreter waits before it calls its handlers, may take longer
        is_exiting = threading.Event()
        atexit.register(is_exiting.set)
        wait, seconds = is_exiting.wait, EXIT_SECONDS
    threading.Thread(target=_exit_after, args=(wait, seconds), daemon=True).start()


def _exit_after(wait: Callable[[], Any], seconds: float) -> None:
    """Exit if the interpreter does not, because handlers that a tracker has registered for its exit hang.

    Daemon threads continue while these handlers run. A program that `run` has called exits before if its exit code is not 0.
    """
    wait()
    time.sleep(seconds)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)


class Trackers(Hook):
    """Passes everything that happens to the threads of the trackers."""

    def __init__(self, accelerator: Accelerator, cfg: TrainConfig):
        self.accelerator, self.cfg = accelerator, cfg
        self.facts: dict[str, Any] = {}
        self.evaluations: dict[int, dict[str, float]] = {}
        self.before: Sequence[RankSample] = ()
        self.scale = Scale(0, cfg.global_batch_size, ())
        self.total_steps = 0
        self.is_closed = False
        folder = str(accelerator.logging_dir or cfg.output_dir)
        # wandb and others record the command line. All options are parsed by now.
        sys.argv[:] = redact_command(sys.argv)
        ending.run(Moment.TRACKERS)  # those of an earlier `fit`, which nothing else would close before the process ends
        keep_forks_apart_from_starts()  # of the programs of trackers, and of data workers
        self.threads = [TrackerThread(make_tracker(name, cfg, folder)) for name in cfg.tracker_names()]
        self._put("import", lambda tracker: tracker.load())
        wait = cfg.tracker_wait  # the last numbers take seconds; more would delay the next job if a server does not answer
        finished = max(wait, MODEL_SECONDS) if cfg.log_model else wait
        limits = finished, min(wait, STOP_SECONDS), min(wait, FAILURE_SECONDS)
        ending.add(Moment.FORK, self, lambda seconds: wait_for_imports(self.threads, seconds), (IMPORT_SECONDS,) * 3)
        ending.add(Moment.TRACKERS, self, self.close, limits)

    def _put(self, what: str, call: Callable[[Tracker], Any], is_row: bool = False, is_vital: bool = True) -> None:
        for thread in self.threads:
            thread.put(Call(what, call, (thread.tracker,), is_row, is_vital))

    def _put_row(self, step: int, values: dict[str, Any] | Callable[[], dict[str, Any]]) -> None:
        """Log a row. A function makes it in the threads of the trackers, because that takes time."""
        if values:
            self._put("log", lambda tracker: tracker.log(values() if callable(values) else values, step), is_row=True)

    def on_describe(self, facts):
        self.facts = facts
        nodes = tuple(rank["node"] for rank in facts.get("ranks", []))
        self.scale = Scale(facts.get("items", 0), facts.get("batch", {}).get("global", self.cfg.global_batch_size), nodes)

    def on_start(self, step, total_steps, evaluations):
        self.total_steps, self.evaluations = total_steps, dict(evaluations)
        config = redact_values(as_plain_dict(self.cfg))
        if sharding := self.facts.get("sharding"):
            config["sharding"] = sharding["text"]
        facts = redact_values(self.facts)
        self._put("start", lambda tracker: tracker.start(config, facts, step, self.accelerator.trackers))

    def on_warm_up(self, step, seconds):
        self._put_row(step, {"speed/warm_up_seconds": seconds})

    def on_restart(self, step, restart):
        names = {"restart": "count", "lost_steps": "lost_steps", "lost_seconds": "lost_seconds", "goodput": "goodput"}
        known = {key: name for key, name in names.items() if isinstance(restart.get(key), int | float)}
        self._put_row(step, {f"restarts/{name}": restart[key] for key, name in known.items()})

    def on_update(self, numbers, pace):
        if numbers.step % self.cfg.log_every == 0 or numbers.step == self.total_steps:
            self._put_row(numbers.step, functools.partial(row_of_update, numbers, pace, self.before, self.scale))
        self.before = numbers.ranks or self.before

    def on_evaluate(self, step, metrics):
        self.evaluations[step] = metrics
        self._put_row(step, {f"eval/{name}": value for name, value in metrics.items()})
        trained = {at: values for at, values in self.evaluations.items() if at}
        if best := best_of(trained, self.cfg.metric_directions() or {self.cfg.best().name: self.cfg.best().direction}):
            self._put("summary", lambda tracker: tracker.summarize(best, step), is_row=True)

    def on_tables(self, step, tables: dict[str, Table]):
        self._put("tables", lambda tracker: tracker.log_tables(tables, step), is_row=True, is_vital=False)

    def on_save(self, step, path):
        count = lambda: len(checkpoint_format.list_checkpoints(path.parent))
        self._put_row(step, lambda: {"checkpoints/newest_step": step, "checkpoints/count": count()})

    def on_end(self, step, summary):
        self._put_row(step, {"restarts/goodput": summary["goodput"]} if "goodput" in summary else {})
        skipped = {"train/skipped_steps": summary.get("skipped_steps", 0)}
        self._put("summary", lambda tracker: tracker.summarize(skipped, step))

    def on_export(self, folder):
        if self.cfg.log_model:
            self._put("upload the model", lambda tracker: tracker.log_model(folder), is_vital=False)

    def close(self, seconds: float) -> None:
        if not self.is_closed:
            self.is_closed = True
            close_all(self.threads, seconds)
            ending.remove(self)


# ---- the numbers that trackers show, grouped as panels: train/, eval/, speed/, system/, restarts/ and checkpoints/


class Scale(NamedTuple):
    """What turns the numbers of a step into rates: the size of the run."""

    items: int  # of the training data
    batch_items: float  # of a step
    nodes: tuple[int, ...]  # the node of each rank


def row_of_update(numbers: Numbers, pace: Pace, before: Sequence[RankSample], scale: Scale) -> dict[str, float]:
    """Return the row of a logged step. `before` are the samples of the logged step before, or ()."""
    row = {"train/loss": numbers.loss, "train/grad_norm": numbers.grad_norm, "train/lr": numbers.lr}
    row |= {f"train/{name}": value for name, value in numbers.means.items()}
    if scale.items:
        row["train/epoch"] = numbers.step * scale.batch_items / scale.items
    row["speed/samples_per_second"] = pace.samples
    if pace.samples > 0:
        row["speed/step_seconds"] = scale.batch_items / pace.samples
    row |= {f"speed/{name}": value for name, value in rates_of(numbers, pace).items()}
    return row | _row_of_times(before, numbers.ranks) | _row_of_system(numbers.ranks, scale.nodes)


def _row_of_times(before: Sequence[RankSample], ranks: Sequence[RankSample]) -> dict[str, float]:
    """Return the parts of a step in seconds, as the mean over ranks, and what the slowest rank costs the others in each step."""
    if not (splits := splits_between(before, ranks)):
        return {}
    row = {f"speed/step_{part}_seconds": statistics.mean(getattr(split, part) for split in splits) for part in Split._fields}
    if len(splits) > 1:
        row["speed/slowest_rank"], row["speed/slowest_rank_costs_seconds"] = find_slowest(splits)
    return row


def _row_of_system(ranks: Sequence[RankSample], nodes: Sequence[int]) -> dict[str, float]:
    """Return what each rank or each node uses of its machine. wandb itself measures only the main node."""
    if len(nodes) != len(ranks):
        return {}
    row: dict[str, float] = {}
    for name in SYSTEM:
        values = [getattr(rank, name) for rank in ranks]
        if len(ranks) <= MOST_RANKS:
            row |= {f"system/node{node}.rank{rank}/{name}": value for rank, (node, value) in enumerate(zip(nodes, values))}
            continue
        groups: dict[str, list[float]] = {}
        for node, value in zip(nodes, values):
            if not math.isnan(value):
                groups.setdefault(f"node{node}" if len(set(nodes)) <= MOST_NODES else "all", []).append(value)
        for group, known in groups.items():
            row |= {f"system/{group}/{name}_min": min(known), f"system/{group}/{name}_max": max(known)}
            row[f"system/{group}/{name}_mean"] = statistics.mean(known)
    return {name: value for name, value in row.items() if not math.isnan(value)}


def best_of(evaluations: dict[int, dict[str, float]], directions: dict[str, Any]) -> dict[str, float]:
    best: dict[str, float] = {}
    for name, direction in directions.items():
        for step in BestMetric(name, direction).rank(evaluations)[:1] if direction in ("min", "max") else ():
            best |= {f"best/{name}": evaluations[step][name], f"best/{name}_step": step}
    return best
