"""Chrome traces: those of torch.profiler, one for each rank, and the merged one. https://ui.perfetto.dev opens them.

torch writes times in microseconds after `baseTimeNanoseconds`, which is a time of the clock of the rank's host.
"""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from accel_ddp.errors import UserError

FOLDER = "profile"
MERGED = "merged.json.gz"
SUMMARY, SUMMARY_TEXT = "summary.json", "summary.txt"
FILES = (MERGED, SUMMARY, SUMMARY_TEXT)
WAIT = "communication wait"  # a range in which a rank on a CPU waits for other ranks
DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")  # categories of what runs on a GPU
_LEVEL = 4  # of gzip: half the time of the default, and files that are 10 % larger
_FLOW_IDS = 1 << 40  # arrows of a rank have ids below this number


def file_of(rank: int | str) -> str:
    return f"rank_{rank}.json.gz"


def name_of_step(step: int) -> str:
    return f"step {step}"


def is_step(name: str) -> bool:
    return name.startswith("step ") and name[5:].isdigit()


class Clock(NamedTuple):
    """How the clock of a rank's host differs from the clock of rank 0's host."""

    offset: float = 0.0  # nanoseconds to add
    accuracy: float = 0.0  # nanoseconds; the true offset is at most this far away


class Place(NamedTuple):
    """The rank that a trace belongs to."""

    rank: int
    host: str


def read_trace(path: Path) -> dict[str, Any]:
    """Return a trace. Raise UserError if it cannot be read."""
    try:
        # torch does not escape every character in the names of operations.
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            trace = json.loads(file.read().decode(errors="replace"), strict=False)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a trace: {error}.") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise UserError(f"{path} is not a chrome trace of torch.profiler: it has no list traceEvents.")
    return trace


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    with gzip.open(path, "wt", compresslevel=_LEVEL) as file:
        file.write(json.dumps(trace, separators=(",", ":")))


def align(trace: dict[str, Any], place: Place, clock: Clock, zero: float) -> list[dict[str, Any]]:
    """Return the events of a rank for the merged trace: on the clock of rank 0, as one process of their own.

    `zero` is the time in nanoseconds that becomes 0. The streams of a GPU become threads of the rank's process, below its own.
    """
    shift = (trace.get("baseTimeNanoseconds", 0) + clock.offset - zero) / 1000
    found: list[dict[str, Any]] = []
    names: dict[Any, str] = {}
    threads: dict[Any, int] = {}  # a number for each thread, because those of torch are unique on one device only
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
        copy = {**event, "ts": round(event["ts"] + shift, 3), "pid": place.rank, "tid": number}
        if kind != "X":
            copy["id"] = int(event.get("id", 0)) % _FLOW_IDS + place.rank * _FLOW_IDS
        found.append(copy)
    header = [
        _metadata(place.rank, 0, "process_name", name=f"rank {place.rank} ({place.host})"),
        _metadata(place.rank, 0, "process_sort_index", sort_index=place.rank),
    ]
    for key, number in threads.items():
        if name := names.get(key):
            header.append(_metadata(place.rank, number, "thread_name", name=name))
        header.append(_metadata(place.rank, number, "thread_sort_index", sort_index=order[number] * 1000 + number))
    return header + found


def _metadata(pid: int, tid: int, kind: str, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def write_fragment(path: Path, events: list[dict[str, Any]]) -> None:
    """Write the events of a rank without brackets, so that the main rank can join fragments without parsing them."""
    with gzip.open(path, "wt", compresslevel=_LEVEL) as file:
        file.write(json.dumps(events, separators=(",", ":"))[1:-1])


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
