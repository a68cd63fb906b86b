"""Examples are found by name, are parsed and run by their recipes, and state the memory that the estimate gives."""

import importlib.util
import json
import re

import pytest

from accel_ddp import cli
from accel_ddp.config.parsing import parse_config
from accel_ddp.doctor.check_options import load_recipe, read_recipe_option
from accel_ddp.nodes.recipe_files import examples, options_path, place_example, recipe_path
from tests.conftest import BIN, ROOT, clean_environment, run_all

EXAMPLES = examples()
NAMES = list(EXAMPLES)


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("make_examples", ROOT / "docs" / "make_examples.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_parsed_and_described(generator):
    assert {one.recipe for one in EXAMPLES.values()} >= {"sft", "dpo", "rerank", "classify", "tag", "embed", "seq2seq", "images"}
    for name, one in EXAMPLES.items():
        cfg = parse_config(load_recipe(recipe_path(one.recipe)).Config, ["--config", name])
        assert cfg.model in generator.SHAPES, name
        assert list(one.facts) == ["Data", "Hardware", "Memory", "Run"], name
        assert re.fullmatch(r"1 GPU with \d+ GB|[2-9] GPUs with \d+ GB", one.facts["Hardware"]), name
        assert one.facts["Run"].startswith(f"accel-ddp run {one.recipe} --config {name}"), name
        for file in (*cfg.train_file, *cfg.eval_file):
            assert file in one.facts["Data"], f"{name} describes {file}"


def check_memory(name, generator, folder):
    found, (stated, _) = generator.estimate(EXAMPLES[name], folder), EXAMPLES[name].facts["Memory"].split(maxsplit=1)
    assert found.fits, f"{found.text}, but the header states {EXAMPLES[name].facts['Hardware']}"
    assert found.gib == pytest.approx(float(stated), rel=0.03), (
        "run: python docs/make_examples.py && python docs/make_reference.py"
    )


def test_the_memory_in_a_header_is_the_estimate(generator, tmp_path):
    check_memory("vit-images", generator, tmp_path)


@pytest.mark.slow  # a second for each, and several for large models
@pytest.mark.parametrize("name", NAMES)
def test_the_memory_in_every_header_is_the_estimate(name, generator, tmp_path):
    check_memory(name, generator, tmp_path)


@pytest.mark.parametrize(
    ("words", "placed"),
    [
        ("run sft --config llama-8b-lora", "run sft --config llama-8b-lora"),
        ("run llama-8b-lora --lr 1", "run sft --config llama-8b-lora --lr 1"),
        ("run --config llama-8b-lora", "run sft --config llama-8b-lora"),
        ("run --config my.yaml --debug sft --lr 1", "run --debug sft --config my.yaml --lr 1"),
        ("run llama-8b-lora --run_name sft", "run sft --config llama-8b-lora --run_name sft"),
        ("estimate --json roberta-ner", "estimate --json tag --config roberta-ner"),
        ("launch --name roberta-ner cluster.yaml tag", "launch --name roberta-ner cluster.yaml tag"),
        ("launch cluster.yaml roberta-ner", "launch cluster.yaml tag --config roberta-ner"),
        ("verify --fsdp recipes/sft.py", "verify --fsdp recipes/sft.py"),
        ("run nosuch", "run nosuch"),
    ],
)
def test_an_example_alone_stands_for_its_recipe(words, placed):
    assert place_example(words.split()) == placed.split()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run sft --config lama-8b-lora", "no example of this name. Did you mean llama-8b-lora? Examples of sft: llama-8b-full,"),
        ("run classify --config nosuch.yaml", "no example of this name. Examples of classify: modernbert-classify."),
        (
            "run own_loop --config roberta-ner",
            "has options of the recipe tag, not classify: accel-ddp run tag --config roberta-ner",
        ),
        ("estimate sft --config roberta-ner", "has options of the recipe tag, not sft: accel-ddp run tag --config roberta-ner"),
        ("run lama-8b-lora", "is not a recipe. Did you mean 'llama-8b-lora'?"),
        ("run sft --config 2node.yaml", "describes nodes and processes, not options of a recipe. Use --config_file 2node.yaml."),
        (
            "run sft --config mine/1node.yaml",
            "describes nodes and processes, not options of a recipe. Use --config_file mine/1node.y",
        ),
        (
            "run sft --config_file llama-8b-lora",
            "has options of a recipe, not of `accelerate launch`. Use --config llama-8b-lora.",
        ),
        (
            "run sft --config_file mine/run.yaml",
            "has options of a recipe, not of `accelerate launch`. Use --config mine/run.yaml.",
        ),
        (
            "estimate --config_file mine/run.yaml sft",
            "has options of a recipe, not of `accelerate launch`. Use --config mine/run.",
        ),
    ],
)
def test_a_wrong_config_is_refused_with_what_to_run_instead(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.execv", lambda *given: pytest.fail(f"started {given}"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.yaml").write_text("lr: 1e-4\nsteps: 2\n")
    (tmp_path / "mine" / "1node.yaml").write_text((ROOT / "accelerate_configs" / "1node.yaml").read_text())
    assert cli.main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_a_copy_wins_over_the_example_of_the_same_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert read_recipe_option(["sft.py", "--config", "llama-8b-lora"], "epochs", "") == "3", "the launcher finds it too"
    assert cli.main(["copy", "llama-8b-lora"]) == 0
    assert capsys.readouterr().out.endswith("\nRun it: accel-ddp run sft --config llama-8b-lora.yaml\n")
    copy = tmp_path / "llama-8b-lora.yaml"
    assert copy.read_text() == EXAMPLES["llama-8b-lora"].path.read_text()
    copy.write_text(copy.read_text().replace("epochs: 3", "epochs: 7"))
    sft = load_recipe(recipe_path("sft")).Config
    assert [parse_config(sft, ["--config", name]).epochs for name in ("llama-8b-lora", copy.name)] == [7, 7]
    assert options_path("roberta-ner") == EXAMPLES["roberta-ner"].path
    assert cli.main(["copy", "llama-8b-lora"]) == 2, "an edited file is not overwritten"


