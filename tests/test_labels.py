"""Labels of rows: their names and numbers, and classes that may be mistakes."""

import json

import numpy as np
import pytest

from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.sources.data import load_rows
from accel_ddp.sources.table_files import load_file
from accel_ddp.tasks.labels import Labels, may_lack_classes, report_classes
from tests.test_data import table


def test_labels_are_named_and_checked():
    train, test = table(label=["b", "a", "b"]), table(label=["a", "b"])
    labels = Labels.from_rows(train, test, "label")
    assert (labels.names, labels.encode({"label": ["a", "b"]})) == (["a", "b"], [0, 1])
    assert Labels.from_rows(table(label=[3, 7]), table(label=[7]), "label").encode({"label": [7]}) == [1]
    assert Labels.from_rows(train, table(label=["c"]), "label", use_both=True).names == ["a", "b", "c"]
    multi_label = Labels.from_rows(table(label=[["x", "y"], []]), table(label=[["y"]]), "label")
    assert multi_label.encode({"label": [["y"], ["x", "y"], []]}) == [[0, 1], [1, 1], [0, 0]]
    assert labels.find_problems({"label": ["a", None, " ", float("nan"), "c"]}) == [
        "",
        *["it has no label"] * 3,
        "it has a label that does not occur in the training data (a, b)\t'c'",
    ]
    assert multi_label.find_problems({"label": [["x"], [], None, [None], ["x", "z"]]})[:4] == [
        "",
        "",
        "it has no label",
        "its label contains an empty name",
    ]
    for bad, words in [
        ((table(label=[None, None]), test), "no training row has a label"),
        ((table(label=[{"a": 1}]), test), "must be all names, all whole numbers"),
        ((table(label=["0.5", "1.25"]), table(label=["0.5"])), "For regression, add --num_labels 1"),
        ((table(label=["a", "a"]), table(label=["a"])), "nothing to learn"),
        ((table(label=[0.5, 1.5]), table(label=[0.5])), "must be all names, all whole numbers"),
        ((table(label=[[0, 1, 1], [1, 0, 0]]), table(label=[[0, 0, 1]])), "a list of 0 and 1"),
    ]:
        with pytest.raises(UserError, match=words):
            Labels.from_rows(*bad, "label")


def warnings_about(caplog, names, train, test):
    caplog.clear()
    report_classes("--label_column label", "rows", names, np.array(train), np.array(test))
    return [record.getMessage() for record in caplog.records]


def test_classes_that_may_be_mistakes_are_reported_with_counts(caplog):
    assert warnings_about(caplog, ["a", "b"], [5, 5], [1, 0]) == []
    (text,) = warnings_about(caplog, ["a", "b", "c"], [5, 0, 0], [1, 3, 0])
    assert "2 of 3 classes have no training rows and cannot be learned: 'b' (3 evaluation rows), 'c'." in text
    (text,) = warnings_about(caplog, ["Positive", "negative", "positive "], [9, 500, 900], [1, 50, 90])
    assert "case or white space" in text
    assert "'Positive' (10 rows), 'positive ' (990 rows)" in text
    for name in ("nan", "None", "N/A"):
        (text,) = warnings_about(caplog, ["a", name], [5, 7], [1, 1])
        assert f"a class is named {name!r} (8 rows)" in text
    assert warnings_about(caplog, ["a", "none"], [5, 7], [1, 1]) == []
    names = [form(f"class {i}") for i in range(500) for form in (str.upper, str.lower)]
    texts = warnings_about(caplog, names, [0] * 1000, [1] * 1000)
    assert len(texts) == 2
    assert all(len(text) < 600 for text in texts), texts


def test_labels_of_a_csv_are_numbers_or_names_in_every_part_of_a_large_file(tmp_path):
    """pandas finds types in parts of 10,000 rows. A label that is not a number in a later part is an ordinary name."""
    path = tmp_path / "large.csv"
    rows = [f"text {i},{i % 12}" for i in range(12_000)]
    path.write_text("\n".join(["text,label", *rows]))
    both = {"train_file": str(path), "eval_file": str(path)}
    labels = Labels.from_rows(*load_rows(RecipeConfig(**both)), "label")
    assert labels.names == [str(i) for i in range(12)], "in the order of numbers, not of texts"
    path.write_text("\n".join(["text,label", *rows, "007,other"]))
    train, test = load_rows(RecipeConfig(**both))
    assert train["text"][-1] == "007", "as it is in the file"
    assert "other" in Labels.from_rows(train, test, "label").names
    with_gap = table(label=[1.0, None, 2.0])
    assert Labels.from_rows(with_gap, with_gap, "label").names == ["1", "2"], "a table of pandas in which one is missing"


# ---------------------------------------------------------------------------------------------- broken rows


def test_a_rare_class_whose_rows_are_all_set_aside_is_known_in_files_and_datasets(tmp_path):
    """A dataset without an evaluation split is split like a file, and its evaluation rows must not be refused."""
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": f"text {i}", "label": "ab"[i % 2] if i % 3 else f"rare {i}"}) for i in range(40)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines))
    for options in ({"dataset": str(tmp_path / "data")}, {"train_file": str(tmp_path / "data" / "train.jsonl")}):
        cfg = RecipeConfig(**options)
        train, test = load_rows(cfg)
        only_in_test = set(test["label"]) - set(train["label"])
        assert only_in_test, "this split has a class without training rows"
        assert only_in_test <= set(Labels.from_rows(train, test, "label", use_both=may_lack_classes(cfg, train)).names)
    whole, cfg = load_file("--train_file", str(tmp_path / "data" / "train.jsonl")), RecipeConfig(train_file="a", eval_file="b")
    assert not may_lack_classes(cfg, whole), "evaluation data of their own may not add classes"


def test_lists_of_labels_in_a_table_of_large_lists_are_several_labels(tmp_path):
    """Programs such as polars write this type."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels = pa.array([["x"], ["y", "x"], []], pa.large_list(pa.large_string()))
    pq.write_table(pa.table({"text": ["a", "b", "c"], "label": labels}), tmp_path / "large.parquet")
    rows = load_file("--train_file", str(tmp_path / "large.parquet"))
    found = Labels.from_rows(rows, rows, "label")
    assert found.is_multi_label
    assert found.names == ["x", "y"]
    assert found.encode({"label": rows["label"][:]}) == [[1, 0], [1, 1], [0, 0]]


def test_labels_are_found_without_copying_the_texts_of_rows_that_were_split(tmp_path):
    """Count the rows whose texts are read. `unique` of datasets rewrites whole rows after a split."""
    rows = table(text=[f"text {i}" for i in range(50)], label=["a", "b"] * 25)
    train = rows.train_test_split(test_size=5, seed=0)["train"]
    copied = []
    train.flatten_indices = lambda *args, **kwargs: copied.append(1) or rows
    assert Labels.from_rows(train, rows, "label").names == ["a", "b"]
    assert not copied
