"""Tests of the tables of evaluations: their content, which of them a run keeps, and that no error in them ends a run.

tests/test_recipes.py compares the tables of one rank with those of two, and those of a resumed run with the first ones.
"""

import base64
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from accel_ddp import recipe
from accel_ddp.config import train_config
from accel_ddp.errors import UserError
from accel_ddp.observe.log_hook import JsonlLog
from accel_ddp.records.eval_tables import NEWEST, Table, check_tables, file_of, list_steps, prune, read_tables, write_tables
from accel_ddp.records.run_log import read_log
from accel_ddp.sources import data
from accel_ddp.tasks import generation_metrics, labels, metrics, tables, tagging, vision
from accel_ddp.tasks.tables import MOST_IN_TABLE, Row, ScoreTable
from tests.conftest import PROGRAMS, run_ranks

NAMES = ["bad", "fair", "good"]


def rows_of_classes(number: int, classes: int, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.RandomState(seed)
    references, predictions = draw.randint(classes, size=(2, number))
    return {"predictions": predictions, "references": references, "loss": draw.rand(number), "confidence": draw.rand(number)}


def texts(items: list[int]) -> dict[str, list]:
    return {"text": [f"text {i}" for i in items]}


def groups_of(table: Table) -> dict[str, list[str]]:
    """Return the texts of each group of predictions."""
    found: dict[str, list[str]] = {}
    for row in table.rows:
        found.setdefault(row[0], []).append(row[1])
    return found


# ---- content


def test_the_confusion_matrix_counts_true_classes_in_rows_and_predicted_ones_in_columns():
    rows = rows_of_classes(200, 3)
    table = tables.confusion(rows["predictions"], rows["references"], NAMES)
    assert table.kind == "matrix"
    assert table.columns == ["true class", *NAMES]
    assert [row[0] for row in table.rows] == NAMES
    assert [row[1:] for row in table.rows] == confusion_matrix(rows["references"], rows["predictions"]).tolist()
    unseen = tables.confusion(np.array([1]), np.array([0]), NAMES)
    assert [row[1:] for row in unseen.rows] == [[0, 1, 0], [0, 0, 0], [0, 0, 0]], "classes without items have rows of zeros"


def test_the_confusion_matrix_of_many_classes_keeps_the_most_confused_ones():
    names = [f"class {i}" for i in range(5000)]
    references = np.repeat(np.arange(5000), 4)
    predictions = references.copy()
    predictions[:4] = 4999  # class 0 is always taken for class 4999
    predictions[400:402] = 200  # class 100 is twice taken for class 200
    table = tables.confusion(predictions, references, names)
    assert len(table.rows) == tables.MOST_CLASSES == len(table.columns) - 1
    at = {name: i for i, name in enumerate(table.columns)}
    row = {row[0]: row for row in table.rows}
    assert row["class 0"][at["class 4999"]] == 4
    assert row["class 100"][at["class 200"]] == 2
    assert row["class 100"][at["class 100"]] == 2
    assert table.columns[-1] == table.rows[-1][0] == "other"
    assert sum(sum(row[1:]) for row in table.rows) == len(references), "every item is counted once"
    kept = tables.MOST_CLASSES - 1
    assert row["other"][at["other"]] == 4 * (5000 - kept)
    assert f"the {kept} of 5,000 classes" in table.title
    assert len(json.dumps(vars(table))) < 20_000

    clash = tables.confusion(predictions, references, ["other", *names[1:]])
    assert len(set(clash.columns)) == len(clash.columns), "a class that is named other keeps its name"


def test_scores_of_classes_have_averages_and_none_for_what_is_not_defined():
    _, scores = metrics.class_metrics(np.array([0, 1, 1]), np.array([0, 1, 0]), NAMES)
    table = scores.as_table()
    assert table.columns == ["class", "precision", "recall", "f1", "support"]
    assert [row[0] for row in table.rows] == [*NAMES, "accuracy", "macro avg", "weighted avg"]
    assert table.rows[0] == ["bad", 1.0, 0.5, pytest.approx(2 / 3), 2]
    assert table.rows[2] == ["good", None, None, None, 0]
    assert table.rows[3][1:3] == [None, None]
    assert table.rows[3][3] == pytest.approx(2 / 3)


def test_scores_of_very_many_classes_keep_those_with_the_lowest_f1():
    rows = [Row(f"class {i}", 0.5, 0.5, (i % 2000) / 2000, 1) for i in range(3000)]
    table = ScoreTable([*rows, Row("absent", math.nan, math.nan, math.nan, 0)], [Row("macro avg", 1, 1, 1, 3000)]).as_table()
    assert len(table.rows) == MOST_IN_TABLE + 1
    assert table.rows[0][0] == "class 0"
    assert table.rows[-1][0] == "macro avg"
    assert "absent" not in [row[0] for row in table.rows]
    assert max(row[3] for row in table.rows[:-1]) < 0.3


def test_items_with_several_classes_have_counts_of_each_class():
    truth, guess = np.array([[1, 0, 1], [0, 0, 1], [1, 0, 0]]), np.array([[1, 1, 0], [0, 0, 1], [0, 0, 0]])
    table = tables.counts_of_classes(guess, truth, NAMES)
    assert table.columns[1:] == ["true positives", "false positives", "false negatives", "true negatives"]
    assert table.rows == [["bad", 1, 0, 1, 1], ["fair", 0, 1, 0, 2], ["good", 1, 0, 1, 1]]
    several = labels.Labels("label", NAMES, {}, is_multi_label=True)
    values = {"predictions": guess, "references": truth, "loss": np.ones(3), "confidence": np.array([0.9, 0.8, 0.7])}
    made = labels.make_tables(several, values, None, 5, texts)
    assert made.keys() == {"counts", "predictions"}
    shown = {row[1]: row for row in made["predictions"].rows}
    assert shown["text 0"] == ["most confident error", "text 0", "bad, good", "bad, fair", 0.9, 1.0]
    assert shown["text 1"] == ["correct", "text 1", "good", "good", 0.8, 1.0]
    assert shown["text 2"] == ["most confident error", "text 2", "bad", "", 0.7, 1.0]


def test_a_regression_has_quantiles_of_errors_and_points():
    truth = np.arange(3000, dtype=np.float32)
    made = labels.make_tables(
        labels.Labels("label", [], {}, is_regression=True),
        {"predictions": truth + np.where(truth == 7, 5, -1), "references": truth, "loss": np.ones(3000)},
        None, 2, texts,
    )  # fmt: skip
    quantiles = {row[0]: row[1:] for row in made["errors"].rows}
    assert quantiles["minimum"] == [-1, 1]
    assert quantiles["median"] == [-1, 1]
    assert quantiles["maximum"] == [5, 5]
    assert quantiles["mean"] == [pytest.approx(-0.998), pytest.approx(1.0013)]
    assert made["points"].kind == "points"
    assert len(made["points"].rows) == tables.MOST_POINTS
    assert all(b - a in (-1, 5) for a, b in made["points"].rows)
    predictions = made["predictions"]
    assert predictions.columns == ["group", "text", "true", "predicted", "error", "loss"]
    assert [row[0] for row in predictions.rows] == ["sample"] * 2 + ["largest error"] * 2
    assert predictions.rows[2][1:5] == ["text 7", 7, 12, 5]


def test_predictions_are_n_of_each_group_and_the_same_in_every_evaluation():
    rows = rows_of_classes(500, 3)
    names = labels.Labels("label", NAMES, {name: i for i, name in enumerate(NAMES)})
    made = labels.make_tables(names, rows, None, 4, texts)["predictions"]
    assert made.columns == ["group", "text", "true", "predicted", "confidence", "loss"]
    found = groups_of(made)
    assert {group: len(some) for group, some in found.items()} == {"correct": 4, "wrong": 4, "most confident error": 4}
    assert len({row[1] for row in made.rows}) == 12, "an item is in one group only"
    for group, _, true, predicted, *_ in made.rows:
        assert (true == predicted) == (group == "correct")
    confident = [row[4] for row in made.rows[-4:]]
    is_wrong = rows["predictions"] != rows["references"]
    assert confident == [round(value, 4) for value in sorted(rows["confidence"][is_wrong], reverse=True)[:4]]

    # The last bits of numbers depend on the batches in which items were computed, and so on the number of ranks.
    noise = {name: rows[name] * (1 + 1e-9) for name in ("loss", "confidence")}
    assert labels.make_tables(names, rows | noise, None, 4, texts)["predictions"] == made
    # A model that changes its mind about one item changes the groups by this item only.
    changed = rows | {"predictions": np.where(np.arange(500) == 3, rows["references"], rows["predictions"])}
    later = groups_of(labels.make_tables(names, changed, None, 4, texts)["predictions"])
    assert len(set(later["correct"]) & set(found["correct"])) >= 3


def test_predictions_without_errors_or_of_few_items_are_shorter():
    right = {"predictions": np.zeros(3, int), "references": np.zeros(3, int), "loss": np.ones(3), "confidence": np.ones(3)}
    names = labels.Labels("label", NAMES, {})
    assert groups_of(labels.make_tables(names, right, None, 9, texts)["predictions"]).keys() == {"correct"}
    wrong = right | {"references": np.ones(3, int)}
    assert groups_of(labels.make_tables(names, wrong, None, 2, texts)["predictions"]) == {
        "wrong": ["text 2"], "most confident error": ["text 0", "text 1"],
    }  # fmt: skip
    assert "predictions" not in labels.make_tables(names, right, None, 0, texts)


def test_texts_are_shortened_and_numbers_that_are_not_finite_can_be_stored(tmp_path):
    rows = {"predictions": np.zeros(1, int), "references": np.zeros(1, int), "loss": np.array([math.inf])}
    rows["confidence"] = np.array([math.nan])
    long = lambda items: {"text": ["data:image/x" + "long \ud800" * 400 for _ in items]}
    made = check_tables(labels.make_tables(labels.Labels("label", NAMES, {}), rows, None, 1, long))
    write_tables(tmp_path, 3, made)
    text = (tmp_path / file_of(3)).read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    group, shown, *_, confidence, loss = read_tables(tmp_path / file_of(3))["predictions"].rows[0]
    assert group == "correct"
    assert len(shown) == tables.LONGEST_TEXT
    assert shown.endswith("…")
    assert (confidence, loss) == ("nan", "inf")


def test_tags_have_a_confusion_of_words_and_predictions_of_whole_texts():
    import datasets

    tags = tagging.Tags("tags", ["B-PER", "I-PER", "O"], {})
    words = datasets.Dataset.from_dict({"first": [[1, 2, 4], [1, -1]], "tags": [[0, 1, 2], [2, 0]]})
    predictions = np.array([[2, 0, 1, 2, 2, 2], [2, 2, 2, 2, -100, -100]])
    rows = {"predictions": predictions, "loss": np.array([3.0, 1]), "words": np.array([3, 1]), "confidence": np.array([2.4, 0.5])}
    made = tagging.make_tables(
        tags, rows, words, 2, lambda items: [[["Ada", "Lovelace", "wrote"], ["by", "Bob"]][i] for i in items]
    )
    assert made["confusion"].rows == [["B-PER", 1, 0, 1], ["I-PER", 0, 1, 0], ["O", 0, 0, 2]], "a truncated word counts as O"
    assert made["predictions"].rows == [
        ["correct", "Ada Lovelace wrote", "PER: Ada Lovelace", "PER: Ada Lovelace", 0.8, 1.0],
        ["most confident error", "by Bob", "PER: Bob", "", 0.5, 1.0],
    ]
    plain = tagging.Tags("tags", ["NOUN", "VERB"], {})
    words = datasets.Dataset.from_dict({"first": [[1, -1]], "tags": [[0, 1]]})
    made = tagging.make_tables(plain, {"predictions": np.array([[0, 0, 0]])}, words, 0, list)
    assert made["confusion"].columns == ["true class", "NOUN", "VERB", "O"]
    whole = datasets.Dataset.from_dict({"first": [[1, 2]], "tags": [[0, 1]]})
    made = tagging.make_tables(plain, {"predictions": np.array([[0, 0, 1]])}, whole, 0, list)
    assert made["confusion"].rows == [["NOUN", 1, 0], ["VERB", 0, 1]]


def test_generated_texts_are_grouped_by_their_scores():
    made = generation_metrics.make_tables(1, ["1", "2", "3"], ["one", "two", "three"], ["one", "xyz", "thee"], np.ones(3))
    assert [row[:4] for row in made["predictions"].rows] == [
        ["correct", "1", "one", "one"], ["wrong", "3", "three", "thee"], ["lowest score", "2", "two", "xyz"],
    ]  # fmt: skip
    assert [row[4] for row in made["predictions"].rows][::2] == [100, 0]
    assert generation_metrics.make_tables(0, ["1"], ["one"], ["one"], np.ones(1)) == {}


def test_the_nearest_text_is_the_one_that_retrieval_metrics_count():
    from accel_ddp.tasks import contrastive

    draw = np.random.RandomState(0)
    embeddings, keys = draw.randn(40, 2, 6).astype("float32"), np.arange(80).reshape(40, 2)
    embeddings[:20, 1] += 3 * embeddings[:20, 0]
    keys[39, 1] = keys[38, 1]  # a positive that occurs twice
    embeddings[39, 1] = embeddings[38, 1]
    ranks, places, cosines = contrastive.nearest(embeddings, keys)
    scores = contrastive.retrieval_metrics(embeddings, keys)
    assert (ranks == 1).mean() == pytest.approx(scores["recall_at_1"])
    assert 0.2 < scores["recall_at_1"] < 1
    unit = embeddings / np.linalg.norm(embeddings, axis=-1, keepdims=True)
    np.testing.assert_allclose(cosines, (unit[:, 0] @ unit[:, 1].T).max(1), atol=1e-6)
    np.testing.assert_allclose(cosines, (unit[:, 0] * unit[places, 1]).sum(-1), atol=1e-6)
    pairs = lambda items: {"anchor": [f"a{i}" for i in items], "positive": [f"p{i}" for i in items]}
    table = contrastive.make_tables({"embeddings": embeddings, "keys": keys}, 3, pairs)["predictions"]
    assert table.columns == ["group", "anchor", "positive", "found", "cosine", "rank"]
    for group, _, positive, found, _, rank in table.rows:
        assert (positive == found) == (group == "correct") == (rank == 1)


def test_masked_words_are_shown_in_their_texts():
    import torch

    from accel_ddp.engine.rows import Collate
    from accel_ddp.tasks import masking

    labels_of_batch = torch.full((3, 5), -100)
    labels_of_batch[0, 2], labels_of_batch[0, 4], labels_of_batch[2, 1] = 7, 8, 9
    rows = Collate(("labels",))([{"input_ids": [0] * 5, "labels": labels} for labels in labels_of_batch.tolist()])
    scores = torch.zeros(3, 10)
    scores[torch.arange(3), torch.tensor([7, 1, 3])] = 5
    found = masking.first_guesses(scores, torch.tensor([0.1, 0.2, 0.3]), rows["labelled"], rows)
    assert found["position"].tolist() == [2, -1, 1]
    assert found["truth"][[0, 2]].tolist() == [7, 9]
    assert found["guess"][[0, 2]].tolist() == [7, 3]
    assert found["guess_loss"][[0, 2]].tolist() == pytest.approx([0.1, 0.3])
    none = masking.first_guesses(scores[:0], torch.empty(0), rows["labelled"][:0], rows)
    assert none["position"].tolist() == [-1, -1, -1]

    class Tokenizer:
        def decode(self, ids):
            return " ".join(f"w{i}" for i in ids)

    blocks = [{"input_ids": [1, 2, 3, 4, 5]}] * 3
    table = masking.make_tables(2, {name: value.numpy() for name, value in found.items()}, blocks, Tokenizer())["predictions"]
    assert [row[:4] for row in table.rows] == [
        ["correct", "w1 w2 «w3» w4 w5", "w7", "w7"], ["most confident error", "w1 «w2» w3 w4 w5", "w9", "w3"],
    ]  # fmt: skip


@pytest.mark.parametrize(("size", "mode"), [((8, 8), "L"), ((600, 400), "RGB"), ((30, 500), "P"), ((50, 50), "RGBA")])
def test_images_have_small_thumbnails(size, mode):
    from PIL import Image

    noise = np.random.RandomState(0).randint(256, size=(size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(file := io.BytesIO(), "png")
    made = vision.thumbnail({"bytes": file.getvalue(), "path": None})
    head, _, content = made.partition(";base64,")
    assert head in ("data:image/png", "data:image/jpeg")
    assert len(made) < 10_000
    small = Image.open(io.BytesIO(base64.b64decode(content)))
    assert max(small.size) <= vision.THUMBNAIL
    assert max(size) > vision.THUMBNAIL or small.size == size
    assert vision.thumbnail({"bytes": None, "path": "/no/such/file.png"}) is None


def test_the_shown_texts_are_those_of_the_evaluated_rows():
    import datasets

    numbers = np.array([7, 2, 9, 4])  # rows of the file that were drawn
    drawn = data.with_row_numbers(datasets.Dataset.from_dict({"text": [f"row {i}" for i in numbers]}), numbers)
    made = data.with_row_numbers(datasets.Dataset.from_dict({"input_ids": [[1]] * 3}), np.array([7, 9, 4]))  # one was broken
    assert data.select_sources(drawn, made)["text"][:] == ["row 7", "row 9", "row 4"]
    whole = datasets.Dataset.from_dict({"text": ["a", "b"]})
    assert data.select_sources(whole, whole)["text"][:] == ["a", "b"]


# ---- files


def make(value: float) -> dict[str, Table]:
    return {"classes": Table(["class", "f1"], [["good", value]])}


def test_numbers_of_numpy_and_torch_are_stored_and_wrong_tables_are_refused():
    import torch

    mixed = [np.float32(0.5), np.int64(3), torch.tensor(2), np.float64("nan"), None, True, Path("x"), np.array([1, 2])]
    table = check_tables({"own": Table([str(i) for i in range(8)], [mixed])})["own"]
    assert table.rows == [[0.5, 3, 2, "nan", None, True, "x", "[1 2]"]]
    json.dumps(vars(table), allow_nan=False)
    with pytest.raises(TypeError, match="`tables` returned list"):
        check_tables([Table([], [])])
    with pytest.raises(TypeError, match="'own' is list"):
        check_tables({"own": [[1]]})
    with pytest.raises(ValueError, match="row 1 of the table 'own' has 1 cells, but there are 2 columns"):
        check_tables({"own": Table(["a", "b"], [[1, 2], [1]])})
    with pytest.raises(ValueError, match="the kind of the table 'own' is 'plot'"):
        check_tables({"own": Table(["a"], [[1]], "plot")})


def test_a_damaged_or_removed_file_has_no_tables(tmp_path):
    write_tables(tmp_path, 1, make(1))
    path = tmp_path / file_of(1)
    whole = path.read_bytes()
    assert read_tables(path) == make(1)
    for damaged in (whole[:-5], b"[]", b'{"a": 1}', b'{"a": {"rows": []}}', b"\xff\xfe", b""):
        path.write_bytes(damaged)
        assert read_tables(path) == {}
    newer = json.loads(whole)
    newer["classes"]["unit"] = "a field of a later version"
    newer |= {"more": {"columns": [], "rows": [], "kind": "new", "title": ""}}
    path.write_text(json.dumps(newer))
    assert read_tables(path) == make(1), "a table of an unknown kind is left out"
    assert read_tables(tmp_path / "no.json") == {}


class Run(JsonlLog):
    """The log of a run in a folder, called as `fit` calls it."""

    def __init__(self, folder: Path, first: int = 0, evaluations: dict | None = None, **options):
        super().__init__(train_config.TrainConfig(output_dir=str(folder), **options))
        self.on_start(first, 10_000, evaluations or {})

    def evaluate(self, step: int, loss: float) -> None:
        self.on_evaluate(step, {"loss": loss})
        self.on_tables(step, make(loss))


def test_a_run_of_many_evaluations_keeps_the_tables_of_the_first_the_best_and_the_newest(tmp_path):
    run = Run(tmp_path)
    for step in range(0, 1000, 10):
        run.evaluate(step, loss=abs(step - 420) + 1)
        assert len(list_steps(tmp_path)) <= NEWEST + 2
    assert list_steps(tmp_path) == [0, 420, 970, 980, 990]
    assert read_tables(tmp_path / file_of(420))["classes"].rows == [["good", 1]]
    events = [event for event in read_log(tmp_path / "log.jsonl") if event["event"] == "tables"]
    assert [event["path"] for event in events[-2:]] == [file_of(980), file_of(990)]

    run = Run(tmp_path, 990, evaluations={420: {"loss": 1.0}, 990: {"loss": 571.0}})
    run.evaluate(1000, loss=581)
    assert list_steps(tmp_path) == [0, 420, 980, 990, 1000], "a resumed run knows the best one of before"
    run.evaluate(1010, loss=0.5)
    run.evaluate(1020, loss=math.nan)
    assert list_steps(tmp_path) == [0, 1000, 1010, 1020]

    run = Run(tmp_path, 1000, {420: {"loss": 1.0}})
    assert list_steps(tmp_path) == [0, 1000], "the tables of steps that the run repeats are removed"
    other = tmp_path / "other"
    other.mkdir()
    run = Run(other, best_metric="accuracy:max")
    for step in range(1, 9):
        run.on_evaluate(step, {"loss": 1.0})
        run.on_tables(step, make(1))
    assert list_steps(other) == [1, 6, 7, 8], "without a best metric there is no best one"
    prune(tmp_path / "nowhere", None)


def test_a_repeated_evaluation_leaves_the_same_bytes_and_a_crash_leaves_no_partial_file(tmp_path):
    Run(tmp_path).evaluate(5, 0.25)
    before = (tmp_path / file_of(5)).read_bytes()
    (tmp_path / "tables" / ".step_00000009.json.tmp").write_text("{")
    run = Run(tmp_path, first=3)
    assert [path.name for path in (tmp_path / "tables").iterdir()] == []
    run.evaluate(5, 0.25)
    assert (tmp_path / file_of(5)).read_bytes() == before
    assert [event["step"] for event in read_log(tmp_path / "log.jsonl") if event["event"] == "tables"] == [5]


def test_a_disk_that_does_not_accept_tables_is_reported_once(tmp_path, capsys):
    (tmp_path / "tables").write_text("a file where the folder should be")
    run = Run(tmp_path)
    for step in (1, 2):
        run.evaluate(step, 0.5)
    printed = capsys.readouterr().err
    assert printed.count("tables/step_") == printed.count("Training continues.") == 1
    assert "step_00000001.json cannot be written: " in printed
    (tmp_path / "tables").unlink()
    run.evaluate(3, 0.5)
    assert list_steps(tmp_path) == [3], "the disk works again"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_the_older_tables_as_they_were(tmp_path, capsys):
    run = Run(tmp_path)
    run.evaluate(1, 0.5)
    before = (tmp_path / file_of(1)).read_bytes()
    (tmp_path / "tables" / ".step_00000001.json.tmp").symlink_to("/dev/full")
    run.evaluate(1, 0.25)
    assert (tmp_path / file_of(1)).read_bytes() == before
    assert "step_00000001.json cannot be written: No space left on device." in capsys.readouterr().err


# ---- options and runs


def test_log_predictions_is_refused_where_it_has_no_effect(tmp_path):
    with pytest.raises(UserError, match=r"--log_predictions 2000: must be 1,000 or less"):
        train_config.RecipeConfig(log_predictions=2000).validate()

    class Task:
        pass

    with pytest.raises(UserError, match=r"--log_predictions 3: Task of this recipe has no method `tables`"):
        recipe.train(train_config.RecipeConfig(log_predictions=3, output_dir=str(tmp_path / "run")), Task)
    assert not hasattr(train_config.TrainConfig(), "log_predictions"), "a recipe without a dataset option does not have it"


def test_an_error_in_tables_does_not_end_a_run_and_is_printed_once(tmp_path):
    """Run tests/programs/tables.py: its tables fail in four of six evaluations, and one of its hooks always fails."""
    ended = run_ranks(2, PROGRAMS / "tables.py", "--output_dir", tmp_path / "run", "--steps", "6", "--eval_every", "1").well()
    text = ended.text
    assert "Traceback" not in text
    failed = [line for line in text.splitlines() if line.startswith("The tables of the evaluation at step ")]
    assert len(failed) == 4, text
    assert "step 1 failed: ZeroDivisionError: division by zero" in failed[0]
    assert "programs/tables.py, line " in failed[0]
    assert "step 3 failed: TypeError: `tables` returned NoneType. It must return a dictionary of accel_ddp.Table." in failed[1]
    assert "step 4 failed: ValueError: row 0 of the table 'own' has 1 cells, but there are 2 columns." in failed[2]
    assert "step 5 failed: RuntimeError: a hook of a user" in failed[3]
    assert list_steps(tmp_path / "run") == [5, 6], "the hooks before and after the failed one get the tables"
    assert read_tables(tmp_path / "run" / file_of(6))["own"].rows == [["loss", 6.0]]
    assert "after the failed hook: 5 6" in text
