"""The reader of a run's options: defaults, then `--config` (a YAML file or an example), then the command line. A later value wins.

This module needs the standard library, yaml and tyro only, so a mistyped option is reported before torch is imported.
"""

import contextlib
import dataclasses
import inspect
import io
import re
import sys
import typing
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar

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
IMPLIED = {"resume": "auto", "profile": "auto", "merge_adapters": "on"}
MAY_BE_OFF = ("balance", "tuned")  # options with any text, for which `off` is a word


def parse_config(cls: type[C], argv: list[str] | None = None, script: str | None = None) -> C:
    """Return the options of this run, from `argv` or the command line. Raise UserError or exit with code 2 for a mistake.

    `script` is the recipe that messages name, if another program reads its options.
    """
    import tyro

    argv = list(sys.argv[1:] if argv is None else argv)
    types, properties = typing.get_type_hints(cls), properties_of(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    arguments: list[str] = []
    files, recipe = find_options(argv, ["config"]), _recipe_of(cls)
    for file in files:
        if file.value is None:
            raise UserError("--config needs a file or the name of an example: --config my_run.yaml")
        arguments += _read_file(file.value, recipe, types, properties, defaults)
    argv = without(argv, files)
    _check_names(argv, types, properties)
    given = _normalize(argv, types)
    _check_values(given, types, defaults)
    arguments += given

    description = f"{sys.modules[cls.__module__].__doc__ or ''}\n--config reads options from a YAML file.{_examples_of(recipe)}"
    # Every rank parses the same words, and one message per node is enough. tyro prints errors even without `console_outputs`.
    show = is_local_main()
    with contextlib.nullcontext() if show else contextlib.redirect_stderr(io.StringIO()):
        groups = tyro.cli(
            _grouped(cls, types, properties), prog=script, args=arguments, description=description, use_underscores=True,
            console_outputs=show, config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
        )  # fmt: skip
    values = {field.name: getattr(group, field.name) for group in vars(groups).values() for field in dataclasses.fields(group)}
    cfg = cls(**values)
    cfg.validate()
    return cfg


def _recipe_of(cls: type) -> str:
    """Return the name of the recipe that declares a config class, or "" for another script."""
    name = Path(getattr(sys.modules[cls.__module__], "__file__", None) or "").stem
    return name if name in recipe_files.recipe_names() else ""


def _examples_of(recipe: str) -> str:
    """Return " Examples: NAME, ..." with the examples of a recipe, or of all of them for another script."""
    names = [name for name, example in recipe_files.examples().items() if recipe in ("", example.recipe)]
    return f" Examples{f' of {recipe}' if recipe else ''}: {', '.join(names)}." if names else ""


def _read_file(
    path: str, recipe: str, types: dict[str, Any], properties: dict[str, Properties], defaults: dict[str, Any]
) -> list[str]:
    """Return the lines of a config file as words of a command line. Raise one UserError for all lines that have to change."""
    arguments, problems, empty = [], [], []
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
                words = _normalize(_as_arguments(name, value, types[name]), types)
                _check_values(words, types, defaults)
                arguments += words
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
    return arguments


def own_options(cls: type) -> set[str]:
    """Return the options that a recipe declares, or a class that it shares with others. `--help` shows them first."""
    bases = [base for base in cls.__mro__ if issubclass(base, TrainConfig) and base.__module__ != TrainConfig.__module__]
    return {name for base in bases for name in inspect.get_annotations(base)}


def _grouped(cls: type[C], types: dict[str, Any], properties: dict[str, Properties]) -> type:
    """Return a dataclass with one nested dataclass per group of options, from which tyro makes the groups of `--help`."""
    import tyro

    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    groups, own = [], own_options(cls)
    if unknown := [name for name, found in properties.items() if found.group not in (*GROUPS, "")]:
        raise ValueError(f"the group of --{unknown[0]} is none of {', '.join(GROUPS)}")
    for group, title in GROUPS.items():
        names = [name for name in properties if (properties[name].group or "model") == group]
        names.sort(key=lambda name: name not in own)
        fields = [
            (name, Annotated[types[name], tyro.conf.arg(help=properties[name].help)], dataclasses.field(default=defaults[name]))
            for name in names
        ]
        if fields:
            made = dataclasses.make_dataclass(group.replace("-", "_"), fields, kw_only=True)
            made.__doc__ = title
            groups.append((group.replace("-", "_"), made, dataclasses.field(default_factory=made)))
    return dataclasses.make_dataclass("Options", groups, kw_only=True)


def _check_names(argv: list[str], types: dict[str, Any], properties: dict[str, Properties]) -> None:
    """Raise UserError for an option that does not exist, with the name of the one that was probably meant."""
    known = {*properties, *(f"no_{name}" for name, kind in types.items() if _is_switch(kind)), "help"}
    if argv and not argv[0].startswith("-"):
        meant = f" Did you mean --train_file {argv[0]}?" if "train_file" in properties else " See --help for all options."
        raise UserError(f"{argv[0]}: is not an option.{meant}")
    for word in argv:
        name = name_of(word)
        if word.startswith("--") and name not in known:
            raise UserError(f"--{name}: there is no such option.{_suggest(name.removeprefix('no_'), properties)}")


def _check_values(arguments: list[str], types: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise UserError for an option without a value, with one too many, or with one that is not of the option's type."""
    for name, values in group_values(arguments):
        kind, default = types.get(name, bool), defaults.get(name)  # --help and --no_... are switches
        example = f" For example: --{name} {default}." if type(default) in (int, float) and default else ""
        if not values and kind is not bool and (typing.get_origin(kind) is not tuple or name.endswith("_file")):
            raise UserError(f"--{name}: needs a value{f': {expected}' if (expected := _expected(kind)) else ''}.{example}")
        if len(values) > 1 and typing.get_origin(kind) is not tuple:  # as in `--report_to wandb tensorboard` of HF Trainer
            meant = f"Use --report_to {','.join(values)}." if name == "report_to" else "Put a value with spaces into quotes."
            raise UserError(f"--{name} {' '.join(values)}: is one value too many. {meant}")
        for value in (one for one in values if not _is_valid(one, kind)):
            if _is_valid(value, float) and float(value).is_integer():  # 1e3, 8.0
                example = f" Use --{name} {int(float(value))}."
            elif meant := did_you_mean(value.lower(), _choices(kind), f"--{name} {{}}"):
                example = meant
            raise UserError(f"--{name} {value}: must be {_expected(kind)}.{example}")


def _is_valid(value: str, kind: Any) -> bool:
    if kind is bool:
        return value in ("True", "False")
    if kind in (int, float):
        with contextlib.suppress(ValueError):
            kind(value)
            return True
        return False
    if typing.get_origin(kind) is Literal:
        return value in _choices(kind)
    if typing.get_origin(kind) in (tuple, typing.Union, UnionType):
        return any(_is_valid(value, one) for one in typing.get_args(kind) if one is not ...)
    return True  # a text, or what only tyro knows


def _is_switch(kind: Any) -> bool:
    """Return whether an option needs no value: a bool, or one that may be `auto`."""
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


def _as_arguments(name: str, value: Any, kind: Any) -> list[str]:
    """Return a line of YAML as words of a command line, so that one parser checks both."""
    if kind is bool:
        if not isinstance(value, bool):
            raise UserError(f"{name}: {value!r} must be true or false.")
        return [f"--{name}" if value else f"--no_{name}"]
    if name.endswith("_file") and typing.get_origin(kind) is tuple:
        return [f"--{name}", *_paths(name, value)]
    if isinstance(value, dict):
        raise UserError(f"{name}: has nested lines, but takes one value.")
    if isinstance(value, list):
        if typing.get_origin(kind) is not tuple:
            raise UserError(f"{name}: is a list, but takes one value.")
        return [f"--{name}", *map(str, value)]
    if value is None and kind is not str:
        raise UserError(f"{name}: needs a value.")
    if isinstance(value, bool):  # YAML reads an unquoted `no`, `on` or `off` as a boolean
        known = ["off"] if name in MAY_BE_OFF else _choices(kind)
        value = next((word for word in (("on", "yes") if value else ("off", "no")) if word in known), value)
    return [f"--{name}", "" if value is None else str(value)]


def _paths(name: str, value: Any) -> list[str]:
    """Return the paths of a line of YAML: one, or several, each perhaps with a weight: {PATH: 0.7, ...} or [[PATH, 0.7], ...]."""
    given = list(value.items()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    pairs = [next(iter(one.items())) if isinstance(one, dict) and len(one) == 1 else one for one in given]
    words = [f"{one[0]}:{one[1]}" if isinstance(one, tuple | list) and len(one) == 2 else one for one in pairs]
    if other := [one for one in words if not isinstance(one, str | None)]:
        raise UserError(f"{name}: {other[0]!r} is not a path. Write a list of paths, or of [path, weight].")
    return [word or "" for word in words]


def _normalize(argv: list[str], types: dict[str, Any]) -> list[str]:
    """Return the words as tyro accepts them: `--resume auto` for `--resume`, `--no_tf32` for `--tf32 false`, `on` for `true`."""
    words = ["--help"] if argv[:1] == ["-h"] else []
    for name, values in group_values(argv):
        kind, word = types.get(name), values[0].lower() if values else ""
        plain = name.removeprefix("no_")
        if values and plain != name and name not in types:
            raise UserError(f"--{name} {values[0]}: --{name} takes no value. Use --{name} or --{plain}.")
        if bool in typing.get_args(types.get(plain)) and (not values or word in ("true", "false", "on", "off")):
            words += [f"--{plain}", str(word not in ("false", "off") and name == plain), *values[1:]]
            continue
        if kind is bool and values:
            if word not in ("true", "false"):
                raise UserError(f"--{name} {values[0]}: --{name} is a switch and takes no value. Use --{name} or --no_{name}.")
            words += [f"--{name}" if word == "true" else f"--no_{name}", *values[1:]]
        elif word in ("true", "false") and "on" in _choices(kind):
            words += [f"--{name}", "on" if word == "true" else "off", *values[1:]]
        elif len(values) == 1 and word.startswith("-"):
            words.append(f"--{name}={values[0]}")
        else:
            words += [f"--{name}", *(values or ([IMPLIED[name]] if name in IMPLIED else []))]
    return words
