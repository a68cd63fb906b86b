"""Checks of this node alone, before any connection is opened: its numbers, its addresses and its limits."""

import contextlib
import ipaddress
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

from accel_ddp.doctor.findings import Finding
from accel_ddp.doctor.host import (
    HOST,
    call_with_timeout,
    interface_addresses,
    is_local_address,
    local_finding,
    resolve,
    route_to,
)
from accel_ddp.nodes.messages import printable
from accel_ddp.nodes.topology import Topology
from accel_ddp.text import format_bytes

_LITTLE = 1 << 30  # bytes; less free space than this is a warning


def check_topology(topology: Topology, ip: str) -> list[Finding]:
    """Return what is wrong with the numbers of this node and with the main address, which is `ip`."""
    return [
        *_check_process_counts(topology),
        *_check_machine_rank(topology, ip),
        *_check_main_address(topology, ip),
    ]


def _check_process_counts(topology: Topology) -> list[Finding]:
    found = []
    num_nodes, num_ranks = topology.num_nodes, topology.num_ranks
    if num_nodes > 1 and num_ranks % num_nodes and not topology.num_node_ranks:
        below = num_ranks // num_nodes * num_nodes
        found.append(
            local_finding(
                topology, "E_PROCESSES", f"{topology.describe('num_processes')} is the total over all nodes and is not a "
                f"multiple of {topology.describe('num_machines')}: accelerate would start {below} and print nothing about it",
                f"use num_processes {below or num_nodes} or {below + num_nodes}; for different numbers of ranks on the nodes, use "
                "torchrun with its own --nproc_per_node on each node, or `accel-ddp launch`",
            )
        )  # fmt: skip
    kind = str(topology.accelerate_config.get("distributed_type", ""))
    uses_cpu = topology.accelerate_config.get("cpu")
    if num_nodes > 1 and (kind in ("MULTI_CPU", "NO") or uses_cpu) and not topology.is_launched:
        what = "--cpu" if uses_cpu else f"distributed_type {kind}"
        found.append(
            local_finding(
                topology, "E_TRAINS_ALONE", f"accelerate was given {what} with num_machines {num_nodes}: every node would "
                "start one process that trains alone and ends with exit code 0",
                "use distributed_type: MULTI_GPU as in accelerate_configs/2node.yaml; without GPUs set ACCELERATE_USE_CPU=true",
            )
        )  # fmt: skip
    return found


def _check_machine_rank(topology: Topology, ip: str) -> list[Finding]:
    found = []
    node_rank, num_nodes = topology.node_rank, topology.num_nodes
    if node_rank is not None and node_rank >= num_nodes and (num_nodes > 1 or not is_local_address(ip)):
        found.append(
            local_finding(
                topology, "E_MACHINE_RANK", f"{topology.describe('machine_rank')}, but {topology.describe('num_machines')}: "
                f"machine ranks go from 0 to {num_nodes - 1}",
                f"use --machine_rank 0 to {num_nodes - 1}, or --num_machines {node_rank + 1} on every node",
            )
        )  # fmt: skip
    if num_nodes == 1 and not is_local_address(ip) and (node_rank or 0) < 1:
        found.append(
            local_finding(
                topology, "E_TRAINS_ALONE", f"{topology.describe('num_machines')}, but {topology.describe('main_process_ip')} "
                "is another host: this node would train alone, and the other node would wait for it",
                "use the same --num_machines on every node, 2 or more",
            )
        )  # fmt: skip
    return found


