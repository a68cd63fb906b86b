"""Metrics: which one is the best, tables of classes, and the metrics that --metrics adds."""

import csv
import math
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from accel_ddp.config.parsing import parse_config
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.tasks import metrics
from accel_ddp.tasks.generation_metrics import text_metric
from accel_ddp.tasks.metrics import MoreMetrics, class_metrics
from accel_ddp.tasks.tagging import score_entities
from accel_ddp.training.evaluation import as_numbers
from tests.conftest import PROGRAMS, ROOT
from tests.test_config import recipe_configs


@dataclass(kw_only=True)
class Declared(TrainConfig):
    def metric_directions(self):
        return {"macro_f1": "max", "bits_per_byte": "min", "my_metric": ""}


@pytest.mark.parametrize(
    ("cls", "argv", "best"),
    [
        (Declared, [], ("macro_f1", "max")),
        (Declared, ["--best_metric", "bits_per_byte", "--keep_best"], ("bits_per_byte", "min")),
        (Declared, ["--best_metric", "bits_per_byte:max"], ("bits_per_byte", "max")),
        (Declared, ["--best_metric", "my_metric_f1:max"], ("my_metric_f1", "max")),
        (TrainConfig, [], ("loss", "min")),
        (TrainConfig, ["--best_metric", "ece:min"], ("ece", "min")),
    ],
)
def test_the_best_metric_is_one_that_the_recipe_declares(cls, argv, best):
    assert parse_config(cls, argv).best() == best


@pytest.mark.parametrize(
    ("cls", "metric", "message"),
    [
        (Declared, "makro_f1", "does not measure makro_f1. Did you mean macro_f1? Use one of: macro_f1, bits_per_byte, my_metric."),
        (Declared, "eval_macro_f1:max", "Did you mean macro_f1?"),
        (Declared, "accuracy:max", "declared in `metric_directions` of its Config"),
        (Declared, "macro_f1:best", "Use macro_f1:min or macro_f1:max"),
        (Declared, "my_metric_f1", "Use --best_metric my_metric_f1:min or --best_metric my_metric_f1:max."),
        (TrainConfig, "brier", "Use --best_metric brier:min or --best_metric brier:max."),
    ],
)  # fmt: skip
def test_a_metric_that_is_not_measured_or_without_a_direction_is_refused(cls, metric, message):
    with pytest.raises(UserError) as error:
        parse_config(cls, ["--best_metric", metric])
    assert message in str(error.value)


def test_a_switch_with_a_value_is_refused():
    for argv in (["--keep_best", "accuracy"], ["--keep_best=accuracy"], ["--keep-best", "accuracy", "--steps", "2"]):
        with pytest.raises(UserError, match=r"takes no value\. Use --keep_best or --no_keep_best\."):
            parse_config(TrainConfig, argv)
    assert parse_config(TrainConfig, ["--tf32=false", "--keep_best"]).tf32 is False


def test_every_recipe_declares_metrics_and_their_directions():
    for cls in recipe_configs():
        assert set(cls().metric_directions().values()) <= {"min", "max"}, cls.__module__
        assert cls().best().name in cls().metric_directions()
    classify = next(cls for cls in recipe_configs() if cls.__module__ == "classify")
    assert classify().best() == ("accuracy", "max")
    assert classify(num_labels=1).best() == ("mse", "min")
    with pytest.raises(UserError, match="does not measure accuracy"):
        classify(num_labels=1, best_metric="accuracy").validate()
    with pytest.raises(
        UserError, match=r"mae: is a metric of numbers, but this run predicts classes. Built-in metrics of classes"
    ):
        classify(metrics=("mae",)).validate()


def test_the_documentation_lists_all_metrics_of_recipes_and_all_built_in_ones():
    page = (ROOT / "docs" / "own_data.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    own = [name for cls in recipe_configs() for name in cls().metric_directions()]
    for name in [*own, *(name for those in metrics.BUILT_IN.values() for name in those)]:
        assert f" {name}" in page, name


# ---- tables of classes


def test_the_macro_f1_of_the_table_equals_the_metric_and_scikit_learn():
    from sklearn.metrics import classification_report, f1_score

    references, predictions = np.array([0, 0, 1, 1, 4]), np.array([0, 1, 1, 1, 0])
    scores, table = class_metrics(predictions, references, list("abcde"))  # c and d neither occur nor are predicted
    assert scores["macro_f1"] == f1_score(references, predictions, average="macro", zero_division=0) == table.averages[1].f1
    assert f"{scores['macro_f1']:.3f}" in str(table).partition("macro avg")[2].partition("\n")[0]
    assert "2 of 5 classes occur neither in the evaluation data nor in the predictions" in str(table)
    assert "c, d." in str(table)
    _, table = class_metrics(predictions, np.array([0, 0, 1, 2, 2]), ["long name", "b", "c"])
    printed = classification_report([0, 0, 1, 2, 2], predictions, target_names=["long name", "b", "c"], digits=3, zero_division=0)
    assert str(table) == printed.rstrip("\n") + "\n", "the table has the form of scikit-learn"


def test_labels_without_items_are_not_averaged_if_items_have_several_labels():
    from sklearn.metrics import f1_score

    references, predictions = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0]]), np.array([[1, 0, 0], [0, 1, 0], [0, 0, 0]])
    scores, table = class_metrics(predictions, references, list("abc"))
    assert scores["macro_f1"] == f1_score(references[:, :2], predictions[:, :2], average="macro") == table.averages[1].f1
    assert scores["accuracy"] == pytest.approx(1 / 3)
    assert [row.name for row in table.averages] == ["micro avg", "macro avg", "weighted avg"]
    empty = np.zeros((3, 2), dtype=int)
    scores, table = class_metrics(empty, empty, ["a", "b"])
    assert scores == {"accuracy": 1, "macro_f1": 0}
    assert "no classes, and none were predicted" in str(table)


