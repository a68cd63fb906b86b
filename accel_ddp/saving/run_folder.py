"""The claim of an output folder: one run per folder, and neither a run nor a file of the user is overwritten."""

import contextlib
import fcntl
import logging
import os
import secrets
import time
from pathlib import Path
from typing import IO

from accel_ddp.config.choices import reasons
from accel_ddp.config.train_config import TrainConfig, as_plain_dict
from accel_ddp.errors import UserError
from accel_ddp.ranks.agreement import broadcast_object, gather_everywhere, together
from accel_ddp.ranks.process import this_rank
from accel_ddp.records.redaction import redact_values
from accel_ddp.records.run_log import last_step_of
from accel_ddp.saving import checkpoint_format, resume

log = logging.getLogger(__name__)

MARKER = ".accel_ddp"  # a file in the folder of every run; config.json alone may belong to a model
SECONDS_TO_APPEAR = 5  # of a new file on a network disk
_WRITTEN_BY_RUNS = (
    "config.json", "log.jsonl", "incidents.jsonl", "evaluations.json", "best.json", "classes.csv", "tables", "model"
)  # fmt: skip


def claim(cfg: TrainConfig) -> IO[str]:
    """Lock `--output_dir` and write config.json into it. The lock lasts as long as the returned file is open.

    Raise UserError if the folder holds another run, is in use, holds a run that was saved with other options, or holds files that
    are not those of a run. A run that ended before it had anything to continue from does not block its folder.
    """
    folder = Path(cfg.output_dir)
    if folder.is_file():
        raise UserError(f"--output_dir {folder}: is a file on {this_rank.host}. Give a folder.")
    with contextlib.ExitStack() as opened:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _refuse_foreign_files(folder)  # before the lock is made, so that the folder stays as it is
            lock = opened.enter_context(_lock(folder))  # an error releases it: the traceback in a notebook would keep it
            if not resume.continues_run_in(folder, cfg):
                _refuse_other_run(folder, cfg)
            if found := resume.candidates(cfg):  # before a model is loaded; the data are compared when they are
                resume.check_options(cfg, checkpoint_format.read_run(found[-1]))
            if _is_run(folder):  # elsewhere hidden files belong to the user
                checkpoint_format.sweep(folder)
            checkpoint_format.write_json(folder / MARKER, {"format": checkpoint_format.FORMAT})
            _write_options(cfg)
        except OSError as error:
            raise UserError(f"--output_dir {folder}: cannot be written on {this_rank.host}: {error.strerror}.") from error
        opened.pop_all()
    return lock


def _write_options(cfg: TrainConfig) -> None:
    values = {"chosen": reasons(cfg), **as_plain_dict(cfg)}
    checkpoint_format.write_json(Path(cfg.output_dir, "config.json"), redact_values(values))


def update_options(cfg: TrainConfig) -> None:
    """Write the config.json of `claim` again, with what was chosen meanwhile. A full disk does not end the run: checkpoints have it."""
    if Path(cfg.output_dir, "config.json").is_file():
        try:
            _write_options(cfg)
        except OSError as error:
            log.warning("%s/config.json: the chosen options could not be written: %s.", cfg.output_dir, error.strerror)


def refuse_run_of_other_node(cfg: TrainConfig) -> None:
    """`claim` sees only the main node's disk, which may be new. With `--resume` any node's newest counts. A collective."""
    with together("look for checkpoints in the output folder"):
        found = checkpoint_format.list_checkpoints(cfg.output_dir) if this_rank.is_local_main and not cfg.resume else []
    holders = {host: name for host, name in gather_everywhere((this_rank.host, found[-1].name if found else "")) if name}
    if holders:
        host, name = max(holders.items(), key=lambda holder: holder[1])
        raise UserError(
            f"--output_dir {cfg.output_dir} holds another run ({name}) on {host}, but none on the main node. Add --resume without a "
            f"path to continue it from there: {host} sends its checkpoint to the other nodes. Or choose another --output_dir."
        )


