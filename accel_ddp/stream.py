"""The training items as an endless shuffled stream. The step says where we are in it: nothing to save, nothing to replay."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, Sampler

from accel_ddp.config import TrainConfig
from accel_ddp.seeds import mixed, seed_host
from accel_ddp.stop import leave_signals_to_the_rank


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

    def starting_at(self, step: int, accelerator: Accelerator, cfg: TrainConfig) -> Iterator[list[Any]]:
        micro, count = cfg.split(accelerator.num_processes)
        stream = _GlobalMicroBatches(
            Shuffle(len(self.dataset), cfg.seed), first=step * cfg.global_batch_size, batch_size=micro * accelerator.num_processes
        )
        loader = DataLoader(
            _SeededItems(self.dataset, cfg.seed),
            batch_sampler=stream,
            collate_fn=self.collate,
            **loader_options(cfg, accelerator),
        )
        micro_batches = iter(accelerator.prepare(loader))  # each rank gets its slice of every global micro-batch
        accelerator._dataloaders.pop()  # kept there, its workers would live until the process ends
        while True:
            yield [next(micro_batches) for _ in range(count)]


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
    """(position in the stream, index in the dataset) of the items of all ranks' micro-batches, for ever."""

    drop_last = False  # asked for by Accelerate

    def __init__(self, order: Shuffle, first: int, batch_size: int):
        self.order, self.first, self.batch_size = order, first, batch_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        position = self.first
        while True:
            yield list(enumerate(self.order.items(position, self.batch_size), start=position))
            position += self.batch_size


class _SeededItems(Dataset):
    """Random crops and masks depend on the position in the stream, not on the rank or worker that draws them.

    What the collate function draws depends on the position of the micro-batch's first item.
    """

    def __init__(self, dataset: Any, seed: int):
        self.dataset, self.seed = dataset, seed
        self.record = os.environ.get("ACCEL_DDP_RECORD_SAMPLES", "")  # a folder; set by `accel-ddp verify`

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


def _draws_nothing(dataset: Any) -> bool:
    """Rows of a `datasets` table without a transform of the user's."""
    return type(dataset).__module__.startswith("datasets.") and dataset.format["type"] != "custom"
