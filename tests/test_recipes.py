"""Tests of every recipe as users start it: on one rank and on two, killed and resumed, exported and loaded."""

import contextlib
import dataclasses
import io
import json
import math
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from accel_ddp.config.choices import KEPT
from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.exporting import export
from accel_ddp.records.eval_tables import Table, file_of, list_steps, read_tables
from accel_ddp.records.files import read_objects
from tests.conftest import BIN, PROGRAMS, ROOT, Running, clean_environment, rank_environments, run_all, run_ranks
from tests.log_schema import require_documented

WORDS = ["a", "fine", "film", "with", "warm", "funny", "people", "and", "great", "acting", "in", "dull", "cold", "houses"]


def sentence(i: int, length: int = 6) -> str:
    return " ".join(WORDS[(i * 7 + j * (i % 5 + 1)) % len(WORDS)] for j in range(length))


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CLASSES = ("classes", "confusion", "predictions")


@dataclass
class Case:
    """A recipe, the data and options of a run that takes seconds, and a function that loads its export with the usual library."""

    recipe: str
    rows: Callable[[int], dict] | None
    options: list[str]
    loads: Callable[[str], object]
    weights: str = "model.safetensors"
    metrics: tuple[str, ...] = field(default=("loss",))
    tables: tuple[str, ...] = ("predictions",)
    shown: str = r"label: ⟦\d⟧"  # what `--show_example` prints, as a regular expression


def pipeline(task: str, text: object, **more: object) -> Callable[[str], object]:
    """Return a function that loads a folder as a pipeline of Transformers and applies it to the text."""

    def use(folder: str) -> object:
        from transformers import pipeline as make

        return make(task, folder, **more)(text)

    return use


def merges_without_a_change(folder: str) -> object:
    """Compare the logits of the exported adapters, on the model below them, with those of the merged model.

    The adapters contain the newly initialised layers, also the pooler, which a masked language model does not have.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    from accel_ddp.sources import models

    base = json.loads((Path(folder) / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    base = models.locate(base, RecipeConfig.cache_dir)
    ids = torch.tensor([[2, 9, 30, 31, 3]])
    with torch.no_grad():
        below = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
        a = PeftModel.from_pretrained(below, f"{folder}/adapter").eval()(ids).logits
        b = AutoModelForSequenceClassification.from_pretrained(folder).eval()(ids).logits
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    return True


def sentence_embeddings(folder: str) -> object:
    from sentence_transformers import SentenceTransformer

    vectors = SentenceTransformer(folder).encode(["a fine film", "a dull house"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    return vectors.shape == (2, 16)


def cross_encoder(folder: str) -> object:
    """Compare the scores of sentence-transformers with those of transformers. Both truncate the pair to --max_length."""
    import torch
    from sentence_transformers import CrossEncoder
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = ["a fine film", "cold " * 40]
    with torch.no_grad():
        inputs = tokenizer(["warm"] * 2, texts, padding=True, truncation=True, max_length=12, return_tensors="pt")
        scores = model(**inputs).logits[:, 0].numpy()
    np.testing.assert_allclose(CrossEncoder(folder).predict([("warm", text) for text in texts]), scores, atol=1e-5)
    assert export.read_facts(folder)["columns"] == {"query_column": "query", "candidate_column": ""}, "`predict` reads these"
    return scores[0] != scores[1]


def scores_chats(folder: str) -> object:
    """Compare the score of a chat alone with its score next to a longer one. The exported config names the padding token."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    chats = [uneven_chat(i)["messages"] for i in (1, 3)]
    with torch.no_grad():
        one, two = (
            model(**tokenizer.apply_chat_template(some, padding=True, return_dict=True, return_tensors="pt")).logits
            for some in (chats[:1], chats)
        )
    torch.testing.assert_close(one, two[:1], atol=1e-5, rtol=1e-5)
    return two.shape == (2, 1)


def image_of_a_digit() -> object:
    from PIL import Image

    return Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))


