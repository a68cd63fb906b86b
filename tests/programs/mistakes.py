"""Make the mistakes of a first recipe one after the other, and write the message of each rank to OUT.RANK.

The learning rates of an optimizer with its own ones are written too: those of a whole run, and those of a resumed one.
"""

import json
from dataclasses import replace
from pathlib import Path

import base
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import IterableDataset

import accel_ddp
from accel_ddp.entry import run
from accel_ddp.errors import UserError


class Returned(base.Task):
    """Returns what its function returns."""

    def terms(self, model, batch, team):
        return self.losses(model, batch)


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(4)


def squares(model, batch):
    return model(batch).square().sum(1)


def main(cfg: base.Config) -> None:
    accelerator = accel_ddp.start(cfg)
    rows = list(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))

    def new_model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))

    def message(name, losses=squares, count=len, **more):
        model, task = more.pop("model", None) or new_model(), more.pop("task", None) or base.Task(losses, count=count)
        try:
            base.fit(accelerator, replace(cfg, output_dir=f"{cfg.output_dir}/{name}"), model, rows, task=task, **more)
        except UserError as error:
            return str(error)
        return "no error"

    def counted(each):
        count = lambda batch: each * len(batch)
        return lambda model, batch: {"loss": (squares(model, batch).sum(), count(batch))}, count

    def steps_scheduler(model, batch):
        scheduler.step()
        return squares(model, batch)

    def calls_backward(model, batch):
        squares(model, batch).sum().backward()
        return squares(model, batch)

    def freezes(model, batch):
        freezes.calls += torch.is_grad_enabled()
        frozen[1].weight.requires_grad_(freezes.calls < 4)
        return squares(model, batch)

    def without_gradient(model, batch):
        with torch.no_grad():
            return squares(model, batch)

    freezes.calls, frozen, scheduled = 0, new_model(), new_model()
    own = torch.optim.SGD(scheduled.parameters(), lr=cfg.lr)
    scheduler = StepLR(own, 1)
    closure = new_model()
    found = {
        "scheduler": message("scheduler", steps_scheduler, model=scheduled, optimizer=own),
        "backward": message("backward", calls_backward),
        "frozen": message("frozen", freezes, model=frozen),
        "sum": message("sum", lambda model, batch: squares(model, batch).sum()),
        "tensor": message("tensor", task=Returned(lambda model, batch: squares(model, batch))),
        "float": message("float", lambda model, batch: squares(model, batch).sum().item()),
        "no_grad": message("no_grad", without_gradient),
        "no items": message("no_items", *counted(0)),
        "no items on the device": message("no_items_on_device", *counted(torch.zeros(()))),
        "LBFGS": message("lbfgs", model=closure, optimizer=torch.optim.LBFGS(closure.parameters())),
        "weights": message("weights", *counted(0.01)),
    }
    try:
        accel_ddp.TrainBatches(Endless(), torch.stack)
    except UserError as error:
        found["iterable"] = str(error)

    class Rates(accel_ddp.hooks.Hook):
        def on_update(self, numbers, pace):
            rates[numbers.step] = [numbers.lr, *(group["lr"] for group in optimizer.param_groups)]

    for name, resume in (("rates", ""), ("resumed rates", f"{cfg.output_dir}/rates/step_00000003")):
        rates, model = {}, new_model()
        groups = [{"params": model[0].parameters()}, {"params": [*model[1].parameters(), *model[2].parameters()], "lr": 1e-3}]
        optimizer = torch.optim.SGD(groups, lr=1e-1)
        own_cfg = replace(cfg, output_dir=f"{cfg.output_dir}/{name.replace(' ', '_')}", resume=resume, save_every=3)
        base.fit(accelerator, own_cfg, model, rows, optimizer=optimizer, hooks=[Rates()])
        found[name] = rates
        found[f"sum after {name}"] = sum(float(p.detach().double().sum()) for p in model.parameters())
    Path(f"{cfg.out}.{accelerator.process_index}").write_text(json.dumps(found))


if __name__ == "__main__":
    run(base.Config, main)
