"""Every recipe on real public data, compared with a peer: HF Trainer, Seq2SeqTrainer or sentence-transformers.

    python benchmarks/recipes.py --data FOLDER --peer
    python benchmarks/recipes.py --data FOLDER --peer --only tag embed --seeds 0 1 2 --jobs 4 --out results.json

FOLDER contains the data as they are published; see `read_data` for the names of the files. A peer gets the options of the recipe:
model, data, batch, learning rates, epochs and precision are the same. The order of the data and the initial values of new weights
differ, so that results differ by chance. The same functions evaluate the saved models of both sides. "before" is the recipe's own
evaluation.
"""

import argparse
import csv
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from seqeval.metrics import f1_score
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader

from accel_ddp.config.parsing import parse_config
from accel_ddp.sources.models import load_tokenizer, locate
from accel_ddp.tasks.masking import MaskedBlocks
from accel_ddp.tasks.mini_resnet import MiniResNetConfig, MiniResNetForImageClassification

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
transformers.utils.logging.disable_progress_bar()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PADDING = {"pad_to_multiple_of": 8 if DEVICE == "cuda" else None}  # as in the recipes
Rows = list[dict[str, Any]]


def read_data(name: str, data: Path) -> list[Rows]:
    """Return training rows and test rows."""
    lines = lambda file: [line.strip() for line in (data / file).read_text("utf-8").split("\n") if line.strip()]
    labelled = lambda found: [dict(zip(("text", "label"), line.rsplit("\t", 1))) for line in found]
    match name:
        case "classify-sst2":
            return [labelled(lines(f"sst2/{part}.tsv")[1:]) for part in ("train", "dev")]
        case "classify-agnews":  # the training texts have no titles, so that titles of test texts are not used
            classes, table = lines("ag_news/classes.txt"), csv.reader(lines("ag_news/test.csv"))
            test = [{"text": text, "label": classes[int(number) - 1]} for number, _, text in table]
            return [labelled(lines("ag_news/train10k.tsv")), test]
        case "classify-clinc150":
            whole = json.loads((data / "clinc150/data_full.json").read_text("utf-8"))
            return [[{"text": text, "label": intent} for text, intent in whole[part]] for part in ("train", "test")]
        case "tag-wikigold":  # there is no split; the last fifth of the sentences is the test set
            blocks = (data / "wikigold/wikigold.conll").read_text("utf-8").replace("-DOCSTART- O", "").split("\n\n")
            pairs = [[line.split() for line in block.split("\n") if line] for block in blocks]
            rows = [{"tokens": [word for word, _ in some], "tags": [tag for _, tag in some]} for some in pairs if some]
            return [rows[: len(rows) * 4 // 5], rows[len(rows) * 4 // 5 :]]
        case "sft-full" | "sft-lora":
            rows = json.loads((data / "alpaca/alpaca_en_demo.json").read_text("utf-8"))
            return [rows[:-100], rows[-100:]]
        case "seq2seq-scan":
            pairs = [[line[4:].split(" OUT: ") for line in lines(f"scan/{part}_simple.txt")] for part in ("train", "test")]
            return [[{"source": source, "target": target} for source, target in some] for some in pairs]
        case "images-mnist":
            arrays = np.load(data / "mnist/mnist_10000_2000.npz")
            pairs = [zip(arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test")]
            return [[{"x": pixels, "y": label} for pixels, label in some] for some in pairs]
        case "mlm-wikitext2":
            return [[{"text": line} for line in lines(f"wikitext2/{part}.txt")] for part in ("valid", "test")]
        case "embed-sick":  # pairs in which one sentence follows from the other, or means nearly the same
            tables = [[line.split("\t") for line in lines(f"sick/{part}.tsv")[1:]] for part in ("train", "test")]
            near = [[(a, b) for _, a, b, score, kind in rows if kind == "ENTAILMENT" or float(score) >= 4.5] for rows in tables]
            positives = {b for _, b in near[1]}  # a test anchor that is also a positive would find itself
            near[1] = [(a, b) for a, b in near[1] if a not in positives]
            return [[{"anchor": a, "positive": b} for a, b in rows] for rows in near]


def prepare(name: str, data: Path, folder: Path, quick: bool) -> dict[str, str]:
    """Write the rows, and a model for SCAN. Return the options that name them."""
    recipe, splits = TASKS[name][0].recipe, dict(zip(("train", "test"), read_data(name, data)))
    if quick:
        few = {"sft": 6, "classify": 150}.get(recipe, 64)  # there are 150 intents
        splits = {part: rows[:: max(1, len(rows) // few)][:few] for part, rows in splits.items()}
    folder.mkdir(parents=True, exist_ok=True)
    if recipe == "images":
        np.savez(folder / "data.npz", **{f"{x}_{part}": [row[x] for row in rows] for part, rows in splits.items() for x in "xy"})
        return {"train_file": str(folder / "data.npz"), "eval_file": str(folder / "data.npz")}
    for part, rows in splits.items():
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"train_file": str(folder / "train.jsonl"), "eval_file": str(folder / "test.jsonl")}
    return {**files, "model": word_level_t5(folder / "t5", splits["train"])} if recipe == "seq2seq" else files


def word_level_t5(folder: Path, rows: Rows) -> str:
    """Write a small T5 with random weights, whose tokens are whole words, and return its folder."""
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), *sorted({word for row in rows for text in row.values() for word in text.split()})]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=128, **special).save_pretrained(folder)
    shape = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 4, "feed_forward_proj": "gated-gelu"}
    config = transformers.T5Config(vocab_size=len(words), decoder_start_token_id=0, dropout_rate=0.0, **shape)
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)  # the ids 0 and 1 of <pad> and </s> are T5's
    return str(folder)


def read_rows(files: tuple[str, ...]) -> Rows:
    return [json.loads(line) for line in Path(*files).read_text().splitlines()]


def loaded(kind: str, folder: Path) -> tuple[Any, Any]:
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval().to(DEVICE)
    return model, transformers.AutoTokenizer.from_pretrained(folder, padding_side="right")


def padded(tokenizer: Any, texts: list, cfg: Any, **more: Any) -> Any:
    return tokenizer(texts, truncation=True, max_length=cfg.max_length, padding=True, return_tensors="pt", **more).to(DEVICE)


def peer_classify(recipe: Any, cfg: Any, place: str, tokenizer: Any) -> dict[str, Any]:
    rows = read_rows(cfg.train_file)
    names = sorted({row["label"] for row in rows})
    ids = tokenizer([row["text"] for row in rows], truncation=True, max_length=cfg.max_length)["input_ids"]
    rows = [{"input_ids": tokens, "labels": names.index(row["label"])} for tokens, row in zip(ids, rows)]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(place, id2label=dict(enumerate(names)))
    return {"model": model, "train_dataset": rows, "data_collator": transformers.DataCollatorWithPadding(tokenizer, **PADDING)}


def score_classify(recipe: Any, cfg: Any, folder: Path) -> dict[str, float]:
    (model, tokenizer), rows, right = loaded("AutoModelForSequenceClassification", folder), read_rows(cfg.eval_file), 0
    for some in DataLoader(rows, 256, collate_fn=list):
        answers = model(**padded(tokenizer, [row["text"] for row in some], cfg)).logits.argmax(-1).tolist()
        right += sum(model.config.id2label[answer] == row["label"] for answer, row in zip(answers, some))
    return {"accuracy": right / len(rows)}


def peer_tag(recipe: Any, cfg: Any, place: str, tokenizer: Any) -> dict[str, Any]:
    items, rows = [], read_rows(cfg.train_file)
    names = sorted({tag for row in rows for tag in row["tags"]})
    for row in rows:
        tokens = tokenizer(row["tokens"], is_split_into_words=True, truncation=True, max_length=cfg.max_length)
        words = zip(tokens.word_ids(), [None, *tokens.word_ids()])
        items.append({**tokens, "labels": [-100 if w in (None, last) else names.index(row["tags"][w]) for w, last in words]})
    model = transformers.AutoModelForTokenClassification.from_pretrained(place, id2label=dict(enumerate(names)))
    collate = transformers.DataCollatorForTokenClassification(tokenizer, **PADDING)
    return {"model": model, "train_dataset": items, "data_collator": collate}


def score_tag(recipe: Any, cfg: Any, folder: Path) -> dict[str, float]:
    (model, tokenizer), rows, found = loaded("AutoModelForTokenClassification", folder), read_rows(cfg.eval_file), []
    for row in rows:
        inputs = padded(tokenizer, [row["tokens"]], cfg, is_split_into_words=True)
        pairs = zip(inputs.word_ids(), model(**inputs).logits[0].argmax(-1).tolist())
        tags = {
            word: model.config.id2label[answer] for word, answer in reversed(list(pairs))
        }  # the tag of the first sub-word remains
        found.append([tags.get(word, "O") for word in range(len(row["tokens"]))])  # words beyond --max_length get O
    return {"f1": float(f1_score([row["tags"] for row in rows], found))}


def rows_of(recipe: Any, cfg: Any, tokenizer: Any) -> Any:
    """Return training and evaluation rows of sft or pretrain_mlm."""
    return recipe.Task(cfg, None).rows


def peer_lm(recipe: Any, cfg: Any, place: str, tokenizer: Any) -> dict[str, Any]:
    """For sft and pretrain_mlm. Tokens and labels are those of the recipe. Masked words differ in every epoch."""
    tokenizer.padding_side = "right"
    rows, is_masked = rows_of(recipe, cfg, tokenizer)[0], hasattr(cfg, "mask_share")
    kind = transformers.AutoModelForMaskedLM if is_masked else transformers.AutoModelForCausalLM
    model, rows = kind.from_pretrained(place), MaskedBlocks(rows, tokenizer, cfg.mask_share) if is_masked else rows
    if cfg.lora_r:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(
            task_type="CAUSAL_LM", r=cfg.lora_r, lora_alpha=cfg.lora_alpha, target_modules=cfg.lora_targets[0]
        ))  # fmt: skip
    collate = transformers.DataCollatorForTokenClassification(tokenizer, **PADDING)
    return {"model": model, "train_dataset": rows, "data_collator": collate}


