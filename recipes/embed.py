r"""Fine-tune a sentence encoder for retrieval: each anchor must find its positive among those of the whole batch.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/embed.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/embed.py --model BAAI/bge-small-en-v1.5 \
        --train_file pairs.jsonl --anchor_column query --positive_column passage --global_batch_size 1024 --lr 2e-5

The batch is part of the loss: negatives come from all ranks and all micro-batches, with gradient. The result is therefore the same
as on one rank that holds the whole batch. If --micro_batch_size is smaller than the share of a rank, micro-batches are embedded one
after the other (GradCache), at the cost of one more forward pass.

Pairs with scores of their similarity are learned with --score_column: the cosine of each pair is to equal its score, which is scaled
from --min_score and --max_score to 0 and 1 (mean squared error). The metrics are then correlations, and not those of retrieval. Texts
that look right and are wrong teach more than those of other rows: docs/own_data.md has examples of both.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp import MinedConfig, UserError, column, option, run


@dataclass(kw_only=True)
class Config(MinedConfig):
    model: str = "builtin:all-MiniLM-L6-v2"
    dataset: str = "builtin:docstrings"
    anchor_column: str = column("anchor", "column of the query")
    positive_column: str = column("positive", "column of the text to find, or of the second text of a scored pair")
    score_column: str = column(
        "", "column of the similarity of anchor and positive; default: all pairs are similar", kind="number"
    )
    min_score: float = option(0.0, "score of unrelated texts, which get the cosine 0", group="data", needs="score_column")
    max_score: float = option(
        1.0, "score of texts that mean the same, for example 5; they get the cosine 1", group="data", needs="score_column"
    )
    negative_columns: tuple[str, ...] = column(
        (),
        "columns of texts that look right and are wrong (hard negatives); with scores, give them as pairs",
        excludes="score_column",
    )
    anchor_prefix: str = option("", "text before each anchor, for example 'query: '", group="data")
    positive_prefix: str = option("", "text before each positive and negative, for example 'passage: '", group="data")
    pooling: Literal["mean", "cls"] = option("mean", "how token vectors become one vector", group="model")
    scale: float = option(
        20.0,
        "factor of the cosines in the softmax: 1 / temperature; 20 is usual",
        group="training",
        above=0,
        also=("temperature",),
    )
    matryoshka: tuple[int, ...] = option(
        (), "also train embeddings truncated to these dimensions, for example 256 128 64", group="training"
    )
    max_length: int = option(64, "tokens per text; longer texts are truncated", group="data", at_least=1)
    global_batch_size: int = option(64, "rows per optimizer step, over all ranks; each is a negative for all others")
    micro_batch_size: int | Literal["auto"] = 64
    lr: float = 1e-4
    warmup_ratio: float = 0.1
    best_metric: str = option("", "metric for --keep_best and early stopping; default: mrr, with scores spearman")

    def metric_directions(self):
        sizes = ["", *(f"_{size}" for size in self.matryoshka)]
        names = ("spearman", "pearson") if self.score_column else ("mrr", "recall_at_1", "recall_at_5", "recall_at_10")
        loss = {"loss": "min"} if self.score_column else {}
        return {f"{name}{size}": "max" for size in sizes for name in names} | loss

    def validate(self) -> None:
        super().validate()
        if not self.min_score < self.max_score:
            raise UserError(f"--min_score {self.min_score}: must be below --max_score {self.max_score}.")
        if self.global_batch_size < 2 and not self.negative_columns and not self.score_column:
            raise UserError(f"--global_batch_size {self.global_batch_size}: a single row has no negatives. Use 32 or more.")
        if any(size < 1 for size in self.matryoshka):
            given = " ".join(map(str, self.matryoshka))
            raise UserError(f"--matryoshka {given}: must be numbers of dimensions, for example 256 128.")


class Task(accel_ddp.EmbeddingTask):
    def items(self, rows):
        return accel_ddp.contrastive.encode(rows, self.processor, self.cfg)

    def outputs(self, model, batch):
        return accel_ddp.contrastive.embed(model, batch, self.cfg.pooling)

    def batches(self):
        compare = lambda rows, keys: accel_ddp.contrastive.in_batch_losses(rows, keys, self.cfg.scale, self.sizes)
        self.whole_batch = not self.cfg.score_column
        self.in_batch = accel_ddp.losses.GradCache(self.outputs, lambda batch: batch["keys"], compare)
        return super().batches()

    def prepare(self, model, batches, team, seeded):
        if self.whole_batch:
            self.in_batch.prepare(model, batches, team, seeded)

    def terms(self, model, batch, team):
        if self.whole_batch:
            return self.in_batch.terms(model, batch, team)
        return {"loss": accel_ddp.contrastive.score_losses(self.outputs(model, batch), batch["scores"], self.sizes)}

    def measure(self, model, batch):
        if self.whole_batch:
            return {"embeddings": self.outputs(model, batch)[:, :2].float(), "keys": batch["keys"][:, :2]}
        return {"cosines": accel_ddp.contrastive.pair_cosines(self.outputs(model, batch), self.sizes), "scores": batch["scores"]}

    def metrics(self, table):
        self.table = table  # for `tables`
        if self.whole_batch:
            return accel_ddp.contrastive.retrieval_metrics(table["embeddings"], table["keys"], self.sizes)
        self.report_same(table["cosines"][:, 0], table["scores"])
        return accel_ddp.contrastive.correlation_metrics(table["cosines"], table["scores"], self.sizes)


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)  # Accelerate's, set up by the config file of `accelerate launch`
    task = Task(cfg, accelerator)  # its items: the tokens of the rows
    model = accel_ddp.load_model(task)
    optimizer = accel_ddp.optim.build(model, cfg)
    train, test = task.batches()
    return accel_ddp.fit_and_export(accelerator, cfg, task=task, model=model, optimizer=optimizer, train=train, test=test)


if __name__ == "__main__":
    run(Config, main)
