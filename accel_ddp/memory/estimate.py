"""The peak of GPU memory per rank, from the states of a model and the trace of a micro-batch, and what to change if it is too high.

It is what `torch.cuda.max_memory_allocated` returns. The CUDA context, NCCL, and what the allocator holds but does not use come on
top of it; see `needed`.
"""

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from accel_ddp.errors import UserError
from accel_ddp.memory import fake_model, step_trace
from accel_ddp.memory.fake_model import ASSUMED_LENGTH, States, count_states
from accel_ddp.memory.step_trace import ACTIVATIONS, CASTS_OF_LAYERS, CASTS_OF_REST, GRADIENTS_OF_LAYERS, GRADIENTS_OF_REST, LOSS
from accel_ddp.nodes.sharding_plan import CONFIG, ONE_PER_NODE, ShardingPlan
from accel_ddp.sources import models
from accel_ddp.text import table

GIB = 1 << 30
WORKSPACES = 64 << 20  # bytes of the matrix products of cuBLAS and of the loss
CONTEXT = 0.6 * GIB  # of CUDA, which no tensor uses
COMMUNICATION = 0.6 * GIB  # of NCCL
MARGIN = 1.1  # how much larger a peak may be than its estimate, where `auto` relies on it
FRAGMENTATION = 0.05  # of the peak: memory that the allocator has requested and cannot use

log = logging.getLogger(__name__)

# What the rows of an estimate are called. `docs/memory.md` explains them.
NAMES = {
    "weights": "weights", "reference": "copy of trained weights", "gradients": "gradients", "optimizer": "optimizer state",
    "averages": "averaged weights",
    "gathered": "gathered weights", "copies": "weights in 16 bits", "activations": "activations", "loss": "vocabulary loss",
    "other": "other", "graphs": "CUDA graphs",
}  # fmt: skip
ROWS, STATES = tuple(NAMES)[:10], tuple(NAMES)[:6]  # no smaller micro-batch saves the states
ONE, DDP, FSDP = "one GPU", "DDP", "FSDP"
GATHERED_LAYERS = 3  # the layer that is computed, the next one, and the buffer of its all-gather


@dataclass(frozen=True)
class EstimatedRun:
    states: States
    trace: step_trace.Trace
    precision: str
    is_graphed: bool  # whether layers are captured as CUDA graphs if there is room
    copies_of_gradients: int = 0  # that DDP keeps besides the gradients


@dataclass(frozen=True)
class Estimate:
    kind: str
    ranks: int
    has_activations: bool  # whether the model could be traced; otherwise the peak is larger than stated
    weights: int
    reference: int  # of --reference copy
    gradients: int
    optimizer: int
    averages: int  # of --ema_decay
    gathered: int  # weights that FSDP has gathered, and its buffers
    copies: int  # of weights, in 16 bits
    activations: int
    loss: int
    other: int
    graphs: int = 0  # used only if there is room
    evaluations: dict[int, int] = field(default_factory=dict)  # items per batch -> how much more an evaluation needs than a step
    eval_batch_size: int | str = "auto"  # auto: the smallest
    replicas: int = 1  # copies of a sharded model
    rows: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", {name: int(getattr(self, name)) for name in ROWS})

    @property
    def states(self) -> int:
        return sum(self.rows[name] for name in STATES)

    @property
    def total(self) -> int:
        """The peak of a step, without CUDA graphs."""
        return sum(self.rows.values())

    @property
    def evaluation(self) -> int:
        return self.evaluations.get(self.eval_batch_size, min(self.evaluations.values(), default=0))

    @property
    def peak(self) -> int:
        """The peak of a run, without CUDA graphs."""
        return self.total + self.evaluation

    @property
    def title(self) -> str:
        copies = f"{self.replicas} copies of " if self.replicas > 1 else ""
        return self.kind if self.ranks == 1 else f"{copies}{self.kind} x {self.ranks // self.replicas}"

    @property
    def with_graphs(self) -> int:
        return self.total + self.graphs


def needed(peak: float, ranks: int) -> float:
    """Return the bytes that a GPU must have for a peak of allocated memory."""
    return peak * (1 + FRAGMENTATION) + CONTEXT + (COMMUNICATION if ranks > 1 else 0)


