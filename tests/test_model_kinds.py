"""Tests that a model which can be loaded but is wrong for a task is refused, and that other models are not."""

import json

import pytest
import torch
import transformers

from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.exporting import export
from accel_ddp.sources import model_kinds, models
from accel_ddp.training import divergence

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OLD = {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}  # XLNet


def config_of(kind: str, **more: object):
    config = transformers.AutoConfig.for_model(kind)
    given = OLD if kind == "xlnet" else {key: value for key, value in SMALL.items() if hasattr(config, key)}
    return transformers.AutoConfig.for_model(kind, **{**given, **more})


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return models.load_tokenizer(RecipeConfig(model=tiny_model))


@pytest.mark.parametrize(
    ("kind", "options", "wanted"),
    [
        ("llama", {}, True),
        ("gpt2", {}, True),
        ("gpt_neox", {}, True),  # its config has is_decoder = False
        ("mamba", {}, True),
        ("mixtral", {"num_local_experts": 4}, True),
        ("bert", {"is_decoder": True}, True),
        ("bert-generation", {}, False),
        ("bert-generation", {"is_decoder": True}, True),
        ("xlnet", {}, False),
        ("gemma3_text", {"use_bidirectional_attention": True, "head_dim": 8}, False),
        ("gemma3_text", {"head_dim": 8}, True),
    ],
)
def test_a_language_model_is_causal_if_later_tokens_do_not_change_its_output(kind, options, wanted, tokenizer):
    """Compute two texts with each model, because configs do not show it reliably."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **options))
    device = torch.device("cpu")
    assert model_kinds.is_causal(model.train(), tokenizer, device) is wanted
    assert model.training
    if wanted:
        model_kinds.require_causal(model, tokenizer, device, "some/model")
    else:
        with pytest.raises(
            UserError, match=r"^--model some/model: \w+ is not causal: .* Use a causal language model, for example"
        ):
            model_kinds.require_causal(model, tokenizer, device, "some/model")


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "xlm", "rembert", "camembert", "roformer", "big_bird", "xmod"])
def test_an_encoder_is_refused_as_a_language_model_by_its_config(kind):
    with pytest.raises(UserError, match=rf"--model x: is an encoder \({kind}\).*recipes/pretrain_mlm.py"):
        model_kinds.check_config("AutoModelForCausalLM", "x", config_of(kind))
    model_kinds.check_config("AutoModelForMaskedLM", "x", config_of(kind))
    model_kinds.check_config("AutoModelForSequenceClassification", "x", config_of(kind))
    model_kinds.check_config("embeddings", "x", config_of(kind))


@pytest.mark.parametrize(
    ("task", "kind", "options", "words"),
    [
        ("AutoModelForCausalLM", "bart", {}, "whose encoder would be left out.*recipes/seq2seq.py"),
        ("AutoModelForCausalLM", "whisper", {}, "is an encoder-decoder model"),
        ("AutoModelForMaskedLM", "bart", {}, "whose decoder would be given masked tokens"),
        ("AutoModelForMaskedLM", "bert", {"is_decoder": True}, "is causal.*recipes/sft.py"),
        ("AutoModelForMaskedLM", "xlm", {"causal": True}, "is causal"),
        ("AutoModelForSequenceClassification", "bert", {"is_decoder": True}, "first token, which would see no other token"),
        ("AutoModelForSeq2SeqLM", "qwen2_audio", {}, "is not an encoder-decoder model"),
        ("embeddings", "t5", {}, "whose embeddings would come from its decoder"),
        ("embeddings", "bart", {}, "whose embeddings would come from its decoder"),
        ("embeddings", "clip", {}, "not a model of texts alone"),
    ],
)
def test_a_model_that_loads_but_is_wrong_for_a_task_is_refused_by_its_config(task, kind, options, words):
    with pytest.raises(UserError, match=words) as error:
        model_kinds.check_config(task, "some/model", transformers.AutoConfig.for_model(kind, **options))
    assert str(error.value).startswith("--model some/model: ")
    assert "for example" in str(error.value)


@pytest.mark.parametrize(
    ("task", "kind", "options"),
    [
        ("AutoModelForCausalLM", "bert", {"is_decoder": True}),
        ("AutoModelForCausalLM", "xlm", {"causal": True}),
        ("AutoModelForCausalLM", "bart", {"is_decoder": True, "is_encoder_decoder": False}),  # what BartForCausalLM saves
        ("AutoModelForSequenceClassification", "bart", {}),
        ("AutoModelForSequenceClassification", "gpt2", {}),
        ("AutoModelForTokenClassification", "t5", {}),
        ("AutoModelForSeq2SeqLM", "t5", {}),
        ("AutoModel", "t5", {}),  # a recipe of a user's own
        ("embeddings", "gpt2", {}),
        ("embeddings", "distilbert", {}),
    ],
)
def test_a_model_that_suits_a_task_is_not_refused(task, kind, options):
    model_kinds.check_config(task, "some/model", transformers.AutoConfig.for_model(kind, **options))


def test_embeddings_of_the_first_token_of_a_causal_model_are_refused_and_others_are_warned_about(tokenizer, caplog):
    """The first token of a causal model sees no other token, so that all texts have the same embedding."""
    encoder = transformers.AutoModel.from_config(config_of("bert"))
    decoder = transformers.AutoModel.from_config(config_of("llama"))
    device = torch.device("cpu")
    with pytest.raises(UserError, match=r"^--pooling cls: --model some/model: LlamaModel is causal"):
        model_kinds.report_causal(decoder, tokenizer, device, "some/model", "--pooling cls")
    model_kinds.report_causal(encoder, tokenizer, device, "some/model", "--pooling cls")
    model_kinds.report_causal(encoder, tokenizer, device, "some/model")
    assert not caplog.records
    model_kinds.report_causal(decoder, tokenizer, device, "some/model")
    assert "LlamaModel is causal" in caplog.text


EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


def test_the_auxiliary_loss_of_a_mixture_of_experts_is_reported_as_off(capsys):
    for kind, options in EXPERTS.items():
        model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **options, output_router_logits=True))
        model_kinds.report_router_loss(model)
        assert "the router's auxiliary loss (factor 0.0" in capsys.readouterr().out
        assert not model.config.output_router_logits
    for kind, options in {"llama": {}, "doge": {}, "mixtral": {"num_local_experts": 4, "router_aux_loss_coef": 0.0}}.items():
        model_kinds.report_router_loss(transformers.AutoModelForCausalLM.from_config(config_of(kind, **options)))
        assert not capsys.readouterr().out, kind


@pytest.mark.parametrize(
    ("kind", "task"),
    [*((kind, "AutoModelForCausalLM") for kind in EXPERTS), ("mixtral", "AutoModelForSequenceClassification")],
)
def test_experts_are_chosen_for_each_token_alone(kind, task):
    """Logits of a text do not depend on the other texts of a micro-batch, nor on padding."""
    torch.manual_seed(0)
    model = getattr(transformers, task).from_config(config_of(kind, **EXPERTS[kind])).eval()
    ids = torch.randint(5, 99, (4, 12))
    mask = (torch.arange(12) < torch.tensor([12, 3, 7, 1])[:, None]).long()
    with torch.no_grad():
        together = model(input_ids=ids * mask, attention_mask=mask).logits
        for i, length in enumerate(mask.sum(1).tolist()):
            alone = model(input_ids=ids[i : i + 1, :length], attention_mask=mask[i : i + 1, :length]).logits[0]
            torch.testing.assert_close(together[i, :length] if alone.ndim == 2 else together[i], alone, atol=1e-5, rtol=1e-5)


def test_rwkv_keeps_its_weights_in_eval_mode_and_is_exported_with_its_config(tmp_path, tokenizer):
    """transformers halves the weights of RWKV in place for a forward pass in eval mode, and doubles them in the next training pass."""
    shape = {"vocab_size": len(tokenizer), "num_hidden_layers": 3, "rescale_every": 1}
    transformers.RwkvForCausalLM(config_of("rwkv", **{**shape, "hidden_size": 16})).save_pretrained(tmp_path)
    original = transformers.RwkvForCausalLM.from_pretrained(tmp_path).eval()
    model = models.load(transformers.AutoModelForCausalLM, RecipeConfig(model=str(tmp_path)), tokenizer).eval()
    ids = torch.arange(5)[None]
    with divergence.weights_kept(model, "a pass"), torch.no_grad():
        computed = model(ids).logits
    words = r"a pass changed 4 tensors of RwkvForCausalLM: rwkv.blocks.1.attention.output.weight"
    with pytest.raises(UserError, match=words), divergence.weights_kept(original, "a pass"), torch.no_grad():
        torch.testing.assert_close(
            original(ids).logits, computed, atol=2e-3, rtol=0
        )  # layer norms add an epsilon to halved values
    assert json.loads(export.files_of(model, tokenizer)["config.json"])["rescale_every"] == 1


def test_a_language_model_without_its_head_is_reported(tmp_path, tokenizer, caplog):
    config = config_of("llama", vocab_size=len(tokenizer))
    cfg = RecipeConfig(model=str(tmp_path))
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    models.load(transformers.AutoModelForCausalLM, cfg, tokenizer)
    assert "no weights for 1 of 21 tensors of LlamaForCausalLM, for example lm_head.weight" in caplog.text
    caplog.clear()
    models.load(transformers.AutoModelForTokenClassification, cfg, tokenizer)
    assert not caplog.records, "a new head for labels is usual"


def test_a_perceiver_with_fewer_latents_than_tokens_classifies(tmp_path, tokenizer):
    """It has neither a table of embeddings that could be extended nor a padding token in its config."""
    sizes = {name: 8 for name in ("d_latents", "d_model", "qk_channels", "v_channels")}
    heads = {"num_self_attention_heads": 2, "num_cross_attention_heads": 2, "num_blocks": 1, "num_self_attends_per_block": 1}
    config = transformers.PerceiverConfig(num_latents=4, vocab_size=len(tokenizer), max_position_embeddings=64, **sizes, **heads)
    transformers.PerceiverForSequenceClassification(config).save_pretrained(tmp_path)
    cfg = RecipeConfig(model=str(tmp_path))
    model = models.load(transformers.AutoModelForSequenceClassification, cfg, tokenizer, num_labels=2, pad_token_id=0)
    ids = torch.arange(8).unsqueeze(0)
    assert model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.shape == (1, 2)


@pytest.mark.parametrize(
    ("kind", "options", "wanted"), [("bert", {}, 99), ("ibert", {}, 99), ("canine", {"num_hash_buckets": 64}, 0)]
)
def test_a_model_with_an_unusual_table_of_embeddings_is_checked(kind, options, wanted, tokenizer):
    """Count the embeddings of a usual table, of one of another class, and of a model that hashes characters."""
    model = transformers.AutoModel.from_config(config_of(kind, **options))
    assert model_kinds.num_embeddings(model) == wanted
    assert model_kinds.is_causal(model, tokenizer, torch.device("cpu")) is (None if kind == "canine" else False)


def test_outputs_that_are_not_finite_are_no_evidence_against_a_model(tokenizer):
    model = transformers.AutoModelForCausalLM.from_config(config_of("llama"))
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    assert model_kinds.is_causal(model, tokenizer, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("llama", {}, ""),
        ("gpt2", {}, ""),
        ("gemma3_text", {"head_dim": 8}, ""),
        ("lfm2", {"full_attn_idxs": [1]}, "not all of its layers are attention layers"),
        ("opt", {"ffn_dim": 64}, "they would see each other"),  # it makes a mask of its own
        ("mamba", {}, "not all of its layers are attention layers"),
    ],
)
def test_documents_share_rows_only_in_models_that_keep_them_apart(kind, options, reason, tokenizer):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **options))
    assert model_kinds.why_mixed(model, tokenizer, torch.device("cpu")) == reason
