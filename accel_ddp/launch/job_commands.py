"""The command that runs on each node: `accelerate launch` with a config, or torchrun where Accelerate cannot start the ranks."""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from accel_ddp.errors import UserError
from accel_ddp.launch.description import Cluster, Node
from accel_ddp.nodes import recipe_files
from accel_ddp.nodes.launcher import CONFIG_FILE
from accel_ddp.text import read_table
from accel_ddp.words import has_option, script_at, value_of

REFUSALS: dict[str, dict[str, str]] = read_table(Path(__file__).with_name("refusals.yaml"))  # what programs print, by program


class Shell(str):
    """Text that a shell evaluates, for example $SLURM_NODEID. Other words are quoted."""


@dataclass(frozen=True, kw_only=True)
class Job:
    name: str
    script: str
    options: tuple[str, ...]
    run_folder: str  # relative to the code folder of a node, or absolute


def make_job(cluster: Cluster, recipe: str, options: Iterable[str], name: str = "") -> Job:
    options = list(options)
    script = recipe if recipe.endswith(".py") else f"recipes/{recipe_files.recipe_path(recipe).name}"
    name = name or cluster.name or Path(script).stem
    given = value_of(options, "output_dir")
    if given == "":
        raise UserError("--output_dir needs a value.")
    run_folder = given or f"{cluster.output.rstrip('/')}/{name}"
    if given is None and uses_package(script):
        options += ["--output_dir", run_folder]
    if cluster.doctor == "off" and uses_package(script) and not has_option(options, "preflight"):
        options += ["--preflight", "off"]
    return Job(name=name, script=script, options=tuple(options), run_folder=run_folder)


def uses_package(script: str) -> bool:
    """Return whether a script understands the options of a recipe. A script that exists only on the nodes does."""
    try:
        return "accel_ddp" in Path(script).read_text(errors="replace")
    except OSError:
        return True


def config_word(cluster: Cluster) -> str:
    word = cluster.accelerate_config
    if "/" in word or Path(word).is_file():
        return word
    try:
        return f"accelerate_configs/{recipe_files.config_path(word).name}"
    except UserError as error:
        reason = str(error).partition(": ")[2]
        raise UserError(
            f"{cluster.file}: accelerate_config {word}: {reason} A path on the nodes contains a /, as in ./{word}."
        ) from None


def uses_torchrun(cluster: Cluster) -> bool:
    """Accelerate gives all nodes the same number of processes, and starts no launcher for one, so every failure returns 1."""
    return not cluster.has_equal_nodes or cluster.num_processes == 1


def used_config(cluster: Cluster) -> str:
    """Empty if no config is needed. torchrun reads none: FSDP and mixed precision reach its ranks through CONFIG_FILE."""
    is_default = cluster.accelerate_config == Cluster.accelerate_config
    return "" if cluster.num_processes == 1 and is_default else config_word(cluster)


def launcher_words(cluster: Cluster, job: Job, *, node_rank: int | Shell, address: str, port: int | str) -> list[str]:
    restarts = ["--max_restarts", str(cluster.restarts)] if cluster.restarts else []
    launcher = ["torchrun"] if uses_torchrun(cluster) else ["accelerate", "launch"]
    return [*launcher, *_topology_words(cluster, node_rank, address, port), *restarts, job.script, *job.options]


def doctor_words(cluster: Cluster, job: Job, *, node_rank: int, address: str, port: int) -> list[str]:
    return ["accel-ddp", "doctor", *_topology_words(cluster, node_rank, address, port), job.script, *job.options]


def _topology_words(cluster: Cluster, node_rank: int | Shell, address: str, port: int | str) -> list[str]:
    words: list[int | str]
    if uses_torchrun(cluster):
        # A rank that a shell evaluates is that of a backend whose nodes are equal.
        node = cluster.nodes[node_rank if isinstance(node_rank, int) else 0]
        words = ["--nnodes", len(cluster.nodes), "--nproc_per_node", node.processes, "--node_rank", node_rank]
        words += ["--master_addr", address, "--master_port", port]
    else:
        words = ["--config_file", config_word(cluster), "--num_machines", len(cluster.nodes)]
        words += ["--num_processes", cluster.num_processes, "--machine_rank", node_rank]
        words += ["--main_process_ip", address, "--main_process_port", port]
    return [word if isinstance(word, str) else str(word) for word in words]


def node_environment(cluster: Cluster, node: Node) -> dict[str, str]:
    own: dict[str, str] = {}
    if node.interface:
        own |= {"NCCL_SOCKET_IFNAME": node.interface, "GLOO_SOCKET_IFNAME": node.interface}
    if not node.gpus:
        own["ACCELERATE_USE_CPU"] = "true"
    elif node.processes < node.gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(node.processes)))
    if uses_torchrun(cluster) and used_config(cluster):
        own[CONFIG_FILE] = used_config(cluster)
    return {**own, **node.env}


def words_of_job(cluster: Cluster, job: Job) -> str:
    """Return what follows `accel-ddp stop` and the like. --set is repeated, except for variables, which may be secret."""
    has_variables = lambda change: "{" in change or change.partition("=")[0].rpartition(".")[2].startswith("env")
    changes = [change for change in cluster.changes if not has_variables(change)]
    return " ".join([str(cluster.file), "--name", job.name, *(f"--set {shlex.quote(change)}" for change in changes)])


def follow_lines(cluster: Cluster, job: Job) -> list[str]:
    which = words_of_job(cluster, job)
    commands = {"status": "status", "output": "logs -f", "stop": "stop"}
    return [f"  {name + ':':<8} accel-ddp {command} {which}" for name, command in commands.items()]


def shell_path(path: str) -> Shell:
    """Return a path for a shell. A leading `~` is the home directory of the user who runs the shell."""
    if path == "~" or path.startswith("~/"):
        return Shell('"$HOME"' + (f"/{shlex.quote(path[2:])}" if path[2:] else ""))
    return Shell(shlex.quote(path))


def replace_home(words: Iterable[str], paths: Iterable[str], replace: Callable[[str], str]) -> list[str]:
    """Replace those of `paths` that begin with `~`, which only a shell would do, and none does it in --output_dir=~/runs."""
    homes = {path for path in paths if path.startswith("~")}
    found = []
    for word in words:
        option, path = ("--output_dir=", word[13:]) if word.startswith("--output_dir=") else ("", word)
        new = replace(path) if path in homes else path
        found.append(type(new)(option + new) if path in homes else word)
    return found


def to_shell(words: Iterable[str]) -> str:
    """Return a line for a shell. Only Shell words are evaluated."""
    return " ".join(word if isinstance(word, Shell) else shlex.quote(word) for word in words)


def wrap(words: list[str], separator: str = " \\\n  ") -> str:
    lines: list[str] = []
    script = script_at(words)
    for at, word in enumerate(words):
        if not lines or word.startswith(("--", "${")) or at == script:
            lines.append(to_shell([word]))
        else:
            lines[-1] += f" {to_shell([word])}"
    return separator.join(lines)
