"""The built-in datasets and models, by name. They need no access to the Hub.

They are part of installed packages, or they are made from the standard library or from random weights. Rows are drawn with fixed
seeds from sorted files, so that every machine with the same Python version gets the same rows.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from accel_ddp.errors import UserError
from accel_ddp.sources.builtin_data import DATASETS
from accel_ddp.sources.builtin_models import MODELS

if TYPE_CHECKING:
    from accel_ddp.sources.builtin_data import Splits

PREFIX = "builtin:"
OLD_PREFIX = "embedded:"  # users of earlier versions still type it


def is_builtin(option: str, name: str) -> bool:
    """Return whether `name` has the prefix of built-in datasets and models. Raise UserError for the prefix of old versions."""
    if name.startswith(OLD_PREFIX):
        new = PREFIX + name.removeprefix(OLD_PREFIX)
        raise UserError(f"{option} {name}: the prefix {OLD_PREFIX} was renamed (did you mean {new}?).")
    return name.startswith(PREFIX)


def load_dataset(name: str) -> "Splits":
    """Return the splits `train` and `validation` of a built-in dataset."""
    if name not in DATASETS:
        raise UserError(f"--dataset {name}: there is no such built-in dataset. Use one of: {', '.join(DATASETS)}.")
    return DATASETS[name]()


@cache  # the tokenizer and the model both need the folder, and its digest takes a moment
def model_folder(name: str, cache_dir: str) -> Path:
    """Return the folder of a built-in model, for `from_pretrained` of transformers."""
    if name not in MODELS:
        raise UserError(f"--model {name}: there is no such built-in model. Use one of: {', '.join(MODELS)}.")
    return MODELS[name](name, cache_dir)
