"""Names of options in other toolkits: HF Trainer, TRL, axolotl and LLaMA-Factory, as of 2026-11.

Error messages, `accel-ddp convert` and the tables of docs/from_*.md use these tables. A name is in one of OTHER_NAMES, INSTEAD and
NO_EQUIVALENT, or it is the name of our own option.
"""

# What users of other toolkits type, for "did you mean" messages.
OTHER_NAMES = {
    "optimizer": "optim optimizer_type", "lr": "learning_rate", "lr_of": "lr_groups param_groups head_lr layerwise_lr",
    "lr_schedule": "lr_scheduler_type lr_scheduler scheduler", "warmup_steps": "num_warmup_steps",
    "min_lr_ratio": "min_lr min_lr_rate eta_min cosine_min_lr_ratio", "decay_ratio": "num_decay_steps decay_steps cooldown_ratio",
    "beta1": "adam_beta1 betas", "beta2": "adam_beta2", "eps": "adam_epsilon epsilon", "ema_decay": "ema use_ema ema_rate swa",
    "output_dir": "out_dir output save_dir logging_dir", "resume": "resume_from_checkpoint resume_from",
    "save_every": "save_steps save_strategy checkpointing_steps saves_per_epoch", "keep_last": "save_total_limit",
    "keep_best": "load_best_model_at_end save_best", "push_to_hub": "hub_model_id",
    "log_every": "logging_steps logging_strategy log_steps log_interval",
    "report_to": "log_with logger use_wandb use_tensorboard use_mlflow",
    "project": "wandb_project project_name mlflow_experiment_name swanlab_project",
    "run_name": "wandb_run_name wandb_name mlflow_run_name swanlab_run_name", "run_group": "wandb_group wandb_run_group group",
    "run_tags": "wandb_tags tags", "log_model": "wandb_log_model",
    "profile": "profiler profiling profile_steps profile_step_start profile_step_end torch_profiler use_profiler profiler_steps "
    "profiler_steps_start",
    "profile_ranks": "profiler_ranks profile_rank", "ddp_timeout_seconds": "ddp_timeout", "comm_hook": "ddp_comm_hook",
    "bucket_cap_mb": "ddp_bucket_cap_mb", "find_unused_parameters": "ddp_find_unused_parameters",
    "sync_every": "local_sgd local_sgd_steps diloco inner_steps", "local_workers": "num_local_workers num_replicas",
    "broadcast_buffers": "ddp_broadcast_buffers", "sync_batchnorm": "sync_bn", "epochs": "num_train_epochs num_epochs max_epochs",
    "steps": "max_steps num_steps train_steps iterations", "global_batch_size": "batch_size train_batch_size total_batch_size",
    "micro_batch_size": "per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size auto_find_batch_size",
    "max_grad_norm": "gradient_clip_val clip_grad_norm grad_clip", "on_nonfinite": "skip_nan detect_nan terminate_on_nan",
    "eval_every": "eval_steps evaluation_strategy eval_strategy val_check_interval evals_per_epoch", "eval_first": "eval_on_start",
    "static_graph": "ddp_static_graph", "best_metric": "metric_for_best_model",
    "early_stopping_patience": "patience early_stopping_steps", "padding_free": "remove_padding",
    "compile": "torch_compile dynamo_backend", "mixed_precision": "bf16 fp16 precision", "tf32": "allow_tf32",
    "deterministic": "full_determinism", "gradient_checkpointing": "activation_checkpointing",
    "num_threads": "num_cpu_threads_per_process omp_num_threads torch_num_threads", "num_workers": "dataloader_num_workers",
    "worker_start": "multiprocessing_context dataloader_multiprocessing_context", "prefetch_factor": "dataloader_prefetch_factor",
    "pin_memory": "dataloader_pin_memory",
    "model": "model_name_or_path model_name model_id pretrained_model_name_or_path base_model lora_model_dir adapter_name_or_path",
    "dtype": "torch_dtype model_dtype bfloat16 float16 float32 pure_bf16", "lora_r": "lora_rank use_lora use_peft",
    "lora_targets": "target_modules lora_target_modules lora_target", "merge_adapters": "merge_lora",
    "quantize": "quantization_bit", "dataset": "dataset_name dataset_config data task_name",
    "train_file": "train_data data_path train_path data_files datasets pretraining_dataset",
    "eval_file": "validation_file test_file dev_file eval_data test_datasets eval_dataset", "train_split": "dataset_train_split",
    "eval_fraction": "val_set_size val_size validation_split_percentage",
    "eval_split": "validation_split dataset_test_split test_split", "max_train_items": "max_train_samples max_samples",
    "max_eval_items": "max_eval_samples max_val_samples", "log_predictions": "log_samples log_sample_predictions eval_table_size",
    "export_dtype": "save_dtype merge_dtype", "show_example": "show_examples debug_num_examples print_examples",
    "eval_batch_size": "per_device_eval_batch_size precompute_ref_batch_size",
    "max_length": "max_seq_length sequence_len cutoff_len model_max_length",
    "attn_implementation": "flash_attention flash_attn attention sdp_attention eager_attention",
    "cache_dir": "dataset_prepared_path tokenized_path", "seed": "data_seed random_seed", "text_column": "dataset_text_field",
    "train_on_prompts": "train_on_inputs train_on_prompt", "chat_template": "template chat_template_jinja chat_template_path",
    "max_new_tokens": "eval_max_new_tokens", "streaming": "dataset_streaming", "shuffle_block": "buffer_size",
    "messages_column": "field_messages",
}  # fmt: skip
# What to do about settings of other toolkits (axolotl, LLaMA-Factory, TRL, HF Trainer) that are no single option here. A text is
# used in recipes that have the options in it.
INSTEAD = {
    "leave it out; padding-free is the default (--padding_free), and sft packs plain texts": "packing sample_packing "
    "eval_sample_packing eval_packing neat_packing pad_to_sequence_len pad_to_max_length group_by_length batch_flattening "
    "pad_to_multiple_of packing_strategy train_sampling_strategy length_column_name sample_packing_bin_size "
    "sample_packing_group_size multipack_real_batches",
    "leave it out; it follows from --global_batch_size and --micro_batch_size": "gradient_accumulation_steps",
    "leave it out; the recipe sets it: accel-ddp run sft, dpo or reward": "stage rl reward_model",
    "leave it out; a run trains and evaluates": "do_train do_eval",
    "use --lora_r 16 for LoRA, with --quantize 4bit for QLoRA; without them all weights are trained": "adapter finetuning_type",
    "use --quantize 4bit, or leave it out": "load_in_4bit", "use --quantize 8bit, or leave it out": "load_in_8bit",
    "use --lora_targets all-linear": "lora_target_linear",
    "leave it out; answers are trained, and prompts too with --train_on_prompts": "assistant_only_loss completion_only_loss",
    "use --train_on last to train the last answer only": "mask_history",
    "leave it out; the assistant's messages are trained (--train_on)": "roles_to_train",
    "leave it out; the end-of-turn token is trained": "train_on_eos train_on_eot",
    "leave it out; the tokenizer in --model decides, and no pad token is needed": "special_tokens eos_token pad_token bos_token "
    "eot_tokens",
    "use --reference stored": "precompute_ref_log_probs precompute_ref_logps",
    "leave it out; --max_length counts prompt and answer, and --chosen_column names the better one": "max_prompt_length",
    "leave it out; dropout is off unless --dropout is given, and so is the --reference": "disable_dropout",
    "use --train_file FOLDER or FOLDER/FILE": "dataset_dir",
    "leave it out; a row may have a column chat_template_kwargs": "enable_thinking",
    "leave it out; --train_file is tokenized once and cached": "overwrite_cache preprocessing_num_workers dataset_processes "
    "dataset_num_proc preprocessing_batch_size dataset_keep_in_memory",
    "leave it out; accel-ddp report draws the curves": "plot_loss",
    "leave it out; a run needs a new --output_dir, or --resume": "overwrite_output_dir auto_resume_from_checkpoints",
    "leave it out; the config of --model has it": "model_type tokenizer_type tokenizer_use_fast use_fast_tokenizer "
    "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model is_falcon_derived_model processor_type lora_task_type",
    "leave it out; the loss is computed in chunks without it": "use_liger_kernel enable_liger_kernel plugins liger_kernel_config "
    "liger_rope liger_rms_norm liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy flash_attn_cross_entropy "
    "cut_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel use_unsloth",
    "use accel-ddp run --config_file fsdp.yaml to shard the model": "deepspeed fsdp fsdp_config fsdp_version "
    "fsdp_final_state_dict_type",
    "set the variable WANDB_ENTITY": "wandb_entity", "set the variable WANDB_MODE": "wandb_mode",
    "leave it out; the launcher sets it": "local_rank world_size ddp ddp_backend device use_ray ray_num_workers",
    "use --min_lr_ratio or --decay_ratio": "lr_scheduler_kwargs", "use --beta1, --beta2, --eps or --momentum": "optim_args",
    "use --best_metric NAME:max or NAME:min": "greater_is_better",
    "leave it out; the loss is the mean over the items of all ranks and micro-batches": "average_tokens_across_devices",
    "leave it out; evaluations compute in --mixed_precision": "bf16_full_eval fp16_full_eval",
    "leave it out; --gradient_checkpointing chooses it": "gradient_checkpointing_kwargs use_reentrant_gc",
    "leave it out; --compile chooses it": "torch_compile_backend torch_compile_mode",
    "leave it out; it is off in training": "use_cache", "leave it out; step 1 is logged with --log_every 1": "logging_first_step",
    "leave it out; --on_nonfinite decides, and nothing is hidden": "logging_nan_inf_filter",
    "leave it out; every log line has the rate, and the report the total": "include_num_input_tokens_seen "
    "include_tokens_per_second include_tkps include_effective_tokens_per_second",
    "leave it out; rank 0 prints a panel in a terminal, and lines elsewhere": "log_level log_level_replica disable_tqdm "
    "log_on_each_node",
    "leave it out; `measure` and `summarize` of the recipe get the rows of all ranks": "prediction_loss_only "
    "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics",
    "leave it out; SIGTERM always saves a checkpoint": "enable_jit_checkpoint",
    "leave it out; disks need not be shared: one node writes the checkpoints": "save_on_each_node",
    "set the variable HF_TOKEN, or run hf auth login": "hub_token hf_hub_token hf_use_auth_token push_to_hub_token",
    "leave it out; the model is uploaded once, at the end (--push_to_hub)": "hub_strategy hub_always_push",
    "leave it out; --resume skips data without reading them": "ignore_data_skip", "use accel-ddp run --cpu": "use_cpu no_cuda",
    "use accel-ddp run --config_file": "accelerator_config",
    "leave it out; worker processes stay alive, and batches keep their order": "dataloader_persistent_workers dataloader_in_order",
    "leave it out; other columns are ignored, and the run names them": "remove_unused_columns label_names",
    "leave it out; log.jsonl and the report have the memory and the phases of each rank": "skip_memory_metrics debug",
    "run accel-ddp predict or accel-ddp evaluate after training": "do_predict predict_with_generate",
    "leave it out; exports are safetensors": "save_safetensors tokenizer_save_jinja_files",
    "use --train_file PATH:WEIGHT for a mixture": "interleave_probs mix_strategy",
    "leave it out; its columns are found by their names, or by --messages_column and the others": "dataset_kwargs",
    "leave it out; wandb is not asked to watch gradients, the log has their norm": "wandb_watch",
    "leave it out; loading is memory-efficient": "low_cpu_mem_usage model_init_kwargs device_map",
    "leave it out, or turn --gradient_checkpointing off": "disable_gradient_checkpointing",
    "leave it out; longer texts lose their end (--max_length)": "truncation_mode",
    "leave it out; 4bit is nf4 with double quantization (--quantize)": "bnb_4bit_quant_type use_bnb_nested_quant "
    "quantization_type double_quantization bnb_4bit_quant_storage quantization_method bnb_config_kwargs",
    "leave it out; the order of rows follows from --seed": "shuffle_dataset shuffle_merged_datasets",
    "use --optimizer muon": "use_muon",
}  # fmt: skip
# Why a setting of another toolkit has no equivalent, and what that changes.
NO_EQUIVALENT = {
    "noise on embeddings is not implemented": "neftune_noise_alpha noisy_embedding_alpha",
    "labels are not smoothed, except in dpo": "label_smoothing_factor",
    "code from the Hub is never run: the model needs a class in transformers": "trust_remote_code",
    "always the newest version on the Hub; download another one and give its folder": "model_revision revision_of_model revision",
    "an upload goes to the main branch": "hub_revision",
    "tensor, pipeline and context parallelism are missing; FSDP shards weights only": "parallelism_config "
    "sequence_parallel_degree context_parallel_size tensor_parallel_size",
    "no last step is dropped: the next epoch fills it": "dataloader_drop_last",
    "the rows are always shuffled": "disable_shuffling sample_packing_sequentially curriculum_sampling",
    "a checkpoint always has what --resume needs": "save_only_model save_first_step",
    "evaluations begin before the first step (--no_eval_first: after the first epoch)": "eval_delay",
    "the Hub decides whether a new repository is private": "hub_private_repo",
    "memory is not emptied between steps": "torch_empty_cache_steps gc_steps",
    "a Space or bucket of trackio is not created; --report_to trackio writes locally": "trackio_space_id trackio_bucket_id "
    "trackio_static_space_id",
    "hooks have no state of their own": "restore_callback_states_from_checkpoint",
    "these optimizers are missing; own_model takes any": "optim_target_modules use_galore galore_rank use_apollo use_badam "
    "badam_mode use_adam_mini lisa_n_layers",
    "all adapters have one learning rate": "loraplus_lr_ratio loraplus_lr_embedding embedding_lr embedding_lr_scale",
    "only plain LoRA is trained": "use_dora use_rslora peft_use_dora peft_use_rslora pissa_init relora peft "
    "peft_init_lora_weights oft_rank gptq use_llama_pro",
    "adapters are trained in linear layers, and in the embeddings of tokens that --chat_template adds": "lora_modules_to_save "
    "modules_to_save additional_target lora_target_parameters peft_layers_to_transform peft_trainable_token_indices "
    "fix_untrained_tokens",
    "only --chat_template adds tokens: add others to the tokenizer and the model before": "tokens add_tokens add_special_tokens "
    "resize_vocab new_special_tokens_config resize_token_embeddings_to_32x",
    "parts are frozen by name (--freeze), not unfrozen": "unfrozen_parameters freeze_trainable_layers freeze_trainable_modules "
    "freeze_extra_modules",
    "the learning rate falls until the last step": "cosine_constant_lr_ratio",
    "RoPE is used as in the model's config": "rope_scaling rope_theta use_pose shift_attn s2_attention",
    "images, video and sound are not read by sft": "image_max_pixels media_dir freeze_vision_tower freeze_language_model",
    "only bf16, fp16 and float32 are computed": "fp8 qat quantization",
    "activations stay on the GPU; gradient checkpointing saves memory": "activation_offloading use_unsloth_gc",
    "the auxiliary loss of a router is off, because it depends on the split into micro-batches": "router_aux_loss_coef "
    "moe_aux_loss_coef",
    "each --loss has one formula; see docs/preferences.md": "loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef "
    "discopop_tau use_weighting dpo_use_weighting use_dft_loss",
    "the reference is the model before training": "ref_model ref_model_path sync_ref_model ref_model_mixup_alpha "
    "ref_model_sync_steps ref_model_adapters ref_model_quantization_bit",
    "reinforcement learning is missing; preference losses (dpo --loss) and reward models are there": "trl vllm process_reward_model "
    "reward_model_type ppo_epochs",
    "a run stops for a loss that is not finite, and reports one that rises": "loss_watchdog_threshold",
    "the system text comes from the rows": "default_system_message default_system drop_system_message",
    "rows are not removed or changed; filter the file before": "dataset_exact_deduplication min_sample_len dataset_shard_num "
    "skip_prepare_dataset",
    "sft measures loss and perplexity on one set of rows": "do_bench_eval do_causal_lm_eval compute_accuracy eval_on_each_dataset",
    "this tracker is missing; --report_to has wandb, tensorboard, trackio and mlflow": "use_comet comet_project_name use_swanlab",
    "accel_ddp sets the wandb run id, so --resume continues the run": "wandb_run_id",
    "the tokens of tools are those of the model's chat template": "tool_format split_special_tokens",
    "--broadcast_buffers decides which buffers are copied": "ignore_bias_buffers",
    "there is no other tokenizer than the model's": "tokenizer_config", "unknown options are always refused": "strict",
}  # fmt: skip
# What is different although there is an option, by the name in the other toolkit.
NOTES = {
    "per_device_train_batch_size": "changes memory and time; the result depends on --global_batch_size",
    "micro_batch_size": "changes memory and time; the result depends on --global_batch_size",
    "batch_size": "per GPU there, the sum over all GPUs here",
    "auto_find_batch_size": "auto chooses by memory before training, and is the default of sft, dpo and reward",
    "max_steps": "-1 there is 0 here", "warmup_steps": "a fraction below 1 (transformers 5) is --warmup_ratio",
    "lr_scheduler_type": "constant_with_warmup is constant, cosine_with_min_lr is cosine with --min_lr_ratio, warmup_stable_decay "
    "is wsd",
    "lr_scheduler": "constant_with_warmup is constant, warmup_stable_decay is wsd; one_cycle and rex are missing",
    "optim": "adamw_torch and adamw_torch_fused are adamw, the 8-bit ones adamw8bit (torchao); paging is missing",
    "logging_strategy": "always every --log_every updates", "logging_dir": "trackers write into the run folder",
    "save_strategy": "--save_every 0 saves after every epoch; a run always saves", "save_total_limit": "at least 2",
    "eval_strategy": "--eval_every 0 evaluates after every epoch; a run always evaluates",
    "evals_per_epoch": "updates between evaluations here; 0: one per epoch",
    "saves_per_epoch": "updates between saves here; 0: one per epoch",
    "load_best_model_at_end": "the best checkpoint is exported; without it, the last weights are",
    "metric_for_best_model": "without eval_; your own metric needs :min or :max",
    "push_to_hub": "a name here, not a switch; uploads once, at the end", "hub_model_id": "uploads once, at the end",
    "report_to": "commas between trackers; none is the default", "run_name": "default: the name of the run folder",
    "bf16": "bf16 is the default on GPUs that have it; the weights stay float32", "fp16": "fp16; the weights stay float32",
    "torch_compile": "auto compiles where it saves time", "seed": "default 0 instead of 42",
    "data_seed": "one seed for new weights, the order of rows and dropout",
    "resume_from_checkpoint": "without a value it continues the run in --output_dir; checkpoints of other toolkits cannot be "
    "resumed",
    "weight_decay": "default 0.01 instead of 0; biases and norms have none in both",
    "num_train_epochs": "the next epoch fills the last step", "full_determinism": "the order of rows and dropout are always seeded",
    "ddp_timeout": "tokenizing does not count, so 600 s are enough", "dataset": "a Hub name; files go to --train_file",
    "datasets": "a Hub name goes to --dataset, and one is possible", "max_samples": "of all files together, drawn at random",
    "val_set_size": "a number of rows is --max_eval_items", "val_size": "a number of rows is --max_eval_items",
    "sequence_len": "longer rows are truncated, and not dropped", "max_length": "auto fits the data, up to the model's limit",
    "quantization_bit": "4 is 4bit, 8 is 8bit",
    "lora_model_dir": "pass the adapter folder, without --lora_r, to continue training it",
    "adapter_name_or_path": "pass the adapter folder, without --lora_r, to continue training it",
    "template": "leave it out; the model's own chat template is used, and --chat_template is for models without one",
    "chat_template": "leave it out for tokenizer_default; for models without a template: plain, chatml, llama3, gemma, mistral or "
    "a file",
    "flash_attention": "leave it out; padding-free attention needs no package",
    "flash_attn": "leave it out; padding-free needs no package",
    "attention": "leave it out; padding-free attention needs no package",
    "optimizer": "the 8-bit ones are adamw8bit (torchao); no paging", "loss_type": "sigmoid is dpo; nll is sft itself",
    "pref_loss": "sigmoid is dpo", "use_peft": "0: all weights are trained",
    "gradient_checkpointing": "default auto in sft, dpo and reward: if a step does not fit otherwise",
    "lr_groups": "a part of the names, = and the learning rate",
    "learning_rate": "auto by default in sft, dpo and reward: by the size of the model", "bfloat16": "bfloat16",
    "pure_bf16": "bfloat16", "eval_on_start": "on by default", "rpo_alpha": "mean over each answer's tokens",
    "pref_ftx": "mean over each answer's tokens", "dataset_prepared_path": "one cache for all runs, by content",
    "tokenized_path": "one cache for all runs, by content", "lora_target": "all is all-linear",
    "padding_free": "auto by default, without flash-attn", "dataset_streaming": "needs --steps",
    "early_stopping_steps": "evaluations without a better --best_metric",
    "dtype": "float32 by default, as there; with --lora_r as in the files", "lora_alpha": "default 16", "lora_dropout": "default 0",
}  # fmt: skip
ROLES = {"system", "user", "assistant", "tool", "human", "gpt", "bot", "chatgpt", "observation", "function", "function_call"}
# The columns of their datasets. The option of a chat is `messages_column`, and of pairs and prompts `prompt_column`.
COLUMNS = {
    "messages": "field_messages messages", "text": "field text_column", "prompt": "field_prompt field_instruction prompt",
    "answer": "field_output field_completion response", "chosen": "field_chosen chosen", "rejected": "field_rejected rejected",
    "label": "field_label kto_tag",
}  # fmt: skip
# Further columns that are read if they have these names, and keys of a dataset with their usual values, which need no option.
USUAL = {
    "query": ("input", "context"), "field_input": ("input", "context"), "system": ("system", "system_prompt"),
    "field_system": ("system", "system_prompt"), "history": ("history",), "tools": ("tools",), "field_tools": ("tools",),
    "role_tag": ("from", "role"), "content_tag": ("value", "content"), "role": ("from", "role"), "content": ("value", "content"),
    "message_field_role": ("from", "role"), "message_field_content": ("value", "content"), "train_on_eos": ("turn",),
    "roles_to_train": (["assistant"], ["gpt"]), "formatting": ("alpaca", "sharegpt"), "ranking": (True, False),
    "chat_template": ("tokenizer_default",), "message_field_training": ("train", "training", "weight"),
}  # fmt: skip
FORMATS = ("json", "csv", "parquet", "text", "arrow")  # a dataset with such a path has its rows in `data_files`
ELSEWHERE = ("path", "data_files", "name", "split", "type", "ds_type", "file_name", "hf_hub_url", "subset", "columns", "tags")
