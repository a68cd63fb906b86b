"""This host alone: its addresses, interfaces and folders, and checks of them. No call takes longer than its timeout."""

import contextlib
import functools
import ipaddress
import os
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from accel_ddp.doctor.findings import FIREWALLS, FIXES, Finding
from accel_ddp.errors import UserError
from accel_ddp.nodes.topology import Topology
from accel_ddp.text import format_bytes

# Time limits that several modules of the doctor share, in seconds.
FIRST_NOTICE = 2.0  # until the first line about what the doctor waits for
NOTICE_INTERVAL = 10.0  # between further lines
FACTS = 45.0  # for a connected node to send its facts; its disks and its driver may be slow
MAIN_SILENT = 20.0  # without a message from the coordinator, which sends one every 2 s
NO_ANSWER = 8.0  # without any answer from an address; a host that is up answers at least with a refusal
PREFLIGHT_NO_ANSWER = 60.0  # the same in a preflight, where the main node may still be booting

T = TypeVar("T")

HOST = socket.gethostname()
_LITTLE = 1 << 30  # bytes; less free space than this is a warning


def detect_platform(vendor_file: Path = Path("/sys/class/dmi/id/sys_vendor")) -> str:
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if "SLURM_JOB_ID" in os.environ:
        return "slurm"
    with contextlib.suppress(OSError):
        return "ec2" if "Amazon EC2" in vendor_file.read_text(errors="replace") else ""
    return ""


def firewall_advice() -> str:
    return FIREWALLS[detect_platform()]


def local_finding(topology: Topology, code: str, saw: str, fix: str | None = None) -> Finding:
    return Finding(code, saw, fix, host=HOST, node=topology.node_rank)


def call_with_timeout(call: Callable[[], T], seconds: float, default: T) -> T:
    """Return what `call` returns, or `default` if it fails or takes too long. The thread of such a call cannot be interrupted."""
    results: list[T] = []

    def work() -> None:
        with contextlib.suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else default


def limit_name_lookups() -> None:
    """torch looks names up at each event: 2 minutes for 2 ranks. A child asks, because glibc keeps a process's first limit."""
    try:
        subprocess.run(["getent", "hosts", "192.0.2.1"], capture_output=True, timeout=1)  # an address that no hosts file contains
    except OSError:
        return  # there is no getent
    except subprocess.TimeoutExpired:
        os.environ["RES_OPTIONS"] = f"{os.environ.get('RES_OPTIONS', '')} timeout:1 attempts:2".strip()
        socket.getfqdn = functools.cache(socket.getfqdn)


def resolve(name: str, seconds: float = 5) -> str:
    def look_up() -> tuple[str, str]:
        try:
            found = sorted(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), key=lambda entry: entry[0] != socket.AF_INET)
            return found[0][4][0], ""
        except (OSError, UnicodeError) as error:
            return "", str(error)

    address, reason = call_with_timeout(look_up, seconds, ("", f"the resolver did not answer within {seconds:.0f} s"))
    if not address:
        raise UserError(reason)
    return address


def interface_addresses() -> dict[str, list[str]]:
    up, families = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items() if name in up and up[name].isup
    }  # fmt: skip
    return {name: ips for name, ips in found.items() if ips}


