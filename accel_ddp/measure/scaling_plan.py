"""What `accel-ddp scaling` measures: its command line, the numbers of ranks and nodes, and how each batch is divided."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.doctor.check_options import load_recipe_config
from accel_ddp.errors import UserError
from accel_ddp.nodes import recipe_files
from accel_ddp.nodes.launcher import parse_accelerate_command, read_accelerate_config, stated_precision
from accel_ddp.nodes.sharding_plan import require_ddp
from accel_ddp.text import counted, did_you_mean
from accel_ddp.words import find_options, name_of, script_at, without

STRONG, WEAK = "strong", "weak"


class Placement(NamedTuple):
    """Where a run takes place: on the first `nodes` nodes."""

    nodes: int
    ranks: int  # of all these nodes


@dataclass(frozen=True)
class Setting:
    place: Placement
    batch: int  # items per step, over all ranks
    micro: int | None  # items that a rank computes at once; None: the run finds it (auto)
    modes: tuple[str, ...]  # the tables that contain it
    note: str = ""

    @property
    def ranks(self) -> int:
        return self.place.ranks

    @property
    def per_rank(self) -> int:
        return self.batch // self.place.ranks

    def describe(self) -> str:
        nodes = f" on {self.place.nodes} nodes" if self.place.nodes > 1 else ""
        return f"{counted(self.ranks, 'rank')}{nodes}, global batch {self.batch}"


def parse_ranks(text: str) -> list[int]:
    """Return the numbers of `--ranks 1,2,4`, in ascending order. Raise UserError for anything else."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--ranks {text}: must be numbers of ranks, separated by commas, for example --ranks 1,2,4.")
    return sorted(set(map(int, words)))


def local_places(numbers: Sequence[int], limit: int, gpus: int) -> list[Placement]:
    """Return the places on this machine: `numbers` of ranks, or powers of two up to `limit`. Ranks on CPUs may share cores."""
    if gpus and numbers and max(numbers) > gpus:
        raise UserError(
            f"--ranks {','.join(map(str, numbers))}: {max(numbers)} ranks need {max(numbers)} GPUs, and this machine has "
            f"{counted(gpus, 'GPU')}. Use --ranks {','.join(map(str, powers_of_two(gpus)))}, several nodes with --cluster "
            "cluster.yaml, or CPU ranks with ACCELERATE_USE_CPU=true."
        )
    return [Placement(1, number) for number in numbers or powers_of_two(limit)]


def cluster_places(processes: Sequence[int], numbers: Sequence[int]) -> list[Placement]:
    """Return the places in a cluster whose nodes have these numbers of ranks.

    The default is one rank, all ranks of the first node, and then 2, 4, 8 ... and all nodes. `numbers` selects others. Raise
    UserError if one of them is not possible: several nodes are used as a whole.
    """
    whole = {sum(processes[:nodes]): nodes for nodes in range(1, len(processes) + 1)}
    possible = {number: 1 for number in range(1, processes[0] + 1)}
    possible |= {ranks: nodes for ranks, nodes in whole.items() if nodes > 1}
    if not numbers:
        several = {*powers_of_two(len(processes)), len(processes)}
        numbers = sorted({1, *(ranks for ranks, nodes in whole.items() if nodes in several)})
    for number in numbers:
        if number not in possible:
            raise UserError(
                f"--ranks {','.join(map(str, numbers))}: {number} ranks are not the ranks of some whole nodes of this cluster. Use "
                f"some of: {', '.join(map(str, possible))}."
            )
    return [Placement(possible[number], number) for number in numbers]


def powers_of_two(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(max(1, limit).bit_length())]


