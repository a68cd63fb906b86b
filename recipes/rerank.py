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
from accel_ddp import RecipeConfig, UserError, option, run


@dataclass(kw_only=True)
class Config(RecipeConfig):
    model: str = "builtin:all-MiniLM-L6-v2"
    dataset: str = "builtin:rerank"
    query_column: str = option("", "column of the query; default: query, question or anchor", group="data")
    candidate_column: str = option(
        "", "column of the candidate, or of lists of them; default: candidate, passage, document ...", group="data"
    )
    label_column: str = option("", "column of 0 or 1, or of lists of these; default: label or labels", group="data")
    score_column: str = option(
        "", "column of scores (graded relevance); default: score or scores, if there is no label", group="data"
    )
    positive_columns: tuple[str, ...] = option(
        (), "columns of relevant texts, or of lists of them; default: positive or positives", group="data"
    )
    negative_columns: tuple[str, ...] = option(
        (), "columns of texts that are not relevant; default: negative, negatives, negative_1 ...", group="data"
    )
    max_candidates: int = option(
        16, "candidates of a query in training: a relevant one, and others that --seed draws; 0: all", group="data", at_least=0
    )
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
    texts_per_item = 1  # for the estimate of memory; the task sets it to the most candidates of a row

    def check_columns(self, *tables):
        accel_ddp.data.require_columns(accel_ddp.ranking.QueryFormat(tables[0], self).needed, *tables)

    def metric_directions(self):
        names = ("ndcg_at_10", "spearman", "pearson", "mrr", "map") if self.score_column else ("mrr", "ndcg_at_10", "map")
        more = () if self.score_column else ("average_precision", "accuracy", "spearman", "pearson")
        return {name: "max" for name in (*names, *more)} | {"loss": "min"}

    def validate(self):
        super().validate()
        if self.max_candidates == 1:
            raise UserError("--max_candidates 1: there is nothing to compare. Use 2 or more, or 0 for all.")


class Task(accel_ddp.TextTask):
    model_class = "AutoModelForSequenceClassification"
    predicts = "scores"

    def load_tokenizer(self):
        tokenizer = super().load_tokenizer()
        tokenizer.model_max_length = self.cfg.max_length  # sentence-transformers truncates to it
        return tokenizer

    def read(self):
        tables = accel_ddp.data.load_columns(self.cfg)
        self.form = accel_ddp.ranking.QueryFormat(tables[0], self.cfg)
        self.loss = self.form.choose_loss(tables[0], self.cfg.loss)
        self.is_listwise = self.loss in accel_ddp.ranking.LIST_LOSSES
        self.identity, self.predict_columns = [self.form.identity, self.loss], self.form.columns
        return tables

    def items(self, rows):  # queries with their candidates
        return accel_ddp.ranking.encode(rows, self.form, self.loss, self.processor, self.cfg, is_trained=True)

    def eval_items(self, rows):  # one candidate each
        return accel_ddp.ranking.encode(rows, self.form, self.loss, self.processor, self.cfg, is_trained=False)

    def encode(self, tables):
        train, test = super().encode(tables)
        accel_ddp.ranking.report_queries(test, None if self.cfg.evaluate_only else train)
        self.cfg.texts_per_item = int(accel_ddp.stream.count_tokens(train, ("relevance",)).max())
        self.memory_rows, self.places = (train, test), test["place"][:]
        return train, test

    def head(self):
        return {"num_labels": 1, "problem_type": "multi_label_classification" if self.loss == "binary" else "regression"}

    def build(self):
        model = super().build()
        activation = f"torch.nn.{'Sigmoid' if self.loss == 'binary' else 'Identity'}"  # what CrossEncoder applies to the score
        model.config.sentence_transformers = {"activation_fn": activation}
        return model

    def outputs(self, model, batch):
        return accel_ddp.ranking.score(model, batch)

    def terms(self, model, batch, team):
        losses = accel_ddp.ranking.list_losses if self.is_listwise else accel_ddp.ranking.pair_losses
        return {"loss": (losses(self.outputs(model, batch), batch["relevance"], self.loss).sum(), self.count(batch))}

    def count(self, batch):
        return batch.items if self.is_listwise else batch.texts  # queries, or candidates

    def measure(self, model, batch):
        scores, relevance = self.outputs(model, batch)[:, 0], batch["relevance"][:, 0]
        loss = {} if self.is_listwise else {"loss": accel_ddp.ranking.pair_losses(scores, relevance, self.loss)}
        return {"scores": scores, "relevance": relevance, "keys": batch["keys"], **loss}

    def metrics(self, table):
        self.table = table  # for `tables`
        return accel_ddp.ranking.summarize(table["scores"], table["relevance"], table["keys"], self.loss)

    def tables(self):
        return accel_ddp.ranking.make_tables(self.table, self.cfg.log_predictions, self.describe)

    def describe(self, items):
        queries = [self.form.read(self.eval_texts[item], self.loss) for item in items]
        found = [query.candidates[self.places[item]] for query, item in zip(queries, items)]
        return {"query": [query.text for query in queries], "candidate": found}

    @property
    def example(self):
        query = self.form.read(self.eval_texts[0], self.loss)
        texts = [accel_ddp.examples.literal(accel_ddp.examples.shorten(text)) for text in (query.text, *query.candidates[:3])]
        return (
            "from sentence_transformers import CrossEncoder; "
            f"print(CrossEncoder({{folder}}).rank({texts[0]}, [{', '.join(texts[1:])}], return_documents=True))"
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
