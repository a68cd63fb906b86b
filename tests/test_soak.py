"""A long run without faults, beside busy processes, produces no diagnosis.

`SOAK_SECONDS=600 pytest -m slow tests/test_soak.py` runs it for 10 minutes. The default is 30 minutes.
"""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.jobs import Jobs
from tests.nodes import Nodes

SECONDS = float(os.environ.get("SOAK_SECONDS", 1800))
BUSY = int(os.environ.get("SOAK_BUSY", 8))  # processes that compute without a pause
# The evaluation and the saves take longer than the first report of a rank that does not progress.
OPTIONS = [
    "--steps", 1_000_000, "--items", 300, "--num_workers", 2, "--step_seconds", 0.05, "--eval_every", 40, "--eval_seconds", 4,
    "--save_every", 30, "--save_seconds", 7, "--width", 500, "--eval_first",
]  # fmt: skip


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_a_long_run_without_faults_beside_busy_processes_has_no_diagnosis(tmp_path):
    folder = tmp_path / "run"
    with Nodes(2) as cluster:
        jobs = Jobs(cluster)
        with busy_processes(BUSY), jobs.launched("torchrun", 2, "--output_dir", folder, *OPTIONS) as job:
            job.until_step(1, timeout=300)
            end, load = time.monotonic() + SECONDS, []
            while time.monotonic() < end and all(process.poll() is None for process in job.processes):
                time.sleep(1)
                load.append(os.getloadavg()[0])
                assert job.diagnoses() == [], job.all_output()
            (folder / "STOP").touch()
            codes = job.codes(120)
            job.nothing_is_left()
            steps = job.steps()
        slowest = max((later - earlier for (earlier, _), (later, _) in itertools.pairwise(steps)), default=0.0)
        print(
            f"{SECONDS:.0f} s, {steps[-1][1]} steps, load {sum(load) / len(load):.1f} on average and {max(load):.1f} at most; the "
            f"longest time between two steps was {slowest:.1f} s"
        )
        assert codes == [75, 75], job.all_output()  # the launchers end with the exit code of a stop
        assert job.diagnoses() == [], job.all_output()
        assert "stopped: requested by" in job.text(0)
        assert steps[-1][1] > 40
