"""One optimizer step can be paused between its micro-batches, where weights and optimizer are those of the step before."""

import contextlib
import copy

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.step import train_step
from accel_ddp.engine.terms import Terms
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
