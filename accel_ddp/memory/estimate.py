"""Computes the peak of GPU memory per rank from the states of a model and the trace of a micro-batch.

The peak is that of `torch.cuda.max_memory_allocated`. The CUDA context, NCCL, and what the allocator holds but does not use come on
top of it; see `needed`.
"""

from dataclasses import dataclass, field
from typing import Any

from accel_ddp.memory import fake_model
from accel_ddp.memory.states import States, count_states
from accel_ddp.memory.step import Trace, trace
from accel_ddp.memory.tracker import ACTIVATIONS, CASTS_OF_LAYERS, CASTS_OF_REST, GRADIENTS_OF_LAYERS, GRADIENTS_OF_REST, LOSS

GIB = 1 << 30
WORKSPACES = 64 << 20  # bytes of the matrix products of cuBLAS and of the loss
CONTEXT = 0.6 * GIB  # of CUDA, which no tensor uses
COMMUNICATION = 0.6 * GIB  # of NCCL
FRAGMENTATION = 0.05  # of the peak: memory that the allocator has requested and cannot use

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


@dataclass(frozen=True)
class Estimate:
    """The peak of one rank, in bytes, by what the memory is used for."""

    kind: str
    ranks: int
    weights: int
    gradients: int
    optimizer: int
    gathered: int  # weights that FSDP has gathered, and its buffers
    copies: int  # of weights, in 16 bits
    activations: int
    loss: int
    other: int
    graphs: int  # used only if there is room
    evaluation: int  # how much more an evaluation needs than a step
    rows: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = ("weights", "gradients", "optimizer", "gathered", "copies", "activations", "loss", "other")
        object.__setattr__(self, "rows", {name: int(getattr(self, name)) for name in names})

    @property
    def states(self) -> int:
        """Bytes that no smaller micro-batch saves."""
        return self.weights + self.gradients + self.optimizer + self.gathered

    @property
    def total(self) -> int:
        """The peak of a step, without CUDA graphs."""
        return sum(self.rows.values())

    @property
    def with_graphs(self) -> int:
        return self.total + self.graphs


def needed(peak: float, ranks: int) -> float:
    """Return the bytes that a GPU must have for a peak of allocated memory."""
    return peak * (1 + FRAGMENTATION) + CONTEXT + (COMMUNICATION if ranks > 1 else 0)


def prepare(cfg: Any, model_class: str, precision: str, micro_batch_size: int, evaluates: bool = True) -> Run:
    """Return the memory of one rank. Raise UserError if the model cannot be found. It takes about a second and loads no weights."""
    fake = fake_model.build(cfg, model_class)
    states = count_states(fake.model, cfg)
    traced = trace(fake, cfg, precision, micro_batch_size, evaluates)
    is_graphed = traced.is_padding_free and cfg.compile != "off" and not cfg.gradient_checkpointing
    return Run(states, traced, precision, micro_batch_size, is_graphed)


def estimate(run: Run, kind: str, ranks: int, num_micro_batches: int, **options: Any) -> Estimate:
    """Return the peak of one rank of `ranks`. `options` are those of FSDP: shards, reshard_after_forward, cpu_offload."""
    if kind == FSDP:
        return _sharded(run, ranks, **options)
    return _replicated(run, kind, ranks, num_micro_batches)


def _replicated(run: Run, kind: str, ranks: int, num_micro_batches: int) -> Estimate:
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
    without = Estimate(
        kind, ranks, states.weights + states.buffers, states.gradients, states.optimizer, 0, copies, int(activations), loss,
        WORKSPACES, 0, 0,
    )  # fmt: skip
    return _with_evaluation(run, without, _graphs(run, without, keeps_gradients, num_micro_batches))


def _graphs(run: Run, without: Estimate, keeps_gradients: bool, num_micro_batches: int) -> int:
    """Return how much the peak grows if the layers are captured as CUDA graphs, for micro-batches of one shape."""
    if not run.is_graphed:
        return 0
    states, moments = run.states, run.trace.moments
    of_layers = states.layers.gradients  # the buffer into which every replay writes
    kept = run.trace.output_of_layer * (run.trace.num_layers + 2)
    base = states.weights + states.buffers + states.optimizer + WORKSPACES
    if keeps_gradients:
        base += states.gradients
    capture = (
        base + of_layers + int(moments[:, [ACTIVATIONS, CASTS_OF_LAYERS]].sum(1).max()) + of_layers // max(1, states.num_layers)
    )
    replay = base + of_layers + kept + int(moments[:, [LOSS, CASTS_OF_REST, GRADIENTS_OF_REST]].sum(1).max())
    return max(0, max(capture, replay) - without.total)


def _sharded(run: Run, ranks: int, shards: int = 0, reshard_after_forward: bool = True, cpu_offload: bool = False) -> Estimate:
    states, moments, shards = run.states, run.trace.moments, shards or ranks
    on_gpu = 0 if cpu_offload else 1
    share = lambda size: -(-size // shards) * on_gpu
    layer = states.layers.parameters // max(1, states.num_layers)
    is_narrow = run.precision == "bf16"
    size = 2 if is_narrow else -(-states.layers.weights // max(1, states.layers.parameters))
    number = GATHERED_LAYERS if reshard_after_forward else states.num_layers + 1
    gathered = states.rest.weights + min(number, states.num_layers + 1) * layer * size
    # In the backward pass: the gradients of a layer, and two buffers in float32 of its reduce-scatter.
    trained = states.layers.trained // max(1, states.num_layers)
    gathered += trained * (size + 8)
    kinds = [ACTIVATIONS, LOSS, CASTS_OF_REST, GRADIENTS_OF_REST] + ([] if is_narrow else [CASTS_OF_LAYERS])
    in_step = moments[:, kinds].sum(1)
    at = moments[int(in_step.argmax())]
    # At the end of the backward pass the gradients of the root exist, and a buffer of their reduce-scatter.
    end = 2 * states.rest.gradients
    activations = max(int(at[ACTIVATIONS] + at[GRADIENTS_OF_REST]), end - int(at[LOSS] + at[CASTS_OF_REST]))
    copies = int(at[CASTS_OF_REST] + (0 if is_narrow else at[CASTS_OF_LAYERS]))
    found = Estimate(
        FSDP, ranks, share(states.weights) + states.buffers, share(states.gradients), share(states.optimizer), gathered, copies,
        activations, int(at[LOSS]), WORKSPACES, 0, 0,
    )  # fmt: skip
    return _with_evaluation(run, found, 0)


def _with_evaluation(run: Run, found: Estimate, graphs: int) -> Estimate:
    kept = found.states if found.kind != ONE else found.weights + found.optimizer
    more = max(0, kept + WORKSPACES + run.trace.evaluation - found.total)
    values = {name: getattr(found, name) for name in found.__dataclass_fields__ if name != "rows"}
    return Estimate(**values | {"graphs": graphs, "evaluation": more})
