"""Records the steps that `--profile` selects, and brings the traces of all ranks to the main rank."""

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from accel_ddp import phases
from accel_ddp.config.option_values import Window, choose_ranks, choose_window, parse_steps
from accel_ddp.engine.fit import Run
from accel_ddp.engine.hook import Hook
from accel_ddp.engine.step_times import StepTimes
from accel_ddp.observe import profile_summary, traces
from accel_ddp.observe.traces import WAIT, Clock, analyse
from accel_ddp.phases import NAMES, PARTS, PROFILE, Phase, Split
from accel_ddp.ranks.agreement import broadcast_object, gather_everywhere, gather_objects, print_on_main
from accel_ddp.ranks.process import links, this_rank

# Measures how far the clocks of hosts differ, so that traces of several hosts can be shown on one time axis.
ROUND_TRIPS = 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def kernel_id() -> str:
    """Return a text that is the same for all processes with the same clock: those of one kernel, also in several containers."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return this_rank.host


def measure_clock(ranks: list[int]) -> Clock:
    """Return how the clock of this rank differs from that of rank 0. This is a collective of all ranks.

    Each of `ranks` in turn asks rank 0 for its time. The reply belongs to the middle of the round trip, and the fastest of several
    round trips has the smallest error, which is at most half of its duration. Ranks on the host of rank 0 have its clock.
    """
    ids = gather_everywhere(kernel_id())
    best = Clock()
    for rank in ranks:
        if ids[rank] == ids[0]:
            continue
        message = torch.zeros(1, dtype=torch.int64)
        for trip in range(ROUND_TRIPS):
            if this_rank.is_main:
                dist.recv(message, rank, group=links.slow_group)
                message[0] = time.time_ns()
                dist.send(message, rank, group=links.slow_group)
            elif this_rank.rank == rank:
                sent = time.time_ns()
                dist.send(message, 0, group=links.slow_group)
                dist.recv(message, 0, group=links.slow_group)
                received = time.time_ns()
                found = Clock(int(message) - (sent + received) / 2, (received - sent) / 2)
                best = found if not trip or found.accuracy < best.accuracy else best
    return best


def between(before: Clock, after: Clock) -> Clock:
    """Return the clock in the middle of two measurements. The accuracy includes how far the clock has drifted meanwhile."""
    drift = abs(after.offset - before.offset) / 2
    return Clock((before.offset + after.offset) / 2, max(before.accuracy, after.accuracy) + drift)


def collect_files(ranks: list[int], mine: list[Path], targets: dict[int, list[Path]]) -> list[str]:
    """Send the files `mine` of this rank to the main rank, one rank after the other. Return what went wrong there.

    To be called by all ranks. `targets` are the paths that the main rank writes. Nodes need not share a folder.
    """
    problems = []
    for rank in filter(None, ranks):
        for path in mine if this_rank.rank == rank else ():
            content = None
            with contextlib.suppress(OSError):
                content = path.read_bytes()
            dist.send_object_list([content], 0, group=links.slow_group)
            phases.HERE.beat()  # over a slow link all files together take longer than a step may
        for path in targets.get(rank, ()):
            received: list[Any] = [None]
            dist.recv_object_list(received, rank, group=links.slow_group)
            phases.HERE.beat()
            try:
                path.write_bytes(received[0] or b"")
            except OSError as error:
                problems.append(f"{path} cannot be written: {error.strerror}")
            problems += [f"rank {rank} could not read its trace"] if received[0] is None else []
    return problems


BEFORE = 100_000_000  # nanoseconds from the start of the merged trace to its first step; viewers reject negative times


class Ranges:
    """Names the parts of a step in a trace, with `record_function`: step 12, data, forward, backward, optimizer.

    It listens to the phases of this process while a step is recorded. On a CPU the backward pass ends where the wait for other ranks
    begins, so the ranges are those of the breakdown in log.jsonl. On a GPU the engine of autograd enters that phase in a thread of its
    own, which is left out: the host does not wait there, and the kernels of NCCL show the communication.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.step, self.phase = contextlib.ExitStack(), contextlib.ExitStack()

    def begin_step(self, step: int) -> None:
        self.step.enter_context(record_function(f"step {step}"))
        self.phase.enter_context(record_function(NAMES[phases.HERE.phase]))
        phases.HERE.listeners.append(self)
        self.step.callback(phases.HERE.listeners.remove, self)

    def end_step(self) -> None:
        self.phase.close()
        self.step.close()

    def __call__(self, part: int, seconds: float, phase: Phase) -> None:
        if threading.get_ident() == self.thread:
            self.phase.close()
            self.phase.enter_context(record_function(WAIT if phase.part == PARTS.index("communication") else NAMES[phase]))


