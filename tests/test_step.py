"""One optimizer step can be paused between its micro-batches, where weights and optimizer are those of the step before."""

import contextlib
import copy

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.step import train_step
from accel_ddp.engine.terms import Terms
from accel_ddp.errors import UserError
from accel_ddp.training import optim
from tests.programs.base import Task


class Ended(Exception): ...


def end_before_the_third(number: int) -> None:
    if number == 2:
        raise Ended


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value.clone() for values in (model.state_dict(), *optimizer.state.values()) for value in values.values()]


def test_a_step_can_be_paused_before_each_micro_batch_and_ended_there():
    torch.manual_seed(0)
    first, cfg = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), TrainConfig(lr=0.1)
    steps = [list(torch.randn(3, 4, 4)) for _ in range(2)]
    found = []
    for pause in (lambda number: None, lambda number: torch.randn(2), end_before_the_third):
        model, paused = copy.deepcopy(first), []
        optimizer = optim.build(model, cfg)
        train_step(Accelerator(cpu=True), cfg, Terms(model, Task()), optimizer, steps[0])
        before = state_of(model, optimizer)

        def observe(number, pause=pause, paused=paused, before=before, model=model, optimizer=optimizer):
            paused.append((number, all(map(torch.equal, before, state_of(model, optimizer)))))
            pause(number)

        is_ended = pause is end_before_the_third
        with pytest.raises(Ended) if is_ended else contextlib.nullcontext():
            train_step(Accelerator(cpu=True), cfg, Terms(model, Task()), optimizer, steps[1], pause=observe)
        assert paused == [(0, True), (1, True), (2, True)]
        found.append(state_of(model, optimizer))
        assert all(map(torch.equal, before, found[-1])) == is_ended
    assert all(map(torch.equal, *found[:2])), "dropout is seeded after the pause"


class Old(accel_ddp.Task):
    def loss_sum(self, model, batch):
        return model(batch).square().sum()


def test_a_task_of_an_earlier_version_is_refused_before_its_model_is_loaded():
    with pytest.raises(UserError, match=r"Old.loss_sum: tasks now have `terms\(model, batch, team\)`.*docs/own_recipe.md"):
        accel_ddp.train(TrainConfig(), Old)
    with pytest.raises(UserError, match=r"Old.loss_sum"):
        Terms(nn.Linear(4, 4), Old())


def test_a_task_may_call_any_part_of_the_model_and_returns_one_loss_for_each_item():
    """`checked` knows the number of items without reading the device."""
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(3, 4)
    wrong = {
        r"a loss of shape \[\] for 3 items": lambda model, batch: model(batch).sum(),
        r"a loss of shape \[3, 3\] for 3 items": lambda model, batch: model(batch) - batch[:, 0],
        r"the sum over 2 items for 3 items": lambda model, batch: {"loss": (model(batch).sum(), 2)},
        r"a dictionary without 'loss' \(right\)": lambda model, batch: {"right": model(batch)},
        r"one number as 'right'": lambda model, batch: {"loss": model(batch)[:, 0], "right": 0.5},
    }
    for words, losses in wrong.items():
        with pytest.raises(UserError, match=words):
            train_step(
                Accelerator(cpu=True), TrainConfig(), Terms(model, Task(losses)), torch.optim.SGD(model.parameters()), [batch]
            )
    parts = Task(lambda model, batch: {"loss": model[1](model[0](batch))[:, 0], "first": model[0](batch)[:, 0]})
    stats = train_step(
        Accelerator(cpu=True), TrainConfig(), Terms(model, parts), torch.optim.SGD(model.parameters(), 1e-9), [batch]
    )
    assert stats.names == ("first",)
    assert float(stats.means[0]) == pytest.approx(float(model[0](batch)[:, 0].detach().double().mean()), abs=1e-6)
    assert float(stats.loss) == pytest.approx(float(model(batch).detach().mean()), abs=1e-6)