def uneven_chat(i: int) -> dict:
    """Return a chat whose answer has 1 or 61 words, so that a mean over rows or over ranks differs from the mean over tokens."""
    question = {"role": "user", "content": sentence(i, 3)}
    return {"messages": [question, {"role": "assistant", "content": sentence(i, 1 if i % 3 else 61)}]}


ANSWER = r"<\|im_start\|>user\n[a-z ]+<\|im_end\|>\n<\|im_start\|>assistant\n⟦[a-z ]+<\|im_end\|>"
MIXED = {"sft": (3, 1), "pretrain_mlm": (1, 2)}  # weights of the two halves of the rows
BOTH = ("loss/eval1", "loss/eval2")  # of the two halves
CASES = {
    "classify": Case(
        "classify",
        lambda i: {"text": sentence(i), "label": i % 3},
        ["--class_weights", "balanced", "--metrics", "matthews_correlation", "brier_score", str(PROGRAMS / "weighted_by_place"),
         "--early_stopping_patience", "9", "--best_metric", "weighted_by_place:min"],
        pipeline("text-classification", "a fine film"),
        metrics=("accuracy", "macro_f1", "loss", "matthews_correlation", "brier_score", "weighted_by_place"),
        tables=CLASSES,
    ),
    "classify a number": Case(
        "classify",
        lambda i: {"a": sentence(i), "b": sentence(i + 1), "label": (i % 7) / 7},
        ["--num_labels", "1", "--text_column", "a", "--text_pair_column", "b", "--best_metric", "r2", "--metrics", "r2"],
        pipeline("text-classification", {"text": "a fine film", "text_pair": "a dull one"}),
        metrics=("mse", "pearson", "loss", "r2"),
        tables=("errors", "points", "predictions"),
    ),
    "tag": Case(
        "tag",
        lambda i: {"tokens": sentence(i, 1 + i % 9).split(), "tags": (["B-X", "I-X", "O"] * 3)[: 1 + i % 9]},
        ["--metrics", "macro_f1"],
        pipeline("token-classification", "a fine film", aggregation_strategy="simple"),
        metrics=("f1", "loss", "macro_f1"),
        tables=CLASSES,
        shown=r"\[CLS\] ⟦[a-z]+ → B-X⟧",
    ),
    "sft": Case("sft", uneven_chat, ["--samples", "1", "--max_new_tokens", "2"], pipeline("text-generation", "hello"),
                metrics=("loss", "perplexity", *BOTH), shown=ANSWER),
    "sft, streaming": Case("sft", uneven_chat,
                ["--samples", "1", "--max_new_tokens", "2", "--streaming", "--shuffle_block", "20", "--max_length", "96"],
                pipeline("text-generation", "hello"), metrics=("loss", "perplexity"), shown=ANSWER),
    "sft with adapters": Case(
        "sft", uneven_chat,
        ["--samples", "1", "--max_new_tokens", "2", "--lora_r", "2", "--gradient_checkpointing", "--lr", "1"],
        pipeline("text-generation", "hello"), "adapter/adapter_model.safetensors", shown=ANSWER,
    ),
    "dpo": Case(
        "dpo",
        lambda i: {"prompt": sentence(i, 3), "chosen": sentence(i, 1 if i % 3 else 31), "rejected": sentence(i + 1, 1 + i % 7)},
        ["--loss", "simpo", "--sft_weight", "0.5"],
        pipeline("text-generation", "hello"),
        metrics=("loss", "reward_accuracy", "reward_margin", "logp_chosen"),
        shown=f"chosen:\n.*{ANSWER}⟧\n\nrejected:\n.*{ANSWER}",
    ),
    "classify with adapters": Case(
        "classify",
        lambda i: {"text": sentence(i), "label": i % 3},
        ["--model", "builtin:tiny-bert", "--lora_r", "2", "--lr", "0.5", "--no_dropout"],
        merges_without_a_change,
        "adapter/adapter_model.safetensors",
        metrics=("loss",),
        tables=CLASSES,
    ),
    "seq2seq": Case(
        "seq2seq",
        lambda i: {"source": sentence(i, 3), "target": sentence(i, 1 + i % 9)},
        ["--max_new_tokens", "4", "--metrics", "ter", "rouge_1"],
        lambda folder: __import__("transformers").AutoModelForSeq2SeqLM.from_pretrained(folder),
        shown=r"\n[a-z ]+</s>\n⟦[a-z ]+</s>⟧\n",
    ),
    "images": Case(
        "images", None, ["--norm", "group", "--metrics", "roc_auc"],
        pipeline("image-classification", image_of_a_digit(), trust_remote_code=True),
        metrics=("accuracy", "loss", "roc_auc"),
        tables=CLASSES,
    ),
    "embed": Case(
        "embed",
        lambda i: {"anchor": sentence(i, 4), "positive": sentence(i, 7), "wrong": sentence(i + 3, 5)},
        ["--negative_columns", "wrong", "--matryoshka", "8", "--scale", "5"],
        sentence_embeddings,
        metrics=("mrr", "recall_at_1_8"),
        shown=r"(\[CLS\] [a-z ]+ \[SEP\]\n){3}",
    ),
    "embed with mined negatives": Case(
        "embed",
        lambda i: {"anchor": sentence(i, 4), "positive": sentence(i, 3 + i % 5)},
        ["--mine_negatives", "2", "--mine_every", "3", "--mine_margin", "-2", "--scale", "5"],
        sentence_embeddings,
        metrics=("mrr",),
        shown=r"(\[CLS\] [a-z ]+ \[SEP\]\n){2}",
    ),
    "rerank": Case(
        "rerank",
        lambda i: {
            "query": sentence(i, 3), "positives": [sentence(i, 5)], "negatives": [sentence(i + k, 2 + k) for k in range(1, 2 + i % 4)]
        },
        ["--max_candidates", "4", "--max_length", "12"],
        cross_encoder,
        metrics=("mrr", "ndcg_at_10", "map", "loss"),
        shown=r"(\[CLS\] [a-z ]+ \[SEP\] [a-z ]+ \[SEP\]\n){2}",
    ),
    "reward": Case(
        "reward",
        lambda i: {"prompt": sentence(i, 3), "chosen": sentence(i, 4 + i % 9), "rejected": sentence(i, 2), "margin": i % 3 / 2},
        ["--center_rewards", "0.1"],
        scores_chats,
        metrics=("accuracy", "margin", "loss"),
        shown=r"<\|im_start\|>assistant\n[a-z ]+<\|im_end\|>",
    ),
    "pretrain_mlm": Case(
        "pretrain_mlm", lambda i: {"text": sentence(i, 40)}, ["--max_length", "32"],
        pipeline("fill-mask", "a fine [MASK]"), metrics=("loss", "perplexity", *BOTH), shown=r"⟦\[MASK\] → [#a-z]+⟧",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def options(tmp_path_factory, tiny_model, cache) -> Callable[[str], list[str]]:
    """Return a function that returns the options of a case.

    A run has 6 steps of 8 items in micro-batches of 2. It evaluates 11 items, which two ranks cannot share equally. The
    optimizer is SGD, because AdamW enlarges rounding errors where a gradient consists of them.
    """
    folder = tmp_path_factory.mktemp("data")

    def options_of(name: str) -> list[str]:
        case = CASES[name]
        given = ["--steps", "6", "--save_every", "2", "--keep_last", "3", "--eval_every", "3", "--log_every", "1"]
        given += ["--global_batch_size", "8", "--micro_batch_size", "2", "--max_eval_items", "11", "--eval_batch_size", "4"]
        given += ["--optimizer", "sgd", "--lr", "0.05", "--log_predictions", "2", "--show_example", "1"]
        if case.rows:
            for part, first, number in (("train", 0, 48), ("eval", 48, 13)):
                (folder / name).mkdir(exist_ok=True)
                rows, path = [case.rows(i) for i in range(first, first + number)], folder / name / f"{part}.jsonl"
                halves = [(path.with_name(f"{part}1.jsonl"), rows[::2]), (path.with_name(f"{part}2.jsonl"), rows[1::2])]
                files = [write_jsonl(*half) for half in (halves if name in MIXED else [(path, rows)])]
                weights = [f":{weight}" for weight in MIXED.get(name, ())] if part == "train" else []
                given += [f"--{part}_file", *(f"{file}{weight}" for file, weight in zip_longest(files, weights, fillvalue=""))]
        if case.recipe in ("classify", "tag", "embed", "rerank") and "--model" not in case.options:
            given += ["--model", tiny_model]
        return [*given, *case.options]

    return options_of


def evaluations(folder: Path) -> list[dict]:
    return [e for e in map(json.loads, (folder / "log.jsonl").read_text().splitlines()) if e["event"] == "evaluate"]


def assert_same_tables(a: dict[str, Table], b: dict[str, Table]) -> None:
    """Require equal tables. Only rounded numbers may differ, by one in the last digit."""
    assert a.keys() == b.keys()
    for name in a:
        assert dataclasses.replace(a[name], rows=[]) == dataclasses.replace(b[name], rows=[])
        for row_of_a, row_of_b in zip(a[name].rows, b[name].rows, strict=True):
            assert [cell for cell in row_of_a if not isinstance(cell, float)] == [c for c in row_of_b if not isinstance(c, float)]
            assert row_of_a == [pytest.approx(cell, abs=1.01e-4) if isinstance(cell, float) else cell for cell in row_of_b]


def assert_tables_are_complete(case: Case, one: Path, two: Path, again: Path) -> None:
    """Compare the tables of one rank with those of two, and of a run that repeats the last steps byte for byte."""
    found = read_tables(one / file_of(6))
    assert tuple(found) == case.tables
    assert list_steps(one) == list_steps(two) == [0, 3, 6]
    for step in (3, 6):
        assert (again / file_of(step)).read_bytes() == (one / file_of(step)).read_bytes()
    before = [read_tables(run / file_of(0)) for run in (one, two)]  # with equal weights
    assert_same_tables(*before)
    for name in {"classes", "confusion"} & found.keys():
        assert before[0][name] == before[1][name]
    shown = found["predictions"]
    assert 2 <= len(shown.rows) <= 6
    assert max(Counter(row[0] for row in shown.rows).values()) <= 2
    assert not case.rows or any(word in str(shown.rows) for word in WORDS), "it shows texts of the data"
    if case.recipe == "classify" and "confusion" in found:
        pairs = [case.rows(i) for i in range(48, 61)]  # the evaluation file
        assert all({"text": row[1], "label": int(row[2])} in pairs for row in shown.rows), "texts and labels are of the same row"
    for name in {"confusion"} & found.keys():
        counted = sum(sum(row[1:]) for row in found[name].rows)
        assert counted == 11 or case.recipe == "tag"
        right = sum(row[1 + i] for i, row in enumerate(found[name].rows))
        assert right / counted == pytest.approx(evaluations(one)[-1]["accuracy"])


def assert_same_result(case: Case, one: Path, two: Path) -> None:
    """Compare the weights of two exported models, and their metrics."""
    weights_of_one, weights_of_two = (load_file(folder / "model" / case.weights) for folder in (one, two))
    assert weights_of_one.keys() == weights_of_two.keys()
    for key, value in weights_of_one.items():
        np.testing.assert_allclose(weights_of_two[key], value, atol=1e-5, rtol=0, err_msg=key)
    assert [e["step"] for e in evaluations(one)] == [0, 3, 6]
    for metric in case.metrics:
        a, b = (evaluations(folder)[-1][metric] for folder in (one, two))
        assert math.isfinite(a)
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5), metric


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_evaluate_repeats_the_last_evaluation(name, options, tmp_path):
    """Compare the log with `accel-ddp evaluate` on one rank, on three, and of the export, for which the training rows are missing."""
    case, given, run = CASES[name], options(name), tmp_path / "run"
    run_ranks(1, ROOT / "recipes" / f"{case.recipe}.py", *given, "--output_dir", run).well()
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    files_of = lambda at: [*takewhile(lambda word: not word.startswith("--"), given[at + 1 :])]
    rows = ["--eval_file", *files_of(given.index("--eval_file"))] if case.rows else []
    rows += ["--metrics", *case.options[3:6]] if name == "classify" else []  # one is a folder, whose place is not published
    words = {"one": [run], "three": [run, "--num_processes", "3"], "export": [run / "model", *rows]}
    commands = [
        [sys.executable, BIN / "accel-ddp", "evaluate", *more, "--output", tmp_path / f"{kind}.json"]
        for kind, more in words.items()
    ]
    ended = run_all(commands, [clean_environment()] * 3).well()
    assert "equal to the evaluation in training" in ended.texts[0]
    last = {name: value for name, value in evaluations(run)[-1].items() if name not in ("event", "step", "time")}
    found = {kind: json.loads((tmp_path / f"{kind}.json").read_text())["metrics"] for kind in words}
    assert found["one"] == last
    for kind in ("three", "export"):
        assert found[kind] == pytest.approx(last, rel=1e-6, abs=1e-6), kind
    assert files == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}, "the run was changed"