def _check_main_address(topology: Topology, ip: str) -> list[Finding]:
    if topology.num_nodes <= 1:
        return []
    found, main = [], ipaddress.ip_address(ip)
    if topology.node_rank == 0 and not is_local_address(ip):
        mine = [one for ips in interface_addresses().values() for one in ips if ":" not in one and not one.startswith("127.")]
        is_public = not main.is_private and any(ipaddress.ip_address(one).is_private for one in mine)
        found.append(
            local_finding(
                topology, "E_MAIN_PUBLIC" if is_public else "E_MAIN_ELSEWHERE", f"{topology.describe('machine_rank')}, but "
                f"{topology.describe('main_process_ip')} is not an address of this host ({', '.join(mine) or 'it has none'})"
                + (": it is a public address, which a cloud translates and no instance has itself" if is_public else ""),
                ("" if is_public else "if this is not node 0, use --machine_rank 1 here; if it is, ")
                + f"use --main_process_ip {mine[0] if mine else 'PRIVATE_ADDRESS_OF_NODE_0'} on every node",
            )
        )  # fmt: skip
    if topology.node_rank and is_local_address(ip) and not main.is_loopback:
        found.append(
            local_finding(
                topology, "E_MAIN_IS_HERE", f"{topology.describe('machine_rank')}, but {topology.describe('main_process_ip')} "
                "is an address of this host: the main node must have machine_rank 0",
                f"use --machine_rank 0 here, or the address of node 0 instead of {topology.main_address}",
            )
        )  # fmt: skip
    return found


def choose_data_address(topology: Topology, main_ip: str) -> tuple[str, str, list[Finding]]:
    """Return (address, interface) that this node will use for data, and findings about interfaces chosen by variables."""
    address, interface = (main_ip, "") if is_local_address(main_ip) else route_to(main_ip)
    addresses, found = interface_addresses(), []
    loopback = "lo" if address[:4] == "127." else ""
    interface = interface or next((name for name, ips in addresses.items() if address in ips), loopback)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        names = [name for name in value.lstrip("=").split(",") if name]
        if not names or value.startswith("^"):
            continue
        is_prefix = variable.startswith("NCCL") and not value.startswith("=")  # NCCL also accepts the beginning of a name
        matches = [name for name in addresses if any(name == one or (is_prefix and name.startswith(one)) for one in names)]
        if not matches:
            found.append(
                local_finding(
                    topology, "E_IFNAME", f"{variable}={value}: no interface with this name is up. This host has "
                    f"{', '.join(f'{name} ({ips[0]})' for name, ips in addresses.items()) or 'none'}",
                    f"unset {variable}, or export {variable}={interface or next(iter(addresses), 'eth0')}",
                )
            )  # fmt: skip
        elif variable.startswith("GLOO") and not any(address in addresses[name] for name in matches):
            interface, address = matches[0], min(addresses[matches[0]], key=lambda ip: (":" in ip, ip.startswith("fe80")))
    return address, interface, found


def check_host_name(
    topology: Topology, interface: str, main_ip: str, variables: dict[str, str], will_be_set: bool
) -> list[Finding]:
    """Return a finding if the host name resolves to loopback, or not at all.

    gloo announces the address of the host name to the other nodes. With Debian's default of 127.0.1.1 they would connect to
    themselves. `variables` select the right interface; `will_be_set` is true if the caller sets them.
    """
    address = call_with_timeout(lambda: resolve(HOST, 2), 3, "")
    is_good = address and not address.startswith("127.") and address != "::1"
    is_one_machine = ipaddress.ip_address(main_ip).is_loopback
    if is_good or os.environ.get("GLOO_SOCKET_IFNAME") or is_one_machine:
        return []
    saw = f"the host name {HOST} " + (
        f"resolves to {address}: gloo would announce this address to the other nodes"
        if address
        else "does not resolve: gloo cannot determine the address of this node"
    )
    if not interface:
        return [local_finding(topology, "E_HOST_NAME", saw, "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, see `ip addr`")]
    if will_be_set:
        settings = " and ".join(f"{name}={value}" for name, value in variables.items())
        return [local_finding(topology, "I_HOST_NAME", f"{saw}; the preflight has set {settings} for this run", "")]
    settings = " ".join(f"{name}={value}" for name, value in variables.items())
    return [local_finding(topology, "W_HOST_NAME", saw, f"export {settings} (the recipes of accel_ddp set this themselves)")]


