"""Losses and metrics of rerankers and reward models, and hard negatives of embeddings, compared with formulas and other libraries."""

import math
from collections import defaultdict
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from accel_ddp.config.train_config import RecipeConfig
from accel_ddp.engine.rows import Collate, accept_rows
from accel_ddp.errors import UserError
from accel_ddp.ranks.team import Team
from accel_ddp.tasks import ranking
from accel_ddp.tasks.chat_rows import UnusableRow
from accel_ddp.tasks.contrastive import NOTHING, in_batch_losses, text_keys
from accel_ddp.tasks.negatives import MinedBatches, add_negatives, hardest
from accel_ddp.tasks.ranking import Query, QueryFormat

NAN = float("nan")
OPTIONS = {"query_column": "", "candidate_column": "", "label_column": "", "score_column": ""}
OPTIONS |= {"positive_columns": (), "negative_columns": ()}


def lists(number: int = 7, most: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores and relevances of queries with 2 to `most` candidates, in float64."""
    draw = np.random.default_rng(0)
    relevance = draw.integers(0, 3, (number, most)).astype(float)
    for i in range(number):
        relevance[i, 2 + i % (most - 1) :] = NAN
        relevance[i, 0] = 2
    return torch.from_numpy(draw.normal(size=(number, most))).requires_grad_(), torch.from_numpy(relevance)


def expected(scores: list[torch.Tensor], relevance: list[float], loss: str) -> torch.Tensor:
    """Return the loss of one query, as its formula is written."""
    if loss == "ranknet":
        pairs = [(i, j) for i in range(len(scores)) for j in range(len(scores)) if relevance[i] > relevance[j]]
        return sum((torch.log(1 + torch.exp(scores[j] - scores[i])) for i, j in pairs), torch.zeros(())) / max(1, len(pairs))
    target = [math.exp(y) if loss == "listwise" else y for y in relevance]
    total = torch.log(sum(torch.exp(s) for s in scores))
    return -sum(y / sum(target) * (s - total) for y, s in zip(target, scores))


@pytest.mark.parametrize("loss", ranking.LIST_LOSSES)
def test_the_loss_of_a_list_and_its_gradient_equal_the_formula(loss):
    scores, relevance = lists()
    own = ranking.list_losses(scores, relevance, loss)
    rows = [[(s, float(y)) for s, y in zip(*row) if y == y] for row in zip(scores, relevance)]
    formula = torch.stack([expected([s for s, _ in row], [y for _, y in row], loss) for row in rows])
    torch.testing.assert_close(own, formula, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(losses.sum(), scores, retain_graph=True)[0] for losses in (own, formula)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert (gradients[0][relevance.isnan()] == 0).all()


def test_the_losses_of_pairs_equal_their_formulas():
    scores, relevance = lists()
    there, labels = ~relevance.isnan(), (relevance > 1).double().where(~relevance.isnan(), NAN)
    p = torch.sigmoid(scores[there])
    binary = -(labels[there] * p.log() + (1 - labels[there]) * (1 - p).log())
    torch.testing.assert_close(ranking.pair_losses(scores, labels, "binary")[there], binary)
    torch.testing.assert_close(ranking.pair_losses(scores, relevance, "scored")[there], (scores[there] - relevance[there]) ** 2)
    pair, margins = scores[:, :2], torch.arange(7.0)
    formula = torch.log(1 + torch.exp(-(pair[:, 0] - pair[:, 1] - margins))) + 0.1 * (pair[:, 0] + pair[:, 1]) ** 2
    torch.testing.assert_close(ranking.preference_numbers(pair, margins, 0.1)["loss"], formula)
    found = ranking.preference_numbers(torch.tensor([[1.0, 0.0], [2.0, 2.0]]), torch.tensor([0.0, 1.0]))
    assert {name: values.tolist() for name, values in found.items() if name != "loss"} == {"accuracy": [1, 0], "margin": [1, 0]}


def test_metrics_of_rankings_equal_those_of_scikit_learn_and_a_constant_model_gets_no_credit():
    from sklearn.metrics import average_precision_score, ndcg_score

    draw = np.random.default_rng(1)
    keys, scores = draw.integers(0, 9, 200), draw.normal(size=200)
    relevance = draw.integers(0, 4, 200) * (draw.random(200) < 0.3) * 1.0
    relevance[np.unique(keys, return_index=True)[1]] = 1
    relevance[keys == 8] = 0  # a query without a relevant candidate is left out
    found = ranking.summarize(scores, relevance, keys, "listwise")
    queries = [(scores[keys == key], relevance[keys == key]) for key in range(8)]
    assert found["ndcg_at_10"] == pytest.approx(np.mean([ndcg_score([y], [s], k=10) for s, y in queries]))
    assert found["map"] == pytest.approx(np.mean([average_precision_score(y > 0, s) for s, y in queries]))
    first = [min(1 + (s > one).sum() for one in s[y > 0]) for s, y in queries]
    assert found["mrr"] == pytest.approx(np.mean([1 / rank if rank <= 10 else 0 for rank in first]))

    keys, relevance = np.repeat(np.arange(3), 20), np.tile(np.eye(20)[0], 3)
    constant = ranking.ranking_metrics(*ranking.group_by_query(np.zeros(60), relevance, keys)[:2])
    assert constant == {"mrr": 0, "ndcg_at_10": 0, "map": pytest.approx(1 / 20)}
    pairs = ranking.summarize(np.zeros(60), relevance, np.arange(60), "binary")
    assert math.isnan(pairs["mrr"]), "a query with one candidate cannot be ranked"
    assert pairs["average_precision"] == pytest.approx(1 / 20)
    assert pairs["accuracy"] == pytest.approx(19 / 20)


def read(row: dict, loss: str = "", **options) -> Query:
    rows = SimpleNamespace(column_names=[*row])
    return QueryFormat(rows, SimpleNamespace(**{**OPTIONS, **options})).read(row, loss)


def test_rows_of_all_forms_are_read_and_candidates_are_drawn_by_the_seed():
    assert read({"query": "q", "passage": "a", "label": "1"}) == Query("q", ["a"], [1.0])
    assert read({"query": "q", "passage": "a", "score": 0.3}) == Query("q", ["a"], [0.3])
    assert read({"question": "q", "candidates": ["a", "b"], "labels": [0, True]}) == Query("q", ["a", "b"], [0.0, 1.0])
    assert read({"anchor": "q", "positive": "a", "negative_1": "b", "negative_2": None}) == Query("q", ["a", "b"], [1.0, 0.0])
    assert read({"anchor": "q", "positive": "a", "negative": "b", "2": "a note"}) == Query("q", ["a", "b"], [1.0, 0.0])
    assert read({"query": "q", "positives": ["a"], "negatives": ["b", "c"]}) == Query("q", ["a", "b", "c"], [1.0, 0.0, 0.0])
    query = Query("q", [*"abcdefgh"], [0.0, 0, 1, 0, 1, 0, 0, 0])
    drawn = [ranking.draw_candidates(query, 3, seed) for seed in (0, 0, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len({tuple(one.candidates) for one in drawn}) > 1
    assert all(len(one.candidates) == 3 and 1 in one.relevance for one in drawn)
    assert ranking.draw_candidates(query, 0, 0) == query


@pytest.mark.parametrize(
    ("row", "loss", "words"),
    [
        ({"query": "q", "passage": "a", "label": 2}, "binary", "its label is not 0 or 1 .*--score_column label"),
        ({"query": "q", "passage": "a", "label": None}, "binary", "its label is not a finite number"),
        ({"query": " ", "passage": "a", "label": 1}, "binary", "its query is empty"),
        ({"query": "q", "docs": ["a", ""], "labels": [0, 1]}, "softmax", "its docs is empty"),
        ({"query": "q", "docs": ["a", "b"], "labels": [1]}, "softmax", "its docs and labels have different lengths\t2 and 1"),
        ({"query": "q", "docs": ["a", "b"], "labels": [0, 0]}, "softmax", "none of its candidates is relevant"),
        ({"query": "q", "docs": ["a", "b"], "scores": [2, 2]}, "listwise", "all its scores are equal"),
        ({"query": "q", "docs": ["a", "b"], "scores": [-2, 0]}, "softmax", r"relevant \(has a score above 0\)"),
        ({"query": "q", "docs": ["a"], "labels": [1]}, "ranknet", "needs two or more candidates, and it has 1 candidate"),
    ],
)
def test_rows_that_cannot_be_used_are_described(row, loss, words):
    with pytest.raises(UnusableRow, match=words):
        read(row, loss)


def test_the_hardest_negatives_are_those_found_one_by_one():
    draw = np.random.default_rng(0)
    rows = torch.from_numpy(draw.normal(size=(40, 2, 6)))
    rows[7, 1] = rows[3, 1]  # equal cosines: the first row is taken
    texts = [[f"a{i % 35}" for i in range(40)], [f"p{i % 37}" for i in range(40)]]  # equal anchors and equal positives
    texts[1][9] = "a4"  # a positive that is an anchor
    keys = np.array(text_keys(texts))
    unit = F.normalize(rows.float(), dim=-1)
    cosines = (unit[:, 0] @ unit[:, 1].T).numpy()
    for margin, number in ((-2.0, 3), (0.1, 3), (0.1, 100)):
        found = hardest(rows, keys, number, margin, block=39 * 7)  # in parts
        for i in range(40):
            own = {texts[1][j] for j in range(40) if texts[0][j] == texts[0][i]} | {texts[0][i]}
            allowed = [j for j in range(40) if texts[1][j] not in own and texts[1].index(texts[1][j]) == j]
            allowed = [j for j in allowed if cosines[i, j] <= cosines[i, i] - margin]
            best = sorted(allowed, key=lambda j: (-cosines[i, j], j))[:number]
            assert found[i].tolist() == best + [-1] * (number - len(best))


def test_negatives_that_a_row_does_not_have_do_not_change_the_loss():
    rows, keys = torch.randn(5, 3, 8, dtype=torch.float64), torch.arange(1, 16).view(5, 3)
    keys[:, 2] = NOTHING
    torch.testing.assert_close(in_batch_losses(rows, keys, 20.0), in_batch_losses(rows[:, :2], keys[:, :2], 20.0))


def test_negatives_of_a_file_are_joined_by_anchor_or_drawn_from_a_pool(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"anchor": ["a", "b", "c"], "positive": ["x", "y", "z"]})
    joined, pool = tmp_path / "joined.jsonl", tmp_path / "pool.jsonl"
    joined.write_text('{"anchor": "b", "negative": "m"}\n{"anchor": "a", "negative": "n"}\n{"anchor": "b", "negative": "o"}\n')
    pool.write_text("".join(f'{{"text": "t{i}"}}\n' for i in range(50)))

    def negatives(file, number=2, **more):
        names = {
            "anchor_column": "anchor",
            "positive_column": "positive",
            "skip_broken": False,
            "seed": 0,
            "cache_dir": str(tmp_path),
        }
        cfg = SimpleNamespace(**{**names, "negatives_file": str(file), "num_negatives": number, **more})
        return add_negatives(rows, cfg)["texts of --negatives_file"][:]

    assert negatives(joined) == [["n"], ["m", "o"], []]
    drawn = negatives(pool)
    assert drawn == negatives(pool)
    assert drawn != negatives(pool, seed=1)
    assert len({text for row in drawn for text in row}) > 3
    joined.write_text('{"anchor": "b", "negative": "m"}\n{"anchor": "a", "negative": ""}\n')
    with pytest.raises(UserError, match="row 2 has a cell that is empty"):
        negatives(joined)
    joined.write_text('{"anchor": "other", "negative": "m"}\n')
    with pytest.raises(UserError, match="has no negatives for any anchor"):
        negatives(joined)
    joined.write_text('{"query": "other", "bad": "m"}\n')
    with pytest.raises(UserError, match=r"needs a column anchor .* The data have: query, bad"):
        negatives(joined)


@pytest.mark.slow
def test_losses_and_scores_are_those_of_sentence_transformers(tiny_model):
    """Compare the losses of a CrossEncoder on texts with those of our scores of the same texts."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import losses

    from accel_ddp.sources import models

    torch.manual_seed(0)
    encoder = CrossEncoder(tiny_model, num_labels=1, device="cpu", model_kwargs={"ignore_mismatched_sizes": True}).eval()
    tokenizer = models.load_tokenizer(RecipeConfig(model=tiny_model))
    documents = [["a fine film", "dull"], ["cold houses", "warm people", "a film with great acting"]]
    relevance = [[1.0, 0.0], [0.0, 2.0, 1.0]]
    rows = []
    for query, texts, values in zip(("fine", "warm"), documents, relevance):
        tokens = tokenizer([query] * len(texts), texts)
        rows.append({"input_ids": tokens["input_ids"], "token_type_ids": tokens["token_type_ids"], "relevance": values})
    batch = Collate()(rows)
    accept_rows(encoder.model)
    with torch.no_grad():
        scores = ranking.score(encoder.model, batch)
        labels = [torch.tensor(values) for values in relevance]
        theirs = losses.ListNetLoss(encoder)([["fine", "warm"], documents], labels)
        torch.testing.assert_close(ranking.list_losses(scores, batch["relevance"], "listwise").mean(), theirs)
        pairs = [["fine", "fine"], documents[0]]
        binary = losses.BinaryCrossEntropyLoss(encoder)(pairs, labels[0])
        torch.testing.assert_close(ranking.pair_losses(scores[:1, :2], batch["relevance"][:1, :2], "binary").mean(), binary)
        squared = losses.MSELoss(encoder)(pairs, labels[0])
        torch.testing.assert_close(ranking.pair_losses(scores[:1, :2], batch["relevance"][:1, :2], "scored").mean(), squared)
        one = losses.RankNetLoss(encoder, reduction_log="natural")([["fine"], documents[:1]], labels[:1])
        torch.testing.assert_close(ranking.list_losses(scores[:1], batch["relevance"][:1], "ranknet").sum(), one)


@dataclass(kw_only=True)
class MiningConfig(RecipeConfig):
    mine_negatives: int = 2
    mine_every: int = 3
    global_batch_size: int = 4
    micro_batch_size: int | Literal["auto"] = 2


def test_mined_negatives_change_at_their_steps_and_a_resumed_run_reads_them(tmp_path):
    import datasets
    from accelerate import Accelerator

    keys = np.arange(1, 21).reshape(10, 2)
    rows = datasets.Dataset.from_dict({"input_ids": [[[5], [5] * (i + 1)] for i in range(10)], "keys": keys.tolist()})
    accelerator, calls = Accelerator(cpu=True), []

    def steps(first: int, number: int, folder: str, resume: str = "", team: Team | None = None) -> list[list]:
        """Return the keys of the texts of some steps. Mining call number n takes the rows n + 1 and n + 2 places further on."""

        def mine() -> np.ndarray:
            calls.append(len(calls))
            return np.stack([(np.arange(10) + calls[-1] + k) % 10 for k in (1, 2)], 1).astype(np.int32)

        cfg = MiningConfig(output_dir=str(tmp_path / folder), resume=resume)
        (tmp_path / folder).mkdir(exist_ok=True)
        collate = lambda items: {"keys": torch.tensor([item["keys"] for item in items])}
        batches = MinedBatches(rows, collate, "", cfg, mine).starting_at(first, accelerator, cfg, team)
        return [torch.cat([batch["keys"] for batch in next(batches)]).tolist() for _ in range(number)]

    (tmp_path / "run").mkdir()
    for stale in (0, 3, 6):
        np.save(tmp_path / "run" / f"negatives_{stale:08d}.npy", np.zeros((10, 2), dtype=np.int32))
    whole = steps(0, 8, "run")
    assert calls == [0, 1, 2]
    for step, texts in enumerate(whole):
        for anchor, positive, *negatives in texts:
            row = anchor // 2
            assert (anchor, positive) == tuple(keys[row])
            assert negatives == [keys[(row + step // 3 + k) % 10, 1] for k in (1, 2)]
    calls.clear()
    two = Team(1, 0, workers=range(2), num_workers=2)
    steps(0, 2 * 8, "of two workers", team=two)  # each of which gets its batches of a step
    assert calls == [0, 1, 2]
    assert steps(4, 2, "run", "auto") == whole[4:6]
    assert steps(4, 2, "other", str(tmp_path / "run")) == whole[4:6]
    assert steps(5, 1, "other", "auto") == whole[5:6], "the other folder has the negatives too"
    assert calls == [0, 1, 2]
    steps(6, 1, "run", "auto")
    assert calls == [0, 1, 2, 3], "the weights that mine them are here, and the stored ones may be of another run"
    (tmp_path / "other" / "negatives_00000003.npy").unlink()
    with pytest.raises(UserError, match=r"negatives_00000003.npy is missing: .* resume from a checkpoint of step 3 or before"):
        steps(4, 1, "other", "auto")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed: pip install 'trl>=1.16'")
def test_the_loss_of_a_reward_model_is_the_one_of_trl():
    """Call TRL's own function with scores, margins and centering. It expects all chosen answers before all rejected ones."""
    from accelerate import Accelerator
    from trl import RewardTrainer

    torch.manual_seed(0)
    pairs, margins = torch.randn(6, 2, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), args=SimpleNamespace(center_rewards_coefficient=0.1), accelerator=Accelerator(cpu=True),
        _metrics={"eval": defaultdict(list)}, _total_train_tokens=0,
    )  # fmt: skip
    logits = torch.cat([pairs[:, 0], pairs[:, 1]])[:, None]
    theirs = RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=logits), {"margin": margins})
    own = ranking.preference_numbers(pairs, margins, 0.1)
    torch.testing.assert_close(own["loss"].mean(), theirs)
    for name in ("accuracy", "margin"):
        assert own[name].mean().item() == pytest.approx(trainer._metrics["eval"][name][0])
