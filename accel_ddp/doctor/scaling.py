"""The expected duration of a training step on more nodes, from a measured bandwidth and latency."""

import math

BUCKET_BYTES = 25e6  # of DDP
# Assumed if the model and the duration of a step are not given: BERT-base in fp32, and this share of the measured FLOP/s.
PARAMETERS, ITEMS, TOKENS, UTILISATION = 110_000_000, 8, 128, 0.4


def expected_step(num_nodes: int, ranks: int, size: float, compute: float, bus: float, hop: float) -> dict[str, float]:
    """Return the expected times of a step, and the share of it in which a rank computes.

    `size` is the bytes of gradients, `compute` the seconds of computing per step, `bus` the bus bandwidth in bytes per second
    and `hop` the seconds of one hop in the ring. `worst` is the share if nothing overlaps, `best` if communication is hidden
    behind the backward pass.
    """
    communication = 2 * (ranks - 1) / ranks * size / bus + 2 * (ranks - 1) * hop * math.ceil(size / BUCKET_BYTES)
    exposed = max(0.0, communication - compute * 2 / 3)  # the backward pass is two thirds of the computing
    shares = {"worst": compute / (compute + communication), "best": compute / (compute + exposed)}
    return {"nodes": num_nodes, "ranks": ranks, "communication_seconds": communication, "compute_seconds": compute, **shares}


def format_si(value: float) -> str:
    """Return a number with three digits and the letter of a unit, for example `12.3 G`."""
    units = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1, "m": 1e-3, "u": 1e-6}
    letter = next((letter for letter, unit in units.items() if value >= unit), "u")
    return f"{value / units[letter]:.3g} {letter}"
