"""Losses over a whole batch, and models that skip parameters: the same result on any number of ranks."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from torch import nn

from accel_ddp.engine.ddp import words_to_freeze
from accel_ddp.exporting import export
from accel_ddp.tasks.contrastive import correlation_metrics, in_batch_losses, retrieval_metrics, score_losses, text_keys
from accel_ddp.training.optim import freeze
from tests.conftest import PROGRAMS, ROOT, run_ranks


def weights(folder: Path, step: int) -> dict[str, np.ndarray]:
    return load_file(folder / f"step_{step:08d}" / "model.safetensors")


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray], within: float) -> None:
    for name in a:
        np.testing.assert_allclose(b[name], a[name], atol=within, rtol=0, err_msg=name)


@pytest.mark.parametrize("spread", [[(2, 4)], pytest.param([(1, 4), (4, 4)], marks=pytest.mark.slow)], ids=str)
def test_negatives_come_from_all_ranks_and_micro_batches_with_gradient(tmp_path, spread):
    """16 rows in one micro-batch, in two on each of 2 ranks, in four, and on 4 ranks, with hard negatives and truncated embeddings."""
    runs = {}
    for ranks, micro in ((1, 16), *spread):
        folder = tmp_path / f"{ranks}x{micro}"
        run_ranks(
            ranks, PROGRAMS / "contrastive.py", "--steps", 3, "--global_batch_size", 16, "--micro_batch_size", micro,
            "--hard", "--cut", "--output_dir", folder,
        ).well()  # fmt: skip
        runs[ranks, micro] = weights(folder, 3)
    for run in runs.values():
        assert_same(runs[1, 16], run, 1e-12)


def test_micro_batches_that_are_embedded_twice_draw_the_same_dropout(tmp_path):
    """One rank and two ranks have the same micro-batches. Their weights are equal only if both passes draw the same dropout."""
    for ranks in (1, 2):
        run_ranks(
            ranks, PROGRAMS / "contrastive.py", "--steps", 3, "--global_batch_size", 16, "--micro_batch_size", 4,
            "--drop", 0.5, "--output_dir", tmp_path / str(ranks),
        ).well()  # fmt: skip
    assert_same(weights(tmp_path / "1", 3), weights(tmp_path / "2", 3), 1e-12)


def test_the_loss_is_the_cross_entropy_of_cosines():
    """Compare with a softmax over cosines, without texts that occur twice, and then with such texts excluded."""
    torch.manual_seed(0)
    rows = torch.randn(5, 3, 8, dtype=torch.float64)
    keys = torch.arange(15).view(5, 3)
    unit = rows / rows.norm(dim=-1, keepdim=True)
    for i, loss in enumerate(in_batch_losses(rows, keys, 20.0)):
        cosines = [unit[i, 0] @ unit[j, part] for part in (1, 2) for j in range(5)]
        assert loss.item() == pytest.approx((-20 * cosines[i] + torch.stack([20 * c for c in cosines]).logsumexp(0)).item())
    keys[3, 1] = keys[0, 1]  # rows 0 and 3 have the same positive
    cosines = [unit[0, 0] @ unit[j, part] for part in (1, 2) for j in range(5) if (j, part) != (3, 1)]
    expected = -20 * cosines[0] + torch.stack([20 * c for c in cosines]).logsumexp(0)
    assert in_batch_losses(rows, keys, 20.0)[0].item() == pytest.approx(expected.item())
    mean = (in_batch_losses(rows, keys, 20.0) + in_batch_losses(rows[..., :4], keys, 20.0)) / 2
    torch.testing.assert_close(in_batch_losses(rows, keys, 20.0, (8, 4)), mean)


def test_retrieval_scores_are_those_counted_by_hand():
    anchors = np.eye(3)
    positives = np.array([[1.0, 0, 0], [0.9, 0.1, 0.5], [0, 0, 1]])  # each anchor is nearest to its own positive
    rows = np.stack([anchors, positives], 1)
    scores = retrieval_metrics(rows, np.array(text_keys([["a", "b", "c"], ["x", "y", "z"]])))
    cosines = F.normalize(torch.tensor(anchors), dim=-1) @ F.normalize(torch.tensor(positives), dim=-1).T
    ranks = [int((cosines[i] > cosines[i, i]).sum()) + 1 for i in range(3)]
    assert scores["recall_at_1"] == pytest.approx(np.mean([rank == 1 for rank in ranks]))
    assert scores["mrr"] == pytest.approx(np.mean([1 / rank for rank in ranks]))
    same = retrieval_metrics(np.ones((4, 2, 3)), np.array(text_keys([list("abcd"), list("wxyz")])))
    assert same["recall_at_1"] == 0, "constant embeddings find nothing"


def test_the_loss_of_scored_pairs_is_that_of_sentence_transformers():
    torch.manual_seed(0)
    rows, scores = torch.randn(6, 2, 8), torch.rand(6)
    expected = torch.nn.MSELoss()(torch.cosine_similarity(rows[:, 0], rows[:, 1]), scores)  # its CosineSimilarityLoss
    torch.testing.assert_close(score_losses(rows, scores, (8,)).mean(), expected)
    both = (score_losses(rows, scores, (8,)) + score_losses(rows[..., :4], scores, (4,))) / 2
    torch.testing.assert_close(score_losses(rows, scores, (8, 4)), both)
    found = correlation_metrics(np.array([[0.1, 0.9], [0.2, 0.5], [0.9, 0.1]]), np.array([0.0, 0.5, 0.6]), (8, 4))
    assert found["spearman"] == pytest.approx(1)
    assert found["spearman_4"] == pytest.approx(-1)
    assert 0.5 < found["pearson"] < 1


def test_pairs_with_scores_are_learned_the_same_on_two_ranks_and_exported(tmp_path, tiny_model, cache):
    """Scores from 0 to 5 state how many words two texts share."""
    words = ["film", "house", "people", "acting", "water", "music", "light", "paper", "stone", "glass"]
    lines = ["first,second,similarity"]
    for i in range(60):
        texts = [[words[(i * 3 + j) % 10] for j in range(5)], [words[(i * 3 + j + i % 6) % 10] for j in range(5)]]
        lines.append(f"{' '.join(texts[0])},{' '.join(texts[1])},{5 - i % 6}")
    (tmp_path / "sts.csv").write_text("\n".join(lines))
    for ranks in (1, 2):
        text = run_ranks(
            ranks, ROOT / "recipes" / "embed.py", "--model", tiny_model, "--train_file", tmp_path / "sts.csv",
            "--anchor_column", "first", "--positive_column", "second", "--score_column", "similarity", "--max_score", 5,
            "--matryoshka", 8, "--epochs", 5, "--global_batch_size", 8, "--micro_batch_size", 2, "--lr", 0.2, "--no_dropout",
            "--optimizer", "sgd", "--keep_best", "--best_metric", "spearman:min", "--output_dir", tmp_path / str(ranks),
        ).well().text  # fmt: skip
    assert_same(*(load_file(tmp_path / name / "model" / "model.safetensors") for name in "12"), 1e-5)
    best = json.loads((tmp_path / "2" / "best.json").read_text())
    assert f"--keep_best: exporting step {best['step']}, the checkpoint with the best spearman." in text
    out = export.from_checkpoint(str(tmp_path / "2" / best["checkpoint"]), str(tmp_path / "out"))
    for file in ("model.safetensors", "config.json"):
        assert (out / file).read_bytes() == (tmp_path / "2" / "model" / file).read_bytes()
    *_, end = [json.loads(line) for line in (tmp_path / "2" / "log.jsonl").read_text().splitlines()]
    assert end["step"] > end["best_step"] == best["step"]
    assert end["spearman"] == best["value"]
    assert re.search(rf"^ +before +step {best['step']}\n(.*\n)*spearman .* {best['value']:.4f}$", text, flags=re.MULTILINE)
    assert f"| spearman | {best['value']:.4f} |" in (tmp_path / "2" / "model" / "README.md").read_text()
    logged = [json.loads(line) for line in (tmp_path / "1" / "log.jsonl").read_text().splitlines()]
    before, *_, after = [event for event in logged if event["event"] == "evaluate"]
    assert after["loss"] < before["loss"]
    assert {"spearman", "pearson", "spearman_8", "pearson_8"} <= after.keys()
    assert json.loads((tmp_path / "1" / "best.json").read_text())["metric"] == "spearman"
    assert "SentenceTransformer" in text

    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(tmp_path / "1" / "model"))
    same, other = model.similarity(model.encode(["film house people"]), model.encode(["film house people", "stone glass light"]))[
        0
    ]
    assert same.item() == pytest.approx(1, abs=1e-4)
    assert other < same


def test_parameters_that_no_step_uses_are_named_and_left_as_they_are(tmp_path):
    text = run_ranks(2, PROGRAMS / "dynamic.py", "--output_dir", tmp_path / "run").well().text
    assert text.count("120 trained parameters got no gradient in the first step: large.0.weight, large.0.bias, ") == 1
    assert "--freeze large saves memory" in text
    run_ranks(2, PROGRAMS / "dynamic.py", "--freeze", "large", "--output_dir", tmp_path / "frozen").well()
    assert_same(weights(tmp_path / "run", 6), weights(tmp_path / "frozen", 6), 0)


@pytest.mark.parametrize(
    ("unused", "used", "expected"),
    [
        (["transformer.mask_emb"], ["transformer.layer.0.w", "transformer.embedding.w"], ["transformer.mask_emb"]),
        (["pooler.a.weight", "pooler.a.bias", "pooler.b.weight"], ["encoder.weight"], ["pooler"]),
        (["layer.1.weight", "layer.1.bias"], ["layer.0.weight", "layer.10.weight", "layer.11.bias"], ["layer.1."]),
        (["h.3.ln.weight", "h.3.ln.bias", "out.bias"], ["h.3.attn.weight", "out.weight"], ["h.3.ln", "out.bias"]),
        (["a.lora_A.weight", "b.lora_A.weight"], ["a.lora_B.weight", "b.lora_B.weight"], ["a.lora_A", "b.lora_A"]),
        (["head.weight"], ["base.head.weight"], []),
        (["scale"], ["body.weight"], ["scale"]),
    ],
)
def test_the_words_to_freeze_match_all_unused_parameters_and_no_others(unused, used, expected):
    assert words_to_freeze(unused, used) == expected
    model = nn.Module()
    for name in (*used, *unused):
        module, parts = model, name.split(".")
        for part in parts[:-1]:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(parts[-1], nn.Parameter(torch.zeros(1)))
    freeze(model, tuple(expected))
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert sorted(frozen) == sorted(unused if expected else [])


FURTHER = [(1, 6, ()), (3, 6, ()), (2, 6, ("--find_unused_parameters",))]


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([(1, 6, ()), (2, 6, ())], id="six rows"),
        pytest.param([(1, 2, ()), (2, 2, ())], id="two rows"),
        pytest.param(FURTHER, id="three ranks", marks=pytest.mark.slow),
    ],
)
def test_parameters_that_are_used_in_some_steps_learn_the_same_on_any_number_of_ranks(tmp_path, runs):
    """A step of one row uses one head, and weight decay moves a parameter if it has a gradient of zeros."""
    adamw = ["--how", "sometimes", "--optimizer", "adamw", "--weight_decay", 0.1, "--save_every", 12, "--steps", 12]
    for number, (ranks, rows, more) in enumerate(runs):
        options = [*adamw, "--global_batch_size", rows, "--micro_batch_size", 1, *more]
        run_ranks(ranks, PROGRAMS / "dynamic.py", *options, "--output_dir", tmp_path / str(number)).well()
        assert_same(weights(tmp_path / "0", 12), weights(tmp_path / str(number), 12), 1e-12)


def test_random_numbers_of_a_forward_pass_are_the_same_on_two_ranks_and_buffers_that_differ_are_named(tmp_path):
    texts = [
        run_ranks(ranks, PROGRAMS / "dynamic.py", "--how", "random", "--output_dir", tmp_path / str(ranks)).well().text
        for ranks in (1, 2)
    ]
    saved = [weights(tmp_path / name, 6) for name in "12"]
    for one in saved:
        assert one.pop("mean").any()
    assert_same(*saved, 1e-12)
    warning = "at step 6 the ranks have different values in 1 buffer: mean. "
    assert [text.count(warning) for text in texts] == [0, 1]