def make_plan(
    places: Sequence[Placement], batch: int, micro: int | None, modes: Sequence[str]
) -> tuple[list[Setting], list[str]]:
    """Return the settings to measure, from the fewest to the most ranks, and why some were left out.

    With strong scaling every setting has the global batch of the recipe. With weak scaling the first setting has it, and the batch
    grows with the ranks. A setting of both is measured once.
    """
    settings: list[Setting] = []
    reasons = []
    items = max(1, batch // places[0].ranks)  # per rank, for weak scaling
    for place in places:
        batches: dict[int, tuple[str, ...]] = {}
        if STRONG in modes and batch % place.ranks:
            near = [number for number in (batch // place.ranks * place.ranks, (batch // place.ranks + 1) * place.ranks) if number]
            reasons.append(
                f"strong scaling on {place.ranks} ranks is left out: --global_batch_size {batch} cannot be split over {place.ranks} "
                f"ranks. With --global_batch_size {' or '.join(map(str, near))} it can."
            )
        elif STRONG in modes:
            batches[batch] = (STRONG,)
        if WEAK in modes:
            batches[items * place.ranks] = (*batches.get(items * place.ranks, ()), WEAK)
        settings += [divide(Setting(place, number, micro, of)) for number, of in batches.items()]
    return settings, reasons


def divide(setting: Setting) -> Setting:
    """Return the setting with a micro-batch that divides the items of a rank: the largest that is not above the one given."""
    if setting.micro is None:
        return setting
    micro = min(setting.micro, setting.per_rank)
    fits = max(number for number in range(1, micro + 1) if setting.per_rank % number == 0)
    note = f"--micro_batch_size {micro} does not divide {setting.per_rank} items per rank, so {fits} is used"
    return replace(setting, micro=fits, note=note if fits < micro else "")


def smaller(setting: Setting, used: int) -> Setting | None:
    """Return the setting with at most half the micro-batch `used` and more accumulation. None: one item does not fit."""
    if used <= 1:
        return None
    fits = max(number for number in range(1, used // 2 + 1) if setting.per_rank % number == 0)
    return replace(setting, micro=fits, note=f"a micro-batch of {used} does not fit in memory, so {fits} is used")


DESCRIPTION = """Run a few steps of a recipe on 1, 2, ... ranks, and print how the speed grows with them: speed-up and efficiency next
to the ideal, and what limits scaling. The recipe runs unchanged. Nothing is evaluated, and checkpoints are deleted."""
USAGE = "accel-ddp scaling [options] [options of accelerate launch] RECIPE [options of the recipe]"
# Options of `accelerate launch` that `scaling` sets itself, or that describe several nodes.
_OF_NODES = ("num_machines", "machine_rank", "main_process_ip", "rdzv_backend", "same_network")


@dataclass(frozen=True)
class ScalingOptions:
    given: argparse.Namespace
    launch: list[str]  # options of `accelerate launch` for several ranks, with the config
    launch_one: list[str]  # and for one rank
    limit: int  # --num_processes; 0: not given
    gpu_ids: int  # how many GPUs --gpu_ids selects; 0: all
    recipe: str
    options: list[str]  # of the recipe
    cfg: TrainConfig

    @property
    def modes(self) -> tuple[str, ...]:
        return (STRONG, WEAK) if self.given.mode == "both" else (self.given.mode,)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="accel-ddp scaling", usage=USAGE, description=DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add("--steps", type=int, default=20, metavar="N", help="steps that are measured in each run (default: 20)")
    add("--warmup", type=int, default=5, metavar="N", help="steps of each run before them (default: 5)")
    ranks = "powers of two up to the GPUs or else the cores of this machine; with --cluster 1 rank, 1 node, 2, 4 ... nodes"
    add("--ranks", default="", metavar="1,2,4", help=f"numbers of ranks (default: {ranks})")
    modes = "strong: the same global batch on more ranks; weak: the global batch grows with the ranks (default: both)"
    add("--mode", choices=(STRONG, WEAK, "both"), default="both", help=modes)
    cluster = "run on the nodes of a cluster file, as `accel-ddp launch` does"
    add("--cluster", default="", metavar="CLUSTER.yaml", help=cluster)
    add("--folder", default="", help="keep the logs and the output of the runs in this folder (default: a temporary folder)")
    add("--run_seconds", type=float, default=1800, metavar="SECONDS", help="stop a run that takes longer (default: 1800)")
    add("--json", action="store_true", help="print one JSON document instead of text")
    return parser


def read_options(words: list[str]) -> ScalingOptions:
    """Return the options. Raise UserError for a mistake, also in the options of the recipe, before anything runs."""
    names = recipe_files.recipe_names()
    at = script_at(words, names)
    given, launch = build_parser().parse_known_args(words[:at])
    if at == len(words):
        meant = next((word for word in launch if not word.startswith("-")), "")
        near = did_you_mean(meant, names, "{!r}") if meant else ""
        raise UserError(f"accel-ddp scaling needs a recipe: accel-ddp scaling recipes/classify.py [options of the recipe].{near}")
    for name, minimum in {"steps": 2, "warmup": 0, "run_seconds": 1}.items():
        if getattr(given, name) < minimum:
            raise UserError(f"--{name} {getattr(given, name)}: must be {minimum} or more.")
    recipe = words[at] if given.cluster else str(recipe_files.recipe_path(words[at]))
    try:
        cfg = load_recipe_config([str(recipe_files.recipe_path(words[at])), *words[at + 1 :]])
    except UserError as error:
        unknown = str(error).partition(": there is no such option")[0]
        if unknown.removeprefix("--") not in vars(given):
            raise
        where = "options of accel-ddp scaling stand before the recipe"
        raise UserError(f"{unknown}: {where}: accel-ddp scaling {unknown} ... {recipe}") from error
    if cfg is None:
        raise UserError(f"{recipe}: does not use accel_ddp, so it writes no log from which its speed could be read.")
    if cfg.resume:
        raise UserError(f"--resume {cfg.resume}: every run of accel-ddp scaling begins a new training. Leave --resume out.")
    given.ranks = parse_ranks(given.ranks) if given.ranks else []
    launch, launch_one, limit, gpu_ids = _read_launch(launch, given.cluster)
    return ScalingOptions(given, launch, launch_one, limit, gpu_ids, recipe, words[at + 1 :], cfg)


def _read_launch(words: list[str], cluster: str) -> tuple[list[str], list[str], int, int]:
    """Return the options of `accelerate launch` for several ranks and for one, --num_processes, and the number of --gpu_ids.

    Raise UserError for an option that describes several nodes, and for a misspelt option of `scaling`. One rank is started
    with local.yaml, because other configs may have settings for several processes.
    """
    if cluster and words:
        raise UserError(f"{words[0]}: with --cluster, options of accelerate launch belong into {cluster}.")
    values = argparse.Namespace(num_processes="", gpu_ids="", config_file="1node.yaml", main_process_port="")
    found = find_options(words, vars(values))
    for option in found:
        if option.value is None:
            raise UserError(f"{words[option.at]} needs a value.")
        setattr(values, option.name, option.value)
    kept = without(words, found)
    for word in kept:
        if name_of(word) in _OF_NODES:
            raise UserError(
                f"{word}: accel-ddp scaling starts the runs on several nodes itself. Describe the nodes in a file, as for accel-ddp "
                "launch, and run: accel-ddp scaling --cluster cluster.yaml RECIPE"
            )
        # 0.85: `--rank` and `--warm_up` are misspelt, and `--module` of accelerate launch is not `--mode`.
        if meant := did_you_mean(name_of(word), vars(build_parser().parse_args([])), "--{}", cutoff=0.85):
            raise UserError(f"{word}: there is no such option.{meant}")
    if values.num_processes and not values.num_processes.isdecimal():
        raise UserError(f"--num_processes {values.num_processes}: must be a whole number, the largest number of ranks.")
    if values.gpu_ids.isdigit():
        raise UserError(
            f"--gpu_ids {values.gpu_ids}: is one GPU, with which there is nothing to compare. Name several, as in --gpu_ids 0,1."
        )
    kept += ["--gpu_ids", values.gpu_ids] if values.gpu_ids else []
    config = str(recipe_files.config_path(values.config_file))
    if not cluster:  # the options of `accelerate launch` replace the settings of the config
        require_ddp(parse_accelerate_command(["accelerate", "launch", "--config_file", config, *kept]) or {}, "accel-ddp scaling")
    alone = ["--config_file", str(recipe_files.config_path("local.yaml"))]
    stated = stated_precision(read_accelerate_config(config))
    if stated and not any(word.startswith(("--mixed_precision", "--mixed-precision")) for word in kept):
        alone += ["--mixed_precision", stated]
    alone += [word for word in kept if word not in ("--multi_gpu", "--multi-gpu")]
    num_gpus = len(values.gpu_ids.split(",")) if values.gpu_ids not in ("", "all") else 0
    return ["--config_file", config, *kept], alone, int(values.num_processes or 0), num_gpus
