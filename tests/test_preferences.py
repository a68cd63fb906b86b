"""Preferences: losses against formulas and TRL, rows of every format, bad rows, and the same result on any number of ranks."""

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch

from accel_ddp.engine.step_sums import LossNumbers
from accel_ddp.engine.terms import Sealed, checked, numbers_of
from accel_ddp.errors import UserError
from accel_ddp.memory.estimate_command import load_recipe
from accel_ddp.ranks.team import Team
from accel_ddp.sources.data import with_row_numbers
from accel_ddp.tasks import preference_losses, preferences
from tests.conftest import PROGRAMS, ROOT, run_ranks

INSTALL = "pip install 'trl>=1.16'"
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason=f"TRL is not installed: {INSTALL}")


def options(**given: object) -> SimpleNamespace:
    usual = {
        "beta": 0.3,
        "label_smoothing": 0.0,
        "gamma": 0.4,
        "sft_weight": 0.0,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.5,
    }
    return SimpleNamespace(**{**usual, **given})


def formula(cfg, s, r, n, good=None, z=0.0):
    """Return the loss of one pair or one labeled answer, as the papers write it. `s`, `r`, `n`: policy, reference, tokens."""
    if cfg.loss == "kto":
        v = torch.sigmoid(cfg.beta * ((s - r) - z)) if good else torch.sigmoid(cfg.beta * (z - (s - r)))
        weight = cfg.desirable_weight if good else cfg.undesirable_weight
        return weight * (1 - v) - (cfg.sft_weight * s / n if good else 0)
    d, a = (s - r)[0] - (s - r)[1], s / n
    odds = a.exp() / (1 - a.exp())
    loss = {
        "dpo": -(1 - cfg.label_smoothing) * torch.log(1 / (1 + torch.exp(-cfg.beta * d)))
        - cfg.label_smoothing * torch.log(1 / (1 + torch.exp(cfg.beta * d))),
        "ipo": (d - 1 / (2 * cfg.beta)) ** 2,
        "orpo": -a[0] - cfg.beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))),
        "simpo": -torch.log(torch.sigmoid(cfg.beta * (a[0] - a[1]) - cfg.gamma)),
    }[cfg.loss]
    return loss - cfg.sft_weight * a[0]


@pytest.mark.parametrize(
    "given",
    [*({"loss": name} for name in preference_losses.LOSSES), {"loss": "dpo", "label_smoothing": 0.2},
     {"loss": "dpo", "sft_weight": 0.7}, {"loss": "kto", "sft_weight": 0.7}],
    ids=lambda given: " ".join(map(str, given.values())),
)  # fmt: skip
def test_a_loss_and_its_gradient_are_the_formula_of_the_paper(given):
    torch.manual_seed(0)
    cfg, number, is_kto = options(**given), 7, given["loss"] in preference_losses.LABELED
    shape = (number,) if is_kto else (number, 2)
    tokens = torch.randint(1, 9, shape)
    policy = (-torch.rand(shape, dtype=torch.float64) * tokens).requires_grad_()
    reference, good, z = policy.detach() + torch.randn(shape, dtype=torch.float64), torch.arange(number) % 2, 0.37
    if is_kto:
        losses, rewards = preference_losses.compute(cfg, policy, reference, tokens, good, z)
        more = [(good[i], z) for i in range(number)]
    else:
        used = None if cfg.loss in preference_losses.REFERENCE_FREE else reference
        losses, rewards = preference_losses.compute(cfg, policy, used, tokens)
        more = [()] * number
    expected = torch.stack([formula(cfg, policy[i], reference[i], tokens[i], *more[i]) for i in range(number)])
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad(some.sum(), policy)[0] for some in (losses, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    scale = policy.detach() / tokens if cfg.loss in preference_losses.REFERENCE_FREE else (policy - reference).detach()
    torch.testing.assert_close(rewards, cfg.beta * scale)


def test_the_numbers_of_a_step_are_those_counted_by_hand():
    rewards = torch.tensor([[1.0, 0.5], [0.2, 0.2], [-1.0, 2.0]])  # right, a tie, wrong
    found = preferences.pair_numbers(torch.tensor([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]]), rewards)
    assert {name: round(values.sum().item(), 5) for name, values in found.items()} == {
        "rewards/accuracies": 1, "rewards/margins": -2.5, "rewards/chosen": 0.2, "rewards/rejected": 2.7,
        "logps/chosen": -9, "logps/rejected": -12,
    }  # fmt: skip
    good = torch.tensor([1, 0, 0, 1])
    found = preferences.label_numbers(torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([0.6, 0.4, 0.5, 0.1]), good, 0.5)
    assert found["rewards/accuracies"] == (2, 4), "the third reward is at the threshold"
    assert [tuple(map(float, found[name])) for name in ("rewards/chosen", "logps/rejected")] == [
        (pytest.approx(0.7), 2), (-5, 2)
    ]  # fmt: skip


