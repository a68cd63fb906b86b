"""The command `accel-ddp report`."""

import argparse
import os
import sys
import warnings
from pathlib import Path

from accel_ddp.errors import UserError
from accel_ddp.report.compare import unique_names
from accel_ddp.report.csv_files import write_csv
from accel_ddp.report.find import find_runs
from accel_ddp.report.markup import require_page
from accel_ddp.report.run_data import Run
from accel_ddp.report.runs import read_run

_EXAMPLES = """examples:
  accel-ddp report runs/classify/20260131-120000                 one run: the page is report.html in its folder
  accel-ddp report runs/classify/* --out compare.html            several runs on one page, with their differences
  accel-ddp report runs/classify/20260131-120000 --csv numbers   CSV files too, in the folder numbers

A run that has not ended is shown as it is now. docs/report.md describes the page and the files."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="accel-ddp report",
        usage="accel-ddp report RUN... [--out FILE] [--csv FOLDER] [--open]",
        description="Write one HTML file about one or several runs, which opens without a network: curves, the time of\n"
        "each rank, evaluations, checkpoints, incidents, options and versions.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run (its --output_dir)")
    default = "RUN/report.html; for several runs report.html in the current folder"
    parser.add_argument("--out", default="", metavar="FILE", help=f"the file to write (default: {default})")
    parser.add_argument("--csv", default="", metavar="FOLDER", help="also write the numbers as CSV files into this folder")
    parser.add_argument("--open", action="store_true", help="open the page in the browser of this machine")
    return parser


def main(words: list[str]) -> int:
    """Write the report of the runs in `words` and return the exit code."""
    given = build_parser().parse_args(words)
    folders, left_out = find_runs(given.runs)
    path = _choose_path(given.out, folders)
    if given.csv and Path(given.csv).exists() and not Path(given.csv).is_dir():
        raise UserError(f"--csv {given.csv}: is a file. Give a folder.")
    runs = _read_all(folders, left_out)
    for run in runs:
        left_out += [f"{run.name}: {note}" for note in run.notes]
    for text in left_out:
        print(f"warning: {text}", file=sys.stderr)
    _write_page(runs, path)
    print(f"{path} ({_size(path)})")
    if given.csv:
        for one in write_csv(runs, given.csv):
            print(f"{one} ({_size(one)})")
    if given.open:
        _open(path)
    return 0


def _read_all(folders: list[Path], left_out: list[str]) -> list[Run]:
    """Return the runs. Of several, those that cannot be read are left out."""
    runs = []
    for folder, name in zip(folders, unique_names(folders)):
        try:
            runs.append(read_run(folder, name))
        except UserError as error:
            if len(folders) == 1:
                raise
            left_out.append(str(error))
    if not runs:
        raise UserError("none of these runs can be read. " + " ".join(left_out))
    return runs


def _choose_path(out: str, folders: list[Path]) -> Path:
    """Return the path of the page. Raise UserError if it cannot be written, before the runs are read."""
    path = Path(out).expanduser() if out else Path("report.html")
    if not out and len(folders) == 1 and os.access(folders[0], os.W_OK):
        path = folders[0] / "report.html"
    option = f"--out {out}" if out else str(path)
    require_page(path, option, "--out", "report")
    return path


def _write_page(runs: list[Run], path: Path) -> None:
    """Replace the page atomically: a browser that reloads it sees the old page or the new one."""
    from accel_ddp.report.page import write_page

    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns where all values are missing
            write_page(runs, new)
        new.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        new.unlink(missing_ok=True)


def _size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def _open(path: Path) -> None:
    import webbrowser

    if not webbrowser.open(path.absolute().as_uri()):
        print(f"warning: --open: this machine has no browser. Copy {path} to a machine that has one.", file=sys.stderr)
