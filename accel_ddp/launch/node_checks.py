"""The checks before a job starts: what each node reports about itself, and what is wrong or differs.

The guards collect facts, and the launching machine compares them. Then all guards connect to the main address and port, because
torch waits up to 15 minutes for a node that cannot. For a script without accel_ddp these are the only checks. The preflight of the
launchers (`doctor.at_launch`) adds the paths between all nodes, and that of the ranks (`doctor.cluster`) the options of the recipe.
"""

import asyncio
import contextlib
import errno
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accel_ddp import __version__
from accel_ddp.doctor import compare_nodes
from accel_ddp.doctor import facts as doctor_facts
from accel_ddp.doctor.findings import ERROR, format_findings
from accel_ddp.errors import UserError
from accel_ddp.launch.code_files import compare_code, describe_code
from accel_ddp.launch.description import Cluster, Node
from accel_ddp.launch.job_commands import Job, config_word, uses_torchrun, words_of_job
from accel_ddp.launch.job_record import Record, find_record
from accel_ddp.nodes import recipe_files
from accel_ddp.text import counted, did_you_mean

CONNECT_SECONDS = 5.0

# ---- on a node


def collect(request: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of this node, about the script, config, run folder and host (as in the description) of `request`."""
    present, driver, gpu_error = doctor_facts.query_driver() if request["gpus"] else ([], {}, "")
    script = find_file(request["script"], "recipes")
    files = Path("/proc/sys/kernel/random/boot_id"), Path("/etc/machine-id")
    records = find_record(request), Record(request["run_folder"], request["host"])  # of this name, and of this folder
    return {
        "host": socket.gethostname(),
        # Two nodes have this in common only if they are the same machine. Containers on one host are different nodes.
        "machine": [*(file.read_text() for file in files if file.is_file()), os.readlink("/proc/self/ns/net")],
        "address": os.environ.get("SSH_CONNECTION", "").split()[2:3],
        "versions": doctor_facts.package_versions(),
        "code": describe_code(Path.cwd(), script),
        "driver": driver,
        "gpus": None if present is None else len(present),
        "gpu_error": gpu_error,
        "has_script": bool(script),
        "has_config": not request["config"] or bool(find_file(request["config"], "accelerate_configs")),
        "programs": {name: bool(shutil.which(name, path=path_of_programs(os.environ))) for name in ("accelerate", "torchrun")},
        "running": next((record.read() for record in records if record.is_running()), None),
        "disk_error": check_folder(Path(request["run_folder"]).expanduser()),
        "version": __version__,
        "folder": str(Path.cwd()),
    }


def path_of_programs(env: Mapping[str, str]) -> str:
    """Return PATH with the folder of this Python first, so that `accelerate` is that of the same environment."""
    return os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])


def find_file(word: str, kind: str) -> str:
    """Return the path of a script or config on this node, or "". The code folder comes first, then the installed package."""
    path = Path(word).expanduser()
    if not path.is_file() and word == f"{kind}/{path.name}":
        with contextlib.suppress(UserError):
            path = recipe_files.folder(kind) / path.name
    return str(path) if path.is_file() else ""


def check_folder(folder: Path) -> str:
    try:
        (folder / "launch").mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder / "launch", prefix=".test-") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return str(error.strerror)
    return ""


async def listen(port: int, word: str) -> tuple[asyncio.Server | None, str]:
    """Send a word to each node that connects, which shows that the address is right. Return the server, and an error or ""."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            writer.write(word.encode() + b"\n")
            # The other side closes first, so that this port is free at once.
            await asyncio.wait_for(reader.read(), CONNECT_SECONDS)
        writer.close()

    try:  # on all addresses: it is not known here which of them, or of a router, main_address is
        return await asyncio.start_server(answer, None, port), ""
    except OSError as error:
        return None, "it is in use by another program" if error.errno == errno.EADDRINUSE else _reason(error)


async def connect(address: str, port: int, word: str) -> str:
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port), CONNECT_SECONDS)
    except asyncio.TimeoutError:
        return f"no answer within {CONNECT_SECONDS:.0f} s. A firewall may drop the packets"
    except socket.gaierror:
        return "this name cannot be resolved there"
    except OSError as error:
        return _reason(error)
    with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.TimeoutError):
        if await asyncio.wait_for(reader.readline(), CONNECT_SECONDS) == word.encode() + b"\n":
            return ""
    return "another machine or program answers there"


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)  # asyncio puts the address into strerror


# ---- on the launching machine


