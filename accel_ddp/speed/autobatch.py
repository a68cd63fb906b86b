"""The choice of `--micro_batch_size auto`: the largest size that fits in memory, the same on all ranks unless they are balanced."""

from collections.abc import Callable

import torch
from accelerate import Accelerator

from accel_ddp.config import choices
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.rehearsal import rehearse
from accel_ddp.engine.terms import Terms
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import gather_everywhere, together
from accel_ddp.ranks.shards import is_sharded, local
from accel_ddp.text import counted
from accel_ddp.training.optim import state_bytes
from accel_ddp.training.stream import TrainBatches

USABLE = 0.9  # fraction of a GPU's memory; the rest is for fragmentation and for the library itself
USABLE_BY_ONE = 0.97  # if a micro-batch has one item
LARGEST_ON_CPU = 8  # items; larger micro-batches are not faster there, and the free memory is not known


def choose(
    accelerator: Accelerator,
    cfg: TrainConfig,
    terms: Terms,
    optimizer: torch.optim.Optimizer,
    train: TrainBatches,
    room: float,
    workers: int,
) -> None:
    """Replace `cfg.micro_batch_size` by a number if it is "auto".

    Each rank tries its longest items, and the smallest answer counts, unless there is `--balance`, with which each rank has its
    own size. `room` is the memory of a micro-batch in multiples of what its forward and backward pass take. It includes CUDA
    graphs, because they save more time than a larger micro-batch. `workers` are those of this rank.
    """
    if cfg.micro_batch_size != "auto" or cfg.micro_batch_tokens:
        return
    per_rank = cfg.split(accelerator.num_processes)[0]
    sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
    largest = max(size for size in sizes if size <= LARGEST_ON_CPU)
    how = f"at most {LARGEST_ON_CPU} on CPUs"
    if accelerator.device.type == "cuda":
        module = terms.model
        device = accelerator.device

        def load(size: int) -> float:
            """Return the memory that a micro-batch needs, as a fraction of what may be used. It may raise OutOfMemoryError."""
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
            # The optimizer allocates its state in its first step. A rank holds as much of it as of the parameters.
            trained = [p for p in module.parameters() if p.requires_grad]
            share = sum(local(p).numel() for p in trained if p.is_cuda) / max(1, sum(p.numel() for p in trained))
            # The weights of workers are counted in `held`.
            later = 0 if any(optimizer.state.values()) else share * state_bytes(module, cfg) * workers
            try:
                rehearse(terms, train.sample(size, accelerator, cfg, longest=True))
            finally:
                torch.cuda.empty_cache()
            taken = torch.cuda.max_memory_allocated(device) - held
            # Of a single item nothing can be saved, except for CUDA graphs, which are captured only if there is room.
            usable, factor = (USABLE, room) if size > 1 else (USABLE_BY_ONE, 1.0)
            whole = cfg.gpu_memory_gb * 2**30 or torch.cuda.get_device_properties(device).total_memory
            return (held + later + factor * taken) / (usable * whole)

        was_training = module.training
        module.train(cfg.dropout)
        if is_sharded(module):
            largest = largest_together(sizes, lambda size: max(gather_everywhere(load(size))))
        else:
            with together("find the largest micro-batch that fits"):
                largest = _largest(sizes, load)
        module.train(was_training)
        torch.cuda.reset_peak_memory_stats(device)  # sizes that do not fit are no part of the run
        how = "by trying the longest items"
    of_ranks = gather_everywhere(largest)
    smallest = min(of_ranks)
    if smallest == 0:
        raise UserError(
            "--micro_batch_size auto: not even one of the longest items fits into the GPU memory of every rank. Use "
            "--gradient_checkpointing, --mixed_precision bf16, --lora_r 16, or a smaller --max_length."
        )
    chosen = smallest if cfg.balance == "off" else largest  # balanced ranks need not have equal micro-batches
    count = per_rank // chosen
    if cfg.static_graph and count > 1 and accelerator.num_processes > 1:
        raise UserError(
            f"--static_graph cannot be combined with several micro-batches per update, and only {smallest} items fit into one. "
            "Leave --static_graph out."
        )
    reason = f"{counted(count, 'micro-batch')} per rank and step, {how}; it must divide the {per_rank} items of a rank"
    reason += f"; the ranks have {smallest} to {max(of_ranks)}" if cfg.balance != "off" and smallest < max(of_ranks) else ""
    choices.choose(cfg, "micro_batch_size", chosen, reason)


def doubling(sizes: list[int]) -> list[int]:
    """Return the first size, the next ones that are at least twice the one before, and the last."""
    found = sizes[:1]
    for size in sizes[1:]:
        if size >= 2 * found[-1] or size == sizes[-1]:
            found.append(size)
    return found


def _largest(sizes: list[int], load: Callable[[int], float]) -> int:
    """Return the largest size that fits, or 0. Sizes are doubled, so a size that is too large is rarely far too large."""

    def fits(size: int) -> bool:
        try:
            return load(size) <= 1
        except torch.OutOfMemoryError:
            return False

    best = 0
    for size in doubling(sizes):
        if fits(size):
            best = size
            continue
        between = [other for other in sizes if best < other < size]
        while between:  # bisection
            middle = between[len(between) // 2]
            is_small = fits(middle)
            best = middle if is_small else best
            between = [other for other in between if (other > middle) == is_small and other != middle]
        break
    return best


def largest_together(sizes: list[int], load: Callable[[int], float]) -> int:
    """Return the largest size that fits on every rank of a sharded model, or 0. `load` is the same on all ranks.

    A rank that runs out of memory leaves the others waiting in a gather. A size is therefore tried only if the sizes before it
    predict that it fits: memory grows linearly with the size.
    """
    known: dict[int, float] = {}

    def predict(size: int) -> float:
        (first, low), (last, high) = [(0, 0.0), (0, 0.0), *known.items()][-2:]
        return high + (high - low) * (size - last) / (last - first) if last else 0.0

    best, tried = 0, doubling(sizes)
    for size in tried:
        if predict(size) > 1:
            size = max((other for other in sizes if best < other < size and predict(other) <= 1), default=0)
        known[size] = load(size) if size else 2.0
        if known[size] > 1:
            break
        best = size
        if size not in tried:
            break
    return best
