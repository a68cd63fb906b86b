"""The command `accel-ddp report`: its options, and the runs among the paths that a user has given."""

import argparse
import itertools
import os
import shlex
import sys
import webbrowser
from pathlib import Path

from accel_ddp.errors import UserError
from accel_ddp.records import run_log
from accel_ddp.report.page import GENERATOR, write_page
from accel_ddp.report.run_reader import read_run
from accel_ddp.report.sections import unique_names
from accel_ddp.saving import checkpoint_format
from accel_ddp.text import format_bytes, listed

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
    reason = "this is no run" if len(left_out) == 1 else "these are no runs"
    warnings = [f"{listed(left_out, _MOST_SHOWN)}: left out, because {reason}."] if left_out else []
    return list(found.values()), warnings


def _require_run(folder: Path, word: str) -> None:
    """Raise UserError, with what to type instead, if `folder` has no log of a run."""
    if (folder / run_log.FILE).is_file():
        return
    parent = folder.parent if folder.name else folder.resolve().parent
    if (parent / run_log.FILE).is_file():
        what = "a checkpoint of a run" if checkpoint_format.is_checkpoint_name(folder) else "part of a run"
        raise UserError(f"{word} is {what}. Run: accel-ddp report {shlex.quote(str(parent))}")
    if not folder.is_dir():
        raise UserError(f"{word} is a file. Give a run folder, which contains {run_log.FILE}.")
    if below := _runs_below(folder):
        names = listed((shlex.quote(str(one)) for one in below), _MOST_SHOWN)
        is_flat = len(below) > 1 and all(one.parent == folder for one in below)
        everything = f". For all of them: accel-ddp report {shlex.quote(str(folder))}/*" if is_flat else ""
        raise UserError(
            f"{word} is not a run: it has no {run_log.FILE}. Below it {'is a run' if len(below) == 1 else f'are {len(below)} runs'}: "
            f"{names}. Run: accel-ddp report {shlex.quote(str(below[0]))}{everything}"
        )
    if (folder / ".accel_ddp").exists() or (folder / ".lock").exists():
        raise UserError(f"{word} has no {run_log.FILE}: the run has not begun to train, or it was refused. Give another run.")
    reason = "is empty" if not any(folder.iterdir()) else f"is not a run: it has no {run_log.FILE}, and no run is below it"
    raise UserError(f"{word} {reason}. Give a run folder, the --output_dir of a run, for example runs/classify/20260131-120000.")


def _runs_below(folder: Path) -> list[Path]:
    """Return the runs in a folder and its subfolders, as far as a short search finds them, the newest first."""
    found: dict[Path, float] = {}
    for path, names, _ in itertools.islice(os.walk(folder, followlinks=True), _MOST_FOLDERS):
        log, depth = Path(path, run_log.FILE), len(Path(path).relative_to(folder).parts)
        if log.is_file():
            found[Path(path)] = log.stat().st_mtime
        is_deep = log.is_file() or depth == _DEEPEST
        names[:] = [] if is_deep else [name for name in names if not name.startswith(".")]
    return sorted(found, key=found.__getitem__, reverse=True)


def _suggest_beside(folder: Path) -> str:
    there = folder.parent
    while not there.is_dir() and there != there.parent:
        there = there.parent
    newest = _runs_below(there) if there.is_dir() and there != Path("/") else []
    if not newest:
        return " Give a run folder, the --output_dir of a run."
    return f" The newest run in {there} is {shlex.quote(str(newest[0]))}."


def require_page(path: Path, given: str) -> None:
    """Raise UserError if the page cannot be written: it is no HTML file, another program's file, or a folder. `given` is the option."""
    if path.is_dir():
        raise UserError(f"{given}: is a folder. Use: --out {path / 'report.html'}")
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{given}: a browser opens files that end with .html. Use: --out {path.with_name(path.name + '.html')}")
    try:
        is_own = not path.exists() or GENERATOR.encode() in path.read_bytes()[:4096]
    except OSError as error:
        raise UserError(f"{given}: cannot be read: {error.strerror}.") from error
    if not is_own:
        raise UserError(
            f"{given}: this file exists, and accel-ddp report has not written it. Move it away, or use another name: "
            f"--out {path.with_name('accel_ddp_report.html')}"
        )
    parent = next(one for one in path.absolute().parents if one.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{given}: {parent} cannot be written. Use another path, for example --out ~/report.html.")


_EXAMPLES = """examples:
  accel-ddp report runs/classify/20260131-120000        one run: the page is report.html in its folder
  accel-ddp report runs/classify/* --out compare.html   several runs on one page, with their differences

A run that is still running is shown as it is now. docs/report.md describes the page."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accel-ddp report",
        usage="accel-ddp report RUN... [--out FILE] [--open]",
        description="Write one HTML file about one or several runs, which opens without a network: curves, the time of\n"
        "each rank, evaluations, checkpoints, incidents, options and versions.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder (its --output_dir)")
    default = "RUN/report.html; for several runs report.html in the current folder"
    parser.add_argument("--out", default="", metavar="FILE", help=f"the file to write (default: {default})")
    parser.add_argument("--open", action="store_true", help="open the page in the browser of this machine")
    return parser


def main(words: list[str]) -> int:
    given = build_parser().parse_args(words)
    folders, left_out = find_runs(given.runs)
    path = Path(given.out or "report.html").expanduser()
    if not given.out and len(folders) == 1 and os.access(folders[0], os.W_OK):
        path = folders[0] / "report.html"
    require_page(path, f"--out {given.out}" if given.out else str(path))  # before the runs are read
    runs = []
    for folder, name in zip(folders, unique_names(folders)):
        try:
            runs.append(read_run(folder, name))
        except UserError as error:  # of several runs, those that cannot be read are left out
            if len(folders) == 1:
                raise
            left_out.append(str(error))
    if not runs:
        raise UserError("none of these runs can be read. " + " ".join(left_out))
    left_out += [f"{run.name}: {note}" for run in runs for note in run.notes]
    for text in left_out:
        print(f"warning: {text}", file=sys.stderr)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_page(runs, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
    print(f"{path} ({format_bytes(path.stat().st_size)})")
    if given.open and not webbrowser.open(path.absolute().as_uri()):
        print(f"warning: --open: this machine has no browser. Copy {path} to a machine that has one.", file=sys.stderr)
    return 0
