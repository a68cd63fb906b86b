"""What NCCL's log and the InfiniBand devices of a host show about the transport between ranks."""

import contextlib
import re
from pathlib import Path


def read_nccl_log(log: str) -> tuple[list[str], str, list[str]]:
    """Return (transports between ranks such as `P2P/CUMEM`, network to other nodes, its interfaces) from a log of NCCL.

    Lists are empty, and the network is `unknown`, if the log does not contain them.
    """
    paths = {"/".join(filter(None, path)) for path in re.findall(r" via (P2P|SHM|NET)(?:/([A-Za-z][\w ]*))?", log)}
    network = re.findall(r"Using network (.*\S)", log)[:1] or ["unknown"]
    names = re.findall(r"\[\d+\]([\w.-]+):", "\n".join(re.findall(r"NET/\w+ ?: Using (.*)", log)))
    return sorted(paths), network[0], names


def find_infiniband_devices() -> list[str]:
    """Return the InfiniBand devices with a port that is up, with their drivers. Amazon's EFA is among them."""
    devices = []
    for device in sorted(Path("/sys/class/infiniband").glob("*")):
        ports = []
        with contextlib.suppress(OSError):  # a container may show the folder but not allow reading it
            ports = [port.read_text() for port in device.glob("ports/*/state")]
        if not ports or any("ACTIVE" in port for port in ports):
            devices.append(f"{device.name} ({(device / 'device' / 'driver').resolve().name})")
    return devices
