"""LoRA adapters of a model: new ones, or those that `--model` names."""

import functools
import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from accel_ddp.config.train_config import ALL_LINEAR, RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.seeds import mixed
from accel_ddp.sources.builtin import PREFIX, TOKENIZER_FILES, from_pretrained, locate
from accel_ddp.sources.places import prepare_hub
from accel_ddp.text import listed

log = logging.getLogger(__name__)


class Adapters(NamedTuple):
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


@functools.cache  # the tokenizer, the config and the model need the folder
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


def locate_base(name: str, adapters: Adapters, cache_dir: str) -> str:
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


def add_adapters(model: nn.Module, cfg: RecipeConfig, task: str) -> nn.Module:
    """Return the model with low-rank adapters. Everything else is frozen, except for new modules such as a new head."""
    import peft

    given = getattr(model, "_adapters", None)
    if not task:
        option = f"--model {cfg.model}" if given else f"--lora_r {cfg.lora_r}"
        raise UserError(f"{option}: the model of this recipe does not support adapters. Leave it out.")
    known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets: Any = list(cfg.lora_targets)
    if targets == [ALL_LINEAR] or not targets:
        targets = None if not targets and model.config.model_type in known else ALL_LINEAR
    config = _checked_config(given, model, cfg, task) if given else peft.LoraConfig(
        task_type=task, r=cfg.lora_r, lora_alpha=cfg.lora_alpha, lora_dropout=cfg.lora_dropout, target_modules=targets,
        modules_to_save=model._new_modules or None,  # they are random: if frozen, their values would be in no file
        trainable_token_indices=_token_tables(model, getattr(model, "_new_tokens", ())) or None,
    )  # fmt: skip
    try:
        with torch.random.fork_rng():
            # The seed is independent of how much a new head has drawn before.
            torch.manual_seed(mixed(cfg.seed, "adapters") % 2**63)
            model = peft.get_peft_model(model, config)
    except ValueError as error:
        layers = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        reason = f"the model has no layer with this name. Its linear layers are: {', '.join(layers)}"
        raise UserError(f"--lora_targets {' '.join(cfg.lora_targets)}: {reason}.") from error
    for layer in model.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer) and _is_plain(layer):
            # Not a method, which pickle would look for in peft's class.
            layer.forward = functools.partial(_forward_at_once, layer)
        elif isinstance(layer, peft.tuners.trainable_tokens.TrainableTokensLayer):
            layer.trainable_tokens_delta.float()  # as all adapters
            layer.register_buffer("own_tokens", torch.tensor(layer.token_indices["default"]), persistent=False)
            layer.forward = functools.partial(_forward_tokens, layer)
    if given:
        _load_adapters(model, given, cfg)
    trained, total = model.get_nb_trainable_parameters()
    if not cfg.evaluate_only:
        log.info(f"LoRA adapters of rank {config.r}: {trained:,} of {total:,} parameters are trained ({trained / total:.2%})")
    return model


def trained_tokens(config: Any) -> list[int]:
    found = getattr(config, "trainable_token_indices", None) or {}
    return sorted({*found} if isinstance(found, list) else {token for tokens in found.values() for token in tokens})


def _token_tables(model: Any, tokens: Sequence[int]) -> dict[str, list[int]]:
    """Return the tokens by the names of the layers with their embeddings: the input layer, and a head with weights of its own."""
    tables = [model.get_input_embeddings(), model.get_output_embeddings()] if tokens else []
    distinct = {table.weight: table for table in reversed(tables) if table is not None}.values()
    return {name: [*tokens] for name, module in model.named_modules() if any(module is table for table in distinct)}


@torch.no_grad()
def add_token_rows(model: Any, num_tokens: int, tokens: Sequence[int]) -> None:
    """Let new tokens begin with the embedding of the end token: they end turns as it ends texts, and no rank draws values."""
    end = model.config.get_text_config().eos_token_id
    end = next(iter(end if isinstance(end, list) else [end]), 0)
    num_tokens = max(num_tokens, max(tokens) + 1)  # some vocabularies have gaps
    if len(model.get_input_embeddings().weight) < num_tokens:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        for values in (table.weight, getattr(table, "bias", None)) if table is not None else ():
            if values is not None:
                values[[*tokens]] = values[end or 0].clone()