def score_lm(recipe: Any, cfg: Any, folder: Path) -> dict[str, float]:
    """Average over all tokens of the test answers, or over the masked words, which are the same for all models."""
    is_masked, total, number = hasattr(cfg, "mask_share"), 0.0, 0
    model, tokenizer = loaded("AutoModelForMaskedLM" if is_masked else "AutoModelForCausalLM", folder)
    rows = rows_of(recipe, cfg, tokenizer)[1]
    rows = MaskedBlocks(rows, tokenizer, cfg.mask_share, seed=0) if is_masked else rows
    for batch in DataLoader(rows, 16, collate_fn=transformers.DataCollatorForTokenClassification(tokenizer)):
        labels = batch.pop("labels")[:, 0 if is_masked else 1 :].to(DEVICE)  # a causal model predicts the next token
        logits = model(**batch.to(DEVICE)).logits[:, : labels.shape[1]]
        total += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        number += int((labels != -100).sum())
    return {"loss": total / number, "perplexity": math.exp(total / number)}


def peer_seq2seq(recipe: Any, cfg: Any, place: str, tokenizer: Any) -> dict[str, Any]:
    pairs = [[tokenizer(row[column])["input_ids"] for column in ("source", "target")] for row in read_rows(cfg.train_file)]
    rows = [{"input_ids": source, "labels": target} for source, target in pairs]
    kinds = {"trainer": transformers.Seq2SeqTrainer, "arguments": transformers.Seq2SeqTrainingArguments}
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(place)
    collate = transformers.DataCollatorForSeq2Seq(tokenizer, **PADDING)
    return {"model": model, "train_dataset": rows, "data_collator": collate, **kinds}


