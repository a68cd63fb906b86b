"""The training items as an endless shuffled stream. The step determines the position in it, so that no state is saved."""

import functools
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.ranks.process import this_rank
from accel_ddp.ranks.team import Team
from accel_ddp.seeds import mixed, seed_host
from accel_ddp.text import counted, plural
from accel_ddp.training.sharding import plan_of
from accel_ddp.training.step_plan import BY_TOKENS, OwnMicroBatches, Shares, StepPlan
from accel_ddp.training.workers import loader_options, starting_workers


class Shuffle:
    """A different order of `num_items` items for each (seed, epoch), computed where it is needed.

    It is a keyed permutation of [0, 4^k) (a Feistel network), applied until the result is below `num_items`. Any position of
    any epoch is found directly, and an epoch of a billion items needs no memory. 65,536 positions are computed together, which
    takes about 10 ms.
    """

    CHUNK, ROUNDS = 1 << 16, 8

    def __init__(self, num_items: int, seed: int):
        self.num_items, self.seed = num_items, seed
        self.half_bits = max(1, ((num_items - 1).bit_length() + 1) // 2)
        self._cached: tuple[tuple[int, int], np.ndarray] | None = None

    def at(self, position: int) -> int:
        """Return the item at `position` of the endless stream: all items in the order of epoch 0, then of epoch 1, ..."""
        return self.items(position, 1)[0]

    def items(self, position: int, number: int) -> list[int]:
        """Return `number` items, starting at `position`."""
        found: list[int] = []
        while len(found) < number:
            epoch, place = divmod(position + len(found), self.num_items)
            chunk, inside = divmod(place, self.CHUNK)
            if self._cached is None or self._cached[0] != (epoch, chunk):
                first = chunk * self.CHUNK
                self._cached = (epoch, chunk), self._permute(np.arange(first, min(first + self.CHUNK, self.num_items)), epoch)
            found += self._cached[1][inside : inside + number - len(found)].tolist()
        return found

    def _permute(self, places: np.ndarray, epoch: int) -> np.ndarray:
        keys = [np.uint64(mixed(self.seed, "order", epoch, i)) for i in range(self.ROUNDS)]
        shift, mask = np.uint64(self.half_bits), np.uint64((1 << self.half_bits) - 1)
        values = places.astype(np.uint64)
        outside = np.ones(len(values), dtype=bool)
        while outside.any():
            left, right = values[outside] >> shift, values[outside] & mask
            for key in keys:
                left, right = right, left ^ (_hashed(right, key) & mask)
            values[outside] = (left << shift) | right
            outside = values >= self.num_items
        return values


def _hashed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return 32 bits for each value: multiply and fold, a cheap hash of good quality."""
    noise = (values ^ key) * np.uint64(0x9E3779B97F4A7C15)
    noise = (noise ^ (noise >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return noise >> np.uint64(32)


@dataclass(frozen=True)
class Mixture:
    """The datasets that rows come from. Tables of rows have it as their attribute `mixture`, if they come from several datasets.

    With `weights`, which are the probabilities of a training row up to a factor, training mixes the datasets in these proportions.
    """

    names: tuple[str, ...]
    numbers: np.ndarray  # the dataset of each row
    weights: tuple[float, ...] | None = None

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each dataset."""
        return np.bincount(self.numbers, minlength=len(self.names)).tolist()


class MixedShuffle:
    """Like `Shuffle`, the order of a mixture: which dataset each position takes its row from, and which of its rows.

    Each dataset has its own `Shuffle`, and begins its next epoch when all of its rows were seen, whatever the others do. A tree of
    two-way splits deals positions to datasets: of its first n positions, a split passes round(n * share) to one side and the rest to
    the other, so all counts are found directly. They differ from n * weight by about 1 at most. Then the datasets of each BLOCK of
    positions are permuted, because the tree alone is periodic.
    """

    BLOCK, CHUNK, ONE = 16, 1 << 16, 1 << 40

    def __init__(self, mixture: Mixture, seed: int):
        self.names, self.sizes, self.seed = mixture.names, mixture.sizes, seed
        if empty := [name for name, size in zip(self.names, self.sizes) if not size]:
            raise UserError(
                f"--train_file: no training rows of {empty[0]} are left. Give it more rows, or leave it out of the mixture."
            )
        total = sum(mixture.weights)
        self.shares = [weight / total for weight in mixture.weights]
        numbers = mixture.numbers
        is_sorted = (numbers[1:] >= numbers[:-1]).all()
        self.rows = None if is_sorted else np.argsort(numbers, kind="stable")  # by dataset
        self.firsts = np.cumsum([0, *self.sizes])[:-1]
        self.orders = [Shuffle(size, mixed(seed, "dataset", number)) for number, size in enumerate(self.sizes)]
        nodes: list[tuple[float, int, Any]] = [(weight, number, number) for number, weight in enumerate(mixture.weights)]
        heapq.heapify(nodes)  # the two smallest are joined until one is left, as in a Huffman code: large weights have few splits
        while len(nodes) > 1:
            (a, _, left), (b, _, right) = heapq.heappop(nodes), heapq.heappop(nodes)
            node = max(1, round(a / (a + b) * self.ONE)), left, right
            heapq.heappush(nodes, (a + b, len(self.names) + len(nodes), node))
        self.tree = nodes[0][2]
        self._cached: tuple[int, np.ndarray, np.ndarray] | None = None

    def items(self, position: int, number: int) -> list[int]:
        """Return the indices of `number` rows, starting at `position` of the endless stream."""
        found = np.empty(number, dtype=np.int64)
        done = 0
        while done < number:
            datasets, before = self._chunk_at(position + done)
            inside = (position + done) % self.CHUNK
            part = datasets[inside : inside + number - done]
            for dataset in np.unique(part).tolist():
                at = np.flatnonzero(part == dataset)
                first = int(before[dataset] + (datasets[:inside] == dataset).sum())
                found[done + at] = self.firsts[dataset] + np.array(self.orders[dataset].items(first, len(at)))
            done += len(part)
        return (found if self.rows is None else self.rows[found]).tolist()

    def counts(self, position: int) -> dict[str, int]:
        """Return how many of the rows before `position` come from each dataset."""
        datasets, before = self._chunk_at(position)
        counts = before + np.bincount(datasets[: position % self.CHUNK], minlength=len(self.names))
        return dict(zip(self.names, counts.tolist()))

    def _chunk_at(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset of each position of a chunk, and the rows of each dataset before the chunk."""
        chunk = position // self.CHUNK
        if self._cached is None or self._cached[0] != chunk:
            before = np.zeros(len(self.names), dtype=np.int64)
            datasets = self._deal(self.tree, chunk * self.CHUNK, self.CHUNK, before).reshape(-1, self.BLOCK)
            places = np.arange(chunk * self.CHUNK, (chunk + 1) * self.CHUNK, dtype=np.uint64)
            noise = _hashed(places, np.uint64(mixed(self.seed, "mixture"))).reshape(-1, self.BLOCK)
            datasets = np.take_along_axis(datasets, noise.argsort(axis=1, kind="stable"), axis=1).ravel()
            self._cached = chunk, datasets, before
        return self._cached[1], self._cached[2]

    def _deal(self, node: Any, first: int, number: int, before: np.ndarray) -> np.ndarray:
        """Return the datasets of `number` positions of a node, from its position `first` on. `before` gets its rows before `first`."""
        if isinstance(node, int):
            before[node] = first
            return np.full(number, node, dtype=np.int32)
        share, left, right = node
        done, rest = divmod(first * share + self.ONE // 2, self.ONE)  # exact: Python's integers have any size
        is_left = np.diff((rest + np.arange(number + 1) * share) // self.ONE) > 0
        datasets = np.empty(number, dtype=np.int32)
        datasets[is_left] = self._deal(left, done, int(is_left.sum()), before)
        datasets[~is_left] = self._deal(right, first - done, int((~is_left).sum()), before)
        return datasets

    def describe(self, num_rows: int) -> tuple[str, list[str]]:
        """Return what `num_rows` training rows consist of, and warnings about datasets that are seen too often or in part only."""
        epochs = {name: seen / size for (name, seen), size in zip(self.counts(num_rows).items(), self.sizes)}
        usual, mean_size = num_rows / sum(self.sizes), sum(self.sizes) / len(self.sizes)
        parts, warnings = [], []
        for share, size, (name, times) in zip(self.shares, self.sizes, epochs.items()):
            parts.append(f"{name}: {share * 100:.3g} % of the rows, {times:.3g} epochs of {size:,}")
            if times > max(4, 2 * usual):
                warnings.append(
                    f"{name}: its {size:,} rows are repeated {times:.1f} times. Give it a lower weight, or more rows."
                )
            elif times < 1 <= usual and size <= mean_size:
                warnings.append(
                    f"{name}: is small, and {1 - times:.0%} of its {size:,} rows are never used. Give it a higher weight."
                )
        return "; ".join(parts), warnings


Order = Shuffle | MixedShuffle


def require_items(dataset: Any) -> None:
    """Raise UserError for a dataset without a length or without items at any position, such as an iterable one."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"The dataset ({type(dataset).__name__}) needs __len__ and __getitem__, because a step reads its items by their "
            "positions after a restart and on any number of ranks. Use a map-style dataset, for example list(dataset)."
        )


class TrainBatches:
    """The micro-batches of each step, on this rank's device.

    Step `s` trains on items [s * G, (s + 1) * G) of the stream, where G is the global batch size. Neither a restart nor the
    number of ranks changes that. The stream continues from one epoch into the next, so no item is dropped or repeated at
    the end of an epoch.
    """

    knows_lengths = True  # of all items, before they are read
    state = ""  # what a checkpoint must contain to continue, if the step is not enough
    cost = BY_TOKENS  # of an item; `attach` sets it if it is known for the model
    shares_at: Callable[[int], Shares | None] = staticmethod(lambda step: None)  # of the ranks at a step; None: equal ones
    first: Callable[[int], int] | None = None  # returns the position at which a step begins; None: it is not yet asked for

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list], Any],
        fingerprint: str = "",
        lengths: Callable[[Any], np.ndarray | None] | None = None,
    ):
        """`fingerprint` identifies the content; a resumed run must have the same.

        `lengths(dataset)` returns the tokens of each item, by which the items of a step are spread evenly over micro-batches. If
        items have parts that are padded separately, such as source and target, it returns a column for each part. By default it
        counts the `input_ids` of each row of a `datasets` table.
        """
        require_items(dataset)
        self.dataset, self.collate, self._measure_lengths = dataset, collate, lengths or count_tokens
        self.identity: dict[str, Any] = {"items": len(dataset), "fingerprint": fingerprint}
        mixture = getattr(dataset, "mixture", None)
        self.mixture: Mixture | None = mixture if mixture and mixture.weights else None
        self._order: MixedShuffle | None = None
        if self.mixture:  # without names: renamed files have the same content
            self.identity["mixture"] = [[weight, size] for weight, size in zip(self.mixture.weights, self.mixture.sizes)]

    def __len__(self) -> int:
        return len(self.dataset)

    @functools.cached_property
    def part_lengths(self) -> np.ndarray | None:
        """The tokens of each part of each item, or None if they are not known without computing every item."""
        found = self._measure_lengths(self.dataset)
        return found if found is None else np.asarray(found).reshape(len(found), -1)

    @functools.cached_property
    def lengths(self) -> np.ndarray | None:
        """The tokens of each item, or None if they are not known."""
        return None if self.part_lengths is None else self.part_lengths.sum(1)

    def order(self, seed: int) -> Order:
        """Return which item each position of the stream has."""
        return self._mixed_order(seed) or Shuffle(len(self.dataset), seed)

    def _mixed_order(self, seed: int) -> MixedShuffle | None:
        if self.mixture and (self._order is None or self._order.seed != seed):
            self._order = MixedShuffle(self.mixture, seed)
        return self._order

    def total_steps(self, cfg: TrainConfig) -> int:
        """Return the number of steps of a run. Raise UserError for options that need other data."""
        for name in () if cfg.evaluate_only else ("micro_batch_tokens", "global_batch_tokens"):
            value, instead = getattr(cfg, name), name.replace("tokens", "size")
            if value and not (self.knows_lengths and self.lengths is not None):
                raise UserError(f"--{name} {value}: the tokens of an item are not known before it is read. Use --{instead}.")
        tokens, ranks = cfg.global_batch_tokens, this_rank.num_ranks
        if tokens and not cfg.evaluate_only and tokens < (needed := ranks * int(self.lengths.max())):
            reason = f"the longest item has {self.lengths.max():,} tokens, and each of {counted(ranks, 'rank')} needs an item"
            raise UserError(f"--global_batch_tokens {tokens}: {reason}. Use at least {needed}, or a smaller --max_length.")
        size = self.epoch_size(cfg)
        # The default may exceed few items.
        is_chosen = cfg.global_batch_tokens or cfg.global_batch_size != type(cfg).global_batch_size
        is_trial = cfg.steps or cfg.stop_after or cfg.evaluate_only or cfg.resume
        if is_chosen and not is_trial and cfg.step_size > size * max(1, 2 * cfg.epochs):
            text = f"a step would be {cfg.step_size / size:.3g} epochs of {counted(len(self), 'item')}, and --epochs is {cfg.epochs:g}"
            raise UserError(f"{_step_option(cfg)}: {text}. Use at most {size}, or give --steps instead of --epochs.")
        return cfg.total_steps(size)

    def epoch_size(self, cfg: TrainConfig) -> int:
        """Return the items of an epoch, or their tokens with `--global_batch_tokens`. A step has `cfg.step_size` of them."""
        if not cfg.global_batch_tokens or cfg.evaluate_only:
            return len(self)
        if not (order := self._mixed_order(cfg.seed)):
            return int(self.lengths.sum())
        tokens = np.bincount(self.mixture.numbers, self.lengths, minlength=len(order.sizes))
        return round(len(self) * float((tokens / order.sizes) @ order.shares))

    def mean_items(self, cfg: TrainConfig) -> float:
        """Return the items of a step, on average."""
        return cfg.global_batch_tokens * len(self) / self.epoch_size(cfg) if cfg.global_batch_tokens else cfg.global_batch_size

    def counts(self, step: int, cfg: TrainConfig) -> dict[str, int]:
        """Return the rows of each dataset of a mixture in the first `step` steps, as `rows/NAME`. Without a mixture it is empty."""
        order = self._mixed_order(cfg.seed)
        if not order:
            return {}
        position = self.first(step) if self.first else step * cfg.global_batch_size
        return {f"rows/{name}": number for name, number in order.counts(position).items()}

    def describe(self, total_steps: int, cfg: TrainConfig) -> tuple[str, list[str]]:
        """Return lines about how often the items are seen, and warnings."""
        rows = round(total_steps * self.mean_items(cfg))
        text = f"{total_steps} {plural(total_steps, 'step')} = {rows / len(self):.2f} epochs of {counted(len(self), 'item')}"
        text += f", about {self.mean_items(cfg):.1f} in each step" if cfg.global_batch_tokens else ""
        mixed_text, warnings = order.describe(rows) if (order := self._mixed_order(cfg.seed)) else ("", [])
        warnings = [f"--train_file: {warning}" for warning in warnings]
        if cfg.step_size > (size := self.epoch_size(cfg)):
            reason = f"a step has more than the {counted(len(self), 'item')} of the data, so items are repeated within a step"
            warnings.append(f"{_step_option(cfg)}: {reason}. Use at most {size}, or more data.")
        return "\n".join(filter(None, (text, mixed_text))), warnings

    def items(self, seed: int) -> Dataset:
        """Return the items of the stream, by (position in the stream, index in the dataset)."""
        return _SeededItems(self.by_index(), seed)

    def by_index(self) -> Any:
        """Return what has the items of the stream by their indices."""
        return self.dataset

    def starting_at(self, step: int, accelerator: Accelerator, cfg: TrainConfig, team: Team | None = None) -> Iterator[list[Any]]:
        """Yield the micro-batches of this rank for update `step` (from 0), or of each of its local workers, then for the next step.

        `team` are the ranks that compute the step; default: all.
        """
        if cfg.evaluate_only:
            raise UserError("--evaluate_only: this script has a training loop of its own. It has to call accel_ddp.train or fit.")
        parts, sharded = self.part_lengths if self.knows_lengths else None, plan_of(accelerator) is not None
        team = team or Team.of(accelerator)
        plan = StepPlan(self.order(cfg.seed), cfg, team.size, parts, self.cost, sharded)
        sampler, self.first = OwnMicroBatches(plan, step, team, self.shares_at), plan.first
        # Accelerate would deal equal micro-batches to ranks. Of what else it does, only the copies to the device are needed.
        loader = DataLoader(
            self.items(cfg.seed),
            batch_sampler=sampler,
            collate_fn=self.collate,
            **loader_options(cfg, accelerator),
        )
        on_device = lambda batch: send_to_device(batch, accelerator.device, non_blocking=accelerator.device.type == "cuda")
        with starting_workers(loader):
            micro_batches = map(on_device, loader)
            first = [next(micro_batches)]  # it is removed below: otherwise its memory would be held for the whole run
        while True:
            batches = [first.pop() if first else next(micro_batches)]
            batches += (next(micro_batches) for _ in range(sampler.numbers.popleft() - 1))
            yield batches
            del batches

    def sample(self, number: int, accelerator: Accelerator, cfg: TrainConfig, longest: bool = False) -> Any:
        """Return a micro-batch of the first items, or of the longest if lengths are known; the same on every rank.

        The longest ones include the longest of each part, to whose lengths the parts of all others are padded.
        """
        places = range(number)
        if longest and self.lengths is not None:
            order = np.argsort(-self.lengths, kind="stable")[:number].tolist()
            widest = self.part_lengths.argmax(0).tolist()
            places = list(dict.fromkeys([*widest, *order] if number > len(widest) else order))[:number]
        return self.batch_of([places[i % len(places)] % len(self.dataset) for i in range(number)], accelerator, cfg)

    def batch_of(self, indices: list[int], accelerator: Accelerator, cfg: TrainConfig) -> Any:
        """Return a micro-batch of these items of the dataset, for a trial; the same on every rank."""
        return self.to_device(self.read([*enumerate(indices)], cfg.seed), accelerator)

    def read(self, keys: list[tuple[int, int]], seed: int) -> Any:
        """Return a micro-batch in host memory, of items given by the position that seeds them and their index in the dataset."""
        return self.collate(_SeededItems(self.dataset, seed).__getitems__(keys))

    def to_device(self, batch: Any, accelerator: Accelerator) -> Any:
        """Return what `read` has returned as a micro-batch on the device."""
        return send_to_device(batch, accelerator.device)


