"""Train local workers on this number of ranks, and write the results to OUT. Tests compare numbers of ranks."""

import dataclasses
from pathlib import Path

import core
import torch

import accel_ddp
from accel_ddp.entry import run
from accel_ddp.ranks.agreement import broadcast_object
from accel_ddp.saving.checkpoint_format import MODEL, OPTIMIZER
from accel_ddp.saving.pieces import Pieces

WORKERS = {"sync_every": 3, "local_workers": 4, "dropout": 0.3, "micro_batch_size": 2}


def train(accelerator, cfg, name, **changes):
    """Return what `core.train` returns, and the tensors of the last checkpoint."""
    cfg = dataclasses.replace(cfg, output_dir=f"{cfg.output_dir}_{name}")
    result = core.train(accelerator, cfg, **WORKERS | changes)
    broadcast_object(None)
    path = sorted(Path(cfg.output_dir).glob("step_*"))[-1]
    groups = {group: Pieces(path, group) for group in (MODEL, OPTIMIZER)}
    tensors = {name: pieces.read(name) for pieces in groups.values() for name in pieces.tensors}
    return {**result, "tensors": tensors, "steps": sorted(p.name for p in Path(cfg.output_dir).glob("step_*"))}


def main(cfg: core.Config) -> None:
    accelerator = accel_ddp.start(cfg)
    results = {}
    results["straight"] = train(accelerator, cfg, "straight", save_every=2, keep_last=9)
    train(accelerator, cfg, "resumed", steps=6)
    results["resumed"] = train(accelerator, cfg, "resumed", resume="auto")
    results["float32"] = train(accelerator, cfg, "float32", dtype=torch.float32, sync_dtype="bfloat16", ema_decay=0.5)
    if accelerator.is_main_process:
        torch.save(results, cfg.out)


if __name__ == "__main__":
    run(core.Config, main)
