"""Scores of texts in lists: rows of a query with its candidates, losses of rerankers and reward models, and metrics of rankings.

The scores and relevances of a micro-batch are matrices with a row for each query. Rows may have different numbers of candidates:
the relevance is NaN where there is none.
"""

import random
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from accel_ddp.errors import UserError
from accel_ddp.records.eval_tables import Table
from accel_ddp.seeds import mixed
from accel_ddp.sources.data import describe_columns, merge_problems, number_problem, parse_number, require_columns, require_types
from accel_ddp.sources.places import warn
from accel_ddp.sources.tokenization import SOURCE
from accel_ddp.tasks import chat, tables
from accel_ddp.tasks.chat_rows import Chat, UnusableRow, check_text
from accel_ddp.tasks.contrastive import PER_TEXT, text_keys
from accel_ddp.tasks.metrics import regression_metrics
from accel_ddp.tasks.preferences import Preferences
from accel_ddp.text import counted

if TYPE_CHECKING:
    import datasets

LIST_LOSSES = ("listwise", "softmax", "ranknet")  # of a query, not of a pair
# Usual names of columns in public datasets, tried in this order if the option is empty.
USUAL_COLUMNS = {
    "query_column": ("query", "question", "anchor"),
    "candidate_column": ("candidate", "candidates", "passage", "passages", "document", "documents", "docs", "response", "text"),
    "label_column": ("label", "labels"),
    "score_column": ("score", "scores"),
    "positive_columns": ("positive", "positives", "pos"),
    "negative_columns": ("negative", "negatives", "neg"),
}


class Query(NamedTuple):
    """A query with its candidates and how relevant each of them is: 0 or 1, or a score."""

    text: str
    candidates: list[str]
    relevance: list[float]


