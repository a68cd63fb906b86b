"""The estimate of GPU memory equals what a real model has, a run reports it, and what it suggests fits."""

import copy
import dataclasses
import json
import random
import re

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from torch import nn

from accel_ddp.config.parsing import parse_config
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.memory import at_start, estimate_command, fake_model, step_trace
from accel_ddp.memory.estimate import GIB, MARGIN, USABLE, Estimator, fits, needed
from accel_ddp.memory.fake_model import count_states
from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.ranks.process import links
from accel_ddp.training import optim, run_facts
from accel_ddp.training.ema import Ema
from tests.conftest import ROOT

CAUSAL = "AutoModelForCausalLM"


def size(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("name", "momentum"),
    [("adamw", 0.9), ("adamw8bit", 0.9), ("adafactor", 0.9), ("sgd", 0.9), ("sgd", 0.0), ("muon", 0.9), ("muon", 0.0)],
)
def test_weights_gradients_optimizer_and_averages_are_counted_to_the_byte(name, momentum):
    """A matrix of 4,096 values has moments of 8 bits with adamw8bit, and a smaller one has not."""
    cfg = TrainConfig(optimizer=name, momentum=momentum, lr=0.01, ema_decay=0.9)
    layers = nn.Embedding(30, 64), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 3), nn.Linear(3, 3)
    model = nn.Sequential(*layers)
    model[4].weight.requires_grad_(False)
    found = count_states(model, cfg)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.build(model, cfg)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    to_plain = getattr(optimizer, "to_plain", dict)
    state = [value for one in optimizer.state.values() for key, value in to_plain(one).items() if key != "step"]
    assert found.weights == size(model.parameters())
    assert found.gradients == size(p.grad for p in trained)
    assert found.optimizer == size(value for value in state if value is not None)
    assert found.averages == size(Ema(model, 0.9).averages.values()), "with the statistics of batch norm"
    assert count_states(model, TrainConfig()).averages == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Return a folder with the config of a model of 1.9 billion parameters, without weights."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("config")
    shape = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008}
    LlamaConfig(num_hidden_layers=8, vocab_size=32000, architectures=["LlamaForCausalLM"], **shape).save_pretrained(folder)
    return str(folder)


def sft(model: str, *words: str):
    recipe = estimate_command.load_recipe(ROOT / "recipes" / "sft.py")
    fixed = ["--micro_batch_size", "8", "--eval_batch_size", "16", "--no_gradient_checkpointing"]
    return parse_config(recipe.Config, ["--model", model, "--max_length", "512", "--mixed_precision", "bf16", *fixed, *words])


@pytest.fixture(scope="module")
def estimator(model) -> Estimator:
    return Estimator(sft(model), CAUSAL, "bf16")


def test_fsdp_divides_what_it_shards_and_its_settings_count(estimator):
    ddp, fsdp = estimator.estimate(4), estimator.estimate(4, ShardingPlan())
    assert fsdp.optimizer == ddp.optimizer // 4
    assert fsdp.gathered > 0 == ddp.gathered
    assert estimator.estimate(4, ShardingPlan(replicas=2)).optimizer == ddp.optimizer // 2
    assert estimator.estimate(4, ShardingPlan(reshard_after_forward=False)).gathered > fsdp.gathered
    offloaded = estimator.estimate(4, ShardingPlan(cpu_offload=True))
    assert (offloaded.weights < 1e6, offloaded.gradients, offloaded.optimizer) == (True, 0, 0)
    checkpointed = estimator.estimate(4, ShardingPlan(activation_checkpointing=True))
    assert checkpointed.total < fsdp.total
    assert checkpointed.total == estimator.estimate(4, ShardingPlan(), gradient_checkpointing=True).total


def test_what_stays_gathered_during_a_step_is_what_fits(estimator):
    """Two micro-batches. A config that does not free weights after the forward pass keeps them even if they do not fit."""
    estimator = copy.copy(estimator)
    estimator.cfg = dataclasses.replace(estimator.cfg, global_batch_size=32)
    size = lambda keep: needed(estimator.estimate(2, ShardingPlan(), keep_gathered=keep).total * MARGIN, 2)
    sizes = {keep: size(keep) for keep in ("none", "weights", "gradients")}
    assert sizes["none"] == size("auto") < sizes["weights"] < sizes["gradients"] - 2 * GIB
    chosen = lambda plan, available: estimator.settled(2, plan, available).choices.get("keep_gathered", ("",))[0]
    assert {keep: chosen(ShardingPlan(), size + 1) for keep, size in sizes.items()} == {keep: keep for keep in sizes}
    assert chosen(ShardingPlan(), 0) == "none"
    assert chosen(ShardingPlan(reshard_after_forward=False), 0) == "weights"
    assert chosen(None, sizes["gradients"]) == "", "of FSDP only"


