"""Finds the folders of runs among the paths that a user has typed."""

import os
import shlex
from pathlib import Path

from accel_ddp.errors import UserError
from accel_ddp.records import log
from accel_ddp.saving import format

_MOST_FOLDERS = 5000  # that are searched below a folder that is no run
_DEEPEST = 3
_MOST_SHOWN = 5


def find_runs(words: list[str]) -> tuple[list[Path], list[str]]:
    """Return the folders of runs, each once, and why others were left out. Raise UserError if there is no run, or no such path.

    If one path is given it must be a run. Of several, as `runs/classify/*` has them, those that are not runs are left out.
    """
    found: dict[Path, Path] = {}
    left_out: dict[str, str] = {}
    for word in words:
        folder = Path(word).expanduser()
        if not os.path.lexists(folder):
            raise UserError(f"{word}: there is no such folder.{_suggest_beside(folder)}")
        try:
            _require_run(folder, word)
        except UserError as error:
            left_out[word] = str(error)
        else:
            found.setdefault(folder.resolve(), folder)
    if not found:
        reasons = list(left_out.values())
        raise UserError(reasons[0] if len(reasons) == 1 else "no run was given. " + " ".join(reasons[:_MOST_SHOWN]))
    return list(found.values()), _listed(list(left_out))


def _listed(words: list[str]) -> list[str]:
    """Return one message about the paths that are not runs, or none."""
    if not words:
        return []
    more = f" and {len(words) - _MOST_SHOWN} more" if len(words) > _MOST_SHOWN else ""
    reason = "this is no run" if len(words) == 1 else "these are no runs"
    return [f"{', '.join(words[:_MOST_SHOWN])}{more}: left out, because {reason}."]


def _require_run(folder: Path, word: str) -> None:
    """Raise UserError, with what to type instead, if `folder` has no log of a run."""
    if (folder / log.FILE).is_file():
        return
    parent = folder.parent if folder.name else folder.resolve().parent
    if (parent / log.FILE).is_file():
        what = "a checkpoint of a run" if format.is_checkpoint_name(folder) else "part of a run"
        raise UserError(f"{word} is {what}. Type: accel-ddp report {shlex.quote(str(parent))}")
    if not folder.is_dir():
        raise UserError(f"{word} is a file. Give the folder of a run, which contains {log.FILE}.")
    if below := _runs_below(folder):
        newest = sorted(below, key=_changed_at, reverse=True)
        listed = ", ".join(shlex.quote(str(one)) for one in newest[:_MOST_SHOWN])
        more = f" and {len(below) - _MOST_SHOWN} more" if len(below) > _MOST_SHOWN else ""
        is_flat = len(below) > 1 and all(one.parent == folder for one in below)
        everything = f". For all of them: accel-ddp report {shlex.quote(str(folder))}/*" if is_flat else ""
        raise UserError(
            f"{word} is not a run: it has no {log.FILE}. Below it {'is a run' if len(below) == 1 else f'are {len(below)} runs'}: "
            f"{listed}{more}. Type: accel-ddp report {shlex.quote(str(newest[0]))}{everything}"
        )
    if (folder / ".accel_ddp").exists() or (folder / ".lock").exists():
        raise UserError(f"{word} has no {log.FILE}: the run has not begun to train, or it was refused. Give another run.")
    reason = "is empty" if not any(folder.iterdir()) else f"is not a run: it has no {log.FILE}, and no run is below it"
    raise UserError(
        f"{word} {reason}. Give the folder of a run, which is its --output_dir, for example runs/classify/20260131-120000."
    )


def _runs_below(folder: Path) -> list[Path]:
    """Return the runs in a folder and its subfolders, as far as a short search finds them."""
    found: list[Path] = []
    level, searched = [folder], 0
    for _ in range(_DEEPEST):
        below: list[Path] = []
        for one in level:
            searched += 1
            if searched > _MOST_FOLDERS:
                return found
            try:
                below += sorted(
                    Path(entry.path) for entry in os.scandir(one) if entry.is_dir() and not entry.name.startswith(".")
                )
            except OSError:
                continue
        found += [one for one in below if (one / log.FILE).is_file()]
        level = [one for one in below if not (one / log.FILE).is_file()]
    return found


def _changed_at(folder: Path) -> float:
    try:
        return (folder / log.FILE).stat().st_mtime
    except OSError:
        return 0.0


def _suggest_beside(folder: Path) -> str:
    """Return the runs beside a path that does not exist, or ""."""
    there = folder.parent
    while not there.is_dir() and there != there.parent:
        there = there.parent
    newest = sorted(_runs_below(there), key=_changed_at, reverse=True) if there.is_dir() and there != Path("/") else []
    if not newest:
        return " Give the folder of a run, which is its --output_dir."
    return f" The newest run in {there} is {shlex.quote(str(newest[0]))}."