def score_seq2seq(recipe: Any, cfg: Any, folder: Path) -> dict[str, float]:
    (model, tokenizer), rows, right = loaded("AutoModelForSeq2SeqLM", folder), read_rows(cfg.eval_file), 0
    for some in DataLoader(rows, cfg.eval_batch_size, collate_fn=list):
        inputs = padded(tokenizer, [row["source"] for row in some], cfg, return_token_type_ids=False)
        written = model.generate(**inputs, max_new_tokens=cfg.max_new_tokens, num_beams=1, do_sample=False)
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        right += sum(text.strip() == row["target"] for text, row in zip(texts, some))
    return {"exact_match": right / len(rows)}


def pictures(files: tuple[str, ...], part: str) -> Rows:
    """Return all images as tensors of three channels from -1 to 1. The recipe decodes them in every epoch, which takes time."""
    arrays = np.load(*files)
    pixels = torch.from_numpy(arrays[f"x_{part}"]).unsqueeze(1).expand(-1, 3, -1, -1) / 127.5 - 1
    return [{"pixel_values": image, "labels": label} for image, label in zip(pixels, arrays[f"y_{part}"].tolist())]


def peer_images(recipe: Any, cfg: Any, place: str, tokenizer: Any) -> dict[str, Any]:
    model = MiniResNetForImageClassification(MiniResNetConfig(norm=cfg.norm, num_labels=10))
    loss = lambda outputs, labels, num_items_in_batch=None: F.cross_entropy(outputs.logits, labels)
    return {"model": model, "train_dataset": pictures(cfg.train_file, "train"), "compute_loss_func": loss}


