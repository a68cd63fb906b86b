"""Layers without padding and the loss over a large vocabulary give the same result as the plain model."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from accel_ddp import compat
from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.engine import ddp, losses
from accel_ddp.engine.rows import DOCUMENTS, Collate, Rows, accept_rows
from accel_ddp.sources import tokenization
from accel_ddp.sources.adapters import add_adapters
from accel_ddp.speed import flops, linear_cross_entropy, padding_free
from accel_ddp.speed.layer_stacks import SmallTable
from accel_ddp.speed.packed_layers import PackedLayers
from accel_ddp.speed.row_model import FixedModel, RowModel
from accel_ddp.training import isolation
from tests.conftest import ROOT

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 100}
LENGTHS = [3, 17, 9, 30, 1]
OPT = {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64, "num_attention_heads": 4, "vocab_size": 100}
POSITIONS = {"max_position_embeddings": 64}
KINDS = {
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SHAPE, **POSITIONS)),
    "roberta": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**SHAPE, max_position_embeddings=80, pad_token_id=1)
    ),
    "distilbert": lambda: transformers.DistilBertForTokenClassification(
        transformers.DistilBertConfig(dim=32, n_layers=3, n_heads=4, hidden_dim=64, vocab_size=100)
    ),
    "bert masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SHAPE, **POSITIONS)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **POSITIONS, num_key_value_heads=2)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE, **POSITIONS, num_key_value_heads=2)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=100, n_positions=64)
    ),
    "gpt-neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SHAPE, **POSITIONS)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SHAPE, **POSITIONS, num_key_value_heads=2, num_local_experts=4)
    ),
}

GROUPS = {**POSITIONS, "num_key_value_heads": 2}
WINDOW = {**GROUPS, "sliding_window": 8}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
SPECIAL = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
PART = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
BART = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in PART.items()}
BART |= {**SPECIAL, **POSITIONS, "d_model": 32, "dropout": 0.0, "forced_eos_token_id": 2}
T5 = {
    "d_model": 32,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "d_ff": 64,
    "d_kv": 8,
    "dropout_rate": 0.0,
    **SPECIAL,
}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
DEBERTA = {**SHAPE, **POSITIONS, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["c2p", "p2c"]}
DEBERTA |= {"norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False, "type_vocab_size": 0}
IMAGES = {name: value for name, value in SHAPE.items() if name != "vocab_size"} | {"image_size": 32, "patch_size": 8}
MOE = {"num_experts": 4, "num_experts_per_tok": 2}


def of(name, config, **options):
    """Return a function that builds a model, from the names of its class and of its config."""
    return lambda: getattr(transformers, name)(getattr(transformers, config)(**options))


FAMILIES = {  # whose arguments differ from layer to layer, or have a gradient
    "mistral, a window": of("MistralForCausalLM", "MistralConfig", **SHAPE, **WINDOW),
    "gemma 3": of("Gemma3ForCausalLM", "Gemma3TextConfig", **SHAPE, **WINDOW, head_dim=8, layer_types=TYPES),
    "modernbert": of("ModernBertForSequenceClassification", "ModernBertConfig", **SHAPE, **POSITIONS, pad_token_id=0,
                     local_attention=8, global_attn_every_n_layers=2),
    "bart": of("BartForConditionalGeneration", "BartConfig", **BART),
    "t5": of("T5ForConditionalGeneration", "T5Config", **T5),
    "deberta": of("DebertaV2ForSequenceClassification", "DebertaV2Config", **DEBERTA),
    "vit": of("ViTForImageClassification", "ViTConfig", **IMAGES),
}  # fmt: skip
MORE_FAMILIES = {
    "qwen 2, a window": of("Qwen2ForCausalLM", "Qwen2Config", **SHAPE, **WINDOW, use_sliding_window=True, max_window_layers=1),
    "phi 3, a window": of("Phi3ForCausalLM", "Phi3Config", **SHAPE, **WINDOW, pad_token_id=0),
    "cohere 2": of("Cohere2ForCausalLM", "Cohere2Config", **SHAPE, **WINDOW, pad_token_id=0, layer_types=TYPES),
    "olmoe": of("OlmoeForCausalLM", "OlmoeConfig", **SHAPE, **POSITIONS, **MOE),
    "qwen 3 moe": of("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **SHAPE, **GROUPS, **MOE, moe_intermediate_size=32, head_dim=8),
    "mbart": of("MBartForConditionalGeneration", "MBartConfig", **BART),
    "marian": of("MarianMTModel", "MarianConfig", **BART),
    "pegasus": of("PegasusForConditionalGeneration", "PegasusConfig", **BART),
    "bart, classes": of("BartForSequenceClassification", "BartConfig", **BART),
    "t5, tags": of("T5ForTokenClassification", "T5Config", **T5),
    "mt5": of("MT5ForConditionalGeneration", "MT5Config", **T5),
    "deberta 1": of("DebertaForSequenceClassification", "DebertaConfig", **{**DEBERTA, "type_vocab_size": 2}),
    "bloom": of("BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=3, n_head=4, vocab_size=100),
    "gpt-neo": of("GPTNeoForCausalLM", "GPTNeoConfig", hidden_size=32, num_layers=2, num_heads=4, vocab_size=100, window_size=8,
                  attention_types=[[["global", "local"], 1]]),
    "gemma 2": of("Gemma2ForCausalLM", "Gemma2Config", **SHAPE, **WINDOW, head_dim=8),
    "gpt-oss": of("GptOssForCausalLM", "GptOssConfig", **SHAPE, **WINDOW, head_dim=8, num_local_experts=4),
    "electra": of("ElectraForSequenceClassification", "ElectraConfig", **SHAPE, **POSITIONS, embedding_size=32),
}  # fmt: skip
EXCEPTIONS = {  # and the reason that a run prints
    "umt5": (of("UMT5ForConditionalGeneration", "UMT5Config", **T5), "each of its layers has its own position bias"),
    "longt5": (of("LongT5ForConditionalGeneration", "LongT5Config", **T5), "its attention is eager, not sdpa"),
    "albert": (of("AlbertForSequenceClassification", "AlbertConfig", **SHAPE, **POSITIONS, embedding_size=16), "not found"),
    "mpnet": (of("MPNetForSequenceClassification", "MPNetConfig", **SHAPE), "its layers were not found"),
    "xlnet": (of("XLNetForSequenceClassification", "XLNetConfig", d_model=32, n_layer=2, n_head=4, vocab_size=100), "not found"),
    "stablelm": (of("StableLmForCausalLM", "StableLmConfig", **SHAPE, **GROUPS), "do not pass their arguments on"),
}
TARGETS = [5, 2, 12, 7, 1]


def without_padding(model):
    """Return what computes without padding: rows, or layers of encoder-decoders, of models with their own attention, and of images."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    if getattr(model, "main_input_name", "") == "pixel_values":
        return FixedModel(model)
    if getattr(config, "is_encoder_decoder", False) or kind in ("deberta", "deberta-v2", "bloom", "gpt_neo", "t5"):
        return PackedLayers(model)
    return RowModel(model)


