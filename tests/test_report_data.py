"""`accel-ddp report` reads every run that exists, also old, damaged, huge and running ones."""

import fcntl
import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_ddp import cli
from accel_ddp.errors import UserError
from accel_ddp.records import eval_tables as table_files
from accel_ddp.records.run_log import LogWriter
from accel_ddp.report import log_reader
from accel_ddp.report.chart_data import downsample
from accel_ddp.report.page import make_page
from accel_ddp.report.run_reader import read_run
from accel_ddp.report.sections import differences, unique_names
from tests.conftest import ROOT, clean_environment

PARTS = ("data", "forward", "backward", "optimizer", "other", "communication")


def update(step: int, **values: Any) -> dict[str, Any]:
    return {"event": "update", "step": step, "time": 1000.0 + step, "loss": 1 / step, "grad_norm": 0.5, "lr": 0.1, "items": 8,
            "samples_per_second": 20.0, **values}  # fmt: skip


def start(step: int = 0, **values: Any) -> dict[str, Any]:
    return {"event": "start", "step": step, "time": 1000.0 + step, "schema": 1, "total_steps": 40, **values}


def ranks(step: int, count: int, **values: Any) -> dict[str, Any]:
    parts = {part: [0.1 * (rank + 1) for rank in range(count)] for part in PARTS}
    return {"event": "ranks", "step": step, "time": 1000.0 + step, "first_step": step - 9, "last_step": step, **parts, **values}


def write(folder: Path, *events: dict[str, Any] | bytes, **files: Any) -> Path:
    """Write a log of events and raw bytes, and JSON files."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n" for event in events]
    (folder / "log.jsonl").write_bytes(b"".join(lines))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_a_log_of_the_writer_is_read_back(tmp_path):
    log = LogWriter(tmp_path / "log.jsonl")
    log.write(
        "start", 0, schema=1, total_steps=3, batch={"global": 8, "micro": 4, "accumulation": 1}, options={"lr": [0.1, 0.01]}
    )
    log.write("update", 1, loss=2.0, grad_norm=1.0, lr=0.1, items=8, samples_per_second=10.0, tokens=100, tokens_per_second=50.0)
    log.write("update", 2, loss=math.nan, grad_norm=math.inf, lr=0.1, items=8, samples_per_second=30.0, tokens=300)
    log.write("ranks", 2, first_step=1, last_step=2, **{part: [0.1, math.nan] for part in PARTS}, system={"cpu": [1, 2.5]})
    log.write("evaluate", 2, **{"loss": 0.5, 'a/"b"': 0.25, "<i>": -math.inf})
    log.write("save", 2, path=str(tmp_path / "step_00000002"))
    log.write("end", 3, loss=0.5, skipped_steps=1)
    log.close()
    run = read_run(tmp_path)
    assert (run.name, run.state, run.notes) == (tmp_path.name, "complete", [])
    assert " ".join(run.updates) == "step time loss grad_norm lr items samples_per_second tokens tokens_per_second"
    assert run.updates["step"].tolist() == [1, 2]
    np.testing.assert_array_equal(run.updates["loss"], [2.0, math.nan])
    np.testing.assert_array_equal(run.updates["grad_norm"], [1.0, math.inf])
    np.testing.assert_array_equal(run.updates["tokens_per_second"], [50.0, math.nan])
    np.testing.assert_array_equal(run.ranks.seconds["data"], np.float32([[0.1, math.nan]]))
    np.testing.assert_array_equal(run.ranks.system["cpu"], [[1, 2.5]])
    assert (run.ranks.first_steps.tolist(), run.ranks.steps.tolist()) == ([1], [2])
    assert {name: value for name, value in run.evaluations[0].items() if name != "time"} == {
        "step": 2, "loss": 0.5, 'a/"b"': 0.25, "<i>": -math.inf,
    }  # fmt: skip
    assert [(one["step"], one["exists"], one["bytes"]) for one in run.checkpoints] == [(2, False, None)]
    assert [one["kind"] for one in run.incidents] == ["NOT_FINITE", "SKIPPED_STEPS"]
    assert (run.summary["samples"], run.summary["samples_per_second"]) == (24, 15.0)
    assert run.summary["best"] == {"metric": "loss", "step": 2, "value": 0.5}
    assert run.summary["seconds_per_step"]["data"] == pytest.approx(0.1)


def test_the_log_of_the_first_version_is_read(tmp_path):
    """It had no schema, no facts, no times of ranks and no warm-up, and Python's NaN in place of a string."""
    run = read_run(write(
        tmp_path, {"event": "start", "step": 0, "time": 1.0, "total_steps": 20},
        {"event": "evaluate", "step": 0, "time": 2.0, "loss": 1.5},
        b'{"event": "update", "step": 10, "time": 3.0, "loss": NaN, "grad_norm": Infinity, "lr": 0.1, "items": 8}\n',
        {"event": "update", "step": 20, "time": 4.0, "loss": 0.5, "grad_norm": 1.0, "lr": 0.1, "items": 8},
        {"event": "end", "step": 20, "time": 5.0, "loss": 0.4},
    ))  # fmt: skip
    assert (run.state, run.notes, run.options, run.ranks.num_ranks) == ("complete", [], {}, 0)
    np.testing.assert_array_equal(run.updates["loss"], [math.nan, 0.5])
    assert run.summary["wall_seconds"] == 4.0
    assert run.summary["ranks"] is None