def score_images(recipe: Any, cfg: Any, folder: Path) -> dict[str, float]:
    model, rows = MiniResNetForImageClassification.from_pretrained(folder).eval().to(DEVICE), pictures(cfg.eval_file, "test")
    right = [model(b["pixel_values"].to(DEVICE)).logits.argmax(-1).cpu() == b["labels"] for b in DataLoader(rows, 256)]
    return {"accuracy": float(torch.cat(right).double().mean())}


def peer_embed(recipe: Any, cfg: Any, place: str, tokenizer: Any) -> dict[str, Any]:
    """A batch has no equal texts, as sentence-transformers recommends. The recipe does not use equal texts as negatives either."""
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = st.SentenceTransformer(place)
    model.max_seq_length, loss = cfg.max_length, MultipleNegativesRankingLoss(model, scale=cfg.scale)
    arguments = lambda **options: st.SentenceTransformerTrainingArguments(**options, batch_sampler="no_duplicates")
    kinds = {"trainer": st.SentenceTransformerTrainer, "arguments": arguments, "loss": loss}
    return {"model": model, "train_dataset": Dataset.from_list(read_rows(cfg.train_file)), **kinds}


def score_embed(recipe: Any, cfg: Any, folder: Path) -> dict[str, float]:
    """Rank the positive of each anchor among all different positives."""
    from sentence_transformers import SentenceTransformer

    rows, model = read_rows(cfg.eval_file), SentenceTransformer(str(folder), device=DEVICE)
    texts = [row["anchor"] for row in rows], sorted({row["positive"] for row in rows})
    anchors, corpus = (model.encode(some, convert_to_tensor=True, normalize_embeddings=True) for some in texts)
    right = torch.tensor([[texts[1].index(row["positive"])] for row in rows], device=DEVICE)
    rank = (anchors @ corpus.T >= (anchors @ corpus.T).gather(1, right)).sum(1).double()
    return {"recall_at_1": float((rank == 1).double().mean()), "mrr": float(torch.where(rank <= 10, 1 / rank, 0.0).mean())}


Kind = namedtuple(
    "Kind", ["recipe", "peer", "score", "metrics"]
)  # `peer` returns what a peer trains, `score` evaluates both sides
CLASSIFY = Kind("classify", peer_classify, score_classify, ["accuracy"])
TAG = Kind("tag", peer_tag, score_tag, ["f1"])
SFT = Kind("sft", peer_lm, score_lm, ["perplexity"])
SEQ2SEQ = Kind("seq2seq", peer_seq2seq, score_seq2seq, ["exact_match"])
IMAGES = Kind("images", peer_images, score_images, ["accuracy"])
EMBED = Kind("embed", peer_embed, score_embed, ["recall_at_1", "mrr"])
MLM = Kind("pretrain_mlm", peer_lm, score_lm, ["loss"])
SMOLLM2 = {"model": "builtin:SmolLM2-135M-Instruct", "max_length": 512, "global_batch_size": 16, "epochs": 2}
TASKS = {  # the longest first, so that with --jobs all end at about the same time
    "seq2seq-scan": (SEQ2SEQ, {"global_batch_size": 64, "epochs": 20, "lr": 1e-3, "max_new_tokens": 56, "eval_batch_size": 512}),
    "classify-sst2": (CLASSIFY, {"global_batch_size": 32, "epochs": 1, "lr": 5e-5}),
    "classify-clinc150": (CLASSIFY, {"global_batch_size": 64, "epochs": 10, "lr": 2e-4, "warmup_ratio": 0.1, "max_length": 64}),
    "sft-full": (SFT, {**SMOLLM2, "lr": 5e-5}),
    "sft-lora": (SFT, {**SMOLLM2, "lr": 1e-3, "lora_r": 16, "merge_adapters": "on"}),
    "classify-agnews": (CLASSIFY, {"global_batch_size": 32, "epochs": 2, "lr": 5e-5}),
    "tag-wikigold": (TAG, {"global_batch_size": 16, "epochs": 10, "lr": 3e-4, "warmup_ratio": 0.1}),
    "images-mnist": (IMAGES, {"global_batch_size": 64, "epochs": 5, "lr": 3e-3, "augment": "none"}),
    "mlm-wikitext2": (MLM, {"global_batch_size": 32, "epochs": 3, "lr": 5e-4, "model": "builtin:all-MiniLM-L6-v2"}),
    "embed-sick": (EMBED, {"global_batch_size": 64, "epochs": 3, "lr": 5e-5}),
}


