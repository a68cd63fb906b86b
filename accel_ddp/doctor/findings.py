"""Findings, the outcome of the checks and how both are printed, and the usual fix of each code.

A finding has its own observation. Its fix is the one of the table, unless it depends on values that are known only where it is found.
E_ codes end the run, W_ codes do not, and I_ codes are information. Every node prints the same text.
"""

import os
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from accel_ddp.text import counted

ERROR, WARNING, INFO = "error", "warning", "info"


@dataclass(frozen=True)
class Finding:
    """One observation about the cluster: where it was made, what it is, and how to fix it."""

    code: str  # E_...: training must not start; W_...: training works, with a disadvantage; I_...: information
    saw: str
    fix: str | None = None  # None: the usual one of the code, in FIXES
    host: str = ""
    node: int | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.fix is None:
            object.__setattr__(self, "fix", FIXES[self.code])

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


# How to fix what a code stands for. docs/codes.md has the meaning of each code (docs/reference/code_meanings.py).
FIXES = {
    # This node: its numbers and addresses.
    "E_PROCESSES": "use a multiple of num_machines for num_processes, which is the total over all nodes; for different numbers of "
    "ranks on the nodes, use torchrun with its own --nproc_per_node on each node, or `accel-ddp launch`",
    "E_TRAINS_ALONE": "use distributed_type: MULTI_GPU and the same --num_machines on every node; without GPUs set "
    "ACCELERATE_USE_CPU=true",
    "E_MACHINE_RANK": "use --machine_rank 0 to num_machines - 1, a different one on each node",
    "E_MAIN_ELSEWHERE": "use --machine_rank 1, or its address as --main_process_ip",
    "E_MAIN_PUBLIC": "use its private address as --main_process_ip",
    "E_MAIN_IS_HERE": "use --machine_rank 0 on the node that has the main address",
    "E_NAME": "use the private IP address of node 0 (Slurm: NodeAddr of `scontrol show node NAME`), or add the name to /etc/hosts; "
    "in Kubernetes MASTER_ADDR must be the headless Service's name of the first pod: POD.SERVICE",
    "E_IFNAME": "unset it, or use one that `ip addr` shows",
    "W_HOST_NAME": "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; the recipes of accel_ddp set them themselves",
    "I_HOST_NAME": "nothing, or correct /etc/hosts",
    "E_PORT": "use a --main_process_port above 1023, or another GLOO_SOCKET_IFNAME",
    # This node: its limits, disks and GPUs.
    "W_OPEN_FILES": "ulimit -Hn 65536 as root",
    "W_MEMLOCK": "ulimit -l unlimited (docker: --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK)",
    "W_SHM": "docker run --shm-size=8g (Kubernetes: an emptyDir with medium: Memory at /dev/shm)",
    "W_DISK": "delete files, or use another disk",
    "E_DISK": "delete files, or use another --output_dir",
    "E_DISK_STUCK": "run `df`, `git status` and `nvidia-smi` there: one of them hangs",
    "E_OUTPUT_DIR": "choose another --output_dir, or correct its permissions",
    "E_OUT": "choose another --out on this node",
    "E_GPU_COUNT": "use --num_processes with the number of nodes times the visible GPUs of one node, or --nproc_per_node of "
    "torchrun with the visible GPUs of this node; check CUDA_VISIBLE_DEVICES",
    "E_CUDA_VISIBLE_DEVICES": "unset it, or name GPUs that exist",
    "E_GPU_ECC": "nvidia-smi --gpu-reset -i INDEX, or do not use this node",
    "E_GPU_DRIVER": "restart the node, update the driver, or install a torch for the CUDA version of the driver",
    "W_GPU_DRIVER": "restart the node, or install the NVIDIA driver",
    "W_GPU_BUSY": "stop processes of an earlier run (kill PID), or set CUDA_VISIBLE_DEVICES",
    # The way to the main node.
    "E_REFUSED": "start node 0, or correct port and address",
    "E_DROPPED": "check the address; then allow all TCP between the nodes",
    "E_UNREACHABLE": "correct --main_process_ip, or start that node",
    "E_PORT_BUSY": "stop processes of an earlier run there, or use another --main_process_port; script, --token and version of "
    "accel_ddp must be the same on every node",
    "E_PORT_BLOCKED": "allow all TCP between the nodes, or use an open port",
    "I_RENDEZVOUS": "nothing",
    "E_MAIN_LOST": "read the output of the main node; restart all nodes",
    # All nodes together.
    "E_MISSING": "start the same command there, and open the main port",
    "E_LATE": "use the same num_machines on every node; restart all of them",
    "E_SILENT": "read the output of that node",
    "E_DUPLICATE": "give each its own",
    "E_COUNTS": "use the same num_machines and num_processes on every node; for different numbers of ranks on the nodes, use "
    "torchrun with its own --nproc_per_node on each node, or `accel-ddp launch`",
    "E_VERSIONS": "run `pip install -c constraints.txt -e .` on every node",
    "W_PYTHON": "results are the same; use one version when you can",
    "E_CODE": "check out the same commit on every node, or share one folder",
    "E_OPTIONS": "start every node with the same options",
    "E_ACCELERATE_CONFIG": "use the same accelerate config and options of `accelerate launch` on every node",
    "E_FILES": "check the path; copy it to every node, or share a disk",
    "I_FILES": "nothing, or compare it yourself",
    "W_HUB": "download it again on every node",
    "W_ENVIRONMENT": "export the same NCCL settings on every node",
    "W_DRIVER": "results are the same; update the older driver when you can",
    "E_GPU_MIX": "check nvidia-smi, CUDA_VISIBLE_DEVICES and the torch build there, or set ACCELERATE_USE_CPU=true on every node",
    "W_GPU_KINDS": "use --balance speed; --micro_batch_size may differ",
    "W_CLOCK": "timedatectl set-ntp true",
    # Paths between the nodes.
    "E_PATH_DROPPED": "allow all TCP between the nodes, not only the main port",
    "E_PATH_REFUSED": "allow all TCP between the nodes",
    "E_PATH_ONE_WAY": "allow all TCP in both directions",
    "E_PATH_UNREACHABLE": "check routes: ip route get ADDRESS",
    "E_PATH_MTU": "ip link set dev eth0 mtu 1400, or let ICMP `fragmentation needed` pass",
    "E_PATH_CUT": "look for a proxy or firewall that resets it",
    "W_PATH_SLOW": "check that link (ethtool, ip -s link)",
    # Collectives.
    "E_COLLECTIVE_STUCK": "NCCL_DEBUG=INFO shows the interface NCCL uses; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose "
    "another; NCCL_IB_DISABLE=1 rules out InfiniBand",
    "E_COLLECTIVE_FAILED": "read what this rank printed; NCCL_DEBUG=INFO shows more; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME "
    "choose the interface",
    "E_COLLECTIVE_WRONG": "use the same torch, NCCL and driver on every node; NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1 and "
    "NCCL_ALGO=Ring narrow it down",
    "E_GPU_PLACEMENT": "check nvidia-smi, CUDA_VISIBLE_DEVICES and the torch build there, or set ACCELERATE_USE_CPU=true on every "
    "node",
    "W_GPU_SHARED": "use one rank per GPU in num_processes; check CUDA_VISIBLE_DEVICES",
    "W_SLOW_TRANSPORT": "see ibv_devinfo, NCCL_IB_DISABLE and /dev/infiniband",
}
