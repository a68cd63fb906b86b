"""Folders in `--cache_dir` that are written once per node, by whichever process needs them first."""

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from accel_ddp.errors import UserError

log = logging.getLogger(__name__)

REPORT_EVERY = 10  # seconds after which a waiting process logs what it waits for


def write_once(cache_dir: str, name: str, write: Callable[[Path], None], what: str) -> Path:
    """Return the folder `name` of the cache. If it does not exist, call `write(folder)` to fill it.

    On each node one process writes under a file lock, and the others wait. They use no collective, so that no timeout of the
    process group runs meanwhile. The folder is renamed when it is complete, so that no process reads a part of it. `what`
    completes the message "waiting for another process to ...".
    """
    from filelock import FileLock, Timeout

    final = Path(cache_dir).expanduser() / name
    partial = final.with_name(f".{final.name}.partial.{os.getpid()}")
    lock, began = FileLock(f"{final}.lock"), time.monotonic()
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        while not final.exists():
            try:
                with lock.acquire(timeout=REPORT_EVERY):
                    if not final.exists():
                        write(partial)
                        partial.rename(final)  # from here on it is in the cache
            except Timeout:
                log.warning("waiting for another process to %s (%.0f s): %s.lock", what, time.monotonic() - began, final)
    except OSError as error:
        # If the folder exists, the file system has no working locks, and another process has written the same folder.
        if not final.exists():
            text = f"--cache_dir {cache_dir}: cannot be written: {error.strerror or error}. Give another folder."
            raise UserError(text) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final
