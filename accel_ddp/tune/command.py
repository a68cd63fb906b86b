"""accel-ddp tune: options, first the doctor's preflight, then the parents of all nodes together."""

import argparse
import asyncio
import contextlib
import difflib
import ipaddress
import os
import shlex
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from accel_ddp.config import RecipeConfig, TrainConfig, as_plain_dict
from accel_ddp.doctor import host, report
from accel_ddp.doctor.cluster import check_cluster
from accel_ddp.doctor.command import add_options, read_options
from accel_ddp.doctor.options import load_recipe_config
from accel_ddp.doctor.preflight import print_progress
from accel_ddp.doctor.report import Outcome
from accel_ddp.environment.topology import Topology
from accel_ddp.errors import UserError
from accel_ddp.net import messages
from accel_ddp.tune import results
from accel_ddp.tune.course import Course, Wish
from accel_ddp.tune.ranks import Ranks
from accel_ddp.tune.search import TUNED
from accel_ddp.tune.together import Conductor, attend

ABOUT = """Finds what is fastest on this cluster, in a few minutes. Type the same on every node, each with its own --machine_rank.

First the doctor looks whether all nodes are well. Then all-reduce is timed under NCCL's socket settings, each in fresh
processes on every node; then, with the best of them, a DDP step of your model with several bucket sizes and communication
hooks. Every node prints the same table. The best goes into OUT/tuned.env (set -a; . FILE; set +a, on every node) and
OUT/tuned.yaml (--config of the recipes). Where a node stands is found as `accel-ddp doctor` finds it."""

INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_OF_DOCTOR_ALONE = ("no_deep", "deep", "deep_seconds", "megabytes", "data", "step_ms", "output_dir", "json")


def parser_of_tune() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accel-ddp tune", usage="accel-ddp tune [options] [RECIPE.py [its options]]", description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter, conflict_handler="resolve", allow_abbrev=False,
    )  # fmt: skip
    add_options(parser)
    for action in [one for one in parser._actions if one.dest in _OF_DOCTOR_ALONE]:
        parser._remove_action(action)
        for group in parser._action_groups:
            with contextlib.suppress(ValueError):
                group._group_actions.remove(action)
        for word in action.option_strings:
            del parser._option_string_actions[word]
    what = parser.add_argument_group("what is tuned")
    what.add_argument("--model", default="", metavar="NAME", help="hub name, folder or builtin: instead of a recipe's")
    what.add_argument("--model_bytes", type=int, default=0, help="of the gradients in float32, where there is no model")
    what.add_argument("--tokens", type=int, default=0, help="of each rank in a step (micro_batch_size x 128; else 1024, CPU 128)")
    what.add_argument("--minutes", type=float, default=5.0, help="all of it takes at most about this long (5)")
    what.add_argument("--trial_seconds", type=float, default=20.0, help="a trial that hangs is ended after these, and its start")
    what.add_argument("--try", action="append", default=[], dest="tries", metavar="'KEY=VALUE ...'",
                      help="try these variables too; may be repeated")  # fmt: skip
    what.add_argument("--out", default="accelerate_configs", metavar="FOLDER", help="for tuned.env and tuned.yaml")
    return parser


def main(words: list[str]) -> int:
    """Exit code 0: tuned; 1: the cluster is broken, a node was lost, or a file could not be written; 2: wrong words."""
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    parser = parser_of_tune()
    given, unknown = parser.parse_known_args(words[:script])
    if unknown:
        near = difflib.get_close_matches(unknown[0], list(parser._option_string_actions), n=1)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}" + (f". Did you mean {near[0]}?" if near else ""))
    try:
        return asyncio.run(tune(given, words, script))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


