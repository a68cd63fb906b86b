"""Chrome traces of torch.profiler, one for each rank, the merged one, and where the time of a rank went.

https://ui.perfetto.dev opens them. torch writes times in microseconds after `baseTimeNanoseconds`, a time of the host's clock.

`analyse` measures kernels on a GPU, because a GPU works behind its host, and lets the host explain the gaps between them. On a CPU
it measures the training thread itself. Its times are seconds per step.
"""

import bisect
import gzip
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel_ddp.errors import UserError

FOLDER = "profile"
MERGED = "merged.json.gz"
SUMMARY, SUMMARY_TEXT = "summary.json", "summary.txt"
FILES = (MERGED, SUMMARY, SUMMARY_TEXT)
WAIT = "communication wait"  # a range in which a rank on a CPU waits for other ranks
DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")  # categories of what runs on a GPU
_LEVEL = 4  # of gzip: half the time of the default, and files that are 10 % larger
_FLOW_IDS = 1 << 40  # arrows of a rank have ids below this number
TOP = 15  # operations that are listed
SMALLEST_GAP = 10.0  # microseconds; shorter ones are the usual distance of two kernels and are not counted
PARTS = ("data", "forward", "backward", "optimizer")  # phases of the training thread; everything else is "other"
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def file_of(rank: int | str) -> str:
    return f"rank_{rank}.json.gz"


def is_step(name: str) -> bool:
    return name.startswith("step ") and name[5:].isdigit()


class Clock(NamedTuple):
    """How the clock of a rank's host differs from the clock of rank 0's host."""

    offset: float = 0.0  # nanoseconds to add
    accuracy: float = 0.0  # nanoseconds; the true offset is at most this far away


def read_trace(path: Path) -> dict[str, Any]:
    try:
        # torch does not escape every character in the names of operations.
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            trace = json.loads(file.read().decode(errors="replace"), strict=False)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a trace: {error}.") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise UserError(f"{path} is not a chrome trace of torch.profiler: it has no list traceEvents.")
    return trace


def write_text(path: Path, text: str) -> None:
    with gzip.open(path, "wt", compresslevel=_LEVEL) as file:
        file.write(text)


def align(trace: dict[str, Any], rank: int, host: str, clock: Clock, zero: float) -> list[dict[str, Any]]:
    """Return the events of a rank for the merged trace: on the clock of rank 0, as one process of their own.

    `zero` is the time in nanoseconds that becomes 0. The streams of a GPU become threads of the rank's process, below its own.
    """
    shift = (trace.get("baseTimeNanoseconds", 0) + clock.offset - zero) / 1000
    found: list[dict[str, Any]] = []
    names: dict[Any, str] = {}
    threads: dict[Any, int] = {}  # a number for each thread, because the numbers of torch are unique on one device only
    order: dict[int, int] = {}
    for event in trace["traceEvents"]:
        kind, key = event.get("ph"), (str(event.get("pid")), str(event.get("tid")))
        if kind == "M":
            if event.get("name") == "thread_name":
                names[key] = str(event.get("args", {}).get("name", ""))
            continue
        if kind not in ("X", "s", "t", "f") or event.get("cat") == "Trace" or "ts" not in event:
            continue
        number = threads.setdefault(key, len(threads))
        # The thread of the training comes first, then the others of the host, then the streams of the GPU.
        is_main = event.get("cat") == "user_annotation" and is_step(event["name"])
        where = 0 if is_main else 2 if event.get("cat") in DEVICE_KINDS else 1
        order[number] = where if number not in order else min(order[number], where)
        copy = {**event, "ts": round(event["ts"] + shift, 3), "pid": rank, "tid": number}
        if kind != "X":
            copy["id"] = int(event.get("id", 0)) % _FLOW_IDS + rank * _FLOW_IDS
        found.append(copy)
    described = [(0, "process_name", {"name": f"rank {rank} ({host})"}), (0, "process_sort_index", {"sort_index": rank})]
    for key, number in threads.items():
        if name := names.get(key):
            described.append((number, "thread_name", {"name": name}))
        described.append((number, "thread_sort_index", {"sort_index": order[number] * 1000 + number}))
    header = [{"ph": "M", "name": kind, "pid": rank, "tid": number, "args": values} for number, kind, values in described]
    return header + found


