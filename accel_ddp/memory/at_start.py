"""The estimated GPU memory before a run loads its model, and the options that depend on it. A model that does not fit is refused."""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator

from accel_ddp.config.choices import choose
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.memory.estimate import CONTEXT, GIB, NAMES, STATES, Estimate, Estimator, Suggestion, fits, needed
from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.ranks.agreement import broadcast_object, gather_objects, print_on_main
from accel_ddp.ranks.process import links, this_rank
from accel_ddp.seeds import generators_kept
from accel_ddp.training.stream import count_tokens

log = logging.getLogger(__name__)
EVAL_BATCH_SIZE = 16  # where the memory is not known


@dataclass(frozen=True)
class Verdict:
    text: str = ""  # to print
    refusal: str = ""  # the message of the error that every rank raises
    facts: dict[str, Any] = field(default_factory=dict)  # for the log of the run
    choices: dict[str, tuple[Any, str]] = field(default_factory=dict)  # the values of options that are `auto`, and why


def fit_memory(cfg: TrainConfig, accelerator: Accelerator, model_class: str, rows: Sequence[Any] = ()) -> None:
    """Choose `auto` of `--gradient_checkpointing`, `--keep_gathered` and `--eval_batch_size`, and print the memory that a GPU needs.

    Call it on every rank, when `cfg.max_length` is known and before the model is loaded. `rows` are the tokenized rows for training and
    for evaluation, of which the longest are assumed to come together. Without them all have `--max_length` tokens. Raise UserError on
    every rank if the states of the model alone do not fit. A micro-batch that is too large is only reported, because others are
    smaller. Whatever fails in the estimate itself does not stop the run. Without `model_class`, and on CPUs without `--gpu_memory_gb`,
    nothing is estimated.
    """
    found = Verdict()
    is_on_gpu = accelerator.device.type == "cuda"
    is_estimated = bool(model_class) and not cfg.evaluate_only and (is_on_gpu or cfg.gpu_memory_gb > 0)
    if is_estimated:
        rooms = gather_objects(_room(accelerator.device, cfg.gpu_memory_gb * GIB))
        if rooms and all(size for size, _ in rooms):
            found = _judge(accelerator.mixed_precision, cfg, model_class, rows, *map(min, zip(*rooms)))
        found = broadcast_object(found, what="estimate the memory of the model")
        links.memory = found.facts
    why = "the memory is not estimated" if is_on_gpu or is_estimated else "on CPUs"
    for name, value in (("gradient_checkpointing", False), ("eval_batch_size", EVAL_BATCH_SIZE)):
        if getattr(cfg, name, None) == "auto":
            choose(cfg, name, *found.choices.get(name, (value, why)))
    if "keep_gathered" in found.choices:  # otherwise `auto` keeps nothing, as on CPUs
        choose(cfg, "keep_gathered", *found.choices["keep_gathered"])
    if found.text:
        print_on_main(found.text)
    if found.refusal:
        raise UserError(found.refusal)


def _room(device: torch.device, given: float) -> tuple[float, float]:
    """Return the bytes of the GPU of this rank, and those that other processes do not use. 0: not known."""
    if device.type != "cuda":
        return given, given
    try:
        free, size = torch.cuda.mem_get_info(device)
    except RuntimeError:  # the driver does not tell
        return given, given
    return given or size, min(given or size, free + CONTEXT)  # this process has opened CUDA already


def _judge(precision: str, cfg: TrainConfig, model_class: str, rows: Sequence[Any], size: float, free: float) -> Verdict:
    """Return what to print and whether the run is refused. It draws no random numbers, and never raises an exception."""
    try:
        with generators_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            estimator = Estimator(cfg, model_class, precision, len(links.nodes), [count_tokens(table) for table in rows])
            return judge(estimator, this_rank.num_ranks, links.sharding, size, free)
    except UserError:
        return Verdict()  # loading the model reports it
    except Exception as error:  # an unusual model, which may train nevertheless
        log.info("the memory of the model is not estimated: %s: %s", type(error).__name__, error)
        return Verdict()


def judge(estimator: Estimator, ranks: int, plan: ShardingPlan | None, size: float, free: float) -> Verdict:
    estimator = estimator.settled(ranks, plan, min(size, free))
    found = estimator.estimate(ranks, plan)
    expected = max(found.peak, found.with_graphs) if needed(found.with_graphs, ranks) <= size else found.peak
    is_least = estimator.cfg.micro_batch_size == "auto" and not estimator.cfg.micro_batch_tokens
    what = f"estimated{_with(found)}{' for micro-batches of 1 item' * is_least}{_parts(found, expected)}"
    lines = [f"memory per GPU: {expected / GIB:.1f} of {size / GIB:.1f} GiB {what}"]
    if ranks > 1 and found.peak > GIB and (plan or estimator.can_be_sharded()):
        other = estimator.estimate(ranks, None if plan else ShardingPlan())
        lines.append(f"  it would be {other.peak / GIB:.1f} GiB{_with(other)}{_parts(other)}")
    if not found.has_activations:
        lines.append("  Activations are not included, because the forward pass of this model could not be traced.")
    facts = {"estimated": expected, **found.rows, **({"micro_batch_size": 1} if is_least else {})}
    advice = [] if fits(found, size) else estimator.suggest(ranks, plan, size)
    if needed(found.states, ranks) > size:
        return Verdict("\n".join(lines), _refusal(estimator.cfg, found, size, advice), facts, estimator.choices)
    if not fits(found, size):
        what = "A step" if needed(found.total, ranks) > size else "An evaluation"
        change = ", or ".join(map(str, advice)) or "a smaller --max_length or --eval_batch_size"
        lines.append(f"  {what} may not fit if texts are as long as the estimate assumes. Use {change}.")
    elif not fits(found, free):
        lines.append(f"  Only {free / GIB:.1f} GiB are free, because other processes use the GPU. The run may not fit.")
    return Verdict("\n".join(lines), "", facts, estimator.choices)


def _with(found: Estimate) -> str:
    return f" with {found.kind}" if found.ranks > 1 else ""


def _parts(found: Estimate, expected: int = 0) -> str:
    """Return the parts of a peak, for example ` (weights 5.0, gradients 5.0, activations 2.3)`, without small parts."""
    rows = found.rows | {"graphs": max(0, expected - found.peak)}
    shown = [f"{NAMES[name]} {size / GIB:.1f}" for name, size in rows.items() if size >= (0.2 if name == "other" else 0.05) * GIB]
    return f" ({', '.join(shown)})" if shown else ""


def _refusal(cfg: Any, found: Estimate, size: float, advice: list[Suggestion]) -> str:
    size_of_states = needed(found.states, found.ranks)
    sizes = {NAMES[name]: found.rows[name] for name in STATES}
    sizes["CUDA, NCCL and fragmentation"] = size_of_states - found.states
    states = ", ".join(f"{name} {bytes / GIB:.1f}" for name, bytes in sizes.items() if bytes >= 0.05 * GIB)
    room = f"--gpu_memory_gb {cfg.gpu_memory_gb:g} allows less" if cfg.gpu_memory_gb else f"a GPU has {size / GIB:.1f} GiB"
    change = f"Use {', or '.join(map(str, advice))}." if advice else "Use more GPUs, GPUs with more memory, or a smaller model."
    return (
        f"--model {cfg.model}: does not fit{_with(found)}. With CUDA it needs {size_of_states / GIB:.1f} GiB per GPU besides "
        f"activations ({states}), and {room}. {change}"
    )
