"""The process of one Trainer for vs_trainer.py, and one that evaluates the models of both sides."""

import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def load_model(spec: dict[str, Any], attention: str | None) -> Any:
    """Load the model as a user of Trainer does: in float32, or in bf16 or 4 bits below adapters of PEFT."""
    import torch
    import transformers

    adapters, kind = spec.get("adapters", ""), "CausalLM" if spec["recipe"] == "sft" else "SequenceClassification"
    options: dict[str, Any] = {"dtype": torch.bfloat16 if adapters and torch.cuda.is_available() else torch.float32}
    options |= {"attn_implementation": attention} if attention else {}
    if adapters == "qlora":
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True
        )
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(spec["model"], **options)
    if adapters:
        import peft

        lora = peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)
    return model


def train_with_trainer(folder: Path) -> None:
    """Train as spec.json in the folder says. It has its own process, because some flags, such as torch_compile, stay in effect."""
    spec = json.loads((folder / "spec.json").read_text())
    import datasets
    import torch
    import transformers
    from torch.utils.data import Sampler
    from transformers.trainer_pt_utils import LengthGroupedSampler

    on_gpu = torch.cuda.is_available()
    transformers.set_seed(spec["seed"])
    transformers.utils.logging.disable_progress_bar()
    data, batch, flags = Path(spec["data"]), spec["batch"], dict(spec["flags"])
    rows, lengths = datasets.load_from_disk(str(data / "train_tokens")), np.load(data / "train_lengths.npy")
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec["model"])
    is_grouped, is_flat = flags.pop("group", False), flags.pop("flat", False)
    model = load_model(spec, flags.pop("attention", None))
    if spec["recipe"] == "sft":
        collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
        collate = transformers.DataCollatorWithFlattening() if is_flat else collate
    else:
        collate = transformers.DataCollatorWithPadding(tokenizer)
    if is_grouped:  # transformers 5 has renamed the flag
        known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
        is_new = "train_sampling_strategy" in known
        flags |= {"train_sampling_strategy": "group_by_length"} if is_new else {"group_by_length": True}
    order, seen = np.load(spec["order"]).tolist(), []

    class StoringSampler(Sampler):
        """Yields rows in our order or grouped by length, and stores them, because their tokens are counted afterwards."""

        def __init__(self):
            # The sampler that the flag creates. Here it gets the lengths; otherwise it would read every row at the start.
            self.inner = LengthGroupedSampler(batch, lengths=lengths.tolist()) if is_grouped else None
            self.epoch = 0

        def __len__(self):
            return len(rows)

        def __iter__(self):
            start = self.epoch * len(rows)
            self.epoch += 1
            for row in self.inner or order[start : start + len(rows)]:
                seen.append(row)
                yield row

    class Timed(transformers.Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return StoringSampler()

        def create_scheduler(self, num_training_steps, optimizer=None):
            """Use our linear schedule. Trainer's own begins with a rate of 0, so that its curve would be one step behind."""
            warm, total = spec["warmup_steps"], spec["steps"]
            share = lambda step: min((step + 1) / max(warm, 1), (total - step) / (total - warm))
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, share)
            return self.lr_scheduler

    wait = torch.cuda.synchronize if on_gpu else lambda: None
    offset = time.time() - time.perf_counter()
    times, losses = [], []

    class Stopwatch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (spec["warm"], spec["steps"]):
                wait()
            times.append(offset + time.perf_counter())

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"), seed=spec["seed"], use_cpu=not on_gpu, max_steps=spec["steps"],
        per_device_train_batch_size=batch, learning_rate=spec["lr"], weight_decay=0.01, max_grad_norm=1.0,
        bf16=spec["precision"] == "bf16",
        logging_steps=spec["log_every"], save_strategy="no", eval_strategy="no", report_to=[], disable_tqdm=True, **flags,
    )  # fmt: skip
    parts = {"model": model, "args": arguments, "train_dataset": rows, "data_collator": collate, "processing_class": tokenizer}
    trainer = Timed(**parts, callbacks=[Stopwatch()])
    trainer.train()
    if spec["kind"] == "curve":
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    measured = {"times": times, "losses": losses, "rows": seen[: spec["steps"] * batch]}
    (folder / "measured.json").write_text(json.dumps(measured))


def score_models(folders: list[Path]) -> None:
    """Write the evaluation loss of each saved model to its result.json: a mean over rows, or over tokens of a decoder."""
    import datasets
    import torch
    import torch.nn.functional as F
    import transformers

    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for folder in folders:
        result = json.loads((folder / "result.json").read_text())
        is_lm = result["spec"]["recipe"] == "sft"
        kind = transformers.AutoModelForCausalLM if is_lm else transformers.AutoModelForSequenceClassification
        model = kind.from_pretrained(folder / "model", dtype=torch.float32).eval().to(device)
        rows = datasets.load_from_disk(str(Path(result["spec"]["data"]) / "eval_tokens"))
        total, number = 0.0, 0
        for row in sorted(rows, key=lambda row: len(row["input_ids"])):
            ids = torch.tensor([row["input_ids"]], device=device)
            with torch.no_grad():
                logits = model(input_ids=ids).logits.float()
            if is_lm:
                total += float(F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))
                number += ids.shape[1] - 1
            else:
                total += float(F.cross_entropy(logits, torch.tensor([row["labels"]], device=device)))
                number += 1
        result["eval_loss"] = total / number
        (folder / "result.json").write_text(json.dumps(result))
        shutil.rmtree(folder / "model")


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train_with_trainer(Path(sys.argv[2]))
    else:
        score_models([Path(folder) for folder in sys.argv[2:]])
