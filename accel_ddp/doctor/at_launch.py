"""The preflight inside `accelerate launch` and torchrun, before they start a rank.

Launchers wait for the other nodes before they start any process, up to 30 minutes and without output. What goes wrong in this
time can only be reported from inside the launcher. Restarts are decided here too (`launcher_restarts`).

torch loads this module through the entry point `torchrun.handlers` (pyproject.toml), by which packages add rendezvous
backends. The preflight then runs before the usual backends if the launched script uses this package on several nodes, and the
usual backends are wrapped. Any other script is not affected.
"""

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accel_ddp import compat
from accel_ddp.words import find_options, value_of

if TYPE_CHECKING:
    from accel_ddp.nodes.topology import Topology


def add_to_torchrun():
    """Put the preflight before torch's rendezvous backends. torch calls this function when a launcher starts.

    Returns a rendezvous backend, as torch requires: the usual static one, which is then registered under this package's name.
    """
    creators = compat.rendezvous_creators()
    usual = {name: creators[name] for name in ("static", "c10d") if name in creators}
    if argv := find_script(sys.argv[1:]):
        from accel_ddp.doctor.launcher_restarts import return_exit_code_of_ranks  # other scripts do not wait for this import

        return_exit_code_of_ranks()
        adopt_config()
        _refuse_deepspeed(argv)
        if _is_checked(argv):
            _leave_port_check_to_preflight()
        for name, create in usual.items():
            creators[name] = lambda params, name=name, create=create: _create_after_preflight(params, name, create, argv)
    return usual["static"]


def find_script(argv: list[str]) -> list[str]:
    """Return the script that a launcher starts, with its arguments, or an empty list if it does not use this package."""
    for at, argument in enumerate(argv):
        if argument in ("-m", "--module"):
            return argv[at + 1 :] if _uses_package(_file_of_module(argv[at + 1 : at + 2])) else []
        if argument.endswith(".py"):
            return argv[at:] if _uses_package(argument) else []
    return []


def _file_of_module(module: list[str]) -> str:
    from importlib.util import find_spec

    inside = os.path.join(*module[0].split(".")) if module and module[0] else ""
    for file in (f"{inside}.py", os.path.join(inside, "__main__.py")):
        if inside and os.path.isfile(file):  # the working directory is on sys.path of `python -m`, but not of a launcher
            return file
    try:
        return find_spec(module[0]).origin or ""
    except (ImportError, AttributeError, ValueError, IndexError):
        return ""  # the launcher reports it


def _uses_package(file: str) -> bool:
    try:
        with open(file, errors="replace") as text:
            return "accel_ddp" in text.read()
    except OSError:
        return False


def read_recipe_option(argv: list[str], name: str, default: str) -> str:
    """Return an option of the recipe: --name VALUE, --name=VALUE, or a line of its --config file."""
    value = default
    for option in find_options(argv, ("config", name)):
        if option.name == name:
            value = option.value or ""
            continue
        import yaml

        try:
            with open(option.value or "") as file:
                value = str((yaml.safe_load(file) or {}).get(name, value))
        except (OSError, yaml.YAMLError, AttributeError):
            pass  # the recipe reports it
    return value


def _is_checked(argv: list[str]) -> bool:
    """Return whether the options of the recipe leave the preflight on."""
    return read_recipe_option(argv, "preflight", "on") not in ("off", "False")  # YAML reads an unquoted off as false


def adopt_config() -> None:
    """Set the variables that `accelerate launch` would set for a config, if torchrun is asked for one with ACCEL_DDP_CONFIG_FILE.

    The ranks inherit them. Variables that are set already are left as they are.
    """
    from accel_ddp.errors import USER_ERROR, UserError
    from accel_ddp.nodes.launcher import CONFIG_FILE, parse_accelerate_command, read_accelerate_config
    from accel_ddp.nodes.sharding_plan import variables_of

    file = os.path.expanduser(os.environ.get(CONFIG_FILE, ""))
    if not file or parse_accelerate_command(sys.orig_argv) is not None:
        return
    try:
        config = read_accelerate_config(file)
    except UserError as error:
        print(f"error: {str(error).replace('--config_file', CONFIG_FILE)}", file=sys.stderr, flush=True)
        sys.exit(USER_ERROR)
    precision = {"ACCELERATE_MIXED_PRECISION": str(config["mixed_precision"])} if config.get("mixed_precision") else {}
    for name, value in {**variables_of(config), **precision}.items():
        os.environ.setdefault(name, value)


def _refuse_deepspeed(argv: list[str]) -> None:
    """Exit with code 2 if the accelerate config asks for DeepSpeed, before Accelerate asks the user to install DeepSpeed."""
    from accel_ddp.doctor.cluster import report_to_other_nodes
    from accel_ddp.nodes.launcher import find_config_file, parse_accelerate_command
    from accel_ddp.nodes.sharding_plan import variables_of
    from accel_ddp.nodes.topology import find_topology

    request = parse_accelerate_command(sys.orig_argv) or {}
    if request.get("distributed_type") == "DEEPSPEED":

        def report(reason: str) -> None:
            names = ("machine_rank", "num_machines", "num_processes", "main_process_ip", "main_process_port", "rdzv_backend")
            topology = find_topology({name: request.get(name) for name in names}, find_config_file(sys.orig_argv))
            if _is_checked(argv):
                report_to_other_nodes(reason, topology, argv[0])

        _check_sharding(variables_of({"distributed_type": "DEEPSPEED"}), 0, report)


