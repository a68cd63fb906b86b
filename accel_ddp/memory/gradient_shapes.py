"""The shapes of a model's parameters as JSON, without its weights: `python -m accel_ddp.memory.gradient_shapes OPTIONS`.

OPTIONS is a JSON object with options of a recipe. `accel-ddp tune` starts this module as a subprocess on the main node: building
a model needs torch and transformers, which `tune` itself does not import.
"""

import dataclasses
import json
import sys
from typing import Any

import torch

from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.memory import fake_model


def parameter_shapes(cfg: RecipeConfig) -> list[list[Any]]:
    cfg = dataclasses.replace(cfg, gradient_checkpointing=False)  # it changes no shapes, and not every model supports it
    model = fake_model.build(cfg, fake_model.IMAGES if cfg.model == "mini-resnet" else "").model
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    kind = lambda weight: "embedding" if id(weight) in tables else "matrix" if weight.dim() > 1 else "vector"
    return [[kind(weight), list(weight.shape), weight.requires_grad] for weight in model.parameters()]


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