def test_a_newer_schema_is_reported_and_what_is_known_is_read(tmp_path):
    run = read_run(write(tmp_path, start(schema=7, ranks="all"), update(1), {"event": "unknown", "step": 1, "time": 2.0}))
    assert any("schema 7" in note and "pip install -U" in note for note in run.notes)
    assert len(run.updates["step"]) == 1


GARBAGE = [
    b'{"event": "update", "step": 3, "loss": 0.', b"\n", b"\x00\xff\xfe{]\n", b"[1, 2]\n", b'"event"\n', b"null\n", b"{}\n",
    b'{"event": 3}\n',
    b'{"event": "update", "step": "x"}\n', b'{"event": "update", "step": -1}\n', b'{"event": "update", "step": 1e300}\n',
    b'{"event": "update"}\n', b'{"event": "update", "step": 2.5}\n', b'{"event": "evaluate", "step": null}\n', b"[" * 100_000 + b"\n",
    b'{"event": "ranks", "step": 1, "time": 1, "data": {}}\n', b'{"event": "ranks", "step": 2, "data": [[1, 2], [3]], "system": 3}\n',
    b'{"event": "ranks", "step": 3, "data": [], "system": {"cpu": ["x", null, true, "nan"]}}\n',
    b'{"event": "start", "step": 0, "time": "x", "ranks": [1, null], "versions": 3, "batch": [], "total_steps": "x", "options": 1}\n',
    b'{"event": "save", "step": 1, "path": null}\n', b'{"event": "tables", "step": 1, "path": "../../etc/passwd"}\n',
    b'{"event": "end", "step": 1, "skipped_steps": "x", "goodput": [], "stopped": {}}\n', b'{"event": "restart", "step": 1}\n',
    b'{"event": "update", "step": 9, "loss": {"a": 1}, "lr": 1' + b"0" * 400 + b', "name": "\\ud800"}\n',
    b'{"event": "evaluate", "step": 9, "\\ud800<b>": 1, "text": "x", "deep": [[1]]}\n',
]  # fmt: skip


