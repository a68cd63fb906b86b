"""accel-ddp doctor: options, the walk through the checks, and what is printed."""

import argparse
import asyncio
import difflib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from accel_ddp import doctor
from accel_ddp.config import TrainConfig, is_voice_of_node, parse_config
from accel_ddp.doctor import client as visit
from accel_ddp.doctor import host as here
from accel_ddp.doctor import report
from accel_ddp.doctor.client import Outcome, Wanted
from accel_ddp.doctor.coordinator import free_port
from accel_ddp.doctor.report import Finding
from accel_ddp.environment import topology as places
from accel_ddp.environment.topology import Place
from accel_ddp.errors import UserError

ABOUT = """Names whatever is wrong with the cluster. Type the same on every node, each with its own --machine_rank.

The order is that of a person who looks for the fault: this machine alone, the way to the main node, who is there and
what differs, every data path, the disk; then, with torch, a collective: device placement, gradient synchronisation, and
what share of a step communication takes. Options of `accelerate launch` are taken as they are; what is not given is
taken from the environment (MASTER_ADDR, NODE_RANK ..., torchrun's, Slurm's, Kubeflow's), then from --config_file."""


def parser_of_doctor(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    place = parser.add_argument_group("where this node stands, as for accelerate launch")
    place.add_argument("--config_file", default="", help="an accelerate config, for example accelerate_configs/2node.yaml")
    place.add_argument("--machine_rank", type=int, help="0 on the main node, 1, 2 ... on the others")
    place.add_argument("--num_machines", type=int, help="nodes")
    place.add_argument("--num_processes", type=int, help="ranks, the total over all nodes")
    place.add_argument("--main_process_ip", help="address of the main node")
    place.add_argument("--main_process_port", type=int, help="open port of the main node (29500)")
    place.add_argument("--rdzv_backend", help="c10d: machine ranks are given out")
    place.add_argument("--mixed_precision", help=argparse.SUPPRESS)
    place.add_argument("--cpu", action="store_true", help=argparse.SUPPRESS)
    for flag in ("--multi_gpu", "--same_network"):
        place.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    look = parser.add_argument_group("what is looked at")
    look.add_argument("--wait", type=float, help="seconds to wait for nodes that are not started yet (300)")
    look.add_argument("--token", default=os.environ.get("ACCEL_DDP_TOKEN", ""), help="a secret that all nodes share; also "
                      "ACCEL_DDP_TOKEN; without it anyone who knows the port can take part")  # fmt: skip
    look.add_argument("--no_deep", action="store_true", help="leave out the collectives, which need torch")
    look.add_argument("--deep", action="store_true", help="the collectives too (the default)")
    look.add_argument("--deep_seconds", type=float, default=120, help="time limit of the collectives, with the import of torch")
    look.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto", help="of the collectives")
    look.add_argument("--megabytes", type=int, default=0, help="size of the measured all-reduce (64, on CPUs 8)")
    look.add_argument("--data", action="append", default=[], metavar="PATH", help="its content must be the same on every node")
    look.add_argument("--model", default="", metavar="FOLDER", help="the same, and its size is used for the expected step")
    look.add_argument("--model_bytes", type=int, default=0, help="of the weights in float32, where --model is no folder")
    look.add_argument("--step_ms", type=float, default=0, help="a step of one rank, for the expected scaling (else estimated)")
    look.add_argument("--output_dir", default="", help="where checkpoints will go")
    look.add_argument("--json", action="store_true", help="one JSON document instead of text")
    return parser


def main(words: list[str], prog: str = "accel-ddp doctor") -> int:
    """Exit code 0: nothing wrong (there may be warnings); 1: something is; 2: these words make no sense."""
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    usage = f"{prog} [options] [RECIPE.py [its options]]"
    parser = parser_of_doctor(
        argparse.ArgumentParser(prog=prog, usage=usage, description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    )
    given, unknown = parser.parse_known_args(words[:script])
    if unknown:
        near = difflib.get_close_matches(unknown[0], list(parser._option_string_actions), n=1)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}" + (f". Did you mean {near[0]}?" if near else ""))
    try:
        place, wanted = patient(given, words[script:])
        return walk(place, wanted, given)
    except UserError as error:
        if is_voice_of_node():
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def patient(given: argparse.Namespace, script: list[str]) -> tuple[Place, Wanted]:
    """Which node this is, and what is to be looked at."""
    names = ("machine_rank", "num_machines", "num_processes", "main_process_ip", "main_process_port", "rdzv_backend")
    options = {name: getattr(given, name) for name in names}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        place = places.of_this_rank()
    else:
        place = places.find(options, given.config_file)
        place.config |= {name: getattr(given, name) for name in ("mixed_precision", "cpu") if getattr(given, name)}
    if place.nodes == 1 and here.is_here(here.bounded(lambda: here.resolved(place.address), 5, "127.0.0.1")):
        place.address, place.port = "127.0.0.1", free_port("127.0.0.1")  # nobody else needs to find it
        place.meeting_ports = (place.port,)
    wanted = _of_the_script(script) if script else Wanted()
    wanted.files |= {f"content of {path}": path for path in [*given.data, *([given.model] if given.model else [])]}
    wanted.output_dir = given.output_dir or wanted.output_dir
    if given.wait is not None:
        wanted.wait = wanted.silent = given.wait
    wanted.token, wanted.deep = given.token, not given.no_deep
    return place, wanted


def _of_the_script(words: list[str]) -> Wanted:
    """A recipe of ours tells its resolved options and files; of any other script the words themselves are compared."""
    if cfg := options_of(words):
        return doctor.of_options(cfg, script=words[0])
    return Wanted(recipe={"words of the script": " ".join(words[1:])}, script=words[0])


def options_of(words: list[str]) -> TrainConfig | None:
    """The resolved options of a recipe of ours with these words; None of any other script. UserError where there is none."""
    path = Path(words[0])
    if not path.is_file():
        raise UserError(f"{path}: there is no such script.")
    text = path.read_text(errors="replace")
    if "accel_ddp" not in text or "__main__" not in text:  # without that line an import would start the training
        return None
    spec = importlib.util.spec_from_file_location("recipe_of_doctor", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)  # recipes import torch only when they run
    kinds = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, TrainConfig)]
    own = [one for one in kinds if one.__module__ == spec.name] or kinds
    return parse_config(own[-1], words[1:], script=words[0]) if own else None


