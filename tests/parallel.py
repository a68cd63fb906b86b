"""Tests on several workers of pytest-xdist (`make test`). Plain `pytest` runs the same tests one after another.

Most of a test's time is spent waiting: for an interpreter on another core, for a timeout, for a node that never comes. So there
are more workers than cores. A worker takes a whole file, because the tests of a file share launches through module fixtures.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent

# These files come first: a worker that started a long one last would keep the others waiting.
LONGEST = ["test_stop", "test_classify", "test_doctor", "test_errors", "test_docs", "test_checkpoint", "test_recipes"]
# The tests of these files share no launch, so that any worker may take any of them.
INDEPENDENT = {"test_docs", "test_launch", "test_recipes"}


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


@contextlib.contextmanager
def locked(file: str, how: int) -> Iterator[None]:
    """Hold a lock on one of the files here, so that no file has to be made and removed for it."""
    with (FOLDER / file).open() as opened:
        fcntl.flock(opened, how)
        try:
            yield
        finally:
            fcntl.flock(opened, fcntl.LOCK_UN)  # closing is not enough: forks have the same file open


@pytest.fixture
def default_port() -> Iterator[None]:
    """For tests of launchers without a port of their own: all of these use 29500."""
    with locked("conftest.py", fcntl.LOCK_EX):
        yield
