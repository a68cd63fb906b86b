"""Which models suit a task. Many can be loaded for a task and then learn something else without an error."""

from typing import Any

import torch
from torch import Tensor, nn

from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import print_on_main
from accel_ddp.ranks.shards import is_sharded
from accel_ddp.sources.places import warn
from accel_ddp.training.sharding import autocast, gathered, recover

# What to use instead, by the task: the class with which a recipe loads its model, or "embeddings".
INSTEAD = {
    "AutoModelForCausalLM": "Use a causal language model, for example HuggingFaceTB/SmolLM2-135M-Instruct",
    "AutoModelForMaskedLM": "Use an encoder, for example FacebookAI/roberta-base",
    "AutoModelForSequenceClassification": "Use an encoder, for example FacebookAI/roberta-base",
    "AutoModelForSeq2SeqLM": "Use an encoder-decoder model, for example google-t5/t5-small",
    "embeddings": "Use an encoder, for example BAAI/bge-small-en-v1.5",
    "rewards": "Use a chat model, for example HuggingFaceTB/SmolLM2-135M-Instruct, or train an encoder with recipes/rerank.py",
}
READS = "would read the answers that it learns"


def check_config(task: str, name: str, config: Any) -> None:
    """Raise UserError if the config shows that the model is wrong for the task (see `INSTEAD`)."""
    kind = config.model_type
    is_pair = bool(getattr(config, "is_encoder_decoder", False))
    is_causal = _is_causal_encoder(config)
    pair = f"is an encoder-decoder model ({kind}), whose"
    by_first = f"is causal, but {kind} models classify by their first token, which would see no other token"
    # For each task: whether the model is wrong, the reason, and the recipe that trains such a model.
    rules: dict[str, list[tuple[bool | None, str, str]]] = {
        "AutoModelForCausalLM": [
            (is_pair, f"{pair} encoder would be left out", "seq2seq"),
            (is_causal is False, f"is an encoder ({kind}): a token sees the tokens after it, so it {READS}", "pretrain_mlm"),
        ],
        "AutoModelForMaskedLM": [
            (is_pair, f"{pair} decoder would be given masked tokens", "seq2seq"),
            (is_causal, "is causal: a masked token would not see the tokens after it", "sft"),
        ],
        "AutoModelForSequenceClassification": [(is_causal, by_first, "")],
        "AutoModelForSeq2SeqLM": [(not is_pair, f"is not an encoder-decoder model ({kind})", "")],
        "rewards": [(is_causal is False, f"is an encoder ({kind}), and rewards are read at the last token of a chat", "")],
        "embeddings": [
            (is_pair, f"{pair} embeddings would come from its decoder", ""),
            (not hasattr(config, "hidden_size"), f"is not a model of texts alone ({kind})", ""),
        ],
    }
    for is_wrong, reason, recipe in rules.get(task, ()):
        if is_wrong:
            other = f", or use this model with recipes/{recipe}.py" if recipe else ""
            raise UserError(f"--model {name}: {reason}. {INSTEAD[task]}{other}.")


def _is_causal_encoder(config: Any) -> bool | None:
    """Return whether a model of a type that exists as an encoder is used as a decoder. Return None for other types."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return None
    return bool(getattr(config, "is_decoder", False) or getattr(config, "causal", False))  # XLM names it `causal`


@torch.no_grad()
def is_causal(model: nn.Module, tokenizer: Any, device: torch.device) -> bool | None:
    """Return whether no token sees the tokens behind it, or None if the model does not compute a text of 8 tokens.

    The config does not always show it. Two texts that differ in their last token are therefore compared. The model is moved to
    the device, where it takes milliseconds.
    """
    known, ids = _is_causal_encoder(model.config), _ordinary_tokens(model, tokenizer, device)
    if known is not None or len(ids) < 9:
        return known
    texts = torch.stack([ids[:8], torch.cat([ids[:7], ids[8:]])])
    scores = _try_scores(model, device, input_ids=texts, attention_mask=torch.ones_like(texts))
    if scores is None:
        return None
    a, b = scores.float()
    apart = torch.where(a == b, 0, a - b).abs().flatten(1).amax(1)  # a logit of -inf equals itself
    if not apart.isfinite().all():  # NaN is no evidence, and training reports it
        return None
    return bool(apart[:-1].max() <= _allowed(scores) * apart[-1])


def _allowed(scores: Tensor) -> float:
    return 1e-4 if scores.dtype in (torch.float32, torch.float64) else 3e-2


def _ordinary_tokens(model: nn.Module, tokenizer: Any, device: torch.device) -> Tensor:
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}  # an image token needs an image
    ordinary = [token for token in range(min(len(tokenizer), num_embeddings(model))) if token not in special]
    return torch.tensor(ordinary[:: max(1, len(ordinary) // 9)][:9], device=device)


def _try_scores(model: nn.Module, device: torch.device, **inputs: Any) -> Tensor | None:
    """Return the logits or hidden states of a model in eval mode, or None if the model cannot compute them."""
    was_training = model.training
    if not getattr(model, "is_quantized", False) and not is_sharded(model):
        model.to(device)
    model.eval()
    try:
        with gathered(model), autocast(model, device):
            output = model(**inputs)
        return output.logits if "logits" in output else output.last_hidden_state
    except torch.OutOfMemoryError:
        raise
    except Exception:  # training reports what the model does not accept
        if is_sharded(model):
            recover(model)
        return None
    finally:
        model.train(was_training)


def num_embeddings(model: nn.Module) -> int:
    """Return how many tokens have embeddings, or 0 without a table: CANINE hashes characters, Perceiver's has latents."""
    try:
        table = model.get_input_embeddings()
    except NotImplementedError:
        return 0
    table = getattr(table, "weight", None)  # I-BERT and adapters have tables of their own classes
    return len(table) if isinstance(table, Tensor) else 0


