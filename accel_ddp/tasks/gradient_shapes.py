"""The shapes of a model's parameters as JSON, without its weights: `python -m accel_ddp.tasks.gradient_shapes OPTIONS`.

OPTIONS is a JSON object with options of a recipe. `accel-ddp tune` starts this module as a subprocess on the main node: building
a model needs torch and transformers, which `tune` itself does not import.
"""

import dataclasses
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.sources import models
from accel_ddp.tasks.mini_resnet import MiniResNetConfig, MiniResNetForImageClassification

LORA_TASKS = {"CausalLM": "CAUSAL_LM", "ConditionalGeneration": "SEQ_2_SEQ_LM", "SequenceClassification": "SEQ_CLS"}


def parameter_shapes(cfg: RecipeConfig) -> list[list[Any]]:
    """Return [kind, shape, is_trained] for every parameter of the model, in the model's order.

    The kind is "embedding", "matrix" or "vector". Raises UserError if the model cannot be found.
    """
    with torch.device("meta"):  # parameters on this device have a shape and use no memory
        model, lora_task = _build(cfg)
        model._new_modules = []
        # These three options do not change the shapes of the gradients, and they need a GPU or more than shapes.
        cfg = dataclasses.replace(cfg, quantize="no", gradient_checkpointing=False, sync_batchnorm=False)
        model = models.prepare(model, cfg, SimpleNamespace(ddp_handler=None), lora_task)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    kind = lambda weight: "embedding" if id(weight) in tables else "matrix" if weight.dim() > 1 else "vector"
    return [[kind(weight), list(weight.shape), weight.requires_grad] for weight in model.parameters()]


def _build(cfg: RecipeConfig) -> tuple[torch.nn.Module, str]:
    """Return the model and its PEFT task type."""
    if cfg.model == "mini-resnet":  # the built-in model of recipes/images.py
        return MiniResNetForImageClassification(MiniResNetConfig()), ""
    config = models.from_pretrained(transformers.AutoConfig, cfg.model, models.locate(cfg.model, cfg.cache_dir))
    name = (getattr(config, "architectures", None) or [""])[0]
    model_class = getattr(transformers, name, None)
    model = model_class(config) if model_class else transformers.AutoModel.from_config(config)
    return model, next((task for end, task in LORA_TASKS.items() if name.endswith(end)), "FEATURE_EXTRACTION")


def main() -> None:
    """Print one line of JSON: {"entries": ...}, or {"error": ...} if the model cannot be found."""
    options = json.loads(sys.argv[1])
    names = {field.name for field in dataclasses.fields(RecipeConfig)}
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items() if name in names}
    try:
        answer: dict[str, Any] = {"entries": parameter_shapes(RecipeConfig(**options))}
    except UserError as error:
        answer = {"error": str(error)}
    print("\n" + json.dumps(answer))  # the line break ends what a library may have printed


if __name__ == "__main__":
    main()
