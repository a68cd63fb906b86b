"""Computes the peak of GPU memory per rank from the states of a model and the trace of a micro-batch.

The peak is that of `torch.cuda.max_memory_allocated`. The CUDA context, NCCL, and what the allocator holds but does not use come on
top of it; see `needed`.
"""

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any

from accel_ddp.environment.sharding import ShardingPlan
from accel_ddp.memory import fake_model
from accel_ddp.memory.states import States, count_states
from accel_ddp.memory.step import NOTHING, Trace, trace
from accel_ddp.memory.tracker import ACTIVATIONS, CASTS_OF_LAYERS, CASTS_OF_REST, GRADIENTS_OF_LAYERS, GRADIENTS_OF_REST, LOSS

GIB = 1 << 30
WORKSPACES = 64 << 20  # bytes of the matrix products of cuBLAS and of the loss
CONTEXT = 0.6 * GIB  # of CUDA, which no tensor uses
COMMUNICATION = 0.6 * GIB  # of NCCL
FRAGMENTATION = 0.05  # of the peak: memory that the allocator has requested and cannot use

log = logging.getLogger(__name__)

ROWS = ("weights", "gradients", "optimizer", "averages", "gathered", "copies", "activations", "loss", "other")
ONE, DDP, FSDP = "one GPU", "DDP", "FSDP"
GATHERED_LAYERS = 3  # the layer that is computed, the next one, and the buffer of its all-gather


@dataclass(frozen=True)
class Run:
    """The memory of one rank with its share of a step, however many ranks there are."""

    states: States
    trace: Trace
    precision: str
    micro_batch_size: int
    is_graphed: bool  # whether layers are captured as CUDA graphs if there is room
    copies_of_gradients: int = 0  # that DDP keeps besides the gradients


@dataclass(frozen=True)
class Estimate:
    """The peak of one rank, in bytes, by what the memory is used for."""

    kind: str
    ranks: int
    has_activations: bool  # whether the model could be traced; otherwise the peak is larger than stated
    weights: int
    gradients: int
    optimizer: int
    averages: int  # of --ema_decay
    gathered: int  # weights that FSDP has gathered, and its buffers
    copies: int  # of weights, in 16 bits
    activations: int
    loss: int
    other: int
    graphs: int = 0  # used only if there is room
    evaluation: int = 0  # how much more an evaluation needs than a step
    replicas: int = 1  # copies of a sharded model
    rows: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", {name: int(getattr(self, name)) for name in ROWS})

    @property
    def states(self) -> int:
        """Bytes that no smaller micro-batch saves."""
        return self.weights + self.gradients + self.optimizer + self.averages + self.gathered

    @property
    def total(self) -> int:
        """The peak of a step, without CUDA graphs."""
        return sum(self.rows.values())

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


def prepare(cfg: Any, model_class: str, precision: str, micro_batch_size: int) -> Run:
    """Return the memory of one rank. Raise UserError if the model cannot be found. It takes about a second and loads no weights.

    A model that cannot be traced, for example because its forward pass depends on values, has no activations in the estimate.
    """
    with fake_model.quiet():
        fake = fake_model.build(cfg, model_class, precision)
        states = count_states(fake.model, cfg)
        try:
            traced = trace(fake, cfg, precision, micro_batch_size)
        except Exception as error:  # of any kind, from the code of the model
            log.info("activations of %s are not estimated: %s: %s", model_class, type(error).__name__, error)
            traced = NOTHING
    is_graphed = traced.is_padding_free and cfg.compile != "off" and not cfg.gradient_checkpointing
    copies = (not cfg.gradient_as_bucket_view) + (cfg.comm_hook == "powersgd")  # its buckets, and the errors of powersgd
    return Run(states, traced, precision, micro_batch_size, is_graphed, copies)


def estimate(run: Run, ranks: int, num_micro_batches: int, plan: ShardingPlan | None = None) -> Estimate:
    """Return the peak of one rank of `ranks`. With a `plan` the model is sharded, and otherwise each rank has all of it."""
    if plan is not None and ranks > 1:
        return _sharded(run, ranks, num_micro_batches, plan)
    return _replicated(run, ranks, num_micro_batches)


