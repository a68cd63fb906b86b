"""What a node reports about itself before a job starts there."""

import contextlib
import errno
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_ddp import __version__
from accel_ddp.doctor import facts
from accel_ddp.doctor import facts as doctor_facts
from accel_ddp.errors import UserError
from accel_ddp.launch.code_files import describe_code
from accel_ddp.launch.job_record import Record, find_record
from accel_ddp.nodes import recipe_files


def collect(request: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of this node that the launching machine compares and checks.

    `request` has the script, the config, the run folder, the host as in the description, and for the main node the port.
    """
    present, driver, gpu_error = facts.query_driver() if request["gpus"] else ([], {}, "")
    script = find_file(request["script"], "recipes")
    return {
        "host": socket.gethostname(),
        "machine": machine_identity(),
        "address": os.environ.get("SSH_CONNECTION", "").split()[2:3],
        "versions": doctor_facts.package_versions(),
        "code": describe_code(Path.cwd(), script),
        "driver": driver,
        "gpus": None if present is None else len(present),
        "gpu_error": gpu_error,
        "has_script": bool(script),
        "has_config": not request["config"] or bool(find_file(request["config"], "accelerate_configs")),
        "programs": {name: bool(shutil.which(name, path=path_of_programs(os.environ))) for name in ("accelerate", "torchrun")},
        "running": _running(request),
        "disk_error": check_folder(Path(request["run_folder"]).expanduser()),
        "port_error": check_port(request["port"]) if request.get("port") else "",
        "version": __version__,
        "time": time.time(),
        "folder": str(Path.cwd()),
    }


def path_of_programs(env: Mapping[str, str]) -> str:
    """Return PATH with the folder of this Python first, so that `accelerate` is that of the same environment."""
    return os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])


def find_file(word: str, kind: str) -> str:
    """Return the path of a script or config on this node, or "". The code folder comes first, then the installed package."""
    if Path(word).expanduser().is_file():
        return str(Path(word).expanduser())
    if word != f"{kind}/{Path(word).name}":
        return ""
    try:
        folder = recipe_files.recipes_folder() if kind == "recipes" else recipe_files.configs_folder()
    except UserError:
        return ""
    path = folder / Path(word).name
    return str(path) if path.is_file() else ""


def machine_identity() -> str:
    """Return a text that two nodes have in common only if they are the same machine with the same network."""
    parts = []
    for file in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        try:
            parts.append(Path(file).read_text().strip())
        except OSError:
            parts.append("")
    try:
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))  # containers on one host are different nodes
    except OSError:
        parts.append(socket.gethostname())
    return " ".join(parts)


def check_port(port: int) -> str:
    """Return why this node cannot listen on a port, or ""."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen(1)
        except OSError as error:
            return "it is in use by another program" if error.errno == errno.EADDRINUSE else str(error.strerror)
    return ""


def check_folder(folder: Path) -> str:
    """Return why a file of 1 MiB cannot be written into a folder, or "". The folder is made, and the file is removed."""
    test = folder / "launch" / f".test-{os.getpid()}"
    try:
        test.parent.mkdir(parents=True, exist_ok=True)
        with test.open("wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return str(error.strerror)
    finally:
        with contextlib.suppress(OSError):
            test.unlink(missing_ok=True)
    return ""


def _running(request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the state of a job with this name or this folder that is running."""
    for record in (find_record(request), Record(request["run_folder"], request["host"])):
        if record.is_running():
            return record.read()
    return None
