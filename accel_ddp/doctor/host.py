"""Addresses, interfaces and folders of this host. No call takes longer than its timeout."""

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from accel_ddp.doctor.findings import Finding
from accel_ddp.errors import UserError
from accel_ddp.nodes.topology import Topology

# Time limits that several modules of the doctor share, in seconds.
FIRST_NOTICE = 2.0  # until the first line about what the doctor waits for
NOTICE_INTERVAL = 10.0  # between further lines
FACTS = 45.0  # for a connected node to send its facts; its disks and its driver may be slow
MAIN_SILENT = 20.0  # without a message from the coordinator, which sends one every 2 s
NO_ANSWER = 8.0  # without any answer from an address; a host that is up answers at least with a refusal
PREFLIGHT_NO_ANSWER = 60.0  # the same in a preflight, where the main node may still be booting


# The platform this machine belongs to (a cloud, Slurm, Kubernetes), and how its firewall is opened.


def detect_platform(vendor_files: Path = Path("/sys/class/dmi/id")) -> str:
    """Return `kubernetes`, `slurm`, `ec2`, `gcp`, `azure` or an empty text. Only variables and local files are read."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if "SLURM_JOB_ID" in os.environ:
        return "slurm"
    for file in ("sys_vendor", "product_name", "board_vendor", "chassis_asset_tag"):
        try:
            text = (vendor_files / file).read_text(errors="replace")
        except OSError:
            continue
        for mark, name in (("Amazon EC2", "ec2"), ("Google", "gcp"), ("Microsoft Corporation", "azure")):
            if mark in text:
                return name
    return ""


def firewall_advice(ports: str, platform: str | None = None) -> str:
    """Return how to let the nodes reach each other on this platform. `ports` is the port that is needed first."""
    return {
        "ec2": "EC2: give both instances one security group with an inbound rule `All traffic` whose source is that same group "
        f"({ports} alone is not enough, because data ports are random)",
        "gcp": "GCP: add a VPC firewall rule that allows all tcp between the instances, by their network tag "
        f"({ports} alone is not enough, because data ports are random)",
        "azure": "Azure: allow all TCP from VirtualNetwork to VirtualNetwork in the network security group",
        "slurm": "Slurm: the nodes of a job must reach each other on all TCP ports; show this line to your administrators, or "
        "choose the fast network with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
        "kubernetes": "Kubernetes: a NetworkPolicy must allow all TCP between the pods of this job, and MASTER_ADDR must be a "
        "headless Service (clusterIP: None)",
    }.get(
        detect_platform() if platform is None else platform,
        "allow all TCP between the nodes in their firewalls (nft list ruleset, ufw status, firewall-cmd --list-all)",
    )


T = TypeVar("T")

HOST = socket.gethostname()


def local_finding(topology: Topology, code: str, saw: str, fix: str) -> Finding:
    """Return a finding about this node."""
    return Finding(code, saw, fix, host=HOST, node=topology.node_rank)


def call_with_timeout(call: Callable[[], T], seconds: float, default: T) -> T:
    """Return what `call` returns, or `default` if it fails or takes too long, as with a dead resolver or NFS mount.

    The thread of a call that takes too long keeps running, because it cannot be interrupted.
    """
    results: list[T] = []

    def work() -> None:
        with contextlib.suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else default


def resolve(name: str, seconds: float = 5) -> str:
    """Return an address of a host name, IPv4 if it has one. Raises UserError with the reason if there is none."""
    reason: list[str] = [f"the resolver did not answer within {seconds:.0f} s"]

    def look_up() -> str:
        try:
            found = sorted(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), key=lambda entry: entry[0] != socket.AF_INET)
            return found[0][4][0]
        except (OSError, UnicodeError) as error:
            reason[0] = str(error)
            raise

    if address := call_with_timeout(look_up, seconds, ""):
        return address
    raise UserError(reason[0])


def interface_addresses() -> dict[str, list[str]]:
    """Return the IP addresses of each network interface that is up."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        ips = [entry.address.partition("%")[0] for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        if name in up and ips:
            found[name] = ips
    return found


def is_local_address(ip: str) -> bool:
    """Return whether this host has the address. Listening on it is no test: some systems allow that for any address."""
    one = ipaddress.ip_address(ip)
    return one.is_loopback or one.is_unspecified or any(ip in ips for ips in interface_addresses().values())


def find_port_user(ip: str, port: int) -> str:
    """Return the process of this host that listens on the port, or an empty string. Processes of other users may be hidden."""
    import psutil

    if not is_local_address(ip):
        return ""
    try:
        pids = [c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid]
        process = psutil.Process(pids[0])
        return f"pid {process.pid} ({' '.join(process.cmdline())[:100] or process.name()})"
    except (psutil.Error, OSError, IndexError):
        return ""


def route_to(ip: str) -> tuple[str, str]:
    """Return (address, interface) of this host from which packets to `ip` leave; both are empty if there is no route."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((ip, 9))  # for UDP this selects the route and sends nothing
            mine = sock.getsockname()[0]
        except OSError:
            return "", ""
    default = "lo" if mine.startswith("127.") else ""
    return mine, next((name for name, ips in interface_addresses().items() if mine in ips), default)


def external_interfaces() -> list[str]:
    """Return the interfaces that may lead to other hosts, without loopback and those of containers and tunnels."""
    internal = "lo docker veth virbr br- cni flannel cali kube podman lxc tun tap wg tailscale"
    return [name for name in interface_addresses() if not name.startswith(tuple(internal.split()))]


def choose_coordinator_addresses(topology: Topology, ip: str) -> tuple[str, str]:
    """Return (address on which the coordinator listens, address under which this node connects to it).

    On the main node, the main address may be a name that its own hosts file resolves to 127.0.1.1, or it may be 0.0.0.0. The
    other nodes cannot reach either. Launchers listen on all addresses in this case, and so does the coordinator if the host
    has several.
    """
    one = ipaddress.ip_address(ip)
    is_literal = topology.main_address == ip and not one.is_unspecified
    is_internal = one.is_loopback or one.is_unspecified
    if topology.num_nodes == 1 or topology.node_rank or not is_internal or is_literal:
        return ip, ip
    external = external_addresses()
    return (external[0], external[0]) if len(external) == 1 else ("0.0.0.0", external[0] if external else "127.0.0.1")


def external_addresses() -> list[str]:
    """Return the IPv4 addresses of this host that other hosts may use, that of the default route first."""
    addresses = interface_addresses()
    found = [ip for name in external_interfaces() for ip in addresses[name] if ":" not in ip]
    default = route_to("192.0.2.1")[0]  # an address reserved for documentation; nothing is sent
    return sorted(found, key=lambda ip: ip != default)


def socket_interface_variables(interface: str, main_ip: str) -> dict[str, str]:
    """Return the variables that select the interface which leads to the main node, without those the user has set.

    gloo uses one interface in any case. NCCL can use several at once, so its variable is left unset if there are several.
    """
    is_only = external_interfaces() == [interface] or ipaddress.ip_address(main_ip).is_loopback
    names = ["GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if is_only else [])]
    return {name: interface for name in names if interface and not os.environ.get(name)}


def nearest_existing_folder(folder: str) -> Path | None:
    """Return the folder, or the nearest parent that exists; None if the disk does not answer."""

    def search() -> Path:
        path = Path(folder).expanduser().absolute()
        while not path.is_dir() and path != path.parent:
            path = path.parent
        return path

    return call_with_timeout(search, 3, None)