def write_fragment(path: Path, events: list[dict[str, Any]]) -> None:
    """Write the events of a rank without brackets, so that the main rank can join fragments without parsing them."""
    write_text(path, json.dumps(events, separators=(",", ":"))[1:-1])


def join_fragments(target: Path, fragments: list[Path], metadata: dict[str, Any]) -> None:
    """Write the merged trace. The memory that this needs does not depend on the size of the traces."""
    with gzip.open(target, "wb", compresslevel=_LEVEL) as file:
        head = json.dumps({"displayTimeUnit": "ms", **metadata}, separators=(",", ":"))
        file.write(head[:-1].encode() + b',"traceEvents":[\n')
        for number, path in enumerate(fragments):
            if number:
                file.write(b",\n")
            with gzip.open(path, "rb") as fragment:
                shutil.copyfileobj(fragment, file, 1 << 20)
        file.write(b"\n]}\n")


# ---- arithmetic of time intervals

Intervals = NDArray[np.float64]  # [n, 2], the start and the end of each


def clip(given: Intervals, first: float, last: float) -> Intervals:
    inside = np.clip(given, first, last)
    return inside[inside[:, 1] > inside[:, 0]]


def union(*given: Intervals) -> Intervals:
    """Return intervals that do not touch each other, in order, which cover the same time."""
    every = np.concatenate(given)
    every = every[every[:, 1] > every[:, 0]]
    if not len(every):
        return every
    every = every[np.argsort(every[:, 0], kind="stable")]
    ends = np.maximum.accumulate(every[:, 1])
    begins_new = np.concatenate([[True], every[1:, 0] > ends[:-1]])
    last = np.concatenate([np.flatnonzero(begins_new)[1:] - 1, [len(every) - 1]])
    return np.stack([every[begins_new, 0], ends[last]], axis=1)


def length(*given: Intervals) -> float:
    merged = union(*given)
    return float((merged[:, 1] - merged[:, 0]).sum())


def overlap(one: Intervals, other: Intervals) -> float:
    return length(one) + length(other) - length(one, other)


def outside(one: Intervals, other: Intervals) -> float:
    return length(one, other) - length(other)


def gaps(given: Intervals, first: float, last: float) -> Intervals:
    covered = union(clip(given, first, last))
    starts, ends = np.concatenate([[first], covered[:, 1]]), np.concatenate([covered[:, 0], [last]])
    found = np.stack([starts, ends], axis=1)
    return found[found[:, 1] > found[:, 0]]


# ---- analysis of one rank


class Event(NamedTuple):
    """One operation. Times are microseconds."""

    kind: str
    name: str
    start: float
    end: float
    thread: Any
    arguments: dict[str, Any]


