"""The order of items, fingerprints, the tokenisation cache, labels and files."""

import itertools
import json
import multiprocessing
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from accel_ddp.config import RecipeConfig, TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.seeds import mixed
from accel_ddp.sources import data
from accel_ddp.sources.data import load_rows
from accel_ddp.sources.files import load_file
from accel_ddp.sources.tokenisation import fingerprint, map_once, pad_collate
from accel_ddp.tasks.labels import Labels, may_lack_classes, report_classes
from accel_ddp.training.losses import of_tokens
from accel_ddp.training.stream import Shuffle, TrainBatches
from tests.conftest import PROGRAMS, ROOT, clean_environment, run_ranks


@pytest.mark.parametrize("num_items", [1, 2, 3, 7, 64, 101, 1000, 70_000])
def test_each_epoch_has_each_item_once_in_another_order(num_items):
    shuffle = Shuffle(num_items, seed=0)
    epochs = [[shuffle.at(epoch * num_items + place) for place in range(num_items)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(num_items))
    if num_items > 10:
        assert epochs[0] != epochs[1] != epochs[2] != list(range(num_items))


def test_the_order_is_as_good_as_random():
    """Over many seeds, the position of an item is uniform, and neighbours are unrelated."""
    places = np.zeros((10, 10))
    following = 0
    for seed in range(3000):
        shuffle = Shuffle(10, seed)
        order = [shuffle.at(place) for place in range(10)]
        places[range(10), order] += 1
        following += sum(b == (a + 1) % 10 for a, b in itertools.pairwise(order))
    chi_squared = ((places - 300) ** 2 / 300).sum()
    assert 45 < chi_squared < 130, chi_squared  # 81 degrees of freedom: 81 +- 4 sigma
    assert abs(following / (3000 * 9) - 1 / 9) < 0.01


def test_seeds_are_mixed_not_added():
    def order(seed, epoch):
        return [Shuffle(100, seed).at(epoch * 100 + i) for i in range(100)]

    assert order(42, 1) != order(43, 0)
    assert len({mixed(s, p, a, b) for s in range(5) for p in ("x", "y") for a in range(5) for b in range(5)}) == 250


def test_a_position_in_a_billion_items_is_found_at_once():
    def seconds(num_items: int, place: int) -> float:
        began = time.perf_counter()
        shuffle = Shuffle(num_items, seed=0)
        found = [shuffle.at(place + i) for i in range(1000)]
        assert len(set(found)) == 1000
        assert max(found) > 0.9 * num_items
        return time.perf_counter() - began

    few, many = (min(seconds(number, 3 * number) for _ in range(5)) for number in (10**3, 10**9))
    assert many < 20 * few


def table(**columns):
    import datasets

    return datasets.Dataset.from_dict(columns)


def test_a_fingerprint_depends_on_the_content_only():
    rows = table(text=["a", "b", "c"], label=[0, 1, 0])
    assert fingerprint(rows) == fingerprint(table(text=["a", "b", "c"], label=[0, 1, 0]))
    assert fingerprint(rows) == fingerprint(table(text=["x", "a", "b", "c"], label=[9, 0, 1, 0]).select([1, 2, 3]))
    assert fingerprint(rows) != fingerprint(rows.select([0, 2, 1]))
    assert fingerprint(rows) != fingerprint(table(text=["a", "b", "d"], label=[0, 1, 0]))


def test_words_such_as_none_and_na_are_texts_and_labels(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "None,NA\nnull,x\n" * 10)
    train, test = load_rows(RecipeConfig(train_file=str(tmp_path / "a.csv")))
    assert {*train["text"], *test["text"]} == {"None", "null"}
    assert {*train["label"], *test["label"]} == {"NA", "x"}


def test_content_is_mapped_once(tmp_path):
    cfg = TrainConfig(cache_dir=str(tmp_path))
    calls = []

    def length(rows):
        calls.append(len(rows["text"]))
        return {"n": [len(text) for text in rows["text"]]}

    for rows in (table(text=["a", "bb"]), table(text=["zz", "a", "bb"]).select([1, 2])):  # other tables with the same content
        assert map_once(rows, length, depends_on={"v": 1}, cfg=cfg)["n"] == [1, 2]
    assert calls == [2]
    map_once(table(text=["a", "bb"]), length, depends_on={"v": 2}, cfg=cfg)
    assert calls == [2, 2]


CACHE_KEYS = """
import importlib, json, sys
from pathlib import Path
import datasets
import accel_ddp
from accel_ddp.sources import tokenisation

package = Path(accel_ddp.__file__).parent
assert package == Path(sys.argv[1])
rows = datasets.Dataset.from_dict({"text": ["a", "b"]})

def key(recipe="one", depends_on=None):
    tokenisation._digest_of_code.cache_clear()
    return tokenisation.cache_key(rows, importlib.import_module(recipe).encode, depends_on)

keys = {"unchanged": key(), "same function elsewhere": key("two"), "other function": key("three"), "other option": key(depends_on=1)}
for name in sys.argv[2:]:
    file = package / name
    before = file.read_text() if file.exists() else None
    file.write_text((before or "") + "\\n# an edit\\n")
    keys[name] = key()
    file.unlink() if before is None else file.write_text(before)
keys["restored"] = key()
print(json.dumps(keys))
"""


def test_data_are_tokenised_again_only_if_code_that_tokenises_has_changed(tmp_path):
    """In a copy of the package, files are edited one after the other."""
    package = tmp_path / "accel_ddp"
    shutil.copytree(ROOT / "accel_ddp", package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "keys.py").write_text(CACHE_KEYS)
    for name, change in (("one", ""), ("two", ""), ("three", "[::-1]")):
        (tmp_path / f"{name}.py").write_text(f"def encode(rows):\n    return {{'n': list(map(len, rows['text'])){change}}}\n")
    same = ["doctor/command.py", "training/stream.py", "speed/attach.py", "config.py", "cli.py", "recipe.py", "doctor/new.py"]
    other = ["sources/data.py", "tasks/labels.py", "tasks/chat.py", "seeds.py", "tasks/new.py"]
    command = [sys.executable, tmp_path / "keys.py", package, *same, *other]
    env = clean_environment(PYTHONPATH=str(tmp_path))
    found = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    keys = json.loads(found.splitlines()[-1])
    for name in [*same, "same function elsewhere", "restored"]:
        assert keys[name] == keys["unchanged"], name
    changed = [*other, "other function", "other option", "unchanged"]
    assert len({keys[name] for name in changed}) == len(changed)


def test_slow_tokenising_is_done_by_one_rank_and_outlasts_the_process_group_timeout(tmp_path):
    """With two ranks, 12 s of tokenising and a timeout of 5 s, one rank works, and the other waits and reports it."""
    ended = run_ranks(
        2, PROGRAMS / "slow_tokenising.py", "--cache_dir", tmp_path / "cache", "--ddp_timeout_seconds", 5,
        "--global_batch_size", 2, "--output_dir", tmp_path / "run",
    ).well()  # fmt: skip
    assert ended.text.count("tokenised 3 rows") == 1
    assert ended.text.count("received [1, 2, 3]") == 2
    assert "waiting for another process to tokenise" in ended.text


def test_labels_stay_with_their_tokens_whichever_side_a_tokenizer_pads(tiny_model):
    from accelerate import Accelerator
    from transformers import AutoTokenizer

    rows = [{"input_ids": [5, 6, 7], "labels": [1, 2, 3]}, {"input_ids": [8], "labels": [4]}]
    for side in ("left", "right"):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model, padding_side=side)
        batch = pad_collate(tokenizer, Accelerator(cpu=True), per_token=("labels",))(rows)
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
            assert {i: label for i, label in zip(ids, labels) if label != -100} in ({5: 1, 6: 2, 7: 3}, {8: 4})


