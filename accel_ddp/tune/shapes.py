"""The gradients of a model without its weights: `python -m accel_ddp.tune.shapes OPTIONS` prints their shapes as JSON.

A process of its own on the main node: it needs torch and transformers, which the parents do not import.
"""

import dataclasses
import json
import math
import sys
from types import SimpleNamespace
from typing import Any

from accel_ddp.config import RecipeConfig
from accel_ddp.errors import UserError

_SQUARE = 1024  # side of the matrices that stand for a model of which only the size is known


def of_bytes(size: int) -> list[list[Any]]:
    """Square matrices of float32, and one for the rest."""
    whole, rest = divmod(size // 4, _SQUARE * _SQUARE)
    entries: list[list[Any]] = [["matrix", [_SQUARE, _SQUARE], True] for _ in range(whole)]
    if rows := rest // _SQUARE:
        entries.append(["matrix", [rows, _SQUARE], True])
    return entries or [["vector", [max(1, rest)], True]]


def count(entries: list[list[Any]]) -> int:
    """Numbers in those that are trained."""
    return sum(math.prod(shape) for _, shape, is_trained in entries if is_trained)


def first_of(entries: list[list[Any]], numbers: int) -> list[list[Any]]:
    """The first of them, up to so many trained numbers."""
    kept: list[list[Any]] = []
    for entry in entries:
        numbers -= count([entry])
        if kept and numbers < 0:
            break
        kept.append(entry)
    return kept


def packed(entries: list[list[Any]]) -> dict[str, Any]:
    """Each shape once and their order: a message between nodes must not be large."""
    different = {json.dumps(entry): entry for entry in entries}
    place = {key: number for number, key in enumerate(different)}
    return {"different": list(different.values()), "order": [place[json.dumps(entry)] for entry in entries]}


def unpacked(message: dict[str, Any]) -> list[list[Any]]:
    return [message["different"][number] for number in message["order"]]


def of_model(cfg: RecipeConfig) -> list[list[Any]]:
    """[kind, shape, whether it is trained] of every parameter, in order. UserError where the model cannot be found."""
    import torch
    import transformers

    from accel_ddp.sources import models

    with torch.device("meta"):  # shapes without memory
        if cfg.model == "mini-resnet":  # of recipes/images.py
            from accel_ddp.tasks import vision

            model, task = vision.MiniResNetForImageClassification(vision.MiniResNetConfig()), ""
        else:
            place = models.locate(cfg.model, cfg.cache_dir)
            config = models.from_pretrained(transformers.AutoConfig, cfg.model, place)
            name = (getattr(config, "architectures", None) or [""])[0]
            auto = getattr(transformers, name, None)
            model = auto(config) if auto else transformers.AutoModel.from_config(config)
            tasks = {"CausalLM": "CAUSAL_LM", "ConditionalGeneration": "SEQ_2_SEQ_LM", "SequenceClassification": "SEQ_CLS"}
            task = next((task for end, task in tasks.items() if name.endswith(end)), "FEATURE_EXTRACTION")
        model._made_anew = []
        cfg = dataclasses.replace(cfg, quantize="no", gradient_checkpointing=False, sync_batchnorm=False)  # no other gradients
        model = models.ready(model, cfg, SimpleNamespace(ddp_handler=None), task)
    tables = {id(one.weight) for one in model.modules() if isinstance(one, torch.nn.Embedding)}
    kinds = lambda weight: "embedding" if id(weight) in tables else "matrix" if weight.dim() > 1 else "vector"
    return [[kinds(weight), list(weight.shape), weight.requires_grad] for weight in model.parameters()]


def main() -> None:
    given = json.loads(sys.argv[1])
    known = {field.name for field in dataclasses.fields(RecipeConfig)}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if name in known}
    try:
        print("\n" + json.dumps({"entries": of_model(RecipeConfig(**given))}))
    except UserError as error:
        print("\n" + json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
