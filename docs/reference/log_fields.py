"""The fields of log.jsonl and incidents.jsonl, for docs/log.md.

A field has its type and its meaning. "missing" in a type: the field is optional. Tests compare real runs with the fields.
"""

ANY = "any other name"
Fields = dict[str, tuple[str, str]]

EVERY_EVENT: Fields = {
    "event": ("string", "one of the names below"),
    "step": ("integer", "optimizer updates before the event; `update` and `ranks` count this one too"),
    "time": ("number (seconds since 1970)", "when the line was written"),
    "repeated": ("true, or missing", "an earlier attempt logged this step too"),
}
EVENTS: dict[str, tuple[str, Fields]] = {
    "start": ("A process begins to train, at step 0 or at the step of its checkpoint.", {
        "schema": ("integer", "version of these fields"),
        "total_steps": ("integer (updates)", "the last step of the run"),
        "command": ("list of strings", "the recipe and its options without secrets"),
        "launcher": ("list of strings, or missing", "the whole command on the main node, from `accel-ddp run`, `accelerate launch` or "
                     "torchrun on, without secrets. Missing under Slurm, Kubernetes and `accel-ddp launch`"),
        "ranks": ("list of objects", "for each rank: `rank`, `node`, `host`, `pid`, `device`, and on a GPU `memory` in bytes"),
        "versions": ("object", "versions of Python, torch and other packages"),
        "options": ("object", "options that differ from their defaults, each as [value, default]"),
        "environment": ("object", "variables that change how a run computes or communicates, such as NCCL_*, without secrets"),
        "batch": ("object", "items per step (`global`) and per micro-batch (`micro`), and micro-batches per rank (`accumulation`). "
                  "If options count tokens, `global` is a mean, and the others are estimates for texts of `--max_length`"),
        "items": ("integer", "rows of the training data"),
        "precision": ("string", "no, bf16 or fp16"),
        "sharding": ("object, or missing", "with FSDP: `text` describes it, `replicas` of the model are sharded over `shards` ranks "
                     "each, and the settings `reshard_after_forward`, `cpu_offload`, `activation_checkpointing`, `layer_classes`"),
        "model": ("object", "number of `parameters`, of `trained` ones, and `gradient_bytes`"),
        "memory": ("object (bytes), or missing", "the [estimate](memory.md) of each GPU: the peak `estimated`, and its parts. "
                   "`micro_batch_size` is 1 if the option is `auto`. Missing on CPUs without `--gpu_memory_gb`"),
        "eval_rows": ("object, or missing", "if evaluation rows were drawn (`--max_eval_items`) or set aside: their `number`, `digest` "
                      "and `rows`, their positions from 0 in the file or split (with `--streaming`, of blocks), such as \"3,7-9\"; "
                      "missing above 20,000 characters"),
    }),
    "warm_up": ("The layers are compiled from the next step on.", {"seconds": ("number (seconds)", "duration")}),
    "restart": ("A launcher restarted the ranks after a failure ([restarts](several_nodes.md#restart-after-a-failure)).", {
        "restart": ("integer", "number of the restart, from 1"),
        "lost_steps": ("integer (updates)", "steps that are repeated"),
        "lost_seconds": ("number (seconds)", "time since the checkpoint was complete"),
        "committed": ("number (seconds since 1970)", "when the checkpoint was complete, or when the run began"),
        "failed_step": ("integer (updates)", "the step at which the attempt before failed"),
        "text": ("string", "why it failed"),
        "goodput": ("number (0 to 1) or null", "share of the time since the first attempt that was spent on steps that count"),
    }),
    "update": ("An optimizer update, every `--log_every` steps and after the last step.", {
        "loss": ("number", "mean over the items of all ranks"),
        "grad_norm": ("number", "norm of all gradients before clipping; if it or the loss is not finite, the step was skipped"),
        "lr": ("number", "learning rate"),
        "items": ("number", "items of this step on all ranks; for language models, tokens"),
        "samples_per_second": ("number (rows/s)", "over all ranks"),
        "tokens": ("number, or missing", "tokens of this step, without padding"),
        "tokens_per_second": ("number (tokens/s), or missing", "over all ranks"),
        "tflops": ("number (10^12 FLOP/s), or missing", "of the model, over all ranks"),
        "mfu": ("number (0 to 1), or missing", "model FLOPs utilization of the GPUs"),
        ANY: ("number, or missing", "`rows/NAME`: rows of one dataset of a mixture since the first step; otherwise a mean of what the "
              "loss function returned, over the items of all ranks, such as `rewards/margins`"),
    }),
    "ranks": ("Where the time of each rank goes: seconds per step, averaged over the steps from `first_step` to `last_step`, with one "
              "number per rank. The parts add up to the duration of a step. Evaluations and saves are not included.", {
        "first_step": ("integer (updates)", "first step that is included"),
        "last_step": ("integer (updates)", "last step that is included; on a GPU a few steps before `step`"),
        "data": ("list of numbers (seconds)", "waiting for the data loader"),
        "forward": ("list of numbers (seconds)", "forward passes"),
        "backward": ("list of numbers (seconds)", "backward passes, until the last gradient of this rank is computed"),
        "optimizer": ("list of numbers (seconds)", "clipping and optimizer step"),
        "other": ("list of numbers (seconds)", "logging and hooks between two steps"),
        "communication": ("list of numbers (seconds)", "waiting for other ranks and the network, without overlap with computation"),
        "system": ("object of lists", "state of the machine, about every 2 s. `gpu_memory`: peak bytes that torch allocated. "
                   "`gpu_memory_used`: bytes in use on the GPU by all processes. `gpu_utilisation`: 0 to 1. `gpu_temperature`: °C. "
                   "`gpu_power`: watts. `cpu`: cores that the rank and its data workers use. `memory`: bytes of the rank and its data "
                   "workers. `host_memory`: used share of the node's memory. Unknown values are missing or \"nan\""),
    }),
    "evaluate": ("An evaluation.", {ANY: ("number", "a metric of the evaluation")}),
    "tables": ("An evaluation stored tables: scores of each class, a confusion matrix, sample predictions.", {
        "path": ("string", "file with the tables, relative to the run folder"),
        "names": ("list of strings", "names of the tables"),
    }),
    "save": ("A checkpoint is complete. The line may come some steps after the step of the checkpoint.", {
        "path": ("string", "folder of the checkpoint"),
    }),
    "end": ("The run is complete, or was stopped on request. A run that failed has no such event; see incidents.jsonl.", {
        "skipped_steps": ("integer (updates)", "steps of this process that were skipped because loss or gradients were not finite"),
        "stopped": ("string, or missing", "who asked for the stop"),
        "goodput": ("number (0 to 1), or missing", "as in `restart`"),
        "breakdown": ("object, or missing", "the whole attempt: `first_step`, `last_step`, `seconds` per step, the share of each part "
                      "of `ranks` in it (0 to 1, mean over ranks), `slowest_rank`, `slowest_host`, and `slowest_cost`: seconds per "
                      "step that the others wait for this rank"),
        "memory": ("object (bytes), or missing", "on GPUs: `measured`, the largest peak that torch allocated on a GPU of the run, and "
                   "`estimated` and `micro_batch_size` as in `start`"),
        "best_step": ("integer (updates), or missing", "with `--keep_best`: the exported step, if it is not the last one"),
        ANY: ("number", "a metric of the evaluation after the last step, or after `best_step`"),
    }),
}  # fmt: skip
INCIDENT: Fields = {
    "time": ("number (seconds since 1970)", "when it was found"),
    "level": ("string", "`error` stopped the run, `warning` did not, `info` reports the end of a fault, or a stop"),
    "kind": ("string", "a [kind of incident](codes.md#kinds-of-incidents)"),
    "text": ("string", "the message without secrets; it may have several lines"),
    "rank": ("integer, or missing", "the rank at fault, or the one that printed the warning"),
    "host": ("string, or missing", "its host"),
    "step": ("integer (updates), or missing", "the step at which it happened or began"),
}
