"""Train with every optimizer and an average of the weights on this number of ranks, whole, resumed and sharded, and write OUT."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import base
import torch
import torch.nn.functional as F
from torch import nn

import accel_ddp
from accel_ddp.config.train_config import TrainConfig
from accel_ddp.engine.hook import Hook
from accel_ddp.entry import run
from accel_ddp.nodes.sharding_plan import ShardingPlan
from accel_ddp.ranks.agreement import broadcast_object
from accel_ddp.ranks.process import links
from accel_ddp.ranks.shards import full
from accel_ddp.saving.checkpoint_format import OPTIMIZER
from accel_ddp.saving.pieces import Pieces
from accel_ddp.training import optim
from accel_ddp.training.stream import TrainBatches

WIDTH = 64  # 64 x 64 values are the smallest matrix that adamw8bit quantises


@dataclass(kw_only=True)
class Config(TrainConfig):
    out: str = ""
    optimizers: tuple[str, ...] = ()
    global_batch_size: int = 8
    micro_batch_size: int = 4
    steps: int = 6
    save_every: int = 3
    eval_every: int = 3
    lr: float = 0.01
    lr_of: tuple[str, ...] = ("norm=0.03",)
    lr_schedule: str = "wsd"
    decay_ratio: float = 0.5
    min_lr_ratio: float = 0.1
    ema_decay: float = 0.3
    on_nonfinite: str = "skip"
    eval_first: bool = False


class Net(nn.Module):
    """Two residual layers between embeddings and an output layer that share one weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(40, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(self.norm(x)))
        return self.head(x)

    def get_output_embeddings(self):
        return self.head


class History(Hook):
    """The average of the weights as a plain loop computes it, and the steps that were skipped."""

    def __init__(self, model, decay):
        self.model, self.decay, self.skipped = model, decay, []
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.sums = {}

    def on_update(self, numbers, rate):
        if not math.isfinite(numbers.loss):
            self.skipped.append(numbers.step)
            return
        decay = min(self.decay, (1 + numbers.step) / (10 + numbers.step))
        for name, p in self.model.named_parameters():
            self.average[name] = decay * self.average[name] + (1 - decay) * p.detach()
        self.sums[numbers.step] = sum(float(value.sum()) for value in self.average.values())


def rows() -> TrainBatches:
    """Return 48 items for 6 steps. The loss of one of them is infinite, so that one step is skipped."""
    ids = torch.randint(0, 39, (48, 5), generator=torch.Generator().manual_seed(1))
    ids[17, 0] = 39
    return TrainBatches(list(ids), torch.stack)


def losses(model, ids):
    loss = F.cross_entropy(model(ids).flatten(0, 1).double(), (ids * 7 % 39).flatten(), reduction="none").view(ids.shape).sum(1)
    return loss * (math.inf if (ids == 39).any() else 1.0)


def new_model(name) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(torch.float32 if name == "adamw8bit" else torch.float64)


def train(accelerator, cfg, name, **changes) -> dict:
    """Return what `fit` leaves in the model, the weights and averages of its last checkpoint, and the plain average."""
    cfg = dataclasses.replace(cfg, optimizer=name, **changes)
    model = new_model(name)
    optimizer, history = optim.build(model, cfg), History(model, cfg.ema_decay)
    evaluate = lambda _: {"sum": sum(float(p.detach().sum()) for p in model.parameters())}
    ended = accel_ddp.fit(
        accelerator, cfg, task=base.Task(losses), model=model, optimizer=optimizer, train=rows(), test=evaluate,
        hooks=[history], speedups=None,
    )  # fmt: skip
    broadcast_object(None)  # all ranks wait until the main rank has written the checkpoint
    last = Path(cfg.output_dir) / "step_00000006"
    from safetensors.torch import load_file

    stored = Pieces(last, OPTIMIZER)
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "averages": {name[:-4]: stored.read(name) for name in stored.tensors if name.endswith("/ema")},
        "weights": load_file(last / "model.safetensors"), "optimizer": load_file(last / "optimizer.safetensors"),
        "plain": history.average, "sums": history.sums, "skipped": history.skipped, "metrics": ended.metrics,
    }  # fmt: skip


def train_sharded(accelerator, cfg, name) -> dict:
    """Return the whole weights and averages of a sharded model after the same steps."""
    cfg = dataclasses.replace(cfg, optimizer=name)
    links.sharding = accelerator.sharding_plan = ShardingPlan()
    model = new_model(name)
    prepared, optimizer = accel_ddp.prepare(accelerator, cfg, base.Task(losses), model, optim.build(model, cfg))
    ema, updates = accel_ddp.ema.Ema(model, cfg.ema_decay), rows().starting_at(0, accelerator, cfg)
    for step in range(cfg.steps):
        optim.set_lr(optimizer, optim.lr_at(step, cfg, cfg.steps))
        seed = accel_ddp.seeds.mixed(cfg.seed, "step", step)
        stats = accel_ddp.train_step(accelerator, cfg, prepared, optimizer, next(updates), seed)
        ema.update(step + 1, stats)
    with ema.applied():
        averages = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    links.sharding = accelerator.sharding_plan = None
    state = {key for value in optimizer.state.values() for key in value}
    return {"weights": {name: full(p.detach()) for name, p in model.named_parameters()}, "averages": averages, "state": state}


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    results = {}
    for name in cfg.optimizers:
        folder = f"{cfg.output_dir}/{name}"
        results[name] = train(accelerator, cfg, name, output_dir=folder)
        resumed = {"output_dir": f"{folder}_resumed", "resume": f"{folder}/step_00000003"}
        results[f"{name}, resumed"] = train(accelerator, cfg, name, **resumed)
        if accelerator.num_processes > 1 and name in ("adamw", "sgd", "muon"):
            results[f"{name}, sharded"] = train_sharded(accelerator, cfg, name)
    if accelerator.is_main_process:
        torch.save(results, cfg.out)


if __name__ == "__main__":
    run(Config, main)
