"""Synthetic data and models: texts of lognormal lengths and models of random weights, generated from seeds.

vs_trainer.py, two_nodes.py and evaluation.py use them.
"""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

TOPICS = 8
PAIR = ("prompt", "chosen", "rejected")


@dataclasses.dataclass
class Family:
    vocabulary: int
    shape: dict[str, Any]  # of the model
    rows: int
    max_length: int = 512
    mean_length: float = 232
    dtype: str = "float32"  # of the weights
    classes: tuple[str, str] = ("LlamaForCausalLM", "LlamaConfig")  # of transformers, except for "bert"


DECODER = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "initializer_range": 1 / 24, "rms_norm_eps": 1e-5,
}  # fmt: skip
HYBRID, EXPERTS = ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig"), ("GptOssForCausalLM", "GptOssConfig")
QWEN = ("Qwen3ForCausalLM", "Qwen3Config")
FAMILIES = {
    "bert": Family(30522, {}, rows=25_600),  # the library's default is BERT-base
    "decoder": Family(49152, DECODER, rows=12_800),
    "pairs": Family(49152, DECODER, rows=3200, mean_length=120),  # of a prompt and of an answer
    "qwen3": Family(  # Qwen3-0.6B
        151936,
        {
            "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 3072, "rms_norm_eps": 1e-6,
        },
        rows=3200, max_length=1024, mean_length=400, classes=QWEN,
    ),
    "qwen3.5": Family(  # Qwen3.5-0.8B with half of its layers: three with linear attention before each one with full attention
        49152,
        {
            "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
            "intermediate_size": 3584, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        rows=3200, max_length=1024, mean_length=400, classes=HYBRID,
    ),
    "gpt-oss": Family(  # a quarter of gpt-oss-20b's width, half of its layers and of its window
        49152,
        {
            "hidden_size": 720, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64,
            "intermediate_size": 720, "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 64,
        },
        rows=3200, max_length=1024, mean_length=400, classes=EXPERTS,
    ),
    "decoder1b4": Family(
        49152,
        {
            "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
            "intermediate_size": 8960, "rms_norm_eps": 1e-6,
        },
        rows=3200, max_length=1024, mean_length=400,
    ),
    "decoder8b": Family(
        128256,
        {
            "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 14336, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        },
        rows=1600, max_length=1024, mean_length=400, dtype="bfloat16",
    ),
}  # fmt: skip
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
HALF = {**SMALL, "num_key_value_heads": 1, "head_dim": 32}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
TINY_SHAPES = {
    "qwen3": HALF,
    "qwen3.5": {**HALF, **LINEAR, "num_hidden_layers": 4},
    "gpt-oss": {**HALF, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}
TINY_FAMILIES = {
    name: Family(1000, TINY_SHAPES.get(name, SMALL), rows=1024, max_length=64, mean_length=29, classes=family.classes)
    for name, family in FAMILIES.items()
}


def lengths_of_texts(rng: np.random.Generator, number: int, family: Family) -> np.ndarray:
    """Return lognormal lengths in tokens, including special tokens. They vary as those of film reviews do.

    Lengths are at most `family.max_length`, and their mean after that is `family.mean_length`.
    """
    normal = rng.standard_normal(number)
    low, high = 0.0, math.log(family.max_length)
    for _ in range(40):  # bisection
        middle = (low + high) / 2
        lengths = np.clip(np.exp(middle + 0.6 * normal), 8, family.max_length)
        low, high = (middle, high) if lengths.mean() < family.mean_length else (low, middle)
    return lengths.round().astype(int)


def zipf(rng: np.random.Generator, size: Any, num_words: int) -> np.ndarray:
    """Return numbers below `num_words`, in which low numbers are frequent, as words are (Zipf's law)."""
    heights = np.cumsum(1 / np.arange(1, num_words + 1))
    return np.searchsorted(heights, rng.random(size) * heights[-1])


def texts_with_topics(rng: np.random.Generator, lengths: np.ndarray, num_words: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the words of each text, and the topic that most of them belong to.

    In some texts another topic has nearly as many words, so that a model has to learn rare words too.
    """
    shape, common = (len(lengths), lengths.max()), num_words // 4
    each = (num_words - common) // TOPICS
    main, share = rng.integers(TOPICS, size=(len(lengths), 1)), rng.uniform(0.2, 0.8, (len(lengths), 1))
    topic = np.where(rng.random(shape) < share, main, rng.integers(TOPICS, size=shape))
    topical = common + topic * each + zipf(rng, shape, each)
    is_topical = rng.random(shape) < 0.5
    words = np.where(is_topical, topical, zipf(rng, shape, common))
    inside = is_topical & (np.arange(shape[1]) < lengths[:, None])
    counts = np.stack([((topic == number) & inside).sum(1) for number in range(TOPICS)], 1)
    return [row[:length] for row, length in zip(words, lengths)], counts.argmax(1)


def texts_of_a_chain(rng: np.random.Generator, lengths: np.ndarray, num_words: int) -> list[np.ndarray]:
    """Return texts of a Markov chain. A word is often one of two that follow the last one, and otherwise any word or one of a topic."""
    followers = zipf(np.random.default_rng(1), (num_words, 2), num_words)  # the same in training and evaluation
    words = np.empty((len(lengths), lengths.max()), dtype=int)
    shift = rng.integers(TOPICS, size=len(lengths)) * (num_words // TOPICS)
    last = zipf(rng, len(lengths), num_words)
    for place in range(words.shape[1]):
        follows, of_topic = rng.random(len(lengths)) < 0.6, rng.random(len(lengths)) < 0.5
        fresh = zipf(rng, len(lengths), num_words)
        fresh = np.where(of_topic, (fresh + shift) % num_words, fresh)
        last = np.where(follows, followers[last, rng.integers(2, size=len(lengths))], fresh)
        words[:, place] = last
    return [row[:length] for row, length in zip(words, lengths)]


def make_tokenizer(name: str, family: Family) -> Any:
    """Return a tokenizer of whole words, separated by spaces. It has as many words as the model's vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    if name == "bert":
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
        inputs = ["input_ids", "token_type_ids", "attention_mask"]
    else:
        special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<pad>", "unk_token": "<unk>"}
        inputs = ["input_ids", "attention_mask"]
    words = [*special.values(), *(f"w{i}" for i in range(family.vocabulary - len(special)))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=special["unk_token"]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if name == "bert":
        ids = [("[CLS]", words.index("[CLS]")), ("[SEP]", words.index("[SEP]"))]
        inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    options = {"model_max_length": family.max_length, "model_input_names": inputs, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **options, **special)


def make_once(final: Path, make: Any) -> Path:
    """Let `make` fill the folder, unless it exists, and return it. A folder that is not complete does not exist under this name."""
    if not final.exists():
        partial = final.with_name(f"{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        make(partial)
        partial.rename(final)
    return final


def write_pairs(file: Path, rng: np.random.Generator, number: int, family: Family, spelling: np.ndarray) -> np.ndarray:
    """Write prompts, answers, and the same answers in random order as rejected ones. Return the tokens of the pairs."""
    part = dataclasses.replace(family, max_length=family.max_length // 2)
    prompts, chosen = (texts_of_a_chain(rng, lengths_of_texts(rng, number, part), len(spelling)) for _ in range(2))
    text = lambda ids: " ".join(["", *spelling[ids]])  # a space ends the last word before it
    columns = [map(text, texts) for texts in (prompts, chosen, [rng.permutation(ids) for ids in chosen])]
    file.write_text("".join(json.dumps(dict(zip(PAIR, row))) + "\n" for row in zip(*columns)))
    return np.array([2 * (len(prompt) + len(answer)) for prompt, answer in zip(prompts, chosen)])


def make_data(work: Path, name: str, family: Family) -> Path:
    """Write train.jsonl and eval.jsonl for our recipes, the same rows as tokens for Trainer, and their lengths. Return the folder."""

    def make(folder: Path) -> None:
        import datasets

        datasets.disable_progress_bars()
        tokenizer = make_tokenizer(name, family)
        num_words, extra = family.vocabulary - 5, 2 if name == "bert" else 1  # special tokens of the vocabulary and of a text
        spelling = np.array([f"w{i}" for i in range(num_words)], dtype=object)
        for part, number, seed in (("train", family.rows, 2), ("eval", min(512, family.rows), 3)):
            rng = np.random.default_rng(seed)
            lengths = lengths_of_texts(rng, number, family)
            if name == "bert":
                words, labels = texts_with_topics(rng, lengths - extra, num_words)
                rows = [{"text": " ".join(spelling[ids]), "label": f"topic{label}"} for ids, label in zip(words, labels)]
            elif name == "pairs":
                lengths = write_pairs(folder / f"{part}.jsonl", rng, number, family, spelling)
                np.save(folder / f"{part}_lengths.npy", lengths)
                continue
            else:
                rows = [{"text": " ".join(spelling[ids])} for ids in texts_of_a_chain(rng, lengths - extra, num_words)]
            (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            end = "" if name == "bert" else tokenizer.eos_token
            encode = lambda some, end=end: {
                **tokenizer([text + end for text in some["text"]]),
                **({"labels": [int(label[-1]) for label in some["label"]]} if "label" in some else {}),
            }
            table = datasets.Dataset.from_list(rows)
            table = table.map(encode, batched=True, remove_columns=table.column_names, new_fingerprint=f"{name}{part}{number}")
            assert [len(ids) for ids in table["input_ids"][:100]] == lengths[:100].tolist(), "a word is not one token"
            table.save_to_disk(str(folder / f"{part}_tokens"))
            np.save(folder / f"{part}_lengths.npy", lengths)

    return make_once(work / "data" / name, make)


def make_model(work: Path, name: str, family: Family, seed: int) -> Path:
    """Write random weights, including the head of the classifier, and the tokenizer for `from_pretrained`. Return the folder."""

    def make(folder: Path) -> None:
        import torch
        import transformers
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.manual_seed(seed)
        tokenizer = make_tokenizer(name, family)
        sizes = {**family.shape, "vocab_size": family.vocabulary, "pad_token_id": tokenizer.pad_token_id}
        on_gpu = torch.cuda.is_available() and family.shape.get("hidden_size", 0) >= 1024  # a CPU needs a minute for a billion
        dtype = getattr(torch, family.dtype)
        if name == "bert":
            names = {f"topic{i}": i for i in range(TOPICS)}
            labels = {"num_labels": TOPICS, "label2id": names, "id2label": {i: label for label, i in names.items()}}
            model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **labels))
        else:
            ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
            model_class, config_class = (getattr(transformers, each) for each in family.classes)
            config = config_class(
                **{"tie_word_embeddings": True, **sizes, **ids, "max_position_embeddings": 2048, "dtype": dtype}
            )
            with torch.device("cuda" if on_gpu else "cpu"):
                model = model_class._from_config(config, dtype=dtype)
        model.save_pretrained(folder)
        del model
        if on_gpu:
            torch.cuda.empty_cache()
        tokenizer.save_pretrained(folder)

    return make_once(work / "models" / f"{name}-{seed}", make)
