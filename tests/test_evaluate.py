"""Tests of `accel-ddp evaluate` without ranks, and of what a run says about evaluations that show a mistake."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accel_ddp import phases
from accel_ddp.config.train_config import RecipeConfig, as_plain_dict
from accel_ddp.errors import UserError
from accel_ddp.exporting import evaluate_command, export
from accel_ddp.exporting.export_files import public_options
from accel_ddp.observe.progress import find_worse
from accel_ddp.tasks import labels, metrics, tagging
from accel_ddp.tasks.text_task import ClassTask
from accel_ddp.training.divergence import report_untrained, weights_kept


@pytest.fixture
def exported(tmp_path):
    """Return an exported folder that names its recipe and its options, but has no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    options = {"train_file": "gone.csv", "text_column": "review", "lora_r": 4, "metrics": "f1 mcc", "keep_best": True}
    (folder / "accel_ddp.json").write_text(json.dumps({"recipe": "classify.py", "options": options, "metrics": {"loss": 1.0}}))
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--eval_file", "rows.csv"], "name the model or run first"),
        (["./gone"], "./gone: there is no such folder."),
        (["me/model"], "For a model of the Hub, add its recipe: --recipe classify"),
        (["empty"], "is not a run with a checkpoint, nor an exported model"),
        (["empty", "--recipe", "clasify"], "'clasify' is not a recipe. Did you mean 'classify'"),
        ([".", "--output"], "--output: needs a value"),
        (["EXPORTED"], "was trained with gone.csv, which is not here. Give the rows: --eval_file FILE"),
        (["EXPORTED", "--output", "no/such/folder.json"], "its folder does not exist"),
        (["me/model", "--recipe", "classify"], "me/model: its rows are not known. Add --eval_file FILE or --dataset NAME."),
    ],
)
def test_a_wrong_command_says_what_to_type_before_a_rank_starts(words, message, exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as error:
        evaluate_command.main([str(exported) if word == "EXPORTED" else word for word in words])
    assert message in str(error.value)


def test_an_exported_model_is_evaluated_with_the_options_that_describe_its_rows(exported):
    from recipes.classify import Config

    facts = export.read_facts(exported)
    options = evaluate_command._options_of(str(exported), facts, Config(), ["--eval_file", "a b.csv", "c.csv"])
    files = ["a b.csv", "c.csv"]
    assert options == {
        **{"text_column": "review", "metrics": ["f1", "mcc"], "model": str(exported)},
        **{"train_file": files, "eval_file": files},
    }
    same = lambda *words: evaluate_command._has_same_rows(words, {"eval_file": "c.csv"}, Config())
    assert [same(), same("--eval_file", "/x/c.csv"), same("--eval_batch_size", "2")] == [True] * 3
    assert [same("--eval_file", "d.csv"), same("--max_eval_items", "3")] == [False] * 2
    lines = evaluate_command._describe("here", {"loss": 1.5, "f1": 0.5, "mcc": 0.25}, {"loss": 1.0, "f1": 0.5})
    assert lines[1:3] == ["         now  in training  difference", "loss  1.5000       1.0000    +5.0e-01"]
    assert lines[4].split() == ["mcc", "0.2500"], "training did not measure it"


def test_an_export_of_a_run_with_several_files_is_evaluated_with_them(tmp_path, monkeypatch):
    from recipes.classify import Config

    monkeypatch.chdir(tmp_path)
    trained = Config(train_file=("/x/a 1.csv:0.7", "/x/b.csv:0.3"), eval_file=("/x/dev 1.csv", "/x/dev2.csv"))
    stored = public_options(as_plain_dict(trained))
    use = lambda *words, **changed: evaluate_command._options_of("m", {"options": {**stored, **changed}}, Config(), words)
    with pytest.raises(UserError, match=r"m: was evaluated with dev 1.csv, which is not here. Give the rows: --eval_file FILE"):
        use()
    with pytest.raises(UserError, match=r"m: was trained with a 1.csv, which is not here"):
        use(eval_file="")
    assert use("--dataset", "me/rows") == {"model": "m"}
    for name in ("a 1.csv", "b.csv", "dev 1.csv", "dev2.csv"):
        (tmp_path / name).touch()
    assert use()["eval_file"] == use()["train_file"] == ["dev 1.csv", "dev2.csv"]
    assert use(eval_file="")["train_file"] == ["a 1.csv:0.7", "b.csv:0.3"]
    same = lambda *words: evaluate_command._has_same_rows(words, stored, Config())
    assert same("--eval_file", "/y/dev 1.csv", "/y/dev2.csv")
    assert not same("--eval_file", "dev2.csv")


def test_labels_of_evaluation_rows_are_those_of_the_model():
    import datasets

    names = ["bad", "good", "mixed"]
    table = lambda values: datasets.Dataset.from_dict({"label": values})
    made = lambda rows: labels.Labels.from_rows(rows, rows, "label", known=names)
    found = made(table(["good", "good", "new"]))
    assert (found.names, found.class_ids) == (["bad", "good", "mixed"], {"good": 1})
    assert "'new'" in found.find_problems({"label": ["good", "new"]})[1]
    assert made(table([2, 1])).class_ids == {2: 2, 1: 1}
    declared = table([0, 1]).cast_column("label", datasets.ClassLabel(names=["good", "bad"]))
    assert made(declared).class_ids == {0: 1, 1: 0}
    tags = tagging.Tags.from_rows(table([["good"], ["mixed"]]), table([["good"]]), "label", known=names)
    assert tags.tag_ids == {"good": 1, "mixed": 2}
    tags = tagging.Tags.from_rows(table([["good"]]), table([["good"], ["bad"]]), "label", known=names)
    assert tags.tag_ids == {"good": 1, "bad": 0}, "the training rows may lack a tag that the model knows"


@pytest.mark.parametrize(
    ("options", "evaluations", "expected"),
    [
        ({}, {0: {"loss": 1.2}, 3: {"loss": 1.9}}, ["loss rose from 1.2 before training to 1.9. Use a lower --lr"]),
        (
            {},
            {0: {"loss": 1.2}, 1: {"loss": 1.1}, 3: {"loss": 1.9}},
            ["Step 1 was better: --keep_best --best_metric loss keeps it"],
        ),
        ({}, {0: {"loss": 1.2}, 3: {"loss": 1.1}}, []),
        ({}, {0: {"loss": 1.2}, 3: {"loss": float("nan")}}, ["loss rose from 1.2 before training to nan"]),
        (
            {"best_metric": "f1:max"},
            {0: {"f1": 0.5, "loss": 1.0}, 3: {"f1": 0.4, "loss": 2.0}},
            ["f1 fell from 0.5", "loss rose"],
        ),
        (
            {"best_metric": "f1:max", "keep_best": True},
            {0: {"f1": 0.5}, 3: {"f1": 0.5}},
            ["no checkpoint was better than the model"],
        ),
        ({"best_metric": "f1:max", "keep_best": True}, {0: {"f1": 0.5}, 3: {"f1": 0.6}}, []),
    ],
)
def test_metrics_that_are_worse_than_before_training_are_named(options, evaluations, expected):
    lines = list(find_worse(RecipeConfig(**options), evaluations, evaluations[3]))
    assert len(lines) == len(expected)
    assert all(line.startswith("warning: WORSE: ") and words in line for line, words in zip(lines, expected))


def test_one_prediction_for_all_items_is_reported_once_until_it_changes(monkeypatch, capsys):
    monkeypatch.setattr(phases.HERE, "step", 5)
    truth, names, task = np.array([0, 1, 1]), ["bad", "good"], ClassTask.__new__(ClassTask)
    task.cfg, task.labels = RecipeConfig(), labels.Labels("label", names, {})
    task.more_metrics = metrics.MoreMetrics(SimpleNamespace(metrics=()), "classes")

    def evaluate(answers: list, truth: np.ndarray = truth) -> None:
        task.metrics({"predictions": np.array(answers), "references": truth, "loss": np.zeros(len(truth))})

    reported = []
    for answers in ([1, 1, 1], [1, 1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0]):
        evaluate(answers)
        reported.append(capsys.readouterr().out)
    assert [bool(text) for text in reported] == [True, False, True, False, True]
    assert "predicts 'good' for all 3 evaluation items" in reported[0]
    assert "--class_weights balanced" in reported[0]
    evaluate([[1, 0], [1, 0]], np.array([[1, 0], [0, 1]]))
    assert "predicts the same classes" in capsys.readouterr().out
    task.report_same(["O", "O", "O"], ["O", "B-X", "O"], lambda tag: repr(str(tag)))
    assert "predicts 'O' for all 3" in capsys.readouterr().out
    task.report_same(np.full(4, 0.25), np.arange(4.0))
    assert "predicts the value 0.25 for all 4" in capsys.readouterr().out
    evaluate([1, 1], np.array([1, 1]))
    monkeypatch.setattr(phases.HERE, "step", 0)  # a new head before training
    evaluate([1, 1, 1])
    assert not capsys.readouterr().out


def test_weights_that_have_not_changed_are_reported(capsys):
    model = torch.nn.Linear(2, 2)
    with weights_kept(model, "a pass") as before:
        pass
    report_untrained(model, before, 0)
    assert "UNTRAINED: no weight has changed since --model was loaded" in capsys.readouterr().out
    with torch.no_grad():
        model.bias[0] += 1e-6
    report_untrained(model, before, 3)
    assert not capsys.readouterr().out


def test_a_recipe_refuses_to_evaluate_what_it_does_not_load():
    cfg = RecipeConfig(model="some", evaluate_only="runs/classify/1")
    with pytest.raises(UserError, match=r"runs/classify/1: .* --model some\. Use `accel-ddp evaluate runs/classify/1`"):
        cfg.validate()
