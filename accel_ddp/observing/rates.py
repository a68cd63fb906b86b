"""The rates of an update, as log.jsonl and the trackers name them."""

from accel_ddp.training.late_reader import Numbers
from accel_ddp.training.throughput import Pace


def rates_of(numbers: Numbers, pace: Pace) -> dict[str, float]:
    """Return tokens, tokens/s, TFLOP/s and MFU, without those that are not known."""
    known = {
        "tokens": numbers.tokens,
        "tokens_per_second": round(pace.tokens, 1),
        "tflops": float(f"{pace.flops / 1e12:.4g}"),
    }
    known = {name: value for name, value in known.items() if value}
    return known | ({"mfu": round(pace.mfu, 5)} if pace.mfu is not None else {})
