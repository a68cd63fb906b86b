"""`accel-ddp estimate RECIPE [options]`: the GPU memory of a run, from the config of its model alone."""

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from accel_ddp import recipe_files
from accel_ddp.errors import UserError
from accel_ddp.memory import estimate as memory
from accel_ddp.memory.estimate import GIB, Estimate
from accel_ddp.parsing import parse_config

USABLE = 0.99  # of the number in the name of a GPU, in GiB
NAMES = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer state", "gathered": "gathered weights (FSDP)",
    "copies": "weights in 16 bits", "activations": "activations", "loss": "vocabulary loss", "other": "other",
}  # fmt: skip
# What to try if a run does not fit, in this order.
CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("--micro_batch_size 1", {"micro_batch_size": 1}),
    ("--gradient_checkpointing", {"gradient_checkpointing": True}),
    ("--gradient_checkpointing --micro_batch_size 1", {"gradient_checkpointing": True, "micro_batch_size": 1}),
    ("--lora_r 16", {"lora_r": 16}),
    ("--lora_r 16 --dtype bfloat16", {"lora_r": 16, "dtype": "bfloat16"}),
]


def main(words: list[str]) -> int:
    """Print a table, or JSON with --json, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="accel-ddp estimate",
        usage="accel-ddp estimate [--gpus N ...] [--memory GB ...] [--json] RECIPE [options of the recipe]",
        description="Print the GPU memory that each rank of a recipe needs. No weights and no data are loaded. Texts are assumed to "
        "have --max_length tokens.",
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of GPUs (default: 1 2 4 8)")
    parser.add_argument("--memory", type=float, nargs="+", default=[24, 40, 80, 141], help="GB of a GPU (default: 24 40 80 141)")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    names = recipe_files.recipe_names()
    at = next((i for i, word in enumerate(words) if word.endswith(".py") or word in names), len(words))
    given = parser.parse_args(words[:at])
    if at == len(words):
        raise UserError(f"accel-ddp estimate needs a recipe, for example sft. The recipes are: {', '.join(names)}.")
    if min(given.gpus) < 1 or min(given.memory) <= 0:
        raise UserError("--gpus and --memory: must be above 0.")
    recipe = _load(recipe_files.recipe_path(words[at]))
    cfg = parse_config(recipe.Config, words[at + 1 :], words[at])
    if not hasattr(cfg, "model"):
        raise UserError(f"{words[at]}: has no option --model, so that its model is not known before it runs.")
    model_class = getattr(getattr(recipe, "Task", None), "model_class", "")
    found = _estimate(cfg, model_class, sorted(set(given.gpus)))
    if given.json:
        rows = [{**dataclasses.asdict(one), "total": one.total, "with_graphs": one.with_graphs} for one in found]
        print(json.dumps({"estimates": rows}, indent=1))
    else:
        print(_table(found))
        print(_fits(cfg, model_class, found, given.memory))
    return 0


def _load(path: Path) -> Any:
    sys.path.insert(0, str(path.parent))  # own_loop.py imports classify.py
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "Config"):
        raise UserError(f"{path}: has no class Config, so that it is not a recipe.")
    return module


def _estimate(cfg: Any, model_class: str, gpus: list[int]) -> list[Estimate]:
    precision = "bf16" if cfg.mixed_precision == "auto" else cfg.mixed_precision
    runs: dict[int, memory.Run] = {}
    found = []
    for number in gpus:
        per_rank = max(1, cfg.global_batch_size // number)
        micro = 1 if cfg.micro_batch_size == "auto" else min(cfg.micro_batch_size, per_rank)
        if micro not in runs:
            runs[micro] = memory.prepare(cfg, model_class, precision, micro)
        for kind in [memory.ONE] if number == 1 else [memory.DDP, memory.FSDP]:
            found.append(memory.estimate(runs[micro], kind, number, per_rank // micro))
    return found


def _table(found: list[Estimate]) -> str:
    titles = [one.kind if one.ranks == 1 else f"{one.kind} x {one.ranks}" for one in found]
    lines = [["GiB per GPU", *titles]]
    for name, title in NAMES.items():
        if any(one.rows[name] for one in found):
            lines.append([title, *(f"{one.rows[name] / GIB:.2f}" for one in found)])
    lines.append(["total", *(f"{one.total / GIB:.2f}" for one in found)])
    for title, name in (("CUDA graphs, if there is room", "graphs"), ("more in an evaluation", "evaluation")):
        if any(getattr(one, name) for one in found):
            lines.append([title, *(f"{getattr(one, name) / GIB:.2f}" for one in found)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:]))]) for line in lines)


def _does_fit(one: Estimate, size: float) -> bool:
    return memory.needed(one.total + one.evaluation, one.ranks) <= size * USABLE * GIB


def _fits(cfg: Any, model_class: str, found: list[Estimate], sizes: list[float]) -> str:
    lines = ["The total is what torch allocates. CUDA, NCCL and fragmentation are added to decide whether a run fits."]
    changed: dict[str, Estimate] = {}
    for size in sorted(sizes):
        good = [f"{one.kind} x {one.ranks}" if one.ranks > 1 else one.kind for one in found if _does_fit(one, size)]
        if good:
            lines.append(f"{size:g} GB: fits with {', '.join(good)}.")
            continue
        for words, values in CHANGES if not changed else ():
            if all(hasattr(cfg, name) for name in values) and any(getattr(cfg, n) != v for n, v in values.items()):
                changed[words] = _estimate(dataclasses.replace(cfg, **values), model_class, [found[-1].ranks])[-1]
        useful = [f"{words} ({one.kind}: {one.total / GIB:.1f} GiB)" for words, one in changed.items() if _does_fit(one, size)]
        lines.append(f"{size:g} GB: does not fit. " + (f"Use {' or '.join(useful)}." if useful else "Use more GPUs with FSDP."))
    return "\n".join(lines)