def require_shared(cfg: TrainConfig, replicas: int) -> None:
    """Raise UserError on all ranks if a writer, a rank of the first copy, has another folder than the main rank. Collective."""
    writers, rank = range(this_rank.num_ranks // replicas), this_rank.rank
    nonce = broadcast_object(secrets.token_hex(8))
    folder = Path(cfg.output_dir)
    marks = [folder / f".shared-{nonce}-{writer}" for writer in writers]
    problem = ""
    with together("write to the output folder"):
        if this_rank.is_main:
            marks[0].touch()
    with together("find the output folder"):
        if rank in writers and rank != 0:
            deadline = time.monotonic() + SECONDS_TO_APPEAR
            while not marks[0].exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            try:
                problem = "" if marks[0].exists() else "does not see the folder of the main node"
                marks[rank].touch()
            except OSError as error:
                problem = problem or f"cannot write to it ({error.strerror})"
    facts = gather_everywhere((this_rank.host, problem))
    for mark in marks if rank == 0 else marks[rank : rank + 1]:
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)
    problems = list(dict.fromkeys(f"{host} {problem}" for host, problem in facts if problem))
    if problems:
        instead = f" Or shard within each node (accelerate_configs/2node_fsdp.yaml): then only the ranks of {facts[0][0]} write."
        raise UserError(
            f"--output_dir {cfg.output_dir}: each rank writes its part of a checkpoint, but {' and '.join(problems)}. Use a folder "
            f"that these nodes share.{'' if cfg.sync_every else instead}"
        )


def _is_run(folder: Path) -> bool:
    """Return whether a run has used this folder. Runs of older versions have no marker, but their options are in config.json."""
    config = checkpoint_format.read_json(folder / "config.json")
    has_options = isinstance(config, dict) and {"global_batch_size", "stop_signal", "output_dir"} <= config.keys()
    return (folder / MARKER).exists() or has_options or bool(checkpoint_format.list_checkpoints(folder))


def _refuse_foreign_files(folder: Path) -> None:
    """Raise UserError if the folder belongs to a model, or if this run would overwrite files that no run has written."""
    if _is_run(folder):
        return
    config = checkpoint_format.read_json(folder / "config.json")
    is_model = isinstance(config, dict) and ("model_type" in config or "architectures" in config)
    weights = [
        path.name for pattern in ("*.safetensors", "pytorch_model*.bin", "adapter_config.json") for path in folder.glob(pattern)
    ]
    if is_model or weights:
        names = ["config.json"] * is_model + sorted(weights)[:2]
        raise UserError(
            f"--output_dir {folder} holds a model ({', '.join(names)}), which the files of a run would damage. Choose another "
            f"--output_dir. To train this model, use --model {folder}."
        )
    if found := [name for name in _WRITTEN_BY_RUNS if (folder / name).exists()]:
        raise UserError(
            f"--output_dir {folder} contains {', '.join(found)}, which was not written by a run, and which this run would change. "
            "Choose another --output_dir."
        )


def _refuse_other_run(folder: Path, cfg: TrainConfig) -> None:
    if checkpoints := checkpoint_format.list_checkpoints(folder):
        if cfg.resume and not Path(cfg.resume).exists():
            raise UserError(
                f"--resume {cfg.resume}: there is no such checkpoint or run. To continue the run in --output_dir {folder} "
                f"({checkpoints[-1].name}), use --resume without a path."
            )
        instead = "Add --resume without a path to continue it, or choose another --output_dir"
        raise UserError(f"--output_dir {folder} holds another run ({checkpoints[-1].name}). {instead}.")
    step = last_step_of(folder / "log.jsonl")
    if step or (folder / "model").exists():
        what = f"its log ends at step {step}" if step else "it has exported its model"
        raise UserError(
            f"--output_dir {folder} holds another run ({what}) without a checkpoint, so it cannot be continued. Choose another "
            "--output_dir. Or add --resume without a path: the run then starts again at step 0 in this folder. A smaller --save_every "
            "saves earlier."
        )


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
                    f"--output_dir {folder} is in use by another run ({file.read().strip() or 'just starting'}). Wait until it stops "
                    "(after a Ctrl-C it may still be saving), or choose another folder."
                ) from None
            time.sleep(0.2)
        except OSError:
            log.warning("the file system of %s does not support locks. Make sure that no second run uses this folder.", folder)
            break
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {this_rank.host}")
    file.flush()
    return file