def test_options_that_save_memory_save_it_in_the_estimate(estimator):
    whole = estimator.estimate(1)
    lora = estimator.estimate(1, lora_r=16)
    assert lora.optimizer < whole.optimizer / 50
    assert lora.weights == pytest.approx(whole.weights, rel=0.02)
    workers = estimator.estimate(1, sync_every=5, local_workers=4, global_batch_size=4, micro_batch_size=1)
    assert workers.optimizer == 4 * whole.optimizer + 10 * whole.optimizer // 2, "AdamW has 2 numbers per parameter"
    quantised = estimator.estimate(1, lora_r=16, quantize="4bit")
    tables = 2 * 32000 * 4096  # parameters of embeddings and head, which stay in bf16
    adapters = lora.weights - whole.weights
    assert quantised.weights - 2 * tables - adapters == pytest.approx((whole.weights / 4 - tables) * 0.516, rel=0.01)
    assert quantised.copies < lora.copies, "no copy in 16 bits of quantised weights stays"
    wide = 4 * 32000 * 512 * estimator.cfg.split(1)[0]
    uncompiled = estimator.estimate(1, compile="off")
    assert 2.5 * wide < uncompiled.loss < 2.8 * wide, "logits, a copy of them in float32, and their logarithms"
    assert whole.loss < 2.5 * wide
    other = estimator.estimate(2, ema_decay=0.9, gradient_as_bucket_view=False)
    assert other.averages == whole.gradients
    assert other.gradients == 2 * whole.gradients, "DDP then keeps buckets besides the gradients"


HSDP = ShardingPlan(replicas=2)
OTHERS = [(1, None, 0.9), (1, None, 0.3), (2, None, 0.95), (2, ShardingPlan(), 0.95), (2, ShardingPlan(), 0.5), (8, HSDP, 0.6)]


