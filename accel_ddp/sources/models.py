"""Models and tokenizers from the Hub, from a folder or from an installed package, and their preparation for training."""

import copy
import hashlib
import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_ddp import compat
from accel_ddp.config.choices import choose, was_auto
from accel_ddp.config.optimizer_options import OPTIMIZERS
from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.ranks.agreement import together
from accel_ddp.sources import model_kinds
from accel_ddp.sources.adapters import Adapters, add_adapters, add_token_rows, find_adapters, locate_base, trained_tokens
from accel_ddp.sources.builtin import PREFIX, TOKENIZER_FILES, from_pretrained, has_tokenizer, locate
from accel_ddp.sources.places import warn
from accel_ddp.sources.sharded_loading import RowLoader, copied_modules, shard_loaded
from accel_ddp.text import format_si
from accel_ddp.training.optim import freeze
from accel_ddp.training.sharding import plan_of, sharding_options

log = logging.getLogger(__name__)


def load_tokenizer(cfg: RecipeConfig, max_length: int | str = 0, task: str = "") -> Any:
    """Return the tokenizer of `--model`, with a padding token. Raise UserError if it allows fewer than `max_length` tokens.

    0 and "auto" are no limits. With `task`, raise UserError first if the model is wrong for it, before rows are tokenized; see
    `model_kinds.check_config`.
    """
    from transformers import AutoTokenizer

    if task:
        model_kinds.check_config(task, cfg.model, load_config(cfg))
    name = cfg.model
    place = locate(name, cfg.cache_dir)
    if adapters := find_adapters(name, cfg.cache_dir):
        place = adapters.place if has_tokenizer(adapters.place) else locate_base(name, adapters, cfg.cache_dir)
    if Path(place).is_dir() and not has_tokenizer(place):
        instead = "Save one there: tokenizer.save_pretrained(folder)"
        raise UserError(f"--model {name}: the folder has no tokenizer ({', '.join(TOKENIZER_FILES[:2])}). {instead}.")
    tokenizer = from_pretrained(AutoTokenizer, name, place)
    if tokenizer.pad_token is None:  # for example GPT-2; padding is masked, so any token can be used
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
    if tokenizer.pad_token is None:
        raise UserError(f"--model {name}: the tokenizer has no padding token. Set tokenizer.pad_token, and save the tokenizer.")
    if max_length not in (0, "auto"):  # both limits at once, because a run with the first one would name the second one
        _check_length(max_length, name, tokenizer.model_max_length, getattr(load_config(cfg), "max_position_embeddings", None))
    return tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of everything that affects the tokens of a text, for the cache key of tokenized data."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))
    settings = [type(tokenizer).__name__, tokenizer.model_input_names, str(tokenizer.special_tokens_map)]
    return hashlib.blake2b(f"{[*settings, tokenizer.truncation_side]}{vocabulary}".encode(), digest_size=16).hexdigest()


def load_config(cfg: RecipeConfig) -> Any:
    from transformers import AutoConfig

    adapters = find_adapters(cfg.model, cfg.cache_dir)
    place = locate_base(cfg.model, adapters, cfg.cache_dir) if adapters else locate(cfg.model, cfg.cache_dir)
    return from_pretrained(AutoConfig, cfg.model, place)


def label_names(cfg: RecipeConfig) -> list[str]:
    """Return the names of the classes of the model that `--evaluate_only` names, in order, or [] if it has none or trains."""
    if not cfg.evaluate_only:
        return []
    place = Path(cfg.evaluate_only)
    folders = (place / "files" / "base", place / "files", place / "base", place)  # of checkpoints and of exported folders
    config = next((json.loads(path.read_text()) for folder in folders if (path := folder / "config.json").is_file()), {})
    names = config.get("id2label", {}) if place.exists() else load_config(cfg).id2label
    return [names[key] for key in sorted(names, key=int)] or [f"LABEL_{number}" for number in range(2 if config else 0)]


