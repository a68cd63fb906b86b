"""Promise 3 for sharded runs: each rank writes its part, and the checkpoint is complete on all nodes or absent."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, Running, rank_environments, run_ranks

PROGRAM = PROGRAMS / "sharded_saves.py"
PART = "shard-00002-model-00001-of-00001.safetensors"


def results(folder: Path, part: str, ranks: int) -> dict:
    run_ranks(ranks, PROGRAM, "--part", part, "--out", folder / f"{part}.json", "--output_dir", folder / part).well()
    return json.loads((folder / f"{part}.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def two(folder) -> dict:
    """Return what runs of 4 steps on two ranks did. They save after steps 2 and 4. All runs are made in one launch."""
    return results(folder, "two", 2)


def assert_close(one: dict, other: dict) -> None:
    assert (one["from"], one["to"], one["error"], one["unsaved"]) == (2, 4, "", "")
    assert one["weights"] == pytest.approx(other["weights"], abs=1e-12)


def test_a_sharded_run_resumes_bit_identical(two):
    assert (two["resumed"]["from"], two["resumed"]["to"]) == (2, 4)
    assert two["resumed"]["weights"] == two["straight"]["weights"]


def test_a_run_resumes_from_fsdp_to_ddp_and_back(two):
    assert_close(two["as DDP"], two["straight"])
    assert "the model was sharded over 2 ranks, now it is whole on every rank" in two["as DDP"]["said"]
    assert_close(two["DDP as FSDP"], two["straight DDP"])
    assert two["straight DDP"]["weights"] == pytest.approx(two["straight"]["weights"], abs=1e-12)


@pytest.mark.slow
def test_a_run_resumes_on_four_ranks_with_copies_and_on_one_rank(two, folder):
    four, one = results(folder, "four", 4), results(folder, "one", 1)
    for run in (four["as HSDP"], four["on 4"], one["as one"]):
        assert_close(run, two["straight"])
    assert four["again"]["weights"] == four["as HSDP"]["weights"]
    names = sorted(path.name for path in (folder / "four" / "hsdp" / "step_00000004" / "model").iterdir())
    assert names == [PART.replace("2", "1", 1), PART], "only the ranks of the first copy write"
    assert four["frozen"] == two["frozen"]


def test_weights_below_adapters_have_the_same_digest_in_a_sharded_model(two):
    whole, names, sharded, names_of_sharded = two["frozen"]
    assert whole == sharded != ""
    assert names == names_of_sharded == "scale,last.weight,last.bias", "only trained weights and buffers are saved"


@pytest.mark.parametrize(
    ("case", "problem"),
    {
        "removed": f"model/{PART} is missing",
        "truncated": f"optimizer/{PART} has 200 bytes instead of ",
        "flipped": f"model/{PART} is damaged: its sha256 differs from the manifest.",
        "another run": f"model/{PART} is damaged: its sha256 differs from the manifest (it is a part of another run, at its step 4)",
        "another step": f"optimizer/{PART} is damaged: its sha256 differs from the manifest (it is a part of the checkpoint of step 2)",
        "no manifest": "manifest.json is missing",
    }.items(),
)  # fmt: skip
def test_a_part_that_is_missing_damaged_or_of_another_run_is_named_and_the_checkpoint_is_skipped(two, case, problem):
    assert problem in two[case]["said"]
    assert two[case]["from"] == 2
    assert two[case]["weights"] == two["straight"]["weights"]
    assert two[case]["left"] == ["damaged_step_00000004", "step_00000002", "step_00000004"]


def test_every_rank_refuses_a_run_without_a_complete_checkpoint_and_a_newer_format_with_the_same_line(two):
    for case, text in {"only damaged": f"model/{PART} is damaged", "newer": "(format 3; this version reads 2)"}.items():
        assert text in two[case]["error"]
        assert [errors[case] for errors in two["errors"]] == [two[case]["error"]] * 2
        assert two[case]["from"] is None


def test_a_part_that_cannot_be_written_leaves_no_checkpoint_and_the_last_save_is_repeated(two):
    run = two["full disk"]
    for step in (2, 4):
        assert f"the checkpoint of step {step} could not be written on " in run["said"]
    assert "rank 1: No space left on device" in run["said"]
    assert (run["left"], run["unsaved"]) == (["step_00000004"], "")


def test_a_rank_that_does_not_see_the_checkpoint_receives_its_part(two):
    assert two["seen by one"]["from"] == 2
    assert two["seen by one"]["weights"] == two["straight"]["weights"]


def test_a_folder_that_is_not_shared_is_refused_before_training_and_never_committed(two):
    errors = [errors["not shared"] for errors in two["errors"]]
    assert errors[0] == errors[1]
    assert "does not see the folder of the main node. Use a folder that these nodes share." in errors[0]
    assert two["shared by the writers"]["error"] == "", "the second rank writes nothing"
    assert "the folder of rank 1 is not that of " in two["seen by one"]["unsaved"]
    assert [name for name in two["seen by one"]["left"] if "step" in name] == ["step_00000002"]


def test_torch_reads_the_checkpoint_with_its_own_reader(two):
    assert two["torch"]["read"]
    assert two["torch"]["consolidated"]
    shards = [f"{group}/{name}" for group in ("model", "optimizer") for name in (PART.replace("2", "1", 1), PART)]
    assert two["torch"]["files"] == ["files/note.txt", "manifest.json", *shards, "run.json"]


def test_a_rank_that_is_killed_during_a_save_leaves_the_checkpoint_absent_and_the_one_before_it_intact(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [sys.executable, PROGRAM, "--part", "blocked", "--blocked_by", fifo, "--output_dir", tmp_path / "run"]
    running = Running([command] * 2, rank_environments(2))
    running.until("blocked", of=1)
    os.kill(running.processes[1].pid, signal.SIGKILL)
    ended = running.ended()
    assert ended.codes == [1, -signal.SIGKILL]
    assert "the checkpoint of step 4 could not be written on " in ended.text
    assert "rank 1 has ended before its part was complete" in ended.text
    assert sorted(path.name for path in (tmp_path / "run").glob("*step_*")) == ["step_00000002"]
