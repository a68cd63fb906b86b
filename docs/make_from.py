"""Write the tables of docs/from_*.md: the options of another toolkit, sorted by their names there.

    python docs/make_from.py          write the tables
    python docs/make_from.py --check  exit with code 1 if a page is out of date

What a name means here is in `accel_ddp.config.other_names`, which error messages and `accel-ddp convert` use too. This file only
has the names of each toolkit. The first two are compared with the installed packages by tests/test_convert.py.
"""

import importlib
import re
import sys
import tempfile
import textwrap
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from accel_ddp.config.options import properties_of  # noqa: E402
from accel_ddp.config.other_names import INSTEAD, NO_EQUIVALENT, NOTES  # noqa: E402
from accel_ddp.nodes import recipe_files  # noqa: E402

# fmt: off
NAMES = {
    # transformers 5.22, and frequent names of transformers 4 that it has removed.
    "from_trainer.md": """
        accelerator_config adam_beta1 adam_beta2 adam_epsilon auto_find_batch_size average_tokens_across_devices
        batch_eval_metrics bf16 bf16_full_eval data_seed dataloader_drop_last dataloader_in_order
        dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
        dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph
        ddp_timeout debug deepspeed disable_tqdm do_eval do_predict do_train enable_jit_checkpoint eval_accumulation_steps
        eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp
        fsdp_config full_determinism gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
        greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip
        include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor learning_rate length_column_name
        liger_kernel_config load_best_model_at_end local_rank log_level log_level_replica log_on_each_node logging_first_step
        logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps
        metric_for_best_model neftune_noise_alpha num_train_epochs optim optim_args optim_target_modules output_dir
        parallelism_config per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project push_to_hub
        remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node
        save_only_model save_steps save_strategy save_total_limit seed skip_memory_metrics tf32 torch_compile
        torch_compile_backend torch_compile_mode torch_empty_cache_steps train_sampling_strategy trackio_bucket_id
        trackio_space_id trackio_static_space_id use_cache use_cpu use_liger_kernel warmup_steps weight_decay evaluation_strategy
        group_by_length logging_dir no_cuda overwrite_output_dir save_safetensors warmup_ratio""",
    # TRL 1.16: what SFTConfig, DPOConfig, KTOConfig, RewardConfig, ModelConfig and ScriptArguments add.
    "from_trl.md": """
        activation_offloading assistant_only_loss attn_implementation beta bnb_4bit_quant_storage bnb_4bit_quant_type
        center_rewards_coefficient chat_template_path completion_only_loss dataset_config dataset_kwargs dataset_name
        dataset_num_proc dataset_streaming dataset_test_split dataset_text_field dataset_train_split desirable_weight
        disable_dropout discopop_tau dtype eos_token eval_packing f_alpha_divergence_coef f_divergence_type ignore_bias_buffers
        label_smoothing ld_alpha load_in_4bit load_in_8bit lora_alpha lora_dropout lora_modules_to_save lora_r lora_target_modules
        lora_target_parameters lora_task_type loss_type loss_weights max_length model_init_kwargs model_name_or_path
        model_revision packing packing_strategy pad_to_multiple_of pad_token padding_free precompute_ref_batch_size
        precompute_ref_log_probs ref_model_mixup_alpha ref_model_sync_steps router_aux_loss_coef shuffle_dataset sync_ref_model
        truncation_mode trust_remote_code undesirable_weight use_bnb_nested_quant use_dora use_peft use_rslora use_weighting
        max_prompt_length max_seq_length rpo_alpha""",
    # axolotl 0.19: the keys of its documentation and examples for text models.
    "from_axolotl.md": """
        adam_beta1 adam_beta2 adam_epsilon adapter attention auto_resume_from_checkpoints base_model batch_flattening batch_size
        bf16 bfloat16 chat_template chat_template_jinja context_parallel_size cosine_constant_lr_ratio cosine_min_lr_ratio
        dataset_exact_deduplication dataset_prepared_path dataset_processes datasets ddp_timeout deepspeed
        default_system_message early_stopping_patience
        eot_tokens eval_batch_size eval_max_new_tokens eval_sample_packing eval_steps eval_strategy eval_table_size
        evals_per_epoch flash_attention fp16 fp8 fsdp fsdp_config fsdp_version gradient_accumulation_steps gradient_checkpointing
        gradient_checkpointing_kwargs greater_is_better group_by_length hub_model_id hub_strategy kto_desirable_weight
        kto_undesirable_weight learning_rate liger_fused_linear_cross_entropy liger_glu_activation liger_rms_norm liger_rope
        load_best_model_at_end load_in_4bit load_in_8bit logging_steps lora_alpha lora_dropout lora_model_dir lora_modules_to_save
        lora_r lora_target_linear lora_target_modules loraplus_lr_ratio loss_watchdog_threshold lr_groups lr_scheduler
        max_grad_norm max_steps metric_for_best_model micro_batch_size mlflow_experiment_name model_type neftune_noise_alpha
        num_epochs optimizer orpo_alpha output_dir pad_to_sequence_len peft_use_dora peft_use_rslora plugins pretraining_dataset
        process_reward_model qat relora remove_unused_columns resume_from_checkpoint revision_of_model reward_model rl rl_beta
        rpo_alpha sample_packing sample_packing_bin_size sample_packing_group_size save_only_model save_steps save_strategy
        save_total_limit saves_per_epoch seed sequence_len sequence_parallel_degree shuffle_merged_datasets simpo_gamma
        special_tokens strict test_datasets tf32 tokenizer_type tokens torch_compile train_on_inputs trl trust_remote_code
        unfrozen_parameters use_tensorboard val_set_size vllm wandb_entity wandb_log_model wandb_mode wandb_name wandb_project
        wandb_run_id wandb_watch warmup_ratio warmup_steps weight_decay""",
    # LLaMA-Factory 0.9.5: the arguments of training, without those of transformers that from_trainer.md has.
    "from_llama_factory.md": """
        adapter_name_or_path add_special_tokens add_tokens additional_target badam_mode buffer_size compute_accuracy cutoff_len
        dataset dataset_dir disable_gradient_checkpointing disable_shuffling do_train double_quantization dpo_label_smoothing
        early_stopping_steps enable_liger_kernel eval_dataset eval_on_each_dataset finetuning_type flash_attn fp8
        freeze_trainable_layers freeze_trainable_modules galore_rank hf_hub_token image_max_pixels
        include_effective_tokens_per_second interleave_probs kto_chosen_weight kto_rejected_weight lora_alpha lora_dropout
        lora_rank lora_target loraplus_lr_ratio
        mask_history max_samples media_dir mix_strategy model_name_or_path model_revision moe_aux_loss_coef neat_packing
        overwrite_cache packing pissa_init plot_loss ppo_epochs pref_beta pref_ftx pref_loss preprocessing_batch_size
        preprocessing_num_workers pure_bf16 quantization_bit quantization_method ref_model resize_vocab rope_scaling
        simpo_gamma stage streaming template tokenized_path tool_format train_on_prompt trust_remote_code use_apollo use_badam
        use_dora use_fast_tokenizer use_galore use_llama_pro use_muon use_rslora use_swanlab use_unsloth val_size""",
}
# fmt: on
BEGIN, END = "<!-- Generated by `python docs/make_from.py`. -->", "<!-- End of the generated part. -->"


