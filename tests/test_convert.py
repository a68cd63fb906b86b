"""Files of axolotl and LLaMA-Factory are converted, and the pages about other toolkits have all their options."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from accel_ddp.cli import main
from tests.conftest import ROOT, clean_environment, run_all

AXOLOTL_LORA = """
base_model: meta-llama/Llama-3.1-8B-Instruct
model_type: LlamaForCausalLM
datasets:
  - {path: chats.jsonl, type: chat_template, field_messages: talk, roles_to_train: [assistant], train_on_eos: turn,
     message_property_mappings: {role: from, content: value}, roles: {user: [human], assistant: [gpt, bot]}}
val_set_size: 0.05
sequence_len: 2048
sample_packing: false
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save: [embed_tokens]
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: constant_with_warmup
learning_rate: 2e-4
warmup_steps: 10
bf16: auto
tf32: false
fp16:
neftune_noise_alpha: 5
wandb_project: chats
wandb_entity: team
evals_per_epoch: 4
my_setting: 3
output_dir: runs/chat
flash_attention: true
"""
AXOLOTL_FSDP = """
base_model: Qwen/Qwen3-8B
datasets: [{path: org/chats, name: small, type: chat_template, split: 'train[:10%]'}]
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
micro_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 0.00001
optimizer: adamw_torch_fused
save_steps: 200
save_total_limit: 1
gradient_checkpointing: true
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_offload_params: true, fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer}
"""
AXOLOTL_DPO = """
base_model: org/model
rl: dpo
rl_beta: 0.2
datasets: [{path: pairs/train.parquet, type: chat_template.default, field_messages: talk, field_chosen: good, field_rejected: bad}]
test_datasets:
  - {path: pairs/test.parquet, type: chat_template.default, field_messages: talk, field_chosen: good, field_rejected: bad}
adapter: qlora
load_in_4bit: true
deepspeed: deepspeed_configs/zero2.json
sequence_len: 1024
micro_batch_size: 4
gradient_accumulation_steps: 1
learning_rate: 0.000005
metric_for_best_model: rewards/accuracies
load_best_model_at_end: true
"""
LLAMA_FACTORY_SFT = """
model_name_or_path: Qwen/Qwen3-4B
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
quantization_bit: 4
dataset: support, alpaca
template: qwen3
cutoff_len: 1024
max_samples: 500
mask_history: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
report_to: none
plot_loss: true
save_only_model: false
eval_strategy: steps
eval_steps: 100
val_size: 0.1
"""
LLAMA_FACTORY_DPO = """
model_name_or_path: Qwen/Qwen3-4B
stage: dpo
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
pref_beta: 2.5
pref_loss: simpo
simpo_gamma: 1.0
dataset: pairs
per_device_train_batch_size: 2
num_train_epochs: 1.0
pure_bf16: true
"""
INFO = {
    "support": {"file_name": "support.json", "formatting": "sharegpt", "columns": {"messages": "talk", "system": "rules"},
                "tags": {"role_tag": "who", "user_tag": "human", "assistant_tag": "gpt"}},
    "alpaca": {"hf_hub_url": "org/alpaca"},
    "pairs": {"file_name": "pairs.json", "ranking": True, "columns": {"prompt": "question", "chosen": "good", "rejected": "bad"}},
}  # fmt: skip


def convert(folder: Path, text: str, capsys, *words: str) -> tuple[dict, str, str]:
    """Return the options, the file and what is printed on stderr."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(INFO))
    (folder / "theirs.yml").write_text(text)
    code = main(["convert", str(folder / "theirs.yml"), *words])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return yaml.safe_load(printed.out), printed.out, printed.err


