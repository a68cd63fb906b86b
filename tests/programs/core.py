"""Train, read data and evaluate on this number of ranks, and write the results to OUT. Tests compare numbers of ranks."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import base
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import accel_ddp
from accel_ddp.engine.hook import Hook
from accel_ddp.entry import run
from accel_ddp.ranks.agreement import broadcast_object, gather_objects
from accel_ddp.tasks import metrics
from accel_ddp.training import evaluation, optim
from accel_ddp.training.step_plan import Cost
from accel_ddp.training.stream import Mixture, TrainBatches


@dataclass(kw_only=True)
class Config(base.Config):
    global_batch_size: int = 48
    micro_batch_size: int = 48
    steps: int = 9
    lr_schedule: str = "constant"


def rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return 101 texts of 2 to 29 tokens. The fraction of labelled tokens differs widely between texts."""
    generator = torch.Generator().manual_seed(1)
    texts = []
    for _ in range(101):
        length = int(torch.randint(2, 30, (1,), generator=generator))
        ids = torch.randint(1, 40, (length,), generator=generator)
        labelled = torch.rand(length, generator=generator) < torch.rand(1, generator=generator) ** 3
        texts.append((ids, torch.where(labelled, ids % 5, torch.tensor(-100))))  # some texts have no labelled token
    return texts


class Mixed(list):
    """Items of three datasets, which are not in order."""

    def __init__(self, items):
        super().__init__(items)
        self.mixture = Mixture(("a", "b", "c"), np.array([0, 1, 1, 2, 0] * 20 + [1]), (5.0, 1.0, 2.0))


def collate(items: list) -> dict[str, torch.Tensor]:
    pad = nn.utils.rnn.pad_sequence
    ids, labels = zip(*items)
    return {"ids": pad(ids, batch_first=True), "labels": pad(labels, batch_first=True, padding_value=-100)}


class Task:
    """Learns the labels of tokens."""

    def count(self, batch):
        return (batch["labels"] != -100).sum()

    def terms(self, model, batch, team):
        """Return the loss, the share of right labels, and the mean logit of the class 0 over the tokens with this label."""
        logits, labels, number = model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), self.count(batch)
        numbers = {
            "right": ((logits.argmax(-1) == labels).sum(), number),
            "logit": (logits[labels == 0, 0].sum(), (labels == 0).sum()),
        }
        return {"loss": (F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), number), **numbers}


def new_model(dtype: torch.dtype, dropout: float = 0.0, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 16), nn.Dropout(dropout), nn.Linear(16, 5)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


class History(Hook):
    """The loss, the gradient norm and the numbers of `terms` of each step."""

    def __init__(self):
        self.losses, self.norms, self.means = [], [], []

    def on_update(self, numbers, rate):
        self.means.append(numbers.means)
        self.losses.append(numbers.loss)
        self.rows = {name: number for name, number in numbers.means.items() if name.startswith("rows/")}
        self.norms.append(numbers.grad_norm)


