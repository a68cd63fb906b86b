"""Tests of rows that are read in order while they are trained (`sft --streaming`)."""

import gzip
import json
from functools import partial

import pytest

from accel_ddp.config.option_values import check_streaming
from accel_ddp.errors import UserError
from accel_ddp.tasks import row_stream

SKIPPED, BLOCK, ROWS = 3, 16, 53


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[str, ...]:
    """Return three files with 53 rows in all, one of them compressed."""
    folder = tmp_path_factory.mktemp("files")
    lines = [json.dumps({"text": f"text {i}"}) + "\n" for i in range(ROWS)]
    (folder / "a.jsonl").write_text("".join(lines[:10]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.writelines(lines[10:45])
    (folder / "c.jsonl").write_text("".join(lines[45:]))
    return tuple(str(folder / name) for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl"))


class Plain:
    """Rows of an iterable without `state_dict`, such as one of a user."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize("kind", ["datasets", "plain"])
def test_a_stream_continues_from_any_block_with_the_same_rows(kind, files):
    source = partial(row_stream._open, list(files), "", "train")
    if kind == "plain":
        source = partial(Plain, list(source()))
    reader = partial(row_stream._Reader, source, SKIPPED, BLOCK, lambda number, row: ([(number, row["text"])], ""))
    order = row_stream._BlockShuffle(BLOCK, seed=1)
    whole, read = reader(""), []
    for position, index in enumerate(order.items(0, 170)):
        (((number, text),), problem), state = whole[index]
        assert text == f"text {number}"
        assert not problem
        read.append((number, state))
        assert index // BLOCK == position // BLOCK
    numbers = [number for number, _ in read]
    assert sorted(numbers[:48]) == list(range(SKIPPED, 51)), "three blocks of the first pass"
    assert numbers[:16] != sorted(numbers[:16])
    assert sorted(numbers[48:64]) == sorted([*range(51, ROWS), *range(SKIPPED, 17)]), "the next pass fills the block"
    for position in range(0, 160, 9):  # a checkpoint has the state of an item before
        again = reader(read[max(position - 1, 0)][1])
        assert [again[index][0][0][0][0] for index in order.items(position, 10)] == numbers[position : position + 10]


def test_rows_that_cannot_be_read_or_used_are_reported_with_their_numbers(files, tmp_path):
    broken = tmp_path / "d.jsonl"
    broken.write_text('{"text": "a"}\n{"text": \n')
    reader = row_stream._Reader(partial(row_stream._open, [str(broken)], "", "train"), 0, 4, lambda *row: row, "")
    assert reader[0][0][1].startswith("--streaming: cannot read the row after row")

    class Form:
        columns, kind, tokenizer = ("prompt", "answer"), "instructions", type("Tokenizer", (), {"pad_token_id": 7})

        def encode(self, rows):
            first = [len(rows["prompt"][0])]
            ids = [list(range(first[0] + 3))]
            return {"input_ids": ids, "attention_mask": ids, "labels": ids, "first": first, "problem": [rows["answer"][0]]}

    encode = partial(row_stream.encode_row, Form(), 4)
    assert encode(False, 6, {"prompt": "ab", "answer": ""})[0][0]["input_ids"] == [0, 1, 2, 3]
    assert (
        "row 7 cannot be used: its answer is empty: x."
        in encode(False, 6, {"prompt": "ab", "answer": "its answer is empty\tx"})[1]
    )
    assert "its prompt fills --max_length 4" in encode(False, 6, {"prompt": "abcd", "answer": ""})[1]
    example = {"input_ids": [7], "attention_mask": [1], "labels": [-100]}
    assert encode(True, 6, {"prompt": "abcd", "answer": ""}) == ([example], "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"steps": 0}, "needs --steps"),
        ({"max_length": "auto"}, "needs --max_length N"),
        ({"max_eval_items": 0}, "needs --eval_file, --eval_split, or --max_eval_items N"),
        ({"packing": "on"}, "--packing on: needs all rows"),
        ({"eval_fraction": 0.1}, "--eval_fraction 0.1: needs all rows"),
        ({"max_train_items": 5}, "--max_train_items 5: needs all rows"),
        ({"train_file": ("a.jsonl:2", "b.jsonl:1")}, "a.jsonl:2: needs all rows"),
    ],
)
def test_options_that_streaming_lacks_are_reported(changes, reason):
    given = {
        "train_file": ("a.jsonl",),
        "eval_file": (),
        "eval_split": "",
        "max_eval_items": 4,
        "max_train_items": 0,
        "eval_fraction": 0.0,
    }
    given |= {"steps": 3, "max_length": 32, "packing": "auto"}
    check_streaming(type("Config", (), given))
    with pytest.raises(UserError, match=reason):
        check_streaming(type("Config", (), given | changes))


def test_data_that_cannot_be_streamed_are_reported(tmp_path):
    for files, name, reason in [
        (["a.csv"], "", "reads files of one kind"),
        (["a.jsonl", "b.parquet"], "", "reads files of one kind"),
        ([], "builtin:questions", "is a small built-in dataset"),
        ([], str(tmp_path), "cannot be read"),
    ]:
        with pytest.raises(UserError, match=reason):
            next(iter(row_stream._open(files, name, "train")))
