r"""Fine-tune a reranker (cross-encoder): a model that reads a query and a candidate together and returns how relevant it is.

    accelerate launch --config_file accelerate_configs/local.yaml recipes/rerank.py
    accelerate launch --config_file accelerate_configs/local.yaml recipes/rerank.py --model microsoft/MiniLM-L12-H384-uncased \
        --train_file queries.jsonl --eval_file dev.jsonl --max_candidates 8 --lr 2e-5

A row is a query with a candidate and its label (0 or 1) or score, or a query with all of its candidates: lists `candidates` and
`labels` or `scores`, or columns `positives` and `negatives`. By default pairs are learned one by one (cross-entropy with labels,
squared error with scores), and lists with a softmax over the candidates of a query. Such a list is one item, so it is never split.
Evaluations group candidates by the text of their query, also if they are in several rows.
"""

from dataclasses import dataclass
from typing import Literal

import accel_ddp
from accel_ddp import QueryConfig, option, run


@dataclass(kw_only=True)
class Config(QueryConfig):
    model: str = "builtin:all-MiniLM-L6-v2"
    dataset: str = "builtin:rerank"
    loss: Literal["auto", "binary", "scored", "listwise", "softmax", "ranknet"] = option(
        "auto", "binary, scored: of each candidate; listwise (ListNet), softmax, ranknet: of a query's candidates; auto: by the data",
        group="training",
    )  # fmt: skip
    max_length: int = option(128, "tokens of a query with a candidate; the longer of both is truncated", group="data", at_least=1)
    epochs: float = 1.0
    global_batch_size: int = 8
    micro_batch_size: int | Literal["auto"] = 8
    lr: float = 2e-4
    warmup_ratio: float = 0.1
    best_metric: str = option("", "metric for --keep_best and early stopping; default: mrr, with --score_column ndcg_at_10")

    def check_columns(self, *tables):
        accel_ddp.data.require_columns(accel_ddp.ranking.QueryFormat(tables[0], self).needed, *tables)

    def metric_directions(self):
        names = "ndcg_at_10 spearman pearson mrr map" if self.score_column else "mrr ndcg_at_10 map average_precision accuracy"
        return dict.fromkeys(f"{names} spearman pearson".split(), "max") | {"loss": "min"}


class Task(accel_ddp.QueryTask):
    def items(self, rows):  # queries with their candidates
        return accel_ddp.ranking.encode(rows, self.form, self.loss, self.processor, self.cfg, is_trained=True)

    def eval_items(self, rows):  # one candidate each
        return accel_ddp.ranking.encode(rows, self.form, self.loss, self.processor, self.cfg, is_trained=False)

    def outputs(self, model, batch):
        return accel_ddp.ranking.score(model, batch)

    def terms(self, model, batch, team):
        losses = accel_ddp.ranking.list_losses if self.is_listwise else accel_ddp.ranking.pair_losses
        return {"loss": (losses(self.outputs(model, batch), batch["relevance"], self.loss).sum(), self.count(batch))}

    def count(self, batch):
        return batch.items if self.is_listwise else batch.texts  # queries, or candidates

    def measure(self, model, batch):
        scores, relevance = self.outputs(model, batch)[:, 0], batch["relevance"][:, 0]
        return {"scores": scores, "relevance": relevance, "keys": batch["keys"]}

    def metrics(self, table):
        self.table = table  # for `tables`
        self.report_same(table["scores"], table["relevance"])
        return accel_ddp.ranking.summarize(table["scores"], table["relevance"], table["keys"], self.loss)

    def tables(self):
        return accel_ddp.ranking.make_tables(self.table, self.cfg.log_predictions, self.describe)


def main(cfg: Config):
    accelerator = accel_ddp.start(cfg)  # Accelerate's, set up by the config file of `accelerate launch`
    task = Task(cfg, accelerator)  # its items: the tokens of the rows
    model = accel_ddp.load_model(task)
    optimizer = accel_ddp.optim.build(model, cfg)
    train, test = task.batches()
    return accel_ddp.fit_and_export(accelerator, cfg, task=task, model=model, optimizer=optimizer, train=train, test=test)


if __name__ == "__main__":
    run(Config, main)
