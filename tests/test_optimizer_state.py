"""State that an optimizer of the user keeps in its groups, and averages that it computes itself."""

import pytest
import torch

from accel_ddp.saving import checkpoint_format
from accel_ddp.saving.pieces import AveragedPieces, Pieces
from tests.conftest import PROGRAMS, run_ranks


def distance(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> dict[int, dict]:
    """Return the results of tests/programs/optimizer_state.py on one rank and on two."""
    folder, loaded = tmp_path_factory.mktemp("own"), {}
    for ranks in (1, 2):
        options = ["--out", folder / f"{ranks}.pt", "--output_dir", folder / str(ranks), "--kinds", "Counting", "Averaging"]
        options += ["--of_one_rank", folder / "1"] if ranks == 2 else []
        run_ranks(ranks, PROGRAMS / "optimizer_state.py", *options).well()
        loaded[ranks] = torch.load(folder / f"{ranks}.pt", weights_only=False)
    return {**loaded, "folder": folder}


@pytest.mark.parametrize("kind", ["Counting", "Averaging", "Counting, sharded", "Averaging, sharded", "workers"])
def test_a_resumed_run_continues_with_the_numbers_in_the_groups_of_any_optimizer(own, kind):
    for ranks in (2,) if "sharded" in kind else (1, 2):
        whole, resumed = own[ranks][kind], own[ranks][f"{kind}, resumed"]
        assert max(resumed["steps"]) == max(whole["steps"]) > min(resumed["steps"]) > 1
        for step, weights in resumed["steps"].items():
            assert all(map(torch.equal, weights, whole["steps"][step])), (ranks, step)
        assert distance(whole["model"], resumed["model"]) == 0
        assert resumed["metrics"] == whole["metrics"]
        for parts in zip(
            whole["groups"] + [*whole["state"].values()], resumed["groups"] + [*resumed["state"].values()], strict=True
        ):
            assert len({str(sorted(part.items())) for part in parts}) == 1
        types = [{(key, value.dtype) for one in run["state"].values() for key, value in one.items()} for run in (whole, resumed)]
        assert types[0] == types[1]


def test_the_numbers_of_groups_are_the_same_on_other_numbers_of_ranks(own):
    for kind in ("Counting", "Averaging", "workers"):
        assert distance(own[1][kind]["model"], own[2][kind]["model"]) < 1e-10
        if kind != "workers":
            assert distance(own[2][kind]["model"], own[2][f"{kind}, of one rank"]["model"]) < 1e-10
            assert distance(own[2][kind]["model"], own[2][f"{kind}, sharded"]["model"]) < 1e-10


def test_an_option_of_the_new_command_wins_and_what_the_optimizer_has_changed_is_restored(own):
    groups = own[1]["other decay"]["groups"]
    assert [(group["decay"], group["k"], group["grown"]) for group in groups] == [(0.2, 6, pytest.approx(1.3**6))] * 2


def test_averages_of_the_optimizer_are_evaluated_and_exported_and_leave_training_as_it_is(own):
    found = own[1]["Averaging"]
    assert distance(found["model"], own[1]["Averaging, rarely evaluated"]["model"]) == 0
    assert found["metrics"]["sum"] == pytest.approx(sum(float(p.sum()) for p in found["model"].values()), rel=1e-12)
    assert own[1]["evaluated only"]["metrics"] == found["metrics"]
    assert [group["train_mode"] for group in found["groups"]] == [False, False]
    last = own["folder"] / "1" / "Averaging" / "step_00000006"
    averaged, raw = AveragedPieces(last), Pieces(last, checkpoint_format.MODEL)
    for name, p in found["model"].items():
        assert torch.equal(averaged.read(name), p)
        assert (p - raw.read(name)).abs().max() > 1e-4
        torch.testing.assert_close(p.lerp(found["state"][name]["z"], 0.1), raw.read(name), rtol=0, atol=1e-12)


def test_what_cannot_be_stored_is_refused_on_every_rank_with_its_name_and_type(own):
    allowed = "A checkpoint can store tensors, numbers and strings, and lists and tuples of numbers and strings only."
    assert own[2]["said"] == own[1]["said"]
    assert own[2]["said"] == {
        "ema": "--ema_decay 0.9: the optimizer Averaging averages the weights itself. Leave it out.",
        "workers": "--sync_every 2: workers exchange their weights only, and the optimizer Averaging has averages of weights too. Use "
        "another optimizer, or leave --sync_every out.",
        "group": f"The optimizer Counting stores a Box in a parameter group (box). {allowed}",
        "later": f"The optimizer BoxesGroup stores a Box in a parameter group (box). {allowed}",
        "state": f"The optimizer BoxesState stores a Box for each parameter (box). {allowed}",
        "elsewhere": "The optimizer Elsewhere has state of no parameter, which cannot be stored: 'all'.",
        "extended": "The optimizer Extended has state that a checkpoint cannot store: seen.",
    }
    assert own[1]["flat"] == "", "a whole tensor may have any shape"
    assert "The optimizer Flat stores a tensor of its own for the part of a parameter that a rank holds (flat)." in own[2]["flat"]