def test_the_probability_of_a_certain_answer_has_a_finite_gradient():
    policy = torch.zeros(1, 2, requires_grad=True)
    losses, _ = preference_losses.compute(options(loss="orpo"), policy, None, torch.ones(1, 2))
    assert torch.autograd.grad(checked({"loss": losses}), policy)[0].isfinite().all()


def test_numbers_of_a_loss_function_need_names_that_the_log_can_store():
    loss = torch.ones(3, requires_grad=True)
    assert checked({"loss": loss, "a": torch.ones(3)}) == 3
    assert numbers_of({"loss": loss, "a": torch.ones(3), "b": (2, 3)}) == {"a": (3, 3), "b": (2, 3)}
    assert numbers_of({"loss": loss}) == {}
    with pytest.raises(UserError, match="a number named 'lr', which the log cannot store"):
        numbers_of({"loss": loss, "lr": torch.ones(3)})
    found = LossNumbers(torch.float64, torch.device("cpu"))
    for value in (1, torch.tensor(2.0)):
        found.add({"a": (value, 4), "b": (value, 3)})
    assert found.sums.tolist() == [3, 3, 8, 6]
    with pytest.raises(UserError, match=r"the numbers a for a micro-batch and a, b for another one"):
        found.add({"a": (1, 4)})


# ---- rows


@pytest.fixture(scope="module")
def made(cache):
    """Return a function that returns the texts of the items of some rows, with the learned tokens in brackets, and their labels."""
    from accel_ddp.sources import models

    config = load_recipe(ROOT / "recipes" / "dpo.py").Config
    tokenizer = models.load_tokenizer(config(cache_dir=str(cache)), 0, "AutoModelForCausalLM")

    def make(rows: list[dict], evaluation: list[dict] | None = None, **given: object) -> list[tuple]:
        cfg = config(train_file=("rows.jsonl",), eval_file=("eval.jsonl",), cache_dir=str(cache), **given)
        tables = [datasets.Dataset.from_list(some) for some in (rows, evaluation or rows)]
        form = preferences.Preferences(tables[0], tokenizer, cfg)
        encoded = [form.encode(table[:]) for table in tables]
        numbers = [np.array(table.pop(preferences.SOURCE)) for table in encoded]
        encoded = [with_row_numbers(datasets.Dataset.from_dict(table), some) for table, some in zip(encoded, numbers)]
        done = form.finish(encoded, cfg)[0]
        shown = lambda ids, labels: "".join(
            f"[{tokenizer.decode([i])}]" if label != -100 else tokenizer.decode([i]) for i, label in zip(ids, labels)
        ).replace("][", "")
        texts = [[shown(*text) for text in zip(item["input_ids"], item["labels"])] for item in done]
        return [(*item, *([row["good"]] if "good" in row else [])) for item, row in zip(texts, done)]

    return make


def said(role: str, text: str, **more: object) -> dict:
    return {"role": role, "content": text, **more}


