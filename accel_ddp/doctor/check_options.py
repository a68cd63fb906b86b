"""What the doctor checks besides the nodes themselves: `CheckOptions`, also derived from a recipe and its options."""

import contextlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass, field
from glob import has_magic
from pathlib import Path
from typing import Any

import yaml

from accel_ddp.config.option_values import split_weight
from accel_ddp.config.parsing import parse_config
from accel_ddp.config.train_config import TrainConfig, options_that_must_match
from accel_ddp.doctor import host
from accel_ddp.doctor.findings import Finding
from accel_ddp.errors import UserError
from accel_ddp.nodes import recipe_files
from accel_ddp.nodes.run_secret import NodeKeys, read_secret
from accel_ddp.words import find_options


@dataclass(kw_only=True)
class CheckOptions:
    wait_seconds: float = 300.0  # for nodes that are not started yet
    no_answer_seconds: float = host.NO_ANSWER  # an address that gives no answer at all is given up earlier
    secret: str = field(default_factory=read_secret)
    keys: NodeKeys | None = None  # of this node, for connections after the checks; the nodes exchange the public ones
    measures_bandwidth: bool = True  # of each path, one after the other; otherwise only whether each path works
    deep: bool = False  # run collectives with torch afterwards
    recipe: dict[str, Any] = field(default_factory=dict)  # resolved options that must be the same on every node
    hub_names: dict[str, str] = field(default_factory=dict)  # --model and --dataset, which may be names on the hub
    files: dict[str, str] = field(default_factory=dict)  # label -> path whose content must be the same on every node
    script: str = ""
    output_dir: str = ""  # where checkpoints will be written; empty: not checked
    checkpoint_bytes: int = 0  # disk space that the checkpoints will need
    sets_interface: bool = False  # set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in the environment of this process
    may_join_rendezvous: bool = False  # a node joins a rendezvous that is already running, without checks
    findings: list[Finding] = field(default_factory=list)  # what the caller has already found on this node


def options_of_config(cfg: TrainConfig, script: str) -> CheckOptions:
    files = {}
    places = [
        (f"{name}{f' {number}' if number else ''}", split_weight(value)[0])
        for name in ("train_file", "eval_file")
        for number, value in enumerate(getattr(cfg, name, ()))
    ]
    for name, value in [*places, *((name, getattr(cfg, name, "")) for name in ("model", "dataset"))]:
        is_file = "_file" in name and not has_magic(value)
        looks_like_path = is_file or value.startswith(("/", "./", "~"))  # reported as missing if it is
        if value and (looks_like_path or os.path.exists(os.path.expanduser(value))):
            files[f"content of --{name}"] = value
    num_checkpoints = cfg.keep_last + 1 + bool(cfg.keep_best)  # a new one is written before an old one is deleted
    # A checkpoint has the weights and the two moments of AdamW. With adapters it is small.
    checkpoint_bytes = 0 if getattr(cfg, "lora_r", 0) else 3 * model_bytes(getattr(cfg, "model", "")) * num_checkpoints
    return CheckOptions(
        recipe={name: str(value) for name, value in options_that_must_match(cfg).items()}, files=files, script=script,
        hub_names={name: getattr(cfg, name, "") for name in ("model", "dataset")},
        output_dir=cfg.output_dir or "runs", checkpoint_bytes=checkpoint_bytes,
    )  # fmt: skip


def options_of_script(argv: list[str]) -> CheckOptions:
    if cfg := load_recipe_config(argv):
        return options_of_config(cfg, script=argv[0])
    return CheckOptions(recipe={"arguments of the script": " ".join(argv[1:])}, script=argv[0])


def load_recipe_config(argv: list[str]) -> TrainConfig | None:
    path = Path(argv[0])
    if not path.is_file():
        raise UserError(f"{path}: there is no such script.")
    text = path.read_text(errors="replace")
    if "accel_ddp" not in text or "__main__" not in text:  # without that guard, an import would start the training
        return None
    module = load_recipe(path)
    classes = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, TrainConfig)]
    own = [one for one in classes if one.__module__ == module.__name__] or classes
    called = re.findall(r"\b(?:run|parse_config)\(\s*(\w+)", text)
    own = [one for one in classes if one.__name__ in called] or own
    return parse_config(own[0], argv[1:], script=argv[0]) if len(own) == 1 else None


def load_recipe(path: Path) -> Any:
    """Return the module of a recipe. Recipes import torch only when they run."""
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the module of a class by its name
    sys.path.insert(0, str(path.parent))  # own_loop.py imports classify.py
    spec.loader.exec_module(module)
    return module


def read_recipe_option(argv: list[str], name: str, default: str) -> str:
    value = default
    for option in find_options(argv, ("config", name)):
        if option.name == name:
            value = option.value or ""
            continue
        with contextlib.suppress(OSError, yaml.YAMLError, AttributeError):  # the recipe reports it
            value = str((yaml.safe_load(recipe_files.options_path(option.value or "").read_text()) or {}).get(name, value))
    return value


def runs_preflight(argv: list[str]) -> bool:
    return read_recipe_option(argv, "preflight", "on") not in ("off", "False")  # YAML reads an unquoted off as false


def wait_of(argv: list[str]) -> float:
    wait = read_recipe_option(argv, "wait" if argv[0] == "accel_ddp.doctor" else "preflight_wait", "")
    return float(wait) if wait.replace(".", "", 1).isdigit() else CheckOptions.wait_seconds


def model_bytes(model: str) -> int:
    folder = Path(model).expanduser()
    return sum(file.stat().st_size for file in [*folder.glob("*.safetensors")] or folder.glob("*.bin")) if model else 0
