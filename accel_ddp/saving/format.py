"""A checkpoint on disk: a folder that is whole or not there, and that proves it.

    step_00000012/  model.safetensors  optimizer.safetensors  run.json  files/...  manifest.json

Tensors and JSON only: nothing in it is code, so nothing that is loaded can run.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_ddp.config import TrainConfig
from accel_ddp.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
MODEL, OPTIMIZER, RUN, MANIFEST = "model.safetensors", "optimizer.safetensors", "run.json", "manifest.json"


class NewerFormat(UserError):
    """Not damaged: an older checkpoint instead of it would lose work, so that it is refused."""


def is_step(path: Path) -> bool:
    return path.name.startswith("step_") and path.name[5:].isdigit()


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def all_of(output_dir: str | Path) -> list[Path]:
    """Oldest first, by the step in their names: clocks of nodes differ."""
    return sorted(filter(is_step, Path(output_dir).glob("step_*")), key=step_of)


def write(final: Path, tensors: dict[str, dict[str, "Tensor"]], run: dict[str, Any], files: dict[str, bytes]) -> None:
    """Make `final` exist, whole, or raise an OSError and leave nothing of it."""
    from safetensors.torch import save_file

    texts = {RUN: json.dumps({"format": FORMAT, **run}, indent=1).encode(), **{f"files/{name}": b for name, b in files.items()}}
    size = sum(t.nbytes for group in tensors.values() for t in group.values()) + sum(map(len, texts.values()))
    partial = final.with_name(f".{final.name}.partial")
    try:
        _remove(partial)
        final.parent.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(final.parent).free, 1.02 * size + (1 << 16)  # disks count in blocks
        if free < needed:
            raise OSError(errno.ENOSPC, f"{needed / 1e6:,.2f} MB are needed and {free / 1e6:,.2f} MB are free in {final.parent}")
        (partial / "files").mkdir(parents=True)
        for name, group in tensors.items():
            try:
                save_file(group, partial / name, metadata={"format": "pt"})
            except Exception as error:  # safetensors has an error type of its own for what the disk says
                raise OSError(errno.EIO, f"{name}: {error}") from error
        for name, text in texts.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_bytes(text)
        for name in tensors:  # safetensors makes files that nobody else may read
            (partial / name).chmod((partial / RUN).stat().st_mode & 0o777)
        found = {str(p.relative_to(partial)): _digest(p) for p in sorted(partial.rglob("*")) if p.is_file()}
        (partial / MANIFEST).write_text(_signed({"format": FORMAT, "files": found}))
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
        if final.exists():  # of an earlier life of the run, from which it went on before this step
            set_aside(final, "replaced")
        partial.rename(final)  # from here on the checkpoint exists
        _sync(final.parent)
    except OSError:
        _remove(partial)
        raise


def _signed(value: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return json.dumps({**value, "sha256": digest}, indent=1)


def _digest(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def _sync(path: Path) -> None:
    """Onto the disk, a file's content or a folder's list of names; a power cut must not undo what was renamed."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if path.is_file() or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks cannot sync folders
            raise
    finally:
        os.close(number)


def _remove(path: Path) -> None:
    if path.name.startswith("step_"):  # at once out of sight: a kill meanwhile must not leave half of it
        hidden = path.with_name(f".{path.name}.removed")
        shutil.rmtree(hidden, ignore_errors=True)
        path = path.rename(hidden)
    shutil.rmtree(path, ignore_errors=True)


def sweep(output_dir: str | Path) -> None:
    """Remove what a killed process left half written or half removed. Only for the holder of the folder's lock."""
    for pattern in (".step_*.partial", ".step_*.removed", ".*.tmp"):
        for path in Path(output_dir).glob(pattern):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def prune(output_dir: str | Path, keep_last: int, best: int | None) -> None:
    for old in all_of(output_dir)[:-keep_last]:
        if step_of(old) != best:
            with contextlib.suppress(OSError):
                _remove(old)


