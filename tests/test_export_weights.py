"""The export of a checkpoint copies one tensor at a time, and has the weights that `save_pretrained` writes."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accel_ddp.exporting import export, export_files
from accel_ddp.saving import checkpoint_format, pieces
from accel_ddp.saving.state_tensors import to_save
from tests.conftest import clean_environment

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}


def models() -> dict:
    import transformers as t

    torch.manual_seed(0)
    llama = {**SMALL, "num_key_value_heads": 2}
    return {
        "tied": t.LlamaForCausalLM(t.LlamaConfig(**llama, tie_word_embeddings=True)),
        "not tied": t.LlamaForCausalLM(t.LlamaConfig(**llama, tie_word_embeddings=False)),
        "masked": t.BertForMaskedLM(t.BertConfig(**SMALL)),
        "gpt2": t.GPT2LMHeadModel(t.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32)),
        "experts": t.MixtralForCausalLM(t.MixtralConfig(**llama, num_local_experts=2)),  # its tensors are changed when it is saved
        "images": t.ResNetForImageClassification(t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])),
    }  # fmt: skip


def write_checkpoint(model, path: Path, shards: int, files: dict[str, bytes] | None = None) -> None:
    """Write a checkpoint of a model, whole if `shards` is 0, or in parts like those of that many ranks."""
    model.config.architectures = [type(model).__name__]
    run = {
        "recipe": "clm.py", "run": "r", "step": 1, "config": {"output_dir": "run"}, "versions": {}, "values": {},
        "evaluations": {}, "num_ranks": 1,
    }  # fmt: skip
    weights, files = to_save(model), files or {"config.json": model.config.to_json_string().encode()}
    if not shards:
        checkpoint_format.write(path, {checkpoint_format.MODEL: weights, checkpoint_format.OPTIMIZER: {}}, run, files)
        return
    partial, written = path.with_name(".partial"), {}
    (partial / "model").mkdir(parents=True)
    for rank in range(shards):
        own = {
            name: tensor.chunk(shards)[rank]
            for name, tensor in weights.items()
            if tensor.dim() and len(tensor.chunk(shards)) > rank
        }
        offsets = {name: [rank * len(weights[name].chunk(shards)[0]), *[0] * (tensor.dim() - 1)] for name, tensor in own.items()}
        if rank == 0:
            own |= {name: tensor for name, tensor in weights.items() if not tensor.dim()}
            offsets |= {name: [] for name, tensor in weights.items() if not tensor.dim()}
        name = f"model/{pieces.file_name(rank)}"
        written[name] = pieces.write_file(partial / name, own, pieces.describe(offsets, run="r", step="1"))
    checkpoint_format.complete(partial, path, run, files, written)


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_exported_weights_are_those_that_save_pretrained_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(export_files, "MAX_FILE_BYTES", 5_000)
    streamed = {}
    for name, model in models().items():
        folder = tmp_path / name.replace(" ", "_")
        model.save_pretrained(folder / "expected")
        expected = read(folder / "expected")
        for shards in (0, 3):
            checkpoint = folder / str(shards) / "step_00000001"
            write_checkpoint(model, checkpoint, shards)
            streamed[name] = isinstance(export._weights_of(checkpoint, averaged=False), export.Stream)
            out = export.from_checkpoint(str(checkpoint), str(folder / f"out{shards}"))
            found = read(out)
            assert found.keys() == expected.keys(), name
            assert all(torch.equal(found[one], expected[one]) for one in expected), name
            again = type(model).from_pretrained(out)
            assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values())), name
            if streamed[name]:
                index = json.loads((out / export_files.INDEX).read_text())
                assert index["weight_map"].keys() == expected.keys()
                assert len(set(index["weight_map"].values())) > 1
    assert streamed == {"tied": True, "not tied": True, "masked": True, "gpt2": True, "experts": False, "images": True}


def test_weights_are_rounded_once_to_the_dtype_of_the_model_that_was_loaded(tmp_path, monkeypatch, capsys):
    """A run trains float32 weights. Compare the export of its checkpoint, and of the model in memory, with `model.to(dtype)`."""
    import transformers as t

    for name, kept in (("tied", "norm"), ("experts", "gate")):  # of which the second one is not streamed
        folder, model = tmp_path / name, models()[name]
        model._stored_dtype = torch.bfloat16
        monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", [kept])
        files = export.files_of(model, t.ByT5Tokenizer())
        write_checkpoint(model, folder / "step_00000001", 0, files)
        facts = {"recipe": "clm.py", "config": {"output_dir": "run"}, "metrics": {}, "versions": {}, "num_ranks": 1}
        export._write(folder / "memory", model, files, facts)
        out = {dtype: export.from_checkpoint(str(folder), str(folder / dtype), dtype=dtype) for dtype in ("auto", "float16")}
        printed = capsys.readouterr().out
        assert all(
            f"({dtype}; its metrics are those before the weights were rounded)" in printed for dtype in ("bfloat16", "float16")
        )
        for place, dtype in ((folder / "memory", "bfloat16"), (out["auto"], "bfloat16"), (out["float16"], "float16")):
            found = read(place)
            expected = copy.deepcopy(model).to(getattr(torch, dtype))
            for (_, own), (one, rounded) in zip(model.named_parameters(), expected.named_parameters()):
                rounded.data = own.data if f".{kept}." in one else rounded.data
            expected.save_pretrained(folder / "expected")
            wanted = read(folder / "expected")
            assert found.keys() == wanted.keys(), name
            assert {one: tensor.dtype for one, tensor in found.items()} == {one: tensor.dtype for one, tensor in wanted.items()}
            assert all(torch.equal(found[one], wanted[one]) for one in wanted), (name, place)
            assert t.AutoConfig.from_pretrained(place).dtype == getattr(torch, dtype)
        assert next(model.parameters()).dtype == torch.float32, "the model in memory stays as it is"


def test_adapters_are_merged_in_float32_into_weights_of_16_bits():
    import peft

    model = models()["tied"].to(torch.bfloat16)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    pairs = {name.split("base_model.model.")[1]: p.detach().clone() for name, p in adapted.named_parameters() if "lora_" in name}
    merged = dict(export._merge(adapted, "auto").named_parameters())
    for name, p in merged.items():
        a, b = (pairs.get(name.replace("weight", f"lora_{one}.default.weight")) for one in "AB")
        expected = before[name] if a is None else (before[name].double() + 4 * b.double() @ a.double()).to(torch.bfloat16)
        assert torch.equal(p, expected), name
    assert len(pairs) == 4


def test_merged_weights_are_rounded_only_to_the_dtype_in_which_they_are_exported(tmp_path):
    """A model that is stored in float32 was trained in bfloat16."""
    import peft
    import transformers as t

    model = models()["tied"].to(torch.bfloat16)
    model._stored_dtype, model._source, model._new_modules = torch.float32, "me/base", []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    pairs = {name.split("base_model.model.")[1]: p.detach().clone() for name, p in adapted.named_parameters() if "lora_" in name}
    facts = {"recipe": "clm.py", "config": {"output_dir": "run"}, "metrics": {}, "versions": {}, "num_ranks": 1}
    export._write(tmp_path / "out", adapted, export.files_of(adapted, t.ByT5Tokenizer()), facts, merge="on")
    written = read(tmp_path / "out")
    for name in (name for name in before if "q_proj" in name):
        a, b = (pairs[name.replace("weight", f"lora_{one}.default.weight")] for one in "AB")
        assert torch.allclose(written[name], before[name].float() + 4 * b @ a, rtol=1e-6, atol=1e-7), name


@pytest.mark.slow
def test_an_export_needs_less_memory_than_the_model(tmp_path):
    """The model has 400 MB. The memory of Python with transformers is measured by an export of a tiny model."""
    import transformers as t

    peaks = {}
    for name, width in {"tiny": 16, "large": 2048}.items():
        shape = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 4, "num_attention_heads": 2}
        model = t.LlamaForCausalLM(t.LlamaConfig(**shape, num_key_value_heads=2, vocab_size=1000))
        size = sum(p.nbytes for p in model.parameters())
        write_checkpoint(model, tmp_path / name / "step_00000001", 2)
        code = (  # not `ru_maxrss`, which includes the memory of the parent process
            "import sys; from accel_ddp.exporting.export import from_checkpoint; from_checkpoint(*sys.argv[1:]); "
            "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
        )
        command = [sys.executable, "-c", code, str(tmp_path / name), str(tmp_path / f"{name}_out")]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=True)
        peaks[name] = 1024 * int(done.stdout.split()[-1])
    assert size > 400e6
    assert peaks["large"] - peaks["tiny"] < 0.25 * size, (peaks, size)
    print(f"peak memory: {peaks}, model: {size:,} bytes")
