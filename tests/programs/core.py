"""What the core does in a world of this many ranks, written to OUT for comparison with other worlds."""

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import accel_ddp
from accel_ddp.config import TrainConfig
from accel_ddp.entry import run
from accel_ddp.ranks.agreement import broadcast_object, gather_objects
from accel_ddp.tasks import metrics
from accel_ddp.training import evaluation, optim
from accel_ddp.training.hooks import Hook
from accel_ddp.training.stream import TrainBatches


@dataclass(kw_only=True)
class Config(TrainConfig):
    out: str = ""
    global_batch_size: int = 24
    micro_batch_size: int = 24
    steps: int = 9
    lr: float = 0.05
    lr_schedule: str = "constant"


def rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """101 texts of 2 to 29 tokens, of which very different numbers are labelled."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(101):
        length = int(torch.randint(2, 30, (1,), generator=generator))
        ids = torch.randint(1, 40, (length,), generator=generator)
        labelled = torch.rand(length, generator=generator) < torch.rand(1, generator=generator) ** 3
        made.append((ids, torch.where(labelled, ids % 5, torch.tensor(-100))))  # some texts have no label at all
    return made


def collate(items: list) -> dict[str, torch.Tensor]:
    pad = nn.utils.rnn.pad_sequence
    ids, labels = zip(*items)
    return {"ids": pad(ids, batch_first=True), "labels": pad(labels, batch_first=True, padding_value=-100)}


def loss_sum(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def count(batch):
    return (batch["labels"] != -100).sum()


def new_model(dtype: torch.dtype, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(40, 16), nn.Dropout(dropout), nn.Linear(16, 5)).to(dtype)


class Kept(Hook):
    def __init__(self):
        self.losses, self.norms = [], []

    def on_update(self, numbers, rate):
        self.losses.append(numbers.loss)
        self.norms.append(numbers.grad_norm)


class Noisy(torch.utils.data.Dataset):
    """Items with random augmentation, from all three generators that people use."""

    def __init__(self, num_items: int):
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> torch.Tensor:
        import random

        import numpy

        return torch.tensor([index, random.random(), numpy.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def trained(accelerator, cfg, dtype=torch.float64, dropout=0.0, **changes):
    cfg = dataclasses.replace(cfg, **changes)
    model, kept = new_model(dtype, dropout), Kept()
    accel_ddp.fit(
        accelerator, cfg, model=model, optimizer=optim.build(model, cfg), train=TrainBatches(rows(), collate),
        loss_sum=loss_sum, count=count, hooks=[kept],
    )  # fmt: skip
    return {"weights": {k: v.clone() for k, v in model.state_dict().items()}, "losses": kept.losses, "norms": kept.norms}


def stream(accelerator, cfg, dataset, num_steps, first=0, **changes) -> torch.Tensor:
    """The items of the first steps in their global order, gathered from all ranks."""
    cfg = dataclasses.replace(cfg, **changes)
    updates = TrainBatches(dataset, torch.stack).starting_at(first, accelerator, cfg)
    mine = [torch.stack(next(updates)) for _ in range(num_steps)]
    shares = gather_objects(torch.stack(mine))  # rank -> step, micro-batch, item
    if shares is None:
        return torch.empty(0)
    return torch.stack(shares, dim=2).flatten(1, 3).flatten(0, 1)  # step, micro-batch, rank, item


def measured(accelerator, cfg) -> dict[str, float]:
    """Accuracy, macro F1 and loss over 101 items that no number of ranks but 1 divides."""
    items = [(ids, (ids.sum() + i) % 3) for i, (ids, _) in enumerate(rows())]
    torch.manual_seed(3)
    model = accelerator.prepare(nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 3)).double())

    def of_ids(batch):
        ids, labels = zip(*batch)
        return nn.utils.rnn.pad_sequence(ids, batch_first=True), torch.stack(labels)

    def measure(model, batch):
        logits = model(batch[0]).mean(1)
        losses = F.cross_entropy(logits, batch[1], reduction="none")
        return {"loss": losses, "predictions": logits.argmax(-1), "references": batch[1]}

    def summarize(rows):
        pair = {"predictions": rows["predictions"], "references": rows["references"]}
        scores = {name: metrics.load(name).compute(**pair)[name] for name in ("accuracy", "f1")}
        return {**scores, "loss": rows["loss"].mean(), "items": len(rows["loss"]), "labels": rows["references"].tolist()}

    return evaluation.evaluate(accelerator, model, evaluation.EvalBatches(items, of_ids, 1, accelerator, cfg), measure, summarize)


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    results = {}
    for dtype in (torch.float64, torch.float32):
        for micro in (24, 2):
            results[f"{dtype}/{micro}"] = trained(accelerator, cfg, dtype, micro_batch_size=micro, save_every=10**9)
    results["sgd, clipped"] = trained(accelerator, cfg, optimizer="sgd", max_grad_norm=0.01, lr=3.0)
    results["dropout"] = trained(accelerator, cfg, dropout=0.3, micro_batch_size=2)
    results["resumed"] = resumed(accelerator, cfg)
    results["order"] = stream(accelerator, cfg, torch.arange(101), num_steps=9, micro_batch_size=2)
    results["order from 3"] = stream(accelerator, cfg, torch.arange(101), num_steps=6, first=3)
    for workers in (0, 2):
        results[f"noise/{workers}"] = stream(accelerator, cfg, Noisy(101), 10, num_workers=workers, micro_batch_size=2)
    results["metrics"] = measured(accelerator, cfg)
    results["params equal on all ranks"] = _same_everywhere(results)
    if accelerator.is_main_process:
        torch.save(results, cfg.out)


def resumed(accelerator, cfg):
    """Stopped after 5 of 9 steps, then gone on with; dropout on."""
    common = {"dropout": 0.3, "micro_batch_size": 2, "output_dir": cfg.output_dir + "_resumed", "lr_schedule": "constant"}
    trained(accelerator, cfg, steps=5, **common)
    broadcast_object(None)  # the main rank has written before the others read
    return trained(accelerator, cfg, steps=9, resume="auto", **common)


def _same_everywhere(results) -> bool:
    mine = [v["weights"] for v in results.values() if isinstance(v, dict) and "weights" in v]
    shares = gather_objects(mine)
    return shares is None or all(torch.equal(a[k], b[k]) for share in shares for a, b in zip(shares[0], share) for k in a)


if __name__ == "__main__":
    run(Config, main)
