"""The places of the recipes and the accelerate configs, in the repository and in an installed wheel.

In the repository both are folders beside `accel_ddp/`. The wheel contains them as folders inside the package (see
`[tool.hatch.build.targets.wheel]` in pyproject.toml). This module uses the standard library only, so listing the
recipes does not wait for torch.
"""

import ast
from pathlib import Path

from accel_ddp.errors import UserError
from accel_ddp.text import did_you_mean

_PACKAGE = Path(__file__).parents[1]
LOSSES, PREFERENCES = ("kto", "orpo", "ipo", "simpo"), ("cpo", "prefer", "preferences", "rlhf")  # words for the recipe dpo


def folder(name: str) -> Path:
    """Return the folder "recipes" or "accelerate_configs" that comes with accel_ddp."""
    # The wheel's folder comes first: beside an installed package there may be a folder of the same name that is not ours.
    for path in (_PACKAGE / name, _PACKAGE.parent / name):
        if path.is_dir():
            return path
    raise UserError(f"{_PACKAGE / name} does not exist: this installation of accel_ddp is incomplete. Install accel_ddp again.")


def recipe_names() -> list[str]:
    """Return the names of the recipes, without `.py`, in alphabetical order."""
    return sorted(path.stem for path in folder("recipes").glob("*.py"))


def recipe_path(word: str) -> Path:
    """Return the file of a recipe. `word` is the name of a recipe that comes with accel_ddp, or the path of a script."""
    if word.endswith(".py"):
        if Path(word).is_file():
            return Path(word)
        name = Path(word).stem
        hint = f"To run the recipe that comes with accel_ddp, use `{name}`." if name in recipe_names() else "Check the path."
        raise UserError(f"{word}: there is no such file. {hint}")
    if word in (*LOSSES, *PREFERENCES) and word not in recipe_names():
        raise UserError(
            f"{word!r} is not a recipe. Preferences are learned by `accel-ddp run dpo{f' --loss {word}' if word in LOSSES else ''}`."
        )
    if word not in recipe_names():
        raise UserError(
            f"{word!r} is not a recipe.{did_you_mean(word, recipe_names(), '{!r}')} The recipes are: {', '.join(recipe_names())}."
        )
    return folder("recipes") / f"{word}.py"


def config_path(word: str) -> Path:
    """Return the file of an accelerate config. `word` is a path, or the name of a config that comes with accel_ddp."""
    if Path(word).is_file():
        return Path(word)
    names = sorted(path.name for path in folder("accelerate_configs").glob("*.yaml"))
    for name in (word, f"{word}.yaml"):
        if name in names:
            return folder("accelerate_configs") / name
    raise UserError(f"--config_file {word}: there is no such file. These come with accel_ddp: {', '.join(names)}.")


def summary(recipe: Path) -> str:
    """Return the first line of the docstring. The file is parsed and not imported."""
    docstring = ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def imported_recipes(recipe: Path) -> list[Path]:
    """Return the recipes in the same folder that `recipe` imports: own_loop.py imports classify.py."""
    tree = ast.parse(recipe.read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return [path for path in sorted(recipe.parent.glob("*.py")) if path.stem in modules]
