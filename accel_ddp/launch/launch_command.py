"""`accel-ddp launch`, `status`, `logs` and `stop`: their options, and which backend runs them."""

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from accel_ddp.errors import UserError
from accel_ddp.launch.description import NAME, Cluster, read_description
from accel_ddp.launch.job_commands import Job, make_job
from accel_ddp.nodes import recipe_files
from accel_ddp.text import did_you_mean
from accel_ddp.words import has_option

_LAUNCH = """usage: accel-ddp launch [options] CLUSTER.yaml RECIPE [options of the recipe]

Start a recipe on all nodes of a cluster with one command. CLUSTER.yaml describes the nodes (docs/launch.md). RECIPE is a name
(`accel-ddp recipes` lists them) or the path of a script in the code folder of the nodes. All words after RECIPE belong to the recipe.

  accel-ddp launch cluster.yaml recipes/classify.py --lr 1e-5
  accel-ddp launch --dry_run cluster.yaml classify         print what runs on each node
  accel-ddp launch --detach cluster.yaml classify          continue without this terminal

options:
  --dry_run        print the commands of each node, and start nothing
  --print          print the Slurm script or the Kubernetes manifest, and submit nothing
  --detach         return as soon as the job runs; `accel-ddp status`, `logs -f` and `stop` find it again
  --name NAME      name of the job and of its folder (default: `name` of the cluster file, else the name of the recipe)
  --set KEY=VALUE  replace a key of the cluster file, for example --set main_port=29600 or --set slurm.partition=short

Exit codes: 0 finished, 2 a mistake in the cluster file or the options, 75 stopped with a checkpoint, 130 killed by a second
Ctrl-C, otherwise the exit code of the rank that failed first."""

_OPTIONS = ["--dry_run", "--print", "--detach", "--name", "--set"]


def launch(words: list[str], check_inputs: Callable[[Any], None] = lambda cfg: None) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_LAUNCH, file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    parser = argparse.ArgumentParser(prog="accel-ddp launch", usage=_LAUNCH.partition("\n")[0][7:], add_help=False)
    parser.add_argument("--dry_run", "--dry-run", action="store_true")
    parser.add_argument("--print", action="store_true", dest="is_printed")
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--name", default="")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    own, file, recipe, options = split_words(words)
    given, unknown = parser.parse_known_args(own)
    if unknown:
        near = did_you_mean(unknown[0], _OPTIONS, "{!r}")
        raise UserError(f"{unknown[0]}: accel-ddp launch has no such option.{near} Options of the recipe follow the recipe.")
    check_name(given.name)
    cluster = read_description(file, given.set)
    job = make_job(cluster, recipe, options, given.name)
    check_options(cluster, job, check_inputs)
    if given.is_printed and cluster.backend in ("ssh", "local"):
        raise UserError(f"--print: there is no script to print with backend: {cluster.backend}. Use --dry_run.")
    if given.detach and cluster.backend in ("slurm", "kubernetes"):
        raise UserError(f"--detach: has no effect with backend: {cluster.backend}, where jobs always run without this terminal.")
    backend = _module(cluster)
    if given.dry_run or given.is_printed:
        print(backend.render(cluster, job), end="")
        return 0
    return backend.launch(cluster, job, **({"is_detached": True} if given.detach else {}))


def check_options(cluster: Cluster, job: Job, check_inputs: Callable[[Any], None]) -> None:
    """Raise UserError for wrong options before a node is asked. `check_inputs` checks files, if all nodes are this machine."""
    is_asking = {"-h", "--help"} & set(job.options)
    if not Path(job.script).is_file() or is_asking or has_option(job.options, "config"):  # a config may be on the nodes only
        return
    from accel_ddp.doctor.check_options import load_recipe_config

    try:
        cfg = load_recipe_config([job.script, *job.options])
        if cfg and cluster.backend == "local" and all(Path(node.folder).resolve() == Path.cwd() for node in cluster.nodes):
            check_inputs(cfg)  # other nodes may have files that are not here
    except UserError as error:
        option = str(error).partition(":")[0]
        if option in _OPTIONS and "no such option" in str(error):
            value = {"--name": " NAME", "--set": " KEY=VALUE"}.get(option, "")
            raise UserError(
                f"{option}: is an option of accel-ddp launch. Put it before the cluster file: "
                f"accel-ddp launch {option}{value} {cluster.file} {job.script}"
            ) from None
        raise


