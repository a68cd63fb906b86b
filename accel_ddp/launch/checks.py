"""Compares and checks what the nodes report about themselves, before anything is started."""

import time
from typing import Any

from accel_ddp.doctor import compare
from accel_ddp.doctor.report import ERROR, format_findings
from accel_ddp.launch.commands import Job, config_word, uses_torchrun
from accel_ddp.launch.description import Cluster, Node


def find_errors(cluster: Cluster, job: Job, facts: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return (errors, warnings) about the nodes, whose facts are in the order of the description."""
    errors: list[str] = []
    for node, found in zip(cluster.nodes, facts):
        errors += _errors_of_node(cluster, job, node, found)
    errors += _same_machines(cluster, facts)
    if errors:
        return errors, []
    members = [
        {"host": node.host, "node": node.rank, "local_rank": 0, "ip": "", "pid": 0, "clock": found["clock"],
         "facts": {"versions": found["versions"], "code": found["code"], "driver": found["driver"]}}
        for node, found in zip(cluster.nodes, facts)
    ]  # fmt: skip
    findings, table = compare.compare_facts(members)
    wrong = [finding for finding in findings if finding.severity == ERROR]
    mild = [finding for finding in findings if finding.severity != ERROR]
    text = [f"the nodes differ:\n{format_findings(wrong)}\n" + "\n".join(table)] if wrong else []
    return text, [format_findings(mild)] if mild else []


def _errors_of_node(cluster: Cluster, job: Job, node: Node, found: dict[str, Any]) -> list[str]:
    host, file, where = node.host, cluster.file, found["folder"]
    errors = []
    if not found["has_script"]:
        errors.append(
            f"{host}: {job.script} does not exist in {where}. Correct the path or `folder` in {file}, or write copy: rsync."
        )
    if not found["has_config"]:
        errors.append(f"{host}: accelerate_config {config_word(cluster)} does not exist in {where}.")
    program = "torchrun" if uses_torchrun(cluster) else "accelerate"
    if not found["programs"][program]:
        errors.append(
            f"{host}: {program} is not installed. Run `pip install -c constraints.txt -e .` there, or correct `venv` in {file}."
        )
    if node.gpus and found["gpus"] is not None and found["gpus"] < node.gpus:
        have = f"{found['gpus']} GPU{'s' * (found['gpus'] != 1)}" if found["gpus"] else "no GPU"
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
            f"{host}: main_port {cluster.main_port}: {found['port_error']}. Write another main_port into {file}, or end that program."
        )
    return errors


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
