"""The reader of a run's options: defaults, then `--config` (a YAML file or an example), then the command line. A later value wins.

This module needs the standard library and yaml only, so a mistyped option is reported before torch is imported.
"""

import contextlib
import dataclasses
import inspect
import re
import sys
import typing
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from accel_ddp.config.options import GROUPS, Properties, properties_of
from accel_ddp.config.other_names import INSTEAD, NO_EQUIVALENT
from accel_ddp.config.train_config import RecipeConfig, TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.nodes import recipe_files
from accel_ddp.nodes.topology import is_local_main
from accel_ddp.text import did_you_mean, nearest
from accel_ddp.words import find_options, group_values, name_of, without

C = TypeVar("C", bound=TrainConfig)
# Values of options that may be given without one. --resume means the newest checkpoint of the output folder.
IMPLIED = {"resume": ["auto"], "profile": ["auto"], "merge_adapters": ["on"]}
MAY_BE_OFF = ("balance", "tuned")  # options with any text, for which `off` is a word


def parse_config(cls: type[C], argv: list[str] | None = None, script: str | None = None) -> C:
    """Return the options of this run. Raise UserError for a mistake; exit after --help. `script` is the recipe in messages."""
    argv = list(sys.argv[1:] if argv is None else argv)
    types, properties = typing.get_type_hints(cls), properties_of(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    if unknown := [name for name, found in properties.items() if found.group not in (*GROUPS, "")]:
        raise ValueError(f"the group of --{unknown[0]} is none of {', '.join(GROUPS)}")
    values: dict[str, Any] = {}
    files, recipe = find_options(argv, ["config"]), _recipe_of(cls)
    for file in files:
        if file.value is None:
            raise UserError("--config needs a file or the name of an example: --config my_run.yaml")
        values |= _read_file(file.value, recipe, types, properties, defaults)
    argv = without(argv, files)
    _check_names(argv, types, properties)
    given = group_values(argv)
    if argv[:1] == ["-h"] or "help" in dict(given):
        _print_help(cls, types, properties, defaults, script or sys.argv[0])
    values |= dict(_read_value(name, words, types, defaults) for name, words in given)
    if missing := [name for name, default in defaults.items() if default is dataclasses.MISSING and name not in values]:
        raise UserError(f"--{missing[0]}: is needed. {properties[missing[0]].help}")
    cfg = cls(**values)
    cfg.validate()
    return cfg


def _print_help(
    cls: type, types: dict[str, Any], properties: dict[str, Properties], defaults: dict[str, Any], script: str
) -> NoReturn:
    """Print all options in the groups of GROUPS, those of the recipe first, and exit. One message per node is enough."""
    import argparse

    examples = _examples_of(_recipe_of(cls))
    description = f"{sys.modules[cls.__module__].__doc__ or ''}\n--config reads options from a YAML file.{examples}"
    parser = argparse.ArgumentParser(
        script, "%(prog)s [-h] [OPTIONS]", description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own = own_options(cls)
    for group, title in GROUPS.items():
        shown = parser.add_argument_group(f"{group} options", title)
        names = [name for name, found in properties.items() if (found.group or "model") == group]
        for name in sorted(names, key=lambda name: name not in own):
            kind, default, words = types[name], defaults[name], [f"--{name}"] + [f"--no_{name}"] * (types[name] is bool)
            default = " ".join(default) if isinstance(default, tuple) else default
            text = properties[name].help + f" (default: {default})" * (default != "")
            options: dict[str, Any] = {"action": "store_true"} if kind is bool else {"metavar": _metavar(kind)}
            options |= {"nargs": "*"} if typing.get_origin(kind) is tuple else {}
            shown.add_argument(*words, help=text.replace("%", "%%"), **options)
    if is_local_main():
        parser.print_help()
    sys.exit(0)


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return f"{{{','.join(_choices(kind))}}}"
    parts = [_metavar(one) for one in typing.get_args(kind) if one is not ...]
    return "|".join(parts) or {str: "TEXT", bool: "{true,false}"}.get(kind) or kind.__name__.upper()


def _recipe_of(cls: type) -> str:
    name = Path(getattr(sys.modules[cls.__module__], "__file__", None) or "").stem
    return name if name in recipe_files.recipe_names() else ""


def _examples_of(recipe: str) -> str:
    """Return " Examples: NAME, ..." with the examples of a recipe, or of all of them for another script."""
    names = [name for name, example in recipe_files.examples().items() if recipe in ("", example.recipe)]
    return f" Examples{f' of {recipe}' if recipe else ''}: {', '.join(names)}." if names else ""


def _read_file(
    path: str, recipe: str, types: dict[str, Any], properties: dict[str, Properties], defaults: dict[str, Any]
) -> dict[str, Any]:
    """Return the options of a config file. Raise one UserError for all lines that have to change."""
    found, problems, empty = dict[str, Any](), [], []
    values = _read_yaml(path, recipe)
    if "recipe" not in properties and (stated := values.pop("recipe", recipe)) != recipe and recipe:
        reason = f"has options of the recipe {stated}, not {recipe}: accel-ddp run {stated} --config {path}"
        raise UserError(f"--config {path}: {reason}")
    for name, value in values.items():
        if name not in properties and value is None:
            empty.append(str(name))
        elif name not in properties:
            problems.append(f"{name}: there is no such option.{_suggest(str(name), properties, value)}")
        else:
            try:
                found[name] = _read_value(name, _as_words(name, value, types[name]), types, defaults)[1]
            except UserError as error:
                problems.append(str(error))
    if empty:
        problems.append(f"{', '.join(empty)}: there is no such option. Leave out what has no value.")
    if len(problems) > 1:
        lines = [text.replace(": there is no such option.", ":", 1) for text in problems]
        todo = f"Run accel-ddp convert {path}, or write" if values.keys() & {"base_model", "model_name_or_path"} else "Write"
        problems = ["\n  ".join([f"{len(lines)} lines have to change. {todo} `name: value` for --name value:", *lines])]
    if problems:
        raise UserError(f"{path}: {problems[0]}")
    return found


def own_options(cls: type) -> set[str]:
    """Return the options that a recipe declares, or a class that it shares with others. `--help` shows them first."""
    bases = [base for base in cls.__mro__ if issubclass(base, TrainConfig) and base.__module__ != TrainConfig.__module__]
    return {name for base in bases for name in inspect.get_annotations(base)}


def _check_names(argv: list[str], types: dict[str, Any], properties: dict[str, Properties]) -> None:
    known = {*properties, *(f"no_{name}" for name, kind in types.items() if _is_switch(kind)), "help"}
    if argv and not argv[0].startswith("-"):
        meant = f" Did you mean --train_file {argv[0]}?" if "train_file" in properties else " See --help for all options."
        raise UserError(f"{argv[0]}: is not an option.{meant}")
    for word in argv:
        name = name_of(word)
        if word.startswith("--") and name not in known:
            raise UserError(f"--{name}: there is no such option.{_suggest(name.removeprefix('no_'), properties)}")


def _read_value(name: str, words: list[str], types: dict[str, Any], defaults: dict[str, Any]) -> tuple[str, Any]:
    """Return an option and its value from the words behind `--name` or `--no_name`. Raise UserError if they do not fit its type."""
    plain = name if name in types else name.removeprefix("no_")
    kind, default, word = types[plain], defaults[plain], words[0].lower() if words else ""
    choices, is_list = _choices(kind), typing.get_origin(kind) is tuple
    if words and plain != name:
        raise UserError(f"--{name} {words[0]}: --{name} takes no value. Use --{name} or --{plain}.")
    if len(words) > 1 and not is_list:  # as in `--report_to wandb tensorboard` of HF Trainer
        meant = f"Use --report_to {','.join(words)}." if name == "report_to" else "Put a value with spaces into quotes."
        raise UserError(f"--{name} {' '.join(words)}: is one value too many. {meant}")
    if _is_switch(kind) and (not words or word in ("true", "false") or (word in ("on", "off") and kind is not bool)):
        return plain, word not in ("false", "off") and name == plain
    if kind is bool:
        raise UserError(f"--{name} {words[0]}: --{name} is a switch and takes no value. Use --{name} or --no_{name}.")
    words = words or [*IMPLIED.get(name, ())]
    if word in ("true", "false") and "on" in choices:
        words = ["on" if word == "true" else "off"]
    example = f" For example: --{name} {default}." if type(default) in (int, float) and default else ""
    if not words and (not is_list or name.endswith("_file")):
        raise UserError(f"--{name}: needs a value{f': {expected}' if (expected := _expected(kind)) else ''}.{example}")
    found = [_convert(one, kind) for one in words]
    for one in [one for one, values in zip(words, found) if not values]:
        if [number for number in _convert(one, float) if number.is_integer()]:  # 1e3, 8.0
            example = f" Use --{name} {int(float(one))}."
        meant = did_you_mean(one.lower(), choices, f"--{name} {{}}")
        raise UserError(f"--{name} {one}: must be {_expected(kind) or kind}.{meant or example}")
    return plain, tuple(values[0] for values in found) if is_list else found[0][0]


def _convert(word: str, kind: Any) -> list[Any]:
    if typing.get_origin(kind) is Literal:
        return [one for one in typing.get_args(kind) if str(one) == word]
    if parts := typing.get_args(kind):
        return [value for one in parts for value in _convert(word, one)][:1]
    with contextlib.suppress(ValueError):
        return [] if kind in (bool, type(None), ...) else [kind(word)]
    return []


def _is_switch(kind: Any) -> bool:
    return kind is bool or bool in typing.get_args(kind)


def _choices(kind: Any) -> list[str]:
    if kind is bool:
        return ["true", "false"]
    if typing.get_origin(kind) is Literal:
        return [str(word) for word in typing.get_args(kind)]
    return [word for one in typing.get_args(kind) for word in _choices(one)]


def _expected(kind: Any) -> str:
    parts, words = (kind, *typing.get_args(kind)), _choices(kind)
    found = ["a whole number"] * (int in parts) + ["a number"] * (float in parts)
    found += [f"one of {', '.join(words)}" if len(words) > 1 else words[0]] if words else []
    return " or ".join(found)


def _suggest(name: str, properties: dict[str, Properties], value: Any = None) -> str:
    """Return " Did you mean --lr (...)?" for a name that is misspelt or that another toolkit uses, perhaps with a value in YAML."""
    spelled = name.lower().replace("-", "_")
    for instead in (text for text, names in INSTEAD.items() if spelled in names.split()):
        if {*re.findall(r"--(\w+)", instead)} <= {*properties, "config_file", "cpu"}:
            return f" {instead[0].upper()}{instead[1:]}."
    for reason in (text for text, names in NO_EQUIVALENT.items() if spelled in names.split() and spelled not in properties):
        return f" It has no equivalent: {reason}."
    if isinstance(value, list) and value and isinstance(value[0], dict) and "path" in value[0]:  # datasets of axolotl
        paths, kind = [str(one.get("path")) for one in value], "eval_file" if "test" in spelled else "train_file"
        is_file = Path(paths[0]).suffix or kind == "eval_file"
        return f" Use --{kind} {' '.join(paths)}." if is_file else f" Use --dataset {paths[0]}."
    meanings = {spelling: known for known, found in properties.items() for spelling in (known, *found.also)}
    if spelled not in meanings:
        if spelled in properties_of(RecipeConfig):
            return " Only recipes for pretrained models, such as classify, have it. See --help for all options of this recipe."
        spelled = nearest(spelled, meanings, cutoff=0.7)
        if not spelled:
            return " See --help for all options."
    known = meanings[spelled]
    return f" Did you mean --{known} ({properties[known].help})?"


def _read_yaml(path: str, recipe: str) -> dict[str, Any]:
    import yaml

    file = recipe_files.options_path(path)
    not_ours = f"--config {path}: describes nodes and processes, not options of a recipe. Use --config_file {path}."
    if not file.is_file() and path in recipe_files.config_names():
        raise UserError(not_ours)
    if not file.is_file():
        near = did_you_mean(path.removesuffix(".yaml"), recipe_files.examples())
        raise UserError(f"--config {path}: there is no such file, and no example of this name.{near}{_examples_of(recipe)}")
    try:
        values = yaml.safe_load(file.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}: {error.problem}" if mark else f": {error}"  # the whole text has eight lines
        raise UserError(f"--config {path}: is not valid YAML{where}.") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: must contain lines of `option: value`, but is a {type(values).__name__}.")
    if values.keys() & {"compute_environment", "distributed_type", "num_machines", "num_processes"}:
        raise UserError(not_ours)
    return values


def _as_words(name: str, value: Any, kind: Any) -> list[str]:
    """Return the value of a line of YAML as words of a command line, so that one function checks both."""
    is_list = typing.get_origin(kind) is tuple
    if kind is bool and not isinstance(value, bool):
        raise UserError(f"{name}: {value!r} must be true or false.")
    if name.endswith("_file") and is_list:
        return _paths(name, value)
    if isinstance(value, dict):
        raise UserError(f"{name}: has nested lines, but takes one value.")
    if isinstance(value, list) and not is_list:
        raise UserError(f"{name}: is a list, but takes one value.")
    if value is None and kind is not str:
        raise UserError(f"{name}: needs a value.")
    if isinstance(value, bool) and kind is not bool:  # YAML reads an unquoted `no`, `on` or `off` as a boolean
        known = ["off"] if name in MAY_BE_OFF else _choices(kind)
        value = next((word for word in (("on", "yes") if value else ("off", "no")) if word in known), value)
    return [*map(str, value)] if isinstance(value, list) else ["" if value is None else str(value)]


def _paths(name: str, value: Any) -> list[str]:
    """Return the paths of a line of YAML: one, or several, each perhaps with a weight: {PATH: 0.7, ...} or [[PATH, 0.7], ...]."""
    given = list(value.items()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    pairs = [next(iter(one.items())) if isinstance(one, dict) and len(one) == 1 else one for one in given]
    words = [f"{one[0]}:{one[1]}" if isinstance(one, tuple | list) and len(one) == 2 else one for one in pairs]
    if other := [one for one in words if not isinstance(one, str | None)]:
        raise UserError(f"{name}: {other[0]!r} is not a path. Write a list of paths, or of [path, weight].")
    return [word or "" for word in words]
