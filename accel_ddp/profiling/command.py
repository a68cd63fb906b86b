"""`accel-ddp profile RUN`: prints the summary of a profile again."""

import argparse
import json
from pathlib import Path
from typing import Any

from accel_ddp.errors import UserError
from accel_ddp.profiling import summary, traces
from accel_ddp.records import log


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="accel-ddp profile",
        description="Print the summary of a run that was recorded with --profile: where the time of a step goes, and which options "
        "would save time.",
    )
    parser.add_argument("run", help="the folder of the run (runs/...), or its folder profile/")
    parser.add_argument("--json", action="store_true", help="print summary.json instead of a text")
    parser.add_argument("--analyze", action="store_true", help="read the traces of all ranks again, and store the new summary")
    given = parser.parse_args(words)
    run = Path(given.run)
    folder = run if run.name == traces.FOLDER and run.is_dir() else run / traces.FOLDER
    run = folder.parent
    found = read_summary(folder, run)
    if given.analyze:
        found = analyze_again(folder, found)
        summary.write(folder, found, summary.format_text(found, str(run)))
    print(json.dumps(found, indent=1) if given.json else summary.format_text(found, str(run)))
    return 0


def read_summary(folder: Path, run: Path) -> dict[str, Any]:
    """Return the content of summary.json. Raise UserError if there is none."""
    path = folder / traces.SUMMARY
    if not run.is_dir():
        raise UserError(f"{run}: there is no such folder. Type the folder of a run, for example: accel-ddp profile runs/my_run")
    if not path.is_file() and not (run / log.FILE).is_file():
        raise UserError(
            f"{run} is not a run: it has no {log.FILE}. Type the folder of a run, for example: accel-ddp profile runs/my_run"
        )
    if not path.is_file():
        raise UserError(
            f"{run} has no profile. Record one: add --profile to the command of the run. A run that is complete can be continued for "
            f"some steps: add --resume --output_dir {run} --profile and more --steps."
        )
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    if not isinstance(found, dict) or not isinstance(found.get("schema"), int):
        raise UserError(f"{path} is not a summary of a profile.")
    if found["schema"] > summary.SCHEMA:
        raise UserError(
            f"{path} has version {found['schema']}, and this accel_ddp reads version {summary.SCHEMA}. Install the version of "
            "accel_ddp that has recorded the profile."
        )
    return found


def analyze_again(folder: Path, before: dict[str, Any]) -> dict[str, Any]:
    """Return a summary of the traces in `folder`. What traces do not contain is taken from the summary `before`."""
    from accel_ddp.profiling.analysis import analyse

    ranks = []
    for one in before["ranks"]:
        path = folder / traces.file_of(one["rank"])
        if not path.is_file():
            raise UserError(f"{path} is missing. Without --analyze the stored summary is printed.")
        ranks.append({**one, **analyse(traces.read_trace(path))})
    return summary.summarize(before["run"], ranks)