def walk(place: Place, wanted: Wanted, given: argparse.Namespace) -> int:
    began = time.monotonic()
    is_voice = place.local_rank == 0
    quiet = given.json or not is_voice

    def tell(text: str = "") -> None:
        if not quiet:
            print(text, flush=True)

    def say(text: str) -> None:  # while waiting: also with --json, where a person may look on
        if is_voice:
            doctor.say(text)

    if place.nodes > 1:
        node = "a node" if place.node is None else f"machine_rank {place.node}"
        tell(f"accel-ddp doctor: {node} of {place.nodes} on {here.HOST}, main node {place.address}:{place.port}")
    else:
        tell(f"accel-ddp doctor: one node, {here.HOST}")
    outcome = asyncio.run(visit.examine(place, wanted, say))
    tell(f"here        {outcome.about}") if outcome.about else None
    for line in [*outcome.lines, *outcome.table]:
        tell(line)
    figures: dict[str, Any] = {}
    if outcome.deep_port and is_voice and not outcome.is_bad:
        tell("collective  importing torch ...")
        lines, found, figures = deep(place, outcome, given, wanted.files.get("content of --model", ""))
        outcome.findings += found
        for line in lines:
            tell(f"            {line}")
    elif wanted.deep and is_voice and outcome.is_bad:
        tell("collective  left out: it would hang or fail for what was found")
    if given.json and is_voice:
        print(json.dumps({
            "verdict": report.summary(outcome.findings), "findings": [f.as_dict() for f in report.in_order(outcome.findings)],
            "host": here.HOST, "machine_rank": outcome.node if outcome.node is not None else place.node, "nodes": outcome.roster,
            "paths": outcome.paths, "collective": figures, "differs": outcome.table,
            "seconds": round(time.monotonic() - began, 2),
        }))  # fmt: skip
    elif not quiet:
        if outcome.findings:
            tell(report.text_of(outcome.findings, report.has_colour()))
        tell(f"verdict: {report.summary(outcome.findings)}")
    return 1 if outcome.is_bad else 0


def deep(
    place: Place, outcome: Outcome, given: argparse.Namespace, model: str
) -> tuple[list[str], list[Finding], dict[str, Any]]:
    """A child for each rank of this node; they make one report, the same on every node."""
    main = next((peer for peer in outcome.roster if peer["node"] == 0), outcome.roster[0])
    local = outcome.local  # the same on every node
    node = outcome.node or 0
    base = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "PET_"))}
    base |= here.interface_to_set(outcome.interface, main["ip"])  # as a recipe's preflight would
    options = ["--backend", given.backend, "--seconds", str(given.deep_seconds)]
    for name in ("megabytes", "step_ms"):
        options += [f"--{name}", str(getattr(given, name))] if getattr(given, name) else []
    options += ["--model_bytes", str(size)] if (size := given.model_bytes or doctor.size_of(given.model or model)) else []
    children, results = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for one in range(local):
                results.append(Path(folder) / f"{one}.json")
                env = {
                    **base, "RANK": str(node * local + one), "WORLD_SIZE": str(len(outcome.roster) * local),
                    "LOCAL_RANK": str(one), "LOCAL_WORLD_SIZE": str(local), "GROUP_RANK": str(node), "MASTER_ADDR": main["ip"],
                    "MASTER_PORT": str(outcome.deep_port),
                }  # fmt: skip
                command = [sys.executable, "-m", "accel_ddp.doctor.collectives", "--result", str(results[-1]), *options]
                with open(Path(folder) / f"{one}.txt", "w") as words:
                    children.append(subprocess.Popen(command, env=env, stdout=words, stderr=words))
            deadline = time.monotonic() + given.deep_seconds + 15
            for child in children:
                child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            ways = [_ended(child) for child in children]
        for file in results:
            try:
                report_of_all = json.loads(file.read_text())
                found = [Finding.from_stranger(finding) for finding in report_of_all["findings"]]
                return [str(line) for line in report_of_all["lines"]], found, report_of_all["figures"]
            except (OSError, ValueError, KeyError):
                continue
        found = []
        for one, way in enumerate(ways):
            words = (Path(folder) / f"{one}.txt").read_text(errors="replace").strip().splitlines()
            saw = f"its process {way}, without a report{f'; its last words: {words[-1][:300]}' if words else ''}"
            fix = "python -c 'import torch; print(torch.cuda.is_available())' shows whether torch works there; dmesg, nvidia-smi"
            found.append(Finding("E_COLLECTIVE_FAILED", saw, fix, host=here.HOST, node=node, rank=node * local + one))
        return [], found, {}


def _ended(child: subprocess.Popen) -> str:
    """How a process ended, which is then over in any case."""
    if child.poll() is not None:
        return f"ended with exit code {child.returncode}"
    import psutil

    state = psutil.Process(child.pid).status()
    child.kill()
    child.wait()
    return f"was still there at the end of its time ({state})"
