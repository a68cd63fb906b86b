"""Sentence embeddings: losses of pairs, metrics of retrieval and similarity, and files for sentence-transformers."""

import hashlib
import json
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from accel_ddp.config.options import columns_of
from accel_ddp.records.eval_tables import Table
from accel_ddp.sources import data
from accel_ddp.tasks import tables
from accel_ddp.tasks.metrics import regression_metrics

MORE = "texts of --negatives_file"  # a temporary column of the training rows
NOTHING = 0  # the key of a negative that a row does not have; no loss counts it
PER_TEXT = ("input_ids", "token_type_ids")
POOLINGS = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def text_keys(texts: list[list[str]]) -> list[list[int]]:
    """Return an integer for each text of each row: NOTHING for an empty text. Equal texts have equal integers, on every rank."""
    key = lambda text: int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    return [[key(text) if text else NOTHING for text in row] for row in zip(*texts)]


def embed(model: Any, batch: Any, pooling: str) -> Tensor:
    """Return embeddings of the shape (rows, texts per row, dimensions), not normalized."""
    hidden = batch.pad(model(batch).last_hidden_state[0])
    return pool(hidden, batch.grid.mask, pooling).view(*batch["keys"].shape, -1)


def pool(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Return one vector for each text, which is padded on the right."""
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "lasttoken":
        return hidden[torch.arange(len(mask), device=mask.device), mask.sum(1) - 1]
    mask = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)


def in_batch_losses(rows: Tensor, keys: Tensor, scale: float, dimensions: tuple[int, ...] = ()) -> Tensor:
    """Return for each row the cross-entropy of its anchor's positive among the positives and negatives of all rows.

    `rows` are embeddings of (anchor, positive, negatives ...), and `keys` come from `text_keys`. A candidate is excluded if it
    equals the positive or the anchor, if it is the positive of an equal anchor, or if it is NOTHING. With `dimensions`
    (Matryoshka) the loss is the mean over embeddings truncated to each of them.
    """
    number = len(keys)
    candidates = torch.cat([keys[:, 1], keys[:, 2:].flatten()])
    excluded = (candidates == keys[:, 1:2]) | (candidates == keys[:, 0:1]) | (candidates == NOTHING)
    excluded[:, :number] |= keys[:, 0] == keys[:, 0:1]
    targets = torch.arange(number, device=keys.device)
    excluded[targets, targets] = False
    losses = []
    for size in dimensions or (rows.shape[-1],):
        unit = F.normalize(rows[..., :size].to(torch.promote_types(rows.dtype, torch.float32)), dim=-1)
        scores = scale * unit[:, 0] @ torch.cat([unit[:, 1], unit[:, 2:].flatten(0, 1)]).T
        losses.append(F.cross_entropy(scores.masked_fill(excluded, float("-inf")), targets, reduction="none"))
    return torch.stack(losses).mean(0)


def encode(rows: dict[str, list], tokenizer: Any, cfg: Any) -> dict[str, list]:
    """Return the tokens and keys of anchor, positive and negatives of each row, and with scores also these."""
    texts = [data.read_texts(rows, column) for _, column in columns_of(cfg, "text")]
    more = rows.get(MORE, [])  # which a row may have fewer of
    texts += [[(some + [""] * cfg.num_negatives)[i] for some in more] for i in range(cfg.num_negatives) if more]
    prefixes = [cfg.anchor_prefix] + [cfg.positive_prefix] * (len(texts) - 1)
    prefixed = [[prefix + text for text in some] for prefix, some in zip(prefixes, texts)]
    tokens = [tokenizer(some, truncation=True, max_length=cfg.max_length)["input_ids"] for some in prefixed]
    done: dict[str, list] = {"input_ids": [list(row) for row in zip(*tokens)], "keys": text_keys(texts)}
    if cfg.score_column:
        done["scores"], done["problem"] = read_scores(rows[cfg.score_column], cfg)
    return done


def read_scores(values: list, cfg: Any) -> tuple[list[float], list[str]]:
    """Return the scores, scaled so that `--min_score` is 0 and `--max_score` is 1, and the problem of each row."""
    numbers = [data.parse_number(value) for value in values]
    column, low, high = cfg.score_column, cfg.min_score, cfg.max_score
    outside = f"its {column} is not between --min_score {low:g} and --max_score {high:g}, the range of your scores"
    problems = [
        data.number_problem(column, value) or ("" if low <= number <= high else f"{outside}\t{number:g}")
        for value, number in zip(values, numbers)
    ]
    return [0.0 if problem else (number - low) / (high - low) for number, problem in zip(numbers, problems)], problems


def pair_cosines(rows: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    """Return the cosines of the two texts of each row, truncated to each of the dimensions: (rows, dimensions)."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return torch.stack([F.cosine_similarity(rows[:, 0, :size], rows[:, 1, :size], dim=-1) for size in dimensions], dim=-1)


def score_losses(rows: Tensor, scores: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    """Return for each row the squared difference of cosine and score, as a mean over the dimensions."""
    return (pair_cosines(rows, dimensions) - scores[:, None]).square().mean(-1)


def correlation_metrics(cosines: np.ndarray, scores: np.ndarray, dimensions: tuple[int, ...]) -> dict[str, float]:
    """Return the correlations of cosines and scores for each of the dimensions, the largest of which comes first, and the loss."""
    metrics: dict[str, float] = {}
    for i, size in enumerate(dimensions):
        found = regression_metrics(cosines[:, i].astype(np.float64), scores.astype(np.float64))
        name = f"_{size}" if i else ""
        metrics |= {f"spearman{name}": found["spearman"], f"pearson{name}": found["pearson"]}
    return {**metrics, "loss": float(((cosines - scores[:, None]) ** 2).mean(dtype=np.float64))}


def retrieval_metrics(rows: np.ndarray, keys: np.ndarray, dimensions: tuple[int, ...] = ()) -> dict[str, float]:
    """Return recall at 1, 5 and 10 and the mean reciprocal rank at 10. Each anchor is compared with all distinct positives."""
    metrics: dict[str, float] = {}
    for size in dimensions or (rows.shape[-1],):
        rank = torch.from_numpy(nearest(rows[..., :size], keys)[0]).double()
        name = "" if size == rows.shape[-1] else f"_{size}"
        metrics |= {f"recall_at_{k}{name}": float((rank <= k).double().mean()) for k in (1, 5, 10)}
        metrics[f"mrr{name}"] = float(torch.where(rank <= 10, 1 / rank, 0.0).mean())
    return metrics


def nearest(rows: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each anchor the rank of its positive, the row whose positive is nearest to it, and its cosine with that.

    A candidate with the same score as the right one is ranked before it, so that a model with constant output gets no credit. If
    the rank is 1, the nearest row is the anchor's own.
    """
    _, first = np.unique(keys[:, 1], return_index=True)
    unit = F.normalize(torch.from_numpy(rows).float(), dim=-1)
    found: list[list[Tensor]] = []
    for start in range(0, len(unit), 1024):  # limits the memory to 1,024 x corpus scores at a time
        scores = unit[start : start + 1024, 0] @ unit[first, 1].T
        is_right = torch.from_numpy(keys[start : start + 1024, 1:2] == keys[:, 1][first][None, :])
        own = (scores * is_right).sum(1)
        best, at = scores.masked_fill(is_right, float("-inf")).max(1)
        rank = 1 + ((scores >= own[:, None]) & ~is_right).sum(1)
        places = torch.arange(start, start + len(scores))
        found.append([rank, torch.where(rank == 1, places, torch.from_numpy(first)[at]), torch.where(rank == 1, own, best)])
    ranks, places, cosines = (torch.cat(parts).numpy() for parts in zip(*found))
    return ranks, places, cosines


def make_tables(rows: dict[str, np.ndarray], number: int, inputs: tables.Inputs) -> dict[str, Table]:
    """Return the errors of cosines of scored pairs, and `number` predictions of each group: found texts, or cosines."""
    if "scores" in rows:
        cosines, scores = rows["cosines"][:, 0].astype(np.float64), rows["scores"].astype(np.float64)
        values = {"predictions": cosines, "references": scores}
        return tables.of_numbers(**values) | tables.of_predicted_numbers(number, inputs, **values, loss=(cosines - scores) ** 2)
    if not number:
        return {}
    ranks, places, cosines = nearest(rows["embeddings"], rows["keys"])
    columns = {"found": lambda i: inputs([int(places[i])])["positive"][0], "cosine": cosines, "rank": ranks}
    return tables.of_predictions(number, inputs, is_correct=ranks == 1, certainty=cosines, columns=columns)


def sentence_transformers_files(dimension: int, pooling: str, max_length: int, prompts: dict[str, str]) -> dict[str, bytes]:
    """Return the files that sentence-transformers needs beside those of transformers, by their names."""
    names = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    kinds = [(path, f"sentence_transformers.models.{name}") for path, name in names.items()]
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds)]
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {
            "word_embedding_dimension": dimension,
            **{POOLINGS[name]: name == pooling for name in POOLINGS},
        },
        "2_Normalize/config.json": {},
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": prompts, "similarity_fn_name": "cosine"},
    }
    return {name: json.dumps(content, indent=1).encode() for name, content in files.items()}
