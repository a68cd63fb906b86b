"""Seeds that are mixed, not added.

With `seed + epoch`, seed 42 in epoch 1 is seed 43 in epoch 0. Here every purpose, epoch, step and
position gets a stream of its own.
"""

import hashlib
import random


def mixed(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed that depends on all of its arguments and on nothing else, on any machine."""
    text = "/".join([str(seed), purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Python, numpy and torch go on from here, whatever was drawn before."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