def weights_dtype(cfg: RecipeConfig, config: Any, is_adapted: bool, precision: str) -> tuple[str, str]:
    """Return the dtype of `--dtype`, and the reason if `auto` had a choice: the files have 16 bits, but trained weights need 32.

    Under adapters the weights are frozen. They keep the dtype of the files if mixed precision computes in 16 bits anyway.
    """
    stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
    if cfg.dtype != "auto":
        return cfg.dtype, ""
    if cfg.quantize != "no" and precision in ("bf16", "fp16"):
        narrow = {"bf16": "bfloat16", "fp16": "float16"}[precision]
        return narrow, "embeddings, norms and head under --quantize, which are frozen; adapters have float32"
    if stored not in ("bfloat16", "float16"):
        return "float32", ""
    if not is_adapted:
        return "float32", f"trained weights lose small updates in {stored}, in which the model is stored"
    if precision not in ("bf16", "fp16"):
        return "float32", f"the model is stored in {stored}, and is computed in float32 because mixed precision is off"
    return stored, "as the model is stored, because its weights are frozen; adapters have float32"


# Learning rates of AdamW for models with fewer parameters than the first number. Adapters need about ten times the learning rate of
# whole models; 2e-4, and 1e-4 from 30 billion parameters on, are those of the QLoRA paper.
WHOLE_LR, ADAPTER_LR = {1e9: 5e-5, 14e9: 2e-5, math.inf: 1e-5}, {1e9: 5e-4, 30e9: 2e-4, math.inf: 1e-4}
NEW_MODELS, NEW_LR = f"{PREFIX}tiny-", 2e-3  # the built-in models with random weights


def default_lr(name: str, size: int, is_adapted: bool, part: float = 1.0, loss: str = "") -> tuple[float, str]:
    """Return the learning rate of `--lr auto` for a model with `size` parameters, and the reason.

    A recipe whose loss needs a `part` of the learning rate of fine-tuning has a method `lr_part`, which returns it and the loss.
    """
    if name.startswith(NEW_MODELS):
        return NEW_LR, "this built-in model starts with random weights"
    rate = next(rate for limit, rate in (ADAPTER_LR if is_adapted else WHOLE_LR).items() if size < limit)
    count = format_si(size).replace(" ", "").replace("G", "B")
    reason = f"{'LoRA adapters' if is_adapted else 'all weights'} of a model with {count} parameters"
    return float(f"{rate * part:.3g}"), f"{reason}, {loss}" if loss else reason


