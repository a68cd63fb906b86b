"""The Python API: the public names of `accel_ddp` with their signatures and docstrings, read without importing torch."""

import ast
import re
from functools import cache
from pathlib import Path

import accel_ddp
from reference import notice, table

ROOT = Path(accel_ddp.__file__).parents[1]
# The names that are no modules, in the order in which a reader needs them.
GROUPS = {
    "Run a recipe": (
        "run", "train", "start", "load_model", "fit_and_export", "fit", "Task", "TextTask", "ClassTask", "TokenTask", "ChatTask",
    ),
    "Tasks of single recipes": ("EmbeddingTask", "QueryTask", "RewardTask", "ImageTask", "MaskedTask", "TargetTask"),
    "Options": (
        "TrainConfig", "RecipeConfig", "ScoredConfig", "MinedConfig", "QueryConfig", "ImageConfig", "option", "column", "parse_config",
    ),
    "Data and evaluation": ("TrainBatches", "EvalBatches", "evaluate", "Table"),
    "Ranks and errors": ("together", "UserError"),
    "Your own loop": ("Terms", "prepare", "train_step", "attach", "fit_memory"),
}  # fmt: skip
# Modules with code of single tasks. Their names are listed without types.
TASKS = (
    "chat", "chat_rows", "contrastive", "generation_metrics", "labels", "linear_cross_entropy", "masking", "model_kinds", "negatives",
    "preferences", "ranking", "reference", "row_stream", "tagging", "text_blocks", "vision",
)  # fmt: skip
INTRODUCTION = """The public names of the package `accel_ddp` with their signatures. Read [your own recipe](own_recipe.md) first: it
shows how they fit together.

```python
import accel_ddp
```

A name is imported when it is first used, so `import accel_ddp` does not import torch. Names that are not on this page may change in
any version.
"""


def page() -> str:
    """Return the page of all public names."""
    homes = accel_ddp._HOME
    parts = ["# Python API", notice("signatures and docstrings in `accel_ddp/`"), INTRODUCTION]
    for title, names in GROUPS.items():
        parts += [f"## {title}\n", *(f"### accel_ddp.{name}\n\n{_definition(_find(homes[name], name))}" for name in names)]
    modules = {name: f"{homes[name]}.{name}" for name in sorted(homes) if not any(name in names for names in GROUPS.values())}
    general = [name for name in modules if name not in TASKS]
    parts += ["## Modules\n", "The names that recipes and guides use, by module.\n"]
    rows = [(f"[accel_ddp.{name}](#accel_ddp{name})", _first_sentence(_tree(modules[name]))) for name in general]
    parts.append(table(("module", "content"), rows))
    for name in general:
        found = (_find(modules[name], one) for one in _names(modules[name], name))
        parts += [f"### accel_ddp.{name}\n", *map(_definition, found)]
    parts += ["## Modules of tasks\n", "The recipes use these. Read the recipe first: it shows each name in its place.\n"]
    for name in TASKS:
        found = [_find(modules[name], one) for one in _names(modules[name], name)]
        rows = [(f"`{_call(node)}`", _first_sentence(node)) for node in found]
        parts += [f"### accel_ddp.{name}\n", f"{_first_sentence(_tree(modules[name]))}\n", table(("name", "what it does"), rows)]
    return "\n".join(parts)


