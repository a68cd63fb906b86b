"""restarts.jsonl in the output folder, which a new main node finds too: what failed, what was lost, and the goodput."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import broadcast_object, print_on_main
from accel_ddp.ranks.process import links, this_rank
from accel_ddp.records import run_log
from accel_ddp.records.files import complete_last_line, read_objects
from accel_ddp.saving import checkpoint_format
from accel_ddp.watch.restart_files import LAUNCHER, MOST_FAILURES_OF_A_STEP, find_repeated_step, launcher_pid, store_run

FILE = "restarts.jsonl"
NO_REASON = "the ranks of every node exited without a message"


def begin_attempt(cfg: TrainConfig) -> None:
    """A collective; UserError if attempts repeat a failing step, which launchers learn too and then end at once."""
    if not _is_used(cfg):
        return
    if LAUNCHER not in os.environ and "TORCHELASTIC_RUN_ID" in os.environ and this_rank.restarts == 0:
        print_on_main(
            f"warning: --max_restarts: {os.path.basename(sys.argv[0])} does not mention accel_ddp. Therefore the launcher restarts the "
            "ranks also after a stop or a mistake of the user, and lost nodes cannot join again. Add `import accel_ddp` to this file."
        )
    path = Path(cfg.output_dir, FILE)
    lines: list[dict[str, Any]] = []
    if this_rank.is_main:
        if not links.earlier_run.get("output_dir"):  # this is no restart
            _write(path, {"event": "start", "time": psutil.Process().create_time()}, mode="w")  # before the imports
        else:
            failure = links.earlier_run.get("failure") or {}
            _write(path, {
                "event": "failure", "time": failure.get("time") or time.time(), "step": failure.get("step"),
                "logged_step": run_log.last_step_of_attempt(Path(cfg.output_dir, run_log.FILE)) or 0,
                "text": failure.get("text") or NO_REASON,
            })  # fmt: skip
        lines = list(read_objects(path))
    lines, absolute = broadcast_object((lines, os.path.abspath(cfg.output_dir)))
    failures = [line for line in lines if line["event"] == "failure"]
    if this_rank.is_local_main:
        steps = [failure["step"] for failure in failures]
        typed = links.earlier_run.get("output_dir") or cfg.output_dir  # may be relative to another working directory
        store_run(launcher_pid(), output_dir=typed, absolute=absolute, failed_steps=steps)
    if reason := _why_no_progress(lines):
        raise UserError(f"{reason}, so the run is not restarted again. The last failure: {failures[-1]['text']}")


def _why_no_progress(lines: list[dict[str, Any]]) -> str:
    """Return the reason if the last attempts all failed at the same step, or before their first step. Otherwise return ""."""
    at = [number for number, line in enumerate(lines) if line["event"] == "failure"][-MOST_FAILURES_OF_A_STEP:]
    if len(at) < MOST_FAILURES_OF_A_STEP:
        return ""
    if reason := find_repeated_step([lines[number]["step"] for number in at]):
        return reason
    if not any(line["event"] == "training" for line in lines[at[0] :]):
        return f"the run has failed {MOST_FAILURES_OF_A_STEP} times without a step in between"
    return ""


def resume_of_restart(cfg: TrainConfig, folder: str) -> str:
    """A restart has a folder. A typed path counts until the job has a checkpoint, else a restart would go back to it."""
    if not folder or not cfg.resume:
        return "auto" if folder else cfg.resume
    began = [line["step"] for line in read_objects(Path(folder, FILE)) if line["event"] == "training"]
    saved = [checkpoint_format.step_of(path) for path in checkpoint_format.list_checkpoints(folder)]
    return "auto" if began and saved and max(saved) >= began[-1] else cfg.resume


def begin_training(cfg: TrainConfig, step: int, checkpoint: Path | None) -> dict[str, Any]:
    """Record that training continues at `step`, and print and return what was lost. {}: this is no restart, or not rank 0."""
    if not _is_used(cfg) or not this_rank.is_main:
        return {}
    path, now = Path(cfg.output_dir, FILE), time.time()
    lines = list(read_objects(path))
    saved = {"event": "training", "time": now, "step": step}
    if links.earlier_run.get("output_dir") and (failures := [line for line in lines if line["event"] == "failure"]):
        committed = lines[0]["time"]
        with contextlib.suppress(OSError, AttributeError, TypeError):
            committed = (checkpoint / checkpoint_format.MANIFEST).stat().st_mtime
        last, most = failures[-1], os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        reached = last["logged_step"] if last["step"] is None else last["step"]
        saved |= {
            "restart": len(failures), "lost_steps": max(0, reached - step), "lost_seconds": round(now - committed, 1),
            "committed": committed, "failed_step": reached, "text": last["text"],
        }  # fmt: skip
        reason = last["text"].removeprefix("error: ").splitlines()[0].partition(". ")[0].rstrip(".")  # without what to do
        limit = f" of {most}" if len(failures) <= int(most) else ""  # a restarted launcher counts from 0
        print_on_main(
            f"restart {len(failures)}{limit}: {reason}. {saved['lost_steps']} steps and {saved['lost_seconds']:.0f} s are lost, of "
            f"which {max(0.0, now - last['time']):.0f} s passed since the failure. Training continues at step {step}."
        )
    _write(path, saved)
    if "restart" not in saved:
        return {}
    return {name: value for name, value in saved.items() if name not in ("event", "time", "step")} | {"goodput": goodput(cfg)}


def goodput(cfg: TrainConfig) -> float | None:
    """Return the part of the time since the first attempt began that was spent on steps that count. None: no restart happened.

    Time that counts begins when the steps of an attempt begin, and ends when the checkpoint is complete from which the next
    attempt continues. Evaluations and saves in between are included.
    """
    lines = list(read_objects(Path(cfg.output_dir, FILE))) if _is_used(cfg) and this_rank.is_main else []
    trained = [line for line in lines if line["event"] == "training"]
    if not any("restart" in line for line in trained):
        return None
    now, useful = time.time(), 0.0
    for number, line in enumerate(trained):
        later = trained[number + 1 :]
        # A later attempt may have continued from a checkpoint that is older than this attempt.
        end = min([one["committed"] for one in later if "committed" in one], default=now)
        useful += max(0.0, end - line["time"])
    return round(min(1.0, useful / max(1e-9, now - lines[0]["time"])), 4)


def _is_used(cfg: TrainConfig) -> bool:
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 and bool(cfg.output_dir)


def _write(path: Path, line: dict[str, Any], mode: str = "a") -> None:
    with contextlib.suppress(OSError):  # a full disk must not end the run
        complete_last_line(path)  # a main node that was lost may have written half of a line
        with path.open(mode) as file:
            file.write(json.dumps(line) + "\n")