class QueryFormat:
    """Which columns hold the queries, candidates and labels or scores, and how a row is read."""

    def __init__(self, rows: Any, cfg: Any):
        """Choose the columns that the options name, otherwise the usual ones. `rows` needs `column_names` only."""
        names = rows.column_names
        require_types(rows, [name for some in USUAL_COLUMNS.values() for name in some])
        usual = {option: [name for name in some if name in names] for option, some in USUAL_COLUMNS.items()}
        numbered = [name for name in names if re.fullmatch(r"negative_\d+", name)]
        pick = lambda option: getattr(cfg, option) or next(iter(usual[option]), "")
        self.query, self.candidate = pick("query_column"), pick("candidate_column")
        self.positives = cfg.positive_columns or (tuple(usual["positive_columns"]) if not cfg.candidate_column else ())
        self.negatives = (cfg.negative_columns or (*usual["negative_columns"], *numbered)) if self.positives else ()
        # A label says more than a score that some retriever has written next to it.
        has_label = cfg.label_column or usual["label_column"] or self.positives
        self.score = cfg.score_column or ("" if has_label else pick("score_column"))
        self.value = self.score or pick("label_column")
        needed = {"query_column": self.query or "query"}
        if self.positives:
            needed |= {"positive_columns": self.positives[0], "negative_columns": (*self.negatives, "negative")[0]}
        else:
            needed |= {"candidate_column": self.candidate or "candidate", "label_column": self.value or "label"}
        needed = {"score_column" if column == self.score else option: column for option, column in needed.items()}
        for option, column in (*needed.items(), *(("negative_columns", name) for name in self.negatives)):
            if column not in names:
                raise UserError(f"--{option} {column}: there is no such column. {describe_columns(rows, needed)}")
        several = [name for some in (self.positives, self.negatives) if some[1:] for name in some]  # a row may have one of them
        self.needed = {option: column for option, column in needed.items() if column not in several}
        require_columns(self.needed, rows)
        self.columns = {"query_column": self.query, "candidate_column": "" if self.positives else self.candidate}
        self.identity = [self.query, self.candidate, list(self.positives), list(self.negatives), self.value, self.score]

    def choose_loss(self, rows: "datasets.Dataset", asked: str) -> str:
        """Return the loss of `--loss`. Raise UserError if the data do not suit it."""
        has_lists = bool(self.positives) or isinstance(rows[0][self.candidate], list)
        found = ("softmax" if not self.score else "listwise") if has_lists else "scored" if self.score else "binary"
        kind = found if asked == "auto" else asked
        if kind in LIST_LOSSES and not has_lists:
            raise UserError(
                f"--loss {kind}: needs all candidates of a query in one row: lists candidates and labels (or scores), or "
                f"columns positives and negatives. Rows with one candidate are learned with --loss {found}."
            )
        if kind == ("binary" if self.score else "scored"):
            needs = "labels of 0 and 1 (--label_column)" if self.score else "--score_column, a column of numbers"
            raise UserError(f"--loss {kind}: needs {needs}. These rows are learned with --loss {found}.")
        return kind

    def read(self, row: dict[str, Any], loss: str) -> Query:
        """Return the query of a row. Raise UnusableRow with the reason if that is impossible."""
        query = check_text(row[self.query], self.query)
        if self.positives:
            texts = [
                [text for name in some for text in _read_texts(row.get(name), name)] for some in (self.positives, self.negatives)
            ]
            candidates, relevance = texts[0] + texts[1], [1.0] * len(texts[0]) + [0.0] * len(texts[1])
        else:
            candidates, values = _read_texts(row[self.candidate], self.candidate), row[self.value]
            values = values if isinstance(row[self.candidate], list) and isinstance(values, list) else [values]
            if len(values) != len(candidates):
                detail = f"{len(candidates)} and {len(values)}"
                raise UnusableRow(f"its {self.candidate} and {self.value} have different lengths\t{detail}")
            relevance = [self._read_value(value) for value in values]
        if loss in LIST_LOSSES and len(candidates) < 2:
            raise UnusableRow(f"--loss {loss} needs two or more candidates, and it has {counted(len(candidates), 'candidate')}")
        if loss in LIST_LOSSES and max(relevance) <= 0 and not (self.score and loss != "softmax"):
            raise UnusableRow(f"none of its candidates is relevant{' (has a score above 0)' if self.score else ''}")
        if loss in LIST_LOSSES and self.score and max(relevance) == min(relevance):
            raise UnusableRow("all its scores are equal")
        if not candidates:
            raise UnusableRow("it has no candidates")
        return Query(query, candidates, relevance)

    def _read_value(self, value: Any) -> float:
        number = float(value) if isinstance(value, bool) else parse_number(value)
        if number is None:
            raise UnusableRow(f"its {self.value} is not a finite number\t{value!r:.40}")
        if not self.score and number not in (0, 1):
            raise UnusableRow(f"its {self.value} is not 0 or 1 (for other numbers, use --score_column {self.value})\t{number:g}")
        return number


def _read_texts(value: Any, column: str) -> list[str]:
    """Return a text or a list of texts as a list. A column that is missing in this row has none."""
    return [] if value is None else [check_text(text, column) for text in (value if isinstance(value, list) else [value])]


def draw_candidates(query: Query, most: int, seed: int) -> Query:
    """Return the query with at most `most` candidates: one of the most relevant, and others that the seed and the text draw."""
    number = len(query.candidates)
    if not 0 < most < number:
        return query
    draw = random.Random(mixed(seed, f"candidates {query.text}"))
    first = draw.choice([i for i, value in enumerate(query.relevance) if value == max(query.relevance)])
    kept = sorted([first, *draw.sample([i for i in range(number) if i != first], most - 1)])
    return Query(query.text, [query.candidates[i] for i in kept], [query.relevance[i] for i in kept])


