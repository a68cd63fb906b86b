"""`--micro_batch_size auto`: the largest that fits, found before training, the same on all ranks."""

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp import world
from accel_ddp.config import TrainConfig, UserError
from accel_ddp.fast import Speed
from accel_ddp.stream import TrainBatches
from accel_ddp.update import LossSum, rehearse

FULL = 0.92  # of a GPU's memory; what is between is for pieces that do not fit together
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
    tried = ""
    if accelerator.device.type == "cuda":
        module = accelerator.unwrap_model(model)
        with world.together("find the largest micro-batch that fits"), speed.plainly():
            largest = _largest(sizes, accelerator, cfg, module, optimizer, train, loss_sum)
        tried = ", by trying the longest items"
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


def _largest(
    sizes: list[int],
    accelerator: Accelerator,
    cfg: TrainConfig,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: TrainBatches,
    loss_sum: LossSum,
) -> int:
    """0 where not even one fits. Sizes double, so that a step that is too large is seldom far too large."""
    doubling = [size for i, size in enumerate(sizes) if i == 0 or size == sizes[-1] or size >= 2 * sizes[i - 1]]
    best = 0
    was_training = module.training
    module.train(cfg.dropout)
    for size in doubling:
        if not _fits(size, accelerator, cfg, module, optimizer, train, loss_sum):
            between = [other for other in sizes if best < other < size]
            while between:  # halving what lies between
                middle = between[len(between) // 2]
                if _fits(middle, accelerator, cfg, module, optimizer, train, loss_sum):
                    best = middle
                    between = [other for other in between if other > middle]
                else:
                    between = [other for other in between if other < middle]
            break
        best = size
    module.train(was_training)
    return best


def _fits(
    size: int,
    accelerator: Accelerator,
    cfg: TrainConfig,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: TrainBatches,
    loss_sum: LossSum,
) -> bool:
    device = accelerator.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        # What AdamW will need from its first step on.
        learned = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        later = torch.empty(0 if optimizer.state else 2 * learned, dtype=torch.uint8, device=device)
        rehearse(module, train.sample(size, accelerator, cfg, longest=True), loss_sum)
    except torch.OutOfMemoryError:
        return False
    finally:
        later = None  # noqa: F841
        torch.cuda.empty_cache()
    peak = torch.cuda.max_memory_reserved(device)
    return peak <= FULL * torch.cuda.get_device_properties(device).total_memory
