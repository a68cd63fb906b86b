"""Train with optimizers that keep numbers in their groups on this number of ranks, whole and resumed, and write OUT.

`Counting` and `Averaging` keep them as D-Adaptation, Prodigy and schedule-free optimizers do.
"""

import dataclasses
from dataclasses import dataclass

import base
import torch
from torch import nn

import accel_ddp
from accel_ddp.config.options import option
from accel_ddp.engine.hook import Hook
from accel_ddp.entry import run
from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.ranks.agreement import broadcast_object
from accel_ddp.ranks.process import links
from accel_ddp.ranks.shards import full


@dataclass(kw_only=True)
class Config(base.Config):
    kinds: tuple[str, ...] = option((), "names of optimizers", affects_result=False)
    of_one_rank: str = option("", "folder of the runs on one rank", affects_result=False)
    save_every: int = 3
    eval_every: int = 1
    eval_first: bool = False


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 2)])

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x)))


class Counting(torch.optim.Optimizer):
    """Signs of gradients, whose size grows with numbers of every kind in the group, and with an int64 tensor of each parameter."""

    def __init__(self, groups, lr, decay=0.1, **more):
        super().__init__(groups, {"lr": lr, "decay": decay, "k": 0, "phase": (0.1, 1), "mode": None, **more})
        for group in self.param_groups:
            group["d"] = torch.tensor(1e-3)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"], group["mode"], group["grown"] = group["k"] + 1, f"{group['k']}", group.get("grown", 1.0) * 1.3
            group["d"].mul_(1.1)
            group["phase"] = (group["phase"][0] * 1.7, group["phase"][1] + 1)
            size = group["lr"] * group["grown"] * float(group["d"]) * sum(group["phase"]) * group["k"] * len(group["mode"] or "")
            for p in group["params"]:
                if p.grad is not None:
                    count = self.state[p].setdefault("count", torch.tensor(2**53 + 1 if p.dtype == torch.float64 else 0)).add_(1)
                    p.mul_(1 - group["decay"] * size).add_(p.grad.sign(), alpha=-size * (1 + int(count % 7)))


