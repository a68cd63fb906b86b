"""The model of a run with fake tensors, which have shapes and no values, its micro-batches, and the bytes of its states."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from accel_ddp import compat
from accel_ddp.config.optimizer_options import ema_bytes
from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.engine.rows import Rows, accept_rows
from accel_ddp.errors import UserError
from accel_ddp.sources import adapters, models
from accel_ddp.speed.layer_stacks import head_size, layers_of
from accel_ddp.speed.packed_layers import PackedLayers
from accel_ddp.speed.padding_free import NeedsPadding
from accel_ddp.speed.row_model import RowModel
from accel_ddp.text import first_line
from accel_ddp.training import optim


@dataclass(frozen=True)
class Part:
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
    reference: int  # bytes, with --reference copy
    dequantized: int  # bytes of the largest weight that --quantize stores in fewer bits, while it is multiplied
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
    quantized = quantized_weights(model, inside) if kind != "no" else set()
    all_parameters = list(model.parameters())
    size = lambda p: _stored_bytes(p, kind, p in quantized)
    saved = model.state_dict().keys()
    averaged = [*(p for p in all_parameters if p.requires_grad), *(b for name, b in model.named_buffers() if name in saved)]
    averaged = [tensor for tensor in averaged if tensor.is_floating_point()] if cfg.ema_decay else []
    trained = sum(p.numel() * p.element_size() for p in all_parameters if p.requires_grad)
    return States(
        layers=_count([p for p in all_parameters if id(p) in inside], size),
        rest=_count([p for p in all_parameters if id(p) not in inside], size),
        num_layers=num_layers,
        buffers=sum(b.numel() * b.element_size() for b in model.buffers()),
        optimizer=optim.state_bytes(model, cfg),
        averages=sum(ema_bytes(cfg, tensor.shape, tensor.element_size()) for tensor in averaged),
        reference=trained if getattr(cfg, "reference", "") == "copy" else 0,
        dequantized=max((2 * p.numel() for p in quantized), default=0),
        has_batch_norm=compat.has_batch_norm(model),
    )


def quantized_weights(model: nn.Module, inside: set[int] | None = None) -> set[nn.Parameter]:
    """Return the weights that --quantize stores in fewer bits: frozen linear layers, except for the output head."""
    inside = _find_layers(model)[0] if inside is None else inside
    weights = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    return {p for p in weights if id(p) in inside and not p.requires_grad}


def _stored_bytes(p: nn.Parameter, kind: str, is_quantized: bool) -> int:
    if is_quantized:  # in 4 bits, each block of 64 weights has a scale, and the scales have 8 bits
        return int(p.numel() * {"4bit": 0.5 + 1 / 64, "8bit": 1.0}[kind]) + (4 * p.shape[0] if kind == "8bit" else 0)
    return p.numel() * p.element_size()


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
    elements = [sum(p.numel() for p in some) for some in (parameters, trained)]
    return Part(*elements, sum(map(size, parameters)), sum(p.numel() * p.element_size() for p in trained))


IMAGES = "AutoModelForImageClassification"
ASSUMED_LENGTH = 2048  # tokens of a text, where --max_length auto has no data to look at
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The class that a model without `Task.model_class` has, by the end of its architecture.
CLASSES = {
    "CausalLM": "AutoModelForCausalLM", "LMHeadModel": "AutoModelForCausalLM", "ConditionalGeneration": "AutoModelForSeq2SeqLM",
    "SequenceClassification": "AutoModelForSequenceClassification", "TokenClassification": "AutoModelForTokenClassification",
    "ImageClassification": IMAGES,
}  # fmt: skip


class FakeModel(NamedTuple):
    model: nn.Module
    model_class: str
    mode: Any  # of fake tensors
    config: Any
    lengths: Sequence[np.ndarray | None] = ()  # the tokens of each row for training and for evaluation, if they are known


def build(cfg: RecipeConfig, model_class: str = "", precision: str = "no") -> FakeModel:
    import transformers

    mode = compat.fake_mode()
    if cfg.model == "mini-resnet" and model_class == IMAGES:  # the built-in model of recipes/images.py
        from accel_ddp.tasks.mini_resnet import MiniResNetConfig, MiniResNetForImageClassification  # imports transformers

        with torch.device("meta"):
            model = MiniResNetForImageClassification(MiniResNetConfig())
        return FakeModel(_faked(model, mode), IMAGES, mode, model.config)
    config = models.load_config(cfg)
    if not model_class:
        name = (getattr(config, "architectures", None) or [""])[0]
        model_class = next((found for end, found in CLASSES.items() if name.endswith(end)), "AutoModel")
    if model_class == "AutoModelForSequenceClassification" and getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0  # a run sets the tokenizer's; without one, decoders refuse several texts
    given = adapters.find_adapters(cfg.model, cfg.cache_dir)
    num_new = len(adapters.trained_tokens(given.config)) if given else _count_new_tokens(cfg)
    if given:
        targets = given.config.target_modules
        targets = (targets,) if isinstance(targets, str) else tuple(sorted(targets or ()))
        cfg = dataclasses.replace(cfg, lora_r=given.config.r, lora_targets=targets)
    options: dict[str, Any] = {"dtype": getattr(torch, models.weights_dtype(cfg, config, cfg.lora_r > 0, precision)[0])}
    if cfg.attn_implementation != "auto":
        options["attn_implementation"] = cfg.attn_implementation
    is_quantized, cfg = cfg.quantize != "no", dataclasses.replace(cfg, quantize="no")  # it changes no shapes, and needs a GPU
    with torch.device("meta"):
        try:
            model = getattr(transformers, model_class).from_config(config, **options)
        except ValueError as error:  # the class does not exist for this type of model
            raise UserError(f"--model {cfg.model}: cannot be built as {model_class}: {first_line(error)}") from error
        model._new_modules, model._adapters, model._new_tokens = [], None, range(num_new)  # which tokens changes no shapes
        model = models.adapt(model, cfg, models.LORA_TASKS.get(model_class, ""))
    dtypes: dict[nn.Parameter, torch.dtype] = {}
    if is_quantized:  # they are multiplied as 16 bits, without a copy that stays
        dtypes = dict.fromkeys(quantized_weights(model), NARROW.get(precision, torch.float32))
    return FakeModel(_faked(model, mode, dtypes), model_class, mode, config)


def _count_new_tokens(cfg: RecipeConfig) -> int:
    """Return how many tokens --chat_template adds below new adapters. Then the head is more than its weight: see `OutputHead`."""
    from accel_ddp.tasks.chat_template import TEMPLATES, missing_tokens

    template = getattr(cfg, "chat_template", "")
    has_tokens = cfg.lora_r and template in TEMPLATES
    return len(missing_tokens(models.load_tokenizer(cfg), template)) if has_tokens else 0


def _faked(model: nn.Module, mode: Any, dtypes: Mapping[nn.Parameter, torch.dtype] = MappingProxyType({})) -> nn.Module:
    """Replace the tensors of a model on the meta device by fake tensors of the CPU, for which autocast works. Return the model."""
    made: dict[int, nn.Parameter] = {}  # a parameter that is used twice stays one
    with mode:
        for module in model.modules():
            for name, p in compat.own_parameters(module).items():
                if p is not None:
                    fake = torch.empty(p.shape, dtype=dtypes.get(p, p.dtype))
                    made.setdefault(id(p), nn.Parameter(fake, requires_grad=p.requires_grad))
                    compat.own_parameters(module)[name] = made[id(p)]
            for name, buffer in compat.own_buffers(module).items():
                if buffer is not None:
                    compat.own_buffers(module)[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Log nothing about the model. The run logs the same when it loads the weights."""
    ours = ("accel_ddp.sources.adapters", "transformers.modeling_utils")
    names = (*ours, "torch._subclasses.fake_tensor", "torch.utils._pytree", "torchao")  # PEFT imports torchao
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was in zip(loggers, before):
            logger.disabled = was