def test_garbage_between_lines_is_left_out_and_the_rest_is_read(tmp_path):
    """Once each kind of garbage alone between good lines, and all of it together, in any order."""
    good = [start(), update(10), ranks(10, 2), {"event": "evaluate", "step": 10, "time": 1010.0, "loss": 0.5}, update(20)]
    orders = [[one] for one in GARBAGE] + [random.Random(seed).sample(GARBAGE, len(GARBAGE)) for seed in range(5)]
    for garbage in orders:
        folder = write(tmp_path, *good[:2], *garbage, *good[2:], restarts=[1], config=[1], best="x")
        (folder / "incidents.jsonl").write_bytes(b"".join(garbage))
        (folder / "restarts.jsonl").write_bytes(b"".join(garbage))
        run = read_run(folder)
        assert 20 in run.updates["step"]
        assert run.evaluations[-1]["loss"] == 0.5 or run.evaluations[-1]["step"] != 10
        assert any("config.json" in note for note in run.notes)
        differences([run, run])


def test_a_log_without_an_event_is_refused(tmp_path):
    for content in (b"", b"\x00" * 100, b"hello\n"):
        write(tmp_path, content)
        with pytest.raises(UserError, match="contains no events"):
            read_run(tmp_path)


def test_steps_of_several_attempts_count_once_and_the_number_of_ranks_may_change(tmp_path):
    """The second attempt continues at step 20 with another number of ranks. Steps 30 and 40 of the first one do not count."""
    first = [event for step in (10, 20, 30, 40) for event in (update(step), ranks(step, 2, system={"cpu": [1, 1]}))]
    folder = write(
        tmp_path, start(ranks=[{"rank": 0}, {"rank": 1}]), *first, {"event": "evaluate", "step": 40, "time": 1040.0, "loss": 9.0},
        start(20, time=2000.0, ranks=[{"rank": rank} for rank in range(3)]), update(30, loss=7.0, time=2030.0, repeated=True),
        ranks(30, 3, time=2030.0), update(30, loss=8.0, time=2031.0), {"event": "evaluate", "step": 30, "time": 2031.0, "loss": 1.0},
    )  # fmt: skip
    run = read_run(folder)
    assert run.updates["step"].tolist() == [10, 20, 30]
    assert run.updates["loss"].tolist() == [1 / 10, 1 / 20, 8.0]
    assert run.ranks.steps.tolist() == [10, 20, 30]
    assert run.ranks.seconds["data"].shape == (3, 3)
    assert np.isnan(run.ranks.seconds["data"]).tolist() == [[False, False, True]] * 2 + [[False] * 3]
    assert np.isnan(run.ranks.system["cpu"]).all(axis=1).tolist() == [False, False, True]
    assert [one["step"] for one in run.evaluations] == [30]
    assert (run.summary["attempts"], run.summary["wall_seconds"], run.summary["ranks"]) == (2, 1031.0, 3)
    assert [(one["kind"], one["text"]) for one in run.incidents] == [("RESUME", "Attempt 2 continues at step 20 on 3 ranks.")]


def test_the_average_step_leaves_out_the_first_line_of_an_attempt(tmp_path):
    """Its first step starts data workers. A line counts as often as it has steps."""
    slow = {part: [9.0, 9.0] for part in PARTS}
    events = [ranks(10, 2, **slow), ranks(20, 2), ranks(25, 2, first_step=21, data=[0.4, 0.8]), start(25), ranks(35, 2, **slow)]
    run = read_run(write(tmp_path, start(), *events))
    assert run.summary["seconds_per_rank"]["data"] == pytest.approx([(10 * 0.1 + 5 * 0.4) / 15, (10 * 0.2 + 5 * 0.8) / 15])
    assert run.summary["seconds_per_step"]["forward"] == pytest.approx(0.15)
    only = read_run(write(tmp_path, start(), *events[:1]))
    assert only.summary["seconds_per_step"]["data"] == pytest.approx(9.0)


