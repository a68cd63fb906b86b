"""Findings, the outcome of the checks and how both are printed, and the usual fix of each code.

A finding has its own observation. Its fix is the one of the table, unless it depends on values that are known only where it is found.
E_ codes end the run, W_ codes do not, and I_ codes are information. Every node prints the same text.
"""

import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accel_ddp.text import counted, read_table

ERROR, WARNING, INFO = "error", "warning", "info"


@dataclass(frozen=True)
class Finding:
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
    severities = list({(f.code, f.saw, f.fix): f.severity for f in findings}.values())
    counts = {severity: severities.count(severity) for severity in (ERROR, WARNING)}
    parts = [counted(n, severity) for severity, n in counts.items() if n]
    return ", ".join(parts) or "healthy"


def supports_color(stream: Any = None) -> bool:
    return (stream or sys.stdout).isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


# How to fix what a code stands for, and how to open the firewall of a platform.
_FILE: dict[str, dict[str, str]] = read_table(Path(__file__).with_name("fixes.yaml"))
FIXES, FIREWALLS = _FILE["codes"], _FILE["platforms"]