def _call(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return a name with its parameters, without types and defaults."""
    made = node
    if isinstance(node, ast.ClassDef):
        made = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    names = [arg.arg for arg in (*made.args.args, *made.args.kwonlyargs) if arg.arg != "self"] if made else []
    return f"{node.name}({', '.join(names)})" if made else node.name


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())


@cache
def _texts() -> str:
    """Return the recipes and the guides, which decide what is public in a module."""
    files = [*(ROOT / "recipes").glob("*.py"), *(page for page in (ROOT / "docs").glob("*.md") if page.name != "api.md")]
    return "\n".join(file.read_text() for file in sorted(files))


@cache
def _methods() -> set[str]:
    """Return the names of methods that recipes and guides call or override."""
    return set(re.findall(r"(?:\.|def )([a-z]\w*)\b", _texts()))


def _names(place: str, module: str) -> list[str]:
    """Return the functions and classes of a public module that recipes and guides use."""
    found = sorted(set(re.findall(rf"accel_ddp\.{module}\.([A-Za-z]\w*)", _texts())))
    return [name for name in found if _find(place, name)]


def _find(module: str, name: str) -> ast.FunctionDef | ast.ClassDef | None:
    """Return the definition of a name, which the module may import from elsewhere. None: it is a constant."""
    for node in _tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return _find(node.module, name)
    return None


def _definition(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the signature and docstring of a function or class, and of the methods that recipes call or override."""
    parts = [_block(_signature(node)), f"{ast.get_docstring(node)}\n"]
    for method in node.body if isinstance(node, ast.ClassDef) else []:
        is_public = isinstance(method, ast.FunctionDef) and (method.name in _methods() or method.name.startswith("on_"))
        if is_public and (text := ast.get_docstring(method)):
            parts += [_block(f"# {node.name}\n{_signature(method, is_method=True)}"), f"{text}\n"]
    return "\n".join(parts)


def _block(code: str) -> str:
    code = re.sub(r"'([^'\"]*)'", r'"\1"', code)  # as in the code
    return f"```python\n{code}\n```\n"


def _signature(node: ast.FunctionDef | ast.ClassDef, is_method: bool = False) -> str:
    """Return a signature as Python code, in one line or one parameter per line."""
    if isinstance(node, ast.ClassDef):
        made = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
        bases = [base for base in map(ast.unparse, node.bases) if base != "NamedTuple"]
        if made:
            return f"{_head(f'class {node.name}', bases)}\n{_function(made, 4)}"
        fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign) and not one.target.id.startswith("_")]
        if node.name.endswith("Config"):  # its options have a page
            return f"class {node.name}: ...  # options: docs/options.md"
        return _head(f"class {node.name}", bases) + ("".join(f"\n    {field}" for field in fields) or " ...")
    decorators = [
        one for one in map(ast.unparse, node.decorator_list) if is_method and one in ("property", "classmethod", "staticmethod")
    ]
    return "".join(f"@{one}\n" for one in decorators) + _function(node, 0)


def _head(text: str, bases: list[str]) -> str:
    return f"{text}({', '.join(bases)}):" if bases else f"{text}:"


def _function(node: ast.FunctionDef, indent: int) -> str:
    parameters, returns = _parameters(node.args), f" -> {ast.unparse(node.returns)}" if node.returns else ""
    space = " " * indent
    line = f"{space}def {node.name}({', '.join(parameters)}){returns}: ..."
    if len(line) > 100:
        lines = "".join(f"\n{space}    {one}," for one in parameters)
        line = f"{space}def {node.name}({lines}\n{space}){returns}: ..."
    return line


def _parameters(given: ast.arguments) -> list[str]:
    """Return each parameter with its annotation and default."""
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + given.defaults
    one = lambda arg, default: (
        ast.unparse(arg) + ("" if default is None else f"{' = ' if arg.annotation else '='}{ast.unparse(default)}")
    )
    parts = [one(arg, default) for arg, default in zip(plain, defaults)]
    if given.vararg or given.kwonlyargs:
        parts.append(f"*{ast.unparse(given.vararg) if given.vararg else ''}")
    parts += [one(arg, default) for arg, default in zip(given.kwonlyargs, given.kw_defaults)]
    return parts + ([f"**{ast.unparse(given.kwarg)}"] if given.kwarg else [])


def _first_sentence(node: ast.AST) -> str:
    return re.split(r"(?<=[^.]\.)\s", " ".join((ast.get_docstring(node) or "").split()))[0]
