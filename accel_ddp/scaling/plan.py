"""Chooses the settings that are measured: numbers of ranks and nodes, and how each batch is divided."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from accel_ddp.errors import UserError

STRONG, WEAK = "strong", "weak"


class Place(NamedTuple):
    """Where a run takes place: on the first `nodes` nodes."""

    nodes: int
    ranks: int  # of all these nodes


@dataclass(frozen=True)
class Setting:
    """What one run measures."""

    place: Place
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

    def name(self) -> str:
        """Return the name of the folder of its run."""
        return f"{self.place.nodes}x{self.ranks}_batch{self.batch}" + (f"_micro{self.micro}" if self.micro else "")

    def describe(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{ranks}{f' on {self.place.nodes} nodes' if self.place.nodes > 1 else ''}, global batch {self.batch}"


def parse_ranks(text: str) -> list[int]:
    """Return the numbers of `--ranks 1,2,4`, in ascending order. Raise UserError for anything else."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--ranks {text}: must be numbers of ranks, separated by commas, for example --ranks 1,2,4.")
    return sorted(set(map(int, words)))


def local_places(numbers: Sequence[int], limit: int, gpus: int) -> list[Place]:
    """Return the places on this machine: `numbers` of ranks, or by default powers of two up to `limit`.

    Raise UserError if there are more ranks than GPUs. Ranks on CPUs may share cores.
    """
    if gpus and numbers and max(numbers) > gpus:
        has = f"{gpus} GPU{'s' * (gpus > 1)}"
        raise UserError(
            f"--ranks {','.join(map(str, numbers))}: {max(numbers)} ranks need {max(numbers)} GPUs, and this machine has {has}. Use "
            f"--ranks {','.join(map(str, powers_of_two(gpus)))}, several nodes with --cluster cluster.yaml, or CPU ranks with "
            "ACCELERATE_USE_CPU=true."
        )
    return [Place(1, number) for number in numbers or powers_of_two(limit)]


def cluster_places(processes: Sequence[int], numbers: Sequence[int]) -> list[Place]:
    """Return the places in a cluster whose nodes have these numbers of ranks.

    The default is one rank, all ranks of the first node, and then 2, 4, 8 ... and all nodes. `numbers` selects others. Raise
    UserError if one of them is not possible: several nodes are used as a whole.
    """
    whole = {sum(processes[:nodes]): nodes for nodes in range(1, len(processes) + 1)}
    possible = {number: 1 for number in range(1, processes[0] + 1)} | {
        ranks: nodes for ranks, nodes in whole.items() if nodes > 1
    }
    if not numbers:
        several = {*powers_of_two(len(processes)), len(processes)}
        numbers = sorted({1, *(ranks for ranks, nodes in whole.items() if nodes in several)})
    for number in numbers:
        if number not in possible:
            raise UserError(
                f"--ranks {','.join(map(str, numbers))}: {number} ranks are not the ranks of some whole nodes of this cluster. Use "
                f"some of: {', '.join(map(str, possible))}."
            )
    return [Place(possible[number], number) for number in numbers]


def powers_of_two(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(max(1, limit).bit_length())]


def make_plan(places: Sequence[Place], batch: int, micro: int | None, modes: Sequence[str]) -> tuple[list[Setting], list[str]]:
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
    note = (
        f"--micro_batch_size {micro} does not divide {setting.per_rank} items per rank, so {fits} is used" if fits < micro else ""
    )
    return replace(setting, micro=fits, note=note or setting.note)


def smaller(setting: Setting, used: int) -> Setting | None:
    """Return the setting with at most half the micro-batch `used` and more accumulation. None: one item does not fit."""
    if used <= 1:
        return None
    fits = max(number for number in range(1, used // 2 + 1) if setting.per_rank % number == 0)
    return replace(setting, micro=fits, note=f"a micro-batch of {used} does not fit in memory, so {fits} is used")
