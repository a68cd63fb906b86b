"""The training items as an endless shuffled stream. The step says where we are in it: nothing to save, nothing to replay."""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Dataset, Sampler

from accel_ddp.config import TrainConfig
from accel_ddp.seeds import mixed, seed_host
from accel_ddp.ranks.signals import leave_signals_to_the_rank


class Shuffle:
    """A different order of `num_items` items for each (seed, epoch), computed where it is needed.

    A keyed permutation of [0, 4^k) (a Feistel network), walked until it falls below `num_items`: any
    position of any epoch is found at once, and an epoch of a billion items costs no memory. 65,536
    positions are computed together, about 10 ms of numpy.
    """

    CHUNK, ROUNDS = 1 << 16, 8

    def __init__(self, num_items: int, seed: int):
        self.num_items, self.seed = num_items, seed
        self.half_bits = max(1, ((num_items - 1).bit_length() + 1) // 2)
        self._cached: tuple[tuple[int, int], np.ndarray] | None = None

    def at(self, position: int) -> int:
        """The item at `position` of the endless stream: all items in epoch 0's order, then in epoch 1's, ..."""
        return self.items(position, 1)[0]

    def items(self, position: int, number: int) -> list[int]:
        """The `number` items from `position` on."""
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
                noise = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)  # multiply and fold: a cheap good hash
                noise = (noise ^ (noise >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
                left, right = right, left ^ ((noise >> np.uint64(32)) & mask)
            values[outside] = (left << shift) | right
            outside = values >= self.num_items
        return values


class Sizes(NamedTuple):
    """What the host knows of a micro-batch of texts, so that nobody has to ask the device."""

    texts: int
    real: int  # tokens that are not padding
    squares: int  # the sum of the texts' squared lengths, as attention counts
    row: int  # of a row that holds them: a little more, so that there are few different ones
    longest: int  # at least as long as the longest text; few different ones
    targets: int  # labels that count, where each token has one
    room: int  # a little more than these


class Batch(dict):
    """A micro-batch by name, on the device; `sizes` where it is one of texts."""

    sizes: Sizes | None = None

    def __getattr__(self, name: str) -> Any:
        """`batch.input_ids`, as people of transformers write it."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class TrainBatches:
    """The micro-batches of each step, on this rank's device.

    Step `s` learns from items [s * G, (s + 1) * G) of the stream, where G is the global batch size. A
    restart or another number of ranks does not change that, so there is nothing to save. The stream
    goes from one epoch into the next: no item is dropped or repeated at an epoch's end.
    """

    def __init__(self, dataset: Any, collate: Callable[[list], Any], fingerprint: str = ""):
        """`fingerprint` is of the content: a resumed run must have the same."""
        self.dataset, self.collate = dataset, collate
        self.identity = {"items": len(dataset), "fingerprint": fingerprint}

    def __len__(self) -> int:
        return len(self.dataset)

    @functools.cached_property
    def lengths(self) -> np.ndarray | None:
        """Tokens of each item, where they can be had without reading them all."""
        if not _draws_nothing(self.dataset) or "input_ids" not in self.dataset.column_names:
            return None
        import pyarrow.compute as pc

        found = [pc.list_value_length(part["input_ids"]) for part in self.dataset.with_format("arrow").iter(10_000)]
        return np.concatenate([np.asarray(part.combine_chunks()) for part in found])

    def starting_at(self, step: int, accelerator: Accelerator, cfg: TrainConfig) -> Iterator[list[Any]]:
        micro, count = cfg.split(accelerator.num_processes)
        order = Shuffle(len(self.dataset), cfg.seed)
        stream = _GlobalMicroBatches(order, step, micro, count, accelerator.num_processes, self.lengths)
        loader = DataLoader(
            _SeededItems(self.dataset, cfg.seed),
            batch_sampler=stream,
            collate_fn=Counted(self.collate),
            **loader_options(cfg, accelerator),
        )
        micro_batches = iter(accelerator.prepare(loader))  # each rank gets its slice of every global micro-batch
        accelerator._dataloaders.pop()  # kept there, its workers would live until the process ends
        while True:
            yield [sized(next(micro_batches), accelerator.device) for _ in range(count)]

    def sample(self, number: int, accelerator: Accelerator, cfg: TrainConfig, longest: bool = False) -> Any:
        """A micro-batch of the first items, or of the longest where lengths are known; the same on every rank."""
        items = _SeededItems(self.dataset, cfg.seed, is_recorded=False)
        places = range(number)
        if longest and self.lengths is not None:
            places = np.argsort(-self.lengths, kind="stable")[:number].tolist()
        keys = [(place, places[place % len(places)] % len(self.dataset)) for place in range(number)]
        batch = Counted(self.collate)(items.__getitems__(keys))
        return sized(send_to_device(batch, accelerator.device), accelerator.device)


def loader_options(cfg: TrainConfig, accelerator: Accelerator) -> dict[str, Any]:
    """DataLoader settings that suit the device, unless the user chose others."""
    on_gpu = accelerator.device.type == "cuda"
    workers = cfg.num_workers
    if workers < 0:  # on CPU the cores are busy with training
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = max(1, min(4, (os.cpu_count() or 1) // local_ranks - 1)) if on_gpu else 0
    return {
        "num_workers": workers,
        "pin_memory": on_gpu if cfg.pin_memory is None else cfg.pin_memory,
        "prefetch_factor": cfg.prefetch_factor if workers else None,
        "persistent_workers": workers > 0,
        "worker_init_fn": leave_signals_to_the_rank if workers else None,
    }


class _GlobalMicroBatches(Sampler[list[tuple[int, int]]]):
    """(position in the stream, index in the dataset) of the items of all ranks' micro-batches, for ever.

    Where lengths are known, the items of a step are dealt out so that all of its micro-batches have about as many tokens:
    a step takes as long as its longest. Which items a step has does not change, and each micro-batch has as many.
    """

    drop_last = False  # asked for by Accelerate

    def __init__(self, order: Shuffle, step: int, micro: int, count: int, num_ranks: int, lengths: np.ndarray | None = None):
        self.order, self.step, self.lengths = order, step, lengths
        self.batch_size, self.groups = micro * num_ranks, count * num_ranks  # asked for by Accelerate; micro-batches of a step
        self.per_step = self.batch_size * count

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        step = self.step
        while True:
            first = step * self.per_step
            items = list(enumerate(self.order.items(first, self.per_step), start=first))
            if self.lengths is not None and self.groups > 1:
                items = _dealt_out(items, self.lengths, self.groups)
            for start in range(0, self.per_step, self.batch_size):
                yield items[start : start + self.batch_size]
            step += 1


def _dealt_out(items: list[tuple[int, int]], lengths: np.ndarray, groups: int) -> list[tuple[int, int]]:
    """Group after group, of as many items and about as many tokens each: the longest first, to and fro."""
    by_length = sorted(items, key=lambda item: (-lengths[item[1]], item[0]))
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(groups)]
    for turn, start in enumerate(range(0, len(by_length), groups)):
        for group, item in enumerate(by_length[start : start + groups]):
            dealt[group if turn % 2 == 0 else groups - 1 - group].append(item)
    return [item for group in dealt for item in sorted(group)]


class _SeededItems(Dataset):
    """Random crops and masks depend on the position in the stream, not on the rank or worker that draws them.

    What the collate function draws depends on the position of the micro-batch's first item.
    """

    def __init__(self, dataset: Any, seed: int, is_recorded: bool = True):
        self.dataset, self.seed = dataset, seed
        self.record = os.environ.get("ACCEL_DDP_RECORD_SAMPLES", "") if is_recorded else ""  # a folder; set by `accel-ddp verify`

    def __getitem__(self, key: tuple[int, int]) -> Any:
        position, index = key
        seed_host(mixed(self.seed, "item", position))
        return self.dataset[index]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        if self.record:
            with open(f"{self.record}/{os.environ.get('RANK', '0')}-{os.getpid()}.txt", "a") as file:
                file.write("".join(f"{position} {index}\n" for position, index in keys))
        if _draws_nothing(self.dataset):  # then rows are read together, which is ten times faster
            items = self.dataset.__getitems__([index for _, index in keys])
        else:
            items = [self[key] for key in keys]
        seed_host(mixed(self.seed, "collate", keys[0][0]))  # called next, in the same process
        return items


_COUNTS = "_counts"


class Counted:
    """Counts the tokens of a micro-batch where it is made, on the host."""

    def __init__(self, collate: Callable[[list], Any]):
        self.collate = collate

    def __call__(self, rows: list) -> Any:
        batch = self.collate(rows)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if mask is None or mask.ndim < 2:
            return batch
        labels = batch.get("labels")
        targets = int((labels != -100).sum()) if labels is not None and labels.ndim == 2 else 0
        lengths = mask.sum(-1)
        return {**batch, _COUNTS: (lengths.numel(), int(lengths.sum()), int((lengths**2).sum()), mask.shape[-1], targets)}


def sized(batch: Any, device: torch.device) -> Any:
    if not isinstance(batch, Mapping) or _COUNTS not in batch:
        return batch
    found = Batch(batch)
    texts, real, squares, width, targets = found.pop(_COUNTS)
    on_gpu = device.type == "cuda"
    row = _rounded(real) if on_gpu else real
    # What remains of the row is computed like a text, so it must not be longer than the longest.
    longest = max(1 << max(0, width - 1).bit_length(), 1 << (row - real).bit_length()) if on_gpu else width
    found.sizes = Sizes(texts, real, squares, row, longest, targets, _rounded(targets) if on_gpu else max(1, targets))
    return found


def _rounded(number: int) -> int:
    """Up, by a sixteenth at most on average: a recording is made of every length that occurs."""
    grain = max(64, 1 << max(0, (number // 8).bit_length() - 1))
    return max(1, -(-number // grain)) * grain


def _draws_nothing(dataset: Any) -> bool:
    """Rows of a `datasets` table without a transform of the user's."""
    return type(dataset).__module__.startswith("datasets.") and dataset.format["type"] != "custom"
