"""Runs of `sft` on every format: its loss is what plain PyTorch computes, on any number of ranks, resumed or not.

The expected tokens come from tests/test_chat_templates.py, which computes them without the code of `accel_ddp`.
"""

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.exporting import export, trained_model
from accel_ddp.sources import models
from tests.conftest import PROGRAMS, ROOT, clean_environment, run_ranks
from tests.test_chat_templates import OWN, answer, expected, make_tokenizer, result, tool, trained_backend, user
from tests.test_recipes import FSDP, evaluations, sentence, write_jsonl

SFT = ROOT / "recipes" / "sft.py"
TOOLS = [tool("forecast", "town"), tool("convert", "unit")]


def chats(i: int) -> dict[str, Any]:
    """Return a chat with 1 to 3 turns. Answers have 1 or 30 words, so a mean over rows differs from the mean over tokens."""
    turns = [[user(sentence(i + j, 3)), answer(sentence(i + j, 1 if (i + j) % 3 else 30))] for j in range(1 + i % 3)]
    system = [{"role": "system", "content": sentence(i, 4)}] if i % 2 else []
    return {"messages": [*system, *(message for turn in turns for message in turn)]}


def called(i: int, arguments: dict[str, Any] | str) -> list[dict[str, Any]]:
    function = {"name": ("forecast", "convert")[i % 2], "arguments": arguments}
    return [{"id": f"call{i:05}", "type": "function", "function": function}]


def tools(i: int) -> dict[str, Any]:
    """Return a chat with a tool call. Its arguments have other keys in every second row, where a table fills them with None."""
    arguments = {"town": sentence(i, 1), "days": i} if i % 2 else {"unit": sentence(i, 2)}
    call = answer("", tool_calls=called(i, arguments))
    messages = [user(sentence(i, 3)), call, result(sentence(i, 4), "forecast", f"call{i:05}"), answer(sentence(i, 1 + i % 9))]
    return {"messages": messages, "tools": [TOOLS[i % 2]]}


def tools_as_json(i: int) -> dict[str, Any]:
    """Return the row as the API of OpenAI writes it: the arguments are JSON, and the content beside a call is null."""
    row = json.loads(json.dumps(tools(i)))
    function = row["messages"][1]["tool_calls"][0]["function"]
    row["messages"][1]["content"], function["arguments"] = None, json.dumps(function["arguments"])
    return row


def reasoning(i: int) -> dict[str, Any]:
    think = lambda j: {"reasoning_content": sentence(i + j, 5)} if (i + j) % 4 else {}
    turns = [[user(sentence(i + j, 3)), answer(sentence(i + j, 1 + i % 9), **think(j))] for j in range(1 + i % 2)]
    return {"messages": [message for turn in turns for message in turn]}


def everything(i: int) -> dict[str, Any]:
    return tools(i) | {"messages": [*tools(i)["messages"], *reasoning(i)["messages"]]}


class Kind(NamedTuple):
    template: str  # of tests/chat_templates, or "" for a base model
    row: Callable[[int], dict[str, Any]]
    written: Callable[[int], dict[str, Any]] | None = None  # how the row stands in the file, if otherwise
    max_length: int = 2048


KINDS = {
    "chats": Kind("qwen2_5", chats),
    "tools": Kind("llama3_1", tools, tools_as_json),
    "reasoning": Kind("qwen3", reasoning),
    "generation tags": Kind("chatml_generation", everything),
    "prompts": Kind("", lambda i: {"prompt": sentence(i, 3), "completion": " " + sentence(i, 1 + i % 9)}),
    # Short texts share rows, and long ones are split.
    "texts": Kind("", lambda i: {"text": sentence(i, 1 + 7 * (i % 6))}, max_length=64),
}


BASE = {"new tokens": Kind("", chats)}  # a model without a chat template, and without the tokens of one