def _replicated(run: Run, ranks: int, num_micro_batches: int) -> Estimate:
    states, moments = run.states, run.trace.moments
    in_step = moments[:, :GRADIENTS_OF_LAYERS].sum(1)
    # DDP's buckets stay, and so do gradients of earlier micro-batches. Otherwise gradients use memory that activations have left.
    keeps_gradients = ranks > 1 or num_micro_batches > 1
    peak = int(in_step.argmax()) if keeps_gradients else int(moments.sum(1).argmax())
    at = moments[peak]
    activations = at[ACTIVATIONS]
    if not keeps_gradients:
        activations += at[CASTS_OF_LAYERS] + at[CASTS_OF_REST] + at[LOSS] + at[GRADIENTS_OF_REST] + at[GRADIENTS_OF_LAYERS]
        activations -= states.gradients
        loss = min(int(at[LOSS]), max(0, activations))
        copies = min(int(at[CASTS_OF_LAYERS] + at[CASTS_OF_REST]), max(0, activations - loss))
        activations = max(0, activations - loss - copies)
    else:
        loss, copies = int(at[LOSS]), int(at[CASTS_OF_LAYERS] + at[CASTS_OF_REST])
    found = Estimate(
        kind=DDP if ranks > 1 else ONE,
        ranks=ranks,
        has_activations=run.trace is not NOTHING,
        weights=states.weights + states.buffers,
        gradients=states.gradients * (1 + run.copies_of_gradients * (ranks > 1)),
        optimizer=states.optimizer,
        averages=states.averages,
        gathered=0,
        copies=copies,
        activations=int(activations),
        loss=loss,
        other=WORKSPACES + states.dequantised,
    )
    found = dataclasses.replace(found, graphs=_graphs(run, found, keeps_gradients))
    return _with_evaluation(run, found, keeps_gradients, 1)


def _graphs(run: Run, without: Estimate, keeps_gradients: bool) -> int:
    """Return how much the peak grows if the layers are captured as CUDA graphs, for micro-batches of one shape."""
    if not run.is_graphed:
        return 0
    states, moments = run.states, run.trace.moments
    of_layers = states.layers.gradients  # the buffer into which every replay writes
    kept = run.trace.output_of_layer * (run.trace.num_layers + 2)
    base = states.weights + states.buffers + states.optimizer + states.averages + without.other
    if keeps_gradients:
        base += without.gradients
    capture = (
        base + of_layers + int(moments[:, [ACTIVATIONS, CASTS_OF_LAYERS]].sum(1).max()) + of_layers // max(1, states.num_layers)
    )
    replay = base + of_layers + kept + int(moments[:, [LOSS, CASTS_OF_REST, GRADIENTS_OF_REST]].sum(1).max())
    return max(0, max(capture, replay) - without.total)


def _sharded(run: Run, ranks: int, num_micro_batches: int, plan: ShardingPlan) -> Estimate:
    states, moments = run.states, run.trace.moments
    shards, on_gpu = ranks // max(1, plan.replicas), 0 if plan.cpu_offload else 1
    share = lambda size: -(-size // shards) * on_gpu
    layer = states.layers.parameters // max(1, states.num_layers)
    is_narrow = run.precision == "bf16"
    size = 2 if is_narrow else -(-states.layers.weights // max(1, states.layers.parameters))
    number = GATHERED_LAYERS if plan.reshard_after_forward else states.num_layers + 1
    gathered = states.rest.weights + min(number, states.num_layers + 1) * layer * size
    # In the backward pass: the gradients of a layer, and two buffers in float32 of its reduce-scatter.
    trained = states.layers.trained // max(1, states.num_layers)
    gathered += trained * (size + 8)
    kinds = [ACTIVATIONS, LOSS, CASTS_OF_REST, GRADIENTS_OF_REST] + ([] if is_narrow else [CASTS_OF_LAYERS])
    gradients = share(states.gradients)
    # The shards of gradients of earlier micro-batches stay. Those of the first one use memory that activations have left.
    before = gradients if num_micro_batches > 1 else moments[:, GRADIENTS_OF_LAYERS] / shards * on_gpu
    in_step = moments[:, kinds].sum(1) + before
    place = int(in_step.argmax())
    at = moments[place]
    copies = int(at[CASTS_OF_REST] + (0 if is_narrow else at[CASTS_OF_LAYERS]))
    # At the end of the backward pass the gradients of the root exist, and a buffer of their reduce-scatter.
    peak = max(int(in_step[place]), gradients + 2 * states.rest.gradients)
    loss = min(int(at[LOSS]), max(0, peak - gradients))
    copies = min(copies, max(0, peak - gradients - loss))
    activations = max(0, peak - gradients - loss - copies)
    found = Estimate(
        kind=FSDP,
        ranks=ranks,
        replicas=ranks // shards,
        has_activations=run.trace is not NOTHING,
        weights=share(states.weights) + states.buffers,
        gradients=gradients,
        optimizer=share(states.optimizer),
        averages=share(states.averages),
        gathered=gathered,
        copies=copies,
        activations=activations,
        loss=loss,
        other=WORKSPACES,
    )
    return _with_evaluation(run, found, True, 1 / shards * on_gpu)


def _with_evaluation(run: Run, found: Estimate, keeps_gradients: bool, share: float) -> Estimate:
    """Add how much more an evaluation needs. With --ema_decay it needs a copy of the trained weights too."""
    kept = found.states - (0 if keeps_gradients else found.gradients)
    copy = run.states.gradients * share if run.states.averages else 0
    more = kept + found.other + run.trace.evaluation + copy - found.total
    return dataclasses.replace(found, evaluation=max(0, int(more)))