def test_axolotl_lora(tmp_path, capsys):
    options, text, printed = convert(tmp_path, AXOLOTL_LORA, capsys, "--gpus", "2")
    assert options == {
        "recipe": "sft", "model": "meta-llama/Llama-3.1-8B-Instruct", "train_file": ["chats.jsonl"], "messages_column": "talk",
        "eval_fraction": 0.05, "max_length": 2048, "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05,
        "lora_targets": ["all-linear"],
        "global_batch_size": 2 * 4 * 2, "micro_batch_size": 2, "epochs": 3, "optimizer": "adamw8bit", "lr_schedule": "constant",
        "lr": 2e-4, "warmup_steps": 10, "tf32": False, "project": "chats", "report_to": "wandb",
        "weight_decay": 0.0, "seed": 42, "output_dir": "runs/chat",
    }  # fmt: skip
    missing = ("neftune_noise_alpha: 5", "lora_modules_to_save", "evals_per_epoch: 4", "my_setting: 3: `convert` does not know it",
               "paged_adamw_8bit: adamw8bit, without paging",
               "wandb_entity: team: set the variable WANDB_ENTITY")  # fmt: skip
    for line in missing:
        assert line in printed
        assert line in text.partition("# Not needed")[0]
    assert len(re.findall("^  ", printed, flags=re.MULTILINE)) == len(missing), "nothing else is lost"
    assert not [key for key in yaml.safe_load(AXOLOTL_LORA) if key not in text], "dropped silently"
    assert "No equivalent (5):" in printed
    assert "Replaced (1):" in printed
    assert "bf16: auto: mixed_precision auto is the default" in text
    for line in ("Needs: pip install torchao wandb", "If the model has no chat template, the run stops: add chat_template"):
        assert line in printed
        assert line in text
    assert "run it: accel-ddp run sft --config FILE --num_processes 2" in printed
    assert "on several machines: accel-ddp launch cluster.yaml sft --config FILE" in printed
    assert "global_batch_size: 16  # 2 per GPU x 4 micro-batches x 2 GPUs" in text
    assert "Empty or off: fp16" in text


def test_axolotl_with_fsdp_and_packing(tmp_path, capsys):
    options, text, printed = convert(tmp_path, AXOLOTL_FSDP, capsys, "--gpus", "8")
    expected = {"dataset": "org/chats:small", "global_batch_tokens": 1 * 2 * 8 * 4096, "micro_batch_tokens": 4096, "epochs": 1.0,
                "lr_schedule": "cosine", "warmup_ratio": 0.03, "save_every": 200, "keep_last": 2}  # fmt: skip
    assert options.items() >= expected.items(), "also the defaults of axolotl"
    assert not {"lora_r", "global_batch_size", "train_split"} & {*options}
    assert "accel-ddp run sft --config FILE --config_file fsdp.yaml --num_processes 8" in printed
    assert "accel-ddp launch --set accelerate_config=2node_fsdp.yaml cluster.yaml sft --config FILE" in printed
    for line in ("split: train[:10%]", "offload", "a tenth of the rows", "sample_packing: true: global_batch_tokens"):
        assert line in printed
    assert "axolotl trains bf16 weights" in text


def test_axolotl_preferences(tmp_path, capsys):
    options, _, printed = convert(tmp_path, AXOLOTL_DPO, capsys, "--gpus", "1", "--from", "axolotl")
    expected = {"recipe": "dpo", "loss": "dpo", "beta": 0.2, "prompt_column": "talk", "chosen_column": "good",
                "rejected_column": "bad", "train_file": ["pairs/train.parquet"], "eval_file": ["pairs/test.parquet"],
                "quantize": "4bit", "lora_r": 8, "keep_best": True, "global_batch_size": 4, "warmup_ratio": 0.03}  # fmt: skip
    assert options.items() >= expected.items()
    assert "best_metric" not in options, "dpo has no such metric, and the file must run"
    assert "rewards/accuracies" in printed
    assert "run it: accel-ddp run dpo --config FILE\n" in printed
    assert "quantized weights are not sharded" in printed