def our_names() -> dict[str, str]:
    """Return our option for each of our own names and each name in another toolkit."""
    found: dict[str, str] = {}
    for recipe in recipe_files.recipe_names():
        for option, properties in properties_of(importlib.import_module(recipe).Config).items():
            found |= {name: option for name in properties.also if name not in found} | {option: option}
    return found


def split(page: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return what to use instead of each name, and the names without an equivalent by their reason."""
    ours, here, missing = our_names(), {}, {}
    instead = {name: text for text, names in INSTEAD.items() for name in names.split()}
    reasons = {name: text for text, names in NO_EQUIVALENT.items() for name in names.split()}
    for name in sorted(NAMES[page].split()):
        if name in instead and name not in ("packing",):
            here[name] = f"{instead[name][0].upper()}{instead[name][1:]}."
        elif name in ours:
            note = NOTES.get(name, "")
            here[name] = f"--{ours[name]}{f': {note}' if note else ''}"
        elif name in instead:
            here[name] = f"{instead[name][0].upper()}{instead[name][1:]}."
        elif name in reasons:
            missing.setdefault(reasons[name], []).append(name)
        else:
            sys.exit(f"{name}: add it to other_names, instead or no_equivalent in accel_ddp/config/other_names.yaml")
    return here, missing


def render(page: str) -> str:
    """Return the generated part of a page."""
    here, missing = split(page)
    value = r"(?: (?:\d\w*|[A-Z_:]{2,}|last|stored|copy|all-linear|muon|fsdp\.yaml)\b)?"
    command = r"accel-ddp (?:run|predict|evaluate|report)\b(?: sft)?"
    code = lambda text: re.sub(rf"(?<![\w`-])({command}(?: --\w+{value})?|--\w+{value}|[A-Z]+_[A-Z_]+)", r"`\1`", text)
    lines = ["| there | here |", "|---|---|", *(f"| `{name}` | {code(text)} |" for name, text in here.items())]
    lines += ["", "### No equivalent", ""]
    items = [f"{', '.join(f'`{name}`' for name in names)}: {code(reason)}." for reason, names in missing.items()]
    lines += [textwrap.fill(item, 130, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False) for item in items]
    return "\n".join(lines)


def convert(text: str) -> str:
    """Return a page whose second block of YAML is what `accel-ddp convert` makes of the first one."""
    from accel_ddp.launch.conversion import Conversion, detect

    _, given, between, before, _ = re.split(r"```yaml\n(.*?)```", text, maxsplit=2, flags=re.DOTALL)
    name, gpus = re.search(r"`accel-ddp\s+convert\s+(\S+)\s+--gpus\s+(\d)`\s+prints", between).groups()
    with tempfile.TemporaryDirectory() as folder:
        info = re.search(r"With\s+`(\{.*\})`\s+in\s+`data/dataset_info.json`", between)
        Path(folder, "data").mkdir()
        Path(folder, "data", "dataset_info.json").write_text(info[1] if info else "{}")
        values = yaml.safe_load(given)
        done = Conversion(detect(Path(name), values), values, int(gpus), Path(folder, name), "").text("")
    return text.replace(f"{between}```yaml\n{before}```", f"{between}```yaml\n{done.replace(f'{folder}/', '')}```")


def write(page: str) -> str:
    """Return the page with its generated parts."""
    text = (ROOT / "docs" / page).read_text()
    text = convert(text) if "CONVERTED" in text or " --gpus" in text else text
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{render(page)}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    for name in NAMES:
        if sys.argv[1:] != ["--check"]:
            (ROOT / "docs" / name).write_text(write(name))
        elif (ROOT / "docs" / name).read_text() != write(name):
            sys.exit(f"docs/{name} is out of date. Run: python docs/make_from.py")