def load(
    auto_class: Any, cfg: RecipeConfig, tokenizer: Any = None, *, plan: ShardingPlan | None = None, **options: Any
) -> nn.Module:
    """Return the model of `--model`, with weights of `--dtype` and embeddings for all tokens of the tokenizer.

    Raise UserError before the weights are loaded if the config shows that the model is wrong for the task. `--dtype auto` and
    `--lr auto` are set here. With a `plan`, each rank reads only its rows of the weights; `prepare` shards the model.
    """
    config = load_config(cfg)
    model_kinds.check_config(auto_class.__name__, cfg.model, config)
    if not hasattr(config, "pad_token_id"):  # transformers would pass it to the model instead
        options.pop("pad_token_id", None)
    adapters = find_adapters(cfg.model, cfg.cache_dir)
    name = adapters.base if adapters else cfg.model
    if cfg.lr == "auto" and (usual := OPTIMIZERS[cfg.optimizer].usual_lr) and not cfg.model.startswith(NEW_MODELS):
        instead = f"Give one, for example --lr {usual:g}"
        raise UserError(f"--optimizer {cfg.optimizer} --lr auto: auto knows the learning rates of AdamW only. {instead}.")
    is_adapted = bool(cfg.lora_r or adapters)
    new_tokens = _find_new_tokens(cfg, tokenizer, adapters, plan)
    dtype, reason = weights_dtype(cfg, config, is_adapted, cfg.mixed_precision)
    if reason:
        choose(cfg, "dtype", dtype, reason)
    elif dtype != "float32" and not is_adapted:
        warn(f"--dtype {cfg.dtype}: the trained weights have 16 bits, so small updates are lost in rounding.")
    cfg.dtype = dtype
    options["dtype"] = getattr(torch, dtype)
    if cfg.attn_implementation != "auto":
        options["attn_implementation"] = cfg.attn_implementation
    if cfg.quantize != "no":
        options |= _quantization_options(cfg)
    options["output_loading_info"] = True
    place = locate_base(cfg.model, adapters, cfg.cache_dir) if adapters else locate(name, cfg.cache_dir)
    model_rows: dict[nn.Parameter, Tensor] = {}  # of this rank, if the model will be sharded
    if plan:
        num_tokens = len(tokenizer) if tokenizer is not None else 0
        num_tokens = sys.maxsize if new_tokens else num_tokens  # their embeddings are written even if the table has room for them
        loader = RowLoader(plan, num_tokens, copied_modules(cfg.lora_r, adapters))
        with together(f"load --model {cfg.model}") as facts:  # a rank whose rows can be read stops too
            model, info = loader.from_pretrained(auto_class, name, place, **options)
            facts[f"The weights of --model {cfg.model}"] = loader.digest
        model_rows = loader.rows
    else:
        model, info = from_pretrained(auto_class, name, place, **options)
    missing = {*info["missing_keys"], *(found[0] for found in info.get("mismatched_keys", ()))}
    model._new_modules = sorted({name.rpartition(".")[0] for name in missing})  # trained even if adapters freeze the rest
    for new in model._new_modules if was_auto(cfg, "dtype") else ():
        model.get_submodule(new).float()
    model._adapters, model._source, model._rows = adapters, name, model_rows
    if cfg.lr == "auto":
        part = cfg.lr_part() if hasattr(cfg, "lr_part") else ()
        choose(cfg, "lr", *default_lr(cfg.model, model.num_parameters(), is_adapted, *part))
    model._stored_dtype = config.dtype  # in which the model is exported
    # Some tokenizers do not define `model_max_length`.
    _check_length(getattr(cfg, "max_length", 0), cfg.model, getattr(model.config, "max_position_embeddings", None))
    model_kinds.report_router_loss(model)
    model_kinds.keep_weights_in_eval(model)
    model_kinds.report_new_weights(auto_class.__name__, model, missing, cfg.model)
    rows = model_kinds.num_embeddings(model) if tokenizer is not None else 0
    model._new_tokens = new_tokens
    if new_tokens:
        add_token_rows(model, len(tokenizer), new_tokens)
    elif rows and len(tokenizer) > rows:
        if cfg.lora_r or adapters:
            raise UserError(
                f"--lora_r {cfg.lora_r}: the tokenizer has {len(tokenizer):,} tokens, but the model has {rows:,} embeddings. "
                "Adapters would freeze the new embeddings at their random values. Leave --lora_r out, or use another tokenizer."
            )
        log.info(f"the tokenizer has {len(tokenizer):,} tokens, and the model has {rows:,} embeddings: new ones are added")
        model.resize_token_embeddings(len(tokenizer))
    if cfg.quantize != "no":  # for the weights as they were; adapters can be used with these too, without a GPU
        model._original_config = copy.deepcopy(model.config)
        del model._original_config.quantization_config
    return model


def _find_new_tokens(cfg: RecipeConfig, tokenizer: Any, adapters: Adapters | None, plan: ShardingPlan | None) -> list[int]:
    """Return the tokens that a chat template has added, or with which adapters were trained. Raise UserError if they cannot be."""
    new, known = getattr(tokenizer, "new_token_ids", []), trained_tokens(adapters.config) if adapters else []
    name = f"--chat_template {getattr(cfg, 'chat_template', '')}"
    if adapters and new:
        instead = f"Use --chat_template plain, or train new adapters: --model {adapters.base} --lora_r {adapters.config.r}"
        raise UserError(f"{name}: adds tokens to the model, which the adapters in --model {cfg.model} lack. {instead}.")
    if new and cfg.lora_r and plan:
        raise UserError(
            f"{name} --lora_r {cfg.lora_r}: adds tokens to the model, and FSDP shards their embeddings, which adapters would need. Use "
            "--chat_template plain, leave --lora_r out, or train with DDP: accelerate_configs/1node.yaml or 2node.yaml."
        )
    return known or new


def _check_length(max_length: int, name: str, *limits: int | None) -> None:
    most = min((limit for limit in limits if limit and limit > 0), default=max_length)
    if max_length > most:
        raise UserError(f"--max_length {max_length}: {name} accepts at most {most} tokens. Use --max_length {most}.")


