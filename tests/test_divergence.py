"""Ranks whose weights are no longer equal end the run at the next check, and no checkpoint contains such weights."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accel_ddp.training import divergence
from tests.conftest import PROGRAMS, Ended, run_ranks

DIVERGES = PROGRAMS / "diverges.py"


def run_two(folder: Path, *arguments: object, codes: tuple[int, int] = (1, 1)) -> Ended:
    ended = run_ranks(2, DIVERGES, *arguments, "--output_dir", folder)
    assert tuple(ended.codes) == codes, ended.text
    return ended


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


def message(ended: Ended) -> str:
    """Return the failure. Assert that it was printed once on the node."""
    found = re.findall(r"error: DIVERGED: .*", ended.text)
    assert len(found) == 1, ended.text
    assert "Traceback" not in ended.text
    return found[0]


def test_every_kind_of_difference_is_found_and_every_legitimate_one_is_not():
    """One launch compares parameters of all types and shapes; see tests/programs/checksums.py."""
    ended = run_ranks(3, PROGRAMS / "checksums.py").well()
    results = [line for line in ended.texts[0].splitlines() if line.startswith("case ")]
    assert len(results) == 12, ended.text
    assert all(line.endswith(": as expected") for line in results), results


def test_a_changed_bit_ends_the_run_and_the_resumed_run_ends_like_an_uninterrupted_one(tmp_path):
    """Frozen parameters and buffers of the ranks differ in all three runs, which is no divergence."""
    folder = tmp_path / "run"
    text = message(run_two(folder, "--how", "bit", "--at", 7, "--check_every", 4))
    assert re.match(r"error: DIVERGED: at step 8 the weights of rank 0 \(\S+, pid \d+\) and rank 1 \(\S+, pid \d+\) differ", text)
    assert "The check at step 6 passed. The parameter body.weight differs;" in text
    assert f"--resume --output_dir {folder}" in text
    assert saved_steps(folder) == [6]
    ended = run_two(folder, "--resume", "--check_every", 4, codes=(0, 0))
    assert "resumed at step 6" in ended.text
    run_two(tmp_path / "whole", "--check_every", 0, codes=(0, 0))
    one, two = (load_file(run / "step_00000012" / "model.safetensors") for run in (folder, tmp_path / "whole"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_without_checks_a_run_does_not_detect_another_learning_rate_and_with_them_the_rank_is_named(tmp_path):
    run_two(tmp_path / "off", "--how", "lr", "--check_every", 0, codes=(0, 0))
    assert saved_steps(tmp_path / "off") == [6, 12]
    ended = run_ranks(3, DIVERGES, "--how", "lr", "--output_dir", tmp_path / "on")
    assert ended.codes == [1, 1, 1]
    text = message(ended)
    assert re.search(r"at step 6 the weights of rank 2 \(\S+, pid \d+\) differ from those of the other 2 ranks", text)
    assert "It is the first check of this process." in text
    assert re.search(r"The parameter \S+ and 4 more of 5 differ", text)
    assert saved_steps(tmp_path / "on") == []


def test_the_best_checkpoint_has_passed_a_check(tmp_path):
    folder = tmp_path / "run"
    text = message(run_two(folder, "--how", "bit", "--keep_best", "--eval_every", 2, "--save_every", 100))
    assert "at step 6 " in text
    assert "The check at step 4 passed." in text
    assert saved_steps(folder) == [2, 4]
    assert json.loads((folder / "best.json").read_text())["step"] == 4
    assert "6" not in json.loads((folder / "evaluations.json").read_text())


def test_a_stop_saves_no_weights_that_differ(tmp_path):
    """The step at which a signal stops the run is not known before, so that its check begins with the save."""
    folder = tmp_path / "run"
    options = ["--steps", 2000, "--save_every", 1000, "--check_every", 1000, "--eval_every", 1000]
    ended = run_two(folder, "--how", "update", "--at", 3, "--sigterm_at", 5, *options)
    step = int(re.search(r"at step (\d+) the weights", message(ended))[1])
    assert 5 < step < 1000
    assert saved_steps(folder) == []
    text = message(run_two(tmp_path / "planned", "--how", "update", "--save_every", 4, "--stop_after", 7))
    assert "at step 7 " in text
    assert "The check at step 4 passed." in text
    assert saved_steps(tmp_path / "planned") == [4]


@pytest.mark.parametrize("options", [(), ("--find_unused_parameters",), ("--static_graph", "--micro_batch_size", 3)])
def test_a_skipped_backward_pass_is_reported_before_the_weights_differ(tmp_path, options):
    ended = run_two(tmp_path / "run", "--how", "backward", *options)
    assert "step  5/12" in ended.text
    assert "step  6/12" not in ended.text
    assert "the backward pass of rank 1 reached none of the trained parameters" in ended.text
    assert "RuntimeError" in ended.text


def test_an_evaluation_that_changes_weights_is_refused_before_they_are_saved(tmp_path):
    folder = tmp_path / "run"
    ended = run_two(folder, "--how", "evaluation", "--eval_every", 2, "--save_every", 2, codes=(2, 2))
    assert ended.text.count("the evaluation at step 2 changed 1 tensor of Model: body.weight.") == 1
    assert "Traceback" not in ended.text
    assert saved_steps(folder) == [2]


def test_a_message_names_the_ranks_that_differ_from_the_majority():
    places = [f"node{rank // 2}, pid {rank}" for rank in range(6)]
    name = lambda *checksums: divergence._name_ranks(places[: len(checksums)], [[n] for n in checksums], range(len(checksums)))
    one = "rank 2 (node1, pid 2) differ from those of the other 4 ranks"
    assert name(1, 1, 5, 1, 1) == one
    assert name(1, 1, 5, 1, 6) == one.replace(" differ", " and rank 4 (node2, pid 4) differ").replace("4 ranks", "3 ranks")
    assert name(1, 2) == "rank 0 (node0, pid 0) and rank 1 (node0, pid 1) differ from each other"
    assert name(1, 1, 2, 2).endswith("rank 2 (node1, pid 2) and rank 3 (node1, pid 3) differ from each other")
    # Ranks 0, 2 and 4 hold the same part of a sharded model, and 1, 3 and 5 the other one.
    assert divergence.find_copies(6, 3) == [range(0, 6, 2), range(1, 6, 2)]
    sharded = divergence._name_ranks(places, [[number] for number in (1, 7, 1, 7, 1, 8)], range(1, 6, 2))
    assert sharded == "rank 5 (node2, pid 5) differ from those of the other 2 ranks with the same part of the weights"
    many = divergence._name_ranks([f"node{rank}" for rank in range(40)], [[max(0, rank - 29)] for rank in range(40)], range(40))
    assert many.endswith("rank 37 (node37) and 2 more ranks differ from those of the other 30 ranks")
