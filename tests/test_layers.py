"""Which package may import which. A new arrow is a design decision, so it is made here first."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "accel_ddp"
RECIPES = ROOT / "recipes"

# The packages and the modules at the top of accel_ddp/, from the lowest to the highest. Each may import only those before it.
ORDER = [
    "errors", "seeds", "text", "words", "compat", "nodes", "config", "records", "phases", "watch", "doctor", "ranks", "saving",
    "report", "launch", "measure", "verify", "engine", "training", "speed", "sources", "tasks", "memory", "observe", "exporting",
    "accelerator", "assembly", "recipe", "entry", "cli",
]  # fmt: skip


def modules() -> dict[str, Path]:
    """All modules of the package by their dotted name below accel_ddp, at any depth."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    del found["__init__"]  # the public names, which are imported lazily; only recipes use them
    return found


def imports(path: Path, known: dict[str, Path], at_run_time: bool = False) -> set[str]:
    """The modules that a file imports, anywhere in it: also inside functions and, without `at_run_time`, for type checkers only."""
    found, tree = set(), ast.parse(path.read_text())
    if at_run_time:
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))]
    for node in ast.walk(tree):
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


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Return the modules that each module imports. Reading them takes seconds, which only one worker needs to spend."""
    known = modules()
    return {name: imports(path, known) for name, path in known.items()}


def test_every_package_imports_only_what_is_below_it(graph):
    assert {name.split(".")[0] for name in graph} == set(ORDER), "each package and module at the top needs its place in ORDER"
    wrong = [
        f"accel_ddp.{name} imports {used}"
        for name, uses in graph.items()
        for used in uses
        if ORDER.index(used.split(".")[0]) > ORDER.index(name.split(".")[0])
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_few_packages_few_modules_at_the_top_and_no_file_name_twice():
    packages = [path.parent.name for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    assert len(packages) <= 18
    assert len(list(PACKAGE.glob("*.py"))) <= 14
    names = [path.name for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    assert not {name for name in names if names.count(name) > 1}
    assert not {name.removesuffix(".py") for name in names} & set(packages), "a module and a package have the same name"


def test_no_modules_import_each_other_in_a_circle(graph):
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"a cycle: {' -> '.join([*above[above.index(name) :], name])}"
        if name not in done:
            for used in graph.get(name, ()):
                if used != name:
                    visit(used, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_every_package_says_what_it_contains_and_what_it_may_import():
    for folder in [path for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]:
        tree = ast.parse((folder / "__init__.py").read_text())
        assert "import" in (ast.get_docstring(tree) or ""), f"{folder.name}/__init__.py does not say what it may import"
        assert len(tree.body) == 1, f"{folder.name}/__init__.py contains more than its docstring"


def test_no_module_has_mutable_globals():
    """Constants are upper case, and caches are made by functools. Three objects hold the state of this process as a rank."""
    for name, path in modules().items():
        tree = ast.parse(path.read_text())
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), f"{name} has a `global` statement"
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            for target in targets:
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    text = ast.unparse(node.value) if node.value else ""
                    is_constant = one.id.lstrip("_").isupper() or one.id[:1].isupper() or one.id.lstrip("_")[:1].isupper()
                    is_known = text.startswith(("logging.getLogger(", "ContextVar(", "(HERE.")) or (
                        name == "ranks.process" and text in ("RankPlace.read()", "Connections(this_rank)", "Ending()")
                    )
                    assert is_constant or is_known, f"{name}.{one.id} is a global variable"


def test_the_doctor_tune_and_launch_start_without_torch(graph):
    """The doctor examines clusters of other trainers too; neither waits for torch outside of the processes that need it."""
    names = [
        name
        for name in graph
        if name.split(".")[0] in ("doctor", "measure", "launch", "nodes", "watch", "phases", "records")
        and not name.endswith("__main__")
    ]
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(f'accel_ddp.{{name}}')\n"
        "assert not {'torch', 'accelerate', 'transformers', 'numpy'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_recipes_do_not_import_each_other():
    recipes = {path.stem for path in RECIPES.glob("*.py")}
    for path in RECIPES.glob("*.py"):
        used = {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        allowed = {"classify"} if path.stem == "own_loop" else set()  # it is classify with the loop written out
        assert not (used & recipes) - allowed


def writes_gradients(code: str) -> list[str]:
    """Return the expressions in `code` that write `.grad`, start a backward pass into it, clip, or do an optimizer step."""
    called = ("backward", "step")  # as attributes without a call, these are names of other things too
    named = ("zero_grad", "no_sync", "unscale_", "unscale_gradients")

    def is_in_grad(node: ast.AST) -> bool:  # p.grad, p.grad.data, p.grad[0]
        while isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Attribute) and node.attr == "grad" and ast.unparse(node) != "torch.autograd.grad":
                return True
            node = node.value
        return False

    def name_of(node: ast.AST) -> str:
        return getattr(node, "attr", "") or getattr(node, "id", "") or getattr(node, "name", "")

    found = []
    for node in ast.walk(ast.parse(code)):
        is_written = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del) and is_in_grad(node)
        if isinstance(node, ast.Call):
            is_in_place = isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_") and is_in_grad(node.func.value)
            is_set = name_of(node.func) == "setattr" and ast.unparse(node.args[1]) == "'grad'"
            is_written = is_in_place or is_set or name_of(node.func) in called
        elif isinstance(node, ast.Attribute | ast.Name | ast.alias):
            is_written = is_written or name_of(node) in named or name_of(node).startswith("clip_grad")
        if is_written:
            found.append(ast.unparse(node))
    return found


def test_in_a_run_only_the_step_writes_gradients_clips_and_steps():
    """Other modules may compute derivatives with `torch.autograd.grad`, which writes no `.grad`.

    The doctor and tune measure torch's own DDP in processes of their own. They train nothing. Three optimizers use others. FSDP's
    gradients of whole weights, which are not those of the shards, are added up in `compat`.
    """
    own = [PACKAGE / "engine" / f"{name}.py" for name in ("step", "ddp", "scaler", "rehearsal")]
    inner = {"optim": ["self._adamw(others).step()", "super().step()", "super().step()"], "compat": ["whole.grad"]}
    paths = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("doctor", "measure")]
    for path in [*paths, *RECIPES.glob("*.py")]:
        assert path in own or writes_gradients(path.read_text()) == inner.get(path.stem, []), path
    kinds = ("backward(", "clip_grads_with_norm_", "stepper.step()", "stepper.zero_grad", "parameter.grad")
    found = [one for path in own for one in writes_gradients(path.read_text())]
    assert [kind for kind in kinds if not any(kind in one for one in found)] == []


@pytest.mark.parametrize(
    "code",
    [
        "p.grad = None", "p.grad += g", "a, p.grad = b", "del p.grad", "p.grad[0] = 1", "p.grad.data = g", "p.grad.mul_(2)",
        "p.grad[0].zero_()", "setattr(p, 'grad', g)", "loss.backward()", "torch.autograd.backward([loss])", "model.zero_grad()",
        "accelerator.backward(loss)", "optimizer.step()", "scaler.step(optimizer)", "scaler.unscale_(optimizer)",
        "nn.utils.clip_grad_norm_(p, 1)", "from torch.nn.utils import clip_grad_value_", "clear = model.zero_grad",
        "for p.grad in g: pass",
    ],
)  # fmt: skip
def test_every_way_to_write_gradients_is_found(code):
    assert writes_gradients(code)
    assert not writes_gradients(
        "g = torch.autograd.grad(a, b); h = p.grad.clone(); graph.backward.replay(); run.step = run.step + 1"
    )


@pytest.mark.parametrize("name", ["engine.fit", "training.evaluation"])
def test_the_core_does_not_depend_on_the_speed_package(graph, name):
    todo, seen = {name}, set()
    while todo:
        module = todo.pop()
        seen.add(module)
        todo |= graph.get(module, set()) - seen
    assert not [module for module in seen if module.startswith("speed")]


def test_the_loop_and_the_step_are_short_and_need_few_modules():
    known = modules()
    for module, name, most in (("fit", "fit", 40), ("step", "train_step", 60)):
        todo, seen = {f"engine.{module}"}, set()
        while todo:
            one = todo.pop()
            seen.add(one)
            todo |= imports(known[one], known, at_run_time=True) - seen - {"the public names"}
        assert len(seen) <= 15, sorted(seen)
        assert sum(len(known[one].read_text().splitlines()) for one in seen) <= 4500
        nodes = ast.walk(ast.parse(known[f"engine.{module}"].read_text()))
        (function,) = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]
        assert function.end_lineno - function.lineno < most, name
        text = ast.unparse(function)
        assert not [word for word in ("evaluate_only", "sync_every", "profile", ".item()", ".tolist()") if word in text]


# Lines of Python that a package may have: its budget or, while it is above that, its size when it was last made smaller. A higher
# number takes a line of reason in CONTRIBUTING.md.
LINES: dict[str, int] = {
    "(top)": 2_683,
    "config": 1_467,
    "doctor": 3_550,
    "engine": 3_300,
    "exporting": 1_726,
    "launch": 4_187,
    "measure": 2_382,
    "memory": 1_412,
    "nodes": 1_555,
    "observe": 2_403,
    "ranks": 1_675,
    "records": 762,
    "report": 1_621,
    "saving": 1_867,
    "sources": 3_253,
    "speed": 3_651,
    "tasks": 5_923,
    "training": 4_040,
    "watch": 2_490,
}
# Uses, in other modules, of the objects that a module makes when it is imported. They shall become fewer.
SHARED = {"this_rank": 217, "links": 132, "ending": 91}


def test_no_package_grows_beyond_its_budget_or_its_size():
    sizes: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        name = parts[0] if len(parts) > 1 else "(top)"
        sizes[name] = sizes.get(name, 0) + len(path.read_text().splitlines())
    assert {name: size for name, size in sizes.items() if size > LINES.get(name, 0)} == {}


def test_modules_share_few_objects_and_those_that_compute_none():
    trees = {name: ast.parse(path.read_text()) for name, path in modules().items()}
    uses: dict[str, list[str]] = {}
    for module, tree in trees.items():
        nodes = [*ast.walk(tree)]
        known = {alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        for name in (node.id for node in nodes if isinstance(node, ast.Name) and node.id in known and node.id in SHARED):
            uses.setdefault(name, []).append(module)
    assert {name: len(found) for name, found in uses.items() if len(found) > SHARED[name]} == {}
    # What is learned, and how it is computed, gets an accelerator or a team. Messages about long waits for files have neither.
    free = ("engine", "speed", "tasks", "sources")
    assert {module for found in uses.values() for module in found if module.split(".")[0] in free} <= {"sources.places"}
    own = {module: tree for module, tree in trees.items() if module.split(".")[0] in free}
    names = {(module, getattr(node, "id", getattr(node, "arg", ""))) for module, tree in own.items() for node in ast.walk(tree)}
    assert not [(module, name) for module, name in names if name in ("num_ranks", "process_index", "links")]


def test_options_are_parsed_without_torch():
    code = (
        "import importlib, sys; sys.argv = ['recipe.py']; sys.path.insert(0, 'recipes')\n"
        "from accel_ddp.config.parsing import parse_config\n"
        f"for name in {sorted(path.stem for path in RECIPES.glob('*.py'))}: parse_config(importlib.import_module(name).Config)\n"
        "assert not {'torch', 'accelerate', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