def test_a_run_is_running_while_it_holds_its_lock(tmp_path):
    """A line that is being written is no damage. A run on a disk without locks is running while its log grows."""
    folder = write(tmp_path, start(), update(10), b'{"event": "update", "st')
    assert (read_run(folder).state, read_run(folder).notes) == ("running", [])  # young, and there is no lock
    os.utime(folder / "log.jsonl", (1, 1))
    assert read_run(folder).state == "interrupted"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(folder).state == "running"
    assert read_run(folder).state == "interrupted"
    os.utime(folder / "log.jsonl")
    assert read_run(folder).state == "running"  # the lock names no machine
    (folder / ".lock").write_text(f"pid 1 on {socket.gethostname()}")
    assert read_run(folder).state == "interrupted"
    (folder / ".lock").write_text("pid 1 on another-machine")
    assert read_run(folder).state == "running"
    os.utime(folder / "log.jsonl", (time.time() - 250,) * 2)
    assert read_run(folder).state == "interrupted"
    write(folder, start(), update(10), update(20, time=1110.0))
    os.utime(folder / "log.jsonl", (time.time() - 250,) * 2)
    assert read_run(folder).state == "running"  # 100 s between lines are usual in this run
    write(folder, start(), update(10), {"event": "end", "step": 10, "time": 1.0, "stopped": "SIGUSR2"})
    assert (read_run(folder).state, read_run(folder).end["stopped"]) == ("stopped", "SIGUSR2")
    with (folder / "log.jsonl").open("a") as log:  # it was resumed
        log.write(json.dumps(start(10)) + "\n")
    assert read_run(folder).end is None


def test_every_incident_is_listed_once_in_the_order_of_time(tmp_path):
    failure = "error: RANK_FAILED: rank 1 failed at step 25\nTraceback"
    restart = {"restart": 1, "lost_steps": 5, "lost_seconds": 30.0, "committed": 1.0, "failed_step": 25, "text": failure}
    folder = write(
        tmp_path, start(), update(10), update(20, loss="nan"), start(20, time=1040.0),
        {"event": "restart", "step": 20, "time": 1041.0, **restart, "goodput": 0.5}, update(30, loss="inf", time=1050.0),
        update(40, grad_norm="nan", time=1060.0),
    )  # fmt: skip
    lines = [{"event": "start", "time": 999.0}, {"event": "training", "time": 1000.0, "step": 0},
             {"event": "failure", "time": 1025.0, "step": 25, "logged_step": 20, "text": failure},
             {"event": "training", "time": 1040.9, "step": 20, **restart}]  # fmt: skip
    (folder / "restarts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [{"time": 1024.9, "level": "error", "kind": "RANK_FAILED", "text": "rank 1 failed at step 25", "rank": 1, "host": "b"},
             {"time": 1005.0, "level": "warning", "kind": "STRAGGLER", "text": "rank 0 is slow", "rank": 0, "step": 5},
             {"time": 1020.0, "level": "warning", "kind": "SKIPPED_STEP", "text": "step 20: skipped", "step": 20}]  # fmt: skip
    (folder / "incidents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert [(one["kind"], one["level"], one["step"], one["rank"]) for one in run.incidents] == [
        ("STRAGGLER", "warning", 5, 0), ("SKIPPED_STEP", "warning", 20, None), ("RANK_FAILED", "error", 25, 1),
        ("RESTART", "warning", 20, None), ("NOT_FINITE", "warning", 30, None),
    ]  # fmt: skip
    assert run.incidents[2]["text"] == "rank 1 failed at step 25\nTraceback"
    assert run.incidents[4]["text"].endswith("2 logged steps up to step 40 are not finite.")
    assert run.summary["goodput"] == 0.5


def test_secrets_in_messages_of_a_run_are_hidden(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "planted-secret")
    texts = "https://user:planted-password@host/x failed with planted-secret"
    folder = write(tmp_path, start(command=["train.py"], launcher=["torchrun", texts], environment={"A": texts}), update(1),
                   {"event": "restart", "step": 0, "time": 1.0, "text": texts}, config={"train_file": texts})  # fmt: skip
    (folder / "incidents.jsonl").write_text(json.dumps({"time": 1.0, "level": "error", "kind": "X", "text": texts}))
    run = read_run(folder)
    assert "planted" not in str(vars(run))
    assert "<code>torchrun &#39;https://***@host/x failed with ***" in make_page([run])
    assert "https://***@host/x failed with ***" in run.options["train_file"]