def encode(rows: dict[str, list], form: QueryFormat, loss: str, tokenizer: Any, cfg: Any, is_trained: bool) -> dict[str, list]:
    """Return the tokens of the candidates of each query. Evaluation rows have one candidate each, with its place in the list."""
    queries, problems = [], []
    for values in zip(*rows.values()):
        try:
            query, problem = form.read(dict(zip(rows, values)), loss), ""
        except UnusableRow as error:
            query, problem = Query("", [""], [0.0]), str(error)
        queries.append(draw_candidates(query, cfg.max_candidates, cfg.seed) if is_trained else query)
        problems.append(problem)
    source = [i for i, query in enumerate(queries) for _ in query.candidates]
    texts = [text for query in queries for text in query.candidates]
    tokens = tokenizer([queries[i].text for i in source], texts, truncation=True, max_length=cfg.max_length)
    tokens = {name: tokens[name] for name in PER_TEXT if name in tokens}
    keys = [key for (key,) in text_keys([[query.text for query in queries]])]
    if is_trained:
        ends = np.cumsum([0, *(len(query.candidates) for query in queries)]).tolist()
        done = {name: [values[a:b] for a, b in pairwise(ends)] for name, values in tokens.items()}
        return {**done, "relevance": [query.relevance for query in queries], "keys": keys, "problem": problems}
    places = [(place, value) for query in queries for place, value in enumerate(query.relevance)]
    done = {name: [[one] for one in values] for name, values in tokens.items()}
    done |= {"relevance": [[value] for _, value in places], "place": [place for place, _ in places], SOURCE: source}
    return {**done, "keys": [keys[i] for i in source], "problem": [problems[i] for i in source]}


def score_texts(model: Any, batch: Any) -> Tensor:
    """Return the score of each text, in float32 or wider."""
    scores = model(batch).logits[:, 0]
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def score(model: Any, batch: Any) -> Tensor:
    """Return the scores of all candidates as a matrix. There are arbitrary values where a query has no candidate."""
    is_there = ~batch["relevance"].isnan()
    places = (is_there.flatten().cumsum(0) - 1).clamp(min=0).view(is_there.shape)
    return score_texts(model, batch)[places]


def pair_losses(scores: Tensor, relevance: Tensor, loss: str) -> Tensor:
    """Return the loss of each candidate as a matrix: cross-entropy with the label, or the squared difference from the score."""
    target = relevance.nan_to_num(0.0).to(scores.dtype)
    binary = loss == "binary"
    losses = F.binary_cross_entropy_with_logits(scores, target, reduction="none") if binary else (scores - target).square()
    return losses.masked_fill(relevance.isnan(), 0.0)


def list_losses(scores: Tensor, relevance: Tensor, loss: str) -> Tensor:
    """Return the loss of each query over its candidates.

    listwise (ListNet) is the cross-entropy of softmax(scores) with softmax(relevance), softmax the one with relevance / its sum.
    ranknet is the mean of -log sigmoid(s_i - s_j) over the pairs in which i is more relevant than j.
    """
    is_there, target = ~relevance.isnan(), relevance.nan_to_num(0.0).to(scores.dtype)
    if loss == "ranknet":
        wins = (target[:, :, None] > target[:, None, :]) & is_there[:, :, None] & is_there[:, None, :]
        losses = -F.logsigmoid(scores[:, :, None] - scores[:, None, :]).masked_fill(~wins, 0.0)
        return losses.sum((1, 2)) / wins.sum((1, 2)).clamp(min=1)
    log_p = scores.masked_fill(~is_there, float("-inf")).log_softmax(-1).masked_fill(~is_there, 0.0)
    if loss == "listwise":
        return -(target.masked_fill(~is_there, float("-inf")).softmax(-1) * log_p).sum(-1)
    target = target.clamp(min=0)  # a score below 0 is not relevant
    return -(target / target.sum(-1, keepdim=True).clamp(min=1e-12) * log_p).sum(-1)


def preference_numbers(scores: Tensor, margins: Tensor, center: float = 0.0) -> dict[str, Tensor]:
    """Return the loss of each pair of a reward model (Bradley-Terry), whether it is in order, and by how much.

    `scores` has the columns chosen and rejected. A pair with equal scores is not in order.
    """
    apart = scores[:, 0] - scores[:, 1]
    losses = -F.logsigmoid(apart - margins.to(scores.dtype))
    losses = losses + center * (scores[:, 0] + scores[:, 1]).square() if center else losses
    return {"loss": losses, "accuracy": (apart > 0).to(scores.dtype), "margin": apart.detach()}


