"""Make mistakes that are found before the first step, one after the other, and write the message of each rank to OUT.RANK.

Rows are four inputs and a target, or texts of different lengths.
"""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path

import base
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import accel_ddp
from accel_ddp.engine.terms import Terms
from accel_ddp.entry import run
from accel_ddp.errors import UserError
from accel_ddp.ranks.team import Team
from accel_ddp.seeds import generator_states
from accel_ddp.training import first_step


class Net(nn.Module):
    """A small network. What is wrong with it, if anything, is named by `how`."""

    def __init__(self, how: str = "", width: int = 4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, width), nn.Linear(width, width)])
        self.head, self.how, self.calls = nn.Linear(width, 1), how, 0
        self.own = torch.Generator().manual_seed(0)
        self.register_buffer("mean", torch.zeros(4))
        if how == "unused":
            self.other = nn.Linear(4, 1)

    def forward(self, x):
        self.calls += 1
        self.mean.copy_(x.detach().reshape(-1, 4).mean(0))
        hidden = self.layers[1](self.layers[0](x).tanh())
        if self.how == "counter":
            hidden = hidden * (1 + 1e-3 * self.calls)
        if self.how == "dropout":
            hidden = F.dropout(hidden)
        if self.how == "generator":
            hidden = hidden * torch.rand((), generator=self.own)
        return self.head(hidden)


class Changing:
    """Items with noise of a generator of their own."""

    def __init__(self, rows: list, seed: int):
        self.rows, self.own = rows, torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + 0.01 * torch.rand((), generator=self.own)


def squares(model, batch):
    return (model(batch[:, :4]).squeeze(-1) - batch[:, 4]).square()


def noisy(model, batch):
    return (model(batch[:, :4]) + torch.randn(len(batch), 1)).square()


def neighbors(model, batch):
    scores = model(batch[:, :4]) @ batch[:, 4:].T
    return F.cross_entropy(scores, torch.arange(len(batch)), reduction="none")


def jittered(rows):
    return torch.stack(rows) + torch.rand(5)


def padded(model, batch):
    return (model(batch[..., None].expand(-1, -1, 4)) - 1).square().sum((1, 2))


def named(rows):
    return {"x": torch.stack(rows)}


def unmasked(rows):
    return pad_sequence(rows, batch_first=True)


def main(cfg: base.Config) -> None:
    accelerator = accel_ddp.start(cfg)
    is_last = accelerator.num_processes > 1 and accelerator.process_index == accelerator.num_processes - 1
    rows = list(torch.randn(32, 5, generator=torch.Generator().manual_seed(0)))
    texts = [torch.ones(2 + i % 5) for i in range(32)]

    def message(name, losses=squares, model=None, data=rows, collate=torch.stack, options=(), optimize=None, test=None, **more):
        model, out = model or Net(), io.StringIO()
        own = replace(cfg, output_dir=f"{cfg.output_dir}/{name}".replace(" ", "_"), **dict(options))
        build = optimize or (lambda model: accel_ddp.optim.build(model, own))
        try:
            with contextlib.redirect_stdout(out):
                train = accel_ddp.TrainBatches(data, collate)
                task = base.Task(losses, **more)
                accel_ddp.fit(accelerator, own, task=task, model=model, optimizer=build(model), train=train, test=test)
        except UserError as error:
            return str(error)
        return f"no error\n{out.getvalue()}"

    mean = lambda model, batch: {"loss": (squares(model, batch).mean(), len(batch))}
    numel = lambda model, batch: {"loss": (padded(model, batch).sum() * 0, batch.numel())}
    ragged = {"data": texts, "collate": unmasked}
    whole = accel_ddp.losses.GradCache(
        lambda model, batch: model(batch["x"][:, :4]), lambda batch: batch["x"][:, 4], lambda rows, keys: rows.mean()
    )
    found = {
        "sum": message("sum"),
        "mean": message("mean", mean),
        "mean, allowed": message("mean_allowed", mean, options={"allow_inexact": True}),
        "mean of one": message("mean_of_one", mean, options={"micro_batch_size": 1}),
        "broadcast": message("broadcast", lambda model, batch: (model(batch[:, :4]) - batch[:, 4]).square()),
        "hidden broadcast": message("hidden", lambda model, batch: (model(batch[:, :4]) - batch[:, 4]).square().sum(1)),
        "neighbors": message("neighbors", neighbors),
        "count": message("count", lambda model, batch: {"loss": (squares(model, batch).sum(), 8)}, count=lambda batch: 8),
        "padded count": message("padded_count", numel, count=torch.numel, **ragged),
        "padding": message("padding", padded, **ragged),
        "noise": message("noise", noisy),
        "noise of collate": message("noise_of_collate", collate=jittered),
        "own generator": message("own_generator", data=Changing(rows, accelerator.process_index)),
        "counter": message("counter", model=Net("counter")),
        "dropout": message("dropout", model=Net("dropout")),
        "generator": message("generator", model=Net("generator")),
        "whole batch": message("whole_batch", lambda model, batch: whole.terms(model, batch, Team()), collate=named, whole_batch=True),
        "optimizer": message("optimizer", optimize=lambda model: torch.optim.SGD(model.head.parameters(), lr=0.1)),
        "unused": message("unused", model=Net("unused")),
    }  # fmt: skip
    if accelerator.num_processes > 1:
        shifted = [row + is_last * (i == 31) for i, row in enumerate(rows)]
        frozen = Net()
        frozen.head.bias.requires_grad_(not is_last)
        evaluated = accel_ddp.EvalBatches(rows[: 20 - 4 * is_last], torch.stack, 4, accelerator, cfg)
        found |= {
            "length": message("length", data=rows[: 32 - 2 * is_last]),
            "content": message("content", data=shifted),
            "frozen": message("frozen", model=frozen),
            "shape": message("shape", model=Net(width=4 + is_last)),
            "evaluation": message("evaluation", test=evaluated),
        }
    found["undisturbed"] = undisturbed(accelerator, cfg, rows)
    Path(f"{cfg.out}.{accelerator.process_index}").write_text(json.dumps(found))


def undisturbed(accelerator, cfg, rows) -> bool:
    """Return whether the check leaves everything as it was."""
    model = Net()
    model.layers.eval()
    model.head.weight.grad = torch.ones(1, 4)
    trial = first_step.Trial(accelerator, cfg, Terms(model, base.Task(squares)), accel_ddp.TrainBatches(rows, torch.stack))
    state = lambda: (
        generator_states(),
        model.mean.tolist(),
        model.head.weight.grad.tolist(),
        [m.training for m in model.modules()],
    )
    np.random.seed(1)
    before = state()
    first_step.require_sums(trial, cfg)
    return state() == before and model.calls >= 4


if __name__ == "__main__":
    run(base.Config, main)
