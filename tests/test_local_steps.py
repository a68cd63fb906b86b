"""Local steps (`--sync_every`): the result depends on the number of workers, not on how they are spread over ranks."""

import math
from collections import defaultdict

import pytest
import torch
from torch import nn

from accel_ddp import accelerator
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.errors import UserError
from accel_ddp.ranks.process import links
from accel_ddp.saving import resume
from tests.conftest import BIN, PROGRAMS, clean_environment, run_all, run_ranks


@pytest.fixture(scope="module", params=[(1, 2), pytest.param((1, 4, 8), marks=pytest.mark.slow)], ids=["2", "4 and 8"])
def results(request, tmp_path_factory) -> dict[int, dict]:
    """Return the results of tests/programs/local_steps.py. Its 4 workers are computed by 1, 2, 4 or 8 ranks.

    The others also continue the run of one rank, from its checkpoint of step 6.
    """
    folder, loaded = tmp_path_factory.mktemp("local"), {}
    for ranks in request.param:
        out = folder / f"{ranks}.pt"
        more = ["--saved", folder / "1"] if ranks > 1 else []
        run_ranks(ranks, PROGRAMS / "local_steps.py", "--out", out, "--output_dir", folder / str(ranks), *more).well()
        loaded[ranks] = torch.load(out, weights_only=False)
    return loaded


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    differences = [(a[name].double() - b[name].double()).abs().max() for name in a]
    return torch.stack(differences).max().item()  # unlike Python's max, it does not ignore NaN


def test_workers_do_what_torch_optimizers_do_by_hand(results):
    """8 steps are no multiple of 3: the workers synchronize after the last step too."""
    assert distance(results[1]["plain"]["weights"], results[1]["by hand"]["weights"]) < 1e-12
    assert results[1]["plain"]["losses"][-1] < 0.7 * results[1]["plain"]["losses"][0], "the model has learned"


def test_the_result_does_not_depend_on_ranks(results):
    for ranks, found in results.items():
        for name, limit in {"plain": 1e-12, "straight": 1e-5, "stopped": 1e-5}.items():
            one, other = results[1][name], found[name]
            assert distance(one["tensors"], other["tensors"]) < limit, (ranks, name)
            assert other["losses"] == pytest.approx(one["losses"], rel=limit)
            assert other["norms"] == pytest.approx(one["norms"], rel=limit)
            for means, others in zip(one["means"], other["means"], strict=True):
                assert others == pytest.approx(means, rel=limit)
        if ranks in (2, 4):
            assert distance(results[1]["straight"]["tensors"], found["straight"]["tensors"]) == 0, (
                "the sum has the order of workers"
            )


def test_each_worker_has_its_own_optimizer_state_in_a_checkpoint(results):
    for found in results.values():
        tensors = found["straight"]["tensors"]
        own = [tensors[f"2.weight/exp_avg@{worker}"] for worker in range(4)]
        assert len({tuple(state.flatten().tolist()) for state in own}) == 4
        assert {"2.weight/outer", "2.weight/ema"} <= tensors.keys()


def test_a_resumed_run_is_bit_identical(results):
    for found in results.values():
        assert distance(found["resumed"]["tensors"], found["straight"]["tensors"]) == 0
        assert found["resumed"]["losses"] == found["straight"]["losses"][6:]


def test_a_run_continues_on_another_number_of_ranks(results):
    for ranks in results:
        if ranks > 1:
            assert distance(results[ranks]["continued"]["tensors"], results[1]["straight"]["tensors"]) < 1e-5


def test_a_run_that_continues_with_more_workers_gives_each_its_own_optimizer_state(results):
    for found in results.values():
        tensors = found["more workers"]["tensors"]
        assert [int(tensors[f"2.weight/step@{worker}"]) for worker in range(8)] == [9] * 8
        assert len({tuple(tensors[f"2.weight/exp_avg@{worker}"].flatten().tolist()) for worker in range(8)}) == 8
        assert distance(tensors, results[1]["more workers"]["tensors"]) < 1e-5