@pytest.mark.parametrize(
    ("ranks", "plan", "part"), [(2, None, 0.6), *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_what_is_suggested_fits_when_it_is_typed(model, estimator, ranks, plan, part):
    available = needed(estimator.estimate(ranks, plan).peak, ranks) * part
    advice = estimator.suggest(ranks, plan, available)
    assert advice
    for one in advice:
        words = re.sub(r"FSDP over.*?GPUs( \(.*?\))?( with)?|one copy .*?\)( with)?|--fsdp_\w+ true( with)?", "", one.words)
        typed = Estimator(sft(model, *words.split()), CAUSAL, "bf16")
        sharded = plan or (ShardingPlan() if "FSDP" in one.words else None)
        if sharded and (" over " in one.words or "copy" in one.words):
            sharded = ShardingPlan()
        if "offload" in one.words:
            sharded = ShardingPlan(replicas=sharded.replicas, cpu_offload=True)
        number = int(re.search(r"over (?:the same )?(\d+) GPUs", one.words)[1]) if " over " in one.words else ranks
        again = typed.estimate(number, sharded)
        assert again.peak == one.found.peak, one.words
        assert fits(again, available)


@pytest.mark.slow
def test_a_smaller_evaluation_is_suggested_if_only_the_evaluation_is_too_large(model):
    large = Estimator(sft(model, "--eval_batch_size", "512"), CAUSAL, "bf16")
    found = large.estimate(1)
    assert found.peak > found.total
    assert large.suggest(1, None, needed(found.total, 1) + 1)[0].words == "--eval_batch_size 1"


def test_a_model_that_does_not_fit_is_refused_with_what_to_change(estimator):
    ddp, fsdp = estimator.estimate(2), estimator.estimate(2, ShardingPlan())
    refused = at_start.judge(estimator, 2, None, needed(ddp.states, 2) - 1, 1e15)
    assert re.search(r"^--model .*: does not fit with DDP\. With CUDA it needs \d", refused.refusal)
    assert "FSDP over the same 2 GPUs (--config_file accelerate_configs/fsdp.yaml)" in refused.refusal
    assert "\n" not in refused.refusal
    long = at_start.judge(estimator, 2, None, needed(ddp.states, 2) + 1, 1e15)
    assert (long.refusal, "A step may not fit" in long.text) == ("", True)
    good = at_start.judge(estimator, 2, ShardingPlan(), needed(fsdp.peak, 2) + 1, 1e15)
    assert re.match(r"memory per GPU: \d.* GiB estimated with FSDP \(weights .*, gradients .*, optimizer state ", good.text)
    assert "with DDP (weights" in good.text
    assert good.facts["estimated"] == fsdp.peak
    busy = at_start.judge(estimator, 2, ShardingPlan(), 80 * GIB, 0.1 * GIB)
    assert "Only 0.1 GiB are free" in busy.text
    assert not busy.refusal, "another process may end soon"


def test_a_run_prints_the_estimate_and_its_random_numbers_stay_the_same(model, estimator, monkeypatch, capsys, caplog):
    monkeypatch.setattr(links, "memory", {})
    accelerator = Accelerator(cpu=True)
    numbers = lambda: (torch.random.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    fitting, large = sft(model, "--gpu_memory_gb", "80"), sft(model, "--gpu_memory_gb", "1")
    before = numbers()
    at_start.fit_memory(fitting, accelerator, CAUSAL)
    assert capsys.readouterr().out.startswith("memory per GPU: ")
    assert links.memory["weights"] == estimator.estimate(1).weights
    assert numbers() == before
    caplog.set_level("INFO")
    for cfg, name in ((sft(model), CAUSAL), (large, ""), (large, "None")):
        at_start.fit_memory(cfg, accelerator, name)
    assert capsys.readouterr().out == ""
    assert "the memory of the model is not estimated: AttributeError" in caplog.text, "a class that transformers does not have"


@pytest.fixture(scope="module")
def shape_of_8b(tmp_path_factory) -> str:
    """Return a folder with the config of a model of 8 billion parameters, stored in bf16, without weights."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("8b")
    shape = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
    config = LlamaConfig(num_hidden_layers=32, vocab_size=128256, max_position_embeddings=131072, dtype="bfloat16", **shape)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def test_adapters_of_an_8b_model_fit_on_24_gb_with_what_auto_chooses(shape_of_8b):
    """The weights take 15.0 GiB. A step of one row fits with gradient checkpointing only."""
    recipe = estimate_command.load_recipe(ROOT / "recipes" / "sft.py")
    cfg = parse_config(recipe.Config, ["--model", shape_of_8b, "--lora_r", "16", "--max_length", "2048"])
    room = 24 * USABLE * GIB
    found = at_start.judge(Estimator(cfg, CAUSAL, "bf16"), 1, None, room, room)
    assert {name: value for name, (value, _) in found.choices.items()} == {"gradient_checkpointing": True, "eval_batch_size": 8}
    why = found.choices["gradient_checkpointing"][1]
    assert re.fullmatch(r"\d+\.\d of 23\.8 GiB estimated without it, \d+\.\d with it", why)
    assert "not fit" not in found.text
    assert found.facts["weights"] == pytest.approx(15.1 * GIB, rel=0.01)
    assert 16 * GIB < found.facts["estimated"] < 22 * GIB


def test_pairs_count_as_two_texts_and_a_copy_of_the_trained_weights_as_states(model, estimator):
    cfg = sft(model, "--micro_batch_size", "2")
    cfg.texts_per_item, cfg.reference = 2, "stored"
    stored, single = Estimator(cfg, CAUSAL, "bf16").estimate(1), estimator.estimate(1, micro_batch_size=4)
    assert stored.activations == pytest.approx(single.activations, rel=0.01), "4 texts are 2 pairs"
    cfg.reference = "copy"
    copied = Estimator(cfg, CAUSAL, "bf16").estimate(1)
    assert copied.reference == copied.gradients > 0
    assert copied.states - stored.states == copied.total - stored.total == copied.reference
    fake = fake_model.FakeModel(None, CAUSAL, None, cfg, [np.array([[9, 8], [3, 30], [1, 2]]), None])
    rows = fake_model.make_batch(fake, cfg, 2)
    assert (rows.items, rows.texts, rows.used) == (2, 4, 50)
    lists = fake._replace(lengths=[np.array([9, 30]), np.array([[7], [5]])])  # of 1 or 2 candidates, and evaluated one by one
    assert fake_model.make_batch(lists, cfg, 2).texts == 4
    assert fake_model.make_batch(lists, cfg, 2, True).used == 12


UNEVEN = [64] * 30 + [256] * 4 + [512] * 4


def test_rows_that_are_shorter_than_max_length_are_estimated_as_they_are(model, estimator, monkeypatch, capsys):
    import datasets

    fake = fake_model.FakeModel(None, CAUSAL, None, estimator.cfg, [np.array(UNEVEN), np.array([70])])
    for long, width, tokens in ((600, 512, 3072), (300, 300, 8 * 300 - 4 * 44)):
        cfg = sft(model, "--max_length", str(long))
        rows = fake_model.make_batch(fake, cfg, 8)
        assert (rows.texts, rows.width, rows.used, rows.targets) == (8, -(-width // 8) * 8, tokens, tokens)
        again = fake_model.make_batch(fake, cfg, 3, True)
        assert (again.texts, again.used, again.squares) == (3, 210, 3 * 70**2), "rows come again in the next epoch"

    monkeypatch.setattr(links, "memory", {})
    rows = [datasets.Dataset.from_dict({"input_ids": [[5] * length for length in some]}) for some in (UNEVEN, [70])]
    cfg = sft(model, "--gpu_memory_gb", "80", "--micro_batch_size", "auto", "--max_length", "100000")
    at_start.fit_memory(cfg, Accelerator(cpu=True), CAUSAL, rows)
    assert links.memory["micro_batch_size"] == 1
    assert links.memory["estimated"] < estimator.estimate(1).total
    assert "estimated for micro-batches of 1 item (" in capsys.readouterr().out
    assert run_facts.describe_memory({"measured": GIB, "estimated": GIB, "micro_batch_size": 1}) == (
        "peak of GPU memory: 1.0 GiB, and 1.0 GiB were estimated for micro-batches of 1 item."
    )


@pytest.mark.slow
def test_layers_without_padding_need_the_memory_of_the_tokens_and_padded_ones_that_of_the_longest_text(model, estimator):
    total = lambda rows, *words: (
        Estimator(sft(model, *words), CAUSAL, "bf16", 1, [np.array(rows), np.array([64])]).estimate(1).total
    )
    assert total(UNEVEN) == pytest.approx(total([384] * 9), rel=0.005)
    assert total(UNEVEN) < estimator.estimate(1).total - GIB
    assert total(UNEVEN, "--padding_free", "off") == pytest.approx(estimator.estimate(1, padding_free="off").total, rel=0.005)


def test_auto_is_settled_without_an_estimate_too(model, capsys):
    recipe = estimate_command.load_recipe(ROOT / "recipes" / "sft.py")
    cfg = parse_config(recipe.Config, ["--model", model])
    at_start.fit_memory(cfg, Accelerator(cpu=True), CAUSAL)
    assert (cfg.gradient_checkpointing, cfg.eval_batch_size) == (False, 16)
    assert "eval_batch_size 16: on CPUs (--eval_batch_size changes it)" in capsys.readouterr().out


def test_a_model_that_takes_too_long_to_trace_is_judged_by_its_states(model, estimator, monkeypatch):
    monkeypatch.setattr(step_trace, "LIMIT_SECONDS", -1)
    slow = Estimator(sft(model), CAUSAL, "bf16")
    found = at_start.judge(slow, 2, None, 80 * GIB, 80 * GIB)
    assert slow.estimate(2).states == estimator.estimate(2).states
    assert "Activations are not included" in found.text
    assert at_start.judge(slow, 2, None, 16 * GIB, 16 * GIB).refusal


SMALL = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 500}
WHOLE = {"d_model": 64, "encoder_layers": 4, "decoder_layers": 4, "vocab_size": 500}
ARCHITECTURES = [
    ("sft", "mixtral", {**SMALL, "num_key_value_heads": 4, "num_local_experts": 4}), ("sft", "gemma2", {**SMALL, "head_dim": 16}),
    ("sft", "opt", {"hidden_size": 64, "num_hidden_layers": 4, "ffn_dim": 128, "word_embed_proj_dim": 64, "num_attention_heads": 4}),
    ("sft", "gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4}), ("sft", "qwen3", {**SMALL, "head_dim": 16}),
    ("classify", "deberta-v2", SMALL), ("classify", "modernbert", {**SMALL, "pad_token_id": 0}), ("embed", "mpnet", SMALL),
    ("seq2seq", "t5", {"d_model": 64, "num_layers": 4, "vocab_size": 500}), ("seq2seq", "bart", WHOLE),
    ("images", "vit", SMALL), ("images", "resnet", {}), ("pretrain_mlm", "roberta", SMALL), ("tag", "electra", SMALL),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "kind", "shape"), ARCHITECTURES)
def test_the_activations_of_many_architectures_are_estimated(recipe, kind, shape, tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **shape).save_pretrained(tmp_path)
    module = estimate_command.load_recipe(ROOT / "recipes" / f"{recipe}.py")
    has_adapters = recipe != "images" and kind != "mixtral"  # whose experts are no linear layers
    for options in ([], *([["--lora_r", "8"]] if has_adapters else [])):
        cfg = parse_config(module.Config, ["--model", str(tmp_path), *options])
        found = Estimator(cfg, module.Task.model_class, "bf16").estimate(1)
        assert found.has_activations
        assert found.activations + found.loss > 0


def test_the_command_reads_an_accelerate_config(model, tmp_path, capsys):
    config = yaml.safe_load((ROOT / "accelerate_configs" / "2node_fsdp.yaml").read_text()) | {"num_processes": 4}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    words = ["--json", "sft", "--model", model, "--max_length", "64"]
    assert estimate_command.main(["--config_file", str(tmp_path / "config.yaml"), *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    ddp, fsdp = printed["estimates"]
    assert (printed["precision"], ddp["kind"], fsdp["kind"], fsdp["ranks"]) == ("bf16", "DDP", "FSDP", 4)
    assert fsdp["optimizer"] == -(-ddp["optimizer"] // 2), "one copy on each of two nodes"
    estimate_command.main(["--gpus", "1", "2", "--memory", "12", "80", *words[1:]])
    table = capsys.readouterr().out
    assert table.splitlines()[0].split("  ")[-3:] == ["one GPU", "DDP x 2", "FSDP x 2"]
    for row in ("weights", "gradients", "optimizer state", "gathered weights", "activations", "vocabulary loss", "total"):
        assert f"\n{row} " in table
    peaks = dict(re.findall(r"^peak on (\d+) GB +(.*)$", table, flags=re.MULTILINE))
    assert peaks["12"].split() == ["-"] * 3
    total = re.search(r"^total +(.*)$", table, flags=re.MULTILINE)[1]
    assert peaks["80"].split()[:2] == total.split()[:2], "on large GPUs nothing is turned on"
    assert "12 GB: does not fit. For FSDP x 2, use FSDP over 8 GPUs" in table


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "2"], "needs a recipe"),
        (["--gpus", "0", "sft"], "--gpus 0: must be above 0"),
        (["nosuch"], "accel-ddp estimate nosuch: there is no such recipe"),
        (["sft", "--gpus", "2"], "Put it before the recipe: accel-ddp estimate --gpus ... sft"),
        (
            ["--config_file", "fsdp.yaml", "--gpus", "2", "sft", "--optimizer", "adafactor"],
            "--optimizer adafactor cannot be used",
        ),
        (["--config_file", "2node_fsdp.yaml", "--gpus", "3", "sft", "--global_batch_size", "6"], "Use a multiple of 2"),
        (["--gpus", "3", "sft"], "--global_batch_size 16 cannot be split over 3 ranks"),
        (["--memory", "nan", "sft"], "must be above 0"),
        (["--config_file", "nowhere.yaml", "sft"], "--config_file nowhere.yaml: there is no such file"),
        (["own_model"], "has no option --model"),
        (["sft", "--model", "/nowhere"], "there is no such folder"),
        (["sft", "--quantize", "4bit"], "Add --lora_r 16"),
        (["classify", "--model", "mini-resnet", "--lora_r", "4"], "--model mini-resnet"),
    ],
)
def test_wrong_input_of_the_command_is_one_message(words, message):
    with pytest.raises(UserError) as error:
        estimate_command.main(words)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
