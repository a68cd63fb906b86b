"""A checkpoint on disk: a folder that is either complete or absent, with a manifest of hashes that proves it.

    step_00000012/  model.safetensors  optimizer.safetensors  run.json  files/...  manifest.json
    step_00000012/  model/shard-...  optimizer/shard-...      run.json  files/...  manifest.json

The second folder is from a sharded run, in which each rank writes its part. `pieces` writes the parts and reads the tensors of both.
A checkpoint contains tensors and JSON only. Loading it cannot run code.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_ddp.errors import UserError
from accel_ddp.records.files import replace_file, sync

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 2  # the newest one that this version reads
WHOLE, SHARDED = 1, 2
MODEL, OPTIMIZER, RUN, MANIFEST = "model.safetensors", "optimizer.safetensors", "run.json", "manifest.json"
FACTS = "accel_ddp.json"  # in an exported folder: how its model was trained
PIECES = {MODEL: "model", OPTIMIZER: "optimizer"}  # folders of a sharded checkpoint
HASH_THREADS = 4


class NewerFormat(UserError):
    """A checkpoint of a newer version. It is not damaged, and using an older checkpoint instead would lose work."""


def is_checkpoint_name(path: Path) -> bool:
    return path.name.startswith("step_") and path.name[5:].isdigit()


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, by the step in their names, because clocks of nodes differ."""
    return sorted(filter(is_checkpoint_name, Path(output_dir).glob("step_*")), key=step_of)


def write(final: Path, tensors: dict[str, dict[str, "Tensor"]], run: dict[str, Any], files: dict[str, bytes]) -> None:
    """Write the checkpoint `final` completely, or raise OSError and leave nothing of it."""
    from safetensors.torch import save_file

    partial = final.with_name(f".{final.name}.partial")
    try:
        remove(partial)
        final.parent.mkdir(parents=True, exist_ok=True)
        size = sum(t.nbytes for group in tensors.values() for t in group.values())
        check_space(final.parent, size + sum(map(len, files.values())))
        (partial / "files").mkdir(parents=True)
        (partial / RUN).touch()
        for name, group in tensors.items():
            try:
                save_file(group, partial / name, metadata={"format": "pt"})
            except Exception as error:  # safetensors has its own error type for errors of the disk
                raise OSError(errno.EIO, f"{name}: {error}") from error
            # safetensors creates files that only their owner may read.
            (partial / name).chmod((partial / RUN).stat().st_mode & 0o777)
        complete(partial, final, run, files, {name: _digest(partial / name) for name in tensors}, WHOLE)
    except OSError:
        remove(partial)
        raise


def complete(
    partial: Path, final: Path, run: dict[str, Any], files: dict[str, bytes], written: dict[str, Any], version: int = SHARDED
) -> None:
    """Turn a folder with all tensors into the checkpoint `final`. `written` has the sizes and hashes of the tensor files."""
    texts = {RUN: json.dumps({"format": version, **run}, indent=1).encode(), **{f"files/{name}": b for name, b in files.items()}}
    for name, text in texts.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_bytes(text)
    found = {**written, **{name: _digest(partial / name) for name in texts}}
    in_order = dict(sorted(found.items(), key=lambda item: Path(item[0])))
    (partial / MANIFEST).write_text(_signed({"format": version, "files": in_order}))
    for path in [*partial.rglob("*"), partial]:
        sync(path)
    if final.exists():  # written before the run was resumed from an earlier step
        set_aside(final, "replaced")
    partial.rename(final)  # from here on the checkpoint exists
    with contextlib.suppress(OSError):  # the checkpoint is complete; only a power cut could still undo the rename
        sync(final.parent)


def check_space(folder: Path, size: int) -> None:
    free, needed = shutil.disk_usage(folder).free, 1.02 * size + (1 << 16)  # disks allocate whole blocks
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:,.2f} MB are needed and {free / 1e6:,.2f} MB are free in {folder}")