class Noisy(torch.utils.data.Dataset):
    """Items with random augmentation from the generators of Python, numpy and torch."""

    def __init__(self, num_items: int):
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> torch.Tensor:
        import random

        import numpy

        return torch.tensor([index, random.random(), numpy.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def count_tokens(dataset) -> np.ndarray:
    return np.array([len(ids) for ids, _ in dataset])


def train(
    accelerator, cfg, dtype=torch.float64, dropout=0.0, scale=1.0, kind=list, lengths=None, cost=None, task=None, **changes
):
    """Return the weights after the last step, and the losses and gradient norms of all steps."""
    cfg = dataclasses.replace(cfg, **changes)
    model, history = new_model(dtype, dropout, scale), History()
    data = TrainBatches(kind(rows()), collate, lengths=lengths)
    data.cost = cost or data.cost
    accel_ddp.fit(
        accelerator, cfg, task=task or Task(), model=model, optimizer=optim.build(model, cfg), train=data,
        hooks=[history], **({"speedups": None} if cost else {}),
    )  # fmt: skip
    numbers = {"losses": history.losses, "norms": history.norms, "means": history.means, "rows": history.rows}
    return {"weights": {k: v.clone() for k, v in model.state_dict().items()}, **numbers}


def stream(accelerator, cfg, dataset, num_steps, first=0, **changes) -> torch.Tensor:
    """Return on the main rank the items of `num_steps` steps from step `first` on, in their global order."""
    cfg = dataclasses.replace(cfg, **changes)
    updates = TrainBatches(dataset, torch.stack).starting_at(first, accelerator, cfg)
    mine = [torch.stack(next(updates)) for _ in range(num_steps)]
    shares = gather_objects(torch.stack(mine))  # rank -> step, micro-batch, item
    if shares is None:
        return torch.empty(0)
    return torch.stack(shares, dim=2).flatten(1, 3).flatten(0, 1)  # step, micro-batch, rank, item


def evaluate(accelerator, cfg) -> dict[str, float]:
    """Return accuracy, macro F1 and loss over 101 items. 101 is a prime number, so only 1 rank divides it."""
    items = [(ids, (ids.sum() + i) % 3) for i, (ids, _) in enumerate(rows())]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 3)).double()

    def collate_pairs(items):
        ids, labels = zip(*items)
        return nn.utils.rnn.pad_sequence(ids, batch_first=True), torch.stack(labels)

    def measure(model, batch):
        logits = model(batch[0]).mean(1)
        losses = F.cross_entropy(logits, batch[1], reduction="none")
        return {"loss": losses, "predictions": logits.argmax(-1), "references": batch[1]}

    labels = []

    def summarize(rows):
        labels.extend(rows["references"].tolist())
        scores, _ = metrics.class_metrics(rows["predictions"], rows["references"], ["a", "b", "c"])
        return {**scores, "loss": rows["loss"].mean(), "items": len(rows["loss"])}

    batches = evaluation.EvalBatches(Mixed(items), collate_pairs, 1, accelerator, cfg)
    task = base.Task(measure=measure, metrics=summarize)
    return {**evaluation.evaluate(accelerator, accel_ddp.Terms(model, task), batches), "labels": labels}


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    results = {}
    for dtype in (torch.float64, torch.float32):
        for micro in (48, 2):
            results[f"{dtype}/{micro}"] = train(accelerator, cfg, dtype, micro_batch_size=micro, save_every=10**9)
    results["sgd, clipped"] = train(accelerator, cfg, optimizer="sgd", max_grad_norm=0.01, lr=3.0)
    # Weights below 0.25, as in most pretrained models: the last bit of such a float32 is at most 1.5e-8.
    results["float32, sgd"] = train(accelerator, cfg, torch.float32, scale=0.05, optimizer="sgd", lr=0.1, micro_batch_size=2)
    results["dropout"] = train(accelerator, cfg, dropout=0.3, micro_batch_size=2)
    results["resumed"] = train_with_resume(accelerator, cfg)
    results["mixed"] = train(accelerator, cfg, dropout=0.3, micro_batch_size=2, kind=Mixed)
    results["mixed, resumed"] = train_with_resume(accelerator, cfg, kind=Mixed)
    results |= train_uneven(accelerator, cfg)
    results["order"] = stream(accelerator, cfg, torch.arange(101), num_steps=9, micro_batch_size=2)
    results["order from 3"] = stream(accelerator, cfg, torch.arange(101), num_steps=6, first=3)
    for workers in (0, 2):
        results[f"noise/{workers}"] = stream(accelerator, cfg, Noisy(101), 10, num_workers=workers, micro_batch_size=2)
    results["metrics"] = evaluate(accelerator, cfg)
    results["metrics of a rank"] = metrics_that_differ_between_ranks(accelerator, cfg)
    results["params equal on all ranks"] = weights_are_equal(results)
    if accelerator.is_main_process:
        torch.save(results, cfg.out)