async def tune(given: argparse.Namespace, words: list[str], script: int) -> int:
    cfg = load_recipe_config(words[script:]) if words[script:] else None
    # As the doctor's own parser has it. A --model is read on the main node alone, so the others need not have it.
    as_for_doctor = {**vars(given), "no_deep": False, "data": [], "output_dir": "", "model": ""}
    place, wanted = read_options(argparse.Namespace(**as_for_doctor), words[script:])
    wish = wish_of(given, cfg, place, words, script)
    if place.is_launched or place.num_local_processes > 1:
        raise UserError("accel-ddp tune starts the ranks of its node itself: start it once on each node, without a launcher.")
    if place.num_nodes == 1 and place.num_ranks == 1:
        raise UserError(_alone())
    wanted.script, wanted.deep, wanted.measures_bandwidth, wanted.output_dir = wanted.script or "accel-ddp tune", True, False, ""
    mine = {"minutes": wish.minutes, "trial_seconds": wish.trial_seconds, "model_bytes": wish.model_bytes, "tokens": given.tokens}
    wanted.recipe |= {name: str(value) for name, value in {**mine, "try": given.tries, "tune_backend": wish.backend}.items()}
    if why := _cannot_write(wish.out):  # told to all: a node that ended here alone would leave the others waiting
        fix = "choose another --out on this node"
        wanted.findings.append(host.local_finding(place, "E_OUT", f"--out {wish.out}: {why}", fix))
    outcome = await check_cluster(place, wanted, print_progress)
    return await with_the_others(place, wanted.secret, outcome, wish)


def _alone() -> str:
    return (
        "one rank alone has nothing to tune: nothing travels. Give the nodes (--num_machines, --config_file "
        "accelerate_configs/2node.yaml) or the ranks of this one (--num_processes 2)."
    )


def wish_of(given: argparse.Namespace, cfg: TrainConfig | None, place: Topology, words: list[str], script: int) -> Wish:
    for name, least in {"minutes": 0.05, "trial_seconds": 1.0, "model_bytes": 0, "tokens": 0}.items():
        if not getattr(given, name) >= least:
            raise UserError(f"--{name} {getattr(given, name)}: must be {least} or more.")
    if given.model and given.model_bytes:
        raise UserError(f"--model {given.model} and --model_bytes {given.model_bytes}: give one of them.")
    tries = []
    for text in given.tries:
        pairs = [word.partition("=") for word in shlex.split(text)]
        if not pairs or not all(name and equals for name, equals, _ in pairs):
            raise UserError(f"--try {text!r}: must be variables, for example --try 'NCCL_BUFFSIZE=8388608 NCCL_PROTO=Simple'.")
        tries.append({name: value for name, _, value in pairs})
    model = as_plain_dict(cfg) if isinstance(cfg, RecipeConfig) else {}
    model |= {"lora_targets": list(cfg.lora_targets), "freeze": list(cfg.freeze)} if model else {}
    if given.model:
        model |= {"model": given.model}
    if given.model_bytes:
        model = {}
    precision = getattr(cfg, "mixed_precision", "auto")
    precision = str(place.accelerate_config.get("mixed_precision", "no")) if precision == "auto" else precision
    micro = 8 if cfg is None or cfg.micro_batch_size == "auto" else cfg.micro_batch_size  # auto: found only in training
    tokens = given.tokens or (micro * min(128, getattr(cfg, "max_length", 128)) if cfg else 0)
    which = " --machine_rank $NODE_RANK" if place.num_nodes > 1 else ""  # the line is the same on every node
    options = f"{shlex.join(_of_launch(words[:script]))}{which}".strip()
    launch = " ".join(filter(None, ["accelerate launch", options, shlex.join(words[script:]) or "recipes/classify.py"]))
    return Wish(
        minutes=given.minutes, trial_seconds=given.trial_seconds, backend=given.backend, tries=tries,
        model=model if model.get("model") else {}, model_bytes=given.model_bytes, tokens=tokens, launch=launch, out=given.out,
        autocast={"bf16": "bfloat16", "fp16": "float16"}.get(precision, ""),
    )  # fmt: skip


