"""The search of `accel-ddp tune` as pure functions, the types for what is measured, its tables and the files with the best values.

Settings are a dictionary of environment variables, and a score is a time in milliseconds, so lower is better. NCCL reads its variables
once per process, so every trial has to start new processes. The search therefore makes few trials: first sets of variables that were
fast elsewhere, then changes of one coordinate at a time from the best of these sets.
"""

import math
import shlex
import statistics
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_ddp.records.files import replace_file
from accel_ddp.text import format_bytes

Settings = dict[str, str]

THREADS, SOCKETS, BUFFER = "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_BUFFSIZE"
CHANNELS, ALGORITHM, PROTOCOL = "NCCL_MIN_NCHANNELS", "NCCL_ALGO", "NCCL_PROTO"
TUNED_VARIABLES = (THREADS, SOCKETS, BUFFER, CHANNELS, ALGORITHM, PROTOCOL)

MIB = 1 << 20
SIZES = (1 * MIB, 25 * MIB, 256 * MIB)  # a small model, one DDP bucket of the default size, a large message
MAX_TRIALS = 12
FASTER = 0.97  # a time counts as faster if it is below this share of the other time; a smaller difference is noise

# Measured on one H200 as two nodes over TCP, all-reduce of 25 / 256 MiB: default 18.1 / 144.5 ms, first set 5.9 / 59.4 ms, second
# set 6.5 / 47.2 ms. More threads and sockets without larger buffers were not faster than the default, so no set has only these.
KNOWN_GOOD: tuple[Settings, ...] = (
    {THREADS: "4", SOCKETS: "4", BUFFER: "16777216"},
    {THREADS: "2", SOCKETS: "4", CHANNELS: "8", ALGORITHM: "Ring", PROTOCOL: "Simple"},
    {BUFFER: "16777216"},
    {THREADS: "4", SOCKETS: "4", BUFFER: "8388608", CHANNELS: "8"},
)
# The values of each coordinate; {} leaves the choice to NCCL. NCCL limits threads x sockets to 64. LL128 is not among the values,
# because it corrupts data on hardware where it is not safe. Ring supports every collective.
COORDINATES: tuple[tuple[Settings, ...], ...] = (
    ({CHANNELS: "8"}, {CHANNELS: "16"}, {}),
    ({ALGORITHM: "Ring", PROTOCOL: "Simple"}, {}),
    ({BUFFER: "16777216"}, {BUFFER: "8388608"}, {}),
    ({THREADS: "4", SOCKETS: "4"}, {THREADS: "2", SOCKETS: "4"}, {}),
)
# Tree can be faster on more than two nodes. `tree` alone leaves other collectives without an algorithm (NCCL issue 317), and so
# does `allreduce:tree` since NCCL 2.31 (vLLM pull request 58179). This form gives an algorithm for every collective.
TREE: Settings = {ALGORITHM: "ring,tree;allreduce:tree"}


def score(milliseconds: dict[int, float], gradient_bytes: int = 0) -> float:
    """Return the time by which settings are compared, from the all-reduce time of each message size.

    If the gradients fit into one bucket, this is the time of a message of their size. Otherwise it is the geometric mean over the
    sizes from one bucket up, because no single size should decide.
    """
    if 0 < gradient_bytes < SIZES[1] and gradient_bytes in milliseconds:
        return milliseconds[gradient_bytes]
    compared = [ms for size, ms in milliseconds.items() if size >= SIZES[1]] or list(milliseconds.values())[-1:]
    return statistics.geometric_mean(compared) if compared else math.inf


def propose_settings(nodes: int, default_score: float) -> Generator[Settings, float | None, None]:
    """Yield at most MAX_TRIALS settings to try. The caller sends the score of each, or None if its trial failed."""
    best, best_score, tried = {}, default_score, [{}]
    # A known set replaces all variables, and a coordinate only its own.
    for choices in (KNOWN_GOOD, *COORDINATES) if nodes else ():
        if nodes > 2 and ALGORITHM in choices[0]:
            choices = (*choices, TREE)
        names = {name for choice in choices for name in choice}
        for choice in choices:
            settings = {name: value for name, value in best.items() if name not in names} | choice
            settings = {name: settings[name] for name in TUNED_VARIABLES if name in settings}  # the same order in every row
            if settings in tried or len(tried) > MAX_TRIALS:
                continue
            tried.append(settings)
            measured = yield settings
            if measured is not None and measured < best_score * (1 if choices is KNOWN_GOOD else FASTER):
                best, best_score = settings, measured


def bucket_sizes(gradient_bytes: int) -> list[int]:
    """Return the bucket sizes to try in MiB, DDP's default first. Of those that hold all gradients, only the smallest is kept."""
    kept = []
    for size in (5, 10, 25, 50, 100, 200):
        if size == 25 or not kept or kept[-1] * MIB < gradient_bytes:
            kept.append(size)
    return sorted(kept, key=lambda size: size != 25)


Choice = tuple[int, str]  # bucket_cap_mb, comm_hook
DEFAULT: Choice = (25, "none")  # DDP's defaults
WORTH_ROUNDING = 0.9  # a hook rounds the gradients, so its time must be below this share of the time without a hook