def set_aside(path: Path, why: str) -> Path:
    """Out of the way of `--resume`, but not lost."""
    for number in range(1000):
        aside = path.with_name(f"{why}_{path.name}" + (f"_{number}" if number else ""))
        if not aside.exists():
            return path.rename(aside)
    raise OSError(errno.EEXIST, f"{path} cannot be set aside: too many of its kind are there")


def write_json(path: Path, value: Any) -> None:
    """A small file that is the old one or the new one, never half of it."""
    new = path.with_name(f".{path.name}.tmp")
    new.write_text(json.dumps(value, indent=1))
    _sync(new)
    new.rename(path)


def read_json(path: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


def run_of(path: Path) -> dict[str, Any]:
    """What is written about the run in a checkpoint, without a look at the tensors; {} where that is damaged."""
    manifest = _manifest(path)
    with contextlib.suppress(OSError):
        if manifest and manifest["format"] <= FORMAT and _digest(path / RUN) == manifest["files"].get(RUN):
            run = read_json(path / RUN)
            return run if isinstance(run, dict) else {}
    return {}


def _manifest(path: Path) -> dict[str, Any] | None:
    """None where it is not what was written."""
    manifest = read_json(path / MANIFEST)
    if not isinstance(manifest, dict):
        return None
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return manifest if json.loads(_signed(rest))["sha256"] == manifest.get("sha256") else None


def problem(path: Path) -> str:
    """Why the checkpoint cannot be used, or nothing. Reads and hashes all of it: about a second per GB."""
    if not path.is_dir():
        return "there is no such folder"
    manifest = _manifest(path)
    if manifest is None:
        is_there = (path / MANIFEST).is_file()
        return f"{MANIFEST} is {'damaged' if is_there else 'missing'}"
    if manifest["format"] > FORMAT:
        raise NewerFormat(
            f"{path} was written by a newer version of accel_ddp (format {manifest['format']}; this one reads {FORMAT}). "
            "Upgrade: pip install -U accel_ddp."
        )
    for name, expected in manifest["files"].items():
        if not (path / name).is_file():
            return f"{name} is missing"
        size = (path / name).stat().st_size
        if size != expected["size"]:
            return f"{name} has {size:,} bytes instead of {expected['size']:,}"
        try:
            if _digest(path / name) != expected:
                return f"{name} is damaged: its sha256 is not that of the manifest"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    from safetensors import SafetensorError, safe_open

    for name in (MODEL, OPTIMIZER):  # whole by its manifest, but perhaps not written by us
        try:
            with safe_open(path / name, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{name} is no file of safetensors ({error})"
    if not {"step", "run", "config", "versions", "values", "evaluations"} <= run_of(path).keys():
        return f"{RUN} is not what accel_ddp writes"
    return ""


def is_of_one_run(source: Path, folder: Path) -> bool:
    """Whether `folder`, which is not that of `source`, holds a run that went on from `source`."""
    paths = [source] if (source / MANIFEST).is_file() else all_of(source)
    if any(path.resolve().parent == folder.resolve() for path in paths):
        return False
    runs = [{run_of(path).get("run") for path in those} - {None} for those in (paths, all_of(folder))]
    return bool(runs[0] & runs[1])


def candidates(cfg: TrainConfig) -> list[Path]:
    """The checkpoints on this disk that `--resume` may mean, oldest first."""
    if not cfg.resume:
        return []
    if cfg.resume != "auto" and is_of_one_run(Path(cfg.resume), Path(cfg.output_dir)):
        return all_of(cfg.output_dir)  # the same command again, as a requeued job gives it: the run has gone on from there
    path = Path(cfg.output_dir if cfg.resume == "auto" else cfg.resume)
    is_run = cfg.resume == "auto" or not (is_step(path) or (path / MANIFEST).is_file())
    return all_of(path) if is_run else [path] if path.is_dir() else []
