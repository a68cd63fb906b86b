"""Loads models and tokenizers from the Hub, from a folder or from an installed package, and prepares models for DDP."""

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
from accel_ddp.sources import builtin, model_kinds
from accel_ddp.sources.hub import prepare_hub
from accel_ddp.sources.messages import warn
from accel_ddp.training.optim import freeze

log = logging.getLogger(__name__)

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
        if not (folder / "config.json").is_file():
            raise UserError(f"--model {name}: the folder has no config.json, so it is not a transformers model.")
        return str(folder)
    return name


def load_tokenizer(cfg: RecipeConfig, max_length: int = 0) -> Any:
    """Return the tokenizer of `--model`, with a padding token. Raise UserError if it allows fewer than `max_length` tokens."""
    from transformers import AutoTokenizer

    name = cfg.model
    place = locate(name, cfg.cache_dir)
    if Path(place).is_dir() and not any((Path(place) / file).is_file() for file in TOKENIZER_FILES):
        raise UserError(
            f"--model {name}: the folder has no tokenizer ({', '.join(TOKENIZER_FILES[:2])}). "
            "Save one there: tokenizer.save_pretrained(folder)."
        )
    tokenizer = from_pretrained(AutoTokenizer, name, place)
    if tokenizer.pad_token is None:  # for example GPT-2; padding is masked, so that any token can be used
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
    if tokenizer.pad_token is None:
        raise UserError(
            f"--model {name}: the tokenizer has no padding token. Set tokenizer.pad_token and save the tokenizer in a folder."
        )
    if max_length > tokenizer.model_max_length:
        raise _too_long(max_length, name, tokenizer.model_max_length)
    return tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of everything that affects the tokens of a text, for the cache key of tokenised data."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))
    settings = [type(tokenizer).__name__, tokenizer.model_input_names, str(tokenizer.special_tokens_map)]
    return hashlib.blake2b(f"{[*settings, tokenizer.truncation_side]}{vocabulary}".encode(), digest_size=16).hexdigest()


def load_config(cfg: RecipeConfig) -> Any:
    """Return the config of `--model`, without its weights."""
    from transformers import AutoConfig

    return from_pretrained(AutoConfig, cfg.model, locate(cfg.model, cfg.cache_dir))


def load(auto_class: Any, cfg: RecipeConfig, tokenizer: Any = None, **options: Any) -> nn.Module:
    """Return the model of `--model`, with weights of `--dtype` and embeddings for all tokens of the tokenizer.

    Raise UserError before the weights are loaded if the config shows that the model is wrong for the task. The dtype is not that
    of the file, because training bf16 weights loses small updates.
    """
    model_kinds.check_config(auto_class.__name__, cfg.model, load_config(cfg))
    if cfg.dtype != "float32" and not cfg.lora_r:
        warn(f"--dtype {cfg.dtype}: the trained weights have 16 bits, so that small updates are lost in rounding.")
    options["dtype"] = getattr(torch, cfg.dtype)
    if cfg.attn_implementation != "auto":
        options["attn_implementation"] = cfg.attn_implementation
    if cfg.quantize != "no":
        options |= _quantization_options(cfg)
    options["output_loading_info"] = True
    model, info = from_pretrained(auto_class, cfg.model, locate(cfg.model, cfg.cache_dir), **options)
    missing = {*info["missing_keys"], *(found[0] for found in info.get("mismatched_keys", ()))}
    model._new_modules = sorted({name.rpartition(".")[0] for name in missing})  # trained even if adapters freeze the rest
    _check_positions(model, cfg)
    model_kinds.report_router_loss(model)
    model_kinds.report_new_weights(auto_class.__name__, model, missing, cfg.model)
    rows = model.get_input_embeddings().num_embeddings if tokenizer is not None else 0
    if tokenizer is not None and len(tokenizer) > rows:
        if cfg.lora_r:
            raise UserError(
                f"--lora_r {cfg.lora_r}: the tokenizer has {len(tokenizer):,} tokens, but the model has {rows:,} embeddings. "
                "Adapters would freeze the new embeddings at their random values. Leave --lora_r out, or use another tokenizer."
            )
        log.info(f"the tokenizer has {len(tokenizer):,} tokens, and the model has {rows:,} embeddings: new ones are added")
        model.resize_token_embeddings(len(tokenizer))
    return model


