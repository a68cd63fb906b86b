"""Contrastive learning of sentence embeddings: the loss over a batch, retrieval metrics, and files for sentence-transformers."""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from accel_ddp.sources import tokenisation

POOLINGS = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def text_keys(texts: list[list[str]]) -> list[list[int]]:
    """Return an integer for each text of each row. Equal texts have equal integers, on every rank."""
    key = lambda text: int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    return [[key(text) for text in row] for row in zip(*texts)]


def pad_collate(tokenizer: Any, accelerator: Accelerator) -> Callable[[list], Any]:
    """Return a collate function for rows of several texts each. It pads all texts of row 0, then of row 1, ... together."""
    return partial(_collate, tokenisation.pad_collate(tokenizer, accelerator))


def _collate(pad: tokenisation.PadCollate, rows: list[dict[str, Any]]) -> Any:
    batch = pad([{"input_ids": ids} for row in rows for ids in row["input_ids"]])
    batch["keys"] = torch.tensor([row["keys"] for row in rows])
    return batch


def embed(model: Any, batch: Any, pooling: str) -> Tensor:
    """Return embeddings of the shape (rows, texts per row, dimensions), not normalised."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "keys"}
    hidden = model(**inputs).last_hidden_state
    if pooling == "cls":
        pooled = hidden[:, 0]
    else:
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
    return pooled.view(*batch["keys"].shape, -1)


def in_batch_losses(rows: Tensor, keys: Tensor, scale: float, dimensions: tuple[int, ...] = ()) -> Tensor:
    """Return for each row the cross-entropy of its anchor's positive among the positives and negatives of all rows.

    `rows` are embeddings of (anchor, positive, negatives ...), and `keys` are those of `text_keys`. A candidate is excluded if it
    equals the positive or the anchor, or if it is the positive of an equal anchor. With `dimensions` (Matryoshka) the loss is the
    mean over embeddings truncated to each of them.
    """
    number = len(keys)
    candidates = torch.cat([keys[:, 1], keys[:, 2:].flatten()])
    excluded = (candidates == keys[:, 1:2]) | (candidates == keys[:, 0:1])
    excluded[:, :number] |= keys[:, 0] == keys[:, 0:1]
    targets = torch.arange(number, device=keys.device)
    excluded[targets, targets] = False
    losses = []
    for size in dimensions or (rows.shape[-1],):
        unit = F.normalize(rows[..., :size].to(torch.promote_types(rows.dtype, torch.float32)), dim=-1)
        scores = scale * unit[:, 0] @ torch.cat([unit[:, 1], unit[:, 2:].flatten(0, 1)]).T
        losses.append(F.cross_entropy(scores.masked_fill(excluded, float("-inf")), targets, reduction="none"))
    return torch.stack(losses).mean(0)


def retrieval_metrics(rows: np.ndarray, keys: np.ndarray, dimensions: tuple[int, ...] = ()) -> dict[str, float]:
    """Return recall at 1, 5 and 10 and the mean reciprocal rank at 10. Each anchor is compared with all distinct positives.

    A candidate with the same score as the right one is ranked before it, so that a model with constant output gets no credit.
    """
    _, first = np.unique(keys[:, 1], return_index=True)
    corpus_keys = keys[:, 1][first]
    metrics: dict[str, float] = {}
    for size in dimensions or (rows.shape[-1],):
        unit = F.normalize(torch.from_numpy(rows[..., :size]).float(), dim=-1)
        corpus, ranks = unit[first, 1], []
        for start in range(0, len(unit), 1024):  # limits the memory to 1,024 x corpus scores at a time
            scores = unit[start : start + 1024, 0] @ corpus.T
            is_right = torch.from_numpy(keys[start : start + 1024, 1:2] == corpus_keys[None, :])
            own = (scores * is_right).sum(1, keepdim=True)
            ranks.append(1 + ((scores >= own) & ~is_right).sum(1))
        rank = torch.cat(ranks).double()
        name = "" if size == rows.shape[-1] else f"_{size}"
        metrics |= {f"recall_at_{k}{name}": float((rank <= k).double().mean()) for k in (1, 5, 10)}
        metrics[f"mrr{name}"] = float(torch.where(rank <= 10, 1 / rank, 0.0).mean())
    return metrics


def sentence_transformers_files(dimension: int, pooling: str, max_length: int, prompts: dict[str, str]) -> dict[str, bytes]:
    """Return the files that sentence-transformers needs beside those of transformers, by their names."""
    kinds = [("", "models.Transformer"), ("1_Pooling", "models.Pooling"), ("2_Normalize", "models.Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"} for i, (path, kind) in enumerate(kinds)
    ]
    pooling_config = {"word_embedding_dimension": dimension, **{word: name == pooling for name, word in POOLINGS.items()}}
    return {
        name: json.dumps(content, indent=1).encode()
        for name, content in {
            "modules.json": modules,
            "1_Pooling/config.json": pooling_config,
            "2_Normalize/config.json": {},
            "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
            "config_sentence_transformers.json": {"prompts": prompts, "similarity_fn_name": "cosine"},
        }.items()
    }
