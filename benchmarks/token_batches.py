"""Measure what --micro_batch_tokens saves: the time of each rank's share of a step, computed alone on this device.

    python benchmarks/token_batches.py --ranks 2 4 --steps 6
    python benchmarks/token_batches.py --ranks 2 8 --planned 200    costs of the plans for a 1.4B decoder; nothing is computed

A step takes as long as its slowest rank, so its time is the largest of all ranks. Variants take turns, step by step, and the same
items are computed by each. On a GPU, times are those of CUDA events, and on a CPU, seconds of the processor on one thread, because
other programs then matter less. The last column compares the cost model with the measured times of all micro-batches.
"""

import argparse
import dataclasses
import statistics
import time
from types import SimpleNamespace

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from accel_ddp import TrainBatches, TrainConfig, attach, losses
from accel_ddp.engine.rows import Collate
from accel_ddp.engine.terms import Terms
from accel_ddp.training.step_plan import Cost, StepPlan
from accel_ddp.training.stream import Shuffle

KINDS = {
    "short": (5.0, 0.6, 512),
    "varied": (5.8, 0.7, 1024),
    "long tail": (6.3, 1.2, 8192),
}  # log-normal lengths, and the longest


collate = Collate(("labels",), 8 if torch.cuda.is_available() else 0, is_causal=True)


def loss_sum(model, batch):
    return losses.cross_entropy(model(batch).logits[0], batch["labels"])


def print_planned(kind: str, lengths: np.ndarray, ranks: int, steps: int) -> None:
    """Print how much more the slowest rank has to compute than the mean of all ranks, with 8 items for each rank."""
    cost = Cost(6 * 1.3e9, 12 * 28 * 1536 / 2, pads=False)
    cfg = TrainConfig(global_batch_size=8 * ranks)
    by_tokens = dataclasses.replace(cfg, micro_batch_tokens=10**9)
    plans = {"items": (cfg, False), "equal numbers of items, by cost": (by_tokens, True), "tokens": (by_tokens, False)}
    texts = []
    for name, (options, is_sharded) in plans.items():
        plan = StepPlan(Shuffle(len(lengths), 0), options, ranks, lengths[:, None], cost, is_sharded)
        load = lambda batches: sum(cost.of(lengths[[index for _, index in batch], None]).sum() for batch in batches)
        loads = np.array([[load(plan.of_rank(step, rank)) for rank in range(ranks)] for step in range(steps)])
        texts.append(f"{name} {(loads.max(1) / loads.mean(1)).mean():.3f}")
    print(f"{kind:>9}  mean {lengths.mean():.0f} of {lengths.max()} tokens, {ranks} ranks, slowest / mean: {', '.join(texts)}")


def seconds(model, batch, device) -> float:
    """Return the time of a forward and backward pass. The second of two counts: the first may capture CUDA graphs."""
    for _ in range(2 if device.type == "cuda" else 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter() if device.type == "cuda" else time.process_time()
        loss_sum(model, batch).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent = (time.perf_counter() if device.type == "cuda" else time.process_time()) - began
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32, help="items of a step")
    parser.add_argument("--micro", type=int, default=8, help="items of a micro-batch; in tokens: so many of mean length")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths, for CPUs")
    parser.add_argument("--planned", type=int, default=0, metavar="STEPS", help="print the costs of the plans of so many steps")
    given = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    torch.manual_seed(0)
    shape = {"num_attention_heads": given.hidden // 64, "num_key_value_heads": max(1, given.hidden // 192), "vocab_size": 49152}
    config = LlamaConfig(
        hidden_size=given.hidden, num_hidden_layers=given.layers, intermediate_size=8 * given.hidden // 3, **shape
    )
    config.vocab_size = 49152 if accelerator.device.type == "cuda" else 512
    for kind in given.kinds:
        mean, spread, longest = KINDS[kind]
        drawn = np.random.default_rng(0)
        lengths = (given.scale * np.clip(drawn.lognormal(mean, spread, 4000), 16, longest)).astype(int)
        if given.planned:
            for ranks in given.ranks:
                print_planned(kind, lengths, ranks, given.planned)
            continue
        texts = [drawn.integers(0, 500, n).tolist() for n in lengths]
        rows = Dataset.from_dict({"input_ids": texts, "labels": texts})
        model, train = LlamaForCausalLM(config), TrainBatches(rows, collate)
        cfg = TrainConfig(global_batch_size=given.batch, micro_batch_size=given.micro, compile="auto")
        task = SimpleNamespace(terms=lambda model, batch, team: {"loss": (loss_sum(model, batch), 1)}, count=lambda batch: 1)
        attach(accelerator, cfg, Terms(model, task), train, total_steps=1)
        model = accelerator.prepare(model)
        tokens = max(int(lengths.mean() * given.micro), int(lengths.max()))
        by_tokens = dataclasses.replace(cfg, micro_batch_tokens=tokens)
        for ranks in given.ranks:
            plans = {name: StepPlan(train.order(0), one, ranks, train.part_lengths, train.cost) for name, one in
                     (("items", cfg), ("tokens", by_tokens))}  # fmt: skip
            times = {name: [] for name in plans}
            means, costs, measured = {name: [] for name in plans}, [], []
            for step in range(given.steps + 1):
                for name, plan in plans.items():
                    of_rank = []
                    for rank in range(ranks):
                        spent = 0.0
                        for batch in plan.of_rank(step, rank):
                            places = [index for _, index in batch]
                            took = seconds(model, train.batch_of(places, accelerator, cfg), accelerator.device)
                            costs.append(train.cost.of(train.part_lengths[places]).sum())
                            measured.append(took)
                            spent += took
                        of_rank.append(spent)
                        model.zero_grad()
                    times[name].append(max(of_rank))
                    means[name].append(sum(of_rank) / ranks)
            ratios = [a / b for a, b in zip(times["items"][1:], times["tokens"][1:])]
            over = {name: sum(times[name][1:]) / sum(means[name][1:]) for name in plans}
            print(
                f"{kind:>9}  mean {lengths.mean():.0f} of {lengths.max()} tokens, {ranks} ranks, {given.batch} items per step: "
                f"{given.micro} items {1e3 * statistics.mean(times['items'][1:]):.1f} ms ({over['items']:.3f} of balanced), "
                f"{tokens} tokens {1e3 * statistics.mean(times['tokens'][1:]):.1f} ms ({over['tokens']:.3f}), ratio "
                f"{sum(times['items'][1:]) / sum(times['tokens'][1:]):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
                f"cost model r={np.corrcoef(costs, measured)[0, 1]:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
