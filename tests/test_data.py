"""The order of items, fingerprints, the tokenization cache and losses."""

import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from accel_ddp.config.parsing import parse_config
from accel_ddp.config.train_config import RecipeConfig, TrainConfig, as_plain_dict
from accel_ddp.doctor.check_options import load_recipe
from accel_ddp.engine.losses import cross_entropy
from accel_ddp.errors import UserError
from accel_ddp.saving.resume import check_options
from accel_ddp.seeds import mixed
from accel_ddp.sources import data
from accel_ddp.sources.many_files import hash_rows
from accel_ddp.sources.tokenization import fingerprint, map_once
from accel_ddp.tasks import text_blocks
from accel_ddp.training.stream import MixedShuffle, Mixture, Shuffle, TrainBatches
from tests.conftest import PROGRAMS, ROOT, clean_environment, run_ranks

BOM = "\ufeff"
TABLES = {
    "usual.csv": f'{BOM}text,label\n"a, b",1\nc,0\n',
    "usual.tsv": "text\tlabel\na\t1\nb\t0\n",
    "usual.jsonl": '{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n',
    "pretty.json": '[\n {\n  "text": "a",\n  "label": 1\n },\n {\n  "text": "b",\n  "label": 0\n }\n]\n',
    "late.jsonl": '{"id": 1}\n{"id": 2, "text": "b", "label": 0}\n',
    "nested.jsonl": '{"pair": {"de": "x", "en": "y"}}\n{"pair": {"de": "x", "en": "y"}}\n',
    "other.csv": "Text ,label\na,1\nb,0\n",
    "no_header.csv": "a good film,1\na bad film,0\na long film,1\n",
    "twice.csv": "text,text,label\na,b,1\nc,d,0\n",
    "broken.jsonl": '{"id": 1}\n{"id": 2,}\n',
}


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *(("classify", ["--train_file", name]) for name in (*TABLES, "nowhere.csv", "*.csv")),
        ("classify", ["--train_file", "usual.csv", "--eval_file", "other.csv"]),
        ("seq2seq", ["--train_file", "nested.jsonl", "--source_column", "pair.de", "--target_column", "pair.en"]),
        ("seq2seq", ["--train_file", "nested.jsonl", "--source_column", "pair.de", "--target_column", "pair.fr"]),
        ("sft", ["--train_file", "usual.csv"]),
        ("sft", ["--train_file", "nested.jsonl"]),
        (
            "embed",
            ["--train_file", "usual.csv", "--anchor_column", "text", "--positive_column", "label", "--negative_columns", "no"],
        ),
        ("pretrain_mlm", ["--train_file", "*.jsonl"]),
    ],
)
def test_the_check_before_a_run_finds_what_reading_the_data_finds(recipe, options, tmp_path, monkeypatch):
    """The check reads the beginning of a file only if that is enough, without torch. The recipe reads all rows."""
    monkeypatch.chdir(tmp_path)
    for name, text in TABLES.items():
        Path(name).write_text(text)
    module = load_recipe(ROOT / "recipes" / f"{recipe}.py")
    cfg = parse_config(module.Config, options)

    def error(check: Callable[[], object]) -> str:
        try:
            check()
        except UserError as error:
            return str(error)
        return ""

    def read() -> None:
        train, test = text_blocks.load_texts(cfg) if recipe == "pretrain_mlm" else data.load_rows(cfg)
        data.check_columns(cfg, train, test)

    assert error(lambda: data.check_inputs(cfg)) == error(read)


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


