"""The facts about a run that its log begins with: the ranks and their devices, the versions, and the options that were given."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp import compat, phases
from accel_ddp.config.train_config import TrainConfig, as_plain_dict
from accel_ddp.engine.step_numbers import RankSample
from accel_ddp.nodes.launcher import find_launcher_command
from accel_ddp.phases import COMPILE
from accel_ddp.ranks.agreement import gather_objects
from accel_ddp.ranks.process import links, this_rank
from accel_ddp.records.redaction import redact_command, redact_values
from accel_ddp.saving.state_tensors import versions

# Variables that change how a run computes or communicates. Others, which may be private, are not recorded.
VARIABLES = ("NCCL_", "TORCH_", "CUDA_", "OMP_", "MKL_", "GLOO_", "PYTORCH_", "ACCELERATE_", "ACCEL_DDP_", "SLURM_JOB_", "FI_")


def describe_run(
    accelerator: Accelerator, cfg: TrainConfig, num_items: int, mean_items: float, model: nn.Module, eval_rows: dict[str, Any]
) -> dict[str, Any]:
    """Return the facts on the main rank, and {} on the others. `mean_items` are those of a step. This is a collective."""
    on_gpu = accelerator.device.type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    memory = torch.cuda.get_device_properties(accelerator.device).total_memory if on_gpu else 0
    place = {"rank": this_rank.rank, "node": links.node, "host": this_rank.host, "pid": os.getpid(), "device": device}
    ranks = gather_objects(place | ({"memory": memory} if memory else {}))
    if not ranks:
        return {}
    micro, count = cfg.split(accelerator.num_processes)
    launcher = redact_command(find_launcher_command())
    return {
        "command": redact_command(sys.argv),
        **({"launcher": launcher} if launcher else {}),
        "ranks": ranks,
        "versions": versions(),
        "options": changed_options(cfg),
        "environment": redact_values({
            name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)
        }),
        "batch": {"global": mean_items, "micro": micro, "accumulation": count},
        "items": num_items,
        "precision": accelerator.mixed_precision,
        **({"sharding": links.sharding.facts(accelerator.num_processes)} if links.sharding else {}),
        "model": describe_model(model),
        **({"memory": links.memory} if links.memory else {}),
        **({"eval_rows": eval_rows} if eval_rows else {}),
    }  # fmt: skip


def describe_model(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters, the number of those that are trained, and the bytes of their gradients."""
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    return {
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in trained),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in trained),
    }


def measure_memory(device: torch.device, ranks: Sequence[RankSample]) -> dict[str, int]:
    """Return the largest peak of all ranks, and its estimate if there is one, in bytes. {}: there is no GPU.

    `ranks` are the last samples of all ranks. The host does not wait for the GPU.
    """
    if device.type != "cuda":
        return {}
    measured = max(torch.cuda.max_memory_allocated(device), *(int(rank.gpu_memory) for rank in ranks if rank.gpu_memory > 0), 0)
    return {"measured": measured} | {key: links.memory[key] for key in ("estimated", "micro_batch_size") if key in links.memory}


def describe_memory(found: dict[str, int]) -> str:
    """Return the line about memory that a run prints at its end."""
    estimated = f", and {found['estimated'] / 2**30:.1f} GiB were estimated" if "estimated" in found else ""
    for_one = " for micro-batches of 1 item" if "micro_batch_size" in found else ""  # --micro_batch_size auto has chosen more
    return f"peak of GPU memory: {found['measured'] / 2**30:.1f} GiB{estimated}{for_one}."


def changed_options(cfg: TrainConfig) -> dict[str, list[Any]]:
    """Return the options that differ from their defaults, each as [value, default]."""
    values = redact_values(as_plain_dict(cfg))
    defaults = {}
    for field in dataclasses.fields(cfg):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        defaults[field.name] = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return {
        name: [value, None if defaults[name] is dataclasses.MISSING else defaults[name]]
        for name, value in values.items()
        if value != defaults[name]
    }


def compilations_published() -> contextlib.AbstractContextManager:
    """Return a context that enters the phase `compile` during each compilation, which may take minutes in the middle of a step."""
    interrupted: list[Any] = []  # compilations may be nested

    def begin(*_: Any) -> None:
        interrupted.append(phases.phase(COMPILE))
        interrupted[-1].__enter__()

    return compat.compile_callbacks(begin, lambda *_: interrupted.pop().__exit__(None, None, None))
