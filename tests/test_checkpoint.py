"""Promise 3: a checkpoint is complete or absent, damage is detected and reported, and no full disk or kill loses saved work."""

import json
import os
import re
import signal
import sys
import time

import pytest

from tests.conftest import PROGRAMS, Running, clean_environment, node_environments, rank_environments, run_all, run_ranks

FILES = ["model.safetensors", "optimizer.safetensors", "run.json", "manifest.json", "files/note.txt"]


@pytest.fixture(scope="module")
def damage(tmp_path_factory) -> dict:
    """Return what each resumed run did after its checkpoints or options were changed.

    The original run has 6 steps and checkpoints after steps 2, 4 and 6. One process makes all runs.
    """
    folder = tmp_path_factory.mktemp("damage")
    run_ranks(1, PROGRAMS / "damage.py", "--out", folder / "out.json", "--output_dir", folder / "runs").well()
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_used(damage, file):
    """Damage each file with one flipped bit (five times), by truncating it to half and to zero bytes, and by removing it."""
    for how in [*(f"flip {file} {i}" for i in range(5)), f"truncate {file}", f"empty {file}", f"remove {file}"]:
        case = damage[how]
        assert case["error"] == "", how
        assert "step_00000006 on " in case["said"], how
        assert f"cannot be used: {file} " in case["said"], (how, case["said"])
        assert case["from"] == 4, how
        assert case["end"] == damage["straight"]["end"], how
        assert {"damaged_step_00000006", "step_00000006"} <= set(case["left"]), "it is renamed, and step 6 is saved again"


def test_a_half_written_checkpoint_is_ignored(damage):
    for how in ("empty folder", "half written"):
        assert damage[how]["from"] == 4
        assert damage[how]["end"] == damage["straight"]["end"]
    assert damage["two damaged"]["from"] == 2
    assert damage["two damaged"]["end"] == damage["straight"]["end"]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_train(damage):
    """A run that started from step 0 instead would look like a resumed run, but its result would differ."""
    assert "no complete checkpoint is left" in damage["all damaged"]["error"]
    assert damage["all damaged"]["from"] is None


def test_the_newest_checkpoint_is_chosen_by_step_and_not_by_modification_time(damage):
    assert damage["undamaged"]["from"] is damage["clocks"]["from"] is None
    assert "resumed at step 6" in damage["clocks"]["said"]


def test_a_pickle_that_contains_code_is_refused_and_not_executed(damage):
    """The manifest has the correct size and sha256 of the pickle, as an attacker would write them."""
    for file in FILES[:3]:
        assert damage[f"pickle {file}"]["from"] == 4, file
    assert damage["exploded"] is False


def test_a_newer_format_and_another_model_are_refused(damage):
    assert "newer version of accel_ddp (format 3; this version reads 2)" in damage["newer"]["error"]
    assert (
        "0.weight is ([5, 3], torch.float32) in the model and ([4, 3], torch.float32) in the checkpoint"
        in (damage["another model"]["error"])
    )


@pytest.mark.parametrize(
    ("case", "message"),
    {
        "lr": "--lr was 0.01 and is now 0.02", "seed": "--seed was 0 and is now 1",
        "batch": "--global_batch_size was 4 and is now 8", "steps": "--steps was 6 and is now 5",
        "data": "the content of the training data has changed",
        "fewer data": "the training data had 40 items and now have 39",
    }.items(),
)  # fmt: skip
def test_options_that_change_the_result_are_refused_by_name(damage, case, message):
    assert message in damage[f"changed {case}"]["error"]
    assert "--allow_config_change" in damage[f"changed {case}"]["error"]
    assert damage[f"changed {case}"]["from"] is None


def test_a_run_continues_after_harmless_and_after_allowed_changes_of_options(damage):
    for case in ("changed log_every", "changed micro"):
        assert damage[case]["from"] == 4
    assert damage["changed log_every"]["end"] == damage["straight"]["end"]
    assert "continuing although --lr was 0.01 and is now 0.02" in damage["allowed lr"]["said"]
    assert damage["allowed lr"]["end"] != damage["straight"]["end"], "the new learning rate is used, not the saved one"


