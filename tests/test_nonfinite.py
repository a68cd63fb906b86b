"""A step whose loss or gradient is not finite changes nothing, on every rank alike. Loss spikes are reported."""

import math
import random

import pytest
import torch
from accelerate import Accelerator

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine import scaler
from accel_ddp.engine.step import train_step
from accel_ddp.engine.terms import Terms
from accel_ddp.errors import UserError
from accel_ddp.observe.hooks import LossSpikes
from accel_ddp.records.incidents import read_incidents
from accel_ddp.training import optim
from tests.conftest import PROGRAMS, run_ranks
from tests.programs.base import Task

NONFINITE = PROGRAMS / "nonfinite.py"
CASES = ["adamw", "sgd", "not fused", "own", "without norm"]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, dict]:
    """Return the results of tests/programs/nonfinite.py on one rank and on two, and what the ranks printed."""
    folder, loaded = tmp_path_factory.mktemp("results"), {}
    for ranks in (1, 2):
        out = folder / f"{ranks}.pt"
        ended = run_ranks(ranks, NONFINITE, "--out", out, "--output_dir", folder / f"run{ranks}").well()
        loaded[ranks] = {**torch.load(out, weights_only=False), "text": ended.text}
    return loaded


def assert_equal(a: dict, b: dict) -> None:
    for group in ("weights", "optimizer"):
        assert a[group].keys() == b[group].keys()
        assert [name for name in a[group] if not torch.equal(a[group][name], b[group][name])] == []
        assert all(bool(value.isfinite().all()) for value in a[group].values())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", [*CASES, "scaler not fused", "scaler sgd"])
def test_a_skipped_step_leaves_what_a_loop_without_this_step_has(results, ranks, case):
    """Weights, running statistics, moments and step counters are bit-identical. The first step is one of the skipped ones."""
    assert results[ranks][case]["error"] == ""
    assert_equal(results[ranks][case]["fit"], results[ranks][case]["loop"])


def test_every_rank_skips_the_same_steps(results):
    weights = [results[ranks]["without norm"]["fit"]["weights"] for ranks in (1, 2)]
    assert all(torch.allclose(weights[0][name], weights[1][name], rtol=0, atol=1e-12) for name in weights[0])
    first, second = results[2]["of ranks"]
    assert all(
        torch.equal(first[case][name], second[case][name]) for case in CASES for name in first[case] if "running" not in name
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kind", "words"), [
    ("data", "the loss is nan on rank {} on "), ("constant", "the loss is inf on rank {} on "),
    ("gradient", "the gradient norm is nan, although the loss is "),
])  # fmt: skip
def test_a_run_that_stops_has_not_stepped(results, ranks, kind, words):
    found = results[ranks][f"stop {kind}"]
    assert f"step 5: {words.format(ranks - 1)}" in found["error"]
    without = [{**way, "weights": {k: v for k, v in way["weights"].items() if "running" not in k and "num" not in k}}
               for way in (found["fit"], found["loop"])]  # fmt: skip
    assert_equal(*without)


def test_each_skipped_step_is_reported_with_its_rank(results):
    text = results[2]["text"]
    assert text.count("warning: step 1: the loss is nan on rank 1 on ") == len(CASES), "once per run"
    assert "warning: step 5: the gradient norm is nan, although the loss is " in text
    assert "2 skipped in a row; --max_nonfinite 25 stops the run" in text
    assert text.count("4 of 9 steps were skipped, because their loss or gradients were not finite.") == len(CASES)


