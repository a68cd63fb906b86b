"""`accel-ddp estimate RECIPE [options]`: the GPU memory of a run, from the config of its model alone."""

import argparse
import dataclasses
import json
import math
from dataclasses import dataclass

from accel_ddp.config.parsing import parse_config
from accel_ddp.doctor.check_options import load_recipe
from accel_ddp.errors import UserError
from accel_ddp.nodes import recipe_files
from accel_ddp.nodes.launcher import read_accelerate_config, stated_precision
from accel_ddp.nodes.sharding_plan import ShardingPlan, read_plan, variables_of
from accel_ddp.text import first_line
from accel_ddp.words import script_at

NUMBERS = [1, 2, 4, 8]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accel-ddp estimate",
        usage="accel-ddp estimate [--config_file FILE] [--gpus N ...] [--memory GB ...] [--json] RECIPE [options of the recipe]",
        description="Print the GPU memory that each rank of a recipe needs, with DDP and with FSDP. No weights and no data are loaded. "
        "Texts are assumed to have --max_length tokens. docs/memory.md explains the rows.",
    )
    add = parser.add_argument
    add("--config_file", default="", help="an accelerate config, for its number of GPUs, FSDP settings and precision")
    default = "from the config, or those of 1 2 4 8 that divide the batch"
    add("--gpus", type=int, nargs="+", help=f"numbers of GPUs (default: {default})")
    add("--memory", type=float, nargs="+", default=[16, 24, 40, 80, 141], help="GB per GPU (default: 16 24 40 80 141)")
    add("--json", action="store_true", help="print JSON, in bytes")
    return parser


def main(words: list[str]) -> int:
    given, name, options = _split(words)
    launch = _read_config(given.config_file)
    recipe = load_recipe(recipe_files.recipe_path(name))
    if not hasattr(recipe, "Config"):
        raise UserError(f"{name}: has no class Config, so it is not a recipe.")
    cfg = parse_config(recipe.Config, options, name)
    if not hasattr(cfg, "model"):
        why = "has no option --model, so its model is not known before it runs"
        raise UserError(f"{name}: {why}. Estimate a recipe with a model of transformers, for example sft.")
    precision = (launch.precision or "bf16") if cfg.mixed_precision == "auto" else cfg.mixed_precision
    model_class = getattr(getattr(recipe, "Task", None), "model_class", "")
    from accel_ddp.memory.estimate import Estimator, format_table, layouts_of  # import torch, after --help and mistakes

    estimator = Estimator(cfg, model_class, precision, launch.num_nodes)
    numbers = given.gpus or launch.numbers or [number for number in NUMBERS if cfg.global_batch_size % number == 0]
    try:
        layouts = layouts_of(estimator, launch.plan, launch.num_nodes, sorted(set(numbers)))
    except UserError:
        raise
    except Exception as error:  # code of transformers, or of the model
        reason = f"{type(error).__name__}: {first_line(error)}"
        what = "its memory cannot be estimated. Tracing its forward pass failed"
        raise UserError(f"--model {cfg.model}: {what}: {reason}") from error
    if given.json:
        more = ("total", "peak", "with_graphs")
        rows = [{**dataclasses.asdict(one), **{name: getattr(one, name) for name in more}} for one, _ in layouts]
        print(json.dumps({"precision": precision, "estimates": rows}, indent=1))
    else:
        print(format_table(estimator, layouts, given.memory))
    return 0


def _split(words: list[str]) -> tuple[argparse.Namespace, str, list[str]]:
    names = recipe_files.recipe_names()
    at = script_at(words, names)
    parser = build_parser()
    listed = f"The recipes are: {', '.join(names)}."
    if at == len(words) and words and not words[-1].startswith("-") and parser.parse_known_args(words)[1]:
        raise UserError(f"accel-ddp estimate {words[-1]}: there is no such recipe. {listed}")
    given = parser.parse_args(words[:at])
    if at == len(words):
        raise UserError(f"accel-ddp estimate needs a recipe, for example sft. {listed}")
    own = next((word for word in words[at + 1 :] if word.partition("=")[0] in parser._option_string_actions), "")
    if own not in ("", "-h", "--help"):
        instead = f"Put it before the recipe: accel-ddp estimate {own} ... {words[at]}"
        raise UserError(f"{own}: is an option of accel-ddp estimate. {instead}.")
    for name, values in (("gpus", given.gpus or [1]), ("memory", given.memory)):
        if wrong := [value for value in values if not 0 < value < math.inf]:
            raise UserError(f"--{name} {wrong[0]:g}: must be above 0.")
    return given, words[at], words[at + 1 :]


@dataclass(frozen=True)
class Launch:
    plan: ShardingPlan | None = None
    numbers: tuple[int, ...] = ()  # of GPUs; empty: not known
    num_nodes: int = 1
    precision: str = ""


def _read_config(word: str) -> Launch:
    if not word:
        return Launch()
    path = str(recipe_files.config_path(word))
    config = read_accelerate_config(path)
    values = {}
    for name in ("num_processes", "num_machines"):
        text = str(config.get(name, ""))
        if not text.isdigit() and text not in ("", "auto", "-1", "None"):
            raise UserError(f"--config_file {word}: {name}: {text} is not a number.")
        values[name] = int(text) if text.isdigit() else 0
    number, nodes = values["num_processes"], values["num_machines"] or 1
    precision = stated_precision(config)
    if precision not in ("", "no", "bf16", "fp16"):
        raise UserError(f"--config_file {word}: mixed_precision: {precision} is not supported. Use no, bf16 or fp16.")
    # The number of ranks is checked for each number of GPUs.
    plan = read_plan(variables_of(config), 0, path)
    return Launch(plan, (number,) if number else (), nodes, precision)
