"""Claims the output folder of a run: one run per folder, and no run is overwritten."""

import fcntl
import logging
import os
import time
from pathlib import Path
from typing import IO

from accel_ddp.config import TrainConfig, as_plain_dict
from accel_ddp.errors import UserError
from accel_ddp.ranks.process import process
from accel_ddp.saving import format, resume

log = logging.getLogger(__name__)


def claim(cfg: TrainConfig) -> IO[str]:
    """Lock `--output_dir` and write config.json into it. The lock lasts as long as the returned file is open.

    Raise UserError if the folder holds another run, is in use, or holds a run that was saved with other options.
    """
    folder = Path(cfg.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        was_claimed = (folder / ".lock").exists()
        lock = _lock(folder)
        found = [name for name in ("config.json", "log.jsonl", "model") if (folder / name).exists()]
        found += [path.name for path in format.list_checkpoints(folder)[-1:]]
        has_empty_log = "log.jsonl" in found and (folder / "log.jsonl").stat().st_size == 0
        if (found == ["config.json", "log.jsonl"] and has_empty_log) or (found == ["config.json"] and was_claimed):
            found = []  # left by a run that was refused before it began, for example because of a mistyped column
        if found and not resume.continues_run_in(folder, cfg):
            raise UserError(
                f"--output_dir {folder} holds another run ({', '.join(found)}). Add --resume without a path to continue it, or "
                "choose another --output_dir."
            )
        resume.check_options_early(cfg)
        format.sweep(folder)
        format.write_json(folder / "config.json", as_plain_dict(cfg))
    except OSError as error:
        raise UserError(f"--output_dir {folder}: cannot be written on {process.host}: {error.strerror}.") from error
    return lock


def _lock(folder: Path) -> IO[str]:
    file = (folder / ".lock").open("a+")
    deadline = time.monotonic() + 5  # a data worker of a run that was killed a moment ago may still hold the lock
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                raise UserError(
                    f"--output_dir {folder} is in use by another run ({file.read().strip() or 'just starting'}). Wait until it ends "
                    "(after a Ctrl-C it may still be saving), or choose another folder."
                ) from None
            time.sleep(0.2)
        except OSError:
            log.warning("the file system of %s does not support locks. Make sure that no second run uses this folder.", folder)
            break
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {process.host}")
    file.flush()
    return file
