"""A checkpoint is a folder that either is whole or is not there: weights, optimizer, scaler and the step."""

import json
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_model, save_model
from torch import nn

from accel_ddp import world
from accel_ddp.config import TrainConfig, UserError, as_plain_dict


def all_of(output_dir: str) -> list[Path]:
    """Oldest first."""
    return sorted(Path(output_dir).glob("step_????????"))


def save(accelerator: Accelerator, cfg: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Path:
    """Written by the main rank. The others need not wait here: the next reduction waits for all."""
    final = Path(cfg.output_dir) / f"step_{step:08d}"
    if not accelerator.is_main_process or final.exists():
        return final
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_model(accelerator.unwrap_model(model), str(partial / "model.safetensors"))
    scaler = accelerator.scaler.state_dict() if accelerator.scaler else None
    torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler}, partial / "optimizer.pt")
    (partial / "run.json").write_text(json.dumps({"step": step, "config": as_plain_dict(cfg)}, indent=2))
    partial.rename(final)  # from here on the checkpoint exists
    for old in all_of(cfg.output_dir)[: -cfg.keep_last]:
        shutil.rmtree(old)
    return final


def restore(accelerator: Accelerator, cfg: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load what `--resume` names, on every rank; return the step to go on from: 0 where there is nothing."""
    if not cfg.resume:
        return 0
    # Rank 0 decides and the others follow, or two nodes with disks of their own would go on from different steps.
    found = [Path(cfg.resume)] if cfg.resume != "auto" else all_of(cfg.output_dir)
    path = world.agreed(found[-1] if found else None)
    if path is None:
        return 0
    with world.together("find the checkpoint") as facts:
        if not (path / "run.json").is_file():
            raise UserError(
                f"--resume: {world.HOST} has no checkpoint {path}. Copy it there, or use a folder that all nodes share."
            )
        facts["the checkpoints"] = (path / "run.json").read_text()
    load_model(accelerator.unwrap_model(model), str(path / "model.safetensors"))
    state = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    if accelerator.scaler and state["scaler"]:
        accelerator.scaler.load_state_dict(state["scaler"])
    return json.loads((path / "run.json").read_text())["step"]
