"""Who may import whom. A new arrow is a design decision, so it is made here first."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "accel_ddp"
RECIPES = Path(__file__).parents[1] / "recipes"

ALLOWED = {
    "seeds": set(),
    "errors": set(),
    "config": {"doctor", "runtime"},  # inside `run`, after the options have been parsed
    "world": {"config", "doctor", "seeds"},
    "snapshot": {"config"},
    "state": {"config"},
    "stop": {"config", "world"},
    "runtime": {"config", "doctor", "seeds", "world", "stop", "snapshot", "checkpoint"},
    "embedded": {"config", "seeds", "state"},
    "data": {"config", "embedded", "seeds", "world"},
    "chat": {"config", "data", "world"},
    "contrast": {"data"},
    "tagging": {"config", "data", "world"},
    "textscores": {"config", "world"},
    "mini_resnet": set(),
    "vision": {"config", "data", "labels", "mini_resnet", "models", "world"},
    "masking": {"config", "data", "models", "seeds", "world"},
    "stream": {"config", "seeds", "stop"},
    "optim": {"config"},
    "labels": {"config"},
    "losses": set(),
    "models": {"config", "data", "embedded", "seeds", "world"},
    "export": {"checkpoint", "config", "data", "snapshot", "state", "vision", "world"},
    "verify": {"config", "snapshot"},
    "recipe_files": set(),
    "cli": {"config", "doctor", "export", "recipe_files", "tune", "verify"},
    "packing": set(),
    "replay": set(),
    "graphs": {"replay", "world"},
    "heads": {"losses", "packing"},
    "packed": {"packing"},
    "flops": {"config", "packed"},
    "fast": {"config", "flops", "graphs", "heads", "packed", "packing", "seeds", "stream", "update", "world"},
    "fitting": {"config", "fast", "graphs", "stream", "update", "world"},
    "update": {"config", "packing", "seeds"},
    "metrics": {"config", "packing", "stream", "stop", "world"},
    "checkpoint": {"config", "snapshot", "state", "world"},
    "hooks": {"checkpoint", "config", "stop", "update"},
    "loop": {"config", "world", "stop", "stream", "optim", "update", "checkpoint", "hooks", "seeds", "fast", "fitting", "flops"},
}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "accel_ddp":
            names |= {alias.name for alias in node.names} - {"__version__"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accel_ddp."):
            names.add(node.module.split(".")[1])
    return names - {"errors"}


def test_modules_import_only_what_is_below_them():
    found = {path.stem: imported(path) for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert found.keys() == ALLOWED.keys()
    for module, uses in found.items():
        assert uses <= ALLOWED[module], f"accel_ddp.{module} may not import {uses - ALLOWED[module]}"


def test_the_doctor_stands_alone():
    """It examines clusters of other trainers too, and must not wait for torch."""
    for path in (PACKAGE / "doctor").glob("*.py"):
        assert imported(path) <= {"config", "doctor"}, path
    names = sorted(path.stem for path in (PACKAGE / "doctor").glob("*.py") if path.stem not in ("__main__", "__init__"))
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(f'accel_ddp.doctor.{{name}}')\n"
        "assert not {'torch', 'accelerate', 'transformers', 'numpy', 'tyro'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=RECIPES.parent)


def test_tune_waits_for_torch_only_in_its_ranks():
    """Its parents use the doctor and hear within milliseconds who is gone."""
    for path in (PACKAGE / "tune").glob("*.py"):
        models = {"models", "vision"} if path.stem == "shapes" else set()
        assert imported(path) <= {"config", "doctor", "tune"} | models, path
    code = (
        "import sys, accel_ddp.tune.command, accel_ddp.tune.rank, accel_ddp.tune.shapes\n"
        "assert not {'torch', 'accelerate', 'transformers', 'numpy', 'tyro'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=RECIPES.parent)


def test_recipes_do_not_import_each_other():
    recipes = {path.stem for path in RECIPES.glob("*.py")}
    for path in RECIPES.glob("*.py"):
        modules = {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        allowed = {"classify"} if path.stem == "own_loop" else set()  # classify with the loop written out
        assert not (modules & recipes) - allowed


def test_only_update_touches_gradients():
    for path in [*PACKAGE.glob("*.py"), *RECIPES.glob("*.py")]:
        if path.stem != "update":
            for word in (".backward(", "no_sync", "clip_grad", "zero_grad", ".step()"):
                assert word not in path.read_text(), f"{word} in {path.name}"


def test_options_are_parsed_without_torch():
    code = (
        "import importlib, sys; sys.argv = ['recipe.py']; sys.path.insert(0, 'recipes')\n"
        "from accel_ddp.config import parse_config\n"
        f"for name in {sorted(path.stem for path in RECIPES.glob('*.py'))}: parse_config(importlib.import_module(name).Config)\n"
        "assert not {'torch', 'accelerate', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=RECIPES.parent)