def _fastest(milliseconds: dict[Choice, float]) -> Choice | None:
    """Return the choice with the smallest buckets, which overlap best, of those whose times differ from the shortest by noise."""
    limit = min(milliseconds.values(), default=0.0) / FASTER
    return min((choice for choice, ms in milliseconds.items() if ms < limit), default=None)


def best_exact(milliseconds: dict[Choice, float]) -> Choice:
    """Return the best choice without a hook: DDP's default, unless another is faster by more than noise."""
    exact = {choice: ms for choice, ms in milliseconds.items() if choice[1] == "none"}
    fastest = _fastest(exact) or DEFAULT
    return fastest if exact.get(fastest, 0.0) < exact.get(DEFAULT, math.inf) * FASTER else DEFAULT


def best_choice(milliseconds: dict[Choice, float]) -> Choice:
    """Return the best choice without a hook, unless bf16 or fp16 is clearly faster. Of both, bf16 has the range of float32."""
    exact = best_exact(milliseconds)
    limit = milliseconds.get(exact, 0.0) * WORTH_ROUNDING
    faster = {choice: ms for choice, ms in milliseconds.items() if choice[1] in ("bf16", "fp16") and ms < limit}
    limit = min(faster.values(), default=0.0) * 1.05
    safer = {choice: ms for choice, ms in faster.items() if choice[1] == "bf16" and ms < limit}
    return _fastest(safer) or _fastest(faster) or exact


def confirmed_choice(times: dict[Choice, list[float]]) -> tuple[Choice, float]:
    """Return the best choice and its speed relative to the default, from one or more times of each choice.

    The shortest of many noisy times is partly luck. So the candidates are found by their shortest times, and then compared by
    their longest time against the default's shortest time.
    """
    shortest = {choice: min(each) for choice, each in times.items()}
    candidates = {DEFAULT, best_exact(shortest), best_choice(shortest)}
    compared = {choice: shortest[choice] if choice == DEFAULT else max(times[choice]) for choice in candidates}
    chosen = best_choice(compared)
    return chosen, shortest[DEFAULT] / compared[chosen]


HOOK_EFFECTS = {
    "none": "exact average over the ranks",
    "bf16": "rounded to 8 significant bits (0.4 %) before the average; same range as float32",
    "fp16": "rounded to 11 significant bits (0.05 %) before the average; above 65,504 overflows, below 6e-8 becomes 0",
    "powersgd": "low-rank approximation, the remainder is added in later steps; changes the training, so it is never chosen",
}


@dataclass
class Trial:
    """One set of settings, measured in new processes on all nodes."""

    settings: Settings
    note: str = ""
    number: int = 0
    milliseconds: dict[int, float] = field(default_factory=dict)  # all-reduce time by message size
    failure: str = ""
    score: float = math.inf

    @property
    def label(self) -> str:
        settings = " ".join(f"{name}={value}" for name, value in self.settings.items()) or "default"
        return f"{settings} ({self.note})" if self.note else settings


@dataclass
class Transport:
    backend: str  # nccl or gloo
    device: str
    version: str  # of torch and of the backend
    network: str  # the network plugin that NCCL uses
    paths: list[str]  # the transports between ranks in NCCL's log, for example NET/Socket or P2P/CUMEM
    interfaces: list[str]

    @property
    def is_nccl(self) -> bool:
        return self.backend == "nccl"

    @property
    def uses_sockets(self) -> bool:
        return self.is_nccl and any("Socket" in path for path in self.paths or [self.network])


@dataclass
class DdpConfig:
    """DDP options under which a step of the model is timed. TrainConfig has the same field names."""

    bucket_cap_mb: int = 0  # 0: the best size measured so far
    comm_hook: str = "none"  # "": the best hook measured so far
    gradient_as_bucket_view: bool = True
    is_repeat: bool = False  # a second measurement, because the first one may have been lucky or unlucky
    milliseconds: float = 0.0  # of a step; 0 before it is timed
    failure: str = ""

    @property
    def choice(self) -> Choice:
        return self.bucket_cap_mb, self.comm_hook


def format_time(milliseconds: float) -> str:
    digits = 2 if milliseconds < 10 else 1 if milliseconds < 1000 else 0
    return f"{milliseconds:.{digits}f}"


def all_reduce_heading(sizes: list[int]) -> str:
    return "trial" + "".join(f"{format_bytes(size):>10}" for size in sizes) + "    GB/s    speedup  settings (times in ms)"


def all_reduce_row(trial: Trial, sizes: list[int], default_score: float) -> str:
    times = "".join(f"{format_time(trial.milliseconds[size]) if size in trial.milliseconds else '-':>10}" for size in sizes)
    if trial.failure:
        return f"{trial.number:5}{times}       -     failed  {trial.label}: {trial.failure}"
    largest = max(trial.milliseconds)
    bandwidth = f"{largest / trial.milliseconds[largest] / 1e6:8.2f}"
    return f"{trial.number:5}{times}{bandwidth}{default_score / trial.score:11.2f}  {trial.label}"


