"""Fine-tuning on any number of GPUs and nodes, with the same result.

Names are imported when they are first used (PEP 562), so that `--help`, a mistyped option and the
checks before training do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_ddp import (
        chat,
        checkpoint,
        contrast,
        data,
        embedded,
        export,
        fast,
        fitting,
        heads,
        hooks,
        labels,
        losses,
        masking,
        metrics,
        models,
        optim,
        packed,
        packing,
        runtime,
        seeds,
        stop,
        tagging,
        textscores,
        update,
        vision,
        world,
    )
    from accel_ddp.config import TrainConfig, parse_config, run
    from accel_ddp.errors import UserError
    from accel_ddp.loop import fit
    from accel_ddp.runtime import start
    from accel_ddp.stream import TrainBatches
    from accel_ddp.world import together

__version__ = "0.1.0"

_HOME = {
    "TrainConfig": "config", "UserError": "errors", "parse_config": "config", "run": "config",
    "TrainBatches": "stream", "fit": "loop", "start": "runtime", "together": "world",
}  # fmt: skip
_MODULES = [
    "chat",
    "contrast",
    "checkpoint",
    "data",
    "embedded",
    "export",
    "fast",
    "fitting",
    "heads",
    "hooks",
    "labels",
    "losses",
    "masking",
    "metrics",
    "models",
    "optim",
    "packed",
    "packing",
    "runtime",
    "seeds",
    "stop",
    "tagging",
    "textscores",
    "update",
    "vision",
    "world",
]
# Written out, because type checkers do not compute it: without it every name would be a private one for them.
__all__ = [
    "TrainBatches", "TrainConfig", "UserError", "fit", "parse_config", "run", "start", "together",
    "chat", "contrast", "checkpoint", "data", "embedded", "export", "fast", "fitting", "heads", "hooks", "labels", "losses",
    "masking", "metrics", "models", "optim", "packed", "packing", "runtime", "seeds", "stop", "tagging", "textscores", "update",
    "vision", "world",
]  # fmt: skip

if not TYPE_CHECKING:  # hidden from type checkers, for which a module with __getattr__ has every name

    def __getattr__(name: str):
        if name in _MODULES:
            return import_module(f"accel_ddp.{name}")
        if name in _HOME:
            return getattr(import_module(f"accel_ddp.{_HOME[name]}"), name)
        raise AttributeError(f"module 'accel_ddp' has no attribute {name!r}")