def test_checkpoints_tables_options_and_profile_are_read(tmp_path):
    folder = write(
        tmp_path, start(), {"event": "save", "step": 10, "time": 5.0, "path": "/elsewhere/step_00000010"},
        *({"event": "tables", "step": step, "time": 5.0, "path": "x"} for step in (10, 20, 30)),
        config={"lr": 0.1}, best={"step": 10, "metric": "f1", "value": 0.9, "checkpoint": "step_00000010"},
    )  # fmt: skip
    for step in (10, 20):
        (folder / f"step_{step:08d}").mkdir()
        (folder / f"step_{step:08d}" / "model.safetensors").write_bytes(b"x" * step)
    write(folder / "profile", summary={"steps": 3})
    for step in (10, 20, 30):
        table = {"columns": ["class", "f1"], "rows": [["=a", 0.5]], "kind": "scores"}
        path = folder / table_files.file_of(step)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"classes": table, "wrong": {"columns": ["a"], "rows": [[1, 2]]}, "none": None}))
    run = read_run(folder)
    assert [(one["step"], one["path"], one["exists"], one["is_best"], one["bytes"]) for one in run.checkpoints] == [
        (10, "step_00000010", True, True, 10), (20, "step_00000020", True, False, 20),
    ]  # fmt: skip
    assert {step: list(named) for step, named in run.tables.items()} == {10: ["classes"], 30: ["classes"]}
    assert run.tables[30]["classes"] == {"columns": ["class", "f1"], "rows": [["=a", 0.5]], "kind": "scores", "title": ""}
    assert (run.options, run.profile, run.summary["best"]["metric"]) == ({"lr": 0.1}, {"steps": 3}, "f1")


def test_a_long_log_is_read_in_blocks_with_the_same_values(tmp_path, monkeypatch):
    """The fast parser and `json` return the same columns. Of the times of ranks, at most a fixed number of lines is kept."""
    numbers = random.Random(0)
    events = [start()]
    for step in range(1, 2001):
        loss = {300: "nan", 1500: "inf"}[step] if step in (300, 1500) else numbers.random() * 10 ** numbers.randint(-300, 300)
        events += [update(step, loss=loss, **({"mfu": 0.5} if step > 700 else {})), ranks(step, 2)]
    folder = write(tmp_path, *events, b'{"event": "update", "step": 2001, "lo\n', update(2002))
    expected = read_run(folder)
    monkeypatch.setattr(log_reader, "_BATCH", 250)
    monkeypatch.setattr(log_reader, "MOST_RANK_LINES", 300)
    parsed, parse = [], log_reader._parse_fast
    monkeypatch.setattr(log_reader, "_parse_fast", lambda lines: parsed.append(parse(lines)) or parsed[-1])
    run = read_run(folder)
    assert [one is not None for one in parsed] == [True] * 5 + [False] + [True] * 2  # the sixth block contains "inf"
    assert list(run.updates) == list(expected.updates)
    for name, values in expected.updates.items():
        np.testing.assert_array_equal(run.updates[name], values)
    assert len(expected.updates["step"]) == 2001
    assert len(expected.ranks.steps) == 2000
    assert 75 <= len(run.ranks.steps) <= 300
    assert run.ranks.stride in (8, 16)
    assert any("one line in" in note for note in run.notes)
    assert run.summary["seconds_per_rank"]["data"] == pytest.approx([0.1, 0.2])


