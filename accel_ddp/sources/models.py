"""Loads models and tokenizers from the Hub, from a folder or from an installed package, and prepares models for DDP."""

import hashlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

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
        if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise UserError(f"--model {name}: the folder has no config.json, so it is not a transformers model.")
        return str(folder)
    return name


class Adapters(NamedTuple):
    """Adapters that were trained before, and the model below them."""

    place: str  # a folder
    config: Any
    base: str  # a value of --model


def find_adapters(name: str, cache_dir: str) -> Adapters | None:
    """Return the adapters that `--model` names, or None if it names a whole model. Raise UserError for unknown adapters."""
    place = locate(name, cache_dir)
    if not Path(place).is_dir():
        place = _download_adapters(place)
    # A whole model may lie next to its adapters. transformers then loads the model.
    if not place or (Path(place) / "config.json").is_file():
        return None
    import peft

    config = from_pretrained(peft.PeftConfig, name, place)
    if config.peft_type != "LORA":
        raise UserError(f"--model {name}: contains {config.peft_type.value} adapters. Only LoRA adapters can be trained further.")
    return Adapters(place, config, config.base_model_name_or_path or "")


def _download_adapters(name: str) -> str:
    """Return the folder with the files of adapters on the Hub, or "" if there are no adapters with this name."""
    from huggingface_hub import snapshot_download
    from transformers.utils.peft_utils import find_adapter_config_file

    prepare_hub()
    try:
        if find_adapter_config_file(name) is None:
            return ""
        return snapshot_download(name, allow_patterns=["*.json", "adapter_model.*", "*.jinja", *TOKENIZER_FILES])
    except Exception:  # many types: not a Hub name, no network; loading the model reports it
        return ""


def _locate_base(name: str, adapters: Adapters, cache_dir: str) -> str:
    """Return the place of the model below the adapters. Raise UserError if there is none."""
    from transformers import AutoConfig

    try:
        place = locate(adapters.base, cache_dir)
        from_pretrained(AutoConfig, adapters.base, place)
        return place
    except UserError as error:
        raise UserError(
            f"--model {name}: contains LoRA adapters for the model {adapters.base or '(not named)'}, which cannot be loaded here. "
            f"Write its folder or Hub name into base_model_name_or_path in {adapters.place}/adapter_config.json. ({error})"
        ) from error


def load_tokenizer(cfg: RecipeConfig, max_length: int = 0) -> Any:
    """Return the tokenizer of `--model`, with a padding token. Raise UserError if it allows fewer than `max_length` tokens."""
    from transformers import AutoTokenizer

    name = cfg.model
    place = locate(name, cfg.cache_dir)
    if adapters := find_adapters(name, cfg.cache_dir):
        place = adapters.place if _has_tokenizer(adapters.place) else _locate_base(name, adapters, cfg.cache_dir)
    if Path(place).is_dir() and not _has_tokenizer(place):
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


def _has_tokenizer(folder: str) -> bool:
    return any((Path(folder) / file).is_file() for file in TOKENIZER_FILES)


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of everything that affects the tokens of a text, for the cache key of tokenised data."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))
    settings = [type(tokenizer).__name__, tokenizer.model_input_names, str(tokenizer.special_tokens_map)]
    return hashlib.blake2b(f"{[*settings, tokenizer.truncation_side]}{vocabulary}".encode(), digest_size=16).hexdigest()


def load_config(cfg: RecipeConfig) -> Any:
    """Return the config of `--model`, or of the model below its adapters, without the weights."""
    from transformers import AutoConfig

    adapters = find_adapters(cfg.model, cfg.cache_dir)
    place = _locate_base(cfg.model, adapters, cfg.cache_dir) if adapters else locate(cfg.model, cfg.cache_dir)
    return from_pretrained(AutoConfig, cfg.model, place)