def test_examples_are_listed_below_their_recipes(capsys):
    assert cli.main(["recipes"]) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    for name, one in EXAMPLES.items():
        assert lines.index(one.recipe) < lines.index(name)
    assert lines[lines.index("dpo") + 1] == "llama-8b-dpo"


# ---- runs


CHAT = {"messages": [{"role": "user", "content": "What is 1 and 1?"}, {"role": "assistant", "content": "It is 2."}]}
PAIR = {"prompt": "What is 1 and 1?", "chosen": "It is 2.", "rejected": "It is 7."}
MINILM = ["--model", "builtin:all-MiniLM-L6-v2"]
LLAMA = ["--model", "builtin:tiny-llama", "--quantize", "no"]
ROWS = {
    "sft": (CHAT, LLAMA), "qwen3-1.7b-text": ({"text": "It was a dark and stormy night."}, LLAMA), "dpo": (PAIR, LLAMA),
    "reward": (PAIR, LLAMA), "classify": ({"text": "good {}", "label": "yes"}, MINILM),
    "tag": ({"tokens": ["in", "Paris"], "tags": ["O", "B-LOC"]}, MINILM), "embed": ({"query": "a {}", "passage": "b {}"}, MINILM),
    "rerank": ({"query": "a", "passage": "b {}", "label": 1}, MINILM), "pretrain_mlm": ({"text": "a {} b c d"}, MINILM),
    "seq2seq": ({"article": "one two {}", "summary": "12"}, ["--model", "builtin:tiny-t5"]),
    "images": (None, ["--model", "mini-resnet", "--image_size", "8"]),
}  # fmt: skip


@pytest.mark.slow  # tests/test_packaging.py runs one of them by default
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_with_a_small_model(name, tmp_path, cache):
    recipe = EXAMPLES[name].recipe
    row, model = ROWS.get(name) or ROWS[recipe]
    file = tmp_path / ("photos" if row is None else "rows.jsonl")
    if row:
        rows = [json.dumps(row).replace("{}", str(i)) for i in range(12)]
        if recipe in ("classify", "rerank"):
            rows += [line.replace("yes", "no").replace("1}", "0}") for line in rows]
        file.write_text("\n".join(rows))
    else:
        from PIL import Image

        for i in range(12):
            (file / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (20 * i, 0, 0)).save(file / "ab"[i % 2] / f"{i}.png")
    words = ["run", recipe, "--config", name, *model, "--train_file", file, "--max_length", "64", "--steps", "2"]
    words += ["--global_batch_size", "4", "--micro_batch_size", "2", "--output_dir", tmp_path / "run", "--cache_dir", cache]
    words += ["--eval_file", file] if "eval_file" in EXAMPLES[name].path.read_text() else []
    if recipe == "images":
        words = [word for word in words if word not in ("--max_length", "64")]
    ended = run_all([[BIN / "accel-ddp", *map(str, words)]], [clean_environment()]).well()
    assert "step 2/2" in ended.text
    assert (tmp_path / "run" / "model").is_dir()
