"""Finds models and their files: on the Hub, in a folder, or in an installed package."""

from pathlib import Path
from typing import Any

from accel_ddp.errors import UserError
from accel_ddp.sources import builtin
from accel_ddp.sources.hub import prepare_hub

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")


def locate(name: str, cache_dir: str = "~/.cache/accel_ddp") -> str:
    """Return what `from_pretrained` of transformers accepts: a Hub name, or the folder of a local or built-in model."""
    if not name:
        raise UserError("There is no model. Give --model: a Hub name or a folder.")
    if builtin.is_builtin("--model", name):
        prepare_hub()  # turns off progress bars too
        return str(builtin.model_folder(name, cache_dir))
    if name.startswith((".", "/", "~")) or Path(name).is_dir():
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise UserError(f"--model {name}: there is no such folder.")
        if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise UserError(f"--model {name}: the folder has no config.json, so it is not a transformers model.")
        return str(folder)
    return name


def has_tokenizer(folder: str) -> bool:
    return any((Path(folder) / file).is_file() for file in TOKENIZER_FILES)


def from_pretrained(auto_class: Any, name: str, place: str, **options: Any) -> Any:
    """Return `auto_class.from_pretrained(place)`. Raise UserError if that fails; `name` is the value of `--model`."""
    offline = prepare_hub()
    try:
        return auto_class.from_pretrained(place, **options)
    except Exception as error:  # many types: damaged weights, a damaged tokenizer, no such model, no network
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if lines[0].startswith("Unrecognized configuration class"):
            raise UserError(
                f"--model {name}: this type of model cannot be loaded as {auto_class.__name__}. Use a model for this task."
            ) from error
        if Path(place).is_dir():
            raise UserError(f"--model {name}: the folder cannot be loaded: {lines[0]}") from error
        no_copy = f"there is no network to the Hub ({offline}), and no copy in the local cache"
        raise UserError(
            f"--model {name}: is not a folder, and cannot be loaded from the Hub: {no_copy if offline else lines[0].strip()}. "
            "Without a network, give the path of a folder that contains the model: --model path/to/folder."
        ) from error