def _signed(value: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return json.dumps({**value, "sha256": digest}, indent=1)


def _digest(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def remove(path: Path) -> None:
    if path.name.startswith("step_"):  # hidden first, so that a kill meanwhile leaves no partial checkpoint
        hidden = path.with_name(f".{path.name}.removed")
        shutil.rmtree(hidden, ignore_errors=True)
        path = path.rename(hidden)
    shutil.rmtree(path, ignore_errors=True)


def sweep(output_dir: str | Path) -> None:
    """Remove partial files of a killed process. Only the holder of the folder's lock may call it."""
    names = ("config.json", "evaluations.json", "best.json", "classes.csv", ".accel_ddp")
    files = [f".{name}.tmp" for name in names]  # of `replace_file`
    for pattern in (".step_*.partial*", ".step_*.removed", ".shared-*", *files):
        for path in Path(output_dir).glob(pattern):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def prune(output_dir: str | Path, keep_last: int, best: int | None) -> None:
    for old in list_checkpoints(output_dir)[:-keep_last]:
        if step_of(old) != best:
            with contextlib.suppress(OSError):
                remove(old)


def set_aside(path: Path, why: str) -> Path:
    names = itertools.chain([""], (f"_{number}" for number in itertools.count(1)))
    asides = (path.with_name(f"{why}_{path.name}{end}") for end in names)
    return path.rename(next(aside for aside in asides if not aside.exists()))


def write_json(path: Path, value: Any) -> None:
    """Replace a small JSON file atomically, also for a power cut."""
    replace_file(path, json.dumps(value, indent=1), syncs=True)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or None if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


def read_run(path: Path) -> dict[str, Any]:
    """Return run.json of a checkpoint without reading the tensors, or {} if it is damaged."""
    manifest = _manifest(path)
    with contextlib.suppress(OSError):
        if manifest and manifest["format"] <= FORMAT and _digest(path / RUN) == manifest["files"].get(RUN):
            run = read_json(path / RUN)
            return run if isinstance(run, dict) else {}
    return {}


def chosen(place: Path) -> Path | None:
    """Return the best checkpoint of a run folder, or else the newest one whose run.json is intact; None: there is none."""
    best, there = read_json(place / "best.json"), list_checkpoints(place)
    if isinstance(best, dict) and place / best["checkpoint"] in there:
        return place / best["checkpoint"]
    return next(filter(read_run, reversed(there)), None)


def read_facts(place: str | Path) -> dict[str, Any]:
    """Return how a model was trained: `recipe`, `options`, `metrics`, `num_ranks`, `columns` and `step` if known. {}: nothing is.

    `place` is an exported folder, whose options name no folders of the machine that trained it; a checkpoint, whose options are
    complete; or a run folder, which means the checkpoint that is `chosen` of it.
    """
    place = Path(place)
    if isinstance(facts := read_json(place / FACTS), dict):
        return facts if "options" in facts else {**facts, "options": facts.get("config", {})}  # of an older version
    path = place if (place / MANIFEST).is_file() else chosen(place)
    run = read_run(path) if path else {}
    if path is None or not run:
        return {}
    known = {**(read_json(path.parent / "evaluations.json") or {}), **run["evaluations"]}
    facts = {name: run[name] for name in ("recipe", "step", "versions", "num_ranks") if name in run}
    facts |= read_json(path / "files" / FACTS) or {}
    return {**facts, "options": run["config"], "metrics": known.get(str(run["step"]), {}), "checkpoint": str(path)}


def _manifest(path: Path) -> dict[str, Any] | None:
    manifest = read_json(path / MANIFEST)
    if not isinstance(manifest, dict):
        return None
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return manifest if json.loads(_signed(rest))["sha256"] == manifest.get("sha256") else None


def identify(path: Path) -> tuple[Any, ...] | None:
    """Return a value that is equal on all ranks that see the same checkpoint on a shared disk, also if others have a copy of it."""
    with contextlib.suppress(OSError):
        facts = (path / MANIFEST).stat()
        return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, (_manifest(path) or {}).get("sha256")
    return None


def find_problem(path: Path, part: int = 0, parts: int = 1, with_optimizer: bool = True) -> str:
    """Hash all files, about 1 GB/s; of several ranks, each its `part`. Without the optimizer, two thirds are not hashed."""
    if not path.is_dir():
        return "there is no such folder"
    if (manifest := _manifest(path)) is None:
        return _wrong(path, MANIFEST, "manifest")
    if manifest["format"] > FORMAT:
        raise NewerFormat(
            f"{path} was written by a newer version of accel_ddp (format {manifest['format']}; this version reads {FORMAT}). "
            "Run: pip install -U accel_ddp"
        )
    files: dict[str, dict[str, Any]] = manifest["files"]
    needed = [name for name in files if with_optimizer or not name.startswith((OPTIMIZER, f"{PIECES[OPTIMIZER]}/"))]
    own = sorted(needed, key=lambda name: -files[name]["size"])[part::parts]
    tensors = [name for name in files if name.endswith(".safetensors") and not name.startswith("files/")]
    if manifest["format"] == WHOLE:
        tensors = [MODEL, OPTIMIZER]
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        for kind, names in (("size", files), ("hash", own), ("tensors", tensors)):
            problems = threads.map(lambda name, kind=kind: _wrong(path, name, kind, files.get(name)), names)
            if problem := next(filter(None, problems), ""):
                return problem
    if not {"step", "run", "config", "versions", "values", "evaluations"} <= read_run(path).keys():
        return f"{RUN} was not written by accel_ddp"
    return ""


def _wrong(path: Path, name: str, kind: str, expected: dict[str, Any] | None = None) -> str:
    """Return what is wrong with a file. One with the right hash may be unusable, because accel_ddp has not written it."""
    from safetensors import SafetensorError, safe_open

    file, text = path / name, ""
    try:
        if kind == "manifest":
            file.read_bytes()  # raises OSError if it is missing or cannot be read
            return f"{name} is damaged"
        if kind == "size" and (size := file.stat().st_size) != expected["size"]:
            text = f"{name} has {size:,} bytes instead of {expected['size']:,}"
        elif kind == "hash" and _digest(file) != expected:
            text = f"{name} is damaged: its sha256 differs from the manifest"
        elif kind == "tensors":
            with safe_open(file, framework="np"):
                other = _of_another_run(path, name)
            return f"{name} does not belong here{other}" if other else ""
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, SafetensorError) as error:
        return f"{name} is not a safetensors file ({error})" if kind == "tensors" else f"{name} cannot be read: {error.strerror}"
    return text and f"{text}{_of_another_run(path, name)}"


def _of_another_run(path: Path, name: str) -> str:
    """Return where a part of a sharded checkpoint comes from, if it comes from another run or step, or else ""."""
    from safetensors import SafetensorError, safe_open

    if not name.startswith(tuple(f"{folder}/" for folder in PIECES.values())):
        return ""
    run = read_run(path)
    with contextlib.suppress(OSError, SafetensorError), safe_open(path / name, framework="np") as file:
        facts = file.metadata() or {}
        if run and facts.get("run", run["run"]) != run["run"]:
            return f" (it is a part of another run, at its step {facts.get('step')})"
        if run and facts.get("step", str(run["step"])) != str(run["step"]):
            return f" (it is a part of the checkpoint of step {facts['step']})"
    return ""
