"""Types for what is measured, the rows of the printed tables, and the files with the best values."""

import math
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path

from accel_ddp.tune.search import MIB, Choice, Settings, format_settings

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
    interfaces: list[str] = field(default_factory=list)  # the interface of each node, if the trial chooses interfaces
    interface_variable: str = ""  # the environment variable that chooses the interface
    note: str = ""
    number: int = 0
    milliseconds: dict[int, float] = field(default_factory=dict)  # all-reduce time by message size
    failure: str = ""
    ended_early: bool = False  # because it was much slower than the best trial
    score: float = math.inf

    def environment(self, node: int) -> Settings:
        """Return the environment variables for a node."""
        if not self.interfaces:
            return dict(self.settings)
        exact = "=" if self.interface_variable.startswith("NCCL") else ""  # without it, NCCL takes the name as a prefix
        return {self.interface_variable: exact + self.interfaces[node], **self.settings}

    @property
    def label(self) -> str:
        different = list(dict.fromkeys(self.interfaces))
        interface = [f"{self.interface_variable}={'|'.join(different)}"] if different else []
        settings = [format_settings(self.settings)] if self.settings or not interface else []
        return " ".join([*interface, *settings, *([f"({self.note})"] if self.note else [])])


@dataclass
class Transport:
    """How the ranks communicate, from their reports."""

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
        """Whether NCCL sends data through TCP sockets."""
        return self.is_nccl and any("Socket" in path for path in self.paths or [self.network])


@dataclass
class DdpConfig:
    """DDP options under which a step of the model is timed. The field names are those of TrainConfig."""

    bucket_cap_mb: int = 0  # 0: the best size measured so far
    comm_hook: str = "none"  # "": the best hook measured so far
    gradient_as_bucket_view: bool = True
    is_repeat: bool = False  # a second measurement, because the first one may have been lucky or unlucky

    @property
    def choice(self) -> Choice:
        return self.bucket_cap_mb, self.comm_hook


@dataclass
class DdpTiming:
    """The time of a DDP step, or the reason why there is none."""

    milliseconds: float = math.nan
    ended_early: bool = False
    failure: str = ""


def format_size(size: int) -> str:
    return f"{size / MIB:.0f} MiB" if size >= MIB and size % MIB == 0 else f"{size / 1e6:.3g} MB"


def format_time(milliseconds: float) -> str:
    digits = 2 if milliseconds < 10 else 1 if milliseconds < 1000 else 0
    return f"{milliseconds:.{digits}f}"


def all_reduce_heading(sizes: list[int]) -> str:
    return "trial" + "".join(f"{format_size(size):>10}" for size in sizes) + "    GB/s    speedup  settings (times in ms)"


def all_reduce_row(trial: Trial, sizes: list[int], default_score: float) -> str:
    times = "".join(f"{format_time(trial.milliseconds[size]) if size in trial.milliseconds else '-':>10}" for size in sizes)
    if trial.failure:
        return f"{trial.number:5}{times}       -     failed  {trial.label}: {trial.failure}"
    largest = max(trial.milliseconds)
    bandwidth = f"{largest / trial.milliseconds[largest] / 1e6:8.2f}"
    speedup = f"{'slower' if trial.ended_early else format(default_score / trial.score, '.2f'):>11}"
    return f"{trial.number:5}{times}{bandwidth}{speedup}  {trial.label}" + (" (ended early)" if trial.ended_early else "")


DDP_HEADING = "bucket_cap_mb  comm_hook  bucket_view    ms/step  communication    speedup  effect on the gradients"


def ddp_row(config: DdpConfig, timing: DdpTiming, compute_ms: float, default_ms: float) -> str:
    """Return a row of the table. `compute_ms` is the time of a step without communication, or 0 if it is not measured."""
    view = str(config.gradient_as_bucket_view).lower()
    head = f"{config.bucket_cap_mb:13}  {config.comm_hook:9}  {view:11}"
    if timing.failure:
        return f"{head}  {'-':>9}  {'-':>13}  {'failed':>9}  {timing.failure}"
    communication = max(0.0, 1 - compute_ms / timing.milliseconds) if compute_ms else math.nan
    speedup = "slower" if timing.ended_early else f"{default_ms / timing.milliseconds:.2f}"
    effect = HOOK_EFFECTS[config.comm_hook] + " (ended early)" * timing.ended_early + " (repeated)" * config.is_repeat
    return f"{head}  {format_time(timing.milliseconds):>9}  {communication:13.0%}  {speedup:>9}  {effect}"


def env_text(header: list[str], settings: Settings) -> str:
    """Return the content of tuned.env, which the user sources on every node.

    The file is also written if nothing was faster, so that an older one does not stay in use.
    """
    lines = ["# NCCL and gloo settings for this cluster, written by `accel-ddp tune`.",
             "# Run this on every node before `accelerate launch`: set -a; . THIS_FILE; set +a",
             *(f"# {line}" for line in header)]  # fmt: skip
    if "NCCL_BUFFSIZE" in settings or "NCCL_MIN_NCHANNELS" in settings:
        lines.append("# Larger buffers and more channels use more GPU memory: channels x buffer size for each neighbour.")
    lines += [f"{name}={shlex.quote(value)}" for name, value in settings.items()]  # a value of NCCL_ALGO may have a semicolon
    lines += [] if settings else ["# Nothing was faster than the default, so no NCCL or gloo variable is set."]
    lines += ["# The next variable ends the recipes' advice to run `accel-ddp tune`.", "ACCEL_DDP_TUNED=1"]
    return "\n".join(lines) + "\n"


def yaml_text(header: list[str], config: DdpConfig) -> str:
    """Return the content of tuned.yaml, which recipes read with `--config`."""
    lines = ["# DDP options for this cluster and model, written by `accel-ddp tune`.",
             "# Use them with: recipes/classify.py --config THIS_FILE",
             *(f"# {line}" for line in header),
             f"# Gradients with comm_hook {config.comm_hook}: {HOOK_EFFECTS[config.comm_hook]}."]  # fmt: skip
    if config.comm_hook != "none":
        lines.append("# The hook changes the result by rounding, so a run must be resumed with the same hook.")
    lines += [f'comm_hook: "{config.comm_hook}"', f"bucket_cap_mb: {config.bucket_cap_mb}"]
    return "\n".join([*lines, f"gradient_as_bucket_view: {str(config.gradient_as_bucket_view).lower()}"]) + "\n"


def write_files(folder: str, files: dict[str, str]) -> tuple[list[str], bool]:
    """Write the files and return one line about each, and whether all of them are there.

    A file that is replaced is kept with the suffix `.before`.
    """
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
            draft = path.with_name(f".{name}.{time.time_ns()}")
            draft.write_text(text)
            draft.replace(path)
            lines.append(f"wrote {path}{replaced}")
        except OSError as error:
            lines.append(f"could not write {path}: {error.strerror}")
            is_complete = False
    return lines, is_complete
