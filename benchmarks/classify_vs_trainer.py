"""`recipes/classify.py` beside transformers' Trainer: the same model, data, batch, learning rates and precision.

    python benchmarks/classify_vs_trainer.py
    python benchmarks/classify_vs_trainer.py --train_file train.tsv --eval_file dev.tsv --text_column sentence --lr 5e-5

Each trains on one device in a process of its own, from its launch to the saved model, with empty caches of data. The
order of the data and the start of the classifier's weights are not the same, so that accuracies differ by chance.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
# What both take, under the recipe's names.
SHARED = ["model", "dataset", "train_file", "eval_file", "text_column", "label_column"]
SHARED += ["epochs", "global_batch_size", "lr", "weight_decay", "max_length", "mixed_precision", "seed"]


def main(options: argparse.Namespace) -> None:
    words = [word for name in SHARED for word in (f"--{name}", str(getattr(options, name)))]
    columns = {}
    for name, run in (("classify.py", run_recipe), ("Trainer", run_trainer)):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name} trains ...", flush=True)
            columns[name] = run(words, options, Path(folder))
    ours, theirs = columns.values()
    rows = {
        "accuracy": ("accuracy", ".4f"),
        "training, seconds": ("training_seconds", ".2f"),
        "training, items a second": ("items_per_second", ".1f"),
        "launch to saved model, seconds": ("wall_seconds", ".2f"),
    }
    print(f"\n{'':34}{'classify.py':>14}{'Trainer':>14}{'ratio':>10}")
    for title, (key, form) in rows.items():
        print(f"{title:34}{ours[key]:>14{form}}{theirs[key]:>14{form}}{ours[key] / theirs[key]:>10.3f}")


def timed(command: list[str], folder: Path) -> float:
    """Seconds in all. On the first GPU: with several, Trainer would spread the batch over them."""
    caches = {"HF_DATASETS_CACHE": str(folder / "datasets"), "ACCEL_DDP_CACHE": str(folder / "tokenised")}
    one_gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    began = time.monotonic()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, env={**os.environ, **caches, **one_gpu})
    return time.monotonic() - began


def run_recipe(words: list[str], options: argparse.Namespace, folder: Path) -> dict[str, float]:
    never = ["--no_eval_first", "--eval_every", str(10**9), "--save_every", str(10**9)]  # but at the end, as the Trainer
    # With every step in the log, the last is the end of training. It costs only us.
    wall_seconds = timed(
        [
            str(RECIPES / "classify.py"),
            *words,
            *never,
            *("--log_every", "1", "--micro_batch_size", str(options.global_batch_size), "--output_dir", str(folder / "run")),
        ],
        folder,
    )
    events = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    updates = [event for event in events if event["event"] == "update"]
    seconds = updates[-1]["time"] - next(event["time"] for event in events if event["event"] == "start")
    return {
        "accuracy": next(event["accuracy"] for event in events if event["event"] == "evaluate"),
        "training_seconds": seconds,
        "items_per_second": sum(update["items"] for update in updates) / seconds,
        "wall_seconds": wall_seconds,
    }


def run_trainer(words: list[str], options: argparse.Namespace, folder: Path) -> dict[str, float]:
    wall_seconds = timed([__file__, *words, "--trainer_in", str(folder / "run")], folder)
    return {**json.loads((folder / "run" / "result.json").read_text()), "wall_seconds": wall_seconds}


def train_with_trainer(options: argparse.Namespace, folder: Path) -> None:
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    import accel_ddp

    on_gpu = torch.cuda.is_available()
    places = {name: getattr(options, name) for name in ("model", "dataset", "train_file", "eval_file", "seed")}
    train, test = accel_ddp.data.load_rows(accel_ddp.config.RecipeConfig(**places))
    labels = accel_ddp.labels.Labels.of(train, test, options.label_column)
    place = accel_ddp.models.locate(options.model)
    tokenizer = AutoTokenizer.from_pretrained(place)

    def encode(rows):
        tokens = tokenizer(rows[options.text_column], truncation=True, max_length=options.max_length)
        return {**tokens, "labels": labels.encode(rows)}

    train, test = (rows.map(encode, batched=True, remove_columns=rows.column_names) for rows in (train, test))
    model = AutoModelForSequenceClassification.from_pretrained(
        place, num_labels=len(labels.names), ignore_mismatched_sizes=True, dtype=torch.float32
    )
    num_workers = max(1, min(4, (os.cpu_count() or 1) - 1)) if on_gpu else 0  # as the recipe
    arguments = TrainingArguments(
        output_dir=str(folder),
        seed=options.seed,
        use_cpu=not on_gpu,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.global_batch_size,
        per_device_eval_batch_size=64,
        learning_rate=options.lr,
        lr_scheduler_type="linear",
        warmup_steps=0,
        weight_decay=options.weight_decay,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=options.mixed_precision == "bf16",
        fp16=options.mixed_precision == "fp16",
        tf32=True if on_gpu else None,
        dataloader_num_workers=num_workers,
        dataloader_pin_memory=on_gpu,
        dataloader_prefetch_factor=4 if num_workers else None,
        dataloader_persistent_workers=num_workers > 0,
        logging_steps=10,
        eval_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )

    class Stopwatch(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            self.began = time.monotonic()

        def on_train_end(self, *args, **kwargs):
            if on_gpu:
                torch.cuda.synchronize()
            self.seconds = time.monotonic() - self.began

    stopwatch = Stopwatch()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=test,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if on_gpu else None),
        processing_class=tokenizer,
        compute_metrics=lambda outcome: {"accuracy": float((outcome.predictions.argmax(-1) == outcome.label_ids).mean())},
        callbacks=[stopwatch],
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    result = {
        "accuracy": metrics["eval_accuracy"],
        "training_seconds": stopwatch.seconds,
        "items_per_second": options.epochs * len(train) / stopwatch.seconds,
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded:all-MiniLM-L6-v2")
    parser.add_argument("--dataset", default="embedded:rotten_tomatoes_small")
    parser.add_argument("--train_file", default="", help="instead of --dataset")
    parser.add_argument("--eval_file", default="")
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--label_column", default="label")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--global_batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"], default="no")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainer_in", type=Path, help=argparse.SUPPRESS)  # the folder of the Trainer's own process
    options = parser.parse_args()
    train_with_trainer(options, options.trainer_in) if options.trainer_in else main(options)