def port_answers(address: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((address, port), timeout=2).close()
        return True
    return False


def is_local_address(ip: str) -> bool:
    """Return whether this host has the address. Listening on it is no test: some systems allow that for any address."""
    one = ipaddress.ip_address(ip)
    return one.is_loopback or one.is_unspecified or any(ip in ips for ips in interface_addresses().values())


def find_port_user(ip: str, port: int) -> str:
    """Return the process of this host that listens on the port, or an empty string. Processes of other users may be hidden."""
    if not is_local_address(ip):
        return ""
    try:
        pids = [c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid]
        process = psutil.Process(pids[0])
        return f"pid {process.pid} ({' '.join(process.cmdline())[:100] or process.name()})"
    except (psutil.Error, OSError, IndexError):
        return ""


def route_to(ip: str) -> str:
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((ip, 9))  # for UDP this selects the route and sends nothing
            return sock.getsockname()[0]
        except OSError:
            return ""


def external_interfaces() -> list[str]:
    internal = "lo docker veth virbr br- cni flannel cali kube podman lxc tun tap wg tailscale"
    return [name for name in interface_addresses() if not name.startswith(tuple(internal.split()))]


def choose_coordinator_addresses(topology: Topology, ip: str) -> tuple[str, str]:
    """Return where it listens and connects. The main name may mean 127.0.1.1 or 0.0.0.0 there: then on all addresses."""
    one = ipaddress.ip_address(ip)
    is_name_of_loopback = one.is_loopback and topology.main_address != ip
    if topology.num_nodes == 1 or topology.node_rank or not (one.is_unspecified or is_name_of_loopback):
        return ip, ip
    external = external_addresses()
    return (external[0], external[0]) if len(external) == 1 else ("0.0.0.0", external[0] if external else "127.0.0.1")


def external_addresses() -> list[str]:
    """Return the IPv4 addresses of this host that other hosts may use, with the default route first."""
    addresses = interface_addresses()
    found = [ip for name in external_interfaces() for ip in addresses[name] if ":" not in ip]
    default = route_to("192.0.2.1")  # an address reserved for documentation; nothing is sent
    return sorted(found, key=lambda ip: ip != default)


def socket_interface_variables(interface: str, main_ip: str) -> dict[str, str]:
    """gloo uses one interface in any case. NCCL can use several, so its variable is left unset if there are several."""
    is_only = external_interfaces() == [interface] or ipaddress.ip_address(main_ip).is_loopback
    names = ["GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if is_only else [])]
    return {name: interface for name in names if interface and not os.environ.get(name)}


def nearest_existing_folder(folder: str) -> Path | None:
    path = Path(os.path.abspath(os.path.expanduser(folder)))
    return call_with_timeout(lambda: next(one for one in (path, *path.parents) if one.is_dir()), 3, None)


def check_topology(topology: Topology, ip: str) -> list[Finding]:
    found: list[Finding] = []
    add = lambda code, saw, fix=None: found.append(local_finding(topology, code, saw, fix))
    node_rank, num_nodes, num_ranks = topology.node_rank, topology.num_nodes, topology.num_ranks
    is_here, nodes = is_local_address(ip), topology.describe("num_machines")
    if num_nodes > 1 and num_ranks % num_nodes and not topology.num_node_ranks:
        below = num_ranks // num_nodes * num_nodes
        saw = f"{topology.describe('num_processes')} is the total over all nodes and is not a multiple of {nodes}: accelerate would "
        fix = f"use num_processes {below or num_nodes} or {below + num_nodes}; {FIXES['E_PROCESSES'].partition('; ')[2]}"
        add("E_PROCESSES", f"{saw}start {below} and print nothing about it", fix)
    kind, uses_cpu = (topology.accelerate_config.get(name) for name in ("distributed_type", "cpu"))
    if num_nodes > 1 and (str(kind) in ("MULTI_CPU", "NO") or uses_cpu) and not topology.is_launched:
        given = f"{'--cpu' if uses_cpu else f'distributed_type {kind}'} with num_machines {num_nodes}"
        saw = f"accelerate was given {given}: every node would start one process that trains alone and exits with code 0"
        add("E_TRAINS_ALONE", saw)
    if node_rank is not None and node_rank >= num_nodes and (num_nodes > 1 or not is_here):
        saw = f"{topology.describe('machine_rank')}, but {nodes}: machine ranks go from 0 to {num_nodes - 1}"
        add("E_MACHINE_RANK", saw, f"use --machine_rank 0 to {num_nodes - 1}, or --num_machines {node_rank + 1} on every node")
    elif num_nodes == 1 and not is_here:
        saw = f"{nodes}, but {topology.describe('main_process_ip')} is another host: this node would train alone, and the other "
        add("E_TRAINS_ALONE", f"{saw}node would wait for it", "use the same --num_machines on every node, 2 or more")
    return found + (_check_main_address(topology, ip, is_here) if num_nodes > 1 else [])


def _check_main_address(topology: Topology, ip: str, is_here: bool) -> list[Finding]:
    main, ranks = ipaddress.ip_address(ip), f"{topology.describe('machine_rank')}, but {topology.describe('main_process_ip')}"
    if topology.node_rank and is_here and not main.is_loopback:
        saw = f"{ranks} is an address of this host: the main node must have machine_rank 0"
        return [local_finding(topology, "E_MAIN_IS_HERE", saw)]
    if topology.node_rank != 0 or is_here:
        return []
    mine = [one for ips in interface_addresses().values() for one in ips if ":" not in one and not one.startswith("127.")]
    saw = f"{ranks} is not an address of this host ({', '.join(mine) or 'it has none'})"
    fix = f"use --main_process_ip {mine[0] if mine else 'PRIVATE_ADDRESS_OF_NODE_0'} on every node"
    if not main.is_private and any(ipaddress.ip_address(one).is_private for one in mine):
        saw += ": it is a public address, which a cloud translates and no instance has itself"
        return [local_finding(topology, "E_MAIN_PUBLIC", saw, fix)]
    fix = f"if this is not node 0, use --machine_rank 1 here; if it is, {fix}"
    return [local_finding(topology, "E_MAIN_ELSEWHERE", saw, fix)]


def choose_data_address(topology: Topology, main_ip: str) -> tuple[str, str, list[Finding]]:
    """Return (address, interface) that this node will use for data, and findings about interfaces chosen by variables."""
    address, addresses, found = main_ip if is_local_address(main_ip) else route_to(main_ip), interface_addresses(), []
    loopback = "lo" if address.startswith("127.") else ""
    interface = next((name for name, ips in addresses.items() if address in ips), loopback)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        names = [name for name in value.lstrip("=").split(",") if name]
        if not names or value.startswith("^"):
            continue
        is_prefix = variable.startswith("NCCL") and not value.startswith("=")  # NCCL also accepts the beginning of a name
        matches = [name for name in addresses if any(name == one or (is_prefix and name.startswith(one)) for one in names)]
        if not matches:
            present = ", ".join(f"{name} ({ips[0]})" for name, ips in addresses.items()) or "none"
            saw = f"{variable}={value}: no interface with this name is up. This host has {present}"
            fix = f"unset {variable}, or export {variable}={interface or next(iter(addresses), 'eth0')}"
            found.append(local_finding(topology, "E_IFNAME", saw, fix))
        elif variable.startswith("GLOO") and not any(address in addresses[name] for name in matches):
            interface, address = matches[0], min(addresses[matches[0]], key=lambda ip: (":" in ip, ip.startswith("fe80")))
    return address, interface, found


def check_host_name(
    topology: Topology, interface: str, main_ip: str, variables: dict[str, str], will_be_set: bool
) -> list[Finding]:
    """gloo announces the host name's address: with Debian's 127.0.1.1, nodes connect to themselves. `variables` prevent it."""
    address = call_with_timeout(lambda: resolve(HOST, 2), 3, "")
    is_good = address and not address.startswith("127.") and address != "::1"
    if is_good or os.environ.get("GLOO_SOCKET_IFNAME") or ipaddress.ip_address(main_ip).is_loopback or not interface:
        return []
    what = f"resolves to {address}" if address else "does not resolve"
    settings = [f"{key}={one}" for key, one in variables.items()]
    saw = f"the host name {HOST} {what}: gloo would announce a wrong address"
    if will_be_set:
        saw = f"{saw}; the preflight has set {' and '.join(settings)} for this run"
        return [local_finding(topology, "I_HOST_NAME", saw, "")]
    fix = f"export {' '.join(settings)} (the recipes of accel_ddp set this themselves)"
    return [local_finding(topology, "W_HOST_NAME", saw, fix)]


def check_limits(topology: Topology, output_dir: str, folder: Path | None) -> list[Finding]:
    found: list[Finding] = []
    add = lambda code, saw: found.append(local_finding(topology, code, saw))
    files, locked = resource.getrlimit(resource.RLIMIT_NOFILE)[1], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if 0 <= files < 1024:  # the hard limit, to which ranks raise the soft one
        add("W_OPEN_FILES", f"ulimit -Hn is {files}: data workers need more")
    if locked != resource.RLIM_INFINITY and any(Path("/sys/class/infiniband").glob("*")):
        add("W_MEMLOCK", f"this host has InfiniBand, but ulimit -l is {locked // 1024} KiB: NCCL cannot register memory")
    with contextlib.suppress(OSError):
        shared = shutil.disk_usage("/dev/shm")
        if shared.free < _LITTLE:
            free = f"/dev/shm has {format_bytes(shared.free)} free of {format_bytes(shared.total)}"
            add("W_SHM", f"{free}: data workers and NCCL are killed with `Bus error` when it is full")
    free = -1 if folder is None else call_with_timeout(lambda: shutil.disk_usage(folder).free, 3, -1)
    if output_dir and free < 0:
        add("E_DISK_STUCK", f"the disk of {output_dir} does not answer within 3 s; it may be a network disk that is down")
    elif output_dir and free < _LITTLE:
        add("W_DISK", f"the disk of {folder} has {format_bytes(free)} free")
    return found


class FolderCheck:
    def __init__(self, folder: Path | None):
        self.folder, self.error = folder, ""
        self.marker: Path | None = None

    def write(self, mark: str, node_rank: int | None) -> None:
        if node_rank or not self.folder or self.marker:
            return
        self.marker = self._file(mark)

        def write() -> str:
            try:
                self.marker.write_text("written by accel-ddp doctor\n")
                return ""
            except OSError as error:
                return error.strerror or str(error)

        self.error = call_with_timeout(write, 3, "the disk does not answer")

    def look(self, mark: str) -> dict[str, Any]:
        if not self.folder:
            return {"folder": "", "error": "", "free": 0, "sees": []}
        for _ in range(3):  # a network disk may show files of other hosts a moment later
            if is_there := call_with_timeout(self._file(mark).exists, 2, False):
                break
            time.sleep(0.1)
        free = call_with_timeout(lambda: shutil.disk_usage(self.folder).free, 2, 0)
        return {"folder": str(self.folder), "error": self.error, "free": free, "sees": [0] if is_there else []}

    def remove(self) -> None:
        if self.marker:
            with contextlib.suppress(OSError):
                self.marker.unlink()

    def _file(self, mark: str) -> Path:
        """Return the marker file. The mark was received, so it must be safe in a file name."""
        if not mark.isalnum():
            raise ValueError("not a mark")
        return self.folder / f".accel_ddp_doctor_{mark[:20]}"
