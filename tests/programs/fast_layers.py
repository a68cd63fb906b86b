"""Compute models with padding, without padding, captured as CUDA graphs and compiled. Print the differences as JSON.

fast_layers.py [quick] [KIND ...]   # quick: without compilation; a KIND may be dropout
"""

import json
import sys

import base
import torch
import transformers
from accelerate import Accelerator
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine import losses
from accel_ddp.engine.rows import DOCUMENTS, Collate
from accel_ddp.engine.terms import Terms
from accel_ddp.seeds import seed_torch
from accel_ddp.speed import linear_cross_entropy
from accel_ddp.speed.attach import attach
from accel_ddp.training.stream import TrainBatches

SHAPE = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 256, "vocab_size": 500}
LENGTHS = [7, 100, 33, 64, 1, 128, 90, 15]
GQA = {"num_key_value_heads": 1, "head_dim": 64, "sliding_window": 32}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
BART = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 256))
}
T5 = {"num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "d_kv": 64, "d_ff": 256, "dropout_rate": 0.0}
DEBERTA = {"relative_attention": True, "position_buckets": 16, "pos_att_type": ["c2p", "p2c"], "norm_rel_ebd": "layer_norm",
           "share_att_key": True, "position_biased_input": False, "type_vocab_size": 0}  # fmt: skip
IMAGE = {name: value for name, value in SHAPE.items() if name != "vocab_size"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "window": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE, **GQA)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SHAPE, **GQA, layer_types=TYPES)),
    "modernbert": lambda: transformers.ModernBertForSequenceClassification(
        transformers.ModernBertConfig(**SHAPE, local_attention=32, global_attn_every_n_layers=2, pad_token_id=0, num_labels=3)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SHAPE, num_key_value_heads=1, num_local_experts=4)
    ),
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(d_model=128, vocab_size=500, dropout=0.0, **BART, **SPECIAL, forced_eos_token_id=2)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(d_model=128, vocab_size=500, **T5, **SPECIAL)),
    "deberta": lambda: transformers.DebertaV2ForSequenceClassification(
        transformers.DebertaV2Config(**SHAPE, **DEBERTA, **NO_DROPOUT, num_labels=3)
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**IMAGE, image_size=64, patch_size=8, num_labels=3)
    ),
}
CLASSES = ("bert", "modernbert", "deberta", "vit")  # models of one class per item


class Rows(torch.utils.data.Dataset):
    def __init__(self, kind):
        drawn = torch.Generator().manual_seed(0)
        self.rows = [torch.randint(5, 500, (length,), generator=drawn) for length in LENGTHS]
        self.kind = kind

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], i % 3


def collate(kind):
    def rows(texts):
        ids, classes = [ids for ids, _ in texts], torch.tensor([label for _, label in texts])
        if kind == "vit":
            drawn = torch.Generator().manual_seed(sum(map(len, ids)))
            return {"pixel_values": torch.randn(len(ids), 3, 64, 64, generator=drawn), "labels": classes}
        if kind in CLASSES:
            return Collate(multiple=8)([{"input_ids": one, "labels": label} for one, label in texts])
        items = [{"input_ids": one, "labels": one} for one in ids]
        if kind in ("bart", "t5"):
            widest = 1 + max(map(len, ids)) // 2
            return Collate(multiple=8, target="labels")([item | {"labels": item["labels"][:widest]} for item in items])
        if kind == "packed":  # each row consists of documents of 13 tokens
            items = [item | {DOCUMENTS: [min(13, len(one) - i) for i in range(0, len(one), 13)]} for item, one in zip(items, ids)]
        if kind == "pairs":  # every second text begins like the one before it
            pairs = [(a, torch.cat([a[: len(b) - 1], b[len(a) :], b[-1:]])[: len(b)]) for a, b in zip(ids[0::2], ids[1::2])]
            learned = lambda one, least: torch.where(torch.arange(len(one)) < least - 1, -100, one).tolist()
            items = [
                {"input_ids": [a.tolist(), b.tolist()], "labels": [learned(one, min(len(a), len(b))) for one in (a, b)]}
                for a, b in pairs
            ]
        return Collate(("labels",), 8, is_causal=True, shares=kind == "pairs")(items)

    return rows


