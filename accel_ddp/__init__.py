"""Fine-tuning on any number of GPUs and nodes, with the same result.

`__all__` lists the public names. Each one is imported when it is first used (PEP 562), so that `--help`,
a mistyped option and the checks before training do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_ddp import export, seeds
    from accel_ddp.accelerator import start
    from accel_ddp.config import RecipeConfig, TrainConfig
    from accel_ddp.entry import run
    from accel_ddp.errors import UserError
    from accel_ddp.loop import Outcome, fit
    from accel_ddp.observing import hooks
    from accel_ddp.options import option
    from accel_ddp.parsing import parse_config
    from accel_ddp.ranks.agreement import together
    from accel_ddp.recipe import train
    from accel_ddp.records.tables import Table
    from accel_ddp.saving.checkpoints import Checkpoints
    from accel_ddp.sources import builtin, data, model_kinds, models, tokenisation
    from accel_ddp.speed import linear_cross_entropy
    from accel_ddp.speed.attach import attach
    from accel_ddp.tasks import (
        chat,
        contrastive,
        examples,
        generation_metrics,
        image_files,
        labels,
        masking,
        metrics,
        tables,
        tagging,
        text_blocks,
        text_files,
        vision,
    )
    from accel_ddp.training import late_reader, losses, nonfinite, optim, padding, stream
    from accel_ddp.training.divergence import ParameterCheck
    from accel_ddp.training.ema import Ema
    from accel_ddp.training.evaluation import EvalBatches, compute_on_main, evaluate
    from accel_ddp.training.stream import TrainBatches
    from accel_ddp.training.update import update
    from accel_ddp.training.whole_batch import WholeBatch
    from accel_ddp.training.wrapping import prepare

__version__ = "0.1.0"

# The module that defines each public name. After a dot the name itself is a module.
_HOME = {
    "Checkpoints": "saving.checkpoints",
    "Ema": "training.ema",
    "EvalBatches": "training.evaluation",
    "Outcome": "loop",
    "ParameterCheck": "training.divergence",
    "RecipeConfig": "config",
    "Table": "records.tables",
    "TrainBatches": "training.stream",
    "TrainConfig": "config",
    "UserError": "errors",
    "WholeBatch": "training.whole_batch",
    "attach": "speed.attach",
    "builtin": "sources.",
    "chat": "tasks.",
    "contrastive": "tasks.",
    "data": "sources.",
    "compute_on_main": "training.evaluation",
    "evaluate": "training.evaluation",
    "examples": "tasks.",
    "export": ".",
    "fit": "loop",
    "generation_metrics": "tasks.",
    "hooks": "observing.",
    "image_files": "tasks.",
    "labels": "tasks.",
    "late_reader": "training.",
    "linear_cross_entropy": "speed.",
    "losses": "training.",
    "masking": "tasks.",
    "metrics": "tasks.",
    "model_kinds": "sources.",
    "models": "sources.",
    "nonfinite": "training.",
    "optim": "training.",
    "option": "options",
    "padding": "training.",
    "parse_config": "parsing",
    "prepare": "training.wrapping",
    "run": "entry",
    "seeds": ".",
    "start": "accelerator",
    "stream": "training.",
    "tables": "tasks.",
    "tagging": "tasks.",
    "text_blocks": "tasks.",
    "text_files": "tasks.",
    "together": "ranks.agreement",
    "tokenisation": "sources.",
    "train": "recipe",
    "update": "training.update",
    "vision": "tasks.",
}
# Written out, because type checkers do not evaluate expressions here.
__all__ = [
    "Checkpoints",
    "Ema",
    "EvalBatches",
    "Outcome",
    "ParameterCheck",
    "RecipeConfig",
    "Table",
    "TrainBatches",
    "TrainConfig",
    "UserError",
    "WholeBatch",
    "attach",
    "builtin",
    "chat",
    "compute_on_main",
    "contrastive",
    "data",
    "evaluate",
    "examples",
    "export",
    "fit",
    "generation_metrics",
    "hooks",
    "image_files",
    "labels",
    "late_reader",
    "linear_cross_entropy",
    "losses",
    "masking",
    "metrics",
    "model_kinds",
    "models",
    "nonfinite",
    "optim",
    "option",
    "padding",
    "parse_config",
    "prepare",
    "run",
    "seeds",
    "start",
    "stream",
    "tables",
    "tagging",
    "text_blocks",
    "text_files",
    "together",
    "tokenisation",
    "train",
    "update",
    "vision",
]


if not TYPE_CHECKING:  # hidden from type checkers, for which a module with __getattr__ has every name

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'accel_ddp' has no attribute {name!r}")
        home = _HOME[name]
        if home.endswith("."):
            return import_module(f"accel_ddp.{home}{name}".replace("..", "."))
        return getattr(import_module(f"accel_ddp.{home}"), name)

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]
