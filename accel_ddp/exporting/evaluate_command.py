"""`accel-ddp evaluate`: the metrics of a run, a checkpoint, an exported folder or any other model, as a recipe measures them.

The recipe itself evaluates, in a run with `--evaluate_only` and the model's options. Its folder is a temporary one, so the folder
that is evaluated is only read. This process imports no torch: it starts the ranks, waits, and compares the result.
"""

import glob
import json
import signal
import subprocess
import sys
import tempfile
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_ddp.config.commands import COMMANDS
from accel_ddp.config.option_values import split_weight
from accel_ddp.config.options import properties_of
from accel_ddp.config.train_config import TrainConfig, as_plain_dict
from accel_ddp.doctor.check_options import load_recipe_config
from accel_ddp.errors import USER_ERROR, UserError
from accel_ddp.nodes import recipe_files
from accel_ddp.nodes.spawn import MODULE
from accel_ddp.records.files import replace_file
from accel_ddp.saving.checkpoint_format import read_facts, read_json
from accel_ddp.text import did_you_mean_path, table
from accel_ddp.words import find_options, group_values, without

OF_TRAINING = {"saving", "logging", "multi-node"}  # groups of options that an evaluation does not need
# The model's files state these, or they name files of another machine.
OF_FILES = (
    "model", "lora_r", "lora_alpha", "lora_dropout", "lora_targets", "freeze", "ema_decay", "cache_dir", "chat_template"
)  # fmt: skip
OF_ROWS = ("dataset", "train_split", "eval_split", "eval_fraction", "train_file", "max_train_items")


def main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(COMMANDS["evaluate"]["text"], file=sys.stdout if words else sys.stderr)
        return 0 if words else USER_ERROR
    place, words = words[0], words[1:]
    if place.startswith("-"):
        raise UserError(f"{place}: name the model or run first, for example: accel-ddp evaluate runs/classify/1 {place} ...")
    own = find_options(words, ["recipe", "output"])
    if lacking := [option.name for option in own if not option.value]:
        raise UserError(f"--{lacking[0]}: needs a value.")
    given, words = {option.name: option.value or "" for option in own}, without(words, own)
    output = Path(given.get("output") or "-")
    if "output" in given and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise UserError(f"--output {output}: {'is a folder' if output.is_dir() else 'its folder does not exist'}. Name a file.")
    place = next((one for one in (place, f"{place}/model") if read_facts(one)), place)  # a run may have lost its checkpoints
    facts = read_facts(place)
    script = _script_of(place, given.get("recipe", ""), facts)
    cfg = load_recipe_config([str(script)])
    if cfg is None:
        raise UserError(f"--recipe {script}: its options cannot be read. It needs a Config that `accel_ddp.entry.run` gets.")
    options = _options_of(place, facts, cfg, words)
    with tempfile.TemporaryDirectory(prefix="accel_ddp_evaluate_") as folder:
        config, run = Path(folder, "options.yaml"), Path(folder, "run")
        config.write_text(json.dumps(options))
        ours = ["--config", str(config), "--evaluate_only", facts.get("checkpoint", place), "--output_dir", str(run)]
        code = _wait([sys.executable, *MODULE, "accel_ddp.cli", "run", str(script), *ours, *words])
        if code:
            return code
        metrics = (read_json(run / "evaluations.json") or {}).get(str(facts.get("step", 0) if "checkpoint" in facts else 0))
    if not metrics:
        raise UserError(f"{script.name}: has no evaluation. Give `fit` the items to evaluate: test=accel_ddp.EvalBatches(...).")
    before = facts.get("metrics", {}) if _has_same_rows(words, facts.get("options", {}), cfg) else {}
    print(*_describe(facts.get("checkpoint", place), metrics, before), sep="\n")
    if "output" in given:
        result = {"model": facts.get("checkpoint", place), "recipe": script.name, "metrics": metrics}
        replace_file(output, json.dumps(result, indent=1) + "\n")
    return 0


