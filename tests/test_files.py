"""Files with rows: their formats, mistakes in them, samples, and the report of broken rows."""

import itertools

import pytest

from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.errors import UserError
from accel_ddp.sources import data
from accel_ddp.sources.data import load_rows
from accel_ddp.sources.table_files import load_file
from accel_ddp.tasks.labels import Labels
from tests.test_data import table


def test_words_such_as_none_and_na_are_texts_and_labels(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "None,NA\nnull,x\n" * 10)
    train, test = load_rows(RecipeConfig(train_file=str(tmp_path / "a.csv")))
    assert {*train["text"], *test["text"]} == {"None", "null"}
    assert {*train["label"], *test["label"]} == {"NA", "x"}


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


def expand(text: str) -> list[int]:
    """Return the numbers of "3,7-9"."""
    runs = [[*map(int, run.split("-"))] for run in text.split(",")]
    return [number for run in runs for number in range(run[0], run[-1] + 1)]


def test_a_sample_is_drawn_from_the_whole_file_and_depends_on_the_seed_only(tmp_path):
    """The file is sorted by label, so that its first rows have one class."""
    path = tmp_path / "sorted.csv"
    path.write_text("text,label\n" + "".join(f"text {i},{i // 250}\n" for i in range(1000)))
    draw = lambda seed=0, number=100: load_rows(
        RecipeConfig(train_file=str(path), eval_file=str(path), max_train_items=number, max_eval_items=50, seed=seed)
    )
    train, test = draw()
    assert (len(train), len(test)) == (100, 50)
    recorded = data.describe_drawn(test)
    assert recorded["number"] == 50
    assert expand(recorded["rows"]) == data.row_numbers(test).tolist()
    assert all(train["label"][:].count(label) > 10 for label in "0123"), "a random sample has 25 +- 4 rows of each class"
    assert train["text"][:] == draw()[0]["text"][:], "as in a resumed run"
    assert train["text"][:] != draw(seed=1)[0]["text"][:]
    numbers = data.row_numbers(train)
    assert [f"text {number}" for number in numbers] == train["text"][:]
    assert sorted(numbers) == list(numbers), "in the order of the file"
    assert len(draw(number=2000)[0]) == 1000
    assert data.describe_drawn(draw(number=2000)[1]) == recorded, "the seed draws the same rows"
    every = load_rows(RecipeConfig(train_file=str(path), eval_file=str(path)))[1]
    assert not data.describe_drawn(every), "all rows are evaluated"
    split, aside = load_rows(RecipeConfig(train_file=str(path), max_train_items=20))
    assert expand(data.describe_drawn(aside)["rows"]) == sorted(data.row_numbers(aside))
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
            f"5 of 60 rows of {path} cannot be used:\n"
            "  its text is empty: row 3 (line 4), row 13 (line 15)\n"
            "  it has no label: row 8 (line 10)\n"
            "  its label is not a finite number: row 12 (line 14, 'n/a'), row 13 (line 15, 'inf'), row 31 (line 33, '1,5')\n"
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
    }.items():
        with pytest.raises(UserError) as error:
            load_file("--train_file", str(path))
        assert words in str(error.value)