def prepare(cfg: Any, model_class: str, precision: str, micro_batch_size: int, lengths: Sequence[Any] = ()) -> EstimatedRun:
    """Return the memory of one rank. Raise UserError if the model cannot be found. It takes about a second and loads no weights."""
    with fake_model.quiet():
        fake = fake_model.build(cfg, model_class, precision)._replace(lengths=lengths)
        states = count_states(fake.model, cfg)
        try:
            traced = step_trace.trace(fake, cfg, precision, micro_batch_size)
        except Exception as error:  # of any kind, from the code of the model
            log.info("activations of %s are not estimated: %s: %s", model_class, type(error).__name__, error)
            traced = step_trace.NOTHING
    is_graphed = traced.is_padding_free and cfg.compile != "off" and not cfg.gradient_checkpointing
    copies = (not cfg.gradient_as_bucket_view) + (cfg.comm_hook == "powersgd")  # its buckets, and the errors of powersgd
    return EstimatedRun(states, traced, precision, is_graphed, copies)


def estimate(
    run: EstimatedRun, ranks: int, num_micro_batches: int, plan: ShardingPlan | None = None, keep: str = "auto"
) -> Estimate:
    """Return the peak of one rank, sharded by `plan` or whole. `auto` of `keep`, as in `--keep_gathered`, is the least."""
    states, plan = run.states, plan if ranks > 1 else None
    shards, on_gpu = (ranks // max(1, plan.replicas), 0 if plan.cpu_offload else 1) if plan else (1, 1)
    share = lambda size: -(-size // shards) * on_gpu
    # DDP's buckets stay, and so do gradients of earlier micro-batches. Otherwise gradients use memory that activations have left.
    keeps_gradients = ranks > 1 or num_micro_batches > 1
    if plan:
        activations, loss, copies = _peak_of_shards(run, num_micro_batches, shards, on_gpu)
    else:
        activations, loss, copies = _peak_of_replica(run, keeps_gradients)
    found = Estimate(
        kind=FSDP if plan else DDP if ranks > 1 else ONE,
        ranks=ranks,
        replicas=ranks // shards if plan else 1,
        has_activations=run.trace is not step_trace.NOTHING,
        weights=share(states.weights) + states.buffers,
        gradients=share(states.gradients) * (1 if plan or ranks == 1 else 1 + run.copies_of_gradients),
        optimizer=share(states.optimizer),
        averages=share(states.averages),
        reference=share(states.reference),
        gathered=_gathered(run, plan.keeps(keep), num_micro_batches) if plan else 0,
        copies=copies,
        activations=int(activations),
        loss=loss,
        other=WORKSPACES + (0 if plan else states.dequantized),
    )
    # With --ema_decay an evaluation needs a copy of the trained weights too.
    kept = found.states - (0 if keeps_gradients else found.gradients)
    weights = states.gradients * (1 / shards * on_gpu) if states.averages else 0
    free = found.total - kept - found.other - weights  # of what a step needs
    more = {size: max(0, int(taken - free)) for size, taken in run.trace.evaluations.items()}
    graphs = 0 if plan else _graphs(run, found, keeps_gradients)
    return dataclasses.replace(found, graphs=graphs, evaluations=more)


def _peak_of_replica(run: EstimatedRun, keeps_gradients: bool) -> tuple[int, int, int]:
    moments = run.trace.moments
    counted = moments[:, :GRADIENTS_OF_LAYERS] if keeps_gradients else moments
    at = moments[int(counted.sum(1).argmax())]
    loss, copies = int(at[LOSS]), int(at[CASTS_OF_LAYERS] + at[CASTS_OF_REST])
    return (at[ACTIVATIONS], loss, copies) if keeps_gradients else _split(at.sum() - run.states.gradients, loss, copies)


def _split(size: int, loss: int, copies: int) -> tuple[int, int, int]:
    loss = min(loss, max(0, size))
    copies = min(copies, max(0, size - loss))
    return max(0, size - loss - copies), loss, copies


def _graphs(run: EstimatedRun, without: Estimate, keeps_gradients: bool) -> int:
    if not run.is_graphed:
        return 0
    states, moments = run.states, run.trace.moments
    of_layers = states.layers.gradients  # the buffer into which every replay writes
    kept = run.trace.output_of_layer * (run.trace.num_layers + 2)
    base = states.weights + states.reference + states.buffers + states.optimizer + states.averages + without.other
    if keeps_gradients:
        base += without.gradients
    in_layers = int(moments[:, [ACTIVATIONS, CASTS_OF_LAYERS]].sum(1).max())
    capture = base + of_layers + in_layers + of_layers // max(1, states.num_layers)
    replay = base + of_layers + kept + int(moments[:, [LOSS, CASTS_OF_REST, GRADIENTS_OF_REST]].sum(1).max())
    return max(0, max(capture, replay) - without.total)


def _gathered(run: EstimatedRun, keep: str, num_micro_batches: int) -> int:
    """The root, layers, a layer's gradients, two float32 buffers. Gradients kept to the last micro-batch are whole float32."""
    states = run.states
    layer = states.layers.parameters // max(1, states.num_layers)
    size = 2 if run.precision == "bf16" else -(-states.layers.weights // max(1, states.layers.parameters))
    number = GATHERED_LAYERS if keep == "none" else states.num_layers + 1
    trained = states.layers.trained // max(1, states.num_layers)
    whole = 4 * (states.layers.trained + states.rest.trained) if keep == "gradients" and num_micro_batches > 1 else 0
    return states.rest.weights + min(number, states.num_layers + 1) * layer * size + trained * (size + 8) + whole


def _peak_of_shards(run: EstimatedRun, num_micro_batches: int, shards: int, on_gpu: int) -> tuple[int, int, int]:
    states, moments = run.states, run.trace.moments
    casts = [CASTS_OF_REST] if run.precision == "bf16" else [CASTS_OF_REST, CASTS_OF_LAYERS]
    gradients = -(-states.gradients // shards) * on_gpu
    # The shards of gradients of earlier micro-batches stay. Those of the first one use memory that activations have left.
    before = gradients if num_micro_batches > 1 else moments[:, GRADIENTS_OF_LAYERS] / shards * on_gpu
    in_step = moments[:, [ACTIVATIONS, LOSS, GRADIENTS_OF_REST, *casts]].sum(1) + before
    place = int(in_step.argmax())
    # At the end of the backward pass the gradients of the root exist, and a buffer of their reduce-scatter.
    peak = max(int(in_step[place]), gradients + 2 * states.rest.gradients)
    return _split(peak - gradients, int(moments[place, LOSS]), int(moments[place, casts].sum()))


# ---- what to change if a run does not fit; each suggestion fits by the estimate itself
NUMBERS = (2, 4, 8, 16, 32, 64)  # of GPUs that are suggested
CONFIG_OF_NODES = "accelerate_configs/2node_fsdp.yaml"
Change = tuple[str, int, ShardingPlan | None, dict[str, Any]]  # words, ranks, how the model is sharded, options
CHECKPOINTED = {"gradient_checkpointing": True}
ADAPTERS = {"lora_r": 16}
NARROW_ADAPTERS = {"lora_r": 16, "dtype": "bfloat16"}


@dataclass(frozen=True)
class Suggestion:
    words: str
    found: Estimate

    def __str__(self) -> str:
        more = "" if self.found.has_activations else "more than "
        return f"{self.words} ({more}{self.found.peak / GIB:.1f} GiB)"


class Estimator:
    """Estimates a run, and the same run with other options or GPUs. A micro-batch is traced once for each set of options."""

    def __init__(self, cfg: Any, model_class: str, precision: str, num_nodes: int = 1, lengths: Sequence[np.ndarray | None] = ()):
        """`precision` is no, bf16 or fp16. `lengths`: the tokens of each row for training and for evaluation, if they are known."""
        self.lengths = lengths
        self.cfg, self.model_class, self.precision, self.num_nodes = cfg, model_class, precision, num_nodes
        self._runs: dict[tuple[Any, ...], EstimatedRun] = {}
        self.choices: dict[str, tuple[Any, str]] = {}  # what `auto` means, and why; see `settled`

    def settled(self, ranks: int, plan: ShardingPlan | None, available: float) -> "Estimator":
        """Return an estimator of the run that `auto` makes of this one on GPUs with so many bytes."""
        found, choices = self.estimate(ranks, plan), {}
        of = f"of {available / GIB:.1f} GiB estimated"
        if self.cfg.gradient_checkpointing == "auto":
            is_on, why = False, f"{found.total / GIB:.1f} {of} without it"
            if needed(found.total * MARGIN, ranks) > available:
                with contextlib.suppress(UserError):  # the model does not support it
                    with_it = self.estimate(ranks, plan, **CHECKPOINTED)
                    is_on, why = with_it.total < found.total, f"{why}, {with_it.total / GIB:.1f} with it"
                    found = min(with_it, found, key=lambda one: one.total)
            choices["gradient_checkpointing"] = is_on, why
        if plan and self.cfg.keep_gathered == "auto":
            choices["keep_gathered"], found = self._kept(found, ranks, plan, available, choices)
        if getattr(self.cfg, "eval_batch_size", 0) == "auto":
            fitting = [
                size for size, more in found.evaluations.items() if needed((found.total + more) * MARGIN, ranks) <= available
            ]
            size = max(fitting, default=1)
            peak = found.total + found.evaluations.get(size, 0)
            choices["eval_batch_size"] = size, f"an evaluation needs no more than {peak / GIB:.1f} {of}"
        other = copy.copy(self)
        other.cfg = dataclasses.replace(self.cfg, **{name: value for name, (value, _) in choices.items()})
        other.choices = choices
        return other

    def _kept(
        self, least: Estimate, ranks: int, plan: ShardingPlan, available: float, choices: dict[str, tuple[Any, str]]
    ) -> tuple[tuple[str, str], Estimate]:
        """Return what a run keeps gathered, and why, and its estimate. Keeping more sends less: each weight once in a step."""
        changes = {name: value for name, (value, _) in choices.items()}
        # An automatic micro-batch size uses the memory better than gradients that wait.
        is_known = self.cfg.micro_batch_size != "auto" or self.cfg.micro_batch_tokens
        has_several = is_known and self.cfg.split(ranks)[1] > 1
        for keep in ("gradients", "weights") if has_several else ("weights",):
            found = self.estimate(ranks, plan, keep_gathered=keep, **changes)
            why = f"{found.total / GIB:.1f} of {available / GIB:.1f} GiB estimated with"
            if needed(found.total * MARGIN, ranks) <= available or plan.keeps("auto") == keep:
                return (keep, f"{why} it"), found
        return ("none", f"{why} weights, and {least.total / GIB:.1f} without"), least

    def estimate(self, ranks: int, plan: ShardingPlan | None = None, **changes: Any) -> Estimate:
        """UserError if the batch cannot be split. `auto` is the least: batches of 1 item, no gradient checkpointing."""
        cfg = copy.copy(self.cfg)
        for name, value in changes.items():
            setattr(cfg, name, value)
        cfg.micro_batch_tokens = 0 if "micro_batch_size" in changes else cfg.micro_batch_tokens
        if cfg.micro_batch_size == "auto":
            cfg.micro_batch_size = 1
        in_plan = plan is not None and plan.activation_checkpointing
        cfg.gradient_checkpointing = in_plan or cfg.gradient_checkpointing is True
        micro, count = cfg.split(ranks)
        traced = ("micro_batch_size", "keep_gathered", *CHECKPOINTED)  # in the key, or not in the trace
        options = sorted((name, value) for name, value in changes.items() if name not in traced)
        key = (micro, cfg.gradient_checkpointing, *options)
        if key not in self._runs:
            self._runs[key] = prepare(cfg, self.model_class, self.precision, micro, self.lengths)
        run = self._runs[key]
        if cfg.sync_every:  # workers have their own optimizer state and, if a rank has several, weights; global weights, momentum
            workers, states = max(1, cfg.local_workers // ranks), run.states
            copies = 2 + workers * (2 if workers > 1 else 1)  # a synchronization copies the weights of each worker
            more = 4 * copies * (states.layers.trained + states.rest.trained)
            run = dataclasses.replace(run, states=dataclasses.replace(states, optimizer=workers * states.optimizer + more))
        found = estimate(run, ranks, count, plan, cfg.keep_gathered)
        return dataclasses.replace(found, eval_batch_size=getattr(cfg, "eval_batch_size", 1))

    def can_be_sharded(self) -> bool:
        """Return whether FSDP accepts the model and the options. Call it after `estimate`."""
        with contextlib.suppress(UserError):
            self.require_sharded()
            return True
        return False

    def require_sharded(self) -> None:
        """Raise UserError if FSDP does not accept the model or the options. Call it after `estimate`."""
        cfg, states = self.cfg, next(iter(self._runs.values())).states
        cfg.validate_sharded()
        cfg.check_installed(is_sharded=True)
        what = f"mixed precision {self.precision}" if self.precision == "fp16" else ""
        if what or states.has_batch_norm or not states.num_layers:
            raise UserError(
                f"{what or f'--model {cfg.model}'}: cannot be combined with FSDP, which the accelerate config asks for, so a run would "
                "be refused. Use accelerate_configs/1node.yaml, or leave --config_file out."
            )

    def suggest(self, ranks: int, plan: ShardingPlan | None, available: float) -> list[Suggestion]:
        kept = next(self._fitting(self._same_result(ranks, plan, available), available), None)
        changed = next(self._fitting(self._other_result(ranks, plan), available), None)
        return [one for one in (kept, changed) if one]

    def _fitting(self, changes: Iterator[Change], available: float) -> Iterator[Suggestion]:
        for words, ranks, plan, options in changes:
            # A batch may not be divisible, and a model may not support gradient checkpointing or not be traceable.
            try:
                found = self.estimate(ranks, plan, **options)
                if not fits(found, available) and needed(found.total, ranks) <= available:  # only the evaluation is too large
                    found = self.estimate(ranks, plan, **options, eval_batch_size=1)
                    words = _joined(words, "--eval_batch_size 1")
            except Exception:
                continue
            if fits(found, available):
                yield Suggestion(words, found)

    def _same_result(self, ranks: int, plan: ShardingPlan | None, available: float) -> Iterator[Change]:
        """Yield changes that affect time and memory only, from the cheapest one on."""
        layouts: list[tuple[str, int, ShardingPlan | None]] = [("", ranks, plan)]
        if plan and plan.replicas > 1:
            words = "one copy of the model on all nodes (--fsdp_sharding_strategy FULL_SHARD)"
            layouts.append((words, ranks, dataclasses.replace(plan, replicas=1)))
        if plan and not plan.reshard_after_forward:
            freed = dataclasses.replace(plan, reshard_after_forward=True)
            layouts.append(("--fsdp_reshard_after_forward true", ranks, freed))
        if plan and self.cfg.keep_gathered in ("weights", "gradients"):
            yield "--keep_gathered none", ranks, plan, {"keep_gathered": "none"}
        if self.can_be_sharded():
            sharded = dataclasses.replace(plan or ShardingPlan(), replicas=1, reshard_after_forward=True)
            how = "" if plan else f" (--config_file {CONFIG})"
            if self.num_nodes > 1 and not plan:
                how = f" (--config_file {CONFIG_OF_NODES} --fsdp_sharding_strategy FULL_SHARD)"
            if ranks > 1 and not plan:
                layouts.append((f"FSDP over the same {ranks} GPUs{how}", ranks, sharded))
            layouts += [(f"FSDP over {number} GPUs{how}", number, sharded) for number in NUMBERS if number > ranks]
            if not sharded.cpu_offload:
                words = "" if plan else f"FSDP over {max(2, ranks)} GPUs with "
                words += f"--fsdp_offload_params true{how}"
                layouts.append((words, max(2, ranks), dataclasses.replace(plan or sharded, cpu_offload=True)))
        for words, number, other in layouts:
            with contextlib.suppress(UserError):  # the batch cannot be split over so many GPUs
                if needed(self.estimate(number, other).states, number) <= available:
                    yield from self._smaller_steps(words, number, other)

    def _smaller_steps(self, words: str, ranks: int, plan: ShardingPlan | None) -> Iterator[Change]:
        """Yield a layout alone, and with gradient checkpointing and micro-batches of a half, a quarter, and 1."""
        join = lambda more: _joined(words, more)
        yield words, ranks, plan, {}
        micro = 1 if self.cfg.micro_batch_size == "auto" and not self.cfg.micro_batch_tokens else self.cfg.split(ranks)[0]
        smaller = {size for size in (micro // 2, micro // 4, 1) if 0 < size < micro and micro % size == 0}
        sizes = sorted(smaller, reverse=True)
        for size in sizes:
            yield join(f"--micro_batch_size {size}"), ranks, plan, {"micro_batch_size": size}
        if self.cfg.gradient_checkpointing is True or (plan and plan.activation_checkpointing):
            return
        yield join("--gradient_checkpointing"), ranks, plan, CHECKPOINTED
        if sizes:
            smallest = {**CHECKPOINTED, "micro_batch_size": sizes[-1]}
            yield join(f"--gradient_checkpointing --micro_batch_size {sizes[-1]}"), ranks, plan, smallest

    def _other_result(self, ranks: int, plan: ShardingPlan | None) -> Iterator[Change]:
        cfg, smallest = self.cfg, {**CHECKPOINTED, "micro_batch_size": 1}
        has_adapters = bool(getattr(cfg, "lora_r", 0))
        if cfg.optimizer == "adamw" and plan is None and find_spec("torchao") and not has_adapters:
            yield "--optimizer adamw8bit", ranks, plan, {"optimizer": "adamw8bit"}
        changes: list[dict[str, Any]] = []
        if models.LORA_TASKS.get(self.model_class):
            if not has_adapters:
                changes += [ADAPTERS, NARROW_ADAPTERS, NARROW_ADAPTERS | smallest]
            if plan is None and cfg.quantize == "no":
                changes += [{**({} if has_adapters else ADAPTERS), "quantize": "4bit", **smallest}]
        length = getattr(cfg, "max_length", 0)
        parts = [part for part in (2, 4, 8) if isinstance(length, int) and length >= 128 * part]
        changes += [{"max_length": length // part, **smallest} for part in parts]
        for options in changes:
            words = " ".join(f"--{name}" + (f" {value}" if value is not True else "") for name, value in options.items())
            yield words, ranks, plan, options


def _joined(words: str, more: str) -> str:
    """Return `--option 1 --other 2`, or `FSDP over 2 GPUs with --option 1`."""
    return f"{words}{' with' * ('--' not in words.rpartition(') ')[2])} {more}" if words else more


def fits(found: Estimate, available: float) -> bool:
    return needed(found.peak, found.ranks) <= available


# ---- what `accel-ddp estimate` prints

USABLE = 0.99  # of the number in the name of a GPU, in GiB


def layouts_of(
    estimator: Estimator, given: ShardingPlan | None, num_nodes: int, numbers: list[int]
) -> list[tuple[Estimate, ShardingPlan | None]]:
    found: list[tuple[Estimate, ShardingPlan | None]] = []
    for number in numbers:
        found.append((estimator.estimate(number), None))
        if given:
            estimator.require_sharded()
        if given and given.replicas == ONE_PER_NODE and number > num_nodes and number % num_nodes:
            raise UserError(
                f"--gpus {number}: the accelerate config has num_machines: {num_nodes} and one copy of the model on each node, "
                f"so each node needs the same number of GPUs. Use a multiple of {num_nodes}."
            )
        if number > 1 and (given or estimator.can_be_sharded()):
            # A plan has copies on nodes. Fewer GPUs than nodes are on one node.
            nodes = num_nodes if number % num_nodes == 0 else 1
            plan = (given or ShardingPlan()).on_nodes([number // nodes] * nodes)
            found.append((estimator.estimate(number, plan), plan))
    return found


def format_table(estimator: Estimator, layouts: list[tuple[Estimate, ShardingPlan | None]], sizes: list[float]) -> str:
    found = [one for one, _ in layouts]
    rows = [["GiB per GPU", *(one.title for one in found)]]
    for name, title in NAMES.items():
        if any(one.rows.get(name) for one in found):
            rows.append([title, *(f"{one.rows[name] / GIB:.2f}" for one in found)])
    rows.append(["total", *(f"{one.total / GIB:.2f}" for one in found)])
    for title, name in (("CUDA graphs, if there is room", "graphs"), ("more in an evaluation", "evaluation")):
        if any(getattr(one, name) for one in found):
            rows.append([title, *(f"{getattr(one, name) / GIB:.2f}" for one in found)])
    advice = []
    for size in sorted(sizes):
        usable = size * USABLE * GIB
        cells = []
        for one, plan in layouts:
            settled = estimator.settled(one.ranks, plan, usable)
            peak = settled.estimate(one.ranks, plan)
            is_on = settled.choices.get("gradient_checkpointing", (False, ""))[0]
            cells.append(f"{'*' * is_on}{peak.peak / GIB:.2f}" if fits(peak, usable) else "-")
        rows.append([f"peak on {size:g} GB", *cells])
        if {*cells} == {"-"}:
            changes = settled.suggest(one.ranks, plan, usable)
            use = f"For {one.title}, use" if len(layouts) > 1 else "Use"
            change = f"{use} {', or '.join(map(str, changes))}." if changes else "Use larger GPUs, or a smaller model."
            advice.append(f"{size:g} GB: does not fit. {change}")
    text = "\n".join(table(rows, left=1))
    lines = [
        text,
        "A peak is what torch allocates. CUDA, NCCL and fragmentation are added to decide whether it fits (-: it does not).",
    ]
    if "*" in text:
        lines.append("* with --gradient_checkpointing, which `auto` turns on there.")
    if getattr(estimator.cfg, "max_length", 0) == "auto":
        lines.append(f"Texts of {ASSUMED_LENGTH:,} tokens are assumed, because --max_length auto depends on the data.")
    if not found[0].has_activations:
        lines.append("Activations are not included, because the forward pass of this model could not be traced.")
    return "\n".join([*lines, *advice])
