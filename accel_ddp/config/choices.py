"""The options whose default `auto` depends on the model, the data or the hardware: what was chosen, and why."""

import os
from typing import Any

from accel_ddp.config.options import properties_of
from accel_ddp.config.train_config import TrainConfig, as_plain_dict

KEPT = "as in the saved run"


def choose(cfg: TrainConfig, name: str, value: Any, reason: str) -> None:
    """Set an option that was `auto`, store the reason, and print both on the main rank. Every rank must choose the same value."""
    setattr(cfg, name, value)
    reasons(cfg)[name] = reason
    _print_on_main(f"{name} {as_plain_dict(cfg)[name]}: {reason} (--{name} changes it)")


def reasons(cfg: TrainConfig) -> dict[str, str]:
    """Return why each chosen option has its value. A copy of `cfg` with other options begins without reasons."""
    return cfg.__dict__.setdefault("_reasons", {})


def was_auto(cfg: TrainConfig, name: str) -> bool:
    """Return whether the value of an option was chosen, by this run or by the saved run that it continues."""
    return reasons(cfg).get(name, KEPT) != KEPT


def keep(cfg: TrainConfig, name: str, value: Any, run: dict[str, Any]) -> None:
    """Set an option to the value of a saved run, with the reason that it had there. `run` is its run.json."""
    setattr(cfg, name, value)
    before = run.get("chosen", {}).get(name, "").removesuffix(KEPT).removesuffix(", ")
    reasons(cfg)[name] = f"{before}, {KEPT}" if before else KEPT


def take_saved(cfg: TrainConfig, run: dict[str, Any]) -> None:
    """Set the options that the user has left out to the values of a saved run, and print them. `run` is its run.json.

    These are options with `legacy`, which is the value of runs that are older than the option or its default,
    the length of the run, and how often it is saved and evaluated.
    """
    saved, taken = run.get("config", {}), []
    for name, properties in properties_of(type(cfg)).items():
        now = getattr(cfg, name)
        value = saved.get(name, properties.legacy)
        if name in run.get("chosen", {}) and now == value:  # the user has typed what was chosen then
            keep(cfg, name, value, run)
        if properties.legacy is None or now != getattr(type(cfg), name):
            continue
        if name == "mixed_precision" and saved.get(name, "auto") == "auto":  # of an older run
            value = run.get("precision") or value
        if isinstance(now, tuple) and isinstance(value, str):
            value = tuple(value.split())
        if value not in (now, "auto"):
            keep(cfg, name, value, run)
            taken.append(f"{name} {as_plain_dict(cfg)[name] if value != () else '(empty)'}")
    left_out = {
        name for name in ("steps", "epochs", "save_every", "eval_every") if getattr(cfg, name) == getattr(type(cfg), name)
    }
    if not {"steps", "epochs"} <= left_out:  # one of them states how long the run is
        left_out -= {"steps", "epochs"}
    for name in sorted(left_out):
        if saved.get(name, getattr(cfg, name)) != getattr(cfg, name):
            keep(cfg, name, saved[name], run)
            taken.append(f"{name} {saved[name]:g}")
    if taken:
        _print_on_main(f"--resume: {KEPT}: {', '.join(taken)}")


def _print_on_main(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)
