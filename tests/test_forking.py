"""What other tests rely on: a fork of tests/forking.py starts and ends as an interpreter of its own does."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests import forking
from tests.conftest import PROGRAMS, ROOT, Ended, Running, clean_environment, fork_server, run_ranks

AS_STARTED = PROGRAMS / "as_started.py"


@pytest.mark.parametrize("how", ["end", "exit", "words", "exception", "at once", "SIGKILL", "SIGTERM"])
def test_it_starts_and_ends_as_an_interpreter_of_its_own(how, tmp_path):
    def started(fresh: bool) -> Ended:
        return run_ranks(1, AS_STARTED, how, 'a "word"\nof two lines', fresh=fresh, ACCEL_DDP_CACHE=str(tmp_path))

    forked, real = started(fresh=False), started(fresh=True)
    assert forked.codes == real.codes
    facts, expected = (json.loads(ended.text.splitlines()[0]) for ended in (forked, real))
    assert facts == expected
    assert facts["environment"]["ACCEL_DDP_CACHE"] == str(tmp_path)
    assert forked.text.splitlines()[-1] == (real.text.splitlines()[-1] if how in ("words", "exception") else forked.text[:-1])


def test_what_is_read_when_libraries_are_imported_needs_an_interpreter_of_its_own():
    command = [sys.executable, AS_STARTED, "at once"]
    for environment, kind in [
        (clean_environment(RANK="1", OMP_NUM_THREADS="1"), forking.Forked),
        (clean_environment(HF_HUB_OFFLINE="1"), subprocess.Popen),
        ({name: value for name, value in clean_environment().items() if name != "CUDA_VISIBLE_DEVICES"}, subprocess.Popen),
    ]:
        running = Running([command], [environment])
        assert isinstance(running.processes[0], kind)
        assert running.ended().codes == [74]


def test_its_pid_is_its_own_until_its_end_was_asked_for():
    process = fork_server().fork([str(AS_STARTED), "at once"], clean_environment(), ROOT, new_session=True)
    facts = json.loads(process.stdout.read())
    assert facts["leads a session"]
    deadline = time.monotonic() + 10
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
    assert psutil.Process(process.pid).ppid() == fork_server().process.pid
    assert process.wait(10) == 74
    while psutil.pid_exists(process.pid):
        assert time.monotonic() < deadline


def test_one_that_a_test_has_left_does_no_harm():
    process = fork_server().fork([str(AS_STARTED), "at once"], clean_environment(), ROOT, new_session=True)
    process.report.close()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(process.pid):
        assert time.monotonic() < deadline
    assert run_ranks(1, AS_STARTED, "exit").codes == [75]


def test_nobody_waits_for_a_server_that_is_gone():
    server = forking.Server(clean_environment())
    server.process.kill()
    with pytest.raises(RuntimeError, match="has ended"):
        server.fork([str(AS_STARTED), "end"], clean_environment(), ROOT, new_session=False)
    reader, writer = os.pipe()
    os.close(writer)  # the server had it
    with pytest.raises(RuntimeError, match="has ended"):
        forking.Forked(server, os.getpid(), os.open(os.devnull, os.O_RDONLY), reader).wait()