def main(options: argparse.Namespace, work: Path) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "datasets"), "TOKENIZERS_PARALLELISM": "false"}
    # Only the first GPU, because Trainer would use several.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    names = [name for name in TASKS if not options.only or name.startswith(tuple(options.only))]
    files = {name: prepare(name, options.data, work / name, options.quick) for name in names}
    shared = {"mixed_precision": "bf16" if DEVICE == "cuda" else "no"}
    shared |= {"steps": 3, "global_batch_size": 4} if options.quick else {}
    never = ["--eval_every", str(10**9), "--save_every", str(10**9)]  # except at the end, like the peer
    found, one_at_a_time = [], threading.Lock()

    def run(job: tuple[int, str, str]) -> None:
        seed, name, side = job
        kind, folder = TASKS[name][0], work / name / f"{side}-{seed}"
        values = {**TASKS[name][1], **shared, "seed": seed, **files[name]}
        values["micro_batch_size"] = values["global_batch_size"]
        words = [part for key, value in values.items() for part in ([f"--{key}"] if value is True else [f"--{key}", str(value)])]
        ours = [str(RECIPES / f"{kind.recipe}.py"), *words, *never, "--output_dir", str(folder)]
        command = ours if side == "ours" else [__file__, "--peer_of", name, "--work", str(folder), *words]
        try:
            if not (folder / "result.json").exists():  # otherwise an earlier call with the same --work has done it
                shutil.rmtree(folder, ignore_errors=True)
                with folder.with_suffix(".log").open("w") as log:
                    subprocess.run([sys.executable, *command], check=True, stdout=log, stderr=subprocess.STDOUT)
                facts = facts_of(folder) if side == "ours" else json.loads((folder / "facts.json").read_text())
                with one_at_a_time, torch.no_grad():
                    facts["scores"] = kind.score(*recipe_and_options(name, words), folder / "model")
                (folder / "result.json").write_text(json.dumps({"task": name, "side": side, "seed": seed, **facts}))
            with one_at_a_time:
                found.append(json.loads((folder / "result.json").read_text()))
                print(f"{name} {side} {seed}: {found[-1]['scores']}", flush=True)
                if options.out:
                    options.out.write_text(json.dumps({"jobs": options.jobs, "runs": found}, indent=1))
        except Exception as error:  # the other runs continue
            print(f"{name} {side} {seed} failed, see {folder.with_suffix('.log')}: ...{str(error)[-200:]}", flush=True)

    jobs = [(seed, name, side) for seed in options.seeds for name in names for side in ("ours", "peer")[: 1 + options.peer]]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, jobs))
    print_table(found, names, with_seconds=options.jobs == 1)
    sys.exit(len(found) < len(jobs))


def facts_of(folder: Path) -> dict[str, Any]:
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    before, *_, after = [event for event in events if event["event"] == "evaluate"]
    last = [event for event in events if event["event"] == "update"][-1]
    return {"before": before, "own_evaluation": after, "seconds": last["time"] - before["time"]}