@pytest.mark.parametrize(
    ("weights", "sizes"), [((7, 3), (5000, 300)), ((5, 1, 1, 1e-3), (3000, 2000, 400, 7)), ((1,) * 5, (900,) * 5)]
)
def test_a_mixture_follows_its_weights_everywhere_and_each_dataset_has_epochs_of_its_own(weights, sizes):
    numbers = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    order = MixedShuffle(Mixture(tuple(f"d{i}" for i in range(len(sizes))), numbers, weights), seed=1)
    rows = np.array(order.items(0, 70_000))
    seen = np.cumsum(numbers[rows][:, None] == np.arange(len(sizes)), axis=0)
    wanted = np.arange(1, len(rows) + 1)[:, None] * np.array(weights) / sum(weights)
    assert abs(seen - wanted)[15::16].max() < 1, "at the end of each block"
    assert abs(seen - wanted).max() < 5, "inside a block"
    for number, size in enumerate(sizes):
        mine = rows[numbers[rows] == number]
        epochs = [mine[first : first + size].tolist() for first in range(0, len(mine) - size + 1, size)][:20]
        assert all(sorted(epoch) == np.flatnonzero(numbers == number).tolist() for epoch in epochs)
        assert size < 20 or epochs[1:2] != epochs[:1]
    for place in (0, 5, 65_530, 65_536, 69_990):  # found directly, also across a chunk of 65,536
        again = MixedShuffle(Mixture(order.names, numbers, weights), seed=1)
        assert again.items(place, 10) == rows[place : place + 10].tolist()
        assert [*again.counts(place).values()] == (seen[place - 1].tolist() if place else [0] * len(sizes))
    few = MixedShuffle(Mixture(order.names, np.sort(numbers), weights), seed=2)
    blocks = np.sort(numbers)[few.items(10**12, 64)].reshape(-1, 16)
    assert len({tuple(block) for block in blocks.tolist()}) > 1, "the order is not periodic"


def test_a_mixture_states_how_often_each_dataset_is_seen():
    mixture = Mixture(("a", "b", "c"), np.repeat([0, 1, 2], [10, 1000, 90]), (1, 8, 1))
    text, warnings = MixedShuffle(mixture, 0).describe(1100)
    shares = "a: 10 % of the rows, 11.1 epochs of 10; b: 80 % of the rows, 0.88 epochs of 1,000; c: 10 % of the rows, 1.21 epochs of 90"
    assert text == shares
    assert [warning.split(" rows are ")[1][:17] for warning in warnings] == ["repeated 11.1 tim"]
    mixture = Mixture(mixture.names, mixture.numbers, (1, 8, 0.01))
    assert "c: is small, and 99% of its 90 rows are never used" in MixedShuffle(mixture, 0).describe(1100)[1][1]


@pytest.mark.parametrize(
    ("mixture", "reason"),
    [
        ([[0.5, 3], [0.5, 2]], "the weights of --train_file were 0.7 0.3 and are now 0.5 0.5"),
        (None, "the weights of --train_file were 0.7 0.3 and are now none"),
        ([[0.7, 4], [0.3, 1]], r"the datasets of --train_file had 3 \+ 2 rows and now have 4 \+ 1"),
    ],
)
def test_another_mixture_of_the_same_rows_is_refused_at_a_resume(mixture, reason):
    cfg, known = TrainConfig(steps=3), {"items": 5, "fingerprint": "f"}
    saved = {"config": as_plain_dict(cfg), "step": 1, "data": {**known, "mixture": [[0.7, 3], [0.3, 2]]}}
    check_options(cfg, saved, data=saved["data"])
    with pytest.raises(UserError, match=reason):
        check_options(cfg, saved, data=known | ({"mixture": mixture} if mixture else {}))


def table(**columns):
    import datasets

    return datasets.Dataset.from_dict(columns)


def test_a_fingerprint_depends_on_the_content_only():
    rows = table(text=["a", "b", "c"], label=[0, 1, 0])
    assert fingerprint(rows) == fingerprint(table(text=["a", "b", "c"], label=[0, 1, 0]))
    assert fingerprint(rows) == fingerprint(table(text=["x", "a", "b", "c"], label=[9, 0, 1, 0]).select([1, 2, 3]))
    assert fingerprint(rows) != fingerprint(rows.select([0, 2, 1]))
    assert fingerprint(rows) != fingerprint(table(text=["a", "b", "d"], label=[0, 1, 0]))


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
from accel_ddp.sources import tokenization