def test_a_run_is_made_longer_without_permission_and_prints_the_old_and_the_new_learning_rate(damage):
    """The run has ended after step 6. Its learning rate falls from 0.01 at step 0 to 0 after the last step."""
    for how in ("longer", "longer in epochs"):
        assert damage[how]["error"] == ""
        assert (damage[how]["from"], damage[how]["to"]) == (6, 8)
        assert "The run now has 8 steps instead of 6." in damage[how]["said"]
        assert "The learning rate of step 7 is 0.0025 instead of 0." in damage[how]["said"]
        assert "step_00000008" in damage[how]["left"]
    assert damage["longer"]["end"] == damage["longer in epochs"]["end"] != damage["straight"]["end"]
    assert damage["longer from step 4"]["from"] == 4
    assert "The learning rate of step 5 is 0.005 instead of 0.00333." in damage["longer from step 4"]["said"]


def test_a_longer_run_that_is_stopped_and_resumed_has_the_same_result(damage):
    assert (damage["longer in two parts"]["to"], damage["longer, second part"]["from"]) == (7, 7)
    assert "instead of" not in damage["longer, second part"]["said"], "the checkpoint of step 7 belongs to the longer run"
    assert damage["longer, second part"]["end"] == damage["longer"]["end"]


def test_a_run_cannot_end_before_its_checkpoint(damage):
    assert damage["longer, then the old command"]["from"] is None
    error = damage["longer, then the old command"]["error"]
    assert "--steps 6 stops the run after step 6, but the checkpoint is at step 8 already" in error
    assert "use --steps 8 or more" in error
    assert "accel-ddp export" in error


def test_a_path_selects_the_checkpoint_to_resume_from(damage):
    assert damage["back to 2"]["from"] == 2
    assert damage["back to 2"]["end"] == damage["straight"]["end"]
    assert {"later_step_00000004", "later_step_00000006", "step_00000006"} <= set(damage["back to 2"]["left"])
    assert "resumed at step 6" in damage["path of a run"]["said"]
    assert "no node has a checkpoint there" in damage["no path"]["error"]
    assert "no complete checkpoint is left" in damage["damaged path"]["error"]


def test_the_best_checkpoint_is_kept_and_early_stopping_uses_best_values_from_before_the_resume(damage):
    steps = [name for name in damage["pruned"]["left"] if name.startswith("step_")]
    assert steps == ["step_00000004", "step_00000005", "step_00000006"], "the last two checkpoints and the best one are kept"
    assert damage["best"] == {"step": 4, "metric": "accuracy", "value": 0.9, "checkpoint": "step_00000004"}
    assert "best accuracy: 0.9000 at step 4" in damage["pruned"]["said"]
    assert (damage["patience"]["from"], damage["patience"]["to"]) == (4, 6), "the best value is from before the resume"
    said = damage["best is elsewhere"]["said"]
    assert "--keep_best: the best accuracy was 0.9000 at step 4, of which" in said
    assert "has no checkpoint. Step 6 is exported." in said
    assert "best accuracy:" not in said


def test_nan_is_never_the_best_value(damage):
    assert damage["best beside nan"]["step"] == 4
    assert damage["never a number"]["best"] is None
    assert "no best checkpoint, because brier was NaN in every evaluation" in damage["never a number"]["said"]


def test_the_direction_of_the_best_metric_is_given_and_not_guessed_and_the_first_of_equal_values_is_best(damage):
    assert damage["lower is better"]["best"]["step"] == 2
    assert damage["equal"]["best"]["step"] == 4
    assert "--best_metric brier:min or --best_metric brier:max" in damage["no direction"]["error"]
    assert damage["no direction"]["from"] is None, "it is refused before training"
    assert "Did you mean brier? Use one of: brier." in damage["misspelt"]["error"]
    assert damage["misspelt"]["from"] is None, "the evaluation before the first step reports it"


def test_numbers_of_numpy_and_torch_are_metrics_and_everything_else_is_refused_by_name(damage):
    assert {name: damage[name]["best"]["value"] for name in ("tensor", "whole number", "truth")} == {
        "tensor": pytest.approx(0.9), "whole number": 5, "truth": 1,
    }  # fmt: skip
    for value in ("[0.1, 0.2]", "0.5", "None", "1j", "{'a': 1}"):
        case = damage[f"refused {value}"]
        assert "the metric 'brier' of the evaluation is" in case["error"], value
        assert value in case["error"]
        assert case["from"] is None
    assert "It must return a dictionary" in damage["refused dictionary"]["error"]
    assert "a metric named 'step'" in damage["refused name"]["error"]


def test_a_run_whose_earlier_evaluations_lack_the_best_metric_continues(damage):
    assert damage["older"]["error"] == ""
    assert damage["older"]["from"] == 4
    assert damage["older"]["best"]["metric"] == "brier"


