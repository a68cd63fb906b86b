"""Promise 3 for sharded runs: each rank writes its part, and the checkpoint is complete on all nodes or absent."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from accel_ddp.exporting import export
from accel_ddp.saving.checkpoint_format import find_problem
from tests.conftest import BIN, PROGRAMS, ROOT, Running, clean_environment, free_port, rank_environments, run_all, run_ranks

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
    assert "rank 1 exited before its part was complete" in ended.text
    assert sorted(path.name for path in (tmp_path / "run").glob("*step_*")) == ["step_00000002"]


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.fixture
def command(tmp_path, tiny_model, cache) -> list[object]:
    """Return the command of a run of 8 steps without its folder. It saves after each step and keeps the best and the last two."""
    rows = [{"text": f"{'a fine film' if i % 3 else 'cold'} {i}", "label": int(i % 3 > 0)} for i in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--train_file", tmp_path / "data.jsonl", "--eval_file", tmp_path / "data.jsonl", "--max_eval_items", "7"]
    sizes = ["--global_batch_size", "8", "--micro_batch_size", "2", "--log_every", "1", "--ema_decay", "0.9"]
    kept = [
        "--steps",
        "8",
        "--save_every",
        "1",
        "--eval_every",
        "2",
        "--keep_last",
        "2",
        "--keep_best",
        "--best_metric",
        "loss:max",
    ]
    return [sys.executable, ROOT / "recipes" / "classify.py", "--model", tiny_model, *data, *sizes, *kept]


def parts_of(folder: Path) -> dict[str, bytes]:
    """Return the tensors in the files of all ranks. The files also contain the name of the run."""
    files = {path.relative_to(folder): load_file(path) for path in folder.glob("*/*.safetensors")}
    return {f"{file}/{name}": tensor.tobytes() for file, tensors in files.items() for name, tensor in tensors.items()}


@pytest.mark.slow
def test_a_run_whose_launcher_is_killed_saves_without_its_store(command, tmp_path):
    command[command.index("--steps") + 1], command[command.index("--save_every") + 1] = "600", "500"
    launcher = [BIN / "torchrun", "--nproc_per_node", 2, "--master_port", free_port()]
    environment = clean_environment(ACCELERATE_USE_CPU="true", **FSDP)
    running = Running([[*launcher, *command[1:], "--output_dir", tmp_path / "run"]], [environment], fresh=True)
    running.until("step   7/600")
    running.processes[0].kill()
    ended = running.ended()
    saved = re.search(r"^error: LAUNCHER_DIED: .* Step (\d+) of 600 is saved", ended.text, re.MULTILINE)
    assert saved, ended.text
    checkpoint = max((tmp_path / "run").glob("step_*"))
    assert (find_problem(checkpoint), int(checkpoint.name[5:])) == ("", int(saved[1]))
    assert list(checkpoint.glob("part-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_sharded_run_that_is_stopped_or_killed_resumes_bit_identical_and_removes_old_checkpoints(command, tmp_path, how):
    """It is killed while it saves, because it saves after each step."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run_all([[*command, "--output_dir", straight]] * 2, rank_environments(2, **FSDP)).well()
    running = Running([[*command, "--output_dir", stopped]] * 2, rank_environments(2, **FSDP))
    running.until("step 5/8")
    for process in running.processes if how == signal.SIGKILL else running.processes[1:]:
        os.kill(process.pid, how)
    ended = running.ended()
    assert 0 not in ended.codes
    if how == signal.SIGTERM:
        assert ended.codes[0] == ended.codes[1]
        assert "stopped: requested by SIGTERM on rank 1" in ended.text
    run_all([[*command, "--output_dir", stopped, "--resume"]] * 2, rank_environments(2, **FSDP)).well()
    for folder in (straight, stopped):
        kept = sorted(path.name for path in folder.glob("*step_*"))
        assert {"step_00000007", "step_00000008"} <= set(kept)
        assert len(kept) <= 3
        assert not list(folder.glob(".*partial*"))
    one, other = (parts_of(folder / "step_00000008") for folder in (straight, stopped))
    assert len([name for name in one if name.endswith("classifier.weight/ema")]) == 2, "each rank has a part"
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []
    models = [folder / "model" for folder in (straight, stopped)]
    models.append(export.from_checkpoint(str(straight / "step_00000002"), str(tmp_path / "out")))  # the averages of this step
    assert len({(model / "model.safetensors").read_bytes() for model in models}) == 1, "the highest loss is that of step 2"
    assert "\n2 steps on 2 ranks" in (models[1] / "README.md").read_text()


@pytest.mark.slow
def test_nodes_with_a_folder_of_their_own_are_refused_before_the_model_is_loaded(command, tmp_path):
    """The same relative path is another folder for each rank, as on nodes without a shared disk. One copy per node needs none."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    ended = run_all([[*command, "--output_dir", "run"]] * 2, rank_environments(2, **FSDP), cwd=folders)
    assert ended.codes == [2, 2]
    assert ended.text.count("--output_dir run: each rank writes its part of a checkpoint, but ") == 1
    assert "does not see the folder of the main node. Use a folder that these nodes share." in ended.text
    assert "step 1/8" not in ended.text
    assert not (folders[1] / "run").exists()