def test_downsampling_keeps_extremes_order_ends_and_the_limit():
    numbers = np.random.default_rng(0)
    for trial in range(300):
        n, most = int(numbers.integers(0, 3000)), int(numbers.integers(1, 400))
        values = numbers.standard_cauchy(n)
        if trial % 2:
            values[numbers.random(n) < numbers.choice([0.001, 0.5, 1.0])] = numbers.choice([math.nan, math.inf, -math.inf])
        kept = downsample(values, most)
        assert len(kept) <= most
        assert (np.diff(kept) > 0).all()
        if n <= most:
            assert kept.tolist() == list(range(n))
            continue
        assert kept[0] == 0
        assert most == 1 or kept[-1] == n - 1
        finite = np.isfinite(values)
        if most >= 5 and finite.any():
            assert {np.nanmin(values[finite]), np.nanmax(values[finite])} <= set(values[kept])
        if most >= 5 and not finite.all():
            assert not np.isfinite(values[kept]).all(), "a gap has disappeared"


def test_downsampling_shows_a_spike_of_one_step_in_a_million():
    loss = np.ones(1_000_000)
    loss[123_457], loss[700_001], loss[500_000] = 50.0, -50.0, math.nan
    kept = downsample(loss, 2000)
    assert {123_457, 700_001, 500_000, 0, 999_999} <= set(kept.tolist())
    assert len(kept) <= 2000


def test_runs_have_the_shortest_names_that_differ():
    folders = [Path(text) for text in ("runs/a/1", "runs/a/2", "runs/b/2", "other/b/2", "x")]
    assert unique_names(folders) == ["1", "a/2", "runs/b/2", "other/b/2", "x"]
    assert unique_names([Path("runs/a/1")]) == ["1"]


def test_differences_of_runs_are_listed_by_section(tmp_path):
    facts = {"versions": {"torch": "2.6"}, "environment": {"OMP_NUM_THREADS": "1"}, "items": 100, "precision": "bf16"}
    places = [{"rank": 0, "node": 0, "host": "a", "device": "H100"}, {"rank": 1, "node": 1, "host": "b", "device": "H100"}]
    metrics = {"event": "evaluate", "step": 10, "time": 1.0, "loss": 1.0}
    one = write(tmp_path / "one", start(**facts, ranks=places, options={"lr": [0.1, 0.01]}), metrics | {"f1": 1.0},
                config={"lr": 0.1, "seed": 0, "output_dir": "one", "new_option": 3})  # fmt: skip
    other = {"versions": {"torch": "2.7"}, "items": 50, "sharding": {"text": "FSDP2 over 2 ranks"}}
    two = write(tmp_path / "two", start(**facts | other, ranks=places[:1], options={}), metrics,
                config={"lr": 0.01, "seed": 0, "output_dir": "two"})  # fmt: skip
    runs = [read_run(one), read_run(two)]
    assert differences(runs) == [
        ("options", "lr", [0.1, 0.01]), ("data", "items", [100, 50]), ("cluster", "ranks", [2, 1]), ("cluster", "nodes", [2, 1]),
        ("cluster", "hosts", ["a, b", "a"]), ("cluster", "devices", ["2 x H100", "1 x H100"]),
        ("cluster", "sharding", [None, "FSDP2 over 2 ranks"]), ("versions", "torch", ["2.6", "2.7"]),
    ]  # fmt: skip
    assert differences(runs[:1]) == []
    first_version = {"event": "start", "step": 0, "time": 1.0, "total_steps": 40}
    old = read_run(write(tmp_path / "old", first_version, config={"lr": 0.1, "seed": 1}))
    assert ("options", "new_option", [3, None]) in differences([runs[0], old])  # whether 3 is the default is not known