def print_table(found: list[dict[str, Any]], names: list[str], with_seconds: bool) -> None:
    mean = lambda values: sum(values) / len(values) if values else math.nan
    span = lambda values: f" ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else ""
    titles = f"\n{'task':19}{'metric':12}{'before':>9}  {'ours':28}{'peer':28}{'difference':>10}"
    print(titles + "  seconds, ours and peer" * with_seconds)
    for name, metric in [(task, metric) for task in names for metric in TASKS[task][0].metrics]:
        ours, peer = ([run for run in found if (run["task"], run["side"]) == (name, side)] for side in ("ours", "peer"))
        a, b = ([run["scores"][metric] for run in runs] for runs in (ours, peer))
        cells = [*(f"{mean(values):.4f}{span(values):20}  " for values in (a, b)), f"{mean(a) - mean(b):+10.4f}"]
        cells += [f"{mean([run['seconds'] for run in runs]):12.1f}" for runs in (ours, peer) if with_seconds]
        print(f"{name:19}{metric:12}{mean([run['before'][metric] for run in ours]):9.4f}  {''.join(cells)}")
    note = "" if with_seconds else " Seconds are not shown, because runs shared the device (--jobs)."
    print(f"Several seeds: mean (min to max). Lower is better for loss and perplexity.{note}")


def recipe_and_options(name: str, words: list[str]) -> tuple[Any, Any]:
    sys.path.append(str(RECIPES))
    recipe = import_module(TASKS[name][0].recipe)
    return recipe, parse_config(recipe.Config, words)


def train_peer(name: str, words: list[str], folder: Path) -> None:
    """Train with transformers' Trainer, or with the trainer that the peer returns, and save the model to `folder`/model."""
    recipe, cfg = recipe_and_options(name, words)
    transformers.set_seed(cfg.seed)
    place = "" if cfg.model == "mini-resnet" else locate(cfg.model, cfg.cache_dir)
    tokenizer = load_tokenizer(cfg) if place else None  # adds a padding token if the model has none
    parts = TASKS[name][0].peer(recipe, cfg, place, tokenizer)
    on_gpu, steps = DEVICE == "cuda", cfg.steps or math.ceil(len(parts["train_dataset"]) / cfg.global_batch_size) * cfg.epochs
    num_workers = max(1, min(4, (os.cpu_count() or 1) - 1)) if on_gpu else 0  # as in the recipe
    arguments = parts.pop("arguments", transformers.TrainingArguments)(
        output_dir=str(folder), seed=cfg.seed, use_cpu=not on_gpu, num_train_epochs=cfg.epochs, max_steps=cfg.steps or -1,
        per_device_train_batch_size=cfg.global_batch_size, learning_rate=cfg.lr, lr_scheduler_type=cfg.lr_schedule,
        warmup_steps=math.ceil(cfg.warmup_ratio * steps), weight_decay=cfg.weight_decay, max_grad_norm=cfg.max_grad_norm,
        optim="adamw_torch_fused", bf16=cfg.mixed_precision == "bf16", tf32=True if on_gpu else None,
        dataloader_num_workers=num_workers, dataloader_pin_memory=on_gpu, dataloader_persistent_workers=num_workers > 0,
        dataloader_prefetch_factor=4 if num_workers else None, remove_unused_columns=False, eval_strategy="no",
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer, began = parts.pop("trainer", transformers.Trainer)(args=arguments, **parts), time.monotonic()
    trainer.train()
    (folder / "facts.json").write_text(json.dumps({"seconds": time.monotonic() - began}))
    (parts["model"].merge_and_unload() if cfg.lora_r else parts["model"]).save_pretrained(str(folder / "model"))
    if tokenizer:
        tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=kind, allow_abbrev=False
    )  # --seed is an option of the recipe
    parser.add_argument("--data", type=Path, help="folder of the data")
    parser.add_argument("--only", nargs="+", help=f"tasks, or beginnings of their names: {', '.join(TASKS)}")
    parser.add_argument("--peer", action="store_true", help="train the peers too")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time on one device; seconds are then not shown")
    parser.add_argument("--out", type=Path, help="a .json file for the results, written after each run")
    parser.add_argument("--work", type=Path, help="keep all files in this folder; complete runs there are not repeated")
    parser.add_argument("--quick", action="store_true", help="three steps of four rows, to test the script")
    parser.add_argument("--peer_of", choices=TASKS, help=argparse.SUPPRESS)  # in the process of a peer, which writes to --work
    options, words = parser.parse_known_args()
    if options.peer_of:
        train_peer(options.peer_of, words, options.work)
    elif words or not options.data:
        parser.error(f"unknown options: {' '.join(words)}" if words else "--data FOLDER is required")
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(options, options.work or Path(temporary))