def _quantization_options(cfg: RecipeConfig) -> dict[str, Any]:
    from importlib.util import find_spec

    from transformers import BitsAndBytesConfig

    if not torch.cuda.is_available():
        raise UserError(f"--quantize {cfg.quantize}: needs bitsandbytes and a GPU, and there is no GPU. Leave it out.")
    if find_spec("bitsandbytes") is None:
        raise UserError(f"--quantize {cfg.quantize}: needs bitsandbytes. Install it: pip install bitsandbytes")
    computed_in = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": computed_in}
    choice = BitsAndBytesConfig(load_in_8bit=True) if cfg.quantize == "8bit" else BitsAndBytesConfig(load_in_4bit=True, **kind)
    return {"quantization_config": choice, "device_map": {"": torch.cuda.current_device()}}


# The PEFT task of each class. A class without one supports no adapters.
LORA_TASKS = {
    "AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM", "AutoModel": "FEATURE_EXTRACTION",
    "AutoModelForMaskedLM": "FEATURE_EXTRACTION",
}  # fmt: skip


def build(
    name: str, cfg: RecipeConfig, accelerator: Accelerator, tokenizer: Any, adjust: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> nn.Module:  # fmt: skip
    """Return the model of `--model` as this class of transformers, loaded and prepared. A head for other labels is replaced.

    `adjust(model)` changes the model before it gets adapters and is sharded.
    """
    import transformers

    if name == "AutoModelForSequenceClassification":
        options["pad_token_id"] = tokenizer.pad_token_id
    if name.endswith("Classification"):
        options["ignore_mismatched_sizes"] = True
    model = load(getattr(transformers, name), cfg, tokenizer, plan=plan_of(accelerator), **options)
    if adjust:
        adjust(model)
    model = prepare(model, cfg, accelerator, lora_task=LORA_TASKS[name])
    if name == "AutoModelForCausalLM":
        model_kinds.require_causal(model, tokenizer, accelerator.device, cfg.model)
    elif name == "AutoModelForTokenClassification":
        model_kinds.report_causal(model, tokenizer, accelerator.device, cfg.model)
    return model


def prepare(model: nn.Module, cfg: RecipeConfig, accelerator: Accelerator, lora_task: str = "") -> nn.Module:
    """Return the model with adapters, frozen parameters, gradient checkpointing and batch norm as the options define them.

    The model is sharded if the accelerate config asks for that. Call it before the optimizer is built. `lora_task` is the PEFT task
    type; "" for a model that supports no adapters.
    """
    rows, plan = model.__dict__.pop("_rows", {}), plan_of(accelerator)
    model = adapt(model, cfg, lora_task, plan)
    has_batch_norm = compat.has_batch_norm(model)
    if cfg.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if accelerator.ddp_handler is not None and cfg.broadcast_buffers == "auto":
        # Other buffers, for example position ids, never change. A broadcast in every step would be wasted.
        accelerator.ddp_handler.broadcast_buffers = has_batch_norm
    if plan:
        shard_loaded(model, rows, plan, *sharding_options(accelerator, cfg))
    return model


def adapt(model: nn.Module, cfg: RecipeConfig, lora_task: str = "", plan: ShardingPlan | None = None) -> nn.Module:
    """Return the model with gradient checkpointing, adapters and frozen parameters. It may be on the meta device."""
    if cfg.gradient_checkpointing is True:
        if not getattr(model, "supports_gradient_checkpointing", False):
            in_config = "fsdp_activation_checkpointing: true in the accelerate config"
            name = in_config if plan and plan.activation_checkpointing else "--gradient_checkpointing"
            raise UserError(f"{name}: {type(model).__name__} does not support it. Leave it out.")
        compat.checkpoint_layers(model)
    if cfg.lora_r or getattr(model, "_adapters", None):
        model = add_adapters(model, cfg, lora_task)
    elif cfg.lora_dropout:
        raise UserError(f"--lora_dropout {cfg.lora_dropout}: needs --lora_r, for example --lora_r 16.")
    freeze(model, cfg.freeze)
    return model
