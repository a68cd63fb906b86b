"""Tests of `accel-ddp verify` on a recipe that keeps the promises, and on one that does not."""

import math

import pytest
import torch
from safetensors.torch import save_file

from accel_ddp.saving import format
from accel_ddp.verify import _largest_difference
from tests.conftest import BIN, PROGRAMS, clean_environment, free_port, run_all

TRAINS = PROGRAMS / "trains.py"


def verify(*arguments: object) -> list:
    """Return the command."""
    return [BIN / "accel-ddp", "verify", *arguments]


@pytest.mark.slow  # in CI, tests/test_docs.py runs `verify` on a correct recipe
def test_verify_fails_on_a_wrong_recipe_and_prints_the_reason():
    """A loss that is the mean of each micro-batch, instead of the sum, depends on the micro-batch size."""
    environment = clean_environment(OMP_NUM_THREADS="1")
    wrong = run_all([verify(TRAINS, "--wrong", "mean")], [environment])
    assert wrong.codes == [1]
    assert wrong.text.count("PASS") == 2, "another number of ranks and a resume after a kill give the same result"
    assert "48 of 48 the same" in wrong.text
    assert "FAIL: micro-batch 1 and 2: " in wrong.text
    assert wrong.text.count("FAIL: ") == 1, "the assignment of micro-batches to ranks does not change the result"
    broken = run_all([verify(TRAINS, "--lr", "much"), verify("nowhere.py"), verify()], [environment] * 3)
    assert broken.codes == [2, 2, 2]
    assert "the run 'killed' ended with exit code 2, 2: there is no checkpoint" in broken.texts[0]
    assert "no such file" in broken.texts[1]
    assert "needs a recipe" in broken.texts[2]
    assert "Traceback" not in broken.text


def test_a_weight_that_is_not_a_number_is_the_largest_difference(tmp_path):
    for name, values in (("a", [1.0, 2.0, 3.0]), ("b", [1.5, float("nan"), 3.0])):
        (tmp_path / name).mkdir()
        save_file({str(i): torch.tensor([value]) for i, value in enumerate(values)}, tmp_path / name / format.MODEL)
    difference, name = _largest_difference(tmp_path / "a", tmp_path / "b")
    assert (math.isnan(difference), name) == (True, "1")


@pytest.mark.slow
def test_verify_on_two_nodes():
    """Both commands differ only in --machine_rank, as with `accelerate launch`. The nodes do not share a folder."""
    common = [
        "--config_file",
        "accelerate_configs/2node.yaml",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        free_port(),
    ]
    commands = [verify(*common, "--machine_rank", node, TRAINS) for node in (0, 1)]
    ended = run_all(commands, [clean_environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")] * 2)
    assert ended.codes == [0, 0], ended.text
    assert ended.texts[0].count("PASS") == 3, ended.texts[0]
    assert "The table is printed on node 0" in ended.texts[1]
