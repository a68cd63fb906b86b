"""The values of `--train_file`, `--best_metric`, `--profile`, `--profile_ranks`, `--chat_template`: what they mean, and checks."""

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from accel_ddp.errors import UserError
from accel_ddp.text import counted, did_you_mean

# Which values of a metric are better. "": not known, and further metrics may have names that begin with this one.
Direction = Literal["min", "max", ""]


class BestMetric(NamedTuple):
    name: str
    direction: Literal["min", "max"]

    def require(self, metrics: dict[str, float]) -> None:
        if self.name not in metrics:
            reason = f"the evaluation has no such metric.{_suggest(self.name, list(metrics))} Use one of: {', '.join(metrics)}"
            raise UserError(f"--best_metric {self.name}: {reason}.")

    def is_better(self, value: float, than: float | None) -> bool:
        """Return whether `value` is better than an earlier one. NaN is never better, and of equal values the first is best."""
        if math.isnan(value):
            return False
        return than is None or (value < than if self.direction == "min" else value > than)

    def rank(self, evaluations: dict[int, dict[str, float]]) -> list[int]:
        """Return the steps with a value of the metric, the best first. Of equal values the earlier step is first."""
        values = {step: metrics[self.name] for step, metrics in evaluations.items() if self.name in metrics}
        sign = 1 if self.direction == "min" else -1
        return sorted((step for step in values if not math.isnan(values[step])), key=lambda step: (sign * values[step], step))


def choose(text: str, declared: dict[str, Direction], can_add: bool = False) -> BestMetric:
    """Return the metric that `--best_metric TEXT` means among those that a recipe declares.

    TEXT is NAME, NAME:min or NAME:max. Without it, the first declared metric is used. If a recipe declares none, any name is
    accepted, because its metrics are not known before its first evaluation. `can_add` states whether there is `--metrics`.
    """
    is_closed = bool(declared)
    declared = declared or {"loss": "min"}
    name, colon, given = text.partition(":")
    name = name or next(iter(declared))
    if colon and given not in ("min", "max"):
        raise UserError(f"--best_metric {text}: after the colon, min or max is expected. Use {name}:min or {name}:max.")
    open_names = tuple(f"{prefix}_" for prefix, direction in declared.items() if direction == "")
    if is_closed and name not in declared and not name.startswith(open_names):
        raise UserError(
            f"--best_metric {text}: this recipe does not measure {name}.{_suggest(name, list(declared))} "
            f"Use one of: {', '.join(declared)}.{' Or add it with --metrics.' if can_add else ''} A metric that you write into a "
            "recipe is declared in `metric_directions` of its Config."
        )
    direction = given or declared.get(name, "")
    if direction not in ("min", "max"):
        instead = f"Use --best_metric {name}:min or --best_metric {name}:max"
        raise UserError(f"--best_metric {text}: whether a lower or a higher {name} is better is not known. {instead}.")
    return BestMetric(name, direction)


def _suggest(name: str, known: list[str]) -> str:
    """Return " Did you mean accuracy?" for a misspelt name, or "". HF Trainer writes eval_ before each name."""
    word = name.lower().removeprefix("eval_")
    return did_you_mean(word, known) or next((f" Did you mean {other}?" for other in known if word in other), "")


WARM_UP_STEPS = 10  # first steps of a process: kernels are chosen, shapes are captured, connections are opened
NUM_STEPS = 5
MAX_STEPS = 100  # a trace of a step has some megabytes
MAX_RANKS = 16  # of `--profile_ranks auto`


class Window(NamedTuple):
    first: int
    last: int

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first}-{self.last}"


def parse_steps(text: str) -> Window | Literal["auto"] | None:
    word = text.strip().lower()
    if word in ("", "off", "no", "false", "none"):
        return None
    if word in ("auto", "on", "true"):
        return "auto"
    found = re.fullmatch(r"(\d+)(?:[-:](\d+))?", word)
    if not found:
        default = f"Without a value it records {NUM_STEPS} steps after the first {WARM_UP_STEPS}"
        raise UserError(f"--profile {text}: must be a range of steps such as 10-14, one step, auto or off. {default}.")
    window = Window(int(found[1]), int(found[2] or found[1]))
    if window.first < 1 or window.last < window.first:
        example = f"{max(1, window.last)}-{max(1, window.first)}" if window.last < window.first else "1-5"
        raise UserError(f"--profile {text}: steps are counted from 1, and the first one comes first. Use --profile {example}.")
    if window.last - window.first >= MAX_STEPS:
        raise UserError(
            f"--profile {text}: selects {window.last - window.first + 1:,} steps, of which each needs some megabytes. At most "
            f"{MAX_STEPS} are possible. Use --profile {window.first}-{window.first + NUM_STEPS - 1}."
        )
    return window


def check_end(text: str, total_steps: int) -> None:
    window = parse_steps(text)
    if isinstance(window, Window) and window.last > total_steps:
        first = max(1, min(window.first, total_steps - (window.last - window.first)))
        instead = f"Use --profile {first}-{total_steps}, or train for more --steps"
        raise UserError(f"--profile {text}: the run has {counted(total_steps, 'step')}. {instead}.")


