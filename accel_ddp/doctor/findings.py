"""Findings, the outcome of the checks and how both are printed, and the table of all codes.

A finding has its own observation. Its fix is the one of the table, unless it depends on values that are known only where it is found.
E_ codes end the run, W_ codes do not, and I_ codes are information. Every node prints the same text.
"""

import os
import sys
from collections import namedtuple
from dataclasses import asdict, dataclass, field
from typing import Any

from accel_ddp.text import counted

ERROR, WARNING, INFO = "error", "warning", "info"


@dataclass(frozen=True)
class Finding:
    """One observation about the cluster: where it was made, what it is, and how to fix it."""

    code: str  # E_...: training must not start; W_...: training works, with a disadvantage; I_...: information
    saw: str
    fix: str | None = None  # None: the usual one of the code, in CODES
    host: str = ""
    node: int | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.fix is None:
            object.__setattr__(self, "fix", CODES[self.code].fix)

    @property
    def severity(self) -> str:
        return {"E": ERROR, "W": WARNING}.get(self.code[:1], INFO)

    @property
    def where(self) -> str:
        parts = [self.host] if self.host else []
        parts += [f"machine_rank {self.node}"] if self.node is not None else []
        parts += [f"rank {self.rank}"] if self.rank is not None else []
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "severity": self.severity}


@dataclass
class Outcome:
    """The result of the checks, the same on every node except for `node_rank`, `about` and `interface`."""

    findings: list[Finding]
    lines: list[str] = field(default_factory=list)  # what was checked successfully
    table: list[str] = field(default_factory=list)  # what differs between the nodes
    roster: list[dict[str, Any]] = field(default_factory=list)  # node rank, host, address and number of ranks of each node
    paths: list[dict[str, Any]] = field(default_factory=list)  # measurements of each pair of nodes
    node_rank: int | None = None
    deep_port: int | None = None  # port for the process group of the collective checks; None: they must not run
    about: str = ""  # one line about this node
    interface: str = ""  # network interface that leads to the main node

    @property
    def has_errors(self) -> bool:
        return has_errors(self.findings)

    @property
    def ranks_of_nodes(self) -> list[int]:
        """Return the number of ranks of each node, in the order of the nodes."""
        return [peer["ranks"] for peer in sorted(self.roster, key=lambda peer: peer["node"])]


def has_errors(findings: list[Finding]) -> bool:
    return any(finding.severity == ERROR for finding in findings)


def sort_findings(findings: list[Finding]) -> list[Finding]:
    """Return the findings without duplicates, errors first, in an order that does not depend on the node."""
    order = {ERROR: 0, WARNING: 1, INFO: 2}
    keyed = {(order[f.severity], f.code, -1 if f.node is None else f.node, f.saw, f.host): f for f in findings}
    return [finding for _, finding in sorted(keyed.items())]


def format_findings(findings: list[Finding], color: bool = False) -> str:
    """Return the lines of all findings. Findings with the same text are printed once, with the names of their nodes."""
    paint = {ERROR: "\033[1;31m", WARNING: "\033[1;33m", INFO: "\033[2m"} if color else {}
    plain = "\033[0m" if color else ""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for finding in sort_findings(findings):
        groups.setdefault((finding.code, finding.saw, finding.fix), []).append(finding.where)
    lines = []
    for (code, saw, fix), places in groups.items():
        severity = Finding(code, saw, fix).severity
        where = "; ".join(place for place in places if place and place.partition(", ")[0] + " (machine_rank" not in saw)
        lines.append(f"{paint.get(severity, '')}{code}{plain}  {f'[{where}] ' if where else ''}{saw}")
        lines += [f"    fix: {fix}"] if fix else []
    return "\n".join(lines)


def summarize(findings: list[Finding]) -> str:
    """Return the verdict, for example `healthy` or `2 errors, 1 warning`. Findings are counted as they are printed."""
    severities = list({(f.code, f.saw, f.fix): f.severity for f in findings}.values())
    counts = {severity: severities.count(severity) for severity in (ERROR, WARNING)}
    parts = [counted(n, severity) for severity, n in counts.items() if n]
    return ", ".join(parts) or "healthy"


def supports_color(stream: Any = None) -> bool:
    return (stream or sys.stdout).isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


Code = namedtuple("Code", "meaning fix")