def _check_sharding(variables: Mapping[str, str], num_ranks: int, report: Callable[[str], None] = lambda reason: None) -> None:
    """Exit with code 2 if the ranks could not use these variables. One message replaces the messages of all ranks.

    `report` is called with the message, because nodes with another config would wait for this one.
    """
    from accel_ddp.errors import USER_ERROR, UserError
    from accel_ddp.nodes.launcher import find_config_file
    from accel_ddp.nodes.sharding_plan import read_plan

    try:
        read_plan(variables, num_ranks, find_config_file(sys.orig_argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        report(str(error))
        sys.exit(USER_ERROR)


def _leave_port_check_to_preflight() -> None:
    """Replace the check of `accelerate launch` whether node 0 can use the main port.

    If another program has the port, Accelerate raises an exception on node 0 before the preflight begins, and the other nodes do
    not receive the reason. The preflight reports it on every node. torch loads this module before Accelerate checks the port.
    """
    from accel_ddp.nodes.launcher import parse_accelerate_command

    request = parse_accelerate_command(sys.orig_argv) or {}
    num_nodes = request.get("num_machines")
    if isinstance(num_nodes, int) and num_nodes > 1:
        compat.skip_port_check()


def _create_after_preflight(params: Any, backend: str, create: Any, argv: list[str]) -> Any:
    """Run the preflight, then return a wrapped rendezvous handler of `create`. Exits with code 2 if there are errors."""
    from accel_ddp.doctor.cluster import report_to_other_nodes
    from accel_ddp.doctor.launcher_restarts import RestartingRendezvous, find_max_restarts
    from accel_ddp.nodes.launcher import parse_accelerate_command

    is_on = params.max_nodes > 1 and params.min_nodes == params.max_nodes and _is_checked(argv)
    num_ranks = (parse_accelerate_command(sys.orig_argv) or {}).get("num_processes")
    _check_sharding(
        {**os.environ, "GROUP_WORLD_SIZE": str(params.max_nodes)},
        num_ranks if isinstance(num_ranks, int) and num_ranks > 0 else 0,
        lambda reason: report_to_other_nodes(reason, _find_topology(params, backend), argv[0]) if is_on else None,
    )

    def check(is_running: Callable[[], bool]) -> bool:
        from accel_ddp.errors import USER_ERROR, UserError

        try:
            return is_on and _run_preflight(_find_topology(params, backend), argv, is_running)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(USER_ERROR)
        except KeyboardInterrupt:
            sys.exit(130)

    wait = read_recipe_option(argv, "preflight_wait", "")
    seconds = float(wait) if wait.replace(".", "", 1).isdigit() else 300.0
    return RestartingRendezvous(params, backend, create, check, argv, seconds, find_max_restarts())


def _find_topology(params: Any, backend: str) -> "Topology":
    """Return the nodes that the launcher was asked for."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from accel_ddp.nodes.launcher import parse_accelerate_command
    from accel_ddp.nodes.topology import Topology

    address, port = parse_rendezvous_endpoint(params.endpoint.strip(), 29400 if backend == "c10d" else 29500)
    request = parse_accelerate_command(sys.orig_argv)  # None: this is torchrun
    num_ranks = (request or {}).get("num_processes")
    return Topology(
        node_rank=int(params.config["rank"]) if "rank" in params.config else None, num_nodes=params.max_nodes,
        num_ranks=max(0, num_ranks) if isinstance(num_ranks, int) else 0,
        num_node_ranks=_count_own_ranks(sys.argv) if request is None else 0,
        main_address=address, main_port=port, accelerate_config=request or {}, is_launched=True,
    )  # fmt: skip


def _run_preflight(topology: "Topology", argv: list[str], is_running: Callable[[], bool]) -> bool:
    """Check all nodes. Return True instead if the launchers of the other nodes have already been checked and `is_running()`."""
    import asyncio

    from accel_ddp.doctor import cluster, host
    from accel_ddp.doctor.check_options import CheckOptions
    from accel_ddp.doctor.cluster import check_cluster

    options = CheckOptions(
        script=argv[0], measures_bandwidth=False, sets_interface=True, no_answer_seconds=host.PREFLIGHT_NO_ANSWER
    )
    options.may_join_rendezvous = topology.node_rank != 0  # the launcher of node 0 opens the store itself
    wait = read_recipe_option(argv, "wait" if argv[0] == "accel_ddp.doctor" else "preflight_wait", "")
    if wait.replace(".", "", 1).isdigit():
        options.wait_seconds = float(wait)
    outcome = asyncio.run(check_cluster(topology, options, cluster.print_progress))
    if any(finding.code == "I_RENDEZVOUS" for finding in outcome.findings):  # a store is open at the main port
        cluster.raise_on_errors(outcome)  # of this node alone
        if is_running():
            return True
        options.may_join_rendezvous = False
        outcome = asyncio.run(check_cluster(topology, options, cluster.print_progress))
    cluster.raise_on_errors(outcome)
    # The preflight of the ranks prints the other findings.
    cluster.print_findings([finding for finding in outcome.findings if finding.code == "I_HOST_NAME"])
    return False


def _count_own_ranks(argv: list[str]) -> int:
    """Return torchrun's --nproc_per_node, which each node may have its own of; 0 if it is not a number, such as `gpu`."""
    number = value_of(argv, "nproc_per_node") or os.environ.get("PET_NPROC_PER_NODE", "1")
    return int(number) if number.isdigit() else 0