def _of_launch(words: list[str]) -> list[str]:
    """Of our own words, those that `accelerate launch` takes too, but for the machine rank."""
    names = ("--config_file", "--num_machines", "--num_processes", "--main_process_ip", "--main_process_port",
             "--mixed_precision", "--rdzv_backend")  # fmt: skip
    kept: list[str] = []
    for at, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name in names:
            kept += [word] if equals else words[at : at + 2]
    return kept


def _cannot_write(folder: str) -> str:
    above, path = host.nearest_existing_folder(folder), Path(folder).expanduser().absolute()
    if above is None:
        return "the disk does not answer"
    for one in (path, *path.parents):
        if one.exists() and not one.is_dir():
            return f"{one} is a file, not a folder"
    return "" if os.access(above, os.W_OK | os.X_OK) else f"{above} cannot be written"


async def with_the_others(place: Topology, secret: str, outcome: Outcome, wish: Wish) -> int:
    """The preflight's verdict, and the tuning where it is good."""
    if outcome.findings:
        print(report.format_findings(outcome.findings, report.supports_colour()), flush=True)
    if outcome.has_errors or not outcome.deep_port:
        for line in outcome.table:
            print(line)
        print(f"preflight: {report.summarize(outcome.findings)}. Nothing was tuned.", flush=True)
        return 1
    node, nodes = outcome.node_rank or 0, len(outcome.roster)
    if nodes * outcome.ranks_per_node == 1:
        raise UserError(_alone())
    main = next((peer for peer in outcome.roster if peer["node"] == 0), outcome.roster[0])
    token = messages.make_token(outcome.deep_port, "accel-ddp tune", secret)
    well = f"{nodes} nodes are alike and reach each other" if nodes > 1 else "this node is well"
    print(f"preflight: {well}", flush=True)
    loop = asyncio.get_running_loop()
    leaving: asyncio.Future = loop.create_future()
    for number, name in {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}.items():
        loop.add_signal_handler(number, lambda name=name: leaving.done() or leaving.set_result(name))
    conducting, conductor = None, Conductor(nodes, token)
    try:
        if node == 0:
            await conductor.open(main["ip"], outcome.deep_port)
            conducting = asyncio.ensure_future(Course(conductor, wish, outcome.ranks_per_node, main["ip"]).run())
        base = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "PET_"))}
        base = {name: value for name, value in base.items() if name not in TUNED}  # the default is without them
        base.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as for the recipes
        base |= host.socket_interface_variables(outcome.interface, main["ip"])  # as a recipe's preflight would
        may_set = {*TUNED, *INTERFACES, *(name for settings in wish.tries for name in settings)}
        make = lambda tell: Ranks(node, nodes, outcome.ranks_per_node, main["ip"], base, may_set, tell)
        write = lambda files: results.write(wish.out, files)
        code = await attend(main["ip"], outcome.deep_port, token, hello_of(node, wish.out), make, write, leaving)
        if conducting:  # it tells the others how it ended
            await asyncio.wait([conducting], timeout=10)
            if conducting.done():
                conducting.result()
        return code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if conducting:
            conducting.cancel()
            await asyncio.gather(conducting, return_exceptions=True)
            await conductor.close()


def hello_of(node: int, out: str) -> dict[str, Any]:
    """What the main node needs to know of this one."""
    import psutil

    networks, real = {}, host.external_interfaces()
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if name in real and entry.family == socket.AF_INET and entry.netmask and name not in networks:
                networks[name] = str(ipaddress.ip_network(f"{entry.address}/{entry.netmask}", strict=False))
    return {
        "node": node, "host": host.HOST, "interfaces": networks, "out": out,
        "environment": {name: os.environ[name] for name in TUNED if os.environ.get(name)},
        "chosen": any(os.environ.get(name) for name in INTERFACES),
    }  # fmt: skip