def a_batch(lengths=LENGTHS, seed=0, multiple=0) -> Rows:
    drawn = torch.Generator().manual_seed(seed)
    texts = [torch.randint(5, 100, (length,), generator=drawn).tolist() for length in lengths]
    return Collate(("labels",), multiple)([{"input_ids": text, "labels": text} for text in texts])


def loss_of(model, rows):
    scores = model(rows).logits
    if scores.ndim == 2:
        return losses.cross_entropy(scores, torch.arange(len(scores)) % scores.shape[1])
    labels = rows["labels"]
    return losses.cross_entropy(scores[0], torch.where(labels < 0, -100, labels % scores.shape[-1]))


def inputs_of(model):
    """Return a micro-batch for this model, and its loss."""
    rows = a_batch()
    if model.main_input_name == "pixel_values":
        images = {
            "pixel_values": torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
            "labels": torch.arange(5) % 2,
        }
        return images, lambda model, batch: losses.cross_entropy(
            model(pixel_values=batch["pixel_values"]).logits, batch["labels"]
        )
    if not model.config.is_encoder_decoder:
        return rows, loss_of
    if model.get_output_embeddings() is None:  # it reads the last token
        rows.tokens[rows.tokens == 2] = 3
        rows.tokens[rows.starts[1:].long() - 1] = 2
        return rows, loss_of
    labels = [text[:length] for text, length in zip(texts_of(a_batch(lengths=[12] * 5, seed=3)), TARGETS)]
    labels[2][3] = -100  # a token that is not learned, but read
    items = [{"input_ids": text, "labels": target} for text, target in zip(texts_of(rows), labels)]
    rows = Collate(target="labels")(items)
    return rows, lambda model, rows: losses.cross_entropy(model(rows).logits[0], rows["target"]["labels"])


def texts_of(rows):
    return [text.tolist() for text in rows.tokens[: rows.used].split(rows.lengths)]


def compute(model, batch, loss=loss_of):
    """Return the loss and the gradient of each parameter."""
    accept_rows(model)
    model.zero_grad()
    value = loss(model, batch)
    value.backward()
    return value.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(a, b):
    """Return the largest difference of the loss and of each gradient, as a fraction of its largest value."""
    assert all(bool(gradient.isfinite().all()) for _, gradients in (a, b) for gradient in gradients.values())
    sizes = {name: max(float(gradient.abs().max()), 1e-3) for name, gradient in a[1].items()}
    return max(abs(a[0] - b[0]) / abs(a[0]), *(float((a[1][n] - b[1][n]).abs().max()) / sizes[n] for n in a[1]))


def a_batch_of_pairs(prompts=(7, 2, 11), answers=((4, 9), (12, 1), (3, 3)), shares=True, multiple=0) -> Rows:
    """Two texts each, which begin with the same prompt. The answers of the last pair begin with the same token too."""
    drawn, items = torch.Generator().manual_seed(0), []
    for prompt, pair in zip(prompts, answers):
        first = torch.randint(5, 100, (prompt,), generator=drawn).tolist()
        texts = [first + torch.randint(5, 100, (length,), generator=drawn).tolist() for length in pair]
        texts[1][prompt] = texts[0][prompt] if pair == (3, 3) else 3
        items.append({"input_ids": texts, "labels": [[-100] * prompt + text[prompt:] for text in texts]})
    return Collate(("labels",), multiple, is_causal=True, shares=shares)(items)


def tokens_per_layer(layers, model, batch):
    """Return how many tokens each layer gets in one pass."""
    seen, calls = [], layers.calls
    layers.run = lambda number, hidden, args, kwargs: seen.append(hidden.shape[1]) or calls[number](hidden, *args, **kwargs)
    compute(model, batch)
    layers.run = None
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_padding_free_layers_give_the_same_loss_and_gradients_as_padding(kind):
    torch.manual_seed(0)
    model = KINDS[kind]().eval()  # without dropout, which draws a number for each position of the padded batch
    batch = a_batch()
    padded = compute(model, batch)
    layers = without_padding(model)
    layers.install()
    assert layers.check(lambda batch: loss_of(model, batch), batch, 1e-4) == ""
    found = compute(model, batch)
    assert tokens_per_layer(layers, model, batch) == [sum(LENGTHS)] * 3, "the layers got padding"
    assert difference(padded, found) < 1e-5
    other = a_batch(seed=1)
    assert difference(padded, compute(model, other)) > 1e-2, "the comparison finds no difference at all"
    layers.remove()
    assert difference(padded, compute(model, batch)) == 0