class Averaging(torch.optim.Optimizer):
    """A schedule-free SGD. In training, the weights are between their averages and the points `z` that it steps."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "k": 0, "weight_sum": 0.0, "train_mode": False})

    @torch.no_grad()
    def eval(self):
        self._move(True, 1 - 1 / 0.9)

    @torch.no_grad()
    def train(self):
        self._move(False, 1 - 0.9)

    def _move(self, trains, weight):
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] == trains else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = not trains

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"], "schedule-free optimizers require a call of `train`"
            group["k"] += 1
            group["weight_sum"] += group["k"] ** 0.5
            part = group["k"] ** 0.5 / group["weight_sum"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, part).add_(p.grad, alpha=group["lr"] * (0.9 * (1 - part) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class Box:
    """What no checkpoint can store."""


class BoxesState(Counting):
    """Stores an object for each parameter from its first step on."""

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["box"] = Box()


class BoxesGroup(Counting):
    """Stores an object in its group from its first step on."""

    def step(self, closure=None):
        super().step()
        self.param_groups[0]["box"] = Box()


class Elsewhere(Counting):
    """Has state that belongs to no parameter."""

    def step(self, closure=None):
        super().step()
        self.state["all"] = {"k": 1}


class Extended(Counting):
    """Has state outside of groups and parameters."""

    def state_dict(self):
        return {**super().state_dict(), "seen": 1}


class Flat(Counting):
    """Has state of another shape than the parameter."""

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["flat"] = p.detach().flatten()


def build(kind, model, cfg, **options) -> torch.optim.Optimizer:
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == whole]} for whole in (True, False)]
    if "." in kind:  # an installed one, to try it by hand
        module, name = kind.rsplit(".", 1)
        return getattr(__import__(module, fromlist=[name]), name)(groups, lr=cfg.lr)
    return globals()[kind](groups, lr=cfg.lr, **options)


class Weights(Hook):
    """The weights with which each step begins."""

    def __init__(self, model):
        self.model, self.found = model, {}

    def on_step_begin(self, step):
        self.found[step] = [full(p.detach()).clone() for p in self.model.parameters()]


def train(accelerator, cfg, kind, options=None, rows=48, **changes) -> dict:
    cfg = dataclasses.replace(cfg, **changes)
    torch.manual_seed(0)
    model = Net().double()
    optimizer, weights = build(kind, model, cfg, **(options or {})), Weights(model)
    data = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    evaluate = lambda _: {"sum": sum(float(full(p.detach()).sum()) for p in model.parameters())}
    ended = base.fit(accelerator, cfg, model, list(data), optimizer=optimizer, test=evaluate, hooks=[weights], speedups=None)
    broadcast_object(None)  # all ranks wait until the main rank has written the checkpoint
    return {
        "steps": weights.found, "model": {name: full(p.detach()).clone() for name, p in model.named_parameters()},
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        "state": {
            name: {key: full(value) if isinstance(value, torch.Tensor) else value for key, value in optimizer.state[p].items()}
            for name, p in model.named_parameters()
        }, "metrics": ended.metrics,
    }  # fmt: skip


def refusal(*arguments, **more) -> str:
    try:
        train(*arguments, **more)
    except accel_ddp.UserError as error:
        return str(error)
    return ""


def main(cfg: Config) -> None:
    accelerator, results = accel_ddp.start(cfg), {}
    for kind in cfg.kinds:
        folder = f"{cfg.output_dir}/{kind}"
        resumed = {"output_dir": f"{folder}_resumed", "resume": f"{folder}/step_00000003"}
        results[kind] = train(accelerator, cfg, kind, output_dir=folder)
        results[f"{kind}, resumed"] = train(accelerator, cfg, kind, **resumed)
        if cfg.of_one_rank:
            other = {"output_dir": f"{folder}_of_one", "resume": f"{cfg.of_one_rank}/{kind}/step_00000003"}
            results[f"{kind}, of one rank"] = train(accelerator, cfg, kind, **other)
        results[f"{kind}, rarely evaluated"] = train(
            accelerator, cfg, kind, output_dir=f"{folder}_rarely", eval_every=6, save_every=6
        )
        if accelerator.num_processes > 1 and "." not in kind:
            links.sharding = accelerator.sharding_plan = ShardingPlan()
            results[f"{kind}, sharded"] = train(accelerator, cfg, kind, output_dir=f"{folder}_sharded")
            again = {"output_dir": f"{folder}_sharded_resumed", "resume": f"{folder}_sharded/step_00000003"}
            results[f"{kind}, sharded, resumed"] = train(accelerator, cfg, kind, **again)
            links.sharding = accelerator.sharding_plan = None
    if "Counting" in cfg.kinds:
        folder = f"{cfg.output_dir}/Counting"
        other = {"output_dir": f"{folder}_decay", "resume": f"{folder}/step_00000003"}
        results["other decay"] = train(accelerator, cfg, "Counting", {"decay": 0.2}, **other)
        local = {"sync_every": 2, "local_workers": 2, "steps": 8, "save_every": 4, "eval_every": 8}
        results["workers"] = train(accelerator, cfg, "Counting", output_dir=f"{folder}_local", **local)
        local |= {"output_dir": f"{folder}_local_resumed", "resume": f"{folder}_local/step_00000004"}
        results["workers, resumed"] = train(accelerator, cfg, "Counting", **local)
    if "Averaging" in cfg.kinds:
        folder = f"{cfg.output_dir}/Averaging"
        results["evaluated only"] = train(
            accelerator, cfg, "Averaging", output_dir=f"{folder}_rarely", resume=folder, evaluate_only="eval"
        )
        results["said"] = {
            "ema": refusal(accelerator, cfg, "Averaging", output_dir=f"{folder}_ema", ema_decay=0.9),
            "workers": refusal(accelerator, cfg, "Averaging", output_dir=f"{folder}_local", sync_every=2, local_workers=2),
            "group": refusal(accelerator, cfg, "Counting", {"box": Box()}, output_dir=f"{folder}_group"),
            "later": refusal(accelerator, cfg, "BoxesGroup", output_dir=f"{folder}_later"),
            "state": refusal(accelerator, cfg, "BoxesState", output_dir=f"{folder}_state"),
            "elsewhere": refusal(accelerator, cfg, "Elsewhere", output_dir=f"{folder}_elsewhere"),
            "extended": refusal(accelerator, cfg, "Extended", output_dir=f"{folder}_extended"),
        }
        links.sharding = accelerator.sharding_plan = ShardingPlan() if accelerator.num_processes > 1 else None
        results["flat"] = refusal(accelerator, cfg, "Flat", output_dir=f"{folder}_flat")
        links.sharding = accelerator.sharding_plan = None
    if accelerator.is_main_process:
        torch.save(results, cfg.out)


if __name__ == "__main__":
    run(Config, main)
