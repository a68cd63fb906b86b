"""`accel-ddp tune`: the preflight, then the connection of the nodes and the tuning."""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from accel_ddp.doctor import findings, host
from accel_ddp.doctor.check_options import load_recipe_config
from accel_ddp.doctor.cluster import check_cluster, print_progress
from accel_ddp.doctor.collective_launch import WorkerProcesses
from accel_ddp.doctor.doctor_command import parse_before_script, read_options
from accel_ddp.doctor.findings import Outcome
from accel_ddp.errors import UserError
from accel_ddp.measure.agent import WORKER_MODULE, Agent
from accel_ddp.measure.trials import TuneCoordinator
from accel_ddp.measure.tune_options import TuneOptions, build_parser, options_from
from accel_ddp.measure.tune_results import TUNED_VARIABLES
from accel_ddp.measure.tuner import Tuner
from accel_ddp.nodes.run_secret import NodeKeys
from accel_ddp.nodes.sharding_plan import require_ddp
from accel_ddp.nodes.spawn import clean_environment
from accel_ddp.records.tuned_settings import network_variables

ONE_RANK = (
    "There is only one rank, so there is no communication to tune. Give the number of nodes (--num_machines 2, or --config_file "
    "accelerate_configs/2node.yaml), or the number of ranks on this node (--num_processes 2)."
)


def main(words: list[str]) -> int:
    """Return 0, 1 (the preflight failed, a node was lost, a file was not written), 2 (wrong options) or 130 (interrupted)."""
    given, own_words, script_words = parse_before_script(build_parser(), words)
    return asyncio.run(preflight_and_tune(given, own_words, script_words))


async def preflight_and_tune(given: argparse.Namespace, own_words: list[str], script_words: list[str]) -> int:
    cfg = load_recipe_config(script_words) if script_words else None
    doctor_options = {**vars(given), "no_deep": False, "data": [], "output_dir": ""}  # the doctor has more options
    topology, checks = read_options(argparse.Namespace(**doctor_options), script_words)
    require_ddp(topology.accelerate_config, "accel-ddp tune")
    options = options_from(given, cfg, topology, own_words, script_words)
    if topology.is_launched or topology.num_local_processes > 1:
        raise UserError(
            "accel-ddp tune was started by a launcher, such as torchrun or accelerate launch. It starts the ranks of its node "
            "itself: run it once on each node, without a launcher."
        )
    if topology.num_nodes == 1 and topology.num_ranks == 1:
        raise UserError(ONE_RANK)
    # The options of `tune` must be the same on every node, and --out must be writable.
    checks.script, checks.deep, checks.measures_bandwidth, checks.output_dir = checks.script or "accel-ddp tune", True, False, ""
    same = {name: getattr(given, name) for name in ("minutes", "trial_seconds", "model_bytes", "tokens")}
    same |= {"try": given.tries, "tune_backend": given.backend}
    checks.recipe |= {name: str(value) for name, value in same.items()}
    checks.keys = NodeKeys(checks.secret)
    if reason := _why_not_writable(options.out):  # a finding ends all nodes; an error here would leave the others waiting
        checks.findings.append(host.local_finding(topology, "E_OUT", f"--out {options.out}: {reason}"))
    outcome = await check_cluster(topology, checks, print_progress)
    if outcome.findings:
        print(findings.format_findings(outcome.findings, findings.supports_color()), flush=True)
    if outcome.has_errors or not outcome.deep_port:
        for line in outcome.table:
            print(line)
        print(f"preflight: {findings.summarize(outcome.findings)}. The tuning was not started.", flush=True)
        return 1
    nodes = len(outcome.roster)
    if sum(outcome.ranks_of_nodes) == 1:
        raise UserError(ONE_RANK)
    print(f"preflight: {f'{nodes} nodes have' if nodes > 1 else 'this node has'} no errors", flush=True)
    return await connect_and_tune(outcome, checks.keys, options)


def _why_not_writable(folder: str) -> str:
    existing, path = host.nearest_existing_folder(folder), Path(folder).expanduser().absolute()
    if existing is None:
        return "the disk does not answer"
    for parent in (path, *path.parents):
        if parent.exists() and not parent.is_dir():
            return f"{parent} is a file, not a folder"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"


async def connect_and_tune(outcome: Outcome, own_keys: NodeKeys, options: TuneOptions) -> int:
    """Run the agent of this node, and on node 0 also the coordinator and the tuner. Return the exit code."""
    node, port = outcome.node_rank or 0, outcome.deep_port
    main_ip = next((peer for peer in outcome.roster if peer["node"] == 0), outcome.roster[0])["ip"]
    loop = asyncio.get_running_loop()
    interrupted: asyncio.Future = loop.create_future()  # its result will be the name of the first signal
    for number, name in {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}.items():
        loop.add_signal_handler(number, lambda name=name: interrupted.done() or interrupted.set_result(name))
    shared = lambda peer: own_keys.shared_with(peer["key"], f"tune {port}", (node, peer["node"]))
    try:
        keys = {peer["node"]: shared(peer) for peer in outcome.roster}
    except ValueError as error:
        raise UserError(f"a node has sent an invalid key: {error}. Run the same command again on every node.") from None
    coordinator, tuning = TuneCoordinator(keys), None
    try:
        if node == 0:
            await coordinator.listen(main_ip, port)
            tuning = asyncio.ensure_future(Tuner(coordinator, options, outcome.ranks_of_nodes, main_ip).run())
        allowed = {*TUNED_VARIABLES, *(name for settings in options.tries for name in settings)}
        # Without a launcher's variables and without the variables that are tuned. A recipe sets the last two, too.
        environment = {name: value for name, value in clean_environment().items() if name not in TUNED_VARIABLES}
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        environment |= host.socket_interface_variables(outcome.interface, main_ip)
        processes = WorkerProcesses(WORKER_MODULE, node, outcome.ranks_of_nodes, main_ip, environment, allowed)
        tuned = {name: os.environ[name] for name in TUNED_VARIABLES if os.environ.get(name)}
        # A run on several nodes compares what its preflight has set, too.
        network = network_variables(environment if len(outcome.roster) > 1 else os.environ)
        info = {"node": node, "host": host.HOST, "out": options.out, "environment": tuned, "network": network}
        code = await Agent(processes, options.out, options.cache_dir).run(main_ip, port, keys[0], info, interrupted)
        if tuning:  # it may still be sending the end to the other nodes
            await asyncio.wait([tuning], timeout=10)
            if tuning.done():
                tuning.result()
        return code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if tuning:
            tuning.cancel()
            await asyncio.gather(tuning, return_exceptions=True)
            await coordinator.close()
