"""One optimizer step can be paused between its micro-batches, where weights and optimizer are those of the step before."""

import copy

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.step import train_step
from accel_ddp.training import optim


def test_a_step_can_be_paused_before_each_micro_batch_and_ended_there():
    class Ended(Exception): ...

    def end(number: int) -> None:
        if number == 2:
            raise Ended

    torch.manual_seed(0)
    first, cfg = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), TrainConfig(lr=0.1)
    steps = [list(torch.randn(3, 4, 4)) for _ in range(2)]

    def train(pause, is_ended: bool = False) -> list[torch.Tensor]:
        """Take the first step, and then the second one with `pause`. Return weights and state of the optimizer."""
        model = copy.deepcopy(first)
        optimizer = optim.build(model, cfg)
        state = lambda: [
            tensor.clone() for tensor in (*model.parameters(), *(v for one in optimizer.state.values() for v in one.values()))
        ]
        loss_sum = lambda model, batch: model(batch).square().sum()
        train_step(Accelerator(cpu=True), cfg, model, optimizer, steps[0], loss_sum, len)
        before, paused = state(), []
        seen = lambda number: (paused.append((number, all(map(torch.equal, before, state())))), pause(number))
        if is_ended:
            with pytest.raises(Ended):
                train_step(Accelerator(cpu=True), cfg, model, optimizer, steps[1], loss_sum, len, pause=seen)
            assert all(map(torch.equal, before, state()))
        else:
            train_step(Accelerator(cpu=True), cfg, model, optimizer, steps[1], loss_sum, len, pause=seen)
            assert not any(map(torch.equal, before, state()))
        assert paused == [(number, True) for number in range(3)]
        return state()

    train(end, is_ended=True)
    plain = train(lambda number: None)
    assert all(map(torch.equal, plain, train(lambda number: torch.randn(2) if number else None))), "dropout is seeded afterwards"
