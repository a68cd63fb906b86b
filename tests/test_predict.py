"""`accel-ddp predict` and `accel-ddp chat`: the results of transformers row by row, on any number of processes, killed and resumed."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pexpect
import psutil
import pytest
import torch

from accel_ddp import cli
from accel_ddp.config.commands import parser_of
from accel_ddp.config.options import column
from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.exporting import chat_command, export, predict_command, predictors, trained_model
from accel_ddp.exporting.predict_rows import InputRows
from accel_ddp.recipe import facts_to_predict
from tests.conftest import BIN, Running, clean_environment

WORDS = ["a", "fine", "film", "about", "people", "who", "do", "not", "like", "films", "and", "dull", "long", "scenes"]
TEXTS = [" ".join(WORDS[i % 5 : i % 5 + 1 + i % 7]) for i in range(40)]
PAIR = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.3}


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def predict_here(output: Path, *words: object) -> list[dict]:
    """Do in this process what the processes of the command do, one shard after the other. Return the rows of the output."""
    given = parser_of("predict").parse_args([*map(str, words), "--output", str(output)])
    options = {name: value for name, value in vars(given).items() if name not in predict_command.NO_EFFECT}
    partial = output.with_name(f"{output.name}.partial")
    partial.mkdir()
    found = trained_model.find(given.model, partial)
    rows = InputRows(found, options)
    rows.check(given.skip_broken)
    predict_command.store_job(partial, options, found, rows)
    worker = predictors.Worker(partial)
    for shard in range(rows.num_shards):
        worker.write(shard)
    columns = rows.files.column_names if given.columns is None else given.columns
    predict_command.join(rows, partial, output, columns, predict_command._types(found, given.top_k))
    return [json.loads(line) for line in output.read_text().splitlines()] if output.suffix == ".jsonl" else []


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def folder_of(tiny_model, tokenizer, tmp_path_factory):
    """Return a function that saves a tiny random BERT of a class of transformers."""
    import transformers

    def save(name: str, files: dict[str, bytes] | None = None, **options) -> str:
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(1)
        config = transformers.BertConfig(vocab_size=len(tokenizer), **PAIR, **options)
        getattr(transformers, name)(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file, content in (files or {}).items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(content)
        return str(folder)

    return save


CHOSEN = {"query_column": "query", "candidate_column": "passage"}
RERANK = {"predicts": "scores", "options": dict.fromkeys(CHOSEN, ""), "columns": CHOSEN}
LABELS = {"id2label": {0: "O", 1: "B-X", 2: "I-X"}, "label2id": {"O": 0, "B-X": 1, "I-X": 2}}


def test_labels_numbers_and_tags_are_those_of_pipelines(folder_of, tmp_path):
    from transformers import pipeline

    rows = write(tmp_path / "rows.jsonl", [{"text": text, "pair": text[::-1], "words": text.split()} for text in TEXTS])
    classify = folder_of("BertForSequenceClassification", **LABELS)
    found = predict_here(tmp_path / "a.jsonl", classify, "--input", rows, "--text_pair_column", "pair", "--top_k", 2)
    use = pipeline("text-classification", classify, top_k=2)
    assert [row["text"] for row in found] == TEXTS, "the order and the columns are those of the input"
    for text, row in zip(TEXTS, found):
        expected = use({"text": text, "text_pair": text[::-1]})
        assert row["prediction"] == [one["label"] for one in expected]
        assert row["score"] == pytest.approx([one["score"] for one in expected], abs=1e-5)
    number = folder_of("BertForSequenceClassification", num_labels=1, problem_type="regression")
    found = predict_here(tmp_path / "b.jsonl", number, "--input", rows)
    use = pipeline("text-classification", number, function_to_apply="none")
    assert [row["prediction"] for row in found] == pytest.approx([one["score"] for one in use(TEXTS)], abs=1e-5)
    several = folder_of("BertForSequenceClassification", problem_type="multi_label_classification", **LABELS)
    found = predict_here(tmp_path / "c.jsonl", several, "--input", rows)
    for row, scores in zip(found, pipeline("text-classification", several, top_k=None)(TEXTS)):
        assert dict(zip(row["prediction"], row["score"])) == pytest.approx(
            {one["label"]: one["score"] for one in scores if one["score"] > 0.5}, abs=1e-5
        )
    tag = folder_of("BertForTokenClassification", **LABELS)
    found = predict_here(tmp_path / "d.jsonl", tag, "--input", rows, "--text_column", "words")
    use = pipeline("token-classification", tag, ignore_labels=[])
    for row in found:
        expected = [one for one in use(" ".join(row["words"])) if not one["word"].startswith("##")]
        assert row["prediction"] == [one["entity"] for one in expected]
        assert row["score"] == pytest.approx([one["score"] for one in expected], abs=1e-5)


@pytest.mark.slow
def test_scores_of_rerankers_and_reward_models(folder_of, cache, tmp_path):
    from sentence_transformers import CrossEncoder
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    from accel_ddp.sources import models

    activation = {"activation_fn": "torch.nn.Sigmoid"}
    pairs = write(tmp_path / "pairs of texts.jsonl", [{"query": text, "passage": text[::-1]} for text in TEXTS])
    files = {"accel_ddp.json": json.dumps(RERANK).encode()}
    folder = folder_of("BertForSequenceClassification", files, num_labels=1, sentence_transformers=activation)
    found = predict_here(tmp_path / "a.jsonl", folder, "--input", pairs)
    expected = CrossEncoder(folder, device="cpu").predict([(text, text[::-1]) for text in TEXTS])
    assert [row["prediction"] for row in found] == pytest.approx(expected.tolist(), abs=1e-5)
    source, folder = models.locate("builtin:tiny-llama", cache), tmp_path / "reward"
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(source, num_labels=1, initializer_range=0.3)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "accel_ddp.json").write_text(json.dumps({"predicts": "rewards", "options": {"chosen_column": "chosen"}}))
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}] for text in TEXTS]
    with torch.no_grad():
        inputs = [tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True) for chat in chats]
        expected = [model(**one).logits.item() for one in inputs]
    for name, rows in (
        ("chats", [{"messages": chat} for chat in chats]),
        ("pairs", [{"prompt": chat[0]["content"], "chosen": chat[1]["content"]} for chat in chats]),
    ):
        found = predict_here(tmp_path / f"{name}.jsonl", folder, "--input", write(tmp_path / f"{name} rows.jsonl", rows))
        assert [row["prediction"] for row in found] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_vectors_and_masks_are_those_of_sentence_transformers_and_pipelines(folder_of, tmp_path):
    from sentence_transformers import SentenceTransformer
    from transformers import pipeline

    from accel_ddp import contrastive

    rows = write(tmp_path / "rows.jsonl", [{"anchor": text, "text": f"{text} [MASK] and [MASK]"} for text in TEXTS])
    for pooling in ("mean", "cls"):
        files = contrastive.sentence_transformers_files(16, pooling, 6, {"query": "find: "})
        facts = {"recipe": "embed.py", "options": {"anchor_column": "anchor", "anchor_prefix": "find: ", "max_length": 6}}
        folder = folder_of("BertModel", {**files, "accel_ddp.json": json.dumps(facts).encode()})
        predict_here(tmp_path / f"{pooling}.npy", folder, "--input", rows)
        expected = SentenceTransformer(folder, device="cpu").encode(TEXTS, prompt_name="query")
        assert np.allclose(np.load(tmp_path / f"{pooling}.npy"), expected, atol=1e-6)
    masks = folder_of("BertForMaskedLM")
    found = predict_here(tmp_path / "masks.jsonl", masks, "--input", rows, "--columns", "text", "--top_k", 3)
    for row, expected in zip(found, pipeline("fill-mask", masks, top_k=3)([row["text"] for row in found])):
        assert row["prediction"] == [[one["token_str"] for one in mask] for mask in expected]
        assert np.allclose(row["score"], [[one["score"] for one in mask] for mask in expected], atol=1e-6)
        assert list(row) == ["text", "prediction", "score"]


@dataclass(kw_only=True)
class OwnRecipe(RecipeConfig):
    review_column: str = column("review", "a text")
    reply_column: str = column("", "a second one")


def test_the_columns_of_an_own_recipe_are_known(folder_of, tmp_path):
    folder = folder_of("BertForSequenceClassification", facts_to_predict(SimpleNamespace(cfg=OwnRecipe())))
    rows = write(tmp_path / "rows.jsonl", [{"id": "one", "review": text} for text in TEXTS])
    found = predict_here(tmp_path / "found.jsonl", folder, "--input", rows)
    assert found == predict_here(tmp_path / "again.jsonl", folder, "--input", rows, "--text_column", "review")
    facts = facts_to_predict(SimpleNamespace(cfg=OwnRecipe(reply_column="reply"), predicts="scores"))["accel_ddp.json"]
    assert json.loads(facts) == {"predicts": "scores", "columns": {"text_column": "review", "text_pair_column": "reply"}}


def test_answers_are_those_of_generate_and_samples_depend_on_the_row_only(cache, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    from accel_ddp.sources import models

    folder = models.locate("builtin:tiny-llama", cache)
    chats = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}] for text in TEXTS[:10]]
    rows = write(tmp_path / "chats.jsonl", [{"messages": [*chat, {"role": "assistant", "content": "No."}]} for chat in chats])
    found = predict_here(tmp_path / "a.jsonl", folder, "--input", rows, "--max_new_tokens", 6)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    for chat, row in list(zip(chats, found))[::5]:
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert row["prediction"] == tokenizer.decode(made, skip_special_tokens=True)
    prompts = [{"prompt": text, "system": "Be brief."} for text in TEXTS[:10]]
    prompts = write(tmp_path / "prompts.jsonl", prompts)
    again = predict_here(tmp_path / "b.jsonl", folder, "--input", prompts, "--max_new_tokens", 6)
    assert [row["prediction"] for row in again] == [row["prediction"] for row in found]
    sample = ("--input", rows, "--max_new_tokens", 6, "--temperature", 1, "--seed", 3)
    samples = [predict_here(tmp_path / f"{size}.jsonl", folder, *sample, "--batch_size", size) for size in (3, 10)]
    assert samples[0] == samples[1] != found
    folder = models.locate("builtin:tiny-t5", cache)
    rows = write(tmp_path / "sources.jsonl", [{"source": text} for text in TEXTS[:10]])
    found = predict_here(tmp_path / "c.jsonl", folder, "--input", rows, "--prefix", "say: ", "--max_new_tokens", 5)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    for row in found[::5]:
        made = model.generate(**tokenizer(f"say: {row['source']}", return_tensors="pt"), max_new_tokens=5, do_sample=False)
        assert row["prediction"] == tokenizer.decode(made[0], skip_special_tokens=True)


def test_samples_have_the_probabilities_of_the_model():
    scores = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    number = 4000
    options = {"temperature": 1.0, "top_p": 1.0, "seed": 0}
    noise = predictors.sampling(options, list(range(number)), torch.device("cpu"))["logits_processor"]
    counts = torch.bincount(noise(None, scores.expand(number, 4)).argmax(-1), minlength=4) / number
    assert torch.allclose(counts, scores.exp(), atol=0.03)


def test_images_of_a_folder_and_adapters_of_a_classifier(tiny_model, tmp_path):
    from accelerate import Accelerator
    from PIL import Image
    from transformers import AutoModelForSequenceClassification, pipeline

    from accel_ddp.config.train_config import RecipeConfig
    from accel_ddp.sources import models
    from accel_ddp.tasks import vision

    torch.manual_seed(0)
    config = vision.MiniResNetConfig(id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
    folder, images = tmp_path / "resnet", tmp_path / "images"
    vision.MiniResNetForImageClassification(config).save_pretrained(folder)
    vision.transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    images.mkdir()
    for i in range(5):
        Image.effect_noise((20, 20 + i), 90).convert("RGB").save(images / f"{i}.png")
    found = predict_here(tmp_path / "images.jsonl", folder, "--input", images)
    use = pipeline("image-classification", str(folder), trust_remote_code=True)
    for row in found:
        best = use(row["image"])[0]
        assert (row["prediction"], row["score"]) == (best["label"], pytest.approx(best["score"], abs=1e-5))

    cfg = RecipeConfig(model=tiny_model, lora_r=2, output_dir="here")
    options = {"num_labels": 3, "id2label": LABELS["id2label"], "ignore_mismatched_sizes": True}
    tokenizer = models.load_tokenizer(cfg)
    model = models.load(AutoModelForSequenceClassification, cfg, tokenizer, **options)
    model = models.prepare(model, cfg, Accelerator(cpu=True), "SEQ_CLS").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3) if parameter.requires_grad else None
    facts = {"recipe": "classify.py", "config": {**vars(cfg), "text_column": "review"}, "metrics": {}, "versions": {}}
    export._write(tmp_path / "adapters", model, export.files_of(model, tokenizer), {**facts, "num_ranks": 1}, "off")
    rows = write(tmp_path / "rows.jsonl", [{"review": text} for text in TEXTS])
    found = predict_here(tmp_path / "adapters.jsonl", tmp_path / "adapters", "--input", rows)
    for row in found:
        scores = model(**tokenizer(row["review"], return_tensors="pt")).logits[0].detach().softmax(-1)
        assert row["prediction"] == LABELS["id2label"][int(scores.argmax())]
        assert row["score"] == pytest.approx(float(scores.max()), abs=1e-5)


def test_rows_that_cannot_be_used_are_named_or_have_no_prediction_in_every_format(tiny_model, tmp_path):
    import pyarrow.parquet

    texts = [*TEXTS[:3], "", None, 'ü, "quoted"']
    rows = write(tmp_path / "rows.jsonl", [{"text": text, "when": i} for i, text in enumerate(texts)])
    reason = r"2 of 6 rows of .*rows.jsonl cannot be used:\n  its text is empty: row 4, row 5\n.*--skip_broken"
    with pytest.raises(UserError, match=reason):
        predict_here(tmp_path / "refused.jsonl", tiny_model, "--input", rows)
    found = predict_here(tmp_path / "a.jsonl", tiny_model, "--input", rows, "--skip_broken")
    assert [row["prediction"] is None for row in found] == [False, False, False, True, True, False]
    predict_here(tmp_path / "a.parquet", tiny_model, "--input", rows, "--skip_broken")
    assert pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist() == found
    predict_here(tmp_path / "a.csv", tiny_model, "--input", rows, "--skip_broken")
    with (tmp_path / "a.csv").open(newline="") as file:
        plain = [{name: value or None for name, value in row.items()} for row in csv.DictReader(file)]
    as_text = lambda value: value if value is None or isinstance(value, str) else json.dumps(value)
    assert plain == [{name: as_text(value) or None for name, value in row.items()} for row in found]


def test_mistakes_are_reported_before_a_model_is_loaded(tiny_model, cache, tmp_path, capsys, monkeypatch):
    from accel_ddp.sources import models

    monkeypatch.chdir(tmp_path)
    write(Path("rows.jsonl"), [{"text": "a film", "label": 1}])
    write(Path("scored.jsonl"), [{"text": "a film", "score": 1}])
    write(Path("pairs.jsonl"), [dict.fromkeys(("query", "document", "prompt", "candidate", "text"), "a film")])
    Path("there.jsonl").write_text("mine")
    Path("empty").mkdir()
    Path("run").mkdir()
    Path("run/config.json").write_text('{"lr": 1}')
    Path("run/log.jsonl").write_text("{}")
    for name, facts in (("rerank", RERANK), ("reward", {"predicts": "rewards"}), ("classify", {"recipe": "classify.py"})):
        shutil.copytree(tiny_model, name)
        Path(name, "accel_ddp.json").write_text(json.dumps(facts))
    shutil.copytree(tiny_model, "no_weights", ignore=lambda *_: ["model.safetensors"])
    shutil.copytree(models.locate("builtin:tiny-llama", cache), "base_model")
    Path("base_model/chat_template.jinja").unlink()
    Path("tools.json").write_text('[{"description": "no name"}]')
    rows, pairs = ([*words, "--output", "new.jsonl"] for words in (["--input", "rows.jsonl"], ["--input", "pairs.jsonl"]))
    for words, expected in (
        (["predict", tiny_model, "--input", "rows.jsonl", "--output", "there.jsonl"], "there.jsonl: exists already"),
        (["predict", tiny_model, "--input", "rows.jsonl", "--output", "new.xlsx"], "must end with .jsonl, .csv, .parquet"),
        (["predict", tiny_model, "--input", "rows.jsonl", "--output", "new.npy"], "predicts labels"),
        (["predict", tiny_model, "--input", "row.jsonl", "--output", "new.jsonl"], "Did you mean rows.jsonl"),
        (["predict", tiny_model, "--input", "scored.jsonl", "--output", "new.jsonl"], "has a column 'score'"),
        (["predict", tiny_model, *rows, "--text_column", "txt"], "--text_column txt: there is no such column. The data have: text"),
        (["predict", tiny_model, *rows, "--columns", "id"], "--columns id: there is no such column"),
        (["predict", "rerank", *pairs], "--text_pair_column: which column has the text pair? The model was trained with: passage."),
        (["predict", "reward", *pairs], "--answer_column: which column has the answer? The data have: query, document"),
        (["predict", "reward", *pairs, "--messages_column", "text", "--prompt_column", "text"], "would be ignored next to"),
        (["predict", tiny_model, *rows, "--temperature", "1"], "--temperature 1.0: would be ignored, because"),
        (["predict", "reward", *pairs, "--max_length", "9"], "--max_length 9: would be ignored, because reward predicts rewards"),
        (["predict", "rerank", *pairs, "--top_k", "2"], "--top_k 2: would be ignored, because rerank predicts scores"),
        (["predict", tiny_model, *rows, "--top_k", "0"], "--top_k 0: must be 1 or more"),
        (["chat", tiny_model, "--top_p", "5"], "--top_p 5.0: must be above 0 and at most 1"),
        (["chat", tiny_model, "--top_p", "0.5"], "--top_p 0.5: has no effect without sampling. Add --temperature 1"),
        (["predict", tiny_model, "--input", "rows.jsonl", "--output", "no/new.jsonl"], "no/new.jsonl: its folder does not exist"),
        (["predict", tiny_model, "--input", "rows.jsonl", "--output", "there.jsonl/new.jsonl"], "cannot be written: Not a directory"),
        (["predict", "./nothing", *rows], "./nothing: there is no such folder"),
        (["predict", "empty", *rows], "is neither a model (with a config.json) nor a run"),
        (["predict", "run", *rows], "is neither a model (with a config.json) nor a run with a checkpoint"),
        (["predict", "no_weights", *rows], "the folder has no weights"),
        (["chat", tiny_model], "predicts labels and cannot chat. Use: accel-ddp predict"),
        (["chat", "base_model"], "has no chat template. Give the one of its training (--chat_template plain"),
        (["chat", "base_model", "--tools", "tools.json"], "--tools tools.json: a tool of the column tools is not an object"),
        (["chat", "base_model", "--chat_template", "lama3"], "Did you mean llama3?"),
    ):  # fmt: skip
        assert cli.main(words) == 2
        assert expected in capsys.readouterr().err
        assert not Path("new.jsonl.partial").exists()
    assert Path("there.jsonl").read_text() == "mine"
    shutil.copytree(tiny_model, "run/model")
    assert trained_model.find("run", tmp_path).place == "run/model"
    options = vars(parser_of("predict").parse_args(["classify", *pairs]))
    assert InputRows(trained_model.find("classify", tmp_path), options).columns == {"text_column": "text"}, "and no candidate"


def command(model: str, rows: str, output: Path, *words: object) -> list[str]:
    return [sys.executable, str(BIN / "accel-ddp"), "predict", model, "--input", rows, "--output", str(output), *map(str, words)]


@pytest.mark.slow
def test_a_command_continues_with_the_parts_that_exist(tiny_model, tmp_path):
    rows = write(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS * 5])
    expected, output = tmp_path / "expected.jsonl", tmp_path / "out.jsonl"
    torch.set_num_threads(1)  # as in the processes of the command; other tests change it
    predict_here(expected, tiny_model, "--input", rows)
    partial = Path(f"{output}.partial")
    shutil.copytree(f"{expected}.partial", partial)
    (partial / "shard-000001.json").unlink()
    (partial / "shard-000003.tmp").write_text("a part of a shard")
    (partial / "shard-000003.json").unlink()
    options = {"env": clean_environment(), "capture_output": True, "text": True, "timeout": 300}
    other = subprocess.run(command(tiny_model, rows, output, "--top_k", 2), **options)
    assert (other.returncode, other.stdout) == (2, "")
    words = ["predict", tiny_model, "--input", rows, "--output", str(tmp_path / "new.jsonl"), "--text_column", "x"]
    code = f"import sys\nfrom accel_ddp import cli\nassert cli.main({words}) == 2\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert "has results of another command: --top_k changed. Delete this folder" in other.stderr
    ended = subprocess.run(command(tiny_model, rows, output), **options)
    assert ended.returncode == 0, ended.stderr
    assert "continuing, 5 of 7 parts exist" in ended.stdout
    assert output.read_bytes() == expected.read_bytes()
    assert not partial.exists()


@pytest.mark.slow
def test_three_processes_and_killed_ones_write_the_same_bytes(cache, tmp_path):
    """Kill a process, then the command itself, and continue: with other numbers of processes, and samples of a language model."""
    rows = write(tmp_path / "rows.jsonl", [{"prompt": f"{text}?"} for text in TEXTS * 10])
    options = ("--temperature", 0.8, "--top_p", 0.9, "--seed", 4, "--max_new_tokens", 12)
    env = clean_environment(ACCEL_DDP_CACHE=cache)
    one, three, killed = (tmp_path / f"{name}.jsonl" for name in ("one", "three", "killed"))
    for output, number in ((one, 1), (three, 3)):
        words = command("builtin:tiny-llama", rows, output, *options, "--num_processes", number)
        assert subprocess.run(words, env=env, timeout=600).returncode == 0
    assert one.read_bytes() == three.read_bytes()
    partial = Path(f"{killed}.partial")

    def begin(number: int) -> Running:
        run = Running([command("builtin:tiny-llama", rows, killed, *options, "--num_processes", number)], [env], fresh=True)
        wanted = len(list(partial.glob("shard-*.json"))) + 2
        while len(list(partial.glob("shard-*.json"))) < wanted:
            assert run.processes[0].poll() is None
            time.sleep(0.02)
        return run

    run = begin(2)
    psutil.Process(run.processes[0].pid).children()[0].kill()
    ended = run.ended(60)
    assert ended.codes == [1]
    where = r"in rows [\d,]+ to [\d,]+ or before them"
    assert re.search(rf"process 0 failed \(exit code -9\), {where}. The same command continues.", ended.text), ended.text
    run = begin(3)
    workers = psutil.Process(run.processes[0].pid).children()
    run.processes[0].kill()
    assert not psutil.wait_procs(workers, timeout=20)[1], "processes end with the command"
    assert not killed.exists()
    ended = subprocess.run(command("builtin:tiny-llama", rows, killed, *options), env=env, timeout=600)
    assert ended.returncode == 0
    assert killed.read_bytes() == one.read_bytes()


def test_chat_through_a_pipe_has_a_history_and_commands(cache, capsys, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from accel_ddp.sources import models

    folder = models.locate("builtin:tiny-llama", cache)
    lines = ["What is new?", "And old?", "/undo", "And old?", "/system Be kind.", "Why?", "/reset", "Why?", " ".join(WORDS * 40)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*lines, *["Again " + " ".join(WORDS * 8)] * 4])))
    assert cli.main(["chat", folder, "--max_new_tokens", "5"]) == 0
    printed = capsys.readouterr()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)

    def answer(*texts: str, system: str = "") -> str:
        chat = [{"role": "system", "content": system}] if system else []
        chat += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        return tokenizer.decode(made, skip_special_tokens=True)

    first = answer("What is new?")
    second = answer("What is new?", first, "And old?")
    third = answer("What is new?", first, "And old?", second, "Why?", system="Be kind.")
    expected = [first, second, second, third, answer("Why?", system="Be kind.")]
    assert printed.out.startswith("".join(f"{text}\n" for text in expected))
    assert "error: the question has" in printed.err
    assert "(the oldest turn is left out: the model's context is full)" in printed.err


class Scripted(chat_command.Conversation):
    """A conversation whose answers are given: the model in the tests has not learned to call tools."""

    def __init__(self, predictor, tools: list[dict], answers: list[str]):
        self.predictor, self.tools, self.answers, self.messages, self.system = predictor, tools, answers, [], ""
        self.options = {"plain": False}

    def _generate(self, ids: list[int]) -> str:
        self.prompt = self.predictor.tokenizer.decode(ids)
        return self.answers.pop(0)


def test_tool_calls_are_shown_and_the_user_types_the_results(cache, tmp_path, capsys, monkeypatch):
    from accel_ddp.sources import models

    found = trained_model.find(models.locate("builtin:tiny-llama", cache), tmp_path)
    options = {"chat_template": "chatml", "dtype": "auto", "max_length": 0, "max_new_tokens": 9, "temperature": 0.0}
    tools = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    chat = Scripted(predictors.Predictor(found, options), tools, [f"Let me see. {call}\n{call}", "It rains."])
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the weather?\nrain\nmore rain\n"))
    chat_command._talk(chat)
    assert capsys.readouterr().out == 'tool call: weather {"city": "Rome"}\n' * 2
    assert [one["role"] for one in chat.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert chat.messages[1]["content"] == "Let me see."
    assert '"description": "of a city"' in chat.prompt
    assert chat.prompt.count('{"name": "weather", "arguments": {"city": "Rome"}}') == 2
    assert "<tool_response>\nmore rain\n</tool_response>" in chat.prompt
    mistral, llama = '[TOOL_CALLS] [{"name": "weather", "arguments": {}}]', '{"name": "weather", "parameters": {"city": "Rome"}}'
    strange = ('{"name": ["weather"], "arguments": {}}', '{"name": {}, "arguments": {}}', '{"name":' * 2000)
    texts = (mistral, llama, '{"name": "other", "arguments": {}}', *strange)
    assert [len(chat_command.find_calls(text, tools)) for text in texts] == [1, 1, 0, 0, 0, 0]


@pytest.mark.slow
def test_in_a_terminal_ctrl_c_stops_an_answer_and_then_the_program(cache, tmp_path):
    env = clean_environment(ACCEL_DDP_CACHE=cache)
    words = ["chat", "builtin:tiny-llama", "--max_new_tokens", "500", "--temperature", "2"]
    child = pexpect.spawn(str(BIN / "accel-ddp"), words, env=env, timeout=180, encoding="utf-8", codec_errors="replace")
    shown = lambda *texts: [child.expect_exact(text) for text in texts]
    shown("/help shows the commands.", "> ")
    child.sendline("Hello")
    child.expect(r"Hello\s+\S+")  # the answer begins
    child.sendintr()
    shown("(stopped)", "> ")
    child.sendline("/help")
    shown("/undo", "> ")
    child.sendintr()
    shown("(Ctrl-C again or Ctrl-D exits)")
    child.sendintr()
    child.expect(pexpect.EOF)
    assert child.wait() == 0