def test_pandas_reads_the_numbers_of_a_log_as_the_page_of_docs_does(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    attempts = [start(), update(10, loss="nan"), update(20, loss="-inf"), start(10), update(20, loss=0.5), update(30, tokens=5)]
    write(tmp_path / "runs" / "first", *attempts, ranks(10, 2), {"event": "evaluate", "step": 10, "time": 1.5, "loss": 0.2})
    monkeypatch.chdir(tmp_path)
    code = re.search(r"^```python\n(.*?)^```$", (ROOT / "docs" / "report.md").read_text(), flags=re.MULTILINE | re.DOTALL)[1]
    exec(code, scope := {})
    run = read_run(tmp_path / "runs" / "first")
    for name in ("step", "loss", "tokens"):
        np.testing.assert_allclose(scope["updates"][name], run.updates[name], rtol=1e-12)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make three runs, one of which has no log, and files beside them, and enter the folder above."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("first", "second")):
        write(tmp_path / "runs" / "classify" / name, start(), update(10), config={"lr": number})
        os.utime(tmp_path / "runs" / "classify" / name / "log.jsonl", (number + 1, number + 1))
    (tmp_path / "runs" / "classify" / "refused").mkdir()
    (tmp_path / "runs" / "classify" / "refused" / ".accel_ddp").touch()
    (tmp_path / "runs" / "classify" / "second" / "step_00000010").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.html").write_text("<html>my notes</html>")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs"], "runs is not a run: it has no log.jsonl. Below it are 2 runs: runs/classify/second, runs/classify/first. Run: "
                   "accel-ddp report runs/classify/second"),
        (["runs/classify"], "For all of them: accel-ddp report runs/classify/*"),
        (["runs/clasify"], "runs/clasify: there is no such folder. The newest run in runs is runs/classify/second."),
        (["empty"], "empty is empty"),
        (["runs/classify/refused"], "the run has not begun to train, or it was refused"),
        (["runs/classify/second/step_00000010"], "is a checkpoint of a run. Run: accel-ddp report runs/classify/second"),
        (["runs/classify/second/log.jsonl"], "Run: accel-ddp report runs/classify/second"),
        (["notes.html"], "notes.html is a file"),
        (["notes.html", "empty"], "no run was given"),
        (["runs/classify/first", "runs/gone"], "runs/gone: there is no such folder"),
        (["runs/classify/first", "--out", "notes.html"], "--out notes.html: this file exists, and accel-ddp report has not written it"),
        (["runs/classify/first", "--out", "empty"], "is a folder. Use: --out empty/report.html"),
        (["runs/classify/first", "--out", "page"], "Use: --out page.html"),
        (["runs/classify/first", "--out", "notes.html/x.html"], "--out notes.html/x.html"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_what_to_type(words, message, folder, capsys):
    before = sorted(folder.rglob("*"))
    assert cli.main(["report", *words]) == 2
    assert message in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before, "a refused command changes nothing"


def test_the_command_writes_the_page_without_torch(folder):
    """One process: one run, several runs with a folder that is none, again over its own page, and damaged runs."""
    write(folder / "runs/classify/changed", start(), update(10), ranks(10, 2), start(10), update(20), ranks(20, 1))
    write(folder / "runs/classify/damaged", start(), *GARBAGE, ranks(30, 2))
    code = (
        "import sys; from accel_ddp import cli\n"
        "for words in (['runs/classify/first', '--open'], ['runs/classify/first'],\n"
        "              ['runs/classify/first', 'runs/classify/second', 'runs/classify/refused', 'runs/classify/first/'],\n"
        "              ['runs/classify/changed'], ['runs/classify/changed', 'runs/classify/damaged']):\n"
        "    assert cli.main(['report', *words]) == 0\n"
        "assert not {'torch', 'accelerate', 'transformers'} & set(sys.modules)\n"
    )
    environment = clean_environment() | {"PYTHONPATH": str(ROOT), "BROWSER": "echo %s"}
    ended = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (folder / "runs/classify/first/report.html").stat().st_size
    assert (folder / "report.html").stat().st_size
    assert "runs/classify/first/report.html (" in ended.stdout
    assert f"file://{folder}/runs/classify/first/report.html" in ended.stdout
    assert "RuntimeWarning" not in ended.stderr
    assert "warning: runs/classify/refused: left out, because this is no run." in ended.stderr
    assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]