def _step_option(cfg: TrainConfig) -> str:
    return f"--global_batch_{'tokens' if cfg.global_batch_tokens else 'size'} {cfg.step_size}"


def count_tokens(dataset: Any, columns: tuple[str, ...] = ("input_ids",)) -> np.ndarray | None:
    """Return the tokens in these columns of a `datasets` table; None for other datasets.

    The result has one number for each row, or a row of numbers: one for each column, or one for each text if rows have several.
    """
    if not _has_plain_rows(dataset) or not set(columns) <= set(dataset.column_names):
        return None
    sizes = [
        [_list_lengths(table[name].combine_chunks()) for name in columns]
        for table in dataset.select_columns(list(columns)).with_format("arrow").iter(10_000)
    ]
    found = [_join_lengths(of_one) for of_one in zip(*sizes)]
    return found[0] if len(found) == 1 else np.stack([of_one.reshape(len(of_one), -1).sum(1) for of_one in found], axis=1)


def _list_lengths(column: Any) -> list[np.ndarray]:
    """Return the length of each list of a column, and the lengths of nested lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = [column, pc.list_flatten(column)] if pa.types.is_nested(column.type.value_type) else [column]
    return [np.asarray(pc.list_value_length(some)) for some in lists]


def _join_lengths(parts: Sequence[list[np.ndarray]]) -> np.ndarray:
    """Return the lengths of all parts of a column: one for each row, or one for each nested list."""
    each, *more = (np.concatenate(arrays) for arrays in zip(*parts))
    if not more:
        return each
    inner = more[0]
    if len(each) and (each == each[0]).all():
        return inner.reshape(len(each), -1)
    sums, ends = np.concatenate([[0], np.cumsum(inner)]), np.cumsum(each)
    return sums[ends] - sums[ends - each]  # rows have different numbers of texts


class _SeededItems(Dataset):
    """Seeds each item by its position in the stream, so that random crops and masks do not depend on the rank or worker.

    The collate function is seeded by the position of the first item of the micro-batch.
    """

    def __init__(self, dataset: Any, seed: int):
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        position, index = key
        seed_host(mixed(self.seed, "item", position))
        return self.dataset[index]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        if _has_plain_rows(self.dataset):  # reading rows together is ten times faster
            items = self.dataset.__getitems__([index for _, index in keys])
        else:
            items = [self[key] for key in keys]
        seed_host(mixed(self.seed, "collate", keys[0][0]))  # the collate function is called next, in the same process
        return items


def _has_plain_rows(dataset: Any) -> bool:
    """Return whether this is a `datasets` table without a transform of the user, so that reading a row draws nothing random."""
    return type(dataset).__module__.startswith("datasets.") and dataset.format["type"] != "custom"
