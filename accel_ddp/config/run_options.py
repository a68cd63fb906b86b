"""The options of checkpoints, logs, training, evaluations, speed and several nodes."""

import os
from dataclasses import dataclass
from typing import Literal

from accel_ddp.config.options import of_group, option

TIMEOUT_VARIABLE = os.environ.get("DDP_TIMEOUT_SECONDS") or "600"
_DDP_TIMEOUT = int(TIMEOUT_VARIABLE) if TIMEOUT_VARIABLE.isdigit() else 0  # `TrainConfig.validate` rejects 0


@dataclass(kw_only=True)
@of_group("saving", affects_result=False, at_least=0)
class SavingConfig:
    """The options of checkpoints, stopping and resuming."""

    output_dir: str = option("", "run folder; default: runs/RECIPE/DATE-TIME", per_node=True)
    resume: str = option("", "continue the run in --output_dir; with a path: continue from that checkpoint or run folder")
    allow_config_change: bool = option(False, "resume with different data, or different options that change the result")
    save_every: int = option(0, "steps between checkpoints; 0: save after every epoch")
    keep_last: int = option(2, "number of newest checkpoints to keep", at_least=2)
    keep_best: bool = option(
        False, "also keep the checkpoint with the best --best_metric, and export it at the end; on a tie, the earlier one"
    )
    stop_signal: Literal["USR1", "USR2"] = option("USR2", "signal to save a checkpoint and stop, like SIGTERM and Ctrl-C")
    stop_after: int = option(0, "save a checkpoint and stop after this step, with exit code 75; 0: never")
    push_to_hub: str = option("", "upload the exported model to this Hub repository, for example me/my-model")


@dataclass(kw_only=True)
@of_group("logging", affects_result=False, per_node=True, at_least=0)
class LoggingConfig:
    """The options of logs, trackers and profiles."""

    log_every: int = option(10, "steps between log lines", per_node=False, at_least=1)
    report_to: str = option("", "trackers, for example wandb or wandb,tensorboard,trackio,mlflow")
    project: str = option("accel_ddp", "project name in the trackers")
    run_name: str = option("", "name of the run in the trackers; default: name of the output folder")
    run_group: str = option("", "group of the run in wandb, trackio and mlflow")
    run_tags: tuple[str, ...] = option((), "tags of the run in wandb and mlflow")
    tracker_wait: float = option(60.0, "seconds to wait at the end for trackers that still upload; after a stop at most 10")
    log_model: bool = option(False, "upload the exported model to wandb or mlflow, as an artifact of the run")
    profile: str = option(
        "off", "record these steps with torch.profiler, for example 10-14; without a value: 5 after the first 10", per_node=False
    )
    profile_ranks: str = option("auto", "ranks to record: all, or for example 0,3; auto: all, but at most 16", per_node=False)


@dataclass(kw_only=True)
@of_group("multi-node", affects_result=False, at_least=0)
class MultiNodeConfig:
    """The options of several ranks and nodes: how they are checked, how long they wait for each other, and what they send."""

    preflight: Literal["on", "off"] = option("on", "check the cluster before a run on several nodes, like `accel-ddp doctor`")
    preflight_wait: float = option(300, "seconds that the preflight waits for nodes that start late", per_node=True, at_least=1)
    hang_report_seconds: float = option(5.0, "report ranks without progress for so many seconds longer than usual", at_least=0.5)
    hang_abort_seconds: float = option(
        30.0, "stop the run after this many seconds without progress, or 5 times the usual duration if longer; 0: never"
    )
    ddp_timeout_seconds: int = option(
        _DDP_TIMEOUT, "seconds until a collective fails; default: DDP_TIMEOUT_SECONDS or 600", at_least=1
    )
    check_every: int = option(50, "steps between checks that all ranks have equal weights, besides each checkpoint; 0: never")
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = option("none", "compress gradients on the wire", affects_result=True)
    balance: str = option(
        "off", "share of each rank in a batch: off: equal; speed: by measured speed; or a proportion such as 2,1"
    )
    tuned: str = option("auto", "NCCL settings: off, NAME=VALUE ..., or auto: what `accel-ddp tune` found for these nodes")
    bucket_cap_mb: int | Literal["auto"] = option(
        "auto", "DDP: megabytes of gradients per all-reduce; auto: 25, or what `accel-ddp tune` found", at_least=1, legacy=25
    )
    gradient_as_bucket_view: bool = option(True, "DDP: keep no second copy of the gradients")
    find_unused_parameters: bool = option(False, "DDP: search each graph for unused parameters; slower")
    static_graph: bool = option(False, "DDP: assume that every step uses the same parameters")
    broadcast_buffers: Literal["auto", "on", "off"] = option(
        "auto", "DDP: copy rank 0's buffers to all ranks; auto: for models with batch norm", affects_result=True
    )
    sync_batchnorm: bool = option(False, "compute batch norm over the micro-batches of all ranks (GPU only)", affects_result=True)
    sync_every: int = option(
        0, "slow links: workers take this many local steps, then average (DiLoCo, another algorithm); 0: all-reduce in every step",
        affects_result=True,
    )  # fmt: skip
    local_workers: int = option(
        0, "with --sync_every: groups of ranks with their own weights; 0: one per node; the result depends on it", affects_result=True,
        legacy=0,
    )  # fmt: skip
    outer_lr: float = option(0.7, "with --sync_every: learning rate of the outer step", affects_result=True)
    outer_momentum: float = option(0.9, "with --sync_every: Nesterov momentum of the outer step", affects_result=True)
    sync_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "with --sync_every: dtype of what the workers send", affects_result=True
    )