ASK, GOOD, BAD = said("user", "Who?"), said("assistant", "Me."), said("assistant", "You!")
HEAD = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
ITEM = (f"{HEAD}[Me.<|im_end|>]\n", f"{HEAD}[You!<|im_end|>]\n")
SHAREGPT = {"from": "human", "value": "Who?"}
PAIRS = {
    "texts": {"prompt": "Who?", "chosen": "Me.", "rejected": "You!"},
    "messages": {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
    "whole chats": {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    "whole chats beside their prompt": {"prompt": "Who?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "score": 1.0},
    "ShareGPT": {
        "conversations": [SHAREGPT], "chosen": {"from": "gpt", "value": "Me."}, "rejected": {"from": "gpt", "value": "You!"}
    },
    "Alpaca": {"instruction": "Who?", "input": "", "chosen": "Me.", "rejected": "You!"},
    "hh-rlhf": {"chosen": "\n\nHuman: Who?\n\nAssistant: Me.", "rejected": "\n\nHuman: Who?\n\nAssistant: You!"},
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_has_the_same_tokens_in_every_format(made, name):
    assert made([PAIRS[name]] * 2) == [ITEM] * 2


def test_a_pair_may_have_earlier_turns_a_system_prompt_and_other_names(made):
    early = [said("system", "Be short."), said("user", "Hi"), said("assistant", "Hello"), ASK]
    rows = [{"chosen": [*early, GOOD], "rejected": [*early, BAD]}, {"prompt": early, "chosen": GOOD, "rejected": BAD}]
    (first,), (second,) = (made([row]) for row in rows)
    assert first == second
    assert first[0].startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi")
    assert "[Hello" not in first[0], "earlier answers are context"
    named = {"q": "Who?", "good": "Me.", "bad": "You!"}
    assert made([named], prompt_column="q", chosen_column="good", rejected_column="bad") == [ITEM]
    assert made([{**PAIRS["texts"], "system": "Be short."}])[0][0].startswith("<|im_start|>system\nBe short.")


def test_rows_of_kto_get_the_answer_of_another_row(made):
    """The other answer follows the row's own prompt. Pairs become two rows each."""
    rows = [{"prompt": f"Q{i}", "completion": f"A{i}", "label": [True, 0, "1", 0.0][i % 4] in (True, "1")} for i in range(8)]
    found = made(rows, loss="kto")
    assert [good for *_, good in found] == [1, 0, 1, 0] * 2
    for i, (own, other, _) in enumerate(found):
        head = f"<|im_start|>user\nQ{i}<|im_end|>\n<|im_start|>assistant\n"
        assert own == f"{head}[A{i}<|im_end|>]\n"
        assert other == f"{head}[A{(i + 3) % 8}<|im_end|>]\n"
    chats = [{"messages": [said("user", f"Q{i}"), said("assistant", f"A{i}")], "kto_tag": i % 2 == 0} for i in range(8)]
    assert made(chats, loss="kto") == found
    pairs = [{"prompt": f"Q{i}", "chosen": f"A{i}", "rejected": f"B{i}"} for i in range(4)]
    own = [(row[0], row[2]) for row in made(pairs, loss="kto")]
    assert [good for _, good in own] == [1, 0] * 4
    assert "A0" in own[0][0]
    assert "B0" in own[1][0]
    assert all(f"Q{i // 2}<" in row[1] and f"{i // 2}<|im_end|>]" not in row[1] for i, row in enumerate(made(pairs, loss="kto")))


BAD_PAIRS = {
    "its chosen and rejected are the same: row 2": {"prompt": "Who?", "chosen": "Me.", "rejected": "Me."},
    "its rejected is empty: row 2": {"prompt": "Who?", "chosen": "Me.", "rejected": " "},
    "its chosen is empty: row 2": {"prompt": "Who?", "chosen": None, "rejected": "You!"},
    "its prompt is empty: row 2": {"prompt": "", "chosen": "Me.", "rejected": "You!"},
    r"its prompt fills --max_length 24 .*: row 2": {"prompt": "Who? " * 40, "chosen": "Me.", "rejected": "You!"},
}


@pytest.mark.parametrize("reason", BAD_PAIRS)
def test_a_bad_pair_is_named_with_its_file_and_row(made, reason):
    rows = [PAIRS["texts"], BAD_PAIRS[reason], PAIRS["texts"]]
    with pytest.raises(UserError, match=f"(?s)1 of 3 rows of .*rows.jsonl.* cannot be used:.*{reason}"):
        made(rows, [PAIRS["texts"]], max_length=24)
    assert made(rows, [PAIRS["texts"]], max_length=24, skip_broken=True) == [ITEM] * 2


def test_chats_whose_prompts_differ_are_refused(made):
    other = said("user", "When?")
    whole = PAIRS["whole chats beside their prompt"]
    for bad, reason in (
        ({"chosen": [ASK, GOOD], "rejected": [other, BAD]}, "the prompts of its chosen and rejected differ"),
        ({"chosen": [ASK, GOOD, ASK, GOOD], "rejected": [ASK, BAD, ASK, BAD]}, "the prompts of its chosen and rejected differ"),
        (
            {"prompt": "When?", "chosen": whole["chosen"], "rejected": whole["rejected"]},
            "its prompt is not the prompt in its chosen",
        ),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, "its chosen and rejected are the same"),
    ):
        with pytest.raises(UserError, match=f"{reason}.*: row 1"):
            made([bad] * 2)


def test_labels_and_files_of_the_wrong_kind_are_refused(made):
    labeled = [{"prompt": "Q", "completion": f"A{i}", "label": i} for i in range(3)]
    with pytest.raises(UserError, match=r"its label is neither 0 nor 1: row 3 \(2\)"):
        made(labeled, loss="kto")
    with pytest.raises(UserError, match=r"all 1 training rows are undesirable. KTO compares both kinds"):
        made(labeled[:1], loss="kto")
    with pytest.raises(UserError, match=r"--loss dpo: needs pairs of answers .* Labeled answers are learned with --loss kto."):
        made(labeled)
    plain = [{"messages": [ASK, GOOD]}] * 2
    for loss in ("dpo", "kto"):
        with pytest.raises(UserError, match=rf"--loss {loss}: needs .*The data have: messages. .*`accel-ddp run sft`"):
            made(plain, loss=loss)
    with pytest.raises(UserError, match="--chosen_column best: there is no such column"):
        made([PAIRS["texts"]], chosen_column="best")


def test_options_of_other_losses_are_refused():
    config = load_recipe(ROOT / "recipes" / "dpo.py").Config
    for given, reason in (
        ({"loss": "ipo", "label_smoothing": 0.1}, "--label_smoothing 0.1: is an option of --loss dpo, not of ipo"),
        ({"loss": "orpo", "sft_weight": 1.0}, "--sft_weight 1.0: is an option of --loss dpo and"),
        ({"gamma": 1.0}, "--gamma 1.0: is an option of --loss simpo"),
        ({"answer_column": "a"}, "--answer_column a: is an option of --loss kto, not of dpo"),
        ({"loss": "ipo", "label_column": "a"}, "--label_column a: is an option of --loss kto, not of ipo"),
        ({"label_smoothing": 0.5}, "must be below 0.5.* 0.1 is usual"), ({"beta": 0.0}, "--beta 0.0: must be above 0"),
        ({"loss": "simpo", "reference": "copy"}, "--loss simpo has no reference"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=reason):
            config(**given).validate()
    with pytest.raises(UserError, match="--answer_column a: would be ignored"):
        load_recipe(ROOT / "recipes" / "reward.py").Config(answer_column="a").validate()


# ---- runs


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory) -> Path:
    words = ["red", "green", "blue", "small", "large", "old", "new", "round"]
    pick = lambda i, n: " ".join(words[(i * 5 + j * (i % 3 + 1)) % 8] for j in range(n))
    rows = [
        {"prompt": pick(i, 1 + i % 4), "chosen": pick(i + 1, 1 + i % 5), "rejected": pick(i + 2, 7 - i % 6)} for i in range(40)
    ]
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_program(folder: Path, file: Path, ranks: int, micro: int, *more: object, **env: str) -> dict:
    out = folder / "results.pt"
    run_ranks(
        ranks, PROGRAMS / "preferences.py", "--train_file", file, "--out", out, "--output_dir", folder, "--optimizer", "sgd",
        "--lr", 0.05, "--global_batch_size", 8, "--micro_batch_size", micro, "--eval_batch_size", 4, "--save_every", 2, *more, **env,
    ).well()  # fmt: skip
    return torch.load(out, weights_only=False)


def require_equal(a: dict, b: dict, within: float) -> None:
    """Compare weights, and the loss, rewards and log-probabilities of each step."""
    for name, weight in a["weights"].items():
        torch.testing.assert_close(b["weights"][name], weight, rtol=0, atol=within, msg=name)
    assert len(a["numbers"]) == len(b["numbers"]) == 4 or within == 0
    for one, other in zip(a["numbers"][-len(b["numbers"]) :], b["numbers"]):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5 if within else 0)
    assert b["metrics"] == pytest.approx(a["metrics"], rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_every_loss_learns_the_same_on_two_ranks_under_fsdp_and_after_a_restart(tmp_path, pairs_file, cache):
    one = run_program(tmp_path / "1", pairs_file, 1, 8)
    two = run_program(tmp_path / "2", pairs_file, 2, 2)
    sharded = run_program(tmp_path / "s", pairs_file, 2, 4, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    for name in [name for name in one if "resumed" not in name]:
        require_equal(one[name], two[name], 2e-5)
        require_equal(one[name], sharded[name], 2e-5)
        for some in (one, two, sharded):
            require_equal(some[name], some[f"{name}, resumed"], 0)
        first, last = one[name]["numbers"][0], one[name]["numbers"][-1]
        assert {"rewards/accuracies", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"} <= first.keys()
        assert first["loss"] != last["loss"]
    assert one["dpo"]["numbers"][0]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    start = one["dpo with adapters"]["numbers"][0]
    assert start["loss"] == pytest.approx(math.log(2), abs=1e-6), "the model and its reference are equal before step 1"
    assert start["rewards/accuracies"] == 0, "ties count as wrong"
    assert max(row["kl"] for row in one["kto"]["numbers"]) > 0


# ---- TRL


@pytest.fixture(scope="module")
def models_and_tokenizer(cache):
    """Return a small model, its reference with other weights, and their tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from accel_ddp.sources.builtin import locate

    place = locate("builtin:tiny-llama", str(cache))
    torch.manual_seed(0)
    model, reference = (AutoModelForCausalLM.from_pretrained(place) for _ in range(2))
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return model, reference, AutoTokenizer.from_pretrained(place)


def compare_with_trl(trainer, inputs, ours) -> None:
    """Compare the loss and all gradients. `ours` returns the mean loss of the same tokens."""
    model = trainer.model
    found = []
    for compute in (lambda: trainer.compute_loss(model, inputs), lambda: ours(model)):
        model.zero_grad()
        loss = compute()
        loss.backward()
        found.append((loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    (theirs, gradients), (own, same) = found
    assert own == pytest.approx(theirs, rel=1e-5)
    largest = max(gradient.abs().max() for gradient in gradients.values())
    assert largest > 1e-3
    for name, gradient in gradients.items():
        torch.testing.assert_close(same[name], gradient, rtol=0, atol=1e-5 * largest.item(), msg=name)


def trl_options(config, folder, **more):
    usual = {
        "per_device_train_batch_size": 6,
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
    }
    return config(output_dir=str(folder), beta=0.3, **usual, **more)


def texts(ids, mask, answers):
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(answers == 0, -100)}


@needs_trl
@pytest.mark.slow
def test_dpo_and_kto_are_those_of_trl(tmp_path, models_and_tokenizer, pairs_file):
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    from accel_ddp.speed.linear_cross_entropy import OutputHead

    model, reference, tokenizer = models_and_tokenizer
    logps = preferences.TextLogps(OutputHead(model))
    before = preferences.TextLogps(OutputHead(reference))
    rows = [json.loads(line) for line in pairs_file.read_text().splitlines()][:6]
    args = {"processing_class": tokenizer, "model": model, "ref_model": reference}
    trainer = DPOTrainer(train_dataset=datasets.Dataset.from_list(rows), args=trl_options(DPOConfig, tmp_path), **args)
    inputs = next(iter(trainer.get_train_dataloader()))
    order = torch.arange(12).view(2, 6).T.flatten()  # theirs has all chosen answers first
    batch = {
        name: value[order]
        for name, value in texts(*(inputs[n] for n in ("input_ids", "attention_mask", "completion_mask"))).items()
    }

    def dpo(model):
        with torch.no_grad():
            other = before(reference, batch)
        return preference_losses.compute(options(loss="dpo"), logps(model, batch), other, preferences.answer_tokens(batch))[
            0
        ].mean()

    compare_with_trl(trainer, inputs, dpo)
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": i % 3 > 0} for i, row in enumerate(rows)]
    table = datasets.Dataset.from_list(rows)
    trainer = KTOTrainer(train_dataset=table, args=trl_options(KTOConfig, tmp_path, undesirable_weight=1.5), **args)
    inputs = next(iter(trainer.get_train_dataloader()))
    batch = texts(inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"])
    batch["other"] = texts(*(inputs[f"KL_{name}"] for name in ("input_ids", "attention_mask", "completion_mask")))
    batch["good"] = torch.as_tensor(inputs["label"]).long()

    def old(model, batch):
        with torch.no_grad():
            return before(reference, batch)

    def kto(model):
        loss = preferences.LabelLoss(options(loss="kto"), logps, old)
        loss.prepare(model, [batch], Team(), lambda _: Sealed(batch))
        found = loss.terms(model, batch)
        assert found["kl"][0] > 0
        return found["loss"].mean()

    compare_with_trl(trainer, inputs, kto)


@needs_trl
@pytest.mark.slow
def test_orpo_and_simpo_are_those_of_trl():
    """Their trainers compute losses from mean log-probabilities. TRL's likelihood of ORPO includes the prompt and is left out."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    torch.manual_seed(0)
    tokens = torch.randint(1, 9, (5, 2))
    policy = (-torch.rand(5, 2) * tokens).requires_grad_()
    cfg = options(loss="simpo", accelerator=SimpleNamespace(device="cpu"), alpha=0.0, loss_type="simpo", simpo_gamma=0.4)
    means, orpo = (policy / tokens).unbind(1), options(loss="orpo")
    for theirs, ours in (
        (CPOTrainer.cpo_loss(cfg, *means)[0], preference_losses.compute(cfg, policy, None, tokens)[0]),
        (-ORPOTrainer.odds_ratio_loss(cfg, *means)[0], preference_losses.compute(orpo, policy, None, tokens)[0] + means[0]),
    ):  # fmt: skip
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(some.sum(), policy, retain_graph=True)[0] for some in (ours, theirs)))