def test_of_many_classes_the_ten_worst_are_printed_and_all_are_in_a_file(tmp_path):
    names = [f"class, {i}" for i in range(40)]  # a comma must not break the file
    references = np.repeat(np.arange(39), 3)
    predictions = np.where(np.arange(117) % 39 < 20, references, (references + 1) % 39)
    _, table = class_metrics(predictions, references, names)
    text = table.report(str(tmp_path))
    assert f"all classes: {tmp_path}/classes.csv" in text
    assert "The 10 of 39 classes with the lowest F1:" in text
    assert text.count("class, ") == 10 + 1, "ten rows, and the class that does not occur"
    with (tmp_path / "classes.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == names
    assert rows[39] == {"class": "class, 39", "precision": "", "recall": "", "f1": "", "support": "0"}
    worst = sorted(float(row["f1"]) for row in rows[:39])[:10]
    printed = [float(line.split()[-2]) for line in text.splitlines() if line.lstrip().startswith("class, ")]
    assert printed == pytest.approx(worst, abs=6e-4)
    assert "could not be written" in table.report(str(tmp_path / "nowhere")), "the run continues"
    assert "macro avg" in text


def test_a_table_of_tags_has_the_same_averages_as_the_metrics():
    tags = [f"B-T{i}" for i in range(15)]
    scores, table = score_entities([[*tags[:10], "O", *tags[11:]]], [tags])
    assert table.averages[0] == ("micro avg", scores["precision"], scores["recall"], scores["f1"], 15)
    assert "The 10 of 15 types of entities with the lowest F1" in str(table)
    assert str(table).splitlines()[3].split()[0] == "T10", "the worst one is first"


# ---- the metrics of --metrics


def more(kind: str, *names: str, **options) -> MoreMetrics:
    """Return the metrics of a config that has the given names as --metrics."""

    @dataclass(kw_only=True)
    class Config(TrainConfig):
        metrics: tuple[str, ...] = ()

        def metric_directions(self):
            return {"accuracy": "max", "loss": "min", **metrics.directions(self.metrics, kind)}

    cfg = Config(metrics=names, **options)
    cfg.validate()
    return MoreMetrics(cfg, kind)


def test_built_in_metrics_equal_those_of_the_libraries():
    from scipy.special import softmax
    from sklearn import metrics as sklearn

    generator = np.random.default_rng(0)
    probabilities = softmax(generator.normal(size=(60, 3)), -1)
    rows = {"references": generator.integers(0, 3, 60), "predictions": probabilities.argmax(-1), "probabilities": probabilities}
    found = more("classes", *metrics.BUILT_IN["classes"]).add_to({"loss": 1.0}, **rows)
    references, predictions = rows["references"], rows["predictions"]
    assert found == pytest.approx({
        "loss": 1.0, "accuracy": sklearn.accuracy_score(references, predictions),
        "macro_f1": sklearn.f1_score(references, predictions, average="macro"),
        "macro_precision": sklearn.precision_score(references, predictions, average="macro"),
        "macro_recall": sklearn.recall_score(references, predictions, average="macro"),
        "micro_f1": sklearn.f1_score(references, predictions, average="micro"),
        "weighted_f1": sklearn.f1_score(references, predictions, average="weighted"),
        "balanced_accuracy": sklearn.balanced_accuracy_score(references, predictions),
        "matthews_correlation": sklearn.matthews_corrcoef(references, predictions),
        "cohen_kappa": sklearn.cohen_kappa_score(references, predictions),
        "roc_auc": sklearn.roc_auc_score(references, probabilities, multi_class="ovr"),
        "brier_score": ((probabilities - np.eye(3)[references]) ** 2).sum(-1).mean(),
    })  # fmt: skip
    two = {"references": references % 2, "predictions": predictions % 2, "probabilities": softmax(probabilities[:, :2], -1)}
    found = more("classes", "roc_auc", "brier_score").add_to({}, **two)
    assert found["roc_auc"] == pytest.approx(sklearn.roc_auc_score(two["references"], two["probabilities"][:, 1]))
    assert found["brier_score"] == pytest.approx(sklearn.brier_score_loss(two["references"], two["probabilities"][:, 1]))

    numbers = {"references": generator.normal(size=50), "predictions": generator.normal(size=50)}
    found = more("numbers", *metrics.BUILT_IN["numbers"], "pearsonr").add_to({}, **numbers)
    assert found.keys() == metrics.BUILT_IN["numbers"].keys(), "pearsonr is another name of pearson"
    assert found["r2"] == pytest.approx(sklearn.r2_score(**{"y_true": numbers["references"], "y_pred": numbers["predictions"]}))
    assert found["rmse"] == pytest.approx(math.sqrt(found["mse"]))
    assert found["pearson"] == pytest.approx(np.corrcoef(numbers["references"], numbers["predictions"])[0, 1])
    tags = {"references": [["B-A", "O", "B-B"]], "predictions": [["B-A", "O", "O"]]}
    assert more("tags", *metrics.BUILT_IN["tags"]).add_to({}, **tags) == pytest.approx(
        {"f1": 2 / 3, "precision": 1, "recall": 0.5, "accuracy": 2 / 3, "macro_f1": 0.5, "weighted_f1": 0.5}
    )


def test_all_metrics_of_generated_texts_are_between_0_and_100():
    for name in set(metrics.BUILT_IN["texts"]) - {"ter"}:
        assert text_metric(name, ["a fine film about cats"], ["a fine film about cats"]) == pytest.approx(100)
        assert text_metric(name, ["x"], ["yes it was"]) == pytest.approx(0, abs=1e-6)
    assert text_metric("ter", ["a film"], ["a film"]) == 0
    assert text_metric("rouge_1", ["a film"], ["film a"]) == pytest.approx(100)
    assert text_metric("rouge_2", ["a film"], ["film a"]) == 0


def test_a_metric_in_a_folder_is_computed_with_its_numbers_only(caplog):
    folder = str(PROGRAMS / "weighted_by_place")
    found = more("classes", folder, best_metric="weighted_by_place:min")
    found.try_out([0, 1, 2, 2], list("abc"))
    assert "wrong are not numbers and are left out" in caplog.text
    rows = {"predictions": np.array([0, 1, 1, 0]), "references": np.array([0, 0, 1, 1])}
    assert found.add_to({"loss": 0.1}, **rows) == {"loss": 0.1, "weighted_by_place": 6, "weighted_by_place_items": 4}
    failed = found.add_to({}, predictions=np.array([0]), references=np.array([0, 1]))
    assert all(map(math.isnan, failed.values())), "a metric that fails later does not end the run"
    assert len(failed) == 2


@pytest.mark.parametrize(
    ("text", "names", "options", "message"),
    [
        ("", ["{folder}"], {}, "there is no script"),
        ("import of_no_package_at_all\n", ["{folder}"], {}, "of_no_package_at_all"),
        ("{class}    raise ValueError('average must be given')", ["{folder}"], {}, "ValueError: average must be given"),
        ("{class}    return {'a': [1]}", ["{folder}"], {}, "returns no number (a)"),
        ("{class}    return {'a': 1}", ["{folder}"], {"best_metric": "mine_b:max"}, "Did you mean mine_a?"),
        ("{class}    return {'mine': 1}", ["{folder}", "{folder}/mine.py"], {}, "another metric named mine"),
        ("{float}    return {'mine': 1}", ["{folder}"], {}, "expects predictions of type float32, but this run predicts classes"),
        ("{three}    return {'mine': 1}", ["{folder}"], {}, "needs sources, which this recipe does not have"),
        ("", ["./nowhere"], {}, "there is no script nowhere/nowhere.py"),
        ("", ["cohen_kappa"], {}, "cohen_kappa: cannot be computed for the evaluation data: ValueError: multilabel"),
    ],
)  # fmt: skip
def test_a_metric_that_cannot_be_used_is_refused_before_a_model_is_loaded(tmp_path, text, names, options, message):
    head = (
        "import datasets\nimport evaluate\nclass M(evaluate.Metric):\n  def _info(self):\n"
        "    f = datasets.Features({name: datasets.Value('TYPE') for name in NAMES})\n"
        "    return evaluate.MetricInfo(description='', citation='', features=f)\n  def _compute(self, **inputs):\n"
    )
    two, three = "('predictions', 'references')", "('predictions', 'references', 'sources')"
    for kind, dtype, inputs in (("class", "int64", two), ("float", "float32", two), ("three", "int64", three)):
        text = text.replace(f"{{{kind}}}", head.replace("TYPE", dtype).replace("NAMES", inputs))
    folder = tmp_path / "mine"
    folder.mkdir()
    if text:
        (folder / "mine.py").write_text(text)
    references = [[0, 1], [1, 1]] if names == ["cohen_kappa"] else [0, 1]
    with pytest.raises(UserError) as error:
        more("classes", *(name.format(folder=folder) for name in names), **options).try_out(references, ["a", "b"])
    assert message in str(error.value)
    assert "--metrics" in str(error.value) or "--best_metric" in str(error.value)


def test_numbers_of_libraries_become_python_floats():
    assert {type(value) for value in as_numbers({"a": np.float32(1), "b": True, "c": np.array([2]), "d": 3}).values()} == {float}
    assert "torch" in sys.modules