@pytest.mark.parametrize("kind", [*FAMILIES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_FAMILIES)])
def test_families_compute_without_padding_and_can_be_captured(kind):
    """All layers of a stack get the same arguments, and each the output of the one before, as CUDA graphs need it."""
    torch.manual_seed(0)
    model = (FAMILIES | MORE_FAMILIES)[kind]().eval()
    batch, loss = inputs_of(model)
    padded = compute(model, batch, loss)
    layers, given = without_padding(model), []
    layers.install()
    assert layers.check(lambda batch: loss(model, batch), batch, 1e-4) == ""

    def run(number, hidden, args, kwargs):
        given.append((number, hidden, kwargs, layers.calls[number](hidden, *args, **kwargs)))
        return given[-1][3]

    layers.run = run
    assert difference(padded, compute(model, batch, loss)) < 1e-5
    firsts = {stack.numbers[0]: stack for stack in layers.stacks} if isinstance(layers, PackedLayers) else {0: None}
    for (_, _, before, out), (number, hidden, after, _) in itertools.pairwise(given):
        assert number in firsts or (hidden is out and after is before)
        assert not any(leaf.requires_grad for leaf in compat.flatten(after)[0] if isinstance(leaf, torch.Tensor))
    for number, tokens in zip(firsts, (80 if kind == "vit" else sum(LENGTHS), sum(TARGETS))):
        _, hidden, kwargs, _ = given[number]
        row = kwargs["lengths"][0] if "lengths" in kwargs else hidden.shape[:2].numel()
        assert row - 2 <= (sum(LENGTHS) if kind == "bart, classes" else tokens + (kind == "vit") * 5) <= row, (
            "the layers got padding"
        )
    layers.remove()
    assert difference(padded, compute(model, batch, loss)) == 0


def outputs_of(model, rows):
    """Return what the model says about rows, and the gradients of its sum with fixed factors."""
    model.zero_grad()
    found = model(rows)
    found = found.logits if "logits" in found else found.last_hidden_state
    (found * torch.linspace(-1, 1, found[0, 0].numel() if found.ndim > 2 else found.shape[1])).sin().sum().backward()
    return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [*KINDS, "modernbert", "deberta", "gpt-neo", "llama, texts", "llama, base", "bert, base"])
