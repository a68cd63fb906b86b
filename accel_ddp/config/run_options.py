"""The options of checkpoints, exports, logs, trackers and profiles. None of them changes what is learned."""

import os
from dataclasses import dataclass
from typing import Literal

from accel_ddp.config.options import option


@dataclass(kw_only=True)
class OutputConfig:
    """The options that decide what a run writes, and when."""

    output_dir: str = option(
        "",
        "folder of this run; default: runs/RECIPE/DATE-TIME",
        group="saving",
        affects_result=False,
        per_node=True,
        also=("out_dir", "output", "save_dir", "logging_dir"),
    )
    resume: str = option(
        "",
        "continue the run in --output_dir; with a path: continue from that checkpoint or run",
        group="saving",
        affects_result=False,
        also=("resume_from_checkpoint", "resume_from"),
    )
    allow_config_change: bool = option(
        False, "resume although options or data that change the result are different", group="saving", affects_result=False
    )
    save_every: int = option(
        0,
        "updates between checkpoints; 0: save after every epoch",
        group="saving",
        affects_result=False,
        at_least=0,
        also=("save_steps", "save_strategy", "checkpointing_steps"),
    )
    keep_last: int = option(
        2, "number of newest checkpoints to keep", group="saving", affects_result=False, at_least=2, also=("save_total_limit",)
    )
    keep_best: bool = option(
        False,
        "keep the checkpoint with the best --best_metric too, and name it in best.json; of equal ones the first",
        group="saving",
        affects_result=False,
        also=("load_best_model_at_end", "save_best"),
    )
    stop_signal: Literal["USR1", "USR2"] = option(
        "USR2",
        "signal that asks for a checkpoint and a stop, like SIGTERM and Ctrl-C (Slurm: --signal)",
        group="saving",
        affects_result=False,
    )
    stop_after: int = option(
        0,
        "stop after this update as if asked to, with a checkpoint and exit code 75; 0: never",
        group="saving",
        affects_result=False,
        at_least=0,
    )
    push_to_hub: str = option(
        "",
        "upload the exported model under this name, for example me/my-model",
        group="saving",
        affects_result=False,
        also=("hub_model_id",),
    )

    log_every: int = option(
        10,
        "updates between log lines",
        group="logging",
        affects_result=False,
        at_least=1,
        also=("logging_steps", "log_steps", "log_interval"),
    )
    report_to: str = option(
        "",
        "trackers, for example wandb or wandb,tensorboard,trackio,mlflow",
        group="logging",
        affects_result=False,
        per_node=True,
        also=("log_with", "logger"),
    )
    project: str = option(
        "accel_ddp",
        "project name in the trackers",
        group="logging",
        affects_result=False,
        per_node=True,
        also=("wandb_project", "project_name"),
    )
    run_name: str = option(
        "",
        "name of the run in the trackers; default: name of the output folder",
        group="logging",
        affects_result=False,
        per_node=True,
        also=("wandb_run_name",),
    )
    run_group: str = option(
        "",
        "group of the run in wandb, trackio and mlflow",
        group="logging",
        affects_result=False,
        per_node=True,
        also=("wandb_group", "wandb_run_group", "group"),
    )
    run_tags: tuple[str, ...] = option(
        (),
        "tags of the run in wandb and mlflow",
        group="logging",
        affects_result=False,
        per_node=True,
        also=("wandb_tags", "tags"),
    )
    tracker_wait: float = option(
        60.0,
        "seconds to wait at the end of the run for trackers that have not stored everything; after a stop request at most 10",
        group="logging",
        affects_result=False,
        per_node=True,
        at_least=0,
    )
    log_model: bool = option(
        False,
        "upload the exported model to wandb or mlflow, as an artifact of the run",
        group="logging",
        affects_result=False,
        per_node=True,
        also=("wandb_log_model",),
    )
    profile: str = option(
        "off",
        "record these steps with torch.profiler, for example 10-14; without a value: 5 steps after the first 10 of this process",
        group="logging",
        affects_result=False,
        also=(
            "profiler",
            "profiling",
            "profile_steps",
            "profile_step_start",
            "profile_step_end",
            "torch_profiler",
            "use_profiler",
        ),
    )
    profile_ranks: str = option(
        "auto",
        "ranks that record: all, or for example 0,3; auto: all, but at most 16",
        group="logging",
        affects_result=False,
        also=("profiler_ranks", "profile_rank"),
    )


# The options of ranks and nodes: how they are checked, how long they wait for each other, and what they send.
TIMEOUT_VARIABLE = os.environ.get("DDP_TIMEOUT_SECONDS") or "600"
_DDP_TIMEOUT = int(TIMEOUT_VARIABLE) if TIMEOUT_VARIABLE.isdigit() else 0  # `TrainConfig.validate` rejects 0


@dataclass(kw_only=True)
class MultiNodeConfig:
    """The options of several ranks and nodes."""

    preflight: Literal["on", "off"] = option(
        "on", "with several nodes, check the cluster first, as `accel-ddp doctor` does", group="multi-node", affects_result=False
    )
    preflight_wait: float = option(
        300,
        "seconds to wait in that check for nodes that have not started yet",
        group="multi-node",
        affects_result=False,
        per_node=True,
        at_least=1,
    )
    hang_report_seconds: float = option(
        5.0,
        "report a rank, a node or a link after this many seconds without progress beyond what is usual",
        group="multi-node",
        affects_result=False,
        at_least=0.5,
    )
    hang_abort_seconds: float = option(
        30.0,
        "end the run after this many seconds without progress, or after 5 times the usual duration if that is longer; 0: never",
        group="multi-node",
        affects_result=False,
        at_least=0,
    )
    ddp_timeout_seconds: int = option(
        _DDP_TIMEOUT,
        "seconds that a rank waits for another one; default: DDP_TIMEOUT_SECONDS or 600",
        group="multi-node",
        affects_result=False,
        at_least=1,
        also=("ddp_timeout",),
    )
    check_every: int = option(
        50,
        "updates between checks that the weights of all ranks are equal; every checkpoint is checked too; 0: never",
        group="multi-node",
        affects_result=False,
        at_least=0,
    )
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = option(
        "none", "compress gradients for the network", group="multi-node", also=("ddp_comm_hook",)
    )
    bucket_cap_mb: int = option(
        25,
        "DDP: megabytes of gradients per all-reduce",
        group="multi-node",
        affects_result=False,
        at_least=1,
        also=("ddp_bucket_cap_mb",),
    )
    gradient_as_bucket_view: bool = option(
        True, "DDP: keep no second copy of the gradients", group="multi-node", affects_result=False
    )
    find_unused_parameters: bool = option(
        False,
        "DDP: for models whose forward pass skips parameters; slower",
        group="multi-node",
        affects_result=False,
        also=("ddp_find_unused_parameters",),
    )
    static_graph: bool = option(False, "DDP: every step uses the same parameters", group="multi-node", affects_result=False)
    broadcast_buffers: Literal["auto", "on", "off"] = option(
        "auto",
        "DDP: copy rank 0's buffers to all ranks; auto: for models with batch norm",
        group="multi-node",
        also=("ddp_broadcast_buffers",),
    )
    sync_batchnorm: bool = option(
        False, "compute batch norm over the micro-batches of all ranks (GPU only)", group="multi-node", also=("sync_bn",)
    )
