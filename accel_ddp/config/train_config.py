"""The config of a run: all options, and the checks that need several of them. Each recipe extends `RecipeConfig` with its own."""

import dataclasses
import itertools
import math
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal

from accel_ddp.config import option_values
from accel_ddp.config.optimizer_options import OptimizerConfig
from accel_ddp.config.option_values import BestMetric, Direction, split_weight
from accel_ddp.config.options import of_group, option, properties_of
from accel_ddp.config.run_options import TIMEOUT_VARIABLE, RunConfig
from accel_ddp.errors import UserError

MOST_PREDICTIONS = 1000
TABLE_FILES = ".csv .tsv .json .jsonl .parquet .arrow"
# What recipes read of a folder or a pattern: the files of the first group of endings that occurs. "/": the folder itself.
TEXT_FILES, IMAGE_FILES = (".txt", TABLE_FILES), ("/", f".npz {TABLE_FILES}")
ALL_LINEAR = "all-linear"  # a value of --lora_targets: all linear layers except the head


@dataclass(kw_only=True)
class TrainConfig(RunConfig, OptimizerConfig):
    """The options that every recipe has. Extend it with your own, and override the methods below where you need to."""

    def validate_sharded(self) -> None:
        """Raise UserError if a run cannot have these values with a sharded model (FSDP). Recipes extend it."""
        of_ddp = ("find_unused_parameters", "static_graph", "sync_batchnorm", "broadcast_buffers", "bucket_cap_mb")
        is_chosen = self.bucket_cap_mb == 25 or "bucket_cap_mb" in self.__dict__.get("_reasons", {})  # `auto` becomes a number
        for name in (*of_ddp, "gradient_as_bucket_view"):
            if getattr(self, name) != getattr(TrainConfig, name) and not (name == "bucket_cap_mb" and is_chosen):
                raise UserError(f"--{name} {getattr(self, name)}: is an option of DDP, but this run uses FSDP. Leave it out.")
        if self.comm_hook not in ("none", "bf16"):
            raise UserError(f"--comm_hook {self.comm_hook}: FSDP sums gradients in float32 or bf16. Use --comm_hook bf16.")
        if self.balance != "off":
            why = "FSDP gathers weights in every micro-batch of every rank, so ranks need equal work"
            raise UserError(f"--balance {self.balance}: {why}. Leave it out, or train with DDP: accelerate_configs/1node.yaml.")
        if self.mixed_precision == "fp16":
            raise UserError("--mixed_precision fp16: needs a loss scaler, which FSDP does not have. Use --mixed_precision bf16.")
        if self.sync_every:
            reason = "every worker needs the whole model, but this run uses FSDP"
            raise UserError(f"--sync_every {self.sync_every}: {reason}. Leave it out.")

    def validate_local_steps(self) -> None:
        """Raise UserError for values that a run cannot have with `--sync_every`, or that it has no use for without."""
        if not self.sync_every and (given := _changed(self, "local_workers", "outer_lr", "outer_momentum", "sync_dtype")):
            raise UserError(f"{given[0]}: needs --sync_every, for example --sync_every 30.")
        others = _changed(self, "comm_hook", "sync_batchnorm", "global_batch_tokens", "balance")
        others += ["--mixed_precision fp16"] * (self.mixed_precision == "fp16")
        if self.sync_every and others:
            raise UserError(f"--sync_every {self.sync_every} {others[0]}: cannot be combined. Leave one of them out.")
        if self.outer_momentum >= 1:
            raise UserError(f"--outer_momentum {self.outer_momentum}: must be below 1, for example 0.9.")

    def validate(self) -> None:
        """Raise UserError for values that no run can have. Recipes extend it."""
        if self.ddp_timeout_seconds == 0:
            given = f"--ddp_timeout_seconds or the variable DDP_TIMEOUT_SECONDS is {TIMEOUT_VARIABLE}"
            raise UserError(f"{given}. It must be a whole number of seconds, for example 600.")
        for name, properties in properties_of(type(self)).items():
            if limit := properties.exceeded(value := getattr(self, name)):
                raise UserError(f"--{name} {value}: must be {limit}.")
            is_given = bool(properties.needs or properties.excludes) and value != getattr(type(self), name)
            text = f"--{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
            if is_given and properties.needs and not getattr(self, properties.needs):
                raise UserError(f"{text}: needs --{properties.needs}.")
            if is_given and (other := getattr(self, properties.excludes, "")):
                raise UserError(f"{text}: cannot be used with --{properties.excludes} {other}. Leave one of them out.")
        if self.steps == 0 and not 0 < self.epochs < float("inf"):
            raise UserError(f"--epochs {self.epochs}: must be a number above 0. Or give --steps instead.")
        for tokens, items in (("micro_batch_tokens", "micro_batch_size"), ("global_batch_tokens", "global_batch_size")):
            if getattr(self, tokens) and getattr(self, items) != getattr(type(self), items):
                given = f"--{tokens} {getattr(self, tokens)} --{items} {getattr(self, items)}"
                raise UserError(f"{given}: both are the size of a batch. Leave one of them out.")
        if self.push_to_hub and self.push_to_hub.count("/") > 1:
            raise UserError(f"--push_to_hub {self.push_to_hub}: must be a name on the Hub, for example me/my-model.")
        option_values.parse_shares(self.balance)
        if self.balance != "off" and self.static_graph:
            raise UserError(f"--balance {self.balance} --static_graph: needs ranks with several micro-batches. Use one of them.")
        uneven = _changed(self, "balance", "micro_batch_tokens", "global_batch_tokens")
        if self.sync_batchnorm and uneven:
            why = "batch norm needs all ranks in every micro-batch, but they would have different numbers of micro-batches"
            raise UserError(f"--sync_batchnorm {uneven[0]}: {why}. Leave one of them out.")
        option_values.check_settings(self.tuned)
        self.check_optimizer()
        self.validate_local_steps()
        if self.on_nonfinite == "skip" and self.comm_hook == "powersgd":
            reason = "powersgd adds the rest of a gradient to later ones, so no later one is finite either"
            instead = "Use another --comm_hook, or --on_nonfinite stop"
            raise UserError(f"--on_nonfinite skip --comm_hook powersgd: {reason}. {instead}.")
        is_profiled = option_values.parse_steps(self.profile) is not None
        if option_values.parse_ranks(self.profile_ranks) != "auto" and not is_profiled:
            raise UserError(f"--profile_ranks {self.profile_ranks}: needs the steps to record, for example --profile 10-14.")
        if self.steps:
            option_values.check_end(self.profile, self.steps)
        self.best()

    def metric_directions(self) -> dict[str, Direction]:
        """Return the metrics of an evaluation, and for each "min" if lower is better or "max" if higher is better.

        A recipe declares them here, so a wrong `--best_metric` is refused before training. The first one is the default.
        """
        return {}

    def best(self) -> BestMetric:
        return option_values.choose(self.best_metric, self.metric_directions(), can_add=hasattr(self, "metrics"))

    def tracker_names(self) -> list[str]:
        return list(dict.fromkeys(name.strip() for name in self.report_to.split(",") if name.strip() not in ("", "none")))

    @property
    def step_size(self) -> int:
        """The items of a step, or its tokens with `--global_batch_tokens`."""
        return self.global_batch_tokens or self.global_batch_size

    def total_steps(self, epoch_size: int) -> int:
        """Return `--steps`, or the number of steps in which every item is seen `--epochs` times.

        `epoch_size` is the number of items, or of their tokens with `--global_batch_tokens`. If the last step is not full, it is
        filled from the next epoch. No item is dropped.
        """
        # 2.2 * 100 is 220.00000000000003 in floating-point numbers, which would be one step more.
        return self.steps or max(1, math.ceil(Fraction(str(self.epochs)) * Fraction(epoch_size) / self.step_size))

    def split(self, num_ranks: int) -> tuple[int, int]:
        """Return (items per micro-batch, micro-batches per update) of each rank, which may compute several local workers.

        If batches have a number of tokens, it is an estimate for items of `--max_length` tokens.
        """
        if self.evaluate_only:  # on any number of ranks
            return 1, 1
        workers = self.local_workers if self.sync_every else 0
        if workers > num_ranks and workers % num_ranks == 0:
            micro, count = self.split(workers)
            return micro, count * (workers // num_ranks)
        if workers and num_ranks % workers:
            instead = f"Use a number of ranks that is a multiple or a divisor of {workers}, which keeps the result"
            raise UserError(f"--local_workers {workers}: {num_ranks} ranks cannot be divided among them. {instead}.")
        if self.micro_batch_tokens or self.global_batch_tokens:
            return self._estimate_split(num_ranks, "workers" if num_ranks == workers else "ranks")
        per_rank, remainder = divmod(self.global_batch_size, num_ranks)
        if remainder:
            noun = "workers" if num_ranks == workers else "ranks"
            near = [n for n in (per_rank * num_ranks, (per_rank + 1) * num_ranks) if n]
            possible = [str(n) for n in range(1, self.global_batch_size + 1) if self.global_batch_size % n == 0]
            raise UserError(
                f"--global_batch_size {self.global_batch_size} cannot be split over {num_ranks} {noun}. Use a multiple of "
                f"{num_ranks}, for example {' or '.join(map(str, near))}. Or use one of these numbers of {noun}, which keeps the "
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

    def _estimate_split(self, num_ranks: int, noun: str) -> tuple[int, int]:
        if self.global_batch_size < num_ranks and not self.global_batch_tokens:
            instead = f"Use at least {num_ranks}"
            raise UserError(f"--global_batch_size {self.global_batch_size}: {num_ranks} {noun} need an item each. {instead}.")
        length = getattr(self, "max_length", 0)
        length = length if isinstance(length, int) and length else 512
        per_rank = max(1, (self.global_batch_tokens // length or self.global_batch_size) // num_ranks)
        limit = self.micro_batch_tokens // length if self.micro_batch_tokens else self.micro_batch_size
        micro = per_rank if limit == "auto" else min(max(1, limit), per_rank)
        return micro, -(-per_rank // micro)

    def most_ranks(self, limit: int) -> tuple[int, str]:
        """Return the largest number of ranks up to `limit` that can split a batch, and why not `limit` with what to change, or ""."""
        number = next((ranks for ranks in range(limit, 1, -1) if self._can_split(ranks)), 1)
        if number == limit:
            return number, ""
        workers = self.local_workers if self.sync_every else 0
        if workers and limit % workers and workers % limit:
            return number, f"{limit} ranks cannot be divided among --local_workers {workers}"
        total, micro = self.global_batch_size, self.micro_batch_size
        parts = max(limit, workers)
        per_rank, remainder = divmod(total, parts)
        if not remainder and isinstance(micro, int):
            fits = next(size for size in range(micro, 0, -1) if per_rank % size == 0)
            reason = f"--micro_batch_size {micro} does not divide the {per_rank} items of each; --micro_batch_size {fits}"
        else:
            sizes = itertools.count(total + parts - remainder, parts)
            fits = next(size for size in sizes if dataclasses.replace(self, global_batch_size=size)._can_split(limit))
            reason = f"--global_batch_size {total} cannot be split over {parts}; --global_batch_size {fits}"
        return number, f"{reason} uses all"

    def _can_split(self, num_ranks: int) -> bool:
        with suppress(UserError):
            return bool(self.split(num_ranks))
        return False


def _changed(cfg: TrainConfig, *names: str) -> list[str]:
    return [f"--{name} {getattr(cfg, name)}" for name in names if getattr(cfg, name) != getattr(TrainConfig, name)]


@dataclass(kw_only=True)
@of_group("model", at_least=0)
class ModelConfig(TrainConfig):
    """The options of a recipe's model."""

    model: str = option("", "Hub name, folder, or a built-in model", per_node=True)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "dtype of the weights; 16 bits lose small updates; auto: float32; with --lora_r and mixed precision, as stored",
        legacy="float32",
    )  # fmt: skip
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = option(
        "auto", "attention implementation of transformers; auto: its default", affects_result=False
    )
    lora_r: int = option(0, "train LoRA adapters with this r instead of all weights; 0: train all weights")
    lora_alpha: int = option(16, "LoRA alpha: adapters are scaled by alpha / r")
    lora_dropout: float = option(0.0, "dropout on the input of the adapters")
    lora_targets: tuple[str, ...] = option(
        (), "layers that get adapters, or all-linear; default: what peft chooses, or all linear layers", legacy=()
    )
    merge_adapters: Literal["auto", "on", "off"] = option(
        "auto", "merge the adapters into the exported model; auto: if the base model is not on the Hub", affects_result=False
    )
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "dtype of exported weights; auto: as stored in --model; adapters: as trained", affects_result=False
    )
    quantize: Literal["no", "8bit", "4bit"] = option(
        "no", "quantize the base model of --lora_r (QLoRA); needs bitsandbytes and a GPU"
    )

    def __post_init__(self) -> None:
        given = " ".join(self.lora_targets)
        self.lora_targets = tuple(given.replace(",", " ").split())  # `q_proj,v_proj` and "q_proj v_proj" are two layers
        if given and not self.lora_targets:
            raise UserError(f"--lora_targets {given}: names no layer. For example: --lora_targets q_proj v_proj.")


@dataclass(kw_only=True)
@of_group("data", at_least=0)
class RecipeConfig(ModelConfig):
    """`TrainConfig` with options for a pretrained model, adapters and rows. Recipes change defaults and add their own options."""

    dataset: str = option("", "Hub name (name:configuration) or a built-in dataset; --train_file overrides it", per_node=True)
    file_endings: ClassVar[tuple[str, ...]] = (TABLE_FILES, ".txt")
    train_file: tuple[str, ...] = option(
        (), f"files, folders or patterns: {TABLE_FILES} (.gz .bz2 .xz .zst), or save_to_disk folders; a mixture: PATH:WEIGHT",
        per_node=True,
    )  # fmt: skip
    eval_file: tuple[str, ...] = option(
        (), "evaluation files; default: a tenth of the training rows, at most 2,000", affects_result=False, per_node=True
    )
    train_split: str = option("train", "training split of --dataset")
    eval_split: str = option("", "evaluation split of --dataset; default: validation, dev or test", affects_result=False)
    eval_fraction: float = option(
        0.0, "evaluate on this fraction of the training rows, chosen by content; 0: --eval_split or --eval_file", legacy=0.0
    )
    max_train_items: int = option(0, "train on a random sample of this many rows, drawn with --seed; 0: all")
    max_eval_items: int = option(0, "evaluate on a random sample of this many rows; 0: all", affects_result=False)
    log_predictions: int = option(
        0, "store this many correct, wrong and worst predictions of each evaluation in a table; they contain your data",
        group="logging", affects_result=False,
    )  # fmt: skip
    show_example: int = option(
        0, "print this many training rows as the model receives them, with the trained tokens marked", group="logging",
        affects_result=False,
    )  # fmt: skip
    skip_broken: bool = option(False, "skip rows that cannot be used and report how many; default: stop and report them")
    eval_batch_size: int = option(64, "examples per rank in evaluations", group="evaluation", affects_result=False, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("train_file", "eval_file"):
            given = getattr(self, name)  # a saved run has a text, see `as_plain_dict`
            setattr(self, name, tuple(filter(None, given.split("\n") if isinstance(given, str) else map(str, given))))

    def validate_sharded(self) -> None:
        super().validate_sharded()
        if self.quantize != "no":
            instead = "Leave it out, or train with DDP: use accelerate_configs/1node.yaml or 2node.yaml"
            raise UserError(f"--quantize {self.quantize}: quantized weights cannot be sharded. {instead}.")

    def validate(self) -> None:
        super().validate()
        if self.evaluate_only and self.evaluate_only not in (self.model, self.resume):
            instead = "which loads it with the options that it was trained with"
            reason = f"the run would evaluate --model {self.model}. Use `accel-ddp evaluate {self.evaluate_only}`, {instead}"
            raise UserError(f"--evaluate_only {self.evaluate_only}: {reason}.")
        if self.eval_file and not self.train_file:
            raise UserError(f"--eval_file {' '.join(self.eval_file)}: was given without --train_file. Give both.")
        if not 0 <= self.eval_fraction < 1:
            raise UserError(f"--eval_fraction {self.eval_fraction:g}: must be a fraction between 0 and 1, for example 0.1.")
        for name in ("eval_file", "eval_split"):
            if self.eval_fraction and getattr(self, name) != getattr(type(self), name):
                reason = "both name evaluation rows"
                raise UserError(f"--eval_fraction {self.eval_fraction:g} and --{name}: {reason}. Give one of them.")
        for name in ("train_split", "eval_split"):
            given = getattr(self, name)
            is_used = not self.train_file or (has_splits(self) and not (self.eval_file and name == "eval_split"))
            if given != getattr(type(self), name) and not is_used:
                instead = "--eval_file FILE or --eval_fraction 0.1" if name == "eval_split" else "the file of that split"
                raise UserError(f"--{name} {given}: --train_file {' '.join(self.train_file)} has no splits. Give {instead}.")
        if self.quantize != "no" and not self.lora_r and not self.evaluate_only:
            raise UserError(f"--quantize {self.quantize}: quantized weights cannot be trained. Add --lora_r 16.")
        if self.quantize != "no" and self.merge_adapters == "on":
            instead = "After the run, `accel-ddp export RUN FOLDER --merge on` merges the adapters into the original weights"
            raise UserError(f"--quantize {self.quantize} --merge_adapters on: would round merged weights again. {instead}.")
        if ALL_LINEAR in self.lora_targets and len(self.lora_targets) > 1:
            raise UserError(f"--lora_targets {' '.join(self.lora_targets)}: {ALL_LINEAR} includes the others. Use it alone.")
        if self.lora_targets != type(self).lora_targets and not self.lora_r:
            raise UserError(f"--lora_targets {' '.join(self.lora_targets)}: needs --lora_r, for example --lora_r 16.")
        if self.lora_alpha != type(self).lora_alpha and not self.lora_r:
            reason = "needs --lora_r, for example --lora_r 16"
            raise UserError(f"--lora_alpha {self.lora_alpha}: {reason}. Adapters in --model keep their own.")
        if self.log_predictions > MOST_PREDICTIONS:
            raise UserError(f"--log_predictions {self.log_predictions}: must be {MOST_PREDICTIONS:,} or less.")
        if self.lora_dropout >= 1:
            raise UserError(f"--lora_dropout {self.lora_dropout}: must be a fraction, from 0 to 1.")


def has_splits(cfg: RecipeConfig) -> bool:
    return len(cfg.train_file) == 1 and Path(split_weight(cfg.train_file[0])[0], "dataset_dict.json").is_file()


@dataclass(kw_only=True)
@of_group("evaluation", affects_result=False)
class ScoredConfig(RecipeConfig):
    """The options of a recipe whose predictions further metrics can score."""

    metrics: tuple[str, ...] = option((), "more metrics: built-in (a wrong name lists them), or of the evaluate package")


def options_that_must_match(cfg: TrainConfig) -> dict[str, Any]:
    properties = properties_of(type(cfg))
    found = {name: value for name, value in as_plain_dict(cfg).items() if not properties[name].per_node}
    found["micro_batch_size"] = "auto" if cfg.micro_batch_size == "auto" else "a number"  # ranks choose together
    weights = [split_weight(one)[1] for one in getattr(cfg, "train_file", ())]
    return found | ({"weights of --train_file": weights} if any(weights) else {})


def options_that_keep_the_result(cls: type) -> set[str]:
    return {name for name, properties in properties_of(cls).items() if not properties.affects_result}


def as_plain_dict(cfg: TrainConfig) -> dict[str, Any]:
    """Return the options as JSON and trackers accept them. A line break separates paths, which may contain spaces."""
    between = lambda name: "\n" if name.endswith("_file") else " "
    values = dataclasses.asdict(cfg)
    return {name: between(name).join(map(str, value)) if isinstance(value, tuple) else value for name, value in values.items()}
