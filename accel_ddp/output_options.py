"""The options of checkpoints, exports, logs, trackers and profiles. None of them changes what is learned."""

from dataclasses import dataclass
from typing import Literal

from accel_ddp.options import option


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