package = Path(accel_ddp.__file__).parent
assert package == Path(sys.argv[1])
rows = datasets.Dataset.from_dict({"text": ["a", "b"]})

def key(recipe="one", depends_on=None):
    tokenization._digest_of_code.cache_clear()
    return tokenization.cache_key(rows, importlib.import_module(recipe).encode, depends_on)

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


def test_data_are_tokenized_again_only_if_code_that_tokenizes_has_changed(tmp_path):
    """In a copy of the package, files are edited one after the other."""
    package = tmp_path / "accel_ddp"
    shutil.copytree(ROOT / "accel_ddp", package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "keys.py").write_text(CACHE_KEYS)
    for name, change in (("one", ""), ("two", ""), ("three", "[::-1]")):
        (tmp_path / f"{name}.py").write_text(f"def encode(rows):\n    return {{'n': list(map(len, rows['text'])){change}}}\n")
    same = [
        "doctor/doctor_command.py",
        "training/stream.py",
        "speed/attach.py",
        "config/train_config.py",
        "cli.py",
        "recipe.py",
        "doctor/new.py",
    ]
    other = ["sources/data.py", "tasks/labels.py", "tasks/chat.py", "seeds.py", "tasks/new.py"]
    command = [sys.executable, tmp_path / "keys.py", package, *same, *other]
    env = clean_environment(PYTHONPATH=str(tmp_path))
    found = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    keys = json.loads(found.splitlines()[-1])
    for name in [*same, "same function elsewhere", "restored"]:
        assert keys[name] == keys["unchanged"], name
    changed = [*other, "other function", "other option", "unchanged"]
    assert len({keys[name] for name in changed}) == len(changed)


def test_slow_tokenizing_is_done_by_one_rank_and_outlasts_the_process_group_timeout(tmp_path):
    """With two ranks, 8 s of tokenizing and a timeout of 5 s, one rank works, and the other waits and reports it."""
    ended = run_ranks(
        2, PROGRAMS / "slow_tokenizing.py", "--cache_dir", tmp_path / "cache", "--ddp_timeout_seconds", 5,
        "--global_batch_size", 2, "--output_dir", tmp_path / "run",
    ).well()  # fmt: skip
    assert ended.text.count("tokenized 3 rows") == 1
    assert ended.text.count("received [1, 2, 3]") == 2
    assert "waiting for another process to tokenize" in ended.text


def test_losses_of_half_precision_are_summed_in_float32():
    import torch

    logits, labels = torch.randn(4096, 50) * 3, torch.randint(0, 50, (4096,))
    for kind in (torch.bfloat16, torch.float16):
        found = cross_entropy(logits.to(kind), labels)
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(cross_entropy(logits.to(kind).double(), labels).item(), rel=1e-5)


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


class EndsInItsProcess:
    """As CUDA's objects: a process that only inherited it aborts when it destroys it. In a reference cycle, as after a `fit`."""

    def __init__(self):
        self.pid, self.cycle = os.getpid(), self

    def __del__(self):
        if os.getpid() != self.pid:
            os.abort()


def collects(rows: list[int]) -> torch.Tensor:
    gc.collect()
    return torch.tensor(rows)


def test_forked_workers_never_destroy_what_they_inherit():
    """Both the workers of a first and of a second run, and the process itself still collects what it has left."""
    from accelerate import Accelerator

    cfg, accelerator = TrainConfig(global_batch_size=4, micro_batch_size=4, num_workers=1), Accelerator(cpu=True)
    for _ in range(2):
        left = weakref.ref(EndsInItsProcess())
        steps = TrainBatches(list(range(8)), collects).starting_at(0, accelerator, cfg)
        assert sorted(torch.cat([next(steps)[0], next(steps)[0]]).tolist()) == list(range(8))
        steps.close()
        assert gc.isenabled()
        gc.collect()
        assert left() is None


