"""Tests on several workers of pytest-xdist (`make test`). Plain `pytest` runs the same tests one after another.

Most tests wait for most of their time: for a timeout, for another process, for a node that never starts. There are therefore more
workers than cores. A worker takes a whole file, because the tests of a file share launches through module fixtures.
"""

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

# Files that take more than 40 s come first, the longest at the beginning. The run would take longer if a worker started one last.
LONGEST = [
    "test_doctor", "test_stop", "test_docs", "test_faults", "test_trackers", "test_errors", "test_launch_ssh", "test_restarts",
    "test_classify", "test_checkpoint", "test_recipes", "test_export", "test_slowness", "test_endings", "test_kubernetes",
    "test_builtin", "test_sharded_loading", "test_cli", "test_progress", "test_contrastive", "test_unequal_nodes",
    "test_sharding_config", "test_packaging", "test_vision", "test_sharded_speed",
]  # fmt: skip
# The tests of these files share no launch, or only a short one, so that each of them may run on any worker.
INDEPENDENT = {"test_docs", "test_launch", "test_recipes", "test_gpu", "test_gpu_sharding"}


def file_of(nodeid: str) -> str:
    return Path(nodeid.split("::")[0]).stem


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if file_of(nodeid) in INDEPENDENT else file_of(nodeid)

    config.option.loadscopereorder = False  # keep the order of `pytest_collection_modifyitems`
    return ByFile(config, log)


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        file = file_of(item.nodeid)
        return LONGEST.index(file) if file in LONGEST else len(LONGEST)

    if is_worker(config):
        items.sort(key=place)


@pytest.fixture
def default_port() -> Iterator[None]:
    """Let one test at a time use port 29500, which launchers use if no port is given."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing the file is not enough, because forks have it open too