@pytest.fixture(scope="module")
def run(tmp_path_factory, cache) -> Callable[..., Path]:
    """Return a function that makes a run of a kind and returns its folder. The same run is made once."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("chats")

    @functools.cache
    def model(template: str) -> Path:
        if template:
            tokenizer = make_tokenizer(OWN[template].read_text())
        else:
            names = {"eos_token": "</s>", "pad_token": "<pad>"}
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained_backend()), **names)
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        LlamaForCausalLM(LlamaConfig(**shape, **tokens, initializer_range=0.2)).save_pretrained(folder / f"model {template}")
        tokenizer.save_pretrained(folder / f"model {template}")
        return folder / f"model {template}"

    @functools.cache
    def run_once(name: str, ranks: int = 1, *more: str, sharded: bool = False, script: Path = SFT) -> Path:
        kind = (KINDS | BASE)[name]
        out = folder / f"{name} {ranks} {' '.join(more).replace('/', ' ')[-40:]} {sharded}"
        given = ["--model", model(kind.template), "--max_length", kind.max_length, "--mixed_precision", "no", "--samples", "0"]
        given += ["--steps", "4", "--save_every", "2", "--eval_every", "4", "--global_batch_size", "4", "--micro_batch_size", "2"]
        given += ["--eval_batch_size", "4", "--optimizer", "sgd", "--lr", "0.1", "--no_dropout", "--keep_last", "3"]
        for part, first, number in (("train", 0, 16), ("eval", 16, 7)):
            rows = [(kind.written or kind.row)(i) for i in range(first, first + number)]
            given += [f"--{part}_file", write_jsonl(folder / f"{name}.{part}.jsonl", rows)]
        env = FSDP if sharded else {}
        ended = run_ranks(ranks, script, *given, *more, "--output_dir", out, **env).well()
        assert "Traceback" not in ended.text
        return out

    return run_once


def examples_of(tokenizer: Any, row: dict[str, Any], max_length: int) -> list[tuple[list[int], list[bool | None]]]:
    """Return the tokens of a row and whether each is trained, without the code of `accel_ddp`."""
    if "messages" in row:
        return expected(tokenizer, row["messages"], row.get("tools"))
    before, after = row.get("prompt", ""), row.get("completion") or row["text"]
    encoded = tokenizer(before + after + tokenizer.eos_token, add_special_tokens=False, return_offsets_mapping=True)
    ids, bits = encoded["input_ids"], [start >= len(before) for start, _ in encoded["offset_mapping"]]
    # A part of a long text begins with the last token of the part before it, so every token but the first is predicted once.
    starts = range(0, len(ids) - 1, max_length - 1)
    return [(ids[start : start + max_length], bits[start : start + max_length]) for start in starts]


def plain_loss(folder: Path, rows: list[dict[str, Any]], max_length: int) -> float:
    """Return the mean loss over the trained tokens of these rows, one row at a time, in float64."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).double().eval()
    total, number = 0.0, 0
    for row in rows:
        for ids, bits in examples_of(tokenizer, row, max_length):
            assert None not in bits
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0]
            places = [place for place in range(1, len(ids)) if bits[place]]  # nothing predicts the first token
            wanted = torch.tensor([ids[place] for place in places])
            total += F.cross_entropy(logits[[place - 1 for place in places]], wanted, reduction="sum").item()
            number += len(places)
    return total / number


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_is_what_plain_pytorch_computes(name, run):
    """Compare the evaluations before and after training with the loss of the base model and of the exported model."""
    folder, rows = run(name), [KINDS[name].row(i) for i in range(16, 23)]
    base = json.loads((folder / "config.json").read_text())["model"]
    found = [evaluation["loss"] for evaluation in evaluations(folder)]
    wanted = [plain_loss(Path(place), rows, KINDS[name].max_length) for place in (base, folder / "model")]
    assert found == pytest.approx(wanted, abs=1e-6, rel=0)
    assert abs(wanted[1] - wanted[0]) > 0.05, "the comparison means little if the weights do not change"


def weights_of(folder: Path, file: str) -> dict[str, np.ndarray]:
    return load_file(folder / "model" / file)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "tools" else [pytest.mark.slow]) for name in KINDS])
def test_two_ranks_and_a_resumed_run_learn_what_one_rank_learns(name, run):
    """The run is resumed on another day, and the chat template of "tools" writes the date."""
    one, two = run(name), run(name, 2)
    resumed = run(name, 1, "--resume", str(one / "step_00000002"), script=PROGRAMS / "another_day.py")
    for key, value in weights_of(one, "model.safetensors").items():
        np.testing.assert_allclose(weights_of(two, "model.safetensors")[key], value, atol=1e-6, rtol=0, err_msg=key)
    assert evaluations(two)[-1]["loss"] == pytest.approx(evaluations(one)[-1]["loss"], abs=1e-6)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (resumed / "step_00000004" / file).read_bytes() == (one / "step_00000004" / file).read_bytes()
    assert evaluations(resumed)[-1]["loss"] == evaluations(one)[-1]["loss"]
    config = json.loads((resumed / "config.json").read_text())
    assert config["template_date"] == (date.today().isoformat() if name == "tools" else "auto")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tools", "reasoning", "texts"])