def require_causal(model: nn.Module, tokenizer: Any, device: torch.device, name: str) -> None:
    if is_causal(model, tokenizer, device) is False:
        reason = f"its output for a token depends on the tokens after it, so it {READS}. {INSTEAD['AutoModelForCausalLM']}"
        raise UserError(f"--model {name}: {_class_name(model)} is not causal: {reason}.")


@torch.no_grad()
def why_mixed(model: nn.Module, tokenizer: Any, device: torch.device) -> str:
    """Return why documents that share a row would have another result than alone, or "" if they have the same.

    Two rows end with the same document and begin with different ones. Rounding does not change between them, because they have the
    same shape, so a small difference is found too.
    """
    ids = _ordinary_tokens(model, tokenizer, device)
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    if {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"} or len(ids) < 9:
        return "not all of its layers are attention layers"
    rows, positions = torch.stack([ids[:8], torch.cat([ids[5:], ids[4:8]])]), torch.arange(4, device=device).repeat(2, 2)
    packed = _try_scores(model, device, input_ids=rows, position_ids=positions, use_cache=False)
    alone = _try_scores(model, device, input_ids=rows[:, 4:], position_ids=positions[:, 4:], use_cache=False)
    if packed is None or alone is None:
        return "it takes no positions"
    apart = [(a - b).abs().max().float() for a, b in ((packed[0, 4:], packed[1, 4:]), (packed[:, 4:], alone))]
    allowed, largest = _allowed(alone), alone.abs().max().float()
    is_same = apart[0] <= allowed / 100 * largest and apart[1] <= allowed * largest
    return "" if is_same or not largest.isfinite() else "they would see each other"


def report_causal(model: nn.Module, tokenizer: Any, device: torch.device, name: str, first_token: str = "") -> None:
    """Warn if tokens do not see later tokens. Raise UserError instead if the option `first_token` reads only the first token."""
    if not is_causal(model, tokenizer, device):
        return
    reason = f"{_class_name(model)} is causal"
    if first_token:
        raise UserError(
            f"{first_token}: --model {name}: {reason}, so its first token sees no other token and is the same for all texts. "
            f"{INSTEAD['embeddings']}."
        )
    warn(f"--model {name}: {reason}: a token does not see the tokens after it. Encoders are usually better for this task.")


def report_router_loss(model: nn.Module) -> None:
    """State that the auxiliary loss of a mixture of experts is off. Its logits are turned off, as padding-free needs."""
    configs = [model.config, getattr(model.config, "text_config", None)]
    owners = (*configs, model)  # some models store the factor themselves
    factors = (getattr(one, key, None) for one in owners for key in ("router_aux_loss_coef", "aux_loss_coef"))
    factor = next((factor for factor in factors if isinstance(factor, float) and factor), 0)
    if not factor or not any("expert" in key or "router" in key for key, _ in model.named_parameters()):
        return
    for config in configs:
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False
    state = f"the router's auxiliary loss (factor {factor:g} in the config) is off"
    print_on_main(f"mixture of experts: {state}. Only the loss of the task is learned; docs/exactness.md explains why.")


def keep_weights_in_eval(model: nn.Module) -> None:
    """Turn off RWKV's `rescale_every`, which halves weights in place in eval mode, against overflow in float16."""
    if getattr(model.config, "rescale_every", 0):
        model._exported_values = {"rescale_every": model.config.rescale_every}
        model.config.rescale_every = 0


def report_new_weights(task: str, model: nn.Module, missing: set[str], name: str) -> None:
    """Warn if a language model lacks weights (`missing` in its files), or any model most of them. A new head is usual."""
    number = len(model.state_dict())
    if missing and (task in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM") or len(missing) > number / 2):
        warn(
            f"--model {name}: its files have no weights for {len(missing):,} of {number:,} tensors of {_class_name(model)}, for "
            f"example {min(missing)}. These begin at random values. Was the model saved for another task?"
        )


def _class_name(model: nn.Module) -> str:
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__  # without adapters
