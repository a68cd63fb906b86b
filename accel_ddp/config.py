"""Options of a run: defaults, then `--config file.yaml`, then the command line; a later value wins.

Standard library, yaml and tyro only: a mistyped option is reported before torch is imported.
"""

import contextlib
import dataclasses
import difflib
import json
import os
import sys
import time
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from accel_ddp.environment.topology import is_local_main
from accel_ddp.errors import UserError

C = TypeVar("C", bound="TrainConfig")


_TIMEOUT_WORD = os.environ.get("DDP_TIMEOUT_SECONDS") or "600"
_DDP_TIMEOUT = int(_TIMEOUT_WORD) if _TIMEOUT_WORD.isdigit() else 0  # 0 is refused by `validate`


@dataclass(kw_only=True)
class TrainConfig:
    """What every recipe needs. A recipe subclasses it and adds its own fields."""

    # Options that a resumed run may change freely: they do not change what is learned (but for rounding, and for what
    # dropout draws with another micro-batch, packing or compilation). A recipe may add its own.
    harmless: typing.ClassVar[tuple[str, ...]] = (
        "output_dir", "resume", "allow_config_change", "micro_batch_size", "gradient_checkpointing", "find_unused_parameters",
        "static_graph", "gradient_as_bucket_view", "bucket_cap_mb", "ddp_timeout_seconds", "num_workers", "prefetch_factor",
        "pin_memory", "cache_dir", "log_every", "eval_every", "save_every", "keep_last", "keep_best", "best_metric",
        "early_stopping_patience", "report_to", "project", "run_name", "stop_signal", "stop_after", "push_to_hub",
        "eval_batch_size", "eval_file", "eval_split", "max_eval_items", "eval_first", "attn_implementation",
        "merge_adapters", "packing", "compile", "preflight", "preflight_wait",
    )  # fmt: skip
    # Options of which each node may have its own; any other that differs would train something else on each. `model` and
    # the files are places: what lies there is compared, or rank 0's is sent to all.
    may_differ: typing.ClassVar[tuple[str, ...]] = (
        "output_dir", "cache_dir", "num_workers", "prefetch_factor", "pin_memory", "report_to", "run_name", "project",
        "model", "dataset", "train_file", "eval_file", "preflight_wait",
    )  # fmt: skip

    output_dir: str = ""  # folder of this run; default: runs/RECIPE/DATE-TIME
    resume: str = ""  # go on with the run in --output_dir: alone, or with the path of a checkpoint or of another run
    allow_config_change: bool = False  # resume although options or data that change the result are others
    seed: int = 0  # of the weights' start, the data order, dropout

    epochs: float = 1.0  # passes over the training items; --steps overrides it
    steps: int = 0  # optimizer updates in the whole run; 0: as many as --epochs need
    global_batch_size: int = 32  # items per update, over all ranks: the result depends on it
    micro_batch_size: int | Literal["auto"] = 8  # items a rank holds at once; auto: as many as fit; only dropout depends on it

    optimizer: Literal["adamw", "sgd"] = "adamw"  # sgd takes --momentum
    lr: float = 2e-5  # the highest learning rate of the run
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"  # after the warm-up
    warmup_steps: int = 0  # updates until --lr is reached
    warmup_ratio: float = 0.0  # the same as a share of all updates, where --warmup_steps is 0
    weight_decay: float = 0.01  # on matrices; biases and norms are left alone
    momentum: float = 0.9  # of sgd
    max_grad_norm: float = 1.0  # gradients are clipped to this norm; 0: not clipped

    packing: Literal["auto", "on", "off"] = "auto"  # no computing on padding; auto: where that gives the same loss
    compile: Literal["auto", "on", "off"] = "auto"  # fuse the layers' kernels (GPU); auto: in runs that are long enough
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"  # auto: what the accelerate config says
    tf32: bool = True  # tensor cores for float32 products, on GPUs that have them
    deterministic: bool = False  # GPU kernels that give the same bits every time: slower, but then a resumed run is bit-identical
    gradient_checkpointing: bool = False  # less memory for about a third more time
    dropout: bool = True  # --no_dropout: layers compute as in an evaluation; for comparisons
    freeze: tuple[str, ...] = ()  # parameters whose names contain one of these stay as they are

    find_unused_parameters: bool = False  # DDP: for models whose forward skips parameters; slower
    static_graph: bool = False  # DDP: the same parameters are used in every step
    gradient_as_bucket_view: bool = True  # DDP: no second copy of the gradients
    bucket_cap_mb: int = 25  # DDP: size of the pieces in which gradients travel
    broadcast_buffers: bool | None = None  # DDP: rank 0's buffers for all; default: where there is batch norm
    sync_batchnorm: bool = False  # batch norm over the micro-batches of all ranks (GPU only)
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none"  # DDP: gradients travel compressed
    preflight: Literal["on", "off"] = "on"  # on several nodes: first look for what is wrong with them, as `accel-ddp doctor` does
    preflight_wait: float = 300  # seconds to wait there for nodes that are not started yet
    ddp_timeout_seconds: int = _DDP_TIMEOUT  # a rank waits this long for another; also DDP_TIMEOUT_SECONDS in the environment

    num_workers: int = -1  # processes per rank that prepare batches; -1: 0 on CPU, up to 4 on GPU
    prefetch_factor: int = 4  # batches that each of them prepares ahead
    pin_memory: bool | None = None  # default: on GPU
    cache_dir: str = os.environ.get("ACCEL_DDP_CACHE") or "~/.cache/accel_ddp"  # tokenised data

    log_every: int = 10  # updates
    eval_every: int = 0  # updates; 0: at the end of every epoch
    eval_first: bool = True  # evaluate before the first update too: what the training adds is then printed at the end
    save_every: int = 0  # updates; 0: at the end of every epoch
    keep_last: int = 2  # checkpoints that are kept, at least 2
    keep_best: str = ""  # a metric: the checkpoint with the best value of it is kept too, and named in best.json
    stop_signal: Literal["USR1", "USR2"] = "USR2"  # asks for a checkpoint and the end, as SIGTERM and Ctrl-C do (Slurm: --signal)
    stop_after: int = 0  # end after this step as if asked to: with a checkpoint and exit code 75; 0: never
    push_to_hub: str = ""  # upload the exported model to this name, for example me/my-model
    best_metric: str = "loss"  # what early stopping looks at; lower is better for loss, perplexity, error, wer, cer, mse, mae
    early_stopping_patience: int = 0  # evaluations without a better --best_metric before the end; 0: never
    report_to: str = ""  # trackers, for example wandb,tensorboard,trackio
    project: str = "accel_ddp"  # the trackers' project
    run_name: str = ""  # the trackers' name of the run; default: the output folder's name

    def validate(self) -> None:
        """Raise UserError for values that no run can have. Recipes extend it."""
        at_least = {
            "global_batch_size": 1, "micro_batch_size": 1, "steps": 0, "warmup_steps": 0, "log_every": 1,
            "eval_every": 0, "save_every": 0, "keep_last": 2, "stop_after": 0, "num_workers": -1, "prefetch_factor": 1,
            "ddp_timeout_seconds": 1, "bucket_cap_mb": 1, "early_stopping_patience": 0, "weight_decay": 0,
            "max_grad_norm": 0, "lr": 0, "momentum": 0, "eval_batch_size": 1, "max_length": 1, "max_train_items": 0,
            "max_eval_items": 0, "max_target_length": 1, "max_new_tokens": 1, "num_beams": 1, "samples": 0,
            "lora_r": 0, "lora_alpha": 0, "lora_dropout": 0, "preflight_wait": 1,
        }  # fmt: skip
        if self.ddp_timeout_seconds == 0:
            raise UserError(f"--ddp_timeout_seconds or DDP_TIMEOUT_SECONDS={_TIMEOUT_WORD}: must be a whole number of seconds.")
        for name, least in at_least.items():
            if getattr(self, name, least) != "auto" and not getattr(self, name, least) >= least:
                raise UserError(f"--{name} {getattr(self, name)}: must be {least} or more.")
        if self.steps == 0 and not 0 < self.epochs < float("inf"):
            raise UserError(f"--epochs {self.epochs}: must be a number more than 0, or give --steps.")
        if self.push_to_hub and self.push_to_hub.count("/") > 1:
            raise UserError(f"--push_to_hub {self.push_to_hub}: is a name on the hub, for example me/my-model.")
        if not 0 <= self.warmup_ratio <= 1:
            raise UserError(f"--warmup_ratio {self.warmup_ratio}: is a share of all steps, from 0 to 1.")

    def total_steps(self, num_items: int) -> int:
        """`--steps`, or as many as it takes to see every item `--epochs` times.

        Where the last step is not full, the stream goes on into the next epoch: no item is dropped.
        """
        return self.steps or max(1, -int(-self.epochs * num_items // self.global_batch_size))

    def split(self, num_ranks: int) -> tuple[int, int]:
        """(items per micro-batch, micro-batches per update) of each rank."""
        per_rank, left_over = divmod(self.global_batch_size, num_ranks)
        if left_over:
            near = [n for n in (per_rank * num_ranks, (per_rank + 1) * num_ranks) if n]
            fitting = [str(n) for n in range(1, self.global_batch_size + 1) if self.global_batch_size % n == 0]
            raise UserError(
                f"--global_batch_size {self.global_batch_size} cannot be split over {num_ranks} ranks. "
                f"Use a multiple of {num_ranks}, for example {' or '.join(map(str, near))}; or one of these numbers of ranks, "
                f"which leaves the result as it is: {', '.join(fitting)}."
            )
        most = per_rank if self.micro_batch_size == "auto" else self.micro_batch_size  # auto: until it is known
        micro = min(most, per_rank)  # the batch may be smaller than what fits
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
    """Where a recipe's model and rows come from. Recipes change the defaults and add what is theirs."""

    model: str = ""  # hub name, folder, or embedded
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the weights; on smaller ones small updates are lost
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"  # auto: what transformers takes
    lora_r: int = 0  # train low-rank adapters of this rank instead of the weights; 0: the weights
    lora_alpha: int = 16  # scale of the adapters
    lora_dropout: float = 0.0  # before the adapters
    lora_targets: tuple[str, ...] = ()  # layers that get adapters; default: peft's for this kind of model, or all linear ones
    merge_adapters: bool = False  # export the whole model with the adapters merged into it, instead of the adapters alone
    quantize: Literal["no", "8bit", "4bit"] = "no"  # of the frozen weights under --lora_r (QLoRA); needs bitsandbytes and GPUs

    dataset: str = ""  # hub name (name:configuration) or embedded; --train_file overrides it
    train_file: str = ""  # .csv .tsv .json .jsonl .parquet .txt, or what the recipe says
    eval_file: str = ""  # default: a tenth of the training rows, at most 2,000
    train_split: str = "train"  # of --dataset
    eval_split: str = ""  # of --dataset; default: validation, dev or test
    max_train_items: int = 0  # use the first so many training rows; 0: all
    max_eval_items: int = 0  # the same for the evaluation
    skip_broken: bool = False  # leave out rows that cannot be used, and say how many; default: name them and end
    eval_batch_size: int = 64  # items per rank

    def validate(self) -> None:
        super().validate()
        if self.quantize != "no" and not self.lora_r:
            raise UserError(f"--quantize {self.quantize}: quantised weights cannot be trained. Add --lora_r 16.")
        if self.lora_targets and not self.lora_r:
            raise UserError(f"--lora_targets {' '.join(self.lora_targets)}: needs --lora_r, for example --lora_r 16.")
        if self.lora_dropout >= 1:
            raise UserError(f"--lora_dropout {self.lora_dropout}: is a share, from 0 to 1.")


def parse_config(cls: type[C], argv: list[str] | None = None, script: str | None = None) -> C:
    """The options of this run; a UserError, or tyro's own message and exit code 2, where they cannot be.

    `script`: whose options they are, for messages, where it is not the one that runs.
    """
    import tyro

    argv = list(sys.argv[1:] if argv is None else argv)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    kinds = typing.get_type_hints(cls)

    arguments: list[str] = []
    argv = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    while "--config" in argv:
        at = argv.index("--config")
        if at + 1 == len(argv):
            raise UserError("--config needs a file: --config my_run.yaml")
        for name, value in _read_yaml(argv[at + 1]).items():
            if name not in fields:
                raise UserError(f"{argv[at + 1]}: unknown option {name!r}.{_nearest(name, fields)}")
            arguments += _as_arguments(argv[at + 1], name, value, kinds[name])
        del argv[at : at + 2]
    if "--resume" in argv:  # alone, it means the newest checkpoint of the output folder
        at = argv.index("--resume")
        if at + 1 == len(argv) or argv[at + 1].startswith("--"):
            argv.insert(at + 1, "auto")
    arguments += _plain_flags(argv, kinds)

    # Every rank parses the same words; one voice per node is enough.
    about = sys.modules[cls.__module__].__doc__
    show = is_local_main()
    cfg = tyro.cli(cls, prog=script, args=arguments, description=about, use_underscores=True, console_outputs=show)
    cfg.validate()
    return cfg


def run(cls: type[C], main: typing.Callable[[C], object]) -> NoReturn:
    """Parse the command line, run `main`, and turn whatever happens into an exit code and words for the user."""
    sys.stdout.reconfigure(line_buffering=True)  # a killed run has shown what it printed
    sys.stdout, sys.stderr = _NeverFails(sys.stdout), _NeverFails(sys.stderr)
    from accel_ddp.doctor.preflight import report_to_other_nodes, run_preflight

    cfg = None
    try:
        cfg = parse_config(cls)
        run_preflight(cfg)  # seconds, not minutes, until a fault of the cluster has a name; before torch is imported
    except UserError as error:
        if is_local_main():
            print(f"error: {error}", file=sys.stderr, flush=True)
        if cfg is None:  # a preflight has told them already
            report_to_other_nodes(str(error))
        tell_the_launcher(f"error: {error}")
        sys.exit(2)
    except SystemExit as ended:  # of tyro, which has said why, or of --help
        if ended.code == 2:
            report_to_other_nodes("its command line is invalid")
            tell_the_launcher("error: the command line makes no sense; why is said above")
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    # Threads on a CPU wait asleep, not spinning: on cores that are shared with anything else that is many times faster
    # (6 and 20 items/s beside one other process), and elsewhere slower by a tenth. Read when torch is imported, the next line.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # When the main node is gone, torch's store warns with pages of C++ frames, around our words. Errors are still shown.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        from accel_ddp import runtime  # torch: imported only when the words make sense
    except KeyboardInterrupt:
        sys.exit(130)
    code = runtime.supervise(main, cfg)
    if code:  # at once: an interpreter that shuts down may wait for ranks that are gone
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    sys.exit(0)


def tell_the_launcher(text: str) -> None:
    """torchrun prints it as the root cause, instead of nothing."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": message}))


class _NeverFails:
    """A stream whose disk may be full, or whose reader may be gone, without ending the run that writes to it."""

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _read_yaml(path: str) -> dict[str, Any]:
    import yaml

    if not Path(path).is_file():
        raise UserError(f"--config {path}: there is no such file.")
    try:
        values = yaml.safe_load(Path(path).read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: must be lines of `option: value`, but is a {type(values).__name__}.")
    return values


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else f" Known options: {', '.join(known)}."


def _as_arguments(path: str, name: str, value: Any, kind: Any) -> list[str]:
    """One YAML line as command-line words, so that one parser checks both."""
    if kind is bool:
        if not isinstance(value, bool):
            raise UserError(f"{path}: {name}: {value!r} should be true or false.")
        return [f"--{name}" if value else f"--no_{name}"]
    if isinstance(value, dict):
        raise UserError(f"{path}: {name}: has lines below it, but takes one value.")
    if isinstance(value, list):
        if typing.get_origin(kind) is not tuple:
            raise UserError(f"{path}: {name}: is a list, but takes one value.")
        return [f"--{name}", *map(str, value)]
    if kind is str and value is None:
        value = ""
    if isinstance(value, bool) and typing.get_origin(kind) is Literal:  # as YAML reads an unquoted `no`, `on` or `off`
        value = next((word for word in (("on", "yes") if value else ("off", "no")) if word in typing.get_args(kind)), value)
    return [f"--{name}", str(value)]


def _plain_flags(argv: list[str], kinds: dict[str, Any]) -> list[str]:
    """`--tf32 false` as well as `--no_tf32`: people of other toolkits type it so."""
    words = list(argv)
    for at in range(len(words) - 1, 0, -1):
        name, value = words[at - 1].removeprefix("--").replace("-", "_"), words[at].lower()
        if words[at - 1].startswith("--") and value in ("true", "false"):
            if kinds.get(name) is bool:
                words[at - 1 : at + 1] = [f"--{name}" if value == "true" else f"--no_{name}"]
            elif kinds.get(name) == bool | None:
                words[at] = value.capitalize()
    return words


def must_be_the_same(cfg: TrainConfig) -> dict[str, Any]:
    """The options that every node must have alike."""
    return {name: value for name, value in as_plain_dict(cfg).items() if name not in cfg.may_differ}


def as_plain_dict(cfg: TrainConfig) -> dict[str, Any]:
    """The resolved options, as JSON and the trackers can take them."""
    values = dataclasses.asdict(cfg)
    return {name: " ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in values.items()}
