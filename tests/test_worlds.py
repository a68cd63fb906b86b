"""Promise 2: the number of ranks and the micro-batch size change the duration of a run, not its result."""

import pytest
import torch

from tests.conftest import PROGRAMS, run_ranks


@pytest.fixture(scope="module", params=[(1, 3), pytest.param((1, 2, 4, 8), marks=pytest.mark.slow)], ids=["3", "2, 4 and 8"])
def results(request, tmp_path_factory) -> dict[int, dict]:
    """Return the results of tests/programs/core.py on 1 to 8 ranks. Each rank is a real process."""
    folder = tmp_path_factory.mktemp("results")
    loaded = {}
    for ranks in request.param:
        out = folder / f"{ranks}.pt"
        run_ranks(ranks, PROGRAMS / "core.py", "--out", out, "--output_dir", folder / str(ranks)).well()
        loaded[ranks] = torch.load(out, weights_only=False)
    return loaded


def distance(a: dict, b: dict) -> float:
    """Return the largest absolute difference between two sets of weights."""
    differences = [(a["weights"][name] - b["weights"][name]).abs().max() for name in a["weights"]]
    return torch.stack(differences).max().item()  # unlike Python's max, it does not ignore NaN


@pytest.mark.parametrize(("dtype", "limit"), [("torch.float64", 1e-12), ("torch.float32", 1e-5)])
def test_weights_do_not_depend_on_ranks_or_micro_batches(results, dtype, limit):
    """Compare 1 to 8 ranks, each with the largest micro-batch and with micro-batches of 2. Numbers of labelled tokens are uneven."""
    one = results[1][f"{dtype}/48"]
    for ranks in results:
        for micro in (48, 2):
            other = results[ranks][f"{dtype}/{micro}"]
            assert distance(one, other) < limit, (ranks, micro)
            assert other["losses"] == pytest.approx(one["losses"], rel=limit * 10)
            assert other["norms"] == pytest.approx(one["norms"], rel=limit * 100)
            for step, means in zip(one["means"], other["means"], strict=True):
                assert means == pytest.approx(step, rel=limit * 100)
                assert 0 < means["right"] < 1
                assert "logit" in means
    untrained = results[1]["torch.float64/48"]["losses"][0]
    assert results[1]["torch.float64/48"]["losses"][-1] < 0.7 * untrained  # the model has learned


def test_weights_of_eight_ranks_and_of_one_agree_to_two_bits_of_float32(results):
    for ranks in results:
        assert distance(results[1]["float32, sgd"], results[ranks]["float32, sgd"]) <= 3e-8, ranks
    weights = results[1]["float32, sgd"]["weights"].values()
    assert 0.1 < max(weight.abs().max().item() for weight in weights) < 0.25
    assert min(results[1]["float32, sgd"]["norms"]) > 0.01, "every step moves the weights by more than 1e-3"


def test_clipping_and_sgd_do_not_depend_on_ranks(results):
    for ranks in results:
        assert distance(results[1]["sgd, clipped"], results[ranks]["sgd, clipped"]) < 1e-12
    assert min(results[1]["sgd, clipped"]["norms"]) > 0.01  # gradients were clipped


def test_dropout_does_not_depend_on_ranks_when_micro_batches_are_the_same(results):
    for ranks in results:
        assert distance(results[1]["dropout"], results[ranks]["dropout"]) < 1e-12
    assert distance(results[1]["dropout"], results[1]["torch.float64/2"]) > 1e-4  # dropout was active


def test_every_rank_ends_with_the_same_weights(results):
    assert all(result["params equal on all ranks"] for result in results.values())


def test_a_resumed_run_ends_with_the_same_weights(results):
    """Weights are bit-identical on any number of ranks."""
    for result in results.values():
        assert distance(result["resumed"], result["dropout"]) == 0
        assert len(result["resumed"]["losses"]) == 4


def test_shares_of_ranks_change_only_rounding_and_dropout_and_are_resumed_exactly(results):
    """Of 48 items the ranks get 8, 16 and 24, and after the resume with other shares 24, 16 and 8."""
    one = results[1]["torch.float64/48"]
    for ranks, result in results.items():
        assert distance(result["shares, resumed"], result["shares"]) == 0
        assert distance(result["other shares, resumed"], one) < 1e-12
        assert distance(result["sizes"], one) < 1e-12, "every second rank has micro-batches of 1 item"
        assert (distance(result["shares"], result["dropout"]) > 0) == (ranks > 1), "other micro-batches have other dropout"