class RewardPairs(Preferences):
    """How pairs of a better and a worse answer become whole chats with an optional margin. None is cut: its end is scored."""

    kept = ("input_ids", "good", "margin")

    def _find_columns(self, rows: "datasets.Dataset", cfg: Any) -> tuple[str, tuple[str, ...]]:
        self.margin = margin_column(rows, cfg)
        return super()._find_columns(rows, cfg)

    @property
    def identity(self) -> list[Any]:
        return [*super().identity, self.margin]

    def encode(self, rows: dict[str, list]) -> dict[str, list]:
        done = super().encode(rows)
        values = rows[self.margin] if self.margin else [0.0] * len(done["problem"])
        numbers = [parse_number(value) for value in values]
        others = [number_problem(self.margin, value) if number is None else "" for value, number in zip(values, numbers)]
        return {**done, "margin": [number or 0.0 for number in numbers], "problem": merge_problems(done["problem"], others)}

    def finish(self, given: list["datasets.Dataset"], cfg: Any) -> list["datasets.Dataset"]:
        if cfg.max_length == "auto":
            self._choose_length(given, cfg)
        lengths, most = [np.array(rows["length"][:]) for rows in given], cfg.max_length
        reason = f"an answer with its prompt is longer than --max_length {most} (the longest has {max(map(max, lengths))} tokens)"
        return super().finish([chat.add_problem(rows, own > most, reason) for rows, own in zip(given, lengths)], cfg)

    def first_chosen(self, rows: "datasets.Dataset", encoded: "datasets.Dataset") -> str | list[dict[str, Any]]:
        """Return the chosen answer of the first row with its prompt, as a chat or as a text."""
        found = self._sides()[0]._read(rows[:1], 0)
        return found.messages if isinstance(found, Chat) else self.tokenizer.decode(encoded[0]["input_ids"][0])


def margin_column(rows: Any, cfg: Any) -> str:
    """Return the column of margins, or "" if there is none. Raise UserError if the columns of pairs are missing."""
    margin = cfg.margin_column or ("margin" if "margin" in rows.column_names else "")
    columns = {"chosen_column": cfg.chosen_column, "rejected_column": cfg.rejected_column, "margin_column": margin}
    require_columns(columns, rows)
    return margin


