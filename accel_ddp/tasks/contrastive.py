"""Contrastive learning of sentence embeddings: the loss over a batch, retrieval scores, what sentence-transformers reads."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from accel_ddp.sources.tokenisation import padded

POOLINGS = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def keys_of(texts: list[list[str]]) -> list[list[int]]:
    """A whole number for each text of a row: equal texts have equal numbers, on every rank."""
    number = lambda text: int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    return [[number(text) for text in row] for row in zip(*texts)]


def side_by_side(tokenizer: Any, accelerator: Accelerator) -> Callable[[list], Any]:
    """Collate rows of several texts each: all texts of row 0, then of row 1, ..., padded together; and their `keys`."""
    pad = padded(tokenizer, accelerator)

    def collate(rows: list[dict[str, Any]]) -> Any:
        batch = pad([{"input_ids": ids} for row in rows for ids in row["input_ids"]])
        batch["keys"] = torch.tensor([row["keys"] for row in rows])
        return batch

    return collate


def embeddings(model: Any, batch: Any, pooling: str) -> Tensor:
    """(rows, texts of a row, dimensions), not normalised."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "keys"}
    hidden = model(**inputs).last_hidden_state
    if pooling == "cls":
        pooled = hidden[:, 0]
    else:
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
    return pooled.view(*batch["keys"].shape, -1)


def in_batch_losses(rows: Tensor, keys: Tensor, scale: float, dimensions: tuple[int, ...] = ()) -> Tensor:
    """For each row: how badly its anchor tells its positive from the positives and negatives of all rows.

    `rows` are (anchor, positive, negatives ...). A text that is also the anchor's own positive, or the anchor itself, or a
    positive of an equal anchor, is no negative. With `dimensions` (Matryoshka) the mean over embeddings cut to each.
    """
    number = len(keys)
    candidates = torch.cat([keys[:, 1], keys[:, 2:].flatten()])
    wrong = (candidates == keys[:, 1:2]) | (candidates == keys[:, 0:1])
    wrong[:, :number] |= keys[:, 0] == keys[:, 0:1]
    right = torch.arange(number, device=keys.device)
    wrong[right, right] = False
    losses = []
    for size in dimensions or (rows.shape[-1],):
        cut = F.normalize(rows[..., :size].to(torch.promote_types(rows.dtype, torch.float32)), dim=-1)
        scores = scale * cut[:, 0] @ torch.cat([cut[:, 1], cut[:, 2:].flatten(0, 1)]).T
        losses.append(F.cross_entropy(scores.masked_fill(wrong, float("-inf")), right, reduction="none"))
    return torch.stack(losses).mean(0)


def retrieval(rows: np.ndarray, keys: np.ndarray, dimensions: tuple[int, ...] = ()) -> dict[str, float]:
    """Each anchor looks for its positive among all different positives: recall at 1, 5 and 10, mean reciprocal rank of 10.

    An equal score counts as if it stood before the right one, so that a model that says the same of all is not rewarded.
    """
    _, first = np.unique(keys[:, 1], return_index=True)
    answers = keys[:, 1][first]
    scores: dict[str, float] = {}
    for size in dimensions or (rows.shape[-1],):
        cut = F.normalize(torch.from_numpy(rows[..., :size]).float(), dim=-1)
        corpus, ranks = cut[first, 1], []
        for start in range(0, len(cut), 1024):  # a table of 1,024 by the corpus at a time
            found = cut[start : start + 1024, 0] @ corpus.T
            is_right = torch.from_numpy(keys[start : start + 1024, 1:2] == answers[None, :])
            own = (found * is_right).sum(1, keepdim=True)
            ranks.append(1 + ((found >= own) & ~is_right).sum(1))
        rank = torch.cat(ranks).double()
        name = "" if size == rows.shape[-1] else f"_{size}"
        scores |= {f"recall_at_{k}{name}": float((rank <= k).double().mean()) for k in (1, 5, 10)}
        scores[f"mrr{name}"] = float(torch.where(rank <= 10, 1 / rank, 0.0).mean())
    return scores


def sentence_transformers_files(dimension: int, pooling: str, max_length: int, prompts: dict[str, str]) -> dict[str, bytes]:
    """What makes a transformers folder one of sentence-transformers too."""
    kinds = [("", "models.Transformer"), ("1_Pooling", "models.Pooling"), ("2_Normalize", "models.Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"} for i, (path, kind) in enumerate(kinds)
    ]
    pools = {"word_embedding_dimension": dimension, **{word: name == pooling for name, word in POOLINGS.items()}}
    return {
        name: json.dumps(content, indent=1).encode()
        for name, content in {
            "modules.json": modules,
            "1_Pooling/config.json": pools,
            "2_Normalize/config.json": {},
            "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
            "config_sentence_transformers.json": {"prompts": prompts, "similarity_fn_name": "cosine"},
        }.items()
    }