# Further cases of recipes that have another one, and recipes whose parts others share.
SLOW = {
    "classify a number",
    "sft, streaming",
    "sft with adapters",
    "classify with adapters",
    "embed with mined negatives",
    "rerank",
    "reward",
    "dpo",
    "tag",
    "pretrain_mlm",
    "images",
    "seq2seq",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES])
def test_a_recipe_keeps_the_promises(name, options, tmp_path):
    """Compare one rank with two ranks that are killed and resumed, and with one rank that resumes from step 2. Load the export."""
    case, given = CASES[name], options(name)
    script, one, two, again = (ROOT / "recipes" / f"{case.recipe}.py", *(tmp_path / n for n in ("one", "two", "again")))
    text = run_ranks(1, script, *given, "--output_dir", one).well().text
    assert re.search(r"^ +before +after$", text, flags=re.MULTILINE)
    assert "Traceback" not in text
    assert re.search(case.shown, text), text
    assert text.count("\n  answer  ") == {"sft": 3, "seq2seq": 9}.get(name, text.count("\n  answer  ")), "after 3 evaluations"

    killed = Running([[sys.executable, script, *given, "--output_dir", two]] * 2, rank_environments(2))
    killed.until("step 4/6")
    killed.kill()
    killed.ended()
    run_ranks(2, script, *given, "--output_dir", two, "--resume").well()
    assert_same_result(case, one, two)
    first, last = (load_file(one / f"step_0000000{step}" / "model.safetensors") for step in (2, 6))
    change = max(np.abs(last[key].astype(float) - first[key]).max() for key in last)
    assert change > 1e-3, "the comparison means nothing if the weights do not change"

    run_ranks(1, script, *given, "--resume", one / "step_00000002", "--output_dir", again).well()
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (again / "step_00000006" / file).read_bytes() == (one / "step_00000006" / file).read_bytes()

    assert_tables_are_complete(case, one, two, again)

    out = export.from_checkpoint(str(one / "step_00000006"), str(tmp_path / "exported"))
    for path in (p for p in (one / "model").rglob("*") if p.is_file() and p.name not in ("README.md", "accel_ddp.json")):
        is_equal = (out / path.relative_to(one / "model")).read_bytes() == path.read_bytes()
        assert is_equal, path.name  # pytest would need minutes to find the differences
    assert case.loads(str(one / "model")) is not False

    tried = shlex.split(re.search(r"^try:  (.*)$", text, flags=re.MULTILINE)[1])
    assert tried[:2] == ["python", "-c"]
    assert not case.rows or any(f"{word} " in tried[2] for word in WORDS), "it uses a row of the data"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(tried[2], {})
    assert printed.getvalue()


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
WITH_COPIES = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=[] if (name, ranks) == ("sft", 2) else [pytest.mark.slow])
        for name in CASES if name != "images" for ranks in ((2, 4) if name in ("sft", "sft with adapters") else (2,))
    ],
)  # fmt: skip
def test_a_sharded_recipe_that_is_killed_and_resumed_learns_what_one_rank_learns(name, ranks, options, tmp_path):
    """Two ranks hold one copy of the model (FSDP), and four ranks hold two copies (HSDP)."""
    case, given = CASES[name], options(name)
    script, one, sharded = ROOT / "recipes" / f"{case.recipe}.py", tmp_path / "one", tmp_path / "sharded"
    run_ranks(1, script, *given, "--output_dir", one).well()
    env = FSDP | (WITH_COPIES if ranks == 4 else {})
    given = [*given, "--gpu_memory_gb", "100"]  # so memory is estimated, and much stays gathered
    killed = Running([[sys.executable, script, *given, "--output_dir", sharded]] * ranks, rank_environments(ranks, **env))
    killed.until("step 4/6")
    killed.kill()
    killed.ended()
    text = run_ranks(ranks, script, *given, "--output_dir", sharded, "--resume", **env).well().text
    assert "sharded over 2 ranks" in text
    stored = json.loads((sharded / "step_00000006" / "run.json").read_text())
    assert stored["config"]["keep_gathered"] in ("weights", "gradients")
    assert stored["chosen"]["keep_gathered"].endswith(f"GiB estimated with it, {KEPT}")
    assert "Traceback" not in text
    assert_same_result(case, one, sharded)
    assert (sharded / "step_00000006" / "model").is_dir(), "the checkpoint has a part of each rank"
    require_documented(sharded)
    (begin, *_) = read_objects(sharded / "log.jsonl")
    assert begin["sharding"]["text"] == f"FSDP2 over {ranks} ranks" + ", 2 copies of the model" * (ranks == 4)
    assert case.loads(str(sharded / "model")) is not False


