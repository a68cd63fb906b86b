"""Which node this is, of how many, and where the main node is: from options, variables and the accelerate config.

Options win over variables (of torchrun, Kubeflow, Slurm, SkyPilot, node.env), and variables over the file, which is often
the same on every node.
"""

import argparse
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_ddp.errors import UserError

# What a node may have for itself in its accelerate config; anything else that differs starts something else on each.
OF_ONE_NODE = {"machine_rank", "main_process_ip", "gpu_ids", "enable_cpu_affinity", "debug", "same_network", "downcast_bf16"}
OF_ONE_NODE |= {"main_training_function", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "compute_environment"}


@dataclass(kw_only=True)
class Place:
    node: int | None  # machine_rank; None: given out by the rendezvous (c10d)
    nodes: int  # num_machines
    ranks: int  # num_processes: the total over all nodes; 0: not said
    address: str  # main_process_ip, as it was given
    port: int  # main_process_port
    local_rank: int = 0
    local_ranks: int = 1  # processes of this node that take part in the meeting
    is_launched: bool = False  # a launcher has chosen its way already
    meeting_ports: tuple[int, ...] = ()  # the first free one of them; default: the main port itself
    config: dict[str, Any] = field(default_factory=dict)  # the accelerate config
    sources: dict[str, str] = field(default_factory=dict)  # name -> where its value comes from

    def __post_init__(self) -> None:
        self.meeting_ports = self.meeting_ports or (self.port,)

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes if self.nodes else 0

    def said(self, name: str) -> str:
        """`machine_rank 1 (NODE_RANK)`: so that a wrong one is found where it was written."""
        value = {"machine_rank": self.node, "num_machines": self.nodes, "num_processes": self.ranks}.get(name)
        value = {"main_process_ip": self.address, "main_process_port": self.port}.get(name, value)
        source = self.sources.get(name, "")
        return f"{name} {value}" + (f" ({source})" if source else "")


# In the order in which they are believed.
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


def find(options: dict[str, Any] | None = None, config_file: str = "") -> Place:
    """Where this process stands. UserError where what is said cannot be read."""
    config = read_config(config_file)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in ("machine_rank", "num_machines", "num_processes", "main_process_ip", "main_process_port", "rdzv_backend"):
        if config.get(name) not in (None, ""):
            values[name], sources[name] = config[name], config_file or "the accelerate config"
    values.pop("rdzv_backend", None)  # accelerate 1.15 ignores it in the file
    for name, variables in _VARIABLES.items():
        for variable in variables:
            if os.environ.get(variable, "") not in ("", "auto", "gpu", "cpu"):
                values[name], sources[name] = os.environ[variable], variable
                break
    _from_ranks(values, sources)
    if "main_process_ip" not in sources or sources["main_process_ip"] == config_file:
        _from_lists(values, sources)
    for name, value in (options or {}).items():
        if value not in (None, ""):
            values[name], sources[name] = value, f"--{name}"

    nodes = _number(values, sources, "num_machines", 1)
    per_node = _number(values, sources, "per_node", 0)
    if sources.get("num_processes", "").startswith("--") or not per_node:
        ranks = 0 if values.get("num_processes") in (None, "auto", -1) else _number(values, sources, "num_processes", 0)
    else:
        ranks, sources["num_processes"] = per_node * nodes, f"{sources['per_node']} x {sources.get('num_machines', 1)}"
    elastic = values.get("rdzv_backend", "static") != "static"  # machine_rank is then ignored, and the same on every node
    node = None if elastic else _number(values, sources, "machine_rank", 0)
    local_rank, local_ranks = _of_the_node()
    return Place(
        node=node, nodes=nodes, ranks=ranks, address=str(values.get("main_process_ip") or "127.0.0.1"),
        port=_number(values, sources, "main_process_port", 29500), config=config, sources=sources, local_rank=local_rank,
        local_ranks=local_ranks,
    )  # fmt: skip


