"""Compares and checks what the nodes report about themselves, before anything is started."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accel_ddp.doctor import compare_nodes
from accel_ddp.doctor.findings import ERROR, format_findings
from accel_ddp.launch.code_files import compare_code, describe_code
from accel_ddp.launch.description import Cluster, Node
from accel_ddp.launch.job_commands import Job, config_word, uses_torchrun
from accel_ddp.nodes import recipe_files
from accel_ddp.text import counted, did_you_mean


def find_errors(cluster: Cluster, job: Job, facts: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return (errors, warnings) about the nodes, whose facts are in the order of the description."""
    errors: list[str] = []
    for node, found in zip(cluster.nodes, facts):
        errors += _errors_of_node(cluster, job, node, found)
    errors += _same_machines(cluster, facts)
    if errors:
        return errors, []
    # rsync has just made the files equal. In a folder that is also a repository of the node, the commit is not that of the files.
    keys = ("package",) if cluster.copy == "rsync" else ("package", "commit", "total", "files")
    text = compare_code({node.host: _only(keys, found["code"]) for node, found in zip(cluster.nodes, facts)})
    errors += [text] if text else []
    members = [
        {"host": node.host, "node": node.rank, "local_rank": 0, "ip": "", "pid": 0, "clock": found["clock"],
         "facts": {"versions": found["versions"], "driver": found["driver"]}}
        for node, found in zip(cluster.nodes, facts)
    ]  # fmt: skip
    findings, table = compare_nodes.compare_facts(members)
    wrong = [finding for finding in findings if finding.severity == ERROR]
    mild = [finding for finding in findings if finding.severity != ERROR]
    errors += [f"the nodes differ:\n{format_findings(wrong)}\n" + "\n".join(table)] if wrong else []
    errors += _other_pythons(cluster, facts)
    return errors, [format_findings(mild)] if mild and not errors else []


def _other_pythons(cluster: Cluster, facts: list[dict[str, Any]]) -> list[str]:
    """Return an error if the minor versions of Python differ. Each minor version has its own packages."""
    pythons = [found["versions"]["python"] for found in facts]
    if len({tuple(python.split(".")[:2]) for python in pythons}) == 1:
        return []
    shown = ", ".join(f"{python} on {node.host}" for node, python in zip(cluster.nodes, pythons))
    return [f"python differs: {shown}. Make the virtual environment of every node with the same version of Python."]


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
        is_here = Path(job.script).is_file()
        near = "" if is_here else _nearest_script(job.script)
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
            f"{host}: has {have}, and {file} states {node.gpus}. Correct it (0: train on CPUs). {found['gpu_error']}".strip()
        )
    elif node.gpus and found["gpus"] is None:
        errors.append(f"{host}: {found['gpu_error']}. Repair the driver, or leave this node out.")
    if running := found["running"]:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(running.get("began", 0)))
        stop = f"accel-ddp stop {file} --name {job.name}"
        errors.append(
            f"{host}: a job named {job.name!r} is running since {since} (pid {running.get('pid')}). Type `{stop}`, or use --name."
        )
    elif found["disk_error"]:
        errors.append(
            f"{host}: {job.run_folder}: cannot be written: {found['disk_error']}. Make room there, or change `output` in {file}."
        )
    if found["port_error"] and not found["running"]:
        errors.append(
            f"{host}: main_port {cluster.main_port}: {found['port_error']}. Write another main_port into {file}, or type "
            f"--set main_port={cluster.main_port + 1}."
        )
    return errors


def _nearest_script(script: str) -> str:
    """Return a question that suggests a script of the same folder on this machine, or a recipe that comes with accel_ddp."""
    folder = Path(script).parent
    known = [str(path) for path in folder.glob("*.py")] or [f"recipes/{name}.py" for name in recipe_files.recipe_names()]
    return did_you_mean(script, known, "{!r}")


def _same_machines(cluster: Cluster, facts: list[dict[str, Any]]) -> list[str]:
    if cluster.backend == "local":
        return []
    first: dict[str, str] = {}
    errors = []
    for node, found in zip(cluster.nodes, facts):
        other = first.setdefault(found["machine"], node.host)
        if other != node.host:
            errors.append(
                f"{node.host}: is the same machine as {other} (host name {found['host']}). Remove one of them from `nodes` in "
                f"{cluster.file}, and write its number of processes."
            )
    return errors