def test_the_same_command_again_continues_from_the_newest_checkpoint_of_its_own_run(damage):
    assert (damage["path first"]["from"], damage["path first"]["to"]) == (2, 4)
    assert (damage["path again"]["from"], damage["path again"]["to"]) == (4, 6)
    assert damage["path again"]["end"] == damage["straight"]["end"]


def test_another_optimizer_starts_with_new_state_if_the_change_is_allowed(damage):
    assert damage["allowed optimizer"]["from"] == 4
    assert "the optimizer was AdamW and is now SGD: its state starts from zero" in damage["allowed optimizer"]["said"]


def test_a_run_that_fails_does_not_end_before_its_save_is_complete(damage):
    assert damage["evaluation fails"]["error"] == "this evaluation fails"
    assert damage["evaluation fails"]["left"] == ["step_00000002"]


def test_a_kill_at_any_point_of_a_save_loses_at_most_one_interval(tmp_path):
    """Each process of the run saves after every step. It completes its first save, and is killed in its second one."""
    killed = run_ranks(1, PROGRAMS / "killed.py", "--output_dir", tmp_path / "run").well()
    report = json.loads(killed.text.strip().splitlines()[-1])
    operations, kills = report["first"]["operations"], report["killed"]
    commit = next(i for i, one in enumerate(operations) if one.startswith("os.rename .step_"))
    assert "open manifest.json" in operations[:commit]
    assert "os.remove model.safetensors" in operations[commit:], "an old checkpoint is removed"
    assert [one["status"] for one in kills] == [signal.SIGKILL] * len(operations)
    kind = lambda operation: re.sub(r"\d+", "", operation)
    for number, one in enumerate(kills):
        assert [kind(name) for name in one["operations"]] == [kind(name) for name in operations[: number + 1]]
        (start,) = one["from"]
        assert start == one["before"][-1], "every process resumes from the newest checkpoint"
        assert one["after"][-1] == start + (1 if number <= commit else 2), operations[number]
        assert one["problems"] == [], operations[number]
    assert [number for number, one in enumerate(kills) if any(".partial" in name for name in one["hidden"])] == list(
        range(operations.index("os.mkdir .step_00000003.partial") + 1, commit + 1)
    )
    assert [one["status"] for one in report["sized"]] == [signal.SIGXFSZ] * 2, "the kernel ended both processes inside of a file"
    files = [list(names) for one in report["sized"] for names in one["hidden"].values()]
    assert [sum(name.startswith(".tmp") for name in names) for names in files] == [1, 1]
    assert ["model.safetensors" in names for names in files] == [False, True]
    assert [one["after"][-1] - one["from"][0] for one in report["sized"]] == [1, 1]
    assert report["last"]["status"] == report["uninterrupted"]["status"] == 0
    assert report["last"]["hidden"] == {}, "partial folders are removed"
    assert len(report["last"]["after"]) == 2
    end = report["last"]["after"][-1]
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, other = (tmp_path / run / f"step_{end:08d}" / name for run in ("run", "run_uninterrupted"))
        assert one.read_bytes() == other.read_bytes()


