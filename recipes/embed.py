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
from accel_ddp import RecipeConfig, UserError, column, option, run


@dataclass(kw_only=True)
class Config(RecipeConfig):
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
    negatives_file: str = option(
        "", "more hard negatives: rows of an anchor and negative (a text or a list), or a pool of texts from which --seed draws",
        group="data", per_node=True, excludes="score_column",
    )  # fmt: skip
    num_negatives: int = option(
        1, "texts of --negatives_file for each row: the first of its anchor", group="data", at_least=1, needs="negatives_file"
    )
    mine_negatives: int = option(
        0, "negatives to mine per anchor: the nearest positives of other rows, by the model", group="training", at_least=0,
        excludes="score_column",
    )  # fmt: skip
    mine_every: int = option(
        0, "steps between minings; 0: only before the first step", group="training", at_least=0, needs="mine_negatives"
    )
    mine_margin: float = option(
        0.0, "skip mined texts whose cosine is above the positive's cosine minus this; they may be right", group="training",
        needs="mine_negatives",
    )  # fmt: skip
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
        if self.sync_every and self.mine_every % self.sync_every:
            near = max(self.sync_every, self.mine_every - self.mine_every % self.sync_every)
            why = "negatives are mined when all workers have the same weights"
            instead = f"Use a multiple of --sync_every {self.sync_every}, for example {near}"
            raise UserError(f"--mine_every {self.mine_every}: {why}. {instead}.")
        if not self.min_score < self.max_score:
            raise UserError(f"--min_score {self.min_score}: must be below --max_score {self.max_score}.")
        if self.global_batch_size < 2 and not self.negative_columns and not self.score_column:
            raise UserError(f"--global_batch_size {self.global_batch_size}: a single row has no negatives. Use 32 or more.")
        if any(size < 1 for size in self.matryoshka):
            given = " ".join(map(str, self.matryoshka))
            raise UserError(f"--matryoshka {given}: must be numbers of dimensions, for example 256 128.")


class Task(accel_ddp.TextTask):
    model_class = "AutoModel"
    checked_as = "embeddings"

    def read(self):
        tables = super().read()
        if self.cfg.negatives_file and not self.cfg.evaluate_only:
            tables[0] = accel_ddp.negatives.add_negatives(tables[0], self.cfg)
        return tables

    def items(self, rows):
        return accel_ddp.contrastive.encode(rows, self.processor, self.cfg)

    def build(self):
        model = super().build()
        for name, parameter in model.named_parameters():
            if "pooler" in name:  # embeddings are pooled from the last layer, so that BERT's own pooler is not used
                parameter.requires_grad_(False)
        first_token = "--pooling cls" if self.cfg.pooling == "cls" else ""
        accel_ddp.model_kinds.report_causal(model, self.processor, self.accelerator.device, self.cfg.model, first_token)
        cfg, dimension = self.cfg, model.config.hidden_size
        if any(size > dimension for size in cfg.matryoshka):
            raise UserError(f"--matryoshka {max(cfg.matryoshka)}: the model's embeddings have {dimension} dimensions.")
        self.sizes = tuple(sorted({*cfg.matryoshka, dimension}, reverse=True))
        prompts = {"query": cfg.anchor_prefix, "document": cfg.positive_prefix}
        self.more_files = accel_ddp.contrastive.sentence_transformers_files(dimension, cfg.pooling, cfg.max_length, prompts)
        return model

    def batches(self):
        cfg, losses = self.cfg, accel_ddp.contrastive.in_batch_losses
        compare = lambda rows, keys: losses(rows, keys, cfg.scale, self.sizes)
        self.whole_batch = not cfg.score_column
        self.in_batch = accel_ddp.losses.GradCache(self.outputs, lambda batch: batch["keys"], compare)
        train, test = super().batches()
        if cfg.mine_negatives:
            self.mined = accel_ddp.EvalBatches(self.rows[0], self.collate(), cfg.eval_batch_size, self.accelerator, cfg)
            train = accel_ddp.negatives.MinedBatches(self.rows[0], self.collate(), self.fingerprints[0], cfg, self.mine)
        self.train = train
        return train, test

    def mine(self):
        """Return the rows of the hardest negatives of each anchor, for the current weights."""
        keys, options = self.train.rows.with_format("numpy")["keys"][:], (self.cfg.mine_negatives, self.cfg.mine_margin)
        return accel_ddp.negatives.mine(self.accelerator, self.model, self.mined, self.outputs, keys[:, :2], *options)

    def prepare(self, model, batches, team, seeded):
        if self.whole_batch:
            self.in_batch.prepare(model, batches, team, seeded)

    def outputs(self, model, batch):
        return accel_ddp.contrastive.embed(model, batch, self.cfg.pooling)

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
        return accel_ddp.contrastive.correlation_metrics(table["cosines"], table["scores"], self.sizes)

    def tables(self):
        table, self.table = self.table, {}  # the embeddings of all items are large
        return accel_ddp.contrastive.make_tables(table, self.cfg.log_predictions, self.describe)

    @property
    def example(self):
        texts = self.first_texts()
        anchor, positive = map(accel_ddp.examples.literal, (texts["anchor"], texts["positive"]))
        return (
            "from sentence_transformers import SentenceTransformer; use = SentenceTransformer({folder}); "
            f'a, b = use.encode({anchor}, prompt_name="query"), use.encode({positive}, prompt_name="document"); '
            "print(use.similarity(a, b))"
        )


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)  # Accelerate's, set up by the config file of `accelerate launch`
    task = Task(cfg, accelerator)  # its items: the tokens of the rows
    model = accel_ddp.load_model(task)
    optimizer = accel_ddp.optim.build(model, cfg)
    train, test = task.batches()
    return accel_ddp.fit_and_export(accelerator, cfg, task=task, model=model, optimizer=optimizer, train=train, test=test)


if __name__ == "__main__":
    run(Config, main)
