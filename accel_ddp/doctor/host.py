"""This node alone, before any network: what it has, and what is wrong with it. Nothing here takes longer than its timeout."""

import contextlib
import ipaddress
import os
import resource
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from accel_ddp.doctor.report import Finding, gibibytes
from accel_ddp.environment.topology import Place
from accel_ddp.errors import UserError

T = TypeVar("T")

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
    """Whether this host has the address. Not by listening on it: some systems let that be done on any."""
    one = ipaddress.ip_address(ip)
    return one.is_loopback or one.is_unspecified or any(ip in ips for ips in addresses().values())


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


def where_to_listen(place: Place, ip: str) -> tuple[str, str]:
    """(address to listen on, address under which this node reaches the meeting).

    The main node may know itself by a name that its own hosts file resolves to 127.0.1.1, or by 0.0.0.0; the others
    do not. Launchers listen on all addresses there; so do we, if it has several.
    """
    one = ipaddress.ip_address(ip)
    is_literal = place.address == ip and not one.is_unspecified
    if place.nodes == 1 or place.node or not (one.is_loopback or one.is_unspecified) or is_literal:
        return ip, ip
    others = _outer_addresses()
    return (others[0], others[0]) if len(others) == 1 else ("0.0.0.0", others[0] if others else "127.0.0.1")


def _outer_addresses() -> list[str]:
    """IPv4 addresses of this host that others may know, that of the default route first."""
    there = addresses()
    found = [ip for name in real_interfaces() for ip in there[name] if ":" not in ip]
    default = way_to("192.0.2.1")[0]  # an address of nobody: nothing is sent
    return sorted(found, key=lambda ip: ip != default)


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
            interface, address = fits[0], min(there[fits[0]], key=lambda ip: (":" in ip, ip.startswith("fe80")))
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
    alone = kind in ("MULTI_CPU", "NO") or place.config.get("cpu")
    if place.nodes > 1 and alone and not place.is_launched:
        what = "--cpu" if place.config.get("cpu") else kind
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
                ("" if public else "where this is not node 0, use --machine_rank 1 here; where it is, ")
                + f"use --main_process_ip {mine[0] if mine else 'PRIVATE_ADDRESS_OF_NODE_0'} on every node",
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


def real_interfaces() -> list[str]:
    """Those that may lead to other hosts: not loopback, and not what containers and tunnels add."""
    inner = "lo docker veth virbr br- cni flannel cali kube podman lxc tun tap wg tailscale"
    return [name for name in addresses() if not name.startswith(tuple(inner.split()))]


def interface_to_set(interface: str, ip_of_main: str) -> dict[str, str]:
    """The variables that choose the interface which routes to the main node, where the user has not chosen.

    gloo takes one interface anyhow. NCCL may use several at once, so it is left alone where there are several.
    """
    only = real_interfaces() == [interface] or ipaddress.ip_address(ip_of_main).is_loopback
    names = ["GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if only else [])]
    return {name: interface for name in names if interface and not os.environ.get(name)}


def of_the_name(place: Place, interface: str, ip_of_main: str, sets: bool) -> list[Finding]:
    """gloo connects to what the host name resolves to: Debian's 127.0.1.1 makes the others connect to themselves."""
    is_chosen = bool(os.environ.get("GLOO_SOCKET_IFNAME"))
    to_set = interface_to_set(interface, ip_of_main)
    if sets:
        os.environ.update(to_set)
    at = bounded(lambda: resolved(HOST, 2), 3, "")
    bad = at.startswith("127.") or at == "::1" or not at
    if not bad or is_chosen or ipaddress.ip_address(ip_of_main).is_loopback:  # of the last all nodes are this machine
        return []
    saw = (
        f"the host name {HOST} " + (f"resolves to {at}" if at else "does not resolve") + ": gloo would tell the other nodes that"
    )
    if not interface:
        return [finding(place, "E_HOST_NAME", saw, "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, see `ip addr`")]
    if sets:
        done = " and ".join(f"{name}={interface}" for name in to_set)
        return [finding(place, "I_HOST_NAME", f"{saw}; set {done} for this run", "")]
    fix = f"export {' '.join(f'{name}={interface}' for name in to_set)} (recipes of accel_ddp do so by themselves)"
    return [finding(place, "W_HOST_NAME", saw, fix)]


def of_the_limits(place: Place, output_dir: str, folder: Path | None) -> list[Finding]:
    found = []
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < 1024:
        found.append(finding(place, "W_OPEN_FILES", f"ulimit -n is {files}: data workers need more", "ulimit -n 65536"))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and any(Path("/sys/class/infiniband").glob("*")):
        found.append(
            finding(
                place, "W_MEMLOCK",
                f"this host has InfiniBand, but ulimit -l is {locked // 1024} KiB: NCCL cannot register memory",
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
    if output_dir:
        free = -1 if folder is None else bounded(lambda: shutil.disk_usage(folder).free, 3, -1)
        if free < 0:
            saw = f"{output_dir} does not answer within 3 s: a dead network disk?"
            found.append(finding(place, "E_DISK_STUCK", saw, "see `df`; mount it again, or use another --output_dir"))
        elif free < 1 << 30:
            found.append(
                finding(place, "W_DISK", f"{gibibytes(free)} free on the disk of {folder}", "make room, or use another disk")
            )
    return found


def existing(folder: str) -> Path | None:
    """The folder, or the nearest one above it that is there; None where the disk does not answer."""

    def look() -> Path:
        path = Path(folder).expanduser().absolute()
        while not path.is_dir() and path != path.parent:
            path = path.parent
        return path

    return bounded(look, 3, None)
