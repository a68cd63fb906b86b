"""Each rank of a sharded run reads only its rows of a pretrained model, and all weights are those of a run without sharding."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.ranks.process import this_rank
from accel_ddp.training import sharding
from accel_ddp.training.sharding import own_rows
from tests.conftest import PROGRAMS, run_ranks

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
BIG = 84e6  # parameters, because code and buffers add up to 60 MB


def make_models(folder: Path) -> None:
    """Write models of several kinds, whose tables have an odd number of rows."""
    import peft
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    small = {
        "hidden_size": 16,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.2,
    }
    decoder = {**small, "vocab_size": 101, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}
    bert = transformers.BertConfig(**small, vocab_size=201)
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 33, "num_layers": 2, "num_heads": 2, "vocab_size": 101, "decoder_start_token_id": 0}
    image = {**small, "image_size": 8, "patch_size": 4, "num_labels": 3}
    experts = {**decoder, "tie_word_embeddings": False, "num_local_experts": 4, "num_key_value_heads": 1}
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 101}
    wide = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 4001}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**decoder)).bfloat16()
    llama.save_pretrained(folder / "llama", max_shard_size="4KB")
    transformers.BertModel(bert).save_pretrained(folder / "bert")
    transformers.BertForMaskedLM(bert).save_pretrained(folder / "bert-mlm")
    transformers.BertForSequenceClassification(bert).save_pretrained(folder / "bert-head")
    transformers.T5ForConditionalGeneration(transformers.T5Config(**t5)).save_pretrained(folder / "t5")
    transformers.ViTForImageClassification(transformers.ViTConfig(**image)).save_pretrained(folder / "vit")
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**experts)).bfloat16().save_pretrained(folder / "mixtral")
    big = transformers.LlamaForCausalLM(transformers.LlamaConfig(**wide)).bfloat16()
    assert BIG < big.num_parameters() < 1.1 * BIG
    big.save_pretrained(folder / "big", max_shard_size="70MB")

    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2))
    gpt2.config.save_pretrained(folder / "gpt2-bin")
    torch.save(gpt2.state_dict(), folder / "gpt2-bin" / "pytorch_model.bin")

    # The config ties two tables, and the file has both. They differ only in the rows of the second rank.
    llama.save_pretrained(folder / "untied")
    file = folder / "untied" / "model.safetensors"
    weights = load_file(file)
    table = weights["model.embed_tokens.weight"].clone()
    table[90:] += 1
    save_file({**weights, "lm_head.weight": table}, file, metadata={"format": "pt"})

    llama.config.save_pretrained(folder / "new")
    save_file({"other": torch.ones(3)}, folder / "new" / "model.safetensors", metadata={"format": "pt"})

    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], init_lora_weights=False)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "bert-head")
    adapted = peft.get_peft_model(base, lora)
    adapted.save_pretrained(folder / "adapters")
    adapted.peft_config["default"].init_lora_weights = "pissa"
    adapted.save_pretrained(folder / "pissa")

    shutil.copytree(folder / "llama", folder / "damaged")
    file = max((folder / "damaged").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    make_models(path)
    return path


@pytest.fixture(scope="module")
def results(folder, cache) -> list[dict]:
    """Return what each of two sharded ranks printed."""
    ended = run_ranks(2, PROGRAMS / "sharded_loading.py", folder, **FSDP).well()
    lines = [next(line for line in text.splitlines() if line.startswith("RESULT ")) for text in ended.texts]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def test_the_weights_of_sharded_ranks_are_those_of_one_rank(results):
    assert [result["differences"] for result in results] == [{}, {}]


def test_no_sharded_rank_holds_the_whole_model(results):
    # A whole model takes 4 bytes per parameter, and its files, which are mapped into memory, 2 more. Of a half, it is 3 bytes.
    for result in results:
        assert result["peak"] < 5 * BIG / 1e6, "MB"


def test_all_ranks_refuse_a_model_that_one_of_them_cannot_read_or_that_cannot_be_sharded(results, folder):
    for result in results:
        damaged, pissa = result["errors"]
        assert damaged.startswith(f"--model {folder}/damaged: the folder cannot be loaded: ")
        assert "init_lora_weights: pissa" in pissa


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_rows_of_a_rank_are_those_that_torch_gives_it(ranks, monkeypatch):
    for length in (1, 2, 7, 8, 100):
        chunks = torch.arange(length).chunk(ranks)
        for rank in range(2 * ranks):
            monkeypatch.setattr(sharding, "this_rank", dataclasses.replace(this_rank, rank=rank, num_ranks=2 * ranks))
            begin, end = own_rows(length, ShardingPlan(replicas=2))
            expected = chunks[rank % ranks].tolist() if rank % ranks < len(chunks) else []
            assert [*range(begin, end)] == expected