# ---------------------------------------------------------------------------------------------- samples


# ---------------------------------------------------------------------------------------------- several files


def lines_of(name: str, number: int, **more: object) -> str:
    return "".join(json.dumps({"text": f"{name} {i}", "label": i % 2, **more}) + "\n" for i in range(number))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files of all kinds below the current folder, with 30 rows in all."""
    import gzip
    import lzma

    import datasets
    import pyarrow as pa

    monkeypatch.chdir(tmp_path)
    Path("rows/sub").mkdir(parents=True)
    Path("rows/a.jsonl").write_text(lines_of("a", 4))
    Path("rows/b.csv").write_text("label,text\n" + "".join(f"{i % 2},b {i}\n" for i in range(5)))
    with gzip.open("rows/c.jsonl.gz", "wt") as file:
        file.write(lines_of("c", 2) + "\n" + lines_of("c more", 4))  # a second member, behind an empty line
    Path("rows/sub/d.jsonl.zst").write_bytes(pa.compress(lines_of("d", 3).encode(), codec="zstd", asbytes=True))
    Path("rows/sub/e.csv.xz").write_bytes(lzma.compress(b"text,label\n" + b"e,1\n" * 3))
    made = datasets.Dataset.from_dict({"text": [f"f {i}" for i in range(3)], "label": [0, 1, None]})
    made.save_to_disk("rows/f")
    made.to_parquet("rows/g.parquet")
    with pa.OSFile("rows/h.arrow", "wb") as file, pa.ipc.new_file(file, made.data.schema) as writer:
        writer.write_table(made.data.table)
    for name in ("rows/README.md", "rows/notes.txt", "rows/.hidden.jsonl"):
        Path(name).write_text("not data")
    Path("rows/empty.jsonl").write_text("")
    return tmp_path


def files_cfg(folder, *files: str, **options) -> RecipeConfig:
    cfg = RecipeConfig(train_file=files, cache_dir=str(folder / "cache"), **options)
    cfg.validate()
    return cfg


def test_files_of_all_kinds_are_one_table_and_each_row_knows_its_place(folder, caplog):
    cfg = files_cfg(folder, "rows", eval_file=["rows/a.jsonl"])
    rows, _ = data.load_rows(cfg)
    assert "These are left out: README.md, notes.txt" in caplog.text
    expected = [*(f"a {i}" for i in range(4)), *(f"b {i}" for i in range(5)), "c 0", "c 1", *(f"c more {i}" for i in range(4))]
    expected += [f"f {i}" for i in range(3)] * 3 + [f"d {i}" for i in range(3)] + ["e"] * 3
    assert rows["text"][:] == expected, "in the order of the names, f, g.parquet and h.arrow with the same rows"
    assert set(rows["label"][:]) == {0, 1, None}, "texts of a .csv became numbers, as in the other files"
    places = {0: "rows/a.jsonl, row 1", 5: "rows/b.csv, row 2 (line 3)", 12: "rows/c.jsonl.gz, row 4 (line 5)"}
    places |= {16: "rows/f, row 2", 29: "rows/sub/e.csv.xz, row 3 (line 4)"}
    assert {number: data.place_of(rows, number) for number in places} == places
    assert data.dataset_numbers(rows) is None, "a folder is one dataset"
    patterns = files_cfg(folder, "rows/*.*", "rows/f", "rows/sub/**", eval_file=["rows/a.jsonl"])
    several, _ = data.load_rows(patterns)
    assert sorted(several["text"][:]) == sorted(expected)
    assert fingerprint(data.load_rows(files_cfg(folder, "rows/c.jsonl.gz", eval_file=["rows/a.jsonl"]))[0]) == fingerprint(
        rows.select(range(9, 15))
    )
    drawn = data.draw_sample(several, "max_train_items", files_cfg(folder, max_train_items=12))
    kept = data.drop_broken([data.with_row_numbers(drawn.add_column("problem", [""] * 12), data.row_numbers(drawn))] * 2, cfg)[0]
    names, numbers = kept.mixture.names, data.dataset_numbers(kept)
    assert names == ("rows", "f", "sub")
    assert [names[number] for number in numbers] == [
        "sub" if text[0] in "de" else "f" if data.place_of(kept, number).startswith("rows/f,") else "rows"
        for text, number in zip(kept["text"], data.row_numbers(kept).tolist())
    ]
    assert kept.mixture.numbers.tolist() == numbers.tolist()


def test_a_saved_dataset_with_splits_is_used_like_one_of_the_hub(folder):
    import datasets

    rows = table(text=[f"s {i}" for i in range(20)], label=[0, 1] * 10)
    datasets.DatasetDict({"train": rows, "test": rows.select(range(3)), "more": rows.select(range(5))}).save_to_disk("splits")
    sizes = lambda *files, **options: tuple(map(len, data.load_rows(files_cfg(folder, *files, **options))))
    assert sizes("splits") == (20, 3)
    assert sizes("splits", train_split="more", eval_split="train") == (5, 20)
    assert sizes("splits/more", eval_file=["splits"]) == (5, 3)
    assert sizes("splits", "rows/a.jsonl", eval_file=["splits/more"]) == (24, 5)
    assert sum(sizes("splits", eval_fraction=0.5)) == 20
    for files, split in ((["splits/more"], {"eval_split": "test"}), (["rows/a.jsonl"], {"train_split": "test"})):
        with pytest.raises(UserError, match="has no splits"):
            files_cfg(folder, *files, **split)


def test_a_fraction_for_the_evaluation_depends_on_the_content_of_rows_only(folder):
    Path("long.jsonl").write_text(lines_of("x", 2000))
    both = lines_of("x", 2000).splitlines(keepends=True)[::-1]
    Path("first.jsonl").write_text("".join(both[:700]))
    Path("second.jsonl").write_text("".join(json.dumps({"more": None, **json.loads(line)}) + "\n" for line in both[700:]))
    texts = lambda *files, **options: [set(part["text"][:]) for part in data.load_rows(files_cfg(folder, *files, **options))]
    train, test = texts("long.jsonl", eval_fraction=0.1)
    assert abs(len(test) - 200) < 4 * 13.4
    assert not train & test
    assert texts("first.jsonl", "second.jsonl", eval_fraction=0.1) == [train, test], "other files, order and columns"
    assert texts("long.jsonl", eval_fraction=0.1, seed=1)[1] != test
    more = texts("long.jsonl", eval_fraction=0.2)[1]
    assert test < more, "a larger fraction adds rows"
    Path("twice.jsonl").write_text(lines_of("x", 50) * 2)
    parts = texts("twice.jsonl", eval_fraction=0.3)
    assert not parts[0] & parts[1], "equal rows are on the same side"
    nested = table(messages=[[{"role": "user", "content": f"{i}"}] * (i % 3) for i in range(300)], label=[None] * 300)
    hashed = lambda rows: hash_rows(rows.with_format("arrow")[:], 0).tolist()
    assert len(set(hashed(nested))) == 201, "100 of them are equal: empty lists"
    assert hashed(nested.select([7, 5, 6])) == [hashed(nested)[i] for i in (7, 5, 6)]


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        (["rows/a.jsonl", "nowhere.csv"], {}, "--train_file nowhere.csv: there is no such file"),
        (["rows/a.jsonl", "none/*.csv"], {}, r"--train_file none/\*.csv: no file matches this pattern"),
        (["void"], {}, "void: the folder contains no files that can be read. It is empty"),
        (["rows/a.jsonl:0", "rows/b.csv:1"], {}, "rows/a.jsonl:0: the weight must be a number above 0"),
        (["rows/a.jsonl:-1", "rows/b.csv:1"], {}, "above 0"),
        (["rows/a.jsonl:much", "rows/b.csv:1"], {}, "much: the weight after the colon must be a number"),
        (["rows/a.jsonl", "rows/b.csv:1"], {}, "rows/a.jsonl: has no weight"),
        (["rows/a.jsonl"], {"eval_file": ["rows/b.csv:1"]}, "rows/b.csv:1: evaluations use every row once"),
        (["rows/a.jsonl", "rows/*.jsonl"], {}, r"rows/a.jsonl is named by rows/a.jsonl and by rows/\*.jsonl"),
        (
            ["rows/a.jsonl", "other.jsonl"],
            {},
            "--text_column text: rows/a.jsonl has this column, but other.jsonl does not. It has: t",
        ),
        (
            ["rows/a.jsonl", "names.jsonl"],
            {},
            "--label_column label: Its type is int64 in rows/a.jsonl, but string in names.jsonl",
        ),
        (["rows/a.jsonl", "cut.jsonl.gz"], {}, "cut.jsonl.gz: is truncated or damaged"),
        (["rows/a.jsonl", "cut.jsonl.zst"], {}, "cut.jsonl.zst: is truncated or damaged"),
        (["rows/a.jsonl", "rows/b.csv", "broken.jsonl"], {}, "broken.jsonl: cannot be read as json: line 3 is not JSON"),
        (["rows/a.jsonl", "broken.jsonl.gz"], {}, "--train_file broken.jsonl.gz: cannot be read as json: line 3 is not JSON"),
    ],
)
def test_what_is_wrong_with_one_of_several_files_is_found_before_and_in_a_run(folder, files, options, words):
    import gzip

    import pyarrow as pa

    Path("void").mkdir()
    Path("other.jsonl").write_text('{"t": "x", "label": 1}\n' * 3)
    Path("names.jsonl").write_text('{"text": "x", "label": "good"}\n' * 3)
    Path("cut.jsonl.gz").write_bytes(gzip.compress(lines_of("x", 99).encode())[:-20])
    Path("cut.jsonl.zst").write_bytes(pa.compress(lines_of("x", 99).encode(), codec="zstd", asbytes=True)[:-5])
    Path("broken.jsonl").write_text(lines_of("x", 2) + '{"text":\n')
    Path("broken.jsonl.gz").write_bytes(gzip.compress(Path("broken.jsonl").read_bytes()))
    module = load_recipe(ROOT / "recipes" / "classify.py")
    cfg = module.Config(train_file=files, cache_dir=str(folder / "cache"), **options)
    needs_all_rows = files[-1].startswith(("broken", "names"))
    with contextlib.nullcontext() if needs_all_rows else pytest.raises(UserError, match=words):
        data.check_inputs(cfg)
    with pytest.raises(UserError, match=words):
        data.check_columns(cfg, *data.load_rows(cfg))


ROWS = {
    "classify": {"text": "good", "label": "a"},
    "embed": {"anchor": "a", "positive": "b"},
    "seq2seq": {"source": "a", "target": "b"},
    "sft": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": 1},
    "dpo": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "reward": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "rerank": {"query": "a", "candidate": "b", "label": 1},
    "tag": {"tokens": ["a"], "tags": ["O"]},
    "pretrain_mlm": {"text": "words"},
    "images": {"image": {"bytes": None, "path": "x.png"}, "label": "a"},
}


ANSWERED, PAIR = {"prompt": "a", "answer": "b"}, {"chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("recipe", "options", "first", "second", "option"),
    [
        ("sft", {}, ROWS["sft"], ANSWERED, "--messages_column messages"),
        ("sft", {"prompt_column": "prompt"}, ANSWERED, {"prompt": "a", "messages": []}, "--answer_column answer"),
        ("dpo", {}, ROWS["dpo"], PAIR, "--prompt_column prompt"),
        ("dpo", {"loss": "kto"}, {**ANSWERED, "label": 1}, ANSWERED, "--label_column label"),
        ("reward", {}, {**ROWS["reward"], "margin": 1}, ROWS["reward"], "--margin_column margin"),
        ("rerank", {}, {"query": "a", "positives": ["b"], "negatives": ["c"]}, ROWS["rerank"], "--positive_columns positives"),
    ],
)
def test_a_column_that_one_of_several_files_lacks_is_named_with_this_file(
    recipe, options, first, second, option, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, row in (("a.jsonl", first), ("b.jsonl", second)):
        Path(name).write_text((json.dumps(row) + "\n") * 5)
    config = load_recipe(ROOT / "recipes" / f"{recipe}.py").Config
    cfg = config(train_file=["a.jsonl", "b.jsonl"], cache_dir=str(tmp_path / "cache"), **options)
    message = f"{option}: a.jsonl has this column, but b.jsonl does not. It has: {', '.join(second)}."
    for check in (lambda: data.check_inputs(cfg), lambda: data.check_columns(cfg, *data.load_rows(cfg))):
        with pytest.raises(UserError, match=re.escape(message)):
            check()


def test_a_file_of_negatives_that_is_missing_is_found_before_a_run(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS["embed"]) + "\n")
    config = load_recipe(ROOT / "recipes" / "embed.py").Config
    with pytest.raises(UserError, match=r"--negatives_file gone\.jsonl: there is no such file"):
        data.check_inputs(config(train_file=[str(tmp_path / "a.jsonl")], negatives_file="gone.jsonl"))


@pytest.mark.parametrize("recipe", ROWS)
def test_every_recipe_reads_files_folders_compressed_and_saved_tables(recipe, tmp_path, monkeypatch):
    import gzip

    import datasets

    monkeypatch.chdir(tmp_path)
    row, more = json.dumps(ROWS[recipe]) + "\n", json.dumps({**ROWS[recipe], "id": "x"}) + "\n"  # a type that differs
    Path("a.jsonl").write_text(row * 5)
    Path("many").mkdir()
    Path("many/b.jsonl.gz").write_bytes(gzip.compress(more.encode() * 4))
    datasets.Dataset.from_list([ROWS[recipe]] * 3).save_to_disk("saved")
    cfg = load_recipe(ROOT / "recipes" / f"{recipe}.py").Config(
        train_file=["a.jsonl:1", "many/*.gz:2", "saved:1"], eval_file=["a.jsonl", "saved"], cache_dir=str(tmp_path / "cache")
    )
    cfg.validate()
    data.check_inputs(cfg)
    train, test = text_blocks.load_texts(cfg) if recipe == "pretrain_mlm" else data.load_rows(cfg)
    data.check_columns(cfg, train, test)
    assert np.bincount(train.mixture.numbers).tolist() == [5, 4, 3]
    assert train.mixture.weights == (1.0, 2.0, 1.0)
    assert test.mixture.names == ("a", "saved")
    column = next(iter(ROWS[recipe]))
    assert train[11][column] == ROWS[recipe][column] == train[5][column]
    assert "id" not in train.column_names or recipe != "sft", "a column that no recipe reads"
    broken = [rows.add_column("problem", ["it is broken" if i == 7 else "" for i in range(len(rows))]) for rows in (train, test)]
    broken = [data.with_row_numbers(rows, data.row_numbers(of)) for rows, of in zip(broken, (train, test))]
    with pytest.raises(
        UserError, match=r"1 of 12 rows of .*\n  it is broken: many/b.jsonl.gz, row 3\n1 of 8 .*\n.*: saved, row 3\n"
    ):
        data.drop_broken(broken, cfg)
