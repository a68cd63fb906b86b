"""The platform this machine belongs to (a cloud, Slurm, Kubernetes), and how its firewall is opened."""

import os
from pathlib import Path


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