def test_a_save_is_skipped_while_the_previous_one_hangs_and_the_last_one_is_not(tmp_path):
    """Two ranks save after steps 2, 4 and 6. The first save does not end before the second one is skipped."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    common = ["--steps", 6, "--save_every", 2, "--eval_every", 100, "--no_eval_first"]
    slow = [*common, "--blocked_by", fifo, "--ddp_timeout_seconds", 8, "--output_dir", tmp_path / "slow"]
    running = Running([[sys.executable, PROGRAMS / "trains.py", *slow]] * 2, rank_environments(2))
    running.until("checkpoint of step 4 is skipped")
    running.until("step 6/6")
    time.sleep(5)  # longer than the 4 s after which the second save was skipped; the last save waits without a limit
    assert list((tmp_path / "slow").glob("step_*")) == []
    fifo.write_text("")  # it opens only if the writer of checkpoints has the other end open
    ended = running.ended().well()
    assert ended.text.count("The previous checkpoint is still being written on ") == 1
    assert "also after 4 more seconds. The checkpoint of step 4 is skipped. Training continues." in ended.text
    assert sorted(path.name for path in (tmp_path / "slow").glob("*step_*")) == ["step_00000002", "step_00000006"]
    events = [json.loads(line) for line in (tmp_path / "slow" / "log.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "save"] == [2, 6]
    run_ranks(2, PROGRAMS / "trains.py", *common, "--output_dir", tmp_path / "fast").well()
    for step in (2, 6):
        files = [tmp_path / run / f"step_{step:08d}" / "model.safetensors" for run in ("slow", "fast")]
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> dict:
    """Return what runs did whose disks are too small.

    The disks are mounted in a separate mount namespace, which needs root or user namespaces.
    """
    folder = tmp_path_factory.mktemp("full")
    command = ["unshare", "-Urm", sys.executable, PROGRAMS / "full_disk.py", "--out", folder / "out.json"]
    run_all([[*command, "--output_dir", folder / "runs"]], [clean_environment()]).well()
    return json.loads((folder / "out.json").read_text())


def test_a_disk_that_is_too_small_is_detected_before_writing(full):
    assert full["too small"]["said"].count("3.13 MB are needed and 2.10 MB are free in") == 5, "once per interval and at the end"
    assert full["too small"]["unsaved"].startswith("the run is complete, but the checkpoint of step 8")
    assert full["room for two"]["whole"] == {"step_00000002": "", "step_00000004": ""}, "old checkpoints are kept"
    assert full["exit"]["exit code"][0] == 74
    assert "Traceback" not in full["exit"]["exit code"][1]


def test_a_save_that_failed_is_tried_again_at_the_next_interval(full):
    assert full["freed"]["whole"] == {"step_00000006": "", "step_00000008": ""}
    assert full["freed"]["unsaved"] == ""
    assert full["freed at the end"]["whole"] == {"step_00000008": ""}
    assert full["freed at the end"]["best"] == {"step": 8, "metric": "loss", "value": 1.0, "checkpoint": "step_00000008"}


def test_a_disk_that_is_full_at_any_file_leaves_nothing_half_written(full):
    for inodes in range(2, 9):
        case = full[f"inodes {inodes}"]
        assert "No space left on device" in case["said"]
        assert set(case["whole"].values()) <= {""}
        assert case["left"] == []
    assert [len(full[f"inodes {n}"]["whole"]) for n in range(2, 9)] == [0, 0, 0, 0, 0, 1, 1], "each of the files fails once"
    case = full["filling"]
    assert "No space left on device" in case["said"], "the disk becomes full in the middle of a file"
    assert set(case["whole"].values()) == {""}
    assert case["left"] == []


def test_a_log_on_a_full_disk_does_not_end_the_run(full):
    assert full["log on a full disk"]["unsaved"] == ""
    assert full["log on a full disk"]["said"].count("cannot be written: No space left on device. Training continues.") == 1


@pytest.mark.slow
def test_a_full_disk_of_the_main_node_is_reported_on_every_node(tmp_path):
    mount = 'mount -t tmpfs -o size=300k none "$0" && exec "$@"'
    command = [sys.executable, PROGRAMS / "trains.py", "--width", 1024, "--steps", 5, "--output_dir", tmp_path, "--no_eval_first"]
    commands = [["unshare", "-Urm", "sh", "-c", mount, tmp_path, *command], command]
    ended = run_all(commands, node_environments(2))
    assert ended.codes == [74, 74]
    for text in ended.texts:
        assert (
            len(re.findall(r"the checkpoint of step 4 could not be written on .* are free in .*Training continues", text)) == 1
        ), text
    assert "warning: SAVE_FAILED: the checkpoint of step 4" in ended.texts[1]


def test_a_read_only_folder_is_refused_before_training(full):
    code, text = full["exit"]["read only"]
    assert code == 2
    assert "cannot be written on" in text
    assert "Read-only file system" in text
    assert "Traceback" not in text


def test_the_last_of_ten_million_items_is_found_as_fast_as_the_first():
    code = """
import time
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
import torch
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.training.stream import TrainBatches
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
cfg = TrainConfig(global_batch_size=32, micro_batch_size=32)
train = TrainBatches(torch.arange(10_000_000), torch.stack)
def seconds(step):
    began = time.perf_counter()
    next(train.starting_at(step, accelerator, cfg))
    return time.perf_counter() - began
print(*(min(seconds(step) for _ in range(5)) for step in (0, 9_000_000 // 32)))
"""
    ended = run_all([[sys.executable, "-c", code]], [clean_environment()]).well()
    first, last = map(float, ended.text.strip().splitlines()[-1].split())
    assert last < 10 * first
