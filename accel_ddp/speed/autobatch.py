"""`--micro_batch_size auto`: the largest that fits, found before training, the same on all ranks."""

from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp.ranks import world
from accel_ddp.speed import cuda_graphs
from accel_ddp.config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.speed.attach import Speed
from accel_ddp.training.stream import TrainBatches
from accel_ddp.training.update import LossSum, rehearse

FULL = 0.9  # of a GPU's memory; the rest is for pieces that do not fit together, and for the library's own
ON_CPU = 16  # items: larger ones are not faster there, and nobody says how much memory is free


def settle(
    accelerator: Accelerator,
    cfg: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: TrainBatches,
    loss_sum: LossSum,
    speed: Speed,
) -> None:
    """Make `cfg.micro_batch_size` a number, if it is none yet: each rank tries its longest items, the smallest answer counts."""
    if cfg.micro_batch_size != "auto":
        return
    per_rank = cfg.split(world.NUM_RANKS)[0]
    sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
    largest = max(size for size in sizes if size <= ON_CPU)
    tried = f" (at most {ON_CPU} on CPUs; it divides the {per_rank} of a rank)"
    if accelerator.device.type == "cuda":
        module = accelerator.unwrap_model(model)
        with world.together("find the largest micro-batch that fits"), speed.plainly():
            trial = _Trial(accelerator, cfg, module, optimizer, train, loss_sum, cuda_graphs.ROOM if speed.recorded else 1.0)
            largest = _largest(sizes, trial)
        tried = f", by trying the longest items (it divides the {per_rank} of a rank)"
    answers = world.gathered(largest)
    smallest = world.agreed(min(answers) if answers else None)
    if smallest == 0:
        raise UserError(
            "--micro_batch_size auto: not even one of the longest items fits into the GPU's memory on every rank. Use "
            "--gradient_checkpointing, --mixed_precision bf16, --lora_r, or a smaller --max_length."
        )
    cfg.micro_batch_size = smallest
    micro, count = cfg.split(world.NUM_RANKS)
    if cfg.static_graph and count > 1 and world.NUM_RANKS > 1:
        raise UserError(
            f"--static_graph cannot be combined with several micro-batches per update, and only {micro} items fit into one. "
            "Leave it out."
        )
    world.say(f"--micro_batch_size auto: {micro} x {count} micro-batch{'es' * (count > 1)} per rank{tried}")


class _Trial(NamedTuple):
    accelerator: Accelerator
    cfg: TrainConfig
    module: nn.Module
    optimizer: torch.optim.Optimizer
    train: TrainBatches
    loss_sum: LossSum
    times: float  # what a micro-batch takes: with room for recordings of it, which are worth more than a larger one

    def fits(self, size: int) -> bool:
        device = self.accelerator.device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        # What AdamW will need from its first step on.
        learned = sum(p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad)
        later = 0 if self.optimizer.state else 2 * learned
        try:
            rehearse(self.module, self.train.sample(size, self.accelerator, self.cfg, longest=True), self.loss_sum)
        except torch.OutOfMemoryError:
            return False
        finally:
            torch.cuda.empty_cache()
        taken = torch.cuda.max_memory_allocated(device) - held
        return held + later + self.times * taken <= FULL * torch.cuda.get_device_properties(device).total_memory


def _largest(sizes: list[int], trial: _Trial) -> int:
    """0 where not even one fits. Sizes double, so that one that is too large is seldom far too large."""
    doubling = [size for i, size in enumerate(sizes) if i == 0 or size == sizes[-1] or size >= 2 * sizes[i - 1]]
    best, module = 0, trial.module
    was_training = module.training
    module.train(trial.cfg.dropout)
    for size in doubling:
        if trial.fits(size):
            best = size
            continue
        between = [other for other in sizes if best < other < size]
        while between:  # halving what lies between
            middle = between[len(between) // 2]
            is_small = trial.fits(middle)
            best = middle if is_small else best
            between = [other for other in between if (other > middle) == is_small and other != middle]
        break
    module.train(was_training)
    return best
