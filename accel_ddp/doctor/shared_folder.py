"""Whether the nodes share the output folder: each node writes a marker file there and lists the markers of the others."""

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

from accel_ddp.doctor.host import call_with_timeout
from accel_ddp.net.sanitize import printable

_PREFIX = ".accel_ddp_doctor_"


def write_marker(folder: Path | None, mark: Any, node_rank: int | None) -> tuple[Path | None, str]:
    """Write the marker file of this node. Returns (the file, the reason why it could not be written or "")."""
    if not folder:
        return None, ""
    file = folder / f"{_PREFIX}{_clean_mark(mark)}_{node_rank or 0}"

    def write() -> str:
        try:
            file.write_text("written by accel-ddp doctor\n")
            return ""
        except OSError as error:
            return error.strerror or str(error)

    return file, call_with_timeout(write, 3, "the disk does not answer")


def list_markers(folder: Path | None, mark: Any, error: str) -> dict[str, Any]:
    """Return the answer to the coordinator: the folder, its free space and the nodes whose markers are in it.

    `error` is the reason why this node could not write its own marker.
    """
    if not folder:
        return {"folder": "", "error": "", "free": 0, "sees": []}
    prefix = f"{_PREFIX}{_clean_mark(mark)}_"
    for _ in range(3):  # a network disk may show files of other hosts a moment later
        names = call_with_timeout(lambda: os.listdir(folder), 2, [])
        suffixes = [name[len(prefix) :] for name in names if name.startswith(prefix)]
        nodes = sorted(int(suffix) for suffix in suffixes if suffix.isdigit())
        if 0 in nodes:
            break
        time.sleep(0.1)
    for name in names:  # a doctor that was killed leaves its marker behind
        with contextlib.suppress(OSError):
            if name.startswith(_PREFIX) and time.time() - (folder / name).stat().st_mtime > 3600:
                (folder / name).unlink()
    free = call_with_timeout(lambda: shutil.disk_usage(folder).free, 2, 0)
    return {"folder": str(folder), "error": error, "free": free, "sees": nodes}


def _clean_mark(mark: Any) -> str:
    """Return the part of a received mark that is safe in a file name."""
    return "".join(letter for letter in printable(mark, 20) if letter.isalnum())
