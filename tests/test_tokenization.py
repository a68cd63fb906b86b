"""Tables that all cores map in shards: the same result as in one piece, after a kill, and with damaged files."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import pytest
from accelerate import Accelerator

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.doctor.check_options import load_recipe
from accel_ddp.errors import UserError
from accel_ddp.sources import places, shard_map, tokenization
from accel_ddp.sources.table_files import load_file
from accel_ddp.sources.tokenization import SOURCE, fingerprint, map_once
from tests.conftest import ROOT


def numbers(number: int):
    import datasets

    return datasets.Dataset.from_dict({"number": list(range(number))})


def encode(rows):
    ids = [[number % 97, *range(number % 13)] for number in rows["number"]]
    labels = [[-100, *some[1:]] for some in ids]
    return {"input_ids": ids, "attention_mask": [[1] * len(some) for some in ids], "labels": labels, "problem": ["" for _ in ids]}


def split(rows):
    made = [(i, number) for i, number in enumerate(rows["number"]) for _ in range(number % 3)]
    total = [sum(rows["number"])] * len(made)  # depends on the batch
    return {"labels": [[number] * 3 for _, number in made], "sum": total, SOURCE: [i for i, _ in made]}


@pytest.mark.parametrize(
    ("function", "fingerprint_before", "row_numbers_before"),
    [
        (encode, "138dfe19d348ee35e87765c042d2c6dc", "4d4c94ea64fc0835"),
        (split, "c59724bd01be0639a03154755c5ed662", "c3e6354bc185848e"),
    ],
)
def test_shards_have_the_content_and_the_fingerprint_of_a_table_in_one_piece(
    function, fingerprint_before, row_numbers_before, tmp_path
):
    """The digests were recorded when one process mapped the whole table, and labels had 8 bytes. Checkpoints contain them."""
    rows = numbers(9_500).train_test_split(test_size=100, seed=1)["train"]
    done = map_once(rows, function, depends_on=None, cfg=TrainConfig(cache_dir=str(tmp_path)))
    assert len(list(tmp_path.glob("*/*.arrow"))) == 3
    assert done.features["labels"].feature.dtype == "int32"
    assert fingerprint(done) == fingerprint_before
    assert hashlib.blake2b(done.row_numbers.tobytes(), digest_size=8).hexdigest() == row_numbers_before


@pytest.mark.parametrize("name", ["sft", "classify", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tag", "embed"))])
def test_recipes_get_the_same_rows_from_shards(name, tmp_path, monkeypatch):
    recipe, found = load_recipe(ROOT / "recipes" / f"{name}.py"), []
    monkeypatch.setattr(shard_map, "BATCH", 50)
    for size in (50, 10**6):
        monkeypatch.setattr(shard_map, "SHARD_ROWS", size)
        cfg = recipe.Config(cache_dir=str(tmp_path / str(size)), max_train_items=230)
        cfg.max_length = 64
        train, test = recipe.Task(cfg, Accelerator(cpu=True)).rows
        numbers = [tokenization.row_numbers(rows).tolist() for rows in (train, test)]
        found.append((fingerprint(train), fingerprint(test), numbers))
        shards = {len(list(folder.glob("*.arrow"))) for folder in (tmp_path / str(size)).iterdir() if folder.is_dir()}
        assert max(shards) >= 5 if size == 50 else shards <= {0, 1}
    assert found[0] == found[1]


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_a_killed_process_with_the_same_number_has_left_in_the_cache_is_not_used(tmp_path):
    """A container that is restarted has the same process numbers."""
    left = tmp_path / f".rows.partial.{places.this_rank.host}.{os.getpid()}"
    left.mkdir()
    (left / "half").write_text("")
    folder = places.write_once(str(tmp_path), "rows", lambda into: (into.mkdir(), (into / "all").write_text("")), "write rows")
    assert os.listdir(folder) == ["all"]


def test_a_killed_run_continues_with_the_missing_shards(tmp_path, monkeypatch):
    """The process and its workers are killed. One of the shards that they have completed is damaged afterwards."""
    monkeypatch.setattr(shard_map, "usable_cores", lambda: 2)
    rows, cfg, calls = numbers(30_000), TrainConfig(cache_dir=str(tmp_path / "cache")), tmp_path / "calls"

    def slow(rows):
        with calls.open("a") as out:
            out.write(f"{os.getpid()} {rows['number'][0]}\n")
        if slow.hangs and rows["number"][0] >= 5 * shard_map.SHARD_ROWS:
            time.sleep(600)
        return encode(rows)

    slow.hangs = True  # in the last of 8 shards, until the process is killed
    first = multiprocessing.get_context("fork").Process(
        target=map_once, args=(rows, slow), kwargs={"depends_on": None, "cfg": cfg}
    )
    first.start()
    complete = lambda: sorted((tmp_path / "cache").glob(".*.partial.*/*.arrow"))
    workers = lambda: {int(line.split()[0]) for line in calls.read_text().splitlines()} - {first.pid}
    wait_for(lambda: len(complete()) >= 3 and len(workers()) == 2)
    os.kill(first.pid, signal.SIGKILL)
    first.join()

    def has_ended(pid: int) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
        return True

    wait_for(lambda: all(map(has_ended, workers())))
    kept = complete()
    damaged = kept.pop(1)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    stamps = {file.name: file.stat().st_mtime_ns for file in kept}
    calls.unlink()
    slow.hangs = False
    done = map_once(rows, slow, depends_on=None, cfg=cfg)
    (folder,) = (file for file in (tmp_path / "cache").iterdir() if file.is_dir())
    assert len(list(folder.iterdir())) == 8  # and nothing that the killed processes have left
    assert {name: (folder / name).stat().st_mtime_ns for name in stamps} == stamps
    again = {int(line.split()[1]) // shard_map.SHARD_ROWS for line in calls.read_text().splitlines()} - {
        0
    }  # the types of columns
    assert again == {*range(1, 8)} - {int(name[:5]) for name in stamps}
    whole = map_once(rows, encode, depends_on=None, cfg=TrainConfig(cache_dir=str(tmp_path / "other")))
    assert fingerprint(done) == fingerprint(whole)


def test_errors_of_workers_reach_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_map, "usable_cores", lambda: 2)

    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} {b}")

    def fails(rows):
        if 9_000 in rows["number"]:
            raise errors[0]("a") if errors[0] is not Odd else Odd("a", "b")
        return encode(rows)

    def is_killed(rows):
        if 9_000 in rows["number"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(rows)

    cfg = TrainConfig(cache_dir=str(tmp_path))
    for errors in ([UserError], [OSError], [Odd]):
        # The cache reports an OSError.
        with pytest.raises(RuntimeError if errors[0] is Odd else UserError, match="a"):
            map_once(numbers(12_000), fails, depends_on=errors[0].__name__, cfg=cfg)
    with pytest.raises(RuntimeError, match=r"a worker process was killed \(-9\)"):
        map_once(numbers(12_000), is_killed, depends_on=None, cfg=cfg)


def test_progress_is_reported_in_a_log(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(places, "PROGRESS_EVERY", 0.0)
    map_once(numbers(9_000), encode, depends_on=None, cfg=TrainConfig(cache_dir=str(tmp_path)), doing="counting")
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("counting")]
    assert re.fullmatch(r"counting: [\d,]+ of 9,000 rows \(\d+%\), [\d,]+ rows/s(, .* left)?", lines[0])
    assert "9,000 of 9,000 rows (100%)" in lines[-1]


def test_the_fingerprint_of_a_large_file_is_stored_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization, "REMEMBERED_ROWS", 10)
    computed, compute = [], tokenization._compute_fingerprint
    monkeypatch.setattr(tokenization, "_compute_fingerprint", lambda rows: computed.append(1) or compute(rows))
    file, cache = tmp_path / "rows.jsonl", str(tmp_path / "cache")

    def find(first: int) -> str:
        rows = load_file("--train_file", str(file))
        assert rows[0]["number"] == first
        parts = rows.train_test_split(test_size=5, seed=0)
        found = [fingerprint(part, cache) for part in (rows, parts["train"], rows.remove_columns("other"))]
        assert len(set(found)) == 3
        return found[0]

    def write(first: int) -> None:
        file.write_text("".join(json.dumps({"number": number, "other": 0}) + "\n" for number in range(first, first + 20)))

    write(0)
    before = find(0)
    assert find(0) == before
    assert len(computed) == 3
    write(1)  # as many bytes
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1_000_000_000))
    assert find(1) != before
    write(0)
    os.utime(file, ns=(1, 1_000_000_000))
    assert find(0) == before


def test_pages_of_a_table_are_let_go(tmp_path):
    import datasets
    import numpy as np

    datasets.Dataset.from_dict({"number": np.arange(4_000_000)}).save_to_disk(tmp_path)
    rows = datasets.load_from_disk(tmp_path)
    resident = lambda: int(re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    total = sum(int(table["number"].to_numpy().sum()) for table in rows.with_format("arrow").iter(100_000))
    before = resident()
    shard_map.let_pages_go()
    assert resident() < before - 20_000
    assert total == 4_000_000 * 3_999_999 // 2
    assert rows[3_999_999]["number"] == 3_999_999