def _check_positions(model: nn.Module, cfg: RecipeConfig) -> None:
    """Raise UserError if the model has too few positions. Some tokenizers do not define `model_max_length`."""
    most = getattr(model.config, "max_position_embeddings", None)
    if most and getattr(cfg, "max_length", 0) > most > 0:
        raise _too_long(cfg.max_length, cfg.model, most)


def _too_long(max_length: int, name: str, most: int) -> UserError:
    return UserError(f"--max_length {max_length}: {name} accepts at most {most} tokens. Use --max_length {most}.")


def _quantization_options(cfg: RecipeConfig) -> dict[str, Any]:
    from importlib.util import find_spec

    from transformers import BitsAndBytesConfig

    if not torch.cuda.is_available():
        raise UserError(f"--quantize {cfg.quantize}: needs bitsandbytes and a GPU, and there is no GPU. Leave it out.")
    if find_spec("bitsandbytes") is None:
        raise UserError(f"--quantize {cfg.quantize}: needs bitsandbytes. Install it: pip install bitsandbytes")
    kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    choice = BitsAndBytesConfig(load_in_8bit=True) if cfg.quantize == "8bit" else BitsAndBytesConfig(load_in_4bit=True, **kind)
    return {"quantization_config": choice, "device_map": {"": torch.cuda.current_device()}}


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


def prepare(model: nn.Module, cfg: RecipeConfig, accelerator: Accelerator, lora_task: str = "") -> nn.Module:
    """Return the model with adapters, frozen parameters, gradient checkpointing and batch norm as the options define them.

    Call it before the optimizer is built. `lora_task` is the PEFT task type; "" for a model that supports no adapters.
    """
    if cfg.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise UserError(f"--gradient_checkpointing: {type(model).__name__} does not support it. Leave it out.")
        # Reentrant checkpointing fails with find_unused_parameters of DDP, and if the first layers are frozen.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if cfg.lora_r:
        model = _add_adapters(model, cfg, lora_task)
    freeze(model, cfg.freeze)
    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if cfg.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if accelerator.ddp_handler is not None and cfg.broadcast_buffers == "auto":
        # Other buffers, for example position ids, never change. A broadcast in every step would be wasted.
        accelerator.ddp_handler.broadcast_buffers = has_batch_norm
    return model


def _add_adapters(model: nn.Module, cfg: RecipeConfig, task: str) -> nn.Module:
    """Return the model with low-rank adapters. Everything else is frozen, except for new modules such as a new head."""
    import peft

    if not task:
        raise UserError(f"--lora_r {cfg.lora_r}: the model of this recipe does not support adapters. Leave it out.")
    if cfg.quantize != "no":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets = list(cfg.lora_targets) or (None if model.config.model_type in known else "all-linear")
    config = peft.LoraConfig(
        task_type=task, r=cfg.lora_r, lora_alpha=cfg.lora_alpha, lora_dropout=cfg.lora_dropout, target_modules=targets,
        modules_to_save=model._new_modules or None,  # they are random: if frozen, their values would be in no file
    )  # fmt: skip
    try:
        with torch.random.fork_rng():
            # The seed is independent of how much a new head has drawn before.
            torch.manual_seed(mixed(cfg.seed, "adapters") % 2**63)
            model = peft.get_peft_model(model, config)
    except ValueError as error:
        layers = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise UserError(
            f"--lora_targets {' '.join(cfg.lora_targets)}: the model has no layer with this name. Its linear layers are: "
            f"{', '.join(layers)}."
        ) from error
    trained, total = model.get_nb_trainable_parameters()
    log.info(f"LoRA adapters of rank {cfg.lora_r}: {trained:,} of {total:,} parameters are trained ({trained / total:.2%})")
    return model