def split_words(words: list[str]) -> tuple[list[str], str, str, list[str]]:
    """Return (options of `launch`, description, recipe, options of the recipe). The first two words that are not options are files."""
    own: list[str] = []
    rest = list(words)
    files: list[str] = []
    while rest and len(files) < 2:
        word = rest.pop(0)
        if word in ("--name", "--set") and rest:
            own += [word, rest.pop(0)]
        elif word.startswith("-"):
            own.append(word)
        else:
            files.append(word)
    if len(files) < 2:
        what, example = "a recipe after the cluster file", f"{''.join(files)} recipes/classify.py"
        if not files:
            what, example = "a cluster file and a recipe", "cluster.yaml recipes/classify.py"
        elif files[0].endswith(".py") or files[0] in recipe_files.recipe_names():
            what, example = "a cluster file before the recipe", f"cluster.yaml {files[0]}"
        raise UserError(f"accel-ddp launch needs {what}: accel-ddp launch {example}")
    if files[0].endswith(".py") and files[1].endswith((".yaml", ".yml")):
        raise UserError(f"the cluster file comes before the recipe: accel-ddp launch {files[1]} {files[0]}")
    return own, files[0], files[1], rest


def check_name(name: str) -> None:
    if name and not NAME.fullmatch(name):
        raise UserError(f"--name {name}: must consist of at most 63 letters, digits, '.', '_' and '-'.")


def status(words: list[str]) -> int:
    parser = _parser("status", "Print the state of a job on every node, or of all jobs of the cluster file.")
    cluster, job = _find(parser.parse_args(words), needs_name=False)
    return _module(cluster).status(cluster, job)


def logs(words: list[str]) -> int:
    parser = _parser("logs", "Print the logs of a job from all nodes.")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the job until it stops, and return its exit code")
    parser.add_argument("-n", "--lines", type=int, default=100, help="number of lines of each node (default: 100)")
    given = parser.parse_args(words)
    if given.lines < 0:
        raise UserError(f"--lines {given.lines}: must be at least 0.")
    cluster, job = _find(given)
    return _module(cluster).logs(cluster, job, given.follow, given.lines)


def stop(words: list[str]) -> int:
    parser = _parser("stop", "Stop a job on all nodes: its ranks save a checkpoint and exit.")
    parser.add_argument("--now", action="store_true", help="kill the job at once, without a checkpoint")
    given = parser.parse_args(words)
    cluster, job = _find(given)
    return _module(cluster).stop(cluster, job, given.now)


def _parser(verb: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"accel-ddp {verb}", description=description)
    parser.add_argument("file", metavar="CLUSTER.yaml", help="the cluster file that the job was launched with")
    parser.add_argument("--name", default="", help="name of the job (default: `name` of the cluster file; status: all jobs)")
    parser.add_argument("--output_dir", default="", help="the folder of the job, if it was launched with --output_dir")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a key of the cluster file")
    return parser


def _find(given: argparse.Namespace, needs_name: bool = True) -> tuple[Cluster, Job | None]:
    check_name(given.name)
    cluster, file = read_description(given.file, given.set), given.file
    name = given.name or (cluster.name if needs_name else "")
    if not name and not given.output_dir:
        if needs_name:
            raise UserError(f"--name is missing, and {file} has no name. `accel-ddp status {file}` lists the jobs.")
        return cluster, None
    folder = given.output_dir or f"{cluster.output.rstrip('/')}/{name}"
    return cluster, Job(name=name or folder.rstrip("/").rpartition("/")[2], script="", options=(), run_folder=folder)


def _module(cluster: Cluster) -> ModuleType:
    return importlib.import_module(f"accel_ddp.launch.{'session' if cluster.backend in ('ssh', 'local') else cluster.backend}")
