"""What makes a step faster or smaller works for sharded models too, and does not change what is learned."""

import json

import pytest

from accel_ddp.speed.autobatch import largest_together
from tests.conftest import PROGRAMS, run_ranks

EXACT = ["sharded", "weights kept", "gradients kept", "ddp", "tied", "checkpointed", "lora", "lora on the head",
         "in fit", "offloaded", "broken compiler"]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """The results of tests/programs/sharded_speed.py on two ranks over gloo."""
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(2, PROGRAMS / "sharded_speed.py", "--out", folder / "out.json", "--output_dir", folder / "run").well()
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("case", EXACT)
def test_a_sharded_model_without_padding_and_with_the_loss_in_chunks_learns_what_one_rank_learns(found, case):
    """Ranks with different numbers of tokens, two micro-batches, clipping. One rank computes padding and all logits."""
    assert found["learned"] > 0.02
    assert found[case]["padding-free"]
    assert found[case]["to one rank"] < 1e-5


def test_a_sharded_model_learns_what_ddp_learns(found):
    assert found["to ddp"] < 1e-5
    assert found["sharded"]["grad norm"] == pytest.approx(found["ddp"]["grad norm"], rel=1e-5)


def test_weights_that_stay_gathered_between_micro_batches_change_no_bit(found):
    assert found["to weights kept"] == 0


def test_rows_of_embedding_tables_that_are_sent_alone_have_the_sums_of_ddp(found):
    """With two ranks the order of a sum does not matter. A model that reads the weight itself sends all rows."""


def test_what_is_kept_during_a_step_is_not_sent_again(found):
    """Gathers and sums of the root and three layers, in two micro-batches."""
    sent = {case: list(found[case]["sent"].values()) for case in ("sharded", "weights kept", "gradients kept")}
    assert sent == {"sharded": [14, 8], "weights kept": [4, 8], "gradients kept": [4, 4]}


def test_gathers_in_bf16_change_weights_by_less_than_bf16_itself(found):
    """DDP multiplies in bf16 too. FSDP also sends the weights of layers in bf16, among them those of norms."""
    assert 0 < found["bf16"]["to ddp"] < 5e-3
    assert found["bf16"]["to one rank"] < 1e-2


@pytest.mark.parametrize("case", [name for name in EXACT if name != "ddp"])
def test_rehearsals_evaluations_and_errors_leave_a_model_sharded_and_without_gradients(found, case):
    assert found[case]["failed"], "the error was not raised"
    assert found[case]["is sharded"]


def test_a_compiler_that_fails_on_one_rank_lets_all_ranks_run_without_compilation(found):
    assert found["broken compiler"]["warm-up"] == [False, False]


def test_a_parameter_that_some_ranks_use_learns_what_it_learns_on_one_rank(found):
    """Experts inside of layers and heads in the root. AdamW decays a parameter with a gradient of 0, but not one without a gradient."""
    differences = {case: value for case, value in found["branches"].items() if not isinstance(value, list)}
    assert len(differences) == 11
    assert max(differences.values()) < 1e-12


@pytest.mark.parametrize(
    "case", {"heads as layers": "computes", "heads as layers, all called": "computes the gradients of"}.items()
)
def test_ranks_that_compute_different_layers_are_refused_with_their_names(found, case):
    name, does = case
    first, second = found["branches"][name]
    assert first == second
    assert f"but rank 0 {does} heads.0, while rank 1 {does} heads.1." in first


@pytest.mark.slow
def test_a_rank_that_computes_another_layer_later_ends_the_run_on_all_ranks(tmp_path):
    ended = run_ranks(2, PROGRAMS / "sharded_branches.py", "--changes", "--output_dir", tmp_path / "run")
    assert ended.codes == [2, 2]
    assert "but rank 1 computes heads.2, while it computes heads.0 in its first micro-batch." in ended.text


def test_the_flops_of_a_sharded_model_are_those_of_the_whole_model(found):
    assert found["sharded"]["flops"] == found["ddp"]["flops"]


def test_a_size_of_a_sharded_model_is_tried_only_if_smaller_ones_predict_that_it_fits():
    """A rank that runs out of memory leaves the others waiting. `load` is constant + size / room, as a fraction of the memory."""
    for per_rank in (1, 7, 12, 96, 1000):
        sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        for constant in (0.0, 0.3):
            for room in range(1, per_rank + 2):
                tried = []
                load = lambda size, constant=constant, room=room, tried=tried: tried.append(size) or constant + size / room
                best = largest_together(sizes, load)
                right = max((size for size in sizes if constant + size / room <= 1), default=0)
                assert all(size == 1 or constant + size / room <= 1 for size in tried), (sizes, room, tried)
                # The first size does not show how much of its memory is constant, so that the second one may be omitted.
                assert best == right or (constant and best == 1), (sizes, constant, room, tried)
    assert largest_together([1, 2, 4], lambda size: 2.0) == 0