def check_limits(topology: Topology, output_dir: str, folder: Path | None) -> list[Finding]:
    """Return findings about open files, locked memory, shared memory and the disk.

    `folder` is the existing part of `output_dir`, or None if its disk does not answer.
    """
    found = []
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < 1024:
        found.append(local_finding(topology, "W_OPEN_FILES", f"ulimit -n is {files}: data workers need more", "ulimit -n 65536"))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and any(Path("/sys/class/infiniband").glob("*")):
        found.append(
            local_finding(
                topology, "W_MEMLOCK",
                f"this host has InfiniBand, but ulimit -l is {locked // 1024} KiB: NCCL cannot register memory",
                "ulimit -l unlimited (docker: --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK)",
            )
        )  # fmt: skip
    with contextlib.suppress(OSError):
        shared = shutil.disk_usage("/dev/shm")
        if shared.free < _LITTLE:
            found.append(
                local_finding(
                    topology, "W_SHM", f"/dev/shm has {format_bytes(shared.free)} free of {format_bytes(shared.total)}: data "
                    "workers and NCCL are killed with `Bus error` when it is full",
                    "docker run --shm-size=8g (Kubernetes: an emptyDir with medium: Memory at /dev/shm)",
                )
            )  # fmt: skip
    if output_dir:
        free = -1 if folder is None else call_with_timeout(lambda: shutil.disk_usage(folder).free, 3, -1)
        if free < 0:
            saw = f"the disk of {output_dir} does not answer within 3 s; it may be a network disk that is down"
            found.append(local_finding(topology, "E_DISK_STUCK", saw, "see `df`; mount it again, or use another --output_dir"))
        elif free < _LITTLE:
            saw = f"the disk of {folder} has {format_bytes(free)} free"
            found.append(local_finding(topology, "W_DISK", saw, "delete files, or use another disk"))
    return found


# Whether the nodes share the output folder: each node writes a marker file there and lists the markers of the others.
_PREFIX = ".accel_ddp_doctor_"


def write_marker(folder: Path | None, mark: Any, node_rank: int | None) -> tuple[Path | None, str]:
    """Write the marker file of this node. Returns (the file, the reason why it could not be written or "")."""
    if not folder:
        return None, ""
    file = folder / f"{_PREFIX}{_clean_mark(mark)}_{node_rank or 0}"

    def write() -> str:
        try:
            file.write_text("written by accel-ddp doctor\n")
            return ""
        except OSError as error:
            return error.strerror or str(error)

    return file, call_with_timeout(write, 3, "the disk does not answer")


def list_markers(folder: Path | None, mark: Any, error: str) -> dict[str, Any]:
    """Return the answer to the coordinator: the folder, its free space and the nodes whose markers are in it.

    `error` is the reason why this node could not write its own marker.
    """
    if not folder:
        return {"folder": "", "error": "", "free": 0, "sees": []}
    prefix = f"{_PREFIX}{_clean_mark(mark)}_"
    for _ in range(3):  # a network disk may show files of other hosts a moment later
        names = call_with_timeout(lambda: os.listdir(folder), 2, [])
        suffixes = [name[len(prefix) :] for name in names if name.startswith(prefix)]
        nodes = sorted(int(suffix) for suffix in suffixes if suffix.isdigit())
        if 0 in nodes:
            break
        time.sleep(0.1)
    for name in names:  # a doctor that was killed leaves its marker behind
        with contextlib.suppress(OSError):
            if name.startswith(_PREFIX) and time.time() - (folder / name).stat().st_mtime > 3600:
                (folder / name).unlink()
    free = call_with_timeout(lambda: shutil.disk_usage(folder).free, 2, 0)
    return {"folder": str(folder), "error": error, "free": free, "sees": nodes}


def _clean_mark(mark: Any) -> str:
    """Return the part of a received mark that is safe in a file name."""
    return "".join(letter for letter in printable(mark, 20) if letter.isalnum())
