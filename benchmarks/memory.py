"""The peak of GPU memory next to its estimate, for an encoder, two decoders and LoRA, with random weights.

    python benchmarks/memory.py                    # four models in about two minutes on one GPU; prints a Markdown table
    python benchmarks/memory.py --models bert lora --compile off auto

All texts have the largest length, so that the estimate, which assumes that, can be compared. Each run is a process of its own. The
peak is `torch.cuda.max_memory_allocated` after the last step, before the evaluation.
"""

import argparse
import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes"), str(ROOT / "benchmarks")]

LENGTH, STEPS = 512, 6


@dataclasses.dataclass
class Case:
    recipe: str
    family: str  # of synthetic.py, for the tokenizer
    vocabulary: int
    shape: dict[str, Any]
    options: list[str]


LARGE = {
    "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632,
}  # fmt: skip
SMALL = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
    "tie_word_embeddings": True,
}  # fmt: skip
CASES = {
    "bert": Case("classify", "bert", 30522, {}, ["--micro_batch_size", "16"]),
    "135M": Case("sft", "decoder", 49152, SMALL, []),
    "1.4B": Case("sft", "decoder", 32000, LARGE, []),
    "lora": Case("sft", "decoder", 32000, LARGE, ["--lora_r", "16"]),
    # Not among the default models:
    "checkpointing": Case("sft", "decoder", 32000, LARGE, ["--gradient_checkpointing"]),
    "accumulation": Case("sft", "decoder", 32000, LARGE, ["--micro_batch_size", "4"]),
    "float32": Case("classify", "bert", 30522, {}, ["--micro_batch_size", "16", "--mixed_precision", "no"]),
}


def make_folder(case: Case, folder: Path) -> Any:
    """Write config.json, the tokenizer, and rows of the largest length. Return the config."""
    from synthetic import Family, make_tokenizer
    from transformers import BertConfig, LlamaConfig

    family = Family(case.vocabulary, case.shape, rows=0, max_length=LENGTH)
    tokenizer = make_tokenizer(case.family, family)
    tokenizer.save_pretrained(folder)
    kind = BertConfig if case.family == "bert" else LlamaConfig
    config = kind(vocab_size=case.vocabulary, pad_token_id=tokenizer.pad_token_id, **case.shape)
    config.save_pretrained(folder)
    words = LENGTH - (2 if case.family == "bert" else 1)  # special tokens are added
    rows = [{"text": " ".join(f"w{(i * 31 + j) % 1000}" for j in range(words)), "label": f"class{i % 4}"} for i in range(64)]
    if case.family != "bert":
        rows = [{"text": row["text"]} for row in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


def run_case(name: str, compile: str, steps: int) -> None:
    """Train some steps, print the measured and the estimated bytes, and end the process."""
    import torch

    import accel_ddp
    from accel_ddp.config.parsing import parse_config
    from accel_ddp.engine.hook import Hook
    from accel_ddp.memory import estimate as memory

    case = CASES[name]
    recipe = importlib.import_module(case.recipe)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config = make_folder(case, folder)
        rows = str(folder / "rows.jsonl")
        words = [
            "--model", made, "--train_file", rows, "--eval_file", rows, "--max_eval_items", "2", "--max_length", str(LENGTH),
            "--global_batch_size", "8", "--eval_batch_size", "1", "--steps", str(steps), "--no_eval_first", "--eval_every", "1000",
            "--save_every", "1000", "--log_every", "1", "--compile", compile, "--output_dir", str(folder / "run"),
            "--cache_dir", str(folder / "cache"), "--mixed_precision", "bf16",
        ]  # fmt: skip
        if case.recipe == "classify":
            words[words.index("--global_batch_size") + 1] = "16"
        else:
            words += ["--samples", "0", "--lr", "1e-5", "--micro_batch_size", "8", "--no_gradient_checkpointing"]
        cfg = parse_config(recipe.Config, [*words, *case.options])
        model_class = recipe.Task.model_class
        micro, count = cfg.split(1)
        run = memory.prepare(cfg, model_class, cfg.mixed_precision, micro)
        found = memory.estimate(run, 1, count)

        def build_model(name: str, cfg: Any, accelerator: Any, tokenizer: Any, adjust: Any, **labels: Any) -> Any:
            import transformers

            torch.manual_seed(0)
            own = type(config).from_pretrained(made, **labels)
            with torch.device(accelerator.device):
                model = getattr(transformers, model_class).from_config(own)
            model._new_modules, model._adapters, model._source = [], None, made
            return accel_ddp.models.prepare(model, cfg, accelerator, lora_task="SEQ_CLS" if labels else "CAUSAL_LM")

        accel_ddp.models.build = build_model
        peaks: list[int] = []
        on_gpu = torch.cuda.is_available()

        def print_result() -> None:
            reserved, free = (torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()) if on_gpu else (0, (0, 0))
            outside = free[1] - free[0] - (torch.cuda.memory_reserved() if on_gpu else 0)
            sizes = {"measured": peaks[-1], "steps": peaks, "reserved": reserved, "outside": outside}
            result = {"model": name, "compile": compile, **sizes, **found.rows, "graphs": found.graphs, "total": found.total}
            print("RESULT " + json.dumps(result), flush=True)

        class Peak(Hook):
            def on_update(self, numbers: Any, pace: Any) -> None:
                peaks.append(torch.cuda.max_memory_allocated() if on_gpu else 0)
                if len(peaks) == steps:  # the checkpoint of the largest model would take a minute
                    print_result()
                    shutil.rmtree(folder, ignore_errors=True)
                    os._exit(0)

        accelerator = accel_ddp.start(cfg)
        task = recipe.Task(cfg, accelerator)
        model = accel_ddp.load_model(task)
        train, _ = task.batches()
        parts = {"task": task, "model": model, "optimizer": accel_ddp.optim.build(model, cfg), "train": train}
        accel_ddp.fit(accelerator, cfg, **parts, hooks=[Peak()])


def table(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table in GiB."""
    shown = ["weights", "gradients", "optimizer", "copies", "activations", "loss", "other", "graphs"]
    lines = [
        "| model | --compile | "
        + " | ".join(shown)
        + " | estimate | measured | estimate / measured | reserved | outside of torch |",
        "|---|---" + "|--:" * (len(shown) + 5) + "|",
    ]
    for row in results:
        total = row["total"] + row["graphs"]
        cells = [row["model"], row["compile"], *(f"{row[name] / 2**30:.2f}" for name in shown), f"{total / 2**30:.2f}"]
        cells += [f"{row['measured'] / 2**30:.2f}", f"{total / max(1, row['measured']):.2f}"]
        cells += [f"{row['reserved'] / 2**30:.2f}", f"{row['outside'] / 2**30:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=["bert", "135M", "1.4B", "lora"])
    parser.add_argument("--compile", nargs="+", choices=("auto", "off"), default=["auto", "off"])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run_case(given.models[0], given.compile[0], given.steps)
    results = []
    for name in given.models:
        for compile in given.compile:
            words = [sys.executable, __file__, "--one", "--models", name, "--compile", compile, "--steps", str(given.steps)]
            done = subprocess.run(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                print(f"{name} --compile {compile} failed:\n{done.stdout[-3000:]}", flush=True)
                continue
            results.append(json.loads(lines[-1].removeprefix("RESULT ")))
            print(
                f"{name} --compile {compile}: peaks after each step, in GiB:", [round(p / 2**30, 3) for p in results[-1]["steps"]]
            )
    print(table(results))


if __name__ == "__main__":
    main()
