"""The GPUs of this node as its driver sees them, without torch."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from accel_ddp.doctor.host import finding
from accel_ddp.doctor.report import Finding, gibibytes
from accel_ddp.environment.topology import Place

HANGS = "nvidia-smi does not answer"


def cpu_is_wanted() -> bool:
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def found_by_the_driver(seconds: float = 15) -> tuple[list[dict[str, Any]] | None, dict[str, str], str]:
    """(GPUs, driver and CUDA versions, what went wrong) as the driver tells; None instead of GPUs where it does not tell."""
    if not (command := shutil.which("nvidia-smi")):
        there = Path("/dev/nvidia0").exists()
        return (None, {}, "this host has /dev/nvidia0 but no nvidia-smi: its GPUs were not looked at") if there else ([], {}, "")
    said = ""
    try:
        ended = subprocess.run([command, "-q", "-x"], capture_output=True, text=True, timeout=seconds)
        said = (ended.stdout + ended.stderr).strip()
        tree = ElementTree.fromstring(ended.stdout)
    except subprocess.TimeoutExpired:
        return None, {}, f"{HANGS} within {seconds:.0f} s: a GPU or the driver hangs"
    except (OSError, ElementTree.ParseError) as error:
        return None, {}, f"nvidia-smi fails: {said.splitlines()[-1] if said else error}"

    def text(gpu: ElementTree.Element, path: str) -> str:
        return (gpu.findtext(path) or "").strip()

    def number(words: str) -> int:
        return int(words.split()[0]) if words[:1].isdigit() else 0

    found = []
    for gpu in tree.findall("gpu"):
        volatile = gpu.find("ecc_errors/volatile")
        uncorrected = [
            e for e in ([] if volatile is None else volatile.iter()) if "uncorrectable" in e.tag or e.tag.endswith("_dbe")
        ]
        processes = [
            f"{text(p, 'process_name') or '?'} (pid {text(p, 'pid')}, {text(p, 'used_memory')})"
            for p in gpu.findall("processes/process_info")
            if text(p, "type") in ("C", "C+G")
        ]
        found.append({
            "name": text(gpu, "product_name"), "uuid": text(gpu, "uuid"),
            "bytes": number(text(gpu, "fb_memory_usage/total")) << 20, "used": number(text(gpu, "fb_memory_usage/used")) << 20,
            "ecc": sum(number((e.text or "").strip()) for e in uncorrected),
            "processes": processes,
        })  # fmt: skip
    return found, {"driver": text(tree, "driver_version"), "cuda": text(tree, "cuda_version")}, ""


def judged(
    place: Place, found: list[dict[str, Any]] | None, driver: dict[str, str], trouble: str
) -> tuple[list[int] | None, list[Finding]]:
    """(indices of the GPUs that this node would use, what is wrong with them); None where they are not known."""
    if cpu_is_wanted():
        return [], []
    if found is None:
        code = "E_GPU_DRIVER" if trouble.startswith(HANGS) else "W_GPU_DRIVER"
        return None, [finding(place, code, trouble, "restart the node, or install the NVIDIA driver and its tools")]
    wrong = []
    seen = list(range(len(found)))
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and found:
        seen = []
        for word in [word.strip() for word in wanted.split(",") if word.strip()]:
            index = int(word) if word.isdigit() else next((i for i, g in enumerate(found) if g["uuid"].startswith(word)), -1)
            index = 0 if word.startswith("MIG-") else index
            if not 0 <= index < len(found):  # CUDA ignores this one and every one after it
                if word.isdigit() or word.startswith("GPU-"):  # -1 and Slurm's NoDevFiles mean none, on purpose
                    wrong.append(
                        finding(
                            place, "E_CUDA_VISIBLE_DEVICES",
                            f"CUDA_VISIBLE_DEVICES={wanted}: there is no GPU {word}; this host has 0 to {len(found) - 1}",
                            "unset CUDA_VISIBLE_DEVICES, or name GPUs that are there",
                        )
                    )  # fmt: skip
                break
            seen.append(index)
        if not seen:
            return [], wrong
    has = f"{len(found)} GPUs" if wanted is None else f"{len(seen)} of {len(found)} GPUs visible (CUDA_VISIBLE_DEVICES={wanted})"
    if found and place.per_node > len(seen) * place.local_ranks:  # each task of Slurm may see one
        wrong.append(
            finding(
                place, "E_GPU_COUNT", f"{place.per_node} ranks on this node ({place.said('num_processes')} is the total over "
                f"{place.nodes} nodes), but {has}", f"use --num_processes {place.nodes * max(1, len(seen))}",
            )
        )  # fmt: skip
    for index in seen:
        gpu = found[index]
        if gpu["ecc"]:
            wrong.append(
                finding(
                    place, "E_GPU_ECC",
                    f"GPU {index} ({gpu['name']}) has {gpu['ecc']} uncorrectable memory errors since the last reset",
                    f"nvidia-smi --gpu-reset -i {index}, or take the node out",
                )
            )  # fmt: skip
        if gpu["processes"] or gpu["used"] > 0.2 * max(1, gpu["bytes"]):
            who = ", ".join(gpu["processes"][:3]) or "processes that this container does not see"
            wrong.append(
                finding(
                    place, "W_GPU_BUSY", f"GPU {index} has {gibibytes(gpu['used'])} of {gibibytes(gpu['bytes'])} in use by {who}",
                    "end what is left of an earlier run (kill PID), or choose others with CUDA_VISIBLE_DEVICES",
                )
            )  # fmt: skip
    built, newest = torch_build(), driver.get("cuda", "").split(".")[0]
    if found and built and "cuda" not in built:
        saw = f"this host has {len(found)} GPUs, but its torch is a CPU build"
        wrong.append(finding(place, "E_GPU_DRIVER", saw, "pip install a torch with CUDA, or set ACCELERATE_USE_CPU=true"))
    elif found and built and newest.isdigit() and int(built["cuda"].split(".")[0]) > int(newest):
        saw = f"torch is built for CUDA {built['cuda']}, the driver {driver['driver']} has CUDA {driver['cuda']}"
        wrong.append(finding(place, "E_GPU_DRIVER", saw, "update the driver, or install a torch for that CUDA"))
    return seen, wrong


def torch_build() -> dict[str, str]:
    """torch's version file, read and not imported: an import costs seconds."""
    spec = importlib.util.find_spec("torch")
    try:
        text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()
    except (AttributeError, OSError, TypeError, IndexError):
        return {}
    found = {name: re.search(rf"^{name}(?:: [^=]+)? = '([^']*)'", text, re.MULTILINE) for name in ("__version__", "cuda")}
    return {name: match[1] for name, match in found.items() if match}
