"""How options are declared: an option's properties, the groups of `--help`, and the names of options in other toolkits.

The properties are stored with the option and replace lists of names elsewhere: `affects_result` decides what a resumed run may
change, `per_node` what may differ between nodes.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

# Groups of `--help`, in the order in which they are shown.
GROUPS = {
    "model": "Which model is trained, and which part of it.",
    "data": "Where the rows come from.",
    "training": "These options change what is learned.",
    "evaluation": "When the model is evaluated.",
    "saving": "Checkpoints, stopping and resuming.",
    "logging": "What is logged, and where.",
    "speed": "These options change time and memory, and the result only by rounding.",
    "multi-node": "Several GPUs and nodes.",
}
# What users of other toolkits type, for "did you mean" messages.
OTHER_NAMES = {
    "optimizer": "optim optimizer_type", "lr": "learning_rate", "lr_of": "lr_groups param_groups head_lr layerwise_lr",
    "lr_schedule": "lr_scheduler_type lr_scheduler scheduler", "warmup_steps": "num_warmup_steps",
    "min_lr_ratio": "min_lr min_lr_rate eta_min cosine_min_lr_ratio", "decay_ratio": "num_decay_steps decay_steps cooldown_ratio",
    "beta1": "adam_beta1 betas", "beta2": "adam_beta2", "eps": "adam_epsilon epsilon", "ema_decay": "ema use_ema ema_rate swa",
    "output_dir": "out_dir output save_dir logging_dir", "resume": "resume_from_checkpoint resume_from",
    "save_every": "save_steps save_strategy checkpointing_steps saves_per_epoch", "keep_last": "save_total_limit",
    "keep_best": "load_best_model_at_end save_best", "push_to_hub": "hub_model_id",
    "log_every": "logging_steps log_steps log_interval", "report_to": "log_with logger", "project": "wandb_project project_name",
    "run_name": "wandb_run_name wandb_name", "run_group": "wandb_group wandb_run_group group", "run_tags": "wandb_tags tags",
    "log_model": "wandb_log_model",
    "profile": "profiler profiling profile_steps profile_step_start profile_step_end torch_profiler use_profiler",
    "profile_ranks": "profiler_ranks profile_rank", "ddp_timeout_seconds": "ddp_timeout", "comm_hook": "ddp_comm_hook",
    "bucket_cap_mb": "ddp_bucket_cap_mb", "find_unused_parameters": "ddp_find_unused_parameters",
    "sync_every": "local_sgd local_sgd_steps diloco inner_steps", "local_workers": "num_local_workers num_replicas",
    "broadcast_buffers": "ddp_broadcast_buffers", "sync_batchnorm": "sync_bn", "epochs": "num_train_epochs num_epochs max_epochs",
    "steps": "max_steps num_steps train_steps iterations", "global_batch_size": "batch_size train_batch_size total_batch_size",
    "micro_batch_size": "per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size auto_find_batch_size",
    "max_grad_norm": "gradient_clip_val clip_grad_norm grad_clip", "on_nonfinite": "skip_nan detect_nan terminate_on_nan",
    "eval_every": "eval_steps evaluation_strategy eval_strategy val_check_interval evals_per_epoch", "eval_first": "eval_on_start",
    "best_metric": "metric_for_best_model", "early_stopping_patience": "patience",
    "padding_free": "remove_padding", "compile": "torch_compile dynamo_backend",
    "mixed_precision": "bf16 fp16 precision", "tf32": "allow_tf32", "deterministic": "full_determinism",
    "gradient_checkpointing": "activation_checkpointing",
    "num_threads": "num_cpu_threads_per_process omp_num_threads torch_num_threads", "num_workers": "dataloader_num_workers",
    "worker_start": "multiprocessing_context dataloader_multiprocessing_context", "prefetch_factor": "dataloader_prefetch_factor",
    "pin_memory": "dataloader_pin_memory", "model": "model_name_or_path model_name model_id pretrained_model_name_or_path "
    "base_model lora_model_dir adapter_name_or_path",
    "dtype": "torch_dtype model_dtype", "lora_r": "lora_rank use_lora use_peft",
    "lora_targets": "target_modules lora_target_modules lora_target", "merge_adapters": "merge_lora", "quantize": "quantization_bit",
    "dataset": "dataset_name data task_name", "train_file": "train_data data_path train_path data_files datasets",
    "eval_file": "validation_file test_file dev_file eval_data test_datasets eval_dataset", "train_split": "dataset_train_split",
    "eval_fraction": "val_set_size val_size validation_split_percentage",
    "eval_split": "validation_split dataset_test_split test_split", "max_train_items": "max_train_samples max_samples",
    "max_eval_items": "max_eval_samples max_val_samples", "log_predictions": "log_samples log_sample_predictions eval_table_size",
    "export_dtype": "save_dtype merge_dtype", "show_example": "show_examples debug_num_examples print_examples",
    "eval_batch_size": "per_device_eval_batch_size",
    "max_length": "max_seq_length sequence_len cutoff_len model_max_length", "attn_implementation": "flash_attention flash_attn",
    "cache_dir": "dataset_prepared_path tokenized_path", "seed": "data_seed random_seed", "text_column": "dataset_text_field",
    "train_on_prompts": "train_on_inputs train_on_prompt", "chat_template": "template chat_template_jinja chat_template_path",
    "max_new_tokens": "eval_max_new_tokens",
}  # fmt: skip
# What to do about settings of other toolkits (axolotl, LLaMA-Factory, TRL, HF Trainer) that are no single option here. A text is
# used in recipes that have the options in it.
INSTEAD = {
    "leave it out; padding-free is the default (--padding_free), and sft packs plain texts": "packing sample_packing "
    "eval_sample_packing eval_packing neat_packing pad_to_sequence_len pad_to_max_length group_by_length",
    "leave it out; it follows from --global_batch_size and --micro_batch_size": "gradient_accumulation_steps",
    "leave it out; the recipe sets it: accel-ddp run sft": "stage do_train do_eval rl",
    "use --lora_r 16 for LoRA, with --quantize 4bit for QLoRA; without them all weights are trained": "adapter finetuning_type",
    "use --quantize 4bit, or leave it out": "load_in_4bit", "use --quantize 8bit, or leave it out": "load_in_8bit",
    "use --lora_targets all-linear": "lora_target_linear",
    "leave it out; answers are trained, and prompts too with --train_on_prompts": "assistant_only_loss completion_only_loss",
    "use --train_on last to train the last answer only": "mask_history",
    "leave it out; the assistant's messages are trained (--train_on)": "roles_to_train",
    "leave it out; the end-of-turn token is trained": "train_on_eos train_on_eot",
    "leave it out; the tokenizer in --model has them": "special_tokens tokens eos_token pad_token bos_token eot_tokens",
    "use --reference stored": "precompute_ref_log_probs precompute_ref_logps", "use --reference copy": "ref_model ref_model_path",
    "leave it out; --max_length counts prompt and answer, and --chosen_column names the better one": "max_prompt_length",
    "leave it out; dropout is off unless --dropout is given, and so is the --reference": "disable_dropout",
    "use --train_file FOLDER or FOLDER/FILE": "dataset_dir",
    "leave it out; a row may have a column chat_template_kwargs": "enable_thinking",
    "leave it out; --train_file is tokenized once and cached": "overwrite_cache preprocessing_num_workers dataset_processes "
    "dataset_num_proc",
    "leave it out; accel-ddp report draws the curves": "plot_loss",
    "leave it out; a run needs a new --output_dir, or --resume": "overwrite_output_dir",
    "leave it out; the config of --model sets it": "model_type tokenizer_type trust_remote_code",
    "leave it out; the loss is computed in chunks without it": "use_liger_kernel enable_liger_kernel plugins",
    "use accel-ddp run --config_file fsdp.yaml to shard the model": "deepspeed fsdp fsdp_config",
    "set the variable WANDB_ENTITY": "wandb_entity", "leave it out; the launcher sets it": "local_rank",
}  # fmt: skip

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Properties:
    """The help text, the group and the constraints of an option."""

    help: str = ""
    group: str = ""  # of `--help`: a key of GROUPS
    affects_result: bool = True  # a resumed run must keep the value; False: it changes only rounding or dropout masks
    per_node: bool = False  # nodes may have different values
    at_least: float | None = None
    legacy: Any = None  # the value of runs that are older than the option, or than its default `auto`; None: the default
    also: tuple[str, ...] = ()  # names that users of other toolkits type; OTHER_NAMES has those of the options of every run


def option(
    default: Any,
    help: str | None = None,
    *,
    group: str | None = None,
    affects_result: bool | None = None,
    per_node: bool | None = None,
    at_least: float | None = None,
    legacy: Any = None,
    also: tuple[str, ...] | None = None,
) -> Any:
    """Return a dataclass field with these properties. A field that overrides an inherited one keeps what is not given."""
    given = {
        "help": help, "group": group, "affects_result": affects_result, "per_node": per_node, "at_least": at_least, "legacy": legacy,
        "also": also,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata={name: value for name, value in given.items() if value is not None})


def of_group(group: str, **properties: Any) -> Callable[[C], C]:
    """Return a decorator, inside of @dataclass, that gives the options of a class these defaults. `at_least` is given to numbers."""

    def decorate(cls: C) -> C:
        for name, field in vars(cls).items():
            if isinstance(field, dataclasses.Field) and name not in getattr(cls, "__dataclass_fields__", {}):
                is_number = type(field.default) in (int, float)
                own = {key: value for key, value in properties.items() if is_number or key != "at_least"}
                field.metadata = MappingProxyType({"group": group, **own, **field.metadata})
        return cls

    return decorate


def properties_of(cls: type) -> dict[str, Properties]:
    """Return the properties of each option of a config class. A class without a value takes its base class's value."""
    found = {}
    for name in [field.name for field in dataclasses.fields(cls)]:
        merged: dict[str, Any] = {"also": tuple(OTHER_NAMES.get(name, "").split())}
        for base in reversed(cls.__mro__):
            own = base.__dict__.get("__dataclass_fields__", {}).get(name)
            merged |= own.metadata if own is not None else {}
        found[name] = Properties(**merged)
    return found