def start_recorder(run: Run, times: StepTimes, read_numbers: Callable[..., None], model: dict[str, Any]) -> "Recorder | None":
    """Return the recorder of a run, or None if nothing is recorded. `model` describes the model, for the advice."""
    cfg, step, schedule = run.cfg, run.step, run.schedule
    asked, window = parse_steps(cfg.profile), choose_window(cfg.profile, step, schedule.total_steps, schedule.pauses)
    if window is None:
        if asked is not None and step < schedule.total_steps:
            print_on_main(f"--profile {cfg.profile}: nothing is recorded, because this run continues after step {step}.")
        return None
    if isinstance(asked, Window) and asked != window:
        reason = f"an evaluation or a checkpoint follows step {window.last}" if window.last != asked.last else ""
        reason = reason or f"this run continues after step {step}"
        print_on_main(f"--profile {cfg.profile}: only {window} will be recorded, because {reason}.")
    has_warm_up = window.first - 1 > step and not schedule.pauses(window.first - 1)
    return Recorder(run, times, read_numbers, window, has_warm_up, model)


class Recorder(Hook):
    """Records a window of steps. Every rank has one, because the traces are collected by all ranks together.

    Outside of the window it costs two comparisons per step.
    """

    def __init__(
        self, run: Run, times: StepTimes, read_numbers: Callable[..., None], window: Window, has_warm_up: bool,
        model: dict[str, Any],
    ):  # fmt: skip
        """`read_numbers` passes late numbers to all hooks, which waits for the GPU."""
        self.run, self.cfg, self.times, self.read_numbers = run, run.cfg, times, read_numbers
        self.window, self.model = window, model
        self.on_gpu = run.accelerator.device.type == "cuda"
        self.synchronize: Callable[[], None] = torch.cuda.synchronize if self.on_gpu else lambda: None
        self.precision = run.accelerator.mixed_precision
        firsts = [sum(count for _, count in links.nodes[:node]) for node in range(len(links.nodes))]
        self.ranks = choose_ranks(self.cfg.profile_ranks, this_rank.num_ranks, firsts)
        self.records = this_rank.rank in self.ranks
        self.starts_at = window.first - has_warm_up
        self.profiler: profile | None = None
        self.problem = ""  # why this rank records nothing
        self.is_complete = False
        self.ranges = Ranges()

    def on_step_begin(self, step: int) -> None:
        if self.is_complete or step < self.starts_at:
            return
        with phases.phase(PROFILE):  # this is not time of a step
            if step == self.starts_at:
                self._start()
            if step == self.window.first:
                self.synchronize()  # what the GPU still computes does not belong to the window
            if self.profiler is not None and step > self.starts_at:
                self.advance()
            if step == self.window.first:
                self.timing = self.times.settle(step - 1)
                self.began = time.time_ns()
            if step <= self.window.first:
                self.read_numbers(wait_for_all=True)
        if self.profiler is not None and step >= self.window.first:
            self.ranges.begin_step(step)

    def on_step_end(self, step: int) -> None:
        """End step `step`. Every rank has the same values of `step` and `is_stopping`."""
        if self.is_complete or step < self.starts_at:
            return
        self.is_complete = self.run.is_stopping or step == self.window.last
        if self.run.is_stopping:  # a signal leaves seconds for the checkpoint
            self.close()
            print_on_main("--profile: nothing was stored, because the run is stopping.")
        elif step == self.window.last:
            self._finish(step)
            self.read_numbers(wait_for_all=True)
        else:
            self.ranges.end_step()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        self.close()
        if kind is None and not self.is_complete:
            print_on_main(f"--profile {self.cfg.profile}: nothing was stored, because the run stopped before {self.window}.")

    def close(self) -> None:
        """Stop torch.profiler and discard what it has recorded. This involves no other rank."""
        self.times.measures_all = False
        self.ranges.end_step()
        if self.profiler is not None:
            with contextlib.suppress(Exception):
                self.profiler.stop()
            self.profiler = None

    # ---- recording

    def _start(self) -> None:
        """Start torch.profiler on the ranks that record. It stores nothing of a step in which it warms up: it loads CUPTI there."""
        self.clock = measure_clock(self.ranks)
        self.times.measures_all = True
        if self.records:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it prints two lines about each profile
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
            count = self.window.last - self.window.first + 1
            plan = schedule(wait=0, warmup=1, active=count + 1) if self.starts_at < self.window.first else None
            profiler = profile(activities=activities, schedule=plan)
            try:
                profiler.start()
            except RuntimeError as error:  # another profiler is active
                self.problem = f"torch.profiler cannot start: {error}"
            else:
                self.profiler, self.advance = profiler, profiler.step  # the latter begins the recording, and each step of it
        broadcast_object(None, what="start torch.profiler")

    def _finish(self, step: int) -> None:
        """Store the traces and the summary. Training continues if that is not possible."""
        self.synchronize()
        self.ranges.end_step()
        timing = self.times.settle(step)
        profiler, self.profiler = self.profiler, None
        self.close()
        with phases.phase(PROFILE), contextlib.ExitStack() as stack:
            try:
                if profiler is not None:
                    profiler.stop()
            except RuntimeError as error:
                profiler, self.problem = None, f"torch.profiler cannot stop: {error}"
            clock = between(self.clock, measure_clock(self.ranks))
            zero = min(gather_everywhere(self.began + clock.offset)) - BEFORE
            mine: dict[str, Any] = {"rank": this_rank.rank, "host": this_rank.host, "node": links.node}
            files: list[Path] = []
            try:
                if profiler is not None:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="accel_ddp_profile_")))
                    analysis, files = self._export(profiler, folder, clock, zero)
                    # The seconds per step that log.jsonl has for the same steps, for a comparison.
                    of_step = lambda part: (getattr(timing, part) - getattr(self.timing, part)) / (step - self.window.first + 1)
                    breakdown = {part: round(of_step(part), 9) for part in Split._fields}
                    mine |= analysis | {"breakdown": breakdown, "clock": clock._asdict()}
            except Exception as error:  # a full disk, or a trace of another version of torch; the other ranks wait below
                self.problem = f"{type(error).__name__}: {error}"
            everyone = gather_objects({**mine, "problem": self.problem, "has_trace": bool(files)})
            self._store(everyone, files)
            broadcast_object(None, what="store the profile")

    def _export(self, profiler: profile, folder: Path, clock: traces.Clock, zero: float) -> tuple[dict[str, Any], list[Path]]:
        """Write the trace of this rank and its part of the merged trace. Return its analysis and both paths."""
        plain, own, fragment = folder / "trace.json", folder / "own.json.gz", folder / "fragment.json.gz"
        profiler.export_chrome_trace(str(plain))
        trace = traces.read_trace(plain)
        plain.unlink()
        traces.write_text(own, json.dumps(trace, separators=(",", ":")))
        traces.write_fragment(fragment, traces.align(trace, this_rank.rank, this_rank.host, clock, zero))
        analysis = analyse(trace)
        if self.on_gpu and analysis["kind"] != "gpu":
            raise RuntimeError("torch.profiler has recorded no kernel. Another profiler (nsys, DCGM) may use the GPU's counters")
        return analysis, [own, fragment]

    # ---- on the main rank

    def _store(self, everyone: list[dict[str, Any]] | None, files: list[Path]) -> None:
        folder = Path(self.cfg.output_dir) / traces.FOLDER
        problems, targets = [], {}
        recorded = [one for one in everyone or [] if one["has_trace"]]
        if everyone:
            names = lambda rank: [folder / traces.file_of(rank), folder / f".fragment_{rank}"]
            targets = {one["rank"]: names(one["rank"]) for one in recorded}
            problems = [f"rank {one['rank']} ({one['host']}): {one['problem']}" for one in everyone if one["problem"]]
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for old in (*folder.glob(traces.file_of("*")), *(folder / name for name in traces.FILES)):
                    old.unlink(missing_ok=True)
                for source, target in zip(files, targets.get(0, [])):
                    shutil.copyfile(source, target)
            except OSError as error:
                problems.append(f"{folder} cannot be written: {error.strerror}")
        problems += collect_files(broadcast_object([one["rank"] for one in recorded]), files, targets)
        if everyone is None:
            return
        try:
            if recorded:
                self._summarize(folder, recorded, [targets[one["rank"]][1] for one in recorded])
        except (OSError, EOFError, zlib.error) as error:  # the disk is full, or a part that was received is not complete
            problems.append(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}")
        except Exception as error:  # in the analysis; no summary is worth a run
            problems.append(f"{folder} has no summary: {type(error).__name__}: {error}")
        for path in folder.glob(".fragment_*"):
            path.unlink(missing_ok=True)
        if problems:
            text = "; ".join(problems)
            print(f"--profile: the profile is not complete: {text}. Training continues.", file=sys.stderr, flush=True)

    def _summarize(self, folder: Path, recorded: list[dict[str, Any]], fragments: list[Path]) -> None:
        recorded = [{name: value for name, value in one.items() if name not in ("has_trace", "problem")} for one in recorded]
        micro, count = self.cfg.split(this_rank.num_ranks)
        options = {name: getattr(self.cfg, name) for name in profile_summary.OPTIONS if hasattr(self.cfg, name)}
        run = {
            "steps": [self.window.first, self.window.last], "num_ranks": this_rank.num_ranks, "num_nodes": len(links.nodes),
            "device": torch.cuda.get_device_name() if self.on_gpu else "CPU", "precision": self.precision,
            "micro_batch_size": micro, "accumulation": count, "options": options, **self.model,
        }  # fmt: skip
        made = profile_summary.summarize(run, recorded)
        # The text is printed first: a full disk does not prevent it.
        text = profile_summary.format_text(made, self.cfg.output_dir)
        print(text, flush=True)
        clocks = {f"rank {one['rank']}": {f"{name}_us": one["clock"][name] / 1000 for name in Clock._fields} for one in recorded}
        worst = max(one["clock"]["accuracy"] for one in recorded) / 1000
        metadata = {"clocks": clocks, "clock_accuracy_us": worst, "steps": str(self.window)}
        profile_summary.write(folder, made, text)
        traces.join_fragments(folder / traces.MERGED, fragments, metadata)