def group_by_query(scores: np.ndarray, relevance: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return matrices of scores, relevances and item numbers (-1: none), with a row for each query in the order of the data."""
    _, first, query = np.unique(keys, return_index=True, return_inverse=True)
    query = np.argsort(np.argsort(first))[query.reshape(-1)]  # numbers in the order of the data
    order = np.argsort(query, kind="stable")
    sizes = np.bincount(query)
    column = np.arange(len(query)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    items = np.full((len(sizes), sizes.max()), -1)
    items[query[order], column] = order
    is_there = items >= 0
    grouped = (np.where(is_there, values.astype(np.float64)[items], np.nan) for values in (scores, relevance))
    return (*grouped, items)


def is_rankable(relevance: np.ndarray) -> np.ndarray:
    """Return for each query whether an order of its candidates can be right or wrong: one is relevant, and they differ."""
    return (np.nanmax(relevance, 1) > 0) & (np.nanmax(relevance, 1) > np.nanmin(relevance, 1))


def rank_candidates(scores: np.ndarray, relevance: np.ndarray) -> np.ndarray:
    """Return the columns of each query's candidates, from the highest score to the lowest.

    Of equal scores the least relevant comes first, so that a model with constant output gets no credit.
    """
    last = np.where(np.isnan(scores) | np.isnan(relevance), np.inf, -scores)
    return np.lexsort((np.nan_to_num(relevance, nan=-np.inf), last))


def ranking_metrics(scores: np.ndarray, relevance: np.ndarray) -> dict[str, float]:
    """Return mrr and ndcg, both at 10, and map, as means over the queries that `is_rankable`; NaN if there are none.

    `scores` and `relevance` come from `group_by_query`. A candidate with relevance above 0 is relevant, and its gain is the relevance.
    """
    chosen = is_rankable(relevance)
    if not chosen.any():
        return dict.fromkeys(("mrr", "ndcg_at_10", "map"), float("nan"))
    scores, relevance = scores[chosen], relevance[chosen]
    gains = np.take_along_axis(np.maximum(np.nan_to_num(relevance), 0), rank_candidates(scores, relevance), 1)
    rank, is_hit = np.arange(1, gains.shape[1] + 1), gains > 0
    first = is_hit.argmax(1) + 1
    precision = (is_hit.cumsum(1) / rank * is_hit).sum(1) / is_hit.sum(1)
    dcg = lambda some: (some[:, :10] / np.log2(rank[:10] + 1)).sum(1)
    return {
        "mrr": float(np.where(first <= 10, 1 / first, 0.0).mean()),
        "ndcg_at_10": float((dcg(gains) / dcg(-np.sort(-gains, 1))).mean()),
        "map": float(precision.mean()),
    }


def summarize(scores: np.ndarray, relevance: np.ndarray, keys: np.ndarray, loss: str) -> dict[str, float]:
    """Return the metrics of all candidates: those of rankings, those of pairs if pairs are learned, and the loss."""
    tables.report_same(scores, relevance, "the value {:.3g}".format)
    by_query = group_by_query(scores, relevance, keys)[:2]
    metrics = ranking_metrics(*by_query)
    if loss in LIST_LOSSES:
        parts = [np.array_split(values, -(-len(values) // 64)) for values in by_query]  # ranknet compares all pairs of a query
        losses = [list_losses(*map(torch.from_numpy, part), loss) for part in zip(*parts)]
        return {**metrics, "loss": float(torch.cat(losses).mean())}
    metrics["loss"] = float(pair_losses(*(torch.from_numpy(x.astype(np.float64)) for x in (scores, relevance)), loss).mean())
    if loss == "scored":
        found = regression_metrics(scores.astype(np.float64), relevance.astype(np.float64))
        return {**metrics, "spearman": found["spearman"], "pearson": found["pearson"]}
    from sklearn.metrics import average_precision_score

    precision = float(average_precision_score(relevance, scores)) if relevance.any() else float("nan")
    return {**metrics, "average_precision": precision, "accuracy": float(((scores > 0) == relevance).mean())}


def make_tables(rows: dict[str, np.ndarray], number: int, inputs: tables.Inputs) -> dict[str, Table]:
    """Return `number` queries of each group with the candidate that is ranked first. `inputs` returns the texts of some items."""
    if not number:
        return {}
    scores, relevance, items = group_by_query(rows["scores"], rows["relevance"], rows["keys"])
    first = rank_candidates(scores, relevance)[:, :1]
    score, value, item = (np.take_along_axis(values, first, 1)[:, 0] for values in (scores, relevance, items))
    best = np.nanmax(relevance, 1)
    columns = {"score": score, "relevance": value, "best relevance": best}
    texts = lambda queries: inputs([int(item[i]) for i in queries])
    return tables.of_predictions(number, texts, is_correct=value == best, certainty=score, columns=columns)


def report_queries(test: "datasets.Dataset", train: "datasets.Dataset | None") -> None:
    """Warn about evaluation queries that cannot be ranked, and about those that the training data have too."""
    keys, relevance = np.array(test["keys"][:]), np.array(test["relevance"][:])[:, 0]
    known, rankable = np.unique(keys), is_rankable(group_by_query(relevance, relevance, keys)[1])
    left_out, shared = int((~rankable).sum()), int(np.isin(known, train["keys"][:]).sum()) if train else 0
    what = {
        "have no relevant candidate, or no other one. mrr, ndcg_at_10 and map leave them out.": left_out,
        "are in the training data too, so metrics are too good. Give --eval_file with other queries.": shared,
    }
    for text, number in what.items():
        if number:
            warn(f"{number:,} of {len(known):,} evaluation queries {text}")