def load_base(load: Callable[..., Any], place: str, config: Any, adapters: Any) -> Any:
    """Return `load(config=config)`, the model below adapters. If they train new tokens, it has fewer embeddings than `config` says."""
    from transformers import AutoConfig

    own, size = config.get_text_config(), 0
    if tokens := trained_tokens(adapters):
        size, own.vocab_size = own.vocab_size, AutoConfig.from_pretrained(place).get_text_config().vocab_size
    model = load(config=config, ignore_mismatched_sizes=True)
    if tokens:
        add_token_rows(model, size, tokens)
    return model


def _forward_tokens(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replace the embeddings or logits of new tokens. peft copies the whole table in every pass, and computes a gradient of it."""
    base, names = layer.base_layer, layer.active_adapters
    if layer.disable_adapters or layer.merged or len(names) != 1:
        return type(layer).forward(layer, x, *args, **kwargs)
    rows, out = layer.trainable_tokens_delta[names[0]], base(x)
    tokens = layer.own_tokens
    if isinstance(base, nn.Linear):
        bias = None if base.bias is None else base.bias[tokens].to(out.dtype)
        return out.index_copy(-1, tokens, F.linear(x.to(out.dtype), rows.to(out.dtype), bias).to(out.dtype))
    is_new, number = (x[..., None] == tokens).max(-1)
    scale = layer._get_embed_scale()  # of Gemma's embeddings
    new = rows[number].to(out.dtype)
    return torch.where(is_new[..., None], new if scale is None else new * scale.to(out.dtype), out)


class _AdaptedProduct(torch.autograd.Function):
    """x W^T + bias + scaling (x A^T) B^T above a frozen W, which may have 4 bits (`state`).

    The adapters add to the product in place, where peft writes and reads tensors of its size five more times. The backward pass needs
    x, which adapters with the same input share, and x A^T. It unpacks 4 bits again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, state: Any
    ) -> Tensor:
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        ctx.types, ctx.shape, ctx.scaling, ctx.state = (x.dtype, a.dtype, b.dtype), x.shape, scaling, state
        x, a, b = x.flatten(0, -2).to(dtype), a.to(dtype), b.to(dtype)
        low = x @ a.t()
        out = F.linear(x, _unpacked(weight, state, dtype), None if bias is None else bias.to(dtype))
        ctx.save_for_backward(x, weight, a, b, low)
        return out.addmm_(low, b.t(), alpha=scaling).view(*ctx.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        (x, weight, a, b, low), (of_x, of_a, of_b) = ctx.saved_tensors, ctx.types
        gradient = gradient.flatten(0, -2).to(x.dtype)
        d_low = (gradient @ b).mul_(ctx.scaling)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = (gradient @ _unpacked(weight, ctx.state, x.dtype)).addmm_(d_low, a).view(ctx.shape).to(of_x)
        d_a, d_b = (d_low.t() @ x).to(of_a), (gradient.t() @ low).to(of_b).mul_(ctx.scaling)
        return d_x, None, None, d_a, d_b, None, None


def _unpacked(weight: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    if state is None:
        return weight.to(dtype)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight, state).to(dtype)


def _is_plain(layer: Any) -> bool:
    """Return whether a LoRA layer of peft computes `_AdaptedProduct` and nothing else."""
    base, kinds = layer.get_base_layer(), ("Linear", "Linear4bit")
    if type(layer).__name__ not in kinds or type(base).__name__ not in kinds:
        return False
    has_bias = any(one.bias is not None for one in layer.lora_B.values())
    return not (layer.lora_variant or has_bias or any(type(one) is not nn.Identity for one in layer.lora_dropout.values()))


def _forward_at_once(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    base, (name, *others), usual = layer.base_layer, layer.active_adapters or [""], type(layer).forward
    weight, bias, state = base.weight, base.bias, getattr(base.weight, "quant_state", None)
    trains_base = weight.requires_grad or (bias is not None and bias.requires_grad)
    if layer.disable_adapters or layer.merged or name not in layer.lora_A or others or args or kwargs or trains_base:
        return usual(layer, x, *args, **kwargs)
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    can = torch.is_autocast_enabled(x.device.type)  # otherwise peft converts between the types of adapters and weights
    if weight.is_floating_point():
        can = can or x.dtype == weight.dtype == a.dtype
    else:  # bitsandbytes multiplies few rows, as in a generation, without unpacking
        can = can and state is not None and torch.is_grad_enabled()
    return _AdaptedProduct.apply(x, weight, bias, a, b, layer.scaling[name], state) if can else usual(layer, x)


def _checked_config(given: Adapters, model: Any, cfg: RecipeConfig, task: str) -> Any:
    """Return the config of the adapters, for training. Raise UserError if they do not fit the options or the recipe."""
    config = given.config
    instead = f"To train new ones on the same model, use --model {given.base} --lora_r {config.r}."
    if config.task_type not in (None, task):
        found = f"LoRA adapters for another task ({config.task_type}, and this recipe trains {task})"
        raise UserError(f"--model {cfg.model}: contains {found}. {instead}")
    options = [("lora_r", cfg.lora_r, config.r, 0), ("lora_alpha", cfg.lora_alpha, config.lora_alpha, type(cfg).lora_alpha)]
    targets = " ".join(cfg.lora_targets)  # "" in runs of older versions of sft
    options.append(("lora_targets", targets, "their own layers", targets and " ".join(type(cfg).lora_targets)))
    differing = [f"--{name} {value} (the adapters have {own})" for name, value, own, no in options if value not in (own, no)]
    if differing:
        reason = f"--model {cfg.model} contains LoRA adapters, which are trained further as they are. Leave these options out"
        raise UserError(f"{', '.join(differing)}: {reason}. To train new adapters, use --model {given.base}.")
    kept = config.modules_to_save or []
    if lost := [name for name in model._new_modules if not any(f".{name}".endswith(f".{one}") for one in kept)]:
        raise UserError(
            f"--model {cfg.model}: contains LoRA adapters for {given.base}, but no weights for {', '.join(lost)}, which that model "
            f"lacks too. {instead}"
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
    other = [name for name in ours if name in weights and ours[name].shape != weights[name].shape]
    if strange := [*sorted(ours.keys() ^ weights.keys()), *(name for name in other if "lora_" in name)]:
        raise UserError(
            f"--model {cfg.model}: its adapters do not fit {given.base} in this recipe: {listed(strange)}. To train new adapters, use "
            f"--model {given.base} --lora_r {given.config.r}."
        )
    if other:
        log.info(f"--model {cfg.model}: {', '.join(other)} are new, because the adapters were trained for other labels")
    peft.set_peft_model_state_dict(model, {name: (ours if name in other else weights)[name] for name in ours})


def _distinct_modules(names: list[str] | None, model: nn.Module) -> list[str] | None:
    """Return the names that modules of the model have, each of them once. peft adds usual names of heads to those given."""
    there = [f".{name}" for name, _ in model.named_modules()]
    return [one for one in dict.fromkeys(names or ()) if any(name.endswith(f".{one}") for name in there)] or None


def adapter_config(model: Any) -> dict[str, Any]:
    base, config = model.get_base_model(), model.peft_config["default"]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        values = json.loads((Path(folder) / "adapter_config.json").read_text())
    source = getattr(base, "_source", None) or config.base_model_name_or_path
    is_folder = not source.startswith(PREFIX) and Path(source).expanduser().is_dir()
    return {
        **values,
        "target_modules": sorted(targets) if isinstance(targets := values["target_modules"], list) else targets,  # a set in peft
        "base_model_name_or_path": str(Path(source).expanduser().resolve()) if is_folder else source,
        "modules_to_save": _distinct_modules(values["modules_to_save"], base),
        "inference_mode": True,
    }
