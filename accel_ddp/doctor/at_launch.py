"""The doctor inside the launchers of our recipes: `accelerate launch` and torchrun wait for the other nodes before they start
a process of ours, up to 30 minutes without a word. What happens there can only be said from there.

torch loads this module through the entry point `torchrun.handlers` (pyproject.toml), which is how packages add ways to
rendezvous. Here the doctor goes before the usual ones, where the script that is launched uses this package on several
nodes. Any other script is left alone.
"""

import sys
from typing import Any


def add_to_torchrun():
    """Called by torch when a launcher starts. It wants a way to rendezvous in return: the usual one, under our name."""
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

    ways = rendezvous_handler_registry._registry  # `register` refuses a second maker for a name
    usual = {name: ways[name] for name in ("static", "c10d") if name in ways}
    if words := script_of(sys.argv[1:]):
        for name, make in usual.items():
            ways[name] = lambda params, name=name, make=make: _first_the_doctor(params, name, make, words)
    return usual["static"]


def script_of(words: list[str]) -> list[str]:
    """The script that a launcher starts, with its words, if it uses this package; else nothing."""
    for at, word in enumerate(words):
        if word in ("-m", "--module"):
            return words[at + 1 :] if _uses_us(_file_of(words[at + 1 : at + 2])) else []
        if word.endswith(".py"):
            return words[at:] if _uses_us(word) else []
    return []


def _file_of(module: list[str]) -> str:
    from importlib.util import find_spec

    try:
        return find_spec(module[0]).origin or ""
    except (ImportError, AttributeError, ValueError, IndexError):
        return ""  # the launcher will say so


def _uses_us(file: str) -> bool:
    try:
        with open(file, errors="replace") as text:
            return "accel_ddp" in text.read()
    except OSError:
        return False


def _option(words: list[str], name: str, default: str) -> str:
    """Of the recipe's own options: --name VALUE, --name=VALUE, or a line of its --config file."""
    value = default
    for at, word in enumerate(words):
        key, _, given = word.partition("=")
        given = given or "".join(words[at + 1 : at + 2])
        if key == "--config":
            import yaml

            try:
                with open(given) as file:
                    value = str((yaml.safe_load(file) or {}).get(name, value))
            except (OSError, yaml.YAMLError, AttributeError):
                pass  # the recipe will say so
        elif key == f"--{name}":
            value = given
    return value


def _first_the_doctor(params: Any, backend: str, make: Any, words: list[str]) -> Any:
    from accel_ddp.errors import UserError

    is_on = _option(words, "preflight", "on") not in ("off", "False")  # YAML reads an unquoted off as false
    if params.max_nodes > 1 and params.min_nodes == params.max_nodes and is_on:
        try:
            _preflight(params, backend, words)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(130)
    return make(params)


def _preflight(params: Any, backend: str, words: list[str]) -> None:
    import asyncio

    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from accel_ddp import doctor
    from accel_ddp.doctor import client as visit
    from accel_ddp.environment import topology as places

    address, port = parse_rendezvous_endpoint(params.endpoint.strip(), 29400 if backend == "c10d" else 29500)
    asked = places.of_accelerate_words(sys.orig_argv) or {}
    place = places.Place(
        node=int(params.config["rank"]) if "rank" in params.config else None, nodes=params.max_nodes,
        ranks=_ranks(asked, params.max_nodes), address=address, port=port, config=asked, is_launched=True,
    )  # fmt: skip
    wanted = visit.Wanted(script=words[0], measure=False, sets_interface=True, silent=doctor.SILENT_SECONDS)
    wait = _option(words, "wait" if words[0] == "accel_ddp.doctor" else "preflight_wait", "")
    if wait.replace(".", "", 1).isdigit():
        wanted.wait = float(wait)
    outcome = asyncio.run(visit.examine(place, wanted, doctor.say))
    if backend == "c10d" and {one.code for one in outcome.findings if one.severity == "error"} == {"E_PORT_BUSY"}:
        doctor.say(f"the rendezvous at {address}:{port} is running already: this node joins it without a look at the others")
        return
    doctor.refuse(outcome)
    doctor.tell([one for one in outcome.findings if one.code == "I_HOST_NAME"])  # the rest is told by the recipe's own preflight


def _ranks(asked: dict[str, Any], nodes: int) -> int:
    """num_processes, or torchrun's --nproc_per_node; 0 where it is not a number."""
    if isinstance(asked.get("num_processes"), int):
        return asked["num_processes"]
    for at, word in enumerate(sys.argv):
        name, _, value = word.partition("=")
        if name.replace("_", "-") == "--nproc-per-node":
            value = value or sys.argv[at + 1]
            return int(value) * nodes if value.isdigit() else 0
    return 0 if asked else nodes