def test_a_model_that_is_called_with_rows_gives_the_same_with_and_without_padding(kind):
    torch.manual_seed(0)
    more = {
        "llama, texts": of("LlamaForSequenceClassification", "LlamaConfig", **SHAPE, **GROUPS, pad_token_id=0, num_labels=3),
        "llama, base": of("LlamaModel", "LlamaConfig", **SHAPE, **GROUPS),
        "bert, base": of("BertModel", "BertConfig", **SHAPE, **POSITIONS),
    }
    model = (KINDS | FAMILIES | MORE_FAMILIES | more)[kind]().eval()
    rows = a_batch()
    accept_rows(model)
    padded, before = outputs_of(model, rows)
    layers = without_padding(model)
    layers.install()
    found, after = outputs_of(model, rows)
    layers.remove()
    assert found.shape[:-1] in ((len(LENGTHS),), (1, sum(LENGTHS)))
    torch.testing.assert_close(found, padded, rtol=1e-5, atol=1e-6)
    assert after.keys() == before.keys()
    assert difference((1.0, before), (1.0, after)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_the_reason_why_other_families_are_padded(kind):
    build, reason = EXCEPTIONS[kind]
    model = build().eval()
    batch, loss = inputs_of(model)
    for kind in (RowModel, PackedLayers):  # as `attach` does
        try:
            layers = kind(model)
            layers.install()
            found = layers.check(lambda batch: loss(model, batch), batch, 1e-4)
            layers.remove()
        except padding_free.NeedsPadding as refused:
            found = str(refused)
        assert found
    assert reason in found


def test_the_page_about_speed_names_the_families():
    lines = (ROOT / "docs" / "speed.md").read_text().lower().splitlines()
    padded = " ".join(line for line in lines if "| padded: " in line)
    assert [kind for kind in EXCEPTIONS if kind not in padded] == []
    rest = " ".join(line for line in lines if "| padded" not in line)
    assert [kind for kind in FAMILIES | MORE_FAMILIES if kind.split(",")[0].removesuffix(" 1") not in rest] == []


HYBRID = {**SHAPE, **GROUPS, "head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
HYBRID |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


@pytest.mark.parametrize("kind", ["llama", "llama, adapters", "bert", "gemma 3", "qwen 3.5", "bart", "t5", "deberta", "vit"])
def test_no_module_has_another_forward_beside_mixers_and_all_is_undone(kind):
    import peft

    make = {**KINDS, **FAMILIES, "qwen 3.5": of("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **HYBRID)}[kind.partition(",")[0]]
    model = make().eval()
    if "adapters" in kind:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])).eval()
    batch, loss = inputs_of(getattr(model, "base_model", model) if "adapters" in kind else model)
    accept_rows(model)
    state = lambda: {
        name: (type(m), {*vars(m)}, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()
    }
    before = state()
    layers = without_padding(model)
    layers.install()
    assert layers.check(lambda batch: loss(model, batch), batch) == ""
    changed = {name: module for name, module in model.named_modules() if type(module) is not before[name][0]}
    mixers = [m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")]
    assert [m for m in model.modules() if "forward" in vars(m)] == mixers
    attentions = [*getattr(layers, "attentions", []), *(m for a in getattr(layers, "attentions", []) for m in a.children())]
    assert {id(m) for m in layers.layers} <= {id(m) for m in changed.values()}
    assert {id(m) for m in changed.values()} <= {id(m) for m in (*layers.layers, *attentions)}
    layers.remove()
    assert state() == before


JAMBA = {**SHAPE, **GROUPS, "num_experts": 2, "mamba_d_state": 4, "attn_layer_period": 3, "attn_layer_offset": 1}
CALLED_TWICE = {
    "llama": KINDS["llama"],
    "gemma 3": FAMILIES["gemma 3"],
    "qwen 3.5": of("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **HYBRID),
    "jamba": of("JambaForCausalLM", "JambaConfig", **JAMBA, use_mamba_kernels=False),
}


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("kind", CALLED_TWICE)
def test_a_model_that_is_called_twice_below_checkpointing_computes_each_call_with_its_own_texts(kind, is_reentrant):
    """The backward pass computes layers again, those of a row and of a padded call, with and without gradients, in any order."""
    torch.manual_seed(0)
    model, batch = CALLED_TWICE[kind]().train(), a_batch()
    for module in model.modules():
        module.__dict__.update(
            {name: 0.0 for name in ("attention_dropout", "dropout") if isinstance(getattr(module, name, 0), float)}
        )
    other = a_batch(seed=4, lengths=[7, 2, 19])

    def several(model, batch):
        padded = model(input_ids=other.pad(other.tokens), attention_mask=other.grid.mask.long(), use_cache=False).logits
        found = losses.cross_entropy(other.unpad(padded), other["labels"]) + loss_of(model, batch) + loss_of(model, other)
        with torch.no_grad():
            loss_of(model, other)
        return found

    wanted = compute(model, batch, several)
    layers = without_padding(model)
    layers.install()
    if is_reentrant:
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
    if layers.layers and not layers.is_plain:  # as compiled layers get their arguments
        layers.calls = [lambda *args, call=call, **kwargs: call(*args, **kwargs) for call in layers.calls]
    assert difference(wanted, compute(model, batch, several)) < 1e-5


def test_a_second_run_in_a_process_replaces_what_the_first_has_installed():
    model, batch = KINDS["llama"]().eval(), a_batch()
    padded = compute(model, batch)
    first = without_padding(model)
    first.install()
    second = without_padding(model)
    second.install()
    assert second.check(lambda batch: loss_of(model, batch), batch) == ""
    assert tokens_per_layer(second, model, batch) == [sum(LENGTHS)] * 3
    second.remove()
    assert difference(padded, compute(model, batch)) == 0


def test_texts_in_one_row_do_not_attend_to_each_other():
    """The scores of a text stay the same to the bit when the other texts change. A comparison of sums could miss it."""
    model = KINDS["llama"]().eval()
    layers = without_padding(model)
    layers.install()
    first, second = a_batch(seed=0), a_batch(seed=1)
    second.tokens[3:20] = first.tokens[3:20]
    with torch.no_grad():
        scores = [model(rows).logits[0].split(LENGTHS) for rows in (first, second)]
    assert torch.equal(scores[0][1], scores[1][1])
    assert not torch.equal(scores[0][3], scores[1][3])


PACKED = {kind: (KINDS | FAMILIES)[kind] for kind in ("llama", "gpt2", "gpt-neox", "mistral, a window")}


@pytest.mark.parametrize("kind", PACKED)
def test_packed_documents_have_the_loss_and_gradients_of_separate_ones(kind):
    """Documents share rows of 24 tokens, and rows are padded. Compare with one document at a time, in float64."""
    torch.manual_seed(0)
    model = PACKED[kind]().double().eval()
    lengths = [2, 7, 24, 3, 11, 5, 9, 20, 1, 4]
    documents = [torch.randint(5, 100, (length,)).tolist() for length in lengths]
    packed = tokenization.pack_documents({"input_ids": documents, "labels": documents}, 24)
    rows = [dict(zip(packed, values)) for values in zip(*packed.values())]
    in_rows = [*itertools.chain(*packed[DOCUMENTS])]
    assert sorted(in_rows) == sorted(lengths)
    assert [len(row["input_ids"]) for row in rows] == [14, 24, 24, 24], "they do not fill their rows"
    batch = Collate(("labels",), is_causal=True)(rows)
    assert (batch.items, batch.texts, batch.used, batch.squares) == (4, 10, sum(lengths), sum(n * n for n in lengths))
    assert (batch.width, batch.targets) == (24, sum(lengths) - 10)
    assert batch.sum(batch.tokens).tolist() == [sum(row["input_ids"]) for row in rows]

    def gradients(*losses):
        model.zero_grad()
        total = sum(loss.backward() or loss.detach() for loss in losses)
        return {"loss": total} | {name: value.grad.clone() for name, value in model.named_parameters()}

    accept_rows(model)
    alone = lambda ids: losses.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:])
    wanted = gradients(*(alone(torch.tensor([ids])) for ids in documents))
    found = {"padded": gradients(loss_of(model, batch))}
    layers = without_padding(model)
    layers.install()
    assert layers.check(lambda rows: loss_of(model, rows), batch, 1e-6) == ""
    found["padding-free"] = gradients(loss_of(model, batch))
    # What flash attention is given on a GPU: starts, then the end of the last document, then empty ones.
    starts = Collate(("labels",), 8, is_causal=True)(rows).starts.tolist()
    assert starts[:12] == [*itertools.accumulate(in_rows, initial=0), 128]
    assert {*starts[11:]} == {128}
    for way, values in found.items():
        for name, value in values.items():
            assert (value - wanted[name]).abs().max() <= 1e-12 * wanted[name].abs().max().clamp(min=1), (way, name)


def test_the_pass_that_settles_the_buckets_of_ddp_uses_plain_layers():
    """Compiled layers have another order of gradients, and a run that is resumed after its switch has no others."""
    model, batch = KINDS["bert"](), a_batch()
    layers = without_padding(model)
    layers.install()
    layers.calls = [None] * len(layers.calls)
    token = ddp.in_plain_order.set(True)
    loss_of(model, batch).backward()
    ddp.in_plain_order.reset(token)
    with pytest.raises(TypeError, match="NoneType"):
        loss_of(model, batch)


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_gets_the_output_of_the_layer_before_it(kind):
    """Otherwise several layers could not be captured as one CUDA graph."""
    model = KINDS[kind]()
    layers, given = without_padding(model), []

    def run(number, hidden, args, kwargs):
        out = layers.calls[number](hidden, *args, **kwargs)
        given.append((hidden, out))
        return out

    layers.install()
    layers.run = run
    loss_of(model, a_batch())
    assert len(given) == 3
    assert all(after[0] is before[1] for before, after in itertools.pairwise(given))


def test_a_model_that_needs_padding_is_refused_with_the_reason():
    for model, why in (
        (nn.Linear(2, 2), "not a transformers model"),
        (transformers.OPTForCausalLM(transformers.OPTConfig(**OPT, layerdrop=0.5)), "layerdrop"),
        (KINDS["bert"](), "flex_attention"),
    ):
        if isinstance(model, transformers.BertForSequenceClassification):
            model.config._attn_implementation = "flex_attention"
        with pytest.raises(padding_free.NeedsPadding, match=why):
            without_padding(model)
    # Texts cross a window that the layers do not pass on. Above LONGEST_MADE they do not, and longer ones are padded.
    model = FAMILIES["mistral, a window"]().eval()
    batch = a_batch()
    padded, layers = compute(model, batch), without_padding(model)
    layers.install()
    for chunk, positions, longest in ((12, 64, 1 << 30), (2000, 4096, 1000), (2000, 64, 64)):
        model.config.attention_chunk_size, model.config.max_position_embeddings = chunk, positions
        assert layers.check(lambda batch: loss_of(model, batch), a_batch(lengths=[2, 5]), 1e-4) == ""
        assert layers.longest == longest
    layers.longest = 29
    assert difference(padded, compute(model, batch)) == 0


def test_a_model_whose_layers_drop_arguments_needs_padding():
    """Its texts would attend to each other, which hardly changes the loss of an untrained model."""
    config = transformers.StableLmConfig(**SHAPE, **POSITIONS, num_key_value_heads=2)
    model = transformers.StableLmForCausalLM(config).eval()
    layers = without_padding(model)
    layers.install()
    assert "do not pass their arguments on" in layers.check(lambda batch: loss_of(model, batch), a_batch(), 1e-4)


def test_the_check_compares_hidden_states_and_not_only_the_loss(monkeypatch):
    """Here texts attend to each other, and the loss of the batch is the same."""
    model = KINDS["bert"]().eval()
    layers = without_padding(model)
    layers.install()

    def attend_to_all(module, query, key, value, *_, **__):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2), None

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, padding_free.NAME, attend_to_all)
    assert isolation.LEAKS in layers.check(lambda batch: loss_of(model, batch).detach() * 0 + 1, a_batch(), 1e-4)


