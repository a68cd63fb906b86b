"""Chooses `--micro_batch_size auto`: the largest size that fits in memory, the same on all ranks."""

from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp.config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import gather_everywhere, print_on_main, together
from accel_ddp.ranks.process import process
from accel_ddp.training.optim import state_bytes
from accel_ddp.training.stream import TrainBatches
from accel_ddp.training.update import rehearse
from accel_ddp.training.whole_batch import LossSum, WholeBatch

USABLE = 0.9  # fraction of a GPU's memory; the rest is for fragmentation and for the library itself
LARGEST_ON_CPU = 16  # items; larger micro-batches are not faster there, and the free memory is not known


def choose(
    accelerator: Accelerator,
    cfg: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: TrainBatches,
    loss_sum: LossSum | WholeBatch,
    room: float,
) -> None:
    """Replace `cfg.micro_batch_size` by a number if it is "auto".

    Each rank tries its longest items, and the smallest answer counts. `room` is the memory of a micro-batch in multiples of
    what its forward and backward pass take.
    """
    if cfg.micro_batch_size != "auto":
        return
    per_rank = cfg.split(process.num_ranks)[0]
    sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
    largest = max(size for size in sizes if size <= LARGEST_ON_CPU)
    how = f" (at most {LARGEST_ON_CPU} on CPUs; it must divide the {per_rank} items of a rank)"
    if accelerator.device.type == "cuda":
        module = accelerator.unwrap_model(model)
        with together("find the largest micro-batch that fits"):
            largest = _largest(sizes, _Trial(accelerator, cfg, module, optimizer, train, loss_sum, room))
        how = f", by trying the longest items (it must divide the {per_rank} items of a rank)"
    smallest = min(gather_everywhere(largest))
    if smallest == 0:
        raise UserError(
            "--micro_batch_size auto: not even one of the longest items fits into the GPU memory of every rank. Use "
            "--gradient_checkpointing, --mixed_precision bf16, --lora_r 16, or a smaller --max_length."
        )
    cfg.micro_batch_size = smallest
    micro, count = cfg.split(process.num_ranks)
    if cfg.static_graph and count > 1 and process.num_ranks > 1:
        raise UserError(
            f"--static_graph cannot be combined with several micro-batches per update, and only {micro} items fit into one. "
            "Leave --static_graph out."
        )
    print_on_main(f"--micro_batch_size auto: {micro} x {count} micro-batch{'es' * (count > 1)} per rank{how}")


class _Trial(NamedTuple):
    accelerator: Accelerator
    cfg: TrainConfig
    module: nn.Module
    optimizer: torch.optim.Optimizer
    train: TrainBatches
    loss_sum: LossSum | WholeBatch
    room: float  # memory for CUDA graphs is included, because they save more time than a larger micro-batch

    def fits(self, size: int) -> bool:
        device = self.accelerator.device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        # The optimizer allocates its state in its first step.
        later = 0 if self.optimizer.state else state_bytes(self.module, self.cfg)
        try:
            rehearse(self.module, self.train.sample(size, self.accelerator, self.cfg, longest=True), self.loss_sum)
        except torch.OutOfMemoryError:
            return False
        finally:
            torch.cuda.empty_cache()
        taken = torch.cuda.max_memory_allocated(device) - held
        return held + later + self.room * taken <= USABLE * torch.cuda.get_device_properties(device).total_memory


def _largest(sizes: list[int], trial: _Trial) -> int:
    """Return the largest size that fits, or 0. Sizes are doubled, so that a size that is too large is rarely far too large."""
    doubling = [size for i, size in enumerate(sizes) if i == 0 or size == sizes[-1] or size >= 2 * sizes[i - 1]]
    best, module = 0, trial.module
    was_training = module.training
    module.train(trial.cfg.dropout)
    for size in doubling:
        if trial.fits(size):
            best = size
            continue
        between = [other for other in sizes if best < other < size]
        while between:  # bisection
            middle = between[len(between) // 2]
            is_small = trial.fits(middle)
            best = middle if is_small else best
            between = [other for other in between if (other > middle) == is_small and other != middle]
        break
    module.train(was_training)
    return best
