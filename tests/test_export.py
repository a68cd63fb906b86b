"""The exported folder: it loads elsewhere with the printed line, and contains nothing of the machine it was trained on."""

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate import Accelerator

from accel_ddp.config.parsing import parse_config
from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.exporting import export, export_files
from accel_ddp.sources import models
from accel_ddp.tasks import examples, generation_metrics
from tests.conftest import PROGRAMS, ROOT, clean_environment, run_ranks
from tests.test_recipes import evaluations, sentence, write_jsonl

NASTY = 'it\'s "fine" $HOME `id` $(id) !! \\n back\\slash {folder} {model} %s\n\tsecond line é😀 \x07'
TEXTS = [NASTY, "", "'", '"', "\\", "\\'", '\\"', "''\"\"\\\\", "\ud800 \u2028 \x00", "{folder}{model}", "-c 'x'"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_becomes_python_code_that_a_shell_does_not_change(text):
    code = examples.literal(text)
    assert eval(code) == text
    assert not {"'", "\n"} & set(code)
    assert eval(examples.literal([{"role": text}, text])) == [{"role": text}, text]


def test_commands_with_any_text_and_any_folder_survive_an_interactive_shell():
    echo = "import sys, json; sys.stdout.write(json.dumps([{folder}, %s]) + chr(10))"
    commands = [examples.command(echo % examples.literal(text), f"runs/{text}") for text in TEXTS]
    commands = [command.replace("python -c", f"{sys.executable} -S -c") for command in commands]
    ended = subprocess.run(["bash", "-i"], input="\n".join(commands) + "\nexit\n", capture_output=True, text=True, timeout=180)
    assert [json.loads(line) for line in ended.stdout.splitlines()] == [[f"runs/{text}", text] for text in TEXTS]


def test_own_data_are_suggested_after_built_in_data_only(tmp_path, tiny_model, capsys):
    from transformers import AutoModelForSequenceClassification

    cfg = RecipeConfig(model=tiny_model, output_dir=str(tmp_path))
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(tiny_model), models.load_tokenizer(cfg)
    printed = []
    for options in ({"dataset": "builtin:digits"}, {"dataset": "someone/rows"}, {"train_file": "rows.csv"}):
        own = dataclasses.replace(cfg, **options)
        export.at_the_end(Accelerator(cpu=True), own, model, export.files_of(model, tokenizer), {})
        printed.append("next: train on your own data" in capsys.readouterr().out)
    assert printed == [True, False, False]


def test_the_system_prompt_of_the_data_is_an_option_of_the_suggested_chat():
    code = lambda *messages: f'use = pipeline("text-generation", {{model}})({examples.literal(list(messages))}, max_new_tokens=9)'
    user = {"role": "user", "content": '[{"role": "system", "content": "no"}'}
    for text in filter(None, TEXTS):
        option = examples.system_option(code({"role": "system", "content": text}, user))
        assert shlex.split(option) == ["--system", text]
    assert examples.system_option(code(user)) == examples.system_option("") == ""
    assert examples.system_option(code({"role": "system", "content": examples.shorten("word " * 100)})) == " --system TEXT"


def test_long_texts_are_shortened_between_words():
    assert examples.shorten("word " * 100) == " ".join(["word"] * 31)
    assert len(examples.shorten("x" * 1000)) == examples.MAX_LENGTH


@pytest.mark.parametrize(
    ("options", "data", "words"),
    [
        ({"train_file": "/secret/train.csv", "eval_file": "../secret/dev.csv"}, "dev.csv", "On `dev.csv`:"),
        ({"train_file": "/secret/a.csv", "eval_file": "/secret/b.csv\n/secret/c.csv"}, "b.csv c.csv", "On `b.csv c.csv`:"),
        ({"train_file": "~/secret/train.csv"}, "train.csv", "On rows of `train.csv` that were not used for training:"),
        ({"train_file": "secret/*.txt"}, "*.txt", "On rows of `*.txt`"),
        ({"dataset": "someone/rows:small", "eval_split": "test"}, "someone/rows", "On the split `test` of `someone/rows:small`:"),
        ({"dataset": "builtin:digits"}, "builtin:digits", "On the evaluation rows of `builtin:digits`:"),
    ],
)
def test_a_model_card_attributes_metrics_to_the_evaluation_data_and_contains_no_path(options, data, words, tmp_path):
    import yaml

    config = {
        "model": "/home/secret/base",
        "output_dir": "runs/secret/mine",
        "cache_dir": "/secret/cache",
        "dataset": "",
        **options,
    }
    public = export_files.public_options({**config, "prefix": "a/b: ", "own": str(tmp_path), "metrics": "f1 /home/secret/mine"})
    assert public["metrics"] == "f1 mine"
    assert (public["prefix"], public["own"], public["model"]) == ("a/b: ", tmp_path.name, "base")
    facts = {"recipe": "classify.py", "config": public, "metrics": {"f1": 0.5}, "versions": {}, "num_ranks": 1}
    text = export_files.card(facts, "use = load()", "")
    assert "secret" not in text
    assert words in text
    head = yaml.safe_load(text.split("---")[1])
    assert head["model-index"][0]["results"][0]["dataset"]["type"] == data
    assert head.get("datasets") == (["someone/rows"] if "someone" in data else None)


def test_merge_adapters_is_an_option_with_three_values_and_still_works_as_a_flag():
    for words, value in (
        ([], "auto"), (["--merge_adapters"], "on"), (["--merge_adapters", "off"], "off"), (["--merge-adapters"], "on"),
        (["--merge_adapters=true"], "on"), (["--merge-adapters=off"], "off"),
    ):  # fmt: skip
        assert parse_config(RecipeConfig, [*words, "--lora_r", "2"]).merge_adapters == value


@pytest.mark.slow
def test_adapters_of_every_task_load_elsewhere_with_the_printed_line(tiny_model, cache, tmp_path):
    """Compare adapters on a model of the Hub with the merged export of the same adapters on a local copy of that model."""
    home = clean_environment(
        HF_HOME=str(tmp_path / "secret_hub"), HF_HUB_OFFLINE="1", ACCEL_DDP_CACHE=cache, PYTHONPATH=str(ROOT)
    )
    here, there = tmp_path / "secret_exports", tmp_path / "elsewhere"
    here.mkdir()
    run = lambda *words: subprocess.run(
        [sys.executable, PROGRAMS / "adapters.py", *words], env=home, cwd=tmp_path, text=True, capture_output=True, timeout=300
    )
    made = run(tiny_model, here)
    assert made.returncode == 0, made.stderr[-3000:]
    printed = json.loads(made.stdout.splitlines()[-1])
    here.rename(there)
    lines = [shlex.split(text.splitlines()[-1].removeprefix("try:  "))[2] for *_, text in printed]
    (tmp_path / "lines.json").write_text(json.dumps([line.replace(str(here), str(there)) for line in lines]))
    ended = run("run", tmp_path / "lines.json")
    assert ended.returncode == 0, ended.stderr[-3000:]
    outputs = {
        (task, where, merge): text for (task, where, merge, _), text in zip(printed, json.loads(ended.stdout.splitlines()[-1]))
    }
    round_off = lambda text: re.sub(r"\d+\.\d+(e-\d+)?", lambda number: f"{float(number[0]):.4f}", text)
    for task in {task for task, *_ in outputs}:
        found = {round_off(text) for (of, *_), text in outputs.items() if of == task and not text.startswith("<class")}
        assert len(found) == 1, found
        assert (there / f"{task} hub auto" / "adapter_config.json").is_file()
        assert not (there / f"{task} local auto" / "adapter_config.json").exists()
    assert "name " in outputs["classify", "hub", "auto"], "the names of the labels are kept"
    assert "name " in outputs["tag", "hub", "auto"]
    for path in (path for path in there.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.name == "adapter_config.json":
            config = json.loads(content)
            kept = config["modules_to_save"] or []
            assert len(kept) == len(set(kept))
            is_published = path.relative_to(there).parts[0].startswith(("classify", "sft"))
            assert is_published or " hub " in str(path) or Path(config["base_model_name_or_path"]).is_dir()
            content = b"" if not is_published else content  # peft finds a local base model by its path
        for word in (b"secret_", tiny_model.encode(), str(cache).encode()):
            assert word not in content, path


def test_what_servers_read_is_what_was_trained(cache, tmp_path):
    """A base model of 16 bits, which does not stop at <|im_end|>, learns a template. Read the export as other tools do."""
    import datasets
    import gguf
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    place, base, folder = models.locate("builtin:tiny-llama", cache), tmp_path / "base", tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).save_pretrained(base)
    AutoTokenizer.from_pretrained(place, eos_token="<|pad|>", padding_side="left").save_pretrained(base)
    generation = {"bos_token_id": 0, "eos_token_id": 2, "temperature": 0.6}  # transformers refuses to save this without do_sample
    (base / "generation_config.json").write_text(json.dumps(generation))
    (base / "chat_template.jinja").unlink()

    cfg = RecipeConfig(model=str(base), output_dir="run", dtype="float32")
    tokenizer = models.load_tokenizer(cfg)
    tokenizer.padding_side, tokenizer.chat_template = "right", "{{ messages[0].content }}<|im_end|>"  # by the recipe, by the user
    model = models.load(AutoModelForCausalLM, cfg, tokenizer)
    answer = {"input_ids": [0, 7, 8, 1, 9, 1], "labels": [-100, -100, 8, 1, -100, 1]}
    truncated = {"input_ids": [0, 7, 8, 0], "labels": [-100, -100, 8, 0]}
    generation_metrics.add_end_tokens(model, tokenizer, datasets.Dataset.from_list([answer] * 30 + [truncated]))
    facts = {"recipe": "sft.py", "config": vars(cfg), "metrics": {}, "versions": {}, "num_ranks": 1}
    chosen = {"accel_ddp.json": b'{"columns": {"text_column": "x"}}'}
    export._write(folder, model, export.files_of(model, tokenizer, chosen), facts)

    stored = export.read_facts(folder)
    assert (stored["recipe"], stored["columns"], stored["options"]["dtype"]) == ("sft.py", {"text_column": "x"}, "float32")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [2, 1]
    assert AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
    assert (folder / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    there, before = (AutoTokenizer.from_pretrained(one) for one in (folder, base))
    assert (there.padding_side, there.model_max_length) == (before.padding_side, before.model_max_length) == ("left", 512)
    assert (there.chat_template, tokenizer.padding_side) == (tokenizer.chat_template, "right")
    vocabulary = gguf.SpecialVocab(folder, load_merges=True)  # as llama.cpp's convert_hf_to_gguf.py reads it
    assert vocabulary.chat_template == tokenizer.chat_template
    assert vocabulary.special_token_ids == {"bos": 0, "eos": 2, "pad": 2}
    assert vocabulary.merges


@pytest.fixture(scope="module")
def adapters(tiny_model, cache, tmp_path_factory) -> tuple[Path, str, list[str]]:
    """Return a moved folder of adapters for 7 labels and pairs, the output of their run in secret_folder, and its options."""
    secret = tmp_path_factory.mktemp("secret_folder")
    label = lambda i: f"name {i % 7}"
    rows = [{"a": sentence(i), "b": sentence(i + 1, 3), "label": label(i)} for i in range(35)]
    train = write_jsonl(secret / "train.jsonl", rows)
    dev = write_jsonl(secret / "dev.jsonl", [{"a": NASTY, "b": NASTY + " word" * 99, "label": "name 3"}, *rows[:9]])
    shutil.copytree(tiny_model, secret / "base")
    options = ["--train_file", train, "--eval_file", dev, "--text_column", "a", "--text_pair_column", "b", "--lr", "0.05"]
    options += ["--steps", "4", "--save_every", "2", "--global_batch_size", "4", "--no_dropout"]
    text = run_ranks(
        1, ROOT / "recipes" / "classify.py", *options, "--model", secret / "base", "--lora_r", "2", "--merge_adapters", "off",
        "--output_dir", secret / "run",
    ).well().text  # fmt: skip
    moved = tmp_path_factory.mktemp("elsewhere") / "adapters"
    shutil.copytree(secret / "run" / "model", moved)
    return moved, text, [*map(str, options)]


@pytest.mark.slow  # in CI, tests/test_recipes.py runs the printed line of every recipe
def test_the_printed_line_works_in_a_shell_with_a_row_of_the_users_data(adapters, tmp_path):
    folder, text, options = adapters
    secret = Path(options[1]).parent
    line = next(line for line in text.splitlines() if line.startswith("try:  ")).removeprefix("try:  ")
    assert r"it\x27s \"fine\" $HOME `id`" in line
    line = line.replace(str(secret / "run" / "model"), str(folder))
    env = clean_environment(HF_HUB_OFFLINE="1", PYTHONPATH="")
    ended = subprocess.run(["bash", "-c", line], env=env, cwd=tmp_path, text=True, capture_output=True, timeout=300)
    assert re.search(r"'label': 'name \d'", ended.stdout), ended.stderr[-3000:]
    for path in (path for path in folder.rglob("*") if path.is_file() and path.name != "adapter_config.json"):
        assert b"secret_folder" not in path.read_bytes(), path
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["modules_to_save"]) == (str(secret / "base"), ["classifier"])
    card = (folder / "README.md").read_text()
    assert "name: dev.jsonl" in card
    assert 'subfolder="base"' in card


def test_adapters_are_trained_further_and_such_a_run_resumes_bit_identical(adapters, tmp_path):
    folder, _, options = adapters
    base, classify = Path(options[1]).parent / "base", ROOT / "recipes" / "classify.py"
    shutil.copytree(folder, copy := tmp_path / "adapters")
    base.rename(base.with_name("moved"))
    words = f"--model {copy}: contains LoRA adapters for the model {base}, which cannot be loaded here. Write its folder"
    with pytest.raises(UserError, match=re.escape(words)):
        models.load_config(RecipeConfig(model=str(copy)))
    base.with_name("moved").rename(base)

    one, two = tmp_path / "one", tmp_path / "two"
    run_ranks(1, classify, *options, "--model", copy, "--output_dir", one).well()
    before = evaluations(Path(options[1]).parent / "run")[-1]
    assert evaluations(one)[0]["loss"] == pytest.approx(before["loss"], rel=1e-5), "it begins where the first run ended"
    assert evaluations(one)[-1]["loss"] != pytest.approx(before["loss"], rel=1e-3)
    run_ranks(1, classify, *options, "--model", copy, "--resume", one / "step_00000002", "--output_dir", two).well()
    assert "\n`base`, fine-tuned with" in (one / "model" / "README.md").read_text(), "and not the folder of the adapters"
    out = export.from_checkpoint(str(one), str(tmp_path / "out"))
    first, *others = (place / "adapter" / "adapter_model.safetensors" for place in (one / "model", two / "model", out))
    for other in others:
        assert other.read_bytes() == first.read_bytes(), other


def test_adapters_that_do_not_fit_are_refused_with_what_to_type(adapters, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    folder, _, options = adapters
    base = str(Path(options[1]).parent / "base")
    shutil.copytree(folder, copy := tmp_path / "adapters")
    config = json.loads((copy / "adapter_config.json").read_text())

    def trained(auto_class=AutoModelForSequenceClassification, task="SEQ_CLS", labels=7, change=None, **options):
        values = {**config, "base_model_name_or_path": base, **(change or {})}
        (copy / "adapter_config.json").write_text(json.dumps(values))
        cfg = RecipeConfig(model=str(copy), **options)
        model = models.load(auto_class, cfg, models.load_tokenizer(cfg), num_labels=labels, ignore_mismatched_sizes=True)
        return models.prepare(model, cfg, Accelerator(cpu=True), task)

    for words, options in (
        ("--lora_r 3 (the adapters have 2)", {"lora_r": 3}),
        ("--lora_targets key (the adapters have their own layers)", {"lora_r": 2, "lora_targets": ("key",)}),
        (f"SEQ_CLS, and this recipe trains TOKEN_CLS). To train new ones on the same model, use --model {base} --lora_r 2",
         {"auto_class": AutoModelForTokenClassification, "task": "TOKEN_CLS"}),
        ("do not fit", {"change": {"target_modules": ["key"]}}),
        ("IA3 adapters", {"change": {"peft_type": "IA3"}}),
        ("no weights for classifier", {"change": {"modules_to_save": None}, "labels": 5}),
        ("does not support adapters", {"task": ""}),
    ):  # fmt: skip
        with pytest.raises(UserError, match=re.escape(words)):
            trained(**options)
    import torch

    weights = lambda model: {name: p for name, p in model.named_parameters() if p.requires_grad}
    same, other = trained(lora_r=2), trained(labels=5)
    assert weights(same).keys() == weights(other).keys()
    differing = [name for name, p in weights(same).items() if not torch.equal(p, weights(other)[name])]
    assert differing, "a head for other labels is replaced"
    assert all("classifier" in name for name in differing), "and the adapters are kept"


def test_paths_inside_of_parts_of_a_config_are_not_published():
    config = {"text_config": {"_name_or_path": "/home/secret/base", "hidden_size": 8}, "vocab_file": "/home/secret/vocab.txt"}
    published = json.loads(export_files.without_paths(json.dumps(config).encode()))
    assert published == {"text_config": {"_name_or_path": "base", "hidden_size": 8}, "vocab_file": "vocab.txt"}
