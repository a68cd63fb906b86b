"""Build tiny models of many architectures from their configs, train them on this number of ranks, and write the results to OUT.

For each model the weights after some updates are compared with those of a plain PyTorch loop on one process, with those of other
micro-batches, and with those of a resumed run. The padding check of `fit` is applied to each of them too.
"""

import contextlib
import copy
import dataclasses
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.rows import Collate, accept_rows
from accel_ddp.engine.terms import Terms
from accel_ddp.entry import run
from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.ranks.agreement import gather_everywhere
from accel_ddp.ranks.shards import full
from accel_ddp.ranks.team import Team
from accel_ddp.saving import state_tensors
from accel_ddp.training import padding_check, sharding

VOCABULARY, LABELS, LONGEST, STEPS = 96, 3, 24, 2
SIZE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZE, "num_key_value_heads": 1}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64, "scale_embedding": False,
}  # fmt: skip
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 4,
}
LONGROPE = {
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    "original_max_position_embeddings": 12,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 12}

# The name of each class without its ending, and the options of its config.
ENCODERS = {
    "Albert": {**SIZE, "embedding_size": 8},
    "Bert": SIZE,
    "BigBird": {**SIZE, "attention_type": "original_full"},
    "Camembert": SIZE,
    "ConvBert": {**SIZE, "embedding_size": 16, "head_ratio": 1, "num_groups": 1},
    "Data2VecText": SIZE,
    "Deberta": {**SIZE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "DebertaV2": {**SIZE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
    "DistilBert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 64},
    "Electra": {**SIZE, "embedding_size": 8},
    "Ernie": SIZE,
    "FNet": SIZE,
    "Funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32},
    "Longformer": {**SIZE, "attention_window": 8},
    "ModernBert": {**SIZE, "global_attn_every_n_layers": 2, "local_attention": 8},
    "MPNet": SIZE,
    "Nystromformer": {**SIZE, "num_landmarks": 4, "segment_means_seq_len": 4},
    "RemBert": {**SIZE, "input_embedding_size": 8, "output_embedding_size": 8},
    "Roberta": SIZE,
    "RoFormer": {**SIZE, "embedding_size": 16},
    "SqueezeBert": {**SIZE, "embedding_size": 16, "q_groups": 1, "k_groups": 1, "v_groups": 1, "post_attention_groups": 1,
                    "intermediate_groups": 1, "output_groups": 1},
    "XLMRoberta": SIZE,
    "XLNet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
}  # fmt: skip
DECODERS = {
    "Bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "CodeGen": {**GPT, "n_head": 4, "rotary_dim": 4},
    "Cohere": GROUPED,
    "Falcon": {**SIZE, "alibi": False, "new_decoder_architecture": False},
    "Gemma": {**GROUPED, "head_dim": 8},
    "Gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 8},
    "Gemma3": {**GROUPED, "head_dim": 8, "sliding_window": 8},
    "GPT2": GPT,
    "GPTJ": {**GPT, "rotary_dim": 4},
    "GPTNeoX": SIZE,
    "Granite": GROUPED,
    "GraniteMoe": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Llama": GROUPED,
    "Mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "Mistral": {**GROUPED, "sliding_window": 8},
    "Mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Mpt": {"d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 64},
    "Olmo": GROUPED,
    "Olmo2": GROUPED,
    "OPT": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "word_embed_proj_dim": 16,
            "max_position_embeddings": 64},
    "Phi": GROUPED,
    "Phi3": {**GROUPED, "sliding_window": None},
    "Qwen2": GROUPED,
    "Qwen3": {**GROUPED, "head_dim": 8},
    "SmolLM3": GROUPED,
    "StableLm": GROUPED,
}  # fmt: skip
HEADS = {**GROUPED, "head_dim": 8}
LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR = {**HEADS, **LINEAR, "layer_types": ["linear_attention", "full_attention"]}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MAMBA = {"mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_heads": 4, "mamba_d_head": 8}
RECENT = {  # decoders of 2025 and 2026
    "Bamba": {**HEADS, **MAMBA, "attn_layer_indices": [1]},
    "DeepseekV3": {**HEADS, **ROUTED, **LATENT, "num_key_value_heads": 2, "q_lora_rank": 8, "n_group": 1, "topk_group": 1},
    "Doge": {**GROUPED, "keep_window_size": 64},
    "Exaone4": HEADS,
    "FalconH1": {**HEADS, **MAMBA, "mamba_d_ssm": 32},
    "Glm4Moe": {**HEADS, **ROUTED},
    "GptOss": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "GraniteMoeHybrid": {**HEADS, **MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
                         "layer_types": ["mamba", "attention"]},
    "Jamba": {**HEADS, "num_experts": 4, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinear": {**HEADS, **LATENT, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16,
                   "linear_head_dim": 8, "linear_num_heads": 2, "num_hidden_layers": 4},
    "Lfm2": {**HEADS, "block_ff_dim": 32, "full_attn_idxs": [1]},
    "Mamba2": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 1,
               "chunk_size": 8},
    "MiniMaxM3VL": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 32, "rotary_dim": 4,
                    "shared_intermediate_size": 16, "index_n_heads": 1, "index_head_dim": 8, "index_block_size": 4,
                    "index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    "Ministral3": HEADS,
    "Olmo3": {**HEADS, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "OlmoHybrid": LINEAR,
    "Qwen3Moe": {**HEADS, **MOE},
    "Qwen3Next": {**LINEAR, **MOE},
    "Qwen3_5": LINEAR,
    "Qwen3_5Moe": {**LINEAR, **MOE},
}  # fmt: skip
SEQ2SEQ = {"Bart": BART, "Marian": BART, "MBart": BART, "MT5": T5, "Pegasus": BART, "T5": T5}
IMAGES = {
    "ConvNext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4, "image_size": 16},
    "DeiT": VIT,
    "Swin": {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
    "ViT": VIT,
}
SPECIAL = {  # other heads and settings of some of these models: the kind of the task, the class, and the options
    "BigBird, sparse": ("texts", "BigBird", {**SIZE, "attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}),
    "Llama, classes": ("texts", "Llama", GROUPED),
    "Llama, dynamic rope": ("tokens", "Llama", {**GROUPED, **DYNAMIC}),
    "Phi3, longrope": ("tokens", "Phi3", {**GROUPED, "sliding_window": None, **LONGROPE}),
}
ALL = {
    **{name: ("texts", name, options) for name, options in ENCODERS.items()},
    **{name: ("tokens", name, options) for name, options in DECODERS.items()},
    **{name: ("tokens", name, options) for name, options in RECENT.items()},
    **{name: ("pairs", name, options) for name, options in SEQ2SEQ.items()},
    **{name: ("images", name, options) for name, options in IMAGES.items()},
    **SPECIAL,
}
ENDINGS = {
    "texts": ["ForSequenceClassification"], "tokens": ["ForCausalLM", "LMHeadModel"], "images": ["ForImageClassification"],
    "pairs": ["ForConditionalGeneration", "MTModel"],
}  # fmt: skip


def build(kind: str, name: str, options: dict[str, Any]) -> nn.Module:
    """Return the model with random weights and without dropout. All models of a kind have the same vocabulary and labels."""
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    more = {"num_labels": LABELS} if kind == "images" else {"vocab_size": VOCABULARY, **tokens, "num_labels": LABELS}
    more |= {"decoder_start_token_id": 0, "forced_eos_token_id": None} if kind == "pairs" else {}
    config = config_class(**{**more, **options})
    for field in list(config.to_dict()):
        if "drop" in field and isinstance(getattr(config, field), float):
            setattr(config, field, 0.0)
    model_class = next((found for end in ENDINGS[kind] if (found := getattr(transformers, name + end, None))), None)
    assert model_class, f"transformers has no class {' or '.join(name + end for end in ENDINGS[kind])}"
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():  # larger weights than usual, so that every part of a small model has an effect
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def rows(kind: str) -> list[dict[str, Tensor]]:
    """Return 16 items. Texts have 4 to 40 tokens."""
    drawn = torch.Generator().manual_seed(1)
    lengths = [LONGEST, 4, *torch.randint(4, LONGEST, (14,), generator=drawn).tolist()]
    items = []
    for i, length in enumerate(lengths):
        ids = torch.randint(5, VOCABULARY, (length,), generator=drawn)
        if kind == "images":
            items.append({"pixel_values": torch.randn(3, 16, 16, generator=drawn), "labels": torch.tensor(i % LABELS)})
        elif kind == "texts":
            items.append({"input_ids": ids, "labels": torch.tensor(i % LABELS)})
        else:
            items.append({"input_ids": ids, "labels": ids if kind == "tokens" else ids[: 3 + length // 3]})
    return items


def collate_of(kind: str) -> Callable[[list], Any]:
    if kind == "images":
        return torch.utils.data.default_collate
    return Collate(("labels",) * (kind == "tokens"), is_causal=kind == "tokens", target="labels" * (kind == "pairs"))


class Task:
    """A task of one of the four kinds."""

    def __init__(self, kind: str, model: nn.Module):
        self.kind, self.model = kind, model

    def scores(self, model: nn.Module, batch: Any) -> Tensor:
        if self.kind == "images":
            return model(pixel_values=batch["pixel_values"]).logits
        logits = model(batch).logits
        return logits if self.kind == "texts" else logits[0]

    def labels(self, batch: Any) -> Tensor:
        return batch["target"]["labels"] if self.kind == "pairs" else batch["labels"]

    def terms(self, model: nn.Module, batch: Any, team: Team | None = None) -> dict[str, Any]:
        return {"loss": (self.total(model, batch), self.count(batch))}

    def total(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(self.scores(model, batch), self.labels(batch), ignore_index=-100, reduction="sum")

    def count(self, batch: Any) -> int:
        return int((self.labels(batch) != -100).sum())


def new_task(name: str) -> Task:
    """Return the model of this name, without gradients for parameters that its loss does not use."""
    kind, base, options = ALL[name]
    task = Task(kind, build(kind, base, options))
    trained = [parameter for parameter in task.model.parameters() if parameter.requires_grad]
    accept_rows(task.model)
    used = torch.autograd.grad(task.total(task.model, collate_of(kind)(rows(kind)[:4])), trained, allow_unused=True)
    for parameter, gradient in zip(trained, used):
        parameter.requires_grad_(gradient is not None)
    return task


def copy_of(task: Task, device: torch.device | None = None) -> tuple[Task, torch.optim.Optimizer]:
    """Return the task with a copy of its model, and an optimizer. With a device the model is sharded."""
    model = copy.deepcopy(task.model)
    if device:
        sharding.shard(model, ShardingPlan(), device)
    return Task(task.kind, model), torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9)


def train_plainly(initial: Task) -> dict[str, Tensor]:
    """Return the weights after a loop without accel_ddp: one process, and the items of each step in one batch."""
    task, optimizer = copy_of(initial)
    for step in range(STEPS):
        batch = collate_of(task.kind)(items_of(step, task.kind))
        optimizer.zero_grad()
        (task.total(task.model, batch) / task.count(batch)).backward()
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
    return weights(task.model)


def items_of(step: int, kind: str) -> list[dict[str, Tensor]]:
    """Return the 8 items of a step, of different lengths."""
    return [rows(kind)[(3 * step + i) % 16] for i in range(8)]


def weights(model: nn.Module) -> dict[str, Tensor]:
    sharding.reshard(model)
    return {name: full(value.detach()).clone() for name, value in model.state_dict().items()}


def train(accelerator, initial: Task, micro: int, is_resumed: bool = False, is_sharded: bool = False) -> dict[str, Tensor]:
    """Return the weights after all updates on all ranks. With `is_resumed`, the state moves to a new model before the last one."""
    task, plain = copy_of(initial, accelerator.device if is_sharded else None)
    built = state_tensors.options_of(plain)
    prepare = lambda: accel_ddp.prepare(accelerator, TrainConfig(lr=0.02), task, task.model, plain)
    terms, optimizer = (Terms(task.model, task, Team.of(accelerator)), plain) if is_sharded else prepare()
    ranks, rank = accelerator.num_processes, accelerator.process_index
    for step in range(STEPS):
        if is_resumed and step == STEPS - 1:
            saved, (moments, values) = state_tensors.to_save(task.model), state_tensors.capture(task.model, plain, built)
            task, plain = copy_of(initial)
            task.model.load_state_dict(saved, strict=False)  # tied weights are saved once
            state = {name: dict(found) for name, found in values.items()}
            for key, tensor in moments.items():
                name, _, slot = key.rpartition("/")
                state.setdefault(name, {})[slot] = tensor.clone()
            state_tensors.restore(plain, task.model, state)
            terms, optimizer = prepare()
        items = items_of(step, task.kind)
        own = items[rank * len(items) // ranks : (rank + 1) * len(items) // ranks]
        batches = [collate_of(task.kind)(own[start : start + micro]) for start in range(0, len(own), micro)]
        accel_ddp.train_step(accelerator, TrainConfig(max_grad_norm=1.0), terms, optimizer, batches)
    return weights(task.model)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return torch.stack([(a[n].double() - b[n].double()).abs().max() for n in a if a[n].numel()]).max().item()


def facts_of(accelerator, cfg, name: str) -> dict[str, Any]:
    """Return the largest differences of weights, and the result of the padding check."""
    initial = new_task(name)
    whole = train(accelerator, initial, micro=8 // accelerator.num_processes)
    data = accel_ddp.TrainBatches(rows(initial.kind), collate_of(initial.kind))
    return {
        "moved": distance(weights(initial.model), whole),
        "ranks": distance(train_plainly(initial), whole),
        "micro": distance(train(accelerator, initial, micro=1), whole),
        "resumed": distance(train(accelerator, initial, micro=8 // accelerator.num_processes, is_resumed=True), whole),
        "padding": padding_check.difference(accelerator, cfg, Terms(copy.deepcopy(initial.model), initial), data),
        **facts_without_padding(accelerator, cfg, initial, data),
    }


def facts_without_padding(accelerator, cfg, initial: Task, data: accel_ddp.TrainBatches) -> dict[str, Any]:
    """Return why the layers compute on padding, as a run prints it, or "", and how exact the scores of a run are.

    `apart`: how far they are from those of the plain model. `isolated`: how much those of all items but the first change with its
    tokens, and `depends` its own. All are fractions of the largest score of a class.
    """
    task, plain = Task(initial.kind, copy.deepcopy(initial.model)), copy.deepcopy(initial.model).eval()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        accel_ddp.attach(accelerator, cfg, Terms(task.model, task), data, STEPS)
    task.model.eval()
    items, name = items_of(0, task.kind), "pixel_values" if task.kind == "images" else "input_ids"
    other = -items[0][name] if task.kind == "images" else (items[0][name] + 7) % (VOCABULARY - 5) + 5
    before, row, after = [
        scores_of_items(task, model, some)
        for model, some in ((plain, items), (task.model, items), (task.model, [{**items[0], name: other}, *items[1:]]))
    ]
    scale = torch.cat(before).abs().amax(0)
    apart = lambda a, b: float(((torch.cat(a) - torch.cat(b)).abs() / scale).max())
    return {
        "padded": "".join(re.findall(r"texts are padded: (.*)\.$", printed.getvalue(), flags=re.MULTILINE)),
        "apart": apart(before, row),
        "isolated": apart(row[1:], after[1:]),
        "depends": apart(row[:1], after[:1]),
    }


@torch.no_grad()
def scores_of_items(task: Task, model: nn.Module, items: list[dict[str, Tensor]]) -> list[Tensor]:
    """Return the scores of each item without padding: [tokens, classes]."""
    batch = collate_of(task.kind)(items)
    scores = task.scores(model, batch)
    of_tokens = task.kind in ("tokens", "pairs")
    return [*scores.split(batch.get("target", batch).lengths if of_tokens else 1)]


def facts_of_sharded(accelerator, cfg, name: str) -> dict[str, Any]:
    """Return the same facts of a model that is sharded over the ranks, in which some layers are gathered in bfloat16."""
    initial = new_task(name)
    whole = train(accelerator, initial, micro=8 // accelerator.num_processes, is_sharded=True)
    data = accel_ddp.TrainBatches(rows(initial.kind), collate_of(initial.kind))
    facts: dict[str, Any] = {
        "moved": distance(weights(initial.model), whole),
        "ranks": distance(train_plainly(initial), whole),
        "micro": distance(train(accelerator, initial, micro=1, is_sharded=True), whole),
    }
    for precision in ("no", "bf16"):
        model = copy.deepcopy(initial.model)
        sharding.shard(model, ShardingPlan(), accelerator.device, precision)
        task = Task(initial.kind, model)
        try:
            padding_check.require_independence(accelerator, cfg, Terms(model, task), data)
            facts[f"padding {precision}"] = ""
        except accel_ddp.UserError as error:
            facts[f"padding {precision}"] = str(error)
    with torch.autocast("cpu", torch.bfloat16):  # the model that was sharded last
        batch = collate_of(initial.kind)(rows(initial.kind)[:4])
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02)
        stats = accel_ddp.train_step(
            accelerator, TrainConfig(max_grad_norm=0.0), Terms(model, task, Team.of(accelerator)), optimizer, [batch]
        )
        exact = initial.total(initial.model, batch) / task.count(batch)
    facts["bf16"] = abs(float(stats.loss) - float(exact))
    return facts


def fit(accelerator, cfg, name: str) -> dict[str, list[str]]:
    """Return for some options of `fit` the error on each rank, or "" if it has trained."""
    results = {}
    for options in ({}, {"allow_inexact": True}, {"micro_batch_size": 1}):
        task, optimizer = copy_of(new_task(name))
        changed = dataclasses.replace(cfg, output_dir=f"{cfg.output_dir}_{name}_{len(results)}", steps=1, **options)
        try:
            accel_ddp.fit(
                accelerator, changed, task=task, model=task.model, optimizer=optimizer,
                train=accel_ddp.TrainBatches(rows(task.kind), collate_of(task.kind)),
            )  # fmt: skip
            error = ""
        except accel_ddp.UserError as raised:
            error = str(raised)
        results[" ".join([name, *options])] = gather_everywhere(error)
    return results


@dataclass(kw_only=True)
class Config(TrainConfig):
    out: str = ""
    global_batch_size: int = 8
    only: tuple[str, ...] = ()
    sharded: bool = False


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    results = {}
    for name in cfg.only or ALL:
        try:
            results[name] = (facts_of_sharded if cfg.sharded else facts_of)(accelerator, cfg, name)
        except Exception as error:  # every rank has the same error, so that all continue with the next model
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    if not cfg.sharded:
        results["fit"] = {**fit(accelerator, cfg, "FNet"), **fit(accelerator, cfg, "Bert")}
    if accelerator.is_main_process:
        Path(cfg.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    run(Config, main)
