"""A fork of tests/forking.py, on which other tests rely, starts and ends as a new interpreter does."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests import forking
from tests.conftest import PROGRAMS, ROOT, Ended, Running, clean_environment, fork_server, run_ranks

AS_STARTED = PROGRAMS / "as_started.py"


@pytest.mark.parametrize("how", ["end", "exit", "words", "exception", "at once", "SIGKILL", "SIGTERM"])
def test_a_fork_starts_and_ends_as_a_new_interpreter(how, tmp_path):
    def launch(fresh: bool) -> Ended:
        return run_ranks(1, AS_STARTED, how, 'a "word"\nof two lines', fresh=fresh, ACCEL_DDP_CACHE=str(tmp_path))

    forked, real = launch(fresh=False), launch(fresh=True)
    assert forked.codes == real.codes
    facts, expected = (json.loads(ended.text.splitlines()[0]) for ended in (forked, real))
    assert facts == expected
    assert facts["environment"]["ACCEL_DDP_CACHE"] == str(tmp_path)
    assert forked.text.splitlines()[-1] == (real.text.splitlines()[-1] if how in ("words", "exception") else forked.text[:-1])


def test_variables_that_libraries_read_when_imported_need_a_new_interpreter():
    command = [sys.executable, AS_STARTED, "at once"]
    for environment, kind in [
        (clean_environment(RANK="1", OMP_NUM_THREADS="1"), forking.Forked),
        (clean_environment(HF_HUB_OFFLINE="1"), subprocess.Popen),
        ({name: value for name, value in clean_environment().items() if name != "CUDA_VISIBLE_DEVICES"}, subprocess.Popen),
    ]:
        running = Running([command], [environment])
        assert isinstance(running.processes[0], kind)
        assert running.ended().codes == [74]


def test_the_pid_of_a_fork_is_not_reused_before_its_exit_code_is_read():
    process = fork_server().fork([str(AS_STARTED), "at once"], clean_environment(), ROOT, new_session=True)
    facts = json.loads(process.stdout.read())
    assert facts["leads a session"]
    deadline = time.monotonic() + 180
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
    assert psutil.Process(process.pid).ppid() == fork_server().process.pid
    assert process.wait(60) == 74
    while psutil.pid_exists(process.pid):
        assert time.monotonic() < deadline


def test_a_fork_that_a_test_does_not_wait_for_is_reaped():
    process = fork_server().fork([str(AS_STARTED), "at once"], clean_environment(), ROOT, new_session=True)
    process.report.close()
    deadline = time.monotonic() + 180
    while psutil.pid_exists(process.pid):
        assert time.monotonic() < deadline
    assert run_ranks(1, AS_STARTED, "exit").codes == [75]


def test_a_killed_server_raises_an_error_instead_of_a_hang():
    server = forking.Server(clean_environment(), libraries="loop")
    server.process.kill()
    with pytest.raises(RuntimeError, match="has ended"):
        server.fork([str(AS_STARTED), "end"], clean_environment(), ROOT, new_session=False)
    reader, writer = os.pipe()
    os.close(writer)  # as if the server, which has this end, were killed
    with pytest.raises(RuntimeError, match="has ended"):
        forking.Forked(server, os.getpid(), os.open(os.devnull, os.O_RDONLY), reader).wait()


SESSION = """
import sys, time
from tests import conftest, forking
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
started = conftest.Running([sleep], [conftest.clean_environment()]).processes[0]
server = forking.Server(conftest.clean_environment(), libraries="loop")
forked = server.fork([str(conftest.PROGRAMS / "as_started.py"), "sleep"], conftest.clean_environment(), conftest.ROOT, True)
forked.stdout.readline()  # it has written everything, and sleeps
print(started.pid, forked.pid, flush=True)
time.sleep(600)
"""


def test_processes_of_a_session_of_tests_end_when_it_is_killed():
    session = subprocess.Popen(
        [sys.executable, "-c", SESSION], env=clean_environment(), cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    processes = [psutil.Process(int(pid)) for pid in session.stdout.readline().split()]
    assert len(processes) == 2
    session.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(processes, timeout=30)
    for process in left:
        process.kill()
    assert left == []
    session.wait()