def _script_of(place: str, recipe: str, facts: dict[str, Any]) -> Path:
    is_name = not place.startswith((".", "/", "~")) and place.count("/") < 2
    if not Path(place).exists() and not (recipe and is_name):
        hint = " For a model of the Hub, add its recipe: --recipe classify." if is_name else ""
        raise UserError(f"{place}: there is no such folder.{did_you_mean_path(Path(place).expanduser())}{hint}")
    if recipe:
        return recipe_files.recipe_path(recipe)
    if not facts:
        names = ", ".join(recipe_files.recipe_names())
        instead = f"For another model, add --recipe: {names}"
        raise UserError(f"{place}: is not a run with a checkpoint, nor an exported model of accel-ddp. {instead}.")
    name = facts.get("recipe", "")
    if Path(name).stem in recipe_files.recipe_names():
        return recipe_files.recipe_path(Path(name).stem)
    found = next((path for path in (Path(name), Path("recipes") / name) if name and path.is_file()), None)
    if found is None:
        raise UserError(f"{place}: was trained with {name}, which is not here. Name the script: --recipe FOLDER/{name}.")
    return found


def _options_of(place: str, facts: dict[str, Any], cfg: TrainConfig, words: Sequence[str]) -> dict[str, Any]:
    """Return the options of the evaluation, for a config file. Words of the user override them."""
    is_checkpoint, stored, typed = "checkpoint" in facts, facts.get("options", {}), dict(group_values(words))
    properties, types, defaults = properties_of(type(cfg)), typing.get_type_hints(type(cfg)), as_plain_dict(cfg)
    kept = {name for name, found in properties.items() if found.group not in OF_TRAINING}
    options = {name: value for name, value in stored.items() if name in kept and value != defaults[name] and value is not None}
    options |= {name: _values(name, value) for name, value in options.items() if typing.get_origin(types[name]) is tuple}
    if not is_checkpoint:
        options = {name: value for name, value in options.items() if name not in OF_FILES}
    if not facts and "eval_file" in types and not typed.keys() & {"eval_file", "train_file", "dataset"}:
        raise UserError(f"{place}: its rows are not known. Add --eval_file FILE or --dataset NAME.")
    if typed.keys() & {"train_file", "dataset"}:  # other rows than those of the training
        options = {name: value for name, value in options.items() if name not in (*OF_ROWS, "eval_file")}
    named = typed.get("eval_file") or options.get("eval_file")
    files = () if "eval_file" in typed else named or options.get("train_file", ())
    paths = [split_weight(one)[0] for one in ([files] if isinstance(files, str) else files)]
    if missing := [path for path in paths if not Path(path).exists() and not glob.glob(path, recursive=True)]:
        what = "evaluated" if named else "trained"
        raise UserError(f"{place}: was {what} with {missing[0]}, which is not here. Give the rows: --eval_file FILE.")
    if named and "eval_file" in types:  # the training rows may be missing here, and are not needed
        options = {name: value for name, value in options.items() if name not in OF_ROWS}
        options |= {"train_file": named, "eval_file": named}
    return options | ({"resume": facts["checkpoint"]} if is_checkpoint else {"model": place} if "model" in types else {})


def _values(name: str, text: str) -> list[str]:
    return text.split("\n" if name.endswith("_file") else None)


def _has_same_rows(words: Sequence[str], stored: dict[str, Any], cfg: TrainConfig) -> bool:
    of_data = {name for name, found in properties_of(type(cfg)).items() if found.group == "data"}
    given = {name: values for name, values in group_values(words) if name in of_data}
    names = lambda values: [Path(one).name for one in values]
    before = _values("eval_file", stored.get("eval_file") or "")
    return not given or (given.keys() == {"eval_file"} and names(given["eval_file"]) == names(before))


def _describe(place: str, metrics: dict[str, float], before: dict[str, float]) -> list[str]:
    shared = [name for name in metrics if name in before]
    if not shared:
        return [f"{place}:", *table([[name, f"{value:.4f}"] for name, value in metrics.items()], 1)]
    differences = {name: metrics[name] - before[name] for name in shared}
    compared = {name: [f"{before[name]:.4f}", f"{differences[name]:+.1e}"] for name in shared}
    rows = [[name, f"{value:.4f}", *compared.get(name, ["", ""])] for name, value in metrics.items()]
    equal = "equal to the evaluation in training" if not any(differences.values()) else "compared with the evaluation in training"
    return [f"{place}: {equal}", *table([["", "now", "in training", "difference"], *rows], 1)]


def _wait(command: list[str]) -> int:
    """Run a command and return its exit code. It gets Ctrl-C from the terminal, and SIGTERM from this process."""
    process = subprocess.Popen(command)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: process.send_signal(number) if number == signal.SIGTERM else None)
    code = process.wait()
    return code if code >= 0 else 128 - code