def test_llama_factory_sft(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, text, printed = convert(tmp_path, LLAMA_FACTORY_SFT, capsys, "--gpus", "1")
    expected = {"recipe": "sft", "lora_r": 8, "lora_alpha": 16, "lora_targets": ["q_proj", "v_proj"], "quantize": "4bit",
                "messages_column": "talk", "train_file": ["data/support.json"], "max_length": 1024, "global_batch_size": 8,
                "epochs": 3.0, "max_train_items": 500, "train_on": "last", "eval_every": 100, "save_every": 500,
                "mixed_precision": "bf16",
                "eval_fraction": 0.1, "lr": 1e-4}  # fmt: skip
    assert options.items() >= expected.items()
    for line in ("train dataset: org/alpaca: one Hub dataset per run", "system: rules", "role_tag: who", "trust_remote_code"):
        assert line in printed
    assert "template: qwen3: the model's own" in text


def test_llama_factory_preferences(tmp_path, capsys):
    info = ("--dataset_info", str(tmp_path / "data" / "dataset_info.json"))
    options, _, printed = convert(tmp_path, LLAMA_FACTORY_DPO, capsys, "--gpus", "4", *info)
    expected = {"recipe": "dpo", "loss": "simpo", "beta": 2.5, "gamma": 1.0, "prompt_column": "question", "chosen_column": "good",
                "dtype": "bfloat16", "global_batch_size": 8, "train_file": [f"{tmp_path}/data/pairs.json"], "lr": 5e-5}  # fmt: skip
    assert options.items() >= expected.items()
    assert "lora_r" not in options
    assert "--config_file fsdp.yaml --num_processes 4" in printed


def test_what_cannot_be_converted_is_listed(tmp_path, capsys):
    given = """
        base_model: ./mine
        datasets:
          - {path: a.jsonl, type: {field_instruction: ask, field_output: reply}}
          - {path: json, data_files: b.jsonl, type: alpaca}
        val_set_size: 200
        save_steps: 0.25
        batch_size: 64
        micro_batch_size: 4
        learning_rate: 1e-5
        lr_scheduler: rex
        warmup_steps: 0.1
        optimizer: lion_8bit
        chat_template: qwen_25
        resume_from_checkpoint: out/checkpoint-5
        deepspeed: zero1.json
        lora_r: 8
    """
    options, text, printed = convert(tmp_path, given, capsys, "--gpus", "2")
    expected = {"train_file": ["a.jsonl", "b.jsonl"], "prompt_column": "ask", "max_eval_items": 200, "global_batch_size": 64 * 2,
                "warmup_ratio": 0.1, "lr": 1e-5}  # fmt: skip
    assert options.items() >= expected.items()
    assert not {"lora_r", "save_every", "chat_template", "resume", "optimizer"} & {*options}
    for line in ("all files need rows of one format", "prompt_column: instruction: all files need the same columns",
                 "save_steps: 0.25", "rex: the schedule is linear", "lion_8bit: adamw is used",
                 "qwen_25: there is no such file or built-in template", "cannot be resumed"):  # fmt: skip
        assert line in printed
    assert "lora_r: the file has no adapter" in text
    assert "--config_file fsdp.yaml" in printed


BASE = "base_model: org/model\nlearning_rate: 1e-5\n"
CHATS = BASE + "datasets: [{path: chats.jsonl, type: chat_template}]\n"


@pytest.mark.parametrize(
    ("text", "options", "lines"),
    [
        pytest.param(  # the columns of a dataset that is left out are not those of the other
            BASE + "datasets: [{path: chats.jsonl, type: chat_template}, "
            "{path: org/hub, type: chat_template, field_messages: conversations}]",
            {"train_file": ["chats.jsonl"], "messages_column": None}, ["train dataset: org/hub: one Hub dataset per run"],
            id="columns of another dataset",
        ),
        pytest.param(
            BASE + "datasets: [{path: a.jsonl, type: chat_template}, {path: b.jsonl, type: chat_template, field_messages: talk}]",
            {"train_file": ["a.jsonl", "b.jsonl"], "messages_column": None},
            ["messages_column: talk: all files need the same columns, and the first one has messages"], id="usual column",
        ),
        pytest.param(CHATS + "batch_size: 16\nmicro_batch_size: 4", {"global_batch_size": 64}, [], id="batch_size is per GPU"),
        pytest.param(
            CHATS + "micro_batch_size: 4\ncontext_parallel_size: 2", {"global_batch_size": 8}, ["context_parallel_size: 2"],
            id="ranks with the same rows",
        ),
        pytest.param(CHATS + "warmup_steps: 0", {"warmup_ratio": None, "warmup_steps": None}, [], id="no warm-up"),
        pytest.param(
            CHATS + "test_datasets: [{path: org/evals, split: test}]", {"dataset": None, "eval_split": None, "train_split": None},
            ["eval dataset: org/evals", "val_set_size: 0: here a tenth"], id="Hub evaluation of files",
        ),
        pytest.param(
            BASE + "datasets: [{path: org/chats}]\ntest_datasets: [{path: org/evals}, {path: org/chats, split: 'test[:9]'}]",
            {"dataset": "org/chats", "eval_split": "test", "train_split": None}, ["eval dataset: org/evals", "split: test[:9]"],
            id="split for evaluation",
        ),
        pytest.param(
            CHATS + "adapter: qlora\nlora_model_dir: out/adapter\nlora_r: 32\nlora_alpha: 64",
            {"model": "out/adapter", "quantize": "4bit", "lora_r": 32, "lora_alpha": None}, [], id="quantized base of adapters",
        ),
        pytest.param(
            BASE + "rl: simpo\ndatasets: [{path: pairs.jsonl, type: chatml.intel}]",
            {"loss": "simpo", "beta": 0.1, "sft_weight": 1.0}, ["type: chatml.intel: rows are read by their columns"],
            id="defaults of SimPO",
        ),
        pytest.param(
            BASE + "datasets: [{path: org/chats, data_files: [sub/x.jsonl]}]", {"train_file": None, "dataset": "org/chats"},
            ['data_files: ["sub/x.jsonl"]: all of org/chats is read'], id="files on the Hub",
        ),
        pytest.param(
            CHATS + "fsdp_config: {activation_checkpointing: true}", {"gradient_checkpointing": True}, [], id="checkpointing",
        ),
        pytest.param(
            CHATS + "rl: dpo\nref_model: org/other\ncosine_constant_lr_ratio: 0.8\nchat_template: nemo\nbeta2: 7",
            {"chat_template": None, "beta2": None, "lr": 1e-5},
            ["ref_model: org/other: the reference is the model before training", "chat_template: nemo", "beta2: 7",
             "cosine_constant_lr_ratio: 0.8: the learning rate falls until the last step"], id="without an equivalent",
        ),
        pytest.param(
            "model_name_or_path: m\nstage: kto\ndataset: pairs\nkto_chosen_weight: 2\neval_dataset: pairs\ndataset_dir: data",
            {"desirable_weight": 2, "beta": None, "train_file": ["data/pairs.json"], "eval_file": ["data/pairs.json"]}, [],
            id="KTO of LLaMA-Factory",
        ),
    ],
)  # fmt: skip
def test_what_changes_the_result(tmp_path, capsys, monkeypatch, text, options, lines):
    """Options with these values, those with None are not written, and these lines are in the list of what is missing."""
    monkeypatch.chdir(tmp_path)
    found, written, printed = convert(tmp_path, text, capsys, "--gpus", "4")
    assert {name: found.get(name) for name in options} == options
    kept = re.findall(r"(\w+): the adapters keep", written)
    assert kept == (["lora_alpha"] if "lora_model_dir" in text else [])
    assert [line for line in lines if line not in printed] == [], printed


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("a: [", (), "is not valid YAML"),
        ("- a\n- b", (), "must contain lines of `name: value`"),
        ("recipe: sft\nmodel: org/model", (), "is already a file of accel_ddp. Run it: accel-ddp run sft"),
        ("distributed_type: FSDP", (), "is a config of accelerate"),
        ("some: thing", (), "is neither a file of axolotl"),
        ("base_model: org/model\nrl: grpo", (), "rl: grpo has no recipe here"),
        ("model_name_or_path: org/model\nstage: ppo", (), "stage: ppo has no recipe here"),
        ("rl: dpo", ("--from", "axolotl"), "has neither base_model nor model_name_or_path"),
        ("base_model: m\nwarmup_steps: many\ndatasets: [{path: a.jsonl}]", (), "warmup_steps: must be a number, and not 'many'"),
        ("base_model: org/model\ndatasets: chats.jsonl", (), "must be a list of entries with a path"),
        ("base_model: org/model\nlearning_rate: high", (), "has no datasets"),
        ("model_name_or_path: m\ndataset: x", ("--dataset_info", "no.json"), "there is no such file"),
        ("model_name_or_path: m\ndataset: x", ("--dataset_info", "bad.json"), "bad.json: is not valid JSON"),
        ("model_name_or_path: m\ndataset: x", ("--dataset_info", "x.json"), "x.json: x has neither file_name nor hf_hub_url"),
        ("base_model: m\ndatasets: [{path: a.jsonl}]", ("--from", "llama_factory"), "Is it a file of axolotl?"),
        (
            "base_model: m\ndatasets: [{path: a.jsonl}]",
            ("--out", "no/x.yaml"),
            "--out no/x.yaml: cannot be written: No such file",
        ),
        ("base_model: org/model", ("--gpus", "-1"), "must be a whole number"),
    ],
)
def test_a_wrong_file_is_an_error(tmp_path, capsys, monkeypatch, text, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yml").write_text(text)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "x.json").write_text('{"x": {"columns": {}}}')
    assert main(["convert", str(tmp_path / "theirs.yml"), *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_a_file_is_never_overwritten_and_torch_is_not_imported(tmp_path):
    (tmp_path / "theirs.yml").write_text(AXOLOTL_LORA)
    code = (
        f"import sys; from accel_ddp.cli import main; words = ['convert', {str(tmp_path / 'theirs.yml')!r}, '--out', 'ours.yaml']; "
        "print(main(words), main(words), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=clean_environment())
    assert done.stdout == "0 2 False\n", done.stderr
    assert "--out ours.yaml: cannot be written: File exists" in done.stderr
    assert "for 1 GPU (the default; --gpus N for another number)" in done.stderr
    assert "run it: accel-ddp run sft --config ours.yaml" in done.stderr


@pytest.mark.slow
def test_a_converted_file_runs(tmp_path, capsys):
    """On a ShareGPT file, with options on the command line that replace its lines."""
    rows = [{"talk": [{"from": "human", "value": f"{n} + 1?"}, {"from": "gpt", "value": f"{n + 1}"}]} for n in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = AXOLOTL_LORA.replace("meta-llama/Llama-3.1-8B-Instruct", "builtin:tiny-llama").replace("wandb_project: chats", "")
    given = given.replace("paged_adamw_8bit", "adamw_torch").replace("sample_packing: false", "sample_packing: true")
    given = given.replace("sequence_len: 2048", "sequence_len: 256")
    convert(
        tmp_path, given.replace("path: chats.jsonl", f"path: {tmp_path}/chats.jsonl"), capsys, "--out", f"{tmp_path}/ours.yaml"
    )
    words = ["accel-ddp", "run", "sft", "--config", f"{tmp_path}/ours.yaml", "--steps", "2", "--output_dir", f"{tmp_path}/run"]
    ended = run_all([words], [clean_environment()]).well()
    assert "step 2/2" in ended.text


# ---- pages


def load_generator():
    spec = importlib.util.spec_from_file_location("make_from", ROOT / "docs" / "make_from.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fields_of(package: str, file: str, *classes: str) -> dict[str, str]:
    """Return the fields of dataclasses with their defaults, "Class.field" for all but the first class. Nothing is imported."""
    path = Path(importlib.util.find_spec(package).submodule_search_locations[0], file)
    found = {}
    for node in ast.parse(path.read_text()).body:
        for line in node.body if isinstance(node, ast.ClassDef) and node.name in classes else ():
            if isinstance(line, ast.AnnAssign):
                words = {word.arg: word.value for word in line.value.keywords} if isinstance(line.value, ast.Call) else {}
                found[line.target.id] = ast.unparse(words["default"]) if "default" in words else ""
    assert found, f"{file} of {package} has no class {classes}"
    return found


def test_tables_are_current():
    generator = load_generator()
    for page in generator.NAMES:
        assert (ROOT / "docs" / page).read_text() == generator.write(page), f"docs/{page}: run python docs/make_from.py"


def defaults_on(page: str) -> dict[str, str]:
    section = (ROOT / "docs" / page).read_text().split("### Defaults")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", section, flags=re.MULTILINE))


def require_known(known: set[str], fields: set[str], page: str, package: str) -> None:
    assert not fields - known, (
        f"{package} has fields that docs/{page} does not explain: {', '.join(sorted(fields - known))}. Add them to "
        "accel_ddp/config/other_names.yaml and to NAMES in docs/make_from.py"
    )


def test_the_page_has_every_field_of_training_arguments():
    fields = fields_of("transformers", "training_args.py", "TrainingArguments")
    require_known({*load_generator().NAMES["from_trainer.md"].split()}, {*fields}, "from_trainer.md", "transformers")
    defaults = defaults_on("from_trainer.md")
    assert len(defaults) > 10
    assert {name: fields[name] for name in defaults} == defaults


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_the_page_has_every_field_of_trl():
    names = load_generator().NAMES
    known, there = {*names["from_trl.md"].split(), *names["from_trainer.md"].split()}, {}
    for kind in ("_Base", "SFT", "DPO", "KTO", "Reward", "Model"):
        file, name = f"{kind.lower().strip('_')}_config", f"{kind}Config"
        fields = fields_of("trl", f"trainer/{file}.py", name)
        require_known(known, {*fields}, "from_trl.md", "TRL")
        there |= {f"{name}.{field}": default for field, default in fields.items()}
    require_known(known, {*fields_of("trl", "scripts/utils.py", "ScriptArguments")}, "from_trl.md", "TRL")
    defaults = defaults_on("from_trl.md")
    assert len(defaults) > 5
    assert {name: there[name] for name in defaults} == defaults
