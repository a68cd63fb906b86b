"""Models: from a hub name, a folder or an installed package; made ready for DDP."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp.config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.seeds import mixed
from accel_ddp.sources import builtin
from accel_ddp.sources.hub import prepare_hub

log = logging.getLogger(__name__)


def locate(name: str, cache_dir: str = "~/.cache/accel_ddp") -> str:
    """What `from_pretrained` takes: a hub name and a folder stay as they are, an embedded model is its folder."""
    if not name:
        raise UserError("There is no model. Give --model: a hub name or a folder.")
    if name.startswith("builtin:"):
        prepare_hub()  # also: no bars
        return str(builtin.model_folder(name, cache_dir))
    if name.startswith((".", "/", "~")) or Path(name).is_dir():
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise UserError(f"--model {name}: there is no such folder.")
        if not (folder / "config.json").is_file():
            raise UserError(f"--model {name}: the folder has no config.json, so it is not a transformers model.")
        return str(folder)
    return name


def load_tokenizer(cfg: RecipeConfig, max_length: int = 0) -> Any:
    """One that can pad. A UserError where the model cannot take `max_length` tokens."""
    from transformers import AutoTokenizer

    name = cfg.model
    place = locate(name, cfg.cache_dir)
    files = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")
    if Path(place).is_dir() and not any((Path(place) / file).is_file() for file in files):
        raise UserError(
            f"--model {name}: the folder has no tokenizer ({', '.join(files[:2])}). "
            "Save one there: tokenizer.save_pretrained(folder)."
        )
    tokenizer = from_pretrained(AutoTokenizer, name, place)
    if tokenizer.pad_token is None:  # GPT-2 and its kind; what is padded is masked, so any token will do
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
    if tokenizer.pad_token is None:
        raise UserError(f"--model {name}: its tokenizer has no token to pad with. Save one: tokenizer.pad_token = ...")
    if max_length > tokenizer.model_max_length:
        raise UserError(f"--max_length {max_length}: {name} takes at most {tokenizer.model_max_length} tokens.")
    return tokenizer


def identity(tokenizer: Any) -> str:
    """A digest of what the tokenizer does to a text: part of the key of tokenised data."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))
    around = [type(tokenizer).__name__, tokenizer.model_input_names, str(tokenizer.special_tokens_map), tokenizer.truncation_side]
    return hashlib.blake2b(f"{around}{whole}".encode(), digest_size=16).hexdigest()


def load(auto_class: Any, cfg: RecipeConfig, tokenizer: Any = None, **options: Any) -> nn.Module:
    """With weights of `--dtype`: a bf16 file would otherwise give bf16 weights, on which small updates are lost.

    Where the tokenizer has tokens that the model does not know, its embeddings grow.
    """
    if cfg.dtype != "float32" and not cfg.lora_r:
        log.info(f"--dtype {cfg.dtype}: the trained weights themselves; updates that are small beside them are lost.")
    options["dtype"] = getattr(torch, cfg.dtype)
    if cfg.attn_implementation != "auto":
        options["attn_implementation"] = cfg.attn_implementation
    if cfg.quantize != "no":
        options |= _quantized(cfg)
    options["output_loading_info"] = True
    model, info = from_pretrained(auto_class, cfg.model, locate(cfg.model, cfg.cache_dir), **options)
    missing = {*info["missing_keys"], *(found[0] for found in info.get("mismatched_keys", ()))}
    model._made_anew = sorted({name.rpartition(".")[0] for name in missing})  # under adapters these are trained too
    _require_positions(model, cfg)
    rows = model.get_input_embeddings().num_embeddings if tokenizer is not None else 0
    if tokenizer is not None and len(tokenizer) > rows:
        if cfg.lora_r:
            raise UserError(
                f"--lora_r {cfg.lora_r}: the tokenizer has {len(tokenizer):,} tokens and the model embeddings of {rows:,}. The "
                "new ones would be frozen before they have learned anything. Train all weights, or take a tokenizer that fits."
            )
        log.info(f"the tokenizer has {len(tokenizer):,} tokens and the model {rows:,}: it gets embeddings for the new ones.")
        model.resize_token_embeddings(len(tokenizer))
    return model


def _require_positions(model: nn.Module, cfg: RecipeConfig) -> None:
    """Tokenizers do not always know how many tokens their model can take."""
    most = getattr(model.config, "max_position_embeddings", None)
    if most and getattr(cfg, "max_length", 0) > most > 0:
        raise UserError(f"--max_length {cfg.max_length}: {cfg.model} takes at most {most} tokens.")


def _quantized(cfg: RecipeConfig) -> dict[str, Any]:
    from importlib.util import find_spec

    from transformers import BitsAndBytesConfig

    if not torch.cuda.is_available() or find_spec("bitsandbytes") is None:
        missing = "there is no GPU" if not torch.cuda.is_available() else "pip install bitsandbytes"
        raise UserError(f"--quantize {cfg.quantize}: needs bitsandbytes and a GPU: {missing}.")
    kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    choice = BitsAndBytesConfig(load_in_8bit=True) if cfg.quantize == "8bit" else BitsAndBytesConfig(load_in_4bit=True, **kind)
    return {"quantization_config": choice, "device_map": {"": torch.cuda.current_device()}}


def from_pretrained(auto_class: Any, name: str, place: str, **options: Any) -> Any:
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


def ready(model: nn.Module, cfg: RecipeConfig, accelerator: Accelerator, lora_task: str = "") -> nn.Module:
    """Adapters, frozen parts, gradient checkpointing, batch norm, as the options say. Before the optimizer is built."""
    if cfg.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise UserError("--gradient_checkpointing: this model does not offer it.")
        # Reentrant checkpointing breaks under DDP's find_unused_parameters, and where the first layers are frozen.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if cfg.lora_r:
        model = _with_adapters(model, cfg, lora_task)
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
    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if cfg.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if accelerator.ddp_handler is not None and cfg.broadcast_buffers == "auto":
        # Other buffers (position ids) never change: sending them every step would cost for nothing.
        accelerator.ddp_handler.broadcast_buffers = has_batch_norm
    return model


def _with_adapters(model: nn.Module, cfg: RecipeConfig, task: str) -> nn.Module:
    """Low-rank adapters beside some layers; all else is frozen, but for a new head."""
    import peft

    if not task:
        raise UserError(f"--lora_r {cfg.lora_r}: this recipe's model takes no adapters. Leave it out.")
    if cfg.quantize != "no":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets = list(cfg.lora_targets) or (None if model.config.model_type in known else "all-linear")
    kind = peft.LoraConfig(
        task_type=task, r=cfg.lora_r, lora_alpha=cfg.lora_alpha, lora_dropout=cfg.lora_dropout, target_modules=targets,
        modules_to_save=model._made_anew or None,  # random, and in no file: frozen they would be lost with this process
    )  # fmt: skip
    try:
        with torch.random.fork_rng():
            torch.manual_seed(mixed(cfg.seed, "adapters") % 2**63)  # also where the head drew more on another rank
            model = peft.get_peft_model(model, kind)
    except ValueError as error:
        layers = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise UserError(
            f"--lora_targets {' '.join(cfg.lora_targets)}: no layer of the model is called that. Its linear layers: "
            f"{', '.join(layers)}."
        ) from error
    trained, all_of_it = model.get_nb_trainable_parameters()
    log.info(f"adapters of rank {cfg.lora_r}: {trained:,} of {all_of_it:,} parameters are trained ({trained / all_of_it:.2%})")
    return model
