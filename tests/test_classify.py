"""Tests of recipes/classify.py as users start it: one process, two ranks, two nodes, torchrun, and the written-out loop.

They compare the weights, the logs and the exported models.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from accel_ddp.exporting import evaluate_command
from accel_ddp.exporting.export import read_facts
from accel_ddp.records.eval_tables import file_of, read_tables
from tests.conftest import BIN, PROGRAMS, ROOT, clean_environment, run_all, run_ranks, two_node_commands
from tests.log_schema import names_in_log, require_documented, require_golden

CLASSIFY = ROOT / "recipes" / "classify.py"
EXPORT = [sys.executable, BIN / "accel-ddp", "export"]
SENTENCES = {
    "good": ["a fine film", "a warm and funny story", "great acting"],
    "bad": ["a dull film", "a cold mess", "poor acting"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Return a training file of 90 rows and an evaluation file of 31 rows, which two ranks cannot share equally."""
    folder = tmp_path_factory.mktemp("data")
    made = {}
    for name, number in (("train", 90), ("eval", 31)):
        lines = [f"{SENTENCES[label][i % 3]} number {i},{label}" for i in range(number) for label in [("good", "bad")[i % 2]]]
        made[name] = folder / f"{name}.csv"
        made[name].write_text("\n".join(["review,verdict", *lines]) + "\n")
    return made


