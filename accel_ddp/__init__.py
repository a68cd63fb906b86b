"""Fine-tuning on any number of GPUs and nodes, with the same result.

The block below declares the public names, for type checkers and for `__getattr__`. Each one is imported when it is first used
(PEP 562), because `--help`, a mistyped option and the checks before training must not wait for torch.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_ddp import seeds
    from accel_ddp.accelerator import start
    from accel_ddp.assembly import fit
    from accel_ddp.config.options import column, option
    from accel_ddp.config.parsing import parse_config
    from accel_ddp.config.train_config import RecipeConfig, ScoredConfig, TrainConfig
    from accel_ddp.engine import losses, step_numbers
    from accel_ddp.engine.step import train_step
    from accel_ddp.engine.terms import Terms
    from accel_ddp.entry import run
    from accel_ddp.errors import UserError
    from accel_ddp.exporting import export
    from accel_ddp.memory.at_start import fit_memory
    from accel_ddp.observe import hooks
    from accel_ddp.ranks.agreement import together
    from accel_ddp.recipe import fit_and_export, load_model, train
    from accel_ddp.records.eval_tables import Table
    from accel_ddp.saving import checkpoints
    from accel_ddp.sources import data, model_kinds, models, tokenization
    from accel_ddp.speed import linear_cross_entropy
    from accel_ddp.speed.attach import attach

    # fmt: off
    from accel_ddp.tasks import (chat, chat_rows, contrastive, examples, generation_metrics, labels, masking, metrics, negatives,
                                 preferences, ranking, reference, row_stream, tables, tagging, text_blocks, vision)
    # fmt: on
    from accel_ddp.tasks.task_kinds import EmbeddingTask, ImageConfig, ImageTask, MinedConfig, QueryConfig, QueryTask, RewardTask
    from accel_ddp.tasks.task import Task
    from accel_ddp.tasks.text_task import ChatTask, ClassTask, MaskedTask, TargetTask, TextTask, TokenTask
    from accel_ddp.training import divergence, ema, evaluation, optim, padding_check, stream
    from accel_ddp.training.evaluation import EvalBatches, evaluate
    from accel_ddp.training.sharding import prepare
    from accel_ddp.training.stream import TrainBatches

__version__ = "0.1.0"

if not TYPE_CHECKING:  # hidden from type checkers, for which a module with __getattr__ has every name
    _BLOCK = next(node for node in ast.parse(Path(__file__).read_text()).body if isinstance(node, ast.If))
    _HOME = {alias.name: node.module for node in _BLOCK.body for alias in node.names}
    __all__ = sorted(_HOME)

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'accel_ddp' has no attribute {name!r}")
        home = import_module(_HOME[name])
        is_module = home.__name__ == "accel_ddp" or not hasattr(home, name)
        return import_module(f"{_HOME[name]}.{name}") if is_module else getattr(home, name)

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]
