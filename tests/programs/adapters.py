"""Train nothing, export adapters for models of every task, and print for each how to load them: as adapters and merged.

The models below the adapters are in a cache of the Hub without network, in HF_HOME, as someone/NAME. The output is a list in JSON.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from huggingface_hub.constants import HF_HUB_CACHE
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from accel_ddp import contrastive
from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.exporting import export
from accel_ddp.sources import models

LABELS = {i: f"name {i}" for i in range(9)}
HEAD = {"num_labels": 9, "id2label": LABELS, "label2id": {name: i for i, name in LABELS.items()}, "ignore_mismatched_sizes": True}
PIPELINE = 'from transformers import pipeline; print(pipeline("TASK", {model})("a fine film"))'
GENERATE = (
    "from transformers import AutoModelForSeq2SeqLM as M, AutoTokenizer as T; t = T.from_pretrained({folder}); "
    'print(M.from_pretrained({folder}).generate(**t("a fine", return_tensors="pt"), max_new_tokens=8).tolist())'
)
EMBED = "from sentence_transformers import SentenceTransformer as S; print(S({folder}).encode('a film')[:4].tolist())"
CLASSIFY, TAG, SFT, MLM = (
    PIPELINE.replace("TASK", task).replace('film"', f"film{more}")
    for task, more in (
        ("text-classification", '"'),
        ("token-classification", '"'),
        ("text-generation", '", do_sample=False, max_new_tokens=9'),
        ("fill-mask", ' [MASK]"'),
    )
)
TASKS = {
    "classify": ("tiny", AutoModelForSequenceClassification, "SEQ_CLS", HEAD, CLASSIFY),
    "tag": ("tiny", AutoModelForTokenClassification, "TOKEN_CLS", HEAD, TAG),
    "sft": ("tiny-llama", AutoModelForCausalLM, "CAUSAL_LM", {}, SFT),
    "seq2seq": ("tiny-t5", AutoModelForSeq2SeqLM, "SEQ_2_SEQ_LM", {}, GENERATE),
    "embed": ("tiny", AutoModel, "FEATURE_EXTRACTION", {}, EMBED),
    "pretrain_mlm": ("tiny-bert", AutoModelForMaskedLM, "FEATURE_EXTRACTION", {}, MLM),
}


def put_on_hub(name: str, source: str) -> None:
    folder = Path(HF_HUB_CACHE) / f"models--someone--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("a" * 40)
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / ("a" * 40)).symlink_to(models.locate(source, RecipeConfig.cache_dir))


def check_training_continues(folder: Path, model: torch.nn.Module) -> None:
    """Load the exported adapters by a name of the Hub, and compare them with those in memory."""
    put_on_hub("adapters", str(folder))
    cfg = RecipeConfig(model="someone/adapters")
    again = models.load(AutoModelForSequenceClassification, cfg, models.load_tokenizer(cfg), **HEAD)
    again = models.prepare(again, cfg, Accelerator(cpu=True), "SEQ_CLS")
    weights = [{name: p for name, p in one.named_parameters() if p.requires_grad} for one in (model, again)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(p, weights[1][name]) for name, p in weights[0].items())


def main(tiny_model: str, out: Path) -> None:
    for name in ("tiny-llama", "tiny-t5", "tiny-bert"):
        put_on_hub(name, f"builtin:{name}")
    put_on_hub("tiny", tiny_model)
    printed = []
    for task, (name, auto_class, lora_task, options, example) in TASKS.items():
        for base in (
            f"someone/{name}",
            models.locate(tiny_model if name == "tiny" else f"builtin:{name}", RecipeConfig.cache_dir),
        ):
            cfg = RecipeConfig(model=base, lora_r=2, output_dir="here")
            tokenizer = models.load_tokenizer(cfg)
            model = models.prepare(models.load(auto_class, cfg, tokenizer, **options), cfg, Accelerator(cpu=True), lora_task)
            torch.manual_seed(0)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.normal_(std=0.3)
            more = contrastive.sentence_transformers_files(16, "mean", 64, {}) if task == "embed" else None
            files = export.files_of(model, tokenizer, more)
            published = {"push_to_hub": "me/mine"} if task in ("classify", "sft") else {}
            facts = {"recipe": f"{task}.py", "config": vars(cfg) | published, "metrics": {}, "versions": {}, "num_ranks": 1}
            where = "hub" if base.startswith("someone/") else "local"
            # Adapters are merged in place, so that comes last.
            for merge in ("off", "auto") if where == "local" and task in ("classify", "seq2seq") else ("auto",):
                folder = out / f"{task} {where} {merge}"
                export._write(folder, model.eval(), files, facts, merge)
                if (task, where) == ("classify", "hub"):
                    check_training_continues(folder, model)
                printed.append([task, where, merge, export.describe(folder, files, vars(cfg), example)])
    print(json.dumps(printed))


def run_lines(place: Path) -> None:
    """Run the Python code of the lines in the file, and print for each what it prints, as a list in JSON."""
    import contextlib
    import io

    outputs = []
    for code in json.loads(place.read_text()):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            exec(code, {})
        outputs.append(text.getvalue())
    print(json.dumps(outputs))


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run_lines(Path(sys.argv[2]))
    else:
        main(sys.argv[1], Path(sys.argv[2]))
