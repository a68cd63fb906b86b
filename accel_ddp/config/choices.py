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


def take_saved(cfg: TrainConfig, run: dict[str, Any]) -> None:
    """Set the options that the user has left out to the values of a saved run, and print them. `run` is its run.json.

    Only options with `legacy` take part: it is the value of runs that are older than the option, or than its default.
    """
    saved, why, taken = run.get("config", {}), run.get("chosen", {}), []
    for name, properties in properties_of(type(cfg)).items():
        now = getattr(cfg, name)
        if properties.legacy is None or now != getattr(type(cfg), name):
            continue
        value = saved.get(name, properties.legacy)
        if name == "mixed_precision" and saved.get(name, "auto") == "auto":  # of an older run
            value = run.get("precision") or value
        if isinstance(now, tuple) and isinstance(value, str):
            value = tuple(value.split())
        if value not in (now, "auto"):
            setattr(cfg, name, value)
            before = why.get(name, "").removesuffix(KEPT).removesuffix(", ")
            reasons(cfg)[name] = f"{before}, {KEPT}" if before else KEPT
            taken.append(f"{name} {as_plain_dict(cfg)[name] if value != () else '(empty)'}")
    if taken:
        _print_on_main(f"--resume: {KEPT}: {', '.join(taken)}")


def _print_on_main(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)