@dataclass(kw_only=True)
@of_group("training")
class TrainingConfig:
    """What a run learns from, for how long, and what it does with gradients."""

    seed: int = option(0, "seed of new weights, data order and dropout")
    epochs: float = option(1.0, "passes over the training data; --steps overrides it; a resumed run may use more")
    steps: int = option(0, "optimizer steps of the run; 0: as many as --epochs needs; a resumed run may use more", at_least=0)
    global_batch_size: int = option(32, "examples per optimizer step, over all ranks; the result depends on it", at_least=1)
    global_batch_tokens: int = option(
        0, "tokens per optimizer step (about, without padding) instead of --global_batch_size; 0: off", at_least=0, legacy=0
    )
    max_grad_norm: float = option(1.0, "clip gradients to this global norm; 0: do not clip", at_least=0)
    on_nonfinite: Literal["stop", "skip"] = option(
        "stop", "if the loss or gradient norm is NaN or infinite: stop the run, or skip the step on every rank",
        affects_result=False,
    )  # fmt: skip
    max_nonfinite: int = option(25, "stop the run after this many skipped steps in a row", affects_result=False, at_least=1)
    dropout: bool = option(True, "use dropout")
    freeze: tuple[str, ...] = option((), "freeze parameters whose names contain one of these words")
    allow_inexact: bool = option(
        False, "train although the result depends on padding or on other items, and therefore on micro-batches and ranks, or on what "
        "no checkpoint contains", affects_result=False,
    )  # fmt: skip


@dataclass(kw_only=True)
@of_group("speed", affects_result=False, at_least=0)
class SpeedConfig:
    """The options of the computation."""

    micro_batch_size: int | Literal["auto"] = option(
        8, "examples that a rank computes at once; auto: as many as fit in memory; only dropout depends on it", at_least=1,
        per_node=True,
    )  # fmt: skip
    micro_batch_tokens: int = option(
        0, "at most this many tokens (with padding, if any) instead of --micro_batch_size; balances ranks by cost; 0: off"
    )
    padding_free: Literal["auto", "on", "off"] = option("auto", "compute without padding; auto: if the loss stays the same")
    compile: int | Literal["auto", "on", "graphs", "off"] = option(
        "auto", "compile the layers. on: before the first step; a number: from this step on; auto: where it saves time, chosen once "
        "per run; graphs: only capture CUDA graphs; off: neither",
        legacy="auto", at_least=0,
    )  # fmt: skip
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = option(
        "auto", "compute precision; auto: from the accelerate config, else bf16 if all GPUs support it, and no (float32) on CPUs",
        affects_result=True, legacy="no",
    )  # fmt: skip
    tf32: bool = option(True, "use TF32 tensor cores for float32 matrix products", affects_result=True)
    deterministic: bool = option(
        False, "use deterministic GPU kernels; slower; a resumed run is bit-identical", affects_result=True
    )
    gradient_checkpointing: bool = option(False, "recompute activations: less memory, about a third more time")
    keep_gathered: Literal["auto", "none", "weights", "gradients"] = option(
        "auto", "FSDP: what stays unsharded during a step: the weights, or also the gradients of several micro-batches; auto: what "
        "fits in memory", legacy="none",
    )  # fmt: skip
    gpu_memory_gb: float = option(0.0, "GiB of each GPU that the run may use; a model that needs more is refused; 0: all of it")


@dataclass(kw_only=True)
@of_group("speed", affects_result=False, per_node=True, at_least=0)
class ProcessConfig:
    """The threads, data workers and caches of a rank."""

    num_threads: int = option(0, "CPU threads per rank; 0: OMP_NUM_THREADS, or the node's cores divided by its ranks")
    num_workers: int = option(-1, "data loader processes per rank; -1: 0 on CPU, up to 4 on GPU", at_least=-1)
    worker_start: Literal["auto", "fork", "forkserver", "spawn"] = option(
        "auto", "how data loader processes start; auto: fork on Linux, elsewhere Python's default"
    )
    prefetch_factor: int = option(4, "batches that each data loader process prepares ahead", at_least=1)
    pin_memory: Literal["auto", "on", "off"] = option("auto", "copy batches from pinned memory; auto: on GPUs")
    cache_dir: str = option(
        os.environ.get("ACCEL_DDP_CACHE") or "~/.cache/accel_ddp", "folder for tokenized data and compiled layers"
    )


@dataclass(kw_only=True)
@of_group("evaluation", affects_result=False, at_least=0)
class EvaluationConfig:
    """When a run evaluates, and what it does with the result."""

    eval_every: int = option(0, "steps between evaluations; 0: evaluate after every epoch")
    eval_first: bool = option(True, "also evaluate before the first step, and print the difference at the end")
    evaluate_only: str = option(
        "", "evaluate this --model, or this checkpoint of --resume, without training; `accel-ddp evaluate` sets all of them"
    )
    best_metric: str = option(
        "", "metric for --keep_best and early stopping: NAME, NAME:min or NAME:max; default: the recipe's first metric"
    )
    early_stopping_patience: int = option(0, "stop after this many evaluations without a strictly better --best_metric; 0: never")


@dataclass(kw_only=True)
class RunConfig(EvaluationConfig, ProcessConfig, SpeedConfig, TrainingConfig, MultiNodeConfig, LoggingConfig, SavingConfig):
    """All of them. The order of the classes is the reverse of the order of their options."""