CODES = {
    # This node: its numbers and addresses.
    "E_PROCESSES": Code(
        "num_processes is not a multiple of num_machines, or accelerate started another number of processes.",
        "use a multiple of num_machines for num_processes, which is the total over all nodes; for different numbers of ranks on the "
        "nodes, use torchrun with its own --nproc_per_node on each node, or `accel-ddp launch`",
    ),
    "E_TRAINS_ALONE": Code(
        "This node would train alone, because of --cpu, distributed_type MULTI_CPU or NO, or num_machines 1.",
        "use distributed_type: MULTI_GPU and the same --num_machines on every node; without GPUs set ACCELERATE_USE_CPU=true",
    ),
    "E_MACHINE_RANK": Code(
        "machine_rank is not smaller than num_machines.", "use --machine_rank 0 to num_machines - 1, a different one on each node"
    ),
    "E_MAIN_ELSEWHERE": Code(
        "This node is machine_rank 0, but does not have the main address.",
        "use --machine_rank 1, or its address as --main_process_ip",
    ),
    "E_MAIN_PUBLIC": Code(
        "The main address is a public one, which node 0 itself does not have.", "use its private address as --main_process_ip"
    ),
    "E_MAIN_IS_HERE": Code(
        "This node has the main address, but not machine_rank 0.", "use --machine_rank 0 on the node that has the main address"
    ),
    "E_NAME": Code(
        "The name of the main node does not resolve here.",
        "use the private IP address of node 0 (Slurm: NodeAddr of `scontrol show node NAME`), or add the name to /etc/hosts; in "
        "Kubernetes MASTER_ADDR must be the headless Service's name of the first pod: POD.SERVICE",
    ),
    "E_IFNAME": Code(
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface that is not up.", "unset it, or use one that `ip addr` shows"
    ),
    "W_HOST_NAME": Code(
        "The host name resolves to loopback or not at all, so gloo would announce a wrong address.",
        "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; the recipes of accel_ddp set them themselves",
    ),
    "I_HOST_NAME": Code("As W_HOST_NAME; the preflight has set the variables for this run.", "nothing, or correct /etc/hosts"),
    "E_PORT": Code("This node cannot listen on a port.", "use a --main_process_port above 1023, or another GLOO_SOCKET_IFNAME"),
    # This node: its limits, disks and GPUs.
    "W_OPEN_FILES": Code("The hard limit of open files is too low for data workers.", "ulimit -Hn 65536 as root"),
    "W_MEMLOCK": Code(
        "This host has InfiniBand, but the limit of locked memory is too low for NCCL.",
        "ulimit -l unlimited (docker: --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK)",
    ),
    "W_SHM": Code(
        "/dev/shm is almost full. Data workers and NCCL are killed with `Bus error` when it is full.",
        "docker run --shm-size=8g (Kubernetes: an emptyDir with medium: Memory at /dev/shm)",
    ),
    "W_DISK": Code("The disk of the output folder is almost full.", "delete files, or use another disk"),
    "E_DISK": Code("The output folder has too little space for the checkpoints.", "delete files, or use another --output_dir"),
    "E_DISK_STUCK": Code(
        "A disk or a program of this node does not answer.", "run `df`, `git status` and `nvidia-smi` there: one of them hangs"
    ),
    "E_OUTPUT_DIR": Code(
        "The output folder of the main node cannot be written.", "choose another --output_dir, or correct its permissions"
    ),
    "E_OUT": Code("`accel-ddp tune` cannot write to its output folder.", "choose another --out on this node"),
    "E_GPU_COUNT": Code(
        "This node has fewer visible GPUs than ranks.",
        "use --num_processes with the number of nodes times the visible GPUs of one node, or --nproc_per_node of torchrun with the "
        "visible GPUs of this node; check CUDA_VISIBLE_DEVICES",
    ),
    "E_CUDA_VISIBLE_DEVICES": Code("CUDA_VISIBLE_DEVICES names a GPU that does not exist.", "unset it, or name GPUs that exist"),
    "E_GPU_ECC": Code("A GPU has uncorrectable memory errors.", "nvidia-smi --gpu-reset -i INDEX, or do not use this node"),
    "E_GPU_DRIVER": Code(
        "The driver hangs, or the installed torch cannot use GPUs with it.",
        "restart the node, update the driver, or install a torch for the CUDA version of the driver",
    ),
    "W_GPU_DRIVER": Code("The GPUs of this node could not be checked.", "restart the node, or install the NVIDIA driver"),
    "W_GPU_BUSY": Code("Another process uses a GPU.", "stop processes of an earlier run (kill PID), or set CUDA_VISIBLE_DEVICES"),
    # The way to the main node.
    "E_REFUSED": Code("The main address is up, but nothing listens on the port.", "start node 0, or correct port and address"),
    "E_DROPPED": Code(
        "Nothing answers: packets are dropped, or no such host is up.", "check the address; then allow all TCP between the nodes"
    ),
    "E_UNREACHABLE": Code("The network cannot reach the main address.", "correct --main_process_ip, or start that node"),
    "E_PORT_BUSY": Code(
        "Another program, or the doctor of another run, has the main port.",
        "stop processes of an earlier run there, or use another --main_process_port; script, --token and version of accel_ddp "
        "must be the same on every node",
    ),
    "E_PORT_BLOCKED": Code(
        "A firewall blocks the main port, but not another port of node 0.", "allow all TCP between the nodes, or use an open port"
    ),
    "I_RENDEZVOUS": Code("A rendezvous is running at the main port. This node joins it if it belongs to this job.", "nothing"),
    "E_MAIN_LOST": Code(
        "The connection to the main node was lost before the verdict.", "read the output of the main node; restart all nodes"
    ),
    # All nodes together.
    "E_MISSING": Code("A node or rank did not connect in time.", "start the same command there, and open the main port"),
    "E_LATE": Code(
        "A node connected after the others had been checked.", "use the same num_machines on every node; restart all of them"
    ),
    "E_SILENT": Code("A node did not answer in time, or closed its connection.", "read the output of that node"),
    "E_DUPLICATE": Code("Several nodes have the same machine_rank, or processes the same RANK.", "give each its own"),
    "E_COUNTS": Code(
        "The number of nodes differs between the nodes, or the numbers of ranks contradict the total.",
        "use the same num_machines and num_processes on every node; for different numbers of ranks on the nodes, use torchrun with its "
        "own --nproc_per_node on each node, or `accel-ddp launch`",
    ),
    "E_VERSIONS": Code("Package versions differ between the nodes.", "run `pip install -c constraints.txt -e .` on every node"),
    "W_PYTHON": Code("Python versions differ between the nodes.", "results are the same; use one version when you can"),
    "E_CODE": Code("The code differs between the nodes.", "check out the same commit on every node, or share one folder"),
    "E_OPTIONS": Code(
        "Options differ between the nodes, or a node exited because of its options.", "start every node with the same options"
    ),
    "E_ACCELERATE_CONFIG": Code(
        "The accelerate configs differ between the nodes, for example FSDP on one and DDP on another, or a config is not supported.",
        "use the same accelerate config and options of `accelerate launch` on every node",
    ),
    "E_FILES": Code("A file differs between the nodes, or a node does not have it.", "copy it to every node, or share a disk"),
    "I_FILES": Code("A file was not compared, because reading it takes too long.", "nothing, or compare it yourself"),
    "W_HUB": Code("The nodes have cached different commits of a model or dataset.", "download it again on every node"),
    "W_ENVIRONMENT": Code("NCCL settings differ between the nodes.", "export the same NCCL settings on every node"),
    "W_DRIVER": Code("Driver versions differ between the nodes.", "results are the same; update the older driver when you can"),
    "E_GPU_MIX": Code(
        "Some nodes have GPUs and some have none.",
        "check nvidia-smi, CUDA_VISIBLE_DEVICES and the torch build there, or set ACCELERATE_USE_CPU=true on every node",
    ),
    "W_GPU_KINDS": Code(
        "The nodes have different GPUs. The slowest determines the speed.", "use --balance speed; --micro_batch_size may differ"
    ),
    "W_CLOCK": Code("The clocks of the nodes differ.", "timedatectl set-ntp true"),
    # Paths between the nodes.
    "E_PATH_DROPPED": Code("Packets between two nodes are dropped.", "allow all TCP between the nodes, not only the main port"),
    "E_PATH_REFUSED": Code("A firewall rejects connections between two nodes.", "allow all TCP between the nodes"),
    "E_PATH_ONE_WAY": Code("A path between two nodes works in one direction only.", "allow all TCP in both directions"),
    "E_PATH_UNREACHABLE": Code("There is no route between two nodes.", "check routes: ip route get ADDRESS"),
    "E_PATH_MTU": Code(
        "Large packets between two nodes are dropped.", "ip link set dev eth0 mtu 1400, or let ICMP `fragmentation needed` pass"
    ),
    "E_PATH_CUT": Code("A connection between two nodes is closed at once.", "look for a proxy or firewall that resets it"),
    "W_PATH_SLOW": Code("A path is slower than a quarter of the median of all paths.", "check that link (ethtool, ip -s link)"),
    # Collectives.
    "E_COLLECTIVE_STUCK": Code(
        "A collective does not finish.",
        "NCCL_DEBUG=INFO shows the interface NCCL uses; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose another; "
        "NCCL_IB_DISABLE=1 rules out InfiniBand",
    ),
    "E_COLLECTIVE_FAILED": Code(
        "A rank of the collective checks failed or died.",
        "read what this rank printed; NCCL_DEBUG=INFO shows more; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose the interface",
    ),
    "E_COLLECTIVE_WRONG": Code(
        "An all-reduce returned wrong sums, or DDP's weights, buffers or gradients differ from a single process.",
        "use the same torch, NCCL and driver on every node; NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1 and NCCL_ALGO=Ring narrow it down",
    ),
    "E_GPU_PLACEMENT": Code(
        "A rank has no GPU, or not the one it should use.",
        "check nvidia-smi, CUDA_VISIBLE_DEVICES and the torch build there, or set ACCELERATE_USE_CPU=true on every node",
    ),
    "W_GPU_SHARED": Code("Two ranks share a GPU.", "use one rank per GPU in num_processes; check CUDA_VISIBLE_DEVICES"),
    "W_SLOW_TRANSPORT": Code(
        "NCCL uses sockets although the host has InfiniBand or EFA.", "see ibv_devinfo, NCCL_IB_DISABLE and /dev/infiniband"
    ),
}