def make_batch(fake: FakeModel, cfg: Any, items: int, for_evaluation: bool = False) -> Any:
    """Return a micro-batch of `items`: the longest rows, or the largest that options allow. Call it in fake mode."""
    known = fake.lengths[1 if for_evaluation else 0] if fake.lengths else None
    per_item = known.shape[1] if known is not None and known.ndim == 2 else getattr(cfg, "texts_per_item", 1)
    texts = items * per_item
    if fake.model_class == IMAGES:
        side = getattr(cfg, "image_size", 0) or getattr(fake.config, "image_size", None) or 32
        side = side if isinstance(side, int) else max(side)
        channels = getattr(fake.config, "num_channels", 3)
        return dict(pixel_values=torch.zeros(texts, channels, side, side), labels=torch.zeros(texts, dtype=torch.long))
    limit, width = getattr(fake.config, "max_position_embeddings", None), getattr(cfg, "max_length", 0)
    width = min(limit or ASSUMED_LENGTH, ASSUMED_LENGTH) if width == "auto" else width or min(limit or 512, 4096)
    lengths = np.full(texts, width)
    if known is not None and known.size == len(known) * per_item:
        known = known.reshape(len(known), -1)
        longest = known[np.argsort(-known.sum(1), kind="stable")[:items]]
        lengths = np.minimum(np.resize(longest, texts), width)
        width = int(lengths.max())
    with compat.real_tensors():
        zeros = torch.zeros(int(lengths.sum()), dtype=torch.long)
        more, per_token = {}, {"input_ids": zeros, "labels": zeros}
        if fake.model_class == "AutoModelForSeq2SeqLM":
            of_targets = torch.full((texts,), getattr(cfg, "max_target_length", width))
            more["target"] = Rows.join({"labels": torch.zeros(int(of_targets.sum()), dtype=torch.long)}, of_targets, multiple=8)
            del per_token["labels"]
        rows = Rows.join(per_token, torch.from_numpy(lengths.astype(int)), more, multiple=8, items=items)
    return rows.map(torch.clone)  # fake ones


class _LikeGpu:
    """Computes without padding as on a GPU."""

    owner: Any

    def _has_flash(self, device: torch.device) -> bool:
        size = head_size(self.owner.config)
        return size % 8 == 0 and size <= 256


class RowsLikeGpu(_LikeGpu, RowModel):
    pass


class PackedLikeGpu(_LikeGpu, PackedLayers):
    pass


def remove_padding(model: nn.Module) -> bool:
    for kind in (RowsLikeGpu, PackedLikeGpu):
        with contextlib.suppress(NeedsPadding):
            kind(model).install()
            return True
    accept_rows(model)
    return False