def test_only_the_worker_whose_loss_is_not_finite_skips_its_step(results):
    for found in results.values():
        skipped = found["skipped"]
        assert 2 <= sum(math.isnan(loss) for loss in skipped["losses"]) <= 5, "once per epoch of 2.1 steps"
        assert distance(skipped["tensors"], results[1]["skipped"]["tensors"]) < 1e-12
        steps = sorted(int(skipped["tensors"][f"2.weight/step@{worker}"]) for worker in range(4))
        assert sum(steps) == 4 * 7 - sum(math.isnan(loss) for loss in skipped["losses"])


def test_checkpoints_are_written_where_workers_synchronize(results):
    """Multiples of 2 and the last step: the first synchronization at or after each."""
    for found in results.values():
        assert found["plain"]["saved"] == ["step_00000003", "step_00000006", "step_00000008"]


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({"sync_every": 5, "comm_hook": "fp16"}, 1, "--sync_every 5 --comm_hook fp16: cannot be combined"),
        ({"sync_every": 5, "mixed_precision": "fp16"}, 1, "--sync_every 5 --mixed_precision fp16: cannot be combined"),
        ({"local_workers": 2}, 1, "--local_workers 2: needs --sync_every"),
        ({"sync_every": 5, "outer_momentum": 1.0}, 1, "--outer_momentum 1.0: must be below 1"),
        ({"sync_every": 5, "local_workers": 4}, 6, "--local_workers 4: 6 ranks cannot be divided among them"),
        (
            {"sync_every": 5, "local_workers": 4, "global_batch_size": 6},
            2,
            "--global_batch_size 6 cannot be split over 4 workers",
        ),
    ],
)
def test_options_that_local_steps_cannot_have_are_refused(options, ranks, message):
    cfg = TrainConfig(**options)
    with pytest.raises(UserError, match=message):
        cfg.split(ranks) if ranks > 1 else cfg.validate()


def test_one_worker_per_node_needs_nodes_of_the_same_size(monkeypatch):
    monkeypatch.setattr(links, "nodes", [("a", 4), ("b", 2)])
    with pytest.raises(UserError, match=r"different numbers of ranks \(4, 2\)\. Use --local_workers 3, "):
        accelerator._choose_workers(TrainConfig(sync_every=5))


@pytest.mark.slow
def test_a_run_that_was_killed_and_resumed_on_two_ranks_is_bit_identical():
    """`accel-ddp verify` also compares two ranks with one, which computes both workers."""
    command = [BIN / "accel-ddp", "verify", PROGRAMS / "trains.py", "--sync_every", 2, "--local_workers", 2]
    ended = run_all([command], [clean_environment()], timeout=600)
    assert ended.codes == [0], ended.text
    assert ended.text.count("PASS") == 3


def test_a_rank_computes_the_micro_batches_of_its_workers():
    cfg = TrainConfig(sync_every=5, local_workers=4, global_batch_size=32, micro_batch_size=4)
    assert [cfg.split(ranks) for ranks in (1, 2, 4, 8)] == [(4, 8), (4, 4), (4, 2), (4, 1)]
    with pytest.raises(UserError, match="this run uses FSDP"):
        cfg.validate_sharded()


def test_a_worker_that_has_not_stepped_yet_has_no_optimizer_state_after_a_resume():
    """Its items had no trained tokens, for example."""
    weight = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1, momentum=0.9)
    own = {"@0": defaultdict(dict), "@1": defaultdict(dict)}

    def states():
        for suffix in ("@0", "@1"):
            optimizer.state = own[suffix]
            yield suffix
            own[suffix] = optimizer.state  # `load_state_dict` makes a new one

    there = {"weight/momentum_buffer@0": ([1, 2], torch.float32)}
    for workers, expected in ((2, 0), (1, 1)):
        run = {"on_host": [], "values": {}, "config": {"local_workers": workers}}
        own |= {suffix: defaultdict(dict) for suffix in own}
        resume._load_states(torch.device("cpu"), weight, optimizer, states, there, run, lambda *_: torch.ones(1, 2), False, 2)
        assert (len(own["@0"]), len(own["@1"])) == (1, expected), "a worker that is added begins with the state of another one"
