"""How much faster an evaluation is without padding: `accel_ddp.evaluate` with --padding_free on and off.

    python benchmarks/evaluation.py
    python benchmarks/evaluation.py --texts 4096 --rounds 20      # on a GPU

A classifier of MiniLM's size (6 layers of 384, random weights) evaluates texts of mixed lengths: lognormal, with a mean of 48 and
at most 128 tokens. Both models have the same weights and take turns in one process. The ratio is computed within each round, so
that a machine that slows down slows both. On a CPU that other jobs share, the CPU time is the better measure.
"""

import argparse
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `accel_ddp.run` sets it; torch reads it when it is imported

import numpy as np
import synthetic
import torch
from accelerate import Accelerator
from transformers import BertConfig, BertForSequenceClassification

import accel_ddp
from accel_ddp.engine.rows import Collate, Rows

CLASSES = 4
FAMILY = synthetic.Family(
    30522,
    {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    rows=0,
    max_length=128,
    mean_length=48,
)


def collate(rows: list[np.ndarray]) -> Rows:
    make = Collate(multiple=8 if torch.cuda.is_available() else 0)
    return make([{"input_ids": row.tolist(), "labels": int(row[0]) % CLASSES} for row in rows])


def logits(model: Any, batch: Any) -> torch.Tensor:
    return model(batch).logits


class Task(accel_ddp.Task):
    def terms(self, model: Any, batch: Any, team: Any) -> dict[str, torch.Tensor]:
        return {"loss": accel_ddp.losses.cross_entropy(logits(model, batch), batch["labels"], "none")}


class Side:
    """A model with --padding_free on or off, and its evaluation."""

    def __init__(self, accelerator: Accelerator, texts: list[np.ndarray], batch_size: int, padding_free: str):
        cfg = accel_ddp.TrainConfig(padding_free=padding_free, compile="off", num_workers=0)
        torch.manual_seed(0)
        shape = {**FAMILY.shape, "vocab_size": FAMILY.vocabulary, "num_labels": CLASSES}
        self.accelerator, self.model = accelerator, BertForSequenceClassification(BertConfig(**shape)).to(accelerator.device)
        train = accel_ddp.TrainBatches(texts, collate)
        self.terms = accel_ddp.Terms(self.model, Task())
        speed = accel_ddp.attach(accelerator, cfg, self.terms, train, total_steps=1)
        assert (speed.padding_free is not None) == (padding_free == "on")
        self.batches = accel_ddp.EvalBatches(texts, collate, batch_size, accelerator, cfg)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def evaluate(self) -> float:
        """Return the loss, and append the times of the evaluation to `seconds` and `cpu_seconds`."""
        began, cpu_began = time.perf_counter(), time.process_time()
        loss = accel_ddp.evaluate(self.accelerator, self.terms, self.batches)["loss"]
        self.seconds.append(time.perf_counter() - began)
        self.cpu_seconds.append(time.process_time() - cpu_began)
        return loss


def main(options: argparse.Namespace) -> None:
    accelerator = Accelerator()
    rng = np.random.default_rng(0)
    lengths = synthetic.lengths_of_texts(rng, options.texts, FAMILY)
    texts = [rng.integers(1000, FAMILY.vocabulary, length) for length in lengths]
    sides = {option: Side(accelerator, texts, options.batch, option) for option in ("on", "off")}
    batches = [lengths[start : start + options.batch] for start in range(0, len(lengths), options.batch)]
    padded = sum(len(batch) * batch.max() for batch in batches)
    print(
        f"{len(texts)} texts, {lengths.sum():,} tokens; with padding {padded:,} positions, {padded / lengths.sum():.2f} as many"
    )
    losses = {option: side.evaluate() for option, side in sides.items()}  # not counted: the first one allocates memory
    assert abs(losses["on"] - losses["off"]) < 1e-4 * abs(losses["off"]), losses
    for number in range(1, options.rounds + 1):
        for option in ("on", "off") if number % 2 else ("off", "on"):
            sides[option].evaluate()
        on, off = (sides[option].seconds[-1] for option in ("on", "off"))
        print(f"round {number}: {on:.3f} s padding-free, {off:.3f} s padded, ratio {off / on:.2f}", flush=True)
    report("seconds", sides["on"].seconds[1:], sides["off"].seconds[1:])
    report("CPU seconds", sides["on"].cpu_seconds[1:], sides["off"].cpu_seconds[1:])


def report(unit: str, on: list[float], off: list[float]) -> None:
    ratios = [b / a for a, b in zip(on, off)]
    print(f"medians of {len(on)} rounds: {statistics.median(on):.3f} {unit} padding-free, {statistics.median(off):.3f} padded; ratio "
          f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32, help="texts in a batch")
    parser.add_argument("--rounds", type=int, default=9)
    main(parser.parse_args())
