"""Data workers that are not forked (forkserver, spawn) get everything that they need, and end with their rank."""

import json
import time

import psutil
import pytest

from tests.conftest import PROGRAMS, run_ranks

pytestmark = pytest.mark.slow  # each case starts an interpreter that imports torch: 70 s

CASES = [
    "classify", "embed", "images", "pretrain_mlm", "seq2seq", "sft", "tag", "pretrain_mlm, streaming", "classify, spawn",
]  # fmt: skip


def launch(folder, *arguments: object) -> tuple[list[int], dict]:
    """Return the exit codes and what the program has written."""
    text = folder / "text.txt"
    text.write_text("\n".join(f"This is line {i} of a text, and its square is {i * i}." for i in range(500)))
    out = folder / "out.json"
    options = ["--out", out, "--text", text, "--output_dir", folder / "run", *arguments]
    ended = run_ranks(1, PROGRAMS / "workers.py", *options)
    assert out.is_file(), ended.text
    return ended.codes, json.loads(out.read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory, cache) -> dict:
    codes, found = launch(tmp_path_factory.mktemp("workers"))
    assert codes == [0]
    return found


def assert_no_process_is_left(pids: list[int]) -> None:
    """Wait for the end of the processes, which takes them some time after that of their rank."""
    assert len(pids) >= 2, "a fork server and a worker were running"
    until = time.monotonic() + 60
    while left := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < until, f"these processes still run: {left}"
        time.sleep(0.1)


@pytest.mark.parametrize("name", CASES)
def test_workers_that_are_not_forked_give_the_same_batches_and_ignore_the_signals_of_launchers(results, name):
    assert results[name] == {"train": True, "eval": True, "survived": True}


def test_a_collate_function_that_cannot_be_pickled_is_reported_with_the_option(results):
    text = results["a closure"]
    assert text.startswith("--worker_start forkserver: the dataset or the collate function cannot be pickled: ")
    assert text.endswith("or use --worker_start fork.")


def test_workers_that_are_not_forked_end_with_their_rank(results, tmp_path):
    """The rank exits while a worker runs, or it is killed."""
    assert_no_process_is_left(results["pids"])
    codes, found = launch(tmp_path, "--is_killed")
    assert codes == [-9]
    assert_no_process_is_left(found["pids"])
