"""`accel-ddp doctor`: its options, the order of the checks, and what it prints."""

import argparse
import asyncio
import json
import os
import sys
import time
from typing import Any

from accel_ddp.doctor import findings as report
from accel_ddp.doctor import host
from accel_ddp.doctor.check_options import CheckOptions, options_of_script
from accel_ddp.doctor.cluster import check_cluster, print_progress
from accel_ddp.doctor.collective_launch import run_collectives
from accel_ddp.doctor.host import HOST
from accel_ddp.errors import USER_ERROR, UserError
from accel_ddp.nodes import recipe_files
from accel_ddp.nodes.launcher import check_rank_variables, is_world_of_mpi
from accel_ddp.nodes.messages import find_free_port
from accel_ddp.nodes.topology import Topology, find_topology, is_local_main, topology_of_this_rank
from accel_ddp.text import did_you_mean
from accel_ddp.words import script_at

ABOUT = """Find out what is wrong with a cluster. Run the same command on every node, each with its own --machine_rank.

The checks go from the simple to the complex: this machine alone, the connection to the main node, what differs between
the nodes, every data path, the disk. Collectives with torch follow: device placement, gradient synchronization, latency
and bandwidth (`accel-ddp scaling` measures how a recipe scales with them). Options of `accelerate launch` and of torchrun
are accepted as they are. Values that are not given come from the environment (MASTER_ADDR, NODE_RANK ... and the variables
of torchrun, mpirun, Slurm and Kubeflow), and then from --config_file. Exit codes: 0 no error (there may be warnings), 1 an
error, 2 an invalid command line."""


def add_shared_options(parser: argparse.ArgumentParser) -> Any:
    """Add the options that `accel-ddp doctor` and `accel-ddp tune` share. Return the group for what is checked."""
    node = parser.add_argument_group("the position of this node, as for accelerate launch or torchrun")
    node.add_argument("--config_file", default="", help="an accelerate config: a path, or one of ours, such as 2node.yaml")
    add = lambda *names, **more: node.add_argument(*spellings(*names), dest=names[0], **more)
    add("machine_rank", "node_rank", type=int, help="0 on the main node; 1, 2 ... on the others")
    add("num_machines", "nnodes", help="number of nodes")
    add("num_processes", type=int, help="total number of ranks over all nodes, as for accelerate launch")
    add("nproc_per_node", help="number of ranks on this node, as for torchrun; nodes may differ")
    add("main_process_ip", "master_addr", help="address of the main node")
    add("main_process_port", "master_port", type=int, help="a port of the main node that the others can reach (29500)")
    add("rdzv_backend", help="c10d: the nodes need no --machine_rank")
    add("rdzv_endpoint", metavar="HOST:PORT", help="address and port of the main node, as for torchrun")
    for name in ("rdzv_id", "rdzv_conf", "max_restarts", "monitor_interval", "mixed_precision"):
        add(name, help=argparse.SUPPRESS)
    for name in ("cpu", "multi_gpu", "same_network"):
        add(name, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--wait", type=float, help="seconds to wait for nodes that are not started yet (300)")
    parser.add_argument("--token", default="", help="a secret that all nodes share, for tests: other users of this machine can read it "
                        "here; set ACCEL_DDP_TOKEN or ACCEL_DDP_TOKEN_FILE instead")  # fmt: skip
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto", help="backend of the collectives")


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_shared_options(parser)
    checks = parser.add_argument_group("what is checked")
    checks.add_argument("--deep", action="store_true", help="run the collectives (the default)")
    checks.add_argument("--no_deep", action="store_true", help="skip the collectives, which need torch")
    checks.add_argument("--deep_seconds", type=float, default=120, help="time limit of the collectives and the import of torch")
    checks.add_argument("--megabytes", type=int, default=0, help="size of the measured all-reduce (64, on CPUs 8)")
    checks.add_argument("--data", action="append", default=[], metavar="PATH",
                        help="a file or folder whose content must be the same on every node")  # fmt: skip
    checks.add_argument("--output_dir", default="", help="where checkpoints will be written")
    checks.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return parser


def spellings(*names: str) -> list[str]:
    """Return options with underscores and with hyphens, because accelerate and torchrun accept both."""
    return list(dict.fromkeys(f"--{one}" for name in names for one in (name, name.replace("_", "-"))))


def main(argv: list[str], prog: str = "accel-ddp doctor") -> int:
    """Run the command. Returns exit code 0 (no error, perhaps warnings), 1 (an error) or 2 (an invalid command line)."""
    usage, keep_lines = f"{prog} [options] [RECIPE.py [its options]]", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, usage=usage, description=ABOUT, formatter_class=keep_lines)
    given, _, script = parse_before_script(add_options(parser), argv)
    try:
        topology, options = read_options(given, script)
        return run_checks(topology, options, given)
    except UserError as error:
        if is_local_main():
            print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 130


