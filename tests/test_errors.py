"""Bad input ends every rank with exit code 2 and a clear message before training; a run that fails reports where."""

import json
import os
import shutil
import signal
import sys
import time

import datasets
import pytest
from PIL import Image

from tests.conftest import (
    BIN,
    PROGRAMS,
    ROOT,
    Running,
    clean_environment,
    free_port,
    node_environments,
    rank_environments,
    run_all,
    run_ranks,
)

CLASSIFY = ROOT / "recipes" / "classify.py"


@pytest.fixture(scope="module")
def messages(tmp_path_factory, tiny_model, cache) -> list[dict[str, str]]:
    """Return the message of each of two ranks for each bad input. One launch is used for all inputs."""
    folder = tmp_path_factory.mktemp("bad")

    def file(name: str, text: str) -> str:
        (folder / name).write_text(text)
        return str(folder / name)

    def lines(name: str, *rows: dict) -> str:
        return file(name, "".join(json.dumps(row) + "\n" for row in rows))

    def chat(question: str, answer: str | None) -> dict:
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    long_answers = lines("long.jsonl", *[{"prompt": "why " * (i % 2 * 20 + 1), "answer": "because " * 30} for i in range(20)])
    latin = str(folder / "latin.txt")
    (folder / "latin.txt").write_bytes(b"a text\n" * 50 + b"caf\xe9\n")
    (folder / "latin.csv").write_bytes(b"text,label\n" + b"a text,a\nb text,b\n" * 9 + b"caf\xe9,a\n")
    photos = str(folder / "photos")
    for i in range(12):
        (folder / "photos" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), i * 20).save(folder / "photos" / "ab"[i % 2] / f"{i}.png")
    (folder / "photos" / "a" / "torn.png").write_bytes((folder / "photos" / "a" / "0.png").read_bytes()[:40])
    photo, labels = (folder / "photos" / "a" / "0.png").read_bytes(), [None if i == 6 else i % 2 for i in range(20)]
    datasets.Dataset.from_dict({"image": [photo] * 20, "label": labels}).to_parquet(folder / "photos.parquet")
    good = file("good.csv", "text,label\n" + "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(20)))
    labels = {4: "", 17: ""}  # one of these rows may be set aside for the evaluation
    unlabelled = file("gaps.csv", "text,label\n" + "".join(f"text {i},{labels.get(i, 'ab'[i % 2])}\n" for i in range(20)))
    unnumbered = file("numbers_gap.csv", "text,label\n" + "".join(f"text {i},{'' if i == 4 else i % 2}\n" for i in range(20)))
    no_tokenizer = folder / "no_tokenizer"
    no_tokenizer.mkdir()
    (no_tokenizer / "config.json").write_text('{"model_type": "bert"}')
    (folder / "empty_folder").mkdir()
    no_weights = folder / "no_weights"  # the config is enough to refuse the model
    shutil.copytree(tiny_model, no_weights, ignore=shutil.ignore_patterns("*.safetensors"))
    decoder = folder / "decoder"  # its tokenizer has no chat template
    shutil.copytree(no_weights, decoder)
    (decoder / "config.json").write_text('{"model_type": "gpt2"}')
    longer = folder / "longer"  # its tokenizer allows more tokens than its 512 positions
    shutil.copytree(no_weights, longer)
    settings = json.loads((longer / "tokenizer_config.json").read_text())
    (longer / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 4096}))
    datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}).save_to_disk(folder / "saved")
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    cases = {
        "missing file": {"train_file": str(folder / "nowhere.csv")},
        "unknown ending": {"train_file": file("data.xlsx", "x")},
        "empty file": {"train_file": file("empty.csv", "")},
        "header only": {"train_file": file("header.csv", "text,label\n")},
        "not json": {"train_file": file("broken.json", "{oh no")},
        "eval without train": {"eval_file": good},
        "missing column": {"train_file": good, "text_column": "review"},
        "missing label column": {"train_file": good, "label_column": "stars"},
        "label not in train": {"train_file": good, "eval_file": file("c.csv", "text,label\nx,a\ny,c\n")},
        "text is not text": {"train_file": lines("numbers.jsonl", *[{"text": i, "label": i % 2} for i in range(20)])},
        "text is missing": {"train_file": file("gap.jsonl", '{"text": "x", "label": 0}\n{"text": null, "label": 1}\n' * 9)},
        "label is missing": {"train_file": unlabelled},
        "number is missing, skipped": {"train_file": unnumbered, "skip_broken": True},
        "a long text, then none": {
            "recipe": "sft",
            "model": "builtin:tiny-llama",
            "max_length": 16,
            "train_file": lines("long_texts.jsonl", *[{"text": "why " * 50}] * 4, {"text": ""}, {"text": "why " * 50}),
            "eval_file": lines("short_text.jsonl", {"text": "why not"}),
        },
        "one cell is no number": {
            "train_file": file("cell.csv", "text,label\n" + "".join(f"a,{i}\n" for i in range(20)) + "a,n/a\n,3\n"),
            "eval_file": file("cells.csv", "text,label\na,1\nb,\n"),
            "num_labels": 1,
        },
        "no header": {"train_file": file("no_header.csv", "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(20)))},
        "folder without data": {"train_file": str(folder / "empty_folder")},
        "broken line": {"train_file": file("line.jsonl", '{"text": "x", "label": 0}\n' * 5 + '{"text": "x",\n')},
        "unknown tag": {
            "recipe": "tag",
            "train_file": file("x.conll", "a O\nb B-X\n\n" * 9),
            "eval_file": file("y.conll", "a O\n\nb B-Y\n"),
        },
        "score out of range": {
            "recipe": "embed",
            "score_column": "score",
            "train_file": lines("sts.jsonl", *[{"anchor": "a", "positive": "b", "score": i / 10} for i in range(13)]),
            "eval_file": lines("sts_eval.jsonl", {"anchor": "a", "positive": "b", "score": "high"}),
        },
        "classes of a sample": {"train_file": good, "max_train_items": 1, "eval_file": good},
        "label is missing, skipped": {"train_file": unlabelled, "skip_broken": True},
        "semicolons": {"train_file": file("semicolons.csv", "text;label\n" + "a text;a\n" * 9)},
        "table of Excel": {"train_file": latin.replace(".txt", ".csv")},
        "labels of two kinds": {
            "train_file": lines("kinds.jsonl", *[{"text": "x", "label": i if i < 9 else "a"} for i in range(20)])
        },
        "evaluation without answers": {
            "recipe": "sft",
            "model": "builtin:tiny-llama",
            "train_file": lines("pairs.jsonl", *[{"prompt": "why", "answer": "because"}] * 9),
            "eval_file": lines("prompts.jsonl", {"prompt": "why"}),
        },
        "misspelt role": {
            "recipe": "sft",
            "model": "builtin:tiny-llama",
            "train_file": lines("roles.jsonl", *[chat("Hi", "Hello")] * 9, {"messages": [{"role": "usr", "content": "Hi"}]}),
            "eval_file": lines("answers.jsonl", chat("Hi", "Hello")),
        },
        "metric that is not measured": {"train_file": good, "best_metric": "f1"},
        "no tokenizer": {"train_file": good, "model": str(no_tokenizer)},
        "empty model folder": {"train_file": good, "model": str(folder / "empty_folder")},
        "no model folder": {"train_file": good, "model": "./nowhere"},
        "hub model, no network": {"train_file": good, "model": "someone/some-model"},
        "hub data, no network": {"dataset": "someone/some-data"},
        "built-in model": {"train_file": good, "model": "builtin:gpt-7"},
        "model for another task": {"recipe": "seq2seq", "train_file": lines("s2.jsonl", *[{"source": "1", "target": "one"}] * 9)},
        "encoder as language model": {
            "recipe": "sft",
            "model": str(no_weights),
            "train_file": lines("asked.jsonl", *[{"prompt": "why", "answer": "because"}] * 9),
        },
        "decoder as encoder": {"recipe": "embed", "dataset": "builtin:docstrings", "model": "builtin:tiny-t5"},
        "first token of a decoder": {
            "recipe": "embed",
            "model": "builtin:tiny-llama",
            "pooling": "cls",
            "train_file": lines("found.jsonl", *[{"anchor": "1", "positive": "one"}] * 9),
        },
        "tool calls": {
            "recipe": "sft",
            "model": "builtin:tiny-llama",
            "train_file": lines(
                "calls.jsonl", *[chat("Hi", "Hello")] * 9, {"messages": [*chat("Hi", "Hello")["messages"], call]}
            ),
            "eval_file": lines("no_calls.jsonl", chat("Hi", "Hello")),
        },
        "built-in data": {"dataset": "builtin:everything"},
        "split": {"dataset": "builtin:rotten_tomatoes_small", "eval_split": "testing"},
        "file as dataset": {"dataset": good},
        "too long": {"train_file": good, "max_length": 1000},
        "too long for the tokenizer and the model": {"train_file": good, "model": str(longer), "max_length": 5000},
        "dataset of save_to_disk": {"dataset": str(folder / "saved")},
        "scale of no adapters": {"train_file": good, "lora_alpha": 32},
        "dropout of no adapters": {"train_file": good, "lora_dropout": 0.1},
        "freeze": {"train_file": good, "freeze": ["encodr"]},
        "freeze all": {"train_file": good, "freeze": ["."]},
        "adapters": {"train_file": good, "lora_r": 4, "lora_targets": ["qery"]},
        "targets of no adapters": {"train_file": good, "lora_targets": ["query"]},
        "quantised": {"train_file": good, "lora_r": 4, "quantize": "4bit"},
        "other number of labels": {"train_file": good, "num_labels": 3},
        "label is no number": {"train_file": good, "num_labels": 1},
        "skipped": {"train_file": str(folder / "gap.jsonl"), "skip_broken": True},
        "no such columns": {"recipe": "sft", "train_file": good, "model": "builtin:tiny-llama", "prompt_column": "ask"},
        "no known columns": {"recipe": "sft", "train_file": file("x.csv", "a,b\n1,2\n" * 9), "model": "builtin:tiny-llama"},
        "half of a pair": {
            "recipe": "sft",
            "model": "builtin:tiny-llama",
            "prompt_column": "question",
            "train_file": lines("half.jsonl", *[{"question": "why", "text": "because"}] * 9),
        },
        "messages are texts": {
            "recipe": "sft",
            "model": "builtin:tiny-llama",
            "train_file": lines("texts.jsonl", *[{"messages": "Hi"}] * 9),
        },
        "answer first": {
            "recipe": "sft",
            "model": "builtin:tiny-llama",
            "train_file": lines("first.jsonl", *[{"messages": chat("Hi", "Hello")["messages"][1:]}] * 9),
        },
        "no template": {
            "recipe": "sft",
            "model": str(decoder),
            "train_file": lines("chat.jsonl", *[chat("Hi", "Hello")] * 9),
        },
        "encoder without a template": {"recipe": "sft", "train_file": str(folder / "chat.jsonl")},
        "no answer": {
            "recipe": "sft",
            "model": "builtin:tiny-llama",
            "train_file": lines("silent.jsonl", *[chat("Hi", "Hello")] * 9, chat("Hi", " "), chat("Hi", None)),
        },
        "answers are cut": {
            "recipe": "sft",
            "model": "builtin:tiny-llama",
            "max_length": 24,
            "train_file": long_answers,
            "skip_broken": True,
        },
        "no answer is left": {"recipe": "sft", "model": "builtin:tiny-llama", "max_length": 4, "train_file": long_answers},
        "misaligned": {
            "recipe": "tag",
            "train_file": lines(
                "tags.jsonl", *[{"tokens": ["a", "b"], "tags": ["O", "B-X"]}] * 9, {"tokens": ["a", "b"], "tags": ["O"]}
            ),
        },
        "one column": {"recipe": "tag", "train_file": file("one.conll", "a O\nb B-X\nlonely\n")},
        "no target": {
            "recipe": "seq2seq",
            "model": "builtin:tiny-t5",
            "train_file": lines("s.jsonl", *[{"source": "1", "target": "one"}] * 9, {"source": "2", "target": ""}),
        },
        "one side": {
            "recipe": "embed",
            "train_file": lines("p.jsonl", *[{"anchor": "1", "positive": "one"}] * 9, {"anchor": "2", "positive": None}),
        },
        "no negatives": {"recipe": "embed", "train_file": str(folder / "p.jsonl"), "global_batch_size": 1},
        "negatives without an anchor": {
            "recipe": "embed",
            "train_file": str(folder / "found.jsonl"),
            "negatives_file": lines("n.jsonl", {"anchor": "1", "negative": ""}),
        },
        "scores and mining": {"recipe": "embed", "train_file": good, "score_column": "x", "mine_negatives": 2},
        "margin without mining": {"recipe": "embed", "train_file": good, "mine_margin": 0.1},
        "bad candidates": {
            "recipe": "rerank",
            "train_file": lines(
                "lists.jsonl",
                *[{"query": "q", "docs": ["a", "b"], "labels": [1, 0]}] * 9,
                *(
                    {"query": "q", "docs": ["a"], "labels": [1]},
                    {"query": "q", "docs": ["a", "b"], "labels": [0, 0]},
                    {"query": "q", "docs": ["a", "b"], "labels": [2, 0]},
                    {"query": "q", "docs": ["a", "b"], "labels": [1]},
                    {"query": "", "docs": ["a", "b"], "labels": [1, 0]},
                ),
            ),
        },
        "pairs as lists": {
            "recipe": "rerank",
            "loss": "listwise",
            "train_file": lines("one.jsonl", *[{"query": f"q{i % 4}", "passage": "p", "label": int(i < 2)} for i in range(12)]),
        },
        "queries that cannot be ranked": {
            "recipe": "rerank",
            "train_file": str(folder / "one.jsonl"),
            "eval_file": str(folder / "one.jsonl"),
        },
        "no candidates": {"recipe": "rerank", "train_file": good},
        "answer that is too long": {
            "recipe": "reward",
            "model": "builtin:tiny-llama",
            "max_length": 24,
            "train_file": lines(
                "longer.jsonl",
                *[{"prompt": "Hi", "chosen": f"yes {i}", "rejected": "no"} for i in range(9)],
                {"prompt": "Hi", "chosen": "word " * 40, "rejected": "no"},
            ),
        },
        "margin is no number": {
            "recipe": "reward",
            "model": "builtin:tiny-llama",
            "train_file": lines(
                "margins.jsonl",
                *[
                    {"prompt": "Hi", "chosen": "yes", "rejected": "no", "margin": "x"},
                    *[{"prompt": "Hi", "chosen": f"yes {i}", "rejected": "no", "margin": "1"} for i in range(9)],
                ],
            ),
        },
        "no pairs": {"recipe": "reward", "model": "builtin:tiny-llama", "train_file": good},
        "rewards of an encoder": {"recipe": "reward", "train_file": good},
        "too many dimensions": {"recipe": "embed", "train_file": str(folder / "found.jsonl"), "matryoshka": [999]},
        "broken image": {"recipe": "images", "model": "mini-resnet", "train_file": photos},
        "broken image skipped": {"recipe": "images", "model": "mini-resnet", "train_file": photos, "skip_broken": True},
        "image without a label": {"recipe": "images", "model": "mini-resnet", "train_file": str(folder / "photos.parquet")},
        "nothing to mask": {"recipe": "pretrain_mlm", "model": "builtin:tiny-bert", "train_file": file("blank.txt", " \n\n \n")},
        "not utf-8": {"recipe": "pretrain_mlm", "model": "builtin:tiny-bert", "train_file": latin},
        # The last one, because only the main rank fails: the other rank is then in a barrier that the main rank never enters.
        "metric of the hub, no network": {"train_file": good, "metrics": ["matthews_corelation"]},
    }
    path = folder / "cases.json"
    path.write_text(json.dumps({name: {"model": tiny_model, **case} for name, case in cases.items()}))
    run_ranks(2, PROGRAMS / "without_hub.py", PROGRAMS / "bad_data.py", "--cases", path, "--output_dir", folder / "run").well()
    return [json.loads((folder / f"cases.json.{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("case", "words"),
    {
        "missing file": ["nowhere.csv", "no such file"],
        "unknown ending": [
            "data.xlsx: files ending with '.xlsx' cannot be read. Use .csv, .tsv, .json, .jsonl, .parquet, .arrow."
        ],
        "empty file": ["empty.csv", "is empty"],
        "header only": ["header.csv", "has no rows"],
        "not json": ["broken.json", "cannot be read as json: line 1 is not JSON", "at 'oh no', column 2"],
        "eval without train": ["without --train_file"],
        "missing column": ["--text_column review", "text, label"],
        "missing label column": ["--label_column stars", "text, label"],
        "label not in train": [
            "1 of 2 rows of",
            "c.csv",
            "it has a label that does not occur in the training data (a, b): row 2 (line 3, 'c')",
        ],
        "text is not text": ["--text_column text: contains", "not text"],
        "text is missing": [
            "9 of 18 rows of",
            "gap.jsonl cannot be used:\n  its text is empty: 9 rows, the first are row 2, row 4, row 6",
            "--skip_broken",
        ],
        "label is missing": ["2 of 20 rows of", "it has no label: row 5 (line 6), row 18 (line 19)", "--skip_broken"],
        "one cell is no number": [
            "2 of 22 rows of",
            "cell.csv cannot be used:\n  its label is not a finite number: row 21 (line 22, 'n/a')\n",
            "\n  its text is empty: row 22 (line 23)\n",
            "1 of 2 rows of",
            "cells.csv cannot be used:\n  it has no label: row 2 (line 3)\nCorrect them",
        ],
        "no header": [
            "--text_column text",
            "The data have: text 0, a. These look like values: the table appears to have no header.",
        ],
        "folder without data": ["empty_folder: the folder contains no files that can be read. It is empty."],
        "broken line": ["line.jsonl: cannot be read as json: line 6 is not JSON: Expecting property name"],
        "unknown tag": [
            "1 of 2 rows of",
            "it has a tag that does not occur in the training data (B-X, O): row 2 (line 3, 'B-Y')",
        ],
        "score out of range": [
            "2 of 13 rows of",
            "its score is not between --min_score 0 and --max_score 1, the range of your scores: row 12 (1.1), row 13 (1.2)",
            "its score is not a finite number: row 1 ('high')",
        ],
        "a long text, then none": ["1 of 6 rows of", "its text is empty: row 5\n", "long_texts.jsonl"],
        "semicolons": ["text;label", "separated by ';'", ".tsv"],
        "table of Excel": ["latin.csv", "not UTF-8", "Save it"],
        "metric of the hub, no network": ["--metrics matthews_corelation", "cannot be reached", "mean matthews_correlation?"],
        "metric that is not measured": ["does not measure f1. Did you mean macro_f1?"],
        "labels of two kinds": ["--label_column label", "contains whole numbers and texts"],
        "evaluation without answers": ["The evaluation data lack the column 'answer'", "They have: prompt"],
        "misspelt role": ["a message has the role 'usr' (did you mean 'user'?): row 10"],
        "no tokenizer": ["no tokenizer"],
        "empty model folder": ["no config.json"],
        "no model folder": ["no such folder"],
        "hub model, no network": ["someone/some-model", "no network", "path of a folder"],
        "hub data, no network": ["someone/some-data", "no network", "--train_file"],
        "built-in model": ["builtin:all-MiniLM-L6-v2"],
        "model for another task": ["is not an encoder-decoder model (bert)", "google-t5/t5-small"],
        "encoder as language model": ["is an encoder (bert)", "would read the answers", "recipes/pretrain_mlm.py"],
        "decoder as encoder": ["is an encoder-decoder model (t5)", "BAAI/bge-small-en-v1.5"],
        "first token of a decoder": ["--pooling cls: --model builtin:tiny-llama: LlamaModel is causal"],
        "tool calls": ["does not write `tool_calls` (remove it, or give another --chat_template): row 10"],
        "built-in data": ["builtin:rotten_tomatoes"],
        "split": ["testing", "train, validation"],
        "file as dataset": ["--train_file"],
        "too long": ["--max_length 1000", "at most 512"],
        "too long for the tokenizer and the model": ["--max_length 5000", "at most 512"],
        "dataset of save_to_disk": ["--dataset ", "/saved: It was written with `save_to_disk`", "Use --train_file "],
        "scale of no adapters": ["--lora_alpha 32: needs --lora_r"],
        "dropout of no adapters": ["--lora_dropout 0.1: needs --lora_r"],
        "freeze": ["encodr", "bert.encoder"],
        "freeze all": ["nothing to train"],
        "adapters": ["--lora_targets qery", "query"],
        "targets of no adapters": ["needs --lora_r"],
        "quantised": ["bitsandbytes", "no GPU"],
        "other number of labels": ["--num_labels 3", "2 labels (a, b)"],
        "label is no number": ["no training row contains a number, for example", "leave --num_labels out"],
        "no such columns": ["--prompt_column ask", "text, label"],
        "no known columns": ["--messages_column", "--prompt_column", "--text_column", "a, b"],
        "half of a pair": ["--prompt_column question", "--answer_column"],
        "messages are texts": ["9 of 9 rows of", "the column messages cannot be read as JSON", "No training rows are left."],
        "answer first": ["it has only answers"],
        "no template": ["no chat template", "--chat_template plain"],
        "encoder without a template": ["is an encoder (bert)"],
        "no answer": ["2 of 11 rows of", "an answer is empty: row 10 (message 2), row 11 (message 2)", "--skip_broken"],
        "no answer is left": ["its prompt fills --max_length 4", "No training rows are left."],
        "misaligned": ["another number of tags than of tokens: row 10 (2 tokens but 1 tags)", "--skip_broken"],
        "one column": ["one.conll", "line 3", "'lonely'"],
        "no target": ["its target is empty"],
        "one side": ["its positive is empty"],
        "no negatives": ["no negatives"],
        "negatives without an anchor": ["n.jsonl, row 1 has a cell that is empty or not text ('')", "--skip_broken"],
        "scores and mining": ["--mine_negatives 2: cannot be used with --score_column x"],
        "margin without mining": ["--mine_margin 0.1: needs --mine_negatives"],
        "bad candidates": [
            "5 of 14 rows of",
            "lists.jsonl cannot be used",
            "needs two or more candidates, and it has 1 candidate: row 10\n",
            "none of its candidates is relevant: row 11\n",
            "its labels is not 0 or 1 (for other numbers, use --score_column labels): row 12",
            "its docs and labels have different lengths: row 13 (2 and 1)",
            "its query is empty: row 14\n",
        ],
        "pairs as lists": ["--loss listwise: needs all candidates of a query in one row", "--loss binary"],
        "no candidates": ["--query_column query: there is no such column. The data have: text, label"],
        "answer that is too long": [
            "1 of 10 rows of",
            "is longer than --max_length 24 (the longest has",
            "row 10",
            "--skip_broken",
        ],
        "margin is no number": ["its margin is not a finite number: row 1 ('x')"],
        "rewards of an encoder": ["is an encoder (bert), and rewards are read at the last token", "recipes/rerank.py"],
        "no pairs": ["--chosen_column chosen: there is no such column"],
        "too many dimensions": ["--matryoshka 999", "16 dimensions"],
        "broken image": ["torn.png", "--skip_broken"],
        "image without a label": ["it has no label: row 7\n", "photos.parquet", "--skip_broken"],
        "nothing to mask": ["empty"],
        "not utf-8": ["latin.txt", "UTF-8", "353"],
    }.items(),
)
def test_bad_input_is_named_on_every_rank(messages, case, words):
    assert messages[0][case] == messages[1][case]
    for word in words:
        assert word in messages[0][case], messages[0][case]
    assert len(messages[0][case].splitlines()) == 1 or " cannot be used:\n  " in messages[0][case]


@pytest.mark.parametrize(
    ("case", "words"),
    {
        "skipped": ["--skip_broken: ", "9 of 18 rows of", "its text is empty: 9 rows, the first are row 2"],
        "number is missing, skipped": ["--skip_broken: 1 of 20 rows of", "it has no label: row 5 (line 6)"],
        "label is missing, skipped": ["--skip_broken: 2 of 20 rows of", "it has no label: row 5 (line 6), row 18 (line 19)"],
        "classes of a sample": ["1 of 2 classes has no training rows and cannot be learned: '", "' (10 evaluation rows)."],
        "answers are cut": ["its prompt fills --max_length 24", " rows are longer and lose the end of their answer."],
        "broken image skipped": ["--skip_broken: 1 of ", "torn.png"],
        "queries that cannot be ranked": [
            "2 of 4 evaluation queries have no relevant",
            "4 of 4 evaluation queries are in the training",
        ],
    }.items(),
)
def test_the_main_rank_warns_about_dropped_rows(messages, case, words):
    for rank in (0, 1):
        assert messages[rank][case].startswith("no error")
    assert "warning: " in messages[0][case]
    for word in words:
        assert word in messages[0][case], messages[0][case]
    assert words[0] not in messages[1][case], "one warning for all ranks"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stpes", "3"], "--steps"),
        (["--global_batch_size", "15"], "14 or 16"),
        (["--report_to", "wandbb"], "must be wandb, tensorboard or trackio"),
        (["--mixed_precision", "fp16"], "needs a GPU"),
        (["--comm_hook", "bf16"], "needs NCCL"),
        (["--comm_hook", "powersgd"], "over gloo"),
        (["--static_graph", "--micro_batch_size", "2"], "--static_graph"),
        (["--output_dir", "/proc/none"], "cannot be written"),
        (["--train_file", "nowhere.csv"], "no such file"),
        pytest.param(  # tests/test_memory.py has it without ranks
            ["--gpu_memory_gb", "1"], "does not fit with DDP. With CUDA it needs 1.6 GiB per GPU besides activations",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_every_rank_ends_with_code_2_and_one_message_without_a_traceback(arguments, words, tmp_path):
    ended = run_ranks(2, CLASSIFY, "--output_dir", tmp_path / "run", *arguments)
    assert ended.codes == [2, 2], ended.text
    assert words in ended.text
    assert "Traceback" not in ended.text
    assert ended.text.count("error:") == 1, "one message per node"


def goes_wrong(tmp_path, how: str):
    return run_ranks(2, PROGRAMS / "goes_wrong.py", "--how", how, "--output_dir", tmp_path / "run")


def test_a_loss_that_is_not_a_number_is_reported_with_step_and_rank(tmp_path):
    ended = goes_wrong(tmp_path, "nan")
    assert ended.codes == [2, 2]
    assert ended.text.count("error:") == ended.text.count("error: step 5: the loss is nan on rank 1 on") == 1
    assert "Traceback" not in ended.text


@pytest.mark.parametrize("how", ["memory", "host memory"])
def test_out_of_memory_names_the_option_to_lower(tmp_path, how):
    ended = goes_wrong(tmp_path, how)
    assert ended.codes == [2, 2], "the other rank does not wait forever"
    assert ended.text.count("error:") == ended.text.count("error: rank 1 (") == 1
    assert "out of memory at step 5, in forward with --micro_batch_size 2. Use --micro_batch_size 1 " in ended.text
    assert "Traceback" not in ended.text


def test_an_exception_on_one_rank_ends_all_and_names_it(tmp_path):
    ended = goes_wrong(tmp_path, "exception")
    assert ended.codes == [1, 1]
    assert ended.text.count("error: RANK_FAILED: rank 1 (") == 1
    assert "at step 5, in forward: ValueError: a bug in the user's loss" in ended.text
    assert ended.text.count("Traceback") == 1, "only of the rank that failed"


def test_a_rank_that_calls_sys_exit_is_not_reported_as_killed(tmp_path):
    ended = goes_wrong(tmp_path, "exit")
    assert ended.codes == [3, 3], ended.text
    assert "error: RANK_FAILED: rank 1 (" in ended.text
    assert "called sys.exit(3)" in ended.text
    assert "died" not in ended.text
    assert "Traceback" not in ended.text


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory) -> list[dict]:
    """Return what tests/programs/mistakes.py finds on each of two ranks."""
    folder = tmp_path_factory.mktemp("mistakes")
    run_ranks(2, PROGRAMS / "mistakes.py", "--out", folder / "found", "--output_dir", folder / "runs").well()
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("mistake", "words"),
    {
        "scheduler": ["The learning rate was changed during an update", "Remove the scheduler"],
        "backward": ["`terms` calls backward() itself", "create_graph=True"],
        "frozen": ["requires_grad of 1.weight was turned off during training", "--freeze"],
        "sum": ["`terms` returned a loss of shape [] for 1 item. Return the loss of each item, without .sum()"],
        "tensor": ["`terms` returned Tensor. Return {'loss': the loss of each item}"],
        "float": ["`terms` returned a loss of the type float", "without .item()"],
        "no_grad": ["`terms` returned a loss without a gradient", "no_grad()"],
        "no items": ["step 1: `count` returned 0 items for the global batch", "how many items the loss is of"],
        "no items on the device": ["step 1: `count` returned 0 items for the global batch"],
        "LBFGS": ["LBFGS: ", "needs a closure", "accel_ddp.optim.build(model, cfg)"],
        "iterable": ["The dataset (Endless) needs __len__ and __getitem__"],
    }.items(),
)
def test_a_mistake_in_a_recipe_is_one_line_on_every_rank(mistakes, mistake, words):
    assert mistakes[0][mistake] == mistakes[1][mistake]
    for word in words:
        assert word in mistakes[0][mistake]
    assert len(mistakes[0][mistake].splitlines()) == 1


def test_items_may_have_weights_below_one(mistakes):
    assert mistakes[0]["weights"] == "no error"


def test_the_schedule_scales_the_learning_rates_of_an_optimizer_also_after_a_resume(mistakes):
    """The optimizer has groups at 0.1 and 0.001, and --lr is 0.05. The first number is the one that is logged."""
    for found in mistakes:
        rates = {step: [(7 - step) / 6 * rate for rate in (0.1, 0.1, 0.001)] for step in range(1, 7)}
        assert [found["rates"][str(step)] for step in rates] == [pytest.approx(row) for row in rates.values()]
        assert found["resumed rates"] == {step: row for step, row in found["rates"].items() if step > "3"}
        assert found["sum after resumed rates"] == found["sum after rates"]


def test_a_second_ctrl_c_ends_all_ranks_with_one_line(tmp_path):
    """This includes a rank that cannot finish its step, because it waits in a collective for a rank that hangs."""
    command = [sys.executable, PROGRAMS / "goes_wrong.py", "--how", "endless", "--output_dir", tmp_path / "run"]
    ranks = Running([command] * 2, rank_environments(2))
    ranks.until("now it hangs", of=1)
    time.sleep(1)  # rank 0 is in the all-reduce by now
    for rank in ranks.processes:
        os.killpg(rank.pid, signal.SIGINT)  # as a terminal does
    ranks.until("Press Ctrl-C again to kill the job at once")
    time.sleep(0.5)  # a second one within 0.2 s counts as the same Ctrl-C
    for rank in ranks.processes:
        os.killpg(rank.pid, signal.SIGINT)
    ended = ranks.ended()
    assert ended.codes == [130, 130]
    assert ended.text.count("Press Ctrl-C again to kill the job at once") == 1
    assert ended.text.count("interrupted: received a second Ctrl-C") == 1
    assert ended.text.count("interrupted") == 1
    assert "Traceback" not in ended.text


def test_nodes_with_different_data_or_precision_are_rejected_and_need_no_shared_disk(tmp_path, tiny_model, cache):
    """Two ranks run as two nodes, each in its own folder, as on separate disks."""
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
        rows = [f"text {i},{i % 2}" for i in range(20)] + [f"only on {node},0"]
        (tmp_path / node / "train.csv").write_text("\n".join(["text,label", *rows]))

    def both(*arguments, **of_second):
        environments = node_environments(2)
        environments[1].update(of_second)
        command = [
            sys.executable,
            CLASSIFY,
            "--model",
            tiny_model,
            "--steps",
            4,
            "--save_every",
            2,
            "--output_dir",
            "run",
            *arguments,
        ]
        return run_all([command] * 2, environments, cwd=[tmp_path / "a", tmp_path / "b"])

    ended = both("--train_file", "train.csv")
    assert ended.codes == [2, 2]
    assert "content of --train_file differs" in ended.texts[0]
    assert "content of --train_file differs" in ended.texts[1]
    ended = both("--train_file", "train.csv", "--preflight", "off")
    assert ended.codes == [2, 2]
    assert "the data on rank 1 (" in ended.text
    ended = both(ACCELERATE_MIXED_PRECISION="bf16")
    assert ended.codes == [2, 2]
    assert "--mixed_precision differs" in ended.text

    (tmp_path / "a" / "train.csv").write_text((tmp_path / "b" / "train.csv").read_text())
    # The folder of the runs that were refused above is used again.
    both("--train_file", "train.csv").well()
    assert (tmp_path / "a" / "run" / "step_00000004").exists()
    assert not (tmp_path / "b" / "run").exists()
    straight = (tmp_path / "a" / "run" / "step_00000004" / "model.safetensors").read_bytes()
    # As if the nodes had been swapped: only rank 1 has a checkpoint, and sends it to rank 0.
    (tmp_path / "b" / "run").mkdir()
    shutil.copytree(tmp_path / "a" / "run" / "step_00000002", tmp_path / "b" / "run" / "step_00000002")
    shutil.rmtree(tmp_path / "a" / "run")
    ended = both("--train_file", "train.csv")
    assert ended.codes == [2, 2]
    for text in ended.texts:  # without --resume, the run would begin at step 0
        assert "--output_dir run holds another run (step_00000002) on " in text
        assert "but none on the main node. Add --resume" in text
    ended = both("--train_file", "train.csv", "--resume").well()
    assert "resumed at step 2 from run/step_00000002 of rank 1" in ended.texts[0]
    assert (tmp_path / "a" / "run" / "step_00000004" / "model.safetensors").read_bytes() == straight


def test_nodes_with_different_options_are_rejected(tmp_path):
    commands = [
        [sys.executable, PROGRAMS / "goes_wrong.py", "--lr", lr, "--output_dir", tmp_path / "run"] for lr in ("0.1", "0.2")
    ]
    ended = run_all(commands, rank_environments(2))
    assert ended.codes == [2, 2]
    assert "--lr differs: 0.1 on rank 0" in ended.text
    assert "0.2 on rank 1" in ended.text


@pytest.mark.parametrize(
    # The code 1 is that of Accelerate's launcher of a single process, for any failure. The code 2 comes from the preflight.
    ("launch", "words", "code"),
    [
        (["--cpu", "--num_processes", "2"], "asked for 2 processes but started 1", 1),
        (["--config_file", "multi_cpu.yaml"], "write `distributed_type: MULTI_GPU` and `use_cpu: false` into your config", 1),
        pytest.param(  # tests/test_doctor.py checks it on two nodes
            ["--multi_gpu", "--num_machines", "2", "--num_processes", "3", "--machine_rank", "0"],
            "is not a multiple of num_machines 2",
            2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_launch_with_another_number_of_processes_than_requested_is_rejected(launch, words, code, tmp_path):
    """In these cases `accelerate launch` alone starts separate trainings with exit code 0."""
    lines = ("compute_environment: LOCAL_MACHINE", "distributed_type: MULTI_CPU", "num_processes: 2", "use_cpu: true")
    (tmp_path / "multi_cpu.yaml").write_text("\n".join(lines))
    places = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())] if "--num_machines" in launch else []
    nodes = [0, 1] if places else [0]
    commands = [
        [BIN / "accelerate-launch", *[str(node) if word == "0" else word for word in launch], *places, CLASSIFY, "--steps", "1",
         "--output_dir", str(tmp_path / "run")]
        for node in nodes
    ]  # fmt: skip
    ended = run_all(commands, [clean_environment(GLOO_SOCKET_IFNAME="lo")] * len(nodes), cwd=tmp_path)
    assert ended.codes == [code] * len(nodes), ended.text
    for text in ended.texts:
        assert words in text, text[-3000:]
        assert text.count("error: ") == 1, "one message per node"
