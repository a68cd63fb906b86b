"""The places of the recipes, their examples and the accelerate configs, in the repository and in an installed wheel.

In the repository they are folders beside `accel_ddp/`. The wheel contains them as folders inside the package (see
`[tool.hatch.build.targets.wheel]` in pyproject.toml). This module uses the standard library only, so listing the
recipes does not wait for torch.
"""

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from accel_ddp.errors import UserError
from accel_ddp.text import did_you_mean
from accel_ddp.words import find_options, script_at, without

_PACKAGE = Path(__file__).parents[1]
_OF_RECIPES = "recipe|model|dataset|train_file|output_dir|lr|epochs|steps|global_batch_size"  # names in no accelerate config


def folder(name: str) -> Path:
    # The wheel's folder comes first: beside an installed package there may be a folder of the same name that is not ours.
    for path in (_PACKAGE / name, _PACKAGE.parent / name):
        if path.is_dir():
            return path
    raise UserError(f"{_PACKAGE / name} does not exist: this installation of accel_ddp is incomplete. Install accel_ddp again.")


def recipe_names() -> list[str]:
    return sorted(path.stem for path in folder("recipes").glob("*.py"))


def recipe_path(word: str) -> Path:
    if word.endswith(".py"):
        if Path(word).is_file():
            return Path(word)
        name = Path(word).stem
        hint = f"To run the recipe that comes with accel_ddp, use `{name}`." if name in recipe_names() else "Check the path."
        raise UserError(f"{word}: there is no such file. {hint}")
    if word not in recipe_names():
        near = did_you_mean(word, [*recipe_names(), *examples()], "{!r}")
        raise UserError(f"{word!r} is not a recipe.{near} The recipes are: {', '.join(recipe_names())}.")
    return folder("recipes") / f"{word}.py"


class Example(NamedTuple):
    path: Path
    recipe: str
    summary: str
    facts: dict[str, str]  # "Data", "Hardware", "Memory" and "Run"


def examples() -> dict[str, Example]:
    """Return the examples by their names, those of a recipe together."""
    found = {path.stem: _read_example(path) for path in sorted(folder("recipes").glob("examples/*.yaml"))}
    return dict(sorted(found.items(), key=lambda one: recipe_names().index(one[1].recipe)))


def _read_example(path: Path) -> Example:
    head, _, lines = path.read_text(encoding="utf-8").partition("\nrecipe: ")
    facts = dict(re.findall(r"^# (\w+): +(.*(?:\n#  .*)*)", head, flags=re.MULTILINE))
    facts = {name: re.sub(r"\n# +", " ", text) for name, text in facts.items()}
    return Example(path, lines.split(maxsplit=1)[0], head.partition("\n")[0].removeprefix("# "), facts)


def options_path(word: str) -> Path:
    """Return the file of `--config`, which may not exist. `word` is a path, or the name of an example. A file wins."""
    for path in (Path(word), Path(f"{word}.yaml")):
        if path.is_file():
            return path
    example = examples().get(word.removesuffix(".yaml"))
    return example.path if example else Path(word)


def place_example(words: Sequence[str]) -> list[str]:
    """Return the words of a command with `--config` behind the recipe, and with `sft --config NAME` for the example NAME alone."""
    known, at = examples(), script_at(words, recipe_names())
    place = script_at(words[:at], known)
    follows_option = place > 0 and words[place - 1].startswith("-")  # it may be the value of another option
    if place < at and known.get(words[place]) and (at == len(words) or not follows_option):
        before = words[: place - (words[place - 1 : place] == ["--config"])]
        return [*before, known[words[place]].recipe, "--config", *words[place:]]
    moved = find_options(words[:at], ["config"])
    given = [word for option in moved for word in words[option.at : option.end]]
    return [*without(words[:at], moved), *words[at : at + 1], *given, *words[at + 1 :]]


def config_path(word: str) -> Path:
    path, ours = Path(word), f"--config_file {word}: has options of a recipe, not of `accelerate launch`. Use --config {word}."
    if path.is_file():
        if re.search(rf"^({_OF_RECIPES}) *:", path.read_text(errors="replace"), flags=re.MULTILINE):
            raise UserError(ours)
        return path
    names = config_names()
    for name in (word, f"{word}.yaml"):
        if name in names:
            return folder("accelerate_configs") / name
    if options_path(word).is_file():
        raise UserError(ours)
    raise UserError(f"--config_file {word}: there is no such file. These come with accel_ddp: {', '.join(names)}.")


def config_names() -> list[str]:
    return sorted(path.name for path in folder("accelerate_configs").glob("*.yaml"))


def summary(recipe: Path) -> str:
    docstring = ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def imported_recipes(recipe: Path) -> list[Path]:
    tree = ast.parse(recipe.read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return [path for path in sorted(recipe.parent.glob("*.py")) if path.stem in modules]