def compute(kind, padding_free, compile_option, dropout, times):
    """Return (loss, gradients) of each pass, of two passes whose gradients are accumulated, and of another, smaller batch."""
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16")
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if kind in MODELS:
        model = MODELS[kind]()
    elif kind == "bert":
        model = BertForSequenceClassification(BertConfig(**SHAPE, **drop, num_labels=3))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=1, tie_word_embeddings=True))
    head = linear_cross_entropy.OutputHead(model)

    def loss_sum(model, batch):
        """Return the summed loss of a batch."""
        if kind == "vit":
            return losses.cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["labels"])
        if kind in CLASSES:
            return losses.cross_entropy(model(batch).logits, batch["labels"])
        if kind in ("bart", "t5"):
            return losses.cross_entropy(model(batch).logits[0], batch["target"]["labels"])
        if padding_free == "off":
            return losses.cross_entropy(model(batch).logits[0], batch["labels"])
        return -head.text_logps(model, batch).sum() if kind == "pairs" else head.loss_sum(model, batch)

    cfg = TrainConfig(padding_free=padding_free, compile=compile_option)
    train = TrainBatches(Rows(kind), collate(kind))
    task = base.Task(lambda model, batch: {"loss": (loss_sum(model, batch), 1)}, count=lambda batch: 1)
    speed = attach(accelerator, cfg, Terms(model, task), train, total_steps=1)
    if kind != "vit" and padding_free != "auto":
        assert (speed.padding_free is not None) == (padding_free == "on"), "the layers compute padding"
    model = accelerator.prepare(model)
    model.train()
    batch, smaller = (train.sample(number, accelerator, cfg) for number in (len(LENGTHS), 4))
    if compile_option in ("on", "auto"):
        speed.choose_compilation(0)
    if compile_option == "on":
        speed.compile_layers()
        assert speed.plain_calls, "the layers are not compiled"
    results = []
    for some in (*[[batch]] * times, [batch, batch], [smaller]):  # gradients of a list are accumulated
        for one in some:
            seed_torch(7, accelerator.device)
            loss = loss_sum(model, one)
            loss.backward()
        results.append((loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        for p in model.parameters():
            p.grad = None
    # From here on, nothing may make the host wait for the device. With padding some operations do, and two models do everywhere.
    waits = padding_free != "on" or kind in ("deberta", "modernbert")
    torch.cuda.set_sync_debug_mode("default" if waits else "error")
    loss = loss_sum(model, batch)
    loss.backward()
    torch.cuda.set_sync_debug_mode("default")
    if speed.graphs:
        for graphs in speed.graphs:
            assert not graphs.disabled_reason, graphs.disabled_reason
            assert len(graphs.captured) >= 2, "the shapes of both batches were not captured as CUDA graphs"
    return results[:-2], results[-2:], cfg.compile


def difference(a, b):
    """Return the largest difference, as a fraction of the largest gradient of the same parameter.

    The bias of a key does not change the result, so that its gradient consists of rounding errors. The smallest divisor is
    therefore a thousandth of the largest gradient of all parameters.
    """
    ends = [abs(a[0] - b[0]) / abs(a[0])]
    least = 1e-3 * max(float(gradient.abs().max()) for gradient in a[1].values())
    assert all(bool(gradient.isfinite().all()) for _, gradients in (a, b) for gradient in gradients.values())
    return max(ends + [float((a[1][n] - b[1][n]).abs().max() / a[1][n].abs().max().clamp(min=least)) for n in a[1]])


def compare(kind, quick):
    (padded,), *_ = compute(kind, "off", "off", 0.0, 1)
    (plain,), (plain_twice, plain_smaller), _ = compute(kind, "on", "off", 0.0, 1)
    captured, (captured_twice, captured_smaller), _ = compute(kind, "on", "graphs", 0.0, 3)
    if kind == "vit":  # without CUDA graphs its attention is another one; the first pass is not captured
        plain = captured[0]
    found = {
        "padding-free": difference(padded, plain), "captured": max(difference(plain, r) for r in captured),
        "default": compute(kind, "auto", "auto", 0.0, 1)[2],
    }  # fmt: skip
    if kind != "vit":
        found["accumulated"] = difference(plain_twice, captured_twice)
        found["smaller"] = difference(plain_smaller, captured_smaller)
    if not quick:
        compiled, *_ = compute(kind, "on", "on", 0.0, 3)
        found["compiled"] = max(difference(plain, r) for r in compiled)
        found["compiled again"] = max(difference(compiled[0], r) for r in compiled)
    return found


def repeat_dropout(quick):
    """Compute several passes with the same seed. Of layers that are not compiled, the first one is not captured."""
    found = {}
    for name, option in [("captured", "graphs"), *([] if quick else [("compiled", "on")])]:
        dropped, *_ = compute("bert", "on", option, 0.2, 4)
        found[name] = max(difference(dropped[0], r) for r in dropped[1:])
    return found


kinds, found = [kind for kind in sys.argv[1:] if kind != "quick"], {}
for kind in kinds or ("bert", "llama", "packed", "pairs", *MODELS, "dropout"):
    try:
        found[kind] = compare(kind, "quick" in sys.argv) if kind != "dropout" else repeat_dropout("quick" in sys.argv)
    except Exception as error:  # the others are compared all the same
        found[kind] = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(kind, found[kind], flush=True)
    torch.compiler.reset()
print(json.dumps(found))
