"""Promise 2: the number of ranks and the micro-batch change the time, not the result."""

import pytest
import torch

from tests.conftest import PROGRAMS, run_ranks

WORLDS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[int, dict]:
    """The same program in worlds of 1 to 4 real processes."""
    folder = tmp_path_factory.mktemp("worlds")
    found = {}
    for ranks in WORLDS:
        out = folder / f"{ranks}.pt"
        run_ranks(ranks, PROGRAMS / "core.py", "--out", out, "--output_dir", folder / str(ranks)).well()
        found[ranks] = torch.load(out, weights_only=False)
    return found


def distance(a: dict, b: dict) -> float:
    return max((a["weights"][name] - b["weights"][name]).abs().max().item() for name in a["weights"])


@pytest.mark.parametrize(("dtype", "limit"), [("torch.float64", 1e-12), ("torch.float32", 1e-5)])
def test_weights_do_not_depend_on_ranks_or_micro_batches(worlds, dtype, limit):
    """1x1, 1 rank x 4 micro-batches, 2x2, 4x1, 3x4, ..., with uneven numbers of labelled tokens."""
    one = worlds[1][f"{dtype}/24"]
    for ranks in WORLDS:
        for micro in (24, 2):
            other = worlds[ranks][f"{dtype}/{micro}"]
            assert distance(one, other) < limit, (ranks, micro)
            assert other["losses"] == pytest.approx(one["losses"], rel=limit * 10)
            assert other["norms"] == pytest.approx(one["norms"], rel=limit * 100)
    untrained = worlds[1]["torch.float64/24"]["losses"][0]
    assert worlds[1]["torch.float64/24"]["losses"][-1] < 0.7 * untrained  # and it did learn


def test_clipping_and_sgd_do_not_depend_on_ranks(worlds):
    for ranks in WORLDS:
        assert distance(worlds[1]["sgd, clipped"], worlds[ranks]["sgd, clipped"]) < 1e-12
    assert min(worlds[1]["sgd, clipped"]["norms"]) > 0.01  # it had to clip


def test_dropout_does_not_depend_on_ranks_when_micro_batches_are_the_same(worlds):
    for ranks in WORLDS:
        assert distance(worlds[1]["dropout"], worlds[ranks]["dropout"]) < 1e-12
    assert distance(worlds[1]["dropout"], worlds[1]["torch.float64/2"]) > 1e-4  # it did drop


def test_every_rank_ends_with_the_same_weights(worlds):
    assert all(world["params equal on all ranks"] for world in worlds.values())


def test_a_resumed_run_ends_with_the_same_weights(worlds):
    """To the bit, on any number of ranks."""
    for world in worlds.values():
        assert distance(world["resumed"], world["dropout"]) == 0
        assert len(world["resumed"]["losses"]) == 4


def test_the_same_items_in_the_same_order_over_two_epochs(worlds):
    order = worlds[1]["order"]
    for ranks in WORLDS:
        assert torch.equal(worlds[ranks]["order"], order), ranks
        assert torch.equal(worlds[ranks]["order from 3"], order[3 * 24 :]), "a stream entered at step 3 is the same stream"
    first, second = order[:101], order[101:202]
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(101)), "each epoch has each item once"
    assert not torch.equal(first, second), "every epoch is shuffled anew"


def test_augmentation_depends_on_the_position_only(worlds):
    noise = worlds[1]["noise/0"]
    assert len(noise.unique(dim=0)) == len(noise)
    for ranks in WORLDS:
        for workers in (0, 2):
            assert torch.equal(worlds[ranks][f"noise/{workers}"], noise), (ranks, workers)


def test_metrics_are_those_of_one_process(worlds):
    one = worlds[1]["metrics"]
    assert one["items"] == 101
    for ranks in WORLDS:
        other = worlds[ranks]["metrics"]
        assert other["labels"] == one["labels"], "every item once, in the order of the data"
        assert (other["accuracy"], other["f1"]) == (one["accuracy"], one["f1"])
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-14)
    assert 0.1 < one["f1"] <= one["accuracy"] + 0.2 < 1.2
