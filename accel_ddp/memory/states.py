"""Counts the bytes of a model's weights, gradients and optimizer state. They are the same on every device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from accel_ddp.optimizer_options import ema_bytes
from accel_ddp.speed.padding_free import NeedsPadding
from accel_ddp.speed.padding_free_model import layers_of
from accel_ddp.training import optim


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
    averages: int  # bytes, with --ema_decay
    dequantised: int  # bytes of the largest weight that --quantize stores in fewer bits, while it is multiplied
    has_batch_norm: bool

    @property
    def weights(self) -> int:
        return self.layers.weights + self.rest.weights

    @property
    def gradients(self) -> int:
        return self.layers.gradients + self.rest.gradients


def count_states(model: nn.Module, cfg: Any) -> States:
    """Return the bytes of a model that may be on the meta device or fake."""
    inside, num_layers = _find_layers(model)
    kind = getattr(cfg, "quantize", "no")
    quantised = quantised_weights(model, inside) if kind != "no" else set()
    all_parameters = list(model.parameters())
    size = lambda p: _stored_bytes(p, kind, p in quantised)
    return States(
        layers=_count([p for p in all_parameters if id(p) in inside], size),
        rest=_count([p for p in all_parameters if id(p) not in inside], size),
        num_layers=num_layers,
        buffers=sum(b.numel() * b.element_size() for b in model.buffers()),
        optimizer=optim.state_bytes(model, cfg),
        averages=average_bytes(model, cfg),
        dequantised=max((2 * p.numel() for p in quantised), default=0),
        has_batch_norm=any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()),
    )


def quantised_weights(model: nn.Module, inside: set[int] | None = None) -> set[nn.Parameter]:
    """Return the weights that --quantize stores in fewer bits: those of frozen linear layers, except for the output head."""
    inside = _find_layers(model)[0] if inside is None else inside
    weights = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    return {p for p in weights if id(p) in inside and not p.requires_grad}


def _stored_bytes(p: nn.Parameter, kind: str, is_quantised: bool) -> int:
    if is_quantised:  # in 4 bits, each block of 64 weights has a scale, and the scales have 8 bits
        return int(p.numel() * {"4bit": 0.5 + 1 / 64, "8bit": 1.0}[kind]) + (4 * p.shape[0] if kind == "8bit" else 0)
    return p.numel() * (p.element_size() if kind == "no" else 4)  # PEFT converts all others to float32


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


def _count(parameters: list[nn.Parameter], size: Callable[[nn.Parameter], int]) -> Part:
    trained = [p for p in parameters if p.requires_grad]
    return Part(
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in trained),
        sum(map(size, parameters)),
        sum(p.numel() * p.element_size() for p in trained),
    )


def average_bytes(model: nn.Module, cfg: Any) -> int:
    """Return the bytes of the averages of --ema_decay: of trained parameters, and of buffers that are saved."""
    if not cfg.ema_decay:
        return 0
    saved = model.state_dict().keys()
    buffers = [b for name, b in model.named_buffers() if name in saved and b.is_floating_point()]
    averaged = [*(p for p in model.parameters() if p.requires_grad), *buffers]
    return sum(ema_bytes(cfg, tensor.shape, tensor.element_size()) for tensor in averaged)