def of_this_rank() -> Place:
    """Of a process that a launcher or srun started as one rank of a world. The world is what WORLD_SIZE says, and nothing else:
    a wizard's config or Slurm's variables also surround processes that are alone on purpose."""
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = {name: os.environ.get(name, "") for name in needed}
    if not all(values.values()) or not all(values[name].isdigit() for name in needed if name != "MASTER_ADDR"):
        return Place(node=0, nodes=1, ranks=1, address="127.0.0.1", port=29500)  # `world.meet` says what is missing
    rank, world, local_rank, local, port = (int(values[name]) for name in needed if name != "MASTER_ADDR")
    local = max(1, local)
    nodes = int(os.environ.get("GROUP_WORLD_SIZE") or max(1, world // local))
    place = Place(
        node=int(os.environ.get("GROUP_RANK") or rank // local), nodes=nodes, ranks=local * nodes, address=values["MASTER_ADDR"],
        port=port, local_rank=local_rank, local_ranks=local, is_launched=True,
        sources={"machine_rank": "RANK", "num_processes": "LOCAL_WORLD_SIZE", "main_process_ip": "MASTER_ADDR"},
    )  # fmt: skip
    place.config = {name: value for name, value in asked_of_accelerate().items() if name not in OF_ONE_NODE}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the launcher's own store is on the main port
        first = 20000 + port * 7919 % 12000  # below the ports that systems give out, and apart from those of other jobs
        place.meeting_ports = (first, first + 1, first + 2)
    return place


def _from_ranks(values: dict[str, Any], sources: dict[str, str]) -> None:
    """RANK, WORLD_SIZE and LOCAL_WORLD_SIZE alone, as srun scripts set them; PyTorchJob has one rank per pod."""
    if "GROUP_RANK" in os.environ or not {"RANK", "WORLD_SIZE"} <= set(os.environ):
        return
    try:
        rank, world, local = (int(os.environ.get(name, 1)) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    except ValueError:
        return
    if local > 0:
        values["machine_rank"], sources["machine_rank"] = rank // local, "RANK"
        values["num_machines"], sources["num_machines"] = max(1, world // local), "WORLD_SIZE"


def _of_the_node() -> tuple[int, int]:
    """(which, of how many) this process is among those that a launcher, or srun with several tasks per node, has started here."""
    if "RANK" in os.environ:
        return int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    tasks = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if "SLURM_LOCALID" in os.environ and tasks and int(tasks[0]) > 1:
        return int(os.environ["SLURM_LOCALID"]), int(tasks[0])
    return 0, 1


def _from_lists(values: dict[str, Any], sources: dict[str, str]) -> None:
    """The first of the nodes that Slurm or SkyPilot lists is the main one."""
    if addresses := os.environ.get("SKYPILOT_NODE_IPS", "").split():
        values["main_process_ip"], sources["main_process_ip"] = addresses[0], "SKYPILOT_NODE_IPS"
    elif nodes := os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST"):
        first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)[0]  # rack[1-2]n[07,09],other
        values["main_process_ip"] = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)
        sources["main_process_ip"] = "SLURM_JOB_NODELIST"


def _number(values: dict[str, Any], sources: dict[str, str], name: str, default: int) -> int:
    word = str(values.get(name, default)).rpartition(":")[2]  # torchrun's 1:2 is a range of nodes
    if not word.isdigit():
        raise UserError(f"{name} {values[name]!r} ({sources.get(name, '')}): must be a whole number.")
    return int(word)


def read_config(file: str) -> dict[str, Any]:
    """An accelerate config; without a name the wizard's, if there is one."""
    import yaml

    if file and not Path(file).is_file():
        raise UserError(f"--config_file {file}: there is no such file.")
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    wizards = [Path(home).expanduser() / "accelerate" / f"default_config.{kind}" for kind in ("yaml", "json")]
    for path in [Path(file)] if file else [path for path in wizards if path.is_file()]:
        try:
            values = yaml.safe_load(path.read_text()) or {}
        except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
            raise UserError(f"--config_file {path}: cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise UserError(f"--config_file {path}: is no accelerate config: it must be lines of `name: value`.")
        return values
    return {}


def refuse_what_was_not_asked_for() -> None:
    """`accelerate launch` rounds num_processes down, and starts one process for MULTI_CPU or --cpu, without a word."""
    asked, started = asked_of_accelerate(), int(os.environ.get("WORLD_SIZE", 1))
    processes, machines = asked.get("num_processes"), asked.get("num_machines") or 1
    if not isinstance(processes, int) or processes < 1:
        return
    below = processes // machines * machines
    if processes != below:
        raise UserError(
            f"num_processes {processes} (the total over all nodes) cannot be divided by num_machines {machines}: accelerate "
            f"has started {started}. Use num_processes {below or machines} or {below + machines}."
        )
    if processes != started:
        raise UserError(
            f"accelerate was asked for {processes} processes but started {started}: `--cpu`, use_cpu and "
            "distributed_type MULTI_CPU or NO start one process that would train alone. Use distributed_type: MULTI_GPU "
            "(accelerate_configs/1node.yaml); without GPUs it runs on the CPUs."
        )


def warn_of_tasks_that_train_alone() -> None:
    """srun starts N processes and tells them nothing that torch reads: each of them trains for itself."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks.isdigit() and int(tasks) > 1 and os.environ.get("WORLD_SIZE", "1") == "1" and os.environ.get("SLURM_PROCID") == "0":
        print(
            f"warning: srun has started {tasks} of these processes, and each trains alone: RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set. To train together: one `accelerate launch` per node.",
            file=sys.stderr,
        )


def asked_of_accelerate() -> dict[str, Any]:
    """What was given to the `accelerate launch` that started this process, if one did: its file and its options."""
    import psutil

    for parent in psutil.Process().parents()[:2]:
        try:
            words = parent.cmdline()
        except psutil.Error:
            continue
        asked = of_accelerate_words(words)
        if asked is not None:
            return asked
    return {}


def of_accelerate_words(words: list[str]) -> dict[str, Any] | None:
    """The same, of a command line; None where it is not `accelerate launch`."""
    names = ("launch", "accelerate-launch", "accelerate.commands.launch")
    at = [i for i, word in enumerate(words) if Path(word).name in names]
    at += [i for i, word in enumerate(words) if word.endswith("accelerate/commands/launch.py")]
    if not at or not any("accelerate" in word for word in words[: at[0] + 1]):
        return None
    words = words[at[0] + 1 :]
    script = next((i for i, word in enumerate(words) if word.endswith(".py") or word in ("-m", "--module")), len(words))
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    for name in ("config_file", "main_process_ip", "mixed_precision", "rdzv_backend"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    for name in ("num_processes", "num_machines", "machine_rank", "main_process_port"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--cpu", action="store_const", const=True)
    try:
        given = {name: value for name, value in vars(parser.parse_known_args(words[:script])[0]).items() if value is not None}
    except argparse.ArgumentError:
        return {}
    try:
        base = read_config(given.pop("config_file", ""))
    except UserError:  # accelerate has read it, or said why not
        base = {}
    return {**base, **given}