def test_a_checkpoint_contains_only_the_adapters_which_merge_into_an_ordinary_model(options, tmp_path):
    script, folder = ROOT / "recipes" / "sft.py", tmp_path / "run"
    run_ranks(1, script, *options("sft with adapters"), "--merge_adapters", "--output_dir", folder).well()
    saved = load_file(folder / "step_00000006" / "model.safetensors")
    assert saved
    assert all("lora_" in name for name in saved)
    assert not any("lora_" in name for name in load_file(folder / "model" / "model.safetensors"))
    half = tmp_path / "half"
    run_ranks(1, script, *options("sft with adapters"), "--steps", "1", "--freeze", "lora_A", "--output_dir", half).well()
    export.from_checkpoint(str(half), str(tmp_path / "of half"), merge="on")  # the frozen half of the adapters is there too

    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    from accel_ddp.sources import models

    alone = export.from_checkpoint(str(folder), str(tmp_path / "adapters"), merge="off")
    merged = export.from_checkpoint(str(folder), str(tmp_path / "merged"), merge="on")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        outputs = [AutoModelForCausalLM.from_pretrained(place)(ids).logits for place in (folder / "model", merged)]
        below = AutoModelForCausalLM.from_pretrained(models.locate("builtin:tiny-llama", RecipeConfig.cache_dir))
        below.load_adapter(str(alone))
        outputs.append(below(ids).logits)
        for place in (alone, folder / "model" / "adapter"):
            outputs.append(AutoPeftModelForCausalLM.from_pretrained(place)(ids).logits)
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], atol=1e-5, rtol=1e-5)

    refused = run_ranks(
        1, script, *options("sft with adapters"), "--resume", folder / "step_00000004", "--output_dir", tmp_path / "other",
        "--model", folder / "model", "--allow_config_change",
    )  # fmt: skip
    assert refused.codes == [2]
    assert "were trained on other weights" in refused.text
    shutil.rmtree(folder)
