"""`accel-ddp scaling`: the runs of the settings one after the other, and what they have measured."""

import contextlib
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accel_ddp.doctor.facts import count_visible
from accel_ddp.errors import INTERRUPTED, STOPPED, UNSAVED, USER_ERROR, UserError
from accel_ddp.measure.scaling_analysis import Result, measure
from accel_ddp.measure.scaling_output import LARGE_SPREAD, Summary, as_json, format_summary
from accel_ddp.measure.scaling_plan import ScalingOptions, Setting, cluster_places, local_places, make_plan, read_options, smaller
from accel_ddp.measure.scaling_runs import ClusterRuns, Ended, LocalRuns
from accel_ddp.nodes.cores import choose_num_threads, usable_cores
from accel_ddp.nodes.sharding_plan import require_ddp
from accel_ddp.text import counted, rough_seconds

LATE_STEPS = 2  # the numbers of the last steps may be missing: they arrive with the next step
_NEVER = "1000000000"
FIXED = f"--log_every 1 --no_eval_first --eval_every {_NEVER} --save_every {_NEVER}".split()
FIXED += ["--report_to", "", "--push_to_hub", ""]
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory|using too much memory", re.IGNORECASE)


def main(words: list[str]) -> int:
    """Return the exit code: 0, 1 if some runs have failed, 2 for a mistake of the user, 130 if it was interrupted."""
    options = read_options(words)
    show = lambda text: print(text, file=sys.stderr if options.given.json else sys.stdout, flush=True)
    with _open_folder(options.given.folder) as folder:
        scaling = Scaling(options, folder, show)
        signal.signal(signal.SIGTERM, _raise_interrupt)  # the runs are ended, and what was measured is shown
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` ignores it
            signal.signal(signal.SIGHUP, _raise_interrupt)
        try:
            code = scaling.measure_all()
        except KeyboardInterrupt:
            show("interrupted: the runs were stopped.")
            code = INTERRUPTED
    scaling.summary.is_complete = code == 0
    if options.given.json:
        print(as_json(scaling.summary), flush=True)
    elif any(result.measured for result in scaling.summary.results):
        show(format_summary(scaling.summary))
    return code or int(any(result.problem for result in scaling.summary.results))


@contextlib.contextmanager
def _open_folder(given: str) -> Iterator[Path]:
    """Yield the folder of the runs, which is temporary if none is given. Raise UserError if it cannot be written."""
    if not given:
        with tempfile.TemporaryDirectory(prefix="accel_ddp_scaling_", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    folder = Path(given)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"--folder {folder}: exists and is not an empty folder. Choose another one.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--folder {folder}: cannot be written: {error.strerror}. Choose another folder.") from error
    yield folder


def _raise_interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


class Scaling:
    def __init__(self, options: ScalingOptions, folder: Path, show: Callable[[str], None]):
        self.options, self.show, given = options, show, options.given
        self.errors_shown: set[str] = set()
        self.code = 1  # of the last run that has failed
        self.num_steps = given.warmup + given.steps + LATE_STEPS
        self.runs: LocalRuns | ClusterRuns
        if given.cluster:
            self.runs = ClusterRuns(given.cluster, folder, options.recipe, given.run_seconds)
            self.on_gpu = any(node.gpus for node in self.runs.cluster.nodes)
            places = cluster_places([node.processes for node in self.runs.cluster.nodes], given.ranks)
            cores = 0 if self.on_gpu else self.runs.cores()
            local_ranks = max(node.processes for node in self.runs.cluster.nodes)
        else:
            gpus = count_visible()
            self.on_gpu, cores = gpus > 0, usable_cores()
            gpus = min(gpus, options.gpu_ids or gpus)
            places = local_places(given.ranks, options.limit or gpus or cores, gpus)
            self.runs = LocalRuns(folder, options.launch, options.launch_one, options.recipe, given.run_seconds)
            local_ranks = places[-1].ranks
        # The CPU threads of each rank are the same in every run. A rank alone would otherwise use all cores.
        threads = options.cfg.num_threads
        self.cores, self.threads = cores, threads if self.on_gpu else choose_num_threads(threads, local_ranks, max(1, cores))
        if options.cfg.micro_batch_tokens or options.cfg.global_batch_tokens:
            reason = "scaling compares batches of so many items"
            raise UserError(
                f"--micro_batch_tokens, --global_batch_tokens: {reason}. Use --micro_batch_size and --global_batch_size."
            )
        micro = None if options.cfg.micro_batch_size == "auto" else options.cfg.micro_batch_size
        self.plan, left_out = make_plan(places, options.cfg.global_batch_size, micro, options.modes)
        if not self.plan:
            raise UserError(" ".join(left_out))
        self.summary = Summary(options.recipe, options.modes, left_out, self.on_gpu, self.threads, given.steps, given.warmup)

    def measure_all(self) -> int:
        """Run all settings. Return 0, or the exit code if the first run fails: there is nothing to compare with then."""
        runs = len(self.plan)
        for text in self.summary.left_out:
            self.show(text)
        self.show(
            f"{counted(runs, 'run')} of {self.num_steps} steps. Each starts Python and loads the model and the data, which usually "
            f"takes 10 to 60 s: about {rough_seconds(10 * runs)} to {rough_seconds(60 * runs)}, longer if steps take seconds."
        )
        if not self.on_gpu:
            cores, threads = f" on {self.cores} cores" if self.cores else "", counted(self.threads, "thread")
            self.show(
                f"CPU ranks{cores}: every rank has {threads} in every run, so runs are comparable. The ranks of a node share its "
                "cores and its memory bandwidth."
            )
        for number, setting in enumerate(self.plan):
            result, seconds = self._measure(setting, f"[{number + 1}/{runs}]")
            self.summary.results.append(result)
            if number:
                continue
            if not result.measured:
                self.show("The first run failed, so there is nothing to compare with.")
                return self.code
            if runs > 1:
                self.show(f"This run took {seconds:.0f} s. About {rough_seconds(seconds * (runs - 1))} are left.")
        return 0

    def _measure(self, setting: Setting, label: str) -> tuple[Result, float]:
        """Run a setting, with smaller micro-batches if it does not fit, and once more if its steps vary. Return the seconds too."""
        self.show(f"{label} {setting.describe()} ...")
        ended, runs, warmup = self._run(setting), 1, self.options.given.warmup
        while not (measured := measure(ended.events, warmup)) and _OUT_OF_MEMORY.search(ended.text):
            used = next((event["batch"]["micro"] for event in ended.events if event["event"] == "start" and "batch" in event), 0)
            less = smaller(setting, used or setting.micro or setting.per_rank)
            if not less:
                return Result(setting, None, "does not fit in memory, not even one item at once"), ended.seconds
            self.show(f"{less.note}.")
            setting, ended, runs = less, self._run(less, runs), runs + 1
        if not measured:
            return Result(setting, None, self._explain(ended)), ended.seconds
        if measured.spread > LARGE_SPREAD:
            self.show(f"The steps vary by {measured.spread:.0%}. The run is repeated.")
            again = self._run(setting, runs).events
            if measure(again, warmup):
                measured, runs = measure([*ended.events, *again], warmup), runs + 1
        return Result(setting, measured, runs=runs), ended.seconds

    def _run(self, setting: Setting, number: int = 0) -> Ended:
        steps = self.options.cfg.steps
        more = ["--global_batch_size", str(setting.batch), "--stop_after", str(self.num_steps)]
        more += ["--micro_batch_size", str(setting.micro)] if setting.micro else []
        more += ["--num_threads", str(self.threads)] if self.threads else []
        more += ["--steps", str(self.num_steps)] if 0 < steps < self.num_steps else []
        name = f"{setting.place.nodes}x{setting.ranks}_batch{setting.batch}" + (f"_micro{setting.micro}" if setting.micro else "")
        name += f"_{number + 1}" if number else ""
        ended = self.runs.run(name, setting.place, [*self.options.options, *FIXED, *more])
        start = next((event for event in ended.events if event["event"] == "start"), {})
        if start.get("sharding"):
            require_ddp({"distributed_type": "FSDP"}, "accel-ddp scaling")
        if start and start["total_steps"] < self.num_steps and steps == 0:
            self.show(f"--epochs gives only {start['total_steps']} steps with this batch. The run is repeated with --steps.")
            more += ["--steps", str(self.num_steps)]
            ended = self.runs.run(f"{name}_longer", setting.place, [*self.options.options, *FIXED, *more])
        self.code = ended.code if ended.code in (USER_ERROR, INTERRUPTED) else 1
        return ended

    def _explain(self, ended: Ended) -> str:
        lines = [line.rstrip() for line in ended.text.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"(^|[\]:|] )error: |the first cause: ", line)]
        text = "\n".join(errors[:3] or lines[-20:]) or "it printed nothing"
        how = "stopped early" if ended.code in (0, STOPPED, UNSAVED) else f"failed with exit code {ended.code}"
        if text not in self.errors_shown:
            self.show(f"The run {how}:\n{text}")
        self.errors_shown.add(text)
        return f"{how}: {(errors or lines or ['it printed nothing'])[-1][:200]}"
