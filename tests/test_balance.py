"""`--balance`: how a step is divided among ranks of different speed, as functions and with a slow rank."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from accel_ddp.config.option_values import parse_shares
from accel_ddp.config.train_config import TrainConfig, options_that_must_match
from accel_ddp.engine.step_numbers import Numbers, RankSample, split_samples
from accel_ddp.errors import UserError
from accel_ddp.phases import Timing
from accel_ddp.saving import resume
from accel_ddp.training.balance import Balance, divide
from accel_ddp.training.step_plan import StepPlan
from accel_ddp.training.stream import Shuffle
from tests.conftest import PROGRAMS, run_ranks
from tests.test_slowness import seconds_of


def new_balance(ranks: int, saved: dict | None = None, **options: object) -> Balance:
    cfg = TrainConfig(**{"balance": "speed", "global_batch_size": 64, "num_workers": 2, "prefetch_factor": 4, **options})
    return Balance(SimpleNamespace(num_processes=ranks, device=torch.device("cpu")), cfg, saved or {})


def ends(counts: list[int], costs: list[float], fixed: list[float]) -> float:
    return max(f + c * n for n, c, f in zip(counts, costs, fixed))


def fastest(units: int, costs: list[float], fixed: list[float]) -> float:
    """Return the time of the fastest division: items go to the rank that would be done first with one more."""
    counts = [1] * len(costs)
    for _ in range(units - len(costs)):
        counts[min(range(len(costs)), key=lambda rank: fixed[rank] + costs[rank] * (counts[rank] + 1))] += 1
    return ends(counts, costs, fixed)


def test_no_division_of_a_step_is_faster_than_the_chosen_one():
    dice = random.Random(0)
    for _ in range(200):
        ranks, units = dice.randint(1, 3), dice.randint(3, 12)
        costs, fixed = ([dice.uniform(low, 5) for _ in range(ranks)] for low in (0.1, 0))
        before = [units // ranks + (rank < units % ranks) for rank in range(ranks)]
        counts = divide(costs, fixed, before)
        limits = [range((old + 1) // 2, 2 * old + 1) for old in before]
        possible = [each for each in itertools.product(*limits) if sum(each) == units]
        assert tuple(counts) in possible
        assert ends(counts, costs, fixed) <= min(ends(each, costs, fixed) for each in possible) + 1e-9


def test_the_shares_converge_to_the_fastest_division_and_stay_there():
    """Ranks have fixed and proportional costs, of which only the sum of both is measured, and each step has noise of 3 %."""
    dice = random.Random(1)
    for trial in range(60):
        ranks = dice.choice([2, 3, 8])
        costs = [dice.uniform(1, 4) for _ in range(ranks)]
        fixed, hidden = ([dice.uniform(0, 10) for _ in range(ranks)] for _ in range(2))
        log_every = dice.choice([1, 10, 25])
        balance, clocks = new_balance(ranks), [[0.0, 0.0] for _ in range(ranks)]
        for step in range(600):
            balance.at(step + 8)  # the data loader is ahead
            shares = balance.at(step)
            counts = [round(64 * share) for share in shares] if shares else [64 // ranks + (r < 64 % ranks) for r in range(ranks)]
            for clock, count, cost, rest, extra in zip(clocks, counts, costs, fixed, hidden):
                clock[0] += (cost * count + extra) * dice.uniform(0.97, 1.03)
                clock[1] += rest
            if (step + 1) % log_every == 0:
                samples = [RankSample.of(Timing(step + 1, 0, *[c[0] / 2] * 2, c[1], 0, 0)) for c in clocks]
                numbers = Numbers(step + 1, 0, 0, 0, 64, 0, 0, 0, 0, split_samples([v for one in samples for v in one]))
                balance.on_update(numbers, None)
        both = [a + b for a, b in zip(fixed, hidden)]
        best = fastest(64, costs, both)
        assert ends(balance.changes[-1][1], costs, both) < 1.08 * best, trial
        assert len(balance.changes) < 7, "the shares must not swing"
        assert all(b[0] - a[0] > 8 for a, b in itertools.pairwise(balance.changes)), "a change begins behind prepared batches"


def test_shares_converge_although_the_time_of_fast_ranks_is_hidden():
    """If the host is late, the GPU of a fast rank seems to work only for as long as the rank is later than the slowest one."""
    for costs in ([1.0, 3.0], [2.0, 2.1], [1.0, 1.0, 4.0, 2.0]):
        balance, units = new_balance(len(costs)), 64
        for step in range(1, 10):
            counts = balance.changes[-1][1]
            times = [cost * count for cost, count in zip(costs, counts)]
            measured = [max(0.01 * time, 2 * time - max(times)) for time in times]
            if found := balance.decide(measured, [0.0] * len(costs)):
                balance.changes.append((step, found[0]))
        assert ends(balance.changes[-1][1], costs, [0.0] * len(costs)) < 1.25 * fastest(units, costs, [0.0] * len(costs)), costs
        assert balance.changes[-1][0] < 8, "the shares must come to rest"


def test_a_checkpoint_has_the_shares_of_later_steps_for_the_same_number_of_ranks():
    changes = [(0, [32, 32]), (30, [40, 24])]
    saved = {"num_ranks": 2, "shares": changes}
    balance = new_balance(2, saved)
    assert (balance.at(29), balance.at(30)) == (None, (0.625, 0.375))
    assert balance.state["shares"] == changes
    assert new_balance(3, saved).at(30) is None, "on other ranks the shares are equal again"
    off = new_balance(2, saved, balance="off")
    assert (off.at(30), off.state["shares"]) == (None, [])
    assert new_balance(2, saved, balance="3 1").at(0) == (0.75, 0.25)
    with pytest.raises(RuntimeError, match="step 30 is already divided"):
        balance._change(30, [1, 63], 1.0, 0.5)


def test_ranks_get_as_many_items_as_their_shares_say():
    plan = StepPlan(Shuffle(1000, 0), TrainConfig(global_batch_size=64, micro_batch_size=8), 2)
    for counts in ([40, 24], [1, 63], [63, 1], [33, 31]):
        found = [plan.deal(plan.items(5), rank, tuple(count / 64 for count in counts)) for rank in range(2)]
        assert [sum(map(len, batches)) for batches in found] == counts
        assert all(len(batch) <= 8 for batches in found for batch in batches)


def test_nodes_may_have_different_micro_batches_unless_they_are_chosen_together():
    must_match = lambda size: options_that_must_match(TrainConfig(micro_batch_size=size))
    assert must_match(4) == must_match(8) != must_match("auto")


def test_wrong_shares_are_refused():
    for text, ranks in (("fast", 2), ("1", 1), ("0,1", 2), ("1,-1", 2), ("1,2", 3), ("1,x", 2)):
        with pytest.raises(UserError, match="--balance"):
            parse_shares(text, ranks)
    with pytest.raises(UserError, match="--balance speed: FSDP"):
        TrainConfig(balance="speed").validate_sharded()
    with pytest.raises(UserError, match="--static_graph"):
        TrainConfig(balance="speed", static_graph=True).validate()
    for name, value in (("balance", "2,1"), ("micro_batch_tokens", 512), ("global_batch_tokens", 4096)):
        with pytest.raises(UserError, match=f"--sync_batchnorm --{name} {value}: batch norm needs all ranks"):
            TrainConfig(sync_batchnorm=True, **{name: value}).validate()
    TrainConfig(sync_batchnorm=True).validate()


def test_a_resumed_run_reports_another_division_of_a_step(caplog):
    old = {
        "num_ranks": 1,
        "config": {"micro_batch_size": TrainConfig().micro_batch_size},
        "versions": {},
    }  # without these options
    with caplog.at_level("INFO"):
        resume.report_differences(TrainConfig(padding_free="off", compile="off"), old)
        assert "has changed" not in caplog.text
        resume.report_differences(TrainConfig(balance="speed", micro_batch_tokens=64), old)
    assert "--balance has changed" in caplog.text
    assert "--micro_batch_tokens has changed" in caplog.text


@pytest.mark.slow
def test_a_slow_rank_gets_fewer_items_until_no_rank_waits(tmp_path):
    """An item takes 4 ms on rank 0 and 12 ms on rank 1, so 24 of 32 items belong to rank 0."""
    options = ["--slow", "items", "--seconds", 0.004, "--global_batch_size", 32, "--steps", 100, "--save_every", 1000]
    run_ranks(
        2, PROGRAMS / "slow_rank.py", "--out", tmp_path, "--output_dir", tmp_path / "run", *options, "--balance", "speed"
    ).well()
    times = [seconds_of(tmp_path, rank) for rank in range(2)]
    own = [sum(timing[1:-1]) for timing in times]
    assert max(own) < 1.15 * min(own)
    assert sum(times[0][1:]) < 0.14, "without shares it is 0.192"
