"""Counts the floating-point operations of a model, from which the log computes TFLOP/s and MFU.

It counts what the task needs and not what is executed: matrix products of tokens, without padding and without recomputation.
"""

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp.config import TrainConfig
from accel_ddp.speed.padding_free_model import layers_of

# Dense products in bf16 or fp16, in TFLOP/s, from the data sheets. The first entry that is contained in a GPU's name counts.
PEAKS = {
    "GB300": 2500, "B300": 2500, "GB200": 2500, "B200": 2250, "H200": 989, "GH200": 989,
    "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
    "H800": 989, "H20": 148, "A100": 312, "A800": 312, "A40": 149.7, "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181,
    "L4": 121, "RTX 6000 Ada": 364, "RTX 4090": 165.2, "RTX 3090": 71, "RTX A6000": 154.8, "V100": 125, "T4": 65,
}  # fmt: skip


def peak(name: str, dtype: torch.dtype, tf32: bool = True) -> float | None:
    """Return the FLOP/s of a GPU of this name in this type, or None if they are not known."""
    best = next((value for words, value in PEAKS.items() if words in name), None)
    if best is None:
        return None
    if dtype in (torch.bfloat16, torch.float16):
        return best * 1e12
    return best * 0.5e12 if tf32 and not any(old in name for old in ("V100", "T4")) else None


def peak_of_all(accelerator: Accelerator, cfg: TrainConfig) -> float | None:
    """Return the FLOP/s of all ranks, whose GPUs are assumed to be the same, or None if they are not known."""
    if accelerator.device.type != "cuda":
        return None
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, torch.float32)
    of_one = peak(torch.cuda.get_device_name(accelerator.device), dtype, cfg.tf32)
    return of_one * accelerator.num_processes if of_one else None


class FlopCounter:
    """Counts the FLOPs of one update, forward and backward, of a transformer that is a single stack of layers."""

    def __init__(self, model: nn.Module):
        """Raise NeedsPadding if the stack is not found."""
        layers = layers_of(model)
        inside = {id(module) for layer in layers for module in layer.modules()}
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        matrices = [
            m for m in model.modules() if type(m) is nn.Linear or type(m).__name__ == "Conv1D"
        ]  # not modules that contain them
        self.per_token = sum(_of_one(m) for m in matrices if id(m) in inside)
        self.per_target = _of_one(head) if isinstance(head, nn.Linear) else 0
        # Others, such as a pooler or a classifier, are applied once per text. (A head over tags is applied to every token.)
        others = [m for m in matrices if id(m) not in inside and m is not head]
        self.per_text = sum(_of_one(m) for m in others)
        config = next(
            module.config for module in model.modules() if hasattr(getattr(module, "config", None), "num_hidden_layers")
        )
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        causal = any(getattr(module, "is_causal", False) for layer in layers for module in layer.modules())
        # Attention scores and their use: two products of [s, size] and [s, s] per head, and twice that in the backward pass.
        self.per_square = 3 * 2 * 2 * len(layers) * config.num_attention_heads * size / (2 if causal else 1)

    def count(self, tokens: int, squares: int, targets: int, texts: int) -> float:
        """Return the FLOPs. `squares` is the sum of the squared lengths of the texts."""
        return self.per_token * tokens + self.per_square * squares + self.per_target * targets + self.per_text * texts


def _of_one(matrix: nn.Module) -> int:
    """Return the FLOPs per row: one product forward, one for the gradient of the row, and one for that of a trained weight."""
    return (6 if matrix.weight.requires_grad else 4) * matrix.weight.numel()