def test_the_check_does_not_accept_values_that_are_not_numbers(monkeypatch):
    """The hidden states without padding are NaN, and the loss does not read them."""
    model = KINDS["bert"]().eval()
    layers = without_padding(model)
    layers.install()

    def attend_to_nothing(module, query, key, value, *_, **__):
        return (query * math.nan if padding_free.is_active.get() else query).transpose(1, 2), None

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, padding_free.NAME, attend_to_nothing)
    assert "by nan" in layers.check(lambda batch: loss_of(model, batch).nan_to_num() * 0 + 1, a_batch(), 1e-4)


def test_layers_get_no_cache_and_generation_uses_padding():
    """Decoders pass a cache to their layers by default. It must not become part of a CUDA graph."""
    config = transformers.Qwen2Config(**SHAPE, **POSITIONS, num_key_value_heads=2, num_labels=3, pad_token_id=0)
    model = transformers.Qwen2ForSequenceClassification(config).train()
    layers = without_padding(model)
    layers.install()
    given = []
    layers.run = lambda number, hidden, args, kwargs: given.append(kwargs) or layers.calls[number](hidden, *args, **kwargs)
    compute(model, a_batch())
    assert given
    assert all(kwargs["past_key_values"] is None for kwargs in given)
    model = KINDS["llama"]().eval()
    without_padding(model).install()
    compute(model, a_batch())
    assert model.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=3, do_sample=False).shape == (1, 6)