def test_adapters_of_a_sharded_model_learn_what_one_rank_learns(name, run):
    adapters = ("--lora_r", "2", "--merge_adapters", "off", "--lr", "1")
    one, sharded = run(name, 1, *adapters), run(name, 2, *adapters, sharded=True)
    found = [weights_of(folder, "adapter_model.safetensors") for folder in (one, sharded)]
    assert found[0]
    for key, value in found[0].items():
        np.testing.assert_allclose(found[1][key], value, atol=1e-6, rtol=0, err_msg=key)
    losses = [evaluations(folder)[-1]["loss"] for folder in (one, sharded)]
    assert math.isclose(*losses, abs_tol=1e-6)
    assert abs(losses[0] - evaluations(one)[0]["loss"]) > 0.05, "the comparison means little if the adapters do not change"


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [(), ("--lora_r", "2", "--lr", "1")], ids=["all weights", "adapters"])
def test_a_base_model_learns_a_template_whose_tokens_it_lacks(adapters, run, tmp_path, capsys):
    """The tokens are in the exported tokenizer and model, and their embeddings are trained, also below adapters."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    options = ("--chat_template", "chatml", *adapters)
    one, two = run("new tokens", 1, *options), run("new tokens", 2, *options, sharded=not adapters)
    resumed = run("new tokens", 1, *options, "--resume", str(one / "step_00000002"))
    tokenizer, model = AutoTokenizer.from_pretrained(one / "model"), AutoModelForCausalLM.from_pretrained(one / "model")
    new, (end,) = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]), tokenizer.encode("</s>")
    assert (tokenizer.eos_token, model.config.vocab_size, new) == ("<|im_end|>", len(tokenizer), [*range(len(tokenizer))[-2:]])
    assert GenerationConfig.from_pretrained(one / "model").eos_token_id == [end, new[1]]
    for table, trained in ((model.get_input_embeddings().weight, new), (model.get_output_embeddings().weight, new[1:])):
        assert not torch.isclose(table[trained], table[end], atol=1e-3).all(1).any(), "they began like the end token"
    loss = evaluations(one)[-1]["loss"]
    assert loss == pytest.approx(plain_loss(one / "model", [chats(i) for i in range(16, 23)], 2048), abs=1e-6)
    assert evaluations(two)[-1]["loss"] == pytest.approx(loss, abs=1e-6)
    for key, value in weights_of(one, "model.safetensors").items():
        np.testing.assert_allclose(weights_of(two, "model.safetensors")[key], value, atol=1e-6, rtol=0, err_msg=key)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (resumed / "step_00000004" / file).read_bytes() == (one / "step_00000004" / file).read_bytes()
    export.from_checkpoint(one / "step_00000004", tmp_path / "again")
    ids = torch.tensor([[*new, end, *range(5)]])
    others = [AutoModelForCausalLM.from_pretrained(tmp_path / "again")]
    if adapters:
        cfg = RecipeConfig(model=str(one / "model" / "adapter"), mixed_precision="no")
        further = models.load(AutoModelForCausalLM, cfg, models.load_tokenizer(cfg))
        found = trained_model.find(cfg.model, tmp_path)
        others += [models.adapt(further, cfg, "CAUSAL_LM"), trained_model.load(found, "float32", torch.device("cpu"))]
        others += [AutoPeftModelForCausalLM.from_pretrained(one / "model" / "adapter")]
        export.from_checkpoint(one / "step_00000004", tmp_path / "alone", merge="off")
        command = capsys.readouterr().out.split("try:  ")[-1]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        printed = subprocess.run(
            command, shell=True, check=True, capture_output=True, text=True, env=clean_environment(PATH=path)
        )
        assert "LlamaForCausalLM" in printed.stdout
    for other in others:
        torch.testing.assert_close(other(input_ids=ids).logits, model(input_ids=ids).logits)