def test_losses_of_half_precision_are_summed_in_float32():
    import torch

    logits, labels = torch.randn(8, 512, 50) * 3, torch.randint(0, 50, (8, 512))
    for kind in (torch.bfloat16, torch.float16):
        found = of_tokens(logits.to(kind), labels)
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(of_tokens(logits.to(kind).double(), labels).item(), rel=1e-5)


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


@pytest.mark.parametrize("ending", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_files_of_every_kind_are_read(tmp_path, ending):
    rows = table(text=[f'text "{i}", with, commas' for i in range(20)], label=[i % 2 for i in range(20)])
    path = str(tmp_path / f"data.{ending}")
    if ending == "parquet":
        rows.to_parquet(path)
    elif ending in ("json", "jsonl"):
        rows.to_json(path, lines=ending == "jsonl")
    elif ending == "csv":
        rows.to_csv(path)
    else:
        with open(path, "w") as file:
            file.write("text\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in rows))
    train, test = load_rows(RecipeConfig(train_file=path))
    assert (len(train), len(test)) == (18, 2), "a tenth is set aside"
    assert sorted([*train["text"], *test["text"]]) == sorted(rows["text"])
    assert list(load_rows(RecipeConfig(train_file=path))[1]["text"]) == list(test["text"]), "always the same tenth"
    assert list(load_rows(RecipeConfig(train_file=path, eval_file=path))[1]["text"]) == list(rows["text"])


def test_workers_accept_a_collate_function_that_cannot_be_pickled():
    """Since Python 3.14 processes are started with forkserver by default, which pickles what it hands over."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    usual = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
        cfg = TrainConfig(global_batch_size=4, micro_batch_size=4, num_workers=1)
        steps = TrainBatches(list(range(8)), lambda rows: torch.tensor(rows)).starting_at(0, accelerator, cfg)
        seen = torch.cat([next(steps)[0], next(steps)[0]])
        steps.close()
    finally:
        multiprocessing.set_start_method(usual, force=True)
    assert sorted(seen.tolist()) == list(range(8))


# ---------------------------------------------------------------------------------------------- samples


def test_a_sample_is_drawn_from_the_whole_file_and_depends_on_the_seed_only(tmp_path):
    """The file is sorted by label, so that its first rows have one class."""
    path = tmp_path / "sorted.csv"
    path.write_text("text,label\n" + "".join(f"text {i},{i // 250}\n" for i in range(1000)))
    draw = lambda seed=0, number=100: load_rows(
        RecipeConfig(train_file=str(path), eval_file=str(path), max_train_items=number, max_eval_items=50, seed=seed)
    )
    train, test = draw()
    assert (len(train), len(test)) == (100, 50)
    assert all(train["label"][:].count(label) > 10 for label in "0123"), "a random sample has 25 +- 4 rows of each class"
    assert train["text"][:] == draw()[0]["text"][:], "as in a resumed run"
    assert train["text"][:] != draw(seed=1)[0]["text"][:]
    numbers = data.row_numbers(train)
    assert [f"text {number}" for number in numbers] == train["text"][:]
    assert sorted(numbers) == list(numbers), "in the order of the file"
    assert len(draw(number=2000)[0]) == 1000
    split, _ = load_rows(RecipeConfig(train_file=str(path), max_train_items=20))
    assert [f"text {number}" for number in data.row_numbers(split)] == split["text"][:]


def test_positions_are_drawn_without_memory_for_all_rows():
    cfg = RecipeConfig(max_train_items=1000)
    positions = data.draw_positions(10**12, "max_train_items", cfg)
    assert len(set(positions)) == 1000
    assert max(positions) > 9 * 10**11
    runs = data.draw_positions(1234, "max_train_items", RecipeConfig(max_train_items=1230), run_length=100)
    assert len(set(runs)) == 1230
    runs = data.draw_positions(10_000, "max_train_items", cfg, run_length=100)
    assert sum(b - a == 1 for a, b in itertools.pairwise(runs)) >= 980, "lines that belong together stay together"


# ---------------------------------------------------------------------------------------------- classes that may be mistakes


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


def test_one_report_has_all_broken_rows_of_all_kinds_by_their_numbers_in_the_file(tmp_path):
    """The rows are sampled and split at random. One cell has a line break, so that lines and rows differ."""
    cells = {2: ("", "1"), 7: ("seven", ""), 11: ("eleven", "n/a"), 12: ("", "inf"), 30: ("thirty", "1,5")}
    good = [(f'"text\n{i}"' if i == 4 else f"text {i}", f"{i / 8}") for i in range(60)]
    rows = [cells.get(i, good[i]) for i in range(60)]
    path = tmp_path / "train.csv"
    path.write_text("text,label\n" + "".join(f'{text},"{label}"\n' for text, label in rows))
    cfg = RecipeConfig(train_file=str(path))
    cfg.num_labels, cfg.label_column, cfg.class_weights = 1, "label", "none"

    def check():
        tables = load_rows(cfg)
        labels = Labels.for_task(*tables, cfg)
        checked = []
        for part in tables:
            problems = data.merge_problems(data.find_text_problems(part[:], ["text"]), labels.find_problems(part[:]))
            made = table(text=part["text"][:], labels=labels.encode(part[:]), problem=problems)
            checked.append(data.with_row_numbers(made, data.row_numbers(part)))
        return data.drop_broken(checked, cfg)

    for seed in range(3):  # other rows are set aside
        cfg.seed = seed
        with pytest.raises(UserError) as error:
            check()
        assert str(error.value) == (
            f"5 of 60 rows of {path} cannot be used: its text is empty: row 3 (line 4), row 13 (line 15); it has no label: row 8 "
            "(line 10); its label is not a finite number: row 12 (line 14, 'n/a'), row 13 (line 15, 'inf'), row 31 (line 33, '1,5'). "
            "Correct them, or leave them out with --skip_broken."
        )
    cfg.skip_broken = True
    train, test = check()
    assert len(train) + len(test) == 55
    kept = dict(zip([*data.row_numbers(train), *data.row_numbers(test)], [*train["labels"], *test["labels"]], strict=True))
    assert kept == {i: i / 8 for i in range(60) if i not in cells}


# ---------------------------------------------------------------------------------------------- files

GOOD = '{"text": "a", "label": 1}\n'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("broken.jsonl", GOOD * 3 + '{"text": "b", "label": }\n' + GOOD, "line 4 is not JSON: Expecting value at '}', column 24"),
        ("torn.jsonl", GOOD * 3 + '{"text": "b", "lab', "line 4 is not JSON: Unterminated string starting at '\"lab'"),
        ("commas.jsonl", GOOD.strip() + ",\n" + GOOD, "line 1 has a comma after an object"),
        ("quotes.jsonl", GOOD.replace('"', "'"), "line 1 is not JSON: .* Names and texts need double quotes"),
        ("twice.jsonl", GOOD + '{"text": "b", "label": 1, "label": 2}\n', "line 2 has the key 'label' twice"),
        ("text.jsonl", GOOD + '"hello"\n', 'line 2 is "hello", where an object'),
        ("comma.json", "[\n" + GOOD.strip() + ",\n]", "line 3 is not JSON"),
        ("none.json", "[]", "has no rows"),
        ("blank.jsonl", "\n\n", "has no rows"),
        ("utf16.jsonl", (GOOD * 3).encode("utf-16"), "not UTF-8, but UTF-16 .* iconv -f UTF-16"),
        ("latin.jsonl", GOOD.encode() * 3 + b'{"text": "caf\xe9"}\n', r"at byte 91 \(0xe9\) in line 4. Save it as UTF-8"),
        (
            "long.csv",
            "text,label\na,1\nb, c,2\n",
            "line 3 has 3 cells, but the header has 2. Put cells that contain a comma into q",
        ),
        ("lines.csv", 'text,label\n"a\nb",1\n\nc,d,2\n', "line 5 has 3 cells"),
        ("index.csv", "text,label\na,b,1\nc,d,2\n", "line 2 has 3 cells, but the header has 2. 2 lines have too many cells"),
        ("open.csv", 'text,label\na,1\n"b,2\nc,3\n', "the quote of a cell in line 3 is not closed"),
        ("semicolon.csv", "text;label\na, b;1\n", "Cells seem to be separated by ';'"),
        ("header.csv", "text,label\n", "has no rows"),
        ("zipped.csv", b"\x1f\x8b\x08\x00abc", r"is compressed. .*gunzip < zipped.csv > new.csv"),
        ("train.csv.gz", b"\x1f\x8b\x08\x00abc", r"is compressed. .*gunzip < train.csv.gz > train.csv"),
        ("excel.csv", b"PK\x03\x04abc", "a table of Excel. Export"),
        ("json.parquet", GOOD, "not a parquet file. It begins with '{"),
    ],
)
def test_a_file_that_cannot_be_read_is_explained(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=words) as error:
        load_file("--train_file", str(path))
    assert str(error.value).startswith(f"--train_file {path}: ")
    assert "\n" not in str(error.value)


def test_unusual_files_are_read(tmp_path):
    def read(name: str, content: bytes) -> dict:
        (tmp_path / name).write_bytes(content)
        return load_file("--train_file", str(tmp_path / name))[:]

    expected = {"text": ["a", "b"], "label": ["1", "2"]}
    assert read("a.csv", b"\xef\xbb\xbftext,label\r\na,1\r\n\r\nb,2\r\n") == expected, "byte order mark and line ends of Windows"
    assert read("b.csv", b"text,label\na,1,\nb,2,,\n") == expected, "a separator after the last cell"
    assert read("c.CSV", b"text,label\na,1\nb,2\n") == expected
    assert read("d.csv", b"text,label\na,1\nb\n") == {"text": ["a", "b"], "label": ["1", None]}
    assert read("e.jsonl", b"\xef\xbb\xbf" + GOOD.encode().replace(b"\n", b"\r\n") * 2)["label"] == [1, 1]
    assert read("f.json", GOOD.strip().encode() * 2)["label"] == [1, 1]
    whole = b"".join(b'{"text": "%s", "label": %d}\n' % (b"x" * 100, i % 2) for i in range(90_000))
    assert read("g.jsonl", whole + b'{"text": "b", "label": 0.5}\n')["label"][-2:] == [1.0, 0.5], "beyond the first 10 MB"


def test_repeated_columns_are_reported(tmp_path, caplog):
    (tmp_path / "a.csv").write_text("text,label,label\na,1,2\n")
    load_file("--train_file", str(tmp_path / "a.csv"))
    assert "2 columns are named 'label'. They are read as label, label.1." in caplog.text


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            "a great film,1\nan awful film,0\nso so,1\n",
            "The data have: a great film, 1. These look like values: the table appears",
        ),
        ("good,positive\nbad,negative\nfine,positive\n", "appears to have no header. Add a first line .* for example text,label"),
        ("review,stars\ngood,5\nbad,1\n", r"The data have: review, stars\.$"),
        ("0,1\ngood,5\nbad,1\n", r"The data have: 0, 1\.$"),
        ("Text, label\ngood,5\nbad,1\n", "Did you mean 'Text'"),
        ("text\tlabel\ngood\t5\n", "separated by"),
    ],
)
def test_a_missing_column_is_explained(tmp_path, lines, words):
    (tmp_path / "a.csv").write_text(lines)
    rows = load_file("--train_file", str(tmp_path / "a.csv"))
    with pytest.raises(UserError, match=words):
        data.require_columns({"text_column": "text", "text_pair_column": "", "label_column": "label"}, rows)


def test_a_folder_or_a_mistyped_path_is_explained(tmp_path):
    for name in ("train.csv", "dev.csv", "notes.md"):
        (tmp_path / name).write_text("x")
    for path, words in {
        tmp_path: f"is a folder and not a file. It contains 2 .csv, 1 .md. Give one file, for example {tmp_path / 'train.csv'}",
        tmp_path / "trian.csv": f"Did you mean {tmp_path / 'train.csv'}?",
        tmp_path / "*.csv": "Patterns are not supported here",
    }.items():
        with pytest.raises(UserError) as error:
            load_file("--train_file", str(path))
        assert words in str(error.value)


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
