"""What was found, in words: a code, where, what was seen, and the fix in one line. The same text on every node."""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ERROR, WARNING, INFO = "error", "warning", "info"
_LONGEST = 2000  # characters of one text that another node sent


@dataclass(frozen=True)
class Finding:
    code: str  # E_...: nothing should be started; W_...: it will run, but look at it; I_...: worth knowing
    saw: str
    fix: str
    host: str = ""
    node: int | None = None
    rank: int | None = None

    @property
    def severity(self) -> str:
        return {"E": ERROR, "W": WARNING}.get(self.code[:1], INFO)

    @property
    def where(self) -> str:
        words = [self.host] if self.host else []
        words += [f"machine_rank {self.node}"] if self.node is not None else []
        words += [f"rank {self.rank}"] if self.rank is not None else []
        return ", ".join(words)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "severity": self.severity}

    @classmethod
    def from_stranger(cls, value: Any) -> "Finding":
        """From JSON that another process sent; ValueError where it is no finding."""
        if not isinstance(value, dict):
            raise ValueError("not a finding")
        texts = {name: printable(value.get(name, "")) for name in ("code", "saw", "fix", "host")}
        numbers = {name: whole(value.get(name)) for name in ("node", "rank")}
        if texts["code"][:2] not in ("E_", "W_", "I_"):
            raise ValueError("not a finding")
        return cls(**texts, **numbers)


def printable(value: Any, longest: int = _LONGEST) -> str:
    """Text of another node without what would move a terminal's cursor or fill its screen."""
    if not isinstance(value, str):
        raise ValueError("not a text")
    text = "".join(letter if letter.isprintable() else " " for letter in value[: longest + 1])
    return text if len(text) <= longest else text[:longest] + "..."


def whole(value: Any, most: int = 10**9) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError("not a number")
    return value


def in_order(findings: list[Finding]) -> list[Finding]:
    """Errors first, each once, in an order that every node would choose."""
    rank = {ERROR: 0, WARNING: 1, INFO: 2}
    keys = sorted({(rank[f.severity], f.code, -1 if f.node is None else f.node, f.saw, f.host): f for f in findings}.items())
    return [finding for _, finding in keys]


def is_bad(findings: list[Finding]) -> bool:
    return any(finding.severity == ERROR for finding in findings)


def text_of(findings: list[Finding], colour: bool = False) -> str:
    """The verdict. Findings that say the same of several nodes are told once."""
    paint = {ERROR: "\033[1;31m", WARNING: "\033[1;33m", INFO: "\033[2m"} if colour else {}
    plain = "\033[0m" if colour else ""
    told: dict[tuple[str, str, str], list[str]] = {}
    for finding in in_order(findings):
        told.setdefault((finding.code, finding.saw, finding.fix), []).append(finding.where)
    lines = []
    for (code, saw, fix), places in told.items():
        severity = Finding(code, saw, fix).severity
        where = "; ".join(place for place in places if place and place.partition(", ")[0] + " (machine_rank" not in saw)
        lines.append(f"{paint.get(severity, '')}{code}{plain}  {f'[{where}] ' if where else ''}{saw}")
        lines += [f"    fix: {fix}"] if fix else []
    return "\n".join(lines)


def summary(findings: list[Finding]) -> str:
    told = {(f.code, f.saw, f.fix): f.severity for f in findings}  # as `text_of` tells them
    counts = {severity: list(told.values()).count(severity) for severity in (ERROR, WARNING)}
    words = [f"{n} {severity}{'s' * (n > 1)}" for severity, n in counts.items() if n]
    return ", ".join(words) or "healthy"


def has_colour(stream: Any = None) -> bool:
    return (stream or sys.stdout).isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def gibibytes(amount: float) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if amount >= size:
            return f"{amount / size:.1f} {unit}" if amount < 10 * size else f"{amount / size:.0f} {unit}"
    return f"{amount / 1024:.0f} KiB"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [header, *rows]]


def surroundings(vendor_files: Path = Path("/sys/class/dmi/id")) -> str:
    """Where this runs, as far as the files and variables of this machine tell: no request is sent anywhere."""
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


def how_to_open(ports: str, place: str | None = None) -> str:
    """What lets the nodes reach each other, in the words of where this runs."""
    return {
        "ec2": f"EC2: give both instances one security group with an inbound rule `All traffic` whose source is that same group "
        f"({ports} alone is not enough: data ports are random)",
        "gcp": f"GCP: add a VPC firewall rule that allows all tcp between the instances, by their network tag ({ports} alone is "
        "not enough: data ports are random)",
        "azure": "Azure: allow all TCP from VirtualNetwork to VirtualNetwork in the network security group",
        "slurm": "Slurm: the nodes of a job must reach each other on all TCP ports; show this line to your administrators, or "
        "choose the fast network with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
        "kubernetes": "Kubernetes: a NetworkPolicy must allow all TCP between the pods of this job, and MASTER_ADDR must be a "
        "headless Service (clusterIP: None)",
    }.get(
        surroundings() if place is None else place,
        "allow all TCP between the nodes in their firewalls (nft list ruleset, ufw status, firewall-cmd --list-all)",
    )