def metrics_that_differ_between_ranks(accelerator, cfg):
    """Return the steps after which the ranks stopped early and their metrics, and the errors if the main rank returns a list."""
    cfg = dataclasses.replace(cfg, steps=4, eval_every=1, early_stopping_patience=1, best_metric="own:max")
    found = []
    for is_list in (False, True):
        model, rank, calls = new_model(torch.float64, 0.0), accelerator.process_index, iter(range(9))

        def measure(_, is_list=is_list, rank=rank, calls=calls):
            values = [next(calls) * (-1 if rank == 0 else 1)]
            return {"own": values if is_list and rank == 0 else values[0]}

        try:
            ended = accel_ddp.fit(
                accelerator, dataclasses.replace(cfg, output_dir=f"{cfg.output_dir}_own{is_list}"), task=Task(), model=model,
                optimizer=optim.build(model, cfg), train=TrainBatches(rows(), collate), test=measure,
                hooks=[accel_ddp.hooks.EarlyStopping(cfg)],
            )  # fmt: skip
            found.append((ended.step, ended.metrics))
        except accel_ddp.UserError as error:
            found.append(str(error))
    return gather_objects(found)


def train_with_resume(accelerator, cfg, kind=list, name="", dropout=0.3, balance=("off", "off")):
    """Train 5 steps with dropout, resume from the checkpoint, and return the results after 9 steps."""
    common = {"dropout": dropout, "micro_batch_size": 2, "output_dir": f"{cfg.output_dir}_{name}{kind.__name__}", "kind": kind}
    train(accelerator, cfg, steps=5, balance=balance[0], **common)
    broadcast_object(None)  # all ranks wait until the main rank has written the checkpoint
    return train(accelerator, cfg, steps=9, resume="auto", balance=balance[1], **common)


def train_uneven(accelerator, cfg) -> dict[str, dict]:
    """Return runs whose micro-batches have other numbers of items, on ranks that have other numbers of micro-batches."""
    ranks, packed = range(1, accelerator.num_processes + 1), {"lengths": count_tokens, "cost": Cost(2.0, 0.1, pads=False)}
    rising, falling = (",".join(map(str, each)) if len(ranks) > 1 else "off" for each in (ranks, ranks[::-1]))
    found = {"padded": train(accelerator, cfg, lengths=count_tokens, micro_batch_tokens=60)}
    found["packed"] = train(accelerator, cfg, micro_batch_tokens=60, **packed)
    found["sizes"] = train(accelerator, cfg, micro_batch_size=2 - accelerator.process_index % 2)
    found["shares, packed"] = train(accelerator, cfg, micro_batch_tokens=60, balance=rising, **packed)
    found["shares"] = train(accelerator, cfg, dropout=0.3, micro_batch_size=2, balance=rising)
    found["shares, resumed"] = train_with_resume(accelerator, cfg, name="shares", balance=(rising, rising))
    found["other shares, resumed"] = train_with_resume(accelerator, cfg, name="other", dropout=0.0, balance=(rising, falling))
    by_tokens = {"global_batch_tokens": 700, "micro_batch_size": 4, "kind": Mixed, **packed}
    found["steps of tokens"] = train(accelerator, cfg, **by_tokens)
    folder, first = Path(f"{cfg.output_dir}_tokens"), Path(cfg.output_dir).with_name("1_tokens")
    train(accelerator, cfg, steps=5, output_dir=str(folder), **by_tokens)
    broadcast_object(None)
    for name, place, micro in ((", resumed", folder, 0), (", resumed from one rank", first, 90)):
        options = by_tokens | {
            "output_dir": f"{folder}{name}",
            "resume": str(place / "step_00000005"),
            "micro_batch_tokens": micro,
        }
        found[f"steps of tokens{name}"] = train(accelerator, cfg, **options)
    return found


def weights_are_equal(results) -> bool:
    """Return on the main rank whether all ranks have the same weights. Other ranks return True."""
    mine = [v["weights"] for v in results.values() if isinstance(v, dict) and "weights" in v]
    shares = gather_objects(mine)
    return shares is None or all(torch.equal(a[k], b[k]) for share in shares for a, b in zip(shares[0], share) for k in a)


if __name__ == "__main__":
    run(Config, main)
