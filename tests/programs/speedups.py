"""Train a small encoder with and without the speed package, and write the results to OUT."""

import dataclasses
from dataclasses import dataclass

import base
import torch

import accel_ddp
from accel_ddp.engine.rows import Collate, Rows
from accel_ddp.entry import run


@dataclass(kw_only=True)
class Config(base.Config):
    steps: int = 5
    micro_batch_size: int = 2
    optimizer: str = "sgd"  # AdamW enlarges rounding errors where a gradient consists of them (biases of keys)
    lr: float = 0.1
    lr_schedule: str = "constant"


def rows() -> list[tuple[torch.Tensor, int]]:
    drawn = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 30, (20,), generator=drawn).tolist()
    return [(torch.randint(5, 100, (length,), generator=drawn), i % 3) for i, length in enumerate(lengths)]


def collate(rows: list) -> Rows:
    return Collate()([{"input_ids": ids, "labels": label} for ids, label in rows])


def logits(model, batch):
    return model(batch).logits


def train(accelerator, cfg: Config, name: str, speedups=None) -> dict:
    """Return the weights, the accuracy, and the number of positions that each rank computed in the layers, step by step."""
    from transformers import BertConfig, BertForSequenceClassification

    cfg = dataclasses.replace(cfg, output_dir=f"{cfg.output_dir}/{name}")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 100}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(**shape, **no_dropout, num_labels=3, initializer_range=0.2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    positions = []
    model.bert.encoder.layer[0].intermediate.dense.register_forward_hook(
        lambda module, inputs, output: positions.append(output.shape[:-1].numel())
    )
    batches = accel_ddp.EvalBatches(rows(), collate, 4, accelerator, cfg)
    losses = lambda model, batch: accel_ddp.losses.cross_entropy(logits(model, batch), batch["labels"], "none")
    measure = lambda model, batch: {"accuracy": logits(model, batch).argmax(-1) == batch["labels"]}
    outcome = accel_ddp.fit(
        accelerator, cfg, task=base.Task(losses, measure=measure), model=model, optimizer=accel_ddp.optim.build(model, cfg),
        train=accel_ddp.TrainBatches(rows(), collate), test=batches, speedups=speedups,
    )  # fmt: skip
    return {"before": before, "weights": model.state_dict(), "positions": positions, "accuracy": outcome.metrics["accuracy"]}


def main(cfg: Config) -> None:
    accelerator = accel_ddp.start(cfg)
    plain = train(accelerator, cfg, "plain")
    fast = train(accelerator, cfg, "fast", accel_ddp.attach)
    if accelerator.is_main_process:
        torch.save({"plain": plain, "fast": fast}, cfg.out)


if __name__ == "__main__":
    run(Config, main)
