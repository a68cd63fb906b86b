"""A model whose texts would leak into each other in a row, or whose attention would ignore an argument, is computed with padding."""

import contextlib
import re

import pytest
import torch
import transformers
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

from accel_ddp.speed import row_model
from accel_ddp.speed.row_model import RowModel
from accel_ddp.training import isolation
from tests.test_padding_free import GROUPS, KINDS, SHAPE, SPECIAL, a_batch, compute, difference, loss_of

SHORT = [3, 5, 4, 6]  # shorter than every window and block below
SIZE = {**SHAPE, **GROUPS, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
BLOCKS = {"dense_intermediate_size": 64, "shared_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
BLOCKS |= {"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2, "rotary_dim": 4}


def qwen():
    """One hidden channel is 100 times as large as the others, and hides what happens in them."""
    types = ["linear_attention", "linear_attention", "full_attention"]
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZE, **LINEAR, layer_types=types)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] *= 100
    return model


def minimax():
    types = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
    return MiniMaxM3VLForCausalLM(transformers.MiniMaxM3VLTextConfig(**SIZE, **BLOCKS, layer_types=types)).eval()


def doge():
    """Its attention adds a mask that it computes. At first this mask is constant, and only its gradient is not."""
    return transformers.DogeForCausalLM(transformers.DogeConfig(**SIZE, keep_window_size=32)).eval()


@pytest.mark.parametrize("precision", ["no", "bf16", "bf16 weights"])
def test_a_leak_behind_a_large_channel_is_found_and_the_layer_named(precision, monkeypatch):
    """Mixers get padded texts, so that they do not leak. A mixer that is not known does."""
    for expected in ("", f"{isolation.LEAKS} in model.layers.0.linear_attn"):
        torch.manual_seed(0)
        model = qwen().to(torch.bfloat16 if precision == "bf16 weights" else torch.float32)
        layers = RowModel(model)
        layers.install()
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext():
            assert layers.check(lambda batch, model=model: loss_of(model, batch), a_batch(), 5e-2) == expected
        monkeypatch.setattr(row_model, "MIXERS", re.compile("unknown"))


def test_a_leak_into_a_projection_that_is_still_zero_is_found(monkeypatch):
    """The hidden states are those of padding, and the gradients are not."""
    monkeypatch.setattr(row_model, "MIXERS", re.compile("unknown"))
    torch.manual_seed(0)
    model = qwen()
    for layer in model.model.layers[:2]:
        torch.nn.init.zeros_(layer.linear_attn.out_proj.weight)
    layers = RowModel(model)
    layers.install()
    found = layers.check(lambda batch: loss_of(model, batch), a_batch(), 1e-4)
    assert found == f"{isolation.LEAKS} in model.layers.0.linear_attn.out_proj"


@pytest.mark.parametrize(("make", "argument"), [(minimax, "block_indices"), (doge, "attention_mask")])
def test_an_argument_that_the_attention_would_ignore_is_refused_though_short_texts_give_the_same(make, argument):
    torch.manual_seed(0)
    model = make()
    batch = a_batch()
    padded, layers = compute(model, batch), RowModel(model)
    layers.install()
    found = layers.check(lambda batch: loss_of(model, batch), a_batch(lengths=SHORT), 1e-4)
    assert f"Attention of layer {1 if make is minimax else 0} passes {argument} to its attention, which would be ignored" in found
    layers.remove()
    assert difference(padded, compute(model, batch)) == 0


def test_only_arguments_with_a_value_that_may_change_the_result_are_unknown():
    module = torch.nn.Identity()
    assert (
        isolation.unknown_arguments(module, None, {"block_indices": None, "position_ids": torch.ones(1), "use_cache": True}) == ""
    )
    found = isolation.unknown_arguments(module, None, {"indices": torch.ones(1), "softcap": 2.0})
    assert found == "Identity passes indices, softcap to its attention, which would be ignored"


def test_a_channel_is_compared_by_its_own_scale():
    exact = [torch.randn(20, 4) * torch.tensor([1e4, 1.0, 1.0, 1.0])]
    wrong = [exact[0] + torch.tensor([0.0, 0.0, 0.5, 0.0])]
    assert isolation.channel_distance(exact, wrong) > 0.1
    assert isolation.channel_distance(exact, [exact[0] * (1 + 1e-6)]) < 1e-5
    rounded = [exact[0].bfloat16().float()]
    assert isolation.rounding_distance(exact, rounded, rounded, has_experts=False) <= 1
    assert isolation.rounding_distance(exact, rounded, wrong, has_experts=False) > isolation.TIMES_ROUNDING


def test_the_test_of_isolation_fails_if_a_text_has_no_effect_or_its_neighbor_has_one():
    config = transformers.LlamaConfig(vocab_size=50, bos_token_id=1, eos_token_id=2)
    texts = [torch.arange(3, 3 + n) for n in (4, 6, 5)]
    table = torch.randn(50, 8)
    alone = lambda some: [table[text] for text in some]
    assert isolation.isolation_problem(alone, texts, config) == ""
    assert "does not depend" in isolation.isolation_problem(lambda some: [torch.ones(len(t), 8) for t in some], texts, config)
    tiny = lambda some: [table[text] + 1e-7 * table[some[1][0]] for text in some]
    assert isolation.isolation_problem(tiny, texts, config) == isolation.LEAKS
    held = lambda some: [torch.stack([row.topk(2).indices.float() for row in table[some[1]]]).sum() + table[t] for t in some]
    assert isolation.isolation_problem(held, texts, config) == "", "the choice of experts is held"


def test_another_text_keeps_special_tokens_and_equal_tokens():
    config = transformers.LlamaConfig(
        **{**SHAPE, "vocab_size": 20}, **{k: v for k, v in SPECIAL.items() if k.endswith("eos_token_id")}
    )
    text = torch.tensor([1, 7, 8, 7, 2])
    other = isolation.other_text(text, config)
    assert (other[[0, 4]] == text[[0, 4]]).all()
    assert (other[1:4] != text[1:4]).all()
    assert other[1] == other[3] != other[2]


def test_texts_cross_each_block_of_the_config():
    model = KINDS["llama"]()
    model.config.mamba_chunk_size = 100
    model.config.chunk_size_feed_forward = 300  # does not limit what a token sees
    assert isolation.limits_of(model.config) == {100}
    assert max(map(len, isolation.made_texts(model.config, 127))) == 127