def load(auto_class: Any, cfg: RecipeConfig, tokenizer: Any = None, **options: Any) -> nn.Module:
    """Return the model of `--model`, with weights of `--dtype` and embeddings for all tokens of the tokenizer.

    Raise UserError before the weights are loaded if the config shows that the model is wrong for the task. The dtype is not that
    of the file, because training bf16 weights loses small updates.
    """
    model_kinds.check_config(auto_class.__name__, cfg.model, load_config(cfg))
    adapters = find_adapters(cfg.model, cfg.cache_dir)
    name = adapters.base if adapters else cfg.model
    if cfg.dtype != "float32" and not cfg.lora_r and not adapters:
        warn(f"--dtype {cfg.dtype}: the trained weights have 16 bits, so that small updates are lost in rounding.")
    options["dtype"] = getattr(torch, cfg.dtype)
    if cfg.attn_implementation != "auto":
        options["attn_implementation"] = cfg.attn_implementation
    if cfg.quantize != "no":
        options |= _quantization_options(cfg)
    options["output_loading_info"] = True
    place = _locate_base(cfg.model, adapters, cfg.cache_dir) if adapters else locate(name, cfg.cache_dir)
    model, info = from_pretrained(auto_class, name, place, **options)
    missing = {*info["missing_keys"], *(found[0] for found in info.get("mismatched_keys", ()))}
    model._new_modules = sorted({name.rpartition(".")[0] for name in missing})  # trained even if adapters freeze the rest
    model._adapters, model._source = adapters, name
    _check_positions(model, cfg)
    model_kinds.report_router_loss(model)
    model_kinds.report_new_weights(auto_class.__name__, model, missing, cfg.model)
    rows = model.get_input_embeddings().num_embeddings if tokenizer is not None else 0
    if tokenizer is not None and len(tokenizer) > rows:
        if cfg.lora_r or adapters:
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
    if cfg.lora_r or getattr(model, "_adapters", None):
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
    """Return the model with low-rank adapters. Everything else is frozen, except for new modules such as a new head.

    The adapters are new, or those that `--model` names.
    """
    import peft

    given = getattr(model, "_adapters", None)
    if not task:
        option = f"--model {cfg.model}" if given else f"--lora_r {cfg.lora_r}"
        raise UserError(f"{option}: the model of this recipe does not support adapters. Leave it out.")
    if cfg.quantize != "no":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets = list(cfg.lora_targets) or (None if model.config.model_type in known else "all-linear")
    config = _checked_config(given, model, cfg, task) if given else peft.LoraConfig(
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
    if given:
        _load_adapters(model, given, cfg)
    trained, total = model.get_nb_trainable_parameters()
    log.info(f"LoRA adapters of rank {config.r}: {trained:,} of {total:,} parameters are trained ({trained / total:.2%})")
    return model


def _checked_config(given: Adapters, model: Any, cfg: RecipeConfig, task: str) -> Any:
    """Return the config of the adapters, for training. Raise UserError if they do not fit the options or the recipe."""
    config = given.config
    if config.task_type not in (None, task):
        raise UserError(
            f"--model {cfg.model}: contains LoRA adapters for another task ({config.task_type}, and this recipe trains {task}). "
            f"To train new ones on the same model, use --model {given.base} --lora_r {config.r}."
        )
    differing = [
        f"--{name} {value} (the adapters have {own})"
        for name, value, own, unset in (
            ("lora_r", cfg.lora_r, config.r, 0),
            ("lora_alpha", cfg.lora_alpha, config.lora_alpha, type(cfg).lora_alpha),
            ("lora_targets", " ".join(cfg.lora_targets), "their own layers", ""),
        )
        if value not in (own, unset)
    ]
    if differing:
        raise UserError(
            f"{', '.join(differing)}: --model {cfg.model} contains LoRA adapters, which are trained further as they are. Leave these "
            f"options out. To train new adapters, use --model {given.base}."
        )
    kept = config.modules_to_save or []
    if lost := [name for name in model._new_modules if not any(name == one or name.endswith(f".{one}") for one in kept)]:
        raise UserError(
            f"--model {cfg.model}: contains LoRA adapters for {given.base}, but no weights for {', '.join(lost)}, which that model "
            f"lacks too. To train new adapters, use --model {given.base} --lora_r {config.r}."
        )
    config.inference_mode, config.task_type, config.base_model_name_or_path = False, task, None  # peft sets the last one
    config.lora_dropout = cfg.lora_dropout or config.lora_dropout
    config.modules_to_save = _distinct_modules(config.modules_to_save, model)
    return config


def _load_adapters(model: Any, given: Adapters, cfg: RecipeConfig) -> None:
    """Load the weights of the adapters. A head for other labels is replaced by a new one, as in a whole model."""
    import peft

    try:
        weights = peft.utils.load_peft_weights(given.place, device="cpu")
    except Exception as error:  # no such file, damaged, no network
        raise UserError(f"--model {cfg.model}: the weights of its adapters cannot be loaded: {error}") from error
    ours = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    strange = sorted(ours.keys() ^ weights.keys())
    other = [name for name in ours if name in weights and ours[name].shape != weights[name].shape]
    strange += [name for name in other if "lora_" in name]
    if strange:
        raise UserError(
            f"--model {cfg.model}: its adapters do not fit {given.base} in this recipe: {', '.join(strange[:3])}"
            f"{', ...' if strange[3:] else ''}. To train new adapters, use --model {given.base} --lora_r {given.config.r}."
        )
    if other:
        log.info(f"--model {cfg.model}: {', '.join(other)} are new, because the adapters were trained for other labels")
    peft.set_peft_model_state_dict(model, {name: (ours if name in other else weights)[name] for name in ours})


def _distinct_modules(names: list[str] | None, model: nn.Module) -> list[str] | None:
    """Return the names that modules of the model have, each of them once. peft adds usual names of heads to those given."""
    there = {name for name, _ in model.named_modules()}
    found = [one for one in dict.fromkeys(names or ()) if any(name == one or name.endswith(f".{one}") for name in there)]
    return found or None


def adapter_config(model: Any) -> dict[str, Any]:
    """Return the content of adapter_config.json, with an absolute path of a local model below the adapters."""
    base = model.get_base_model()
    config = model.peft_config["default"]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        values = json.loads((Path(folder) / "adapter_config.json").read_text())
    source = getattr(base, "_source", None) or config.base_model_name_or_path
    is_folder = not builtin.is_builtin("--model", source) and Path(source).expanduser().is_dir()
    return {
        **values,
        "target_modules": sorted(targets) if isinstance(targets := values["target_modules"], list) else targets,  # a set in peft
        "base_model_name_or_path": str(Path(source).expanduser().resolve()) if is_folder else source,
        "modules_to_save": _distinct_modules(values["modules_to_save"], base),
        "inference_mode": True,
    }