def analyse(trace: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of one rank. Raise UserError if the trace contains no step of a run."""
    events = [
        Event(e.get("cat", ""), e.get("name", ""), e["ts"], e["ts"] + e["dur"], (e.get("pid"), e.get("tid")), e.get("args") or {})
        for e in trace["traceEvents"]
        if e.get("ph") == "X" and "ts" in e and "dur" in e
    ]
    steps = sorted((e for e in events if e.kind == "user_annotation" and is_step(e.name)), key=lambda e: e.start)
    if not steps:
        raise UserError("the trace contains no range `step N`. It was not recorded with --profile.")
    first, last = steps[0].start, steps[-1].end
    window = _Window(first, last, len(steps), steps[0].thread)
    inside = [e for e in events if e.end > first and e.start < last]
    ranges: dict[str, list[Event]] = defaultdict(list)  # of the training thread
    for event in inside:
        if event.kind == "user_annotation" and event.thread == window.thread:
            ranges[event.name].append(event)
    phases = {name: window.spans(ranges[name]) for name in (*PARTS, WAIT)}
    # The time of the training thread in each part of a step, without waits for other ranks.
    spent = {name: outside(phases[name], phases[WAIT]) for name in PARTS}
    spent["other"] = (last - first) - sum(spent.values()) - length(phases[WAIT])
    parts = {name: window.per_step(max(0.0, value)) for name, value in spent.items()}
    found = {"step_seconds": window.per_step(last - first), "steps": len(steps)}
    found["step_seconds_each"] = [_seconds(step.end - step.start) for step in steps]
    return found | _numbers(inside, phases, parts, window)


class _Window(NamedTuple):
    first: float
    last: float
    num_steps: int
    thread: Any  # the training thread

    def per_step(self, microseconds: float) -> float:
        return round(microseconds / 1e6 / self.num_steps, 9)

    def spans(self, events: Iterable[Event]) -> Intervals:
        pairs = np.array([(e.start, e.end) for e in events], dtype=np.float64).reshape(-1, 2)
        return clip(pairs, self.first, self.last)


def _seconds(microseconds: float) -> float:
    return round(microseconds / 1e6, 9)


def is_communication(event: Event) -> bool:
    """Return whether this is a collective: a kernel of NCCL, or an operation in a thread of gloo."""
    name = event.name.lower()
    if event.kind == "kernel":
        return "nccl" in name or "rccl" in name
    return event.kind == "user_annotation" and name.startswith("gloo:")


def _numbers(inside: list[Event], phases: dict[str, Intervals], parts: dict[str, float], window: _Window) -> dict[str, Any]:
    device, waits, idle, copies = [e for e in inside if e.kind in _DEVICE], phases[WAIT], None, None
    collectives = [e for e in device or inside if is_communication(e)]
    busy = window.spans(collectives)
    if device:
        copied = [e for e in device if e.kind == "gpu_memcpy"]
        computed = window.spans(e for e in device if not is_communication(e) and e.kind != "gpu_memcpy")
        work = union(computed, window.spans(copied))
        computation = window.per_step(length(computed))
        communication, overlapped, exposed = length(busy), overlap(busy, work), outside(busy, work)
        idle, copies = _idle(inside, device, phases, window), _copies(copied, window)
        operations = _largest(((e.name, e.end - e.start) for e in device), window)
    else:
        computation = round(parts["forward"] + parts["backward"] + parts["optimizer"], 9)
        communication, overlapped, exposed = length(busy, waits), outside(busy, waits), length(waits)
        operations = _largest(self_times([e for e in inside if e.kind == "cpu_op"]), window)
    return {
        "kind": "gpu" if device else "cpu",
        "computation": computation,
        "communication": window.per_step(communication),
        "communication_sum": window.per_step(sum(e.end - e.start for e in collectives)),
        "overlapped": window.per_step(overlapped),
        "exposed": window.per_step(exposed),
        "collectives": round(len(collectives) / window.num_steps, 2),
        "parts": parts,
        "idle": idle,
        "copies": copies,
        "operations": operations,
    }


def _idle(inside: list[Event], device: list[Event], phases: dict[str, Intervals], window: _Window) -> dict[str, Any]:
    """Return the time in which the GPU did nothing, and what the host did meanwhile."""
    free = gaps(window.spans(device), window.first, window.last)
    lengths = free[:, 1] - free[:, 0]
    launches = [e for e in inside if e.kind in _LAUNCHES]
    launched = {e.arguments["correlation"]: e.start for e in launches if "correlation" in e.arguments}
    # What ends a gap is the event that starts there. The host was late if it has launched this event during the gap.
    device = sorted(device, key=lambda e: e.start)
    starts = [e.start for e in device]
    is_late = np.zeros(len(free), dtype=bool)
    for number, (start, end) in enumerate(free):
        at = bisect.bisect_left(starts, end - 1e-3)
        if at == len(device):
            is_late[number] = True  # after the last kernel of the window
        elif (correlation := device[at].arguments.get("correlation")) in launched:
            is_late[number] = launched[correlation] > start
    late = free[is_late]
    during = {name: window.per_step(overlap(free, phases[name])) for name in PARTS}
    during["other"] = max(0.0, round(window.per_step(lengths.sum()) - sum(during.values()), 9))
    delays = [e.start - launched[c] for e in device if (c := e.arguments.get("correlation")) in launched and e.kind == "kernel"]
    largest = []
    for gap, seconds in ((free[i], lengths[i]) for i in np.argsort(-lengths)[:3]):
        spent = {name: length(clip(phases[name], *gap)) for name in PARTS}  # by the host
        spent["other"] = seconds - sum(spent.values())
        part = max(spent, key=spent.__getitem__)
        largest.append({"seconds": _seconds(seconds), "part": part, "host": _host_activity(inside, gap)})
    return {
        "seconds": window.per_step(lengths.sum()),
        "gaps": round(int((lengths >= SMALLEST_GAP).sum()) / window.num_steps, 2),
        "during": during,
        "host_late": window.per_step(overlap(late, late) - overlap(late, phases["data"])),
        "median_launch_delay": _seconds(float(np.median(delays))) if delays else None,
        "largest": largest,
    }


def _host_activity(inside: list[Event], gap: Any) -> str:
    """Return the innermost operation of the host that covers at least half of a gap, or "" if there is none: Python code."""
    kinds = ("cpu_op", *_LAUNCHES)
    found = [
        e for e in inside if e.kind in kinds and min(e.end, gap[1]) - max(e.start, gap[0]) >= 0.5 * (gap[1] - gap[0])
    ]  # fmt: skip
    return min(found, key=lambda e: e.end - e.start).name if found else ""


def _copies(copies: list[Event], window: _Window) -> dict[str, Any]:
    kinds: dict[str, list[Event]] = defaultdict(list)
    for event in copies:
        kinds[event.name].append(event)
    spent = {name: sum(e.end - e.start for e in events) for name, events in kinds.items()}
    size = {name: sum(e.arguments.get("bytes", 0) for e in events) for name, events in kinds.items()}
    described = {
        name: {
            "seconds": window.per_step(spent[name]), "count": round(len(kinds[name]) / window.num_steps, 2),
            "bytes": int(size[name] / window.num_steps),
        }
        for name in sorted(kinds, key=lambda name: -spent[name])
    }  # fmt: skip
    return {"seconds": window.per_step(length(window.spans(copies))), "kinds": described}


def self_times(operations: list[Event]) -> list[tuple[str, float]]:
    """Return each operation with its own time, without the operations that it calls."""
    found: list[tuple[str, float]] = []
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in operations:
        threads[event.thread].append(event)
    for events in threads.values():
        events.sort(key=lambda e: (e.start, -e.end))
        own, above = [e.end - e.start for e in events], []
        for number, event in enumerate(events):
            while above and events[above[-1]].end <= event.start:
                above.pop()
            if above:
                own[above[-1]] -= min(event.end, events[above[-1]].end) - event.start
            above.append(number)
        found += [(event.name, max(0.0, time)) for event, time in zip(events, own)]
    return found


def _largest(operations: Iterable[tuple[str, float]], window: _Window) -> list[dict[str, Any]]:
    totals: dict[str, list[float]] = defaultdict(list)
    for name, time in operations:
        totals[name].append(time)
    largest = sorted(((name, sum(times), len(times)) for name, times in totals.items()), key=lambda one: -one[1])[:TOP]
    whole, steps = window.last - window.first, window.num_steps
    return [
        {"name": name, "seconds": window.per_step(total), "count": round(count / steps, 2), "share": round(total / whole, 5)}
        for name, total, count in largest
    ]