def test_a_mixture_does_not_depend_on_ranks_and_is_resumed_in_the_middle(results):
    mixed = results[1]["mixed"]
    for result in results.values():
        assert distance(result["mixed"], mixed) < 1e-12
        assert distance(result["mixed, resumed"], result["mixed"]) == 0
        assert result["mixed, resumed"]["rows"] == result["mixed"]["rows"]
    assert distance(mixed, results[1]["dropout"]) > 1e-4  # the same rows without weights
    assert mixed["rows"] == {"rows/a": 270, "rows/b": 54, "rows/c": 108}  # 5/8, 1/8 and 2/8 of 9 * 48


def test_weights_do_not_depend_on_how_items_are_dealt_to_ranks(results):
    one = results[1]["torch.float64/48"]
    for ranks, result in results.items():
        for name in ("padded", "packed", "shares, packed"):
            assert distance(one, result[name]) < 1e-12, (ranks, name)
            assert result[name]["losses"] == pytest.approx(one["losses"], rel=1e-11)


def test_steps_of_tokens_do_not_depend_on_ranks_and_are_resumed_in_the_middle(results):
    one = results[1]["steps of tokens"]
    for ranks, result in results.items():
        assert distance(result["steps of tokens"], one) < 1e-12, ranks
        assert result["steps of tokens"]["losses"] == pytest.approx(one["losses"], rel=1e-11)
        assert distance(result["steps of tokens, resumed"], result["steps of tokens"]) == 0
        assert distance(result["steps of tokens, resumed from one rank"], one) < 1e-12, "on other ranks, in other micro-batches"
        assert result["steps of tokens, resumed"]["rows"] == one["rows"]
    assert 360 < sum(one["rows"].values()) < 460  # 9 * 700 tokens
    assert distance(one, results[1]["mixed"]) > 1e-4


def test_items_come_in_the_same_order_on_any_number_of_ranks_over_two_epochs(results):
    order = results[1]["order"]
    for ranks in results:
        assert torch.equal(results[ranks]["order"], order), ranks
        assert torch.equal(results[ranks]["order from 3"], order[3 * 48 :]), "starting at step 3 gives the same order"
    first, second = order[:101], order[101:202]
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(101)), "each epoch has each item once"
    assert not torch.equal(first, second), "each epoch has a different order"


def test_augmentation_depends_only_on_the_position(results):
    noise = results[1]["noise/0"]
    assert len(noise.unique(dim=0)) == len(noise)
    for ranks in results:
        for workers in (0, 2):
            assert torch.equal(results[ranks][f"noise/{workers}"], noise), (ranks, workers)


def test_metrics_equal_those_of_one_process(results):
    one = results[1]["metrics"]
    assert one["items"] == 101
    for ranks in results:
        other = results[ranks]["metrics"]
        assert other["labels"] == one["labels"], "each item is evaluated once, in the order of the data"
        assert (other["accuracy"], other["macro_f1"]) == (one["accuracy"], one["macro_f1"])
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-14)
        for name in "abc":
            assert other[f"loss/{name}"] == pytest.approx(one[f"loss/{name}"], rel=1e-14)
    assert 0.1 < one["macro_f1"] <= one["accuracy"] + 0.2 < 1.2
    sizes = {"a": 40, "b": 41, "c": 20}
    assert sum(one[f"loss/{name}"] * size for name, size in sizes.items()) / 101 == pytest.approx(one["loss"], rel=1e-14)
    assert len({one[f"loss/{name}"] for name in sizes}) == 3


def test_ranks_use_the_metrics_of_the_main_rank_if_those_of_ranks_differ(results):
    """The metric falls on the main rank and rises on the others, so that without an agreement only one rank would stop."""
    for ranks in results:
        assert len(results[ranks]["metrics of a rank"]) == ranks
        for stopped, refused in results[ranks]["metrics of a rank"]:
            assert stopped == (2, {"own": -2.0})
            assert "the metric 'own' of the evaluation is list [0]" in refused


def test_teams_of_one_two_and_four_ranks_in_one_job_take_the_same_steps(tmp_path):
    """Each team is all that takes part in its steps: it computes the global batch, and gradients, numbers and dropout are its own."""
    run_ranks(4, PROGRAMS / "teams.py", "--out", tmp_path / "out.pt", "--output_dir", tmp_path / "run").well()
    everyone = torch.load(tmp_path / "out.pt")
    weights, numbers = everyone[0][4]
    for of_rank in everyone:
        for size in (1, 2, 4):
            assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(of_rank[size][0], weights, strict=True)), size
            assert torch.allclose(torch.tensor(of_rank[size][1]), torch.tensor(numbers), rtol=1e-5), size
    assert {items for _, _, items in numbers} == {8.0}
    assert numbers[-1][0] < numbers[0][0]