def test_too_many_skipped_steps_in_a_row_end_the_run_on_every_rank_also_across_a_resume(tmp_path):
    common = ["--steps", 40, "--bad_from", 5, "--on_nonfinite", "skip", "--max_nonfinite", 6, "--output_dir", tmp_path / "run"]
    ended = run_ranks(2, NONFINITE, *common, "--stop_after", 8)
    assert ended.codes == [75, 75], ended.text
    ended = run_ranks(2, NONFINITE, *common, "--bad_from", 0, "--resume")
    assert ended.codes == [2, 2], ended.text
    assert "error: step 11: the last 6 steps were skipped" in ended.text
    assert "In the last one, the loss is inf on rank 1 on " in ended.text
    assert ended.text.count("error:") == 1
    assert "Traceback" not in ended.text
    # What the ranks have printed is in incidents.jsonl, once, and the resumed run has appended to it.
    found = read_incidents(tmp_path / "run")
    skipped = [("warning", "SKIPPED_STEP", step) for step in range(6, 11)]
    assert [(one.level, one.kind, one.step) for one in found] == [
        *skipped[:3],
        ("info", "STOPPED", 8),
        *skipped[3:],
        ("error", "ERROR", 11),
    ]
    assert found[0].text.startswith("step 6: the loss is inf on rank 1 on ")
    assert found[3].text.startswith("stopped: requested by ")
    assert "\nerror: " + found[-1].text in "\n" + ended.text


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_fused_kernels_skip_without_the_host(monkeypatch, name):
    """The kernels of a CPU read `found_inf` as those of a GPU do. Only the choice between the two ways is replaced."""
    choose, chosen = scaler.can_skip_on_device, []

    def choose_as_on_a_gpu(optimizer, device):
        chosen.append(choose(optimizer, torch.device("cuda")))
        return chosen[-1]

    monkeypatch.setattr(scaler, "can_skip_on_device", choose_as_on_a_gpu)
    accelerator, found = Accelerator(cpu=True), []
    for bad in ((0, 2, 3), ()):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        cfg = TrainConfig(optimizer=name, lr=0.1, max_grad_norm=0.0, on_nonfinite="skip")
        optimizer = optim.build(model, cfg)
        for step in range(6):
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            if step in bad:
                batch[0, 0] = float("inf")
            if bad or step not in (0, 2, 3):
                terms = Terms(model, Task(lambda model, x: model(x).pow(4).sum(1)))
                train_step(accelerator, cfg, terms, optimizer, [batch])
        assert not hasattr(optimizer, "found_inf")
        state = optimizer.state_dict()["state"]
        found.append([*model.state_dict().values(), *(value for one in state.values() for value in one.values())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    first = 2 if name == "sgd" else 0  # until SGD has momentum, the host decides
    assert chosen == [False] * first + [True] * (6 - first) + [False] * (first > 0) + [True] * (3 - (first > 0))


@pytest.mark.parametrize("on_device", [True, False])
def test_a_cache_that_grows_in_the_forward_pass_is_no_error(monkeypatch, on_device):
    """Models with rotary embeddings compute a longer table of positions for the first longer batch."""

    class Grows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.ones(1))
            self.norm = torch.nn.BatchNorm1d(2)

        def forward(self, batch):
            self.cache = torch.ones(len(self.cache) + 1)
            return self.norm(batch)

    monkeypatch.setattr(scaler, "can_skip_on_device", lambda optimizer, device: on_device)
    cfg = TrainConfig(lr=0.1, max_grad_norm=0.0, on_nonfinite="skip")
    model = Grows()
    optimizer = optim.build(model, cfg)
    for value in (1.0, float("inf")):
        before = model.norm.running_mean.clone()
        batch = torch.tensor([[value, 1.0], [3.0, 2.0]])
        train_step(Accelerator(cpu=True), cfg, Terms(model, Task(lambda model, x: model(x).sum(1))), optimizer, [batch])
        assert torch.equal(before, model.norm.running_mean) == (value == float("inf"))
    assert len(model.cache) == 3


@pytest.mark.parametrize("optimizer", [
    lambda p: torch.optim.AdamW(p), lambda p: torch.optim.RMSprop(p), lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
    lambda p: torch.optim.AdamW([{"params": p, "fused": False}], fused=True),
])  # fmt: skip
def test_the_host_decides_for_kernels_that_cannot_skip(optimizer):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    assert not scaler.can_skip_on_device(optimizer([parameter]), torch.device("cuda"))


def test_skipping_is_refused_with_a_hook_that_keeps_gradients():
    with pytest.raises(UserError, match="--on_nonfinite skip --comm_hook powersgd"):
        TrainConfig(on_nonfinite="skip", comm_hook="powersgd").validate()
    with pytest.raises(UserError, match="--max_nonfinite 0: must be 1 or more"):
        TrainConfig(max_nonfinite=0).validate()


def reports(losses: list[float]) -> list[str]:
    spikes = LossSpikes()
    return [text for step, loss in enumerate(losses, 1) if (text := spikes.observe(step, loss))]


def usual(step: int, noise: random.Random) -> float:
    return 2 * math.exp(-step / 200) + 1 + noise.gauss(0, 0.1)


def test_a_loss_spike_is_one_report_and_its_end_another():
    noise = random.Random(0)
    losses = [usual(step, noise) for step in range(1000)]
    assert reports(losses) == []
    losses[699:702] = [3.5, 9.0, math.nan]
    losses[702] = 4.0
    begin, end = reports(losses)
    assert begin.startswith("warning: LOSS_SPIKE: the loss is 3.5 at step 700. The 200 steps before had 1.")
    assert "lower --lr" in begin
    assert end.startswith("info: LOSS_SPIKE: the loss is ")
    assert "at step 704, as before the spike. The spike lasted 4 steps with losses up to 9." in end


def test_a_loss_that_stays_high_is_reported_once_more_and_then_usual():
    noise = random.Random(0)
    losses = [usual(step, noise) + 6 * (step >= 600) for step in range(1200)]
    begin, stays = reports(losses)
    assert "at step 601." in begin
    assert "the loss has not fallen since step 601" in stays


@pytest.mark.parametrize("kind", ["first steps", "learned", "small batches", "constant"])
def test_normal_losses_are_not_spikes(kind):
    noise = random.Random(0)
    values = {
        "first steps": lambda step: 50.0 if step in (3, 17) else usual(step, noise),
        "learned": lambda step: math.exp(-step / 50) + 1e-4 + 0.3 * noise.random() * (noise.random() < 0.05),
        "small batches": lambda step: math.exp(noise.gauss(0, 0.6)),
        "constant": lambda step: 1.0 + 1e-9 * (step == 500),
    }
    assert reports([values[kind](step) for step in range(1500)]) == []
