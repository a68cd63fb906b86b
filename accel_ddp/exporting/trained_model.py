"""Find a trained model by its place (an export, adapters, a run, a checkpoint, any transformers model), its task, and load it."""

import contextlib
import functools
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.records import run_log
from accel_ddp.saving import checkpoint_format
from accel_ddp.sources.adapters import load_base
from accel_ddp.sources.builtin import from_pretrained, locate
from accel_ddp.sources.places import prepare_hub
from accel_ddp.text import read_table

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
KINDS: dict[str, dict[str, Any]] = read_table(Path(__file__).with_name("kinds.yaml"))
ALSO = {"ForPreTraining": "masks", "LMHeadModel": "answers", "Model": "vectors"}


def options_of(kind: str) -> list[str]:
    """Return the options of `predict` that have an effect on predictions of this kind, columns first."""
    return [*(name for group in KINDS[kind]["columns"] for name in group), *KINDS[kind]["options"]]


class TrainedModel(NamedTuple):
    name: str  # as the user has typed it
    place: str  # a folder, or a name on the Hub
    kind: str  # a key of KINDS
    config: dict[str, Any]  # of the whole model
    base: str  # the model below the adapters, or ""
    facts: dict[str, Any]  # how it was trained, see `read_facts`
    chat_template: str  # its source, or ""

    def option(self, name: str, default: Any = None) -> Any:
        """Return the value of an option of the training, or the default if it is not known or empty."""
        return self.facts.get("options", {}).get(name) or self.facts.get("columns", {}).get(name) or default


def find(name: str, scratch: Path) -> TrainedModel:
    """Return the model that `name` means. Of a checkpoint, `place` has no weights: see `export`. Raise UserError if there is none."""
    try:
        folder = Path(name).expanduser()
        place = locate(str(_of_run(folder, scratch)) if folder.is_dir() else name, RecipeConfig.cache_dir)
        if not Path(place).is_dir():
            from accel_ddp.sources.adapters import find_adapters

            adapters = find_adapters(name, RecipeConfig.cache_dir)
            place = adapters.place if adapters else place
        config, base = read(place, CONFIG), ""
        if not config and (adapter := read(place, ADAPTER_CONFIG)):
            base = str(adapter.get("base_model_name_or_path") or "")
            config = read(place, f"base/{CONFIG}") or read(locate(base, RecipeConfig.cache_dir), CONFIG)
        if not config:
            from transformers import AutoConfig

            config = from_pretrained(AutoConfig, name, place).to_dict()
    except UserError as error:
        raise UserError(str(error).removeprefix("--model ")) from error
    is_checkpoint, weights = (Path(place).parent / checkpoint_format.MANIFEST).is_file(), (".safetensors", ".bin")
    if Path(place).is_dir() and not is_checkpoint and not any(file.suffix in weights for file in Path(place).iterdir()):
        raise UserError(f"{name}: the folder has no weights (model.safetensors). Export it again, or copy them there.")
    template = read(place, "chat_template.jinja") or (read(place, "tokenizer_config.json") or {}).get("chat_template") or ""
    template = template if isinstance(template, str) else json.dumps(template)
    facts = checkpoint_format.read_facts(Path(place).parent if is_checkpoint else place)
    kind = facts.get("predicts") or _kind(name, config, place)
    return TrainedModel(name, place, kind, config, base, facts, template)


def _of_run(folder: Path, scratch: Path) -> Path:
    is_model = lambda place: any((place / file).is_file() for file in (CONFIG, ADAPTER_CONFIG))
    if is_model(folder / "model"):
        return folder / "model"
    path = folder if (folder / checkpoint_format.MANIFEST).is_file() else checkpoint_format.chosen(folder)
    if path is None or not is_model(path / "files"):
        if not is_model(folder) or (folder / run_log.FILE).is_file():  # the config.json of a run has its options
            what = "is neither a model (with a config.json) nor a run with a checkpoint"
            raise UserError(f"{folder}: {what}. Name a run, such as runs/sft, an exported folder, or a model of the Hub.")
        return folder
    return scratch / "model" if (scratch / "model").is_dir() else path / "files"


def export(found: TrainedModel, scratch: Path) -> TrainedModel:
    if not (Path(found.place).parent / checkpoint_format.MANIFEST).is_file():
        return found
    from accel_ddp.exporting.export import from_checkpoint

    with contextlib.redirect_stdout(io.StringIO()):  # how to load it
        from_checkpoint(str(Path(found.name).expanduser()), str(scratch / "model"))
    print(f"using the checkpoint of step {checkpoint_format.read_facts(scratch / 'model')['step']}")
    return find(found.name, scratch)


def read(place: str, file: str) -> Any:
    """Return the content of a JSON or text file of a model, or None if it has no such file."""
    path = Path(place) / file
    if not Path(place).is_dir():
        from huggingface_hub import hf_hub_download

        prepare_hub()
        with contextlib.suppress(Exception):  # of many kinds: no such file, no network; loading the model reports it
            path = Path(hf_hub_download(place, file))
    try:
        text = path.read_text("utf-8") if path.is_file() else "null"
        return json.loads(text) if path.suffix == ".json" or text == "null" else text
    except ValueError as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _kind(name: str, config: dict[str, Any], place: str) -> str:
    architecture = (config.get("architectures") or [""])[0]
    endings = {**ALSO, **{one["class"]: kind for kind, one in reversed(KINDS.items()) if one["class"]}}
    kind = next((kind for ending, kind in endings.items() if architecture.endswith(ending)), "")
    if kind in ("", "vectors") and config.get("is_encoder_decoder"):
        kind = "texts"
    if not kind:
        known = f"Known are classes that end with {', '.join(endings)}, and encoder-decoder models"
        raise UserError(f"{name}: the class {architecture!r} of its config is not supported. {known}.")
    return "vectors" if kind in ("masks", "answers") and read(place, "modules.json") else kind


def load(found: TrainedModel, dtype: str, device: Any) -> Any:
    """Return the model for inference. `auto` is the dtype in which it is stored, and float32 on CPUs."""
    import torch
    import transformers

    if found.kind == "images":
        from accel_ddp.tasks import vision as vision  # registers its models with transformers
    stored = found.config.get("dtype") or found.config.get("torch_dtype") or "float32"
    dtype = (stored if device.type == "cuda" else "float32") if dtype == "auto" else dtype
    auto_class, options = getattr(transformers, f"AutoModel{KINDS[found.kind]['class']}"), {"dtype": getattr(torch, dtype)}
    if not found.base:
        return from_pretrained(auto_class, found.name, found.place, **options).eval().to(device)
    import peft

    own, place = Path(found.place) / "base", locate(found.base, RecipeConfig.cache_dir)
    read = functools.partial(from_pretrained, auto_class, found.base, place, **options)
    if own.is_dir():  # the config with the labels of the run
        model = load_base(read, place, transformers.AutoConfig.from_pretrained(own), peft.PeftConfig.from_pretrained(found.place))
    else:
        model = read()
    model = peft.PeftModel.from_pretrained(model, found.place).get_base_model()  # its layers have the adapters
    if (own / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(own)
    return model.eval().to(device)
