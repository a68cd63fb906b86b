"""Two gloo ranks compared with one process, and with HF Trainer in one process, on the same cores.

    python benchmarks/cpu.py --steps 24 --repeats 3

The job is `recipes/classify.py` with its defaults: MiniLM (22.7 million pretrained weights) on film reviews, in float32, with 16
texts of at most 128 tokens in a batch. All sides get the same rows in the same order. One process has the threads of all cores, and
two ranks have half of them each. The sides take turns, and ratios are computed within a turn, because the speed of a shared machine
varies. Turns do not help against another job that starts and stops. Therefore the CPU time of other processes is measured during
every run. If other processes used more than --quiet cores, the run is repeated, up to --tries times. A turn with a run that is
still not quiet is shown in brackets and not counted.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import vs_trainer

RECIPE = f"{vs_trainer.ROOT}/recipes/classify.py"
SIDES = {"two ranks": ["-m", "torch.distributed.run", "--nproc_per_node", "2", RECIPE], "one process": [RECIPE], "Trainer": []}


def prepare(work: Path, words: list[str]) -> str:
    """Write the tokens of the recipe to disk for Trainer. Return the folder of the model."""
    sys.path.append(str(vs_trainer.ROOT / "recipes"))
    import classify

    from accel_ddp.config.parsing import parse_config
    from accel_ddp.sources.models import locate

    cfg = parse_config(classify.Config, words)
    rows = classify.Task(cfg, None).rows[0]
    rows.save_to_disk(str(work / "train_tokens"))
    np.save(work / "train_lengths.npy", [len(ids) for ids in rows["input_ids"]])
    return str(locate(cfg.model, cfg.cache_dir))


def main(options: argparse.Namespace, work: Path) -> None:
    os.environ |= {"CUDA_VISIBLE_DEVICES": ""}
    os.environ |= vs_trainer.environment(work)
    batch, lr, never = 16, 1e-4, vs_trainer.NEVER
    values = {
        "steps": options.steps, "global_batch_size": batch, "micro_batch_size": batch, "max_length": 128, "lr": lr,
        "mixed_precision": "no", "log_every": 1, "eval_every": never, "save_every": never, "max_eval_items": batch,
    }  # fmt: skip
    words = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    words += ["--no_eval_first", *options.ours.split()]
    model = prepare(work, words)
    lengths = np.load(work / "train_lengths.npy")
    epochs = options.steps * batch // len(lengths) + 2
    np.save(work / "order.npy", vs_trainer.our_order(len(lengths), 0, epochs * len(lengths)))
    shared = {
        # The launcher of two ranks must wait for them: the CPU time of processes that nobody waits for is that of others.
        "leaves": False,
        "kind": "speed", "job": "cpu", "recipe": "classify", "flags": {}, "log_every": 1,
        "batch": batch, "steps": options.steps, "warm": options.warm, "seed": 0, "lr": lr,
        "warmup_steps": 0, "precision": "no", "data": str(work), "model": model,
        "order": str(work / "order.npy"),
    }  # fmt: skip
    turns: list[dict[str, Any]] = []
    for number in range(1, options.repeats + 1):
        turn = {}
        for side, command in SIDES.items():
            spec = {**shared, "variant": side, "command": [*command, *words]}
            for attempt in range(options.tries):
                folder = work / f"run-{number}-{side.replace(' ', '-')}-{attempt}"  # ranks of an earlier run may still write
                run = vs_trainer.run_ours if command else vs_trainer.run_trainer
                found = turn[side] = run(spec, folder, work, options.timeout)
                what = f"failed: {found['failed']}" if found["failed"] else f"{found['samples_per_second']:.2f} samples/s"
                print(f"turn {number}, {side}: {what}; other processes used {found['others_cores']:.2f} cores", flush=True)
                if found["failed"] or found["others_cores"] <= options.quiet:
                    break
        turns.append(turn)
        if options.out:
            options.out.write_text(json.dumps({"machine": vs_trainer.about_the_machine(), "turns": turns}, indent=1))
    print_table(turns, options.quiet)


def print_table(turns: list[dict[str, Any]], quiet: float) -> None:
    is_quiet = lambda turn: all(found["others_cores"] <= quiet for found in turn.values())
    print("\n| | samples/s | two ranks / this | in each turn |\n|---|---|---|---|")
    for side in SIDES:
        whole = [turn for turn in turns if not turn[side]["failed"] and not turn["two ranks"]["failed"]]
        if not whole:
            print(f"| {side} | failed: {turns[0][side]['failed'] or turns[0]['two ranks']['failed']} | | |")
            continue
        rate = lambda turn, side=side: turn[side]["samples_per_second"]
        ratio = lambda turn, rate=rate: turn["two ranks"]["samples_per_second"] / rate(turn)
        each = ", ".join(f"{ratio(turn):.2f}" if is_quiet(turn) else f"({ratio(turn):.2f})" for turn in whole)
        counted = [turn for turn in whole if is_quiet(turn)]
        middle = lambda value, some=counted: f"{statistics.median(map(value, some)):.2f}" if some else "no quiet turn"
        print(f"| {side} | {middle(rate)} | {middle(ratio)} | {each} |")
    print(f"Counted: {sum(map(is_quiet, turns))} of {len(turns)} turns, which were quiet.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="steps of each run, at least 10")
    parser.add_argument("--warm", type=int, default=4, help="steps before the measured ones")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quiet", type=float, default=0.15, help="cores that other processes may use during a run")
    parser.add_argument("--tries", type=int, default=3, help="how often a run is repeated until it is quiet")
    parser.add_argument("--ours", default="", help='further options of the recipe, for example "--padding_free off"')
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one run may take")
    parser.add_argument("--out", type=Path, help="a .json file for all results")
    options = parser.parse_args()
    if options.steps < 10 or not 0 < options.warm < options.steps:
        parser.error(
            f"--steps {options.steps} --warm {options.warm}: --steps must be at least 10, and --warm from 1 to --steps - 1"
        )
    with tempfile.TemporaryDirectory() as folder:
        main(options, Path(folder))
