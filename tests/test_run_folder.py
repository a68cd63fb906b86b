"""A run neither overwrites another run nor a file of the user, and a run that left nothing behind does not block its folder."""

import json
import shutil
from pathlib import Path

import pytest

from accel_ddp.config.train_config import RecipeConfig, as_plain_dict
from accel_ddp.errors import UserError
from accel_ddp.saving import run_folder

LINES = [{"event": "start", "step": 0}, {"event": "evaluate", "step": 0}, {"event": "update", "step": 10}]


def claim(folder: Path, **options: str) -> str:
    """Claim the folder as a starting process does, and release the lock again. Return the error, or ""."""
    try:
        run_folder.claim(RecipeConfig(output_dir=str(folder), **options)).close()
        return ""
    except UserError as error:
        return str(error)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(folder: Path, **files: object) -> Path:
    """Write files into a folder. `config` and `adapter_config` are JSON, and `log` is a list of events."""
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        if name == "log":
            (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in value))
        elif name.endswith("config"):
            (folder / f"{name}.json").write_text(json.dumps(value))
        else:
            (folder / name.replace("__", ".")).write_text(value)
    return folder


@pytest.mark.parametrize("log", [None, [], LINES[:2]])
def test_the_same_command_starts_again_after_a_run_that_left_neither_a_checkpoint_nor_a_step(tmp_path, log):
    """The run was refused, or killed or interrupted while it was loading or in the evaluation before training."""
    folder = tmp_path / "run"
    assert claim(folder) == ""
    if log is not None:
        write(folder, log=log)
    assert claim(folder) == ""


def test_a_run_that_was_killed_between_the_lock_and_the_marker_does_not_block_its_folder(tmp_path):
    assert claim(write(tmp_path, __lock="")) == ""


def test_a_run_without_a_checkpoint_is_not_said_to_continue(tmp_path):
    """Its log is kept, and the message states what --resume does."""
    claim(tmp_path)
    write(tmp_path, log=LINES)
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"event": "upda')  # the process was killed in the middle of a line
    error = claim(tmp_path)
    assert "holds another run (its log ends at step 10) without a checkpoint" in error
    assert "starts again at step 0" in error
    assert claim(tmp_path, resume="auto") == ""
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4

    (tmp_path / "log.jsonl").unlink()
    (tmp_path / "model").mkdir()
    assert "holds another run (it has exported its model) without a checkpoint" in claim(tmp_path)


def test_a_run_with_a_checkpoint_names_it(tmp_path):
    claim(tmp_path)
    (tmp_path / "step_00000004").mkdir()
    error = claim(tmp_path)
    assert "holds another run (step_00000004). Add --resume without a path to continue it" in error
    error = claim(tmp_path, resume=str(tmp_path / "nope"))
    assert "nope: there is no such checkpoint or run" in error


def test_a_file_is_not_an_output_folder(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label")
    assert "rows.csv: is a file" in claim(tmp_path / "rows.csv")


def test_a_run_of_an_older_version_has_no_marker_and_is_resumed(tmp_path):
    write(tmp_path, config=as_plain_dict(RecipeConfig()), log=LINES)
    (tmp_path / ".step_00000008.partial").mkdir()
    assert "holds another run" in claim(tmp_path)
    assert claim(tmp_path, resume="auto") == ""
    assert not (tmp_path / ".step_00000008.partial").exists()
    shutil.rmtree(tmp_path)
    (tmp_path / "step_00000004").mkdir(parents=True)  # only a checkpoint was copied
    assert "holds another run (step_00000004)" in claim(tmp_path)
    assert claim(tmp_path, resume="auto") == ""


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config": {"model_type": "bert"}, "model__safetensors": "w"}, "holds a model (config.json, model.safetensors)"),
        ({"config": {"model_type": "bert"}}, "holds a model (config.json)"),
        ({"adapter_config": {}, "adapter_model__safetensors": "w"}, "(adapter_config.json, adapter_model.safetensors)"),
        ({"config": {"anything": 1}}, "contains config.json, which was not written by a run"),
        ({"log": LINES}, "contains log.jsonl, which was not written by a run"),
        ({"tables": "of a user", "classes__csv": "of a user"}, "contains classes.csv, tables, which was not written by a run"),
    ],
)
def test_a_folder_with_a_model_or_foreign_files_is_refused_again_and_again_and_stays_as_it_is(tmp_path, files, words):
    """The second attempt must not find anything that the first one has left."""
    before = content(write(tmp_path, **files))
    for options in ({}, {}, {"resume": "auto"}):
        assert words in claim(tmp_path, **options)
        assert content(tmp_path) == before


def test_files_of_the_user_that_no_run_writes_stay_as_they_are(tmp_path):
    write(tmp_path, notes="mine", __draft__tmp="mine too")
    assert claim(tmp_path) == claim(tmp_path) == ""
    assert (tmp_path / "notes").read_text() == "mine"
    assert (tmp_path / ".draft.tmp").read_text() == "mine too"
