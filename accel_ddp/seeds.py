"""Seeds that are mixed, not added.

With `seed + epoch`, seed 42 in epoch 1 is seed 43 in epoch 0. Here every purpose, epoch, step and
position gets a stream of its own.
"""

import hashlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def mixed(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed that depends on all of its arguments and on nothing else, on any machine."""
    text = "/".join([str(seed), purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_host(seed: int) -> None:
    """What Python, numpy and torch draw on the CPU goes on from here, whatever was drawn before."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_torch(seed: int, device: "torch.device") -> None:
    """Seed what a model on `device` draws from. `torch.manual_seed` does it for every kind of device that
    exists, which takes a hundred times as long: worth it once, not in every micro-batch.
    """
    import torch

    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
    torch.default_generator.manual_seed(seed)
