"""Train with each loss of recipes/dpo.py on this number of ranks, and write weights and numbers to OUT. Tests compare them."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.entry import run
from accel_ddp.ranks import shards
from accel_ddp.ranks.agreement import broadcast_object

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import dpo

RUNS = {  # name -> options
    "dpo": {"label_smoothing": 0.1, "sft_weight": 0.2, "reference": "stored"},
    "ipo": {"reference": "copy"},
    "orpo": {}, "simpo": {}, "kto": {"undesirable_weight": 2.0, "sft_weight": 1.0, "reference": "copy"},
    "dpo with adapters": {"lora_r": 2, "reference": "adapters", "lr": 1.0},
}  # fmt: skip


@dataclass(kw_only=True)
class Config(dpo.Config):
    out: str = option("", "file for the results", group="data", affects_result=False)
    only: str = option("", "train with this loss only", group="data", affects_result=False)


class History(accel_ddp.hooks.Hook):
    def __init__(self):
        self.numbers = []

    def on_update(self, numbers, pace):
        self.numbers.append({"loss": numbers.loss, **numbers.means})


def train(accelerator, cfg, steps, **changes) -> dict:
    """Return the weights, the numbers of each step, and the metrics."""
    cfg = dataclasses.replace(cfg, steps=steps, **changes)
    task, history = dpo.Task(cfg, accelerator), History()
    model = accel_ddp.load_model(task)
    train, test = task.batches()
    parts = {"task": task, "model": model, "optimizer": accel_ddp.optim.build(model, cfg), "train": train, "test": test}
    outcome = accel_ddp.fit(accelerator, cfg, **parts, hooks=[history])
    trained = {name: shards.full(p.detach()).clone() for name, p in model.named_parameters() if p.requires_grad}
    return {"weights": trained, "numbers": history.numbers, "metrics": outcome.metrics}


def main(cfg: Config) -> None:
    accelerator, results = accel_ddp.start(cfg), {}
    for name, options in RUNS.items():
        if cfg.only not in ("", name):
            continue
        more = {**options, "loss": name.split()[0], "output_dir": f"{cfg.output_dir}/{name}".replace(" ", "_")}
        results[name] = train(accelerator, cfg, 4, **more)
        more["output_dir"] += "_again"
        train(accelerator, cfg, 2, **more)
        broadcast_object(None)  # all ranks wait until the main rank has written the checkpoint
        results[f"{name}, resumed"] = train(accelerator, cfg, 4, **more, resume="auto")
    if accelerator.is_main_process:
        torch.save(results, cfg.out)


if __name__ == "__main__":
    run(Config, main)
