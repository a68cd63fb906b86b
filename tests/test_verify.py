"""`accel-ddp verify` on recipes that keep the promises, and on one that does not."""

import pytest

from tests.conftest import BIN, PROGRAMS, clean_environment, free_port, run_all

TRAINS = PROGRAMS / "trains.py"


def verify(*words: object) -> list:
    return [BIN / "accel-ddp", "verify", *words]


@pytest.mark.slow  # CI has the README's `verify`, which passes
def test_it_fails_what_is_wrong_and_says_why():
    """A loss that is a mean of each micro-batch, instead of a sum, depends on how items are split. What is right passes in
    the test of the README's commands."""
    environment = clean_environment(OMP_NUM_THREADS="1")
    wrong = run_all([verify(TRAINS, "--wrong", "mean")], [environment])
    assert wrong.codes == [1]
    assert wrong.text.count("PASS") == 2, "a second number of ranks, and resumed after a kill"
    assert "48 of 48 the same" in wrong.text
    assert "FAIL: micro-batch 1 and 2: " in wrong.text
    assert wrong.text.count("FAIL: ") == 1, "with the same micro-batches it does not matter who has them"
    broken = run_all([verify(TRAINS, "--lr", "much"), verify("nowhere.py"), verify()], [environment] * 3)
    assert broken.codes == [2, 2, 2]
    assert "the run 'killed' ended with exit code 2, 2: there is no checkpoint" in broken.texts[0]
    assert "no such file" in broken.texts[1]
    assert "needs a recipe" in broken.texts[2]
    assert "Traceback" not in broken.text


@pytest.mark.slow
def test_on_two_nodes():
    """The same words on both, with their own --machine_rank, as `accelerate launch` takes them; disks of their own."""
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