def choose_window(text: str, first_step: int, total_steps: int, pauses_after: Callable[[int], bool]) -> Window | None:
    """Return the steps to record after `first_step`, or None. They end before an evaluation or a checkpoint."""
    window = parse_steps(text)
    if window is None or first_step >= total_steps:
        return None
    if window == "auto":
        left = total_steps - first_step
        skipped = min(WARM_UP_STEPS, max(left - NUM_STEPS, left // 2))
        window = Window(first_step + skipped + 1, min(first_step + skipped + NUM_STEPS, total_steps))
        length = window.last - window.first + 1
        # A window that no evaluation shortens, with a step before it in which torch.profiler warms up.
        for first in range(window.first, min(window.first + 10 * NUM_STEPS, total_steps - length + 2)):
            if not any(pauses_after(step) for step in range(first - 1, first + length - 1)):
                return Window(first, first + length - 1)
    if window.last <= first_step:
        return None
    first, last = max(window.first, first_step + 1), min(window.last, total_steps)
    return Window(first, next((step for step in range(first, last) if pauses_after(step)), last))


def parse_ranks(text: str) -> list[int] | Literal["all", "auto"]:
    word = text.strip().lower()
    if word in ("", "auto", "all"):
        return "all" if word == "all" else "auto"
    ranks: set[int] = set()
    for part in re.split(r"[,\s]+", word):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise UserError(f"--profile_ranks {text}: must be all, auto, or ranks with commas, for example 0,3 or 0-3.")
        ranks |= set(range(int(found[1]), int(found[2] or found[1]) + 1))
    return sorted(ranks)


def parse_shares(text: str, num_ranks: int = 0) -> tuple[float, ...] | None:
    """Return the shares of ranks that `--balance` gives, with the sum 1, or None for off and speed. Raise UserError for other texts."""
    if text in ("off", "speed"):
        return None
    words = text.replace(",", " ").split()
    if not all(re.fullmatch(r"\d+(\.\d+)?", word) and float(word) > 0 for word in words) or len(words) < 2:
        raise UserError(f"--balance {text}: must be off, speed, or a number above 0 for each rank, for example 2,1.")
    if num_ranks and len(words) != num_ranks:
        instead = "Give one for each, or use --balance speed"
        raise UserError(f"--balance {text}: has {len(words)} numbers for {num_ranks} ranks. {instead}.")
    return tuple(float(word) / sum(map(float, words)) for word in words)


def is_setting(name: object, value: object) -> bool:
    """Return whether a run may set this variable of NCCL. A plugin is code, which no file of settings may load."""
    is_name = re.fullmatch(r"NCCL_(?!.*PLUGIN)[A-Z0-9_]{1,60}", str(name))
    return bool(is_name and re.fullmatch(r"[A-Za-z0-9.,:;=^_-]{1,100}", str(value)))


def check_settings(text: str) -> None:
    words = text.split()
    wrong = [word for word in words if not is_setting(*word.partition("=")[::2])]
    if text not in ("auto", "off") and (wrong or not words):
        reason = f"{wrong[0]} is no setting of NCCL that a run may have. Use" if len(words) > 1 else "must be"
        raise UserError(f"--tuned {text}: {reason} auto, off, or settings such as NCCL_ALGO=Ring.")


def choose_ranks(text: str, num_ranks: int, first_of_nodes: Sequence[int] = ()) -> list[int]:
    """Return the ranks that record a trace: those named, or for `auto` up to MAX_RANKS, the first of each node before others."""
    ranks = parse_ranks(text)
    if ranks == "all":
        return list(range(num_ranks))
    if ranks == "auto":
        others = [rank for rank in range(num_ranks) if rank not in first_of_nodes]
        return sorted([*first_of_nodes, *others][:MAX_RANKS])
    if ranks[-1] >= num_ranks:
        have = f"{num_ranks} ranks, from 0 to {num_ranks - 1}" if num_ranks > 1 else "one rank, which is rank 0"
        raise UserError(f"--profile_ranks {text}: there is no rank {ranks[-1]}. This run has {have}. Use --profile_ranks all.")
    return ranks


def split_weight(given: str) -> tuple[str, float | None]:
    """Return the path and the number of `PATH:NUMBER`, or the path and None. A path that exists as it is typed is not split."""
    path, _, number = given.rpartition(":")
    with contextlib.suppress(ValueError):
        if path and not Path(given).exists():
            return path, float(number)
    return given, None


def check_streaming(cfg: Any) -> None:
    for option, is_there in (
        ("--steps, because the number of rows is not known", cfg.steps),
        ("--max_length N", cfg.max_length != "auto"),
        ("--eval_file, --eval_split, or --max_eval_items N to evaluate the first N rows and train the others",
         cfg.eval_file or cfg.eval_split or cfg.max_eval_items),
    ):  # fmt: skip
        if not is_there:
            raise UserError(f"--streaming: needs {option}.")
    refused = [f"--{name} {getattr(cfg, name)}" for name in ("max_train_items", "eval_fraction") if getattr(cfg, name)]
    refused += ["--packing on"] if cfg.packing == "on" else []
    refused += [f"--train_file {path}" for path in cfg.train_file if split_weight(path)[1] is not None]
    if refused:
        raise UserError(f"--streaming {refused[0]}: needs all rows at the start. Leave one of them out.")


CHAT_TEMPLATES = ("plain", "chatml", "llama3", "gemma", "mistral")  # the names in tasks/chat_template.py


def check_template(given: str) -> None:
    if given and given not in CHAT_TEMPLATES and not ("{%" in given or "{{" in given) and not Path(given).is_file():
        raise UserError(
            f"--chat_template {given}: there is no such file or built-in template.{did_you_mean(given, CHAT_TEMPLATES)} "
            f"Use one of: {', '.join(CHAT_TEMPLATES)}, or a file."
        )