def test_adapters_and_copies_of_a_padding_free_model():
    import copy

    import peft

    torch.manual_seed(0)
    base = KINDS["llama"]()
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"]))
    model.eval()
    batch = a_batch()
    padded = compute(model, batch)
    layers = without_padding(model)
    layers.install()
    assert difference(padded, compute(model, batch)) < 1e-5
    assert tokens_per_layer(layers, model, batch) == [sum(LENGTHS)] * 3
    assert model.generate(input_ids=torch.tensor([[7, 8, 9]]), max_new_tokens=3, do_sample=False).shape == (1, 6)
    assert copy.deepcopy(model).merge_and_unload() is not None
    counter = flops.FlopCounter(model)
    frozen = [m for name, m in model.named_modules() if type(m) is nn.Linear and ".layers." in name]
    assert counter.per_token == sum((6 if m.weight.requires_grad else 4) * m.weight.numel() for m in frozen)
    for m in [m for m in frozen if not m.weight.requires_grad]:  # two weights of 4 bits are one element of such a class
        m.__class__ = type("Linear4bit", (nn.Linear,), {})
        m.weight = nn.Parameter(torch.zeros(m.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
    assert flops.FlopCounter(model).per_token == counter.per_token


def test_adapters_compute_what_peft_computes_and_store_less():
    """peft converts the input of each adapter to float32, and autocast converts it back. Each one would store a copy."""
    torch.manual_seed(0)
    base = KINDS["llama"]().bfloat16()
    base._new_modules = []
    model, batch = add_adapters(base, RecipeConfig(lora_r=2, lora_targets=("all-linear",)), "CAUSAL_LM"), a_batch()
    for name, p in model.named_parameters():
        nn.init.normal_(p, std=0.1) if "lora_B" in name else None

    def loss_gradients_and_stored_bytes():
        is_narrow, stored = base.dtype == torch.bfloat16, {}
        keep = lambda tensor: stored.setdefault(compat.storage_key(tensor), tensor.nbytes) and tensor
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_narrow):
                loss = loss_of(model, batch)
            size = sum(stored.values())
        loss.backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        return loss.detach(), found, size

    one, x = base.model.layers[0].mlp.gate_proj, torch.randn(50, 32)

    def rounding():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = one(x.bfloat16()).double()
        exact = x.bfloat16().double() @ (one.weight.double() + one.get_delta_weight("default").double()).T
        return (narrow - exact).norm()

    accept_rows(model)
    with torch.no_grad(), model.disable_adapter():
        of_base = model(batch).logits
    with torch.no_grad():  # without autocast, the types of inputs and adapters must be the same
        assert not torch.equal(model(batch).logits, of_base), "adapters that are turned off still act"
    assert sum("forward" in m.__dict__ for m in model.modules()) == 3 * 7
    ours, of_ours = loss_gradients_and_stored_bytes(), rounding()
    own_forward = [(m, m.__dict__.pop("forward")) for m in model.modules() if "forward" in m.__dict__]
    theirs, of_theirs = loss_gradients_and_stored_bytes(), rounding()
    assert ours[2] < 0.95 * theirs[2]
    assert of_ours < of_theirs
    model.float()
    theirs = loss_gradients_and_stored_bytes()
    for m, forward in own_forward:
        m.forward = forward
    ours = loss_gradients_and_stored_bytes()
    assert torch.allclose(ours[0], theirs[0], rtol=1e-6)
    assert (ours[1] - theirs[1]).abs().max() < 1e-5 * theirs[1].abs().max()


def test_a_call_without_rows_uses_padding():
    model = KINDS["bert"]().eval()
    layers = without_padding(model)
    layers.install()
    ran = []
    layers.run = lambda number, hidden, args, kwargs: ran.append(number) or layers.calls[number](hidden, *args, **kwargs)
    rows = a_batch()
    model(input_ids=rows.pad(rows.tokens), attention_mask=rows.grid.mask)
    assert ran == []
    loss_of(model, rows)
    assert ran == list(range(len(layers.calls)))


def test_gradient_checkpointing_without_padding_gives_the_same_result():
    model = KINDS["llama"]().train()
    batch = a_batch()
    layers = without_padding(model)
    layers.install()
    stored = compute(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert difference(stored, compute(model, batch)) < 1e-6
    assert tokens_per_layer(layers, model, batch) == [sum(LENGTHS)] * 6, "the backward pass runs each layer once more"
    layers.run = None
    other = a_batch(seed=4, lengths=[7, 2, 19])

    def two_losses(model, batch):  # the backward pass computes layers of both calls again, each with its own texts
        return loss_of(model, batch) + loss_of(model, other)

    found = compute(model, batch, two_losses)
    layers.remove()
    assert difference(compute(model, batch, two_losses), found) < 1e-5


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_gradient_checkpointing_of_an_encoder_and_a_decoder(kind):
    torch.manual_seed(0)
    model = FAMILIES[kind]().train()  # without dropout
    batch, loss = inputs_of(model)
    padded = compute(model, batch, loss)
    layers, rows = without_padding(model), []
    layers.install()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls = layers.calls
    layers.run = lambda number, hidden, args, kwargs: rows.append(number) or calls[number](hidden, *args, **kwargs)
    assert difference(padded, compute(model, batch, loss)) < 1e-5
    assert rows == [*range(len(calls)), *reversed(range(len(calls)))], "the backward pass runs each layer once more"
    others = {"input_ids": batch.pad(batch.tokens).flip(0), "attention_mask": batch.grid.mask.long().flip(0)}
    options = {
        "max_new_tokens": 4,
        "do_sample": False,
        "use_cache": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    after_a_step = torch.stack(model.eval().generate(**others, **options).logits)  # it calls the encoder alone
    layers.remove()
    torch.testing.assert_close(after_a_step, torch.stack(model.generate(**others, **options).logits))


def test_adapters_of_t5_train_its_position_bias():
    """The wrapper of peft passes None as the tokens of the decoder, which come from the labels."""
    import peft

    torch.manual_seed(0)
    names = ["q", "relative_attention_bias"]
    model = peft.get_peft_model(FAMILIES["t5"](), peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=2, target_modules=names)).train()
    for name, p in model.named_parameters():
        nn.init.normal_(p, std=0.3) if "lora" in name else None
    batch, _ = inputs_of(model.base_model.model)
    loss = lambda model, rows: losses.cross_entropy(model(rows).logits[0], rows["target"]["labels"])
    padded = compute(model, batch, loss)
    layers = without_padding(model)
    layers.install()
    assert sum("relative_attention_bias.lora_" in name for name in padded[1]) == 4
    assert difference(padded, compute(model, batch, loss)) < 1e-5
    rows: list[int] = []
    layers.run = lambda number, hidden, args, kwargs: rows.append(number) or layers.calls[number](hidden, *args, **kwargs)
    compute(model, batch, loss)
    assert rows == [*range(len(layers.calls))], "both stacks compute without padding"


def test_a_small_table_has_the_same_gradient_as_an_embedding():
    table, places = torch.randn(3, 8, dtype=torch.double, requires_grad=True), torch.randint(0, 3, (4, 5))
    weight = torch.randn(4, 5, 8, dtype=torch.double)
    (ours,) = torch.autograd.grad((SmallTable.apply(places, table) * weight).sum(), table)
    (theirs,) = torch.autograd.grad((F.embedding(places, table) * weight).sum(), table)
    assert torch.allclose(ours, theirs, atol=1e-12)


# ------------------------------------------------------------------------------- the loss over a large vocabulary


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # rotary positions, and an embedding of positions
def test_a_prompt_that_two_texts_share_is_computed_once_with_the_same_loss_and_gradients(kind):
    """The last token of a prompt has a label in each of both texts, and so it is not shared."""
    torch.manual_seed(0)
    model, batch = KINDS[kind]().double().eval(), a_batch_of_pairs()
    assert batch["shared"].tolist() == [0, 6, 0, 1, 0, 10]
    padded = compute(model, a_batch_of_pairs(shares=False))
    assert difference(padded, compute(model, batch)) < 1e-6
    layers = without_padding(model)
    layers.install()
    assert layers.check(lambda batch: loss_of(model, batch), batch, 1e-6) == ""
    assert difference(padded, compute(model, batch)) < 1e-6  # Llama's norms compute in float32
    assert tokens_per_layer(layers, model, batch) == [2 * 20 + 32 - 17] * 3
    few = a_batch_of_pairs(prompts=(2, 2, 2), answers=((20, 25), (20, 30), (25, 25)))
    assert tokens_per_layer(layers, model, few) == [154] * 3
    shared = compute(model, few)
    layers.shares = False  # `attach` decides by a sample: so few shared tokens are not worth it
    assert tokens_per_layer(layers, model, few) == [157] * 3
    assert difference(shared, compute(model, few)) < 1e-6


def test_keys_of_a_shared_prompt_are_those_of_the_whole_texts():
    """Flash attention needs a GPU. Here each query attends to the keys that it would see there."""
    rows, whole = a_batch_of_pairs(multiple=8), a_batch_of_pairs(shares=False)
    at = padding_free.segments_of(rows, is_flash=True)
    key_starts, keys, places = at.keys
    found = []
    for text in range(len(at.starts) - 1):
        queries, (first, end) = range(at.starts[text], at.starts[text + 1]), key_starts[text : text + 2]
        some = keys[first:end].tolist()
        assert some[len(some) - len(queries) :] == [*queries], "the last query sees all keys"
        found.append(rows.grid.places[some].tolist())
    for text, length in enumerate(whole.lengths):
        shared = int(rows["shared"][text])
        wanted = [(text - (i < shared)) * rows.width + i for i in range(length)]
        assert found[text] == wanted
    assert len(found[-1]) == 64 - int(at.starts[-2])
    for token, (first, second) in enumerate(places.T.tolist()):
        assert [i for i, key in enumerate(keys[: key_starts[-1]].tolist()) if key == token] == [
            place for place in (first, second) if place >= 0
        ]


@pytest.mark.parametrize("softmax", [linear_cross_entropy.plain_softmax, linear_cross_entropy.fused_softmax])
def test_a_loss_in_chunks_equals_the_loss_over_all_logits(monkeypatch, softmax):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK", 300 * 130)
    torch.manual_seed(0)
    values = [torch.randn(*size, dtype=torch.double, requires_grad=True) for size in ((700, 32), (130, 32), (130,))]
    labels = torch.where(torch.arange(700) % 5 == 0, -100, torch.randint(0, 130, (700,)))
    whole = F.cross_entropy(values[0] @ values[1].T + values[2], labels, reduction="sum")
    in_chunks = linear_cross_entropy.linear_cross_entropy(*values, labels, softmax)
    assert abs(whole.item() - in_chunks.item()) < 1e-9
    with torch.no_grad():
        assert linear_cross_entropy.linear_cross_entropy(*values, labels, softmax).item() == in_chunks.item()
    for a, b in zip(torch.autograd.grad(whole * 0.3, values), torch.autograd.grad(in_chunks * 0.3, values)):
        assert torch.allclose(a, b, atol=1e-12)


def test_a_micro_batch_without_labels_has_a_loss_of_zero():
    model = KINDS["llama"]().eval()
    batch = Collate(("labels",))([{"input_ids": text, "labels": [-100] * len(text)} for text in texts_of(a_batch())])
    head = linear_cross_entropy.OutputHead(model)
    value, gradients = compute(model, batch, head.loss_sum)
    assert value == 0
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("kind", ["llama", "bert masked"])
def test_skipping_the_output_head_gives_the_same_loss_and_gradients(kind):
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    batch = a_batch()
    whole = compute(model, batch)
    head = linear_cross_entropy.OutputHead(model)
    skipped = compute(model, batch, head.loss_sum)
    assert head.is_last
    assert difference(whole, skipped) < 1e-5


@pytest.mark.parametrize("trained", ["head", "adapters"])
@pytest.mark.parametrize("softmax", [linear_cross_entropy.plain_softmax, linear_cross_entropy.fused_softmax])
def test_log_probabilities_of_rows_have_the_gradients_of_all_logits(monkeypatch, trained, softmax):
    """The loss compares rows in pairs, so the factor of each row is known only in the backward pass."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK", 1)  # chunks of 256 tokens, the fewest
    torch.manual_seed(0)
    model = KINDS["llama"]().double().eval()
    if trained == "adapters":
        model.requires_grad_(False)
        model.model.layers[1].mlp.requires_grad_(True)
    else:
        model.lm_head.bias = nn.Parameter(torch.randn(100, dtype=torch.double))
    texts = texts_of(a_batch(lengths=[60, 51, 60, 3, 60, 60, 44, 58]))  # the answer of row 3 is empty
    batch = Collate(("labels",), is_causal=True)([{"input_ids": t, "labels": [-100] * len(t[:6]) + t[6:]} for t in texts])
    head = linear_cross_entropy.OutputHead(model)
    plain = lambda model, rows: -rows.sum(losses.cross_entropy(model(rows).logits[0], rows["labels"], "none"))
    head.softmax = softmax

    def pairs(logps):
        return -F.logsigmoid(0.1 * (logps[0::2] - logps[1::2])).sum() + 0.01 * logps[0]

    wanted = compute(model, batch, lambda model, rows: pairs(plain(model, rows)))
    layers = without_padding(model)
    layers.install()
    found = compute(model, batch, lambda model, rows: pairs(head.text_logps(model, rows)))
    assert head.is_last
    assert difference(wanted, found) < 1e-10
    with torch.no_grad():
        logps = head.text_logps(model, batch)
    assert logps.dtype == torch.double
    assert logps[3] == 0
    torch.testing.assert_close(pairs(logps).item(), wanted[0])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("softmax", [linear_cross_entropy.plain_softmax, linear_cross_entropy.fused_softmax])
def test_rows_of_new_tokens_above_a_frozen_head_have_the_gradients_of_all_logits(monkeypatch, tied, softmax):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK", 1)  # chunks of 256 tokens, the fewest
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, **POSITIONS, num_key_value_heads=2, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config)
    model._new_modules, model._adapters, model._new_tokens = [], None, [7, 98]
    model = add_adapters(model, RecipeConfig(model="any", lora_r=2), "CAUSAL_LM").double().eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    batch = a_batch(lengths=[60, 51, 60, 3, 60, 60, 44, 58])
    batch.tokens[::9] = 98
    batch = Collate(("labels",), is_causal=True)(
        [{"input_ids": text, "labels": [98 if token % 5 == 0 else token for token in text]} for text in texts_of(batch)]
    )
    factors = torch.linspace(-1, 2, 8, dtype=torch.double)
    head = linear_cross_entropy.OutputHead(model)
    head.softmax = softmax

    def plain(model, rows):
        return rows.sum(losses.cross_entropy(model(rows).logits[0], rows["labels"], "none")) @ factors

    assert difference(compute(model, batch), compute(model, batch, head.loss_sum)) < 1e-10
    found = compute(model, batch, lambda model, rows: -head.text_logps(model, rows) @ factors)
    assert difference(compute(model, batch, plain), found) < 1e-10
    assert head.is_last
    tables = [name for name, gradient in found[1].items() if "trainable_tokens_delta" in name and gradient.any()]
    assert len(tables) == (1 if tied else 2)
    with_adapters = head.item_losses(model, batch)
    with torch.no_grad(), model.disable_adapter():  # the reference of `dpo`
        of_rows = head.item_losses(model, batch)
        torch.testing.assert_close(of_rows @ factors, plain(model, batch))
        torch.testing.assert_close(-head.text_logps(model, batch), of_rows)
    assert float((of_rows - with_adapters).abs().min()) > 1e-3


def test_the_losses_of_rows_in_chunks_are_those_of_all_logits_in_any_batch(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK", 1)  # chunks of 256 tokens, the fewest
    torch.manual_seed(0)
    model = KINDS["llama"]().eval()
    texts = texts_of(a_batch(lengths=[60, 51, 60, 3, 60, 60, 44, 58, 60]))
    items = [{"input_ids": text, "labels": [token if token % 10 else -100 for token in text]} for text in texts]
    items[1]["labels"] = [-100] * 51  # a row without an answer
    head = linear_cross_entropy.OutputHead(model)
    accept_rows(model)

    def measure(rows: slice) -> torch.Tensor:
        return head.item_losses(model, Collate(("labels",), is_causal=True)(items[rows]))

    with torch.no_grad():
        wanted = torch.stack([
            losses.cross_entropy(model(input_ids=torch.tensor([item["input_ids"]])).logits[0, :-1], torch.tensor(item["labels"][1:]))
            for item in items
        ])  # fmt: skip
    whole = measure(slice(None))
    assert head.is_last
    assert wanted[1] == whole[1] == 0
    torch.testing.assert_close(whole, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.cat([measure(slice(i, i + 1)) for i in range(9)]), wanted, rtol=1e-6, atol=0)


def test_an_output_head_whose_logits_are_changed_afterwards_is_not_skipped():
    config = transformers.Gemma2Config(**SHAPE, **POSITIONS, num_key_value_heads=2, head_dim=8, final_logit_softcapping=30.0)
    model = transformers.Gemma2ForCausalLM(config).eval()
    batch = a_batch()
    head = linear_cross_entropy.OutputHead(model)
    accept_rows(model)
    of_tokens = losses.cross_entropy(model(batch).logits[0], batch["labels"], "none")
    torch.testing.assert_close(head.loss_sum(model, batch), of_tokens.sum())
    assert torch.equal(head.item_losses(model, batch), batch.sum(of_tokens))
    assert torch.equal(head.text_logps(model, batch), -batch.sum(of_tokens))
    assert head.is_last is False


# ------------------------------------------------------------------- whether a result depends on padding at all
