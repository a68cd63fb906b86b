"""What was measured, as rows of a table and as files."""

import math
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_ddp.tune.search import MIB, Settings, words

COSTS = {
    "none": "exact: the average of what the ranks computed",
    "bf16": "gradients rounded to 8 binary digits (0.4 %) before they are averaged; the range is float32's",
    "fp16": "gradients rounded to 11 binary digits (0.05 %); above 65,504 they overflow, below 6e-8 they are lost",
    "powersgd": "gradients of low rank, what is left out comes later: another training, not rounding; never chosen here",
}


@dataclass
class Trial:
    """One set of settings over all nodes."""

    number: int
    settings: Settings
    interfaces: list[str] = field(default_factory=list)  # of each node, where the trial chose it
    variable: str = ""  # that chooses it
    note: str = ""
    milliseconds: dict[int, float] = field(default_factory=dict)
    failed: str = ""
    early: bool = False
    score: float = math.inf

    def of_node(self, node: int) -> Settings:
        """The variables as that node has them. NCCL takes beginnings of names unless it is told not to."""
        exactly = "=" if self.variable.startswith("NCCL") else ""
        return {**({self.variable: exactly + self.interfaces[node]} if self.interfaces else {}), **self.settings}

    @property
    def words(self) -> str:
        different = list(dict.fromkeys(self.interfaces))
        interface = [f"{self.variable}={'|'.join(different)}"] if different else []
        settings = [words(self.settings)] if self.settings or not interface else []
        return " ".join([*interface, *settings, *([f"({self.note})"] if self.note else [])])


def size_words(size: int) -> str:
    return f"{size / MIB:.0f} MiB" if size >= MIB and size % MIB == 0 else f"{size / 1e6:.3g} MB"


def number_words(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def heading(sizes: list[int]) -> str:
    return "trial" + "".join(f"{size_words(size):>10}" for size in sizes) + "    GB/s  x default  settings (times in ms)"


def row(trial: Trial, sizes: list[int], default: float) -> str:
    times = "".join(f"{number_words(trial.milliseconds[size]) if size in trial.milliseconds else '-':>10}" for size in sizes)
    if trial.failed:
        return f"{trial.number:5}{times}       -     failed  {trial.words}: {trial.failed}"
    largest = max(trial.milliseconds)
    speed = f"{largest / trial.milliseconds[largest] / 1e6:8.2f}"
    ratio = f"{'slower' if trial.early else format(default / trial.score, '.2f'):>11}"
    return f"{trial.number:5}{times}{speed}{ratio}  {trial.words}" + (" (ended early)" if trial.early else "")


DDP_HEADING = "bucket_cap_mb  comm_hook  bucket_view  ms a step  communication  x default  what the hook costs"


def ddp_row(config: dict[str, Any], result: dict[str, Any], alone: float, default: float) -> str:
    view = str(config["gradient_as_bucket_view"]).lower()
    head = f"{config['bucket_cap_mb']:13}  {config['comm_hook']:9}  {view:11}"
    if result.get("failed"):
        return f"{head}  {'-':>9}  {'-':>13}  {'failed':>9}  {result['failed']}"
    share = max(0.0, 1 - alone / result["ms"]) if alone else math.nan
    ratio = "slower" if result["early"] else f"{default / result['ms']:.2f}"
    cost = COSTS[config["comm_hook"]] + " (ended early)" * result["early"] + " (again)" * config["again"]
    return f"{head}  {number_words(result['ms']):>9}  {share:13.0%}  {ratio:>9}  {cost}"


def env_text(header: list[str], settings: Settings) -> str:
    """To be sourced on every node. Where nothing was faster it says so: an older file must not go on to be used."""
    lines = ["# NCCL and gloo settings for this cluster, by `accel-ddp tune`. On every node, before `accelerate launch`:",
             "#   set -a; . THIS_FILE; set +a", *(f"# {line}" for line in header)]  # fmt: skip
    if "NCCL_BUFFSIZE" in settings or "NCCL_MIN_NCHANNELS" in settings:
        lines.append("# Larger buffers and more channels take more GPU memory: channels x buffer for each neighbour.")
    lines += [f"{name}={shlex.quote(value)}" for name, value in settings.items()]  # NCCL_ALGO may hold a semicolon
    lines += ["# So that recipes no longer advise to tune:", "ACCEL_DDP_TUNED=1"]
    return "\n".join([*lines, *([] if settings else ["# Nothing was faster than the default: there is nothing to set."])]) + "\n"


def yaml_text(header: list[str], config: dict[str, Any]) -> str:
    """For `--config` of the recipes: names and values are TrainConfig's."""
    lines = ["# DDP options for this cluster and model, by `accel-ddp tune`: recipes/classify.py --config THIS_FILE"]
    lines += [f"# {line}" for line in header]
    lines += [f"# comm_hook {config['comm_hook']}: {COSTS[config['comm_hook']]}."]
    lines += [] if config["comm_hook"] == "none" else ["# It changes the result by rounding; a run is resumed with the same one."]
    lines += [f'comm_hook: "{config["comm_hook"]}"', f"bucket_cap_mb: {config['bucket_cap_mb']}"]
    return "\n".join([*lines, f"gradient_as_bucket_view: {str(config['gradient_as_bucket_view']).lower()}"]) + "\n"


def write(folder: str, files: dict[str, str]) -> list[str]:
    """A line for each file that says what was done. What was there before is kept beside it, unless it is the same."""
    said = []
    for name, text in files.items():
        path = Path(folder).expanduser() / Path(name).name  # never elsewhere: the name comes from the main node
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = ""
            if path.exists() and path.read_text(errors="replace") == text:
                said.append(f"{path}: is there already, with the same content (a shared disk)")
                continue
            if path.exists():
                path.replace(path.with_name(name + ".before"))
                kept = f"; what was there is now {path.with_name(name + '.before')}"
            draft = path.with_name(f".{name}.{time.time_ns()}")
            draft.write_text(text)
            draft.replace(path)
            said.append(f"wrote {path}{kept}")
        except OSError as error:
            said.append(f"could not write {path}: {error.strerror}")
    return said
