"""Which package may import which. A new arrow is a design decision, so it is made here first."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "accel_ddp"
RECIPES = ROOT / "recipes"

# Each package and module at the top of accel_ddp/, from the lowest to the highest, and what it may import.
LOWEST = ["errors", "seeds", "environment", "net", "options", "config", "parsing"]
ALLOWED = {
    "errors": [],
    "seeds": [],
    "environment": ["errors"],
    "net": ["errors"],
    "options": ["errors"],
    "config": ["errors", "options"],
    "parsing": ["errors", "environment", "options", "config"],
    "doctor": LOWEST,
    "tune": [*LOWEST, "doctor"],
    "ranks": LOWEST,
    "saving": [*LOWEST, "ranks"],
    "training": [*LOWEST, "ranks", "saving"],
    "speed": [*LOWEST, "ranks", "saving", "training"],
    "sources": [*LOWEST, "ranks", "saving", "training"],
    "tasks": [*LOWEST, "ranks", "saving", "training", "sources"],
    "accelerator": [*LOWEST, "ranks", "saving"],
    "export": [*LOWEST, "ranks", "saving", "sources", "tasks"],
    "loop": [*LOWEST, "ranks", "saving", "training", "speed"],
    "recipe": [*LOWEST, "training", "accelerator", "export", "loop"],
    "entry": [*LOWEST, "doctor", "ranks"],
    "verify": [*LOWEST, "saving"],
    "recipe_files": ["errors"],
    "cli": ["errors", "recipe_files", "doctor", "tune", "export", "verify"],
}


def modules() -> dict[str, Path]:
    """All modules of the package by their dotted name below accel_ddp, at any depth."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    del found["__init__"]  # the public names, which are imported lazily; only recipes use them
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules that a file imports, anywhere in it: also inside functions and for type checkers only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] != "accel_ddp" or name == "accel_ddp.__version__":
                continue
            inner = name.removeprefix("accel_ddp").removeprefix(".")
            while inner and inner not in known:
                inner = inner.rpartition(".")[0]
            found.add(inner or "the public names")
    return found


GRAPH = {name: imports(path, modules()) for name, path in modules().items()}


def test_every_package_imports_only_what_is_below_it():
    tops = {name.split(".")[0] for name in GRAPH}
    assert tops == ALLOWED.keys(), "each package and module at the top needs its place in ALLOWED"
    for number, (top, allowed) in enumerate(ALLOWED.items()):
        assert set(allowed) <= set(list(ALLOWED)[:number]), f"ALLOWED is not in order at {top}"
    wrong = [
        f"accel_ddp.{name} imports {used}"
        for name, uses in GRAPH.items()
        for used in uses
        if used.split(".")[0] not in [name.split(".")[0], *ALLOWED[name.split(".")[0]]]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"a cycle: {' -> '.join([*above[above.index(name) :], name])}"
        if name not in done:
            for used in GRAPH.get(name, ()):
                if used != name:
                    visit(used, (*above, name))
            done.add(name)

    for name in GRAPH:
        visit(name, ())


def test_every_package_says_what_it_contains_and_what_it_may_import():
    for folder in [path for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]:
        tree = ast.parse((folder / "__init__.py").read_text())
        assert "import" in (ast.get_docstring(tree) or ""), f"{folder.name}/__init__.py does not say what it may import"
        assert len(tree.body) == 1, f"{folder.name}/__init__.py contains more than its docstring"


def test_no_module_has_mutable_globals():
    """Constants are upper case, and caches are made by functools. One object holds the state of this process as a rank."""
    for name, path in modules().items():
        tree = ast.parse(path.read_text())
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), f"{name} has a `global` statement"
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            for target in targets:
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    text = ast.unparse(node.value) if node.value else ""
                    is_constant = one.id.lstrip("_").isupper() or one.id[:1].isupper() or one.id.lstrip("_")[:1].isupper()
                    is_known = text.startswith(("logging.getLogger(", "ContextVar(")) or text == "Process()"
                    assert is_constant or is_known, f"{name}.{one.id} is a global variable"


def test_the_doctor_and_tune_start_without_torch():
    """The doctor examines clusters of other trainers too; neither waits for torch outside of the processes that need it."""
    names = [
        name for name in GRAPH if name.split(".")[0] in ("doctor", "tune", "environment", "net") and not name.endswith("__main__")
    ]
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(f'accel_ddp.{{name}}')\n"
        "assert not {'torch', 'accelerate', 'transformers', 'numpy', 'tyro'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_recipes_do_not_import_each_other():
    recipes = {path.stem for path in RECIPES.glob("*.py")}
    for path in RECIPES.glob("*.py"):
        used = {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        allowed = {"classify"} if path.stem == "own_loop" else set()  # it is classify with the loop written out
        assert not (used & recipes) - allowed


def test_only_update_touches_gradients():
    """The doctor and tune time torch's own DDP in processes of their own; they train nothing."""
    training = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("doctor", "tune")]
    for path in [*training, *RECIPES.glob("*.py")]:
        if path.name != "update.py":
            for word in (".backward(", "no_sync", "clip_grad_norm_(", "zero_grad(", ".step()"):
                assert word not in path.read_text(), f"{word} in {path.name}"


@pytest.mark.parametrize("name", ["update", "evaluation", "current_batch"])
def test_the_core_does_not_depend_on_the_speed_package(name):
    todo, seen = {f"training.{name}"}, set()
    while todo:
        module = todo.pop()
        seen.add(module)
        todo |= GRAPH.get(module, set()) - seen
    assert not [module for module in seen if module.startswith("speed")]


def test_options_are_parsed_without_torch():
    code = (
        "import importlib, sys; sys.argv = ['recipe.py']; sys.path.insert(0, 'recipes')\n"
        "from accel_ddp.parsing import parse_config\n"
        f"for name in {sorted(path.stem for path in RECIPES.glob('*.py'))}: parse_config(importlib.import_module(name).Config)\n"
        "assert not {'torch', 'accelerate', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
