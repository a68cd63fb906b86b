"""Counts the bytes of a model's weights, gradients and optimizer state. They are the same on every device."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from accel_ddp.speed.padding_free import NeedsPadding
from accel_ddp.speed.padding_free_model import layers_of

STEP_BYTES = 4  # AdamW stores the number of its steps for every parameter


@dataclass(frozen=True)
class Part:
    """The parameters of the layers together, or those of the rest of the model."""

    parameters: int  # elements
    trained: int  # elements
    weights: int  # bytes
    gradients: int  # bytes


@dataclass(frozen=True)
class States:
    """What a run stores from its first to its last step, if nothing is sharded."""

    layers: Part
    rest: Part
    num_layers: int
    buffers: int  # bytes
    optimizer: int  # bytes

    @property
    def weights(self) -> int:
        return self.layers.weights + self.rest.weights

    @property
    def gradients(self) -> int:
        return self.layers.gradients + self.rest.gradients

    @property
    def parameters(self) -> int:
        return self.layers.parameters + self.rest.parameters

    @property
    def trained(self) -> int:
        return self.layers.trained + self.rest.trained


def count_states(model: nn.Module, cfg: Any) -> States:
    """Return the bytes of a model that may be on the meta device or fake."""
    inside, num_layers = _find_layers(model)
    all_parameters = list(model.parameters())
    layers = [p for p in all_parameters if id(p) in inside]
    rest = [p for p in all_parameters if id(p) not in inside]
    # Linear weights of layers are quantised if they are frozen. The scales of the blocks of 64 weights are quantised too.
    narrow = {"4bit": 0.5 + 1 / 128, "8bit": 1.0}.get(getattr(cfg, "quantize", "no"))
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    return States(_count(layers, narrow), _count(rest, None), num_layers, buffers, optimizer_bytes(model, cfg))


def _find_layers(model: nn.Module) -> tuple[set[int], int]:
    """Return the ids of all parameters of layers, and how many layers there are. Lists of modules are layers, as for FSDP."""
    try:
        layers = layers_of(model)
    except NeedsPadding:
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
        layers = [element for one in lists for element in one]
        nested = {id(inner) for layer in layers for inner in layer.modules() if inner is not layer}
        layers = [layer for layer in layers if id(layer) not in nested]
    return {id(p) for layer in layers for p in layer.parameters()}, len(layers)


def _count(parameters: list[nn.Parameter], narrow: float | None) -> Part:
    trained = [p for p in parameters if p.requires_grad]
    size = lambda p: int(p.numel() * narrow) if narrow and p.ndim == 2 and not p.requires_grad else p.numel() * p.element_size()
    return Part(
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in trained),
        sum(size(p) for p in parameters),
        sum(p.numel() * p.element_size() for p in trained),
    )


def optimizer_bytes(model: nn.Module, cfg: Any) -> int:
    """Return the bytes of the optimizer's state after its first step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.numel() * p.element_size() for p in trained)
    if cfg.optimizer == "sgd":
        return size if cfg.momentum else 0
    return 2 * size + STEP_BYTES * len(trained)