def find_errors(cluster: Cluster, job: Job, facts: list[dict[str, Any]]) -> list[str]:
    errors = [text for node, found in zip(cluster.nodes, facts) for text in _errors_of_node(cluster, job, node, found)]
    errors += _same_machines(cluster, facts)
    if errors:
        return errors
    # rsync has just made the files equal. In a folder that is also a repository of the node, the commit is not that of the files.
    keys = ("package",) if cluster.copy == "rsync" else ("package", "commit", "total", "files")
    text = compare_code({node.host: _only(keys, found["code"]) for node, found in zip(cluster.nodes, facts)})
    errors += [text] if text else []
    members = [
        {"host": node.host, "node": node.rank, "local_rank": 0, "ip": "", "pid": 0, "clock": 0.0,
         "facts": {"versions": found["versions"], "driver": found["driver"]}}
        for node, found in zip(cluster.nodes, facts)
    ]  # fmt: skip
    findings, table = compare_nodes.compare_facts(members)
    wrong = [finding for finding in findings if finding.severity == ERROR]
    errors += [f"the nodes differ:\n{format_findings(wrong)}\n" + "\n".join(table)] if wrong else []
    pythons = {node.host: found["versions"]["python"] for node, found in zip(cluster.nodes, facts)}
    if len({tuple(python.split(".")[:2]) for python in pythons.values()}) > 1:  # each minor version has its own packages
        shown = ", ".join(f"{python} on {host}" for host, python in pythons.items())
        errors.append(f"python differs: {shown}. Make the virtual environment of every node with the same version of Python.")
    return errors


def compare_with_this_machine(job: Job, facts: list[dict[str, Any]]) -> list[str]:
    """Return a warning if this machine has other code than the nodes: the user may have forgotten to copy a change."""
    here = describe_code(Path.cwd(), job.script)
    keys = ("commit", "total", "files")
    text = compare_code({"the node": _only(keys, facts[0]["code"]), "this machine": _only(keys, here)})
    return [f"the nodes use the code in their own folders, and {text}"] if text else []


def _only(keys: Iterable[str], code: dict[str, Any]) -> dict[str, Any]:
    return {key: code.get(key) for key in keys}


def _errors_of_node(cluster: Cluster, job: Job, node: Node, found: dict[str, Any]) -> list[str]:
    host, file, where = node.host, cluster.file, found["folder"]
    errors = []
    if not found["has_script"]:
        is_here, folder = Path(job.script).is_file(), Path(job.script).parent
        known = [str(path) for path in folder.glob("*.py")] or [f"recipes/{name}.py" for name in recipe_files.recipe_names()]
        near = "" if is_here else did_you_mean(job.script, known, "{!r}")
        copied = " This machine has it: copy it, or write copy: rsync." if is_here and cluster.backend == "ssh" else ""
        errors.append(f"{host}: {job.script} does not exist in {where}.{near} Correct the path or `folder` in {file}.{copied}")
    if not found["has_config"]:
        errors.append(
            f"{host}: accelerate_config {config_word(cluster)} does not exist in {where}. Copy it there, or correct the path in {file}."
        )
    program = "torchrun" if uses_torchrun(cluster) else "accelerate"
    if not found["programs"][program]:
        errors.append(
            f"{host}: {program} is not installed. Run `pip install -c constraints.txt -e .` there, or correct `venv` in {file}."
        )
    if node.gpus and found["gpus"] is not None and found["gpus"] < node.gpus:
        have = counted(found["gpus"], "GPU") if found["gpus"] else "no GPU"
        errors.append(
            f"{host}: has {have}, but {file} says {node.gpus}. Correct it (0: train on CPUs). {found['gpu_error']}".strip()
        )
    elif node.gpus and found["gpus"] is None:
        errors.append(f"{host}: {found['gpu_error']}. Repair the driver, or leave this node out.")
    if running := found["running"]:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(running.get("began", 0)))
        stop = f"accel-ddp stop {words_of_job(cluster, job)}"
        errors.append(
            f"{host}: a job named {job.name!r} is running since {since} (pid {running.get('pid')}). Run `{stop}`, or use --name."
        )
    elif found["disk_error"]:
        errors.append(
            f"{host}: {job.run_folder}: cannot be written: {found['disk_error']}. Make room there, or change `output` in {file}."
        )
    return errors


def _same_machines(cluster: Cluster, facts: list[dict[str, Any]]) -> list[str]:
    if cluster.backend == "local":
        return []
    first: dict[str, str] = {}
    errors = []
    for node, found in zip(cluster.nodes, facts):
        other = first.setdefault(str(found["machine"]), node.host)
        if other != node.host:
            errors.append(
                f"{node.host}: is the same machine as {other} (host name {found['host']}). Remove one of them from `nodes` in "
                f"{cluster.file}, and write its number of processes."
            )
    return errors


async def check_reach(connections: list[Any], address: str, port: int) -> list[str]:
    word, main = secrets.token_hex(8), connections[0].node.host
    file = connections[0].cluster.file
    opened = await connections[0].ask("listen", "listening", port=port, word=word)
    if opened["error"]:
        advice = f"Write another main_port into {file}, or use --set main_port={port + 1}."
        return [f"{main}: main_port {port}: {opened['error']}. {advice}"]
    ask = lambda connection: connection.ask("connect", "connected", address=address, port=port, word=word)
    answers = await asyncio.gather(*map(ask, connections))
    await connections[0].ask("unlisten", "unlistened")
    advice = f"Write an address of {main} that all nodes reach into main_address in {file}, and allow all TCP between the nodes."
    return [
        f"{connection.node.host}: does not reach {main} at main_address {address}, main_port {port}: {answer['error']}. {advice}"
        for connection, answer in zip(connections, answers)
        if answer["error"]
    ]
