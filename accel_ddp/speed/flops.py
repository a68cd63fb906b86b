"""FLOPs of a model and of GPUs, from which the log computes TFLOP/s and MFU.

They are those that the task needs and not those that are executed: matrix products of tokens, without padding and without
recomputation.
"""

import re

import torch
from torch import nn

from accel_ddp.speed.layer_stacks import layers_of
from accel_ddp.speed.padding_free import NeedsPadding

# Dense products in bf16 or fp16, in TFLOP/s, from the data sheets. The first entry that is a word of a GPU's name counts.
PEAKS = {
    "GB300": 2500, "B300": 2500, "GB200": 2500, "B200": 2250, "H200": 989, "GH200": 989,
    "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
    "H800": 989, "H20": 148, "A100": 312, "A800": 312, "A40": 149.7, "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181,
    "L4": 121, "RTX 6000 Ada": 364, "RTX 4090": 165.2, "RTX 3090": 71, "RTX A6000": 154.8, "V100": 125, "T4": 65,
}  # fmt: skip


def peak(name: str, dtype: torch.dtype, tf32: bool = True) -> float | None:
    """Return the FLOP/s of a GPU of this name in this type, or None if they are not known."""
    # Letters may follow, as in A100X and V100S. In "RTX A1000" no number of another GPU is meant.
    found = next((words for words in PEAKS if re.search(rf"(?<![A-Za-z0-9]){words}(?!\d)", name)), None)
    if found is None:
        return None
    if dtype in (torch.bfloat16, torch.float16):
        return PEAKS[found] * 1e12
    return PEAKS[found] * 0.5e12 if tf32 and found not in ("V100", "T4") else None


class FlopCounter:
    """Counts the FLOPs of one update, forward and backward, of a transformer that is a single stack of layers."""

    def __init__(self, model: nn.Module):
        """Raise NeedsPadding if the stack is not found, or if its config is an unusual one."""
        layers = layers_of(model)
        inside = {id(module) for layer in layers for module in layer.modules()}
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        matrices = [m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
        self.per_token = sum(_of_one(m) for m in matrices if id(m) in inside)
        self.per_target = _of_one(head) if isinstance(head, nn.Linear) else 0
        # Others, such as a pooler or a classifier, are applied once per text. (A head over tags is applied to every token.)
        others = [m for m in matrices if id(m) not in inside and m is not head]
        self.per_text = sum(_of_one(m) for m in others)
        configs = [getattr(module, "config", None) for module in model.modules()]
        config = next((one for one in configs if hasattr(one, "num_hidden_layers")), None)
        if not isinstance(heads := getattr(config, "num_attention_heads", None), int):
            raise NeedsPadding("its config does not say how many attention heads its layers have")
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        causal = any(getattr(module, "is_causal", False) for layer in layers for module in layer.modules())
        # Attention scores and their use: two products of [s, size] and [s, s] per head, and twice that in the backward pass.
        self.per_square = 3 * 2 * 2 * len(layers) * heads * size / (2 if causal else 1)

    def count(self, tokens: int, squares: int, targets: int, texts: int) -> float:
        """Return the FLOPs. `squares` is the sum of the squared lengths of the texts."""
        return self.per_token * tokens + self.per_square * squares + self.per_target * targets + self.per_text * texts


def _of_one(matrix: nn.Module) -> int:
    """Return the FLOPs per row: one product forward, one for the gradient of the row, and one for the gradient of a trained weight."""
    # Quantized weights are packed, so that a tensor has fewer elements than its matrix.
    size = matrix.in_features * matrix.out_features if isinstance(matrix, nn.Linear) else matrix.weight.numel()
    return (6 if matrix.weight.requires_grad else 4) * size
