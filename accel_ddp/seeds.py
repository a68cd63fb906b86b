"""Seeds that are hashed, not added.

With `seed + epoch`, seed 42 in epoch 1 equals seed 43 in epoch 0. Here every purpose, epoch, step and position has its own
random stream.
"""

import contextlib
import hashlib
import pickle
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def mixed(seed: int, purpose: str, *numbers: int) -> int:
    """Return a 63-bit seed that depends on all arguments and on nothing else, on any machine."""
    text = "/".join([str(seed), purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_host(seed: int) -> None:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_torch(seed: int, device: "torch.device") -> None:
    """Seed the generators of `device` and of the CPU. `torch.manual_seed` seeds all kinds of devices, in 100 times the time."""
    import torch

    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
    torch.default_generator.manual_seed(seed)


def seed_forward(seed: int, device: "torch.device") -> None:
    """Seed what a forward pass may draw with torch, numpy and Python. It takes 0.03 ms."""
    seed_host(seed)
    seed_torch(seed, device)


def generator_states(device: "torch.device | None" = None) -> bytes:
    """Return the states of the generators that `seed_forward` seeds."""
    import numpy
    import torch

    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device and device.type == "cuda" else [])]
    return pickle.dumps((random.getstate(), numpy.random.get_state(), [state.numpy() for state in states]))


@contextlib.contextmanager
def generators_kept(device: "torch.device | None" = None) -> Iterator[None]:
    """Restore the generators of Python, numpy, torch and of a GPU at the end of the block."""
    import numpy
    import torch

    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device and device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


def dropout_seed(step_seed: int, micro_batch: int, rank: int, num_ranks: int) -> int:
    """Return the seed of dropout for a micro-batch by its place among those of all ranks, however many ranks there are."""
    return mixed(step_seed, "dropout", micro_batch * num_ranks + rank)