DDP_HEADING = "bucket_cap_mb  comm_hook  bucket_view    ms/step  communication    speedup  effect on the gradients"


def ddp_row(config: DdpConfig, compute_ms: float, default_ms: float) -> str:
    """Return a row of the table. `compute_ms` is the time of a step without communication, or 0 if it is not measured."""
    view, ms = str(config.gradient_as_bucket_view).lower(), config.milliseconds
    head = f"{config.bucket_cap_mb:13}  {config.comm_hook:9}  {view:11}"
    if config.failure:
        return f"{head}  {'-':>9}  {'-':>13}  {'failed':>9}  {config.failure}"
    communication = max(0.0, 1 - compute_ms / ms) if compute_ms else math.nan
    effect = HOOK_EFFECTS[config.comm_hook] + " (repeated)" * config.is_repeat
    return f"{head}  {format_time(ms):>9}  {communication:13.0%}  {default_ms / ms:>9.2f}  {effect}"


def env_text(header: list[str], settings: Settings) -> str:
    """Return the content of tuned.env. It is also written if nothing was faster: an older one would stay in use."""
    lines = ["# NCCL and gloo settings for this cluster, written by `accel-ddp tune`.",
             "# Run this on every node before `accelerate launch`: set -a; . THIS_FILE; set +a",
             *(f"# {line}" for line in header)]  # fmt: skip
    if "NCCL_BUFFSIZE" in settings or "NCCL_MIN_NCHANNELS" in settings:
        lines.append("# Larger buffers and more channels use more GPU memory: channels x buffer size for each neighbor.")
    lines += [f"{name}={shlex.quote(value)}" for name, value in settings.items()]  # a value of NCCL_ALGO may have a semicolon
    lines += [] if settings else ["# Nothing was faster than the default, so no NCCL or gloo variable is set."]
    lines += ["# The next variable ends the recipes' advice to run `accel-ddp tune`.", "ACCEL_DDP_TUNED=1"]
    return "\n".join(lines) + "\n"


def yaml_text(header: list[str], config: DdpConfig) -> str:
    lines = ["# DDP options for this cluster and model, written by `accel-ddp tune`.",
             "# Use them with: recipes/classify.py --config THIS_FILE",
             *(f"# {line}" for line in header),
             f"# Gradients with comm_hook {config.comm_hook}: {HOOK_EFFECTS[config.comm_hook]}."]  # fmt: skip
    if config.comm_hook != "none":
        lines.append("# The hook changes the result by rounding, so a run must be resumed with the same hook.")
    lines += [f'comm_hook: "{config.comm_hook}"', f"bucket_cap_mb: {config.bucket_cap_mb}"]
    return "\n".join([*lines, f"gradient_as_bucket_view: {str(config.gradient_as_bucket_view).lower()}"]) + "\n"


def write_files(folder: str, files: dict[str, str]) -> tuple[list[str], bool]:
    """Write the files, keep replaced ones as `.before`, and return a line about each and whether all of them are there."""
    lines, is_complete = [], True
    for name, text in files.items():
        name = Path(name).name  # the main node sends the name: it must not lead out of the folder
        path = Path(folder).expanduser() / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replaced = ""
            if path.exists() and path.read_text(errors="replace") == text:
                lines.append(f"{path} has this content already (probably a disk that the nodes share)")
                continue
            if path.exists():
                path.replace(path.with_name(name + ".before"))
                replaced = f"; the previous file is now {path.with_name(name + '.before')}"
            replace_file(path, text, has_rivals=True)
            lines.append(f"wrote {path}{replaced}")
        except OSError as error:
            lines.append(f"could not write {path}: {error.strerror}")
            is_complete = False
    return lines, is_complete


# Every parameter of a model is an entry [kind, shape, is_trained], in the model's order. The kind is "embedding", "matrix" or "vector".
Entries = list[list[Any]]

_SIDE = 1024  # of the square matrices that stand for a model if only its size is given


@dataclass(frozen=True)
class Gradients:
    entries: Entries  # empty if there is no model
    dtype: str = "float32"

    @property
    def bytes_per_element(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def bytes(self) -> int:
        """A multiple of 4, because all-reduce is timed on float32; 0 if there is no model."""
        return max(4, count_elements(self.entries) * self.bytes_per_element // 4 * 4) if self.entries else 0


def entries_of_size(size: int) -> Entries:
    """Return float32 matrices of together about `size` bytes: square ones, and a smaller one for the rest."""
    whole, rest = divmod(size // 4, _SIDE * _SIDE)
    entries: Entries = [["matrix", [_SIDE, _SIDE], True] for _ in range(whole)]
    if rows := rest // _SIDE:
        entries.append(["matrix", [rows, _SIDE], True])
    return entries or [["vector", [max(1, rest)], True]]


def count_elements(entries: Entries) -> int:
    return sum(math.prod(shape) for _, shape, is_trained in entries if is_trained)


def first_entries(entries: Entries, elements: int) -> Entries:
    """Return the first entries with together at most `elements` trained elements, and at least one entry."""
    kept: Entries = []
    for entry in entries:
        elements -= count_elements([entry])
        if kept and elements < 0:
            break
        kept.append(entry)
    return kept
