"""The options of a run. Each recipe extends `RecipeConfig` with its own.

The properties of an option are stored with it (see `options.option`). `parsing` reads the command line and YAML.
"""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Literal

from accel_ddp.config.optimizer_options import OptimizerConfig
from accel_ddp.config.option_values import BestMetric, Direction, check_end, choose, parse_ranks, parse_steps
from accel_ddp.config.options import option, properties_of
from accel_ddp.config.run_options import TIMEOUT_VARIABLE, MultiNodeConfig, OutputConfig
from accel_ddp.errors import UserError

MOST_PREDICTIONS = 1000


@dataclass(kw_only=True)
class TrainConfig(MultiNodeConfig, OutputConfig, OptimizerConfig):
    """The options that every recipe has."""

    seed: int = option(0, "seed of new weights, of the data order and of dropout", group="training")
    epochs: float = option(
        1.0,
        "passes over the training items; --steps overrides it; a resumed run may have more",
        group="training",
        also=("num_train_epochs", "num_epochs", "max_epochs"),
    )
    steps: int = option(
        0,
        "optimizer updates of the whole run; 0: as many as --epochs needs; a resumed run may have more",
        group="training",
        at_least=0,
        also=("max_steps", "num_steps", "train_steps", "iterations"),
    )
    global_batch_size: int = option(
        32,
        "items per optimizer update, over all ranks; the result depends on it",
        group="training",
        at_least=1,
        also=("batch_size", "train_batch_size", "total_batch_size"),
    )
    micro_batch_size: int | Literal["auto"] = option(
        8,
        "items that a rank computes at once; auto: as many as fit in memory; only dropout depends on it",
        group="speed",
        affects_result=False,
        at_least=1,
        also=(
            "per_device_train_batch_size",
            "per_device_batch_size",
            "per_gpu_train_batch_size",
            "auto_find_batch_size",
            "gradient_accumulation_steps",
        ),
    )
    max_grad_norm: float = option(
        1.0,
        "clip gradients to this global norm; 0: do not clip",
        group="training",
        at_least=0,
        also=("gradient_clip_val", "clip_grad_norm", "grad_clip"),
    )
    on_nonfinite: Literal["stop", "skip"] = option(
        "stop",
        "what to do if the loss or the gradient norm is NaN or infinite: end the run, or skip this update on every rank",
        group="training",
        affects_result=False,
        also=("skip_nan", "detect_nan", "terminate_on_nan"),
    )
    max_nonfinite: int = option(
        25, "end the run after this many skipped updates in a row", group="training", affects_result=False, at_least=1
    )
    dropout: bool = option(True, "use dropout; --no_dropout turns it off, for comparisons", group="training")
    freeze: tuple[str, ...] = option((), "do not train parameters whose names contain one of these words", group="training")

    eval_every: int = option(
        0,
        "updates between evaluations; 0: evaluate after every epoch",
        group="evaluation",
        affects_result=False,
        at_least=0,
        also=("eval_steps", "evaluation_strategy", "eval_strategy", "val_check_interval"),
    )
    eval_first: bool = option(
        True,
        "evaluate before the first update too, and print the difference at the end",
        group="evaluation",
        affects_result=False,
        also=("eval_on_start",),
    )
    best_metric: str = option(
        "",
        "metric for --keep_best and early stopping: NAME, NAME:min or NAME:max; default: the first one of the recipe",
        group="evaluation",
        affects_result=False,
        also=("metric_for_best_model",),
    )
    early_stopping_patience: int = option(
        0,
        "stop after this many evaluations without a better --best_metric (an equal one is not better); 0: never",
        group="evaluation",
        affects_result=False,
        at_least=0,
        also=("patience",),
    )

    allow_inexact: bool = option(
        False,
        "train a model whose result depends on padding, and so on the micro-batch size and the number of ranks",
        group="training",
        affects_result=False,
    )
    padding_free: Literal["auto", "on", "off"] = option(
        "auto",
        "do not compute on padding; auto: if the loss stays the same",
        group="speed",
        affects_result=False,
        also=("packing", "remove_padding", "group_by_length"),
    )
    compile: Literal["auto", "on", "off"] = option(
        "auto",
        "compile the layers (GPU); auto: in runs that are long enough to gain from it",
        group="speed",
        affects_result=False,
        also=("torch_compile", "dynamo_backend"),
    )
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = option(
        "auto", "precision of computation; auto: as in the accelerate config", group="speed", also=("bf16", "fp16", "precision")
    )
    tf32: bool = option(True, "use TF32 tensor cores for float32 products", group="speed", also=("allow_tf32",))
    deterministic: bool = option(
        False,
        "use GPU kernels that give the same bits every time; slower, but a resumed run is bit-identical",
        group="speed",
        also=("full_determinism",),
    )
    gradient_checkpointing: bool = option(
        False,
        "recompute activations: less memory, about a third more time",
        group="speed",
        affects_result=False,
        also=("activation_checkpointing",),
    )
    gpu_memory_gb: float = option(
        0.0,
        "GiB of each GPU that a run may need; a model that needs more is refused before it is loaded; 0: the memory of the GPU",
        group="speed",
        affects_result=False,
        at_least=0,
    )
    num_threads: int = option(
        0,
        "CPU threads of each rank; 0: OMP_NUM_THREADS if you have set it, or the cores of the node divided by its ranks",
        group="speed",
        affects_result=False,
        per_node=True,
        at_least=0,
        also=("num_cpu_threads_per_process", "omp_num_threads", "torch_num_threads"),
    )
    num_workers: int = option(
        -1,
        "processes per rank that prepare batches; -1: 0 on CPU, up to 4 on GPU",
        group="speed",
        affects_result=False,
        per_node=True,
        at_least=-1,
        also=("dataloader_num_workers",),
    )
    worker_start: Literal["auto", "fork", "forkserver", "spawn"] = option(
        "auto",
        "how these processes start; auto: fork on Linux, elsewhere Python's default",
        group="speed",
        affects_result=False,
        per_node=True,
        also=("multiprocessing_context", "dataloader_multiprocessing_context"),
    )
    prefetch_factor: int = option(
        4,
        "batches that each of these processes prepares ahead",
        group="speed",
        affects_result=False,
        per_node=True,
        at_least=1,
        also=("dataloader_prefetch_factor",),
    )
    pin_memory: Literal["auto", "on", "off"] = option(
        "auto",
        "copy batches from pinned memory; auto: on GPUs",
        group="speed",
        affects_result=False,
        per_node=True,
        also=("dataloader_pin_memory",),
    )
    cache_dir: str = option(
        os.environ.get("ACCEL_DDP_CACHE") or "~/.cache/accel_ddp",
        "folder for tokenised data and compiled layers",
        group="speed",
        affects_result=False,
        per_node=True,
    )

    def validate_sharded(self) -> None:
        """Raise UserError if a run cannot have these values with a model that is spread over ranks (FSDP). Recipes extend it."""
        of_ddp = ("find_unused_parameters", "static_graph", "sync_batchnorm", "broadcast_buffers", "bucket_cap_mb")
        for name in (*of_ddp, "gradient_as_bucket_view"):
            if getattr(self, name) != getattr(TrainConfig, name):
                raise UserError(
                    f"--{name} {getattr(self, name)}: is an option of DDP, and the accelerate config asks for FSDP. Leave it out."
                )
        if self.comm_hook not in ("none", "bf16"):
            raise UserError(
                f"--comm_hook {self.comm_hook}: FSDP can sum gradients in float32 or in bf16. Use --comm_hook bf16, or leave it out."
            )
        if self.mixed_precision == "fp16":
            raise UserError(
                "--mixed_precision fp16: needs a loss scaler, which FSDP does not have here. Use --mixed_precision bf16."
            )

    def validate(self) -> None:
        """Raise UserError for values that no run can have. Recipes extend it."""
        if self.ddp_timeout_seconds == 0:
            raise UserError(
                f"--ddp_timeout_seconds or the variable DDP_TIMEOUT_SECONDS is {TIMEOUT_VARIABLE}. It must be a whole number of "
                "seconds, for example 600."
            )
        for name, properties in properties_of(type(self)).items():
            value = getattr(self, name)
            if properties.at_least is not None and value != "auto" and not value >= properties.at_least:
                raise UserError(f"--{name} {value}: must be {properties.at_least} or more.")
        if self.steps == 0 and not 0 < self.epochs < float("inf"):
            raise UserError(f"--epochs {self.epochs}: must be a number above 0. Or give --steps instead.")
        if self.push_to_hub and self.push_to_hub.count("/") > 1:
            raise UserError(f"--push_to_hub {self.push_to_hub}: must be a name on the Hub, for example me/my-model.")
        self.check_optimizer()
        if self.on_nonfinite == "skip" and self.comm_hook == "powersgd":
            raise UserError(
                "--on_nonfinite skip --comm_hook powersgd: powersgd adds what it has left out of a gradient to later gradients, so "
                "that no later one is finite either. Use another --comm_hook, or --on_nonfinite stop."
            )
        is_profiled = parse_steps(self.profile) is not None
        if parse_ranks(self.profile_ranks) != "auto" and not is_profiled:
            raise UserError(f"--profile_ranks {self.profile_ranks}: needs the steps to record, for example --profile 10-14.")
        if self.steps:
            check_end(self.profile, self.steps)
        self.best()

    def metric_directions(self) -> dict[str, Direction]:
        """Return the metrics of an evaluation, and for each "min" if lower is better or "max" if higher is better.

        A recipe declares them here, so that a wrong `--best_metric` is refused before training. The first one is the default.
        """
        return {}

    def best(self) -> BestMetric:
        """Return the metric of `--best_metric`. Raise UserError if the recipe does not measure it."""
        return choose(self.best_metric, self.metric_directions(), can_add=hasattr(self, "metrics"))

    def total_steps(self, num_items: int) -> int:
        """Return `--steps`, or the number of steps in which every item is seen `--epochs` times.

        If the last step is not full, it is filled from the next epoch, so that no item is dropped.
        """
        return self.steps or max(1, -int(-self.epochs * num_items // self.global_batch_size))

    def split(self, num_ranks: int) -> tuple[int, int]:
        """Return (items per micro-batch, micro-batches per update) of each rank."""
        per_rank, remainder = divmod(self.global_batch_size, num_ranks)
        if remainder:
            near = [n for n in (per_rank * num_ranks, (per_rank + 1) * num_ranks) if n]
            possible = [str(n) for n in range(1, self.global_batch_size + 1) if self.global_batch_size % n == 0]
            raise UserError(
                f"--global_batch_size {self.global_batch_size} cannot be split over {num_ranks} ranks. Use a multiple of "
                f"{num_ranks}, for example {' or '.join(map(str, near))}. Or use one of these numbers of ranks, which keeps the "
                f"result: {', '.join(possible)}."
            )
        limit = per_rank if self.micro_batch_size == "auto" else self.micro_batch_size
        micro = min(limit, per_rank)  # the share of a rank may be smaller than what fits
        if per_rank % micro:
            divisors = [n for n in range(1, per_rank + 1) if per_rank % n == 0]
            near = sorted(sorted(divisors, key=lambda n: abs(n - micro))[:2])
            raise UserError(
                f"--micro_batch_size {micro} does not divide the {per_rank} items that each of {num_ranks} ranks has of "
                f"--global_batch_size {self.global_batch_size}. Use --micro_batch_size {' or '.join(map(str, near))}."
            )
        return micro, per_rank // micro


@dataclass(kw_only=True)
class RecipeConfig(TrainConfig):
    """The options that name a recipe's model and rows. Recipes change the defaults and add their own options."""

    model: str = option(
        "",
        "Hub name, folder, or a built-in model",
        group="model",
        per_node=True,
        also=("model_name_or_path", "model_name", "model_id", "pretrained_model_name_or_path"),
    )
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "float32",
        "type of the trained weights; in 16 bits small updates are lost",
        group="model",
        also=("torch_dtype", "model_dtype"),
    )
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = option(
        "auto", "attention of transformers; auto: its default", group="model", affects_result=False
    )
    lora_r: int = option(
        0,
        "train LoRA adapters of this rank instead of the weights; 0: train the weights",
        group="model",
        at_least=0,
        also=("lora_rank", "use_lora", "use_peft"),
    )
    lora_alpha: int = option(16, "scale of the adapters", group="model", at_least=0)
    lora_dropout: float = option(0.0, "dropout before the adapters", group="model", at_least=0)
    lora_targets: tuple[str, ...] = option(
        (),
        "layers that get adapters; default: those that peft chooses, or all linear layers",
        group="model",
        also=("target_modules", "lora_target_modules"),
    )
    merge_adapters: Literal["auto", "on", "off"] = option(
        "auto",
        "export the whole model with the adapters merged into it; auto: if the model below them is not on the Hub",
        group="model",
        affects_result=False,
        also=("merge_lora",),
    )
    quantize: Literal["no", "8bit", "4bit"] = option(
        "no",
        "quantise the frozen weights under --lora_r (QLoRA); needs bitsandbytes and a GPU",
        group="model",
        also=("load_in_4bit", "load_in_8bit"),
    )

    dataset: str = option(
        "",
        "Hub name (name:configuration) or a built-in dataset; --train_file overrides it",
        group="data",
        per_node=True,
        also=("dataset_name", "data", "task_name"),
    )
    train_file: str = option(
        "",
        ".csv .tsv .json .jsonl .parquet .txt",
        group="data",
        per_node=True,
        also=("train_data", "data_path", "train_path", "data_files"),
    )
    eval_file: str = option(
        "",
        "default: a tenth of the training rows, at most 2,000",
        group="data",
        affects_result=False,
        per_node=True,
        also=("validation_file", "test_file", "dev_file", "eval_data"),
    )
    train_split: str = option("train", "training split of --dataset", group="data", also=("dataset_train_split",))
    eval_split: str = option(
        "",
        "evaluation split of --dataset; default: validation, dev or test",
        group="data",
        affects_result=False,
        also=("validation_split", "dataset_test_split", "test_split"),
    )
    max_train_items: int = option(
        0,
        "use a sample of so many training rows, which --seed draws; 0: all",
        group="data",
        at_least=0,
        also=("max_train_samples", "max_samples"),
    )
    max_eval_items: int = option(
        0,
        "the same for the evaluation rows",
        group="data",
        affects_result=False,
        at_least=0,
        also=("max_eval_samples", "max_val_samples"),
    )
    log_predictions: int = option(
        0,
        "sample predictions in the tables of each evaluation: so many correct ones, wrong ones and worst ones; they contain your data",
        group="logging",
        affects_result=False,
        at_least=0,
        also=("log_samples", "log_sample_predictions"),
    )
    skip_broken: bool = option(
        False, "leave out rows that cannot be used and report their number; default: stop and report them", group="data"
    )
    eval_batch_size: int = option(
        64,
        "items per rank in evaluations",
        group="evaluation",
        affects_result=False,
        at_least=1,
        also=("per_device_eval_batch_size",),
    )

    def validate_sharded(self) -> None:
        super().validate_sharded()
        if self.quantize != "no":
            raise UserError(
                f"--quantize {self.quantize}: quantized weights cannot be sharded, but the accelerate config asks for FSDP. Leave "
                "--quantize out, or train with DDP: use accelerate_configs/1node.yaml or 2node.yaml."
            )

    def validate(self) -> None:
        super().validate()
        if self.quantize != "no" and not self.lora_r:
            raise UserError(f"--quantize {self.quantize}: quantised weights cannot be trained. Add --lora_r 16.")
        if self.quantize != "no" and self.merge_adapters == "on":
            raise UserError(
                f"--quantize {self.quantize} --merge_adapters on: merged weights would be rounded again. Leave it out. "
                "After the run, `accel-ddp export RUN FOLDER --merge on` merges the adapters into the weights as they were before."
            )
        if self.lora_targets and not self.lora_r:
            raise UserError(f"--lora_targets {' '.join(self.lora_targets)}: needs --lora_r, for example --lora_r 16.")
        if self.log_predictions > MOST_PREDICTIONS:
            raise UserError(
                f"--log_predictions {self.log_predictions}: must be {MOST_PREDICTIONS:,} or less, because every evaluation stores so "
                "many rows of each group."
            )
        if self.lora_dropout >= 1:
            raise UserError(f"--lora_dropout {self.lora_dropout}: must be a fraction, from 0 to 1.")


@dataclass(kw_only=True)
class ScoredConfig(RecipeConfig):
    """The options of a recipe whose predictions further metrics can score."""

    metrics: tuple[str, ...] = option(
        (),
        "more metrics: built-in (a wrong name lists them), or of the evaluate package by name or folder",
        group="evaluation",
        affects_result=False,
    )


def options_that_must_match(cfg: TrainConfig) -> dict[str, Any]:
    """Return the options that must be the same on every node."""
    properties = properties_of(type(cfg))
    return {name: value for name, value in as_plain_dict(cfg).items() if not properties[name].per_node}


def options_that_keep_the_result(cls: type) -> set[str]:
    """Return the names of the options that a resumed run may change freely."""
    return {name for name, properties in properties_of(cls).items() if not properties.affects_result}


def as_plain_dict(cfg: TrainConfig) -> dict[str, Any]:
    """Return the options as JSON and trackers accept them."""
    values = dataclasses.asdict(cfg)
    return {name: " ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in values.items()}