def parse_before_script(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    at = script_at(argv)
    given, unknown = parser.parse_known_args(argv[:at])
    if unknown:
        meant = did_you_mean(unknown[0], parser._option_string_actions)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{f'.{meant}' if meant else ''}")
    return given, argv[:at], argv[at:]


def read_options(given: argparse.Namespace, script: list[str]) -> tuple[Topology, CheckOptions]:
    names = "machine_rank num_machines num_processes nproc_per_node main_process_ip main_process_port rdzv_backend"
    typed = {name: getattr(given, name) for name in names.split()}
    if given.rdzv_endpoint:
        address, _, port = given.rdzv_endpoint.partition("]" if "[" in given.rdzv_endpoint else ":")  # IPv6 is in brackets
        typed |= {"main_process_ip": address.lstrip("["), "main_process_port": port.lstrip(":") or typed["main_process_port"]}
    if given.num_processes and given.nproc_per_node:
        raise UserError(
            f"--num_processes {given.num_processes} and --nproc_per_node {given.nproc_per_node}: the first is the total of `accelerate "
            "launch`, the second the number of torchrun on this node. Give the one of your launcher."
        )
    topology = topology_of_this_rank()
    is_typed = any(value is not None for value in typed.values()) or given.config_file
    if not is_typed and is_world_of_mpi():
        check_rank_variables()
    if "TORCHELASTIC_RUN_ID" not in os.environ and (is_typed or not topology.is_launched):
        topology = find_topology(typed, given.config_file and str(recipe_files.config_path(given.config_file)))
        topology.accelerate_config |= {name: getattr(given, name) for name in ("mixed_precision", "cpu") if getattr(given, name)}
    resolve_main = lambda: host.resolve(topology.main_address)
    is_alone = topology.num_nodes == 1 and topology.num_local_processes == 1
    if is_alone and host.is_local_address(host.call_with_timeout(resolve_main, 5, "127.0.0.1")):
        topology.main_address, topology.main_port = "127.0.0.1", find_free_port("127.0.0.1")  # no other node connects to it
        topology.coordinator_ports = (topology.main_port,)
    options = options_of_script(script) if script else CheckOptions()
    options.files |= {f"content of {path}": path for path in given.data}
    options.output_dir = given.output_dir or options.output_dir
    if given.wait is not None:
        options.wait_seconds = options.no_answer_seconds = given.wait
    options.secret, options.deep = given.token or options.secret, not given.no_deep
    return topology, options


def run_checks(topology: Topology, options: CheckOptions, given: argparse.Namespace) -> int:
    began = time.monotonic()
    is_main = topology.local_rank == 0  # prints for all ranks of this node
    prints_text = is_main and not given.json

    def show(*lines: str) -> None:
        if prints_text and lines:
            print("\n".join(lines), flush=True)

    node = f"{'a node' if topology.node_rank is None else f'machine_rank {topology.node_rank}'} of {topology.num_nodes}"
    node = node if topology.rank is None else f"rank {topology.rank} of {topology.num_ranks}"
    several = f"{node} on {HOST}, main node {topology.main_address}:{topology.main_port}"
    show(f"accel-ddp doctor: {several if topology.num_nodes > 1 else f'one node, {HOST}'}")
    # Progress goes to stderr, also with --json.
    outcome = asyncio.run(check_cluster(topology, options, print_progress if is_main else lambda text: None))
    show(*([f"this node   {outcome.about}"] if outcome.about else []), *outcome.lines, *outcome.table)
    figures: dict[str, Any] = {}
    if outcome.deep_port and is_main and not outcome.has_errors:
        show("collective  importing torch ...")
        measured = {"backend": given.backend, "megabytes": given.megabytes}
        lines, findings, figures = run_collectives(outcome, measured, given.deep_seconds)
        outcome.findings += findings
        show(*(f"            {line}" for line in lines))
    elif options.deep and is_main and outcome.has_errors:
        show("collective  skipped: it would hang or fail because of these errors")
    if given.json and is_main:
        print(json.dumps({
            "verdict": report.summarize(outcome.findings),
            "findings": [finding.as_dict() for finding in report.sort_findings(outcome.findings)], "host": HOST,
            "machine_rank": outcome.node_rank if outcome.node_rank is not None else topology.node_rank,
            "nodes": outcome.roster, "paths": outcome.paths, "collective": figures, "differs": outcome.table,
            "seconds": round(time.monotonic() - began, 2),
        }))  # fmt: skip
    elif prints_text:
        show(*([report.format_findings(outcome.findings, report.supports_color())] if outcome.findings else []))
        show(f"verdict: {report.summarize(outcome.findings)}")
    return 1 if outcome.has_errors else 0
