"""The GPUs of this node as its driver reports them, without torch."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from accel_ddp.doctor.host import local_finding
from accel_ddp.doctor.report import Finding, format_bytes
from accel_ddp.environment.launcher import cpu_is_wanted
from accel_ddp.environment.topology import Topology, topology_of_this_rank

_HANGS = "nvidia-smi does not answer"


def query_driver(seconds: float = 15) -> tuple[list[dict[str, Any]] | None, dict[str, str], str]:
    """Return (GPUs, versions of the driver and of CUDA, error). The GPUs are None if they are not known."""
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
    """Return the number of GPUs that ranks on this host would use. 0: they would use CPUs, or the GPUs are not known."""
    gpus = None if cpu_is_wanted() else query_driver()[0]
    return len(_select_visible(topology_of_this_rank(), gpus)[0]) if gpus else 0


def _read_gpu(gpu: ElementTree.Element) -> dict[str, Any]:
    """Return name, identity, memory, uncorrectable errors and processes of one GPU."""
    volatile = gpu.find("ecc_errors/volatile")
    counters = [] if volatile is None else list(volatile.iter())
    uncorrectable = [one for one in counters if "uncorrectable" in one.tag or one.tag.endswith("_dbe")]
    processes = [one for one in gpu.findall("processes/process_info") if _text(one, "type") in ("C", "C+G")]
    return {
        "name": _text(gpu, "product_name"), "uuid": _text(gpu, "uuid"),
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
    """Return (indices of the GPUs that this node would use, findings about them).

    The arguments after the first are those that `query_driver` returns. The indices are None if the GPUs are not known.
    """
    if cpu_is_wanted():
        return [], []
    if gpus is None:
        code = "E_GPU_DRIVER" if error.startswith(_HANGS) else "W_GPU_DRIVER"
        return None, [local_finding(topology, code, error, "restart the node, or install the NVIDIA driver and its tools")]
    visible, found = _select_visible(topology, gpus)
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
        found.append(local_finding(topology, "E_GPU_COUNT", f"{ranks} ranks on this node{reason}, but {has}", fix))
    for index in visible:
        found += _check_one(topology, index, gpus[index])
    return visible, [*found, *(_check_torch(topology, len(gpus), driver) if gpus else [])]


def _select_visible(topology: Topology, gpus: list[dict[str, Any]]) -> tuple[list[int], list[Finding]]:
    """Return the indices of the GPUs that CUDA_VISIBLE_DEVICES selects, and a finding if it names one that does not exist."""
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
            fix = "unset CUDA_VISIBLE_DEVICES, or name GPUs that exist"
            return visible, [local_finding(topology, "E_CUDA_VISIBLE_DEVICES", saw, fix)]
        visible.append(index)
    return visible, []


def _check_one(topology: Topology, index: int, gpu: dict[str, Any]) -> list[Finding]:
    found = []
    if gpu["ecc"]:
        saw = f"GPU {index} ({gpu['name']}) has {gpu['ecc']} uncorrectable memory errors since the last reset"
        fix = f"nvidia-smi --gpu-reset -i {index}, or remove the node from the cluster"
        found.append(local_finding(topology, "E_GPU_ECC", saw, fix))
    if gpu["processes"] or gpu["used"] > 0.2 * max(1, gpu["bytes"]):
        users = ", ".join(gpu["processes"][:3]) or "processes that this container does not see"
        saw = f"GPU {index} has {format_bytes(gpu['used'])} of {format_bytes(gpu['bytes'])} in use by {users}"
        fix = "end what is left of an earlier run (kill PID), or choose others with CUDA_VISIBLE_DEVICES"
        found.append(local_finding(topology, "W_GPU_BUSY", saw, fix))
    return found


def _check_torch(topology: Topology, num_gpus: int, driver: dict[str, str]) -> list[Finding]:
    """Return a finding if the installed torch cannot use GPUs with this driver."""
    build, driver_cuda = read_torch_build(), driver.get("cuda", "").split(".")[0]
    if build and "cuda" not in build:
        saw = f"this host has {num_gpus} GPUs, but its torch is a CPU build"
        fix = "pip install a torch with CUDA, or set ACCELERATE_USE_CPU=true"
        return [local_finding(topology, "E_GPU_DRIVER", saw, fix)]
    if build and driver_cuda.isdigit() and int(build["cuda"].split(".")[0]) > int(driver_cuda):
        saw = f"torch is built for CUDA {build['cuda']}, but the driver {driver['driver']} supports CUDA {driver['cuda']}"
        return [local_finding(topology, "E_GPU_DRIVER", saw, "update the driver, or install a torch for that CUDA")]
    return []


def read_torch_build() -> dict[str, str]:
    """Return the version and the CUDA version of the installed torch. Its version file is read, not imported: that is slow."""
    spec = importlib.util.find_spec("torch")
    try:
        text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()
    except (AttributeError, OSError, TypeError, IndexError):
        return {}
    found = {name: re.search(rf"^{name}(?:: [^=]+)? = '([^']*)'", text, re.MULTILINE) for name in ("__version__", "cuda")}
    return {name: match[1] for name, match in found.items() if match}