@pytest.fixture(scope="module")
def arguments(files, tiny_model, cache) -> list[str]:
    """Return the options that all runs share.

    The optimizer is SGD, because AdamW enlarges rounding errors where a gradient consists of them (biases of attention keys).
    """
    return [
        "--model", tiny_model, "--train_file", str(files["train"]), "--eval_file", str(files["eval"]),
        "--text_column", "review", "--label_column", "verdict", "--epochs", "2", "--global_batch_size", "16",
        "--micro_batch_size", "4", "--optimizer", "sgd", "--lr", "0.05", "--log_every", "1", "--no_eval_first",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def one(arguments, tmp_path_factory) -> Path:
    """Return the folder of a run with plain `python recipes/classify.py`."""
    folder = tmp_path_factory.mktemp("one") / "run"
    ended = run_ranks(1, CLASSIFY, *arguments, "--output_dir", folder, "--gpu_memory_gb", 24).well()
    (folder.parent / "output.txt").write_text(ended.text)
    return folder


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model" / "model.safetensors")


def events(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def assert_same_run(a: Path, b: Path) -> None:
    for name, value in weights(a).items():
        np.testing.assert_allclose(weights(b)[name], value, atol=1e-5, err_msg=name)
    for of_a, of_b in zip(events(a, "evaluate"), events(b, "evaluate"), strict=True):
        assert of_a["accuracy"] == of_b["accuracy"]
        assert of_a["macro_f1"] == of_b["macro_f1"]
        assert of_a["loss"] == pytest.approx(of_b["loss"], abs=1e-5)


def test_a_run_prints_its_metrics_and_the_folder_of_the_model(one):
    text = (one.parent / "output.txt").read_text()
    assert "16 items per step = 1 node x 1 rank x 4 per micro-batch x 4 micro-batches" in text
    assert "memory per GPU: 0.1 of 24.0 GiB estimated\n" in text
    (start,) = events(one, "start")
    assert start["memory"]["estimated"] >= start["memory"]["weights"] > 0
    assert f"model saved in {one}/model" in text
    assert "evaluation: accuracy " in text
    assert "precision    recall  f1-score" in text
    assert "try:  python -c" in text
    assert "next: train on your own data" not in text, "it has its own data"
    assert "Traceback" not in text
    assert len(events(one, "update")) == 12  # 2 epochs of 90 items in steps of 16: 11.25, rounded up
    assert [event["step"] for event in events(one, "evaluate")] == [6, 12]
    assert re.search(
        r"^time of a step: \d.* ms: data \d+ %, forward and backward \d+ %, optimizer \d+ %, other \d+ %\.$", text, re.M
    )


def test_every_event_and_every_field_of_the_log_is_documented(one):
    require_golden("one rank", names_in_log(one))
    assert require_documented(one) >= {"start", "update", "ranks", "evaluate", "save", "end"}
    last = events(one, "ranks")[-1]
    assert last["communication"][0] < 0.001, "a single rank waits for no other one"
    assert last["system"].keys() >= {"memory", "host_memory"}
    assert 50e6 < last["system"]["memory"][0] < 50e9
    assert 0 < last["system"]["host_memory"][0] <= 1


def test_the_exported_folder_is_an_ordinary_pipeline_with_label_names(one):
    from transformers import pipeline

    scores = pipeline("text-classification", str(one / "model"), top_k=None)(["a warm and funny story number 4"])[0]
    assert {score["label"] for score in scores} == {"good", "bad"}
    assert json.loads((one / "model" / "config.json").read_text())["id2label"] == {"0": "bad", "1": "good"}


def test_two_nodes_with_our_config_learn_the_same_weights(one, arguments, tmp_path):
    """Start the two `accelerate launch` commands of two machines on 127.0.0.1."""
    commands, environments = two_node_commands("--mixed_precision", "no", CLASSIFY, *arguments, "--output_dir", tmp_path / "run")
    ended = run_all([[BIN / "accelerate", "launch", *command] for command in commands], environments).well()
    assert "2 nodes x 1 rank x 4 per micro-batch x 2 micro-batches" in ended.texts[0]
    assert "No rank of 2 has a GPU. Training on CPUs over gloo." in ended.texts[0]
    assert_same_run(one, tmp_path / "run")


def test_two_ranks_learn_the_same_weights_and_the_written_out_loop_learns_bit_identical_ones(one, arguments, tmp_path):
    """Compare one rank with two, and `fit` with recipes/own_loop.py on two ranks."""
    run_ranks(2, CLASSIFY, *arguments, "--output_dir", tmp_path / "classify").well()
    run_ranks(2, ROOT / "recipes" / "own_loop.py", *arguments, "--output_dir", tmp_path / "own_loop").well()
    a, b = weights(tmp_path / "classify"), weights(tmp_path / "own_loop")
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert_same_run(one, tmp_path / "classify")
    require_golden("two ranks", names_in_log(tmp_path / "classify"))


def test_multi_label_data_and_text_pairs_with_further_options(tiny_model, tmp_path, cache):
    """One run reads several labels per text from JSON lines. The other reads pairs of texts with numbers as labels.

    Each run also sets options that the shared arguments do not contain.
    """
    several = tmp_path / "several.jsonl"
    found = [[name for name, every in (("good", 2), ("long", 3)) if i % every == 0] for i in range(60)]
    rows = [{"text": f"film {i} is {' and '.join(names)}", "label": names} for i, names in enumerate(found)]
    several.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("a\tb\tlabel\n" + "".join(f"text {i}\t{('text', 'other')[i % 2]} {i}\t{i % 2 + 3}\n" for i in range(60)))
    common = ["--model", tiny_model, "--steps", 6, "--lr", "1e-3"]
    commands = [
        ["--train_file", several, "--output_dir", tmp_path / "several", "--optimizer", "sgd", "--lr_schedule", "cosine",
         "--gradient_checkpointing", "--mixed_precision", "bf16", "--num_workers", "1", "--freeze", "embeddings", "layer.0",
         "--log_predictions", "2", "--ema_decay", "0.5"],
        ["--train_file", pairs, "--text_column", "a", "--text_pair_column", "b", "--output_dir", tmp_path / "pairs",
         "--eval_every", "1", "--early_stopping_patience", "1", "--best_metric", "loss",
         "--lr", "0"],
    ]  # fmt: skip
    ended = run_all([[sys.executable, CLASSIFY, *common, *command] for command in commands], [clean_environment()] * 2).well()
    assert "good" in ended.texts[0]
    assert "long" in ended.texts[0]
    require_golden("averages and tables", names_in_log(tmp_path / "several"))
    tables = read_tables(tmp_path / "several" / file_of(6))
    assert list(tables) == ["classes", "counts", "predictions"]
    assert [sum(row[1:]) for row in tables["counts"].rows] == [6, 6], "a tenth of 60 rows is set aside"
    shown = [row[1:3] for row in tables["predictions"].rows]
    assert shown
    pairs = [[row["text"], ", ".join(row["label"])] for row in rows]
    assert all(pair in pairs for pair in shown), "texts and labels are of the same row"
    config = json.loads((tmp_path / "several" / "model" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert json.loads((tmp_path / "pairs" / "model" / "config.json").read_text())["id2label"] == {"0": "3", "1": "4"}
    assert [event["step"] for event in events(tmp_path / "pairs", "evaluate")] == [0, 1, 2], "it stops without an improvement"
    before, after = load_file(f"{tiny_model}/model.safetensors"), weights(tmp_path / "several")
    frozen = [name for name in after if "embeddings" in name or "layer.0" in name]
    assert frozen
    assert all(np.array_equal(before[name], after[name]) for name in frozen)
    assert not np.array_equal(
        before["bert.encoder.layer.1.output.dense.weight"], after["bert.encoder.layer.1.output.dense.weight"]
    )


def test_a_run_continues_from_its_newest_checkpoint_and_is_never_overwritten(one, arguments, tmp_path):
    folder, model = tmp_path / "run", tmp_path / "model"
    for place in (folder, model):
        place.mkdir()
        (place / "config.json").write_text('{"model_type": "bert"}')
    for name in (".accel_ddp", "log.jsonl"):  # a run that is refused before its first step leaves these files
        (folder / name).touch()
    refused = run_ranks(1, CLASSIFY, *arguments, "--output_dir", model)
    assert "holds a model (config.json)" in refused.text
    run_ranks(1, CLASSIFY, *arguments, "--steps", 12, "--save_every", 5, "--output_dir", folder, "--keep_last", 3).well()
    for newest in ("step_00000012", "step_00000010"):  # these are missing in a run that was killed after step 5
        shutil.rmtree(folder / newest)
    refused = run_ranks(1, CLASSIFY, *arguments, "--output_dir", folder)
    assert refused.codes == [2]
    assert "holds another run" in refused.text
    assert "--resume" in refused.text
    again = run_ranks(1, CLASSIFY, *arguments, "--steps", 12, "--resume", "--output_dir", folder).well()
    assert "step  6/12" in again.text
    assert "step  5/12" not in again.text
    a, b = weights(one), weights(folder)
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_an_evaluation_of_a_run_repeats_its_metrics_and_leaves_it_as_it_is(one, tmp_path):
    """Start the rank that `accel-ddp evaluate` starts, without its launcher. `test_recipes.py` has the command, for all recipes."""
    from recipes.classify import Config

    files = {path: path.read_bytes() for path in one.rglob("*") if path.is_file()}
    facts = read_facts(one)
    assert (facts["recipe"], facts["options"]["text_column"]) == ("classify.py", "review")
    assert read_facts(one / "model")["options"].keys() == facts["options"].keys()
    config = tmp_path / "options.yaml"
    config.write_text(json.dumps(evaluate_command._options_of(str(one), facts, Config(), [])))
    words = ["--config", config, "--evaluate_only", facts["checkpoint"], "--output_dir", tmp_path / "run"]
    run_ranks(1, CLASSIFY, *words).well()
    found = json.loads((tmp_path / "run" / "evaluations.json").read_text())["12"]
    assert found == {name: events(one, "evaluate")[-1][name] for name in found}
    assert found == facts["metrics"]
    assert files == {path: path.read_bytes() for path in one.rglob("*") if path.is_file()}


def test_the_export_of_a_checkpoint_equals_the_export_of_the_run(one, tmp_path):
    """Compare `accel-ddp export` with OUTPUT_DIR/model. The last checkpoint is exported from a folder that contains nothing else."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(one / "step_00000012", moved)
    places = {"out": moved, "earlier": one / "step_00000006", "newest": one}
    commands = [[*EXPORT, checkpoint, tmp_path / name] for name, checkpoint in places.items()]
    ended = run_all(commands, [clean_environment()] * 3).well()
    assert "exporting the newest checkpoint, step_00000012" in ended.texts[2]
    exported = {path.name for path in (one / "model").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= exported
    for name in exported - {"README.md", "accel_ddp.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (one / "model" / name).read_bytes(), name
    assert load_file(tmp_path / "earlier" / "model.safetensors").keys() == weights(one).keys()
    assert not np.array_equal(
        load_file(tmp_path / "earlier" / "model.safetensors")["classifier.weight"], weights(one)["classifier.weight"]
    )
    from huggingface_hub import ModelCard

    last = events(one, "evaluate")[-1]
    for folder in (one / "model", tmp_path / "newest"):
        card = ModelCard.load(folder / "README.md")
        assert card.data.pipeline_tag == "text-classification"
        assert {r.metric_type: r.metric_value for r in card.data.eval_results}["accuracy"] == round(last["accuracy"], 6)
        for expected in ("train.csv", "classify.py", "global_batch_size: 16", f"| loss | {last['loss']:.4f} |", "torch"):
            assert expected in card.text


def test_an_export_or_upload_that_fails_is_reported_without_a_traceback(one, arguments, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(one / "step_00000012", damaged)
    with (damaged / "model.safetensors").open("r+b") as file:
        file.seek(1000)
        file.write(b"x")
    exports = {
        "no such folder": [*EXPORT, tmp_path / "nowhere", tmp_path / "out"],
        "model.safetensors is damaged": [*EXPORT, damaged, tmp_path / "out"],
        "exists already": [*EXPORT, one, one],
    }
    upload = [sys.executable, PROGRAMS / "without_hub.py", CLASSIFY, *arguments, "--push_to_hub", "me/it", "--output_dir"]
    uploads = {"has no Hub token": [*upload, tmp_path / "a"], "The model is in": [*upload, tmp_path / "b", "--steps", "1"]}
    tokens = [clean_environment(HF_TOKEN=None), clean_environment(HF_TOKEN="hf_none")]
    for commands, environments in ((exports, [clean_environment()] * 3), (uploads, tokens)):
        ended = run_all(list(commands.values()), environments)
        assert ended.codes == [2] * len(commands), ended.text
        for message, text in zip(commands, ended.texts):
            assert message in text
            assert "Traceback" not in text
    assert (tmp_path / "b" / "model" / "config.json").is_file(), "a failed upload keeps the model"
    assert "step 1" not in ended.texts[0], "a missing token is reported before training"
