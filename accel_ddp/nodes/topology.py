"""Which node and rank this process is, of how many, and the address of the main node.

Options take precedence over variables (those of torchrun, Kubeflow, Slurm, SkyPilot and node.env), and variables over the accelerate
config, which is often the same on every node.
"""

import os
import re
from dataclasses import dataclass, field
from typing import Any

from accel_ddp.errors import UserError
from accel_ddp.nodes.launcher import PER_NODE_SETTINGS, adopt_mpi_world, find_accelerate_request, read_accelerate_config
from accel_ddp.text import counted


@dataclass(kw_only=True)
class Topology:
    node_rank: int | None  # machine_rank; None: the rendezvous assigns it (c10d)
    num_nodes: int  # num_machines
    num_ranks: int  # num_processes, the total over all nodes; 0: not given
    num_node_ranks: int = 0  # ranks of this node if the launcher accepts another number on each node (torchrun); 0: not given
    rank: int | None = None  # of this process, if the user has set RANK and WORLD_SIZE; the nodes of the ranks are not known then
    main_address: str  # main_process_ip
    main_port: int  # main_process_port
    local_rank: int = 0
    num_local_processes: int = 1  # processes of this node that run the checks: 1, or one per rank under a launcher
    is_launched: bool = False  # a launcher has already decided how many ranks to start
    coordinator_ports: tuple[int, ...] = ()  # the coordinator uses the first free one; default: the main port
    accelerate_config: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # name of a value -> the option, variable or file it comes from

    def __post_init__(self) -> None:
        self.coordinator_ports = self.coordinator_ports or (self.main_port,)

    @property
    def ranks_of_this_node(self) -> int:
        """Return how many ranks this node starts, or 0 if that is not known. Accelerate starts the same number on every node."""
        return self.num_node_ranks or (self.num_ranks // self.num_nodes if self.num_nodes else 0)

    @property
    def other_ports(self) -> int:
        """Ports for checks: below the range that systems assign, and different for jobs with different main ports."""
        return 20000 + self.main_port * 7919 % 12000

    @property
    def rescue_port(self) -> int | None:
        """Return the port through which nodes report errors if the main port cannot be used. None: there is no such port."""
        return self.other_ports + 3 if self.num_nodes > 1 and self.coordinator_ports == (self.main_port,) else None

    def describe(self, name: str) -> str:
        """Return accelerate's name of a value, the value and its source, for example `machine_rank 1 (NODE_RANK)`."""
        value = {
            "machine_rank": self.node_rank, "num_machines": self.num_nodes, "num_processes": self.num_ranks,
            "nproc_per_node": self.num_node_ranks,
            "main_process_ip": self.main_address, "main_process_port": self.main_port,
        }[name]  # fmt: skip
        source = self.sources.get(name, "")
        return f"{name} {value}" + (f" ({source})" if source else "")


# The variables of each value, in order of precedence.
_VARIABLES = {
    "machine_rank": ("GROUP_RANK", "PET_NODE_RANK", "NODE_RANK", "SKYPILOT_NODE_RANK", "SLURM_NODEID"),
    "num_machines": (
        "GROUP_WORLD_SIZE", "PET_NNODES", "NNODES", "NUMBER_OF_NODES", "SKYPILOT_NUM_NODES", "SLURM_NNODES",
        "SLURM_JOB_NUM_NODES",
    ),
    "per_node": ("LOCAL_WORLD_SIZE", "PET_NPROC_PER_NODE", "NUMBER_OF_GPUS", "SKYPILOT_NUM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "main_process_ip": ("MASTER_ADDR", "PET_MASTER_ADDR"),
    "main_process_port": ("MASTER_PORT", "PET_MASTER_PORT"),
}  # fmt: skip


def is_local_main() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def find_topology(options: dict[str, Any] | None = None, config_file: str = "") -> Topology:
    """`options` have accelerate's names, and torchrun's `nproc_per_node`. UserError for wrong numbers or files."""
    adopt_mpi_world()
    config = read_accelerate_config(config_file)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    # accelerate 1.15 ignores rdzv_backend in the file, so it is not read here.
    for name in ("machine_rank", "num_machines", "num_processes", "main_process_ip", "main_process_port"):
        if config.get(name) not in (None, ""):
            values[name], sources[name] = config[name], config_file or "the accelerate config"
    for name, variables in _VARIABLES.items():
        for variable in variables:
            if os.environ.get(variable, "") not in ("", "auto", "gpu", "cpu"):
                values[name], sources[name] = os.environ[variable], variable
                break
    _read_rank_variables(values, sources)
    if "main_process_ip" not in sources or sources["main_process_ip"] == config_file:
        _read_node_lists(values, sources)
    for name, value in (options or {}).items():
        if value not in (None, ""):
            values[name], sources[name] = value, f"--{name}"

    num_nodes = _parse_number(values, sources, "num_machines", 1)
    per_node = _parse_number(values, sources, "per_node", 0)
    is_auto = values.get("nproc_per_node") in ("auto", "gpu", "cpu")  # torchrun counts; the number is not known here
    own = 0 if is_auto else _parse_number(values, sources, "nproc_per_node", 0)
    if "nproc_per_node" in values:
        num_ranks = own if num_nodes == 1 else 0
        sources["num_processes"] = "--nproc_per_node"
    elif sources.get("num_processes", "").startswith("--") or not per_node:
        is_given = values.get("num_processes") not in (None, "auto", -1)
        num_ranks = _parse_number(values, sources, "num_processes", 0) if is_given else 0
    else:
        num_ranks = per_node * num_nodes
        sources["num_processes"] = f"{sources['per_node']} x {sources.get('num_machines', 1)}"
    # With a rendezvous backend such as c10d, machine_rank is ignored and the same on every node.
    assigns_ranks = values.get("rdzv_backend", "static") != "static"
    local_rank, num_local_processes = _find_local_rank()
    return Topology(
        node_rank=None if assigns_ranks else _parse_number(values, sources, "machine_rank", 0), num_nodes=num_nodes,
        num_ranks=num_ranks, num_node_ranks=own, main_address=str(values.get("main_process_ip") or "127.0.0.1"),
        main_port=_parse_number(values, sources, "main_process_port", 29500), local_rank=local_rank,
        num_local_processes=num_local_processes, accelerate_config=config, sources=sources,
    )  # fmt: skip


def topology_of_this_rank() -> Topology:
    """Reads a rank's variables only: Slurm's and the wizard's config are also around processes that train alone."""
    adopt_mpi_world()
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = {name: os.environ.get(name, "") for name in needed}
    if not all(values.values()) or not all(values[name].isdigit() for name in needed if name != "MASTER_ADDR"):
        # A single process. If only some variables are missing, the creation of the process group reports them.
        return Topology(node_rank=0, num_nodes=1, num_ranks=1, main_address="127.0.0.1", main_port=29500)
    rank, world_size, local_rank, local_size, port = (int(values[name]) for name in needed if name != "MASTER_ADDR")
    local_size = max(1, local_size)
    request = find_accelerate_request() or {}
    topology = Topology(
        node_rank=estimate_node(rank, local_rank, local_size), num_nodes=estimate_num_nodes(world_size, local_size),
        num_ranks=world_size, num_node_ranks=local_size, rank=None if "GROUP_RANK" in os.environ else rank,
        main_address=values["MASTER_ADDR"], main_port=port, local_rank=local_rank, num_local_processes=local_size,
        is_launched=True, accelerate_config={name: value for name, value in request.items() if name not in PER_NODE_SETTINGS},
        sources={"machine_rank": "RANK", "num_processes": "WORLD_SIZE", "main_process_ip": "MASTER_ADDR"},
    )  # fmt: skip
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the launcher's own store listens on the main port
        first = topology.other_ports
        topology.coordinator_ports = (first, first + 1, first + 2)
    return topology


def estimate_node(rank: int, local_rank: int, local_size: int) -> int:
    """Return a rank's node, or an estimate: 0 is always right, the others if all nodes have as many ranks as this one."""
    if node := os.environ.get("GROUP_RANK"):
        return int(node)
    return 0 if rank == local_rank else max(1, rank // max(1, local_size))


def estimate_num_nodes(world_size: int, local_size: int) -> int:
    """Return the number of nodes: as the launcher states, or an estimate, which is 1 only if there is no other node."""
    if nodes := os.environ.get("GROUP_WORLD_SIZE"):
        return int(nodes)
    return -(-world_size // max(1, local_size))


def find_nodes(ranks: list[tuple[str, int, int]]) -> list[int]:
    """Return the node of each rank, from its (host, local rank, local ranks). Several nodes may have one name, as in tests."""
    nodes: dict[tuple[str, int, int], int] = {}
    places: dict[tuple[str, int, int], int] = {}
    found = []
    for place in ranks:
        host, _, local_size = place
        places[place] = places.get(place, -1) + 1
        found.append(nodes.setdefault((host, local_size, places[place]), len(nodes)))
    return found


def describe_ranks(nodes: list[tuple[str, int]]) -> str:
    """Return `2 nodes x 1 rank`, or `3 ranks (2 on node0, 1 on node1)`, from the host and the number of ranks of each node."""
    numbers: dict[int, list[int]] = {}
    for at, (_, number) in enumerate(nodes):
        numbers.setdefault(number, []).append(at)
    if len(numbers) == 1:
        number = nodes[0][1]
        return f"{counted(len(nodes), 'node')} x {counted(number, 'rank')}"
    has_names = len({host for host, _ in nodes}) == len(nodes)
    name = lambda at: nodes[at][0] if has_names else f"node {at}"
    parts = [(number, name(at)) for at, (_, number) in enumerate(nodes)]
    if len(nodes) > 3:
        parts = [(number, name(at[0]) if len(at) == 1 else f"{len(at)} nodes") for number, at in numbers.items()]
    return f"{sum(number for _, number in nodes)} ranks ({', '.join(f'{number} on {where}' for number, where in parts)})"


def _read_rank_variables(values: dict[str, Any], sources: dict[str, str]) -> None:
    """Use RANK and WORLD_SIZE if they are all there is: of srun scripts, or of the pods of a PyTorchJob with a rank each."""
    if "GROUP_RANK" in os.environ or not {"RANK", "WORLD_SIZE"} <= set(os.environ):
        return
    try:
        rank, world_size, local_size = (int(os.environ.get(name, 1)) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    except ValueError:
        return
    if local_size > 0:
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        values["machine_rank"], sources["machine_rank"] = estimate_node(rank, local_rank, local_size), "RANK"
        values["num_machines"], sources["num_machines"] = estimate_num_nodes(world_size, local_size), "WORLD_SIZE"


def _find_local_rank() -> tuple[int, int]:
    if "RANK" in os.environ:
        return int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    tasks = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if "SLURM_LOCALID" in os.environ and tasks and int(tasks[0]) > 1:
        return int(os.environ["SLURM_LOCALID"]), int(tasks[0])
    return 0, 1


def _read_node_lists(values: dict[str, Any], sources: dict[str, str]) -> None:
    if addresses := os.environ.get("SKYPILOT_NODE_IPS", "").split():
        values["main_process_ip"], sources["main_process_ip"] = addresses[0], "SKYPILOT_NODE_IPS"
    elif nodes := os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST"):
        first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)[0]  # rack[1-2]n[07,09],other
        values["main_process_ip"] = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)
        sources["main_process_ip"] = "SLURM_JOB_NODELIST"


def _parse_number(values: dict[str, Any], sources: dict[str, str], name: str, default: int) -> int:
    text = str(values.get(name, default)).rpartition(":")[2]  # torchrun accepts a range of nodes such as 1:2
    if not text.isdigit():
        raise UserError(f"{name} {values[name]!r} ({sources.get(name, '')}): must be a whole number.")
    return int(text)
