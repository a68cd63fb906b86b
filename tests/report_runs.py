"""Writes folders of runs that have never trained, for tests of the page of `accel-ddp report` and for its picture.

A run has GPUs on several nodes, a rank that is slow for some time, a phase in which data loads slowly, a peak of the loss, a crash
and a restart, evaluations with tables, predictions and a profile. The numbers are invented.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

PARTS = ("forward", "backward", "optimizer", "data", "other")
SECONDS = np.array([0.031, 0.064, 0.006, 0.002, 0.003])
CLASSES = ("world", "sports", "business", "science", "health", "culture")
TEXTS = (
    "Shares of the airline fell after the report, while analysts expected a profit.",
    "The team won its third match in a row after a late goal in the final minutes.",
    "Researchers measured the temperature of a distant planet with a new telescope.",
)
GROUPS = ("correct", "wrong", "most confident error")
BEGAN = 1_790_000_000.0


def write_run(
    folder: Path, *, steps: int = 4000, every: int = 20, nodes: int = 4, gpus: int = 8, seed: int = 0, lr: float = 3e-4,
    level: float = 1.0, slow_rank: int = 13, classes: int = 6, ends: bool = True, text: str = "",
) -> Path:  # fmt: skip
    """Write a run. `text` is added to every text of the run: names of hosts, options, metrics, classes and so on."""
    random, num_ranks = np.random.default_rng(seed), nodes * gpus
    (folder / "tables").mkdir(parents=True)
    lines: list[dict[str, Any]] = [_start(steps, nodes, gpus, lr, text)]
    time, next_evaluation, restarted = BEGAN + 25, 0, False
    for step in range(every, steps + 1, every):
        done = step / steps
        own = SECONDS[:, None] * (1 + random.normal(size=(5, num_ranks)) * 0.015)
        own[:, slow_rank % num_ranks] *= 1.31 if 0.3 < done < 0.75 else 1
        own[3] *= 9 if 0.5 < done < 0.58 else 1
        seconds = float(own.sum(0).max()) + 0.009
        time += seconds * every
        if done > 0.62 and not restarted:
            restarted, time = True, time + 95
            lines.append({"event": "restart", "step": step - every, "time": time, "restart": 1, "lost_steps": 60, "lost_seconds": 95.0,
                          "failed_step": step + 40, "text": f"error: rank 5 (gpu-node-01) died without a message.{text}"})  # fmt: skip
        loss = (
            2.2 * math.exp(-4 * done) + 0.25 * level + random.normal() * 0.05 + (1.4 if abs(done - 0.35) < every / steps else 0)
        )
        norm = abs(random.normal(1 + 2 * math.exp(-6 * done), 0.2)) * (6 if abs(done - 0.35) < every / steps else 1)
        lines.append({"event": "update", "step": step, "time": time, "loss": loss, "grad_norm": norm, "items": 256,
                      "lr": lr * min(1, done / 0.06) * (1 - done), "samples_per_second": 256 / seconds, "tokens": 32768,
                      "tokens_per_second": 32768 / seconds, "mfu": 0.041 / seconds, "tflops": 33 / seconds})  # fmt: skip
        system = _system(random, num_ranks, gpus, done)
        lines.append({"event": "ranks", "step": step, "time": time, "first_step": step - every + 1, "last_step": step,
                      **{part: own[i].round(6).tolist() for i, part in enumerate(PARTS)},
                      "communication": (seconds - own.sum(0)).round(6).tolist(), "system": system})  # fmt: skip
        if step >= next_evaluation:
            next_evaluation, time = next_evaluation + steps // 40, time + 4
            accuracy = 1 - 0.75 * math.exp(-5 * done) - 0.06 * level + random.normal() * 0.004
            lines.append({"event": "evaluate", "step": step, "time": time, "loss": 2 * math.exp(-4 * done) + 0.3 * level,
                          "accuracy": accuracy, f"macro_f1{text}": accuracy - 0.03})  # fmt: skip
            lines.append({"event": "save", "step": step, "time": time + 3, "path": f"step_{step:08d}{text}"})
    path = f"tables/step_{steps:08d}.json"
    (folder / path).write_text(json.dumps(_tables(random, classes, text)))
    lines.append({"event": "tables", "step": steps, "time": time, "path": path, "names": ["confusion"]})
    if ends:
        lines.append({"event": "end", "step": steps, "time": time + 5, "metrics": {}, "skipped_steps": 2, "goodput": 0.953})
    incident = {"time": BEGAN + 0.35 * (time - BEGAN), "level": "warning", "kind": "SLOW_RANK", "rank": 13, "step": int(steps * 0.33),
                "host": f"gpu-node-02{text}", "text": f"rank 13 (gpu-node-02) is 31 % slower than the others, which wait 33 ms per "
                f"step for it.{text}"}  # fmt: skip
    advice = f"Increase --num_workers from 4 to 8: waiting for data takes 9 % of a step.{text}"
    profile = {"run": {"steps": [100, 104]}, "recommendations": [{"text": advice}], "findings": [],
               "overall": {"step_seconds": 0.133, "computation": 0.104, "communication": 0.052, "overlapped": 0.027, "exposed": 0.025},
               "operations": [{"name": f"ncclDevKernel_AllReduce{text}", "seconds": 0.0188, "share": 0.18, "count": 12}]}  # fmt: skip
    (folder / "profile").mkdir()
    (folder / "profile" / "summary.json").write_text(json.dumps(profile))
    (folder / "incidents.jsonl").write_text(json.dumps(incident) + "\n")
    (folder / "config.json").write_text(json.dumps({"steps": steps, "lr": lr, "seed": seed, f"dataset{text}": f"news{text}"}))
    (folder / "best.json").write_text(json.dumps({"metric": "accuracy", "step": steps, "value": 0.938}))
    (folder / ".lock").touch()
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(log, (time, time))  # a log that has just grown belongs to a run that continues
    return folder


def _start(steps: int, nodes: int, gpus: int, lr: float, text: str) -> dict[str, Any]:
    device = {"device": f"NVIDIA H100 80GB HBM3{text}", "memory": 85_000_000_000}
    ranks = [
        {"rank": rank, "node": rank // gpus, "host": f"gpu-node-{rank // gpus + 1:02d}{text}", **device}
        for rank in range(nodes * gpus)
    ]
    command = [
        "recipes/classify.py",
        "--dataset",
        f"news{text}",
        "--steps",
        str(steps),
        "--lr",
        str(lr),
        "--global_batch_size",
        "256",
    ]
    return {
        "event": "start", "step": 0, "time": BEGAN, "schema": 1, "total_steps": steps, "command": command, "ranks": ranks,
        "versions": {"python": "3.12.4", "torch": "2.9.0", "accelerate": "1.12.0", f"nccl{text}": f"2.27.5{text}"},
        "options": {"lr": [lr, 5e-5], "global_batch_size": [256, 32], f"dataset{text}": [f"news{text}", ""]},
        "environment": {"NCCL_SOCKET_IFNAME": "eth0", f"NCCL_DEBUG{text}": f"WARN{text}"}, "items": 120_000, "precision": "bf16",
        "batch": {"global": 256, "micro": 256 // (nodes * gpus), "accumulation": 1},
    }  # fmt: skip


def _system(random: np.random.Generator, num_ranks: int, gpus: int, done: float) -> dict[str, list[float]]:
    node = np.arange(num_ranks) // gpus
    busy = 0.94 - 0.02 * node + random.normal(size=num_ranks) * 0.02 - (0.25 if 0.5 < done < 0.58 else 0)
    return {
        "gpu_memory": (41e9 + 2e9 * (node % 2)).tolist(),
        "gpu_utilisation": busy.clip(0, 1).round(4).tolist(),
        "gpu_temperature": (61 + node + random.normal(size=num_ranks)).round(1).tolist(),
    }


def _tables(random: np.random.Generator, classes: int, text: str) -> dict[str, Any]:
    names = [CLASSES[i] + text if classes <= len(CLASSES) else f"class {i:02d}{text}" for i in range(classes)]
    counts = random.integers(0, 12, (classes, classes)) * (random.random((classes, classes)) < 0.5)
    counts += np.diag(random.integers(180, 420, classes))
    precision, recall = counts.diagonal() / counts.sum(0), counts.diagonal() / counts.sum(1)
    scores = [[name, float(precision[i]), float(recall[i]), int(counts[i].sum())] for i, name in enumerate(names)]
    samples = [
        [GROUPS[i % 3] + text, TEXTS[i % 3] + text, names[i % classes], names[(i + (i % 3 > 0)) % classes], 0.5 + 0.01 * i]
        for i in range(30)
    ]
    truth = random.normal(size=200)
    points = np.stack([truth, truth + random.normal(size=200) * 0.2], 1).round(4).tolist()
    matrix = [[name, *row] for name, row in zip(names, counts.tolist())]
    return {
        "confusion": {"columns": ["true", *names], "rows": matrix, "kind": "matrix", "title": f"Confusion matrix{text}"},
        f"scores{text}": {"columns": [f"class{text}", "precision", "recall", "support"], "rows": scores, "kind": "scores"},
        "numbers": {"columns": [f"true{text}", f"predicted{text}"], "rows": points, "kind": "points", "title": f"Ratings{text}"},
        "predictions": {"columns": ["group", f"text{text}", "true", "predicted", "confidence"], "rows": samples, "kind": "predictions",
                        "title": f"Sample predictions{text}"},
    }  # fmt: skip
